"""What the shares of eviction are made of: plans by host arithmetic, programs that repeat, and their sums."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import eviction_plan, eviction_share
from benchmarks.eviction_programs import Bench, Shape
from sparsejax import registry
from sparsejax.combine import bound, with_granularity
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import Method
from sparsejax.models.load import dummy

GEOMETRY = Geometry(2, 4, 2, 8, 16, 512, 1.0)
SNAPKV = "sink_keep_tokens=1,decode_keep_tokens=32,recent_keep_tokens=4,observation_window_size=2"
SHAPE = Shape(page=16, context=128, chunk=32, answer=40, batches=(2,), steps=3)


def first_rows(params, context):
    return jnp.arange(context.kept, dtype=jnp.int32)[None]


def between_chunks(params, phase, lengths):
    """The first layer keeps 16 rows between chunks, the second 48; nothing is evicted later."""
    budgets = np.asarray([[16], [48]], np.int32)
    return np.minimum(lengths, budgets) if phase == "chunk" else lengths


UNEVEN = Method("uneven", "prefill", granularity=Granularity.LAYER, keep_rows=first_rows, keep_count=between_chunks)


def test_a_plan_follows_prompt_and_answer():
    method, _ = registry.resolve(f"snapkv({SNAPKV},snapkv_decode_eviction=true,decode_eviction_interval=8)")
    plan = eviction_plan.plan(method, GEOMETRY, 256, 64, 45)
    assert plan.histories == (0, 64, 128, 192)
    assert plan.mean_resident == 37
    prompt, token = plan.compactions["prompt"], plan.compactions["token"]
    assert (prompt.lengths.item(), prompt.kept.item(), prompt.observed, prompt.number) == (256, 37, 256, 1)
    # Five compactions in 40 tokens; the five tokens after them belong to the sixth.
    assert (token.lengths.item(), token.kept.item(), token.observed, token.number) == (45, 37, 8, 1 / 8)


def late(params, phase, lengths):
    """20 rows stay once a decoding request has 28."""
    return np.where((phase == "token") & (lengths >= 28), 20, lengths)


LATE = Method("late", "retention", keep_rows=first_rows, keep_count=late)


def test_the_first_compaction_of_an_answer_may_find_the_whole_prompt():
    plan = eviction_plan.plan(LATE, GEOMETRY, 64, 32, 20)
    answer, token = plan.compactions["answer"], plan.compactions["token"]
    assert (answer.phase, answer.lengths.item(), answer.kept.item(), answer.number) == ("token", 65, 20, 1)
    # One token, and then two compactions in 16 tokens.
    assert (token.phase, token.lengths.item(), token.observed, token.number) == ("token", 28, 8, 1 / 8)
    assert plan.mean_resident == 20
    short = eviction_plan.plan(LATE, GEOMETRY, 64, 32, 5)
    assert set(short.compactions) == {"answer"}


def test_a_plan_of_layers_that_differ():
    plan = eviction_plan.plan(UNEVEN, GEOMETRY, 128, 32, 10)
    # Before each chunk: nothing, 16 and 32 rows, 16 and 48, 16 and 48.
    assert plan.histories == (0, 24, 32, 32)
    chunk = plan.compactions["chunk"]
    assert set(plan.compactions) == {"chunk"}
    assert (chunk.lengths.tolist(), chunk.kept.tolist(), chunk.number) == ([[48], [80]], [[16], [48]], 3)
    assert chunk.observed == 32
    assert plan.resident.tolist() == [[48], [80]]


@pytest.mark.parametrize("shrink", [1, 16, 128])
def test_every_member_that_evicts_is_measured(shrink):
    found = eviction_plan.default_compositions(shrink)
    evicting = {
        name
        for name, entry in registry.available().items()
        if getattr(entry.build(entry.params_type()), "evicts", False)
    }
    assert evicting <= set(found)
    assert {"snapkv", "snapkv, decoding too", "streamingllm"} <= set(found)
    for name, text in found.items():
        method, _ = registry.resolve(text)
        geometry = dataclasses.replace(GEOMETRY, num_layers=12, max_model_len=32768 // shrink + 16)
        plan = eviction_plan.plan(method, geometry, 32768 // shrink, 4096 // shrink, 4096 // shrink)
        assert plan.compactions, name
        if name.endswith("decoding too"):
            assert "token" in plan.compactions, name


def test_compositions_are_named_shortly_where_that_is_enough():
    given = ["a(x=1)", "b(y=1.5)+c", "a(x=2)"]
    assert eviction_share.named(given) == {"a(x=1)": "a(x=1)", "b+c": "b(y=1.5)+c", "a(x=2)": "a(x=2)"}


@pytest.fixture(scope="module")
def bench():
    """Two methods that work, at three granularities, and one that can't be compiled."""
    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    dense, storage = registry.resolve("dense")
    snapkv, _ = registry.resolve(f"snapkv({SNAPKV},snapkv_decode_eviction=true,decode_eviction_interval=8)")

    def broken(params, context):
        raise ValueError("this method does not work")

    methods = {"dense": dense, "snapkv": snapkv, "uneven": UNEVEN, "late": LATE}
    methods["snapkv per head"] = with_granularity(snapkv, Granularity.HEAD)
    kvzip, _ = registry.resolve("kvzip(kvzip_token_budget=32,kvzip_score_chunk_size=32,kvzip_prev_postfix_size=8)")
    methods["kvzip"] = bound(kvzip, lambda text: eviction_share.encode(text, spec.vocab_size))
    methods["broken"] = dataclasses.replace(UNEVEN, keep_rows=broken)
    found = Bench(spec, dummy.dummy_weights(spec), SHAPE, methods, storage, None)
    found.failed = found.compile()
    return found


