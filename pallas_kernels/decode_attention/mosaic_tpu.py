"""Paged decode attention on TPUs through Mosaic: one program per row and up to eight KV heads."""

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
from sparsejax.pallas_kernels.tpu_support import platform_problem, unsupported_rows

BUFFER_BYTES = 4 * 2**20
LONGEST_BLOCK = 512  # rows


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
    scaled = payload.recognise(load_tile, pools, names, q.dtype, dim) == payload.ROW_SCALED
    reader = Reader.of(pools, view, stored_names(scaled), LONGEST_BLOCK, BUFFER_BYTES)
    group, width = q_heads // reader.heads, reader.width
    query = jnp.pad(q, ((0, 0), (0, 0), (0, width - dim))).reshape(batch, reader.heads, group, width)
    arrays = reader.arrays(pools)
    table, table_spec = reader.table(view)

    def program(row, heads, *prefetched):
        return row, heads, 0, 0

    block = (1, reader.at_once, group)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, reader, scale),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, q.dtype),
            jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, reader.num_programs),
            in_specs=[
                table_spec,
                pl.BlockSpec((*block, width), program),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            ],
            out_specs=[pl.BlockSpec((*block, width), program), pl.BlockSpec((*block, 1), program)],
            scratch_shapes=reader.scratch(pools),
        ),
        cost_estimate=cost(reader, batch, q_heads, 1, arrays[0].dtype.itemsize),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="decode_attention",
    )(view.lengths.reshape(-1), view.offset, table, query, *arrays)
    return out.reshape(batch, q_heads, width)[..., :dim], lse.reshape(batch, q_heads)


def _kernel(reader: Reader, scale: float, lengths: Any, offset: Any, table: Any, q: Any, *refs: Any) -> None:
    """lengths [batch * 1 or heads], offset [heads] and table in scalar memory; q, out [1, at_once, group, width]."""
    pools, (out, lse), buffers, semaphores, _ = reader.split(refs, 2)
    ends = reader.lengths(lengths)
    longest = functools.reduce(jnp.maximum, ends)
    group, width = q.shape[2:]

    def attend(i: jax.Array, carry: Any) -> Any:
        return tuple(head_step(i, head, *carry[head]) for head in range(reader.at_once))

    def head_step(i: jax.Array, head: int, *carry: Any) -> Any:
        slot, left = i % 2, ends[head] - i * reader.block
        clear_tail(buffers[1].at[slot, head], left)
        tiles = [buffer[slot, head] for buffer in buffers[:2]] + [buffer[slot, head][None] for buffer in buffers[2:]]
        return softmax_step(
            q[0, head], lambda shape: jax.lax.broadcasted_iota(jnp.int32, shape, 1) < left, tiles, scale, *carry
        )

    start = tuple(jnp.full((group, n), value, jnp.float32) for n, value in ((1, LEAST_PEAK), (1, 0.0), (width, 0.0)))
    found = reader.run(table, offset, pools, buffers, semaphores, ends, longest, attend, (start,) * reader.at_once)
    for head, carry in enumerate(found):
        result, lse[0, head] = softmax_result(*carry)
        out[0, head] = result.astype(out.dtype)
