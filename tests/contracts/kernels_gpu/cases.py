"""Random paged cases for kernels on a device: whatever a kernel must not read is NaN, or leads to a page of NaN."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.pallas_kernels.layout import LoadTile, PageView


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a case looks like; `lengths` is [batch] or, with `lengths_heads` > 1, cut to [batch, heads]."""

    lengths: tuple[int, ...]
    heads: int = 8
    group: int = 4
    dim: int = 128
    page: int = 64
    per_head_table: bool = False
    per_head_lengths: bool = False
    dtype: str = "bfloat16"
    codes: str | None = None
    bits: bool = False  # the codes as uint8
    columns: int | None = None
    layers: int = 2
    layer: int = 1

    def __str__(self) -> str:
        table = ("head" if self.per_head_table else "row") + ("+heads" if self.per_head_lengths else "")
        few = "_".join(map(str, self.lengths[:4])) + ("..." if len(self.lengths) > 4 else "")
        rows = (self.codes or self.dtype) + ("-bits" if self.bits else "")
        return f"{rows}-h{self.heads}x{self.group}-d{self.dim}-p{self.page}-{table}-{few}"


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of the operation, and `keys` and `values` [batch, heads, rows, dim] in float32 as they are stored."""

    q: jax.Array
    pools: dict[str, jax.Array]
    names: tuple[str, ...]
    view: PageView
    load_tile: LoadTile
    keys: np.ndarray
    values: np.ndarray
    scale: float = 0.1

    @property
    def arguments(self):
        return self.q, self.pools, self.names, self.view

    @property
    def how(self):
        return {"load_tile": self.load_tile, "layer": jnp.int32(0), "scale": self.scale}

    def wanted(self, lengths=None) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64, a row and head at a time; `lengths` instead of the view's."""
        batch, heads, _, dim = self.keys.shape
        lengths = np.asarray(self.view.lengths if lengths is None else lengths)
        lengths = np.broadcast_to(lengths, (batch, heads))
        q = np.asarray(self.q, np.float64).reshape(batch, heads, -1, dim)
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -1e30)
        for b, h in zip(*np.nonzero(lengths), strict=True):
            n = lengths[b, h]
            logits = q[b, h] @ self.keys[b, h, :n].astype(np.float64).T * self.scale
            peak = logits.max(1, keepdims=True)
            weights = np.exp(logits - peak)
            total = weights.sum(1, keepdims=True)
            out[b, h] = weights @ self.values[b, h, :n] / total
            lse[b, h] = (peak + np.log(total))[:, 0]
        return out.reshape(self.q.shape), lse.reshape(self.q.shape[:2])


def _plain(tiles, layer):
    return tiles["k"], tiles["v"]


def row_scaled(dtype: str) -> LoadTile:
    """How codes with a scale per row are decoded, by `sparsejax/storages/fp8_kv.py`."""

    def decode(codes, scale):
        if codes.dtype == jnp.uint8:
            codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)

    def load_tile(tiles, layer):
        return decode(tiles["k"], tiles["k_scale"]), decode(tiles["v"], tiles["v_scale"])

    return load_tile


def make(shape: Shape, seed: int = 0, poison: float = np.nan) -> Case:
    """Rows in scattered pages of a pool of several layers."""
    rng = np.random.default_rng(seed)
    batch, heads = len(shape.lengths), shape.heads
    lengths = np.asarray(shape.lengths, np.int32)[:, None]
    if shape.per_head_lengths:
        lengths = np.maximum(lengths - rng.integers(0, 70, (batch, heads), np.int32), np.minimum(lengths, 1))
    columns = shape.columns or max(1, -(-int(lengths.max()) // shape.page))
    table_heads = heads if shape.per_head_table else 1
    slab = 1 if shape.per_head_table else shape.layers * heads
    table = (2 + rng.permutation(batch * table_heads * columns)).reshape(batch, table_heads, columns).astype(np.int32)
    pages = -(-np.broadcast_to(lengths, (batch, heads)) // shape.page)
    needed = pages if shape.per_head_table else pages.max(1, keepdims=True)
    table = np.where(np.arange(columns) < needed[:, :, None], table, 1)  # page 1 belongs to nobody
    offset = np.zeros(heads, np.int32)
    if not shape.per_head_table:
        offset += shape.layer * heads + np.arange(heads, dtype=np.int32)
    num_pages = (2 + batch * table_heads * columns) * slab

    head_pages = table * slab + offset[None, :, None]
    rows = int(lengths.max())
    b, h, r = np.nonzero(np.arange(rows) < np.broadcast_to(lengths, (batch, heads))[:, :, None])
    place = head_pages[b, h, r // shape.page], r % shape.page
    pools, dense = {}, {}
    for name in ("k", "v"):
        stored = rng.standard_normal((len(b), shape.dim), np.float32).astype(jnp.dtype(shape.codes or shape.dtype))
        pool = np.full((num_pages, shape.page, shape.dim), poison, stored.dtype)
        pool[place] = stored
        pools[name] = jnp.asarray(pool.view(np.uint8) if shape.bits else pool)
        plain = stored.astype(np.float32)
        if shape.codes:
            scales = rng.uniform(0.5, 2.0, len(b)).astype(np.float32)
            pool = np.full((num_pages, shape.page), poison, np.float32)
            pool[place] = scales
            pools[f"{name}_scale"] = jnp.asarray(pool)
            plain *= scales[:, None]
        dense[name] = np.zeros((batch, heads, rows, shape.dim), np.float32)
        dense[name][b, h, r] = plain
    q = rng.standard_normal((batch, heads * shape.group, shape.dim), np.float32).astype(jnp.dtype(shape.dtype))
    view = PageView(jnp.asarray(table), slab, jnp.asarray(offset), jnp.asarray(lengths))
    names = ("k", "v", "k_scale", "v_scale") if shape.codes else ("k", "v")
    load_tile = row_scaled(shape.dtype) if shape.codes else _plain
    return Case(jnp.asarray(q), pools, names, view, load_tile, dense["k"], dense["v"])


def relative_error(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
