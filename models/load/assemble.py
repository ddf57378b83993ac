"""Checkpoint tensors into a weight tree: names and shapes are checked before any byte is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.arrays import ArraySpec
from sparsejax.errors import LoadError
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, TensorSlot, Weights

_SHOWN_DIFFERENCES = 10
_PARTS = {"qkv": ("q", "k", "v"), "qkv_bias": ("q", "k", "v"), "gate_up": ("gate", "up")}


def is_harmless(name: str, spec: ModelSpec) -> bool:
    """Tensors that old checkpoints carry and that hold nothing new."""
    return name.endswith(".rotary_emb.inv_freq") or (spec.tie_embeddings and name == "lm_head.weight")


class Assembler:
    """Takes tensors in any order, puts each on the device in the spec's dtype, fuses parts as soon as all are there.

    Args:
      spec: the model.
      found: shape of every tensor in the checkpoint, by Hugging Face name.
      source: named in errors.

    Raises:
      LoadError: missing, unexpected or wrongly shaped tensors; lists the first ten differences.
    """

    def __init__(self, spec: ModelSpec, found: Mapping[str, tuple[int, ...]], source: str) -> None:
        architecture = get_architecture(spec.architecture)
        self._spec = spec
        self._slots = architecture.tensor_slots(spec)
        self._tree: Weights = architecture.weight_specs(spec)
        self._pending: dict[tuple[str | int, ...], dict[str, Any]] = {}
        check_tensors(self._slots, found, source, harmless=lambda name: is_harmless(name, spec))

    def wants(self, name: str) -> bool:
        return name in self._slots

    def add(self, name: str, value: np.ndarray) -> None:
        """Places one tensor, in the shape its slot names."""
        slot = self._slots.pop(name)
        array = jnp.asarray(value)
        if slot.part is None:
            pack = _transpose if slot.transposed else _cast
            self._put(slot.path, pack(array, self._spec.dtype))
            return
        parts = self._pending.setdefault(slot.path, {})
        parts[slot.part] = array
        order = _PARTS[str(slot.path[-1])]
        if len(parts) == len(order):
            del self._pending[slot.path]
            self._put(slot.path, self._fuse(slot, [parts[part] for part in order]))

    def finish(self) -> Weights:
        """The whole tree; every slot has been filled."""
        if self._slots:
            raise LoadError(f"tensors were announced but never read: {_first(sorted(self._slots))}")
        return self._tree

    def _fuse(self, slot: TensorSlot, parts: list[jax.Array]) -> jax.Array:
        if slot.path[-1] == "gate_up":
            return _fuse_gate_up(*parts, self._spec.dtype)
        return _fuse_heads(*parts, self._spec.num_kv_heads, self._spec.head_dim, self._spec.dtype)

    def _put(self, path: tuple[str | int, ...], array: jax.Array) -> None:
        node: Any = self._tree
        for key in path[:-1]:
            node = node[key]
        wanted: ArraySpec = node[path[-1]]
        assert (array.shape, array.dtype) == (wanted.shape, jnp.dtype(wanted.dtype)), (path, array, wanted)
        node[path[-1]] = array


def check_tensors(
    slots: Mapping[str, TensorSlot],
    found: Mapping[str, tuple[int, ...]],
    source: str,
    harmless: Callable[[str], bool] = lambda name: False,
) -> None:
    """LoadError unless `found` has exactly the tensors of `slots`, in their shapes."""
    differences = [f"missing: {name} {slot.shape}" for name, slot in slots.items() if name not in found]
    for name, shape in found.items():
        if name not in slots:
            if not harmless(name):
                differences.append(f"unexpected: {name} {tuple(shape)}")
        elif tuple(shape) != slots[name].shape:
            differences.append(f"wrong shape: {name} is {tuple(shape)}, expected {slots[name].shape}")
    if differences:
        raise LoadError(
            f"{source} does not match its config in {len(differences)} tensors:\n  "
            + _first(differences, "\n  ")
            + "\nThe config and the weights must come from the same checkpoint."
        )


def _first(items: Iterable[str], separator: str = ", ") -> str:
    items = list(items)
    shown = separator.join(items[:_SHOWN_DIFFERENCES])
    rest = len(items) - _SHOWN_DIFFERENCES
    return shown + (f"{separator}... and {rest} more" if rest > 0 else "")


@functools.partial(jax.jit, static_argnums=1)
def _cast(x: jax.Array, dtype: str) -> jax.Array:
    return x.astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _transpose(x: jax.Array, dtype: str) -> jax.Array:
    return x.T.astype(dtype)


@functools.partial(jax.jit, static_argnums=2)
def _fuse_gate_up(gate: jax.Array, up: jax.Array, dtype: str) -> jax.Array:
    """Two [intermediate, hidden] -> [hidden, 2, intermediate]."""
    return jnp.stack([gate.T, up.T], axis=1).astype(dtype)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _fuse_heads(q: jax.Array, k: jax.Array, v: jax.Array, num_kv_heads: int, dim: int, dtype: str) -> jax.Array:
    """q [num_q_heads * dim, ...], k and v [num_kv_heads * dim, ...] -> [..., num_kv_heads, group_size + 2, dim]."""
    parts = [x.reshape(num_kv_heads, -1, dim, *x.shape[1:]) for x in (q, k, v)]
    heads = jnp.concatenate(parts, axis=1)
    return (jnp.moveaxis(heads, -1, 0) if heads.ndim == 4 else heads).astype(dtype)
