"""Heads that share the rows of their layer: how many each keeps, and which, against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax import eviction
from tests.contracts import test_kvzip, test_snapkv
from tests.contracts.compositions import RAGGED, small
from tests.core.harness import Session, tokens_of
from tests.core.oracle import Reads

PROMPT = tokens_of(1, 41)
SNAPKV = ",".join((RAGGED[0][:-1], "sparse_prefill_score_mode=probability,pool_kernel_size=3)"))
KVZIP = RAGGED[1]


def shared_rows(scores: list[np.ndarray], total: int, floor: int, ceiling: int) -> list[list[int]]:
    """Rows of each head, one after the other: every head's best `floor`, then the best of all that have room left.

    `scores` are those of each head's rows. Ties go to the lower head, then to the lower row.
    """
    ranked = [sorted(range(len(found)), key=lambda row, found=found: (-found[row], row)) for found in scores]
    kept = [order[:floor] for order in ranked]
    while sum(map(len, kept)) < total:
        heads = [h for h, order in enumerate(ranked) if len(kept[h]) < min(ceiling, len(order))]
        if not heads:
            break
        best = max(heads, key=lambda h: (scores[h][ranked[h][len(kept[h])]], -h))
        kept[best].append(ranked[best][len(kept[best])])
    return [sorted(rows) for rows in kept]


MOST = 12
values = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0])


@functools.partial(jax.jit, static_argnames=("first", "recent"))
def share(scores, lengths, total, floor, ceiling, first, recent):
    """Counts, and rows [heads, MOST]."""
    counts = eviction.head_budgets(scores, lengths, total, floor, ceiling, first=first, recent=recent)
    return counts, eviction.choose_counted_rows(scores, lengths, MOST, counts, first=first, recent=recent)


@given(
    heads=st.lists(st.lists(values, min_size=6, max_size=16), min_size=3, max_size=3),
    mean=st.integers(3, 5),
    floor=st.integers(1, 3),
    ceiling=st.integers(5, MOST),
    protected=st.sampled_from([(0, 0), (1, 2), (3, 0)]),
)
@settings(max_examples=150, deadline=None)
def test_counts_and_rows_are_the_best_of_all_heads(heads, mean, floor, ceiling, protected):
    capacity, (first, recent) = 20, protected
    scores = np.full((len(heads), capacity), np.nan, np.float32)
    lengths = np.array([len(found) for found in heads], np.int32)
    for h, found in enumerate(heads):
        scores[h, : len(found)] = found
    sure = [np.asarray(found, float) for found in heads]
    for found in sure:
        found[:first] = found[len(found) - recent :] = np.inf
    wanted = shared_rows(sure, len(heads) * mean, floor, ceiling)
    counts, rows = map(np.asarray, share(scores, lengths, len(heads) * mean, floor, ceiling, first, recent))
    assert counts.tolist() == [len(kept) for kept in wanted]
    assert [rows[h, :count].tolist() for h, count in enumerate(counts.tolist())] == wanted
    assert ((rows >= 0) & (rows < lengths[:, None])).all()


def test_a_head_that_nobody_attends_to_keeps_its_share():
    scores = jnp.zeros((2, 16)).at[0].set(1.0)
    counts = eviction.head_budgets(scores, jnp.int32(16), 10, 1, 15)
    assert counts.tolist() == [9, 1]
    assert eviction.head_budgets(scores, jnp.int32(16), 10, 2, 7).tolist() == [7, 3]


def bounds(budget: int) -> tuple[int, int]:
    return max(1, int(0.2 * budget)), int(1.5 * budget)


def check_layers(session: Session, scores: list[list[np.ndarray]], before: list[list[np.ndarray]], budget: int) -> bool:
    """`scores` [layer][head] of the rows at positions `before`: what stays is what the heads of a layer share.

    Returns whether any two heads keep different numbers of them.
    """
    geometry, uneven = session.geometry, False
    for layer in range(geometry.num_layers):
        wanted = shared_rows(scores[layer], geometry.num_kv_heads * budget, *bounds(budget))
        for head, rows in enumerate(wanted):
            found = session.positions(1, layer, head)
            np.testing.assert_array_equal(found, before[layer][head][rows])
            uneven |= len(found) != budget
    session.check()
    return uneven


def snapkv_scores(
    session: Session, reads: Reads, before: list[list[np.ndarray]], window: int
) -> list[list[np.ndarray]]:
    """What the last `window` queries think of the rows at positions `before`, protected ones included."""
    params, geometry, seen = session.method.params, session.geometry, len(reads.tokens)
    query_at, found = np.arange(seen - window, seen), []
    for layer, (q, k) in enumerate(reads.recompute()[1]):
        grouped = q.reshape(len(q), geometry.num_kv_heads, geometry.group_size, -1)[query_at]
        found.append([])
        for head, at in enumerate(before[layer]):
            votes = test_snapkv.votes_of(params, geometry.scale, grouped[:, head], k[at, head], query_at, at).mean(0)
            scores = np.full(len(at), np.inf)
            scores[params.sink_keep_tokens : len(at) - params.recent_keep_tokens] = test_snapkv.smooth(votes, 3, "max")
            found[-1].append(scores)
    return found


@pytest.mark.parametrize("storage", ["", "+fp8_kv"])
def test_heads_share_by_the_votes_of_the_last_queries(storage):
    """Also in a second turn, when heads hold different numbers of rows already."""
    name = SNAPKV + storage
    session = Session(name, params=small("snapkv"))
    reads, budget = Reads(session), session.method.params.budget
    geometry, uneven = session.geometry, False
    heads = [(layer, head) for layer in range(geometry.num_layers) for head in range(geometry.num_kv_heads)]
    for turn, prompt in enumerate((PROMPT, tokens_of(3, 7))):
        held = {of: session.positions(1, *of) if turn else np.zeros(0, int) for of in heads}
        now = np.arange(len(reads.tokens), len(reads.tokens) + len(prompt))
        session.prefill({1: prompt}, pieces=[3], first=not turn)
        reads.appended(prompt, held)
        before = [
            [np.concatenate([held[layer, head], now]) for head in range(geometry.num_kv_heads)]
            for layer in range(geometry.num_layers)
        ]
        uneven |= check_layers(session, snapkv_scores(session, reads, before, 4), before, budget)
        for token in tokens_of(4, 3):
            held = {of: session.positions(1, *of) for of in heads}
            session.decode([1], [token])
            reads.appended([token], held)
    assert uneven


@pytest.mark.parametrize("storage", ["", "+fp8_kv"])
def test_heads_share_by_what_repeats_the_prompt(storage):
    session = Session(KVZIP + storage, params=small("kvzip"), encode=test_kvzip.encode)
    params = test_kvzip.own(session)
    session.prefill({1: PROMPT}, pieces=[13, 25])
    scores = test_kvzip.wanted_scores(session, PROMPT)
    scores[..., : params.kvzip_protect_sink] = scores[..., len(PROMPT) - params.kvzip_protect_recent :] = np.inf
    before = [[np.arange(len(PROMPT))] * scores.shape[1]] * scores.shape[0]
    assert check_layers(session, [list(layer) for layer in scores], before, params.kvzip_token_budget)


@pytest.mark.parametrize("name", RAGGED)
def test_the_same_counts_beside_others(name):
    def lengths(session: Session, row: int) -> list:
        return session.rows[row].lengths.tolist()

    alone = Session(name, params=small(name))
    alone.prefill({1: PROMPT})
    session = Session(name, params=small(name), seed=3, poison=np.nan)
    session.prefill({2: tokens_of(5, 40), 4: PROMPT, 1: tokens_of(6, 9)}, pieces=[9, 20])
    assert lengths(session, 4) == lengths(alone, 1) != lengths(session, 2)
    for layer in range(2):
        for head in range(2):
            np.testing.assert_array_equal(session.positions(4, layer, head), alone.positions(1, layer, head))
    session.check()
