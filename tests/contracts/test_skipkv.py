"""Which rows SkipKV keeps in a running model, against NumPy over queries, keys and hidden states recomputed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.methods import skipkv
from tests.contracts.compositions import small
from tests.contracts.test_snapkv import Eviction, Watched, append
from tests.core.answers import Answer
from tests.core.harness import TINY, Session, tokens_of
from tests.core.oracle import Reads
from tests.vectors import make_rkv_vectors as oracle
from tests.vectors.make_vectors import softmax

VARIANTS = [
    "skipkv",
    "skipkv+fp8_kv",
    "skipkv(head_mode=per_kv_head,skipkv_sentence_score_weight=0.01,skipkv_sentence_embedding_layer=-1)",
    "skipkv(skipkv_enable_sentence_scoring=false,skipkv_mix_lambda=0.7)",
    "skipkv(skipkv_importance=step)",
    "skipkv(skipkv_importance=step,skipkv_enable_sentence_scoring=false,skipkv_similarity_threshold=0)",
]


def window_scores(params: Any, scale: float, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q [q_heads, queries, dim], k [kv_heads, rows, dim] -> [1 or kv_heads, candidates]."""
    inside = slice(params.sink_keep_tokens, k.shape[1] - params.recent_keep_tokens)
    votes = oracle.importance(q, k, inside.start, inside.stop, params.skipkv_kernel_size, scale)
    scores = oracle.joint(votes, oracle.redundancy(k)[0][:, inside], params.skipkv_mix_lambda)
    return scores if params.head_mode == "per_kv_head" else scores.mean(0, keepdims=True)


def segment_losses(params: Any, rows: np.ndarray) -> np.ndarray:
    """[candidates of the window, channels] -> what each loses because a later segment is like its own."""
    size = params.skipkv_segment_size
    means = oracle.unit(np.stack([rows[i : i + size].mean(0) for i in range(0, len(rows), size)]), floor=1e-6)
    losses = []
    for i, mean in enumerate(means):
        cosines = [float(mean @ later) for later in means[i + 1 :]]
        losses += [max((c for c in cosines if c >= params.skipkv_similarity_threshold), default=0.0)] * size
    return np.array(losses[: len(rows)])


