"""Block-sparse prefill attention on Hopper through Pallas Mosaic GPU: the pipeline of `prefill_attention`, over lists.

A block of the grid takes 128 packed rows of queries. Its steps are the blocks of keys on its tile's list instead of all
those before its last query, and blocks with long lists are launched first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.block_sparse_attention.tiles import pack_queries, readable, unpack_queries
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.mosaic_support import platform_problem
from sparsejax.pallas_kernels.prefill_attention import mosaic_gpu as dense
from sparsejax.pallas_kernels.prefill_attention.mosaic_gpu import COMPUTE_WARPGROUPS, WARPGROUP_QUERIES

LAUNCH_ROWS = COMPUTE_WARPGROUPS * WARPGROUP_QUERIES  # packed rows of a block of the grid
LEAST_STEP = 64  # keys


@dataclasses.dataclass(frozen=True)
class Problem(dense.Problem):
    """What a kernel is compiled for.

    Attributes:
      chunk: packed rows of a KV head, a multiple of `LAUNCH_ROWS`.
      tile_rows: packed rows of a tile, a multiple of `LAUNCH_ROWS`.
      biased: whether a tile's steps are the first keys there are, with a bias on logits, instead of listed blocks.
    """

    tile_rows: int = LAUNCH_ROWS
    biased: bool = False

    @property
    def sharers(self) -> int:
        return 1

    @property
    def launches(self) -> int:
        """Blocks of the grid of one KV head."""
        return self.chunk // LAUNCH_ROWS


def unsupported(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    block_size: int,
    tile_rows: int,
) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.block_sparse_attention`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(q, pools, names, view, load_tile, block_size, tile_rows)


def unsupported_shape(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    block_size: int,
    tile_rows: int,
) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    if (problem := dense.unsupported_shape(q, pools, names, view, load_tile)) is not None:
        return problem
    if tile_rows % LAUNCH_ROWS:
        return f"tiles of {tile_rows} rows are not a multiple of {LAUNCH_ROWS}"
    step, page = config_of(q.shape[3], block_size).block_rows, pools["k"].shape[1]
    if step % LEAST_STEP or block_size % step:
        return f"blocks of {block_size} rows are neither a multiple of {LEAST_STEP} nor a part of {step}"
    if step % page and page % step:
        return f"pages of {page} rows neither divide {step} rows nor are their multiple"
    return None


def config_of(head_dim: int, block_size: int) -> dense.Config:
    """A step is a block, or as much of it as fits."""
    config = dense.default_config(head_dim)
    if block_size >= config.block_rows:
        return config
    return dataclasses.replace(config, block_rows=block_size, stages=2 * config.stages)


def block_sparse_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    blocks: jax.Array,
    num_blocks: jax.Array,
    block_size: int,
    tile_rows: int,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_sparse_attention`."""
    config = config_of(q.shape[3], block_size)
    problem = describe(q, pools["k"], view, tile_rows, scale, config)
    each = block_size // config.block_rows
    if each > 1:
        part = jnp.arange(each, dtype=jnp.int32)[None, None, None, None]
        blocks = (blocks[..., None] * each + part).reshape(*blocks.shape[:3], -1)
        num_blocks = num_blocks * each
    return launch(problem, q, pools["k"], pools["v"], view.table, view.offset, view.lengths, start, blocks, num_blocks)


def describe(
    q: jax.Array, k: jax.Array, view: PageView, tile_rows: int, scale: float, config: dense.Config, biased: bool = False
) -> Problem:
    """The problem that a call poses.

    Raises:
      ValueError: the scale is not positive.
    """
    like = dense.describe(q, {"k": k}, view, scale, config)
    fields: dict[str, Any] = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}
    rows = -(-q.shape[1] * like.group // tile_rows) * tile_rows
    return Problem(**fields | {"chunk": rows, "tile_rows": tile_rows, "biased": biased})


@functools.partial(jax.jit, static_argnums=0)  # lowered once, however many layers call it
def launch(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    offset: jax.Array,
    lengths: jax.Array,
    start: jax.Array,
    blocks: jax.Array,
    num_blocks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The kernel on packed queries, with lists of blocks of a step's rows."""
    view = PageView(table, problem.stride, offset, lengths)
    start = jnp.broadcast_to(start, lengths.shape)
    shape = {"tile_rows": problem.tile_rows, "group": problem.group, "chunk": q.shape[1]}
    steps, whole = readable(view, start, blocks, num_blocks, block_size=problem.config.block_rows, **shape)
    return call(problem, q, k, v, table, offset, steps, whole, lengths, start, blocks)


def call(problem: Problem, q: jax.Array, *arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The kernel on queries [batch, chunk, q_heads, dim]; `arguments` are k, v, table, offset, steps and the rest."""
    kernels = importlib.import_module("sparsejax.pallas_kernels.block_sparse_attention.mosaic_kernels")
    packed = pack_queries(q, problem.heads, problem.tile_rows)
    steps = arguments[4]
    out, lse = kernels.build(problem)(packed, *arguments[:4], launch_order(problem, steps), *arguments[4:])
    return unpack_queries(out, q.shape[1], problem.group), unpack_queries(lse, q.shape[1], problem.group)


def launch_order(problem: Problem, steps: jax.Array) -> jax.Array:
    """int32 [blocks of the grid]: which comes when, those with most steps first, by powers of two.

    A long list that began last would keep one multiprocessor busy alone. Among lists of a kind, tiles of one KV head
    follow each other, from the last one down, so that what they read stays in the L2 cache.
    """
    bits = jnp.repeat(32 - jax.lax.clz(steps), problem.tile_rows // LAUNCH_ROWS, axis=2).reshape(-1)
    return jnp.argsort(bits, stable=True)[::-1].astype(jnp.int32)
