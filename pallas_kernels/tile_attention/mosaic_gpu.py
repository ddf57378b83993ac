"""Attention of tiles over biased keys on Hopper: the kernel of `block_sparse_attention` with keys in one long page."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.block_sparse_attention import mosaic_gpu as sparse
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.mosaic_support import platform_problem
from sparsejax.pallas_kernels.prefill_attention.mosaic_gpu import DTYPES, HEAD_DIMS, default_config


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, tile_rows: int) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.tile_attention`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(q, k, v, tile_rows)


def unsupported_shape(q: jax.Array, k: jax.Array, v: jax.Array, tile_rows: int) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    dtypes = {x.dtype.name for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"queries, keys and values are {', '.join(sorted(dtypes))}, not all one of {', '.join(DTYPES)}"
    if q.shape[3] not in HEAD_DIMS:
        return f"head_dim is {q.shape[3]}, not one of {', '.join(map(str, HEAD_DIMS))}"
    if tile_rows % sparse.LAUNCH_ROWS:
        return f"tiles of {tile_rows} rows are not a multiple of {sparse.LAUNCH_ROWS}"
    return None


def tile_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, tile_rows: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.tile_attention`."""
    batch, heads, keys, dim = k.shape
    config = default_config(dim)
    extra = -keys % config.block_rows
    page = keys + extra
    table = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    lengths = jnp.full((batch, 1), page, jnp.int32)
    view = PageView(table, heads, jnp.arange(heads, dtype=jnp.int32), lengths)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))).reshape(-1, page, dim) for x in (k, v))
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, extra)), constant_values=-jnp.inf)
    problem = sparse.describe(q, k, view, tile_rows, scale, config, biased=True)
    return launch(problem, q, k, v, view.table, view.offset, bias)


@functools.partial(jax.jit, static_argnums=0)  # lowered once, however many layers call it
def launch(
    problem: sparse.Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    offset: jax.Array,
    bias: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The kernel, whose steps end with the last key that a tile sees."""
    key = jax.lax.broadcasted_iota(jnp.int32, bias.shape, 3)
    end = jnp.where(bias > -jnp.inf, key + 1, 0).max(-1)
    block = problem.config.block_rows
    return sparse.call(problem, q, k, v, table, offset, (end + block - 1) // block, bias * (1 / problem.scale))
