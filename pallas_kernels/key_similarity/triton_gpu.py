"""Key similarity on NVIDIA GPUs through Triton: four kernels, whatever the number of rows, that don't ask the host."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.key_similarity.xla import column_means, fraction_bits
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.triton_support import capability, num_multiprocessors, platform_problem, rows_problem

NEWEST = 512
"""Rows at the end that all rows are compared with first."""

SPAN = 512
"""Rows that a tile of the others is compared with in one piece of work."""

STREAMED = 32
"""Rows at once of the kernels that only read them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are launched.

    Attributes:
      rows: rows that a program compares with as many others at once, a power of two, at least 16.
      num_warps, num_stages: of the kernels that compare.
      programs_per_core: programs per multiprocessor, over which the tiles are shared out.
    """

    rows: int
    num_warps: int
    num_stages: int = 2
    programs_per_core: int = 2


def default_config(head_dim: int, itemsize: int) -> Config:
    """Tiles that fit the device's shared memory, for keys of `itemsize` bytes in the compute dtype."""
    large_shared_memory = capability() in ((8, 0), (9, 0), (10, 0), (10, 3))
    rows = max(16, min(128, (32768 if large_shared_memory else 16384) // (head_dim * itemsize)))
    return Config(rows, 4)  # H200: 8 warps take 1.2 times as long at 5K rows and 1.4 times at 33K


def unsupported(pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.key_similarity`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(pools, names, view, load_tile)


def unsupported_shape(pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    return rows_problem(_row(pools, names, load_tile), pools, names, ("k",), load_tile)  # type: ignore[arg-type]


def _row(pools: Pools, names: tuple[str, ...], load_tile: LoadTile) -> jax.ShapeDtypeStruct:
    """A decoded key."""
    tiles = {name: jax.ShapeDtypeStruct((1, 1, *pools[name].shape[1:]), pools[name].dtype) for name in names}
    key, _ = jax.eval_shape(load_tile, tiles, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.ShapeDtypeStruct(key.shape[3:], key.dtype)


def key_similarity(
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    threshold: float,
    tile: int,
    load_tile: LoadTile,
    layer: jax.Array,
    config: Config | None = None,
) -> jax.Array:
    """See `api.key_similarity`; `config` overrides how the kernels are launched."""
    dtype = _row(pools, names, load_tile).dtype
    scaled = payload.recognise(load_tile, pools, names, dtype) == payload.ROW_SCALED
    config = config or default_config(pools["k"].shape[2], dtype.itemsize)
    return launch(pools, view, threshold, dtype, scaled, config, num_multiprocessors())


def launch(
    pools: Pools,
    view: PageView,
    threshold: float,
    dtype: Any,
    scaled: bool,
    config: Config,
    num_cores: int,
    compute_capability: int | None = None,
) -> jax.Array:
    """The kernels. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    language = importlib.import_module("triton.language")
    kernels = importlib.import_module("sparsejax.pallas_kernels.key_similarity.triton_kernels")
    page_size, dim = pools["k"].shape[1:]
    heads, (table_heads, columns) = view.num_heads, view.table.shape[1:]
    capacity = columns * page_size
    length = jnp.minimum(view.lengths.max(), capacity)
    ends = jnp.stack([length, jnp.maximum(length - NEWEST, 0)])
    runs = max(1, min(-(-capacity // config.rows), num_cores * config.programs_per_core // heads))
    rows = jax.ShapeDtypeStruct((heads, capacity), jnp.int32)
    numbers = jax.ShapeDtypeStruct((heads, capacity), jnp.float32)
    common: dict[str, Any] = {
        "grid": (runs, heads),
        "compute_capability": compute_capability,
        "COMPUTE": getattr(language, jnp.dtype(dtype).name),
        "HEADS": heads,
        "DIM": dim,
        "PAGE": page_size,
        "COLUMNS": columns,
        "TABLE_HEADS": table_heads,
        "RUNS": runs,
    }
    compared: dict[str, Any] = {"ROWS": config.rows, "num_warps": config.num_warps, "num_stages": config.num_stages}
    compared |= {"THRESHOLD": float(threshold), "PRECISION": "tf32x3" if dtype == jnp.float32 else "tf32"}
    streamed: dict[str, Any] = {"ROWS": STREAMED, "num_warps": 4, "num_stages": 2}
    k, where = pools["k"], (view.table, ends, view.offset)
    norms, sums = jax_triton.triton_call(
        k,
        pools["k_scale" if scaled else "k"],
        *where,
        view.stride,
        kernel=kernels.norms_kernel,
        out_shape=[numbers, jax.ShapeDtypeStruct((runs, heads, dim), jnp.float32)],
        name="key_norms",
        SCALED=scaled,
        **streamed,
        **common,
    )
    last, missing, num_missing = jax_triton.triton_call(
        k,
        *where,
        norms,
        view.stride,
        kernel=kernels.newest_kernel,
        out_shape=[rows, rows, jax.ShapeDtypeStruct((heads,), jnp.int32)],
        zeroed_outputs=(2,),
        name="similar_newest",
        **compared,
        **common,
    )
    [last] = jax_triton.triton_call(
        k,
        *where,
        norms,
        missing,
        num_missing,
        last,
        view.stride,
        kernel=kernels.others_kernel,
        out_shape=[rows],
        input_output_aliases={7: 0},
        name="similar_others",
        SPAN=SPAN,
        **compared,
        **common,
    )
    bits = fraction_bits(capacity)
    own, dropped = jax_triton.triton_call(
        k,
        *where,
        norms,
        sums,
        last,
        view.stride,
        kernel=kernels.sums_kernel,
        out_shape=[numbers, rows],
        zeroed_outputs=(1,),
        name="key_similarity",
        ONE=float(2**bits),
        **streamed,
        **common,
    )
    return column_means(own, dropped, bits, length)
