"""What benchmarks.report says of each kind of result file: pure functions from its record to Markdown."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; every row must have one cell per column."""
    body = [list(row) for row in rows]
    if any(len(row) != len(header) for row in body):
        raise ValueError(f"every row needs {len(header)} cells")
    shown = [[cell.replace("|", "\\|") for cell in row] for row in [list(header), *body]]
    shown.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(row) + " |" for row in shown)


def short(spec: str) -> str:
    """A composition with the sum of what each method keeps, in tokens: `snapkv 512 + fp8_kv`."""
    parts = []
    for name, knobs in re.findall(r"([a-z0-9_]+)(?:\(([^)]*)\))?(?:\+|$)", spec):
        kept = sum(int(value) for value in re.findall(r"_keep_tokens=(\d+)", knobs))
        parts.append(f"{name} {kept}" if kept else name)
    return " + ".join(parts)


def _cases(first: str, cases: Iterable[tuple[str, Record]], columns: Mapping[str, Callable[[Record], str]]) -> str:
    """A row per case, a column per function of a case."""
    return table([first, *columns], [[name, *(show(case) for show in columns.values())] for name, case in cases])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _over_floor(case: Record) -> str:
    """By the bandwidth that a copy reached and, if there is one, by the nominal one."""
    return ", ".join(f"{value:.3f} {name}" for name, value in case["step_over_floor"].items())


def _share_of_floor(case: Record) -> str:
    return ", ".join(f"{value:.1%} {name}" for name, value in case["share_of_floor"].items())


def _number(value: float | None, how: str) -> str:
    """Numbers that are not finite are null in result files."""
    return "-" if value is None else format(value, how)


def _pairs(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['ratio']:.3g} ({ratio['least_pair']:.3g} to {ratio['largest_pair']:.3g})" if ratio else "-"


def _interval(values: Sequence[float | None] | None) -> str:
    """Estimate and 95% interval."""
    return "{} [{}, {}]".format(*(_number(value, ".3g") for value in values)) if values else "-"


def _invalid(case: Record) -> str:
    return f"invalid: {'; '.join(case['invalid_because'])}"


# Sections: from the record of a file to Markdown


def decode_step(record: Record) -> str:
    columns = {
        "step, ms": lambda case: _ms(case["step_s"]["median"]),
        "spread": lambda case: f"{case['step_s']['spread']:.1%}",
        "tokens/s": lambda case: f"{case['tokens_per_s']:,.0f}",
        "over floor": _over_floor,
        "faster than dense": lambda case: _pairs(case.get("faster_than_dense")),
    }
    return _cases("case", record["result"]["cases"].items(), columns)


def capacity(record: Record) -> str:
    def measured(show: Callable[[Record], str], key: str = "step_s") -> Callable[[Record], str]:
        return lambda case: show(case) if key in case else "-"  # a largest batch of none has no step

    columns = {
        "largest batch": lambda case: str(case["batch"]),
        "one more: pages": lambda case: "{pages_needed:,} of {pages:,}".format(**case["one_more"]),
        "step, ms": measured(lambda case: _ms(case["step_s"]["median"])),
        "spread": measured(lambda case: f"{case['step_s']['spread']:.1%}"),
        "tokens/s": measured(lambda case: f"{case['tokens_per_s']:,.0f}"),
        "over floor": measured(_over_floor),
        "batch over dense": measured(lambda case: f"{case['over_dense']['batch']:.3g}", "over_dense"),
        "tokens/s over dense": measured(lambda case: f"{case['over_dense']['tokens_per_s']:.3g}", "over_dense"),
    }
    return _cases("case", record["result"]["cases"].items(), columns)


