"""What benchmarks.report says of the Chain Cache and the prefix cache: pure functions from a record to Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.report_sections import Record, table


def _verdict(result: Mapping[str, Any]) -> str:
    """Whether the run counts, how quiet it was, and every goal with what was found."""
    parts = [] if result["valid"] else [f"**Invalid**: {'; '.join(result['invalid_because'])}."]
    shares = result.get("others_cpu_share")
    known = [share for share in (shares if isinstance(shares, list) else [shares]) if share is not None]
    if known:
        parts.append(f"Other processes took {', '.join(f'{share:.0%}' for share in known)} of the CPUs meanwhile.")
    rows = [[goal["goal"], _found(goal["found"]), "met" if goal["met"] else "missed"] for goal in result["goals"]]
    return "\n\n".join([*parts, table(["goal", "found", ""], rows)])


def _found(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def _interval(values: Sequence[float]) -> str:
    return "{:.0%} [{:.0%}, {:.0%}]".format(*values)


def chain_turns(record: Record) -> str:
    """The last turn of long conversations, and going on after a kill."""
    result, options = record["result"], record["manifest"]["arguments"]
    rows = []
    for name, side in result["sides"].items():
        last = side["last"]
        if last is None:
            continue
        ratio = last["over_short"]
        times = [f"{1e3 * last[key]['median']:,.0f}" for key in ("ttft_s", "short_ttft_s")]
        over = f"{ratio['ratio']:.2f} ({ratio['least_pair']:.2f} to {ratio['largest_pair']:.2f})"
        sizes = [f"{last[key]:,.0f}" for key in ("prompt_tokens", "prefilled_tokens")]
        rows.append([name, *sizes, *times, over])
    header = [f"turn {options['turns']}", "tokens of its prompt", "computed", "first token after, ms"]
    header += [f"after {options['context']} tokens of context, ms", "ratio (of rounds)"]
    said = "Both times are of the same message; they were measured in turn. Medians of "
    parts = [said + f"{options['rounds']} conversations.", table(header, rows)]
    if "restart" in result:
        restart = result["restart"]
        rows = [
            [
                name,
                f"{one['cached_tokens']:,} of {one['unkilled_cached_tokens'] or 0:,}",
                str(one["status"]),
                f"{sum(one['same_text'])} of {len(one['same_text'])}",
            ]
            for name, one in restart["sides"].items()
        ]
        said = f"Killed (SIGKILL) while it answered turn {restart['killed_in_turn']} ({restart['cut_requests']} "
        said += f"answers were cut off), ready again after {restart['start_s']:.1f} s with "
        parts.append(said + f"{restart['disk_bytes'] / 1e6:,.0f} MB on disk; the next turn sent again:")
        parts.append(table(["method", "tokens taken over, of those unkilled", "status", "answers the same"], rows))
    return "\n\n".join([*parts, _verdict(result)])


def chain_recall(record: Record) -> str:
    """The answer's token with and without recall."""
    result, options = record["result"], record["manifest"]["arguments"]
    rows = []
    for name, side in result["sides"].items():
        cells = [f"{side['logprob']:.3f}", f"{side['probability_over_dense']:.3g}", f"{side['median_rank']:g}"]
        cells += [_interval(side[key]) for key in ("ranked_first", "within_5_percent")]
        cells.append(f"{side['taken_back']:.1%}" if "taken_back" in side else "-")
        cells.append(f"{side['fact_rows_held']:.0%}" if "fact_rows_held" in side else "-")
        lent = side.get("recall_means")
        cells.append("{lent_rows:,.0f} of {evicted_rows:,.0f}".format(**lent) if lent else "-")
        rows.append([name, *cells])
    header = ["method, rows, recall", "log-probability", "probability / dense", "median rank", "ranked first"]
    header += [
        "within 5% of dense",
        "lost log-probability taken back",
        f"fact's rows left after turn {options['look_after']}",
        "rows lent, of dropped",
    ]
    said = f"{result['cases']} conversations of {options['turns']} turns in which dense attention ranks the answer "
    said += f"first ({result['tried']} tried); means, intervals of 95%."
    return "\n\n".join([said, table(header, rows), _verdict(result)])


def agents(record: Record) -> str:
    """Throughput, reuse and prefill of many agents."""
    result, options = record["result"], record["manifest"]["arguments"]
    chained, plain, over = result["chains"], result["no_chains"], result["over"]
    rows = []
    for name, one in (("with chains", chained), ("without", plain)):
        cells = [f"{one['requests']:,}", str(one["failed_requests"]), f"{one['requests_per_s']:.3g}"]
        cells += [f"{one['prefilled_tokens'] / one['requests']:,.0f}", f"{one['ms']['e2el']['p50']:,.0f}"]
        rows.append([name, *cells])
    header = ["side", "requests", "failed", "requests/s", "prompt tokens computed, per request", "median answer, ms"]
    said = f"{options['agents']} agents of {result['answered_turns']} turns, up to {chained['longest_context']:,} "
    said += f"tokens each, {options['concurrency']} at once, in {result['cache_bytes'] / 1e6:,.0f} MB of cache "
    said += f"({options['share']:.0%} of {result['dense_tokens_per_agent']:,} uncompressed tokens for each); "
    said += f"{options['method']} keeps {options['budget']} rows."
    parts = [said, table(header, rows)]
    if over is not None:
        parts.append(
            f"Requests/s over those without chains: {over['ratio']:.3g} "
            f"(parts: {over['least_part']:.3g} to {over['largest_part']:.3g})."
        )
    counts = ", ".join(f"{number} {status}" for status, number in chained["status"].items())
    tiers = ", ".join(f"{number} {tier}" for tier, number in chained["restored_from"].items())
    parts.append(
        f"Turns: {counts}; rows came from: {tiers}. Computed prompt tokens over those that no earlier turn had: "
        f"{chained['prefilled_over_needed']:.3f}. First turns reused {chained['first_turn_reused_tokens']:,} tokens."
    )
    return "\n\n".join([*parts, _verdict(result)])


