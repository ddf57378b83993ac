"""Page selection on TPUs through Mosaic: a threshold search on the order of float32 bits, then a compaction by shifts.

A TPU has no scatter, and XLA sorts, or gathers one element after the other. Here chosen pages move to their places all
at once: each has as far to go as there are pages before it that are not chosen, and goes that way in powers of two, the
smallest first, so that no two ever meet (H. S. Warren, Hacker's Delight, section 7-4). Table entries move, so nothing
is looked up at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels.layout import LANES, PageView, explicit_view
from sparsejax.pallas_kernels.select_pages.xla import LOWEST, ordered_keys, selected_lengths, shared_scores
from sparsejax.pallas_kernels.tpu_support import HEADS_AT_ONCE, platform_problem

MOST_COLUMNS = 2**14  # in vector memory; two counts share 32 bits
BLOCK_ELEMENTS = 2**16  # rows times columns of a program: what the registers hold


def unsupported(scores: jax.Array, view: PageView) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.select_pages`."""
    if (problem := platform_problem()) is not None:
        return problem
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype.name}, not float32"
    if scores.shape[2] > MOST_COLUMNS:
        return f"rows have {scores.shape[2]} columns, more than {MOST_COLUMNS}"
    return None


def select_pages(
    scores: jax.Array, view: PageView, num_scored: int, width: int, budget: int, page_size: int, shared: bool
) -> PageView:
    """See `api.select_pages`."""
    batch, heads = scores.shape[0], view.num_heads
    if shared:
        scores = shared_scores(scores, view.lengths, page_size)
    at_once = min(heads, HEADS_AT_ONCE)
    size = -(-max(scores.shape[2], width) // LANES) * LANES
    rows = max(1, min(batch, BLOCK_ELEMENTS // (HEADS_AT_ONCE * size)))

    def block(array: jax.Array, width: int) -> pl.BlockSpec:
        """Of [batch, heads or 1, ...]."""
        if array.shape[1] == 1:
            return pl.BlockSpec((rows, 1, width), lambda b, h: (b, 0, 0))
        return pl.BlockSpec((rows, at_once, width), lambda b, h: (b, h, 0))

    offset = pl.BlockSpec((1, at_once, 1), lambda b, h: (0, h, 0))
    head_pages = pl.pallas_call(
        functools.partial(_kernel, (rows, at_once, size), num_scored, width, budget, page_size, view.stride),
        out_shape=jax.ShapeDtypeStruct((batch, heads, width), jnp.int32),
        grid=(-(-batch // rows), -(-heads // at_once)),
        in_specs=[block(scores, size), block(view.table, size), block(view.lengths, 1), offset],
        out_specs=pl.BlockSpec((rows, at_once, width), lambda b, h: (b, h, 0)),
        cost_estimate=pl.CostEstimate(
            flops=(64 + 8 * size.bit_length()) * batch * heads * size,
            bytes_accessed=4 * (scores.size + view.table.size + batch * heads * width),
            transcendentals=0,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="select_pages",
    )(scores, view.table, view.lengths[:, :, None], view.offset[None, :, None])
    lengths = jnp.broadcast_to(view.lengths, (batch, heads))
    return explicit_view(head_pages, selected_lengths(lengths, num_scored, budget, page_size))


def _kernel(
    shape: tuple[int, int, int],
    num_scored: int,
    width: int,
    budget: int,
    page_size: int,
    stride: int,
    scores: Any,
    table: Any,
    lengths: Any,
    offset: Any,
    head_pages: Any,
) -> None:
    """Pages of a block of rows and heads, whose arrays have this shape; what is past their columns is arbitrary."""
    length = jnp.broadcast_to(lengths[...], shape)
    num_pages = (length + page_size - 1) // page_size
    whole = (length <= budget) | (num_pages <= num_scored + 1)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    keys = jnp.where(column < num_pages - 1, ordered_keys(jnp.broadcast_to(scores[...], shape)), LOWEST)

    def step(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold ^ (jnp.int32(1) << (31 - i))  # the first step clears the sign bit of LOWEST
        return jnp.where(_count(keys >= candidate) >= num_scored, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, step, jnp.full((*shape[:2], 1), LOWEST, jnp.int32))
    above, equal = keys > threshold, keys == threshold
    missing = num_scored - _count(above).astype(jnp.int32)
    ones = (above.astype(jnp.int32) << 16) + equal.astype(jnp.int32)
    sums = _running_sum(ones, column)
    num_above, num_equal = sums >> 16, sums & 0xFFFF
    scored = above | (equal & (num_equal <= missing))
    last = column == num_pages - 1
    chosen = (whole & (column < num_pages)) | (~whole & (scored | last))
    place = jnp.where(last, num_scored, num_above + jnp.minimum(num_equal, missing) - 1)
    place = jnp.where(whole, column, place)
    pages = jnp.broadcast_to(table[...], shape) * stride + offset[...]
    pages = _compact(pages, jnp.where(chosen, column - place, 0))
    count = jnp.where(whole, num_pages, num_scored + 1)
    head_pages[...] = jnp.where(column < count, pages, 0)[:, :, :width]


def _count(own: jax.Array) -> jax.Array:
    """float32 [..., 1]: how many along the lanes, exact."""
    return own.astype(jnp.float32).sum(-1, keepdims=True)


def _shifted(x: jax.Array, distance: int) -> jax.Array:
    """[..., i] is x[..., i - distance], around the end."""
    return pltpu.roll(x, distance % x.shape[-1], x.ndim - 1)


def _running_sum(x: jax.Array, column: jax.Array) -> jax.Array:
    """Inclusive sums along the lanes."""
    distance = 1
    while distance < x.shape[-1]:
        x += jnp.where(column >= distance, _shifted(x, distance), 0)
        distance *= 2
    return x


def _compact(values: jax.Array, distances: jax.Array) -> jax.Array:
    """Values moved down the lanes by distances that never decrease from one chosen value to the next.

    What is not chosen has distance 0, stays, and is overwritten where something arrives.
    """
    step = 1
    while step < values.shape[-1]:
        arriving = _shifted(distances, -step)
        arrives = (arriving & step) != 0
        values = jnp.where(arrives, _shifted(values, -step), values)
        left = (distances & step) != 0
        distances = jnp.where(arrives, arriving, jnp.where(left, 0, distances))
        step *= 2
    return values
