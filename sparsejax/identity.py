"""What makes the rows of two engines comparable: digests of weights and tokenizer, storage, knobs of the methods."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.method import Method
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.storage import Storage

_STREAMS = 4  # 32-bit sums of one array


def identity(spec: ModelSpec, weights: Weights, tokenizer: Any, storage: Storage) -> dict[str, Any]:
    """By name (see `plans.RunnerLimits`). Paths, sampling and the length of the window are no part of it.

    Args:
      spec, weights: the model, as it lies on the device.
      tokenizer: has `hf`, a fast tokenizer of transformers.
      storage: how rows are stored.
    """
    shape = dataclasses.asdict(spec)
    rope = shape.pop("rope")
    del shape["max_model_len"]
    return {
        "weights": weights_digest(weights),
        "model": _texts(shape),
        "rope": _texts(rope),
        "storage": {"name": storage.name} | _texts(_fields(storage.params)),
        "tokenizer": hashlib.sha256(tokenizer.hf.backend_tokenizer.to_str().encode()).hexdigest(),
    }


def knobs(methods: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    """Of each method, those of its members."""
    return {
        name: {member.name: _texts(_fields(member.params)) for member in (method.members or (method,))}
        for name, method in methods.items()
    }


def weights_digest(weights: Weights) -> str:
    """SHA-256 over names, shapes, dtypes and checksums of the arrays. Computed where they are, in one pass over them.

    Equal bits give equal digests on any device and however they were loaded. The checksums tell revisions,
    quantisations and seeds apart; they are no protection against somebody who makes weights to collide.
    """
    digest = hashlib.sha256()
    sums = [
        (jax.tree_util.keystr(path), array.shape, str(array.dtype), _checksum(array))
        for path, array in jax.tree_util.tree_leaves_with_path(weights)
    ]
    for name, shape, dtype, values in sums:
        digest.update(f"{name} {shape} {dtype} ".encode())
        digest.update(np.asarray(values, "<u4").tobytes())
    return digest.hexdigest()


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """uint32 [4]: sums of the elements' bits, each mixed with its place."""
    if array.dtype.name.endswith(("int4", "int2")):
        array = array.astype(jnp.int8)
    unsigned = jnp.dtype(f"uint{min(32, 8 * array.dtype.itemsize)}")
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32).reshape(-1)
    place = jax.lax.iota(jnp.uint32, bits.size)
    starts = [(i * 0x9E3779B9 + 1) & 0xFFFFFFFF for i in range(_STREAMS)]
    return jnp.stack([jnp.sum(_mix(bits ^ _mix(place + jnp.uint32(start)))) for start in starts])


def _mix(x: jax.Array) -> jax.Array:
    """A permutation of 32 bits in which each input bit moves about half of them."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _fields(params: Any) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
