"""Random page selections: scores with ties, signed zeros, infinities and NaN, and pages in scattered places."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.pallas_kernels.layout import PageView

KINDS = ("normal", "ties", "equal", "infinite", "special")


@dataclasses.dataclass(frozen=True)
class Shape:
    """`lengths` is [batch], or with `per_head` cut at random to [batch, heads] where at least one row stays."""

    lengths: tuple[int, ...]
    columns: int
    num_scored: int
    page: int = 16
    heads: int = 3
    budget: int | None = None
    per_head: bool = False  # tables and lengths
    shared: bool = False
    kind: str = "normal"

    def __str__(self) -> str:
        marks = ("-head" if self.per_head else "") + ("-shared" if self.shared else "")
        few = "_".join(map(str, self.lengths[:4])) + ("..." if len(self.lengths) > 4 else "")
        return f"{self.kind}-k{self.num_scored}of{self.columns}-p{self.page}-h{self.heads}{marks}-{few}"

    @property
    def sizes(self) -> dict[str, int | bool]:
        """Keyword arguments of the operation."""
        budget = (self.num_scored + 1) * self.page if self.budget is None else self.budget
        width = max(self.num_scored + 1, min(-(-budget // self.page), self.columns))
        sizes: dict[str, int | bool] = {"num_scored": self.num_scored, "width": width, "budget": budget}
        return sizes | {"page_size": self.page, "shared": self.shared}


def make(shape: Shape, seed: int = 0) -> tuple[jax.Array, PageView]:
    """Scores, NaN and infinity where they must not be read, and the view, whose unused entries belong to nobody."""
    rng = np.random.default_rng(seed)
    batch, heads, columns = len(shape.lengths), shape.heads, shape.columns
    own = heads if shape.per_head else 1
    lengths = np.asarray(shape.lengths, np.int32)[:, None]
    if shape.per_head:
        cut = rng.integers(0, 3 * shape.page, (batch, heads), np.int32)
        lengths = np.maximum(lengths - cut, np.minimum(lengths, 1))
    scores = rng.standard_normal((batch, heads, columns)).astype(np.float32)
    if shape.kind == "ties":
        scores = np.round(scores * 2)
    elif shape.kind == "equal":
        scores[:] = -1.5
    elif shape.kind in ("infinite", "special"):
        values = [np.inf, -np.inf, 0.0, -0.0, 1.2e-38, -1.2e-38, 3.4e38, -3.4e38]
        values += [np.nan, -np.nan] if shape.kind == "special" else []
        strange = rng.choice(np.asarray(values, np.float32), scores.shape)
        scores = np.where(rng.random(scores.shape) < 0.7, strange, scores)
    num_pages = -(-np.broadcast_to(lengths, (batch, heads)) // shape.page)
    unread = np.arange(columns) >= num_pages[:, :, None] - (0 if shape.shared else 1)
    scores = np.where(unread, rng.choice(np.asarray([np.nan, np.inf], np.float32), scores.shape), scores)
    stride = 1 if shape.per_head else 2 * heads
    table = 2 + rng.permutation(batch * own * columns).reshape(batch, own, columns)
    table = np.where(np.arange(columns) < -(-lengths // shape.page)[:, :, None], table, 1).astype(np.int32)
    offset = np.zeros(heads, np.int32) if shape.per_head else heads + np.arange(heads, dtype=np.int32)
    return jnp.asarray(scores), PageView(jnp.asarray(table), stride, jnp.asarray(offset), jnp.asarray(lengths))


def wanted(shape: Shape, scores, view: PageView) -> tuple[np.ndarray, np.ndarray]:
    """(head-pages, lengths) one row and head at a time, by a stable sort."""
    sizes = shape.sizes
    scores = np.where(np.isnan(scores), -np.inf, scores)
    table, offset = np.asarray(view.table), np.asarray(view.offset)
    batch, heads, columns = scores.shape
    all_lengths = np.broadcast_to(np.asarray(view.lengths), (batch, heads))
    if shape.shared:
        real = np.arange(columns) < -(-all_lengths // shape.page)[:, :, None]
        scores = np.broadcast_to(np.where(real, scores, -np.inf).max(1, keepdims=True), scores.shape)
    pages = np.zeros((batch, heads, int(sizes["width"])), np.int32)
    lengths = np.zeros((batch, heads), np.int32)
    for b in range(batch):
        for h in range(heads):
            length = int(all_lengths[b, h])
            last = -(-length // shape.page) - 1
            if length <= sizes["budget"] or last <= shape.num_scored:
                columns_read, lengths[b, h] = list(range(last + 1)), length
            else:
                best = np.argsort(-scores[b, h, :last], kind="stable")[: shape.num_scored]
                columns_read = [*sorted(best), last]
                lengths[b, h] = shape.num_scored * shape.page + length - last * shape.page
            entries = table[b, h if table.shape[1] > 1 else 0, columns_read]
            pages[b, h, : len(columns_read)] = entries * view.stride + offset[h]
    return pages, lengths


def _ragged(columns: int, page: int) -> tuple[int, ...]:
    full = columns * page
    return 0, 1, page, full // 3, full // 2 + 1, full - page, full - page + 1, full


SMALL = tuple(
    dataclasses.replace(shape, kind=kind)
    for kind in KINDS
    for shape in (
        Shape(_ragged(37, 16), 37, 7),
        Shape(_ragged(37, 16), 37, 29, budget=100),
        Shape(_ragged(150, 4), 150, 11, 4, 2, shared=True, budget=200),
        Shape(_ragged(200, 1), 200, 60, 1, 2, per_head=True),
        Shape(_ragged(64, 8), 64, 63, 8, 1, per_head=True, shared=True),
        Shape(_ragged(33, 8), 33, 1, 8, 2, per_head=True, shared=True),
    )
)
"""Every kind of choice, small enough for a CPU."""
