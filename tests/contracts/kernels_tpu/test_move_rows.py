"""Rows moved on TPUs against the oracle, in interpret mode: bit for bit."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels import api, reference
from sparsejax.state import layer_view
from tests.contracts.kernels_tpu.cases import interpret, slow


@pytest.mark.parametrize("kept", [1, 70])
@pytest.mark.parametrize(
    ("granularity", "storage", "per_head"),
    [
        (Granularity.SEQUENCE, "fp8_kv", False),
        slow(Granularity.LAYER, "plain", True),
        slow(Granularity.HEAD, "plain", True),
    ],
)
def test_kept_rows_are_where_they_belong_and_nothing_else_changed(granularity, storage, per_head, kept):
    geometry = Geometry(2, 4, 2, 128, 32, 192, 1.0, "bfloat16")
    rng = np.random.default_rng(3)
    kind = registry.resolve(storage)[1]
    layers, heads = geometry.table_shape(granularity)
    batch, length, num_pages = 2, 180, 20
    size = num_pages * geometry.head_pages_per_page(granularity) * layers * heads
    pools = {
        name: jnp.asarray(rng.integers(0, 120, (size, *spec.shape))).astype(jnp.dtype(spec.dtype))
        for name, spec in kind.payload(kind.params, geometry).items()
    }
    pools["positions"] = jnp.asarray(rng.integers(0, 99, (size, geometry.page_size)), jnp.int32)
    ids = layers * heads + rng.permutation((num_pages - 1) * layers * heads)[: layers * heads * batch * 9]
    ids = ids.reshape(layers, heads, batch, 9).astype(np.int32)
    new_pages = np.pad(ids[..., 6:], ((0, 0), (0, 0), (0, 0), (0, 3)))  # null pages past the end
    views = []
    for table, rows in ((ids[..., :6], length), (new_pages, kept)):
        lengths = jnp.full((layers, heads, batch), rows, jnp.int32)
        views.append(layer_view(geometry, granularity, jnp.asarray(table), lengths, jnp.int32(1)))
    choices = [np.sort(rng.permutation(length)[:kept]) for _ in range(batch * (2 if per_head else 1))]
    keep = jnp.asarray(np.reshape(choices, (batch, -1, kept)), jnp.int32)
    move = functools.partial(api.move_rows, implementation="mosaic_tpu")
    found = interpret(lambda pools, keep: move(pools, keep, *views), pools, keep)
    wanted = reference.move_rows(pools, keep, *views)
    assert set(found) == set(pools)
    for name, pool in wanted.items():
        np.testing.assert_array_equal(found[name], np.asarray(pool), err_msg=name)
        assert (found[name] != np.asarray(pools[name])).any()
