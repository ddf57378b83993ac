"""Writes the worked examples beside this file: NumPy in float64, from the formulas, sharing no code with the engine.

    python tests/vectors/make_vectors.py [folder]

Every tensor lies on a dyadic grid, so it is exact in bfloat16 and float32. `gap` is the distance between the scores of
the last kept and the first dropped row: far more than float32 can lose, so what is kept must match exactly.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent


def plain(value: Any, number) -> Any:
    """The same tree in JSON types; `number` rounds floats."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(item, number) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item, number) for item in value]
    if isinstance(value, float):
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return number(value)
    return value


def cases_text(method: str, description: str, cases: list[dict]) -> str:
    document = {"method": method, "description": description, "cases": cases}
    return json.dumps(plain(document, lambda x: round(x, 6)), indent=1) + "\n"


def compact_text(document: dict) -> str:
    return json.dumps(plain(document, lambda x: float(f"{x:.12g}")), separators=(",", ":")) + "\n"


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis; a row of -inf gives zeros."""
    peak = x.max(-1, keepdims=True)
    mass = np.exp(x - np.where(np.isfinite(peak), peak, 0.0))
    total = mass.sum(-1, keepdims=True)
    return mass / np.where(total > 0, total, 1.0)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """q [q_heads, dim], k and v [rows, kv_heads, dim] -> [q_heads, dim]."""
    group = q.shape[0] // k.shape[1]
    return np.stack([softmax(k[:, h // group] @ q[h] * scale) @ v[:, h // group] for h in range(q.shape[0])])


def best(scores: np.ndarray, count: int) -> list[int]:
    """Indices of the largest finite scores, ties to the lower index, ascending."""
    finite = [i for i in range(len(scores)) if scores[i] > -np.inf]
    return sorted(sorted(finite, key=lambda i: (-(scores[i] + 0.0), i))[:count])


def gap(scores: np.ndarray, count: int) -> float:
    ranked = np.sort(scores)[::-1]
    return float(ranked[count - 1] - ranked[count]) if 0 < count < len(ranked) else math.inf


# Sinks and recent rows


def sinks_and_recent(length: int, sink: int, recent: int) -> list[int]:
    first = min(sink, length)
    return [*range(first), *range(max(first, length - recent), length)]


def streamingllm() -> str:
    knobs = {"sink_keep_tokens": 2, "recent_keep_tokens": 4}
    cases = [
        {
            "name": name,
            "params": params,
            "inputs": {"n": n},
            "expected": {"keep": sinks_and_recent(n, *params.values())},
        }
        for name, params, n in (
            ("prompt_compaction", knobs, 12),
            ("shorter_than_budget", knobs, 6),
            ("regions_overlap", {"sink_keep_tokens": 3, "recent_keep_tokens": 4}, 5),
        )
    ]
    for ratio in (2.0, 1.0):
        prompt, budget = 9, 6
        positions = [list(range(prompt))[i] for i in sinks_and_recent(prompt, 2, 4)]
        trace: list[dict] = [{"step": 0, "length": budget, "positions": positions}]
        for step in range(1, 14):
            positions = [*positions, prompt + step - 1]
            read = len(positions)
            if read > budget and read >= int(ratio * budget):
                positions = [positions[i] for i in sinks_and_recent(read, 2, 4)]
            trace.append({"step": step, "rows_read": read, "length": len(positions), "positions": positions})
        cases.append(
            {
                "name": f"decode_trace_ratio_{ratio}",
                "params": {**knobs, "streamingllm_decode_trigger_ratio": ratio},
                "inputs": {"prompt_tokens": prompt, "decode_steps": 13},
                "expected": {"trace": trace},
            }
        )
    cases.append(
        {
            "name": "reindex_rotary_positions",
            "params": {**knobs, "streamingllm_position_mode": "reindex", "streamingllm_decode_trigger_ratio": 1.0},
            "inputs": {"retained_positions_before_append": [0, 1, 20, 21, 22, 23], "new_token_position": 24},
            "expected": {"key_rotary_positions": list(range(7)), "query_rotary_position": 6},
        }
    )
    description = (
        "Row indices kept by sink+recent retention, and two decode traces (positions are original logical positions)."
    )
    return cases_text("streamingllm", description, cases)


# Votes of an observation window


def window_votes(q, k, first: int, end: int, mode: str, scale: float, domain: str) -> np.ndarray:
    """q [q_heads, window, dim] are the last queries of k [kv_heads, rows, dim] -> [q_heads, candidates]."""
    window, rows = q.shape[1], k.shape[1]
    logits = np.einsum("hwd,hsd->hws", q, np.repeat(k, q.shape[0] // k.shape[0], axis=0))
    row = np.arange(rows)
    seen = np.broadcast_to(row[None, :] <= np.arange(rows - window, rows)[:, None], logits.shape)
    candidate = (row >= first) & (row < end)
    if mode == "logits":
        return np.where(seen, logits, -np.inf).max(1)[:, first:end]
    counted = seen if domain == "all" else seen & candidate
    mass = softmax(np.where(counted, logits * scale, -np.inf))
    return np.where(counted, mass, 0.0).mean(1)[:, first:end]


def pooled(x: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    half = kernel // 2
    edge = -np.inf if kind == "max" else 0.0
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], constant_values=edge)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return windows.max(-1) if kind == "max" else windows.sum(-1) / kernel


def snapkv() -> str:
    rng = np.random.default_rng(3)
    window, rows, sink, recent, keep, scale = 3, 12, 1, 3, 3, 0.5
    q, k = (rng.integers(-6, 7, size=shape) / 4.0 for shape in ((4, window, 4), (2, rows, 4)))
    inputs = {"q_window": q, "k": k}
    cases: list[dict] = []
    for mode, domain, kernel, kind in (
        ("logits", "candidates", 1, "max"),
        ("probability", "candidates", 1, "max"),
        ("probability", "candidates", 3, "max"),
        ("probability", "all", 3, "avg"),
    ):
        votes = window_votes(q, k, sink, rows - recent, mode, scale, domain).max(0)
        smooth = pooled(votes, kernel, kind)
        kept = [*range(sink), *(i + sink for i in best(smooth, keep)), *range(rows - recent, rows)]
        cases.append(
            {
                "name": f"shared_{mode}_{domain}_{kind}{kernel}",
                "params": {
                    "sink_keep_tokens": sink,
                    "recent_keep_tokens": recent,
                    "decode_keep_tokens": keep,
                    "observation_window_size": window,
                    "sparse_prefill_score_mode": mode,
                    "pool_kernel_size": kernel,
                    "pool_type": kind,
                    "softmax_domain": domain,
                    "softmax_scale": scale,
                },
                "inputs": inputs,
                "expected": {"candidate_score": votes, "pooled": smooth, "keep": kept, "gap": gap(smooth, keep)},
            }
        )
    votes = pooled(window_votes(q, k, 0, rows - window, "probability", scale, "all"), 3, "avg")
    votes = votes.reshape(2, 2, -1).mean(1)
    cases.append(
        {
            "name": "per_kv_head_avg3_paper_style",
            "params": {
                "sink_keep_tokens": 0,
                "recent_keep_tokens": window,
                "decode_keep_tokens": 4,
                "observation_window_size": window,
                "sparse_prefill_score_mode": "probability",
                "pool_kernel_size": 3,
                "pool_type": "avg",
                "softmax_domain": "all",
                "head_mode": "per_kv_head",
                "softmax_scale": scale,
            },
            "inputs": inputs,
            "expected": {
                "group_mean_score": votes,
                "keep_per_kv_head": [[*best(head, 4), *range(rows - window, rows)] for head in votes],
                "gap": min(gap(head, 4) for head in votes),
            },
        }
    )
    votes = np.array([1.0, 2.0, 9.0, 3.0, 8.0, 4.0])
    cases.append(
        {
            "name": "score_only",
            "params": {"sink_keep_tokens": 1, "recent_keep_tokens": 1, "decode_keep_tokens": 2, "pool_kernel_size": 1},
            "inputs": {"n": 8, "candidate_score": votes},
            "expected": {"keep": [0, *(i + 1 for i in best(votes, 2)), 7], "gap": gap(votes, 2)},
        }
    )
    description = (
        "Observation-window scores and kept rows for one layer; window queries are the last 3 rows of a 12-row prompt."
    )
    return cases_text("snapkv", description, cases)


# Page bounds


def fine_grid(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal values rounded to 1/32."""
    return np.round(np.clip(rng.standard_normal(shape) * scale, -3.9, 3.9) * 32) / 32


