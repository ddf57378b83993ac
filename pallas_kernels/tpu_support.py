"""What the Mosaic TPU implementations share: whether they can run here, and which rows they can read. Imports jax only.

TPU memory is tiled: the last axis in 128 lanes, the one before in 8 sublanes of 32 bits. A head-page is copied as it
lies in HBM, so a pool's rows must fill the lanes and its pages whole sublanes.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.layout import LANES, LoadTile, PageView, Pools
from sparsejax.pallas_kernels.platforms import platform

DTYPES = ("bfloat16", "float32")
CODES = ("float8_e4m3fn", "uint8")
WIDEST_ROW = 256
LARGEST_GROUP = 64
MOST_LENGTHS = 16384  # each takes 4 bytes of scalar memory
MOST_ENTRIES = 65536  # of the page tables that one program reads
HEADS_AT_ONCE = 8

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpreting(params: pltpu.InterpretParams | None = None) -> Iterator[None]:
    """Runs TPU kernels traced inside on a CPU, in Pallas's TPU interpret mode: for tests."""
    token = _interpreting.set(True)
    try:
        with pltpu.force_tpu_interpret_mode(params or pltpu.InterpretParams()):
            yield
    finally:
        _interpreting.reset(token)


def platform_problem() -> str | None:
    """Why no TPU kernel can run on what is being traced for, or None."""
    found = platform()
    return None if found == "tpu" or _interpreting.get() else f"needs a TPU, JAX runs on {found}"


def sublanes(dtype: jax.typing.DTypeLike) -> int:
    """Rows of a tile of VMEM."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def heads_at_once(num_heads: int) -> int:
    """KV heads that one program serves: a divisor of their number."""
    return max(n for n in range(1, HEADS_AT_ONCE + 1) if num_heads % n == 0)


def unsupported_rows(
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    load_tile: LoadTile,
    q_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
) -> str | None:
    """Why the attention kernels can't read these rows, or None."""
    dtype = jnp.dtype(dtype)
    layout = payload.recognise(load_tile, pools, names, dtype, head_dim)
    if layout is None:
        found = ", ".join(f"{name} {pools[name].dtype.name}" for name in names)
        return f"the stored rows ({found}) are decoded in a way the kernel does not know"
    if dtype.name not in DTYPES:
        return f"queries are {dtype.name}, not one of {', '.join(DTYPES)}"
    keys = pools["k"]
    page_size, width = keys.shape[1:3]
    if keys.ndim != 3 or pools["v"].shape != keys.shape or width < head_dim:
        return f"pages have shapes {keys.shape[1:]} and {pools['v'].shape[1:]}, not rows of {head_dim} channels"
    if width % LANES or width > WIDEST_ROW:
        return f"rows of {width} do not fill the {LANES} lanes of a TPU's memory, or are longer than {WIDEST_ROW}"
    if page_size % sublanes(keys.dtype):
        return f"pages of {page_size} rows cut the tiles of {sublanes(keys.dtype)} rows of {keys.dtype.name}"
    if layout == payload.ROW_SCALED:
        if any(pools[name].dtype.name not in CODES for name in ("k", "v")):
            return f"scaled codes are {keys.dtype.name}, not one of {', '.join(CODES)}"
        if page_size % LANES:
            return f"the scales of a page of {page_size} rows do not fill {LANES} lanes"
        if view.table.shape[1] > 1 or view.num_heads % HEADS_AT_ONCE:
            return f"scales are read for {HEADS_AT_ONCE} adjacent heads at once"
    if q_heads // view.num_heads > LARGEST_GROUP:
        return f"{q_heads // view.num_heads} query heads share a KV head, more than {LARGEST_GROUP}"
    return unsupported_tables(view)


def unsupported_tables(view: PageView) -> str | None:
    """Why tables or lengths don't fit the scalar memory, or None."""
    batch, heads, columns = view.table.shape
    if batch * view.lengths.shape[1] > MOST_LENGTHS:
        return f"{batch} rows have {batch * view.lengths.shape[1]} lengths, more than {MOST_LENGTHS}"
    if min(heads, HEADS_AT_ONCE) * columns > MOST_ENTRIES:
        return f"tables of {columns} columns are wider than {MOST_ENTRIES // min(heads, HEADS_AT_ONCE)}"
    return None
