"""How TPU kernels store rows: whole tiles of memory are read, completed and written back, in place.

XLA's scatter takes one row after the other, and of arrays with a single number per row it copies the whole pool. Here
rows are laid out as the tiles or pages that they belong to. Tiles of keys and values are copied many at once, and those
that new rows fill are not read before. Pieces of the other pools, too small for copies of their own, are updated in a
loop.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels.layout import LANES, PageView, Pools
from sparsejax.pallas_kernels.tpu_support import CODES, DTYPES, sublanes

BUFFER_BYTES = 2**20  # of new keys in a program, and as much for values
MOST_TILES = 16384  # times four numbers of 4 bytes in scalar memory


def unsupported_pools(pools: Pools, batch: int, chunk: int, heads: int) -> str | None:
    """Why rows of at most `chunk` tokens can't be stored in these pools, or None."""
    if not {"k", "v"} <= set(pools):
        return f"rows are stored as {', '.join(sorted(pools))}, not as keys and values"
    keys = pools["k"]
    if keys.ndim != 3 or pools["v"].shape != keys.shape or keys.shape[2] % LANES:
        return f"pages of shape {keys.shape[1:]} do not fill the {LANES} lanes of a TPU's memory"
    if keys.dtype.name not in (*DTYPES, *CODES) or pools["v"].dtype != keys.dtype:
        return f"rows are {keys.dtype.name}, not one of {', '.join((*DTYPES, *CODES))}"
    if keys.shape[1] % sublanes(keys.dtype):
        return f"pages of {keys.shape[1]} rows cut the tiles of {sublanes(keys.dtype)} rows of {keys.dtype.name}"
    if large := [name for name in sorted(set(pools) - {"k", "v"}) if pools[name].ndim != 2]:
        return f"{large[0]!r} holds more than one number per row"
    tiles = batch * heads * num_tiles(chunk, tile_rows(chunk, keys))
    return f"{tiles} tiles are more than {MOST_TILES}" if tiles > MOST_TILES else None


def tile_rows(chunk: int, pool: jax.Array) -> int:
    """Rows that are written at once: a tile of memory for single tokens, a page for a chunk."""
    return pool.shape[1] if chunk > 1 else sublanes(pool.dtype)


