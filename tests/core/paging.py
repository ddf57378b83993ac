"""Puts keys and values into scrambled pages of a pool whose every other byte is poison."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import EvictContext, Method
from sparsejax.pallas_kernels.layout import LoadTile, PageView
from sparsejax.state import POSITIONS, layer_view
from sparsejax.storage import Storage


@dataclasses.dataclass(frozen=True)
class Paged:
    """Rows in pages.

    Attributes:
      geometry: shapes.
      pools: the storage's payload and positions.
      view: the rows' pages in `layer`.
      head_pages: int32 [batch, kv_heads, columns], the same pages spelled out.
      storage: how rows are stored.
      layer: int32 scalar.
    """

    geometry: Geometry
    pools: dict[str, jax.Array]
    view: PageView
    head_pages: np.ndarray
    storage: Storage
    layer: jax.Array

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self.pools if name != POSITIONS)

    @property
    def load_tile(self) -> LoadTile:
        return functools.partial(self.storage.load_tile, self.storage.params, self.geometry)

    @property
    def pages(self) -> tuple[dict[str, jax.Array], tuple[str, ...], PageView]:
        """The arguments that kernels take after the query."""
        return self.pools, self.names, self.view

    @property
    def how(self) -> dict:
        """Keyword arguments of the attention kernels."""
        return {"load_tile": self.load_tile, "layer": self.layer, "scale": self.geometry.scale}


def plain_storage() -> Storage:
    return registry.resolve("plain")[1]


def paged(
    geometry: Geometry,
    k,
    v,
    lengths,
    *,
    storage: Storage | None = None,
    granularity: Granularity = Granularity.HEAD,
    layer: int = 0,
    seed: int = 0,
    poison: float = np.nan,
) -> Paged:
    """Stores k and v [batch, rows, kv_heads, head_dim], the first `lengths` rows of each sequence.

    The null page, unused pages and rows past the end hold `poison` (the largest value in integer pools), and table
    entries past the end point to such pages.
    """
    storage = storage or plain_storage()
    batch, num_rows = k.shape[:2]
    lengths = np.broadcast_to(np.asarray(lengths, np.int32), (batch,))
    table_layers, table_heads = geometry.table_shape(granularity)
    columns = geometry.pages(num_rows)
    num_slabs = 2 * batch * columns + 1
    slab = table_layers * table_heads
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.arange(slab, num_slabs * slab))[: slab * batch * columns]
    table = jnp.asarray(ids.reshape(table_layers, table_heads, batch, columns), jnp.int32)
    each = jnp.asarray(np.broadcast_to(lengths, (table_layers, table_heads, batch)))
    view = layer_view(geometry, granularity, table, each, jnp.int32(layer))
    head_pages = np.asarray(view.head_pages(0, columns))
    sequence, index = np.nonzero(np.arange(num_rows)[None, :] < lengths[:, None])
    target, offsets = head_pages[sequence, :, index // geometry.page_size], (index % geometry.page_size)[:, None]
    k, v = (jnp.asarray(x, geometry.dtype) for x in (k, v))
    payload = _encode(storage, geometry, jnp.int32(layer), k, v)
    num_head_pages = num_slabs * geometry.head_pages_per_sequence_page
    pools = {}
    for name, spec in storage.payload(storage.params, geometry).items():
        floating = jnp.issubdtype(spec.dtype, jnp.floating)
        junk = poison if floating else jnp.iinfo(spec.dtype).max  # 0xFF is also an 8-bit float's NaN
        pools[name] = np.full((num_head_pages, *spec.shape), junk, jnp.dtype(spec.dtype))
        pools[name][target, offsets] = np.asarray(payload[name])[sequence, index]
    pools[POSITIONS] = np.full((num_head_pages, geometry.page_size), -7, np.int32)
    pools[POSITIONS][target, offsets] = index[:, None]
    pools = {name: jnp.asarray(pool) for name, pool in pools.items()}
    return Paged(geometry, pools, view, head_pages, storage, jnp.int32(layer))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(storage: Storage, geometry: Geometry, layer, k, v):
    return storage.encode(storage.params, geometry, layer, k, v)


def evict_context(
    method: Method, rows: Paged, *, phase: str = "prompt", row_aux=None, page_aux=None, observed: int = 0
) -> EvictContext:
    """What `keep_rows` sees of the one sequence in `rows`, whose positions are 0, 1, ..."""
    length = rows.view.lengths[0, 0]
    kept = int(method.kept_after(phase, np.full((1, 1), length))[0, 0])
    return EvictContext(
        geometry=rows.geometry,
        phase=phase,  # type: ignore[arg-type]
        kept=kept,
        counts=jnp.full(rows.view.table.shape[1], kept, jnp.int32),
        layer=rows.layer,
        row=jnp.int32(0),
        view=rows.view,
        length=length,
        observed=jnp.int32(observed),
        next_position=length,
        pools=rows.pools,
        names=rows.names,
        load_tile=rows.load_tile,
        page_aux=page_aux or {},
        row_aux=row_aux or {},
        request_aux={},
    )
