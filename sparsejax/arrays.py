"""Arrays described before they exist: allocation, byte counts, loaders and snapshots read the same specs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape, dtype and axis names of an array to come.

    Attributes:
      shape: sizes.
      dtype: dtype name, e.g. "float32" or "float8_e4m3fn".
      axes: one logical name per axis ("layer", "vocab", "kv_head", ...), for sharding and messages.
      fill: value a fresh array holds.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] = ()
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def empty(self) -> jax.Array:
        """A fresh array holding `fill` everywhere."""
        return jnp.full(self.shape, self.fill, self.dtype)

    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))


def is_spec(x: Any) -> bool:
    """True for a leaf of a spec tree."""
    return isinstance(x, ArraySpec)


def tree_nbytes(specs: Any) -> int:
    """Bytes of a tree of specs."""
    return sum(spec.nbytes for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def tree_empty(specs: Any) -> Any:
    """Allocates a tree of specs."""
    return jax.tree.map(lambda spec: spec.empty(), specs, is_leaf=is_spec)
