"""Worked examples of importance less redundancy, of sentences and of schedules, by the functions that serve."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import redundancy, registry, sentences
from sparsejax.geometry import Geometry, Granularity
from sparsejax.methods import rkv, skipkv
from sparsejax.pallas_kernels.layout import POSITIONS
from tests.core.paging import evict_context, paged
from tests.vectors import make_rkv_vectors
from tests.vectors.make_vectors import HERE
from tests.vectors.test_vectors import cases, knobs

GRANULARITIES = [Granularity.SEQUENCE, Granularity.HEAD]


@pytest.mark.parametrize("name", make_rkv_vectors.MAKERS)
def test_the_generator_reproduces_the_files(name):
    assert make_rkv_vectors.MAKERS[name]() == (HERE / f"{name}.json").read_text("utf-8")


def context_of(method, k, q_window, granularity, *, next_position: int | None = None, positions=None):
    """What `keep_rows` sees of k [kv_heads, rows, dim], in pages, and q_window [q_heads, window, dim]."""
    heads, length, dim = k.shape
    geometry = Geometry(1, q_window.shape[0], heads, dim, 4, length + 9, 0.5, hidden_size=3)
    rows = np.concatenate([k, np.full((heads, 9, dim), np.nan)], axis=1).swapaxes(0, 1)[None]
    stored = paged(geometry, rows, rows, length, granularity=granularity)
    next_position = next_position or length
    window = q_window.shape[1]
    ring = np.zeros((window, q_window.shape[0], dim), np.float32)
    ring[np.arange(next_position - window, next_position) % window] = q_window.swapaxes(0, 1)
    name = f"{method.name}_queries"
    context = evict_context(method, stored, row_aux={name: jnp.asarray(ring)}, phase="token", observed=window)
    if positions is not None:
        pool, pages = np.array(stored.pools[POSITIONS]), stored.head_pages[0]
        for i, position in enumerate(positions):
            pool[pages[:, i // 4], i % 4] = position
        context = context._replace(pools={**stored.pools, POSITIONS: jnp.asarray(pool)})
    return context._replace(next_position=jnp.int32(next_position))


def rkv_layers(granularity, **more):
    case = cases("rkv")["global_selection"]
    params = knobs(case["params"]) | {"rkv_compression_interval": 2} | more
    method, _ = registry.resolve("rkv", params)
    k, q = (np.asarray(case["inputs"][name]) for name in ("k", "q_window"))
    return method, [context_of(method, *layer, granularity) for layer in zip(k, q, strict=True)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rkv_global_selection(granularity):
    expected = cases("rkv")["global_selection"]["expected"]
    method, contexts = rkv_layers(granularity)
    params, total = method.params, jnp.zeros((), jnp.float32)
    for context, layer in zip(contexts, expected["per_layer"], strict=True):
        assert context.kept == len(expected["keep"])
        votes = {"first": 0, "recent": 2, "kernel": params.rkv_kernel_size}
        found = redundancy.importance(context, context.row_aux[rkv.QUERIES], jnp.ones(2, bool), **votes)
        np.testing.assert_allclose(found[:, :8], layer["importance_pooled"], rtol=1e-5, atol=1e-6)
        found = redundancy.key_redundancy(context, params.tile(context.geometry))
        np.testing.assert_allclose(found[:, :8], layer["redundancy"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rkv.score_rows(params, context)[:, :8], layer["joint"], rtol=1e-5, atol=1e-6)
        total = total + method.survey(params, context)
    np.testing.assert_allclose(total[0, :8], expected["total_score"], rtol=1e-5, atol=1e-6)
    for context in contexts:
        assert method.keep_rows(params, context._replace(survey=total)).tolist() == [expected["keep"]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rkv_per_head_selection(granularity):
    method, contexts = rkv_layers(granularity, rkv_scope="per_head")
    assert method.survey is None
    expected = cases("rkv")["per_head_selection_layer0"]["expected"]
    assert method.keep_rows(method.params, contexts[0]).tolist() == expected["keep_per_kv_head"]


def test_rkv_per_layer_selection():
    method, contexts = rkv_layers(Granularity.SEQUENCE, rkv_scope="per_layer")
    assert method.survey is None
    for context, layer in zip(contexts, cases("rkv")["global_selection"]["expected"]["per_layer"], strict=True):
        scores = np.mean(layer["joint"], axis=0)
        best = sorted(np.argsort(-scores, kind="stable")[:4].tolist())
        assert method.keep_rows(method.params, context).tolist() == [[*best, 8, 9]]


@pytest.mark.parametrize("run", cases("rkv")["trigger_schedule"]["expected"]["runs"], ids=lambda run: run["prompt"])
def test_rkv_schedule(run):
    budget = {"sink_keep_tokens": 0, "recent_keep_tokens": 0, "decode_keep_tokens": run["budget"]}
    method, _ = registry.resolve("rkv", budget | {"rkv_compression_interval": run["interval"]})
    rows, events = np.full((1, 1), run["prompt"]), []
    assert not method.may_evict("prompt", run["prompt"])
    for step in range(1, run["steps"] + 1):
        rows = rows + 1
        kept = method.kept_after("token", rows) if method.may_evict("token", step) else rows
        if kept < rows:
            events.append([step, int(rows[0, 0])])
            rows = kept
    assert events == run["events_step_length"]
    assert rows.tolist() == [[run["final_length"]]]


def test_skipkv_segmentation():
    case = cases("skipkv")["segmentation"]
    params, expected = case["params"], case["expected"]
    shapes = (2, 4, 2), (2, 4, 3), (2, 3), (2, 3)
    state = sentences.Sentences(*(jnp.zeros(s, t) for s, t in zip(shapes, ("int32", "float32") * 2, strict=True)))
    closed = []
    for position, token in enumerate(case["inputs"]["generated_ids"], params["prompt_tokens"]):
        one = (jnp.asarray([value]) for value in (1, True, token, position))
        state = sentences.advance(
            state,
            *one,
            jnp.ones((1, 3)),
            delimiters=tuple(params["delimiter_ids"]),
            min_tokens=params["skipkv_sentence_min_tokens"],
            max_tokens=params["skipkv_sentence_max_tokens"],
        )
        start, count, number = state.open[1].tolist()
        if count == 0:
            long_enough = number > sum("span" in event for event in closed)
            closed.append({"close_at": position, "span" if long_enough else "discarded": [start, position + 1]})
    assert closed == expected["events"]
    assert state.spans[1].tolist() == expected["spans"]
    assert start == expected["open_start"]
    assert count == 1


def test_skipkv_sentence_redundancy():
    case = cases("skipkv")["sentence_redundancy"]
    hidden, threshold = (
        np.asarray(case["inputs"]["sentence_mean_hidden"]),
        case["params"]["skipkv_similarity_threshold"],
    )
    shapes = (2, 6, 2), (2, 6, 3), (2, 3), (2, 3)
    state = sentences.Sentences(*(jnp.zeros(s, t) for s, t in zip(shapes, ("int32", "float32") * 2, strict=True)))
    for position, mean in enumerate(np.repeat(hidden, 2, axis=0)):  # sentences of two tokens
        one = (jnp.asarray([value]) for value in (1, True, 0, position))
        sums = jnp.asarray(mean[None], jnp.float32)
        state = sentences.advance(state, *one, sums, delimiters=(9,), min_tokens=2, max_tokens=2)
    found = sentences.repeated(state.embeddings[1], state.open[1, 2], threshold)
    np.testing.assert_allclose(found[:5], case["expected"]["redundancy"], rtol=1e-5, atol=1e-6)


def skipkv_case(name: str, granularity):
    """The case's method and context, its request holding sentences that repeat each other as the case says."""
    case, first = cases("skipkv")[name], cases("skipkv")["window_importance"]
    inputs = first["inputs"]
    known = {field.name for field in dataclasses.fields(skipkv.Params)}
    params = {key: value for key, value in case["params"].items() if key in known}
    more = {"skipkv_compression_interval": 4, "skipkv_delimiter_ids": (9,), "skipkv_max_tracked_sentences": 6}
    method, _ = registry.resolve("skipkv", {"skipkv_observation_tokens": 2} | params | more)
    k, q = (np.asarray(inputs[name]) for name in ("k", "q_window"))
    context = context_of(method, k, q, granularity, next_position=16, positions=inputs["positions"])
    spans = np.zeros((6, 2), np.int32)
    spans[:3] = inputs["sentences"]
    embeddings, repeats = np.zeros((6, 3), np.float32), inputs["sentence_redundancy"]
    assert repeats[1] == 0
    # The first and the third are as close to a later one as they should be, and far from each other.
    embeddings[0], embeddings[1], embeddings[2] = (1, 0, 0), (-0.9, 0, -(0.19**0.5)), (0, 1, 0)
    for i, j in ((0, 3), (2, 4)):
        embeddings[j] = repeats[i] * embeddings[i] + (1 - repeats[i] ** 2) ** 0.5 * np.array([0, 0, 1])
    spans[3:5] = [[20, 21], [21, 22]]
    arrays = spans, embeddings, np.array([0, 0, 5], np.int32), np.zeros(3, np.float32)
    return method, context._replace(request_aux=dict(zip(skipkv.SENTENCES, map(jnp.asarray, arrays), strict=True)))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["window_importance", "step_importance_reference"])