def decode_window(record: Record) -> str:
    columns = {
        "batch": lambda case: str(case["batch"]),
        "context": lambda case: str(case["context"]),
        "tokens/s": lambda case: f"{case['tokens_per_s']:,.0f}" if case["valid"] else _invalid(case),
        "spread": lambda case: f"{case['spread']:.1%}" if case["valid"] else "-",
        "share of floor": lambda case: _share_of_floor(case) if case["valid"] else "-",
        "tokens/s over dense": lambda case: f"{case['over_dense']:.3g}" if "over_dense" in case else "-",
    }
    return _cases("case", record["result"]["cases"].items(), columns)


def prefill_step(record: Record) -> str:
    columns = {
        "seconds": lambda case: f"{case['seconds']['median']:.4g}",
        "spread": lambda case: f"{case['seconds']['spread']:.1%}",
        "tokens/s": lambda case: f"{case['tokens_per_s']:,.0f}",
        "TFLOP/s": lambda case: f"{case['flops_per_s'] / 1e12:.0f}",
        "over floor": lambda case: f"{case['over_floor']:.3f}",
        "over what is needed": lambda case: f"{case['over_needed']:.3f}",
    }
    return _cases("prompt in chunks", record["result"]["cases"].items(), columns)


def _parts(cases: Mapping[str, Record]) -> str:
    """Cases of parts or peers that took turns, each with its time, share of its floor and a ratio to one of them."""

    def ratios(part: Record) -> str:
        over = [key for key in part if key.startswith("time_over_")]
        return ", ".join(f"{_pairs(part[key])} of {key.removeprefix('time_over_').replace('_', ' ')}" for key in over)

    columns = {
        "time, µs": lambda part: f"{part['seconds']['median'] * 1e6:.4g}",
        "on the device, µs": lambda part: f"{part['device_s'] * 1e6:.4g}" if part.get("device_s") else "-",
        "share of floor": lambda part: f"{part['share_of_floor']:.1%}",
        "ratio of times": lambda part: ratios(part) or "-",
    }
    named = {
        f"{case}: {name.replace('_', ' ')}": part
        for case, parts in cases.items()
        for name, part in parts.items()
        if isinstance(part, Mapping) and name != "quiet"
    }
    return _cases("case", named.items(), columns)


def eviction_cost(record: Record) -> str:
    found = record["result"]["auto"]
    total = {key: _ms(found[f"all_layers_{key}_s"]) for key in ("logits", "probability")}
    said = f"All layers: {total['logits']} ms by logits, {total['probability']} ms by probability."
    return _parts({key: found[key] for key in ("choosing", "moving")}) + f"\n\n{said}"


def eviction_share(record: Record) -> str:
    """Costs of methods as shares of dense; compactions and replays of a prompt count with its prefill."""
    result = record["result"]

    def compactions(case: Record) -> str:
        shown = [f"{when} {_ms(one['seconds']['median'])}" for when, one in case["compactions"].items()]
        return ", ".join(shown)

    columns = {
        "rows while decoding": lambda case: f"{case['resident_tokens']:,}",
        "prompt chunks, ms more": lambda case: _ms(case["prompt_extra_s"]),
        "one compaction after, ms": compactions,
        "share of the dense prefill": lambda case: f"{case['prefill_share']:.1%}",
        "whole prefill / dense": lambda case: f"{case['prefill_over_dense']:.2f}",
        "share of a dense step, by rows": lambda case: ", ".join(
            f"{batch}: {one['share']:.1%}" for batch, one in case["decode"].items()
        ),
    }
    said = f"Dense prefill: {_ms(result['dense']['prefill_s']['median'])} ms."
    return _cases("method", result["methods"].items(), columns) + f"\n\n{said}"


def sparse_prefill(record: Record) -> str:
    """Time to the first token of one long prompt, by method."""
    model, arguments = record["result"]["model"], record["manifest"]["arguments"]
    columns = {
        "first token after, s": lambda case: f"{case['ttft']['median']:.2f}",
        "dense over it": lambda case: f"{case['over']['ratio']:.2f}x",
    }
    cases = {name: {"ttft": ttft, "over": model["dense_over"][name]} for name, ttft in model["ttft_s"].items()}
    said = f"{arguments['context']:,} tokens in chunks of {arguments['chunk']:,}; 'sparse' read {model['density']:.1%} "
    said += f"of the blocks ({model['sparsity']:.1f} times fewer than dense)."
    return _cases("method", cases.items(), columns) + f"\n\n{said}"


