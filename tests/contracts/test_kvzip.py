"""What KVzip scores and keeps in a running model, against NumPy over queries and keys recomputed from the start."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Granularity
from sparsejax.methods import kvzip
from tests.contracts.compositions import small
from tests.core.harness import Session, tokens_of
from tests.core.oracle import Reads

PER_HEAD = "kvzip(kvzip_variant=per_head_uniform)"
VARIANTS = ["kvzip", "kvzip+fp8_kv", "kvzip(kvzip_query_reduction=max)", PER_HEAD, "kvzip+quest"]
PROMPT = tokens_of(1, 41)
INSTRUCTION = [7, 3]


def encode(text: str) -> list[int]:
    """A tokenizer of one text."""
    assert text == kvzip.Params.kvzip_instruction
    return INSTRUCTION


def start(name: str, **options: Any) -> Session:
    return Session(name, params=small(name), encode=encode, **options)


def replayed(session: Session, prompt: list[int]) -> list[tuple[list[int], int, int]]:
    """Tokens of each replay, and the prompt tokens [start, stop) that it repeats: from the definition."""
    params, found = own(session), []
    for begin in range(0, len(prompt), params.kvzip_score_chunk_size):
        stop = min(len(prompt), begin + params.kvzip_score_chunk_size)
        found.append((INSTRUCTION + prompt[max(0, begin - params.kvzip_prev_postfix_size) : stop], begin, stop))
    return found


def own(session: Session) -> kvzip.Params:
    members = session.method.members or (session.method,)
    return next(member.params for member in members if member.name == "kvzip")


def softmax(x: np.ndarray) -> np.ndarray:
    mass = np.exp(x - x.max(-1, keepdims=True))
    return mass / mass.sum(-1, keepdims=True)


def wanted_scores(session: Session, prompt: list[int]) -> np.ndarray:
    """float64 [layers, kv_heads, rows]."""
    geometry, params, length = session.geometry, own(session), len(prompt)
    heads, group = geometry.num_kv_heads, geometry.group_size
    scores = np.zeros((geometry.num_layers, heads, length))
    everything = {(layer, head): np.arange(length) for layer in range(geometry.num_layers) for head in range(heads)}
    for tokens, begin, stop in replayed(session, prompt):
        reads = Reads(session)
        reads.appended(prompt, {at: rows[:0] for at, rows in everything.items()})
        reads.appended(tokens, everything)
        for layer, (q, k) in enumerate(reads.recompute()[1]):
            end = length + len(tokens)
            q = q[length:end].astype(np.float64).reshape(len(tokens), heads, group, -1)
            logits = np.einsum("qhgd,shd->hgqs", q, k[:end].astype(np.float64)) * geometry.scale
            if params.kvzip_variant == "global_token":
                share = softmax(logits[..., :length])
                share = share.mean(2) if params.kvzip_query_reduction == "mean" else share.max(2)
                scores[layer] = np.maximum(scores[layer], share.max(1))
            else:
                seen = np.zeros((len(tokens), end), bool)
                seen[:, : params.kvzip_protect_sink] = seen[:, begin:stop] = True
                seen[:, length:] = np.tri(len(tokens), dtype=bool)
                share = softmax(np.where(seen, logits, -np.inf))[..., begin:stop]
                scores[layer, :, begin:stop] = share.max((1, 2))
    return scores


def wanted_rows(session: Session, scores: np.ndarray) -> np.ndarray:
    """Positions [layers, kv_heads, kept]."""
    params = own(session)
    if params.kvzip_variant == "global_token":
        scores = np.broadcast_to(scores.max((0, 1)), scores.shape)
    scores, length = scores.copy(), scores.shape[2]
    scores[..., : params.kvzip_protect_sink] = scores[..., length - params.kvzip_protect_recent :] = np.inf
    return np.sort(np.argsort(-scores, axis=2, kind="stable")[..., : params.kvzip_token_budget], axis=2)


def kept(session: Session, row: int) -> np.ndarray:
    geometry = session.geometry
    heads = range(geometry.num_kv_heads)
    return np.stack([np.stack([session.positions(row, l, h) for h in heads]) for l in range(geometry.num_layers)])


def kept_scores(session: Session, row: int) -> np.ndarray:
    """Scores move with the rows that a compaction keeps."""
    geometry, scores = session.geometry, np.asarray(session.state.page_aux[kvzip.SCORES])
    pages = [[session.head_pages(row, l, h) for h in range(geometry.num_kv_heads)] for l in range(geometry.num_layers)]
    return scores[np.asarray(pages)].reshape(*np.shape(pages)[:2], -1)[..., : session.rows[row].length]


@pytest.mark.parametrize("protect", [(1, 2), (0, 0)])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_stays_is_what_the_replays_attend_to(name, protect):
    knobs = small(name) | dict(zip(("kvzip_protect_sink", "kvzip_protect_recent"), protect, strict=True))
    session = Session(name, params=knobs, encode=encode)
    session.prefill({1: PROMPT}, pieces=[13, 25, 1])
    scores = wanted_scores(session, PROMPT)
    wanted = wanted_rows(session, scores)
    np.testing.assert_array_equal(kept(session, 1), wanted)
    at = np.take_along_axis(scores, wanted, axis=2)
    np.testing.assert_allclose(kept_scores(session, 1), at, rtol=1e-4, atol=1e-6)
    session.check()


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("name", ["kvzip", PER_HEAD])
def test_the_same_rows_stay_beside_others_and_on_other_pages(name, granularity):
    alone = start(name)
    alone.prefill({1: PROMPT})
    session = start(name, granularity=granularity, seed=5, poison=np.nan)
    prompts = {2: tokens_of(5, 40), 3: PROMPT, 1: tokens_of(6, 13), 4: tokens_of(7, 30)}
    session.prefill(prompts, pieces=[7, 16])
    np.testing.assert_array_equal(kept(session, 3), kept(alone, 1))
    for row, prompt in prompts.items():
        if len(prompt) > own(session).kvzip_token_budget:
            np.testing.assert_array_equal(kept(session, row), wanted_rows(session, wanted_scores(session, prompt)))
    session.check()


def test_the_first_token_is_that_of_the_dense_prompt():
    wanted = Session().prefill({1: PROMPT})[1]
    np.testing.assert_allclose(start("kvzip").prefill({1: PROMPT})[1], wanted, rtol=1e-5, atol=1e-5)


def test_a_replay_leaves_the_row_as_it_was():
    session = start("kvzip")
    session.prefill({1: PROMPT[:12]})  # nothing is due yet
    before = {name: session.stored(name, 1, 1, 1) for name in session.state.pools}
    counts, positions = np.asarray(session.state.counts), np.asarray(session.state.positions)
    lengths = np.asarray(session.state.lengths["sequence"])
    always = {"replays": lambda params, tokens: (5, 5), "replay_tokens": lambda params, prompt, index: prompt[:5]}
    session.method = dataclasses.replace(session.method, **always)
    session._replay(1, PROMPT[:12])
    for name, rows in before.items():
        np.testing.assert_array_equal(session.stored(name, 1, 1, 1), rows)
    np.testing.assert_array_equal(session.state.counts, counts)
    np.testing.assert_array_equal(session.state.positions, positions)
    np.testing.assert_array_equal(session.state.lengths["sequence"], lengths)
    session.check()


def test_what_is_appended_to_a_compacted_row_stays():
    session = start("kvzip")
    session.prefill({1: PROMPT})
    rows = kept(session, 1)
    for token in tokens_of(2, 3):
        session.decode([1], [token])
    session.prefill({1: tokens_of(3, 9)}, first=False)
    appended = np.broadcast_to(np.arange(41, 53), (*rows.shape[:2], 12))
    np.testing.assert_array_equal(kept(session, 1), np.concatenate([rows, appended], axis=2))
    session.check()


def test_an_instruction_must_have_tokens():
    method, _ = registry.resolve("kvzip")
    with pytest.raises(MethodError, match="kvzip_instruction"):
        kvzip.bind(method.params, lambda text: [])


def test_replays_cover_the_prompt():
    params = kvzip.bind(kvzip.Params(5, 4, 2), lambda text: [99])
    prompt = np.arange(10, dtype=np.int32)
    found = [kvzip.replay_tokens(params, prompt, i).tolist() for i in range(3)]
    assert found == [[99, 0, 1, 2, 3], [99, 2, 3, 4, 5, 6, 7], [99, 6, 7, 8, 9]]
    assert kvzip.replays(params, 10) == (5, 7, 5)
    assert kvzip.replays(params, 5) == ()
    assert kvzip.replays(params, 6) == (5, 5)
