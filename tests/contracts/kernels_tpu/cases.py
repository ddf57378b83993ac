"""Paged rows as a TPU stores them, and kernels compiled for Pallas's TPU interpret mode on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels import specs, tpu_support
from sparsejax.pallas_kernels.layout import LANES
from tests.contracts.test_kernels import rows_of
from tests.core.harness import QUICK
from tests.core.paging import Paged

CODES = specs.AttentionShape(
    "fp8-page-128", (1, 127, 129, 300), 8, 2, 128, 128, "layer", "bfloat16", True, chunks=(1, 100, 129, 40)
)
"""Scaled codes as TPU kernels take them; those of `specs.SMALL` have pages too short."""

FAST = ("page-16", "page-64-head", CODES.name)


def slow(*values: Any) -> Any:
    """Values as parameters that only `pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)
ATTENTION = [
    shape if shape.name in FAST else slow(shape)
    for shape in (*specs.SMALL, CODES)
    if shape is CODES or not shape.scaled_codes
]


def stored(shape: Any, **options: Any) -> tuple[Paged, jax.Array]:
    """Rows and queries of a shape, the rows as wide as TPU memory has lanes; what is added holds zeros."""
    rows, q = rows_of(shape, **options)
    pools = dict(rows.pools)
    for name in ("k", "v"):
        pools[name] = jnp.pad(pools[name], ((0, 0), (0, 0), (0, -pools[name].shape[2] % LANES)))
    return dataclasses.replace(rows, pools=pools), q


def interpret(function: Any, *arguments: Any, **params: Any) -> Any:
    """`function(*arguments)` as numpy arrays, its TPU kernels interpreted; unwritten memory is NaN."""
    with tpu_support.interpreting(pltpu.InterpretParams(**params)):
        found = jax.jit(function).lower(*arguments).compile(QUICK)(*arguments)
    return jax.tree.map(np.asarray, found)
