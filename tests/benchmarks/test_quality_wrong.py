"""With a real model: methods that are wrong on purpose come out worst, and dense attention solves tasks."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_smoke import run


@pytest.mark.slow
def test_wrong_methods_come_out_worst(default_model, tmp_path):
    size = ("--contexts", "1500:4", "--continuation", 16, "--budgets", 256)
    found = run("quality", tmp_path, "--model", default_model, *size)["lengths"]["1500"]
    kept = {task: facts for task, facts in found["tasks"].items() if facts["dropped"] is None}
    assert {"single", "multi_key", "tool_result", "early_turn"} <= set(kept)
    retrieval = {name: facts["retrieval"][0] for name, facts in found["variants"].items()}
    assert retrieval["dense"] > 5 * found["chance"]
    for name in ("random eviction 256", "shuffled positions"):
        verdict = found["controls"][name]
        assert verdict["kl_clearly_worst"], verdict
        assert verdict["retrieval_worst"], verdict
