"""Row scores on NVIDIA GPUs through Triton: blocks of keys against all queries of a KV head's group at once.

A window of 32 queries in a group of 4 makes a matrix product of 128 columns, so keys pass at the memory's speed.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.triton_support import (
    capability,
    num_multiprocessors,
    platform_problem,
    power_of_two,
    rows_problem,
)

MOST_GROUP_BYTES = 32768
NEG = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are launched.

    Attributes:
      block_rows: rows that a program reads at once, a power of two.
      tile_queries: queries times padded group of one product, a power of two, at least 16 and the padded group.
      num_warps, num_stages: of both kernels.
      programs_per_core: programs per multiprocessor, over which the blocks are shared out.
    """

    block_rows: int
    tile_queries: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_core: int = 2


def default_config(head_dim: int, itemsize: int) -> Config:
    """Tiles that fit the device's shared memory, for keys of `itemsize` bytes in the compute dtype."""
    row_bytes = head_dim * itemsize
    large_shared_memory = capability() in ((8, 0), (9, 0), (10, 0), (10, 3))
    rows = max(16, min(64, 16384 // row_bytes))
    queries = max(16, min(128, 32768 // row_bytes) // (1 if large_shared_memory else 2))
    return Config(rows, queries, num_stages=3 if large_shared_memory and row_bytes <= 256 else 2)


def unsupported(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.row_scores`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(q, pools, names, view, load_tile)


def unsupported_shape(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    q_heads, dim = q.shape[2:]
    if (problem := rows_problem(q, pools, names, ("k",), load_tile)) is not None:
        return problem
    group_bytes = power_of_two(q_heads // view.num_heads) * dim * q.dtype.itemsize
    if group_bytes > MOST_GROUP_BYTES:
        return f"the query heads of a KV head take {group_bytes} bytes, more than {MOST_GROUP_BYTES}"
    return None


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
    config: Config | None = None,
) -> jax.Array:
    """See `api.attention_lse`; `config` overrides how the kernel is launched."""
    scaled = payload.recognise(load_tile, pools, names, q.dtype) == payload.ROW_SCALED
    config = config or default_config(q.shape[3], q.dtype.itemsize)
    return launch_lse(q, pools, view, limit, first, scaled, scale, config, num_multiprocessors())


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
    config: Config | None = None,
    *,
    over: str = "sum",
) -> jax.Array:
    """See `api.row_scores`; `config` overrides how the kernel is launched."""
    scaled = payload.recognise(load_tile, pools, names, q.dtype) == payload.ROW_SCALED
    config = config or default_config(q.shape[3], q.dtype.itemsize)
    how = (scaled, scale, config, num_multiprocessors())
    return launch_scores(q, pools, view, limit, lse, group, *how, over=over)


def _constants(q: jax.Array, pools: Pools, view: PageView, limit: jax.Array, config: Config) -> dict[str, Any]:
    """What both kernels are compiled for."""
    _, queries, q_heads, dim = q.shape
    group = q_heads // view.num_heads
    group_pad = power_of_two(group)
    most_queries = max(1, config.tile_queries // group_pad)
    tile_queries = max(min(most_queries, power_of_two(queries)), -(-16 // group_pad))
    return {
        "PRECISION": "tf32x3" if q.dtype == jnp.float32 else "tf32",
        "QUERIES": queries,
        "HEADS": view.num_heads,
        "LIMIT_HEADS": limit.shape[1],
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "TILE_QUERIES": tile_queries,
        "TILES": -(-queries // tile_queries),
        "DIM": dim,
        "PAGE": pools["k"].shape[1],
        "COLUMNS": view.table.shape[2],
        "TABLE_HEADS": view.table.shape[1],
        "BLOCK": config.block_rows,
    }


def _runs(constants: dict[str, Any], rows_and_heads: int, config: Config, num_cores: int) -> int:
    """Programs that share the blocks of one row and head."""
    most = -(-constants["COLUMNS"] * constants["PAGE"] // config.block_rows)
    return max(1, min(most, num_cores * config.programs_per_core // rows_and_heads))


def launch_lse(
    q: jax.Array,
    pools: Pools,
    view: PageView,
    limit: jax.Array,
    first: int,
    scaled: bool,
    scale: float,
    config: Config,
    num_cores: int,
    compute_capability: int | None = None,
) -> jax.Array:
    """The kernel of log-sum-exps. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.row_scores.triton_kernels")
    batch, queries, q_heads, _ = q.shape
    constants = _constants(q, pools, view, limit, config)
    heads_and_tiles = constants["HEADS"] * constants["TILES"]
    runs = _runs(constants, batch * heads_and_tiles, config, num_cores)
    [parts] = jax_triton.triton_call(
        q,
        pools["k"],
        pools["k_scale" if scaled else "k"],
        view.table,
        jnp.minimum(limit, constants["COLUMNS"] * constants["PAGE"]),
        view.offset,
        view.stride,
        first,
        kernel=kernels.lse_kernel,
        out_shape=[jax.ShapeDtypeStruct((runs, batch, queries, q_heads), jnp.float32)],
        grid=(runs, heads_and_tiles, batch),
        name="attention_lse",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=compute_capability,
        SCALE=float(scale),
        SCALED=scaled,
        BATCH=batch,
        RUNS=runs,
        **constants,
    )
    return merge_parts(parts)


def merge_parts(parts: jax.Array) -> jax.Array:
    """Base-2 log-sum-exps of runs [runs, ...] -> natural ones of all runs [...]."""
    peak = jnp.maximum(parts.max(0), NEG)
    total = jnp.exp2(parts - peak[None]).sum(0)
    return jnp.where(total > 0, (peak + jnp.log2(total)) * jnp.log(2.0).astype(jnp.float32), NEG)


def launch_scores(
    q: jax.Array,
    pools: Pools,
    view: PageView,
    limit: jax.Array,
    lse: jax.Array | None,
    group: str,
    scaled: bool,
    scale: float,
    config: Config,
    num_cores: int,
    compute_capability: int | None = None,
    over: str = "sum",
) -> jax.Array:
    """The kernel of scores. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.row_scores.triton_kernels")
    batch = q.shape[0]
    constants = _constants(q, pools, view, limit, config)
    capacity = constants["COLUMNS"] * constants["PAGE"]
    limit = jnp.minimum(limit, capacity)
    ends = limit.max(2)
    runs = _runs(constants, batch * constants["HEADS"], config, num_cores)
    [scores] = jax_triton.triton_call(
        q,
        pools["k"],
        pools["k_scale" if scaled else "k"],
        view.table,
        limit,
        ends,
        limit if lse is None else lse,
        view.offset,
        view.stride,
        kernel=kernels.scores_kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, constants["HEADS"], capacity), jnp.float32)],
        grid=(runs, constants["HEADS"], batch),
        name="row_scores",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=compute_capability,
        SCALE=float(scale),
        SCALED=scaled,
        MASS=lse is not None,
        ADD=lse is not None and over == "sum",
        SUM=group == "sum",
        RUNS=runs,
        **constants,
    )
    written = jnp.arange(capacity, dtype=jnp.int32)[None, None, :] < ends[:, :, None]
    return jnp.where(written, scores, -jnp.inf if lse is None else 0.0)
