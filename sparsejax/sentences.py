"""Sentences of an answer: where they lie, what they mean, and which of them a later one repeats (arXiv 2512.07993).

Everything stays on the device. A decode step adds one hidden state to the open sentence; similarities are computed only
when a request is compacted. The oldest sentence makes room for a new one, so whatever may be repeated by a tracked
sentence is compared with all later ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sentences(NamedTuple):
    """Sentences of all requests, zero at first; row 0 swallows what doesn't exist.

    Attributes:
      spans: int32 [rows, tracked, 2], first position and the one after the last; sentence i lies in slot i mod tracked.
      embeddings: float32 [rows, tracked, hidden_size], of unit length.
      open: int32 [rows, 3]: first position and tokens of the open sentence (none: 0), sentences closed so far.
      total: float32 [rows, hidden_size], sum of the open sentence's hidden states.
    """

    spans: jax.Array
    embeddings: jax.Array
    open: jax.Array
    total: jax.Array


def advance(
    state: Sentences,
    rows: jax.Array,
    live: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    hidden: jax.Array,
    *,
    delimiters: tuple[int, ...],
    min_tokens: int,
    max_tokens: int,
) -> Sentences:
    """Adds one generated token of each row to its open sentence, or to a new one, and closes what ends there.

    A sentence ends with a delimiter, with its `max_tokens`-th token, or where the answer ended: if the token doesn't
    follow it, a prompt came between. One shorter than `min_tokens` is forgotten.

    Args:
      rows: int32 [batch].
      live: bool [batch], False for padding.
      tokens: int32 [batch].
      positions: int32 [batch], logical.
      hidden: [batch, hidden_size].
      delimiters: token ids that end a sentence.
    """
    start, count, closed = state.open[rows].T
    total = state.total[rows]
    broken = live & (count > 0) & (start + count != positions)
    state, closed = _close(state, rows, broken, start, count, closed, total, min_tokens)
    count = jnp.where(broken, 0, count)
    fresh = count == 0
    start = jnp.where(fresh, positions, start)
    total = jnp.where(fresh[:, None], 0.0, total) + hidden.astype(jnp.float32)
    count = count + 1
    ends = jnp.isin(tokens, jnp.asarray(delimiters, jnp.int32)) | (count >= max_tokens)
    state, closed = _close(state, rows, live & ends, start, count, closed, total, min_tokens)
    count = jnp.where(ends, 0, count)
    target = jnp.where(live, rows, 0)
    return state._replace(
        open=state.open.at[target].set(jnp.stack([start, count, closed], axis=1)),
        total=state.total.at[target].set(total),
    )


def _close(
    state: Sentences,
    rows: jax.Array,
    ends: jax.Array,
    start: jax.Array,
    count: jax.Array,
    closed: jax.Array,
    total: jax.Array,
    min_tokens: int,
) -> tuple[Sentences, jax.Array]:
    """Tracks the open sentences that end and are long enough; returns sentences closed so far."""
    kept = ends & (count >= min_tokens)
    target, slot = jnp.where(kept, rows, 0), closed % state.spans.shape[1]
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)[:, None]
    unit = mean / jnp.maximum(jnp.sqrt((mean * mean).sum(1, keepdims=True)), 1e-6)
    spans = state.spans.at[target, slot].set(jnp.stack([start, start + count], axis=1))
    return state._replace(spans=spans, embeddings=state.embeddings.at[target, slot].set(unit)), closed + kept.astype(
        jnp.int32
    )


def repeated(embeddings: jax.Array, closed: jax.Array, threshold: float) -> jax.Array:
    """How closely the closest later sentence of one request repeats each, float32 [tracked]; 0 below the threshold.

    Args:
      embeddings: float32 [tracked, hidden_size].
      closed: int32 scalar, sentences closed so far.
      threshold: least cosine that counts.
    """
    tracked = embeddings.shape[0]
    slot = jnp.arange(tracked, dtype=jnp.int32)
    index = closed - 1 - (closed - 1 - slot) % tracked  # of the sentence in each slot; negative: none
    cosine = jnp.matmul(embeddings, embeddings.T, precision=jax.lax.Precision.HIGHEST)
    later = (index[None, :] > index[:, None]) & (index >= 0)[:, None]
    return jnp.where(later & (cosine >= threshold), cosine, 0.0).max(1)


def penalties(positions: jax.Array, spans: jax.Array, repeats: jax.Array) -> jax.Array:
    """What `repeated` says of the sentence that each position lies in, 0 outside: float32 of the positions' shape.

    Args:
      positions: int32 [...].
      spans: int32 [tracked, 2].
      repeats: float32 [tracked].
    """
    start, end, repeats = (jnp.expand_dims(x, range(positions.ndim)) for x in (spans[:, 0], spans[:, 1], repeats))
    inside = (positions[..., None] >= start) & (positions[..., None] < end)
    return jnp.where(inside, repeats, 0.0).max(-1)
