"""Writes the worked examples of importance less redundancy, of sentences and of their schedules: see `make_vectors`.

python -m tests.vectors.make_rkv_vectors [folder]
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from tests.vectors.make_vectors import HERE, best, cases_text, gap, pooled, softmax


def quarters(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/4."""
    return rng.integers(-6, 7, size=shape) / 4.0


def unit(x: np.ndarray, floor: float = 0.0, extra: float = 0.0) -> np.ndarray:
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / (np.maximum(norm, floor) + extra)


def importance(q: np.ndarray, k: np.ndarray, first: int, end: int, kernel: int, scale: float) -> np.ndarray:
    """q [q_heads, window, dim] after k [kv_heads, rows, dim] -> [kv_heads, candidates]."""
    grouped = q.reshape(len(k), -1, *q.shape[1:])
    logits = np.einsum("hgwd,hsd->hgws", grouped, k).max(1) * scale
    return pooled(softmax(logits[:, :, first:end]).mean(1), kernel, "max")


def last_similar(cosine: np.ndarray) -> np.ndarray:
    """[rows, rows], 0 on the diagonal -> the last similar row of each, 0 without any."""
    return np.array([max(np.flatnonzero(row > 0.5), default=0) for row in cosine])


def redundancy(k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k [kv_heads, rows, dim] -> softmax [kv_heads, rows], and the last similar row of each."""
    result, last = [], []
    for head in unit(k, extra=1e-8):
        cosine = head @ head.T
        np.fill_diagonal(cosine, 0.0)
        last.append(last_similar(cosine))
        cosine[np.arange(len(cosine)), last[-1]] = 0.0
        result.append(softmax(cosine.mean(0)))
    return np.stack(result), np.stack(last)


def joint(votes: np.ndarray, repeats: np.ndarray, weight: float) -> np.ndarray:
    return weight * votes - (1 - weight) * repeats


def rkv_events(prompt: int, budget: int, interval: int, steps: int) -> dict:
    """Decoded tokens and rows before each compaction."""
    rows, events = prompt, []
    for step in range(1, steps + 1):
        rows += 1
        if step % interval == 0 and rows >= budget + interval:
            events.append([step, rows])
            rows = budget
    return {
        "prompt": prompt,
        "budget": budget,
        "interval": interval,
        "steps": steps,
        "events_step_length": events,
        "final_length": rows,
    }


def rkv() -> str:
    rng = np.random.default_rng(5)
    rows, window, kernel, weight, budget, scale = 10, 2, 3, 0.1, 6, 0.5
    k = quarters(rng, 2, 2, rows, 4)
    k[0, 0, 5] = k[0, 0, 8] = k[0, 0, 2]
    q = quarters(rng, 2, 4, window, 4)
    layers = []
    for keys, queries in zip(k, q, strict=True):
        votes = importance(queries, keys, 0, rows - window, kernel, scale)
        repeats, last = redundancy(keys)
        repeats = repeats[:, : rows - window]
        layers.append(
            {
                "importance_pooled": votes,
                "redundancy": repeats,
                "last_similar": last,
                "joint": joint(votes, repeats, weight),
            }
        )
    total = sum(layer["joint"].mean(0) for layer in layers)
    heads = layers[0]["joint"]
    end, count = range(rows - window, rows), budget - window
    cases = [
        {
            "name": "global_selection",
            "params": {
                "sink_keep_tokens": 1,
                "decode_keep_tokens": 3,
                "recent_keep_tokens": 2,
                "rkv_observation_tokens": window,
                "rkv_kernel_size": kernel,
                "rkv_alpha": weight,
                "softmax_scale": scale,
            },
            "inputs": {"k": k, "q_window": q, "layout": "k [L,Hkv,n,D]; q [L,Hq,w,D]"},
            "expected": {
                "per_layer": layers,
                "total_score": total,
                "keep": [*best(total, count), *end],
                "gap": gap(total, count),
            },
        },
        {
            "name": "per_head_selection_layer0",
            "params": {"rkv_scope": "per_head", "budget": budget},
            "inputs": {"use": "layer 0 of global_selection"},
            "expected": {
                "keep_per_kv_head": [[*best(head, count), *end] for head in heads],
                "gap": min(gap(head, count) for head in heads),
            },
        },
        {
            "name": "trigger_schedule",
            "params": {},
            "inputs": {},
            "expected": {"runs": [rkv_events(*run) for run in ((20, 16, 8, 30), (100, 16, 8, 20), (4, 16, 8, 30))]},
        },
    ]
    description = (
        "Joint importance/redundancy scores, global and per-head selection, and the eviction schedule (step = decoded"
        " tokens whose KV is resident)."
    )
    return cases_text("rkv", description, cases)


def segmentation() -> dict:
    tokens = [5, 6, 9, 5, 7, 6, 9, 9, 5, 6, 7, 8, 6, 5, 9, 4]
    delimiter, prompt, least, most = 9, 3, 2, 5
    spans, events, start = [], [], None
    for position, token in enumerate(tokens, prompt):
        start = position if start is None else start
        if token == delimiter or position + 1 - start >= most:
            span = [start, position + 1]
            long_enough = position + 1 - start >= least
            events.append({"close_at": position, "span" if long_enough else "discarded": span})
            spans += [span] if long_enough else []
            start = None
    return {
        "name": "segmentation",
        "params": {
            "delimiter_ids": [delimiter],
            "skipkv_sentence_min_tokens": least,
            "skipkv_sentence_max_tokens": most,
            "prompt_tokens": prompt,
        },
        "inputs": {"generated_ids": tokens},
        "expected": {"spans": spans, "events": events, "open_start": start},
    }


def sentence_redundancy() -> dict:
    hidden = np.array([[3.0, 4.0, 0.0], [0.0, 1.0, 0.0], [3.0, 4.0, 0.25], [0.0, 0.0, 2.0], [3.0, 4.0, -0.25]])
    cosine = unit(hidden) @ unit(hidden).T
    later = np.triu(np.where(cosine >= 0.95, cosine, 0.0), 1)
    return {
        "name": "sentence_redundancy",
        "params": {"skipkv_similarity_threshold": 0.95},
        "inputs": {"sentence_mean_hidden": hidden},
        "expected": {"redundancy": later.max(1)},
    }


def token_redundancy(k: np.ndarray, threshold: float) -> np.ndarray:
    """k [rows, channels] -> softmax of each row's mean similarity, without its latest similar future row."""
    vectors = unit(k, floor=1e-6)
    cosine = vectors @ vectors.T
    np.fill_diagonal(cosine, 0.0)
    cosine[cosine < threshold] = 0.0
    for i, row in enumerate(cosine):
        future = [j for j in range(i + 1, len(row)) if row[j] > 0]
        if future:
            row[future[-1]] = 0.0
    return softmax(cosine.mean(1))


def skipkv() -> str:
    rng = np.random.default_rng(9)
    rows, window, sink, recent, keep, kernel, weight, scale = 14, 2, 1, 3, 4, 3, 0.1, 0.5
    k, q = quarters(rng, 2, rows, 4), quarters(rng, 4, window, 4)
    positions = np.array([0, 1, 2, 3, 5, 6, *range(8, 16)])
    spans, repeats = [[3, 6], [6, 9], [9, 12]], np.array([0.97, 0.0, 0.96])
    penalty = np.zeros(rows)
    for (start, end), repeat in zip(spans, repeats, strict=True):
        penalty[(positions >= start) & (positions < end)] = repeat
    inside = slice(sink, rows - recent)
    votes = importance(q, k, sink, rows - recent, kernel, scale)
    final = joint(votes, redundancy(k)[0][:, inside], weight).mean(0) - penalty[inside]
    protected = {"sink_keep_tokens": sink, "recent_keep_tokens": recent, "decode_keep_tokens": keep}

    def keep_rows(scores: np.ndarray) -> list[int]:
        return [*range(sink), *(i + sink for i in best(scores, keep)), *range(rows - recent, rows)]

    logits = np.einsum("hd,hsd->hs", q[:, -1], np.repeat(k, 2, axis=0)) * scale
    attention = softmax(logits[:, sink:]).max(0)[: rows - recent - sink]
    width = 6
    tokens = token_redundancy(k[:, rows - recent - width : rows - recent].swapaxes(0, 1).reshape(width, -1), 0.8)
    step = attention - penalty[inside]
    step[-width:] -= 0.1 * tokens
    steering = [[count, -1.25 - 0.02 * count, max(-1.3, -1.25 - 0.02 * count)] for count in range(5)]
    cases = [
        segmentation(),
        sentence_redundancy(),
        {
            "name": "window_importance",
            "params": {
                "skipkv_importance": "window",
                **protected,
                "skipkv_observation_tokens": window,
                "skipkv_kernel_size": kernel,
                "skipkv_mix_lambda": weight,
                "skipkv_sentence_score_weight": 1.0,
                "softmax_scale": scale,
            },
            "inputs": {
                "k": k,
                "q_window": q,
                "positions": positions,
                "sentences": spans,
                "sentence_redundancy": repeats,
            },
            "expected": {
                "penalty": penalty,
                "final_score": final,
                "keep_rows": keep_rows(final),
                "gap": gap(final, keep),
            },
        },
        {
            "name": "step_importance_reference",
            "params": {
                "skipkv_importance": "step",
                **protected,
                "skipkv_alpha": 0.1,
                "skipkv_redundancy_window": width,
                "token_similarity_threshold": 0.8,
                "recent_similar_keep": 1,
                "softmax_scale": scale,
            },
            "inputs": {"use": "k, q_window[-1], positions, sentences of window_importance"},
            "expected": {
                "importance": attention,
                "token_redundancy_window": tokens,
                "final_score": step,
                "keep_rows": keep_rows(step),
                "gap": gap(step, keep),
            },
        },
        {
            "name": "steering_alpha",
            "params": {
                "skipkv_steering_alpha": -1.25,
                "skipkv_steering_alpha_increment": -0.02,
                "skipkv_steering_alpha_max": [0.0, -1.3],
            },
            "inputs": {"non_execution_counts": list(range(5))},
            "expected": {"count_unclamped_clamped": steering},
        },
    ]
    what = "Sentence segmentation, sentence redundancy, both importance variants on one layer"
    description = f"{what}, and the steering coefficient."
    return cases_text("skipkv", description, cases)


MAKERS = {"rkv": rkv, "skipkv": skipkv}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKERS.items():
        (folder / f"{name}.json").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
