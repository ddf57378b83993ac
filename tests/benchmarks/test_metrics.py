"""The functions that turn samples into claims, on inputs made by hand."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib

import pytest

from benchmarks import common, cpu_decode, perplexity, quiet


def test_percentile_interpolates_between_ranks():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [common.percentile(values, p) for p in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert common.percentile(values, 90) == pytest.approx(3.7)
    assert common.percentile([7.0], 99) == 7.0


def test_percentile_is_numpys():
    import numpy as np

    values = np.random.default_rng(0).standard_normal(37)
    for percent in (1, 25, 50, 90, 99):
        assert common.percentile(values.tolist(), percent) == pytest.approx(np.percentile(values, percent))


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses(values, percent):
    with pytest.raises(ValueError, match=r"no values|percent"):
        common.percentile(values, percent)


def test_summary_gives_median_and_spread():
    found = common.summary([2.0, 1.0, 4.0])
    assert (found["median"], found["min"], found["max"], found["samples"]) == (2.0, 1.0, 4.0, 3)
    assert found["mean"] == pytest.approx(7 / 3)
    assert found["spread"] == pytest.approx(1.5)


def test_ratio_takes_medians_and_shows_the_pairs():
    found = common.ratio([10.0, 30.0, 20.0], [5.0, 10.0, 4.0])
    assert found == {"ratio": 4.0, "least_pair": 2.0, "largest_pair": 5.0}
    with pytest.raises(ValueError, match="pairs"):
        common.ratio([1.0], [1.0, 2.0])


def test_alternate_gives_every_side_every_place():
    order: list[str] = []
    sides = {name: lambda name=name: (order.append(name), name)[1] for name in "abc"}
    rounds = quiet.alternate(sides, 3)
    assert rounds.found == {name: [name] * 3 for name in "abc"}
    assert "".join(order) == "abcbcacab"
    assert len(rounds.others) == rounds.facts["rounds"] == 3


def test_disturbed_rounds_are_repeated_while_patience_lasts(monkeypatch):
    monkeypatch.setattr(quiet, "_POLL_S", 0.0)
    shares = iter([0.0, 0.5, 0.0, 0.05, 0.0, 0.02])  # wait, round, wait, round, ...
    monkeypatch.setattr(quiet, "others_share", lambda before, after: next(shares))
    counter = iter(range(10))
    rounds = quiet.alternate({"a": lambda: next(counter)}, 2, patience_s=60.0)
    assert rounds.found == {"a": [1, 2]}
    assert (rounds.others, rounds.repeated) == ([0.05, 0.02], 1)


def test_without_patience_disturbed_rounds_are_kept_and_named(monkeypatch):
    monkeypatch.setattr(quiet, "others_share", lambda before, after: 0.7)
    rounds = quiet.alternate({"a": lambda: 1}, 2)
    assert rounds.found == {"a": [1, 1]}
    assert rounds.facts["most_others_cpu_share"] == 0.7


def test_others_share():
    before, after = quiet.Usage(100.0, 10.0, 0.0), quiet.Usage(108.0, 14.0, 4.0)
    assert quiet.others_share(before, after) == pytest.approx(1.0 / os.cpu_count())
    assert quiet.others_share(None, after) is None
    assert quiet.others_share(before, before) is None


@pytest.mark.skipif(not pathlib.Path("/proc/stat").exists(), reason="needs Linux's /proc")
def test_usage_sees_its_own_work():
    before = quiet.usage()
    sum(i * i for i in range(3_000_000))
    after = quiet.usage()
    assert after.own_s > before.own_s
    assert after.machine_s >= before.machine_s


def test_windows_are_consecutive():
    assert common.windows(range(10), 3, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(len(window) == 4 for window in common.windows(range(10), 5, 4))
    with pytest.raises(SystemExit, match="fewer than 11"):
        common.windows(range(10), 1, 11)


def test_table_aligns():
    assert common.table(("name", "ms"), [("a", 1), ("long one", 10)]) == "name      ms\na          1\nlong one  10"


def test_results_are_not_overwritten(tmp_path, monkeypatch, capsys):
    path = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["prog", "--json", str(path)])
    run = common.Run("test", argparse.Namespace(json=path, force=False, folder=tmp_path / "x", count=3))
    run.finish({"value": 1.23456789, "bad": math.nan}, dtype="float32")
    record = json.loads(path.read_text())
    assert record["result"] == {"value": 1.2346, "bad": None}
    manifest = record["manifest"]
    assert manifest["arguments"] == {"folder": "x", "count": 3}
    assert manifest["dtype"] == "float32"
    assert {"date", "cpu", "cpu_count", "versions", "git_commit", "load_average"} <= set(manifest)
    assert str(tmp_path) not in path.read_text()
    assert "wrote" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--force"):
        common.Run("test", argparse.Namespace(json=path, force=False))
    common.Run("test", argparse.Namespace(json=path, force=True))


def test_a_stopped_run_keeps_what_it_had(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    run = common.Run("test", argparse.Namespace(json=path, force=False))
    run.keep({"cases": {"a": 1}}, dtype="float32")
    record = json.loads(path.read_text())
    assert record["result"] == {"cases": {"a": 1}}
    assert (record["manifest"]["unfinished"], record["manifest"]["dtype"]) == (True, "float32")

    def stopped(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            run.keep({"cases": {"a": 1, "b": 2}})
    assert json.loads(path.read_text()) == record
    run.finish({"cases": {"a": 1, "b": 2}}, dtype="float32")
    record = json.loads(path.read_text())
    assert record["result"] == {"cases": {"a": 1, "b": 2}}
    assert "unfinished" not in record["manifest"]
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_result_needs_a_folder(tmp_path):
    with pytest.raises(SystemExit, match="not a folder"):
        common.Run("test", argparse.Namespace(json=tmp_path / "missing" / "result.json", force=False))


def test_decode_rate_counts_only_common_decoding():
    # Both decode from 2 (the second one's first token) to 4 (the first one's end): 2 and 4 tokens in 2 s.
    times = [[1.0, 3.0, 4.0], [2.0, 2.5, 3.0, 3.5, 4.0, 9.0]]
    assert cpu_decode.decode_rate(times) == 3.0
    assert cpu_decode.decode_rate([[1.0, 1.5, 2.0]]) == 2.0
    with pytest.raises(ValueError, match="never decoded together"):
        cpu_decode.decode_rate([[1.0, 2.0], [3.0, 4.0]])


def test_streamed_throughput_counts_prompts():
    streamed = cpu_decode.Streamed([[1.0, 2.0], [1.0, 2.0, 4.0]], [[1, 2], [3, 4, 5]])
    assert streamed.wall_s == 4.0
    assert streamed.tokens_per_s == 1.25


def test_perplexity_weighs_tokens_not_windows():
    assert perplexity.perplexity([[math.log(4.0)] * 3, [math.log(4.0)]]) == pytest.approx(4.0)
    assert perplexity.perplexity([[0.0, 0.0, 0.0], [math.log(16.0)]]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no tokens"):
        perplexity.perplexity([[], []])


@pytest.mark.parametrize("budget", [32, 256, 1024])
def test_budgets_are_what_they_say(budget):
    from sparsejax import registry

    for spec in perplexity.methods([budget])[1:]:
        method, _ = registry.resolve(spec)
        for member in method.members or (method,):
            limit = budget if member.axis == "retention" else (budget // 2 if method.members else budget)
            assert member.params.budget == limit, spec
