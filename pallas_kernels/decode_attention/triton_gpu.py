"""Paged decode attention on NVIDIA GPUs through Triton: split-KV flash decoding over head-pages.

The kernel shares out the work by lengths at run time (`triton_kernels`), so one compiled program serves every mixture
of lengths without asking the host. A second small kernel merges what several programs found for one row.
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

LARGEST_GROUP = 64
MOST_ENTRIES = 4096  # every program scans all lengths


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are launched.

    Attributes:
      block_rows: rows that a program reads at once, a power of two.
      num_warps, num_stages: of the attention kernel.
      programs_per_core: programs per multiprocessor; as many as run at once, since all take equally long.
      least_rows: rows below which a program's share is not cut further.
    """

    block_rows: int
    num_warps: int = 4
    num_stages: int = 5
    programs_per_core: int = 3
    least_rows: int = 128


def default_config(head_dim: int, itemsize: int, scaled: bool) -> Config:
    """The best found on an H200 (`python -m benchmarks.decode_attention --sweep`).

    Tiles of 8 KiB for keys and as much for values, in the compute dtype of `itemsize` bytes. Codes that are read in
    pairs have four times the rows, since they take half the memory and more instructions; in float32, twice the rows.
    """
    pairs = scaled and itemsize == 2
    tile_bytes = 32768 if pairs else 16384 if scaled else 8192
    rows = max(16, min(128, tile_bytes // (head_dim * itemsize)))
    large_shared_memory = capability() in ((8, 0), (9, 0), (10, 0), (10, 3))
    return Config(rows, num_stages=5 if large_shared_memory else 3, programs_per_core=2 if pairs else 3)


def unsupported(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.decode_attention`."""
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
    batch, q_heads, _ = q.shape
    if (problem := rows_problem(q, pools, names, ("k", "v"), load_tile)) is not None:
        return problem
    if q_heads // view.num_heads > LARGEST_GROUP:
        return f"{q_heads // view.num_heads} query heads share a KV head, more than {LARGEST_GROUP}"
    if batch * view.lengths.shape[1] > MOST_ENTRIES:
        return f"{batch} rows have {batch * view.lengths.shape[1]} lengths, more than {MOST_ENTRIES}"
    return None


def decode_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.decode_attention`; `config` overrides how the kernels are launched."""
    scaled = payload.recognise(load_tile, pools, names, q.dtype) == payload.ROW_SCALED
    config = config or default_config(q.shape[2], q.dtype.itemsize, scaled)
    out, lse, _ = launch(q, pools, view, scaled, scale, config, num_multiprocessors())
    return out, lse


def cut_at_rows(programs: int, rows: int, spare: int) -> int:
    """About as many programs, as a multiple of the rows or with whole rows for each, if that leaves few cores idle.

    Equally long rows then begin and end with shares wherever their blocks divide, and a program that goes from one row
    to the next starts its loads anew. One program per row may be up to `spare` more than asked for.
    """
    if programs < rows <= programs + spare:
        return rows
    fitting = programs // rows * rows if rows <= programs else -(-rows // -(-rows // programs))
    return fitting if fitting >= 0.9 * programs else programs


def launch(
    q: jax.Array,
    pools: Pools,
    view: PageView,
    scaled: bool,
    scale: float,
    config: Config,
    num_cores: int,
    compute_capability: int | None = None,
    with_logits: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both kernels. `compute_capability` (such as 90) is only needed where no GPU can be asked.

    Returns:
      out, lse and, `with_logits`, scaled logits to the base 2, float32 [batch, q_heads, columns * page_size]; anything
      past the end of a row.
    """
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.decode_attention.triton_kernels")
    batch, q_heads, dim = q.shape
    heads, page_size = view.num_heads, pools["k"].shape[1]
    group = q_heads // heads
    table_heads, columns = view.table.shape[1:]
    lengths_heads = view.lengths.shape[1]
    entries, heads_per_entry = batch * lengths_heads, heads // lengths_heads

    block = config.block_rows
    least_blocks = max(1, config.least_rows // block)
    most_blocks = -(-columns * page_size // block)  # of a row that fills the table
    # Each program takes ceil(blocks / programs) blocks, so more programs than these would find nothing to do.
    programs = min(num_cores * config.programs_per_core, -(-batch * heads * most_blocks // least_blocks))
    programs = cut_at_rows(programs, batch * heads, num_cores)
    slots = programs + batch * heads
    common: dict[str, Any] = {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "ENTRIES": entries,
        "ENTRIES_POW2": max(16, power_of_two(entries)),
        "HEADS_PER_ENTRY": heads_per_entry,
        "BLOCK": block,
        "PROGRAMS": programs,
        "LEAST_BLOCKS": least_blocks,
        "compute_capability": compute_capability,
    }
    part_out, part_lse, logits = jax_triton.triton_call(
        q,
        pools["k"],
        pools["v"],
        pools["k_scale" if scaled else "k"],
        pools["v_scale" if scaled else "v"],
        view.table,
        view.lengths,
        view.offset,
        view.stride,
        kernel=kernels.attend_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((slots, group, dim), jnp.float32),
            jax.ShapeDtypeStruct((slots, group), jnp.float32),
            jax.ShapeDtypeStruct((batch, q_heads, columns * page_size) if with_logits else (1,), jnp.float32),
        ],
        grid=(programs,),
        name="decode_attention",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=float(scale),
        SCALED=scaled,
        PAIRS=scaled and q.dtype != jnp.float32,
        LOGITS=with_logits,
        PRECISION="tf32x3" if q.dtype == jnp.float32 else "tf32",
        GROUP_PAD=max(16, power_of_two(group)),
        PAGE=page_size,
        COLUMNS=columns,
        TABLE_HEADS=table_heads,
        **common,
    )
    # A merging program reads as many parts at once as a row has on average; a few parts need only one warp.
    tile = max(4, min(32, power_of_two(programs // (batch * heads) + 2)))
    parts_pow2 = power_of_two(min(programs, -(-most_blocks // least_blocks) + 1))
    out, lse = jax_triton.triton_call(
        part_out,
        part_lse,
        view.lengths,
        kernel=kernels.merge_kernel,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, q_heads), jnp.float32)],
        grid=(q_heads, batch),
        name="decode_attention_merge",
        num_warps=1 if tile <= 8 else 4,
        num_stages=2,
        CAPACITY=columns * page_size,
        PARTS_POW2=parts_pow2,
        TILE=tile,
        **common,
    )
    return out, lse, logits
