"""Writes the worked examples of reconstruction scores: see `make_vectors`.

python -m tests.vectors.make_kvzip_vectors [folder]
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from tests.vectors.make_vectors import HERE, best, cases_text, gap, softmax


def quarters(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/4."""
    return rng.integers(-6, 7, size=shape) / 4.0


def dots(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q [q_heads, queries, dim], k [kv_heads, rows, dim] -> [q_heads, queries, rows]."""
    return np.einsum("hqd,hsd->hqs", q, np.repeat(k, len(q) // len(k), axis=0))


def kvzip() -> str:
    rng = np.random.default_rng(21)
    layers, heads, kv_heads, dim, rows = 2, 4, 2, 4, 8
    scale, chunk, before, instruction = dim**-0.5, 4, 1, [7]
    prompt = list(range(100, 100 + rows))
    keys = quarters(rng, layers, kv_heads, rows, dim)
    score, replays = np.zeros(rows), []
    for start in range(0, rows, chunk):
        tokens = instruction + prompt[max(0, start - before) : start + chunk]
        queries = quarters(rng, layers, heads, len(tokens), dim)
        for q, k in zip(queries, keys, strict=True):
            share = softmax(dots(q, k) * scale)  # over prompt rows only
            score = np.maximum(score, share.mean(1).max(0))
        replays.append({"token_ids": tokens, "first_position": rows, "q": queries})
    params = {
        "kvzip_token_budget": 4,
        "kvzip_score_chunk_size": chunk,
        "kvzip_prev_postfix_size": before,
        "instruction_ids": instruction,
        "softmax_scale": scale,
    }
    layout = "k [L,Hkv,n,D]; replay q [L,Hq,len,D]"
    cases = [
        {
            "name": "global_token",
            "params": params,
            "inputs": {"prompt_ids": prompt, "k": keys, "replays": replays, "layout": layout},
            "expected": {"score": score, "keep": best(score, 4), "gap": gap(score, 4)},
        },
        per_head(rng, keys[0], heads, scale),
        ties(),
    ]
    what = "Token-shared reconstruction score over 2 layers and 2 replay passes, one official per-head chunk score"
    return cases_text("kvzip", f"{what}, and ties.", cases)


def per_head(rng: np.random.Generator, k: np.ndarray, heads: int, scale: float) -> dict:
    sink, start, end, queries = 2, 2, 6, 5
    kv_heads, _, dim = k.shape
    k_replay, q_replay = quarters(rng, kv_heads, queries, dim), quarters(rng, heads, queries, dim)
    seen = np.ones((queries, end + queries), bool)
    seen[:, end:] = np.tri(queries, dtype=bool)
    logits = dots(q_replay, np.concatenate([k[:, :end], k_replay], axis=1)) * scale
    share = softmax(np.where(seen, logits, -np.inf))[:, :, start:end]
    scores = share.reshape(kv_heads, -1, end - start).max(1)
    return {
        "name": "per_head_official_chunk_score",
        "params": {"sink": sink, "chunk": [start, end], "softmax_scale": scale},
        "inputs": {"k_layer": k, "k_replay": k_replay, "q_replay": q_replay},
        "expected": {
            "score_per_kv_head": scores,
            "top2_per_kv_head": [[start + row for row in best(of_head, 2)] for of_head in scores],
            "gap": min(gap(of_head, 2) for of_head in scores),
        },
    }


def ties() -> dict:
    scores = np.array([0.5, 0.2, 0.5, 0.2, 0.5, 0.1])
    return {
        "name": "ties_go_to_lower_position",
        "params": {"kvzip_token_budget": 4},
        "inputs": {"score": scores},
        "expected": {"keep": best(scores, 4), "gap": gap(scores, 4)},
    }


MAKERS = {"kvzip": kvzip}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKERS.items():
        (folder / f"{name}.json").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
