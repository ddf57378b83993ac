"""What holds for every storage: payload specs are true, rows are independent, what was stored comes back."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry
from sparsejax.storages import fp8_kv
from tests.contracts.compositions import storages

SHARE_OF_LARGEST = {"plain": 0.0, "fp8_kv": 2.0**-4}
"""Largest error of a stored number, as a share of its row's largest; a new storage is added here."""

DTYPES = ["float32", "bfloat16"]


def geometry_of(dtype: str) -> Geometry:
    return Geometry(2, 4, 2, 16, 8, 64, 0.25, dtype)


def resolve(name: str):
    return registry.resolve(name)[1]


def numbers(dtype: str, seed: int = 0, shape=(3, 5, 2, 16)) -> jax.Array:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, (*shape[:-1], 1))
    return jnp.asarray(rng.standard_normal(shape) * scale, dtype)


def load(storage, geometry, payload, layer=0):
    """Payload rows [batch, rows, heads, ...] through the head-major tiles that kernels load."""
    tiles = {name: jnp.moveaxis(rows, 2, 1) for name, rows in payload.items()}
    keys, values = storage.load_tile(storage.params, geometry, tiles, jnp.int32(layer))
    return jnp.moveaxis(keys, 1, 2), jnp.moveaxis(values, 1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", storages())
def test_round_trip(name, dtype):
    storage, geometry = resolve(name), geometry_of(dtype)
    k, v = numbers(dtype, 1), numbers(dtype, 2).at[0, 0].set(0)
    payload = storage.encode(storage.params, geometry, jnp.int32(0), k, v)
    for found, wanted in zip(load(storage, geometry, payload), (k, v), strict=True):
        assert found.dtype == dtype
        found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
        rounding = 0.0 if SHARE_OF_LARGEST[name] == 0 else float(jnp.finfo(dtype).eps)
        limit = (SHARE_OF_LARGEST[name] + rounding) * np.abs(wanted).max(-1, keepdims=True)
        assert (np.abs(found - wanted) <= limit).all()
    assert not np.asarray(load(storage, geometry, payload)[1], np.float32)[0, 0].any()  # zeros are exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", storages())
def test_payload_specs_are_true(name, dtype):
    storage, geometry = resolve(name), geometry_of(dtype)
    x = numbers(dtype)
    payload = storage.encode(storage.params, geometry, jnp.int32(1), x, x)
    specs = storage.payload(storage.params, geometry)
    assert list(payload) == list(specs)
    for key, spec in specs.items():
        assert spec.shape[0] == geometry.page_size
        assert payload[key].shape == (*x.shape[:3], *spec.shape[1:])
        assert payload[key].dtype == spec.dtype
    page = sum(spec.nbytes for spec in specs.values()) * geometry.head_pages_per_sequence_page
    assert storage.bytes_per_token(geometry) * geometry.page_size == page


@pytest.mark.parametrize("name", storages())
def test_a_row_is_stored_alike_in_any_company(name):
    storage, geometry = resolve(name), geometry_of("float32")
    k, v = numbers("float32", 3), numbers("float32", 4)
    whole = storage.encode(storage.params, geometry, jnp.int32(1), k, v)
    single = storage.encode(storage.params, geometry, jnp.int32(1), k[1:2, 3:4], v[1:2, 3:4])
    for key, rows in whole.items():
        assert np.asarray(rows[1:2, 3:4]).tobytes() == np.asarray(single[key]).tobytes()


@pytest.mark.parametrize("name", storages())
def test_storing_twice_changes_nothing(name):
    storage, geometry = resolve(name), geometry_of("float32")
    once = load(
        storage,
        geometry,
        storage.encode(storage.params, geometry, jnp.int32(0), numbers("float32"), numbers("float32")),
    )
    twice = load(storage, geometry, storage.encode(storage.params, geometry, jnp.int32(0), *once))
    for found, wanted in zip(twice, once, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["static", "static_head"])
def test_calibrated_scales_belong_to_their_layer_and_head(mode, tmp_path):
    scales = [([0.5, 0.25], [1.0, 2.0]), ([0.125, 4.0], [1.0, 0.5])]
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(fp8_kv.scale_file(scales, mode, "model", "hash")))
    storage, geometry = fp8_kv.build(fp8_kv.Params(mode, str(path))), geometry_of("float32")
    assert set(storage.payload(storage.params, geometry)) == {"k", "v"}
    codes = np.arange(-8, 8, dtype=np.float32)  # exact in 8 bits
    for layer, pair in enumerate(scales):
        k_scale, v_scale = (np.asarray([max(x)] * 2 if mode == "static" else x, np.float32) for x in pair)
        k, v = (np.broadcast_to(codes * scale[:, None], (1, 3, 2, 16)) for scale in (k_scale, v_scale))
        payload = storage.encode(storage.params, geometry, jnp.int32(layer), jnp.asarray(k), jnp.asarray(v))
        for key in ("k", "v"):
            np.testing.assert_array_equal(np.asarray(fp8_kv.dequantise(payload[key], jnp.float32(1)))[0, 0, 1], codes)
        for found, wanted in zip(load(storage, geometry, payload, layer), (k, v), strict=True):
            np.testing.assert_array_equal(found, wanted)
        payload = storage.encode(
            storage.params, geometry, jnp.int32(layer), jnp.full((1, 1, 2, 16), 1e9), jnp.asarray(v)
        )
        found = load(storage, geometry, payload, layer)[0]
        np.testing.assert_array_equal(found[0, 0, :, 0], 448 * k_scale)  # saturates


def test_bits_in_the_pool_are_the_codes():
    """CPU pools hold bits and others the 8-bit floats themselves: both decode alike."""
    codes = jnp.arange(256, dtype=jnp.uint8)
    floats = jax.lax.bitcast_convert_type(codes, fp8_kv.DTYPE)
    found, wanted = (np.asarray(fp8_kv.dequantise(x, jnp.float32(0.5))) for x in (codes, floats))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(fp8_kv.pool_rows(floats), codes)
    assert np.flatnonzero(np.isnan(found)).tolist() == [0x7F, 0xFF]
