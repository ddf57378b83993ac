"""Decode attention that scores rows, on a GPU against the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api
from tests.contracts.kernels_gpu.cases import Case, Shape, make, relative_error

pytestmark = pytest.mark.gpu

RAGGED = (1, 63, 64, 65, 700, 127, 1537)
CASES = [
    *(Shape(RAGGED, page=page) for page in (16, 64, 128)),
    *(Shape(RAGGED, heads=heads, group=group) for heads, group in ((1, 16), (2, 7), (8, 1), (3, 3), (1, 64))),
    Shape(RAGGED, dim=256, page=16, dtype="float32"),
    Shape(RAGGED, per_head_table=True, per_head_lengths=True, dtype="float32"),
    Shape(RAGGED, codes="float8_e4m3fn"),
    Shape(RAGGED, codes="float8_e4m3fn", dtype="float32", bits=True),
    Shape((20000,), columns=400),
    Shape((6000, *(30,) * 40), columns=96),
]


def places(case: Case):
    """Head-pages and offsets of each head's resident rows."""
    pages, page_size = np.asarray(case.view.head_pages(0, case.view.table.shape[2])), case.pools["k"].shape[1]
    lengths = np.broadcast_to(case.view.lengths, pages.shape[:2])
    for b, h in np.ndindex(lengths.shape):
        row = np.arange(lengths[b, h])
        yield b, h, (pages[b, h, row // page_size], row % page_size)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_matches_the_oracle_and_writes_nothing_else(shape, shared):
    case, rng = make(shape), np.random.default_rng(3)
    scores = np.full(case.pools["k"].shape[:2], np.nan, np.float32)
    wanted, (out, lse) = scores.copy(), case.wanted()
    q = np.asarray(case.q, np.float64).reshape(*case.keys.shape[:2], -1, shape.dim)
    mass = np.einsum("bhgd,bhrd->bhgr", q, case.keys.astype(np.float64)) * case.scale
    mass = np.exp(np.minimum(mass - lse.reshape(*q.shape[:3], 1), 0))
    mass *= np.arange(mass.shape[3]) < np.broadcast_to(case.view.lengths, q.shape[:2])[:, :, None, None]
    mass = np.broadcast_to(mass.sum((1, 2))[:, None], mass.shape[:2] + mass.shape[3:]) if shared else mass.sum(2)
    for b, h, (page, offset) in places(case):
        before = rng.random(len(page)).astype(np.float32)
        scores[page[:-1], offset[:-1]] = before[:-1]
        before[-1] = 0
        wanted[page, offset] = before + mass[b, h, : len(page)]

    def run(q, scores, pools, table, offset, lengths):
        view = case.view._replace(table=table, offset=offset, lengths=lengths)
        how = {**case.how, "shared": shared, "implementation": "triton"}
        return api.observed_decode_attention(q, scores, pools, case.names, view, **how)

    view = case.view
    arguments = case.q, jnp.asarray(scores), case.pools, view.table, view.offset, view.lengths
    found_out, found = jax.jit(run, donate_argnums=1)(*arguments)
    found = np.asarray(found)
    exact = shape.dtype == "float32" and not shape.codes
    assert relative_error(found_out, out) < (1e-4 if exact else 1e-2)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    assert relative_error(found[~np.isnan(wanted)], wanted[~np.isnan(wanted)]) < (5e-5 if exact else 8e-3)


def test_choice_on_a_gpu():
    case = make(Shape((70, 3)))
    scores = jnp.zeros(case.pools["k"].shape[:2])
    api.observed_decode_attention(case.q, scores, case.pools, case.names, case.view, shared=True, **case.how)
    assert "triton" in api.chosen()["observed_decode_attention"]
