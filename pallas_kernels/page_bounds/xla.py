"""Page bounds for any platform: XLA's scatters."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    offsets = jnp.broadcast_to(offsets, head_pages.shape)
    if keys.shape[1] == 1:  # one row per page: no two updates meet, a gather and a set do
        new = (offsets == 0)[..., None]
        low = jnp.where(new, keys, jnp.minimum(page_min[head_pages], keys))
        high = jnp.where(new, keys, jnp.maximum(page_max[head_pages], keys))
        return page_min.at[head_pages].set(low), page_max.at[head_pages].set(high)
    # Rows that don't open a page "reset" the null page, which nobody scores.
    opened = jnp.where(offsets == 0, head_pages, 0)
    low = page_min.at[opened].set(jnp.inf).at[head_pages].min(keys)
    return low, page_max.at[opened].set(-jnp.inf).at[head_pages].max(keys)
