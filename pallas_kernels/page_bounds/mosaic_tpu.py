"""Page bounds on TPUs through Mosaic: the tiles of memory that hold them are read, completed and written back in place.

XLA reduces the new rows of each page; those of a chunk are laid out page by page first. The kernel then merges one row
of bounds per page. A tile holds the bounds of several head-pages: a program reads it once, and all rows that belong to
it meet in its buffer. The tiles of one program are copied all at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels.layout import LANES
from sparsejax.pallas_kernels.tpu_rows import lay_out, num_tiles
from sparsejax.pallas_kernels.tpu_support import DTYPES, WIDEST_ROW, platform_problem

TILE_ROWS = 8  # of HBM: what lies between can't be copied
BLOCK_ROWS = 128  # rows of bounds that a program merges


def unsupported(page_min: jax.Array, page_max: jax.Array, keys: jax.Array) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.page_bounds`."""
    if (problem := platform_problem()) is not None:
        return problem
    if not keys.dtype == page_min.dtype == page_max.dtype:
        return f"keys are {keys.dtype.name}, page bounds {page_min.dtype.name} and {page_max.dtype.name}"
    if keys.dtype.name not in DTYPES:
        return f"keys are {keys.dtype.name}, not one of {', '.join(DTYPES)}"
    rows, dim = page_min.shape
    if dim != keys.shape[3]:
        return f"page bounds have {dim} channels, keys {keys.shape[3]}"
    if dim % LANES or dim > WIDEST_ROW:
        return f"bounds of {dim} do not fill the {LANES} lanes of a TPU's memory, or are longer than {WIDEST_ROW}"
    return f"bounds of {rows} head-pages do not fill tiles of {TILE_ROWS}" if rows % TILE_ROWS else None


