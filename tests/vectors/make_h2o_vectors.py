"""Writes the worked examples of attention accumulated over queries: see `make_vectors`.

python -m tests.vectors.make_h2o_vectors [folder]
"""

from __future__ import annotations

import math
import pathlib
import sys

import numpy as np

from tests.vectors.make_vectors import HERE, best, cases_text, gap, softmax


def quarters(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/4."""
    return rng.integers(-6, 7, size=shape) / 4.0


def logits(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q [q_heads, queries, dim] are the last queries of k [kv_heads, rows, dim] -> [q_heads, queries, rows], causal."""
    dots = np.einsum("hqd,hsd->hqs", q, np.repeat(k, len(q) // len(k), axis=0))
    queries, rows = dots.shape[1:]
    return np.where(np.arange(rows) <= np.arange(rows - queries, rows)[:, None], dots, -np.inf)


def step_scores(q: np.ndarray, k: np.ndarray, mode: str, scale: float) -> np.ndarray:
    """What the scored queries of a chunk add to each row; `scale` multiplies their logits."""
    if mode == "probability":
        return softmax(logits(q, k) * scale).sum(1).max(0)
    return q.shape[1] * softmax(logits(q, k).max((0, 1)) * scale)


def recent_rows(budget: int, ratio: float) -> int:
    return min(max(1, int(budget * ratio)), budget)


def kept(scores: np.ndarray, budget: int, ratio: float) -> tuple[list[int], float]:
    """Rows that stay, and the gap."""
    rows = len(scores)
    if rows <= budget:
        return list(range(rows)), math.inf
    recent = recent_rows(budget, ratio)
    competing, heavy = scores[: rows - recent], budget - recent
    return [*best(competing, heavy), *range(rows - recent, rows)], gap(competing, heavy)


def two_chunks(tensors: list[np.ndarray], mode: str, logit_scale: str, window: int) -> dict:
    q1, k1, q2, k2 = tensors
    chunk, scale, ratio = q1.shape[1], 0.5, 0.5
    count = window or chunk
    used = scale if mode == "probability" or logit_scale == "attn" else 1.0
    first = step_scores(q1[:, -count:], k1, mode, used)
    keep1, gap1 = kept(first, 5, ratio)
    keys = np.concatenate([k1[:, keep1], k2], axis=1)
    second = np.pad(first[keep1], (0, chunk)) + step_scores(q2[:, -count:], keys, mode, used)
    keep2, gap2 = kept(second, 4, ratio)
    positions = np.array([*keep1, *range(chunk, 2 * chunk)])
    return {
        "name": f"two_chunks_{mode}_logitscale_{logit_scale}_window_{window}",
        "params": {
            "sparse_prefill_score_mode": mode,
            "h2o_prefill_score_window": window,
            "h2o_prefill_budget": 5,
            "h2o_decode_budget": 4,
            "h2o_recent_ratio": ratio,
            "h2o_logit_scale": logit_scale,
            "softmax_scale": scale,
            "chunk": chunk,
        },
        "inputs": {
            "q_chunk1": q1,
            "k_chunk1": k1,
            "q_chunk2": q2,
            "k_chunk2": k2,
            "layout": "q [Hq, chunk, D], k [Hkv, chunk, D], post-RoPE",
        },
        "expected": {
            "score_after_chunk1": first,
            "keep_after_chunk1": keep1,
            "gap1": gap1,
            "score_after_chunk2": second,
            "keep_after_chunk2_rows": keep2,
            "gap2": gap2,
            "keep_final_positions": positions[keep2],
            "score_carried_final": second[keep2],
        },
    }


def decoding(rng: np.random.Generator) -> dict:
    budget, interval, ratio, scale = 6, 2, 0.5, 0.5
    initial = np.array([5.0, 1.0, 3.0, 0.5, 2.0, 0.25])
    first_keys = keys = quarters(rng, 2, 6, 4)
    scores, positions, steps = initial, np.arange(6), []
    for step in range(3):
        q, k = quarters(rng, 4, 1, 4), quarters(rng, 2, 1, 4)
        keys, positions = np.concatenate([keys, k], axis=1), np.append(positions, 6 + step)
        scores = np.append(scores, 0.0) + softmax(logits(q, keys) * scale)[:, 0].sum(0)
        due = len(scores) >= budget + interval
        record = {"q": q, "k": k, "score": scores, "length_before": len(scores), "evicted": due}
        if due:
            keep, distance = kept(scores, budget, ratio)
            scores, keys, positions = scores[keep], keys[:, keep], positions[keep]
            record |= {"keep_rows": keep, "gap": distance, "positions": positions}
        steps.append(record)
    return {
        "name": "decode_accumulate_and_evict",
        "params": {
            "h2o_decode_eviction": True,
            "h2o_decode_budget": budget,
            "h2o_decode_eviction_interval": interval,
            "h2o_recent_ratio": ratio,
            "decode_head_reduction": "sum",
            "softmax_scale": scale,
        },
        "inputs": {"initial_scores": initial, "initial_keys": first_keys},
        "expected": {"steps": steps},
    }


def h2o() -> str:
    rng = np.random.default_rng(11)
    tensors = [quarters(rng, heads, 6, 4) for heads in (4, 2, 4, 2)]
    cases = [
        two_chunks(tensors, mode, logit_scale, window)
        for mode, logit_scale, window in (("probability", "attn", 0), ("logits", "attn", 2), ("logits", "none", 2))
    ]
    cases.append(decoding(rng))
    tied = np.array([0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 9.0, 9.0])
    keep, distance = kept(tied, 4, 0.5)
    cases.append(
        {
            "name": "ties_go_to_lower_row",
            "params": {"budget": 4, "h2o_recent_ratio": 0.5},
            "inputs": {"score": tied},
            "expected": {"keep": keep, "gap": distance},
        }
    )
    pairs = [[1, 0.5], [3, 0.5], [5, 0.5], [10, 0.05], [4096, 0.5]]
    cases.append(
        {
            "name": "recent_rounding",
            "params": {},
            "inputs": {"pairs": pairs},
            "expected": {"recent_counts": [recent_rows(int(budget), ratio) for budget, ratio in pairs]},
        }
    )
    description = (
        "Accumulated importance and kept rows for chunked prefill, decode accumulation with periodic eviction, ties and"
        " the recent-count rounding. Head reduction: max over query heads in prefill, sum over query heads in decode"
        " (reference setting)."
    )
    return cases_text("h2o", description, cases)


def schedule(prompt: int, chunk: int, prefill_budget: int, decode_budget: int, evicts: bool) -> dict:
    length, log = 0, []
    for done in range(0, prompt, chunk):
        new = min(chunk, prompt - done)
        last = done + new == prompt
        before = length + new
        budget = (decode_budget if evicts else before) if last else prefill_budget
        length = min(before, budget)
        log.append({"chunk": new, "length_in_attention": before, "length_after": length})
    return {
        "name": f"lengths_p{prompt}_c{chunk}_{'h2o' if evicts else 'vanilla'}",
        "params": {
            "h2o_prefill_budget": prefill_budget,
            "h2o_decode_budget": decode_budget,
            "engine_prefill_chunk_size": chunk,
            "sparse_method": "h2o" if evicts else "",
        },
        "inputs": {"prompt_tokens": prompt},
        "expected": {
            "chunks": log,
            "peak_length": max(entry["length_in_attention"] for entry in log),
            "peak_bound": min(prompt, prefill_budget + chunk),
        },
    }


def three_chunks() -> dict:
    rng = np.random.default_rng(31)
    budget, ratio, scale = 5, 0.5, 2**-0.5
    pairs = [(quarters(rng, 2, 4, 2), quarters(rng, 1, 4, 2)) for _ in range(3)]
    keys, scores, positions, log = np.zeros((1, 0, 2)), np.zeros(0), np.zeros(0, int), []
    for index, (q, k) in enumerate(pairs):
        keys = np.concatenate([keys, k], axis=1)
        scores = np.pad(scores, (0, 4)) + step_scores(q, keys, "probability", scale)
        positions = np.append(positions, np.arange(4 * index, 4 * index + 4))
        record = {"score": scores, "positions": positions}
        if index < 2:
            keep, distance = kept(scores, budget, ratio)
            keys, scores, positions = keys[:, keep], scores[keep], positions[keep]
            record |= {"keep_rows": keep, "gap": distance}
        log.append(record)
    return {
        "name": "three_chunks_vanilla_decode",
        "params": {
            "h2o_prefill_budget": budget,
            "h2o_recent_ratio": ratio,
            "sparse_prefill_score_mode": "probability",
            "h2o_prefill_score_window": 0,
            "softmax_scale": scale,
        },
        "inputs": {"q_chunks": [q for q, _ in pairs], "k_chunks": [k for _, k in pairs]},
        "expected": {"chunks": log},
    }


def h2o_prefill() -> str:
    cases = [
        schedule(*sizes)
        for sizes in (
            (100, 32, 40, 20, True),
            (100, 32, 40, 20, False),
            (30, 32, 40, 20, True),
            (75, 32, 64, 20, False),
        )
    ]
    cases.append(three_chunks())
    description = (
        "Row lengths per chunk for four schedules, and one 3-chunk run with scores (the last chunk is not compacted"
        " under vanilla decode)."
    )
    return cases_text("h2o_prefill", description, cases)


MAKERS = {"h2o": h2o, "h2o_prefill": h2o_prefill}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKERS.items():
        (folder / f"{name}.json").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
