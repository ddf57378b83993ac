"""Every implementation that runs here against the float32 oracle, over the shapes of `pallas_kernels/specs.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels import api, reference, specs
from sparsejax.pallas_kernels.decode_attention import xla as decode_xla
from sparsejax.pallas_kernels.page_scores import xla as scores_xla
from sparsejax.pallas_kernels.prefill_attention import xla as prefill_xla
from tests.core.harness import QUICK
from tests.core.paging import Paged, paged

by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)


def tolerance(dtype: str) -> dict:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 2e-5, "atol": 2e-5}


def geometry_of(shape) -> Geometry:
    rows = max(shape.lengths) + shape.page_size
    layers = 3
    return Geometry(
        layers,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        rows,
        shape.head_dim**-0.5,
        shape.dtype,
    )


@functools.cache
def rows_of(shape, poison: float = float("nan"), seed: int = 0) -> tuple[Paged, jax.Array]:
    """Paged rows, and queries [batch, longest chunk or 1, q_heads, head_dim]."""
    rng = np.random.default_rng(5)
    geometry = geometry_of(shape)
    size = (len(shape.lengths), max(shape.lengths), shape.num_kv_heads, shape.head_dim)
    k, v = (rng.standard_normal(size) * 1.5 for _ in range(2))
    queries = max(getattr(shape, "chunks", ()) or (1,))
    q = rng.standard_normal((len(shape.lengths), queries, shape.num_q_heads, shape.head_dim)) * 1.5
    storage = registry.resolve("fp8_kv" if getattr(shape, "scaled_codes", False) else "plain")[1]
    grain = Granularity(shape.granularity)
    rows = paged(geometry, k, v, shape.lengths, storage=storage, granularity=grain, layer=1, seed=seed, poison=poison)
    return rows, jnp.asarray(q, shape.dtype)


@functools.cache
def program(module, operation: str, shape, block: int | None = None):
    """Compiled (q, pools, table, lengths, start) -> (out, lse); `block` is what the module was patched with."""
    rows, q = rows_of(shape)
    static = {"load_tile": rows.load_tile, "scale": rows.geometry.scale, "layer": rows.layer}

    def compute(q, pools, table, lengths, start):
        view = rows.view._replace(table=table, lengths=lengths)
        if operation == "decode_attention":
            return getattr(module, operation)(q[:, 0], pools, rows.names, view, **static)
        return getattr(module, operation)(q, pools, rows.names, view, start, **static)

    arguments = (q, rows.pools, rows.view.table, rows.view.lengths, rows.view.lengths)
    return jax.jit(compute).lower(*arguments).compile(QUICK)


@functools.cache
def attend(module, operation: str, shape, block: int | None = None, **options) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of "decode_attention" or "prefill_attention"."""
    rows, q = rows_of(shape, **options)
    start = jnp.asarray(np.asarray(rows.view.lengths) - np.asarray(shape.chunks, np.int32)[:, None])
    found = program(module, operation, shape, block)(q, rows.pools, rows.view.table, rows.view.lengths, start)
    return tuple(np.asarray(x) for x in found)


def real_queries(shape) -> np.ndarray:
    return np.arange(max(shape.chunks))[None, :] < np.asarray(shape.chunks)[:, None]


@by_name(argvalues=specs.SMALL)
def test_decode_attention(shape):
    wanted, wanted_lse = attend(reference, "decode_attention", shape)
    out, lse = attend(api, "decode_attention", shape)
    assert out.dtype == shape.dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, **tolerance(shape.dtype))
    np.testing.assert_allclose(lse, wanted_lse, **tolerance(shape.dtype))


@by_name(argvalues=specs.SMALL)
def test_prefill_attention(shape):
    wanted, wanted_lse = attend(reference, "prefill_attention", shape)
    out, lse = attend(api, "prefill_attention", shape)
    real = real_queries(shape)
    assert np.isfinite(np.asarray(out, np.float32)).all()  # queries past a row's end are junk, but finite
    assert out.dtype == shape.dtype
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], wanted[real], **tolerance(shape.dtype))
    np.testing.assert_allclose(lse[real], wanted_lse[real], **tolerance(shape.dtype))


