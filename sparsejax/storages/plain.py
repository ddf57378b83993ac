"""Keys and values in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from sparsejax.arrays import ArraySpec
from sparsejax.geometry import Geometry
from sparsejax.method import NoParams
from sparsejax.pallas_kernels.layout import row_width, trim_rows, widen_rows
from sparsejax.storage import Storage


def payload(params: NoParams, geometry: Geometry) -> dict[str, ArraySpec]:
    width = row_width(geometry.head_dim)
    rows = ArraySpec((geometry.page_size, width), geometry.dtype, ("row", "head_dim"))
    return {"k": rows, "v": rows}


def encode(params: NoParams, geometry: Geometry, layer: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
    return {"k": widen_rows(k.astype(geometry.dtype)), "v": widen_rows(v.astype(geometry.dtype))}


def load_tile(
    params: NoParams, geometry: Geometry, tiles: Mapping[str, jax.Array], layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return trim_rows(tiles["k"], geometry.head_dim), trim_rows(tiles["v"], geometry.head_dim)


def build(params: NoParams) -> Storage:
    return Storage("plain", params, "keys and values in the compute dtype", payload, encode, load_tile, exact=True)


PARAMS = NoParams
ALIASES = ("auto",)
NOTES = {
    "Keeps": "Keys and values as computed.",
    "Costs": "2 x head_dim numbers of the compute dtype per row, layer and KV head.",
    "Use it": "As long as memory allows.",
}
