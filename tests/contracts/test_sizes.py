"""A member that can be sized holds, or reads, as many rows as it was asked to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry

GEOMETRY = Geometry(
    num_layers=30,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    page_size=16,
    max_model_len=8192,
    scale=0.125,
    dtype="float32",
)
SIZED = [name for name, entry in registry.available().items() if entry.sized is not None]


def held(composition: str) -> float:
    """Rows per layer and head once everything that may happen to 8,000 rows has happened."""
    method, _ = registry.resolve(composition)
    lengths = np.full(GEOMETRY.table_shape(method.granularity), 8000, np.int32)
    return min(float(method.kept_after(phase, lengths).mean()) for phase in ("chunk", "prompt", "token"))


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("rows", [256, 512, 1024, 2048])
def test_rows_are_what_they_say(name, rows):
    method, _ = registry.resolve(registry.sized(name, rows))
    if method.evicts:
        assert held(registry.sized(name, rows)) == pytest.approx(rows, rel=0.01)
    elif method.select is not None:
        read = method.rows_read(8000, dataclasses.replace(GEOMETRY, page_size=method.page_size(method.params) or 16))
        assert rows <= read < held(name)


def test_what_is_no_size_stays():
    assert registry.sized("snapkv", 4672) == "snapkv"
    assert registry.sized("snapkv(pool_kernel_size=7)", 4672) == "snapkv(pool_kernel_size=7)"
    assert registry.sized("snapkv(snapkv_decode_eviction=true)+fp8_kv", 256) == (
        "snapkv(sink_keep_tokens=32,decode_keep_tokens=160,recent_keep_tokens=64,snapkv_decode_eviction=true)+fp8_kv"
    )


def test_a_selection_reads_half_of_what_is_held():
    both = registry.sized("snapkv+quest", 512)
    assert both == f"{registry.sized('snapkv', 512)}+{registry.sized('quest', 256)}"


def test_members_without_a_size_are_refused():
    with pytest.raises(MethodError, match="no size"):
        registry.sized("fp8_kv", 512)
    with pytest.raises(MethodError, match="did you mean 'snapkv'"):
        registry.sized("snapkw", 512)


@pytest.mark.parametrize("name", registry.available())
def test_samples_can_be_written_down(name):
    entry = registry.available()[name]
    for params in entry.samples:
        assert registry.resolve(registry.spec_of(entry, params))
