"""Tiles of queries: what reads the same blocks of keys. Imports jax only.

The queries of a KV head are packed positions first: packed row r is query position r // group of query head r % group.
A tile is `tile_rows` consecutive packed rows, so that all query heads of a position are (nearly) always in one tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView


def num_tiles(chunk: int, group: int, tile_rows: int) -> int:
    """Tiles of each KV head."""
    return -(-chunk * group // tile_rows)


def pack_queries(q: jax.Array, heads: int, multiple: int) -> jax.Array:
    """[batch, chunk, q_heads, ...] -> [batch, kv_heads, rows, ...], padded with zeros to a multiple of rows."""
    batch, chunk, q_heads, *rest = q.shape
    group = q_heads // heads
    packed = jnp.moveaxis(q.reshape(batch, chunk, heads, group, *rest), 2, 1).reshape(batch, heads, -1, *rest)
    extra = -packed.shape[2] % multiple
    return jnp.pad(packed, ((0, 0), (0, 0), (0, extra), *((0, 0) for _ in rest))) if extra else packed


def unpack_queries(packed: jax.Array, chunk: int, group: int) -> jax.Array:
    """[batch, kv_heads, rows, ...] -> [batch, chunk, q_heads, ...]."""
    batch, heads, _, *rest = packed.shape
    rows = packed[:, :, : chunk * group].reshape(batch, heads, chunk, group, *rest)
    return jnp.moveaxis(rows, 1, 2).reshape(batch, chunk, heads * group, *rest)


def packed_positions(tiles: int, tile_rows: int, group: int) -> jax.Array:
    """int32 [tiles, tile_rows]: the query position of each packed row."""
    return (jnp.arange(tiles * tile_rows, dtype=jnp.int32) // group).reshape(tiles, tile_rows)


def bounds(tiles: int, tile_rows: int, group: int, chunk: int) -> tuple[jax.Array, jax.Array]:
    """int32 [tiles] first and last query position of each tile of a chunk."""
    first = jnp.arange(tiles, dtype=jnp.int32) * tile_rows
    last = jnp.minimum(first + tile_rows, chunk * group) - 1
    return first // group, last // group


def readable(
    view: PageView,
    start: jax.Array,
    blocks: jax.Array,
    num_blocks: jax.Array,
    *,
    block_size: int,
    tile_rows: int,
    group: int,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """How many of each tile's blocks hold rows that any of its queries sees, and how many all rows of which all see.

    Blocks ascend, so both are beginnings of the list. A tile past a row's end reads nothing.

    Returns:
      int32 [batch, kv_heads, tiles], twice.
    """
    first, last = (x[None, None] for x in bounds(blocks.shape[2], tile_rows, group, chunk))
    lengths, start = view.lengths[:, :, None], start[:, :, None]
    seen_by_any = jnp.where(start + first < lengths, jnp.minimum(lengths, start + last + 1), 0)[..., None]
    seen_by_all = jnp.minimum(lengths, start + first + 1)[..., None]
    listed = jax.lax.broadcasted_iota(jnp.int32, blocks.shape, 3) < num_blocks[..., None]
    read = (listed & (blocks * block_size < seen_by_any)).sum(-1, dtype=jnp.int32)
    whole = (listed & ((blocks + 1) * block_size <= seen_by_all)).sum(-1, dtype=jnp.int32)
    return read, jnp.minimum(whole, read)
