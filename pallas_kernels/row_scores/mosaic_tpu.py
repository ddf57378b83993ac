"""Row scores on TPUs through Mosaic: one program per row and up to eight KV heads, which streams their keys once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LANES, LoadTile, PageView, Pools, pad_columns
from sparsejax.pallas_kernels.tpu_pages import LEAST_PEAK, MASKED, Reader, cost, logits_of
from sparsejax.pallas_kernels.tpu_support import platform_problem, sublanes, unsupported_rows

BUFFER_BYTES = 4 * 2**20
LONGEST_BLOCK = 512  # rows of keys
MOST_QUERIES = 1024  # of all query heads of a KV head
MOST_ROWS = 262144  # that one table holds: their scores stay in VMEM until all are known
VMEM_BYTES = 64 * 2**20  # v5e and v6e have 128 MiB


def unsupported(q: jax.Array, pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.row_scores`."""
    if (problem := platform_problem()) is not None:
        return problem
    queries, q_heads, dim = q.shape[1:]
    if (problem := unsupported_rows(pools, names, view, load_tile, q_heads, dim, q.dtype)) is not None:
        return problem
    rows = _padded(queries, q.dtype) * q_heads // view.num_heads
    if rows > MOST_QUERIES:
        return f"{queries} queries of a group of {q_heads // view.num_heads} are more than {MOST_QUERIES}"
    page_size = pools["k"].shape[1]
    if LANES % page_size and page_size % LANES:
        return f"pages of {page_size} rows do not fill {LANES} lanes of scores"
    if view.table.shape[2] * page_size > MOST_ROWS:
        return f"tables of {view.table.shape[2] * page_size} rows are longer than {MOST_ROWS}"
    return None


def _padded(queries: int, dtype: jax.typing.DTypeLike) -> int:
    return -(-queries // sublanes(dtype)) * sublanes(dtype)


def attention_lse(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    first: int,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> jax.Array:
    """See `api.attention_lse`."""
    batch, queries, q_heads, _ = q.shape
    heads, group, padded = view.num_heads, q_heads // view.num_heads, _padded(queries, q.dtype)
    shape = (batch, heads, group * padded, 1)
    lse = _launch(functools.partial(_lse_kernel, scale, first), shape, q, pools, names, view, limit, None, load_tile, 2)
    lse = lse.reshape(batch, heads, group, padded)[..., :queries]
    return jnp.moveaxis(lse, 3, 1).reshape(batch, queries, q_heads)


def row_scores(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    lse: jax.Array | None,
    group: str,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    *,
    over: str = "sum",
) -> jax.Array:
    """See `api.row_scores`."""
    capacity = view.table.shape[2] * pools["k"].shape[1]
    add = lse is not None and over == "sum"
    kernel = functools.partial(_score_kernel, scale, q.shape[2] // view.num_heads, group, add)
    shape = (q.shape[0], view.num_heads, 1, -1)
    return _launch(kernel, shape, q, pools, names, view, limit, lse, load_tile)[:, :, 0, :capacity]


def _launch(
    kernel: Callable[..., None],
    shape: tuple[int, ...],
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    lse: jax.Array | None,
    load_tile: LoadTile,
    num_columns: int = 0,
) -> jax.Array:
    """float32 of `shape`, a program's share of it its row and heads; -1 stands for the rows of the tables, rounded up.

    Queries are laid out [batch, heads, group * queries, width], the numbers of each query as columns beside them. The
    kernel gets `num_columns` more such columns to work with.
    """
    batch, queries, q_heads, dim = q.shape
    page_size, width = pools["k"].shape[1:]
    scaled = payload.recognise(load_tile, pools, names, q.dtype, dim) == payload.ROW_SCALED
    ends = limit.max(2)
    pages = max(1, LANES // page_size)  # scores are stored by whole lines
    view = pad_columns(view._replace(lengths=ends), pages)
    reader = Reader.of(pools, view, ("k", "k_scale") if scaled else ("k",), LONGEST_BLOCK, BUFFER_BYTES)
    view = pad_columns(view, block_pages := max(pages, reader.block_pages // pages * pages))
    reader = dataclasses.replace(reader, block_pages=block_pages, columns=view.table.shape[2])
    heads, group, padded = view.num_heads, q_heads // view.num_heads, _padded(queries, q.dtype)
    shape = tuple(view.table.shape[2] * page_size if size < 0 else size for size in shape)

    def beside(x: jax.Array, fill: int) -> jax.Array:
        """[batch, heads, group, queries, ...] -> [batch, heads, group * padded queries, ...]."""
        extra = ((0, 0),) * 3 + ((0, padded - queries),) + ((0, 0),) * (x.ndim - 4)
        x = jnp.pad(x, extra, constant_values=fill)
        return x.reshape(*x.shape[:2], group * padded, *x.shape[4:])

    query = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width - dim))).reshape(batch, queries, heads, group, width)
    query = beside(query.transpose(0, 2, 3, 1, 4), 0)
    columns = [beside(jnp.broadcast_to(limit[:, :, None, :, None], (batch, heads, group, queries, 1)), 0)]
    if lse is not None:
        columns.append(beside(lse.reshape(batch, queries, heads, group, 1).transpose(0, 2, 3, 1, 4), 0))

    def program(row: jax.Array, head_block: jax.Array, *prefetched: Any) -> tuple[Any, ...]:
        return row, head_block, 0, 0

    def block(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, reader.at_once, *array.shape[2:]), program)

    column = (reader.at_once, group * padded, 1)
    table, table_spec = reader.table(view)
    arrays = reader.arrays(pools)
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(kernel, reader, lse is not None),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, reader.num_programs),
            in_specs=[
                table_spec,
                *[block(x) for x in (query, *columns)],
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            ],
            out_specs=block(out),
            scratch_shapes=[*reader.scratch(pools), *[pltpu.VMEM(column, jnp.float32)] * num_columns],
        ),
        cost_estimate=cost(reader, batch, q_heads, queries, arrays[0].dtype.itemsize),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        name="row_scores",
    )(ends.reshape(-1), view.offset, table, query, *columns, *arrays)


