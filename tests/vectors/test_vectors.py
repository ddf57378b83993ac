"""Every array of the worked examples, computed by the functions that serve."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import eviction, registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import Written
from sparsejax.methods import quest, snapkv
from sparsejax.pallas_kernels import api, reference
from sparsejax.pallas_kernels.layout import PageView, explicit_view
from sparsejax.storages import fp8_kv
from tests.core.harness import Session
from tests.core.paging import evict_context, paged
from tests.vectors import make_vectors

HERE = pathlib.Path(__file__).parent
GRANULARITIES = list(Granularity)


def load(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))


def cases(name: str) -> dict[str, dict]:
    return {case["name"]: case for case in load(name)["cases"]}


def knobs(params: dict) -> dict:
    return {name: value for name, value in params.items() if name != "softmax_scale"}


@pytest.mark.parametrize("name", make_vectors.MAKERS)
def test_the_generator_reproduces_the_files(name):
    assert make_vectors.MAKERS[name]() == (HERE / f"{name}.json").read_text("utf-8")


# Sinks and recent rows


def kept_rows(method, rows, **context) -> list[list[int]]:
    length = int(rows.view.lengths[0, 0])
    if method.keep_count(method.params, "prompt", length) == length:  # the engine compacts nothing
        return [list(range(length))]
    return np.asarray(method.keep_rows(method.params, evict_context(method, rows, **context))).tolist()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["prompt_compaction", "shorter_than_budget", "regions_overlap"])
def test_streamingllm_keeps(name, granularity):
    case = cases("streamingllm")[name]
    method, _ = registry.resolve("streamingllm", case["params"])
    length = case["inputs"]["n"]
    geometry = Geometry(1, 2, 2, 4, 4, 16, 0.5)
    rows = paged(geometry, np.ones((1, length, 2, 4)), np.ones((1, length, 2, 4)), length, granularity=granularity)
    assert kept_rows(method, rows) == [case["expected"]["keep"]]


@pytest.mark.parametrize("name", ["decode_trace_ratio_2.0", "decode_trace_ratio_1.0"])
def test_streamingllm_decode_trace(name):
    case = cases("streamingllm")[name]
    session = Session("streamingllm", params=case["params"])
    prompt = case["inputs"]["prompt_tokens"]
    for entry in case["expected"]["trace"]:
        if entry["step"] == 0:
            session.prefill({1: list(range(1, prompt + 1))})
        else:
            before = session.rows[1].length
            session.decode([1])
            assert session.method.rows_read(before + 1, session.geometry) == entry["rows_read"]
        assert session.rows[1].length == entry["length"]
        for layer in range(session.geometry.num_layers):
            assert session.positions(1, layer, 1).tolist() == entry["positions"]


def test_every_streamingllm_case_is_known():
    elsewhere = {"reindex_rotary_positions"}  # tests/contracts/test_streamingllm.py
    tested = {"prompt_compaction", "shorter_than_budget", "regions_overlap"}
    tested |= {"decode_trace_ratio_2.0", "decode_trace_ratio_1.0"}
    assert set(cases("streamingllm")) == tested | elsewhere


# Votes of an observation window


def snapkv_rows(case, granularity):
    k = np.asarray(case["inputs"]["k"]).swapaxes(0, 1)[None]  # [1, rows, kv_heads, dim]
    queries = np.asarray(case["inputs"]["q_window"], np.float32).swapaxes(0, 1)  # [window, q_heads, dim]
    length, window = k.shape[1], len(queries)
    geometry = Geometry(1, queries.shape[1], k.shape[2], k.shape[3], 4, 24, case["params"]["softmax_scale"])
    ring = np.zeros_like(queries)
    ring[np.arange(length - window, length) % window] = queries
    return paged(geometry, k, k, length, granularity=granularity), {snapkv.QUERIES: jnp.asarray(ring)}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", [name for name in cases("snapkv") if name != "score_only"])
def test_snapkv_window(name, granularity):
    case, expected = cases("snapkv")[name], cases("snapkv")[name]["expected"]
    method, _ = registry.resolve("snapkv", knobs(case["params"]))
    params = method.params
    rows, row_aux = snapkv_rows(case, granularity)
    context = evict_context(method, rows, row_aux=row_aux, observed=12)
    inside = slice(params.sink_keep_tokens, 12 - params.recent_keep_tokens)
    smooth = snapkv.score_rows(params, context)[:, inside]
    votes = snapkv.score_rows(dataclasses.replace(params, pool_kernel_size=1), context)[:, inside]
    if params.sparse_prefill_score_mode == "logits":
        votes, smooth = votes / rows.geometry.scale, smooth / rows.geometry.scale  # the file's logits are unscaled
    if params.head_mode == "shared":
        np.testing.assert_allclose(votes[0], expected["candidate_score"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(smooth[0], expected["pooled"], rtol=1e-5, atol=1e-6)
        kept = [expected["keep"]]
    else:
        np.testing.assert_allclose(smooth, expected["group_mean_score"], rtol=1e-5, atol=1e-6)
        kept = expected["keep_per_kv_head"]
    assert kept_rows(method, rows, row_aux=row_aux, observed=12) == kept


def test_snapkv_score_only():
    case = cases("snapkv")["score_only"]
    method, _ = registry.resolve("snapkv", case["params"])
    scores = np.full((1, 20), -np.inf, np.float32)
    scores[0, 1:7] = case["inputs"]["candidate_score"]
    kept = method.keep_count(method.params, "prompt", case["inputs"]["n"])
    rows = eviction.choose_rows(jnp.asarray(scores), jnp.int32(8), kept, first=1, recent=1)
    assert rows.tolist() == [case["expected"]["keep"]]


# Page bounds


QUEST = load("quest")


def quest_geometry() -> Geometry:
    inputs = QUEST["inputs"]
    return Geometry(
        num_layers=1,
        num_q_heads=inputs["num_heads"],
        num_kv_heads=inputs["num_kv_heads"],
        head_dim=inputs["head_dim"],
        page_size=inputs["page_size"],
        max_model_len=len(inputs["page_table"][0]) * inputs["page_size"],
        scale=inputs["softmax_scale"],
    )


def quest_method(scope: str = "kv_head"):
    budget = QUEST["inputs"]["token_budget"]
    params = {"quest_chunk_size": 4, "quest_skip_layers": 0, "sink_keep_tokens": 0, "decode_keep_tokens": budget}
    return registry.resolve("quest", params | {"recent_keep_tokens": 0, "quest_select_scope": scope})[0]


def quest_rows():
    """The two sequences, each [rows, kv_heads, dim] of keys and values."""
    inputs = QUEST["inputs"]
    k_pages, v_pages = np.asarray(inputs["k_pages"]), np.asarray(inputs["v_pages"])
    sequences = []
    for table, length in zip(inputs["page_table"], inputs["context_lens"], strict=True):
        used = [page for page in table if page >= 0]
        flat = [pages[used].reshape(-1, *pages.shape[2:])[:length] for pages in (k_pages, v_pages)]
        sequences.append(flat)
    longest = max(inputs["context_lens"])
    padded = [[np.pad(x, ((0, longest - len(x)), (0, 0), (0, 0))) for x in pair] for pair in sequences]
    return np.stack([k for k, _ in padded]), np.stack([v for _, v in padded])


def write_bounds(method, rows, keys, starts, counts, page_aux, phase="chunk"):
    """Runs `on_write` for keys [batch, rows, kv_heads, dim] at row indices starts .. starts + counts."""
    geometry = rows.geometry
    step = np.arange(max(counts))
    index = np.asarray(starts)[:, None] + step[None]
    valid = step[None] < np.asarray(counts)[:, None]
    index = np.where(valid, index, 0)
    batch = np.arange(len(counts))[:, None]
    head_pages = np.asarray(rows.head_pages).swapaxes(1, 2)[batch, index // geometry.page_size]
    written = Written(
        phase=phase,
        rows=jnp.arange(1, len(counts) + 1, dtype=jnp.int32),
        layer=jnp.int32(0),
        keys=jnp.asarray(np.where(valid[:, :, None, None], keys[batch, index], np.nan), jnp.float32),
        queries=None,
        positions=jnp.asarray(index, jnp.int32),
        head_pages=jnp.asarray(np.where(valid[:, :, None], head_pages, 0)),
        offsets=jnp.asarray(index % geometry.page_size, jnp.int32)[:, :, None],
        num_valid=jnp.asarray(counts, jnp.int32),
    )
    return dict(method.on_write(method.params, geometry, page_aux, {}, written)[0])


def stale_bounds(rows):
    shape = (rows.pools["k"].shape[0], rows.geometry.head_dim)
    return {quest.MIN: jnp.full(shape, -1e9, jnp.float32), quest.MAX: jnp.full(shape, 1e9, jnp.float32)}


@pytest.fixture(scope="module", params=[(1, "token"), (5, "chunk"), (23, "chunk")], ids=["tokens", "uneven", "whole"])
def quest_pages(request):
    """The sequences in scrambled pages, their bounds written token by token, in uneven chunks, or at once."""
    size, phase = request.param
    method, (k, v) = quest_method(), quest_rows()
    lengths = QUEST["inputs"]["context_lens"]
    rows = paged(quest_geometry(), k, v, lengths, seed=size)
    page_aux = stale_bounds(rows)
    for start in range(0, max(lengths), size):
        counts = [max(0, min(size, length - start)) for length in lengths]
        page_aux = write_bounds(method, rows, k, [start] * len(lengths), counts, page_aux, phase)
    return rows, page_aux


def chosen_columns(scores, lengths, **sizes):
    """Columns instead of pages: `api.select_pages` over pages that are numbered by their columns."""
    batch, heads, columns = scores.shape
    table = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (batch, 1, columns))
    view = PageView(table, 1, jnp.zeros(heads, jnp.int32), lengths)
    chosen = api.select_pages(scores, view, page_size=4, **sizes)
    return chosen.table, chosen.lengths


def test_quest_bounds(quest_pages):
    rows, page_aux = quest_pages
    for r, expected in enumerate(QUEST["expected"]["rows"]):
        used = QUEST["inputs"]["page_table"][r][: expected["num_pages"]]
        pages = np.asarray(rows.head_pages)[r, :, : len(used)].T
        np.testing.assert_array_equal(page_aux[quest.MAX][pages], np.asarray(QUEST["expected"]["page_max"])[used])
        np.testing.assert_array_equal(page_aux[quest.MIN][pages], np.asarray(QUEST["expected"]["page_min"])[used])


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_quest_selection(quest_pages, scope):
    rows, page_aux = quest_pages
    geometry, method = rows.geometry, quest_method(scope)
    params = method.params
    query = jnp.asarray(QUEST["inputs"]["query"], jnp.float32)
    low, high = page_aux[quest.MIN], page_aux[quest.MAX]
    # One score per query head: each query head as a KV head of its own.
    per_head = explicit_view(jnp.repeat(rows.head_pages, geometry.group_size, axis=1), rows.view.lengths)
    each = api.page_scores(query, low, high, per_head, page_size=4)
    scores = api.page_scores(query, low, high, rows.view, page_size=4)
    chosen, read = chosen_columns(
        scores,
        rows.view.lengths,
        num_scored=params.scored_pages(geometry),
        width=params.view_pages(geometry),
        budget=params.budget,
        shared=scope == "shared",
    )
    assert params.scored_pages(geometry) + 1 == QUEST["inputs"]["page_budget_including_last"]
    context = quest.SelectContext(geometry, "selector", rows.layer, query, rows.view, page_aux, None, None)
    selection = quest.select(params, context)
    out, _ = api.decode_attention(query, rows.pools, rows.names, selection.view, **rows.how)
    dense, _ = api.decode_attention(query, *rows.pages, **rows.how)
    for r, expected in enumerate(QUEST["expected"]["rows"]):
        pages, wanted = expected["num_pages"], expected[scope]
        np.testing.assert_allclose(each[r, :, :pages], expected["query_head_page_scores"], rtol=1e-5, atol=1e-5)
        found = scores[r, :, : pages - 1]
        found = found.max(0, keepdims=True) if scope == "shared" else found
        np.testing.assert_allclose(found, wanted["scores_excluding_last_page"], rtol=1e-5, atol=1e-5)
        logical, tokens = wanted["selected_logical_pages"], wanted["view_tokens"]
        for head in range(geometry.num_kv_heads):
            of = head % len(logical)
            assert chosen[r, head, : len(logical[of])].tolist() == logical[of]
            assert int(read[r, head]) == tokens[of]
            # Physical pages differ from the file's by our own scrambling: compare through the table.
            table = QUEST["inputs"]["page_table"][r]
            assert wanted["selected_physical_pages"][of] == [table[c] for c in logical[of]]
            physical = selection.view.head_pages(0, selection.view.table.shape[2])[r, head, : len(logical[of])]
            assert physical.tolist() == [int(rows.head_pages[r, head, c]) for c in logical[of]]
        assert expected["dense_fallback"] == (int(read[r, 0]) == QUEST["inputs"]["context_lens"][r])
        np.testing.assert_allclose(out[r], wanted["output"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dense[r], expected["dense_output"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case", QUEST["tie_cases"], ids=["signed zeros and equal pages", "signed zeros", "few candidates"]
)
def test_quest_ties(case):
    # Masked pages are always those past a row's end, so the finite scores come first here.
    scores = np.asarray([float(score) for score in case["scores"]], np.float32)
    finite = np.flatnonzero(np.isfinite(scores))
    columns = len(finite) + 1
    padded = np.full((1, 1, 8), np.nan, np.float32)
    padded[0, 0, : len(finite)] = scores[finite]
    count = case["k"]
    lengths = jnp.full((1, 1), columns * 4, jnp.int32)
    chosen, read = chosen_columns(jnp.asarray(padded), lengths, num_scored=count, width=count + 1, budget=1)
    wanted = [int(np.searchsorted(finite, i)) for i in case["selected"]] + [columns - 1]
    assert chosen[0, 0, : len(wanted)].tolist() == wanted
    assert int(read[0, 0]) == 4 * len(wanted)


def test_quest_append_and_reuse(quest_pages):
    rows, page_aux = quest_pages
    case, method = QUEST["append_case"], quest_method()
    keys = np.zeros((2, 24, 2, 4), np.float32)
    keys[case["row"], case["position"]] = case["new_key"]
    page = np.asarray(rows.head_pages)[case["row"], :, case["position"] // 4]
    after = write_bounds(method, rows, keys, [0, case["position"]], [0, 1], page_aux, "token")
    np.testing.assert_array_equal(after[quest.MAX][page], case["page_max_after"])
    np.testing.assert_array_equal(after[quest.MIN][page], case["page_min_after"])
    keys[case["row"], 8] = case["new_key"]  # the page's new owner opens it
    for phase in ("token", "chunk"):
        reused = write_bounds(method, rows, keys, [0, 8], [0, 1], after, phase)
        np.testing.assert_array_equal(reused[quest.MAX][page], case["after_free_and_reuse_at_slot0"]["page_max"])
        np.testing.assert_array_equal(reused[quest.MIN][page], case["after_free_and_reuse_at_slot0"]["page_min"])


# 8-bit floats


FP8 = load("fp8_kv")


def codes_of(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def test_fp8_codes():
    expected = FP8["expected"]
    x = jnp.asarray(expected["scalar_inputs"], jnp.float32)
    stored = fp8_kv.quantise(x, jnp.ones_like(x))
    np.testing.assert_array_equal(codes_of(stored), expected["scalar_codes"])
    np.testing.assert_array_equal(fp8_kv.dequantise(stored, jnp.ones_like(x)), expected["scalar_values"])
    every = fp8_kv.dequantise(jnp.arange(0x7F, dtype=jnp.uint8), jnp.float32(1))
    np.testing.assert_array_equal(every, expected["nonnegative_code_values"])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("policy", FP8["expected"]["policies"])
def test_fp8_policy(policy, granularity, tmp_path):
    inputs, expected = FP8["inputs"], FP8["expected"]["policies"][policy]
    geometry = Geometry(1, 4, 2, 4, 4, 8, inputs["softmax_scale"])
    if policy in ("unit", "dynamic_token_head"):
        params = fp8_kv.Params(fp8_kv_scale_mode=policy.partition("_")[0])
    else:
        scales = [(expected["key_scale"][0], expected["value_scale"][0])]
        path = tmp_path / "scales.json"
        path.write_text(json.dumps(fp8_kv.scale_file(scales, "static", "model", "hash")))
        params = fp8_kv.Params("static", str(path))
    storage = fp8_kv.build(params)
    k, v = (jnp.asarray(inputs[name], jnp.float32)[None] for name in ("key", "value"))
    length = k.shape[1]
    payload = storage.encode(storage.params, geometry, jnp.int32(0), k, v)
    for short, name in (("k", "key"), ("v", "value")):
        np.testing.assert_array_equal(codes_of(payload[short][0]), expected[f"{name}_codes"])
        if policy == "dynamic_token_head":
            np.testing.assert_allclose(payload[f"{short}_scale"][0], expected[f"{name}_scale"], rtol=1e-6)
    rows = paged(geometry, k, v, length, storage=storage, granularity=granularity)
    pages = np.asarray(rows.head_pages)
    tiles = {name: rows.pools[name][pages].reshape(1, 2, 8, *rows.pools[name].shape[2:]) for name in rows.names}
    keys, values = rows.load_tile(tiles, rows.layer)
    for found, name in ((keys, "key"), (values, "value")):
        found = np.moveaxis(np.asarray(found), 1, 2)[0, :length]
        np.testing.assert_allclose(found, expected[f"{name}_dequant"], rtol=1e-5, atol=1e-5)
    query = jnp.asarray(inputs["query"], jnp.float32)[None]
    out, _ = api.decode_attention(query, *rows.pages, **rows.how)
    np.testing.assert_allclose(out[0], expected["output"], rtol=1e-5, atol=1e-5)


def test_fp8_dense_output():
    inputs = FP8["inputs"]
    k, v = (jnp.asarray(inputs[name], jnp.float32)[None] for name in ("key", "value"))
    rows = paged(Geometry(1, 4, 2, 4, 4, 8, inputs["softmax_scale"]), k, v, k.shape[1])
    query = jnp.asarray(inputs["query"], jnp.float32)[None]
    for attention in (api.decode_attention, reference.decode_attention):
        out, _ = attention(query, *rows.pages, **rows.how)
        np.testing.assert_allclose(out[0], FP8["expected"]["dense_output"], rtol=1e-5, atol=1e-5)