def lengths(bench, name):
    return np.asarray(bench.state.lengths[bench.sides[name].method.granularity.value])


def test_a_method_that_fails_leaves_the_others(bench):
    assert set(bench.failed) == {"broken"}
    assert "this method does not work" in bench.failed["broken"]
    assert set(bench.sides) == {"dense", "snapkv", "uneven", "late", "snapkv per head", "kvzip"}


@pytest.mark.parametrize("name", ["dense", "snapkv", "uneven", "late", "snapkv per head", "kvzip"])
def test_measurements_repeat_from_one_state(bench, name):
    for _ in range(2):
        assert bench.chunk(name, 96)() > 0
        assert (lengths(bench, name)[..., 1] == 128).all()
        assert np.asarray(bench.state.positions).tolist() == [0, 128, 0]
    resident = bench.sides[name].plan.resident if name != "dense" else 50
    assert bench.step(name, 2, resident)() > 0
    assert (lengths(bench, name)[..., 1:] == np.asarray(resident)[..., None] + SHAPE.steps).all()
    assert (lengths(bench, name)[..., 0] == 0).all()
    assert bench.finite()[name]
    for when, compaction in bench.sides[name].plan.compactions.items():
        for part in ("whole", "moving"):
            assert bench.compaction(name, when, part)() > 0
            assert (lengths(bench, name)[..., 1] == compaction.kept).all()


def test_a_replay_leaves_no_rows(bench):
    assert bench.sides["kvzip"].plan.replays == (5 + 32, 5 + 40, 5 + 40, 5 + 40)
    assert bench.replay("kvzip")() > 0
    assert lengths(bench, "kvzip")[0, 0].tolist() == [0, 128, 0]


def test_a_whole_prompt_is_all_its_chunks(bench):
    assert bench.prompt("dense")() > 0
    assert lengths(bench, "dense").tolist() == [[[0, 128, 0]]]


@pytest.mark.parametrize("name", ["dense", "snapkv", "uneven", "late", "snapkv per head", "kvzip"])
def test_no_page_has_two_owners(bench, name):
    side = bench.sides[name]
    table = bench._start(side, 1, 1)[0][side.method.granularity.value]
    used = np.asarray(table)[np.asarray(table) > 0]
    new = [np.asarray(bench._inputs(side.method, each).new_pages) for each in side.plan.compactions.values()]
    for pages in new:
        both = np.concatenate([used, pages[pages > 0]])
        assert len(np.unique(both)) == len(both)
        limit = bench.num_pages * bench._parts(side.method).size
        assert both.max() < limit


def test_moved_bytes_are_those_of_kept_rows(bench):
    row = 2 * 32 * 4 + 4  # a key, a value and a position of one head
    prompt = bench.sides["snapkv"].plan.compactions["prompt"]
    assert bench.moved_bytes("snapkv", prompt) == 2 * row * 2 * 2 * 37  # layers, heads
    assert bench.moved_bytes("snapkv per head", bench.sides["snapkv per head"].plan.compactions["prompt"]) == (
        bench.moved_bytes("snapkv", prompt)
    )
    chunk = bench.sides["uneven"].plan.compactions["chunk"]
    assert bench.moved_bytes("uneven", chunk) == 2 * row * 2 * (16 + 48)


