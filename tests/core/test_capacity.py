"""How large the pool is made."""

from __future__ import annotations

import pytest

from sparsejax import capacity
from sparsejax.config import EngineConfig
from sparsejax.errors import ConfigError
from sparsejax.models.load import dummy


@pytest.mark.parametrize(("pages", "whole"), [(3, 3), (4, 4), (5, 5), (8, 5), (9, 9), (40, 37)])
def test_pools_hold_whole_rows_if_one_fits(pages, whole):
    assert capacity.whole_rows(pages, 4) == whole


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
