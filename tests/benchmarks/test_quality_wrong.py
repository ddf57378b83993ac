"""With a real model: methods that are wrong on purpose come out worst, and dense attention solves tasks."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_smoke import run

METHODS = (
    "streamingllm(sink_keep_tokens=32,recent_keep_tokens=224)",
    "snapkv(sink_keep_tokens=32,decode_keep_tokens=160,recent_keep_tokens=64)",
)


@pytest.mark.slow
def test_wrong_methods_come_out_worst(default_model, tmp_path):
    size = ("--contexts", "1400:4", "--continuation", 12)
    found = run("quality", tmp_path, "--model", default_model, *size, "--methods", *METHODS)["lengths"]["1400"]
    kept = {task for task, facts in found["tasks"].items() if facts["dropped"] is None}
    assert {"single", "multi_key", "tool_result", "early_turn"} <= kept
    assert found["variants"]["dense"]["retrieval"][0] > 5 * found["chance"]
    for name in ("random eviction 256", "shuffled positions"):
        verdict = found["controls"][name]
        assert verdict["compared_with"] == (2 if name.endswith("256") else 3)
        assert verdict["kl_clearly_worst"], verdict
        assert verdict["retrieval_worst"], verdict