def test_shares_add_up(bench):
    """Seconds made by hand: chunks of 1 s, and 0.5 s more with history; snapkv adds 0.1 s to 0.3 s."""
    ends = 0, 96
    chunks = {"dense": {0: [1.0, 1.0], 96: [1.5, 1.5]}, "snapkv": {0: [1.1, 1.1], 96: [1.8, 1.8]}}
    whole = {("prompt", "whole"): [0.2, 0.2], ("prompt", "moving"): [0.05, 0.05]}
    whole |= {("token", "whole"): [0.08, 0.08], ("token", "moving"): [0.02, 0.02]}
    steps, dense = {"snapkv": {2: [0.03, 0.03]}}, {"snapkv": {2: [0.02, 0.02]}}
    rounds = eviction_share.Rounds(chunks, steps, dense, {"snapkv": whole}, scale=3.0)
    reference = {"prefill_s": {"median": 20.0}, "steps": {(2, 37): {"median": 0.1}}}
    found = eviction_share.judge(bench, "snapkv", rounds, reference, bandwidth=1e9)
    # Histories of 0, 32, 64 and 96 rows: four times the mean of both ends, for three times the layers.
    assert found["prompt_extra_s"] == pytest.approx(4 * 0.2 * 3)
    assert eviction_share.along((0, 32, 64, 96), ends, (0.1, 0.3)) == pytest.approx(0.8)
    assert found["prefill_share"] == pytest.approx((2.4 + 0.6) / 20)
    assert found["prefill_over_dense"] == pytest.approx(1 + (2.4 + 0.6) / 20)
    prompt = found["compactions"]["prompt"]
    assert (prompt["choosing_s"], prompt["moving_s"]["median"]) == (pytest.approx(0.45), pytest.approx(0.15))
    assert prompt["key_read_s"] == pytest.approx(128 * 4 * 32 * 4 * 3 / 1e9)
    # 0.03 s more a step, and two rows that are compacted every 8 tokens in 0.24 s.
    assert found["decode"]["2"]["share"] == pytest.approx((0.03 + 2 * 0.24 / 8) / 0.1)


def test_reading_a_prompt_once_more_counts_with_the_prefill(bench):
    chunks = {name: {0: [1.0], 96: [1.5]} for name in ("dense", "kvzip")}
    whole = {("prompt", "whole"): [0.25], ("prompt", "moving"): [0.25]}
    steps = {"kvzip": {2: [0.02]}}
    rounds = eviction_share.Rounds(chunks, steps, steps, {"kvzip": whole}, 2.0, {"kvzip": [0.5]})
    reference = {"prefill_s": {"median": 5.0}, "steps": {(2, 32): {"median": 0.1}}}
    found = eviction_share.judge(bench, "kvzip", rounds, reference, bandwidth=1e9)
    assert (found["replays"]["number"], found["replays"]["tokens"], found["replays"]["median"]) == (4, 45, 1.0)
    assert found["prefill_share"] == pytest.approx((0.5 + 4 * 1.0) / 5)


def test_a_method_that_shortens_its_prompt_is_given_credit(bench):
    chunks = {name: {0: [1.0], 96: [1.5]} for name in ("dense", "uneven")}
    whole = {("chunk", "whole"): [0.0], ("chunk", "moving"): [1e-9]}
    steps = {"uneven": {2: [0.02]}}
    rounds = eviction_share.Rounds(chunks, steps, steps, {"uneven": whole}, scale=1.0)
    resident = bench.sides["uneven"].plan.mean_resident
    reference = {"prefill_s": {"median": 5.0}, "steps": {(2, resident): {"median": 0.1}}}
    found = eviction_share.judge(bench, "uneven", rounds, reference, bandwidth=1e9)
    assert found["prefill_share"] == 0
    # Histories of 0, 24, 32 and 32 rows instead of 0, 32, 64 and 96; 0.5 s for each 96.
    assert found["prefill_over_dense"] == pytest.approx(1 - (192 - 88) / 96 * 0.5 / 5)