def page_bounds(
    page_min: jax.Array,
    page_max: jax.Array,
    keys: jax.Array,
    head_pages: jax.Array,
    offsets: jax.Array,
    num_valid: jax.Array,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.page_bounds`."""
    low, high, pages, opened = _new_bounds(keys, head_pages, offsets, num_valid, page_size)
    dim = low.shape[1]
    block = min(BLOCK_ROWS, -(-low.shape[0] // TILE_ROWS) * TILE_ROWS)
    spare = -low.shape[0] % block
    low, high = (jnp.pad(rows, ((0, spare), (0, 0))) for rows in (low, high))
    pages, opened = (jnp.pad(x, (0, spare)).reshape(-1, block) for x in (pages, opened))
    tile = pages // TILE_ROWS
    same = (tile[:, :, None] == tile[:, None, :]) & (pages > 0)[:, None, :]
    owners = jnp.argmax(same, axis=2).astype(jnp.int32)
    numbers = jnp.stack([pages, owners, opened.astype(jnp.int32)], 1)
    programs = numbers.shape[0]
    any_memory, rows = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((block, dim), lambda i: (i, 0))
    low, high = pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(bounds.shape, bounds.dtype) for bounds in (page_min, page_max)],
        grid=(programs,),
        in_specs=[
            pl.BlockSpec((1, 3, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            rows,
            rows,
            any_memory,
            any_memory,
        ],
        out_specs=[any_memory, any_memory],
        scratch_shapes=[
            pltpu.VMEM((block, TILE_ROWS, dim), page_min.dtype),
            pltpu.VMEM((block, TILE_ROWS, dim), page_max.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        input_output_aliases={3: 0, 4: 1},
        cost_estimate=pl.CostEstimate(
            flops=2 * programs * block * dim,
            bytes_accessed=programs * block * dim * (8 + 4 * TILE_ROWS * page_min.dtype.itemsize),
            transcendentals=0,
        ),
        # One after the other: the next program may need a tile that this one writes.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="page_bounds",
    )(numbers, low, high, page_min, page_max)
    return low, high


def _new_bounds(
    keys: jax.Array, head_pages: jax.Array, offsets: jax.Array, num_valid: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Bounds of the new rows of each page, arguments as in `api.page_bounds`.

    Returns:
      low and high float32 [rows, dim], head-pages int32 [rows], 0 where there is nothing new, and bool [rows], whether
      the new rows open the page.
    """
    batch, chunk, heads, dim = keys.shape
    offset = offsets[:, 0]  # [batch, heads or 1]
    if chunk == 1:
        low = high = keys.astype(jnp.float32)
        pages = jnp.where(num_valid[:, None] > 0, head_pages[:, 0], 0)
        opened = jnp.broadcast_to(offset == 0, pages.shape)
    else:
        tiles = num_tiles(chunk, page_size)
        # The row of the chunk at which each page begins, below 0 for one that held rows before: [batch, tiles, heads].
        begin = jnp.arange(tiles, dtype=jnp.int32)[None, :, None] * page_size - offset[:, None, :]
        row = begin[..., None] + jnp.arange(page_size, dtype=jnp.int32)[None, None, None, :]
        own = ((row >= 0) & (row < num_valid[:, None, None, None])).reshape(batch * tiles, -1, page_size, 1)
        laid_out = lay_out(keys, offset, page_size, tiles).astype(jnp.float32)
        low, high = jnp.where(own, laid_out, jnp.inf).min(2), jnp.where(own, laid_out, -jnp.inf).max(2)
        first = jnp.broadcast_to(jnp.clip(begin, 0, chunk - 1), (batch, tiles, heads))
        pages = jnp.take_along_axis(head_pages, first, axis=1, mode="clip")
        pages = jnp.where(jnp.maximum(begin, 0) < num_valid[:, None, None], pages, 0)
        opened = jnp.broadcast_to(begin >= 0, pages.shape)
    return low.reshape(-1, dim), high.reshape(-1, dim), pages.reshape(-1), opened.reshape(-1)


def _kernel(
    numbers: Any,
    low: Any,
    high: Any,
    old_min: Any,
    old_max: Any,
    page_min: Any,
    page_max: Any,
    low_tiles: Any,
    high_tiles: Any,
    semaphores: Any,
) -> None:
    """Merges new bounds [rows, dim] into those of pages, which are both inputs and outputs.

    numbers [1, 3, rows]: the head-page of each row, 0 for none; the first row of this program in the same tile, whose
    buffer they share; and whether the page is new. Buffers [rows, TILE_ROWS, dim].
    """
    del old_min, old_max  # aliases of the outputs
    rows, dim = low.shape
    arrays = ((page_min, low_tiles, low, jnp.minimum), (page_max, high_tiles, high, jnp.maximum))

    def each(work: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
        """Calls `work(row, head-page, owner)` for every row."""

        def one(i: jax.Array, _: int) -> int:
            @pl.when(numbers[0, 0, i] > 0)
            def _():
                work(i, numbers[0, 0, i], numbers[0, 1, i])

            return 0

        jax.lax.fori_loop(0, rows, one, 0)

    def copies(back: bool, action: Callable[[Any], None], i: jax.Array, page: jax.Array, owner: jax.Array) -> None:
        @pl.when(owner == i)
        def _():
            first = pl.multiple_of(page // TILE_ROWS * TILE_ROWS, TILE_ROWS)
            for j, (bounds, buffer, *_others) in enumerate(arrays):
                ends = buffer.at[i], bounds.at[pl.ds(first, TILE_ROWS)]
                source, target = ends if back else ends[::-1]
                action(pltpu.make_async_copy(source, target, semaphores.at[j]))

    def merge(i: jax.Array, page: jax.Array, owner: jax.Array) -> None:
        own = jax.lax.broadcasted_iota(jnp.int32, (TILE_ROWS, dim), 0) == page % TILE_ROWS
        opened = numbers[0, 2, i] > 0
        for _bounds, buffer, new_rows, join in arrays:
            old, new = buffer[owner].astype(jnp.float32), new_rows[pl.ds(i, 1)]
            merged = jnp.where(opened, jnp.broadcast_to(new, old.shape), join(old, new))
            buffer[owner] = jnp.where(own, merged, old).astype(buffer.dtype)

    each(functools.partial(copies, False, lambda copy: copy.start()))
    each(functools.partial(copies, False, lambda copy: copy.wait()))
    each(merge)
    each(functools.partial(copies, True, lambda copy: copy.start()))
    each(functools.partial(copies, True, lambda copy: copy.wait()))
