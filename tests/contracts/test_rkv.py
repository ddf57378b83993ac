"""Which rows R-KV keeps in a running model, against NumPy over queries and keys recomputed from the start."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.compositions import small
from tests.contracts.test_snapkv import Eviction, Watched, append
from tests.core.harness import Session, tokens_of
from tests.core.oracle import Reads
from tests.vectors import make_rkv_vectors as oracle

VARIANTS = [
    "rkv",
    "rkv+fp8_kv",
    "rkv(rkv_scope=per_layer,rkv_alpha=0.5)",
    "rkv(rkv_scope=per_head,rkv_kernel_size=1)",
    "rkv(rkv_compress_prompt=true)",
    "rkv(rkv_scope=per_head,rkv_compress_prompt=true)",
]


def layer_scores(params: Any, geometry, event: Eviction, q: np.ndarray, k: np.ndarray, layer: int) -> np.ndarray:
    """[kv_heads, rows that compete]; q and k are those of all tokens so far."""
    window = params.rkv_observation_tokens
    seen = min(window, event.observed)
    queries = q[event.seen - seen : event.seen].swapaxes(0, 1).astype(np.float64)
    keys = np.stack([k[at, head] for head, at in enumerate(event.before[layer])]).astype(np.float64)
    end = keys.shape[1] - window
    votes = oracle.importance(queries, keys, 0, end, params.rkv_kernel_size, geometry.scale)
    return oracle.joint(votes, oracle.redundancy(keys)[0][:, :end], params.rkv_alpha)


def wanted_rows(params: Any, event: Eviction, scores: list[np.ndarray], layer: int) -> np.ndarray:
    """Positions [kv_heads, kept] of one layer from the scores of all."""
    heads = scores[layer]
    if params.rkv_scope == "per_layer":
        heads = np.broadcast_to(heads.mean(0), heads.shape)
    elif params.rkv_scope == "global":
        heads = np.broadcast_to(sum(each.mean(0) for each in scores), heads.shape)
    count, window = params.budget - params.rkv_observation_tokens, params.rkv_observation_tokens
    rows = []
    for at, score in zip(event.before[layer], heads, strict=True):
        best = np.sort(np.argsort(-score, kind="stable")[:count])
        rows.append(at[[*best, *range(len(at) - window, len(at))]])
    return np.stack(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_stays_is_important_and_not_redundant(name):
    session = Watched(name, params=small(name))
    session.evictions = []
    reads, params = Reads(session), session.method.params
    repeated = tokens_of(1, 6)
    append(session, reads, [*repeated * 5, *tokens_of(2, 11)], pieces=[13, 25, 1, 1])  # many keys alike
    for token in tokens_of(3, 10):  # compacted at 4 and 8; the turn ends in the middle of an interval
        append(session, reads, [token])
    append(session, reads, tokens_of(4, 2), pieces=[1])  # fewer than vote
    for token in tokens_of(5, 5):
        append(session, reads, [token])
    times = [(event.phase, event.seen, event.before.shape[2], event.observed) for event in session.evictions]
    if params.rkv_compress_prompt:
        assert times == [
            ("prompt", 41, 41, 41),
            ("token", 45, 17, 4),
            ("token", 49, 17, 4),
            ("prompt", 53, 17, 2),
            ("token", 57, 17, 4),
        ]
    else:
        assert times == [("token", 45, 45, 4), ("token", 49, 17, 4), ("token", 57, 21, 4)]
    _, heads = reads.recompute()
    for event in session.evictions:
        scores = [layer_scores(params, session.geometry, event, q, k, i) for i, (q, k) in enumerate(heads)]
        for layer in range(len(heads)):
            wanted = wanted_rows(params, event, scores, layer)
            np.testing.assert_array_equal(event.after[layer], wanted, err_msg=f"{event.phase} at {event.seen}")


def test_queries_of_earlier_turns_do_not_vote():
    found = []
    for junk in (0.0, 1e3, np.nan):
        session = Session("rkv", params=small("rkv"))
        session.prefill({1: tokens_of(1, 41)})
        session.decode([1])
        aux = {key: jnp.full_like(array, junk) for key, array in session.state.row_aux.items()}
        session.state = session.state.replace(row_aux=aux)
        session.prefill({1: tokens_of(3, 3)}, first=False)
        for token in tokens_of(2, 4):
            session.decode([1], [token])
        assert session.rows[1].length == 13
        found.append(session.positions(1).tolist())
    assert found[0] == found[1] == found[2]


def test_where_nothing_can_be_due_no_queries_are_kept():
    session = Session("rkv", params=small("rkv") | {"decode_keep_tokens": 54})
    assert not session.state.row_aux
    session.prefill({1: tokens_of(1, 40)})
    for token in tokens_of(2, 20):
        session.decode([1], [token])
    assert session.rows[1].length == 60
    session.check()
