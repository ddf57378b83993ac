"""Which calls TPU kernels take, and how a platform that isn't here is traced for."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry
from sparsejax.pallas_kernels import api, platforms, tpu_support
from sparsejax.pallas_kernels.layout import PageView
from tests.contracts.kernels_gpu.test_choice import stored


def problem(spec="plain", table_heads=1, columns=16, **fields) -> str | None:
    fields = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 128, "dtype": "bfloat16"} | fields
    geometry = Geometry(2, max_model_len=4096, scale=0.1, **fields)
    q, pools, names, view, load_tile = stored(spec, geometry)
    table = jax.ShapeDtypeStruct((3, table_heads, columns), jnp.int32)
    view = PageView(table, view.stride, view.offset, view.lengths)  # type: ignore[arg-type]
    return tpu_support.unsupported_rows(pools, names, view, load_tile, *q.shape[1:], q.dtype)


@pytest.mark.parametrize(
    "change",
    [{}, {"spec": "fp8_kv"}, {"page_size": 16}, {"dtype": "float32", "page_size": 8}, {"table_heads": 8}],
    ids=str,
)
def test_what_is_served(change):
    assert problem(**change) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"spec": "fp8_kv(fp8_kv_scale_mode=unit)"}, "decoded in a way the kernel does not know"),
        ({"dtype": "float16"}, "queries are float16"),
        ({"head_dim": 64}, "rows of 64 do not fill the 128 lanes"),
        ({"head_dim": 512}, "longer than 256"),
        ({"page_size": 8}, "pages of 8 rows cut the tiles of 16 rows"),
        ({"spec": "fp8_kv", "page_size": 64}, "the scales of a page of 64 rows do not fill 128 lanes"),
        ({"spec": "fp8_kv", "num_kv_heads": 4}, "scales are read for 8 adjacent heads"),
        ({"spec": "fp8_kv", "table_heads": 8}, "scales are read for 8 adjacent heads"),
        ({"num_q_heads": 1024}, "128 query heads share a KV head"),
        ({"columns": 100_000}, "tables of 100000 columns are wider than 65536"),
        ({"columns": 10_000, "table_heads": 8}, "tables of 10000 columns are wider than 8192"),
    ],
    ids=str,
)
def test_what_is_not_served_has_a_reason(change, reason):
    assert reason in str(problem(**change))


def tracing_for_a_tpu(monkeypatch):
    config = types.SimpleNamespace(jax_default_device=types.SimpleNamespace(platform="tpu"))
    monkeypatch.setattr(platforms, "jax", types.SimpleNamespace(config=config))


@pytest.mark.parametrize("spec", ["plain", "fp8_kv", "fp8_kv(fp8_kv_scale_mode=unit)"])
def test_rows_that_fill_the_lanes_hold_the_same_heads(spec, monkeypatch):
    geometry = Geometry(2, 4, 2, 64, 16, 64, 1.0, "float32")
    storage = registry.resolve(spec)[1]
    k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((3, 16, 2, 64)), jnp.float32) for i in range(2))

    def stored():
        rows = storage.encode(storage.params, geometry, jnp.int32(0), k, v)
        tiles = {name: jnp.moveaxis(row, 2, 1) for name, row in rows.items()}
        return rows, storage.load_tile(storage.params, geometry, tiles, jnp.int32(0))

    _, wanted = stored()
    tracing_for_a_tpu(monkeypatch)
    rows, found = stored()
    for name, array in storage.payload(storage.params, geometry).items():
        assert (rows[name].shape[3:], rows[name].dtype) == (array.shape[1:], array.dtype)
    assert rows["k"].shape[3:] == (128,)
    assert not np.asarray(rows["k"], np.float32)[..., 64:].any()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_default_device_decides_for_which_platform_is_traced(monkeypatch):
    assert api.platform() == jax.default_backend()
    assert "needs a TPU" in str(tpu_support.platform_problem())
    tracing_for_a_tpu(monkeypatch)
    assert api.platform() == "tpu"
    assert tpu_support.platform_problem() is None
    assert problem(head_dim=64) is None  # rows are stored with 128
    assert {"decode_attention", "prefill_attention", "page_scores"} <= {
        operation for operation, name in api.expected().items() if name == "mosaic_tpu"
    }
