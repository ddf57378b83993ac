"""Page scores for any platform: a loop over blocks of page summaries, as far as the longest row goes.

On a GPU, where a trip count that depends on data costs a round trip to the host per block, over the whole table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, pad_columns
from sparsejax.pallas_kernels.triton_support import platform

BLOCK_COLUMNS = 64
GPU_BLOCK_COLUMNS = 512


def page_scores(q: jax.Array, page_min: jax.Array, page_max: jax.Array, view: PageView, page_size: int) -> jax.Array:
    """See `api.page_scores`."""
    width = view.table.shape[2]
    on_gpu = platform() == "gpu"
    columns = min(GPU_BLOCK_COLUMNS if on_gpu else BLOCK_COLUMNS, width)
    view = pad_columns(view, columns)
    batch, q_heads, dim = q.shape
    heads = view.num_heads
    query = q.reshape(batch, heads, q_heads // heads, dim)
    # max(q*m, q*M) = relu(q).M + min(q, 0).m: two matmuls
    positive, negative = jnp.maximum(query, 0), jnp.minimum(query, 0)

    def load(bounds: jax.Array, i: jax.Array) -> tuple[jax.Array, str]:
        """Bounds of a block of columns, and their axes."""
        slabs = view.slabs(i * columns, columns) if platform() == "cpu" else None
        if slabs is None:
            return bounds.at[view.head_pages(i * columns, columns)].get(mode="promise_in_bounds"), "bhnd"
        # Summaries are short: fetched for all heads at once, they take a CPU less than half the time.
        tile = bounds.reshape(-1, heads * dim).at[slabs].get(mode="promise_in_bounds")
        return tile.reshape(batch, columns, heads, dim), "bnhd"

    def step(i, scores):
        (high, axes), (low, _) = load(page_max, i), load(page_min, i)
        bound = jnp.einsum(f"bhgd,{axes}->bhgn", positive, high, preferred_element_type=jnp.float32)
        bound += jnp.einsum(f"bhgd,{axes}->bhgn", negative, low, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(scores, bound.max(2), i * columns, axis=2)

    scores = jnp.zeros((batch, heads, view.table.shape[2]), jnp.float32)
    if on_gpu:
        num_blocks = view.table.shape[2] // columns
    else:
        num_blocks = ((view.lengths.max() + page_size - 1) // page_size + columns - 1) // columns
    return jax.lax.fori_loop(0, num_blocks, step, scores)[:, :, :width]
