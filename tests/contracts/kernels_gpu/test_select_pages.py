"""Page selection on a GPU: exactly what a sort gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels import api, reference
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.select_pages import triton_gpu
from sparsejax.state import layer_view
from tests.contracts.kernels_gpu.selection import KINDS, SMALL, Shape, make, wanted

pytestmark = pytest.mark.gpu

LARGE = (
    *(Shape((131072, 100, 3000, 131071, 70000), 2048, 31, 64, 8, kind=kind) for kind in KINDS),
    *(Shape((131072, 100, 3000, 131071, 70000), 8192, 127, 16, 8, kind=kind) for kind in KINDS),
    *(Shape((50000, 32769, 8193), 50000, 2047, 1, 2, kind=kind) for kind in KINDS),
    Shape((131072,) * 16, 2048, 31, 64, 8),
    Shape((8192, 8000), 8192, 8191, 1, 2),
    Shape((131072, 99999), 2048, 1500, 64, 2, per_head=True),
    Shape((131072, 99999), 2048, 31, 64, 8, shared=True, kind="ties"),
    Shape((131072, 99999), 2048, 31, 64, 8, per_head=True, shared=True),
    Shape((7000,) * 16, 440, 291, 16, 3),
)


@functools.cache
def program(shape: Shape, stride: int, config: triton_gpu.Config | None = None):
    @jax.jit
    def run(scores, table, offset, lengths):
        view = PageView(table, stride, offset, lengths)
        if config is None:
            chosen = api.select_pages(scores, view, **shape.sizes, implementation="triton")
        else:
            chosen = triton_gpu.launch(scores, view, **shape.sizes, config=config)
        return chosen.table, chosen.lengths

    return run


def check(shape: Shape, config: triton_gpu.Config | None = None, seed: int = 0) -> None:
    scores, view = make(shape, seed)
    found = program(shape, view.stride, config)(scores, view.table, view.offset, view.lengths)
    for one, expected in zip(found, wanted(shape, scores, view), strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=str)
def test_matches_a_sort(shape):
    for seed in range(3):
        check(shape, seed=seed)


@pytest.mark.parametrize("config", [(128, 1), (512, 4), (1024, 2), (4096, 8), (16384, 16)], ids=str)
def test_launches_change_nothing(config):
    for shape in (*SMALL[:6], LARGE[1], LARGE[6], LARGE[13]):
        check(shape, triton_gpu.Config(*config))


def test_every_result_is_written():
    """Results land in memory that held something else: buffers of a program that fills and frees them first."""
    shape = LARGE[0]
    scores, view = make(shape)
    expected = wanted(shape, scores, view)
    for _ in range(3):
        junk = [jnp.full(array.shape, -77, jnp.int32).block_until_ready() for array in expected for _ in range(8)]
        del junk
        for one, want in zip(
            program(shape, view.stride)(scores, view.table, view.offset, view.lengths), expected, strict=True
        ):
            np.testing.assert_array_equal(one, want)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_granularities(granularity):
    geometry = Geometry(3, 8, 4, 64, 16, 1600, 0.125, "float32")
    rng = np.random.default_rng(3)
    shape = geometry.table_shape(granularity)
    table = jnp.asarray(1 + rng.permutation(np.prod(shape) * 200).reshape(*shape, 2, 100), jnp.int32)
    lengths = jnp.broadcast_to(jnp.asarray([1599, 700], jnp.int32), (*shape, 2))
    view = layer_view(geometry, granularity, table, lengths, jnp.int32(2))
    scores = jnp.asarray(rng.standard_normal((2, 4, 100)), jnp.float32)
    sizes = {"num_scored": 20, "width": 21, "budget": 300, "page_size": 16, "shared": False}

    @jax.jit
    def run(scores, table, offset, lengths):
        chosen = api.select_pages(
            scores, PageView(table, view.stride, offset, lengths), **sizes, implementation="triton"
        )
        return chosen.table, chosen.lengths

    found = run(scores, view.table, view.offset, view.lengths)
    expected = reference.select_pages(scores, view, **sizes)
    np.testing.assert_array_equal(found[0], expected.table)
    np.testing.assert_array_equal(found[1], expected.lengths)


def test_lengths_are_data():
    shape = LARGE[0]
    run, traces = program(shape, 16), []
    for seed in range(3):
        lengths = tuple(int(n) for n in np.random.default_rng(seed).integers(0, 131073, 5))
        other = Shape(lengths, 2048, 31, 64, 8)
        scores, view = make(other, seed)
        assert view.stride == 16
        for one, want in zip(
            run(scores, view.table, view.offset, view.lengths), wanted(other, scores, view), strict=True
        ):
            np.testing.assert_array_equal(one, want)
        traces.append(run._cache_size())
    assert traces == [traces[0]] * 3
