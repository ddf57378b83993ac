"""Decode attention that scores rows, on NVIDIA GPUs through Triton: attention keeps its logits, one kernel more adds.

Keys are read once. Logits are short beside them: 4 bytes for each query head where a key has 256 in bfloat16.
"""

from __future__ import annotations

import importlib

import jax

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.decode_attention import triton_gpu as attention
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.triton_support import num_multiprocessors, power_of_two
from sparsejax.pallas_kernels.triton_support import platform_problem as platform_problem

BLOCK_ELEMENTS = 2048
PROGRAMS_PER_CORE = 8

unsupported = attention.unsupported


def observed_decode_attention(
    q: jax.Array,
    scores: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    shared: bool,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.observed_decode_attention`."""
    scaled = payload.recognise(load_tile, pools, names, q.dtype) == payload.ROW_SCALED
    config, num_cores = attention.default_config(q.shape[2], q.dtype.itemsize, scaled), num_multiprocessors()
    out, lse, logits = attention.launch(q, pools, view, scaled, scale, config, num_cores, with_logits=True)
    return out, launch(scores, logits, lse, view, shared, num_cores)


def launch(
    scores: jax.Array,
    logits: jax.Array,
    lse: jax.Array,
    view: PageView,
    shared: bool,
    num_cores: int,
    compute_capability: int | None = None,
) -> jax.Array:
    """The kernel that adds. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.observed_decode_attention.triton_kernels")
    batch, q_heads, capacity = logits.shape
    heads = view.num_heads
    heads_pow2, group_pow2 = power_of_two(heads), power_of_two(q_heads // heads)
    block = max(16, min(64, BLOCK_ELEMENTS // (heads_pow2 * group_pow2)))
    runs = max(1, min(-(-capacity // block), num_cores * PROGRAMS_PER_CORE // batch))
    [added] = jax_triton.triton_call(
        logits,
        lse,
        view.table,
        view.lengths,
        view.offset,
        scores,
        view.stride,
        kernel=kernels.add_kernel,
        out_shape=[jax.ShapeDtypeStruct(scores.shape, scores.dtype)],
        input_output_aliases={5: 0},
        grid=(runs, batch),
        name="add_attention",
        num_warps=4,
        num_stages=1,
        compute_capability=compute_capability,
        SHARED=shared,
        HEADS=heads,
        HEADS_POW2=heads_pow2,
        GROUP=q_heads // heads,
        GROUP_POW2=group_pow2,
        PAGE=scores.shape[1],
        COLUMNS=view.table.shape[2],
        TABLE_HEADS=view.table.shape[1],
        LENGTHS_HEADS=view.lengths.shape[1],
        BLOCK=block,
        RUNS=runs,
    )
    return added
