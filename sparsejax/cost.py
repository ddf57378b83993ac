"""Bytes and operations from integers: what fits, and how fast a step could be at best. Standard library and numpy.

Start-up capacity, `--explain` and the floors of the benchmarks read the same functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from sparsejax.geometry import Geometry
from sparsejax.plans import MethodFacts


def prefill_cost(geometry: Geometry, start: int, stop: int) -> float:
    """What computing tokens [start, stop) of a prompt takes, in units of its first token.

    A layer of width w has about 12 w^2 weights, and the token at position p attends to p rows: it costs
    1 + p x heads x head_dim / (6 w^2). Without a width (no model) all tokens cost the same.
    """
    tokens = float(stop - start)
    if not geometry.hidden_size:
        return tokens
    doubled = 6 * geometry.hidden_size**2 / (geometry.num_q_heads * geometry.head_dim)  # at this position
    return tokens + (stop**2 - start**2) / (2 * doubled)


@dataclasses.dataclass(frozen=True)
class RowCost:
    """What one request of `seen_tokens` costs under a method.

    Attributes:
      peak_tokens: most rows of a layer and head on the way.
      resident_tokens: rows of a layer and head, on average, once the prompt was processed and evicted from.
      read_tokens: rows of a layer and head that a decode step reads, on average.
      peak_head_pages: held at the highest point, the fresh pages of its compaction included.
      resident_head_pages: held afterwards.
    """

    seen_tokens: int
    peak_tokens: int
    resident_tokens: int
    read_tokens: int
    peak_head_pages: int
    resident_head_pages: int


def row_cost(facts: MethodFacts, geometry: Geometry, tokens: int) -> RowCost:
    """The cost of a prompt of `tokens` tokens, just before its first decode step."""
    width = geometry.head_pages_per_page(facts.granularity)
    lengths = np.full(geometry.table_shape(facts.granularity), tokens, np.int32)
    kept = np.broadcast_to(np.asarray(facts.kept_after("prompt", lengths), np.int32), lengths.shape)
    resident = int((-(-kept // geometry.page_size)).sum()) * width
    peak = np.broadcast_to(np.asarray(facts.peak_rows(np.zeros_like(lengths), tokens, 0), np.int32), lengths.shape)
    if replays := facts.replay_lengths(tokens):
        peak = np.maximum(peak, tokens + max(replays))
    held = int((-(-peak // geometry.page_size)).sum()) * width
    compaction = 0 if (kept == lengths).all() else resident
    rows = round(float(kept.mean()))
    return RowCost(tokens, int(peak.max()), rows, facts.rows_read(rows, geometry), held + compaction, resident)


def rows_that_fit(facts: MethodFacts, geometry: Geometry, sequence_pages: int, tokens: int) -> int:
    """Requests of so many tokens that a pool holds at once, prefilled one after the other.

    All but the last are at rest; the last one needs its peak. `sequence_pages` includes the null page.
    """
    cost = row_cost(facts, geometry, tokens)
    free = (sequence_pages - 1) * geometry.head_pages_per_sequence_page
    if cost.peak_head_pages > free:
        return 0
    return 1 + (free - cost.peak_head_pages) // max(1, cost.resident_head_pages)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Memory traffic and arithmetic of one program.

    Attributes:
      weight_bytes: weights read once.
      kv_bytes: cache rows read.
      flops: multiplications and additions.
    """

    weight_bytes: int
    kv_bytes: int
    flops: int

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds that no implementation can beat on a device with this bandwidth and arithmetic rate."""
        return max((self.weight_bytes + self.kv_bytes) / bytes_per_s, self.flops / flops_per_s)


def decode_cost(
    geometry: Geometry, weight_bytes: int, matmul_params: int, row_bytes: float, read_tokens: Iterable[int]
) -> StepCost:
    """One decode step.

    Args:
      geometry: attention shape.
      weight_bytes: of all weights that a step reads.
      matmul_params: weights that multiply each token (all but the embedding table).
      row_bytes: of one row of one KV head.
      read_tokens: rows of a layer and head that each request of the batch reads (`MethodFacts.rows_read`).
    """
    reads = list(read_tokens)
    rows = sum(reads)
    kv_bytes = round(rows * geometry.num_layers * geometry.num_kv_heads * row_bytes)
    attention = 4 * rows * geometry.num_layers * geometry.num_q_heads * geometry.head_dim
    return StepCost(weight_bytes, kv_bytes, 2 * len(reads) * matmul_params + attention)


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
