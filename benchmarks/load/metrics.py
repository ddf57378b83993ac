"""From answers to the numbers and the printout that `vllm bench serve` made familiar, and whether they count."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.load.client import Answer, Failure

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
COSTS = ("seen_tokens", "resident_tokens", "read_tokens")
# Random prompts share at most what a tokenizer puts before every text.
_MOST_CACHED = 0.01


@dataclasses.dataclass(frozen=True)
class Turn:
    """One load on one server.

    Attributes:
      asked: per request, the prompt's tokens (None: nobody counted) and the most output tokens.
      outcomes: one per request, in the same order.
      seconds: from the first request to the end of the last answer.
      prompt_hash: of all prompts, to tell whether two turns had the same.
      waits_s: how much later than due each request was sent.
    """

    asked: Sequence[tuple[int | None, int]]
    outcomes: Sequence[Answer | Failure]
    seconds: float
    prompt_hash: str = ""
    waits_s: Sequence[float] = ()

    @property
    def answers(self) -> list[Answer]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Answer)]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(answer.output_tokens for answer in self.answers) / self.seconds


def samples_ms(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Latencies in milliseconds, by metric."""
    return {
        "ttft": [1e3 * a.ttft_s for a in answers],
        "tpot": [1e3 * a.tpot_s for a in answers if a.tpot_s is not None],
        "itl": [1e3 * gap for a in answers for gap in a.gaps_s],
        "e2el": [1e3 * a.e2el_s for a in answers],
    }


def latencies(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | int]:
    shown = {f"p{percent:g}": common.percentile(values, percent) for percent in percentiles}
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        **shown,
        "samples": len(values),
    }


def peak(outcomes: Sequence[Answer | Failure]) -> int:
    """The most requests that were under way at once."""
    edges = sorted([(o.sent_s, 1) for o in outcomes] + [(o.end_s, -1) for o in outcomes])
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def good(answer: Answer, goals_ms: dict[str, float]) -> bool:
    """Whether an answer met every goal. One without a second token has no TPOT and meets that."""
    found = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2el_s}
    return all(1e3 * found[name] <= goal for name, goal in goals_ms.items())


def reasons(turns: Sequence[Turn], *, forced: bool, counted: bool, distinct: bool) -> list[str]:
    """Why a run is invalid; nothing if it is valid.

    Args:
      forced: every answer must have all tokens that were asked for.
      counted: prompts must be as long as asked for, by the server's count.
      distinct: no prompt repeats another, so a cache must not help.
    """
    pairs = [pair for turn in turns for pair in zip(turn.asked, turn.outcomes, strict=True)]
    whole = [(asked, answer) for asked, answer in pairs if isinstance(answer, Answer)]
    found = []
    if failed := len(pairs) - len(whole):
        found.append(f"{failed} of {len(pairs)} requests failed")
    if not whole:
        return found
    if forced and (other := sum(answer.output_tokens != asked[1] for asked, answer in whole)):
        found.append(f"{other} answers have not as many tokens as asked for")
    if counted and (other := sum(asked[0] is not None and answer.prompt_tokens != asked[0] for asked, answer in whole)):
        found.append(f"{other} prompts have not as many tokens as asked for")
    if guessed := sum(answer.counted_by == "pieces" for _, answer in whole):
        found.append(f"{guessed} answers' tokens are a guess: pieces of the stream were counted")
    cached, prompt = sum(answer.cached_tokens or 0 for _, answer in whole), sum(a.prompt_tokens for _, a in whole)
    if distinct and cached > _MOST_CACHED * prompt:
        found.append(f"{cached:,} of {prompt:,} prompt tokens came from a cache that was to be cold")
    return found


