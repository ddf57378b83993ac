"""Decode attention that scores rows, on TPUs: the attention and the row scores of Mosaic, then a scatter."""

from __future__ import annotations

import jax

from sparsejax.pallas_kernels.decode_attention import mosaic_tpu as attention
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.observed_decode_attention.xla import add_mass
from sparsejax.pallas_kernels.row_scores import mosaic_tpu as rows
from sparsejax.pallas_kernels.tpu_support import platform_problem as platform_problem


def unsupported(q: jax.Array, pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.decode_attention`."""
    problem = attention.unsupported(q, pools, names, view, load_tile)
    return problem or rows.unsupported(q[:, None], pools, names, view, load_tile)


def observed_decode_attention(
    q: jax.Array,
    scores: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    shared: bool,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.observed_decode_attention`."""
    out, lse = attention.decode_attention(q, pools, names, view, load_tile, layer, scale)
    limit = view.lengths[:, :, None]
    mass = rows.row_scores(q[:, None], pools, names, view, limit, lse[:, None], "sum", load_tile, layer, scale)
    return out, add_mass(scores, view, mass, shared)
