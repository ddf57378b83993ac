"""Writes the worked examples of block-sparse prefill attention: see `make_vectors`.

python -m tests.vectors.make_flashprefill_vectors [folder]
"""

from __future__ import annotations

import pathlib
import sys
from typing import NamedTuple

import numpy as np

from tests.vectors.make_vectors import HERE, cases_text, softmax


class Rule(NamedTuple):
    """The parameters, in the order of the specification, and the softmax scale."""

    m: int
    n: int
    threshold: float
    sink: int
    window: int
    last: int
    least: int
    correct: bool
    scale: float


class Result(NamedTuple):
    """Blocks read and block energies of each tile, heads outermost; the output [queries, q_heads, dim]."""

    blocks: list[list[int]]
    energies: list[list[float]]
    out: np.ndarray


def sparse_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, prefix: int, rule: Rule) -> Result:
    """q [queries, q_heads, dim] are the last queries of k and v [rows, kv_heads, dim], after `prefix` rows."""
    queries, q_heads = q.shape[:2]
    group = q_heads // k.shape[1]
    tiles = -(-queries * group // rule.m)
    spans = [range(b, min(b + rule.n, len(k))) for b in range(0, len(k), rule.n)]
    result = Result([], [], np.zeros((queries, q_heads, v.shape[2])))
    for head in range(k.shape[1]):
        key_means, value_means = (np.array([x[list(span), head].mean(0) for span in spans]) for x in (k, v))
        for tile in range(tiles):
            packed = np.arange(tile * rule.m, min((tile + 1) * rule.m, queries * group))
            row, own = prefix + packed // group, q[packed // group, head * group + packed % group]
            blocks, energy = read_blocks(own, row, key_means, rule, queries <= rule.least or tile >= tiles - rule.last)
            result.blocks.append(blocks)
            result.energies.append(energy)
            unread = [b for b in range(row[0] // rule.n) if b not in blocks] if rule.correct else []
            rows = [j for b in blocks for j in spans[b]]
            logits = own @ np.concatenate([k[rows, head], key_means[unread]]).T * rule.scale
            logits[:, : len(rows)][np.array(rows)[None] > row[:, None]] = -np.inf
            logits[:, len(rows) :] += np.log([len(spans[b]) for b in unread])
            found = softmax(logits) @ np.concatenate([v[rows, head], value_means[unread]])
            result.out[packed // group, head * group + packed % group] = found
    return result


def read_blocks(
    q: np.ndarray, row: np.ndarray, key_means: np.ndarray, rule: Rule, dense: bool
) -> tuple[list[int], list[float]]:
    """The blocks that a tile of queries [packed rows, dim] at `row` reads, and the energies of those with a score."""
    first, last, scored = row[0] // rule.n, row[-1] // rule.n, (row[-1] + 1) // rule.n
    if dense:
        return list(range(last + 1)), []
    logits = q @ key_means[:scored].T * rule.scale
    logits[row[:, None] < np.arange(scored) * rule.n] = -np.inf
    energy = np.exp(logits - logits.max(initial=-np.inf)).sum(0) if scored else np.zeros(0)
    strong = {b for b in range(scored) if energy[b] >= rule.threshold * energy.max()}
    near = set(range(max(first - rule.window + 1, 0), last + 1)) | set(range(min(rule.sink, last + 1)))
    return sorted(int(b) for b in strong | near), energy.tolist()


def flashprefill_v2() -> str:
    rng = np.random.default_rng(2)

    def grid(low: int, high: int, *shape: int) -> np.ndarray:
        return rng.integers(low, high + 1, size=shape) / 4.0

    q, k, v = grid(-8, 8, 8, 2, 2), grid(-8, 8, 16, 1, 2), grid(-6, 6, 16, 1, 2)
    cases = []
    for threshold, correct in ((0.5, True), (0.5, False), (0.0, False), (1.0, True)):
        rule = Rule(4, 2, threshold, 1, 1, 1, 0, correct, 2**-0.5)
        found = sparse_attention(q, k, v, 8, rule)
        margins = [abs(e / max(energy) - threshold) for energy in found.energies for e in energy]
        names = ("k_block_m", "k_block_n", "abs_threshold", "attention_sink_blocks", "window_blocks")
        names += ("last_query_blocks", "min_sparse_q_len", "use_mean_correction")
        params = {f"flashprefill_v2_{name}": value for name, value in zip(names, rule[:8], strict=True)}
        note = "block sizes are below the engine minimum on purpose; test the pure function"
        inputs = {"q": q, "k": k, "v": v, "prefix": 8, "layout": "q [m,Hq,D], k/v [n,Hkv,D]"}
        expected = {"blocks_per_tile": found.blocks, "energies": found.energies, "output": found.out}
        cases.append(
            {
                "name": f"alpha_{threshold}_correction_{correct}",
                "params": params | {"softmax_scale": rule.scale, "note": note},
                "inputs": inputs,
                "expected": expected | {"threshold_margin": min(margins)},
            }
        )
    description = "Selected key blocks per packed query tile (kv head 0) and attention output, "
    description += "with and without the mean correction."
    return cases_text("flashprefill_v2", description, cases)


MAKERS = {"flashprefill_v2": flashprefill_v2}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKERS.items():
        (folder / f"{name}.json").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
