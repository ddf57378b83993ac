"""Paged decode attention on TPUs through Mosaic: one program per row and up to eight KV heads.

A program walks over its row's pages in blocks. While it attends to one block, the next is copied from HBM; heads that
share a table entry lie side by side, so one copy serves them all. What is read follows the lengths.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.tpu_support import (
    NEG,
    attention_cost,
    copy_pages,
    decode,
    heads_at_once,
    platform_problem,
    unsupported_rows,
)

BUFFER_BYTES = 4 * 2**20  # two blocks of keys and two of values
LONGEST_BLOCK = 512  # rows


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the kernel is compiled for: `lengths_heads` is 1 or all KV heads, `shared` means one table for all heads."""

    heads: int
    heads_at_once: int
    shared: bool
    lengths_heads: int
    stride: int
    page_size: int
    columns: int
    block_pages: int
    scaled: bool
    scale: float


def unsupported(q: jax.Array, pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.decode_attention`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_rows(pools, names, view, load_tile, q.shape[1], q.shape[2], q.dtype)


def decode_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.decode_attention`."""
    batch, q_heads, dim = q.shape
    page_size, width = pools["k"].shape[1:]
    heads, table_heads, columns = view.num_heads, *view.table.shape[1:]
    at_once, group = heads_at_once(heads), q_heads // heads
    shared = table_heads == 1
    scaled = payload.recognise(load_tile, pools, names, q.dtype, dim) == payload.ROW_SCALED
    rows = min(LONGEST_BLOCK, BUFFER_BYTES // (4 * at_once * width * pools["k"].dtype.itemsize))
    block_pages = max(1, min(rows // page_size, columns))
    rows = block_pages * page_size
    call = _Call(
        heads, at_once, shared, view.lengths.shape[1], view.stride, page_size, columns, block_pages, scaled, scale
    )
    query = jnp.pad(q, ((0, 0), (0, 0), (0, width - dim))).reshape(batch, heads, group, width)
    table_rows = 1 if shared else at_once
    table = view.table.reshape(-1, table_rows, columns)
    arrays = [pools[name] for name in (("k", "v", "k_scale", "v_scale") if scaled else ("k", "v"))]

    def program(row, head_block, *prefetched):
        return row, head_block, 0, 0

    def table_of(row, head_block, *prefetched):
        return (row if shared else row * (heads // at_once) + head_block), 0, 0

    buffers = [pltpu.VMEM((2, at_once, rows, *array.shape[2:]), array.dtype) for array in arrays]
    out, lse = pl.pallas_call(
        functools.partial(_kernel, call),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, q.dtype),
            jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads // at_once),
            in_specs=[
                pl.BlockSpec((1, table_rows, columns), table_of, memory_space=pltpu.SMEM),
                pl.BlockSpec((1, at_once, group, width), program),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            ],
            out_specs=[
                pl.BlockSpec((1, at_once, group, width), program),
                pl.BlockSpec((1, at_once, group, 1), program),
            ],
            scratch_shapes=[*buffers, pltpu.SemaphoreType.DMA((2, len(arrays)))],
        ),
        cost_estimate=attention_cost(batch, q_heads, 1, width, view, pools, scaled),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="decode_attention",
    )(view.lengths.reshape(-1), view.offset, table, query, *arrays)
    return out.reshape(batch, q_heads, width)[..., :dim], lse.reshape(batch, q_heads)


def _kernel(call: _Call, lengths: Any, offset: Any, table: Any, q: Any, *refs: Any) -> None:
    """lengths [batch * lengths_heads] and offset [heads] in SMEM, table [1, 1 or heads_at_once, columns]."""
    num_arrays = 4 if call.scaled else 2
    pools, (out, lse), (*buffers, semaphores) = (
        refs[:num_arrays],
        refs[num_arrays : num_arrays + 2],
        refs[num_arrays + 2 :],
    )
    row, first_head = pl.program_id(0), pl.program_id(1) * call.heads_at_once
    members = range(call.heads_at_once)
    capacity = call.columns * call.page_size
    if call.lengths_heads == 1:
        length_of = [jnp.minimum(lengths[row], capacity)] * call.heads_at_once
    else:
        length_of = [jnp.minimum(lengths[row * call.heads + first_head + h], capacity) for h in members]
    longest = functools.reduce(jnp.maximum, length_of)
    block = call.block_pages * call.page_size
    num_blocks = pl.cdiv(longest, block)
    table_rows = [longest] if call.shared else length_of

    def copies(i, action):
        def head_page_of(table_row, page):
            entry = table[0, table_row, i * call.block_pages + page]
            return entry * call.stride + offset[first_head + table_row]

        pages = [pl.cdiv(length, call.page_size) - i * call.block_pages for length in table_rows]
        counts = [jnp.clip(count, 0, call.block_pages) for count in pages]
        adjacent = call.heads_at_once if call.shared else 1
        arrays = list(zip(pools, buffers, strict=True))
        copy_pages(arrays, semaphores, i % 2, head_page_of, counts, adjacent, call.page_size, action)

    @pl.when(num_blocks > 0)
    def _():
        copies(0, lambda copy: copy.start())

    def step(i, carry):
        @pl.when(i + 1 < num_blocks)
        def _():
            copies(i + 1, lambda copy: copy.start())

        copies(i, lambda copy: copy.wait())
        return tuple(_attend(call, q, buffers, i, h, length_of[h], carry[h]) for h in members)

    group, width = q.shape[2:]
    start = (
        jnp.full((group, 1), NEG, jnp.float32),
        jnp.zeros((group, 1), jnp.float32),
        jnp.zeros((group, width), jnp.float32),
    )
    found = jax.lax.fori_loop(0, num_blocks, step, (start,) * call.heads_at_once)
    for h, (peak, total, sums) in enumerate(found):
        total = jnp.maximum(total, 1e-30)
        out[0, h] = (sums / total).astype(out.dtype)
        lse[0, h] = peak + jnp.log(total)


def _attend(call: _Call, q: Any, buffers: Any, i: jax.Array, head: int, length: jax.Array, carry: Any) -> Any:
    """Online softmax of one head over a block; `carry` is (peak, total, weighted sum of values)."""
    peak, total, sums = carry
    keys, values = buffers[:2]
    slot, dtype = i % 2, q.dtype
    block = keys.shape[2]
    left = length - i * block  # rows of this block that are the row's own
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(left < block)
    def _():
        # A weight of zero would still turn what lies there into NaN.
        tile = values[slot, head]
        tile = tile.astype(jnp.int32 if tile.dtype == jnp.uint8 else jnp.float32)
        own = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0) < left
        values[slot, head] = jnp.where(own, tile, 0).astype(values.dtype)

    logits = product(q[0, head], decode(keys[slot, head], dtype), (((1,), (1,)), ((), ()))) * call.scale
    if call.scaled:
        logits *= buffers[2][slot, head][None, :]
    own = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < left
    logits = jnp.where(own, logits, NEG)
    new_peak = jnp.maximum(peak, logits.max(1, keepdims=True))
    weights = jnp.where(own, jnp.exp(logits - new_peak), 0.0)
    decay = jnp.exp(peak - new_peak)
    total = total * decay + weights.sum(1, keepdims=True)
    if call.scaled:
        weights = jnp.where(own, weights * buffers[3][slot, head][None, :], 0.0)
    part = product(weights.astype(dtype), decode(values[slot, head], dtype), (((1,), (0,)), ((), ())))
    return new_peak, total, sums * decay + part
