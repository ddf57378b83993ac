"""Decode attention that scores rows, on TPUs against the oracle, in interpret mode."""

from __future__ import annotations

import pytest

from sparsejax.pallas_kernels import api, reference
from tests.contracts.kernels_tpu.cases import ATTENTION, by_name, interpret, stored
from tests.contracts.test_observed_decode_attention import check, inputs


@by_name(argvalues=ATTENTION)
@pytest.mark.parametrize("shared", [True, False])
def test_matches_the_oracle(shared, shape):
    rows, q = stored(shape)
    q, scores = inputs(rows, q)
    arrays, how = (q, scores, rows.pools, rows.names, rows.view), rows.how
    wanted = reference.observed_decode_attention(*arrays, shared, *how.values())

    def run(q, scores, pools, table):
        view = rows.view._replace(table=table)
        options = {**how, "shared": shared, "implementation": "mosaic_tpu"}
        return api.observed_decode_attention(q, scores, pools, rows.names, view, **options)

    check(interpret(run, q, scores, rows.pools, rows.view.table), wanted, shape.dtype)
