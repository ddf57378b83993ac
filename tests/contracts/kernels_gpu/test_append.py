"""Appending rows and norming the stream on a GPU, with the checks of the portable implementation."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.heads import Heads
from tests.contracts.test_append import CASES, EPS, Case, check, check_norm, inputs

pytestmark = pytest.mark.gpu

WIDE = (
    *CASES,
    Case((2, 100), (1, 1), 1, dtype="float16", heads=1, group=16, dim=256, page=128),
    *(dataclasses.replace(case, normed=not case.normed) for case in CASES),
)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_rows_are_stored_where_they_belong(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 4096), (576,), (2, 3, 896), (7, 14336)])
def test_the_stream_is_added_to_and_normed(dtype, shape):
    check_norm(dtype, "triton", shape)


def test_pools_are_updated_in_place():
    heads, pools, view, options = inputs(Case((0, 15), (1, 1), 1, dtype="bfloat16", dim=128))

    def step(pools, arrays):
        return api.append(Heads(*arrays, eps=EPS), pools, view, **options, implementation="triton")[3]

    memory = jax.jit(step, donate_argnums=0).lower(pools, heads[:5]).compile().memory_analysis()
    nbytes = sum(array.nbytes for array in pools.values())
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < nbytes // 4
