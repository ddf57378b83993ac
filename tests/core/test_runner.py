"""The device runner: plans in, results out, and nothing is compiled after start-up."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from sparsejax import registry, sampling, steps
from sparsejax.plans import DecodeRow, ForkRow, MaintainRow, PrefillRow, SamplingRow, UnparkRow
from sparsejax.runner import DeviceRunner, LateCompileError
from sparsejax.state import IN_PROMPT
from tests.contracts.compositions import small, start
from tests.core.harness import TINY, tiny_weights, tokens_of

NAME, NUM_ROWS, NUM_PAGES = "snapkv+quest+fp8_kv", 4, 60
LONG, SHORT = tokens_of(1, 41), tokens_of(2, 6)
BEST = SamplingRow()


class Compilations:
    """Counts what XLA compiles, eager operations included."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_s: float, **kwargs) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    method, storage = registry.resolve(NAME, small(NAME))
    found = DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(4, 64),
        {NAME: method},
        storage,
        num_rows=NUM_ROWS,
        num_sequence_pages=NUM_PAGES,
        decode_buckets=(1, 4),
        prefill_buckets=((4, 48),),
        fail_on_retrace=True,
    )
    for _ in found.compile(found.programs(), 2):
        pass
    found.seal()
    return found


@dataclasses.dataclass
class _Row:
    pages: list[int]
    length: int = 0
    since: int = 0
    position: int = 0