def quest() -> str:
    rng = np.random.default_rng(11)
    page_size, heads, kv_heads, dim, num_pages = 4, 4, 2, 4, 12
    group, scale, budget = heads // kv_heads, dim**-0.5, 13
    lengths = [23, 9]
    tables = [[7, 2, 9, 0, 5, 11], [3, 8, 1, -1, -1, -1]]
    k_pages, v_pages = np.zeros((2, num_pages, page_size, kv_heads, dim))
    rows = []
    for table, length in zip(tables, lengths, strict=True):
        k, v = fine_grid(rng, length, kv_heads, dim), fine_grid(rng, length, kv_heads, dim)
        if not rows:
            k[12:16] = k[4:8]  # pages 1 and 3 tie
        for t in range(length):
            k_pages[table[t // page_size], t % page_size] = k[t]
            v_pages[table[t // page_size], t % page_size] = v[t]
        rows.append((k, v))
    query = fine_grid(rng, 2, heads, dim)
    page_max, page_min = np.zeros((2, num_pages, kv_heads, dim))
    for table, (k, _) in zip(tables, rows, strict=True):
        for column in range(-(-len(k) // page_size)):
            block = k[column * page_size : (column + 1) * page_size]
            page_max[table[column]], page_min[table[column]] = block.max(0), block.min(0)
    num_scored = max(3, budget // page_size) - 1
    expected = []
    for r, (table, (k, v)) in enumerate(zip(tables, rows, strict=True)):
        columns = -(-len(k) // page_size)
        spans = [range(c * page_size, min(len(k), (c + 1) * page_size)) for c in range(columns)]
        scores = np.zeros((heads, columns))
        for h in range(heads):
            for c in range(columns):
                low, high = page_min[table[c], h // group], page_max[table[c], h // group]
                scores[h, c] = np.maximum(query[r, h] * low, query[r, h] * high).sum()
                assert scores[h, c] >= max(query[r, h] @ k[t, h // group] for t in spans[c]) - 1e-12  # it is a bound
        whole = len(k) <= budget or columns <= num_scored + 1
        row: dict[str, Any] = {"num_pages": columns, "query_head_page_scores": scores, "dense_fallback": whole}
        for scope in ("shared", "kv_head"):
            candidates = scores[:, : columns - 1].reshape(1 if scope == "shared" else kv_heads, -1, columns - 1).max(1)
            chosen = [list(range(columns)) if whole else [*best(head, num_scored), columns - 1] for head in candidates]
            read = [[t for c in columns_of_head for t in spans[c]] for columns_of_head in chosen]
            output = np.concatenate(
                [
                    attend(query[r, h * group : (h + 1) * group], k[tokens, h : h + 1], v[tokens, h : h + 1], scale)
                    for h, tokens in enumerate(read * (kv_heads // len(read)))
                ]
            )
            row[scope] = {
                "scores_excluding_last_page": candidates,
                "selected_logical_pages": chosen,
                "selected_physical_pages": [[table[c] for c in head] for head in chosen],
                "view_tokens": [len(tokens) for tokens in read],
                "output": output,
            }
        row["dense_output"] = attend(query[r], k, v, scale)
        expected.append(row)
    ties = [
        {"scores": scores, "k": count, "selected": best(np.array(scores), count)}
        for scores, count in (
            ([1.0, 3.0, 3.0, -0.0, 0.0, 3.0], 2),
            ([-0.0, 0.0, -1.0], 1),
            ([2.0, -np.inf, 2.0, -np.inf], 3),
        )
    ]
    new_key = fine_grid(rng, kv_heads, dim)
    page = tables[1][2]
    return compact_text(
        {
            "method": "quest",
            "tolerance": {"rtol": 1e-5, "atol": 1e-5},
            "conventions": "page_max/page_min: [pages,Hkv,D] of post-RoPE keys over valid slots only; last page always"
            " kept; ties to lower logical page; table entries -1 are unused",
            "inputs": {
                "page_size": page_size,
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": dim,
                "softmax_scale": scale,
                "context_lens": lengths,
                "page_table": tables,
                "k_pages": k_pages,
                "v_pages": v_pages,
                "query": query,
                "token_budget": budget,
                "page_budget_including_last": num_scored + 1,
            },
            "expected": {"page_max": page_max, "page_min": page_min, "rows": expected},
            "tie_cases": ties,
            "append_case": {
                "row": 1,
                "position": 9,
                "physical_page": page,
                "new_key": new_key,
                "page_max_after": np.maximum(page_max[page], new_key),
                "page_min_after": np.minimum(page_min[page], new_key),
                "after_free_and_reuse_at_slot0": {"page_max": new_key, "page_min": new_key},
            },
        }
    )


# 8-bit floats


def e4m3_values() -> np.ndarray:
    """The value of each non-negative code 0..0x7E (0x7F is NaN)."""
    code = np.arange(0x7F)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """Saturating, round to nearest even."""
    values = e4m3_values()
    size = np.abs(np.clip(x, -448, 448))
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    below = above - 1
    down, up = size - values[below], values[above] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return code | np.where(np.signbit(x), 0x80, 0)


def e4m3_decoded(codes: np.ndarray) -> np.ndarray:
    return np.append(e4m3_values(), np.nan)[codes & 0x7F] * np.where(codes & 0x80, -1.0, 1.0)


def fp8_kv() -> str:
    rng = np.random.default_rng(18)
    heads, kv_heads, dim, rows = 4, 2, 4, 7
    scale = dim**-0.5
    key, value = fine_grid(rng, rows, kv_heads, dim, scale=1.5), fine_grid(rng, rows, kv_heads, dim)
    query = fine_grid(rng, heads, dim)
    value[3, 1] = 0.0
    scalars = [0.0, -0.0, 1.0, 447.0, 448.0, 460.0, 1e6, -1e6, 2.0**-6, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10]
    scalars += [0.0625, 0.3, -0.7, 17.0, 18.0, 19.0]
    codes = e4m3_codes(np.array(scalars))
    ones = np.ones((rows, kv_heads))
    key_scale, value_scale = (np.abs(x).max() / 448 for x in (key, value))
    dynamic = [np.maximum(np.abs(x).max(-1) / 448, 1e-30) for x in (key, value)]
    policies = {}
    for name, k_scale, v_scale in (
        ("static_per_layer", ones * key_scale, ones * value_scale),
        ("static_clipping", ones * (key_scale * 0.5), ones * value_scale),
        ("unit", ones, ones),
        ("dynamic_token_head", *dynamic),
    ):
        k_codes, v_codes = e4m3_codes(key / k_scale[..., None]), e4m3_codes(value / v_scale[..., None])
        k, v = e4m3_decoded(k_codes) * k_scale[..., None], e4m3_decoded(v_codes) * v_scale[..., None]
        policies[name] = {
            "key_scale": k_scale,
            "value_scale": v_scale,
            "key_codes": k_codes,
            "value_codes": v_codes,
            "key_dequant": k,
            "value_dequant": v,
            "output": attend(query, k, v, scale),
        }
    return compact_text(
        {
            "method": "fp8_kv",
            "tolerance": {"rtol": 1e-5, "atol": 1e-5, "codes": "exact"},
            "conventions": "stored = e4m3fn(clip(x/scale, +-448)), round to nearest even; dequant = stored*scale; no"
            " infinities, 0x7F/0xFF are NaN; clip BEFORE the cast because an unclipped cast above 464 gives NaN",
            "inputs": {
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": dim,
                "softmax_scale": scale,
                "key": key,
                "value": value,
                "query": query,
            },
            "expected": {
                "scalar_inputs": scalars,
                "scalar_codes": codes,
                "scalar_values": e4m3_decoded(codes),
                "nonnegative_code_values": e4m3_values(),
                "policies": policies,
                "dense_output": attend(query, key, value, scale),
            },
        }
    )


MAKERS = {"streamingllm": streamingllm, "snapkv": snapkv, "quest": quest, "fp8_kv": fp8_kv}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKERS.items():
        (folder / f"{name}.json").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
