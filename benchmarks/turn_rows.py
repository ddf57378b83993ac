"""Turns of conversations as rows, and what they say: the numbers of benchmarks.chain_turns."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import common, lines

if TYPE_CHECKING:
    from benchmarks.load.client import Answer

MOST_RATIO = 1.3
"""Goal: time to the first token of the last turn over that of the same message after a short context."""
LEAST_DENSE = 3.0
"""What the same ratio should be at least where every turn is computed from its beginning."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One line of the table: a method, as users write it, with or without chains."""

    name: str
    spec: str
    chained: bool = True


@dataclasses.dataclass(frozen=True)
class Row:
    """One request: a turn of a long conversation, or the same message in a short one."""

    side: str
    round: int
    turn: int
    short: bool
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    text: str
    status: str | None

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def row_of(side: str, number: int, turn: int, short: bool, answer: Answer) -> Row:
    cached, status = answer.cached_tokens or 0, (answer.chain or {}).get("status")
    sizes = answer.prompt_tokens, cached, answer.output_tokens
    return Row(side, number, turn, short, answer.ttft_s, *sizes, answer.text, status)


def by_turn(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Long turns of one side: what each round gave."""
    found = []
    for turn in sorted({row.turn for row in rows if not row.short}):
        those = sorted((row for row in rows if row.turn == turn and not row.short), key=lambda row: row.round)
        keys = ("ttft_s", "prompt_tokens", "cached_tokens", "output_tokens", "status")
        found.append({"turn": turn} | {key: [getattr(row, key) for row in those] for key in keys})
    return found


def late(rows: Sequence[Row], turn: int | None = None) -> dict[str, Any] | None:
    """Long turns that have a short one beside them against those, in pairs; `turn` for one turn only."""
    pairs = []
    for row in rows:
        if not row.short and turn in (None, row.turn):
            other = [r for r in rows if r.short and (r.round, r.turn) == (row.round, row.turn)]
            pairs += [(row, short) for short in other]
    if not pairs:
        return None
    longs, shorts = ([pair[i] for pair in pairs] for i in (0, 1))
    return {
        "turns": sorted({row.turn for row in longs}),
        "ttft_s": common.summary([row.ttft_s for row in longs]),
        "short_ttft_s": common.summary([row.ttft_s for row in shorts]),
        "over_short": common.ratio([row.ttft_s for row in longs], [row.ttft_s for row in shorts]),
        "prompt_tokens": statistics.median(row.prompt_tokens for row in longs),
        "prefilled_tokens": statistics.median(row.prefilled_tokens for row in longs),
        "short_prompt_tokens": statistics.median(row.prompt_tokens for row in shorts),
        "short_prefilled_tokens": statistics.median(row.prefilled_tokens for row in shorts),
    }


def reasons(sides: Sequence[Side], rows: Sequence[Row], failures: Sequence[Any], turns: int, least: int) -> list[str]:
    """Why a run is invalid; nothing if it is valid."""
    found = [f"{len(failures)} requests failed"] if failures else []
    for side in sides:
        own = [row for row in rows if row.side == side.name]
        last = [row for row in own if row.turn == turns and not row.short]
        if not last:
            found.append(f"{side.name} has no turn {turns}")
            continue
        if (most := min(row.prompt_tokens + row.output_tokens for row in last)) < least:
            found.append(f"{side.name} ends at {most:,} tokens, fewer than {least:,}")
        if side.chained and (missed := sum(not row.cached_tokens for row in own if row.turn > 1 and not row.short)):
            found.append(f"{side.name} took nothing over in {missed} turns")
        if not side.chained and any(row.cached_tokens for row in own):
            found.append(f"{side.name} took something over")
        pairs = late(own)
        if pairs and side.chained and pairs["prefilled_tokens"] > 1.1 * pairs["short_prefilled_tokens"]:
            sizes = f"{pairs['prefilled_tokens']:g} and {pairs['short_prefilled_tokens']:g} tokens"
            found.append(f"{side.name} computed {sizes} in long and short turns: not the same message")
    return found


def goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was to be shown, what was found, and whether that is enough."""
    found = []
    for name, side in result["sides"].items():
        pairs = side.get("last")
        if pairs is None:
            continue
        ratio = pairs["over_short"]["ratio"]
        if not side["chained"]:
            goal = f"{name}: last turn at least {LEAST_DENSE:g}x the short one"
            found.append({"goal": goal, "found": ratio, "met": ratio >= LEAST_DENSE})
        elif not name.startswith("dense"):
            goal = f"{name}: last turn at most {MOST_RATIO:g}x the short one"
            found.append({"goal": goal, "found": ratio, "met": ratio <= MOST_RATIO})
    for name, one in result.get("restart", {}).get("sides", {}).items():
        met = bool(one["cached_tokens"]) and all(one["same_text"])
        shown = f"{one['cached_tokens']} of {one['unkilled_cached_tokens']} tokens taken over"
        shown += f", {sum(one['same_text'])} of {len(one['same_text'])} answers the same"
        found.append({"goal": f"{name}: goes on after SIGKILL and says the same", "found": shown, "met": met})
    return found


def same(row: Row | None, other: Row | None) -> bool:
    """Both were answered, with the same text."""
    return row is not None and other is not None and row.text == other.text


def plot(result: Mapping[str, Any]) -> str:
    """Time to the first token over the turns, as SVG."""
    series: dict[str, list[lines.Point]] = {}
    for name, side in result["sides"].items():
        for turn in side["turns"]:
            times = turn["ttft_s"]
            point = lines.Point(float(turn["turn"]), statistics.median(times), min(times), max(times))
            series.setdefault(name, []).append(point)
    return lines.svg("Time to the first token of each turn", series, "turn", "seconds", log_y=True)
