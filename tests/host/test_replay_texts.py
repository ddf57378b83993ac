"""Texts of replays: every token of a range is repeated once, behind what stands before it within its range."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax.replay_texts import replay_chunks, replay_spans

IDS = np.arange(100, 150, dtype=np.uint32)


def test_chunks_begin_with_what_stands_before_them_in_their_range() -> None:
    texts = replay_chunks(IDS, [(4, 14), (20, 24)], 4, 3, (7, 8))
    assert [text.tolist() for text in texts] == [
        [7, 8, 104, 105, 106, 107],
        [7, 8, *range(105, 112)],
        [7, 8, *range(109, 114)],
        [7, 8, *range(120, 124)],
    ]
    assert {text.dtype for text in texts} == {np.dtype(np.int32)}


@pytest.mark.parametrize("postfix", [0, 5, 100])
@pytest.mark.parametrize("chunk", [1, 6, 64])
def test_every_token_is_repeated_once(chunk: int, postfix: int) -> None:
    ranges = [(0, 16), (32, 48)]
    spans = replay_spans(ranges, chunk, postfix)
    repeated: list[int] = []
    for start, stop in spans:
        inside = next(r for r in ranges if r[0] <= start < stop <= r[1])
        size = min(chunk, inside[1] - (repeated[-1] + 1 if repeated and repeated[-1] >= inside[0] else inside[0]))
        assert stop - start == size + min(postfix, stop - size - inside[0])
        repeated += range(stop - size, stop)
    assert repeated == [i for r in ranges for i in range(*r)]
