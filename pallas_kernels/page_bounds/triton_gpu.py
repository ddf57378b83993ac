"""Page bounds on NVIDIA GPUs through Triton: one program per page and head, one launch for both bounds, no atomics."""

from __future__ import annotations

import importlib

import jax

from sparsejax.pallas_kernels.triton_support import DTYPES, platform_problem, power_of_two

BLOCK = 32


def unsupported(page_min: jax.Array, page_max: jax.Array, keys: jax.Array) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.page_bounds`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(page_min, page_max, keys)


def unsupported_shape(page_min: jax.Array, page_max: jax.Array, keys: jax.Array) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    if not keys.dtype == page_min.dtype == page_max.dtype:
        return f"keys are {keys.dtype.name}, page bounds {page_min.dtype.name} and {page_max.dtype.name}"
    if keys.dtype.name not in DTYPES:
        return f"keys are {keys.dtype.name}, not one of {', '.join(DTYPES)}"
    if page_min.shape[1] != keys.shape[3]:
        return f"page bounds have {page_min.shape[1]} channels, keys {keys.shape[3]}"
    return None


def page_bounds(
    page_min: jax.Array,
    page_max: jax.Array,
    keys: jax.Array,
    head_pages: jax.Array,
    offsets: jax.Array,
    num_valid: jax.Array,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.page_bounds`."""
    return launch(page_min, page_max, keys, head_pages, offsets, num_valid, page_size)


def launch(
    page_min: jax.Array,
    page_max: jax.Array,
    keys: jax.Array,
    head_pages: jax.Array,
    offsets: jax.Array,
    num_valid: jax.Array,
    page_size: int,
    compute_capability: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The kernel. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.page_bounds.triton_kernels")
    batch, chunk, heads, dim = keys.shape
    low, high = jax_triton.triton_call(
        keys,
        head_pages,
        offsets,
        num_valid,
        page_min,
        page_max,
        kernel=kernels.bounds_kernel,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (page_min, page_max)],
        input_output_aliases={4: 0, 5: 1},
        grid=(1 if chunk == 1 else (chunk - 1) // page_size + 2, heads, batch),
        name="page_bounds",
        num_warps=1 if chunk == 1 else 4,
        num_stages=1,
        compute_capability=compute_capability,
        CHUNK=chunk,
        HEADS=heads,
        OFFSETS_HEADS=offsets.shape[2],
        DIM=dim,
        DIM_POW2=power_of_two(dim),
        PAGE=page_size,
        BLOCK=1 if chunk == 1 else min(BLOCK, power_of_two(page_size)),
    )
    return low, high
