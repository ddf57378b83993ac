"""Sentences of one answer, one token at a time, as the method that repeats are penalised by is described."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Answer:
    """Redundancy grows as sentences close; the oldest sentence makes room for a new one.

    Attributes:
      delimiters: token ids that end a sentence.
      least, most: tokens of a sentence.
      tracked: sentences remembered.
      threshold: least cosine of a sentence and its repetition.
      spans, repeats: of the sentences remembered.
      closed: sentences so far.
    """

    delimiters: tuple[int, ...]
    least: int
    most: int
    tracked: int
    threshold: float
    spans: list[list[int]] = dataclasses.field(default_factory=list)
    embeddings: list[np.ndarray] = dataclasses.field(default_factory=list)
    repeats: list[float] = dataclasses.field(default_factory=list)
    start: int = 0
    hidden: list[np.ndarray] = dataclasses.field(default_factory=list)
    closed: int = 0

    def close(self, end: int) -> None:
        """Ends the open sentence."""
        if len(self.hidden) >= self.least:
            mean = np.mean(self.hidden, axis=0)
            unit = mean / max(np.linalg.norm(mean), 1e-6)
            for i, other in enumerate(self.embeddings):
                if other @ unit >= self.threshold:
                    self.repeats[i] = max(self.repeats[i], float(other @ unit))
            self.spans.append([self.start, end])
            self.embeddings.append(unit)
            self.repeats.append(0.0)
            self.closed += 1
            for remembered in (self.spans, self.embeddings, self.repeats):
                del remembered[: -self.tracked]
        self.hidden = []

    def add(self, token: int, position: int, hidden: np.ndarray) -> None:
        """Takes one generated token."""
        if self.hidden and self.start + len(self.hidden) != position:
            self.close(self.start + len(self.hidden))
        if not self.hidden:
            self.start = position
        self.hidden.append(hidden)
        if token in self.delimiters or len(self.hidden) >= self.most:
            self.close(position + 1)

    def penalty(self, position: int) -> float:
        """What the row at a position loses."""
        inside = [r for (start, end), r in zip(self.spans, self.repeats, strict=True) if start <= position < end]
        return max(inside, default=0.0)
