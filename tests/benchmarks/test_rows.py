"""The host loop of benchmarks does what a served request gets, where the device counts too."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rows import Rows
from sparsejax import registry
from sparsejax.runner import DeviceRunner
from tests.contracts.compositions import RAGGED, small
from tests.core.harness import TINY, Session, tiny_weights, tokens_of


@pytest.mark.parametrize("name", RAGGED)
def test_heads_keep_as_many_rows_as_in_the_tests_own_loop(name):
    prompt = tokens_of(1, 41)
    session = Session(name, params=small(name))
    session.prefill({1: prompt})
    method, storage = registry.resolve(name, small(name))
    runner = DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(4, 64),
        {name: method},
        storage,
        num_rows=2,
        num_sequence_pages=40,
        decode_buckets=(2,),
        prefill_buckets=((1, 48),),
    )
    rows = Rows(runner, name)
    rows.prefill(1, prompt)
    assert rows.pages[1].lengths.tolist() == session.rows[1].lengths.tolist()
    for layer, heads in enumerate(rows.positions(1)):
        for head, found in enumerate(heads):
            np.testing.assert_array_equal(found, session.positions(1, layer, head))
    rows.release(1)
    assert rows.used_head_pages == 0
