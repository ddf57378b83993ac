"""What the Triton implementations share: whether they can run here, and facts about the device. Imports jax only.

jax-triton and triton are optional and are imported when a kernel is first launched.
"""

from __future__ import annotations

import functools
import importlib

import jax

from sparsejax.pallas_kernels.platforms import platform

LEAST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies


@functools.cache
def import_problem() -> str | None:
    """Why jax-triton can't be imported, or None."""
    try:
        module = importlib.import_module("jax_triton")
        importlib.import_module("triton.language")
    except Exception as error:  # a version of one that the other does not fit fails in many ways
        return f"jax-triton is not usable ({type(error).__name__}: {error}); install sparsejax[gpu]"
    return None if hasattr(module, "triton_call") else "jax-triton has no triton_call"


def capability() -> tuple[int, int]:
    """CUDA compute capability of the first GPU."""
    major, _, minor = str(jax.devices("gpu")[0].compute_capability).partition(".")
    return int(major), int(minor)


def num_multiprocessors() -> int:
    """Streaming multiprocessors of the first GPU."""
    return int(jax.devices("gpu")[0].core_count)


def nvidia_problem() -> str | None:
    """Why what is being traced for is no NVIDIA GPU, or None."""
    found = platform()
    if found not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, JAX runs on {found}"
    kind = getattr(jax.devices("gpu")[0].client, "platform_version", "")
    return "needs an NVIDIA GPU, this one is from AMD" if "rocm" in kind.lower() else None


def platform_problem() -> str | None:
    """Why no Triton kernel can run on what is being traced for, or None."""
    if (problem := nvidia_problem() or import_problem()) is not None:
        return problem
    if capability() < LEAST_CAPABILITY:
        return "needs compute capability {}.{}, this GPU has {}.{}".format(*LEAST_CAPABILITY, *capability())
    return None


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
