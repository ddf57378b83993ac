"""Paged prefill attention on Hopper through Pallas Mosaic GPU: one launch for a ragged batch of chunks over pages.

Pages are copied to shared memory one by one by TMA, and both products run on the tensor cores' asynchronous
instructions (`mosaic_kernels`). Blocks of queries past a row's end only write zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.mosaic_support import platform_problem

HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
LEAST_PAGE = 8  # rows of a core matrix
WARPGROUP_QUERIES = 64
COMPUTE_WARPGROUPS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Attributes:
      block_rows: keys of a step.
      stages: steps whose keys and values are in shared memory at once.
      registers, copy_registers: of a thread of the warpgroups that compute, and of the one that copies.
      cache_bytes: keys and values that the order of the blocks counts on the L2 cache to hold.
      sharers: blocks of one KV head with the same queries that share copies (a cluster), if there are as many.
    """

    block_rows: int = 128
    stages: int = 2
    registers: int = 232
    copy_registers: int = 40
    cache_bytes: int = 32 << 20
    sharers: int = 2


def default_config(head_dim: int) -> Config:
    """What fits shared memory and registers."""
    return Config(block_rows=64) if head_dim == 256 else Config(stages=4) if head_dim == 64 else Config()


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for.

    Attributes:
      batch, chunk, heads, group, dim: of the queries; `chunk` is a multiple of `WARPGROUP_QUERIES`.
      page, columns, stride: rows of a page, width of the table, head-pages from one table entry to the next.
      table_heads, row_heads: KV heads with table entries, and with lengths and starts, of their own: 1 or `heads`.
      dtype: of queries, keys, values and results.
      scale: softmax scale, positive.
    """

    batch: int
    chunk: int
    heads: int
    group: int
    dim: int
    page: int
    columns: int
    stride: int
    table_heads: int
    row_heads: int
    dtype: str
    scale: float
    config: Config

    @property
    def paired_heads(self) -> bool:
        """Whether the warpgroups of a block serve two query heads of one KV head, rather than queries of one head."""
        return self.group % COMPUTE_WARPGROUPS == 0

    @property
    def block_queries(self) -> int:
        """Consecutive queries of a block."""
        return WARPGROUP_QUERIES * (1 if self.paired_heads else COMPUTE_WARPGROUPS)

    @property
    def query_blocks(self) -> int:
        return -(-self.chunk // self.block_queries)

    @property
    def head_blocks(self) -> int:
        """Blocks of one KV head with the same queries."""
        return self.group // (COMPUTE_WARPGROUPS if self.paired_heads else 1)

    @property
    def sharers(self) -> int:
        """Blocks of a cluster, each of which copies a part for all."""
        return self.config.sharers if self.head_blocks % self.config.sharers == 0 else 1

    @property
    def copy_rows(self) -> int:
        return min(self.page, self.config.block_rows)

    @property
    def copies(self) -> int:
        """Copies of keys, and as many of values, in a step."""
        return self.config.block_rows // self.copy_rows


def unsupported(q: jax.Array, pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.prefill_attention`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(q, pools, names, view, load_tile)


def unsupported_shape(
    q: jax.Array, pools: Pools, names: tuple[str, ...], view: PageView, load_tile: LoadTile
) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    dim = q.shape[3]
    layout = payload.recognise(load_tile, pools, names, q.dtype)
    if layout != payload.PLAIN:
        found = ", ".join(f"{name} {pools[name].dtype.name}" for name in names)
        return f"the stored rows ({found}) are not keys and values as they are used"
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype.name}, not one of {', '.join(DTYPES)}"
    for name in ("k", "v"):
        if pools[name].ndim != 3 or pools[name].shape[2] != dim:
            return f"rows of {name!r} have shape {pools[name].shape[2:]}, not the head's ({dim},)"
    if dim not in HEAD_DIMS:
        return f"head_dim is {dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    page, block = pools["k"].shape[1], default_config(dim).block_rows
    if page < LEAST_PAGE or (block % page and page % block):
        return f"pages of {page} rows neither divide {block} rows nor are their multiple, or are below {LEAST_PAGE}"
    return None


def prefill_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.prefill_attention`; `config` overrides how the kernel is launched."""
    problem = describe(q, pools, view, scale, config)
    return launch(problem, q, pools["k"], pools["v"], view.table, view.offset, view.lengths, start)


def describe(q: jax.Array, pools: Pools, view: PageView, scale: float, config: Config | None = None) -> Problem:
    """The problem that a call poses.

    Raises:
      ValueError: the scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    batch, chunk, q_heads, dim = q.shape
    return Problem(
        batch=batch,
        chunk=-(-chunk // WARPGROUP_QUERIES) * WARPGROUP_QUERIES,
        heads=view.num_heads,
        group=q_heads // view.num_heads,
        dim=dim,
        page=pools["k"].shape[1],
        columns=view.table.shape[2],
        stride=view.stride,
        table_heads=view.table.shape[1],
        row_heads=view.lengths.shape[1],
        dtype=q.dtype.name,
        scale=float(scale),
        config=config or default_config(dim),
    )


@functools.partial(jax.jit, static_argnums=0)  # lowered once, however many layers call it
def launch(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    offset: jax.Array,
    lengths: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The kernel on queries padded to whole blocks."""
    kernels = importlib.import_module("sparsejax.pallas_kernels.prefill_attention.mosaic_kernels")
    chunk = q.shape[1]
    q = jnp.pad(q, ((0, 0), (0, problem.chunk - chunk), (0, 0), (0, 0)))
    start = jnp.broadcast_to(start, lengths.shape)
    out, lse = kernels.build(problem)(q, k, v, table, offset, lengths, start)
    return out[:, :chunk], lse[:, :, :chunk].swapaxes(1, 2)
