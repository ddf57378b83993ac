"""Integers that describe attention and the page pool. Standard library only: host and device code share it."""

from __future__ import annotations

import dataclasses
import enum


class Granularity(enum.Enum):
    """How many head-pages one allocation covers. The value is the name used in flags and reports."""

    SEQUENCE = "sequence"  # all layers and KV heads of one token range
    LAYER = "layer"  # all KV heads of one layer
    HEAD = "head"  # one KV head of one layer


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape of attention and of one head-page.

    Attributes:
      num_layers: layers that keep KV.
      num_q_heads: query heads.
      num_kv_heads: KV heads; divides `num_q_heads`.
      head_dim: channels of one head.
      page_size: rows (tokens) of one head-page.
      max_model_len: longest logical sequence in tokens; bounds table width.
      scale: softmax scale.
      dtype: compute dtype name, "float32" or "bfloat16".
      hidden_size: channels of the residual stream; 0 where there is no model around attention.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_model_len: int
    scale: float
    dtype: str = "float32"
    hidden_size: int = 0

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads={self.num_q_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1")

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def max_pages(self) -> int:
        """Table columns: pages of the longest row."""
        return self.pages(self.max_model_len)

    @property
    def head_pages_per_sequence_page(self) -> int:
        return self.num_layers * self.num_kv_heads

    def pages(self, num_rows: int) -> int:
        """Pages that hold `num_rows` rows."""
        return -(-num_rows // self.page_size)

    def table_shape(self, granularity: Granularity) -> tuple[int, int]:
        """(layers, heads) axes of a page table at this granularity."""
        if granularity is Granularity.SEQUENCE:
            return 1, 1
        if granularity is Granularity.LAYER:
            return self.num_layers, 1
        return self.num_layers, self.num_kv_heads

    def head_pages_per_page(self, granularity: Granularity) -> int:
        """Head-pages that one page of this granularity covers."""
        layers, heads = self.table_shape(granularity)
        return self.head_pages_per_sequence_page // (layers * heads)
