"""Page selection: the portable implementation and the oracle against a sort of one row at a time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.select_pages import triton_gpu
from sparsejax.pallas_kernels.select_pages import xla as select_xla
from tests.contracts.kernels_gpu.selection import KINDS, SMALL, Shape, make, wanted
from tests.core.harness import QUICK


@functools.cache
def program(select, shape: Shape, stride: int, share: int):
    """Compiled (scores, table, offset, lengths) -> (head-pages, lengths); `share` is what was patched."""

    def run(scores, table, offset, lengths):
        chosen = select(scores, PageView(table, stride, offset, lengths), **shape.sizes)
        assert chosen.stride == 1
        return chosen.head_pages(0, chosen.table.shape[2]), chosen.lengths

    scores, view = make(shape)
    return jax.jit(run).lower(scores, view.table, view.offset, view.lengths).compile(QUICK)


def check(select, shape: Shape, seed: int) -> None:
    scores, view = make(shape, seed)
    plain = dataclasses.replace(shape, kind="normal")  # kinds differ in their data only
    run = program(select, plain, view.stride, select_xla.BISECTION_SHARE)
    for found, expected in zip(
        run(scores, view.table, view.offset, view.lengths), wanted(shape, scores, view), strict=True
    ):
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("share", [0, 10**6], ids=["sorting", "bisection"])
def test_matches_a_sort(shape, share, monkeypatch):
    monkeypatch.setattr(select_xla, "BISECTION_SHARE", share)
    for seed in range(5):
        check(api.select_pages, shape, seed)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_oracle_is_a_sort(shape):
    check(reference.select_pages, shape, 7)


def test_the_faster_way_is_taken(monkeypatch):
    taken = []
    for name in ("by_sorting", "by_bisection"):
        original = getattr(select_xla, name)
        monkeypatch.setattr(
            select_xla, name, lambda *args, name=name, original=original: taken.append(name) or original(*args)
        )
    for num_scored in (8, 9):
        shape = Shape((640,), 40, num_scored)
        scores, view = make(shape)
        jax.eval_shape(functools.partial(api.select_pages, view=view, **shape.sizes), scores)
    assert taken == ["by_sorting", "by_bisection"]


def test_a_tie_goes_to_the_lower_page_and_the_last_page_is_always_there():
    scores = jnp.asarray([[[0.0, -0.0, 5.0, 0.0, -0.0, 9.0]]])
    view = PageView(jnp.arange(10, 16, dtype=jnp.int32)[None, None], 1, jnp.zeros(1, jnp.int32), jnp.full((1, 1), 22))
    chosen = api.select_pages(scores, view, num_scored=3, width=5, budget=1, page_size=4)
    assert chosen.table[0, 0].tolist() == [10, 11, 12, 15, 0]
    assert chosen.lengths.tolist() == [[14]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_scored": 0}, "num_scored is 0, not in"),
        ({"num_scored": 41, "width": 50}, r"num_scored is 41, not in \[1, 40\]"),
        ({"width": 5}, "no room for 5 pages and the last"),
        ({"budget": 16 * 7}, "no room for 5 pages and the last, or for 112 rows"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    scores, view = make(Shape((600,), 40, 5))
    sizes = {"num_scored": 5, "width": 6, "budget": 90, "page_size": 16} | change
    with pytest.raises(ValueError, match=message):
        api.select_pages(scores, view, **sizes)


def test_scores_of_other_pages():
    scores, view = make(Shape((600,), 40, 5))
    with pytest.raises(ValueError, match=r"scores have shape \(1, 3, 39\), the view's pages \(1, 3, 40\)"):
        api.select_pages(scores[..., :39], view, num_scored=5, width=6, budget=90, page_size=16)


def test_what_the_kernel_does_not_take():
    scores, view = make(Shape((600,), 40, 5))
    assert triton_gpu.unsupported_shape(scores, view) is None
    assert triton_gpu.unsupported_shape(scores.astype(jnp.bfloat16), view) == "scores are bfloat16, not float32"
    long = jax.ShapeDtypeStruct((1, 1, 2**20), jnp.float32)
    assert triton_gpu.unsupported_shape(long, view) == "rows have 1048576 columns, more than 1048575"  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [1, 440, 2048, 8192, 8193, 131072])
def test_launches_hold_what_they_can(columns):
    config = triton_gpu.default_config(columns)
    assert config.block & (config.block - 1) == 0
    assert config.block <= 16384  # two counts share 32 bits
    assert config.block >= min(columns, 8192)


def test_every_kind_is_tried():
    assert {shape.kind for shape in SMALL} == set(KINDS)
