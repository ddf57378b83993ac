"""How large the pool is made."""

from __future__ import annotations

import os
import pathlib

import pytest

from sparsejax import capacity
from sparsejax.config import EngineConfig
from sparsejax.errors import ConfigError
from sparsejax.models.load import dummy


@pytest.mark.parametrize(("pages", "whole"), [(3, 3), (4, 4), (5, 5), (8, 5), (9, 9), (13, 13), (40, 33)])
def test_pools_hold_whole_rows_if_one_fits(pages, whole):
    assert capacity.whole_rows(pages, 4) == whole


def test_few_sizes_of_pool_occur():
    found = {(capacity.whole_rows(1 + rows * 4 + spare, 4) - 1) // 4 for rows in range(1, 40) for spare in range(4)}
    assert found == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}


def test_a_host_has_what_it_can_give_without_swapping():
    available = capacity._host_available_bytes()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available <= total
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.is_file():
        said = int(meminfo.read_text("utf-8").partition("MemAvailable:")[2].split()[0]) * 1024
        assert abs(available - said) < 0.25 * total  # others allocate meanwhile


def test_memory_that_varies_leaves_the_pool_as_it_was(monkeypatch):
    spec = dummy.dummy_spec("tiny-llama", "float32")
    config = EngineConfig(max_model_len=512, max_num_seqs=8)

    def pages(available: int) -> int:
        monkeypatch.setattr(capacity, "_host_available_bytes", lambda: available)
        return capacity.plan(config, spec, "tiny").num_sequence_pages

    row = 512 // 16
    one = capacity.plan(config, spec, "tiny").page_bytes * row
    found = [pages(int(4 * one * rows)) for rows in (2.2, 2.5, 2.9, 3.2)]
    assert found == [1 + 2 * row] * 3 + [1 + 3 * row]
    assert pages(1000 * one) == 1 + 8 * row
    with pytest.raises(ConfigError, match="leaves"):
        pages(4 * one - 1)
