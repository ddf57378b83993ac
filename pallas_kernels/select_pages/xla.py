"""Page selection for any platform: `top_k` and a sort where few are chosen, else a threshold found by bisection."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, explicit_view

LOWEST = -(2**31)
"""Key of columns that can't be chosen, below that of every score."""
BISECTION_SHARE = 5
"""On a CPU bisection is the faster one if more than 1 / BISECTION_SHARE of the columns are chosen."""


def select_pages(
    scores: jax.Array, view: PageView, num_scored: int, width: int, budget: int, page_size: int, shared: bool
) -> PageView:
    """See `api.select_pages`."""
    if shared:
        scores = shared_scores(scores, view.lengths, page_size)
    lengths = jnp.broadcast_to(view.lengths, (scores.shape[0], view.num_heads))
    num_pages = (lengths + page_size - 1) // page_size
    last = num_pages - 1
    column = jnp.arange(scores.shape[2], dtype=jnp.int32)
    valid = column[None, None, :] < last[:, :, None]
    best = by_bisection if num_scored * BISECTION_SHARE > scores.shape[2] else by_sorting
    chosen = best(jnp.broadcast_to(scores, valid.shape), valid, num_scored)

    slot = jnp.arange(width, dtype=jnp.int32)[None, None, :]
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, width - num_scored)))
    chosen = jnp.where(slot == num_scored, last[:, :, None], chosen)
    whole = (lengths <= budget) | (num_pages <= num_scored + 1)
    head_pages = view.pages_at(jnp.where(whole[:, :, None], slot, chosen))
    head_pages = jnp.where(slot < jnp.where(whole, num_pages, num_scored + 1)[:, :, None], head_pages, 0)
    return explicit_view(head_pages, selected_lengths(lengths, num_scored, budget, page_size))


def selected_lengths(lengths: jax.Array, num_scored: int, budget: int, page_size: int) -> jax.Array:
    """int32, like `lengths`: rows of the chosen pages of rows that long."""
    last = (lengths + page_size - 1) // page_size - 1
    whole = (lengths <= budget) | (last <= num_scored)
    return jnp.where(whole, lengths, num_scored * page_size + lengths - last * page_size)


def shared_scores(scores: jax.Array, lengths: jax.Array, page_size: int) -> jax.Array:
    """float32 [batch, 1, columns]: the best over the heads that have the page."""
    column = jnp.arange(scores.shape[2], dtype=jnp.int32)
    real = column[None, None, :] * page_size < lengths[:, :, None]
    return jnp.where(real & (scores > -jnp.inf), scores, -jnp.inf).max(1, keepdims=True)


def by_sorting(scores: jax.Array, valid: jax.Array, count: int) -> jax.Array:
    """Columns of the `count` best valid scores, ascending; ties to the lower column. Like `valid` [..., columns]."""
    candidates = jax.lax.bitcast_convert_type(_comparable_bits(scores), jnp.float32)
    _, best = jax.lax.top_k(jnp.where(valid, candidates, -jnp.inf), count)
    return jnp.sort(best.astype(jnp.int32), axis=-1)


def _comparable_bits(scores: jax.Array) -> jax.Array:
    """int32 bits of the scores, those of -inf for NaN and of +0.0 for -0.0.

    Adding 0.0 instead would also flush subnormal numbers to zero on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores > -jnp.inf, scores, -jnp.inf), jnp.int32)
    return jnp.where(bits == LOWEST, 0, bits)


def ordered_keys(scores: jax.Array) -> jax.Array:
    """int32 in the order of the scores, all above LOWEST."""
    bits = _comparable_bits(scores)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def by_bisection(scores: jax.Array, valid: jax.Array, count: int) -> jax.Array:
    """As `by_sorting`: the `count`-th best bit by bit, then the columns above it and as many at it as are missing."""
    keys = jnp.where(valid, ordered_keys(scores), LOWEST)

    def step(i, threshold):
        candidate = threshold ^ (jnp.int32(1) << (31 - i))  # the first step clears the sign bit of LOWEST
        enough = (keys >= candidate[..., None]).sum(-1, dtype=jnp.int32) >= count
        return jnp.where(enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, step, jnp.full(keys.shape[:-1], LOWEST, jnp.int32))[..., None]
    above, equal = keys > threshold, keys == threshold
    missing = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    chosen = above | equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= missing)
    place = jnp.where(chosen, jnp.cumsum(chosen, -1, dtype=jnp.int32) - 1, count)
    batch, heads, columns = keys.shape
    column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), keys.shape)
    index = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None], place
    return jnp.zeros((batch, heads, count), jnp.int32).at[index].set(column, mode="drop")
