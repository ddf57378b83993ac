"""Attention of tiles of queries over listed blocks, and over biased keys, against float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.block_sparse_attention.tiles import num_tiles
from tests.contracts import tiles
from tests.core.paging import paged

LENGTHS, CHUNKS = (1, 40, 33, 97, 64), (1, 40, 1, 30, 17)


def geometry_of(group=2, page=16, dtype="float32") -> Geometry:
    return Geometry(2, 2 * group, 2, 8, page, 112, 0.4, dtype)


def case(group=2, page=16, dtype="float32", storage="plain", grain="sequence", m=16, n=16, chunk=40):
    """Paged rows, queries, starts, lists, and keys and values [batch, heads, rows, dim] as they are stored."""
    rng = np.random.default_rng(3)
    geometry = geometry_of(group, page, dtype)
    size = (len(LENGTHS), max(LENGTHS), 2, 8)
    k, v = (rng.standard_normal(size) for _ in range(2))
    stored = registry.resolve(storage)[1]
    grain = Granularity(grain)
    rows = paged(geometry, k, v, LENGTHS, storage=stored, granularity=grain, layer=1, seed=1, poison=float("nan"))
    q = jnp.asarray(rng.standard_normal((len(LENGTHS), chunk, 2 * group, 8)), dtype)
    heads = rows.view.lengths.shape[1]
    lengths = np.repeat(np.asarray(LENGTHS, np.int32)[:, None], 2, 1)
    starts = lengths - np.asarray(CHUNKS, np.int32)[:, None]
    lists = tiles.random_lists(rng, starts, lengths, chunk, group, m, n, -(-112 // n))
    tile = {name: np.asarray(rows.pools[name])[rows.head_pages] for name in rows.names}
    tile = {name: x.reshape(*x.shape[:2], -1, *x.shape[4:]) for name, x in tile.items()}
    keys, values = (np.asarray(x, np.float32) for x in rows.load_tile(tile, rows.layer))
    return rows, q, jnp.asarray(starts[:, :heads]), starts, lengths, lists, keys, values


def attend(rows, q, start, blocks, count, m, n):
    @jax.jit
    def run(q, pools, table, lengths, start, blocks, count):
        view = rows.view._replace(table=table, lengths=lengths)
        how = rows.how | {"block_size": n, "tile_rows": m}
        return api.block_sparse_attention(q, pools, rows.names, view, start, blocks, count, **how)

    return run(q, rows.pools, rows.view.table, rows.view.lengths, start, blocks, count)


@pytest.mark.parametrize(
    ("fields", "m", "n"),
    [
        ({}, 16, 16),
        ({}, 32, 8),
        ({"grain": "layer"}, 16, 32),
        ({"grain": "head"}, 16, 64),
        ({"page": 4}, 16, 2),
        ({"group": 1}, 16, 16),
        ({"group": 3}, 16, 16),  # tiles begin within the heads of a position
        ({"group": 7}, 32, 16),
        ({"dtype": "bfloat16"}, 16, 16),
        ({"storage": "fp8_kv"}, 16, 16),
    ],
    ids=str,
)
def test_listed_blocks_and_nothing_else(fields, m, n):
    rows, q, start, starts, lengths, (blocks, count), keys, values = case(**fields, m=m, n=n)
    out, lse = attend(rows, q, start, blocks, count, m, n)
    wanted, wanted_lse = tiles.listed_attention(
        q, keys, values, starts, lengths, blocks, count, m, n, rows.geometry.scale
    )
    real = np.arange(q.shape[1])[None, :] < np.asarray(CHUNKS)[:, None]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if q.dtype == jnp.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    assert out.dtype == q.dtype
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], wanted[real], **tolerance)
    seen = wanted_lse > -1e29
    assert 0 < seen[real].mean() < 1  # some tiles have no block that a query sees
    np.testing.assert_allclose(np.asarray(lse)[real & seen.all(-1)], wanted_lse[real & seen.all(-1)], **tolerance)
    assert np.asarray(lse)[real[..., None] & ~seen].max() < -1e29


def test_all_blocks_are_prefill_attention():
    rows, q, start, *_ = case()
    count = jnp.full((len(LENGTHS), 2, num_tiles(40, 2, 16)), 7, jnp.int32)
    blocks = jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32), (*count.shape, 7))
    out, lse = attend(rows, q, start, blocks, count, 16, 16)
    wanted, wanted_lse = api.prefill_attention(q, *rows.pages, start, **rows.how)
    real = np.arange(40)[None, :] < np.asarray(CHUNKS)[:, None]
    np.testing.assert_allclose(out[real], wanted[real], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[real], wanted_lse[real], rtol=1e-5, atol=1e-6)


def test_blocks_that_are_not_listed_are_not_read():
    """They hold NaN, which no mask would hide from a sum."""
    rows, q, start, starts, lengths, (blocks, count), keys, values = case(page=8, n=8)
    listed = np.zeros(rows.head_pages.shape, bool)
    for b, h, t in np.ndindex(count.shape):
        listed[b, h, blocks[b, h, t, : count[b, h, t]]] = True
    listed[2] = np.arange(listed.shape[2])[None] == [[4], [0]]
    count[2], blocks[2, 0, :, 0], blocks[2, 1, :, 0] = 1, 4, 0
    pools = {name: rows.pools[name].at[rows.head_pages[~listed]].set(jnp.nan) for name in rows.names}
    rows = dataclasses.replace(rows, pools=pools)
    out, _ = attend(rows, q, start, blocks, count, 16, 8)
    wanted, _ = tiles.listed_attention(q, keys, values, starts, lengths, blocks, count, 16, 8, rows.geometry.scale)
    real = np.arange(q.shape[1])[None, :] < np.asarray(CHUNKS)[:, None]
    assert np.isnan(pools["v"][rows.head_pages[2, 0, :4]]).all()
    np.testing.assert_allclose(out[real], wanted[real], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("group", "m"), [(2, 16), (3, 16), (1, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biased_keys(group, m, dtype):
    rng = np.random.default_rng(4)
    q = jnp.asarray(rng.standard_normal((2, 19, 2 * group, 8)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((2, 2, 21, 8)), dtype) for _ in range(2))
    bias = rng.standard_normal((2, 2, num_tiles(19, group, m), 21)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.7] = -np.inf
    bias[0, 1, 0] = -np.inf
    attend = jax.jit(functools.partial(api.tile_attention, tile_rows=m, scale=0.4))
    out, lse = attend(q, k, v, jnp.asarray(bias))
    wanted, wanted_lse = tiles.biased_attention(q, np.asarray(k, np.float32), np.asarray(v, np.float32), bias, m, 0.4)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 2e-5, "atol": 2e-5}
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, **tolerance)
    seen = wanted_lse > -1e29
    assert 0 < seen.mean() < 1
    np.testing.assert_allclose(np.asarray(lse)[seen], wanted_lse[seen], **tolerance)
    assert np.asarray(lse)[~seen].max() < -1e29


def test_lists_must_fit_the_queries():
    q, keys = jnp.zeros((1, 8, 4, 8)), jnp.zeros((1, 2, 3, 8))
    with pytest.raises(ValueError, match=r"has shape \(1, 2, 2, 3\); \[batch, kv_heads, tiles\] are \[1, 2, 1\]"):
        api.tile_attention(q, keys, keys, jnp.zeros((1, 2, 2, 3)), tile_rows=16, scale=1.0)
