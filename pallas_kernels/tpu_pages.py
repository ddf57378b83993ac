"""How TPU kernels read pages: blocks of head-pages copied from HBM, one block ahead of the computation.

Heads that share a table entry lie side by side, so one copy serves all heads of a program. What is read follows the
lengths: pages past the end are not copied, and what a buffer holds there is arbitrary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels.layout import PageView, Pools
from sparsejax.pallas_kernels.tpu_support import HEADS_AT_ONCE, heads_at_once

MASKED = -1e30
LEAST_PEAK = -1e20
"""Far above what is masked, so that its weight is exactly zero, and far below any logit."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A kernel's reads from pools. Hashable.

    Attributes:
      heads: KV heads of the view.
      at_once: heads that one program serves.
      shared: all heads share table entries.
      lengths_heads: 1, or `heads` where each has a length of its own.
      stride: see `PageView`.
      page_size: rows.
      columns: width of the tables.
      block_pages: pages of a block.
      names: pools to read.
      width: elements of a row.
    """

    heads: int
    at_once: int
    shared: bool
    lengths_heads: int
    stride: int
    page_size: int
    columns: int
    block_pages: int
    names: tuple[str, ...]
    width: int

    @classmethod
    def of(cls, pools: Pools, view: PageView, names: tuple[str, ...], longest_block: int, buffer_bytes: int) -> Reader:
        """Blocks of at most `longest_block` rows; `buffer_bytes` hold two of keys and two of values."""
        page_size, width = pools["k"].shape[1:]
        heads, table_heads, columns = view.num_heads, *view.table.shape[1:]
        at_once = heads_at_once(heads)
        rows = min(longest_block, buffer_bytes // (4 * at_once * width * pools["k"].dtype.itemsize))
        return cls(
            heads=heads,
            at_once=at_once,
            shared=table_heads == 1,
            lengths_heads=view.lengths.shape[1],
            stride=view.stride,
            page_size=page_size,
            columns=columns,
            block_pages=max(1, min(rows // page_size, columns)),
            names=names,
            width=width,
        )

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.block_pages * self.page_size

    @property
    def num_programs(self) -> int:
        """Programs that serve the heads of a row."""
        return self.heads // self.at_once

    def arrays(self, pools: Pools) -> list[jax.Array]:
        """The pools, in the order of their buffers."""
        return [pools[name] for name in self.names]

    def table(self, view: PageView) -> tuple[jax.Array, pl.BlockSpec]:
        """The tables as an input whose block, in scalar memory, is what one program needs.

        The first axes of the kernel's grid are rows and programs of a row.
        """
        rows = 1 if self.shared else self.at_once

        def index(row, program, *others):
            return (row if self.shared else row * self.num_programs + program), 0, 0

        spec = pl.BlockSpec((1, rows, self.columns), index, memory_space=pltpu.SMEM)
        return view.table.reshape(-1, rows, self.columns), spec

    def scratch(self, pools: Pools) -> list[Any]:
        """Two buffers of [at_once, block, ...] for each pool, and semaphores."""
        arrays = self.arrays(pools)
        buffers = [pltpu.VMEM((2, self.at_once, self.block, *array.shape[2:]), array.dtype) for array in arrays]
        return [*buffers, pltpu.SemaphoreType.DMA((2, len(arrays)))]

    def split(self, refs: Sequence[Any], num_outputs: int) -> tuple[Any, Any, Any, Any, Any]:
        """A kernel's last arguments: pools, outputs, buffers, semaphores, the rest."""
        n = len(self.names)
        outputs = n + num_outputs
        return refs[:n], refs[n:outputs], refs[outputs : outputs + n], refs[outputs + n], refs[outputs + n + 1 :]

    def lengths(self, ref: Any) -> list[jax.Array]:
        """Of each of this program's heads, from int32 [batch * lengths_heads]; at most what the table holds."""
        row, first = pl.program_id(0), pl.program_id(1) * self.at_once
        capacity = self.columns * self.page_size
        if self.lengths_heads == 1:
            return [jnp.minimum(ref[row], capacity)] * self.at_once
        return [jnp.minimum(ref[row * self.heads + first + h], capacity) for h in range(self.at_once)]

    def run(
        self,
        table: Any,
        offset: Any,
        pools: Sequence[Any],
        buffers: Sequence[Any],
        semaphores: Any,
        ends: Sequence[jax.Array],
        longest: jax.Array,
        compute: Callable[[jax.Array, Any], Any],
        carry: Any,
    ) -> Any:
        """Calls `compute(block, carry)` for each block below `longest`, with rows below `ends` of each head in place.

        Block i is in the buffers of slot i % 2.
        """
        num_blocks = pl.cdiv(longest, self.block)
        table_ends = [longest] if self.shared else ends

        def copies(i: jax.Array, action: Callable[[Any], None]) -> None:
            for table_row, end in enumerate(table_ends):
                pages = jnp.clip(pl.cdiv(end, self.page_size) - i * self.block_pages, 0, self.block_pages)
                jax.lax.fori_loop(0, pages, lambda page, _, row=table_row: copy(i, row, page, action), 0)

        def copy(i: jax.Array, table_row: int, page: jax.Array, action: Callable[[Any], None]) -> int:
            head_page = table[0, table_row, i * self.block_pages + page] * self.stride
            head_page += offset[pl.program_id(1) * self.at_once + table_row]
            adjacent = self.at_once if self.shared else 1
            if adjacent == HEADS_AT_ONCE:
                head_page = pl.multiple_of(head_page, HEADS_AT_ONCE)
            rows = pl.ds(pl.multiple_of(page * self.page_size, self.page_size), self.page_size)
            for j, (pool, buffer) in enumerate(zip(pools, buffers, strict=True)):
                target = buffer.at[i % 2, pl.ds(table_row, adjacent), rows]
                source = pool.at[pl.ds(head_page, adjacent)]
                action(pltpu.make_async_copy(source, target, semaphores.at[i % 2, j]))
            return 0

        @pl.when(num_blocks > 0)
        def _():
            copies(jnp.int32(0), lambda copy: copy.start())

        def step(i: jax.Array, carry: Any) -> Any:
            @pl.when(i + 1 < num_blocks)
            def _():
                copies(i + 1, lambda copy: copy.start())

            copies(i, lambda copy: copy.wait())
            return compute(i, carry)

        return jax.lax.fori_loop(0, num_blocks, step, carry)


