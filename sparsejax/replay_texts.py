"""Texts that make a model repeat what it has read: what their queries attend to says which rows the text needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

INSTRUCTION = "Repeat the previous context exactly:"
"""Text before each replay."""


def replay_spans(ranges: Iterable[tuple[int, int]], chunk_tokens: int, postfix_tokens: int) -> list[tuple[int, int]]:
    """The tokens [start, stop) that each replay repeats: a chunk, and some of its range before it.

    Args:
      ranges: of tokens [start, stop).
      chunk_tokens: of a chunk, at least 1; the last one of a range may be shorter.
      postfix_tokens: before each chunk, fewer at the beginning of a range.
    """
    return [
        (max(start, first - postfix_tokens), min(stop, first + chunk_tokens))
        for start, stop in ranges
        for first in range(start, stop, chunk_tokens)
    ]


def replay_text(ids: np.ndarray, span: tuple[int, int], instruction: Sequence[int]) -> np.ndarray:
    """int32 token ids of one replay: the instruction, then the span of `ids`."""
    return np.concatenate([np.asarray(instruction, np.int32), np.asarray(ids)[slice(*span)].astype(np.int32)])


def replay_chunks(
    ids: np.ndarray,
    ranges: Iterable[tuple[int, int]],
    chunk_tokens: int,
    postfix_tokens: int,
    instruction: Sequence[int],
) -> list[np.ndarray]:
    """All replays of some ranges of a text, int32 token ids of each. See `replay_spans` and `replay_text`."""
    spans = replay_spans(ranges, chunk_tokens, postfix_tokens)
    return [replay_text(ids, span, instruction) for span in spans]
