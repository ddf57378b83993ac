"""New rows on TPUs, in interpret mode: stored where they belong, nothing else touched."""

from __future__ import annotations

import pytest

from sparsejax.pallas_kernels import tpu_rows, tpu_support
from sparsejax.pallas_kernels.append import mosaic_tpu
from tests.contracts.kernels_tpu.cases import slow
from tests.contracts.test_append import Case, check, inputs

CASES = (
    Case((0, 15, 16, 40), (1, 1, 1, 0), 1, dim=128),
    Case((3, 63), (1, 1), 1, "fp8_kv", "bfloat16", group=1, dim=128, page=64, per_head=True),
    Case((5, 31, 64), (20, 33, 0), 33, dtype="bfloat16", dim=128, page=32),
    Case((0, 15, 30), (9, 2, 0), 9, dim=128, per_head=True),
    Case((1, 40), (1, 70), 70, "fp8_kv", "bfloat16", dim=128, page=32),
)


@pytest.mark.parametrize("case", [*CASES[1:3], *map(slow, (*CASES[:1], *CASES[3:]))], ids=str)
def test_rows_are_stored_where_they_belong(case):
    with tpu_support.interpreting():
        check(case, "mosaic_tpu")


def test_programs_with_spare_tiles(monkeypatch):
    monkeypatch.setattr(tpu_rows, "BUFFER_BYTES", 4 * 2 * 8 * 128 * 4)  # four tiles of two heads
    with tpu_support.interpreting():
        check(Case((0, 15, 16, 40, 3, 9), (1, 1, 1, 1, 0, 1), 1, dim=128), "mosaic_tpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dim": 64}, "do not fill the 128 lanes"),
        ({"page": 8, "dtype": "bfloat16"}, "pages of 8 rows cut the tiles of 16 rows"),
        ({"storage": "fp8_kv"}, "pages of 16 rows cut the tiles of 32 rows of uint8"),
        ({"heads": 4}, "4 tiles are more than 3"),
    ],
    ids=str,
)
def test_what_is_not_served_has_a_reason(change, reason, monkeypatch):
    monkeypatch.setattr(tpu_rows, "MOST_TILES", 3)
    fields = {"lengths": (3,), "num_new": (1,), "chunk": 1, "dim": 128} | change
    heads, pools, view, options = inputs(Case(**fields))
    with tpu_support.interpreting():
        assert reason in str(mosaic_tpu.unsupported(heads, pools, view, options["encode"]))
