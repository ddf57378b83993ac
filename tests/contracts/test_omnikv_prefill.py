"""What layers read of a prompt's history, against NumPy in float64 that knows neither pages nor mean queries."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.models.registry import get_architecture
from sparsejax.pallas_kernels.heads import Heads, finish
from tests.contracts.compositions import small
from tests.core.harness import TINY, Session, tokens_of

SPEC = dataclasses.replace(TINY, num_layers=5)
ANCHORS = {"omnikv_prefill_full_attention_layers": "0;3"}  # the last layer follows layer 3


class Model:
    """A model that keeps keys and values as arrays and reads a prompt chunk by chunk.

    Attributes:
      rows: what followers read in each sparse chunk, by anchor.
    """

    def __init__(self, session: Session, sparse: bool = True) -> None:
        self.session, self.sparse = session, sparse
        self.anchors = [0, 3] if sparse else list(range(SPEC.num_layers))
        self.stored: list[tuple[np.ndarray, np.ndarray]] = []
        self.rows: list[tuple[int, list[int]]] = []

    def read(self, tokens: list[int], chunk: bool) -> np.ndarray:
        """Appends tokens; logits of the last one."""
        session, seen = self.session, len(self.stored[0][0]) if self.stored else 0
        geometry, storage = session.geometry, session.storage
        architecture = get_architecture(SPEC.architecture)
        positions = jnp.arange(seen, seen + len(tokens), dtype=jnp.int32)
        x, visible = architecture.embed(SPEC, session.weights, jnp.asarray(tokens, jnp.int32)), None
        for layer in range(SPEC.num_layers):

            def attend(projected: Heads, layer: int = layer):
                nonlocal visible
                q, k, v = finish(projected)
                payload = storage.encode(storage.params, geometry, jnp.int32(layer), k, v)
                tiles = {name: jnp.moveaxis(rows, 1, 0)[None] for name, rows in payload.items()}
                new = storage.load_tile(storage.params, geometry, tiles, jnp.int32(layer))
                new = [np.moveaxis(np.asarray(rows[0], np.float64), 0, 1) for rows in new]
                if layer == len(self.stored):
                    self.stored.append(tuple(rows[:0] for rows in new))
                self.stored[layer] = tuple(np.concatenate(pair) for pair in zip(self.stored[layer], new, strict=True))
                keys, values = self.stored[layer]
                logits = np.einsum(
                    "thd,shd->hts", np.asarray(q, np.float64), np.repeat(keys, geometry.group_size, axis=1)
                )
                allowed = np.arange(len(keys))[None] <= np.asarray(positions)[:, None]
                if layer in self.anchors:
                    visible = self.visible(logits, len(tokens))
                    self.rows.append((layer, visible))
                elif chunk:
                    allowed &= np.isin(np.arange(len(keys)), visible)[None]
                logits = np.where(allowed, logits * geometry.scale, -np.inf)
                mass = np.exp(logits - logits.max(-1, keepdims=True))
                mass /= mass.sum(-1, keepdims=True)
                out = np.einsum("hts,shd->thd", mass, np.repeat(values, geometry.group_size, axis=1))
                return jnp.asarray(out, q.dtype)

            x = architecture.layer(SPEC, session.weights["layers"][layer], x, positions, attend)
        return np.asarray(architecture.logits(SPEC, session.weights, x))[-1]

    def visible(self, logits: np.ndarray, chunk: int) -> list[int]:
        """Rows that followers read, of logits [q_heads, chunk, rows]."""
        sink, keep, recent = 2, 6, 3
        rows = logits.shape[2]
        tail = max(rows - chunk - recent, sink)
        scores = logits.mean(1).max(0)[sink:tail]
        best = np.sort(np.argsort(-scores, kind="stable")[:keep]) + sink
        return [*range(min(sink, rows)), *best.tolist(), *range(tail, rows)]


def start(composition: str = "omnikv_prefill", **options) -> Session:
    params = small(composition) | ANCHORS
    return Session(composition, params=params, spec=SPEC, max_len=96, chunk=24, **options)


@pytest.mark.parametrize("granularity", [None, Granularity.HEAD])
@pytest.mark.parametrize("name", ["omnikv_prefill", "omnikv_prefill+fp8_kv"])
def test_prompts_read_what_an_anchor_chose(name, granularity):
    session = start(name, granularity=granularity)
    close = 1e-4 if "fp8" not in name else 3e-3  # rounding in another order gives another code here and there
    model, dense = Model(session), Model(session, sparse=False)
    text, differs = tokens_of(1, 58), False
    cuts = [1, 14, 21, 1, 16, 5]  # also chunks of one token, and history that just does not fit
    for turn in ([*zip(np.cumsum([0, *cuts[:4]]), cuts[:4], strict=False)], [(37, 16), (53, 5)]):
        prompt = text[turn[0][0] : turn[-1][0] + turn[-1][1]]
        logits = session.prefill({1: prompt}, pieces=[size for _, size in turn], first=turn[0][0] == 0)[1]
        for begin, size in turn:
            wanted = model.read(text[begin : begin + size], chunk=True)
            full = dense.read(text[begin : begin + size], chunk=True)
        np.testing.assert_allclose(logits, wanted, rtol=close, atol=close)
        differs |= not np.allclose(logits, full, rtol=1e-2, atol=1e-2)
        for token in tokens_of(2, 3):  # decoded tokens read everything
            wanted = model.read([token], chunk=False)
            dense.read([token], chunk=False)
            np.testing.assert_allclose(session.decode([1], [token])[0], wanted, rtol=close, atol=close)
        text[turn[-1][0] + turn[-1][1] : 0] = []
        session.check()
    assert differs, "everything was read"
    sizes = {(layer, len(rows)) for layer, rows in model.rows}
    assert (0, 1) in sizes
    assert (3, 2 + 6 + 3 + 16) in sizes


def test_history_that_fits_is_read_whole():
    found, wanted = (
        session.prefill({1: tokens_of(1, 22)}, pieces=[11])[1]  # 2 + 6 + 3 rows of history
        for session in (start(), Session("dense", spec=SPEC, max_len=96, chunk=24))
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_nothing_is_chosen_where_everything_fits():
    params = small("omnikv_prefill") | ANCHORS | {"omnikv_prefill_keep_tokens": 80}
    session = Session("omnikv_prefill", params=params, spec=SPEC, max_len=96, chunk=24)
    dense = Session("dense", spec=SPEC, max_len=96, chunk=24)
    found, wanted = (each.prefill({1: tokens_of(1, 70)})[1] for each in (session, dense))
    np.testing.assert_array_equal(found, wanted)


def test_sinks_and_recent_rows_may_be_all_that_is_read():
    session = start()
    params = small("omnikv_prefill") | ANCHORS | {"omnikv_prefill_keep_tokens": 0}
    few = Session("omnikv_prefill", params=params, spec=SPEC, max_len=96, chunk=24)
    found, wanted = (each.prefill({1: tokens_of(1, 60)})[1] for each in (few, session))
    assert not np.allclose(found, wanted, rtol=1e-2, atol=1e-2)
    assert np.isfinite(found).all()


def test_prefixes_are_not_shared():
    method, _ = registry.resolve("omnikv_prefill", ANCHORS)
    assert method.chunk_dependent
    assert not method.pure_prefix
    assert not registry.resolve("omnikv_prefill+quest", ANCHORS)[0].pure_prefix
    assert registry.resolve("quest")[0].pure_prefix


GEOMETRY = Geometry(4, 4, 2, 8, 4, 64, 1.0)


@pytest.mark.parametrize(("layers", "word"), [("auto", "profile"), ((0, 4), "layer 4"), ("0,1,9", "layer 9")])
def test_models_that_the_layers_do_not_fit_are_refused(layers, word):
    method, _ = registry.resolve("omnikv_prefill", {"omnikv_prefill_full_attention_layers": layers})
    (reason,) = method.check(method.params, GEOMETRY)
    assert word in reason
    assert "omnikv_prefill_full_attention_layers" in reason


@pytest.mark.parametrize("layers", [0, [0, 3], "0;3", "3 0"])
def test_models_that_the_layers_fit_are_served(layers):
    method, _ = registry.resolve("omnikv_prefill", {"omnikv_prefill_full_attention_layers": layers})
    assert method.check(method.params, GEOMETRY) == []


@pytest.mark.parametrize("other", ["streamingllm", "snapkv", "pyramidkv"])
def test_members_that_evict_are_refused(other):
    with pytest.raises(MethodError, match=f"{other} evicts"):
        registry.resolve(f"{other}+omnikv_prefill")
