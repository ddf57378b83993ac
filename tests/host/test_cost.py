"""Capacity and floors, by hand and against the scheduler itself."""

from __future__ import annotations

import dataclasses

import pytest

from sparsejax import cost
from sparsejax.geometry import Geometry, Granularity
from sparsejax.mock import METHODS, MockMethod
from tests.host.bench import Bench

GEOMETRY = Geometry(30, 9, 3, 64, 16, 8192, 0.125, "float32")  # the default model
DENSE = MockMethod()


def test_dense_capacity_by_hand() -> None:
    assert cost.rows_that_fit(DENSE, GEOMETRY, 1 + 23 * 512, 8192) == 23
    assert cost.rows_that_fit(DENSE, GEOMETRY, 23 * 512, 8192) == 22
    assert cost.rows_that_fit(DENSE, GEOMETRY, 512, 8192) == 0


def test_eviction_needs_the_peak_once_and_the_kept_rows_for_each() -> None:
    method = MockMethod("kept", Granularity.LAYER, prompt_budget=1024)
    row = cost.row_cost(method, GEOMETRY, 8192)
    assert row.resident_tokens == row.read_tokens == 1024
    assert row.resident_head_pages == 64 * 90
    assert row.peak_head_pages == (512 + 64) * 90
    assert cost.rows_that_fit(method, GEOMETRY, 1 + 512 + 64, 8192) == 1
    assert cost.rows_that_fit(method, GEOMETRY, 1 + 512 + 64 + 640, 8192) == 11


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_capacity_is_what_the_scheduler_reaches(method: MockMethod) -> None:
    """Submit that many requests of one output token's worth of decoding: all are resident at once, one more is not."""
    tokens, pages = 60, 41
    bench = Bench(methods=(method,), num_sequence_pages=pages, num_rows=100, prefill_buckets=((1, 64),))
    fits = cost.rows_that_fit(method, bench.runner.limits.geometry, pages, tokens)
    assert fits >= 2
    for _ in range(fits):
        bench.submit(tokens, 1)
    resident = bench.scheduler.memory
    for _ in range(fits):
        # max_tokens=1 leaves the row at once, so look at the reservation instead: it must always be granted.
        assert bench.scheduler.step()
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert not resident.holders


def test_decode_floor_by_hand() -> None:
    step = cost.decode_cost(GEOMETRY, 10**9, 10**8, 512, [1000, 3000])
    assert step.kv_bytes == 4000 * 90 * 512
    assert step.flops == 2 * 2 * 10**8 + 4 * 4000 * 30 * 9 * 64
    assert step.floor_s(10**9, 1e30) == pytest.approx((10**9 + step.kv_bytes) / 10**9)
    assert step.floor_s(1e30, 10**9) == pytest.approx(step.flops / 10**9)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert cost.format_bytes(count) == text


def test_later_tokens_of_a_prompt_cost_more_to_compute() -> None:
    model = dataclasses.replace(GEOMETRY, hidden_size=576)  # as wide as its heads: twice as much at position 6 x 576
    assert cost.prefill_cost(model, 0, 1) == pytest.approx(1, abs=1e-3)
    assert cost.prefill_cost(model, 3456, 3457) == pytest.approx(2, abs=1e-3)
    assert cost.prefill_cost(model, 0, 6912) == pytest.approx(2 * 6912)
    parts = [cost.prefill_cost(model, at, at + 64) for at in range(0, 6912, 64)]
    assert sum(parts) == pytest.approx(2 * 6912)
    assert parts == sorted(parts)
    assert cost.prefill_cost(GEOMETRY, 640, 704) == 64, "without a model all cost the same"
