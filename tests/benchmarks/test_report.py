"""That numbers of result files land in the right cells of docs/results.md and README.md; --check finds what differs."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from typing import Any

import pytest

from benchmarks import report, report_pictures, report_sections, report_summary

MANIFEST = {
    "benchmark": "x",
    "date": "2026-01-02T03:04:05+00:00",
    "git_commit": "abc123",
    "cpu": "a processor",
    "cpu_count": 2,
    "versions": {"jax": "1.2.3"},
}


def record(**result: Any) -> dict[str, Any]:
    return {"manifest": MANIFEST, "result": result}


def step(median: float, **more: Any) -> dict[str, Any]:
    facts = {
        "step_s": {"median": median, "spread": 0.015},
        "tokens_per_s": 1234.4,
        "step_over_floor": {"measured": 1.25, "nominal": 1.375},
    }
    return facts | more


def ratio(value: float) -> dict[str, float]:
    return {"ratio": value, "least_pair": value - 0.5, "largest_pair": value + 0.5}


def part(median: float, **more: Any) -> dict[str, Any]:
    return {"seconds": {"median": median}, "share_of_floor": 0.875} | more


DECODE = record(cases={"dense": step(0.01), "quest": step(0.004, faster_than_dense=ratio(2.5))})
ONE_MORE = {"one_more": {"pages_needed": 1100, "pages": 1000}}
CAPACITY = record(
    cases={
        "dense L=128K": step(0.02, batch=5, **ONE_MORE),
        "snapkv L=128K": step(0.03, batch=70, over_dense={"batch": 14.0, "tokens_per_s": 12.5}, **ONE_MORE),
        "dense L=8K": step(0.02, batch=99, **ONE_MORE),
        "quest L=128K": {"batch": 0, **ONE_MORE},
    }
)
SERVER = {
    "valid": True,
    "invalid_because": [],
    "output_tokens_per_s_by_turn": [10.0, 30.0, 20.0],
    "ms": {"ttft": {"median": 100.0}, "tpot": {"median": 7.0}, "e2el": {"median": 2500.0}},
}


WINDOW = record(
    cases={
        "dense B=4 L=128K": {"valid": True, "share_of_floor": {"measured": 0.9}},
        "snapkv 8K B=4 L=128K": {"valid": True, "share_of_floor": {"measured": 0.8}, "over_dense": 3.75},
        "snapkv 8K B=8 L=32K": {"valid": True, "share_of_floor": {"measured": 0.8}, "over_dense": 1.5},
        "broken B=4 L=128K": {"valid": False, "invalid_because": ["no"]},
    }
)


def variant(resident: float, read: float, kl: float, **more: Any) -> dict[str, Any]:
    facts = {"resident_share": resident, "read_share": read, "kl_nats": [kl, kl, kl], "control": False}
    return facts | {"budget_tokens": 1024, "loss": [kl, 0, 0], "top1_agreement": [0.75, 0.7, 0.8]} | more


VARIANTS = {
    "dense": variant(1.0, 1.0, 0.0, budget_tokens=None, retrieval=[0.9, 0.8, 1.0]),
    "good": variant(0.5, 0.5, 0.1, retrieval=[0.625, 0.5, 0.7]),
    "worse": variant(0.5, 0.6, 0.2, budget_tokens=512),
    "small": variant(0.25, 0.3, 0.4),
    "reads little": variant(1.1, 0.2, 0.3, budget_tokens=None),
    "random": variant(0.1, 0.1, 3.0, control=True),
    "shuffled": variant(1.0, 1.0, 4.0, control=True, budget_tokens=None),
    "failed": {"control": False, "invalid": "no logits", "budget_tokens": 1024},
}


def picture(kind: str, found: dict[str, Any], suffix: str = "") -> str:
    (drawn,) = (p.draw(found) for p in report_pictures.PICTURES[kind] if p.suffix == suffix)
    return drawn


def rows(text: str) -> dict[str, dict[str, str]]:
    """Cells of the first table by the first column, then by the header."""
    found = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("|")]
    header = found[0]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in found[2:] if len(row) == len(header)}


def shown(kind: str, found: dict[str, Any]) -> dict[str, dict[str, str]]:
    return rows(report.SECTIONS[kind][1](found))


def test_decode_steps():
    found = shown("decode_step", DECODE)
    same = {"spread": "1.5%", "tokens/s": "1,234", "over floor": "1.250 measured, 1.375 nominal"}
    assert found["dense"] == same | {"step, ms": "10", "faster than dense": "-"}
    assert found["quest"] == same | {"step, ms": "4", "faster than dense": "2.5 (2 to 3)"}


def test_largest_batches():
    found = shown("capacity", CAPACITY)
    over = "1.250 measured, 1.375 nominal"
    assert list(found["snapkv L=128K"].values()) == ["70", "1,100 of 1,000", "30", "1.5%", "1,234", over, "14", "12.5"]
    assert list(found["quest L=128K"].values()) == ["0", "1,100 of 1,000", *["-"] * 6]


def test_invalid_windows_show_why_and_no_numbers():
    valid = {"batch": 8, "context": 8192, "valid": True, "invalid_because": [], "tokens_per_s": 2000.0, "spread": 0.01}
    invalid = {"batch": 9, "context": 8192, "valid": False, "invalid_because": ["too small"]}
    valid |= {"share_of_floor": {"measured": 0.9}, "over_dense": 1.5}
    found = shown("decode_window", record(cases={"a": valid, "b": invalid}))
    assert found["a"] == {
        "batch": "8",
        "context": "8192",
        "tokens/s": "2,000",
        "spread": "1.0%",
        "share of floor": "90.0% measured",
        "tokens/s over dense": "1.5",
    }
    assert found["b"]["tokens/s"] == "invalid: too small"
    assert found["b"]["share of floor"] == "-"


def test_prefills():
    case = {"seconds": {"median": 2.0, "spread": 0.001}, "tokens_per_s": 5e4, "flops_per_s": 6.5e14}
    found = shown("prefill_step", record(cases={"32K": case | {"over_floor": 1.03, "over_needed": 1.06}}))["32K"]
    assert list(found.values()) == ["2", "0.1%", "50,000", "650", "1.030", "1.060"]


@pytest.mark.parametrize(("kind", "key"), [("decode_attention", "shapes"), ("sparse_attention", "sparse")])
def test_parts_and_peers(kind: str, key: str):
    peer = part(3e-5, device_s=None, time_over_ours=ratio(1.5))
    found = shown(
        kind, record(**{key: {"B=1": {"bytes": 5, "ours": part(2e-5, device_s=1e-5), "peer": peer, "quiet": {}}}})
    )
    assert list(found["B=1: ours"].values()) == ["20", "10", "87.5%", "-"]
    assert list(found["B=1: peer"].values()) == ["30", "-", "87.5%", "1.5 (1 to 2) of ours"]
    assert len(found) == 2


def test_selection_and_eviction():
    found = shown("selection", record(selection={"many": {"ours": part(1e-5)}}, gather={"few": {"pages": part(4e-5)}}))
    assert (found["many: ours"]["time, µs"], found["few: pages"]["time, µs"]) == ("10", "40")
    cost = {"choosing": {"mass": part(6e-5)}, "moving": {"move": part(5e-5)}}
    text = report_sections.eviction_cost(
        record(auto=cost | {"all_layers_logits_s": 0.007, "all_layers_probability_s": 0.009})
    )
    assert rows(text)["moving: move"]["time, µs"] == "50"
    assert "7 ms by logits, 9 ms by probability" in text


def test_shares_of_eviction():
    method = {
        "resident_tokens": 4672,
        "prompt_extra_s": 0.004,
        "compactions": {"prompt": {"seconds": {"median": 0.007}}, "token": {"seconds": {"median": 0.002}}},
        "prefill_share": 0.0125,
        "prefill_over_dense": 0.625,
        "decode": {"1": {"share": 0.015}, "8": {"share": 0.0275}},
    }
    text = report_sections.eviction_share(record(dense={"prefill_s": {"median": 1.16}}, methods={"snapkv": method}))
    found = rows(text)["snapkv"]
    assert found["one compaction after, ms"] == "prompt 7, token 2"
    assert (found["prompt chunks, ms more"], found["share of the dense prefill"]) == ("4", "1.2%")
    assert (found["whole prefill / dense"], found["rows while decoding"]) == ("0.62", "4,672")
    assert found["share of a dense step, by rows"] == "1: 1.5%, 8: 2.8%"
    assert text.endswith("Dense prefill: 1160 ms.")


def test_sparse_prefills():
    ttft = {"dense": {"median": 10.75}, "sparse": {"median": 4.3}}
    over = {"dense": {"ratio": 1.0}, "sparse": {"ratio": 2.5}}
    shown = record(model={"density": 0.1099, "sparsity": 9.1, "ttft_s": ttft, "dense_over": over})
    shown["manifest"]["arguments"] = {"context": 131072, "chunk": 8192}
    text = report_sections.sparse_prefill(shown)
    found = rows(text)["sparse"]
    assert (found["first token after, s"], found["dense over it"]) == ("4.30", "2.50x")
    assert "131,072 tokens in chunks of 8,192; 'sparse' read 11.0% of the blocks (9.1 times fewer" in text


def test_cpu_steps_of_equal_budget_are_both_shown():
    specs = ("snapkv(sink_keep_tokens=64,decode_keep_tokens=64)", "snapkv(sink_keep_tokens=28,decode_keep_tokens=100)")
    steps = {spec: {"step_s": {"median": 0.1}, "resident_tokens": 128, "read_tokens": 99} for spec in specs}
    pages = {spec: {"freed_of_first": 0.85} for spec in specs}
    text = report_sections.sparse_decode(record(steps=steps, pages=pages))
    assert text.count("| snapkv 128 | 100 | - | 128 | 99 | 85% |") == 2


def test_cpu_decode():
    run = {"decode_tokens_per_s": {"median": 40.0}, "tokens_per_s": {"median": 30.0}}
    both = {"decode": ratio(4.0), "whole": ratio(3.0)}
    found = shown("cpu_decode", record(one=run, many=run | {"requests": 16}, many_over_one=both))
    assert list(found["16 requests"].values()) == ["40", "30"]
    assert list(found["many over one"].values()) == ["4 (3.5 to 4.5)", "3 (2.5 to 3.5)"]


def test_perplexity():
    method = {"perplexity": 12.0, "loss": 0.2, "resident_share": 0.25, "read_share": 0.125}
    spec = "quest(sink_keep_tokens=32,decode_keep_tokens=224,observation_window_size=32)+fp8_kv"
    found = record(dense={"perplexity": 10.0}, methods={spec: method})
    assert list(shown("perplexity", found)["quest 256 + fp8_kv"].values()) == ["12.00", "+20.0%", "25%", "12%"]
    assert "quest+fp8_kv" in picture("perplexity", found)


def test_quality_with_a_bound_that_is_not_finite_and_an_invalid_variant():
    good = {"control": False, "resident_share": 0.5, "read_share": 0.25, "perplexity": 11.0, "loss": [0.1, None, None]}
    good |= {"kl_nats": [0.02, None, None], "top1_agreement": [0.9, 0.8, 0.95]}
    variants = {"snapkv": good, "random": {"control": True, "invalid": "no logits"}}
    found = shown("quality", record(lengths={"7000": {"contexts": 1, "scored_tokens": 64, "variants": variants}}))
    cells = ["50%", "25%", "11.00", "+10.0%", "0.02 [-, -]", "0.9 [0.8, 0.95]", "-"]
    assert list(found["snapkv"].values()) == cells
    assert found["random (control)"]["resident"] == "invalid: no logits"


def test_servers_under_load():
    bad = SERVER | {"valid": False, "invalid_because": ["a request failed"]}
    ratios = {"peer / ours": {"output_tokens_per_s": ratio(0.8)}}
    loads = {"4": {"servers": {"ours": SERVER, "peer": SERVER, "bad": bad}, "ratios": ratios}}
    lines = report_sections.serve_load(record(loads=loads)).splitlines()
    assert "| 4 | ours | 20 (10 to 30) | - | 100 | 7 | 2,500 |" in lines
    assert "| 4 | peer | 20 (10 to 30) | 0.8 (0.3 to 1.3) | 100 | 7 | 2,500 |" in lines
    assert "| 4 | bad | invalid: a request failed | - | - | - | - |" in lines


def test_start_and_tpu_programs():
    times = {"listening_s": 1.0, "ready_s": 20.0, "answer_s": 21.0}
    warm = {key: {"median": value / 2} for key, value in times.items()}
    found = shown("start_time", record(cold=times, warm=warm))
    assert [list(row.values()) for row in found.values()] == [["1", "20", "21"], ["0.5", "10", "10.5"]]
    program = {"flops": 5e9, "bytes_accessed": 2**31, "peak_memory_bytes": 2**30}
    text = report_sections.tpu_aot({"result": {"a": program | {"layers": 4, "layers_of_model": 32}, "b": program}})
    assert list(rows(text)["a"].values()) == ["4 of 32", "5", "2", "1"]
    assert "b" not in rows(text)
    assert "1 programs of single operations" in text


def test_the_page_names_date_device_versions_and_commit():
    manifest = MANIFEST | {"device": "a GPU", "dtype": "bfloat16"}
    page = report.report({"decode_step_h200": DECODE | {"manifest": manifest}})["results.md"]
    assert "2026-01-02, a GPU, a processor (2 cores), bfloat16, jax 1.2.3, commit abc123." in page


def test_missing_and_unknown_files_are_named():
    page = report.report({"decode_step_h200": DECODE, "surprise": record()})["results.md"]
    missing = re.search(r"No results yet: (.*)\.", page)
    assert missing is not None
    assert set(missing[1].split(", ")) == set(report.SECTIONS) - {"decode_step"}
    assert "No section for: surprise.json." in page


def test_a_missing_key_is_named_with_its_file():
    broken = copy.deepcopy(DECODE)
    del broken["result"]["cases"]["quest"]["tokens_per_s"]
    with pytest.raises(report.MissingKeyError, match=r"decode_step_h200\.json has no 'tokens_per_s'"):
        report.report({"decode_step_h200": broken})


def test_the_picture_of_largest_batches_has_only_one_context():
    drawn = picture("capacity", CAPACITY)
    assert "snapkv, 70 requests" in drawn
    assert "99 requests" not in drawn
    assert "quest, 0 requests" not in drawn


def test_pictures_by_context():
    drawn = picture("capacity", CAPACITY, "_context")
    assert drawn.count("<polyline") == 2  # dense at two contexts, snapkv at one; quest has no step
    assert ">dense</text>" in drawn
    assert ">quest</text>" not in drawn
    memory = picture("capacity", CAPACITY, "_memory")
    assert ">70 requests</text>" in memory
    assert ">99 requests</text>" not in memory

    drawn = picture("decode_window", WINDOW, "_context")
    assert ">snapkv 8K</text>" in drawn
    assert ">broken</text>" not in drawn
    assert ">90 %</text>" in picture("decode_window", WINDOW, "_floor")
    many = {f"method{i} L=8K": step(0.01, batch=1, **ONE_MORE) for i in range(9)}
    assert "(8 of 9 methods)" in picture("capacity", record(cases=many), "_context")
    with pytest.raises(KeyError, match="nameless"):
        picture("capacity", record(cases={"nameless": step(0.01, batch=1, **ONE_MORE)}), "_context")


def test_the_frontier_has_what_nothing_else_beats_at_both():
    assert report_sections.frontier(VARIANTS, "resident_share") == ["small", "good"]
    assert report_sections.frontier(VARIANTS, "read_share") == ["reads little", "good"]
    shown = record(lengths={"64": {"variants": {}}, "7000": {"variants": VARIANTS}})
    drawn = picture("quality", shown, "_kept")
    assert "7,000 tokens" in drawn
    assert drawn.count("<polyline") == 1, "only the frontier is a line"
    # "small", "good" and a legend; "worse", "reads little" and a legend. The control and dense are not there.
    assert (drawn.count("<circle"), drawn.count("<polygon")) == (3, 3)


def test_notes_of_a_run_are_shown():
    manifest = MANIFEST | {"unfinished": True, "notes": "stopped by a limit"}
    page = report.report({"decode_step_h200": DECODE | {"manifest": manifest}})["results.md"]
    assert "unfinished, jax 1.2.3" in page
    assert "\nNote: stopped by a limit.\n" in page


def test_check_finds_drift_and_writes_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"# Name\n\n{report_summary.START}\n{report_summary.END}\n\nThe rest.\n", "utf-8")
    source = results / "decode_step_h200.json"
    source.write_text(json.dumps(DECODE), "utf-8")
    assert report.main(["--check"], results, docs) == 1
    assert not any(docs.iterdir())
    assert "No results yet." not in readme.read_text("utf-8"), "--check must write nothing"
    assert report.main([], results, docs) == 0
    assert report.main(["--check"], results, docs) == 0

    picture = docs / "images" / "results_decode_step_h200.svg"
    drawn = picture.read_text("utf-8")
    picture.write_text(drawn + " ", "utf-8")
    capsys.readouterr()
    assert report.main(["--check"], results, docs) == 1
    assert capsys.readouterr().out.startswith("images/results_decode_step_h200.svg is not what")
    picture.write_text(drawn, "utf-8")

    source.write_text(json.dumps(DECODE).replace("1234.4", "4321.0"), "utf-8")
    assert report.main(["--check"], results, docs) == 1
    assert "4,321" not in (docs / "results.md").read_text("utf-8")
    source.unlink()
    assert report.main([], results, docs) == 0
    assert not picture.exists()


GOALS = {
    "valid": True,
    "goals": [{"goal": "fast", "found": 1.234, "met": True}, {"goal": "x", "found": None, "met": False}],
}


def test_turns_of_long_conversations():
    last = {"ttft_s": {"median": 1.2}, "short_ttft_s": {"median": 1.0}, "over_short": ratio(1.25)}
    last |= {"prompt_tokens": 6512, "prefilled_tokens": 212}
    turns = [{"turn": 1, "ttft_s": [0.5, 0.7]}, {"turn": 30, "ttft_s": [1.2, 1.3]}]
    sides = {"snapkv 512": {"turns": turns, "last": last}, "dense": {"turns": turns, "last": None}}
    restart = {"killed_in_turn": 11, "cut_requests": 4, "start_s": 21.25, "disk_bytes": 5e8}
    one = {"cached_tokens": 900, "unkilled_cached_tokens": 1000, "status": "resumed", "same_text": [True, False]}
    restart["sides"] = {"snapkv 512": one}
    found = record(sides=sides, restart=restart, others_cpu_share=[0.25, None, 0.5], **GOALS)
    found["manifest"] = MANIFEST | {"arguments": {"turns": 30, "context": 500, "rounds": 2}}
    text = report.SECTIONS["chain_turns"][1](found)
    assert "| snapkv 512 | 6,512 | 212 | 1,200 | 1,000 | 1.25 (0.75 to 1.75) |" in text
    assert "| snapkv 512 | 900 of 1,000 | resumed | 1 of 2 |" in text
    assert "while it answered turn 11 (4 answers were cut off), ready again after 21.2 s with 500 MB" in text
    assert "Other processes took 25%, 50% of the CPUs meanwhile." in text
    assert "| fast | 1.23 | met |" in text
    assert "| x | - | missed |" in text
    assert "Invalid" not in text
    del found["result"]["restart"]
    found["result"] |= {"valid": False, "invalid_because": ["too short"]}
    assert "**Invalid**: too short." in report.SECTIONS["chain_turns"][1](found)
    assert picture("chain_turns", found).count("<polyline") == 2


def test_resuming():
    one = {"resume_s": {"median": 0.0025}, "first_token_s": {"median": 0.03}, "goal_s": 0.005, "met": True}
    one |= {"prefill_over_resume": 4000.0, "prefill_over_first_token": 333.0}
    tiers = {"device": one, "host": one | {"over_floor": 1.25, "met": False}}
    found = record(tiers=tiers, context=131072, resident_tokens=8194, bytes=1.5e9, prefill_s=10.0)
    text = report.SECTIONS["chain_resume"][1](found)
    assert "131,072 tokens of which 8,194 rows were kept (1.50 GB); a prefill takes 10.0 s." in text
    assert "| device | 2.5 | 30 | 5, met | 4,000 | 333 | - |" in text
    assert "| host | 2.5 | 30 | 5, missed | 4,000 | 333 | 1.25 |" in text


def test_recall_and_agents():
    side = {"logprob": -0.5, "probability_over_dense": 0.97, "median_rank": 1, "recall": "host"}
    side |= {"ranked_first": [0.96, 0.9, 0.99], "within_5_percent": [0.5, 0.4, 0.6], "fact_rows_held": 0.125}
    side["recall_means"] = {"lent_rows": 100.0, "evicted_rows": 1500.0}
    found = record(cases=50, tried=61, sides={"snapkv": side}, **GOALS)
    found["manifest"] = MANIFEST | {"arguments": {"turns": 12, "look_after": 8}}
    text = report.SECTIONS["chain_recall"][1](found)
    assert "| snapkv | -0.500 | 0.97 | 1 | 96% [90%, 99%] | 50% [40%, 60%] | - | 12% | 100 of 1,500 |" in text
    assert "(61 tried)" in text

    one = {"requests": 200, "failed_requests": 0, "requests_per_s": 4.0, "prefilled_tokens": 9000}
    one["ms"] = {"e2el": {"p50": 1234.5}}
    chained = one | {"longest_context": 1300, "status": {"resumed": 190, "created": 10}, "first_turn_reused_tokens": 7}
    chained |= {"restored_from": {"host": 3}, "prefilled_over_needed": 1.0125}
    over = {"ratio": 4.5, "least_part": 4.0, "largest_part": 5.0}
    found = record(chains=chained, no_chains=one | {"requests": 20}, over=over, cache_bytes=6e8, **GOALS)
    found["result"] |= {"answered_turns": 20, "dense_tokens_per_agent": 1400}
    options = {"agents": 100, "concurrency": 16, "share": 0.1, "method": "snapkv", "budget": 128}
    found["manifest"] = MANIFEST | {"arguments": options}
    text = report.SECTIONS["agents"][1](found)
    assert "| with chains | 200 | 0 | 4 | 45 | 1,234 |" in text
    assert "| without | 20 | 0 | 4 | 450 | 1,234 |" in text
    assert "100 agents of 20 turns, up to 1,300 tokens each, 16 at once" in text
    assert "in 600 MB of cache (10% of 1,400 uncompressed tokens for each)" in text
    assert "4.5 (parts: 4 to 5)" in text
    assert "190 resumed, 10 created; rows came from: 3 host." in text


def test_shared_prefixes_and_pruning():
    sharing = {"requests": 64, "shared_tokens": 3000, "prefilled_tokens": 5000, "prompt_tokens": 195000, "all_s": 30.25}
    sharing |= {"suffix_tokens": 1900, "hit_ttft_s": {"median": 0.1}, "no_cache_ttft_s": {"median": 2.5}}
    sharing["ttft_over"] = ratio(25.0)
    side = {"prompt_tokens": [5000, 6100], "cached_tokens": [4900, 5900], "resident_tokens": [2000, 2900]}
    side |= {"ttft_s": [0.5, 0.75], "deleted_share": [0.6, 0.62]}
    over = {"path": {"edited": ratio(6.5), "whole": ratio(15.0)}}
    full = {"cases": 30, "probability_over_full": 1.0, "worst_logprob_over_full": 0.0, "cached_tokens": 0.0}
    full |= {"ranked_first": [1.0, 0.9, 1.0], "within_5_percent": [0.5, 0.4, 0.6], "resident_tokens": 0.0}
    full["gone"] = {"ranked_first": [0.25, 0.1, 0.4]}
    drop = full | {"worst_logprob_over_full": -0.6931471805599453, "cached_tokens": 1200.0, "resident_tokens": 700.0}
    quality = {"tried": 41, "sides": {"full": full, "drop": drop}}
    found = record(
        sharing=sharing, pruning={"sides": {"path": side, "whole": side}, "over": over}, quality=quality, **GOALS
    )
    found["manifest"] = MANIFEST | {"arguments": {"rounds": 2, "share": 0.6}}
    text = report.SECTIONS["prefix_prune"][1](found)
    assert "64 requests at once share 3,000 tokens: 5,000 of 195,000 prompt tokens were computed" in text
    assert "first token after 100 ms, 2,500 ms without the cache, 25.0x (24.5 to 25.5)." in text
    assert "2 conversations; 61% of the tokens" in text
    assert "| path | 6,100 | 5,900 | 2,900 | 625 | 6.5x (6.0 to 7.0) | 15.0x (14.5 to 15.5) |" in text
    assert "| whole | 6,100 | 5,900 | 2,900 | 625 | - | - |" in text
    assert "30 questions about results that stay, after 60% of the results were pruned (41 tried" in text
    assert "| drop | 1.000 | 0.500 | 100% [90%, 100%] | 50% [40%, 60%] | 25% [10%, 40%] | 700 of 1,200 |" in text
    assert "| fast | 1.23 | met |" in text
    for part in ("sharing", "pruning", "quality"):
        del found["result"][part]
    assert report.SECTIONS["prefix_prune"][1](found).startswith("| goal |")


def test_the_readme_shows_savings_and_costs():
    window = WINDOW | {"manifest": MANIFEST | {"device": "a GPU", "model": "big", "dtype": "bfloat16"}}
    load = record(
        loads={
            "1": {
                "servers": {"ours": SERVER, "llama": SERVER},
                "ratios": {"llama / ours": {"output_tokens_per_s": ratio(1.25)}},
            },
            "4": {
                "servers": {"ours": SERVER, "llama": SERVER},
                "ratios": {"llama / ours": {"output_tokens_per_s": ratio(0.5)}},
            },
            "9": {"servers": {"ours": SERVER, "llama": SERVER | {"valid": False}}, "ratios": {}},
        }
    )
    load["manifest"] = MANIFEST | {"servers": {"ours": {"model": "small"}, "llama": {"model": "small"}}}
    quality = record(lengths={"64": {"variants": {}}, "7000": {"variants": VARIANTS}})
    quality["manifest"] = MANIFEST | {"model": "small", "dtype": "float32", "device": "cpu"}
    capacity = copy.deepcopy(CAPACITY)
    capacity["result"]["cases"]["snapkv 8K L=128K"] = capacity["result"]["cases"].pop("snapkv L=128K")
    records = {"decode_window_h200": window, "capacity_h200": capacity, "quality": quality, "serve_load": load}
    text = report_summary.summary(records)
    assert "big shape, random weights, bfloat16, one a GPU, 2026-01-02" in text
    assert "small, float32, a processor, 2 cores, 2026-01-02" in text
    assert "| snapkv 8K | 3.75x (4 requests) | 14.0x (70) | 12.5x |" in text
    lines = text.splitlines()
    assert "| dense | 100% | 100% | +0.0% | 75% | 90% |" in lines
    assert "| good | 50% | 50% | +10.0% | 75% | 62% |" in lines
    assert "| random (control) | 10% | 10% | +300.0% | 75% | - |" in lines
    assert not any(name in text for name in ("worse", "shuffled", "failed", "broken"))
    assert "over llama.cpp: 0.80x at 1, 2.00x at 4 requests at once." in text
    assert report_summary.summary({}) == "No results yet."


def test_a_stale_readme_is_found_and_the_rest_of_it_is_left_alone(tmp_path: pathlib.Path, capsys):
    results, docs, readme = tmp_path / "results", tmp_path / "docs", tmp_path / "README.md"
    results.mkdir()
    docs.mkdir()
    record_of = {"manifest": MANIFEST | {"model": "m", "dtype": "d"}, "result": {"lengths": {"7000": {"variants": {}}}}}
    variants = record_of["result"]["lengths"]["7000"]["variants"]
    variants |= {name: VARIANTS[name] | {"perplexity": 2.0} for name in ("dense", "good")}
    record_of["result"]["lengths"]["7000"] |= {"contexts": 1, "scored_tokens": 2}
    (results / "quality.json").write_text(json.dumps(record_of), "utf-8")
    readme.write_text(f"Before.\n{report_summary.START}\nold\n{report_summary.END}\nAfter.\n", "utf-8")
    assert report.main([], results, docs) == 0
    current = readme.read_text("utf-8")
    assert current.startswith(f"Before.\n{report_summary.START}\n")
    assert current.endswith(f"{report_summary.END}\nAfter.\n")
    assert "| good | 50% | 50% | +10.0% | 75% | 62% |" in current
    assert report.main(["--check"], results, docs) == 0

    readme.write_text(current.replace("| 62% |", "| 99% |"), "utf-8")
    capsys.readouterr()
    assert report.main(["--check"], results, docs) == 1
    assert capsys.readouterr().out == "README.md is not what the result files say: run python -m benchmarks.report\n"
    assert report.main([], results, docs) == 0
    assert readme.read_text("utf-8") == current

    readme.write_text(current.replace(report_summary.END, ""), "utf-8")
    with pytest.raises(SystemExit):
        report.main(["--check"], results, docs)
    assert "README.md needs one" in capsys.readouterr().err


def test_the_page_of_this_repository_is_current(capsys: pytest.CaptureFixture[str]):
    assert report.main(["--check"]) == 0, capsys.readouterr().out
