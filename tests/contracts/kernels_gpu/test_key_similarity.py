"""Similarity of keys on a GPU against the oracle."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference
from tests.contracts.kernels_gpu.cases import Case, Shape, make

pytestmark = pytest.mark.gpu

CASES = [
    *(Shape((rows,)) for rows in (1, 64, 511, 513, 1537, 5000)),
    *(Shape((1300,), page=page, dim=dim) for page, dim in ((16, 64), (32, 256), (128, 128))),
    Shape((1300,), heads=3, per_head_table=True),
    Shape((1300,), dtype="float32"),
    Shape((1300,), dtype="float32", dim=256, page=16),
    Shape((1300,), dtype="float16"),
    Shape((1300,), codes="float8_e4m3fn"),
    Shape((1300,), codes="float8_e4m3fn", bits=True, page=16),
    Shape((700,), columns=40),
]


def alike(case: Case, share: float, seed: int = 0) -> Case:
    """The same with some rows that have a part in common: most of those find a similar row among the newest."""
    rng = np.random.default_rng(seed)
    pool = np.array(case.pools["k"].astype(jnp.float32))
    pool += 1.2 * (rng.random((*pool.shape[:2], 1)) < share)
    return dataclasses.replace(case, pools={**case.pools, "k": jnp.asarray(pool).astype(case.pools["k"].dtype)})


def run(case: Case, implementation: str) -> np.ndarray:
    @jax.jit
    def similarity(pools, table, offset, lengths):
        view = case.view._replace(table=table, offset=offset, lengths=lengths)
        how = {"load_tile": case.load_tile, "layer": jnp.int32(0), "implementation": implementation}
        return api.key_similarity(pools, case.names, view, threshold=0.5, tile_rows=512, **how)

    view = case.view
    return np.asarray(similarity(case.pools, view.table, view.offset, view.lengths))


def check(case: Case, found: np.ndarray, limit: float, flipped: float) -> None:
    rows = case.keys.shape[2]
    wanted = reference.key_similarity(case.pools, case.names, case.view, 0.5, case.load_tile, jnp.int32(0))
    difference = np.abs(found[:, :rows] - np.asarray(wanted))
    # A cosine next to the threshold may fall on the other side: its row then drops another column.
    assert np.median(difference) < limit
    assert difference.max() < 1.1 / rows + 1e-4
    assert (difference > 1e-4).mean() < flipped or rows < 100


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_matches_the_oracle(shape, share):
    case = make(shape)
    case = case if shape.bits else alike(case, share)
    first = run(case, "triton")
    # Codes are decoded in bfloat16 here, in float32 there: more cosines fall on the other side.
    check(case, first, *((1e-4, 0.1) if shape.codes else (1e-5, 0.02)))
    rows = case.keys.shape[2]
    np.testing.assert_array_equal(first[:, :rows], run(case, "triton")[:, :rows])


def test_choice_on_a_gpu():
    run(make(Shape((70,))), "auto")
    assert "triton" in api.chosen()["key_similarity"]