def step_scores(params: Any, scale: float, q: np.ndarray, k: np.ndarray, penalised: bool) -> np.ndarray:
    """As `window_scores`, from the last query alone."""
    first, end = params.sink_keep_tokens, k.shape[1] - params.recent_keep_tokens
    logits = np.einsum("hd,hsd->hs", q[:, -1], np.repeat(k, len(q) // len(k), axis=0)) * scale
    scores = softmax(logits[:, first:]).max(0)[: end - first]
    width = min(params.skipkv_redundancy_window, end - first)
    rows = k[:, end - width : end].swapaxes(0, 1).reshape(width, -1)
    scores[-width:] -= params.skipkv_alpha * oracle.token_redundancy(rows, 0.8)
    if not penalised:
        scores[-width:] -= segment_losses(params, rows)
    return scores[None]


def wanted_rows(params: Any, scale: float, event: Eviction, q, k, answer: Answer, layer: int) -> np.ndarray:
    """Positions [kv_heads, kept] of one layer."""
    first, recent = params.sink_keep_tokens, params.recent_keep_tokens
    queries = q[event.seen - min(params.skipkv_observation_tokens, event.observed) : event.seen]
    queries = queries.swapaxes(0, 1).astype(np.float64)
    keys = np.stack([k[at, head] for head, at in enumerate(event.before[layer])]).astype(np.float64)
    losses = np.zeros((len(keys), keys.shape[1]))
    if params.skipkv_enable_sentence_scoring:
        losses = np.array([[answer.penalty(int(p)) for p in at] for at in event.before[layer]])
    losses = losses[:, first : keys.shape[1] - recent]
    if params.skipkv_importance == "window":
        scores = window_scores(params, scale, queries, keys)
    else:
        scores = step_scores(params, scale, queries, keys, bool((losses > 0).any()))
    scores = scores - params.skipkv_sentence_score_weight * losses
    rows = []
    for at, score in zip(event.before[layer], scores, strict=True):
        best = np.sort(np.argsort(-score, kind="stable")[: params.decode_keep_tokens]) + first
        rows.append(at[[*range(first), *best, *range(len(at) - recent, len(at))]])
    return np.stack(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_stays_is_what_no_later_sentence_repeats(name):
    session = Watched(name, params=small(name))
    session.evictions = []
    reads, params, generated = Reads(session), session.method.params, []
    for turn, (prompt, count) in enumerate(((31, 16), (3, 10))):
        append(session, reads, tokens_of(10 + turn, prompt), pieces=[13, 1])
        for token in tokens_of(20 + turn, count):
            generated.append(len(reads.tokens))
            append(session, reads, [token])
    times = [(event.phase, event.seen, event.before.shape[2], event.observed) for event in session.evictions]
    assert times == [
        ("token", 32, 32, 1),  # the prompt was too long: compacted after its first token, whose query votes alone
        ("token", 38, 19, 6),
        ("token", 44, 19, 6),
        ("token", 51, 20, 1),
        ("token", 57, 19, 6),
    ]
    _, heads = reads.recompute()
    layer = range(len(heads))[params.skipkv_sentence_embedding_layer]
    hidden = reads.hidden()[layer].astype(np.float64)
    limits = params.skipkv_sentence_min_tokens, params.skipkv_sentence_max_tokens, params.skipkv_max_tracked_sentences
    answer = Answer(params.skipkv_delimiter_ids, *limits, params.skipkv_similarity_threshold)
    penalised = 0
    for position in generated:
        answer.add(reads.tokens[position], position, hidden[position])
        for event in session.evictions:
            if event.seen != position + 1:
                continue
            penalised += sum(answer.penalty(int(p)) > 0 for p in event.before[0, 0])
            for layer, (q, k) in enumerate(heads):
                wanted = wanted_rows(params, session.geometry.scale, event, q, k, answer, layer)
                np.testing.assert_array_equal(event.after[layer], wanted, err_msg=f"at {event.seen}")
    assert penalised or not params.skipkv_enable_sentence_scoring
    assert answer.closed > params.skipkv_max_tracked_sentences  # the oldest were forgotten


def test_without_delimiters_there_are_no_sentences():
    found = []
    for knobs in ({"skipkv_delimiter_ids": ()}, {"skipkv_enable_sentence_scoring": False}, {}):
        session = Session("skipkv", params=small("skipkv") | knobs)
        session.prefill({1: tokens_of(1, 31)})
        for token in tokens_of(2, 16):
            session.decode([1], [token])
        found.append(session.positions(1).tolist())
        arrays = session.state.request_aux
        # Memory is planned before the tokenizer says what ends a sentence.
        assert set(arrays) == (set() if "skipkv_enable_sentence_scoring" in knobs else set(skipkv.SENTENCES))
        assert any(jnp.any(array) for array in arrays.values()) == (not knobs)
    assert found[0] == found[1]


def test_delimiters_come_from_the_tokenizer():
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    method, _ = registry.resolve("skipkv")
    bound = method.bind(method.params, encode)
    assert bound.skipkv_delimiter_ids == (10,)
    assert method.bind(bound, lambda text: [1]) == bound
    merged = method.bind(method.params, lambda text: [5, len(text)] if text != "\n" else [])
    assert merged.skipkv_delimiter_ids == (2, 3)
    off, _ = registry.resolve("skipkv", {"skipkv_enable_sentence_scoring": False})
    assert off.bind(off.params, encode) == off.params


@pytest.mark.parametrize("value", [13, "13", (13,), [13]])
def test_delimiters_may_be_given(value):
    assert registry.resolve("skipkv", {"skipkv_delimiter_ids": value})[0].params.skipkv_delimiter_ids == (13,)
    assert registry.resolve("skipkv(skipkv_delimiter_ids=13;198)")[0].params.skipkv_delimiter_ids == (13, 198)


def test_hidden_states_are_those_after_the_layer():
    for layer, index in ((-1, TINY.num_layers - 1), (0, 0), (1, 1)):
        method, _ = registry.resolve("skipkv", {"skipkv_sentence_embedding_layer": layer})
        assert method.hidden_layer(method.params, TINY.num_layers) == index


def test_a_new_owner_has_no_sentences():
    session = Session("skipkv", params=small("skipkv"))
    session.prefill({1: tokens_of(1, 9)})
    for token in tokens_of(2, 12):
        session.decode([1], [token])
    assert int(session.state.request_aux["skipkv_open"][1, 2]) > 0
    session.release(1)
    session.prefill({1: tokens_of(3, 9)})
    assert all(not jnp.any(session.state.request_aux[name][1]) for name in skipkv.SENTENCES)
