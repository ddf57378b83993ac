"""Which rows SnapKV keeps in a running model, against NumPy over queries and keys recomputed from the start."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import eviction
from sparsejax.methods import snapkv
from tests.contracts.compositions import PER_HEAD, small
from tests.core.harness import Session, tokens_of
from tests.core.oracle import Reads

VARIANTS = [
    "snapkv",
    "snapkv+fp8_kv",
    PER_HEAD,
    "snapkv(sparse_prefill_score_mode=probability,softmax_domain=all,pool_type=avg,pool_kernel_size=5)",
]


@dataclasses.dataclass
class Eviction:
    phase: str
    observed: int
    seen: int
    before: np.ndarray  # [layers, heads, rows] positions
    after: np.ndarray


class Watched(Session):
    """Notes every eviction."""

    evictions: list[Eviction]

    def _all(self, row: int) -> np.ndarray:
        geometry = self.geometry
        heads = range(geometry.num_kv_heads)
        return np.stack([np.stack([self.positions(row, l, h) for h in heads]) for l in range(geometry.num_layers)])

    def _maintain(self, row: int, phase: str) -> None:
        record = self.rows[row]
        before, length, observed = self._all(row), record.length, record.since
        super()._maintain(row, phase)
        if record.length < length:
            self.evictions.append(Eviction(phase, observed, record.seen, before, self._all(row)))


def smooth(scores: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    half = kernel // 2
    padded = np.pad(scores, (half, half), constant_values=-np.inf if kind == "max" else 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel)
    return windows.max(-1) if kind == "max" else windows.sum(-1) / kernel


def votes_of(params: Any, scale: float, q: np.ndarray, k: np.ndarray, query_at: np.ndarray, key_at: np.ndarray):
    """q [window, group, dim], k [rows, dim] -> votes of each query head for each candidate, [group, candidates]."""
    logits = np.einsum("wgd,sd->gws", q, k).astype(np.float64) * scale
    seen = np.broadcast_to(key_at[None, :] <= query_at[:, None], logits.shape)
    first, end = params.sink_keep_tokens, len(k) - params.recent_keep_tokens
    if params.sparse_prefill_score_mode == "logits":
        return np.where(seen, logits, -np.inf).max(1)[:, first:end]
    domain = np.zeros(len(k), bool)
    domain[slice(None) if params.softmax_domain == "all" else slice(first, end)] = True
    mass = np.where(seen & domain, np.exp(logits - logits.max()), 0.0)
    total = mass.sum(-1, keepdims=True)
    return (mass / np.where(total > 0, total, 1)).mean(1)[:, first:end]


def wanted_rows(params: Any, geometry, event: Eviction, q: np.ndarray, k: np.ndarray, layer: int) -> np.ndarray:
    """Positions [heads, kept] of one layer."""
    window = min(params.observation_window_size, event.observed)
    query_at = np.arange(event.seen - window, event.seen)
    grouped = q.reshape(len(q), geometry.num_kv_heads, geometry.group_size, -1)[query_at]
    per_head = []
    for head in range(geometry.num_kv_heads):
        at = event.before[layer, head]
        per_head.append(votes_of(params, geometry.scale, grouped[:, head], k[at, head], query_at, at))
    votes = np.stack(per_head)  # [heads, group, candidates]
    shared = params.head_mode == "shared"
    votes = np.broadcast_to(votes.max((0, 1)), (len(votes), votes.shape[2])) if shared else votes.mean(1)
    kernel = params.pool_kernel_size if event.phase == "prompt" else 1
    rows = []
    for head, scores in enumerate(votes):
        scores = smooth(scores, kernel, params.pool_type)
        best = np.sort(np.argsort(-scores, kind="stable")[: params.decode_keep_tokens]) + params.sink_keep_tokens
        at = event.before[layer, head]
        recent = np.arange(len(at) - params.recent_keep_tokens, len(at))
        rows.append(at[[*range(params.sink_keep_tokens), *best, *recent]])
    return np.stack(rows)


def append(session: Session, reads: Reads, tokens: list[int], **how) -> None:
    geometry = session.geometry
    heads = [(layer, head) for layer in range(geometry.num_layers) for head in range(geometry.num_kv_heads)]
    known = 1 in session.rows
    before = {of: session.positions(1, *of) if known else np.zeros(0, int) for of in heads}
    if how:
        session.prefill({1: tokens}, first=not known, **how)
    else:
        session.decode([1], tokens)
    reads.appended(tokens, before)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_stays_is_what_the_last_queries_attend_to(name):
    session = Watched(name, params=small(name))
    session.evictions = []
    reads, params = Reads(session), session.method.params
    append(session, reads, tokens_of(1, 41), pieces=[13, 25, 1, 1])  # the window spans chunks
    for token in tokens_of(2, 10):
        append(session, reads, [token])
    append(session, reads, tokens_of(3, 3), pieces=[2])  # a turn shorter than the window
    append(session, reads, tokens_of(4, 2), pieces=[1])
    for token in tokens_of(5, 6):
        append(session, reads, [token])
    assert [(event.phase, event.observed) for event in session.evictions] == [
        ("prompt", 41),
        ("token", 8),
        ("prompt", 3),
        ("prompt", 2),
    ]
    _, heads = reads.recompute()
    for event in session.evictions:
        for layer, (q, k) in enumerate(heads):
            wanted = wanted_rows(params, session.geometry, event, q, k, layer)
            np.testing.assert_array_equal(event.after[layer], wanted, err_msg=f"{event.phase} at {event.seen}")


@pytest.mark.parametrize("name", VARIANTS[:1])
def test_queries_of_earlier_turns_do_not_vote(name):
    found = []
    for junk in (0.0, 1e3, np.nan):
        session = Session(name, params=small(name))
        session.prefill({1: tokens_of(1, 41)})
        aux = {key: jnp.full_like(array, junk) for key, array in session.state.row_aux.items()}
        session.state = session.state.replace(row_aux=aux)
        session.prefill({1: tokens_of(3, 3)}, first=False)
        found.append([session.positions(1, layer, 0).tolist() for layer in range(2)])
    assert found[0] == found[1] == found[2]


def test_the_keep_set_depends_on_the_layer():
    session = Session("snapkv", params=small("snapkv"))
    session.prefill({1: tokens_of(1, 41)})
    assert session.positions(1, 0, 0).tolist() != session.positions(1, 1, 0).tolist()


def test_without_decode_eviction_rows_only_grow():
    session = Session("snapkv", params=small("snapkv") | {"snapkv_decode_eviction": False})
    session.prefill({1: tokens_of(1, 30)})
    ring = np.asarray(session.state.row_aux[snapkv.QUERIES][:, 1])
    for step, token in enumerate(tokens_of(2, 20)):
        session.decode([1], [token])
        assert session.rows[1].length == 13 + step + 1
    np.testing.assert_array_equal(session.state.row_aux[snapkv.QUERIES][:, 1], ring)
    session.check()


def test_ties_go_to_the_lower_row():
    for scores, kept in (
        ([0.0, -0.0, 0.0, -0.0, 0.0], [1, 2, 3]),  # signed zeros are equal
        ([1.0, 2.0, 1.0, 2.0, 1.0], [1, 2, 4]),
        ([-np.inf] * 5, [1, 2, 3]),  # rows that no query saw
        ([-np.inf, -np.inf, -5.0, -np.inf, -np.inf], [1, 2, 3]),
    ):
        padded = np.full((1, 16), np.nan, np.float32)
        padded[0, 1:6] = scores
        found = eviction.choose_rows(jnp.asarray(padded), jnp.int32(7), 5, first=1, recent=1)
        assert found.tolist() == [[0, *kept, 6]]


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_pooling_stays_inside_the_candidates(kernel, kind):
    rng = np.random.default_rng(kernel)
    scores = rng.random(9).astype(np.float32)
    padded = np.full((1, 24), 1e6, np.float32)  # sinks, recent rows and padding must not leak in
    padded[0, 2:11] = scores
    length, protected = jnp.int32(14), {"first": 2, "recent": 3}
    pooled = eviction.pool_candidates(jnp.asarray(padded), length, kernel, kind, **protected)
    found = eviction.choose_rows(pooled, length, 9, **protected)[0].tolist()
    best = np.argsort(-smooth(scores.astype(np.float64), kernel, kind), kind="stable")[:4]
    assert found == [0, 1, *sorted((best + 2).tolist()), 11, 12, 13]
