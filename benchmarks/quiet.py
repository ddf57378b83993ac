"""Rounds of measurements on a machine that others use too.

What other processes take of the CPU is recorded for every round. With patience, a round that was disturbed is measured
again: the choice depends on what others did, never on what was measured. Linux only; elsewhere every round counts.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

MOST_OTHERS = 0.1
"""Share of all CPUs that others may take in a round that counts as quiet."""
_POLL_S = 1.0


class Usage(NamedTuple):
    """CPU seconds since boot: of the whole machine, and of this process and its peers."""

    machine_s: float
    own_s: float
    time_s: float


def usage(pids: Iterable[int] = ()) -> Usage | None:
    """Reads /proc; None where there is none. `pids` are further processes of this benchmark."""
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        fields = [int(x) for x in pathlib.Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]]
        own = sum(_process_ticks(pid) for pid in (os.getpid(), *pids))
    except (OSError, ValueError):
        return None
    busy = sum(fields) - fields[3] - fields[4]  # all but idle and waiting for disks
    return Usage(busy / ticks, own / ticks, time.monotonic())


def _process_ticks(pid: int) -> int:
    # The name in parentheses may contain spaces.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def others_share(before: Usage | None, after: Usage | None) -> float | None:
    """Share of all CPUs that went to other processes in between, 0 to 1."""
    if before is None or after is None or after.time_s <= before.time_s:
        return None
    others = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return max(0.0, others / (after.time_s - before.time_s) / (os.cpu_count() or 1))


class Rounds(NamedTuple):
    """What every side gave, by name, and how quiet it was: one share of others per kept round."""

    found: dict[str, list[Any]]
    others: list[float | None]
    repeated: int

    @property
    def facts(self) -> dict[str, Any]:
        known = [share for share in self.others if share is not None]
        return {
            "rounds": len(self.others),
            "others_cpu_share": self.others,
            "most_others_cpu_share": max(known, default=None),
            "repeated_rounds": self.repeated,
        }


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    patience_s: float = 0.0,
    pids: Iterable[int] = (),
) -> Rounds:
    """Calls every side once per round, in an order that turns.

    Args:
      sides: what to measure, by name.
      rounds: rounds to keep.
      patience_s: time to spend in all on waiting for quiet and on repeating disturbed rounds; then rounds are kept as
        they are.
      pids: processes that work for a side, so that they don't count as others.
    """
    names, found = list(sides), {name: [] for name in sides}
    others: list[float | None] = []
    spent = 0.0
    attempt = repeated = 0
    while len(others) < rounds:
        while spent < patience_s:
            before = usage(pids)
            time.sleep(_POLL_S)
            if (others_share(before, usage(pids)) or 0.0) <= MOST_OTHERS:
                break
            spent += _POLL_S
        start, before = time.monotonic(), usage(pids)
        shift = attempt % len(names)
        results = {name: sides[name]() for name in names[shift:] + names[:shift]}
        share = others_share(before, usage(pids))
        attempt += 1
        if share is not None and share > MOST_OTHERS and spent < patience_s:
            spent += time.monotonic() - start
            repeated += 1
            continue
        for name, value in results.items():
            found[name].append(value)
        others.append(share)
    return Rounds(found, others, repeated)
