"""What a method does to one long prompt and its answer by its host arithmetic: when it compacts, from what to what.

Imports neither jax nor a model: lengths are integers, as the scheduler has them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

EVICTION_SWITCH = "decode_eviction"
"""End of the names of knobs that make a method evict while decoding."""


@dataclasses.dataclass(frozen=True)
class Compaction:
    """One kind of compaction.

    Attributes:
      phase: what was just finished.
      lengths, kept: int32 [layers, heads] of the granularity, rows before and after the last one.
      observed: tokens processed since the one before, or since the phase began.
      number: how many there are: with the prompt, or per decoded token.
    """

    phase: str
    lengths: np.ndarray
    kept: np.ndarray
    observed: int
    number: float

    @property
    def due(self) -> np.ndarray:
        """Which layers and heads lose rows."""
        return self.kept < self.lengths


@dataclasses.dataclass(frozen=True)
class Plan:
    """A prompt in chunks, and the tokens that follow.

    Attributes:
      histories: rows before each chunk, averaged over layers and heads.
      compactions: by when: "chunk", "prompt", "token", and "answer", the first one after a token where that takes more
        rows than were decoded. What never happens is left out.
      resident: int32 [layers, heads], rows that decode steps find: after a compaction, or once the prompt is done if
        there is none while decoding.
      replays: tokens of each forward pass that the prompt needs once more before it is compacted.
    """

    histories: tuple[float, ...]
    compactions: dict[str, Compaction]
    resident: np.ndarray
    replays: tuple[int, ...] = ()

    @property
    def mean_resident(self) -> int:
        """Average over layers and heads."""
        return round(float(self.resident.mean()))


def plan(method: Any, geometry: Any, context: int, chunk: int, decode_tokens: int) -> Plan:
    """Follows a prompt of `context` tokens in chunks, then `decode_tokens` tokens, as the scheduler would."""
    lengths = np.zeros(geometry.table_shape(method.granularity), np.int32)
    histories, found = [], {}
    observed_from = 0
    for start in range(0, context, chunk):
        done = min(start + chunk, context)
        histories.append(float(lengths.mean()))
        lengths = lengths + (done - start)
        after = _compaction(
            method, "prompt" if done == context else "chunk", lengths, done, done - observed_from, found
        )
        if after is not lengths:
            lengths, observed_from = after, done
    resident, observed_from = lengths, 0
    first, first_done = None, 0
    for done in range(1, decode_tokens + 1):
        lengths = lengths + 1
        after = _compaction(method, "token", lengths, done, done - observed_from, found)
        if after is not lengths:
            lengths, observed_from = after, done
            first, first_done = first or found["token"], first_done or done
    if first is not None:
        last = found["token"]
        resident = last.kept
        if (first.lengths - first.kept > first_done).any():
            found["answer"] = first
            last = dataclasses.replace(last, number=last.number - 1)
        else:
            first_done = 0
        # `observed_from` is the last compaction: what follows it belongs to the next one.
        if observed_from > first_done:
            found["token"] = dataclasses.replace(last, number=last.number / (observed_from - first_done))
        else:
            del found["token"]  # `decode_tokens` are too few for another one
    return Plan(tuple(histories), found, resident, method.replay_lengths(context))


def _compaction(
    method: Any, phase: str, lengths: np.ndarray, done: int, observed: int, found: dict[str, Compaction]
) -> np.ndarray:
    """The lengths after a phase, and the compaction counted in `found`; `lengths` itself if nothing is due."""
    if not method.evicts or not method.may_evict(phase, done):
        return lengths
    kept = method.kept_after(phase, lengths)
    if not (kept < lengths).any():
        return lengths
    number = 1.0 + (found[phase].number if phase in found else 0.0)
    found[phase] = Compaction(phase, lengths, kept, observed, number)
    return kept


def shrunk(entry: Any, shrink: int) -> dict[str, int]:
    """Knobs of a registry entry that count tokens, at their defaults divided by `shrink`."""
    if shrink == 1:
        return {}
    counts = [field for field in dataclasses.fields(entry.params_type) if field.metadata.get("unit") == "tokens"]
    given = {field.name: field.default for field in counts if type(field.default) is int and field.default > 0}
    return {name: max(1, value // shrink) for name, value in given.items()}


def default_compositions(shrink: int = 1) -> dict[str, str]:
    """Registry names, by what to call them, of every member that evicts; once more where that is a switch in decoding.

    Budgets are the defaults, which suit 32K tokens, divided by `shrink`.
    """
    from sparsejax import registry

    found = {}
    for name, entry in registry.available().items():
        if entry.kind != "method" or not entry.build(entry.params_type()).evicts:
            continue
        knobs = shrunk(entry, shrink)
        found[name] = _named(name, knobs)
        switches = {
            field.name: True
            for field in dataclasses.fields(entry.params_type)
            if field.name.endswith(EVICTION_SWITCH) and field.default is False
        }
        if switches:
            found[f"{name}, decoding too"] = _named(name, knobs | switches)
    return found


def _named(name: str, knobs: dict[str, Any]) -> str:
    given = ",".join(f"{key}={value}" for key, value in knobs.items())
    return f"{name}({given})" if given else name
