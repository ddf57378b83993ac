"""What the Mosaic GPU implementations share: whether they can run here. Imports jax only.

Pallas's Mosaic GPU modules change between versions of jax and cost time to import, so they are imported when a kernel
is first launched or, where it could run, asked for.
"""

from __future__ import annotations

import functools
import importlib

import jax

from sparsejax.pallas_kernels.triton_support import capability, nvidia_problem

CAPABILITY = (9, 0)  # the instructions of Hopper alone
LEAST_JAX = (0, 11)


@functools.cache
def import_problem() -> str | None:
    """Why Pallas's Mosaic GPU modules can't be used, or None."""
    if jax.__version_info__[:2] < LEAST_JAX:
        return "needs jax {}.{} or later, this is {}".format(*LEAST_JAX, jax.__version__)
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except Exception as error:  # jaxlib built without it, or absl-py missing
        return f"Pallas Mosaic GPU is not usable ({type(error).__name__}: {error}); install sparsejax[gpu]"
    return None


def platform_problem() -> str | None:
    """Why no kernel for Hopper can run on what is being traced for, or None."""
    if (problem := nvidia_problem()) is not None:
        return problem
    if capability() != CAPABILITY:
        return "needs compute capability {}.{}, this GPU has {}.{}".format(*CAPABILITY, *capability())
    return import_problem()
