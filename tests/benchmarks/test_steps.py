"""Floors, traces and plots of the step benchmarks, on inputs made by hand."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bars, capacity, decode_step, decode_window, filled_state, kernels, prefill_step, step_timing
from sparsejax import registry
from sparsejax.models.load import dummy

# Two streams; times in picoseconds after the line's timestamp in nanoseconds.
TRACE = """
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 duration_ps: 5000 } }
  event_metadata { key: 1 value { id: 1 name: "call" } } }
planes { name: "/device:GPU:1" lines { name: "Stream #9" events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "other_device" } } }
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #7(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 stats { metadata_id: 1 str_value: "custom-call.3.0" }
      stats { metadata_id: 2 str_value: "regs:32 dynamic_shared:0 grid:96,1,1 block:128,1,1 occ_pct:100" } }
    events { metadata_id: 2 offset_ps: 10000000 duration_ps: 10000000 }
    events { metadata_id: 3 offset_ps: 23000000 duration_ps: 7000000 }
  }
  lines { name: "Stream #8(MemcpyD2H)" timestamp_ns: 1000
    events { metadata_id: 4 offset_ps: 25000000 duration_ps: 2000000 }
  }
  lines { name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 1 duration_ps: 30000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion_1" } }
  event_metadata { key: 3 value { id: 3 name: "loop_add_fusion_12" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2H" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "kernel_details" } }
}
"""


@pytest.fixture
def trace(tmp_path):
    from jax.profiler import ProfileData

    folder = tmp_path / "plugins" / "profile" / "today"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(TRACE))
    return tmp_path


def test_kernels_are_those_of_the_first_gpus_streams(trace):
    found, planes = kernels.device_kernels(kernels.load(trace))
    assert [kernel.name for kernel in found] == ["gemm", "loop_add_fusion_1", "loop_add_fusion_12", "MemcpyD2H"]
    assert found[0].operation == "custom-call.3.0"
    assert found[1].end_ns - found[0].start_ns == pytest.approx(20000)
    assert "/host:CPU" in planes


def test_kernels_add_up_to_a_step(trace):
    report = kernels.analyse(kernels.device_kernels(kernels.load(trace))[0], 1)
    first, second, third = report.groups
    assert (first.name, first.count, first.seconds) == ("loop_add_fusion", 2, pytest.approx(17e-6))
    assert (second.name, second.operations, second.count) == ("gemm [96,1,1]", ("custom-call",), 1)
    assert (third.name, third.seconds) == ("MemcpyD2H", pytest.approx(2e-6))
    # The copy runs beside a kernel: 29 us of work in 27 us, of which 3 us are a gap.
    assert report.sum_s == pytest.approx(29e-6)
    assert report.busy_s == pytest.approx(27e-6)
    assert report.span_s == pytest.approx(30e-6)
    (gap,) = report.gaps
    assert (gap.before, gap.after, gap.count) == ("loop_add_fusion", "loop_add_fusion", 1)
    assert gap.seconds == pytest.approx(3e-6)
    assert report.gap_sizes == [(5.0, pytest.approx(3e-6), 1)]
    shown = kernels.text(report, most=1)
    assert "2 more" in shown
    assert "span 30.0, busy 27.0, idle 3.0" in shown
    assert kernels.facts(report)["num_kernels"] == 4


def test_the_first_of_equal_steps_is_left_out():
    twice = [kernels.Kernel("a", 0, 100), kernels.Kernel("b", 900, 1000), kernels.Kernel("a", 2000, 2100)]
    twice.append(kernels.Kernel("b", 2100, 2200))
    kept, steps = kernels.without_first_step(twice, 2)
    assert kernels.analyse(kept, steps).span_s == pytest.approx(200e-9)
    assert kernels.without_first_step(twice[:3], 2) == (twice[:3], 2)


def test_families_drop_only_trailing_numbers():
    names = ("fusion.3.1", "loop_add_fusion_12", "nvjet_tst_64x8_2x1_v_bz_TNT", "input_reduce_fusion", "gemm_16_7")
    assert [kernels.family(name) for name in names] == [
        "fusion",
        "loop_add_fusion",
        "nvjet_tst_64x8_2x1_v_bz_TNT",
        "input_reduce_fusion",
        "gemm",
    ]


def test_a_trace_without_a_gpu_says_so(tmp_path):
    from jax.profiler import ProfileData

    file = tmp_path / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace('planes { name: "/host:CPU" }'))
    report, text = kernels.report_of(file, 1)
    assert report is None
    assert "/host:CPU" in text
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no"):
        kernels.load(tmp_path / "empty")


def test_the_floor_of_the_8b_shape():
    spec = dummy.dummy_spec("qwen3-8b", "bfloat16")
    geometry = spec.geometry(64, 131072 + 64)
    dense, storage = registry.resolve("dense")
    found = step_timing.floor(spec, geometry, dense, storage, 5, 131072)
    # 8.19e9 parameters, of which the embedding table is not read.
    assert found.weight_bytes == 2 * (8_190_735_360 - 151936 * 4096)
    assert found.kv_bytes == 5 * 131072 * 36 * 8 * 128 * 2 * 2
    assert found.summary_bytes == 0
    assert found.nbytes / 4.3e12 == pytest.approx(25.99e-3, rel=1e-3)


def test_the_floor_counts_what_selection_reads():
    spec = dummy.dummy_spec("qwen3-8b", "bfloat16")
    model = step_timing.MODELS["qwen3-8b"]
    quest, storage = registry.resolve(step_timing.composition("quest", 2048, model))
    found = step_timing.floor(spec, spec.geometry(64, 131072 + 64), quest, storage, 3, 131072)
    row = 8 * 128 * 2 * 2
    assert found.kv_bytes == pytest.approx(3 * (2 * 131072 + 34 * 2048) * row, rel=1e-4)
    assert found.summary_bytes == 3 * 34 * 2048 * 8 * 2 * 128 * 2


def test_tied_embeddings_are_read():
    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    tied = step_timing.read_weight_bytes(spec)
    weights = dummy.dummy_weights(spec)
    assert tied == sum(int(leaf.nbytes) for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize("budget", [16, 64, 2048, 8192])
@pytest.mark.parametrize("method", ["quest", "snapkv"])
def test_budgets_are_what_they_say(method, budget):
    found, _ = registry.resolve(step_timing.composition(method, budget, step_timing.MODELS["tiny"]))
    assert found.params.budget == budget


def test_rounds_against_the_floor():
    limit = step_timing.Floor(600, 300, 100)
    timed = [step_timing.Timed(2.0, 0.5), step_timing.Timed(4.0, 0.5), step_timing.Timed(3.0, 0.25)]
    found = step_timing.judge(6, timed, limit, {"measured": 500.0, "nominal": 1000.0})
    assert found["tokens_per_s"] == 2.0
    assert found["floor_s"] == {"measured": 2.0, "nominal": 1.0}
    assert found["step_over_floor"] == {"measured": 1.5, "nominal": 3.0}
    assert found["host_s"]["median"] == 0.5


def test_cases_of_one_context_share_a_runner():
    cases = decode_step.default_cases(step_timing.MODELS["qwen3-8b"])
    found = [{str(case) for case in group} for group in decode_step.groups(cases)]
    long = {f"{method} B={batch} L=128K" for method in ("dense", "quest 2K") for batch in (3, 5)}
    assert found == [{"dense B=1 L=2K"}, {"dense B=64 L=2K"}, {"dense B=4 L=32K"}, long | {"snapkv 8K B=5 L=128K"}]
    exact = decode_step.groups(cases, exact=True)
    assert [(group[0].batch, len(group)) for group in exact] == [(1, 1), (64, 1), (4, 1), (3, 2), (5, 3)]


@pytest.fixture(scope="module")
def filled():
    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    model = step_timing.MODELS["tiny"]
    compositions = {name: step_timing.composition(name, 64, model) for name in ("dense", "quest", "snapkv")}
    weights = dummy.dummy_weights(spec)
    return step_timing.Filled(spec, weights, compositions, 3, 200, model.page_size, None)


def test_filled_pages_hold_rows_and_their_bounds(filled):
    state = filled.runner.state
    keys = np.asarray(state.pools["k"])
    block = filled.geometry.head_pages_per_sequence_page
    assert (np.abs(keys[block:]) >= 2**-7).all()
    assert np.abs(keys).max() < 2
    assert len(np.unique(keys[block:, 0, :4], axis=0)) == len(keys) - block
    assert not np.array_equal(keys, state.pools["v"])
    np.testing.assert_array_equal(state.page_aux["quest_min"][block:], keys[block:].min(1))
    np.testing.assert_array_equal(state.page_aux["quest_max"][block:], keys[block:].max(1))
    (table,) = state.tables.values()
    used = np.asarray(table)[0, 0, 1:, : filled_state.pages_per_row(filled.runner.limits)]
    assert used.min() > 0
    assert len(np.unique(used)) == used.size


def test_steps_run_on_a_filled_state(filled):
    assert filled.resident == {"dense": 200, "quest": 200, "snapkv": 64}
    timed = filled.round("snapkv", 2, 3)
    assert timed.step_s > 0
    (lengths,) = filled.runner.state.lengths.values()
    # Rows 1 and 2 took four steps; the null row and row 3 none.
    assert np.asarray(lengths)[0, 0].tolist() == [0, 68, 68, 0]
    assert np.asarray(filled.runner.state.positions).tolist() == [0, 204, 204, 0]
    filled.rewind("dense", 3)
    (lengths,) = filled.runner.state.lengths.values()
    assert np.asarray(lengths)[0, 0].tolist() == [0, 200, 200, 200]
    assert filled.compile_s > 0


def test_rows_beyond_their_pages_are_refused(filled):
    room = filled_state.pages_per_row(filled.runner.limits) * filled.geometry.page_size
    with pytest.raises(ValueError, match="need more than"):
        filled_state.set_rows(filled.runner, 1, room, room)


def test_unknown_page_arrays_are_refused(filled):
    class Runner:
        limits = filled.runner.limits
        state = filled.runner.state.replace(page_aux={"new_sketch": jnp.zeros(1)})

    with pytest.raises(ValueError, match="new_sketch"):
        filled_state.fill_pages(Runner(), filled.storage)


def test_bars_are_proportional():
    root = ET.fromstring(bars.svg("A & B", ["one", "two"], {"step": [1.0, 2.0], "floor": [0.5, 1.0]}, "ms"))
    widths = [float(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")][2:]
    assert widths == [210.0, 105.0, 420.0, 210.0]
    with pytest.raises(ValueError, match="one value per label"):
        bars.svg("", ["one"], {"step": []}, "ms")


def test_pages_of_a_batch():
    spec = dummy.dummy_spec("qwen3-8b", "bfloat16")
    model, context = step_timing.MODELS["qwen3-8b"], 131072
    geometry = spec.geometry(model.page_size, step_timing.window(context, model.page_size))
    dense, snapkv = (registry.resolve(step_timing.composition(name, 8192, model))[0] for name in ("dense", "snapkv"))
    # The null page, and for each row its context and a page of new tokens.
    assert capacity.pages_needed(dense, geometry, 5, context) == 1 + 5 * 2049
    # At rest 128 pages and one of new tokens; the last row holds its prompt, and what it is compacted into.
    assert capacity.pages_needed(snapkv, geometry, 1, context) == 1 + 2048 + 128
    assert capacity.pages_needed(snapkv, geometry, 65, context) == 1 + 64 * 129 + 2048 + 128


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 73, 128])
def test_largest(limit):
    asked = []
    assert capacity.largest(lambda n: (asked.append(n), n <= limit)[1]) == limit
    assert len(asked) <= 16


def test_memory_is_shared_between_rows_and_pages():
    spec = dummy.dummy_spec("qwen3-8b", "bfloat16")
    model = step_timing.MODELS["qwen3-8b"]
    arguments = argparse.Namespace(memory_fraction=None)
    usable = 120 * capacity.GIB
    dense, kept, *_ = capacity.cases(model, [131072])
    assert (str(dense), str(kept)) == ("dense L=128K", "snapkv 8K L=128K")

    def memory(case, batch):
        return capacity.memory(case, spec, model.page_size, batch, arguments, usable)

    for case, batch in ((dense, 4), (kept, 4), (kept, 64)):
        found = memory(case, batch)
        fixed = found.weight_bytes + found.workspace_bytes + found.row_bytes
        assert fixed + found.pages * found.page_bytes <= usable < fixed + (found.pages + 1) * found.page_bytes
        assert found.weight_bytes == 2 * 8_190_735_360
        assert found.page_bytes == 36 * 8 * 64 * (2 * 128 * 2 + 4)
    # A row's observation window, token counts, tables, and its part of the logits.
    window = 36 * 32 * 32 * 128 * 2
    more = memory(kept, 64)
    less = memory(kept, 63)
    assert more.row_bytes - less.row_bytes == pytest.approx(window + 4 * (151936 + 2049), rel=1e-3)
    assert more.workspace_bytes > less.workspace_bytes
    assert more.pages < less.pages


def test_methods_are_compared_with_dense_of_their_context():
    found = {
        "dense L=128K": {"batch": 5, "tokens_per_s": 200.0},
        "snapkv 8K L=128K": {"batch": 70, "tokens_per_s": 3000.0},
        "snapkv 8K L=32K": {"batch": 70, "tokens_per_s": 3000.0},
    }
    capacity.compare(found, "dense")
    assert found["snapkv 8K L=128K"]["over_dense"] == {"batch": 14.0, "tokens_per_s": 15.0}
    assert "over_dense" not in found["snapkv 8K L=32K"]
    assert "over_dense" not in found["dense L=128K"]


@pytest.mark.parametrize(("benchmark", "stop_at"), [(capacity, "fp8_kv L=1K"), (decode_window, "fp8_kv B=2 L=1K")])
def test_a_stopped_run_has_written_its_first_cases(benchmark, stop_at, tmp_path, monkeypatch):
    def measure(what, *_):
        names = [str(case) for case in (what if isinstance(what, list) else [what])]
        if stop_at in names:
            raise KeyboardInterrupt
        entry = {"batch": 2, "tokens_per_s": 100.0, "valid": True}
        return {name: dict(entry) for name in names} if isinstance(what, list) else dict(entry)

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(step_timing, "device_bandwidths", lambda _: {"measured": 1e9})
    monkeypatch.setattr(step_timing, "load", lambda _: (dummy.dummy_spec("tiny-qwen3", "float32"), {}))
    monkeypatch.setattr(step_timing, "reserve_memory", lambda: None)
    path = tmp_path / "found.json"
    only = ["dense*", "snapkv 64*", "fp8_kv*"]
    given = ["--model", "tiny", "--contexts", "131072", "--only", *only, "--json", str(path)]
    given += ["--memory-gib", "1"] if benchmark is capacity else ["--batches", "2"]
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(given)
    record = json.loads(path.read_text())
    assert record["manifest"]["unfinished"] is True
    assert record["manifest"]["model"] == "tiny-qwen3"
    dense, snapkv = record["result"]["cases"].values()
    assert "over_dense" in snapkv
    assert "over_dense" not in dense


def test_kept_budgets_above_the_context_are_left_out():
    names = [str(case) for case in capacity.cases(step_timing.MODELS["qwen3-8b"], [8192])]
    kept = ["snapkv 4K L=8K", "snapkv 2K L=8K", "streamingllm 4K L=8K"]
    assert names == ["dense L=8K", *kept, "quest 2K L=8K", "fp8_kv L=8K"]


def test_a_prefill_must_multiply_every_weight_and_attend_to_what_is_seen():
    from sparsejax.models.registry import get_architecture

    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    specs = get_architecture(spec.architecture).weight_specs(spec)
    matrices = [np.prod(array.shape) for layer in specs["layers"] for array in layer.values() if len(array.shape) > 1]
    found = prefill_step.floor(spec, 5)
    assert found.matmul_flops == 2 * 5 * sum(matrices) + 2 * spec.hidden_size * spec.vocab_size
    seen = 1 + 2 + 3 + 4 + 5  # keys, for each of which two products of head_dim are made
    assert found.attention_flops == spec.num_layers * spec.num_q_heads * seen * 2 * 2 * spec.head_dim
    last = specs["layers"][-1]
    after_attention = sum(np.prod(last[name].shape) for name in ("out", "gate_up", "down"))
    needless = 2 * 4 * after_attention + spec.num_q_heads * (1 + 2 + 3 + 4) * 2 * 2 * spec.head_dim
    assert found.flops - found.needed_flops == needless


def test_a_prompt_is_prefilled_whole_whatever_its_chunks():
    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    cases = [prefill_step.Case(40, 16), prefill_step.Case(40, 32)]
    prefills = prefill_step.Prefills(spec, dummy.dummy_weights(spec), cases, 8, None)
    tokens = []
    for case in (*cases, *cases):
        timed = prefills.prompt(case)
        assert 0 < timed.host_s <= timed.seconds
        assert prefills.runner.state.positions.tolist() == [0, 40]
        assert prefills.runner.state.lengths["sequence"].reshape(-1).tolist() == [0, 40]
        tokens.append(int(prefills.runner.state.last_tokens[1]))
    assert len(set(tokens)) == 1
    assert prefills.runner.num_late_compiles == 0
