"""Named shapes that tests, benchmarks and tuning share. Standard library only."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One call of an attention kernel.

    Attributes:
      name: short name for reports.
      lengths: resident rows of each sequence, the chunk's own included.
      num_kv_heads, group_size: heads, and query heads per KV head.
      head_dim: channels.
      page_size: rows of a page.
      granularity: what one table entry covers: "sequence", "layer" or "head".
      dtype: compute dtype.
      scaled_codes: rows are stored as 8-bit codes with a scale per row.
      chunks: new rows of each sequence in a prefill call; the rest of `lengths` is history.
    """

    name: str
    lengths: tuple[int, ...]
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    page_size: int = 16
    granularity: str = "sequence"
    dtype: str = "float32"
    scaled_codes: bool = False
    chunks: tuple[int, ...] = ()

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group_size


def _edges(page_size: int, longest: int) -> tuple[int, ...]:
    return 1, page_size - 1, page_size, page_size + 1, longest


SMALL: tuple[AttentionShape, ...] = (
    AttentionShape("one-row", (1,), chunks=(1,)),
    AttentionShape("page-16", _edges(16, 85), chunks=(1, 15, 7, 1, 33)),
    AttentionShape("page-32-layer", _edges(32, 140), page_size=32, granularity="layer", chunks=(1, 30, 32, 2, 64)),
    AttentionShape("page-64-head", _edges(64, 200), page_size=64, granularity="head", chunks=(1, 63, 3, 65, 50)),
    AttentionShape("page-128", _edges(128, 300), page_size=128, group_size=3, chunks=(1, 2, 128, 1, 90)),
    AttentionShape("no-groups", (1, 40), 4, 1, chunks=(1, 17)),
    AttentionShape("multi-query", (33, 5), 1, 16, 128, granularity="layer", chunks=(1, 5)),
    AttentionShape("gqa-7-dim-128", (70, 16), 2, 7, 128, 32, granularity="head", chunks=(38, 16)),
    AttentionShape("bfloat16", (1, 15, 16, 97), dtype="bfloat16", chunks=(1, 3, 16, 40)),
    AttentionShape("bfloat16-dim-128", (31, 130), 2, 4, 128, 64, "layer", "bfloat16", chunks=(31, 3)),
    AttentionShape("fp8", (1, 16, 77), scaled_codes=True, chunks=(1, 5, 30)),
    AttentionShape("fp8-bfloat16", (17, 64), 2, 2, 128, 32, "head", "bfloat16", True, chunks=(2, 64)),
    # Batches that a CPU attends to in another way; rows end before, in and after each block of 64.
    AttentionShape("batch-10", (1, 15, 16, 63, 64, 65, 97, 128, 140, 2), 3, 3, chunks=(1, 5, 1, 3, 2, 9, 1, 4, 7, 2)),
    AttentionShape("batch-8-fp8", (64, 128) * 4, 2, 3, scaled_codes=True, chunks=(1, 2) * 4),
)
"""Every kind of shape, small enough for an oracle on a CPU."""

SERVING: tuple[AttentionShape, ...] = (
    AttentionShape("smollm2-135m-batch-1", (8192,), 3, 3, dtype="bfloat16"),
    AttentionShape("smollm2-135m-batch-16", (7000,) * 16, 3, 3, dtype="bfloat16"),
    AttentionShape("llama-8b-batch-1", (32768,), 8, 4, 128, dtype="bfloat16"),
    AttentionShape("llama-8b-batch-16", (32768,) * 16, 8, 4, 128, dtype="bfloat16"),
    AttentionShape("llama-8b-batch-64-mixed", tuple(512 * (i + 1) for i in range(64)), 8, 4, 128, dtype="bfloat16"),
    AttentionShape("llama-8b-batch-16-fp8", (32768,) * 16, 8, 4, 128, 16, "sequence", "bfloat16", True),
)
"""What a server runs: for benchmarks and tuning."""


@dataclasses.dataclass(frozen=True)
class ScoreShape:
    """One call of `page_scores`: lengths in rows, as in `AttentionShape`."""

    name: str
    lengths: tuple[int, ...]
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    page_size: int = 16
    granularity: str = "sequence"
    dtype: str = "float32"

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group_size


SCORES: tuple[ScoreShape, ...] = (
    ScoreShape("one-page", (1, 16)),
    ScoreShape("page-16", (*_edges(16, 150), 1100)),
    ScoreShape("page-64-layer", _edges(64, 500), page_size=64, granularity="layer"),
    ScoreShape("multi-query-head", (300, 20), 1, 16, 128, granularity="head"),
    ScoreShape("no-groups-bfloat16", (33, 90), 4, 1, 128, dtype="bfloat16"),
)
