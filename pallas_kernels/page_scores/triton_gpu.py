"""Page scores on NVIDIA GPUs through Triton: one program per row, KV head and block of pages."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.triton_support import DTYPES, HEAD_DIMS, platform_problem, power_of_two

LARGEST_GROUP = 64


def unsupported(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.page_scores`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(q, page_min, page_max, view)


def unsupported_shape(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    if not q.dtype == page_min.dtype == page_max.dtype:
        return f"queries are {q.dtype.name}, page bounds {page_min.dtype.name} and {page_max.dtype.name}"
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype.name}, not one of {', '.join(DTYPES)}"
    if q.shape[2] not in HEAD_DIMS:
        return f"head_dim is {q.shape[2]}, not one of {', '.join(map(str, HEAD_DIMS))}"
    if q.shape[1] // view.num_heads > LARGEST_GROUP:
        return f"{q.shape[1] // view.num_heads} query heads share a KV head, more than {LARGEST_GROUP}"
    return None


def page_scores(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView, page_size: int) -> jax.Array:
    """See `api.page_scores`."""
    return launch(q, page_min, page_max, view, page_size)


def launch(
    q: jax.Array,
    page_min: jax.Array,
    page_max: jax.Array,
    view: PageView,
    page_size: int,
    compute_capability: int | None = None,
) -> jax.Array:
    """The kernel. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.page_scores.triton_kernels")
    batch, q_heads, dim = q.shape
    heads, columns = view.num_heads, view.table.shape[2]
    group = q_heads // heads
    block = max(16, min(64, 16384 // (dim * q.dtype.itemsize), power_of_two(columns)))
    [scores] = jax_triton.triton_call(
        q,
        page_min,
        page_max,
        view.table,
        view.lengths,
        view.offset,
        view.stride,
        kernel=kernels.scores_kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, heads, columns), jnp.float32)],
        grid=(-(-columns // block), heads, batch),
        name="page_scores",
        num_warps=8 if dim * q.dtype.itemsize >= 1024 else 4,  # more registers for the widest rows
        num_stages=2,
        compute_capability=compute_capability,
        PRECISION="tf32x3" if q.dtype == jnp.float32 else "tf32",
        HEADS=heads,
        GROUP=group,
        GROUP_PAD=max(16, power_of_two(group)),
        DIM=dim,
        PAGE=page_size,
        COLUMNS=columns,
        TABLE_HEADS=view.table.shape[1],
        LENGTHS_HEADS=view.lengths.shape[1],
        BLOCK=block,
    )
    return scores
