"""Page scores for any platform: a loop over blocks of page summaries, as far as the longest row goes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, pad_columns

BLOCK_COLUMNS = 64


def page_scores(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView, page_size: int) -> jax.Array:
    """See `api.page_scores`."""
    width = view.table.shape[2]
    columns = min(BLOCK_COLUMNS, width)
    view = pad_columns(view, columns)
    batch, q_heads, dim = q.shape
    heads = view.num_heads
    query = q.reshape(batch, heads, q_heads // heads, dim)
    # max(q*m, q*M) = relu(q).M + min(q, 0).m: two matmuls
    positive, negative = jnp.maximum(query, 0), jnp.minimum(query, 0)
    num_blocks = ((view.lengths.max() + page_size - 1) // page_size + columns - 1) // columns

    def step(carry):
        i, scores = carry
        pages = view.head_pages(i * columns, columns)
        high = page_max.at[pages].get(mode="promise_in_bounds")
        low = page_min.at[pages].get(mode="promise_in_bounds")
        bound = jnp.einsum("bhgd,bhnd->bhgn", positive, high, preferred_element_type=jnp.float32)
        bound += jnp.einsum("bhgd,bhnd->bhgn", negative, low, preferred_element_type=jnp.float32)
        return i + 1, jax.lax.dynamic_update_slice_in_dim(scores, bound.max(2), i * columns, axis=2)

    scores = jnp.zeros((batch, heads, view.table.shape[2]), jnp.float32)
    _, scores = jax.lax.while_loop(lambda carry: carry[0] < num_blocks, step, (jnp.int32(0), scores))
    return scores[:, :, :width]
