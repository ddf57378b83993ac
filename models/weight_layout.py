"""How weights lie in TPU memory, where the last two axes are tiled."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from sparsejax.pallas_kernels import api


def tpu_layout(num_axes: int) -> Layout | None:
    """The layout of a weight [in, *out], or None where the default one serves.

    Products want "in" next to the last axis. Left to the compiler, a weight with several "out" axes would be turned
    round in every step; and an embedding whose rows don't fill the lanes, of which single rows are read, stored by
    columns.
    """
    if num_axes < 2:
        return None
    return Layout((*range(1, num_axes - 1), 0, num_axes - 1))


def place(weights: Any) -> Any:
    """The weights as the platform wants them; on TPUs the given ones are consumed, one by one."""
    return jax.tree.map(_place, weights) if api.platform() == "tpu" else weights


def _place(array: jax.Array) -> jax.Array:
    layout = tpu_layout(array.ndim)
    return array if layout is None else jax.device_put(array, Format(layout, array.sharding), donate=True)
