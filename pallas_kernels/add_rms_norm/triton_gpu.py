"""Residual addition and RMS norm on NVIDIA GPUs: one Triton kernel, one program per token.

XLA makes three kernels of it (addition, sum of squares, scaling), each of which costs a launch.
"""

from __future__ import annotations

import importlib
import math

import jax

from sparsejax.pallas_kernels.triton_support import DTYPES, platform_problem, power_of_two

LARGEST_SIZE = 16384


def unsupported(x: jax.Array, delta: jax.Array, weight: jax.Array) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.add_rms_norm`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(x, delta, weight)


def unsupported_shape(x: jax.Array, delta: jax.Array, weight: jax.Array) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    if not x.dtype == delta.dtype == weight.dtype:
        return f"dtypes differ: {x.dtype.name}, {delta.dtype.name}, {weight.dtype.name}"
    if x.dtype.name not in DTYPES:
        return f"rows are {x.dtype.name}, not one of {', '.join(DTYPES)}"
    if x.shape[-1] > LARGEST_SIZE:
        return f"rows have {x.shape[-1]} elements, more than {LARGEST_SIZE}"
    return None


def add_rms_norm(x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    return launch(x, delta, weight, eps)


def launch(
    x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, compute_capability: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The kernel. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.add_rms_norm.triton_kernels")
    size = x.shape[-1]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = jax_triton.triton_call(
        x,
        delta,
        weight,
        kernel=kernels.add_norm_kernel,
        out_shape=[like, like],
        grid=(math.prod(x.shape[:-1]),),
        name="add_rms_norm",
        num_warps=max(1, min(16, power_of_two(size) // 256)),
        num_stages=1,
        compute_capability=compute_capability,
        EPS=float(eps),
        SIZE=size,
        SIZE_POW2=power_of_two(size),
    )
    return total, normed
