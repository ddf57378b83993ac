"""KV state as a long prompt leaves it, without the prompt: random rows in every page, tables and lengths set directly.

    fill_pages(runner, storage)                 # once: keys, values and page summaries
    assign_pages(runner)                        # once: whose pages they are
    set_rows(runner, batch, resident, context)  # before each measurement: how much of them counts

Random rows make selection as hard as it gets, and cost the same as real ones. What a method evicted is simply not
there: the row is shorter than its text.
"""

from __future__ import annotations

import functools
from typing import Any

BLOCK_PAGES = 8
"""Sequence pages written by one turn of the loop: enough to fill the device, little enough to need no memory."""
SUMMARIES = {"quest_min": "min", "quest_max": "max"}
"""Page aux that can be filled: how its value follows from the page's keys."""


def random_rows(key: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Random signs and magnitudes from 2^-7 to 2: random bits as bfloat16, cheaper than drawing normals."""
    import jax
    import jax.numpy as jnp

    bits = jax.random.bits(key, shape, jnp.uint16) & 0x83FF | 0x3C00
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)


def fill_pages(runner: Any, storage: Any, seed: int = 0) -> None:
    """Fills every page of a `DeviceRunner`'s pool with random rows, stored by `storage`, and its page summaries.

    What methods keep of each stored row (accumulated scores, say) becomes random numbers from 0 to 1.

    Raises:
      ValueError: a served method keeps page arrays that are not in `SUMMARIES`.
    """
    import jax
    import jax.numpy as jnp

    limits = runner.limits
    geometry = limits.geometry
    of_rows = {name for name, array in runner.state.page_aux.items() if array.shape[1:] == (geometry.page_size,)}
    unknown = sorted(set(runner.state.page_aux) - set(SUMMARIES) - of_rows)
    if unknown:
        raise ValueError(f"there is no way to fill {', '.join(unknown)} (see SUMMARIES)")
    total = limits.num_sequence_pages - 1
    pages = min(BLOCK_PAGES, total)
    head_pages = pages * geometry.head_pages_per_sequence_page
    shape = (head_pages, geometry.page_size, geometry.head_dim)
    layer = jnp.int32(0)

    def write(i: jax.Array, arrays: Any) -> Any:
        pools, page_aux = arrays
        # The last block may reach back over pages that are filled already.
        start = (1 + jnp.minimum(i * pages, total - pages)) * geometry.head_pages_per_sequence_page
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
        k, v = (random_rows(key, shape, geometry.dtype) for key in keys)
        payload = storage.encode(storage.params, geometry, layer, k, v)
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        pools = {**pools, **{name: update(pools[name], rows) for name, rows in payload.items()}}
        stored, _ = storage.load_tile(storage.params, geometry, payload, layer)
        page_aux = {
            name: update(array, getattr(stored, SUMMARIES[name])(axis=1).astype(array.dtype))
            for name, array in page_aux.items()
        }
        return pools, page_aux

    def fill(pools: Any, page_aux: Any) -> Any:
        summaries = {name: array for name, array in page_aux.items() if name not in of_rows}
        pools, summaries = jax.lax.fori_loop(0, -(-total // pages), write, (dict(pools), summaries))
        key = jax.random.key(seed + 1)
        scores = {
            name: jax.random.uniform(key, array.shape, array.dtype)
            for name, array in page_aux.items()
            if name in of_rows
        }
        return pools, {**summaries, **scores}

    state = runner.state
    pools, page_aux = jax.jit(fill, donate_argnums=(0, 1))(state.pools, state.page_aux)
    runner.state = state.replace(pools=pools, page_aux=page_aux)


def pages_per_row(limits: Any) -> int:
    """Pages that each row of a runner gets: as many as there are, or as its table holds."""
    return min(limits.geometry.max_pages, (limits.num_sequence_pages - 1) // limits.num_rows)


def assign_pages(runner: Any, seed: int = 0) -> None:
    """Deals the pool's pages to all rows in random order (see `pages_per_row`)."""
    import jax.numpy as jnp
    import numpy as np

    limits = runner.limits
    rows, columns = limits.num_rows, pages_per_row(limits)
    order = np.random.default_rng(seed).permutation(limits.num_sequence_pages - 1)
    dealt = 1 + order[: rows * columns].reshape(rows, columns)
    tables = {}
    for name, table in runner.state.tables.items():
        layers, heads = table.shape[:2]
        # A sequence page cut into the pages of a finer granularity gives each layer and head its own.
        parts = np.arange(layers * heads).reshape(layers, heads, 1, 1)
        filled = np.zeros(table.shape, np.int32)
        filled[:, :, 1:, :columns] = dealt * (layers * heads) + parts
        tables[name] = jnp.asarray(filled)
    runner.state = runner.state.replace(tables=tables)


def set_rows(runner: Any, batch: int, resident: int, context: int, seed: int = 0) -> None:
    """Makes rows 1..batch hold `resident` rows of texts of `context` tokens; the others are empty.

    Raises:
      ValueError: a row has no pages for so many rows and the next token.
    """
    import jax.numpy as jnp
    import numpy as np

    limits, state = runner.limits, runner.state
    if resident >= pages_per_row(limits) * limits.geometry.page_size:
        raise ValueError(f"{resident} rows and one more need more than {pages_per_row(limits)} pages")
    row = np.arange(limits.num_rows + 1)
    live = (row > 0) & (row <= batch)
    last = np.random.default_rng(seed).integers(0, limits.vocab_size, len(row))
    lengths = {
        name: jnp.asarray(np.broadcast_to(np.where(live, resident, 0), array.shape).astype(np.int32))
        for name, array in state.lengths.items()
    }
    runner.state = state.replace(
        lengths=lengths,
        positions=jnp.asarray(np.where(live, context, 0).astype(np.int32)),
        last_tokens=jnp.asarray(last.astype(np.int32)),
    )
