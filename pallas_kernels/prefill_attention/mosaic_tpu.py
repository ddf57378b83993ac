"""Paged prefill attention on TPUs through Mosaic: one program per row, up to eight KV heads and a block of queries."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.tpu_pages import (
    LEAST_PEAK,
    Reader,
    clear_tail,
    cost,
    softmax_result,
    softmax_step,
    stored_names,
)
from sparsejax.pallas_kernels.tpu_support import platform_problem, sublanes, unsupported_rows

BUFFER_BYTES = 4 * 2**20
LONGEST_BLOCK = 512  # rows of keys
MOST_QUERIES = 512  # of all query heads of a KV head, in one program
VMEM_BYTES = 64 * 2**20  # v5e and v6e have 128 MiB


def unsupported(q: jax.Array, pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.prefill_attention`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_rows(pools, names, view, load_tile, q.shape[2], q.shape[3], q.dtype)


def block_queries(chunk: int, group: int, dtype: jax.typing.DTypeLike) -> int:
    """Queries that a program takes of each query head: a power of two, at least what a tile holds."""
    queries = sublanes(dtype)
    while 2 * queries * group <= MOST_QUERIES and queries < chunk:
        queries *= 2
    return queries


def prefill_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.prefill_attention`."""
    batch, chunk, q_heads, dim = q.shape
    scaled = payload.recognise(load_tile, pools, names, q.dtype, dim) == payload.ROW_SCALED
    reader = Reader.of(pools, view, stored_names(scaled), LONGEST_BLOCK, BUFFER_BYTES)
    heads, width = reader.heads, reader.width
    group = q_heads // heads
    queries = block_queries(chunk, group, q.dtype)
    num_blocks = -(-chunk // queries)
    query = jnp.pad(q, ((0, 0), (0, num_blocks * queries - chunk), (0, 0), (0, width - dim)))
    query = query.reshape(batch, num_blocks, queries, heads, group, width).transpose(0, 1, 3, 4, 2, 5)
    query = query.reshape(batch, num_blocks, heads, group * queries, width)
    arrays = reader.arrays(pools)
    table, table_spec = reader.table(view)
    rows, per_program = group * queries, reader.at_once

    def program(row, head_block, block, *prefetched):
        return row, block, head_block, 0, 0

    first = jnp.broadcast_to(start, view.lengths.shape) if start.shape[1] == 1 else start
    lengths = jnp.broadcast_to(view.lengths, first.shape)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, reader, scale, queries, lengths.shape[1]),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, num_blocks, reader.num_programs, per_program, rows), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, reader.num_programs, num_blocks),
            in_specs=[
                table_spec,
                pl.BlockSpec((1, 1, per_program, rows, width), program),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            ],
            out_specs=[
                pl.BlockSpec((1, 1, per_program, rows, width), program),
                pl.BlockSpec((1, 1, 1, per_program, rows), program),
            ],
            scratch_shapes=[
                *reader.scratch(pools),
                pltpu.VMEM((per_program, rows, 1), jnp.float32),
                pltpu.VMEM((per_program, rows, 1), jnp.float32),
                pltpu.VMEM((per_program, rows, width), jnp.float32),
            ],
        ),
        cost_estimate=cost(reader, batch, q_heads, chunk, arrays[0].dtype.itemsize),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="prefill_attention",
    )(lengths.reshape(-1), first.reshape(-1), view.offset, table, query, *arrays)

    def unfold(x: jax.Array) -> jax.Array:  # [batch, blocks, ..., group * queries, ...] -> [batch, chunk, q_heads, ...]
        x = x.reshape(batch, num_blocks, heads, group, queries, -1).transpose(0, 1, 4, 2, 3, 5)
        return x.reshape(batch, num_blocks * queries, q_heads, -1)[:, :chunk]

    return unfold(out)[..., :dim], unfold(lse)[..., 0]


def _kernel(
    reader: Reader,
    scale: float,
    queries: int,
    lengths_heads: int,
    lengths: Any,
    starts: Any,
    offset: Any,
    table: Any,
    q: Any,
    *refs: Any,
) -> None:
    """lengths and starts [batch * lengths_heads], offset [heads] and table in scalar memory.

    q, out [1, 1, at_once, group * queries, width]; lse [1, 1, 1, at_once, group * queries].
    """
    pools, (out, lse), buffers, semaphores, (peaks, totals, sums) = reader.split(refs, 2)
    first_query = pl.program_id(2) * queries
    row, first_head = pl.program_id(0), pl.program_id(1) * reader.at_once
    rows = q.shape[3]

    def place(head: Any) -> Any:
        return row if lengths_heads == 1 else row * reader.heads + first_head + head

    def end_of(head: Any) -> jax.Array:
        """Rows that this program's queries see of a head at most; none if all of them are padding."""
        length = jnp.minimum(lengths[place(head)], reader.columns * reader.page_size)
        start = starts[place(head)] + first_query
        return jnp.where(start < length, jnp.minimum(start + queries, length), 0)

    ends = [end_of(head) for head in range(reader.at_once)]
    longest = functools.reduce(jnp.maximum, ends)
    peaks[...] = jnp.full(peaks.shape, LEAST_PEAK, jnp.float32)
    totals[...] = jnp.zeros(totals.shape, jnp.float32)
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def attend(i: jax.Array, carry: Any) -> Any:
        jax.lax.fori_loop(0, reader.at_once, lambda head, _: head_step(i, head), 0)
        return carry

    def head_step(i: jax.Array, head: jax.Array) -> int:
        slot, before = i % 2, i * reader.block
        end = end_of(head)
        clear_tail(buffers[1].at[slot, head], end - before)
        start = starts[place(head)] + first_query - before

        def own(shape: tuple[int, ...]) -> jax.Array:
            query = jax.lax.broadcasted_iota(jnp.int32, shape, 0) & (queries - 1)
            key = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            return key < jnp.minimum(query + (start + 1), end - before)

        tiles = [buffer[slot, head] for buffer in buffers[:2]]
        tiles += [buffer[slot, pl.ds(head, 1)] for buffer in buffers[2:]]
        state = peaks[head], totals[head], sums[head]
        peaks[head], totals[head], sums[head] = softmax_step(q[0, 0, head], own, tiles, scale, *state)
        return 0

    reader.run(table, offset, pools, buffers, semaphores, ends, longest, attend, 0)
    for head in range(reader.at_once):
        result, lse_column = softmax_result(peaks[head], totals[head], sums[head])
        out[0, 0, head] = result.astype(out.dtype)
        lse[0, 0, 0, head : head + 1] = jnp.broadcast_to(lse_column, (rows, 128)).T[:1]
