"""Bounds of pages on TPUs, in interpret mode: bit for bit, and nothing else touched."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from sparsejax.pallas_kernels import tpu_support
from sparsejax.pallas_kernels.page_bounds import mosaic_tpu
from tests.contracts.kernels_tpu.cases import interpret, slow
from tests.contracts.test_page_bounds import CASES, Case, check

MINE = [dataclasses.replace(case, dim=128) for case in CASES]


@pytest.mark.parametrize("block", [8, slow(128)])
@pytest.mark.parametrize(
    "case",
    [*MINE[:3], slow(MINE[3]), slow(MINE[4])],
    ids=lambda case: f"{case.dtype}-{case.chunk}-{case.page}",
)
def test_bounds_are_those_of_the_pages(case, block, monkeypatch):
    """Pages lie in random places, so that most tiles belong to several sequences."""
    monkeypatch.setattr(mosaic_tpu, "BLOCK_ROWS", block)
    check(case, "mosaic_tpu", interpret)


def test_adjacent_heads_share_a_tile():
    check(Case((0, 5, 31), (1, 1, 1), 1, heads=8, dim=128, dtype="bfloat16", adjacent=True), "mosaic_tpu", interpret)


def test_no_copy_reads_what_another_one_writes():
    run = functools.partial(interpret, detect_races=True)
    check(Case((0, 7), (20, 9), 20, 16, 2, 128), "mosaic_tpu", run)
    races = interpret_pallas_call.races
    assert races is not None
    assert not races.races_found


def test_what_is_not_served_has_a_reason():
    def problem(head_pages=16, dim=128, dtype="bfloat16", keys="bfloat16", channels=None):
        bounds = jax.ShapeDtypeStruct((head_pages, dim), dtype)
        with tpu_support.interpreting():
            return mosaic_tpu.unsupported(bounds, bounds, jax.ShapeDtypeStruct((1, 1, 2, channels or dim), keys))

    assert problem() is None
    assert problem(dtype="float32", keys="float32", dim=256) is None
    for reason, found in (
        ("bounds of 64 do not fill the 128 lanes", problem(dim=64)),
        ("bounds of 20 head-pages do not fill tiles of 8", problem(head_pages=20)),
        ("page bounds have 256 channels, keys 128", problem(dim=256, channels=128)),
        ("keys are float32, page bounds bfloat16", problem(keys="float32")),
        ("keys are float16, not one of", problem(dtype="float16", keys="float16")),
    ):
        assert reason in str(found)
