"""Rows to sample from, and which logits may stay of each: a NumPy sort in float64."""

from __future__ import annotations

import itertools

import numpy as np

KINDS = ("normal", "flat", "rounded", "masked", "zeros", "outlier", "peaked", "bfloat16", "nothing", "equal")
COLUMNS = {
    "temperature": (0.0, 1e-6, 0.01, 0.1, 0.7, 1.0, 2.5, 100.0),
    "top_k": (0, 0, 1, 2, 5, 50, 1000, -1, 10**6),  # -1 is vocab - 1
    "top_p": (1.0, 1.0, 1e-3, 0.3, 0.5, 0.9, 0.99, 0.999999),
    "min_p": (0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 1.0),
}


def make(batch: int, vocab: int, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits float32 [batch, vocab] of all kinds, and the parameters of each row by name."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((batch, vocab)) * rng.choice([1.0, 3.0, 10.0], (batch, 1))).astype(np.float32)
    for row in range(batch):
        kind = KINDS[(row + seed) % len(KINDS)]
        if kind == "flat":
            logits[row] *= 1e-3
        elif kind == "rounded":
            logits[row] = np.round(logits[row])
        elif kind == "masked":
            logits[row, 1:][rng.random(vocab - 1) < rng.choice([0.1, 0.9, 0.999])] = -np.inf
        elif kind == "zeros":
            logits[row] = rng.choice(np.array([0.0, -0.0, -1.0], np.float32), vocab)
        elif kind == "outlier":
            logits[row, rng.integers(vocab)] = -1e30
        elif kind == "peaked":
            logits[row, rng.integers(vocab)] += 30
        elif kind == "bfloat16":
            logits[row] = (logits[row].view(np.uint32) & 0xFFFF0000).view(np.float32)
        elif kind == "nothing":
            logits[row] = -np.inf
        elif kind == "equal":
            logits[row] = 1.25
    columns = {name: rng.choice(np.array(values), batch) for name, values in COLUMNS.items()}
    columns["top_k"] = np.where(columns["top_k"] < 0, vocab - 1, columns["top_k"]).astype(np.int32)
    return logits, {name: c if name == "top_k" else c.astype(np.float32) for name, c in columns.items()}


def bounds(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[float, float]:
    """Least and largest right answer for a row: they differ only where rounding decides (2e-6 of top_p and min_p)."""
    vocab = len(logits)
    by_count = 0 < top_k < vocab
    if temperature <= 0 or not (by_count or top_p < 1 or min_p > 0) or not np.isfinite(logits).any():
        return -np.inf, -np.inf
    with np.errstate(over="ignore"):
        below = np.abs((logits.max() - logits) / np.maximum(np.float32(temperature), np.float32(1e-6)))
    share = np.exp(-below.astype(np.float64))
    found = []
    for more_p, more_share in itertools.product((-2e-6, 2e-6), repeat=2):
        keep = ((share >= min_p * (1 + more_share)) | (below == 0)) & (below < np.inf)
        if by_count and keep.sum() > top_k:
            keep &= below <= np.partition(below[keep], top_k - 1)[top_k - 1]
        if top_p < 1:
            order = np.sort(below[keep])
            mass = np.cumsum(np.exp(-order.astype(np.float64)))
            place = np.searchsorted(mass, (top_p + more_p) * mass[-1])
            keep &= below <= order[min(place, len(order) - 1)]
        found.append(float(logits[keep].min()))
    return min(found), max(found)


def check(found: np.ndarray, logits: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    """Every row of `found` float32 [batch] is right."""
    assert found.shape == logits.shape[:1]
    for row, value in enumerate(found):
        own = {name: column[row].item() for name, column in columns.items()}
        low, high = bounds(logits[row], **own)
        assert low <= value <= high, (row, own, float(value), low, high)
