"""Which rows of pruned ranges stay: what is run behind a text to score its rows, and how a budget is spent on these.

A score is the largest attention that any query of any layer and head pays to a row. All ranges of a job are scored on
the same text, which ends with the last one, and the same rows stay in all layers and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsejax.cache.radix_prune import choose_rows
from sparsejax.errors import PruneError
from sparsejax.prune_records import OBSERVE, OBSERVED_TOKENS, PruneRequest
from sparsejax.replay_texts import replay_chunks


class Probe(NamedTuple):
    """Tokens whose queries score rows.

    Attributes:
      tokens: int32 [n].
      position: of the first one.
      stop: they see the rows of tokens before this one.
    """

    tokens: np.ndarray
    position: int
    stop: int


class Plan(NamedTuple):
    """What is to be run, and tokens [protected, stop) that stay whatever their scores are."""

    probes: tuple[Probe, ...]
    protected: int


def plan(
    request: PruneRequest,
    ranges: Sequence[tuple[int, int]],
    page_size: int,
    max_probe: int,
    max_tokens: int,
    instruction: Sequence[int],
) -> Plan:
    """What is to be run for a job.

    Args:
      request: of the job.
      ranges: all its ranges, ascending.
      page_size: tokens of a page.
      max_probe: tokens of the longest program.
      max_tokens: of the longest text.
      instruction: token ids that make a model repeat what it has read.

    Raises:
      PruneError: the budget is too small for what must stay, or there is no room behind the text.
    """
    ids, stop = request.ids.astype(np.int32), ranges[-1][1]
    if request.policy == OBSERVE:
        begin, protected = observed(request, ranges, page_size)
        step = max(page_size, max_probe // page_size * page_size)
        probes = [Probe(ids[at : min(stop, at + step)], at, at) for at in range(begin, stop, step)]
        return Plan(tuple(probes), protected)
    room = min(max_probe, max_tokens - stop) - len(instruction)
    if room < 1:
        raise PruneError(f"behind the last range is no room for the {len(instruction) + 1} tokens that score its rows")
    postfix = min(request.prev_postfix_tokens, room // 2)
    texts = replay_chunks(ids, ranges, min(request.score_chunk_tokens, room - postfix), postfix, instruction)
    return Plan(tuple(Probe(text, stop, stop) for text in texts), stop)


def observed(request: PruneRequest, ranges: Sequence[tuple[int, int]], page_size: int) -> tuple[int, int]:
    """What a job observes at the end of its last range: the first token of it, and the first that stays.

    Raises:
      PruneError: so many tokens are to be observed that not all of them may stay. What nobody asked for is observed as
        well, and the newest of it stay.
    """
    (start, stop), asked = ranges[-1], request.observation_tokens
    begin = max(start + page_size, (stop - (asked or OBSERVED_TOKENS)) // page_size * page_size)
    protected = min(begin, stop)
    begin = min(begin, stop - page_size)  # a range of one page observes itself, and nothing of it is sure to stay
    keep = max(request.parts, key=lambda part: max(part.ranges)).keep_tokens
    if stop - protected > keep:
        if asked is not None:
            text = f"the {stop - protected} observed tokens stay, more than the {keep} that may"
            raise PruneError(text, param="keep_tokens")
        protected = stop - keep // page_size * page_size
    return begin, protected


def choose(
    scores: Sequence[np.ndarray],
    tokens: Sequence[np.ndarray],
    keep: int,
    protected: int,
    page_size: int,
    whole_pages: bool,
) -> list[np.ndarray]:
    """Which rows of the ranges of one part stay.

    Args:
      scores: of the rows of each range, float32 [n].
      tokens: of these rows, int32 [n].
      keep: rows that may stay of all of them.
      protected: tokens from here on stay.
      page_size: rows of a page.
      whole_pages: pages stay or go as they are; their score is the sum of their rows'.

    Returns:
      int32 indexes among the rows of each range, ascending.
    """
    if keep >= sum(map(len, tokens)):  # of ranges that were pruned before
        return [np.arange(len(each), dtype=np.int32) for each in tokens]
    values = []
    for score, at in zip(scores, tokens, strict=True):
        value = np.nan_to_num(score.astype(np.float64), nan=-np.inf)
        if whole_pages:
            value = np.repeat(value.reshape(-1, page_size).sum(1), page_size)
        values.append(np.where(at >= protected, np.inf, value))
    return choose_rows(values, keep, page_size)
