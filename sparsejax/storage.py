"""The Storage record: how a resident row is represented.

Like a `Method` it is a frozen, hashable value in one file (under `sparsejax/storages/`). `load_tile` is traced into the
attention kernels, so one kernel serves every storage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sparsejax.arrays import ArraySpec
from sparsejax.geometry import Geometry


@dataclasses.dataclass(frozen=True)
class Storage:
    """How keys and values lie in a head-page.

    Attributes:
      name: the storage's name.
      params: frozen dataclass of knobs.
      summary, paper: one line, and the source.
      payload: specs of the arrays of ONE head-page by name, each [page_size, ...].
      encode: (params, geometry, layer, k, v [..., head_dim]) -> {name: [...]} rows of the payload.
      load_tile: (params, geometry, tiles {name: [..., rows, ...]}, layer) -> k, v [..., rows, head_dim] in the
        compute dtype.
      key_arrays: the arrays of the payload that keys are decoded from.
      exact: what is read is what was stored, so a row can be stored again without getting worse.
      check: (params, geometry, checkpoint id, model config hash) -> reasons why this model can't be stored so.
    """

    name: str
    params: Any
    summary: str
    payload: Callable[[Any, Geometry], dict[str, ArraySpec]]
    encode: Callable[[Any, Geometry, jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]
    load_tile: Callable[[Any, Geometry, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array]]
    paper: str = ""
    key_arrays: tuple[str, ...] = ("k",)
    exact: bool = False
    check: Callable[[Any, Geometry, str, str], list[str]] = lambda params, geometry, checkpoint_id, config_sha256: []

    def bytes_per_token(self, geometry: Geometry) -> int:
        """Bytes of one token's keys and values in all layers and heads, side arrays included."""
        page = sum(spec.nbytes for spec in self.payload(self.params, geometry).values())
        return page // geometry.page_size * geometry.head_pages_per_sequence_page
