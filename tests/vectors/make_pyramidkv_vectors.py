"""Writes the worked examples of budgets that shrink with depth: see `make_vectors`.

python -m tests.vectors.make_pyramidkv_vectors [folder]
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from tests.vectors.make_vectors import HERE, best, cases_text, gap, window_votes


def ratios(layers: int, start: int = 0, high: float = 0.6, least: int | None = None, low: float = 0.01) -> list[float]:
    """1 before `start`, then a line from `high` down to `low` at layer `least`, `low` after it."""
    last = layers - 1 if least is None else least
    line = [high - (high - low) * (i - start) / (last - start) if last > start else low for i in range(layers)]
    return [1.0 if i < start else low if i > last else line[i] for i in range(layers)]


def ratio_budgets(shares: list[float], keep: int, sink: int, recent: int) -> list[int]:
    return [sink + int(keep * share / shares[0]) + recent for share in shares]


def arithmetic_budgets(layers: int, capacity: int, window: int, rows: int, beta: int) -> list[int]:
    """Steps of equal height around `capacity`, the window included."""
    mean = capacity - window
    if rows < capacity or rows < 2 * mean:
        return [min(rows, capacity)] * layers
    low = mean // beta
    high = min(2 * mean - low, rows - window)
    low = 2 * mean - high
    step = (high - low) // max(layers - 1, 1)
    return [high - i * step + window for i in range(layers)]


def pyramidkv() -> str:
    small = {"decode_keep_tokens": 100, "sink_keep_tokens": 4, "recent_keep_tokens": 16}
    four = ratios(4)
    thirty_two = ratio_budgets(ratios(32), 4096, 64, 512)
    six = ratios(6, start=1, least=4)
    cases: list[dict] = [
        {
            "name": "ratio_budgets_4_layers",
            "params": {**small, "pyramidkv_start_ratio": 0.6, "pyramidkv_least_ratio": 0.01},
            "inputs": {"num_kv_layers": 4},
            "expected": {"ratios": four, "budgets": ratio_budgets(four, 100, 4, 16)},
        },
        {
            "name": "ratio_budgets_defaults_32_layers",
            "params": {"all": "defaults"},
            "inputs": {"num_kv_layers": 32},
            "expected": {"budgets": thirty_two, "sum": sum(thirty_two), "mean": sum(thirty_two) / 32},
        },
        {
            "name": "explicit_ratios",
            "params": {"pyramid_layer_ratios": [0.6, 0.01]},
            "inputs": {"num_kv_layers": 2},
            "expected": {"budgets": ratio_budgets([0.6, 0.01], 4096, 64, 512)},
        },
        {
            "name": "start_and_least_layers",
            "params": {
                "decode_keep_tokens": 60,
                "sink_keep_tokens": 2,
                "recent_keep_tokens": 4,
                "pyramidkv_start_layer": 1,
                "pyramidkv_least_layer": 4,
            },
            "inputs": {"num_kv_layers": 6},
            "expected": {"ratios": six, "budgets": ratio_budgets(six, 60, 2, 4)},
        },
    ]
    cases += [
        {
            "name": f"arithmetic_budgets_n{rows}",
            "params": {
                "pyramid_budget_mode": "arithmetic",
                "capacity": 128,
                "observation_window_size": 8,
                "pyramidkv_beta": 20,
            },
            "inputs": {"num_kv_layers": 8, "n": rows},
            "expected": {"budgets": arithmetic_budgets(8, 128, 8, rows, 20)},
        }
        for rows in (100, 150, 500, 5000)
    ]
    rng = np.random.default_rng(7)
    q, k = (rng.integers(-6, 7, size=shape) / 4.0 for shape in ((4, 3, 4), (2, 14, 4)))
    votes = window_votes(q, k, 1, 12, "probability", 0.5, "candidates").max(0)
    layers = [
        {
            "budget": budget,
            "keep": [0, *(i + 1 for i in best(votes, budget - 3)), 12, 13],
            "gap": gap(votes, budget - 3),
        }
        for budget in (9, 6, 3)
    ]
    cases.append(
        {
            "name": "same_score_three_layer_budgets",
            "params": {
                "sink_keep_tokens": 1,
                "recent_keep_tokens": 2,
                "observation_window_size": 3,
                "sparse_prefill_score_mode": "probability",
                "softmax_scale": 0.5,
            },
            "inputs": {"q_window": q, "k": k},
            "expected": {"candidate_score": votes, "layers": layers},
        }
    )
    description = "Per-layer budgets of both schedules and one selection at three budgets."
    return cases_text("pyramidkv", description, cases)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    (folder / "pyramidkv.json").write_text(pyramidkv(), encoding="utf-8")
