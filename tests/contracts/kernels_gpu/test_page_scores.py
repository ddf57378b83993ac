"""Page scores on a GPU against the float32 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference
from sparsejax.pallas_kernels.layout import PageView

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("dim", "heads", "group", "page"), [(64, 3, 3, 16), (128, 8, 4, 64), (256, 1, 16, 32)])
@pytest.mark.parametrize("per_head", [False, True])
def test_matches_oracle(implementation, dtype, dim, heads, group, page, per_head):
    rng = np.random.default_rng(dim + group)
    batch, columns, own = 3, 137, heads if per_head else 1
    lengths = rng.integers(1, columns * page + 1, (batch, own)).astype(np.int32)
    lengths[0], lengths[1] = 1, columns * page
    num_pages = -(-np.broadcast_to(lengths, (batch, heads)) // page)
    stride = 1 if per_head else heads
    slabs = batch * own * columns + 1
    table = 1 + rng.permutation(slabs - 1).reshape(batch, own, columns)
    table = np.where(np.arange(columns) < -(-lengths // page)[:, :, None], table, 0).astype(np.int32)
    bounds = rng.standard_normal((2, slabs * stride, dim)).astype(np.float32)
    bounds.sort(0)
    low, high = jnp.asarray(bounds[0]).astype(dtype), jnp.asarray(bounds[1]).astype(dtype)
    q = jnp.asarray(rng.standard_normal((batch, heads * group, dim)), dtype)
    offset = jnp.zeros(heads, jnp.int32) if per_head else jnp.arange(heads, dtype=jnp.int32)
    view = PageView(jnp.asarray(table), stride, offset, jnp.asarray(lengths))
    with jax.default_matmul_precision("highest"):
        found = api.page_scores(q, low, high, view, page_size=page, implementation=implementation)
        wanted = reference.page_scores(q, low, high, view)
    assert found.dtype == jnp.float32
    valid = np.arange(columns) < num_pages[:, :, None]
    found, wanted = np.asarray(found)[valid], np.asarray(wanted)[valid]
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < (2e-5 if dtype == "float32" else 3e-3)
