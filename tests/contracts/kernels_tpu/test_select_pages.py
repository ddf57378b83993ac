"""Page selection on TPUs against a sort, in interpret mode: bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, tpu_support
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.select_pages import mosaic_tpu
from tests.contracts.kernels_gpu.selection import KINDS, SMALL, Shape, make, wanted
from tests.contracts.kernels_tpu.cases import interpret, slow

LARGE = (
    Shape((1500 * 4, 3, 1024 * 4), 1500, 200, 4, 9, budget=40),  # two blocks of heads, the second of one head
    Shape((8192 * 2,), 8192, 1000, 2, 8, per_head=True),
    Shape((700, 20), 64, 64, 16, 2),  # every page may be chosen
)


def check(shape: Shape, seeds: int) -> None:
    """All kinds of scores at once, as rows of one batch."""
    made = [make(dataclasses.replace(shape, kind=kind), seed) for kind in KINDS for seed in range(seeds)]
    scores = jnp.concatenate([scores for scores, _ in made])
    table, lengths = (jnp.concatenate([getattr(view, name) for _, view in made]) for name in ("table", "lengths"))
    _, view = made[0]

    def run(scores, table, lengths):
        view_of_all = PageView(table, view.stride, view.offset, lengths)
        chosen = api.select_pages(scores, view_of_all, **shape.sizes, implementation="mosaic_tpu")
        assert chosen.stride == 1
        return chosen.head_pages(0, chosen.table.shape[2]), chosen.lengths

    found = interpret(run, scores, table, lengths)
    many = dataclasses.replace(shape, lengths=shape.lengths * len(made))
    for one, expected in zip(found, wanted(many, scores, PageView(table, *view[1:3], lengths)), strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("shape", [*SMALL[1:4], *(slow(shape) for shape in (SMALL[0], *SMALL[4:6], *LARGE))], ids=str)
def test_matches_a_sort(shape):
    check(shape, seeds=2)


def test_blocks_of_rows_that_the_end_cuts(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "BLOCK_ELEMENTS", 3 * 8 * 128)
    check(Shape((100, 33), 40, 3, 4, 2), seeds=1)


def test_what_is_not_served_has_a_reason():
    def problem(columns, dtype="float32"):
        view = PageView(jax.ShapeDtypeStruct((1, 1, columns), jnp.int32), 1, None, None)  # type: ignore[arg-type]
        with tpu_support.interpreting():
            return mosaic_tpu.unsupported(jax.ShapeDtypeStruct((1, 8, columns), dtype), view)

    assert problem(16384) is None
    assert problem(16385) == "rows have 16385 columns, more than 16384"
    assert problem(9, "bfloat16") == "scores are bfloat16, not float32"
