"""Which rows each layer keeps in a running model, against NumPy over queries and keys recomputed from the start."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from tests.contracts.compositions import small
from tests.contracts.test_snapkv import smooth, votes_of
from tests.core.harness import Session, tokens_of
from tests.core.oracle import Reads

VARIANTS = [
    "pyramidkv",
    "pyramidkv+fp8_kv",
    "pyramidkv(sparse_prefill_score_mode=logits,pool_kernel_size=3)",
    "pyramidkv(head_mode=per_kv_head,softmax_domain=all,pool_type=avg,pool_kernel_size=5)",
    "pyramidkv(pyramid_budget_mode=arithmetic,pyramidkv_beta=3)",
    "pyramidkv(decode_eviction_interval=2)",  # fewer queries than the window takes
]


@dataclasses.dataclass
class Eviction:
    layer: int
    phase: str
    window: int  # queries since the phase began, or since this layer's last eviction in it
    seen: int
    before: np.ndarray  # [heads, rows] positions
    after: np.ndarray


class Watched(Session):
    """Notes every eviction of every layer."""

    evictions: list[Eviction]
    since: np.ndarray  # [layers] queries that may vote

    def layers(self, row: int) -> list[np.ndarray]:
        heads = range(self.geometry.num_kv_heads)
        return [np.stack([self.positions(row, l, h) for h in heads]) for l in range(self.geometry.num_layers)]

    def prefill(self, prompts, **how):
        self.since = np.zeros(self.geometry.num_layers, int)
        logits = super().prefill(prompts, **how)
        self.since[:] = 0
        return logits

    def _grow(self, row: int, tokens: int):
        self.since += tokens
        return super()._grow(row, tokens)

    def _maintain(self, row: int, phase: str) -> None:
        before, seen = self.layers(row), self.rows[row].seen
        super()._maintain(row, phase)
        for layer, (old, new) in enumerate(zip(before, self.layers(row), strict=True)):
            if new.shape[1] < old.shape[1]:
                self.evictions.append(Eviction(layer, phase, int(self.since[layer]), seen, old, new))
                self.since[layer] = 0


def wanted_rows(params, geometry: Geometry, event: Eviction, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Positions [heads, kept] of one layer."""
    window = min(params.observation_window_size, event.window)
    query_at = np.arange(event.seen - window, event.seen)
    grouped = q.reshape(len(q), geometry.num_kv_heads, geometry.group_size, -1)[query_at]
    heads = range(geometry.num_kv_heads)
    each = [
        votes_of(params, geometry.scale, grouped[:, h], k[event.before[h], h], query_at, event.before[h]) for h in heads
    ]
    votes = np.stack(each)  # [heads, group, candidates]
    shared = params.head_mode == "shared"
    votes = np.broadcast_to(votes.max((0, 1)), (len(votes), votes.shape[2])) if shared else votes.mean(1)
    kernel = params.pool_kernel_size if event.phase == "prompt" else 1
    scored = event.after.shape[1] - params.protected
    rows = []
    for at, scores in zip(event.before, votes, strict=True):
        best = np.argsort(-smooth(scores, kernel, params.pool_type), kind="stable")[:scored] + params.sink_keep_tokens
        recent = np.arange(len(at) - params.recent_keep_tokens, len(at))
        rows.append(at[[*range(params.sink_keep_tokens), *np.sort(best), *recent]])
    return np.stack(rows)


def append(session: Watched, reads: Reads, tokens: list[int], **how) -> None:
    geometry = session.geometry
    known = 1 in session.rows
    heads = [(layer, head) for layer in range(geometry.num_layers) for head in range(geometry.num_kv_heads)]
    before = {of: session.positions(1, *of) if known else np.zeros(0, int) for of in heads}
    if how:
        session.prefill({1: tokens}, first=not known, **how)
    else:
        session.decode([1], tokens)
    reads.appended(tokens, before)


@pytest.mark.parametrize("first", [41, 12], ids=["every layer", "a prompt that fits the first layer only"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_layer_keeps_what_the_last_queries_attend_to(name, first):
    session = Watched(name, params=small(name))
    session.evictions = []
    reads, params = Reads(session), session.method.params
    append(session, reads, tokens_of(1, first), pieces=[13, 25, 1, 1] if first > 12 else [5, 6])
    for token in tokens_of(2, 13):
        append(session, reads, [token])
    append(session, reads, tokens_of(3, 3), pieces=[2])  # a turn shorter than the window
    for token in tokens_of(5, 5):
        append(session, reads, [token])
    session.check()
    lengths = session.rows[1].lengths[:, 0]
    assert lengths[0] > lengths[1]
    phases = {(event.layer, event.phase) for event in session.evictions}
    assert {(1, "prompt"), (0, "token"), (1, "token")} <= phases
    _, heads = reads.recompute()
    for event in session.evictions:
        wanted = wanted_rows(params, session.geometry, event, *heads[event.layer])
        np.testing.assert_array_equal(event.after, wanted, err_msg=f"layer {event.layer} {event.phase} {event.seen}")


def test_layers_take_turns():
    session = Watched("pyramidkv", params=small("pyramidkv"))
    session.evictions = []
    session.prefill({1: tokens_of(1, 12)})
    assert session.rows[1].lengths[:, 0].tolist() == [12, 10]
    pages = [len(heads[0]) for heads in session.rows[1].pages]
    assert pages == [3, 3]
    for token in tokens_of(2, 9):
        session.decode([1], [token])
    assert [(event.layer, event.seen) for event in session.evictions] == [(1, 12), (1, 20), (0, 21)]
    session.check()


GEOMETRY = Geometry(4, 4, 2, 8, 4, 64, 1.0)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"pyramid_layer_ratios": "1,0.5,0.25"}, "pyramid_layer_ratios has 3"),
        ({"pyramidkv_start_layer": 4}, "pyramidkv_start_layer"),
        ({"pyramidkv_least_layer": 4}, "pyramidkv_least_layer"),
        ({"sink_keep_tokens": 0, "recent_keep_tokens": 0, "decode_keep_tokens": 50}, "keep no rows"),
        (
            {"sink_keep_tokens": 0, "recent_keep_tokens": 0, "decode_keep_tokens": 15}
            | {"pyramid_budget_mode": "arithmetic"},
            "keep no rows",
        ),
    ],
)
def test_models_of_another_depth_are_refused(params, word):
    method, _ = registry.resolve("pyramidkv", params)
    reasons = method.check(method.params, GEOMETRY)
    assert len(reasons) == 1
    assert word in reasons[0]


@pytest.mark.parametrize("params", [{}, {"pyramidkv_start_layer": 3}, {"pyramid_layer_ratios": (0.5, 1, 0.5, 0.1)}])
def test_models_of_any_fitting_depth_are_served(params):
    method, _ = registry.resolve("pyramidkv", params)
    assert method.check(method.params, GEOMETRY) == []


def test_ratios_that_rise_are_refused_unless_spelled_out():
    rising = {"pyramidkv_start_ratio": 0.2, "pyramidkv_least_ratio": 0.5}
    with pytest.raises(MethodError, match="pyramidkv_least_ratio"):
        registry.resolve("pyramidkv", rising)
    registry.resolve("pyramidkv", rising | {"pyramidkv_start_layer": 1})  # the first layer keeps most
    method, _ = registry.resolve("pyramidkv", {"pyramid_layer_ratios": "0.5 1", "decode_keep_tokens": 15})
    assert method.kept_after("prompt", np.full((2, 1), 10_000))[:, 0].tolist() == [591, 606]
