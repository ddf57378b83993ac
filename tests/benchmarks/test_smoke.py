"""Every benchmark runs to its end on random weights, at a size that says nothing about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def run(name: str, tmp_path, *arguments: object) -> dict:
    """Runs a benchmark as a user does; returns the record it wrote."""
    path = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments), "--json", str(path)]
    env = {**os.environ, "SPARSEJAX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record["manifest"]["benchmark"] == name
    return record["result"]


@pytest.mark.slow
def test_cpu_decode(tiny, tmp_path):
    options = ("--load-format", "dummy", "--prompt-tokens", 16, "--new-tokens", 8, "--requests", 2, "--rounds", 1)
    found = run("cpu_decode", tmp_path, "--model", tiny, *options)
    assert found["many_over_one"]["decode"]["ratio"] > 0
    assert found["one"]["tokens_per_s"]["median"] > 0


@pytest.mark.slow
def test_decode_parts(tiny, tmp_path):
    options = ("--load-format", "dummy", "--batches", 1, 2, "--context", 40, "--rounds", 2)
    found = run("decode_parts", tmp_path, "--model", tiny, *options)
    assert set(found) == {"1", "2"}
    assert found["2"]["whole"]["samples"] == 2


@pytest.mark.slow
def test_decode_step(tmp_path):
    plot = tmp_path / "steps.svg"
    only = ("quest 16 B=3 L=1K", "dense B=3 L=1K")
    found = run("decode_step", tmp_path, "--model", "tiny", "--rounds", 1, "--kernels", "--plot", plot, "--only", *only)
    assert set(found["cases"]) == set(only)
    quest = found["cases"]["quest 16 B=3 L=1K"]
    assert quest["faster_than_dense"]["ratio"] > 0
    assert quest["floor_bytes"]["summary_bytes"] > 0
    assert quest["read_tokens"] < quest["resident_tokens"] == 1024
    assert plot.read_text().startswith("<svg")


@pytest.mark.slow
def test_prefill_step(tmp_path):
    size = ("--model", "tiny", "--contexts", 32768, 57344, "--chunks", 8192, 16384, "--rounds", 2, "--kernels")
    found = run("prefill_step", tmp_path, *size, "--plot", tmp_path / "prefill.svg", "--only", "256 *", "448 in 128")
    assert set(found["cases"]) == {"256 in 64", "256 in 128", "448 in 128"}
    for case in found["cases"].values():
        assert case["seconds"]["samples"] == 2
        assert case["over_floor"] == pytest.approx(case["seconds"]["median"] / case["floor_s"], rel=1e-3)
        assert 0 < case["host_s"]["median"] <= case["seconds"]["median"]
    flops = [found["cases"][name]["floor_flops"]["attention_flops"] for name in ("256 in 64", "448 in 128")]
    assert flops[1] / flops[0] == pytest.approx(448 * 449 / (256 * 257), rel=1e-3)


@pytest.mark.slow
def test_capacity(tmp_path):
    only = ("dense L=1K", "snapkv 64 L=1K", "streamingllm 64 L=1K", "fp8_kv L=1K")
    size = ("--model", "tiny", "--memory-gib", 0.02, "--rounds", 1, "--prove")
    found = run("capacity", tmp_path, *size, "--plot", tmp_path / "batches.svg", "--only", *only)
    assert set(found["cases"]) == set(only)
    dense, snapkv, streamingllm, fp8 = (found["cases"][name] for name in only)
    assert dense["batch"] < fp8["batch"] < streamingllm["batch"]
    assert 1 <= dense["batch"] < snapkv["batch"]
    assert snapkv["over_dense"]["batch"] == pytest.approx(snapkv["batch"] / dense["batch"], rel=1e-3)
    for case in (dense, snapkv):
        assert case["tokens_per_s"] > 0
        assert case["memory"]["pages_needed"] <= case["memory"]["pages"]
        assert case["one_more"]["pages_needed"] > case["one_more"]["pages"]
        assert case["one_more_allocates"] is True  # a budget below what the machine has
    assert (snapkv["resident_tokens"], dense["resident_tokens"]) == (64, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [(), ("--prefill", "--chunk", 64)], ids=["filled", "prefilled"])
def test_decode_window(tmp_path, prefill):
    size = ("--model", "tiny", "--contexts", 32768, "--batches", 2, "--keep", 8192, "--read", 4096)
    steps = ("--warm-up", 3, "--steps", 40, "--rounds", 2, "--plot", tmp_path / "window.svg")
    found = run("decode_window", tmp_path, *size, *steps, *prefill)["cases"]
    names = ("dense", "streamingllm 64", "snapkv 64", "quest 32", "fp8_kv")
    assert set(found) == {f"{name} B=2 L=256" for name in names}
    for name, case in found.items():
        assert case["valid"], (name, case["invalid_because"])
        assert case["tokens_per_s"] == pytest.approx(2 / case["step_s"], rel=1e-3)
        assert [window["delivered"] for window in case["windows"]] == [80, 80]
        assert case["share_of_floor"]["measured"] > 0
    dense, streaming, snapkv, quest, _ = found.values()
    assert streaming["windows"][0]["calls"]["maintain"] >= 2, "no eviction in the window"
    assert snapkv["resident_tokens"] < streaming["resident_tokens"] + 40 < dense["resident_tokens"]
    assert quest["read_tokens"] < quest["resident_tokens"]
    assert snapkv["over_dense"] == pytest.approx(snapkv["tokens_per_s"] / dense["tokens_per_s"], rel=1e-3)


@pytest.mark.slow
def test_sparse_decode(tiny, tmp_path):
    size = ("--context", 160, "--batch", 2, "--budget", 64, "--steps", 3, "--rounds", 1)
    found = run("sparse_decode", tmp_path, "--model", tiny, "--load-format", "dummy", *size)
    dense, snapkv, quest = found["steps"].values()
    assert (dense["resident_tokens"], snapkv["resident_tokens"], quest["resident_tokens"]) == (160, 64, 160)
    assert quest["read_bytes"] < dense["read_bytes"]
    dense, snapkv, quest = (pages["prompts"][0] for pages in found["pages"].values())
    assert dense["evicted"] == quest["evicted"] == 0
    assert snapkv["evicted"] > 0
    # Pages of 16 rows in 3 layers and 2 heads; a few answer tokens are in the cache too.
    assert dense["decoding"] == quest["decoding"] == 6 * 11
    assert snapkv["decoding"] == 6 * 5


@pytest.mark.slow
def test_sparse_attention(tmp_path):
    size = ("--context", 512, "--read", 128, "--gather-context", 256, "--batches", 2, "--heads", 2, "--dim", 64)
    plot = tmp_path / "times.svg"
    found = run("sparse_attention", tmp_path, *size, "--layers", 2, "--rounds", 2, "--xla", "--plot", plot)
    sides = found["sparse"]["B=2 128 of 512 page 64"]
    assert set(sides) >= {"scores", "selection", "attention", "all three", "dense", "quiet"}
    assert sides["all three"]["bytes"] == sides["scores"]["bytes"] + sides["attention"]["bytes"]
    # Keys and values in bfloat16, 2 heads of 64; the bounds of a page are as large as one row.
    assert sides["attention"]["bytes"] == 2 * 128 * 2 * 64 * 4
    assert sides["scores"]["bytes"] == 2 * 8 * 2 * 64 * 4
    assert sides["dense"]["time_over_all_three"]["ratio"] > 0
    assert set(found["selection"]) == {"8 pages x 2 x 2, 1", "32 pages x 2 x 2, 7", "256 pages x 2 x 2, 127"}
    [gather] = found["gather"].values()
    assert gather["pages"]["bytes"] == gather["tokens"]["bytes"]
    assert plot.read_text("utf-8").count("all three") == 2


@pytest.mark.slow
def test_eviction_cost(tmp_path):
    size = ("--context", 512, "--keep", 128, "--heads", 2, "--dim", 64, "--layers", 2, "--page", 16)
    found = run("eviction_cost", tmp_path, *size, "--rounds", 2, "--xla", "--no-device-times")
    for name in ("auto", "xla"):
        choosing, moving = found[name]["choosing"], found[name]["moving"]
        assert set(choosing) == {"lse", "mass", "logits", "choice", "quiet"}
        assert choosing["logits"]["bytes"] == 512 * 2 * 64 * 2
        # Keys, values and positions of 2 heads, read and written.
        assert moving["move"]["bytes"] == 2 * 128 * 2 * (64 * 4 + 4)
        both = choosing["lse"]["bytes"] + choosing["mass"]["bytes"] + moving["move"]["bytes"]
        assert moving["compaction, probability"]["bytes"] == both
        assert found[name]["all_layers_logits_s"] > 0


@pytest.mark.slow
def test_eviction_share(tmp_path):
    methods = (
        "snapkv(sink_keep_tokens=1,decode_keep_tokens=32,recent_keep_tokens=4,observation_window_size=2)",
        "streamingllm(sink_keep_tokens=4,recent_keep_tokens=16)+quest(quest_chunk_size=16,quest_skip_layers=0)",
        "streamingllm(sink_keep_tokens=0,recent_keep_tokens=16)+fp8_kv",
    )
    size = ("--model", "tiny", "--batches", 2, "--layers", 1, "--rounds", 2, "--kernels")
    found = run("eviction_share", tmp_path, *size, "--methods", *methods)
    assert found["left_out"] == {"streamingllm+fp8_kv": "it is stored as fp8_kv"}
    assert not found["failed"]
    snapkv, streaming = found["methods"].values()
    assert set(found["methods"]) == {"snapkv", "streamingllm+quest"}
    assert snapkv["histories"] == [32 * i for i in range(8)]
    assert set(snapkv["chunk_extra_s"]) == {"0", "224"}
    assert set(snapkv["compactions"]) == {"prompt"}
    assert set(streaming["compactions"]) == {"prompt", "token"}
    assert (snapkv["resident_tokens"], streaming["resident_tokens"]) == (37, 20)
    prefill_s = found["dense"]["prefill_s"]["median"]
    cost = snapkv["prompt_extra_s"] + snapkv["compactions"]["prompt"]["seconds"]["median"]
    assert snapkv["prefill_share"] == pytest.approx(cost / prefill_s, rel=1e-3, abs=1e-5)
    step, token = streaming["decode"]["2"], streaming["compactions"]["token"]
    cost = step["extra_s"]["median"] + 2 * token["number"] * token["seconds"]["median"]
    assert step["share"] == pytest.approx(cost / step["dense_step_s"]["median"], rel=1e-3, abs=1e-5)
    assert token["number"] == pytest.approx(1 / 20)


@pytest.mark.slow
def test_sampling(tmp_path):
    size = ("--batches", 2, "--vocab", 500, "--calls", 2, "--rounds", 2, "--no-device-times")
    found = run("sampling", tmp_path, *size)["cases"]
    assert set(found) == {f"B=2 {case}" for case in ("greedy", "temperature", "top-k + top-p", "top-p", "min-p")}
    both = found["B=2 top-k + top-p"]
    assert set(both) == {"bytes", "calls", "quiet", "ours", "ours, threshold", "xla", "xla, threshold"}
    assert both["bytes"] == 2 * 500 * 4
    assert both["xla, threshold"]["time_over_ours"]["ratio"] > 0


@pytest.mark.slow
def test_perplexity(tiny, tmp_path):
    size = ("--windows", 2, "--window-tokens", 64)
    found = run("perplexity", tmp_path, "--model", tiny, "--load-format", "dummy", *size, "--budgets", 32)
    dense = found["dense"]
    assert dense["perplexity"] == pytest.approx(dense["perplexity_token_by_token"], rel=1e-4)
    assert dense["resident_bytes"] > dense["read_bytes"] > 0
    for name, method in found["methods"].items():
        assert method["read_share"] < 1, name
        assert 0 < method["perplexity"] < 2 * dense["perplexity"], name


@pytest.mark.slow
def test_quality(tmp_path):
    found = run("quality", tmp_path, "--quick")["lengths"]["1400"]
    assert found["contexts"] == 2
    for name, facts in found["variants"].items():
        assert "invalid" not in facts, name
        value, low, high = facts["kl_nats"]
        assert low <= value <= high, name
    assert found["variants"]["random eviction 128"]["kl_nats"][0] > found["variants"]["fp8_kv"]["kl_nats"][0]
    page = (tmp_path / "quality.md").read_text()
    assert "| snapkv 128 |" in page
    assert (tmp_path / "quality_divergence_resident.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_quality_of_local_tasks(tmp_path):
    item = {"context": "The sun rises in the", "choices": [" east", " west and north"], "gold": 0}
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "sky.jsonl").write_text("\n".join([json.dumps(item)] * 3))
    options = ("--quick", "--tasks", folder, "--limit", 2, "--methods", "fp8_kv")
    found = run("quality", tmp_path, *options)["local_tasks"]["sky"]
    assert (found["items"], found["chance"]) == (2, 0.5)
    assert set(found["variants"]) == {"dense", "fp8_kv"}


@pytest.mark.slow
def test_warm_up(tmp_path):
    size = ("--model", "tiny-qwen3", "--max-model-len", 64, "--max-num-seqs", 1, "--workers", 2)
    found = run("warm_up", tmp_path, *size, "--only", "prefill*", "sample*")
    labels = {"prefill[dense rows=1 tokens=32]", "prefill[dense rows=1 tokens=64]", "sample[rows=1 mode=None]"}
    for start in (found["cold"], found["warm"]):
        assert set(start["programs"]) == labels
        assert all(entry["compile_s"] > 0 for entry in start["programs"].values())
    cold, warm = (start["programs"]["sample[rows=1 mode=None]"]["compile_s"] for start in found.values())
    assert warm < cold, "nothing was kept"


@pytest.mark.slow
def test_start_time(tmp_path):
    options = ("--warm-starts", 1, "--import-repeats", 1, "--", "--load-format", "dummy", "--max-model-len", 64)
    path = tmp_path / "start_time.json"
    command = [sys.executable, "-m", "benchmarks.start_time", "--json", str(path), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["result"]
    assert found["warm"]["answer_s"]["median"] > 0
    assert 0 < found["cold"]["listening_s"] < found["cold"]["answer_s"]


@pytest.mark.slow
def test_chain_resume(tmp_path):
    found = run("chain_resume", tmp_path, "--model", "tiny", "--rounds", 1, "--suffix", 4)
    assert found["tiers"].keys() == {"device", "host"}
    assert all(entry["prefill_over_resume"] > 1 for entry in found["tiers"].values())
    assert found["bytes"] > 0