def test_skipkv_importance(name, granularity):
    expected = cases("skipkv")[name]["expected"]
    method, context = skipkv_case(name, granularity)
    params, inside = method.params, slice(1, 11)
    assert context.kept == len(expected["keep_rows"])
    penalty = cases("skipkv")["window_importance"]["expected"]["penalty"]
    np.testing.assert_allclose(skipkv.row_penalties(params, context)[0, :14], penalty, rtol=1e-5, atol=1e-6)
    if params.skipkv_importance == "step":
        found = skipkv.step_importance(params, context)
        np.testing.assert_allclose(found[0, inside], expected["importance"], rtol=1e-5, atol=1e-6)
        found = skipkv.token_redundancy(skipkv.last_candidates(params, context))
        np.testing.assert_allclose(found, expected["token_redundancy_window"], rtol=1e-5, atol=1e-6)
    scores = skipkv.score_rows(params, context)
    np.testing.assert_allclose(scores[0, inside], expected["final_score"], rtol=1e-5, atol=1e-6)
    assert method.keep_rows(params, context).tolist() == [expected["keep_rows"]]


def test_every_case_is_known():
    assert set(cases("rkv")) == {"global_selection", "per_head_selection_layer0", "trigger_schedule"}
    left_out = {"steering_alpha"}  # activations are not steered in this version
    tested = {"segmentation", "sentence_redundancy", "window_importance", "step_importance_reference"}
    assert set(cases("skipkv")) == tested | left_out