def judge(
    turns: Sequence[Turn], percentiles: Sequence[float], goals_ms: dict[str, float], **rules: bool
) -> dict[str, Any]:
    """Numbers of one server's turns, pooled: all tokens by all seconds. `rules` are those of `reasons`."""
    answers = [answer for turn in turns for answer in turn.answers]
    outcomes = [outcome for turn in turns for outcome in turn.outcomes]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    seconds = sum(turn.seconds for turn in turns)
    prompt, output = sum(a.prompt_tokens for a in answers), sum(a.output_tokens for a in answers)
    why = reasons(turns, **rules)
    result: dict[str, Any] = {
        "valid": not why,
        "invalid_because": why,
        "successful_requests": len(answers),
        "failed_requests": len(failures),
        "failures": dict(collections.Counter(failure.kind for failure in failures)),
        "failure_examples": {failure.kind: failure.detail for failure in reversed(failures)},
        "peak_concurrency": max(peak(turn.outcomes) for turn in turns),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(answers) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "output_tokens_per_s_by_turn": [turn.output_tokens_per_s for turn in turns],
        "prompt_hashes": [turn.prompt_hash for turn in turns],
        "output_tokens_counted_by": dict(collections.Counter(a.counted_by for a in answers)),
    }
    if goals_ms:
        result["goodput_per_s"] = sum(good(answer, goals_ms) for answer in answers) / seconds
    waits = [1e3 * wait for turn in turns for wait in turn.waits_s]
    if waits:
        result["sent_late_ms"] = latencies(waits, percentiles)
    result["ms"] = {name: latencies(values, percentiles) for name, values in samples_ms(answers).items() if values}
    cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
    if cached:
        result["cached_tokens"] = sum(cached)
    costs = [a.cost for a in answers if a.cost]
    if costs:
        result["methods"] = sorted({cost["method"] for cost in costs})
        result["preemptions"] = sum(cost.get("preemptions", 0) for cost in costs)
        for name in COSTS:
            if values := [cost[name] for cost in costs if name in cost]:
                result[f"mean_{name}"] = statistics.fmean(values)
    return result


_LINES = (
    ("successful_requests", "Successful requests:", "d"),
    ("failed_requests", "Failed requests:", "d"),
    ("max_concurrency", "Maximum request concurrency:", "d"),
    ("peak_concurrency", "Peak concurrent requests:", "d"),
    ("request_rate", "Request rate configured (RPS):", ".2f"),
    ("seconds", "Benchmark duration (s):", ".2f"),
    ("prompt_tokens", "Total input tokens:", "d"),
    ("output_tokens", "Total generated tokens:", "d"),
    ("requests_per_s", "Request throughput (req/s):", ".2f"),
    ("goodput_per_s", "Request goodput (req/s):", ".2f"),
    ("output_tokens_per_s", "Output token throughput (tok/s):", ".2f"),
    ("total_tokens_per_s", "Total token throughput (tok/s):", ".2f"),
)
_OWN = (
    ("cached_tokens", "Prompt tokens from a cache:", "d"),
    ("mean_seen_tokens", "Mean tokens seen:", ".1f"),
    ("mean_resident_tokens", "Mean tokens resident at the end:", ".1f"),
    ("mean_read_tokens", "Mean tokens read in the last step:", ".1f"),
    ("preemptions", "Preemptions:", "d"),
)


def block(result: dict[str, Any], metrics: Sequence[str]) -> str:
    """The printout. `metrics` are those whose latencies are shown."""

    def row(label: str, value: Any, form: str) -> str:
        return f"{label:<40} {value:<9{form}}".rstrip()

    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += [row(label, result[name], form) for name, label, form in _LINES if result.get(name) is not None]
    for name in metrics:
        if values := result["ms"].get(name):
            lines.append(f"{TITLES[name]:-^50}")
            shown = [key for key in values if key in ("mean", "median") or key[0] == "p"]
            titles = {"mean": "Mean", "median": "Median"}
            lines += [row(f"{titles.get(key, key.upper())} {name.upper()} (ms):", values[key], ".2f") for key in shown]
    own = [row(label, result[name], form) for name, label, form in _OWN if name in result]
    if own:
        lines += [f"{'Sparsity':-^50}", *own]
    lines.append("=" * 50)
    for kind, number in result["failures"].items():
        lines.append(f"{number} failed: {kind}: {result['failure_examples'][kind]}")
    lines += [f"INVALID: {reason}" for reason in result["invalid_because"]]
    return "\n".join(lines)


def compare(base: Sequence[Turn], other: Sequence[Turn]) -> dict[str, Any]:
    """`other` against `base`, turn by turn: above 1 is better for throughput, below 1 for latencies."""
    found = {
        "output_tokens_per_s": common.ratio(
            [turn.output_tokens_per_s for turn in other], [turn.output_tokens_per_s for turn in base]
        )
    }
    sides = [[samples_ms(turn.answers) for turn in turns] for turns in (other, base)]
    for name in ("ttft", "tpot", "e2el"):
        medians = [[statistics.median(turn[name]) for turn in side if turn[name]] for side in sides]
        if len(medians[0]) == len(medians[1]) == len(base) and all(medians[1]):
            found[f"{name}_median"] = common.ratio(*medians)
    return found