def chain_resume(record: Record) -> str:
    """Going on with a long conversation whose rows were kept, by where they were."""
    result, rows = record["result"], []
    for tier, one in result["tiers"].items():
        cells = [f"{1e3 * one[key]['median']:.3g}" for key in ("resume_s", "first_token_s")]
        cells.append(f"{1e3 * one['goal_s']:g}, {'met' if one['met'] else 'missed'}")
        cells += [f"{one[key]:,.0f}" for key in ("prefill_over_resume", "prefill_over_first_token")]
        rows.append([tier, *cells, f"{one['over_floor']:.2f}" if "over_floor" in one else "-"])
    header = ["rows on the", "resumed after, ms", "first token after, ms", "goal of resuming, ms"]
    header += ["prefill / resuming", "prefill / first token", "resuming over its copy's floor"]
    said = f"{result['context']:,} tokens of which {result['resident_tokens']:,} rows were kept "
    said += f"({result['bytes'] / 1e9:.2f} GB); a prefill takes {result['prefill_s']:.1f} s."
    return said + "\n\n" + table(header, rows)


def prefix_prune(record: Record) -> str:
    """One beginning for many requests; turns and answers after pruning."""
    result, options, parts = record["result"], record["manifest"]["arguments"], []
    if "sharing" in result:
        one = result["sharing"]
        times = [1e3 * one[key]["median"] for key in ("hit_ttft_s", "no_cache_ttft_s")]
        parts.append(
            f"{one['requests']} requests at once share {one['shared_tokens']:,} tokens: {one['prefilled_tokens']:,} of "
            f"{one['prompt_tokens']:,} prompt tokens were computed ({one['suffix_tokens']:,} are no others'), all were "
            f"answered after {one['all_s']:.1f} s. Later ones, in turn: first token after {times[0]:,.0f} ms, "
            f"{times[1]:,.0f} ms without the cache, {_over(one['ttft_over'])}."
        )
    if "pruning" in result:
        found, rows = result["pruning"], []
        for name, side in found["sides"].items():
            cells = [f"{side[key][-1]:,}" for key in ("prompt_tokens", "cached_tokens", "resident_tokens")]
            cells.append(f"{1e3 * statistics.median(side['ttft_s']):,.0f}")
            ratios = found["over"].get(name)
            rows.append([name, *cells, *(_over(ratios[key]) if ratios else "-" for key in ("edited", "whole"))])
        header = ["next turn", "prompt tokens", "cached", "of these with rows", "first token after, ms"]
        header += ["edited / this", "whole / this"]
        share = statistics.median(found["sides"]["path"]["deleted_share"])
        said = f"{options['rounds']} conversations; {share:.0%} of the tokens of their tool results are taken away: by "
        said += "pruning (path, chain), or by the client in its messages (edited). unpruned: nothing is taken away; "
        parts += [said + "whole: nothing is cached. Tokens are the last conversation's.", table(header, rows)]
    if "quality" in result:
        found, rows = result["quality"], []
        for name, side in found["sides"].items():
            cells = [f"{side['probability_over_full']:.3f}", f"{math.exp(side['worst_logprob_over_full']):.3f}"]
            cells += [_interval(side[key]) for key in ("ranked_first", "within_5_percent")]
            cells.append(_interval(side["gone"]["ranked_first"]))
            rows.append([name, *cells, f"{side['resident_tokens']:,.0f} of {side['cached_tokens']:,.0f}"])
        header = [
            "rows",
            "probability / full",
            "worst case",
            "ranked first",
            "within 5% of full",
            "ranked first, of what was pruned",
            "cached tokens with rows",
        ]
        said = (
            f"{found['sides']['full']['cases']} questions about results that stay, after {options['share']:.0%} of the "
        )
        said += (
            f"results were pruned ({found['tried']} tried; full: the whole text, computed at once); intervals of 95%."
        )
        parts += [said, table(header, rows)]
    return "\n\n".join([*parts, _verdict(result)])


def _over(ratio: Mapping[str, float]) -> str:
    return "{ratio:.1f}x ({least_pair:.1f} to {largest_pair:.1f})".format(**ratio)


SECTIONS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "chain_turns": ("Turns of long conversations", chain_turns),
    "chain_recall": ("Recall of what was dropped", chain_recall),
    "agents": ("Many agents", agents),
    "chain_resume": ("Resuming long conversations", chain_resume),
    "prefix_prune": ("Shared prefixes and pruning", prefix_prune),
}
