"""Windows of decode steps on a full batch: what counts, what is invalid, and the arithmetic, on inputs made by hand."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
import pytest

from benchmarks import decode_window, engine_window, step_timing
from benchmarks.decode_window import Case
from benchmarks.engine_window import Window, reasons
from sparsejax import registry
from sparsejax.models.load import dummy
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings

GOOD = Window(2.0, (3,) * 4, {"decode": 4, "maintain": 3}, 0, 12, (), (10, 11, 12))


def test_a_window_of_full_steps_is_valid():
    assert reasons(GOOD, 3, 4) == []
    assert GOOD.tokens == 12


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batches": (3, 3, 2, 3)}, "1 steps without all 3 rows"),
        ({"batches": (3, 3, 3)}, "3 decode steps instead of 4"),
        ({"calls": {"decode": 4, "prefill": 2}}, "2 x prefill"),
        ({"calls": {"decode": 4, "export_row": 1}}, "1 x export_row"),
        ({"compilations": 1}, "1 programs compiled"),
        ({"ended": ("length", "length")}, "2 requests ended: length"),
        ({"delivered": 11}, "11 tokens delivered instead of 12"),
    ],
)
def test_what_makes_a_window_invalid(change, reason):
    assert reasons(dataclasses.replace(GOOD, **change), 3, 4) == [reason]


def test_resident_tokens_grow_and_are_cut_within_a_window():
    dense, _ = registry.resolve("dense")
    # Steps attend to 11 and 21, 12 and 22, 13 and 23 tokens.
    assert engine_window.resident_over(dense, [10, 20], 3) == 17.0
    cut, _ = registry.resolve(
        "streamingllm(sink_keep_tokens=2,recent_keep_tokens=8,streamingllm_decode_trigger_ratio=1.2)"
    )
    # 11, 12 (cut to 10), 11, 12 (cut to 10), 11.
    assert engine_window.resident_over(cut, [10], 5) == 57 / 5


def test_a_watched_runner_notes_everything():
    class Runner:
        limits = "limits"

        def decode(self, method, rows):
            return method, rows

        def export_row(self, *args):
            return args

    watched = engine_window.Watched(Runner())
    assert watched.decode("dense", [1, 2]) == ("dense", [1, 2])
    assert watched.export_row("dense", 1) == ("dense", 1)
    assert (watched.batches, watched.calls) == ([2], {"decode": 1, "export_row": 1})
    with pytest.raises(AttributeError, match="compile"):
        _ = watched.compile


# On a tiny model


def options(**more):
    base = {"model": "tiny", "implementation": None, "prefill": False, "chunk": 32, "warm_up": 3, "steps": 8}
    return argparse.Namespace(**base | more)


def tiny_cases():
    kept = step_timing.composition("snapkv", 32, step_timing.MODELS["tiny"])
    return [Case("dense", "dense", 2, 100), Case("snapkv 32", kept, 2, 100)]


@pytest.fixture(scope="module")
def model():
    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    return spec, dummy.dummy_weights(spec)


@pytest.fixture(scope="module")
def engine(model):
    return decode_window.Engine(tiny_cases(), *model, options())


@pytest.mark.parametrize("case", tiny_cases(), ids=str)
def test_a_window_on_the_engine(engine, case):
    engine.window(case, 0)
    window = engine.window(case, 1)
    assert engine.compile_s[case.method] > 0
    assert reasons(window, 2, 8) == []
    assert window.tokens == window.delivered == 16
    assert window.seconds > 0
    # Three warm-up steps of both; the first row waited for the second.
    kept = 100 if case.method == "dense" else 32
    assert min(window.lengths) == kept + 3
    assert max(window.lengths) <= kept + 3 + 2


def test_requests_that_end_make_a_window_invalid(engine):
    rows = engine_window.FullBatch(engine.runner, engine.settings, "dense", 2, 100)
    window = rows.window(3, 60, 0)
    found = reasons(window, 2, 60)
    assert any("requests ended: length" in text for text in found)
    assert any("without all 2 rows" in text or "decode steps instead" in text for text in found)


def test_a_batch_that_does_not_fit_is_refused(engine):
    rows = engine_window.FullBatch(engine.runner, engine.settings, "dense", 3, 100)
    with pytest.raises(RuntimeError, match="2 of 3 rows"):
        rows.window(3, 8, 0)


def test_prompts_taken_as_read_leave_the_books_of_prefilled_ones(model, engine):
    prefilled = decode_window.Engine(tiny_cases()[:1], *model, options(prefill=True))
    owners = []
    for made in (engine, prefilled):
        rows = engine_window.FullBatch(made.runner, made.settings, "dense", 2, 100)
        scheduler = Scheduler(made.runner, made.settings)
        rows._add(scheduler, 0)
        while len([seq for seq in scheduler.running if seq.prefilled]) < 2:
            scheduler.step()
        state = made.runner.state
        for seq in scheduler.running:
            pages = seq.pages
            table = np.asarray(state.tables["sequence"])[0, 0, seq.row, : pages.count]
            np.testing.assert_array_equal(table, pages.table[0, 0, : pages.count])
            assert int(state.lengths["sequence"][0, 0, seq.row]) == pages.length
            assert int(state.positions[seq.row]) == pages.length
        owners.append({seq.row: seq.computed for seq in scheduler.running})
        for name in list(scheduler.groups):
            scheduler.cancel(name)
        while scheduler.step():
            pass
    assert owners[0].keys() == owners[1].keys()
    assert set(owners[0].values()) >= {100}


def test_what_methods_remember_is_filled(engine):
    filled = {name: np.asarray(array) for name, array in engine.runner.state.row_aux.items()}
    assert filled, "snapkv keeps a window of queries"
    again = decode_window.Engine(tiny_cases()[1:], engine.spec, engine.runner.weights, options())
    for name, array in again.runner.state.row_aux.items():
        if np.issubdtype(np.asarray(array).dtype, np.floating):
            assert np.unique(np.asarray(array)).size > 100, name


# Arithmetic


def stub(steps, spec, method, storage):
    return argparse.Namespace(
        arguments=argparse.Namespace(steps=steps),
        methods={"dense": method},
        spec=spec,
        geometry=spec.geometry(16, 128),
        storage=storage,
    )


def test_windows_are_pooled(model):
    spec, _ = model
    method, storage = registry.resolve("dense")
    windows = [dataclasses.replace(GOOD, seconds=seconds) for seconds in (2.0, 3.0, 2.5)]
    case = Case("dense", "dense", 3, 11)
    bandwidths = {"measured": 1e6, "nominal": 2e6}
    found = decode_window.judge(case, windows, stub(4, spec, method, storage), bandwidths)
    assert found["valid"]
    assert found["tokens_per_s"] == pytest.approx(36 / 7.5)
    assert found["step_s"] == pytest.approx(7.5 / 12)
    assert found["spread"] == pytest.approx(1.0 / 2.5)
    # Rows of 10, 11 and 12 tokens, in the middle of four steps.
    assert found["resident_tokens"] == 13.5
    limit = step_timing.floor(spec, spec.geometry(16, 128), method, storage, 3, 14)
    assert found["share_of_floor"]["measured"] == pytest.approx(limit.nbytes / 1e6 / (7.5 / 12))
    assert found["share_of_floor"]["nominal"] == pytest.approx(found["share_of_floor"]["measured"] / 2)


def test_one_invalid_window_leaves_no_result(model):
    spec, _ = model
    method, storage = registry.resolve("dense")
    windows = [GOOD, dataclasses.replace(GOOD, compilations=2)]
    case = Case("dense", "dense", 3, 11)
    found = decode_window.judge(case, windows, stub(4, spec, method, storage), {"measured": 1e6})
    assert not found["valid"]
    assert found["invalid_because"] == ["window 2: 2 programs compiled"]
    assert "tokens_per_s" not in found
    assert decode_window.cells("dense", found)[1] == "INVALID"
    assert "2 programs compiled" in decode_window.line("dense", found)


def test_a_case_that_cannot_run_leaves_the_others(model, monkeypatch):
    spec, _ = model
    method, storage = registry.resolve("dense")
    seeds = []

    class Engine:
        def __init__(self, group, spec, weights, arguments):
            self.__dict__.update(vars(stub(4, spec, method, storage)))
            self.compile_s = {case.method: 1.0 for case in group}
            self.runner = argparse.Namespace(seal=lambda: seeds.append("sealed"))

        def window(self, case, seed):
            if case.method != "dense":
                raise RuntimeError("1 of 3 rows")
            seeds.append(seed)
            return GOOD

    monkeypatch.setattr(decode_window, "Engine", Engine)
    group = [Case("dense", "dense", 3, 11), Case("snapkv", "snapkv", 3, 11)]
    given = argparse.Namespace(rounds=2, patience_s=0.0)
    found = decode_window.measure(group, spec, None, given, {"measured": 1e6})
    assert seeds == [0, "sealed", 1, 2], "the first is discarded, and nothing may compile after it"
    assert found["dense B=3 L=11"]["valid"]
    assert found["snapkv B=3 L=11"]["invalid_because"] == ["1 of 3 rows"]


def test_cases_are_compared_with_a_dense_one_that_counts():
    dense, other, far = Case("dense", "dense", 2, 64), Case("quest 2K", "quest", 2, 64), Case("fp8_kv", "fp8_kv", 2, 32)
    found = {
        str(dense): {"valid": True, "tokens_per_s": 10.0},
        str(other): {"valid": True, "tokens_per_s": 25.0},
        str(far): {"valid": True, "tokens_per_s": 99.0},
    }
    decode_window.compare(found, [dense, other, far])
    assert found[str(other)]["over_dense"] == 2.5
    assert "over_dense" not in found[str(far)]
    assert "over_dense" not in found[str(dense)]
    found[str(dense)]["valid"] = False
    del found[str(other)]["over_dense"]
    decode_window.compare(found, [dense, other, far])
    assert "over_dense" not in found[str(other)]


def test_default_cases():
    model = step_timing.MODELS["qwen3-8b"]
    given = argparse.Namespace(
        methods=list(decode_window.MEMBERS), contexts=[8192, 131072], batches=None, keep=8192, read=2048
    )
    made = decode_window.cases(model, given)
    short = [str(case) for case in made if case.context == 8192]
    assert short == ["dense B=16 L=8K", "quest 2K B=16 L=8K", "fp8_kv B=16 L=8K"]
    long = [case for case in made if case.context == 131072]
    assert [case.method for case in long] == ["dense", "streamingllm 8K", "snapkv 8K", "quest 2K", "fp8_kv"]
    assert {case.batch for case in long} == {4}
    assert [len(group) for group in decode_window.groups(made)] == [2, 1, 4, 1]
    for case in long[1:4]:
        method, _ = registry.resolve(case.composition)
        assert method.params.budget == (2048 if case.method.startswith("quest") else 8192)
    # Evictions lie within a window of 256 steps.
    assert registry.resolve(long[1].composition)[0].params.trigger == 8192 + 128
    given.batches = [1, 2, 3]
    with pytest.raises(SystemExit, match="3 --batches for 2"):
        decode_window.cases(model, given)


def test_pages_of_a_window():
    spec = dummy.dummy_spec("qwen3-8b", "bfloat16")
    model = step_timing.MODELS["qwen3-8b"]
    geometry = spec.geometry(64, 131072 + 320)
    dense, _ = registry.resolve("dense")
    # The null page, two rows of the context and 320 new tokens, and one to spare.
    assert decode_window.pages_needed(dense, geometry, 2, 131072, 320) == 1 + 2 * (2048 + 5) + 1
    snapkv, _ = registry.resolve(step_timing.composition("snapkv", 8192, model))
    # One row at rest; another with its prompt and what that is compacted into; as much again for a compaction.
    assert decode_window.pages_needed(snapkv, geometry, 2, 131072, 320) == 1 + (128 + 5) + (2048 + 128) + 128 + 1


def test_settings_of_the_engine_are_the_servers(engine):
    assert engine.settings.max_inflight_steps == EngineSettings().max_inflight_steps
