"""Which prefill program to run: a rectangular bucket for the chosen rows, within a stall target."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from sparsejax.rows import Sequence

Bucket = tuple[int, int]  # rows, chunk tokens

_OVERHEAD_TOKENS = 64  # what one program costs besides its tokens, before anything was measured
_SMOOTHING = 0.3


class PrefillPlanner:
    """Learns how long each bucket takes and picks the one that gets most done per second.

    Args:
      buckets: allowed (rows, chunk tokens).
      max_tokens: padded tokens of one program.
    """

    def __init__(self, buckets: SequenceOf[Bucket], max_tokens: int) -> None:
        allowed = [b for b in buckets if b[0] * b[1] <= max_tokens]
        self.buckets = sorted(allowed or [min(buckets, key=lambda b: b[0] * b[1])], key=lambda b: b[0] * b[1])
        self.max_rows = max(rows for rows, _ in self.buckets)
        self.max_chunk = max(chunk for _, chunk in self.buckets)
        self._seconds: dict[Bucket, float] = {}
        self._seen: set[Bucket] = set()

    def observe(self, bucket: Bucket, seconds: float) -> None:
        """Records a program's duration. The first one of a bucket may include compilation and is not believed."""
        if bucket not in self._seen:
            self._seen.add(bucket)
            return
        seconds = max(seconds, 1e-6)
        old = self._seconds.get(bucket, seconds)
        new = self._seconds[bucket] = old + _SMOOTHING * (seconds - old)
        # What slows one bucket (longer contexts, a busier machine) slows the others, which are not measured meanwhile.
        for other in self._seconds.keys() - {bucket}:
            self._seconds[other] *= new / old

    def estimate_s(self, bucket: Bucket) -> float | None:
        """Expected duration: measured, or scaled from the nearest measured bucket by tokens; None before any."""
        if bucket in self._seconds:
            return self._seconds[bucket]
        if not self._seconds:
            return None
        cost = _cost(bucket)
        near = min(self._seconds, key=lambda b: abs(_cost(b) - cost))
        return self._seconds[near] * cost / _cost(near)

    def choose(self, candidates: SequenceOf[Sequence], stall_s: float | None) -> tuple[Bucket, list[int]] | None:
        """The bucket for these candidates, most urgent first, and the tokens of each candidate that takes part.

        The most urgent candidate takes part whatever the padding. Candidates get 0 tokens if the bucket is too short
        for them.

        Args:
          candidates: choices of one method.
          stall_s: longest program while others decode, or None for no limit.
        """
        if not candidates:
            return None
        plans = []
        for bucket in self.buckets:
            tokens = self._fill(candidates, bucket)
            if tokens and tokens[0]:
                plans.append((bucket, tokens))
        if stall_s is not None and plans:
            quick = [p for p in plans if (self.estimate_s(p[0]) or float("inf")) <= stall_s]
            plans = quick or plans[:1]
        if not plans:
            return None
        # Most tokens per second; of equals, the program that finishes most.
        return max(plans, key=lambda p: (sum(p[1]) / self._relative_cost(p[0]), sum(p[1])))

    def _relative_cost(self, bucket: Bucket) -> float:
        estimate = self.estimate_s(bucket)
        return _cost(bucket) if estimate is None else estimate

    def _fill(self, candidates: SequenceOf[Sequence], bucket: Bucket) -> list[int]:
        rows, chunk = bucket
        tokens, used = [], 0
        for candidate in candidates:
            n = candidate.chunk_tokens(chunk) if used < rows else 0
            if candidate.group.facts.chunk_dependent and n < candidate.chunk_tokens(self.max_chunk):
                n = 0  # chunks are as long as they can be: what comes out must not depend on the company
            used += n > 0
            tokens.append(n)
        return tokens


def _cost(bucket: Bucket) -> int:
    return _OVERHEAD_TOKENS + bucket[0] * bucket[1]
