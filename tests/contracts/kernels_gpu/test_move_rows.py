"""Rows moved on a GPU, bit for bit, in place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView

pytestmark = pytest.mark.gpu

PAGE, HEADS, LAYERS = 64, 8, 3


def views(rng, stride: int, own: int, batch: int, rows: int, kept: int) -> tuple[PageView, PageView, int]:
    """Source and target with scattered pages, and how many head-pages there are."""
    columns, new = -(-rows // PAGE), -(-kept // PAGE)
    num_slabs = 1 + batch * own * (columns + new) + 5
    ids = 1 + rng.permutation(num_slabs - 1).astype(np.int32)
    cut = batch * own * columns
    old = ids[:cut].reshape(batch, own, columns)
    fresh = ids[cut : cut + batch * own * new].reshape(batch, own, new)
    fresh = np.pad(fresh, ((0, 0), (0, 0), (0, 3)))
    offset = np.zeros(HEADS, np.int32) if stride == 1 else np.arange(HEADS, dtype=np.int32) + (stride - HEADS)
    lengths = np.full((batch, own), rows, np.int32)
    made = [PageView(jnp.asarray(t), stride, jnp.asarray(offset), jnp.asarray(lengths)) for t in (old, fresh)]
    return made[0], made[1], num_slabs * stride


def wanted(pool: np.ndarray, keep: np.ndarray, source: PageView, target: PageView) -> np.ndarray:
    old, new = (np.asarray(view.head_pages(0, view.table.shape[2])) for view in (source, target))
    out, index = pool.copy(), np.arange(keep.shape[2])
    for b in range(keep.shape[0]):
        for h in range(HEADS):
            row = keep[b, h % keep.shape[1]]
            out[new[b, h, index // PAGE], index % PAGE] = pool[old[b, h, row // PAGE], row % PAGE]
    return out


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("per_head_rows", [False, True])
@pytest.mark.parametrize("stride", [1, HEADS, LAYERS * HEADS])
@pytest.mark.parametrize(("rows", "kept"), [(1, 1), (65, 64), (1000, 333), (3000, 1025)])
def test_rows_are_moved_and_nothing_else(implementation, per_head_rows, stride, rows, kept):
    rng = np.random.default_rng(rows)
    batch = 2
    source, target, pages = views(rng, stride, HEADS if stride == 1 else 1, batch, rows, kept)
    keep = [np.sort(rng.permutation(rows)[:kept]) for _ in range(batch * (HEADS if per_head_rows else 1))]
    keep = np.reshape(keep, (batch, -1, kept)).astype(np.int32)
    kinds = {"k": ((128,), "uint16"), "codes": ((128,), "uint8"), "odd": ((96,), "uint16"), "scale": ((), "uint32")}
    bits = {n: rng.integers(0, 250, (pages, PAGE, *shape)).astype(dtype) for n, (shape, dtype) in kinds.items()}
    views_as = {"k": jnp.bfloat16, "codes": jnp.float8_e4m3fn, "odd": jnp.float16, "scale": jnp.float32}
    pools = {name: jnp.asarray(pool.view(views_as[name])) for name, pool in bits.items()}

    @jax.jit
    def run(pools, keep, old, new):
        old, new = source._replace(table=old), target._replace(table=new)
        return api.move_rows(pools, keep, old, new, implementation=implementation)

    found = run(pools, jnp.asarray(keep), source.table, target.table)
    for name, pool in bits.items():
        moved = np.asarray(found[name])
        assert moved.dtype == views_as[name]
        np.testing.assert_array_equal(moved.view(pool.dtype), wanted(pool, keep, source, target), err_msg=name)
        np.testing.assert_array_equal(np.asarray(pools[name]).view(pool.dtype), pool)  # not donated: not touched


@pytest.mark.parametrize("per_head_rows", [False, True])
@pytest.mark.parametrize("own", [1, HEADS])
def test_all_layers_at_once(own, per_head_rows):
    rng = np.random.default_rng(11)
    rows, kept = 700, 333
    stride = LAYERS * HEADS if own == 1 else 1
    source, target, pages = views(rng, stride, own * (LAYERS if own > 1 else 1), 1, rows, kept)
    keep = np.stack([np.sort(rng.permutation(rows)[:kept]) for _ in range(LAYERS * (HEADS if per_head_rows else 1))])
    keep = jnp.asarray(keep.reshape(LAYERS, -1, kept), jnp.int32)
    pool = jnp.asarray(rng.standard_normal((pages, PAGE, 128), np.float32), jnp.bfloat16)

    def views_of(layer):
        def one(view):
            if own == 1:
                return view._replace(offset=layer * HEADS + jnp.arange(HEADS, dtype=jnp.int32))
            table = jax.lax.dynamic_slice_in_dim(view.table, layer * HEADS, HEADS, axis=1)
            return view._replace(table=table, lengths=view.lengths[:, :HEADS])

        return one(source), one(target)

    def run(implementation):
        move = lambda pools: api.move_layers(pools, keep, views_of, implementation=implementation)  # noqa: E731
        return np.asarray(jax.jit(move)({"k": pool})["k"]).view(np.uint16)

    found = run("triton")
    np.testing.assert_array_equal(found, run("xla"))
    assert (found != np.asarray(pool).view(np.uint16)).any()


def test_donated_pools_are_not_copied():
    """In a loop over layers, as compaction runs it: what moves depends on the pool, which is read afterwards too."""
    rng = np.random.default_rng(0)
    source, target, pages = views(rng, LAYERS * HEADS, 1, 1, 3000, 1025)
    keep = jnp.asarray(np.sort(rng.permutation(3000)[:1025])[None, None].astype(np.int32))
    pools = {name: jnp.zeros((pages, PAGE, 128), jnp.bfloat16) for name in ("k", "v")}
    pools["positions"] = jnp.zeros((pages, PAGE), jnp.int32)

    def step(pools, keep, old, new):
        def body(layer, carry):
            pools, total = carry
            offset = layer * HEADS + jnp.arange(HEADS, dtype=jnp.int32)
            before, after = source._replace(table=old, offset=offset), target._replace(table=new, offset=offset)
            read = pools["k"][before.head_pages(0, 1)].astype(jnp.float32).sum()
            rows = keep + jnp.isnan(read).astype(jnp.int32)
            pools = api.move_rows(pools, rows, before, after, implementation="triton")
            return pools, total + pools["v"][after.head_pages(0, 1)].astype(jnp.float32).sum()

        return jax.lax.fori_loop(0, LAYERS, body, (pools, jnp.float32(0)))

    arguments = (pools, keep, source.table, target.table)
    text = jax.jit(step, donate_argnums=0).lower(*arguments).compile().as_text()
    assert "move_rows" in text or "triton_kernel_call" in text
    for pool in pools.values():
        shape = ",".join(map(str, pool.shape))
        assert not re.findall(rf"\[{shape}\]\S* copy", text)


def test_pool_beyond_int32():
    pages = 2**31 // (PAGE * 128) + 64
    rows = jax.random.normal(jax.random.key(0), (16, PAGE, 128), jnp.float32).astype(jnp.bfloat16)
    first, last = jnp.arange(1, 17, dtype=jnp.int32), jnp.arange(pages - 16, pages, dtype=jnp.int32)
    fill = jax.jit(lambda rows: jnp.full((pages, PAGE, 128), jnp.nan, jnp.bfloat16).at[last].set(rows))
    lengths = jnp.full((1, HEADS), 2 * PAGE, jnp.int32)
    views = [PageView(ids.reshape(1, HEADS, 2), 1, jnp.zeros(HEADS, jnp.int32), lengths) for ids in (last, first)]
    keep = jnp.arange(2 * PAGE, dtype=jnp.int32)[None, None, ::-1]
    move = jax.jit(lambda pools, keep: api.move_rows(pools, keep, *views, implementation="triton"), donate_argnums=0)
    found = move({"k": fill(rows)}, keep)["k"]
    moved = np.asarray(found[first].astype(jnp.float32)).reshape(HEADS, 2 * PAGE, 128)
    wanted_rows = np.asarray(rows.astype(jnp.float32)).reshape(HEADS, 2 * PAGE, 128)[:, ::-1]
    np.testing.assert_array_equal(moved, wanted_rows)
    np.testing.assert_array_equal(np.asarray(found[last]).view(np.uint16), np.asarray(rows).view(np.uint16))