def stored_names(scaled: bool) -> tuple[str, ...]:
    """The pools of keys and values: plain ones, or codes and their scales."""
    return ("k", "v", "k_scale", "v_scale") if scaled else ("k", "v")


def clear_tail(tile: Any, left: jax.Array) -> None:
    """Zeros in a buffer [block, ...] from row `left` on: a weight of zero would still turn what lies there into NaN."""

    @pl.when(left < tile.shape[0])
    def _():
        values = tile[...]
        values = values.astype(jnp.int32 if values.dtype == jnp.uint8 else jnp.float32)
        own = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) < left
        tile[...] = jnp.where(own, values, 0).astype(tile.dtype)


def decode(codes: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Stored rows in the compute dtype; uint8 are the bits of 8-bit floats (E4M3FN)."""
    if codes.dtype != jnp.uint8:
        return codes if codes.dtype == dtype else codes.astype(jnp.float32).astype(dtype)
    bits = codes.astype(jnp.int32)
    sign, rest = bits >> 7, bits & 0x7F
    # Bias 7 to 127, mantissa of 3 bits to 23. Below the least exponent a code counts in steps of 2^-9.
    normal = jax.lax.bitcast_convert_type((rest << 20) + (120 << 23), jnp.float32)
    value = jnp.where(rest < 8, rest.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(sign == 1, -value, value).astype(dtype)


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """float32 of a's last axis times an axis of b."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def logits_of(query: jax.Array, keys: jax.Array, scales: Sequence[jax.Array], scale: float) -> jax.Array:
    """float32 [queries, block] of queries [queries, width], stored keys [block, width] and their scales [1, block]."""
    logits = _product(query, decode(keys, query.dtype), 1) * scale
    return logits * scales[0] if scales else logits


def softmax_step(
    query: jax.Array,
    own: Callable[[tuple[int, ...]], jax.Array],
    tiles: Sequence[jax.Array],
    scale: float,
    peak: jax.Array,
    total: jax.Array,
    sums: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax over one block of one head.

    Args:
      query: [queries, width].
      own: shape [queries, block] -> bool, the keys that each query sees.
      tiles: keys and values [block, width] as stored and, for codes, their scales [1, block].
      scale: softmax scale.
      peak, total, sums: [queries, 1], [queries, 1] and [queries, width] so far; `peak` starts at LEAST_PEAK.
    """
    keys, values, *scales = tiles
    logits = logits_of(query, keys, scales[:1], scale)
    seen = own(logits.shape)
    logits = jnp.where(seen, logits, MASKED)
    new_peak = jnp.maximum(peak, logits.max(1, keepdims=True))
    weights = jnp.exp(logits - new_peak)
    decay = jnp.exp(peak - new_peak)
    total = total * decay + weights.sum(1, keepdims=True)
    if scales:
        weights = jnp.where(seen, weights * scales[1], 0.0)
    weights = weights.astype(query.dtype)
    return new_peak, total, sums * decay + _product(weights, decode(values, query.dtype), 0)


def softmax_result(peak: jax.Array, total: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output [queries, width] and log-sum-exp [queries, 1]: 0 and MASKED for a query that saw nothing."""
    least = jnp.maximum(total, 1e-30)
    return sums / least, jnp.where(total > 0, peak + jnp.log(least), MASKED)


def cost(reader: Reader, batch: int, q_heads: int, queries: int, itemsize: int) -> pl.CostEstimate:
    """What the compiler should think attention costs when the tables are full: lengths are unknown to it."""
    rows = reader.columns * reader.page_size
    row_bytes = sum(4 if name.endswith("_scale") else reader.width * itemsize for name in reader.names)
    products = batch * q_heads * queries * rows
    return pl.CostEstimate(
        flops=(4 if "v" in reader.names else 2) * products * reader.width,
        bytes_accessed=batch * reader.heads * rows * row_bytes,
        transcendentals=products,
    )