def _lse_kernel(
    scale: float,
    first: int,
    reader: Reader,
    has_lse: bool,
    ends: Any,
    offset: Any,
    table: Any,
    q: Any,
    limits: Any,
    *refs: Any,
) -> None:
    """Blocks q [1, at_once, group * queries, width], limits and out [1, at_once, group * queries, 1]."""
    pools, (out,), buffers, semaphores, (peaks, totals) = reader.split(refs, 1)
    peaks[...] = jnp.full(peaks.shape, LEAST_PEAK, jnp.float32)
    totals[...] = jnp.zeros(totals.shape, jnp.float32)

    def one_head(i: jax.Array, head: jax.Array) -> None:
        logits, row = _logits(reader, i, head, q, buffers, scale)
        logits = jnp.where((row < limits[0, head]) & (row >= first), logits, MASKED)
        peak = jnp.maximum(peaks[head], logits.max(1, keepdims=True))
        mass = jnp.exp(logits - peak).sum(1, keepdims=True)
        totals[head] = totals[head] * jnp.exp(peaks[head] - peak) + mass
        peaks[head] = peak

    _each_block(reader, table, offset, pools, buffers, semaphores, ends, one_head)
    for head in range(reader.at_once):
        lse = peaks[head] + jnp.log(jnp.maximum(totals[head], 1e-30))
        out[0, head] = jnp.where(totals[head] > 0, lse, MASKED)


def _score_kernel(
    scale: float,
    group: int,
    join: str,
    add: bool,
    reader: Reader,
    has_lse: bool,
    ends: Any,
    offset: Any,
    table: Any,
    q: Any,
    limits: Any,
    *refs: Any,
) -> None:
    """As `_lse_kernel`, with a block of lse after the limits if there is one; out [1, at_once, 1, table's rows]."""
    lses, refs = (refs[0], refs[1:]) if has_lse else (None, refs)
    pools, (out,), buffers, semaphores, _ = reader.split(refs, 1)
    outside = -jnp.inf if lses is None else 0.0
    out[...] = jnp.full(out.shape, outside, jnp.float32)

    def one_head(i: jax.Array, head: jax.Array) -> None:
        logits, row = _logits(reader, i, head, q, buffers, scale)
        seen = row < limits[0, head]
        if lses is not None:
            logits = jnp.minimum(logits - lses[0, head], 0.0)
        if add:
            votes = jnp.where(seen, jnp.exp(logits), 0.0).reshape(group, -1, reader.block).sum(1)
        else:
            votes = jnp.where(seen, logits, -jnp.inf).reshape(group, -1, reader.block).max(1)
        if lses is not None and not add:
            votes = jnp.exp(votes)
        votes = votes.max(0, keepdims=True) if join == "max" else votes.sum(0, keepdims=True)
        out[0, head, :, pl.ds(pl.multiple_of(i * reader.block, LANES), reader.block)] = votes

    _each_block(reader, table, offset, pools, buffers, semaphores, ends, one_head)


def _logits(
    reader: Reader, i: jax.Array, head: jax.Array, q: Any, buffers: Any, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Logits of all queries of a head over a block, and each row's index."""
    scales = [buffer[i % 2, pl.ds(head, 1)] for buffer in buffers[1:]]
    logits = logits_of(q[0, head], buffers[0][i % 2, head], scales, scale)
    return logits, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + i * reader.block


def _each_block(
    reader: Reader,
    table: Any,
    offset: Any,
    pools: Any,
    buffers: Any,
    semaphores: Any,
    ends_ref: Any,
    one_head: Callable[[jax.Array, jax.Array], None],
) -> None:
    """Calls `one_head(block, head)` for each block that a query sees."""
    ends = reader.lengths(ends_ref)

    def compute(i: jax.Array, carry: int) -> int:
        def head_step(head: jax.Array, carry: int) -> int:
            one_head(i, head)
            return carry

        return jax.lax.fori_loop(0, reader.at_once, head_step, carry)

    longest = functools.reduce(jnp.maximum, ends)
    reader.run(table, offset, pools, buffers, semaphores, ends, longest, compute, 0)