@by_name(argvalues=specs.SMALL)
@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention"])
def test_the_oracle_is_softmax_attention(operation, shape):
    """The oracle itself against numpy in float64 over the rows as stored, one query at a time."""
    rows, q = rows_of(shape)
    tiles = {name: np.asarray(rows.pools[name])[rows.head_pages] for name in rows.names}
    tiles = {name: tile.reshape(*tile.shape[:2], -1, *tile.shape[4:]) for name, tile in tiles.items()}
    k, v = (np.asarray(x, np.float64) for x in jax.jit(rows.load_tile)(tiles, rows.layer))
    out, lse = (np.asarray(x) for x in attend(reference, operation, shape))
    q = np.asarray(q, np.float64)
    for b, length in enumerate(shape.lengths):
        chunk = shape.chunks[b] if operation == "prefill_attention" else 1
        for i in {0, chunk - 1}:
            seen = length - chunk + i + 1
            for h in range(shape.num_q_heads):
                query = q[b, i, h]
                head = h // shape.group_size
                logits = k[b, head, :seen] @ query * rows.geometry.scale
                total = np.exp(logits - logits.max()).sum()
                answer = np.exp(logits - logits.max()) @ v[b, head, :seen] / total
                at = (b, i, h) if operation == "prefill_attention" else (b, h)
                np.testing.assert_allclose(out[at], answer, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(lse[at], logits.max() + np.log(total), rtol=1e-4, atol=1e-4)


SOME = [shape for shape in specs.SMALL if shape.name in ("page-16", "page-64-head", "fp8-bfloat16", "batch-10")]


@by_name(argvalues=SOME)
@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention"])
def test_poison_and_place_change_nothing(operation, shape):
    real = real_queries(shape) if operation == "prefill_attention" else np.ones(len(shape.lengths), bool)
    wanted = [np.asarray(x)[real] for x in attend(api, operation, shape, poison=0.0)]
    for options in ({"poison": float("nan")}, {"poison": float("inf")}, {"poison": float("nan"), "seed": 9}):
        for found, expected in zip(attend(api, operation, shape, **options), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(found)[real], expected)


@by_name(argvalues=SOME)
@pytest.mark.parametrize("block", [16, 64, 4096])
def test_block_size_changes_nothing(block, shape, monkeypatch):
    monkeypatch.setattr(decode_xla, "block_rows", lambda batch: block)
    monkeypatch.setattr(prefill_xla, "BLOCK_ROWS", block)
    for operation in ("decode_attention", "prefill_attention"):
        wanted = attend(reference, operation, shape)
        real = real_queries(shape) if operation == "prefill_attention" else np.ones(len(shape.lengths), bool)
        for found, expected in zip(attend(api, operation, shape, block), wanted, strict=True):
            found = np.asarray(found, np.float32)[real]
            np.testing.assert_allclose(found, np.asarray(expected)[real], **tolerance(shape.dtype))


def test_parts_merge_to_the_whole_in_any_order():
    shape = specs.SMALL[1]
    rows, q = rows_of(shape)
    keys = np.stack([rows.pools["k"], rows.pools["v"]])[:, rows.head_pages]
    k, v = np.nan_to_num(keys.reshape(2, *rows.head_pages.shape[:2], -1, shape.head_dim))
    row = np.arange(k.shape[2])[None, None, None, :]
    valid = row < np.asarray(rows.view.lengths)[:, :, None, None]
    attention, merge = jax.jit(reference.attention), jax.jit(api.merge)
    # The first row has one key: three of its parts are empty.
    parts = [attention(q[:, :1], k, v, valid & (row % 4 == i), rows.geometry.scale) for i in range(4)]
    whole = attention(q[:, :1], k, v, valid, rows.geometry.scale)
    a, b, c, d = parts
    orders = [
        merge(parts),
        merge(parts[::-1]),
        merge([merge([a, b]), merge([c, d])]),
        merge([a, merge([b, merge([c, d])])]),
    ]
    for merged in orders:
        for found, expected in zip(merged, whole, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def bounds_of(shape) -> tuple[jax.Array, jax.Array, Paged, jax.Array]:
    rows, q = rows_of(shape)
    keys = np.asarray(rows.pools["k"])
    low, high = (bound(keys, 1).astype(keys.dtype) for bound in (np.fmin.reduce, np.fmax.reduce))  # unused: NaN
    return low, high, rows, q[:, 0]


def scores_of(module, shape, q, low, high, view) -> np.ndarray:
    arguments = {"page_size": shape.page_size} if module is api else {}
    return np.asarray(
        jax.jit(functools.partial(module.page_scores, view=view, **arguments))
        .lower(q, low, high)
        .compile(QUICK)(q, low, high)
    )


def last_columns(shape) -> np.ndarray:
    pages = -(-np.asarray(shape.lengths) // shape.page_size)
    columns = -(-max(shape.lengths) // shape.page_size)
    return np.arange(columns)[None, :] < pages[:, None]


@by_name(argvalues=specs.SCORES)
def test_page_scores(shape):
    low, high, rows, q = bounds_of(shape)
    wanted = np.moveaxis(scores_of(reference, shape, q, low, high, rows.view), 1, 2)
    found = scores_of(api, shape, q, low, high, rows.view)
    assert found.dtype == np.float32
    assert found.shape == rows.head_pages.shape
    real = last_columns(shape)
    # Unlike attention outputs, scores are sums over head_dim without a softmax: the error grows with their size.
    close = {"rtol": 2e-2, "atol": 0.3} if shape.dtype == "bfloat16" else {"rtol": 2e-5, "atol": 2e-4}
    np.testing.assert_allclose(np.moveaxis(np.asarray(found), 1, 2)[real], wanted[real], **close)


@by_name(argvalues=specs.SCORES)
def test_page_scores_bound_every_key(shape):
    low, high, rows, q = bounds_of(shape)
    scores = scores_of(api, shape, q, low, high, rows.view)
    keys = np.asarray(rows.pools["k"], np.float32)[np.asarray(rows.head_pages)]  # [batch, heads, columns, page, dim]
    query = np.asarray(q, np.float32).reshape(len(q), shape.num_kv_heads, shape.group_size, shape.head_dim)
    logits = np.einsum("bhgd,bhcpd->bhcgp", query, keys)
    for b, length in enumerate(shape.lengths):
        for t in range(length):
            column, offset = divmod(t, shape.page_size)
            assert (logits[b, :, column, :, offset].max(-1) <= scores[b, :, column] + 1e-3).all()


@pytest.mark.parametrize("block", [1, 4, 1000])
def test_score_blocks_change_nothing(block, monkeypatch):
    monkeypatch.setattr(scores_xla, "BLOCK_COLUMNS", block)
    shape = specs.SCORES[1]
    low, high, rows, q = bounds_of(shape)
    wanted = np.moveaxis(scores_of(reference, shape, q, low, high, rows.view), 1, 2)
    found = scores_of(api, shape, q, low, high, rows.view)
    np.testing.assert_allclose(np.moveaxis(found, 1, 2)[last_columns(shape)], wanted[last_columns(shape)], 2e-5, 2e-4)


def test_granularities_are_one_thing_to_a_kernel():
    found = [
        attend(api, "decode_attention", specs.AttentionShape("grain", (5, 40), granularity=grain.value, chunks=(1, 1)))
        for grain in Granularity
    ]
    for out, lse in found[1:]:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(lse, found[0][1])


def test_an_unknown_implementation_is_refused():
    rows, q = rows_of(specs.SMALL[0])
    with pytest.raises(ValueError, match="nonsense"):
        api.decode_attention(q[:, 0], *rows.pages, implementation="nonsense", **rows.how)


def test_shapes_have_names_of_their_own():
    for group in (specs.SMALL, specs.SERVING, specs.SCORES):
        assert len({shape.name for shape in group}) == len(group)
