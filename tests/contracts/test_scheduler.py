"""Named promises of the scheduler: ownership, capacity, order, fairness, lookahead, and what survives a failure.

The numbers are those of the serving specification's list of contract tests.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from sparsejax.cache.pages import PoolExhaustedError
from sparsejax.errors import CacheTooSmallError, ConfigError, ContextLengthError, QueueTimeoutError, RequestError
from sparsejax.geometry import Granularity
from sparsejax.mock import METHODS, MockMethod
from sparsejax.plans import PrefillRow, Ticket
from sparsejax.rows import RowPages, State
from sparsejax.settings import EngineSettings
from tests.host.bench import Bench, observe

DENSE = (MockMethod(),)
NAMES = [method.name for method in METHODS]
SMALL_WINDOWS = EngineSettings(decode_window_tokens=4, min_decode_window_tokens=4, max_decode_window_tokens=4)


def state_of(bench: Bench, request_id: str, index: int = 0) -> State:
    group = bench.scheduler.groups.get(request_id)
    return group.choices[index].state if group else State.FINISHED


def only(bench: Bench, request_id: str):
    return bench.scheduler.groups[request_id].choices[0]


# Ownership and leaks.


def test_02_releasing_twice_changes_nothing() -> None:
    bench = Bench()
    a, b = bench.submit(20, 30), bench.submit(20, 30)
    bench.step(3)
    bench.scheduler.cancel(a)
    free = bench.scheduler.memory.pool.free_head_pages
    bench.scheduler.cancel(a)
    bench.scheduler.stop(a, 0)
    bench.scheduler.cancel("never seen")
    assert bench.scheduler.memory.pool.free_head_pages == free
    bench.run()
    assert bench.reason(a) == "cancelled"
    bench.check_done(b)


def test_03_cancel_before_the_first_chunk_leaves_no_promise() -> None:
    bench = Bench(num_rows=1)
    a, b = bench.submit(20, 30), bench.submit(20, 30)
    bench.step()
    bench.scheduler.cancel(b)
    assert bench.reason(b) == "cancelled"
    assert bench.last(b).stats is not None
    bench.run()
    bench.check_done(a)


def test_04_failed_preparation_takes_nothing() -> None:
    bench = Bench(num_sequence_pages=6)
    pool = bench.scheduler.memory.pool
    for granularity in Granularity:
        row = RowPages(pool, granularity)
        row.append(9)
        before = pool.free_head_pages, row.table.copy(), row.lengths.copy()
        with pytest.raises(PoolExhaustedError):
            row.append(1000)
        with pytest.raises(RuntimeError, match="device"):
            row.compact(np.full_like(row.lengths, 3), _raise_device)
        assert pool.free_head_pages == before[0]
        assert (row.table == before[1]).all()
        assert (row.lengths == before[2]).all()
        row.release()
    assert pool.free_head_pages == pool.num_head_pages


def _raise_device(table: np.ndarray) -> None:
    raise RuntimeError("device")


def test_04_fork_without_room_takes_nothing() -> None:
    bench = Bench(num_sequence_pages=4)
    pool = bench.scheduler.memory.pool
    row = RowPages(pool, Granularity.SEQUENCE)
    row.append(10)  # all three pages, the last one partial
    with pytest.raises(PoolExhaustedError):
        row.fork()
    pool.check_integrity([(Granularity.SEQUENCE, row.held())])


def test_05_free_rows_are_empty_and_live_ones_within_the_table() -> None:
    bench = Bench(max_model_len=64, num_rows=2)
    a = bench.submit(40, 24)
    while bench.step():
        observe(bench.scheduler)
        assert len(bench.scheduler.memory.holders) + len(bench.scheduler.memory.free_rows) == 2
    bench.check_done(a)
    bench.check_all_free()


def test_08_batches_hold_requests_only() -> None:
    """Padding is the runner's: it is never planned, so it allocates and publishes nothing."""
    bench = Bench(decode_buckets=(8,), prefill_buckets=((4, 64),))
    sizes = []
    decode = bench.runner.decode
    bench.runner.decode = lambda method, rows: (sizes.append([r.row for r in rows]), decode(method, rows))[1]  # type: ignore[method-assign]
    ids = [bench.submit(5, 6) for _ in range(3)]
    bench.run()
    bench.check_done(*ids)
    assert all(0 not in rows and len(set(rows)) == len(rows) <= 3 for rows in sizes)