def cpu_decode(record: Record) -> str:
    result = record["result"]
    runs = {"one request": result["one"], f"{result['many']['requests']} requests": result["many"]}
    ratios = {"many over one": result["many_over_one"]}
    if "peer" in result:
        runs[result["peer"]["peer"]] = result["peer"]
        ratios["one over peer"] = result["one_over_peer"]
    keys = ("decode_tokens_per_s", "tokens_per_s")
    rows = [[name, *(f"{run[key]['median']:.4g}" for key in keys)] for name, run in runs.items()]
    rows += [[name, *(_pairs(ratio[key]) for key in ("decode", "whole"))] for name, ratio in ratios.items()]
    return table(["run", "tokens/s while decoding", "tokens/s with prefill"], rows)


def sparse_decode(record: Record) -> str:
    pages = record["result"]["pages"]
    steps = [(short(spec), {**step, "pages": pages[spec]}) for spec, step in record["result"]["steps"].items()]
    columns = {
        "step, ms": lambda step: _ms(step["step_s"]["median"]),
        "faster than dense, by rounds": lambda step: _pairs(step.get("faster_than_first")),
        "resident tokens": lambda step: str(step["resident_tokens"]),
        "read tokens": lambda step: str(step["read_tokens"]),
        "pages freed": lambda step: f"{step['pages']['freed_of_first']:.0%}",
    }
    return _cases("method", steps, columns)


def perplexity(record: Record) -> str:
    result = record["result"]
    rows = [["dense", f"{result['dense']['perplexity']:.2f}", "-", "100%", "100%"]]
    for spec, found in result["methods"].items():
        shares = (f"{found[f'{key}_share']:.0%}" for key in ("resident", "read"))
        rows.append([short(spec), f"{found['perplexity']:.2f}", f"{found['loss']:+.1%}", *shares])
    return table(["method", "perplexity", "loss", "bytes resident", "bytes read"], rows)


def quality(record: Record) -> str:
    parts = ["Tasks, depths, controls and pictures: [quality.md](../benchmarks/results/quality.md)."]
    header = ["method", "resident", "read", "perplexity", "loss", "KL, nats", "same top token", "retrieval"]
    for length, found in record["result"]["lengths"].items():
        rows = []
        for name, facts in found["variants"].items():
            shown = f"{name} (control)" if facts["control"] else name
            if "invalid" in facts:
                rows.append([shown, f"invalid: {facts['invalid']}", *["-"] * (len(header) - 2)])
                continue
            cells = [f"{facts['resident_share']:.0%}", f"{facts['read_share']:.0%}"]
            cells += [
                _number(facts["perplexity"], ".2f"),
                _number(facts["loss"][0], "+.1%"),
                _interval(facts["kl_nats"]),
            ]
            rows.append([shown, *cells, _interval(facts["top1_agreement"]), _interval(facts.get("retrieval"))])
        scored = f"{found['contexts']} contexts, {found['scored_tokens']} scored tokens"
        parts += [f"{length} tokens, {scored}; intervals are of 95%:", table(header, rows)]
        for verb, share in (("kept", "resident_share"), ("read per step", "read_share")):
            best = [f"{name} ({found['variants'][name][share]:.0%})" for name in frontier(found["variants"], share)]
            parts.append(f"Smallest KL for its bytes {verb}: {', '.join(best)}." if best else "")
    return "\n\n".join(part for part in parts if part)