def num_tiles(chunk: int, rows: int) -> int:
    """Tiles that a chunk touches at most, wherever it begins."""
    return -(-(chunk - 1) // rows) + 1


def store(pools: Pools, new: Pools, view: PageView, num_new: jax.Array) -> dict[str, jax.Array]:
    """The pools, updated in place where they are donated.

    Args:
      pools: head-page arrays, of which those in `new` change; see `unsupported_pools`.
      new: rows {name: [batch, chunk, kv_heads, ...]}.
      view: where they go: after the first `lengths` rows.
      num_new: int32 [batch], how many of them.
    """
    chunk = new["k"].shape[1]
    plan = Plan.of(view, num_new, chunk, tile_rows(chunk, pools["k"]), pools["k"].shape[1])
    small = {name: _store_numbers(pools[name], row, plan) for name, row in new.items() if name not in ("k", "v")}
    keys, values = _store_rows(pools["k"], pools["v"], new["k"], new["v"], plan)
    return {**pools, **small, "k": keys, "v": values}


class Plan(NamedTuple):
    """Which tiles new rows belong to.

    Attributes:
      head_pages, first_rows: int32 [tiles * heads / adjacent]: where a tile lies; of `adjacent` heads the first.
      begins, ends: int32, likewise: the rows of the tile that are new.
      offset: int32 [batch, heads or 1]: row of the first tile at which the new rows begin.
      adjacent: heads whose head-pages lie side by side and hold the same rows.
      rows: of a tile.
      tiles: of a sequence.
    """

    head_pages: jax.Array
    first_rows: jax.Array
    begins: jax.Array
    ends: jax.Array
    offset: jax.Array
    adjacent: int
    rows: int
    tiles: int

    @classmethod
    def of(cls, view: PageView, num_new: jax.Array, chunk: int, rows: int, page_size: int) -> Plan:
        """Tiles of `rows` rows for at most `chunk` new rows of each sequence."""
        tiles = num_tiles(chunk, rows)
        start = view.lengths[:, :, None]  # [batch, heads or 1, 1]
        first_row = (start // rows + jnp.arange(tiles, dtype=jnp.int32)[None, None, :]) * rows
        head_pages = view.pages_at(jnp.minimum(first_row // page_size, view.table.shape[2] - 1))
        begin = jnp.maximum(start - first_row, 0)
        end = jnp.minimum(start + num_new[:, None, None] - first_row, rows)
        adjacent = view.num_heads if view.table.shape[1] == view.lengths.shape[1] == 1 else 1
        numbers = (head_pages, first_row % page_size, begin, end)
        each = [jnp.broadcast_to(x, head_pages.shape)[:, ::adjacent].swapaxes(1, 2).reshape(-1) for x in numbers]
        return cls(*each, offset=start[:, :, 0] % rows, adjacent=adjacent, rows=rows, tiles=tiles)

    def lay_out(self, new: jax.Array) -> jax.Array:
        """[batch, chunk, kv_heads, ...] -> [batch * tiles, kv_heads, rows, ...]; what is not new is arbitrary."""
        return lay_out(new, self.offset, self.rows, self.tiles)


def lay_out(new: jax.Array, offset: jax.Array, rows: int, tiles: int) -> jax.Array:
    """New rows as the tiles that they belong to.

    Args:
      new: [batch, chunk, kv_heads, ...].
      offset: int32 [batch, heads or 1]: row of the first tile at which they begin.
      rows: of a tile; a chunk of one has a tile of its own, which is full of it.
      tiles: of a sequence.

    Returns:
      [batch * tiles, kv_heads, rows, ...]; what is not new is arbitrary.
    """
    batch, chunk, heads, *rest = new.shape
    new = new.swapaxes(1, 2)
    if chunk == 1:
        laid_out = jnp.broadcast_to(new, (batch, heads, rows, *rest))
    else:
        size = tiles * rows
        around = ((0, 0), (0, 0), (rows, size - chunk), *[(0, 0)] * len(rest))
        new = jnp.pad(new, around)

        def shifted(new: jax.Array, offset: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(new, rows - offset, size, axis=new.ndim - 1 - len(rest))

        if offset.shape[1] == 1:
            laid_out = jax.vmap(shifted)(new, offset[:, 0])
        else:
            laid_out = jax.vmap(jax.vmap(shifted))(new, offset)
    laid_out = laid_out.reshape(batch, heads, tiles, rows, *rest).swapaxes(1, 2)
    return laid_out.reshape(batch * tiles, heads, rows, *rest)


def _store_numbers(pool: jax.Array, new: jax.Array, plan: Plan) -> jax.Array:
    """The pool [head pages, page_size] with numbers [batch, chunk, kv_heads]."""
    laid_out = plan.lay_out(new).reshape(-1, plan.adjacent, plan.rows)
    row = jnp.arange(plan.rows, dtype=jnp.int32)[None, :]

    def one(i: jax.Array, pool: jax.Array) -> jax.Array:
        place = plan.head_pages[i], plan.first_rows[i]
        old = jax.lax.dynamic_slice(pool, place, laid_out.shape[1:])
        own = (row >= plan.begins[i]) & (row < plan.ends[i])
        pool = jax.lax.dynamic_update_slice(pool, jnp.where(own, laid_out[i], old), place)
        return with_layout_constraint(pool, layout)

    # As the compiler lays out such pools by itself: a loop that wants another layout would copy the pool.
    layout = Layout((1, 0) if pool.shape[1] < LANES else (0, 1))
    return jax.lax.fori_loop(0, laid_out.shape[0], one, pool)


def _store_rows(
    k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """The pools with rows [batch, chunk, kv_heads, width], updated in place where they are donated."""
    batch, _, heads, width = k.shape
    rows, adjacent = plan.rows, plan.adjacent
    items = batch * plan.tiles
    per_program = max(1, min(items, BUFFER_BYTES // (heads * rows * width * k.dtype.itemsize)))
    programs = -(-items // per_program)
    spare = programs * per_program - items
    # What is padding ends where it begins: nothing is copied.
    numbers = [jnp.pad(x, (0, spare * (heads // adjacent))) for x in plan[:4]]
    laid_out = [jnp.pad(plan.lay_out(x), ((0, spare), (0, 0), (0, 0), (0, 0))) for x in (k, v)]
    block = (per_program, heads, rows, width)
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    new_rows = pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, adjacent),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(programs,),
            in_specs=[new_rows, new_rows, any_memory, any_memory],
            out_specs=[any_memory, any_memory],
            scratch_shapes=[
                pltpu.VMEM(block, k_pool.dtype),
                pltpu.VMEM(block, v_pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(numbers) + 2: 0, len(numbers) + 3: 1},
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=6 * programs * math.prod(block) * k.dtype.itemsize, transcendentals=0
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="append",
    )(*numbers, *laid_out, k_pool, v_pool)


def _kernel(
    adjacent: int,
    head_pages: Any,
    first_rows: Any,
    begins: Any,
    ends: Any,
    new_keys: Any,
    new_values: Any,
    old_keys: Any,
    old_values: Any,
    keys: Any,
    values: Any,
    key_tiles: Any,
    value_tiles: Any,
    semaphores: Any,
) -> None:
    """Numbers are [copies]; a copy moves the rows of one tile and `adjacent` heads.

    The pools are both inputs and outputs; blocks of new rows and buffers are [tiles, heads, rows, width].
    """
    items, heads, rows, _ = key_tiles.shape
    copies = items * (heads // adjacent)
    first = pl.program_id(0) * copies
    arrays = ((keys, key_tiles, new_keys), (values, value_tiles, new_values))

    def each(work: Any) -> None:
        """Calls `work(copy, tile and heads of it)` for the copies that have new rows."""

        def one(i: jax.Array, _: int) -> int:
            @pl.when(begins[first + i] < ends[first + i])
            def _():
                work(first + i, (i // (heads // adjacent), pl.ds(i % (heads // adjacent) * adjacent, adjacent)))

            return 0

        jax.lax.fori_loop(0, copies, one, 0)

    def place(pool: Any, copy: jax.Array) -> Any:
        first_row = pl.multiple_of(first_rows[copy], rows)
        return pool.at[pl.ds(head_pages[copy], adjacent), pl.ds(first_row, rows)]

    def partial(copy: jax.Array) -> jax.Array:
        return (begins[copy] > 0) | (ends[copy] < rows)

    def read(action: Any, copy: jax.Array, tile: Any) -> None:
        @pl.when(partial(copy))
        def _():
            for j, (pool, buffer, _new) in enumerate(arrays):
                action(pltpu.make_async_copy(place(pool, copy), buffer.at[tile], semaphores.at[j]))

    def complete(copy: jax.Array, tile: Any) -> None:
        for _pool, buffer, new in arrays:
            fresh, old = new[tile], buffer[tile]
            wide = jnp.int32 if old.dtype == jnp.uint8 else jnp.float32
            row = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
            own = (row >= begins[copy]) & (row < ends[copy])
            buffer[tile] = jnp.where(own, fresh.astype(wide), old.astype(wide)).astype(old.dtype)

    def write(action: Any, copy: jax.Array, tile: Any) -> None:
        for j, (pool, buffer, _new) in enumerate(arrays):
            action(pltpu.make_async_copy(buffer.at[tile], place(pool, copy), semaphores.at[j]))

    each(functools.partial(read, lambda copy: copy.start()))
    each(functools.partial(read, lambda copy: copy.wait()))
    each(complete)
    each(functools.partial(write, lambda copy: copy.start()))
    each(functools.partial(write, lambda copy: copy.wait()))