class Driver:
    """The host's part, for sequence pages."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.runner = runner
        self.facts = runner.limits.methods[NAME]
        self.pages = runner.limits.geometry.pages
        self.free = list(range(1, NUM_PAGES))
        self.rows: dict[int, _Row] = {}

    def _grow(self, row: int, tokens: int) -> np.ndarray | None:
        record = self.rows[row]
        record.length, record.since = record.length + tokens, record.since + tokens
        updates = []
        while len(record.pages) < self.pages(record.length):
            record.pages.append(self.free.pop())
            updates.append((0, 0, len(record.pages) - 1, record.pages[-1]))
        return np.asarray(updates, np.int32).reshape(-1, 4) if updates else None

    def _maintain(self, row: int, phase: str) -> None:
        record = self.rows[row]
        length = np.full((1, 1), record.length, np.int32)
        kept = self.facts.kept_after(phase, length)
        if (kept == length).all():
            return
        new = [self.free.pop() for _ in range(self.pages(int(kept[0, 0])))]
        plan = MaintainRow(row, "evict", phase, length, kept, np.asarray([[new]], np.int32), record.since)
        self.runner.maintain(NAME, plan)
        self.free += record.pages
        record.pages, record.length, record.since = new, int(kept[0, 0]), 0

    def prefill(self, prompts: dict[int, list[int]], sampling: SamplingRow = BEST):
        plans = []
        for row, tokens in prompts.items():
            self.rows[row] = _Row([])
            updates = self._grow(row, len(tokens))
            plans.append(PrefillRow(row, np.asarray(tokens, np.int32), True, True, sampling, updates))
        ticket = self.runner.prefill(NAME, plans)
        for row in prompts:
            self._maintain(row, "prompt")
            self.rows[row].since = 0
        return ticket

    def decode(self, rows: list[int], sampling: SamplingRow = BEST):
        plans = []
        for row in rows:
            self.rows[row].position += 1
            drawn = dataclasses.replace(sampling, position=self.rows[row].position)
            plans.append(DecodeRow(row, drawn, self._grow(row, 1)))
        ticket = self.runner.decode(NAME, plans)
        for row in rows:
            self._maintain(row, "token")
        return ticket

    def generate(self, prompts: dict[int, list[int]], count: int, sampling: SamplingRow = BEST):
        """Tokens by row."""
        tickets = [self.prefill(prompts, sampling)]
        tickets += [self.decode(list(prompts), sampling) for _ in range(count - 1)]
        tokens = np.stack([ticket.result().tokens for ticket in tickets])
        return dict(zip(prompts, tokens.T.tolist(), strict=True))

    def release(self, *rows: int) -> None:
        for row in rows:
            self.free += self.rows.pop(row).pages


def test_tokens_are_those_of_the_step_functions(runner):
    session, driver = start(NAME), Driver(runner)
    logits = session.generate(1, LONG, 20)
    assert driver.generate({1: LONG}, 20)[1] == logits.argmax(-1).tolist()


def test_nothing_compiles_while_rows_cross_page_and_budget_boundaries(runner):
    driver = Driver(runner)
    driver.generate({1: SHORT}, 3)  # what the host itself needs once
    compilations = Compilations()
    driver.generate({1: LONG, 2: SHORT, 3: tokens_of(3, 1)}, 23)
    drawn = SamplingRow(temperature=0.8, top_p=0.9, top_k=7, min_p=0.01, seed=3, presence_penalty=0.1, logprobs=2)
    driver.generate({4: tokens_of(4, 20)}, 9, drawn)
    table = np.asarray([(0, 0, column, page) for column, page in enumerate(driver.rows[1].pages)], np.int32)
    runner.fork(NAME, ForkRow(1, 2, table, ()))
    pages = np.asarray([[driver.rows[3].pages]], np.int32)
    runner.import_row(NAME, 3, pages, runner.export_row(NAME, 3, pages))
    parked = runner.import_parked(NAME, pages, runner.export_parked(NAME, pages, runner.park(NAME, 3)))
    lengths, seen = np.full((1, 1), driver.rows[3].length, np.int32), np.asarray(tokens_of(3, 1), np.int32)
    runner.unpark(NAME, UnparkRow(3, pages, lengths, seen, parked))
    runner.copy_pages(NAME, ((1, 2),))
    runner.setup_row(2, ((5, 1.0),), (3,))
    assert compilations.count == 0
    assert runner.num_late_compiles == 0


def test_each_program_is_described_and_compiled_once(runner):
    programs = list(runner.programs())
    assert len({program.key for program in programs}) == len({program.label for program in programs}) == len(programs)
    assert list(runner.compile(programs, 2)) == []


def test_compilations_are_counted_by_name():
    counted = []
    method, storage = registry.resolve("dense")
    found = DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(4, 16),
        {"dense": method},
        storage,
        num_rows=1,
        num_sequence_pages=5,
        decode_buckets=(1,),
        prefill_buckets=((1, 16),),
        on_compile=lambda name, seconds: counted.append((name, seconds)),
    )
    done = list(found.compile((p for p in found.programs() if p.name != "prefill"), 2))
    assert sorted(name for name, _ in counted) == sorted(compiled.program.name for compiled in done)
    assert sum(seconds for _, seconds in counted) == pytest.approx(sum(one.lower_s + one.compile_s for one in done))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(found.state))
    found.seal()
    found.setup_row(1, (), ())
    assert found.num_late_compiles == 0
    assert [compiled.program.name for compiled in found.compile(found.programs())] == ["prefill"]
    assert found.num_late_compiles == 1


def test_a_late_compilation_is_an_error(runner):
    geometry = runner.limits.geometry
    plan = MaintainRow(
        1, "evict", "chunk", np.full((1, 1), 9), np.full((1, 1), 3), np.zeros((1, 1, geometry.pages(3)), np.int32), 1
    )
    before = runner.num_late_compiles
    with pytest.raises(LateCompileError, match="maintain"):
        runner.maintain(NAME, plan)
    assert runner.num_late_compiles == before + 1
    runner.num_late_compiles = before


def test_draws_do_not_depend_on_company(runner):
    drawn = SamplingRow(temperature=1.2, top_p=0.95, seed=2**63 + 5)
    alone, together = Driver(runner), Driver(runner)
    wanted = alone.generate({2: LONG}, 12, drawn)[2]
    found = together.generate({1: SHORT, 3: LONG, 4: tokens_of(5, 30)}, 12, drawn)
    assert found[3] == wanted
    other = Driver(runner).generate({2: LONG}, 12, dataclasses.replace(drawn, seed=5))[2]
    assert other != wanted
    assert len(set(wanted)) > 2


def test_logprobs_are_those_of_the_raw_logits(runner):
    driver = Driver(runner)
    ticket = driver.prefill({1: LONG, 2: SHORT}, SamplingRow(temperature=1.0, seed=1, logprobs=3))
    result, logits = ticket.result(), np.asarray(ticket.logits, np.float64)[:2]
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(result.logprob, wanted[[0, 1], result.tokens], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.top_logprobs[:, 0], wanted.max(-1), rtol=1e-4, atol=1e-4)
    assert result.top_ids[:, 0].tolist() == wanted.argmax(-1).tolist()
    assert driver.prefill({3: SHORT}).result().logprob is None


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((BEST, BEST), sampling.GREEDY),
        ((BEST, SamplingRow(temperature=0.7)), sampling.SAMPLE),
        ((BEST, SamplingRow(temperature=0.7, presence_penalty=0.5)), None),
        ((BEST, SamplingRow(logprobs=3)), None),
    ],
)
def test_an_accelerator_runs_no_more_of_the_sampler_than_the_batch_needs(runner, monkeypatch, rows, wanted):
    asked = []

    def program(size, mode):
        asked.append(mode)
        return lambda state, *inputs: steps.sample_step(state, *inputs, mode=mode)

    monkeypatch.setitem(vars(runner), "_sampling_modes", (sampling.GREEDY, sampling.SAMPLE, None))
    monkeypatch.setattr(runner, "_sample_program", program)
    logits = np.random.default_rng(0).normal(0, 1, (4, TINY.vocab_size)).astype(np.float32)
    result = runner._sample(jax.numpy.asarray(logits), [(0, 1), (0, 1)], list(rows)).result()
    assert asked == [wanted]
    assert result.tokens[0] == logits[0].argmax()
    assert (result.logprob is not None) == any(row.logprobs >= 0 for row in rows)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_large_batches_multiply_through_cublas_where_there_is_one(runner, monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    options = [runner._describe_decode(NAME, rows).options for rows in (1, 31, 32, 128)]
    cublas = {"xla_gpu_enable_triton_gemm": False} if platform == "gpu" else {}
    assert options == [{}, {}, cublas, cublas]


def test_bias_stops_and_penalties_reach_the_device(runner):
    driver = Driver(runner)
    plain = driver.generate({1: LONG}, 8)[1]
    driver.release(1)
    runner.setup_row(1, (), (plain[0],))
    assert driver.generate({1: LONG}, 1, SamplingRow(mask_stops=True))[1][0] != plain[0]
    driver.release(1)
    assert driver.generate({1: LONG}, 8)[1] == plain  # stored, but not asked for
    driver.release(1)
    runner.setup_row(1, ((7, 500.0), (9, 300.0)), ())
    assert driver.generate({1: LONG}, 3, SamplingRow(has_bias=True))[1] == [7, 7, 7]
    driver.release(1)
    # Penalised for what was generated, the favourites alternate: counts live on the device and start at zero.
    pushed = SamplingRow(has_bias=True, frequency_penalty=400.0)
    assert driver.generate({1: LONG}, 3, pushed)[1] == [7, 9, 7]


def test_swapped_and_forked_rows_go_on(runner):
    driver = Driver(runner)
    wanted = driver.generate({1: LONG}, 16)[1]
    driver.release(1)
    begun = driver.generate({1: LONG}, 6)[1]
    assert begun == wanted[:6]
    record = driver.rows[1]
    assert record.length % 4, "the last page must be a partial one"
    whole = record.length // 4
    shared, own = record.pages[:whole], [driver.free.pop()]
    copies = tuple(zip(record.pages[whole:], own, strict=True))
    driver.rows[2] = dataclasses.replace(record, pages=shared + own)
    table = np.asarray([(0, 0, column, page) for column, page in enumerate(shared + own)], np.int32)
    runner.fork(NAME, ForkRow(1, 2, table, copies))
    swapped = runner.export_row(NAME, 1, np.asarray([[record.pages]], np.int32))
    assert swapped.nbytes > 0
    rest = [driver.decode([2]).result().tokens[0] for _ in range(10)]
    assert rest == wanted[6:]
    driver.generate({1: tokens_of(9, 40)}, 4)  # a stranger on the row
    pages = [driver.free.pop() for _ in record.pages]
    driver.rows[3] = dataclasses.replace(record, pages=list(pages))
    runner.import_row(NAME, 3, np.asarray([[pages]], np.int32), swapped)
    rest = [driver.decode([3]).result().tokens[0] for _ in range(10)]
    assert rest == wanted[6:]
    with pytest.raises(ValueError, match="head-pages"):
        runner.import_row(NAME, 3, np.asarray([[pages[:-1]]], np.int32), swapped)


@pytest.mark.parametrize("tier", ["device", "host", "swapped", "copy"])
def test_a_parked_row_goes_on_as_if_it_had_stayed(runner, tier):
    """Turn 2 of a conversation, in another row, after others had the first one."""
    session, driver = start(NAME), Driver(runner)
    session.generate(1, LONG, 6)
    answer = driver.generate({1: LONG}, 6)[1]
    session.decode([1], [answer[-1]])
    logits = session.prefill({1: SHORT}, first=False)[1]
    expected = [logits.argmax(), *(session.decode([1])[0].argmax() for _ in range(4))]

    driver.decode([1])  # the last token of the answer; what it samples is dropped
    record = driver.rows.pop(1)
    pages = np.asarray([[record.pages]], np.int32)
    swapped = runner.export_row(NAME, 1, pages) if tier == "swapped" else None
    parked = runner.park(NAME, 1)
    driver.generate({1: SHORT}, 3)
    if tier in ("host", "swapped"):
        swapped = swapped or runner.export_parked(NAME, pages, parked)
        driver.free += record.pages
        driver.generate({2: LONG}, 3)  # on the pages
        record.pages = [driver.free.pop() for _ in record.pages]
        parked = runner.import_parked(NAME, np.asarray([[record.pages]], np.int32), swapped)
    elif tier == "copy":
        copies = [driver.free.pop() for _ in record.pages]
        runner.copy_pages(NAME, tuple(zip(record.pages, copies, strict=True)))
        driver.free += record.pages
        record.pages = copies
        driver.generate({2: LONG}, 3)
    seen, lengths = np.asarray([*LONG, *answer], np.int32), np.full((1, 1), record.length, np.int32)
    runner.setup_row(3, (), ())
    runner.unpark(NAME, UnparkRow(3, np.asarray([[record.pages]], np.int32), lengths, seen, parked))
    driver.rows[3], record.since = record, 0
    plan = PrefillRow(3, np.asarray(SHORT, np.int32), False, True, BEST, driver._grow(3, len(SHORT)))
    tickets = [runner.prefill(NAME, [plan])]
    driver._maintain(3, "prompt")
    record.since = 0
    tickets += [driver.decode([3]) for _ in range(4)]
    assert [int(ticket.result().tokens[0]) for ticket in tickets] == expected
    counts = np.asarray(runner.state.counts[3])
    assert set(np.flatnonzero(counts & IN_PROMPT).tolist()) == {*seen.tolist(), *SHORT}


def test_plans_that_do_not_fit_are_refused(runner):
    updates = np.zeros((2, 4), np.int32)
    with pytest.raises(ValueError, match="table updates"):
        runner.decode(NAME, [DecodeRow(1, SamplingRow(), updates)])
    length = np.asarray([[5]], np.int32)
    for kept in (length, length + 1):
        with pytest.raises(ValueError, match="can't be kept"):
            runner.maintain(NAME, MaintainRow(1, "evict", "prompt", length, kept, np.zeros((1, 1, 2), np.int32), 3))
