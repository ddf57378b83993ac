"""Where the rows of a sequence lie: page tables, head-pages and block loads. Imports jax only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.platforms import platform

LANES = 128
"""Elements of a line of TPU memory."""

Pools = Mapping[str, jax.Array]
"""Arrays of head-pages, each [num_head_pages, page_size, ...]: one storage's payload, plus "positions"."""

POSITIONS = "positions"
"""Name of the pool that holds each row's logical position, int32 [num_head_pages, page_size]."""

Encode = Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]
"""(layer, k, v [..., num_kv_heads, head_dim]) -> rows of each payload array {name: [..., num_kv_heads, ...]}."""

LoadTile = Callable[[Mapping[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array]]
"""(payload tiles {name: [..., rows, ...]}, layer) -> keys and values [..., rows, head_dim] in the compute dtype."""


def row_width(head_dim: int) -> int:
    """Elements of a stored row: as many as channels, on TPUs rounded up to whole lanes.

    A TPU pads shorter rows anyway, unless it turns the pool round so that a page is no longer in one place.
    """
    return -(-head_dim // LANES) * LANES if platform() == "tpu" else head_dim


def widen_rows(rows: jax.Array) -> jax.Array:
    """[..., head_dim] -> [..., row_width(head_dim)], with zeros."""
    extra = row_width(rows.shape[-1]) - rows.shape[-1]
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, extra),)) if extra else rows


def trim_rows(rows: jax.Array, head_dim: int) -> jax.Array:
    """The first `head_dim` elements of each stored row."""
    return rows if rows.shape[-1] == head_dim else jax.lax.slice_in_dim(rows, 0, head_dim, axis=-1)


class PageView(NamedTuple):
    """The page tables of some rows in one layer.

    Heads that share a table entry have adjacent head-pages, the first of them at a multiple of their number.

    Attributes:
      table: int32 [batch, heads or 1, columns]; entries of pages past the end are 0, the null page.
      stride: head-pages from one table entry to the next of the same layer and head.
      offset: int32 [kv_heads]: head-page = entry * stride + offset[head].
      lengths: int32 [batch, heads or 1]: valid rows.
    """

    table: jax.Array
    stride: int
    offset: jax.Array
    lengths: jax.Array

    @property
    def num_heads(self) -> int:
        return self.offset.shape[0]

    def head_pages(self, first_column: jax.Array | int, num_columns: int) -> jax.Array:
        """int32 [batch, kv_heads, num_columns]: the head-pages of a run of table columns.

        `first_column + num_columns` must not pass the table's width: dynamic slices clamp silently.
        """
        entries = jax.lax.dynamic_slice_in_dim(self.table, first_column, num_columns, axis=2)
        return entries * self.stride + self.offset[None, :, None]

    def held_pages(self, page_size: int) -> jax.Array:
        """int32 [batch, kv_heads, columns]: all head-pages; the null page past the end, where others' may stand."""
        columns = self.table.shape[2]
        first_row = jnp.arange(columns, dtype=jnp.int32)[None, None] * page_size
        return jnp.where(first_row < self.lengths[:, :, None], self.head_pages(0, columns), 0)

    def slabs(self, first_column: jax.Array | int, num_columns: int) -> jax.Array | None:
        """int32 [batch, num_columns]: as `head_pages`, but of all heads at once, in units of kv_heads head-pages.

        One read then fetches what all heads need. None where heads have table entries of their own.
        """
        if self.table.shape[1] != 1 or self.stride % self.num_heads:
            return None
        entries = jax.lax.dynamic_slice_in_dim(self.table[:, 0], first_column, num_columns, axis=1)
        return entries * (self.stride // self.num_heads) + self.offset[0] // self.num_heads

    def places(self, num_new: jax.Array, chunk: int, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Where new rows go, after the first `lengths` ones.

        Args:
          num_new: int32 [batch].
          chunk: places for each sequence; those past `num_new` are on the null page.
          page_size: rows of a page.

        Returns:
          int32 head-pages [batch, chunk, kv_heads] and offsets [batch, chunk, heads or 1].
        """
        step = jnp.arange(chunk, dtype=jnp.int32)
        index = self.lengths[:, :, None] + step[None, None, :]
        valid = step[None, :] < num_new[:, None]
        columns = jnp.minimum(index // page_size, self.table.shape[2] - 1)
        head_pages = self.pages_at(columns).swapaxes(1, 2)
        return jnp.where(valid[:, :, None], head_pages, 0), (index % page_size).swapaxes(1, 2)

    def pages_at(self, columns: jax.Array) -> jax.Array:
        """int32 [batch, kv_heads, n] head-pages of `columns` [batch, kv_heads or 1, n]."""
        heads = max(columns.shape[1], self.table.shape[1])
        table = jnp.broadcast_to(self.table, (self.table.shape[0], heads, self.table.shape[2]))
        columns = jnp.broadcast_to(columns, (columns.shape[0], heads, columns.shape[2]))
        entries = jnp.take_along_axis(table, columns, axis=2, mode="clip")
        return entries * self.stride + self.offset[None, :, None]


def explicit_view(head_pages: jax.Array, lengths: jax.Array) -> PageView:
    """A view whose table already holds head-page ids: int32 [batch, kv_heads, columns]."""
    return PageView(head_pages, 1, jnp.zeros(head_pages.shape[1], jnp.int32), lengths)


def pad_columns(view: PageView, multiple: int) -> PageView:
    """The same view with a table width that is a multiple; the added columns are null pages."""
    extra = -view.table.shape[2] % multiple
    if not extra:
        return view
    return view._replace(table=jnp.pad(view.table, ((0, 0), (0, 0), (0, extra))))


def few_rows(tile_rows: int, page_size: int) -> int:
    """Rows, whole pages of them, that a tile of rows is compared with at a time where all are compared with all."""
    return max(tile_rows // 4 // page_size, 1) * page_size


def load_block(
    pools: Pools, names: tuple[str, ...], head_pages: jax.Array, load_tile: LoadTile, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [batch, kv_heads, columns * page_size, head_dim] of a block of head-pages."""
    tiles = {name: gather_rows(pools[name], head_pages) for name in names}
    return load_tile(tiles, layer)


def gather_rows(pool: jax.Array, head_pages: jax.Array) -> jax.Array:
    """[num_head_pages, page_size, ...] and ids [batch, heads, columns] -> [batch, heads, columns * page_size, ...]."""
    batch, heads, columns = head_pages.shape
    # A page as one long row: a CPU copies it in one go instead of row by row. A TPU would have to copy the whole pool,
    # whose tiles hold eight rows of a page.
    pages = pool if platform() == "tpu" else pool.reshape(pool.shape[0], -1)
    tile = pages.at[head_pages].get(mode="promise_in_bounds")
    return tile.reshape(batch, heads, columns * pool.shape[1], *pool.shape[2:])