@pytest.mark.parametrize("method", ["prompt", "pyramid", "heads", "window"])
def test_10_evicted_pages_serve_others_before_the_program_has_run(method: str) -> None:
    """Memory is really freed by eviction, and the free count says so while nothing has been collected yet."""
    bench = Bench(EngineSettings(max_inflight_steps=4), num_rows=2)
    bench.runner.hold()
    pool = bench.scheduler.memory.pool
    bench.submit(240, 30, method)
    facts = bench.runner.limits.methods[method]
    for _ in range(2 if method == "window" else 1):  # the window is cut after the first token
        bench.scheduler.step()
    seq = bench.scheduler.running[0]
    kept = seq.pages.lengths
    assert seq.computed >= 240
    assert not bench.events["r000"], "nothing was collected"
    assert kept.max() < 40
    shape = bench.runner.limits.geometry.table_shape(facts.granularity)
    assert kept.shape == shape
    used = int((-(-kept // 4)).sum()) * bench.runner.limits.geometry.head_pages_per_page(facts.granularity)
    assert pool.num_head_pages - pool.free_head_pages == used
    dense = 240 // 4 * bench.runner.limits.geometry.head_pages_per_sequence_page
    assert used < 0.2 * dense
    other = bench.submit(100, 4)
    bench.scheduler.step()  # takes freed pages; the mock would notice if the evicting row still read them
    bench.runner.release()
    bench.run()
    bench.check_done("r000", other)


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_11_fork_and_drop_in_any_order(granularity: Granularity, order: tuple[int, ...]) -> None:
    bench = Bench()
    pool = bench.scheduler.memory.pool
    rows = [RowPages(pool, granularity)]
    rows[0].append(10)
    for _ in range(2):
        fork, copies = rows[0].fork()
        cells = rows[0].columns.size
        assert len(copies) == cells, "one partial page in each head"
        assert all(pool.references(granularity, np.array(pair)).tolist() == [1, 1] for pair in copies)
        rows.append(fork)
    full = rows[0].table[..., :2].reshape(-1)
    assert (pool.references(granularity, full) == 3).all()
    pool.check_integrity([(granularity, row.held()) for row in rows])
    for n, i in enumerate(order):
        rows[i].release()
        assert (pool.references(granularity, full) == 2 - n).all()
    assert pool.free_head_pages == pool.num_head_pages


def test_a_fork_that_shares_nothing_copies_all_pages() -> None:
    bench = Bench()
    pool = bench.scheduler.memory.pool
    row = RowPages(pool, Granularity.LAYER)
    row.append(10)
    fork, copies = row.fork(share=False)
    assert [list(pages) for pages in zip(*copies, strict=True)] == [row.held().tolist(), fork.held().tolist()]
    assert not {*row.held().tolist()} & {*fork.held().tolist()}
    assert not row.shared
    assert not fork.shared
    pool.check_integrity([(Granularity.LAYER, row.held()), (Granularity.LAYER, fork.held())])


# Admission and capacity.


def test_29_two_that_fit_alone_but_not_together_run_in_turn() -> None:
    bench = Bench(num_sequence_pages=21, num_rows=4)  # 80 tokens
    a, b = bench.submit(30, 30), bench.submit(30, 30)
    bench.step()
    assert state_of(bench, a) is not State.WAITING
    assert state_of(bench, b) is State.WAITING, "60 tokens are promised to the first"
    bench.run()
    bench.check_done(a, b)
    assert bench.scheduler.num_preemptions == 0


def test_30_promise_of_a_prompt_ends_with_its_final_chunk() -> None:
    bench = Bench(num_sequence_pages=64, prefill_buckets=((1, 16),), num_rows=4)
    bench.submit(60, 4, "prompt")
    memory = bench.scheduler.memory
    for _ in range(3):
        bench.step()
        (seq,) = memory.holders.values()
        assert seq.reserved_pages == 15 * 2, "the peak of the prompt"
    bench.step()
    assert seq.prefilled
    assert seq.reserved_pages <= 5 * 2, "16 rows were kept and 3 tokens may come"
    bench.scheduler.cancel("r000")
    assert not memory.holders
    bench.run()


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("window", [1, 2, 16, 17])
def test_31_real_use_never_exceeds_the_reservation(method: str, window: int) -> None:
    settings = EngineSettings(decode_window_tokens=window, min_decode_window_tokens=1, max_decode_window_tokens=window)
    bench = Bench(settings, prefill_buckets=((1, 16), (1, 32)))
    bench.submit(75, 70, method)
    while bench.step():
        for seq in bench.scheduler.memory.holders.values():
            assert seq.pages.count <= seq.reserved_pages
    bench.check_done("r000")


@pytest.mark.parametrize("method", NAMES)
def test_31_needs_are_monotone_in_the_horizon(method: str) -> None:
    bench = Bench()
    facts, memory = bench.runner.limits.methods[method], bench.scheduler.memory
    needs = [memory.pages_alone(facts, 50, tokens) for tokens in range(1, 200)]
    assert all(0 <= a <= b for a, b in itertools.pairwise(needs))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
@pytest.mark.parametrize("name", ["decode_window_tokens", "max_inflight_steps", "max_num_batched_tokens"])
def test_32_bad_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineSettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"queue_timeout_s": 0}, {"swap_bytes": -1}, {"max_inflight_steps": 5}])
def test_32_limits_are_checked(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        EngineSettings(**changes)


def test_33_34_a_sole_request_gets_shorter_windows_until_max_tokens() -> None:
    bench = Bench(num_sequence_pages=21, num_rows=2)  # 80 tokens; the first window would be 1024
    a = bench.submit(10, 70)
    bench.run()
    bench.check_done(a)
    assert bench.scheduler.num_preemptions == 0


def test_33_release_frees_only_the_promise() -> None:
    bench = Bench()
    bench.submit(20, 60)
    bench.step(2)
    memory = bench.scheduler.memory
    (seq,) = memory.holders.values()
    held = seq.pages.count
    memory.tighten()
    assert seq.pages.count == held
    assert held <= seq.reserved_pages <= held + 1
    bench.run()
    bench.check_done("r000")


def test_35_what_can_never_fit_is_refused_at_the_door() -> None:
    bench = Bench(num_sequence_pages=11, max_model_len=256)  # 40 tokens
    a = bench.submit(20, 10)
    with pytest.raises(CacheTooSmallError, match=r"40 prompt tokens and 9 output tokens need 12 cache pages.* has 10"):
        bench.submit(40, 9)
    with pytest.raises(CacheTooSmallError) as refused:
        bench.submit(200, None)
    assert refused.value.param == "prompt"
    with pytest.raises(ContextLengthError, match="window of 256"):
        bench.submit(250, 7)
    with pytest.raises(ContextLengthError, match="window of 256"):
        bench.submit(256, None)
    bench.run()
    bench.check_done(a)


def test_35_compaction_needs_its_room_too() -> None:
    """40 rows and 16 fresh ones at once: 14 layer pages in each of two layers."""
    methods = (MockMethod("prompt", Granularity.LAYER, prompt_budget=16),)
    assert Bench(num_sequence_pages=15, methods=methods).submit(40, 1)
    with pytest.raises(CacheTooSmallError):
        Bench(num_sequence_pages=14, methods=methods).submit(40, 1)
    bench = Bench(num_sequence_pages=15, methods=methods)
    a = bench.submit(40, 20)
    bench.run()
    bench.check_done(a)


def test_35_without_max_tokens_the_cache_is_the_limit() -> None:
    bench = Bench(num_sequence_pages=11, max_model_len=256)
    a = bench.submit(20, None)
    bench.run()
    assert bench.reason(a) == "length"
    assert len(bench.tokens(a)) == 21, "40 rows hold 20 prompt tokens and all but the last of 21"
    b = Bench(max_model_len=64)
    b.submit(20, None)
    b.run()
    assert len(b.tokens("r000")) == 44


def test_37_promises_shrink_before_anybody_loses_a_place() -> None:
    """The pool holds both to the end, just not with full windows: nobody is preempted."""
    settings = EngineSettings(decode_window_tokens=16, min_decode_window_tokens=16, max_decode_window_tokens=16)
    bench = Bench(settings, num_sequence_pages=31, num_rows=2)  # 120 tokens
    a, b = bench.submit(20, 40), bench.submit(20, 40)
    bench.run()
    bench.check_done(a, b)
    assert bench.scheduler.num_preemptions == 0


def test_39_three_times_as_many_requests_as_rows() -> None:
    bench = Bench(num_rows=4)
    order: list[str] = []
    bench.scheduler.on_admitted = lambda group: order.append(group.request_id)
    ids = []
    for _ in range(12):
        ids.append(bench.submit(10, 20))
        bench.clock.sleep(0.001)
    bench.run()
    bench.check_done(*ids)
    assert order == ids, "first come, first served"


# Scheduling.


@pytest.mark.parametrize("call", ["facts", "append", "sampling"])
def test_41_57_a_failure_while_planning_ends_only_its_request(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    ids = [bench.submit(20, 30, "prompt" if call == "facts" else None) for _ in range(3)]
    bench.step(3)
    victim = only(bench, ids[1])
    running = list(bench.scheduler.running)

    def broken(*args: object) -> None:
        raise ArithmeticError("broken on purpose")

    if call == "facts":
        victim.group.facts = dataclasses.replace(victim.group.facts, name="broken")
        object.__setattr__(victim.group.facts, "kept_after", broken)
    elif call == "append":
        monkeypatch.setattr(victim.pages, "append", broken)
    else:
        monkeypatch.setattr(victim, "sampling_row", broken)
    bench.step(3)
    assert bench.reason(ids[1]) == "error"
    assert isinstance(bench.last(ids[1]).error, ArithmeticError)
    assert bench.scheduler.running == [seq for seq in running if seq is not victim], "the others keep their order"
    bench.run()
    bench.check_done(ids[0], ids[2])
    retry = bench.submit(list(bench.requests[ids[1]].prompt_ids), 30)
    bench.run()
    bench.check_done(retry)


def test_41_57_a_refused_batch_ends_only_the_row_at_fault() -> None:
    bench = Bench(prefill_buckets=((4, 32),))
    bench.runner.refuse(251)
    ids = [bench.submit([i, i, 251 if i == 2 else i], 9) for i in range(4)]
    bench.run()
    bench.check_done(ids[0], ids[1], ids[3])
    assert isinstance(bench.last(ids[2]).error, RequestError)


@pytest.mark.parametrize("call", ["setup_row", "prefill", "decode", "maintain", "fork", "export_row", "import_row"])
def test_57_a_refusal_at_any_call_leaves_the_others_alone(call: str) -> None:
    bench = Bench(SMALL_WINDOWS, num_sequence_pages=80 if call == "fork" else 40, num_rows=6)
    bench.runner.fail(call, 1, RequestError("refused on purpose"))
    ids = [bench.submit(20, 40), bench.submit(20, 40, "window", n=2), bench.submit(20, 40), bench.submit(20, 40)]
    bench.run()
    assert bench.runner.calls.get(call, 0) >= 1, "the fault was not reached"
    ended = [(i, k) for i in ids for k in range(bench.requests[i].params.n)]
    failed = [pair for pair in ended if bench.reason(*pair) == "error"]
    # A batch is tried again in halves and a row that can't be exported is rebuilt, so these need not fail anybody.
    assert len(failed) == 1 or (not failed and call in ("decode", "prefill", "export_row"))
    for pair in ended:
        if pair not in failed:
            assert bench.reason(*pair) == "length"
            assert bench.tokens(*pair) == bench.alone(*pair)


def test_42_begun_prompts_go_on_and_decode_order_is_kept() -> None:
    bench = Bench(prefill_buckets=((1, 16),), num_rows=4)
    a, b = bench.submit(16, 30), bench.submit(16, 30)
    bench.step(3)
    first = bench.submit(48, 5)
    bench.step()
    second = bench.submit(48, 5)
    bench.step(2)
    assert state_of(bench, first) is State.DECODE, "a begun prompt comes before a new one"
    assert only(bench, second).computed <= 16
    assert [seq.group.request_id for seq in bench.scheduler.running][:2] == [a, b]
    bench.run()
    bench.check_done(a, b, first, second)


@pytest.mark.parametrize("prompt_tokens", range(1, 45))
def test_43_the_last_chunk_is_never_too_short(prompt_tokens: int) -> None:
    minimum = 7
    methods = (MockMethod("heads", Granularity.HEAD, prompt_budget=12, final_chunk=minimum),)
    bench = Bench(methods=methods, prefill_buckets=((1, 4), (1, 16)))
    chunks = []
    prefill = bench.runner.prefill
    bench.runner.prefill = lambda method, rows: (chunks.extend(len(r.tokens) for r in rows), prefill(method, rows))[1]  # type: ignore[method-assign]
    a = bench.submit(prompt_tokens, 3)
    bench.run()
    bench.check_done(a)
    assert sum(chunks) == prompt_tokens
    assert chunks[-1] >= min(minimum, prompt_tokens)


def test_43_a_minimum_that_no_bucket_can_meet_is_refused() -> None:
    methods = (MockMethod("heads", Granularity.HEAD, prompt_budget=12, final_chunk=17),)
    with pytest.raises(RequestError, match="last prompt chunk of 17 tokens"):
        Bench(methods=methods, prefill_buckets=((1, 16),)).submit(30, 2)


def test_44_every_decoding_row_steps_whatever_the_prompt_backlog() -> None:
    bench = Bench(num_rows=8, decode_buckets=(1, 2), prefill_buckets=((1, 16),))
    ids = [bench.submit(8, 60) for _ in range(5)]
    while any(state_of(bench, i) is not State.DECODE for i in ids):
        bench.step()
    for _ in range(3):
        bench.submit(400, 2)
    before = [only(bench, i).dispatched for i in ids]
    bench.step(20)
    assert [only(bench, i).dispatched - n for i, n in zip(ids, before, strict=True)] == [20] * 5
    bench.run()
    bench.check_done(*ids)


def test_45_decoders_do_not_starve_a_prompt_nor_a_flood_of_prompts_the_decoders() -> None:
    settings = EngineSettings(stall_target_ms=50)
    buckets = ((1, 16), (1, 256), (2, 256))
    bench = Bench(settings, token_s=0.001, step_s=0.005, num_rows=8, prefill_buckets=buckets, verify=False)
    bench.checks = False
    bench.submit(256, 3)
    bench.submit(256, 3)
    bench.run()  # what buckets cost is known now
    decoders = [bench.submit(4, 400) for _ in range(3)]
    while any(state_of(bench, i) is not State.DECODE for i in decoders):
        bench.step()
    started = bench.clock()
    late = bench.submit(10, 3)
    while not bench.tokens(late):
        bench.step()
    assert bench.clock() - started < 0.2
    for _ in range(4):
        bench.submit(1000, 1)
    produced, started = len(bench.tokens(decoders[0])), bench.clock()
    while bench.scheduler.waiting or any(seq.state is State.PREFILL for seq in bench.scheduler.running):
        bench.step()
        if bench.reason(decoders[0]):
            break
    gaps = (bench.clock() - started) / (len(bench.tokens(decoders[0])) - produced)
    assert gaps < 0.05 + 0.02, f"one token in {gaps:.3f} s beside the flood"
    bench.run()


def test_45_a_short_prompt_overtakes_a_long_one() -> None:
    bench = Bench(token_s=0.001, prefill_buckets=((1, 64),), num_rows=4)
    long = bench.submit(4000, 2)
    bench.step(5)
    short = bench.submit(20, 2)
    started = bench.clock()
    while not bench.tokens(short):
        bench.step()
    assert bench.clock() - started < 0.5
    assert not bench.tokens(long)
    bench.run()
    bench.check_done(long, short)


def test_45_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    bench = Bench(token_s=0.001, prefill_buckets=((1, 64),), num_rows=4)
    long = bench.submit(640, 2)
    for _ in range(100):
        bench.submit(60, 2)
        bench.step()
        if bench.reason(long):
            break
    assert bench.clock() - 1000.0 < 60
    bench.run()
    bench.check_done(long)


def test_45_a_big_request_is_not_overtaken_for_ever() -> None:
    bench = Bench(num_sequence_pages=61, num_rows=8, step_s=0.05)  # 240 tokens
    small = [bench.submit(20, 30) for _ in range(4)]
    bench.step(2)
    big = bench.submit(200, 20)
    for _ in range(400):
        if bench.tokens(big):
            break
        if len(bench.scheduler.waiting) < 3:
            small.append(bench.submit(20, 30))
        bench.step()
    assert bench.tokens(big), "small requests kept overtaking"
    bench.run()
    bench.check_done(big, *small)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_46_two_full_cache_requests_cannot_livelock(swap_bytes: int) -> None:
    settings = dataclasses.replace(SMALL_WINDOWS, swap_bytes=swap_bytes)
    bench = Bench(settings, num_sequence_pages=26, num_rows=2)  # 100 tokens: 1.1 requests
    a, b = bench.submit(10, 80), bench.submit(10, 80)
    bench.run(1000)
    bench.check_done(a, b)
    assert bench.last(a).stats.preemptions == 0, "the oldest is never preempted"
    assert 1 <= bench.last(b).stats.preemptions <= 5
    assert bench.last(b).stats.rebuilt == (swap_bytes == 0)


@pytest.mark.parametrize("swap_bytes", [0, 3000, 1 << 30])
@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_47_48_preemption_never_changes_loses_or_repeats_a_token(method: str, swap_bytes: int, penalty: float) -> None:
    settings = dataclasses.replace(SMALL_WINDOWS, swap_bytes=swap_bytes)
    bench = Bench(settings, num_sequence_pages=64, num_rows=6)
    ids = [bench.submit(20, 50, method, presence_penalty=penalty) for _ in range(5)]
    for i in range(60):
        bench.step()
        if i % 6 == 5 and bench.scheduler.running:
            bench.scheduler._preempt(bench.scheduler.running[i % len(bench.scheduler.running)])
            bench.check()
    bench.run()
    bench.check_done(*ids)
    assert bench.scheduler.num_preemptions >= 8
    rebuilt = [bench.last(i).stats.rebuilt for i in ids]
    assert any(rebuilt) if swap_bytes == 0 else swap_bytes == 3000 or not any(rebuilt)


@pytest.mark.parametrize("method", NAMES)
def test_48_alone_as_in_company(method: str) -> None:
    """Same tokens, and maintenance at the same lengths."""
    alone = Bench()
    alone.submit([7] * 40, 60, method, seed=5)
    alone.run()
    company = Bench()
    others = [company.submit(30 + i, 40, NAMES[i % 5]) for i in range(5)]
    company.step(4)
    mine = company.submit([7] * 40, 60, method, seed=5)
    company.run()
    company.check_done(mine, *others)
    assert company.tokens(mine) == alone.tokens("r000")
    assert [x for x in alone.runner.log if x[1] == "token"] == [
        x for x in company.runner.log if x in alone.runner.log and x[1] == "token"
    ][: len([x for x in alone.runner.log if x[1] == "token"])]


# Lookahead.


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_49_any_depth_gives_the_same_tokens_in_order(depth: int, tokens: int) -> None:
    bench = Bench(EngineSettings(max_inflight_steps=depth), step_s=1.0)
    ids = [bench.submit(9, tokens) for _ in range(3)]
    deepest = 0
    while bench.step():
        deepest = max(deepest, len({launch.step for launch in bench.scheduler.launches}))
    assert deepest == min(depth, tokens + 1) or tokens < depth
    bench.check_done(*ids)
    for i in ids:
        assert [event.token_ids for event in bench.of(i)] == [(t,) for t in bench.alone(i)]


def test_49_the_next_step_is_submitted_before_the_last_is_read() -> None:
    bench = Bench(step_s=1.0)
    a = bench.submit(5, 20)
    bench.step(2)
    assert len(bench.scheduler.launches) == 2
    assert not bench.tokens(a)
    assert only(bench, a).dispatched == 2
    bench.run()
    bench.check_done(a)


def test_50_the_token_after_the_end_is_dropped() -> None:
    bench = Bench(eos_after=4, step_s=1.0)
    a = bench.submit(5, 50)
    b = bench.submit(5, 50, ignore_eos=True)
    bench.run()
    assert bench.reason(a) == "stop"
    assert len(bench.tokens(a)) == 5
    assert bench.last(a).stop_reason is None
    assert bench.runner.calls["decode"] >= 5
    assert bench.reason(b) == "length"
    assert len(bench.tokens(b)) == 50


def test_50_stop_ids_and_min_tokens() -> None:
    bench = Bench()
    plain = bench.runner.generate([1, 2, 3], 40, 9)
    stop = plain[10]
    a = bench.submit([1, 2, 3], 40, seed=9, stop_token_ids=(stop,))
    b = bench.submit([1, 2, 3], 40, seed=9, stop_token_ids=(stop,), min_tokens=20)
    bench.run()
    assert bench.reason(a) == "stop"
    assert bench.last(a).stop_reason == stop
    assert bench.tokens(a) == plain[: plain.index(stop) + 1]
    assert len(bench.tokens(b)) > 20
    bench.check_done(a, b)


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("method", ["dense", "pyramid"])
def test_51_cancel_at_any_moment_frees_at_once_and_is_final(steps: int, method: str) -> None:
    bench = Bench(step_s=1.0, prefill_buckets=((1, 16),), num_rows=2)
    a, b = bench.submit(40, 30, method), bench.submit(40, 30, method)
    if steps:
        bench.step(steps)
    rows = len(bench.scheduler.memory.free_rows)
    owned = only(bench, a).row != 0
    bench.scheduler.cancel(a)
    bench.check()
    assert len(bench.scheduler.memory.free_rows) == rows + owned
    assert bench.reason(a) == "cancelled"
    said = len(bench.events[a])
    c = bench.submit(40, 30, method)
    bench.run()
    assert len(bench.events[a]) == said, "nothing after the last event"
    bench.check_done(b, c)


def test_52_a_program_not_collected_holds_up_nobody_else() -> None:
    """The row is free as soon as its last plan is submitted; its tokens still come, in order."""
    bench = Bench(EngineSettings(max_inflight_steps=4), num_rows=1, step_s=1.0)
    a = bench.submit(5, 2)
    b = bench.submit(5, 2)
    bench.step(2)
    assert not bench.events[a], "nothing collected yet"
    assert only(bench, a).row == 0
    assert only(bench, b).row == 1
    bench.run()
    bench.check_done(a, b)


@pytest.mark.parametrize("yields", [False, True])
def test_rows_that_can_shrink_do_so_before_anybody_is_preempted(yields: bool) -> None:
    method = MockMethod("window", window=16, interval=32, yields=yields)
    bench = Bench(SMALL_WINDOWS, methods=(method,), num_sequence_pages=29, num_rows=4)
    ids = [bench.submit(20, 60) for _ in range(4)]
    bench.run()
    bench.check_done(*ids)
    early = [entry for entry in bench.runner.log if entry[1] == "pressure"]
    assert bool(early) == yields
    assert (bench.scheduler.num_preemptions == 0) == yields
    for _, _, _, lengths, kept in early:
        assert 16 == kept[0][0] < lengths[0][0] < 48


def test_53_54_preemption_and_newcomers_beside_work_in_flight() -> None:
    bench = Bench(EngineSettings(max_inflight_steps=3), step_s=1.0)
    a, b = bench.submit(10, 40), bench.submit(10, 40)
    bench.step(4)
    assert len(bench.scheduler.launches) >= 2
    bench.scheduler._preempt(only(bench, a))
    bench.check()
    c = bench.submit(10, 10)
    bench.run()
    bench.check_done(a, b, c)
    assert bench.last(a).stats.preemptions == 1


def test_53_a_choice_that_ends_while_swapped_out_leaves_no_trace() -> None:
    bench = Bench(EngineSettings(max_inflight_steps=4), step_s=1.0, eos_after=3)
    a, b = bench.submit(10, 40), bench.submit(10, 40, ignore_eos=True)
    bench.step(4)
    seq = only(bench, a)
    bench.scheduler._preempt(seq)
    assert bench.scheduler.swap.used_bytes > 0
    bench.run()
    bench.check_done(a, b)


# Time.


def test_a_request_that_waits_too_long_says_why() -> None:
    bench = Bench(EngineSettings(queue_timeout_s=5.0), num_rows=1, step_s=0.1)
    a = bench.submit(5, 100)
    b = bench.submit(5, 2, n=2)
    bench.run()
    bench.check_done(a)
    for index in range(2):
        error = bench.last(b, index).error
        assert isinstance(error, QueueTimeoutError)
        assert "no free row" in str(error)
        assert error.status == 503
    c = bench.submit(5, 2)
    bench.run()
    bench.check_done(c)


def test_an_impasse_ends_one_request_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    a = bench.submit(20, 5)
    admit = bench.scheduler.memory.admit
    monkeypatch.setattr(
        bench.scheduler.memory, "admit", lambda seq, *rest: seq.group.request_id != a and admit(seq, *rest)
    )
    bench.run()
    assert bench.reason(a) == "error"
    assert "no room" in str(bench.last(a).error)
    b = bench.submit(20, 5)
    bench.run()
    bench.check_done(b)


def test_a_method_that_understates_its_peak_is_held_anyway() -> None:
    class Liar(MockMethod):
        def peak_rows(
            self, length: np.ndarray, prompt_tokens: int, decode_tokens: int, chunk_tokens: int | None = None
        ) -> np.ndarray:
            return np.ones_like(length)

    bench = Bench(methods=(Liar(),), num_sequence_pages=24, num_rows=4)
    ids = [bench.submit(20, 30) for _ in range(4)]
    bench.run()
    for i in ids:
        assert bench.reason(i) in ("length", "error")
    bench.check_done(ids[0])


# Several choices of one prompt.


@pytest.mark.parametrize("dependent", [False, True])
def test_company_does_not_change_chunks_that_matter(monkeypatch: pytest.MonkeyPatch, dependent: bool) -> None:
    bench = Bench(
        EngineSettings(stall_target_ms=1),
        methods=(MockMethod("cut", window=24, chunk_dependent=dependent), MockMethod("other")),
        prefill_buckets=((1, 8), (4, 8), (1, 32), (2, 32)),
    )
    found: list[list[int]] = []
    by_row: dict[int, list[int]] = {}
    prefill = bench.runner.prefill

    def noted(method: str, rows: list[PrefillRow]) -> Ticket:
        for row in rows:
            if row.first:
                by_row[row.row] = []
                found.append(by_row[row.row])
            by_row[row.row].append(len(row.tokens))
        return prefill(method, rows)

    monkeypatch.setattr(bench.runner, "prefill", noted)
    bench.submit(70, 30, "cut")
    bench.run()
    for tokens in (3, 70, 33, 64):  # while another decodes, side by side, one after the other
        bench.submit(tokens, 40, "cut")
        bench.step(3)
    bench.run()
    assert (found == [[32, 32, 6], [3], [32, 32, 6], [32, 1], [32, 32]]) == dependent


@pytest.mark.parametrize("method", NAMES)
def test_choices_share_the_prompt_and_sample_apart(method: str) -> None:
    bench = Bench()
    a = bench.submit(41, 30, method, n=4)
    bench.run()
    bench.check_done(a)
    assert len({tuple(bench.tokens(a, index)) for index in range(4)}) == 4
    assert bench.runner.calls["fork"] == 3
    assert bench.last(a).stats.prompt_tokens == 41


def test_choices_whose_rows_go_on_changing_share_none() -> None:
    bench = Bench(methods=(MockMethod(prompt_budget=20, private_rows=True),))
    a = bench.submit(41, 30, n=3)
    bench.run()
    bench.check_done(a)
    assert "fork" not in bench.runner.calls


def test_forked_choices_hold_the_prompt_once() -> None:
    bench = Bench(num_rows=8)
    a = bench.submit(41, 4, n=8)
    bench.step(2)
    pool = bench.scheduler.memory.pool
    assert len(bench.scheduler.running) == 8
    used = (pool.num_head_pages - pool.free_head_pages) // 4
    begun = sum(seq.prefilled for seq in bench.scheduler.running)
    assert begun > 1
    assert used == 10 + begun, "ten full pages together, and one for each that went on"
    bench.run()
    bench.check_done(a)


def test_choices_without_room_to_fork_come_later_on_their_own() -> None:
    bench = Bench(num_rows=2, num_sequence_pages=30)
    a = bench.submit(40, 20, n=5)
    bench.run()
    bench.check_done(a)
    assert bench.runner.calls["fork"] == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (3, 0), (0, 3), (1, 2), (0, 2)])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_choices_outlive_the_one_they_wait_for(order: tuple[int, int], steps: int) -> None:
    bench = Bench(prefill_buckets=((1, 16), (4, 16)), step_s=1.0)
    a = bench.submit(40, 20, n=4)
    if steps:
        bench.step(steps)
    for index in order:
        bench.scheduler.stop(a, index)
        bench.check()
    bench.run()
    for index in range(4):
        assert bench.reason(a, index) == ("stop" if index in order else "length")
        assert bench.tokens(a, index) == bench.alone(a, index)[: len(bench.tokens(a, index))]


def test_a_leader_that_is_preempted_before_the_fork_still_leads() -> None:
    bench = Bench(prefill_buckets=((1, 16),))
    a = bench.submit(60, 10, n=3)
    bench.step(2)
    bench.scheduler._preempt(bench.scheduler.running[0])
    bench.run()
    bench.check_done(a)
    assert bench.runner.calls["fork"] == 2
