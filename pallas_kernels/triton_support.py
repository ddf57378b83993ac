"""What the Triton implementations share: whether they can run here, and facts about the device. Imports jax only.

jax-triton and triton are optional and are imported when a kernel is first launched.
"""

from __future__ import annotations

import functools
import importlib

import jax

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LoadTile, Pools
from sparsejax.pallas_kernels.platforms import platform

LEAST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
CODES = ("float8_e4m3fn", "uint8")
CODES_CAPABILITY = (8, 9)


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


def codes_problem() -> str | None:
    """Why this GPU has no 8-bit floats, or None."""
    if capability() < CODES_CAPABILITY:
        return "8-bit floats need compute capability {}.{}".format(*CODES_CAPABILITY)
    return None


def rows_problem(
    q: jax.Array, pools: Pools, names: tuple[str, ...], read: tuple[str, ...], load_tile: LoadTile
) -> str | None:
    """Why a kernel can't multiply queries [..., head_dim] with the stored rows that it reads of `pools`, or None."""
    dim = q.shape[-1]
    layout = payload.recognise(load_tile, pools, names, q.dtype)
    if layout is None:
        found = ", ".join(f"{name} {pools[name].dtype.name}" for name in names)
        return f"the stored rows ({found}) are decoded in a way the kernel does not know"
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype.name}, not one of {', '.join(DTYPES)}"
    for name in read:
        if layout == payload.ROW_SCALED and pools[name].dtype.name not in CODES:
            return f"scaled codes are {pools[name].dtype.name}, not one of {', '.join(CODES)}"
        if pools[name].ndim != 3 or pools[name].shape[2] != dim:
            return f"rows of {name!r} have shape {pools[name].shape[2:]}, not the head's ({dim},)"
    if dim not in HEAD_DIMS:
        return f"head_dim is {dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    return codes_problem() if layout == payload.ROW_SCALED else None


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
