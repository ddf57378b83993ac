"""Every array of the worked examples of accumulated attention, computed by the functions that serve."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import accumulated_scores, registry
from sparsejax.accumulated_scores import SCORED, SCORES
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import ObserveContext, Written
from tests.core.harness import Session, tokens_of
from tests.core.paging import evict_context, paged
from tests.vectors import make_h2o_vectors
from tests.vectors.test_vectors import HERE, cases

GRANULARITIES = list(Granularity)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("name", make_h2o_vectors.MAKERS)
def test_the_generator_reproduces_the_files(name):
    assert make_h2o_vectors.MAKERS[name]() == (HERE / f"{name}.json").read_text("utf-8")


class Request:
    """One request in one layer: keys [kv_heads, rows, dim] in scrambled pages, beside them scores on poisoned ones."""

    def __init__(self, composition: str, params: dict, granularity: Granularity, kv_heads: int, dim: int) -> None:
        known = registry.method_params()
        knobs = {knob: value for knob, value in params.items() if knob in known}
        self.method, _ = registry.resolve(composition, knobs, used=set())
        self.scale, self.granularity = params["softmax_scale"], granularity
        self.keys, self.scores = np.zeros((kv_heads, 0, dim)), np.zeros(0)

    def append(self, q, k, phase: str) -> np.ndarray:
        """Stores new rows and lets their queries [q_heads, queries, dim] look: the scores of all rows."""
        q, k = np.asarray(q), np.asarray(k)
        start, new = self.keys.shape[1], k.shape[1]
        self.keys = np.concatenate([self.keys, k], axis=1)
        rows = self.rows(len(q))
        scored = jnp.full((1, 2), len(self.scores), jnp.int32)
        page_aux, row_aux = {SCORES: self.aux(rows)}, {SCORED: scored}
        head_pages, offsets = rows.view._replace(lengths=rows.view.lengths - new).places(
            jnp.array([new]), new, rows.geometry.page_size
        )
        stored = jnp.asarray(k.swapaxes(0, 1)[None], jnp.float32)
        positions = jnp.arange(start, start + new, dtype=jnp.int32)[None]
        queries = jnp.asarray(q.swapaxes(0, 1)[None], jnp.float32)
        count = jnp.array([new], jnp.int32)
        written = Written(phase, jnp.array([1]), rows.layer, stored, queries, positions, head_pages, offsets, count)
        page_aux, row_aux = self.method.on_write(self.method.params, rows.geometry, page_aux, row_aux, written)
        context = ObserveContext(
            geometry=rows.geometry,
            phase=phase,
            layer=rows.layer,
            rows=jnp.array([1]),
            queries=queries,
            num_valid=count,
            positions=positions,
            view=rows.view,
            start=rows.view.lengths - new,
            pools=rows.pools,
            names=rows.names,
            load_tile=rows.load_tile,
            page_aux=page_aux,
            row_aux=row_aux,
        )
        page_aux, _ = self.method.observe(self.method.params, context)
        found = np.asarray(accumulated_scores.rows_scores(page_aux[SCORES], rows.view))[0, :, : start + new]
        np.testing.assert_array_equal(found, found[:1].repeat(len(found), 0))  # one score for all heads
        self.scores, self.num_q_heads = found[0], len(q)
        return self.scores

    def rows(self, num_q_heads: int):
        kv_heads, length, dim = self.keys.shape
        geometry = Geometry(1, num_q_heads, kv_heads, dim, 4, 24, self.scale)
        keys = np.pad(self.keys.swapaxes(0, 1), ((0, 24 - length), (0, 0), (0, 0)))[None]
        return paged(geometry, keys, keys, length, granularity=self.granularity)

    def aux(self, rows):
        scores = np.full(rows.pools["k"].shape[:2], np.nan, np.float32)
        index = np.arange(len(self.scores))
        scores[rows.head_pages[0][:, index // 4], index % 4] = self.scores
        return jnp.asarray(scores)

    def compact(self, phase: str) -> list[int]:
        """Which rows stay."""
        rows = self.rows(self.num_q_heads)
        context = evict_context(self.method, rows, phase=phase, page_aux={SCORES: self.aux(rows)})
        (kept,) = np.asarray(self.method.keep_rows(self.method.params, context)).tolist()
        self.keys, self.scores = self.keys[:, kept], self.scores[kept]
        return kept


@pytest.mark.parametrize(
    ("composition", "granularity"),
    [*(("h2o", granularity) for granularity in GRANULARITIES), ("h2o+h2o_prefill", Granularity.SEQUENCE)],
)
@pytest.mark.parametrize("name", [name for name in cases("h2o") if name.startswith("two_chunks")])
def test_two_chunks(name, composition, granularity):
    case = cases("h2o")[name]
    inputs, expected = case["inputs"], case["expected"]
    request = Request(composition, case["params"], granularity, 2, 4)
    np.testing.assert_allclose(
        request.append(inputs["q_chunk1"], inputs["k_chunk1"], "chunk"), expected["score_after_chunk1"], **CLOSE
    )
    kept = request.compact("chunk")
    assert kept == expected["keep_after_chunk1"]
    np.testing.assert_allclose(
        request.append(inputs["q_chunk2"], inputs["k_chunk2"], "chunk"), expected["score_after_chunk2"], **CLOSE
    )
    last = request.compact("prompt")
    assert last == expected["keep_after_chunk2_rows"]
    positions = [*kept, *range(6, 12)]
    assert [positions[row] for row in last] == expected["keep_final_positions"]
    np.testing.assert_allclose(request.scores, expected["score_carried_final"], **CLOSE)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_decoded_tokens_score_and_evict(granularity):
    case = cases("h2o")["decode_accumulate_and_evict"]
    request = Request("h2o", case["params"], granularity, 2, 4)
    request.keys, request.scores = (np.asarray(case["inputs"][name]) for name in ("initial_keys", "initial_scores"))
    positions = np.arange(6)
    for step, expected in enumerate(case["expected"]["steps"]):
        found = request.append(expected["q"], expected["k"], "token")
        np.testing.assert_allclose(found, expected["score"], **CLOSE)
        positions, length = np.append(positions, 6 + step), len(found)
        assert length == expected["length_before"]
        due = request.method.kept_after("token", np.array([length]))[0] < length
        assert due == expected["evicted"]
        if due:
            kept = request.compact("token")
            assert kept == expected["keep_rows"]
            positions = positions[kept]
            assert positions.tolist() == expected["positions"]


def test_ties_go_to_the_lower_row():
    case = cases("h2o")["ties_go_to_lower_row"]
    knobs = {"h2o_decode_budget": case["params"]["budget"], "softmax_scale": 0.5}
    request = Request("h2o", case["params"] | knobs, Granularity.HEAD, 2, 4)
    request.scores, request.num_q_heads = np.asarray(case["inputs"]["score"]), 4
    request.keys = np.zeros((2, len(request.scores), 4))
    assert request.compact("prompt") == case["expected"]["keep"]


def test_recent_rows():
    case = cases("h2o")["recent_rounding"]
    found = [accumulated_scores.recent_rows(*pair) for pair in case["inputs"]["pairs"]]
    assert found == case["expected"]["recent_counts"]


@pytest.mark.parametrize("name", [name for name in cases("h2o_prefill") if name.startswith("lengths")])
def test_lengths(name):
    case = cases("h2o_prefill")[name]
    params, chunk = dict(case["params"]), case["params"]["engine_prefill_chunk_size"]
    retention = params.pop("sparse_method")
    del params["engine_prefill_chunk_size"]
    prompt = case["inputs"]["prompt_tokens"]
    for composition in ("h2o", "h2o+h2o_prefill") if retention else ("h2o_prefill", "dense+h2o_prefill"):
        method, _ = registry.resolve(composition, params, used=set())
        length = done = most = 0
        for entry in case["expected"]["chunks"]:
            done, length = done + entry["chunk"], length + entry["chunk"]
            most = max(most, length)
            assert length == entry["length_in_attention"]
            length = int(method.kept_after("prompt" if done == prompt else "chunk", np.array([[length]]))[0, 0])
            assert length == entry["length_after"]
        assert done == prompt
        assert most == case["expected"]["peak_length"] <= case["expected"]["peak_bound"]
        bound = method.peak_rows(np.zeros((1, 1)), prompt, 0, chunk)
        assert bound.tolist() == [[case["expected"]["peak_bound"]]]
    session = Session(composition, params=params, max_len=128, num_rows=1, chunk=chunk)
    session.prefill({1: tokens_of(1, prompt)})
    assert session.rows[1].length == case["expected"]["chunks"][-1]["length_after"]
    assert (session.rows[1].most == case["expected"]["peak_length"]).all()
    session.check()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_three_chunks(granularity):
    case = cases("h2o_prefill")["three_chunks_vanilla_decode"]
    request = Request("h2o_prefill", {"h2o_decode_budget": 1} | case["params"], granularity, 1, 2)
    inputs, positions = case["inputs"], np.zeros(0, int)
    chunks = case["expected"]["chunks"]
    for index, (q, k, expected) in enumerate(zip(inputs["q_chunks"], inputs["k_chunks"], chunks, strict=True)):
        positions = np.append(positions, np.arange(4 * index, 4 * index + 4))
        np.testing.assert_allclose(request.append(q, k, "chunk"), expected["score"], **CLOSE)
        assert positions.tolist() == expected["positions"]
        phase = "prompt" if expected is chunks[-1] else "chunk"
        kept, length = expected.get("keep_rows", range(len(positions))), np.array([len(positions)])
        assert request.method.kept_after(phase, length)[0] == len(kept)
        if len(kept) < len(positions):
            assert request.compact(phase) == kept
            positions = positions[kept]


def test_every_case_is_known():
    others = {"decode_accumulate_and_evict", "ties_go_to_lower_row", "recent_rounding"}
    assert {name for name in cases("h2o") if not name.startswith("two_chunks")} == others
    assert {name for name in cases("h2o_prefill") if not name.startswith("lengths")} == {"three_chunks_vanilla_decode"}
