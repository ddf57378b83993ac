"""What is asked of a prune job, and what is said of it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np

from sparsejax.errors import PruneError

POLICIES = ("drop", "snapkv_global", "kvzip_global")
OBSERVE, REPEAT = POLICIES[1:]
OBSERVED_TOKENS = 64
ENDED = ("completed", "failed", "blocked", "cancelled")


@dataclasses.dataclass(frozen=True)
class PrunePart:
    """Ranges that share one budget.

    Attributes:
      ranges: [start, stop) of logical tokens, both multiples of the page size.
      keep_tokens: rows that stay of all of them together, fewer than they have tokens. Whole pages of each range stay,
        so it may be a few less.
    """

    ranges: tuple[tuple[int, int], ...]
    keep_tokens: int


@dataclasses.dataclass(frozen=True)
class PruneRequest:
    """Which rows of a text are to go.

    Attributes:
      method: whose rows.
      ids: uint32 [n], the text in which the ranges lie. Of a chain: the beginning of its tokens.
      parts: budgets and their ranges, which don't overlap.
      policy: "drop" keeps nothing. The others keep what attention looks at: that of the last tokens before the end of
        the last range ("snapkv_global"), or that of the ranges' own text when it is repeated ("kvzip_global").
      salt, tenant: of the rows.
      chain_id: prune this chain, and what of its path others may begin with; None prunes the path only.
      recompute: rows behind the beginning of the first range are computed again on what is left.
      observation_tokens: last tokens that "snapkv_global" observes, which stay: their range's budget must hold them.
        None: `OBSERVED_TOKENS`, of which only the newest stay where that budget is smaller.
      score_chunk_tokens: that "kvzip_global" repeats at once, at most; fewer where a program takes fewer, or while
        others decode and it would hold them up.
      prev_postfix_tokens: it repeats before each chunk, at most.
      block_timeout_s: longest wait for a turn of the chain that is under way, for readers of what is to be computed
        again, or for room.
      idempotency_key: a second request of the tenant with the same key is the same job.
    """

    method: str
    ids: np.ndarray
    parts: tuple[PrunePart, ...]
    policy: str = "drop"
    salt: str = ""
    tenant: str = ""
    chain_id: str | None = None
    recompute: bool = False
    observation_tokens: int | None = None
    score_chunk_tokens: int = 2048
    prev_postfix_tokens: int = 64
    block_timeout_s: float = 30.0
    idempotency_key: str | None = None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Of all parts, ascending."""
        return tuple(sorted(pair for part in self.parts for pair in part.ranges))

    def validate(self) -> None:
        """Raises PruneError. Ranges are looked at where the page size is known."""
        if self.policy not in POLICIES:
            raise PruneError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}", param="policy")
        least = (("observation_tokens", 1), ("score_chunk_tokens", 1), ("prev_postfix_tokens", 0))
        for name, low in least:
            value = getattr(self, name)
            if value is None and name == "observation_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise PruneError(f"{name} must be an integer of at least {low}, not {value!r}", param=name)
        timeout = self.block_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= 3600:
            raise PruneError(f"block_timeout_s must be in [0, 3600], not {timeout!r}", param="block_timeout_s")
        for part in self.parts:
            width, keep = sum(stop - start for start, stop in part.ranges), part.keep_tokens
            if isinstance(keep, bool) or not isinstance(keep, int) or not 0 <= keep < width:
                text = f"keep_tokens must be in [0, {width - 1}], less than the ranges have tokens, not {keep!r}"
                raise PruneError(text, param="keep_tokens")
            if self.policy == "drop" and keep:
                raise PruneError(f'policy "drop" keeps nothing, but keep_tokens is {keep}', param="keep_tokens")


@dataclasses.dataclass(frozen=True)
class PruneInfo:
    """A job as it is at some moment. Times in seconds of `time.time`.

    Attributes:
      prune_id: of the job.
      status: "queued", "running", or one of `ENDED`. "blocked": the chain, or room, was not to be had in time; the
        same request may succeed later.
      policy, ranges, keep_tokens: what was asked for; all parts together.
      result: of a completed job: `ranges`, `range` (the first start and the last stop), `logical_tokens` (their
        widths), `retained_tokens` and `freed_device_slots` (rows that stayed and went; of ranges that were pruned
        before, of what they had), `freed_pages` (pages of a table that hold them; they are free once the last reader
        has left), `affected_blocks`, `recomputed_tokens`, `quality_degraded`, `chain_id`, `path` (whether what others
        begin with was pruned), and `parts` (ranges, keep_tokens and retained_tokens of each).
      error: of one that ended otherwise: `code` and `message`.
    """

    prune_id: str
    status: str
    policy: str
    ranges: tuple[tuple[int, int], ...]
    keep_tokens: int
    created_s: float
    started_s: float | None = None
    finished_s: float | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Slice(enum.Enum):
    """Where a job stands between two slices of its work."""

    READY = "ready"
    """It goes on at once."""
    DEVICE = "device"
    """Its next slice submits a program."""
    RESULT = "result"
    """It waits for numbers from the device."""
    BLOCKED = "blocked"
    """It waits for somebody else."""


class Wait(NamedTuple):
    """What a job waits for before its next slice."""

    state: Slice
    why: str = ""
