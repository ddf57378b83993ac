"""Random block lists of tiles of queries, and attention over lists and over biased keys in float64, tile by tile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparsejax.pallas_kernels.block_sparse_attention.tiles import num_tiles


def random_lists(
    rng: np.random.Generator,
    starts: np.ndarray,
    lengths: np.ndarray,
    chunk: int,
    group: int,
    m: int,
    n: int,
    columns: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Lists [batch, heads, tiles, columns] of blocks of which the tile's last query sees a row, and their lengths.

    `starts` and `lengths` are [batch, heads]. What comes after a list is out of range.
    """
    tiles = num_tiles(chunk, group, m)
    blocks = np.full((*lengths.shape, tiles, columns), 2**24, np.int32)
    count = np.zeros(blocks.shape[:3], np.int32)
    for b, h, t in np.ndindex(count.shape):
        last = starts[b, h] + min((t + 1) * m, chunk * group) // group - 1
        seen = min(lengths[b, h], last + 1)
        own = np.flatnonzero(
            rng.random(max(-(-seen // n), 0)) < rng.choice([0.0, 0.3, 0.7, 1.0], p=[0.1, 0.4, 0.3, 0.2])
        )
        count[b, h, t] = min(len(own), columns)
        blocks[b, h, t, : len(own)] = own[:columns]
    return blocks, count


def attend_tiles(
    q: np.ndarray, heads: int, m: int, scale: float, keys_of: Callable[[int, int, int, np.ndarray], tuple]
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of q [batch, chunk, q_heads, dim].

    `keys_of(b, h, t, positions)` gives a tile's keys and values [keys, dim] and what is added to the logits of its
    packed rows [rows, keys], which are those of query `positions`. Zeros and -1e30 where a row sees nothing.
    """
    q = np.asarray(q, np.float64)
    batch, chunk, q_heads, _ = q.shape
    group = q_heads // heads
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -1e30)
    for b, h, t in np.ndindex(batch, heads, num_tiles(chunk, group, m)):
        rows = np.arange(t * m, min((t + 1) * m, chunk * group))
        position, head = rows // group, h * group + rows % group
        k, v, bias = keys_of(b, h, t, position)
        logits = q[b, position, head] @ k.T * scale + bias
        peak = logits.max(1, keepdims=True, initial=-1e30)
        weights = np.exp(logits - peak)
        total = weights.sum(1, keepdims=True)
        seen = total[:, 0] > 0
        out[b, position[seen], head[seen]] = (weights @ v)[seen] / total[seen]
        lse[b, position[seen], head[seen]] = (peak + np.log(np.maximum(total, 1e-300)))[seen, 0]
    return out, lse


def listed_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    blocks: np.ndarray,
    count: np.ndarray,
    m: int,
    n: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of each tile over the rows of its listed blocks; keys and values [batch, heads, rows, dim]."""

    def keys_of(b, h, t, position):
        listed = (blocks[b, h, t, : count[b, h, t], None].astype(np.int64) * n + np.arange(n)).reshape(-1)
        rows = listed[listed < lengths[b, h]]
        seen = rows[None, :] <= starts[b, h] + position[:, None]
        k, v = (np.asarray(x[b, h, rows], np.float64) for x in (keys, values))
        return k, v, np.where(seen, 0.0, -np.inf)

    return attend_tiles(q, keys.shape[1], m, scale, keys_of)


def biased_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, bias: np.ndarray, m: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each tile over all keys [batch, heads, keys, dim] with bias [batch, heads, tiles, keys]."""

    def keys_of(b, h, t, position):
        return np.asarray(keys[b, h], np.float64), np.asarray(values[b, h], np.float64), bias[b, h, t]

    return attend_tiles(q, keys.shape[1], m, scale, keys_of)