def frontier(variants: Mapping[str, Record], share: str) -> list[str]:
    """Valid sparse variants whose KL no other one with as few bytes undercuts, from few bytes to many.

    Args:
      variants: of one length of a quality record; controls and dense, whose KL is 0, are left out.
      share: "resident_share" or "read_share".
    """
    compared = {name: facts for name, facts in variants.items() if not facts["control"] and "invalid" not in facts}
    found: list[str] = []
    least = math.inf
    for name, facts in sorted(compared.items(), key=lambda item: (item[1][share], item[1]["kl_nats"][0])):
        if 0 < facts["kl_nats"][0] < least:
            found.append(name)
            least = facts["kl_nats"][0]
    return found


def start_time(record: Record) -> str:
    result = record["result"]
    keys = ("listening_s", "ready_s", "answer_s")
    rows = [["later starts, median", *(f"{result['warm'][key]['median']:.3g}" for key in keys)]]
    if "cold" in result:
        rows.insert(0, ["first start", *(f"{result['cold'][key]:.3g}" for key in keys)])
    said = f"\n\nInstallation: {result['install_s']:.3g} s." if "install_s" in result else ""
    return table(["start", "listening, s", "ready, s", "first answer, s"], rows) + said


def serve_load(record: Record) -> str:
    header = ["load", "server", "output tokens/s, by rounds", "over the first server's"]
    header += ["TTFT, ms", "TPOT, ms", "E2EL, ms"]
    rows = []
    for load, found in record["result"]["loads"].items():
        first = next(iter(found["servers"]))
        for name, server in found["servers"].items():
            if not server["valid"]:
                rows.append([load, name, _invalid(server), *["-"] * 4])
                continue
            rounds = server["output_tokens_per_s_by_turn"]
            rate = f"{statistics.median(rounds):.3g} ({min(rounds):.3g} to {max(rounds):.3g})"
            over = _pairs(found["ratios"].get(f"{name} / {first}", {}).get("output_tokens_per_s"))
            rows.append(
                [load, name, rate, over, *(f"{server['ms'][k]['median']:,.0f}" for k in ("ttft", "tpot", "e2el"))]
            )
    return "Rates are medians of rounds, times medians of all requests.\n\n" + table(header, rows)


def tpu_aot(record: Record) -> str:
    whole = {name: found for name, found in record["result"].items() if "layers" in found}
    columns = {
        "layers of the model": lambda found: f"{found['layers']} of {found['layers_of_model']}",
        "GFLOP": lambda found: f"{found['flops'] / 1e9:.4g}",
        "GiB accessed": lambda found: f"{found['bytes_accessed'] / 2**30:.4g}",
        "peak memory, GiB": lambda found: f"{found['peak_memory_bytes'] / 2**30:.4g}",
    }
    others = f"{len(record['result']) - len(whole)} programs of single operations are in the file too"
    return _cases("program", whole.items(), columns) + f"\n\nThe compiler's counts, not times; {others}."


SECTIONS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "decode_window": ("Decoding with a full batch", decode_window),
    "capacity": ("Largest batches", capacity),
    "decode_step": ("Decode steps", decode_step),
    "prefill_step": ("Whole prefills", prefill_step),
    "sparse_prefill": ("Sparse prefills", sparse_prefill),
    "decode_attention": ("Decode attention of one layer", lambda record: _parts(record["result"]["shapes"])),
    "sparse_attention": ("Sparse attention of one layer", lambda record: _parts(record["result"]["sparse"])),
    "selection": ("Selection", lambda record: _parts(record["result"]["selection"] | record["result"]["gather"])),
    "eviction_cost": ("Cost of eviction", eviction_cost),
    "eviction_share": ("Eviction beside dense prefill and decoding", eviction_share),
    "quality": ("Quality", quality),
    "perplexity": ("Perplexity", perplexity),
    "serve_load": ("Servers under load", serve_load),
    "cpu_decode": ("Decoding on a CPU", cpu_decode),
    "sparse_decode": ("Sparse steps on a CPU", sparse_decode),
    "start_time": ("Start", start_time),
    "tpu_aot": ("TPU programs", tpu_aot),
}
