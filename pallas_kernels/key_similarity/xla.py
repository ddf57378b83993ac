"""Key similarity for any platform: a loop over tiles of rows.

In most heads nearly every key has a similar one among the newest: all are compared with those, and only the others with
all. Similarities exist one tile at a time, and only as far as rows are resident.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools, few_rows, load_block, pad_columns


def key_similarity(
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    threshold: float,
    tile: int,
    load_tile: LoadTile,
    layer: jax.Array,
) -> jax.Array:
    """See `api.key_similarity`."""
    heads, page_size = view.num_heads, pools[names[0]].shape[1]
    length, rows = view.lengths.max(), view.table.shape[2] * page_size
    view = pad_columns(view, tile // page_size)
    capacity = view.table.shape[2] * page_size
    num_tiles = (length + tile - 1) // tile
    few = few_rows(tile, page_size)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]

    def load(page: jax.Array, count: int) -> _Keys:
        """`count` rows from a page on."""
        pages = view.head_pages(page, count // page_size)
        keys, _ = load_block(pools, names, pages, load_tile, layer)
        row = page * page_size + jnp.arange(count, dtype=jnp.int32)
        keys = jnp.where((row < length)[None, :, None], keys[0], 0)
        return _Keys(jnp.broadcast_to(row[None], (heads, count)), keys, _inverse_norm(keys))

    def load_tile_of(index: jax.Array) -> _Keys:
        return load(index * (tile // page_size), tile)

    def load_rows(row: jax.Array) -> _Keys:
        """Resident rows [kv_heads, n]."""
        pages = view.pages_at(row[None] // page_size)
        found = {name: pools[name][pages, row[None] % page_size] for name in names}
        keys = load_tile(found, layer)[0][0]
        return _Keys(row, keys, _inverse_norm(keys))

    newest = load(jnp.maximum((length + page_size - 1) // page_size - few // page_size, 0), few)

    def look_at_newest(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, last = carry
        keys = load_tile_of(index)
        last = jax.lax.dynamic_update_slice(last, _last_similar(keys, newest, threshold), (0, index * tile))
        return total + keys.units().sum(1), last

    empty = jnp.zeros((heads, capacity), jnp.float32)
    total = jnp.zeros((heads, newest.keys.shape[2]), jnp.float32)
    total, last = jax.lax.fori_loop(0, num_tiles, look_at_newest, (total, empty.astype(jnp.int32)))

    def missing(last: jax.Array) -> jax.Array:
        return (last < 0) & (jnp.arange(capacity, dtype=jnp.int32) < length)[None]

    def look_at_all(last: jax.Array) -> jax.Array:
        """Finds the last similar row of the next few that miss one; 0 without any."""
        wanted = missing(last)
        place = jnp.where(wanted, jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1, few)  # those past `few` wait
        every = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), wanted.shape)
        row = jnp.full((heads, few), capacity, jnp.int32).at[head, place].set(every, mode="drop")
        keys = load_rows(jnp.minimum(row, length - 1))

        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            other, found = state
            return other - 1, jnp.maximum(found, _last_similar(keys, load_tile_of(other), threshold))

        def searching(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (state[0] >= 0) & (state[1] < 0).any()

        start = num_tiles - 1, jnp.where(row < capacity, -1, 0)  # from the last tile down: what is found is the last
        found = jax.lax.while_loop(searching, step, start)[1]
        return last.at[head, row].set(jnp.maximum(found, 0), mode="drop")

    last = jnp.maximum(jax.lax.while_loop(lambda last: missing(last).any(), look_at_all, last), 0)

    # What was set to 0 is added up in fixed point: the order of a float scatter is not fixed on GPUs.
    bits = fraction_bits(capacity)

    def add_rows(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, dropped = carry
        keys = load_tile_of(index)
        match = load_rows(jax.lax.dynamic_slice(last, (0, index * tile), (heads, tile)))
        units = keys.units()
        cosine = jnp.where(match.row == keys.row, 0.0, (units * match.units()).sum(2))
        dropped = dropped.at[head, match.row].add(jnp.round(cosine * 2.0**bits).astype(jnp.int32))
        own = (units * (total[:, None] - units)).sum(2)
        return jax.lax.dynamic_update_slice(sums, own, (0, index * tile)), dropped

    sums, dropped = jax.lax.fori_loop(0, num_tiles, add_rows, (empty, empty.astype(jnp.int32)))
    return column_means(sums, dropped, bits, length)[:, :rows]


def fraction_bits(capacity: int) -> int:
    """Bits after the point of a sum of so many cosines in an int32."""
    return 29 - capacity.bit_length()


def column_means(sums: jax.Array, dropped: jax.Array, bits: int, length: jax.Array) -> jax.Array:
    """Means of columns from their sums and, in fixed point, what was set to 0 of them."""
    return (sums - dropped.astype(jnp.float32) * 2.0**-bits) / length.astype(jnp.float32)


class _Keys(NamedTuple):
    """Keys of some rows.

    Attributes:
      row: int32 [kv_heads, n].
      keys: [kv_heads, n, head_dim].
      inverse: float32 [kv_heads, n], of their norms.
    """

    row: jax.Array
    keys: jax.Array
    inverse: jax.Array

    def units(self) -> jax.Array:
        """float32 [kv_heads, n, head_dim]."""
        return self.keys.astype(jnp.float32) * self.inverse[..., None]


def _last_similar(keys: _Keys, others: _Keys, threshold: float) -> jax.Array:
    """The largest row of `others` that is similar to each of `keys` and another one, int32 [kv_heads, n]; else -1."""
    cosine = jnp.einsum(
        "hrd,hcd->hrc",
        keys.keys,
        others.keys,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    similar = cosine * keys.inverse[..., None] * others.inverse[:, None] > threshold
    similar &= others.row[:, None] != keys.row[..., None]
    return jnp.where(similar, others.row[:, None], -1).max(2)


def _inverse_norm(keys: jax.Array) -> jax.Array:
    keys = keys.astype(jnp.float32)
    return 1.0 / (jnp.sqrt((keys * keys).sum(-1)) + 1e-8)
