"""Rows moved on NVIDIA GPUs through Triton, in place: each byte is read once and written once.

XLA would gather into an array of its own and scatter from there, twice the bytes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, Pools
from sparsejax.pallas_kernels.triton_support import codes_problem, platform_problem, power_of_two

WIDEST_ROW = 4096
DTYPES = ("bfloat16", "float16", "float32", "int8", "int16", "int32", "uint8", "uint16", "uint32")
CODES = ("float8_e4m3fn", "float8_e5m2")
BLOCK_BYTES = 16384


def unsupported(pools: Pools, rows: jax.Array, target: PageView) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.move_rows`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(pools)


def unsupported_shape(pools: Pools) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    for name, pool in pools.items():
        if pool.dtype.name in CODES and (problem := codes_problem()) is not None:
            return problem
        if pool.dtype.name not in (*DTYPES, *CODES):
            return f"rows of {name!r} are {pool.dtype.name}, not one of {', '.join((*DTYPES, *CODES))}"
        if _width(pool) > WIDEST_ROW:
            return f"a row of {name!r} has {_width(pool)} elements, more than {WIDEST_ROW}"
    return None


def _width(pool: jax.Array) -> int:
    return math.prod(pool.shape[2:])


def move_rows(pools: Pools, rows: jax.Array, source: PageView, target: PageView) -> dict[str, jax.Array]:
    """See `api.move_rows`."""
    return {name: launch(pool, rows, source, target) for name, pool in pools.items()}


def move_layers(
    pools: Pools, rows: jax.Array, views: Callable[[jax.Array], tuple[PageView, PageView]]
) -> dict[str, jax.Array]:
    """See `api.move_layers`: the heads of all layers as the heads of one view."""
    layers, _, kept = rows.shape
    source, target = views(jnp.int32(0))
    heads = source.num_heads

    def arrays(layer: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        return [(jnp.broadcast_to(view.table[0], (heads, view.table.shape[2])), view.offset) for view in views(layer)]

    def joined(view: PageView, table: jax.Array, offset: jax.Array) -> PageView:
        return view._replace(table=table.reshape(1, layers * heads, -1), offset=offset.reshape(-1))

    old, new = jax.vmap(arrays)(jnp.arange(layers, dtype=jnp.int32))
    rows = jnp.broadcast_to(rows, (layers, heads, kept)).reshape(1, layers * heads, kept)
    return move_rows(pools, rows, joined(source, *old), joined(target, *new))


def launch(
    pool: jax.Array, rows: jax.Array, source: PageView, target: PageView, compute_capability: int | None = None
) -> jax.Array:
    """The kernel for one array. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.move_rows.triton_kernels")
    batch, rows_heads, kept = rows.shape
    width = _width(pool)
    width_pow2 = power_of_two(width)
    block = max(1, min(256, BLOCK_BYTES // (width_pow2 * pool.dtype.itemsize)))
    [moved] = jax_triton.triton_call(
        pool,
        rows,
        source.table,
        source.offset,
        target.table,
        target.offset,
        source.stride,
        target.stride,
        kernel=kernels.move_kernel,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={0: 0},
        grid=(-(-kept // block), source.num_heads, batch),
        name="move_rows",
        num_warps=4,
        num_stages=1,
        compute_capability=compute_capability,
        KEPT=kept,
        HEADS=source.num_heads,
        ROWS_HEADS=rows_heads,
        SOURCE_HEADS=source.table.shape[1],
        SOURCE_COLUMNS=source.table.shape[2],
        TARGET_HEADS=target.table.shape[1],
        TARGET_COLUMNS=target.table.shape[2],
        PAGE=pool.shape[1],
        WIDTH=width,
        WIDTH_POW2=width_pow2,
        BLOCK=block,
    )
    return moved
