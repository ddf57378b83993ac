"""Worked examples of reconstruction scores, computed by the functions that serve."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import eviction, registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import ObserveContext
from sparsejax.methods import kvzip
from tests.core.paging import evict_context, paged
from tests.vectors import make_kvzip_vectors
from tests.vectors.test_vectors import HERE, cases

COUNT = 8  # places for queries of a replay; those past its end hold poison


def test_the_generator_reproduces_the_file():
    assert make_kvzip_vectors.kvzip() == (HERE / "kvzip.json").read_text("utf-8")


def test_every_case_is_known():
    assert set(cases("kvzip")) == {"global_token", "per_head_official_chunk_score", "ties_go_to_lower_position"}


def replay_context(rows, queries: np.ndarray, scores, num_rows: int, part: int = 0) -> ObserveContext:
    """What `observe` sees of a replay [q_heads, queries, dim] behind the first `num_rows` rows."""
    count = queries.shape[1]
    padded = np.full((1, COUNT, queries.shape[0], queries.shape[2]), np.nan, np.float32)
    padded[0, :count] = queries.swapaxes(0, 1)
    return ObserveContext(
        geometry=rows.geometry,
        phase="replay",
        layer=rows.layer,
        rows=jnp.ones(1, jnp.int32),
        queries=jnp.asarray(padded),
        num_valid=jnp.full(1, count, jnp.int32),
        positions=num_rows + jnp.arange(COUNT, dtype=jnp.int32)[None],
        view=rows.view._replace(lengths=jnp.full_like(rows.view.lengths, num_rows + count)),
        start=jnp.full_like(rows.view.lengths, num_rows),
        pools=rows.pools,
        names=rows.names,
        load_tile=rows.load_tile,
        page_aux={kvzip.SCORES: scores},
        row_aux={},
        part=jnp.full(1, part, jnp.int32),
    )


def fresh_scores(rows, num_rows: int):
    """Zeros where the row's tokens lie, as `on_write` leaves them, and poison elsewhere."""
    page_size = rows.geometry.page_size
    scores = np.full(rows.pools["positions"].shape, np.nan, np.float32)
    for row in range(num_rows):
        scores[rows.head_pages[0, :, row // page_size], row % page_size] = 0.0
    return jnp.asarray(scores)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_global_token(granularity):
    case = cases("kvzip")["global_token"]
    knobs, inputs, expected = case["params"], case["inputs"], case["expected"]
    sizes = ("kvzip_token_budget", "kvzip_score_chunk_size", "kvzip_prev_postfix_size")
    method, _ = registry.resolve("kvzip", {name: knobs[name] for name in sizes})
    params = kvzip.bind(method.params, lambda text: list(knobs["instruction_ids"]))
    prompt, keys = np.asarray(inputs["prompt_ids"], np.int32), np.asarray(inputs["k"])
    length = len(prompt)
    assert kvzip.replays(params, length) == tuple(len(replay["token_ids"]) for replay in inputs["replays"])
    assert kvzip.replays(params, knobs["kvzip_token_budget"]) == ()
    surveys = []
    for layer in range(len(keys)):
        k = keys[layer].swapaxes(0, 1)[None]  # [1, rows, kv_heads, dim]
        k = np.concatenate([k, np.full((1, COUNT, *k.shape[2:]), 7.0)], 1)  # keys of a replay, which must not count
        geometry = Geometry(2, 4, k.shape[2], k.shape[3], 4, 16, knobs["softmax_scale"])
        rows = paged(geometry, k, k, length + COUNT, layer=layer, granularity=granularity)
        scores = fresh_scores(rows, length)
        for index, replay in enumerate(inputs["replays"]):
            np.testing.assert_array_equal(kvzip.replay_tokens(params, prompt, index), replay["token_ids"])
            context = replay_context(rows, np.asarray(replay["q"])[layer], scores, length)
            scores = kvzip.observe(params, context)[0][kvzip.SCORES]
        view = rows.view._replace(lengths=jnp.full_like(rows.view.lengths, length))
        context = evict_context(method, rows, page_aux={kvzip.SCORES: scores})
        context = context._replace(view=view, length=jnp.int32(length), kept=knobs["kvzip_token_budget"])
        surveys.append(kvzip.survey(params, context))
    survey = jnp.stack(surveys).max(0)
    np.testing.assert_allclose(survey[:length], expected["score"], rtol=1e-5, atol=1e-6)
    assert kvzip.keep_rows(params, context._replace(survey=survey)).tolist() == [expected["keep"]]


def test_official_chunk_score():
    """Two sinks, one chunk of four rows and its replay; the file's rows past the chunk are not read."""
    case = cases("kvzip")["per_head_official_chunk_score"]
    inputs, expected, scale = case["inputs"], case["expected"], case["params"]["softmax_scale"]
    k, behind = (np.asarray(inputs[name], np.float32) for name in ("k_layer", "k_replay"))
    q = np.asarray(inputs["q_replay"], np.float32).reshape(len(k), -1, *behind.shape[1:])
    sink, (start, end) = case["params"]["sink"], case["params"]["chunk"]
    ones = functools.partial(np.ones, dtype=bool)
    for head in range(len(k)):
        keys = (k[None, head, start:end], k[None, head, :sink], behind[None, head])
        seen = ones((1, end - start)), ones((1, sink)), ones((1, q.shape[2]))
        found = kvzip.attention_shares(*(jnp.asarray(x) for x in (q[None, head], *keys, *seen)), scale)
        np.testing.assert_allclose(found[0], expected["score_per_kv_head"][head], rtol=1e-5, atol=1e-6)
        best = eviction.choose_rows(jnp.pad(found, ((0, 0), (0, 4))), jnp.int32(end - start), 2)
        assert (best + start).tolist() == [expected["top2_per_kv_head"][head]]


def test_ties_go_to_the_lower_position():
    case = cases("kvzip")["ties_go_to_lower_position"]
    scores = np.asarray([case["inputs"]["score"]], np.float32)
    found = eviction.choose_rows(jnp.pad(scores, ((0, 0), (0, 2))), jnp.int32(scores.shape[1]), 4)
    assert found.tolist() == [case["expected"]["keep"]]
