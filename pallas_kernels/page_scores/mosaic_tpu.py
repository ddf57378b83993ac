"""Page scores on TPUs through Mosaic: one program per row and block of pages.

The bounds of all heads of a page lie side by side and are copied at once. One product then takes every query to every
head's bounds: what belongs to another head is dropped, which costs nothing, since the bounds enter the matrix unit once
either way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels.layout import LANES, PageView, pad_columns
from sparsejax.pallas_kernels.tpu_pages import MASKED
from sparsejax.pallas_kernels.tpu_support import (
    DTYPES,
    LARGEST_GROUP,
    WIDEST_ROW,
    platform_problem,
    unsupported_tables,
)

TILE_ROWS = 8  # of HBM: what lies between can't be copied
BLOCK_BOUNDS = 1024  # pages times heads of a block


def unsupported(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.page_scores`."""
    if (problem := platform_problem()) is not None:
        return problem
    dim, group = q.shape[2], q.shape[1] // view.num_heads
    if not q.dtype == page_min.dtype == page_max.dtype:
        return f"queries are {q.dtype.name}, page bounds {page_min.dtype.name} and {page_max.dtype.name}"
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype.name}, not one of {', '.join(DTYPES)}"
    if dim % LANES or dim > WIDEST_ROW:
        return f"bounds of {dim} do not fill the {LANES} lanes of a TPU's memory, or are longer than {WIDEST_ROW}"
    if view.table.shape[1] > 1 or view.num_heads % TILE_ROWS:
        return f"bounds are read for {TILE_ROWS} adjacent heads at once"
    if group > LARGEST_GROUP:
        return f"{group} query heads share a KV head, more than {LARGEST_GROUP}"
    return unsupported_tables(view)


def page_scores(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView, page_size: int) -> jax.Array:
    """See `api.page_scores`."""
    batch, q_heads, dim = q.shape
    heads, columns = view.num_heads, view.table.shape[2]
    pages = max(1, BLOCK_BOUNDS // heads)
    view = pad_columns(view, pages)
    width = view.table.shape[2]
    num_blocks = width // pages
    last = -(-view.lengths.max(1) // page_size)
    # max(q*m, q*M) = max(q, 0).M + min(q, 0).m
    positive, negative = jnp.maximum(q, 0), jnp.minimum(q, 0)
    any_memory, queries = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((1, q_heads, dim), lambda b, i, *_: (b, 0, 0))
    scores = pl.pallas_call(
        functools.partial(_kernel, heads, view.stride, pages),
        out_shape=jax.ShapeDtypeStruct((batch, num_blocks, 1, pages * heads), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, num_blocks),
            in_specs=[
                pl.BlockSpec((1, 1, width), lambda b, i, *_: (b, 0, 0), memory_space=pltpu.SMEM),
                queries,
                queries,
                any_memory,
                any_memory,
            ],
            out_specs=pl.BlockSpec((1, 1, 1, pages * heads), lambda b, i, *_: (b, i, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, pages * heads, dim), page_min.dtype),
                pltpu.VMEM((2, pages * heads, dim), page_max.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * q_heads * width * heads * dim,
            bytes_accessed=2 * batch * width * heads * dim * page_min.dtype.itemsize,
            transcendentals=0,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="page_scores",
    )(last, view.offset[:1], view.table, positive, negative, page_min, page_max)
    return scores.reshape(batch, width, heads).swapaxes(1, 2)[:, :, :columns]


def _kernel(
    heads: int,
    stride: int,
    pages: int,
    last: Any,
    offset: Any,
    table: Any,
    positive: Any,
    negative: Any,
    page_min: Any,
    page_max: Any,
    scores: Any,
    low: Any,
    high: Any,
    semaphores: Any,
) -> None:
    """A block of pages, while the next is copied. Buffers [2, pages * heads, dim], of pages and heads in this order."""
    row, block = pl.program_id(0), pl.program_id(1)

    def copies(block: jax.Array, action: Any) -> None:
        def copy(page: jax.Array, _: int) -> int:
            first = pl.multiple_of(table[0, 0, block * pages + page] * stride + offset[0], TILE_ROWS)
            target = pl.ds(pl.multiple_of(page * heads, TILE_ROWS), heads)
            for j, (bounds, buffer) in enumerate(((page_min, low), (page_max, high))):
                source = bounds.at[pl.ds(first, heads)]
                action(pltpu.make_async_copy(source, buffer.at[block % 2, target], semaphores.at[block % 2, j]))
            return 0

        jax.lax.fori_loop(0, jnp.clip(last[row] - block * pages, 0, pages), copy, 0)

    @pl.when(block == 0)
    def _():
        copies(block, lambda copy: copy.start())

    @pl.when(block + 1 < pl.num_programs(1))
    def _():
        copies(block + 1, lambda copy: copy.start())

    copies(block, lambda copy: copy.wait())

    @pl.when(block * pages < last[row])
    def _():
        precision = jax.lax.Precision.HIGHEST if low.dtype == jnp.float32 else None
        product = functools.partial(
            jax.lax.dot_general,
            dimension_numbers=(((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        bounds = product(positive[0], high[block % 2]) + product(negative[0], low[block % 2])
        query_head = jax.lax.broadcasted_iota(jnp.int32, bounds.shape, 0) // (bounds.shape[0] // heads)
        head = jax.lax.broadcasted_iota(jnp.int32, bounds.shape, 1) % heads
        scores[0, 0] = jnp.where(query_head == head, bounds, MASKED).max(0, keepdims=True)
