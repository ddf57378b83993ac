"""Pruning on the mock runner: what its scores are, that packed rows are those that were asked for, what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsejax.geometry import Granularity
from sparsejax.mock import ContractError, MockMethod, MockRunner
from sparsejax.mock_prune import row_score
from sparsejax.plans import DecodeRow, PackRows, PrefillRow, SamplingRow, ScoreRow, UnparkRow

GREEDY, PAGE = SamplingRow(), 4
TOKENS = np.random.default_rng(0).integers(1, 256, 16).astype(np.int32)
GRAINS = list(Granularity)


def pages_of(runner: MockRunner, grain: Granularity, first: int, columns: int) -> np.ndarray:
    """Fresh page ids [layers, heads, columns]; `first` counts pages of the whole slab."""
    shape = runner.limits.geometry.table_shape(grain)
    size = int(np.prod(shape))
    return np.arange(first * size, (first + columns) * size, dtype=np.int32).reshape(*shape, columns)


def runner_with(grain: Granularity, tokens: np.ndarray = TOKENS) -> tuple[MockRunner, np.ndarray]:
    """Row 1 holds 16 tokens on 4 pages."""
    runner = MockRunner(methods=(MockMethod("all", grain),), max_model_len=64)
    pages = pages_of(runner, grain, 1, 4)
    runner.setup_row(1, (), ())
    layer, head, column = np.indices(pages.shape).reshape(3, -1)
    updates = np.stack([layer, head, column, pages.reshape(-1)], 1).astype(np.int32)
    runner.prefill("all", [PrefillRow(1, tokens, True, True, GREEDY, updates)])
    return runner, pages


@pytest.mark.parametrize("grain", GRAINS)
def test_scores_are_those_of_tokens_and_positions(grain: Granularity) -> None:
    runner, pages = runner_with(grain)
    probe = ScoreRow(pages[..., :3], pages_of(runner, grain, 10, 2), TOKENS[:5], 40)
    scores = runner.score_rows("all", probe, None)
    expected = np.zeros(64, np.float32)
    expected[:12] = [row_score(token, i) for i, token in enumerate(TOKENS[:12].tolist())]
    found = runner.read_scores(scores).result()
    assert found.dtype == np.float32
    assert (found == expected).all()
    runner.prune.score = lambda token, position: float(position == 5)
    more = runner.read_scores(runner.score_rows("all", probe, scores)).result()
    expected[5] = 1.0
    assert (more == expected).all()
    assert (runner.read_scores(scores).result() == found).all(), "earlier scores stay as they are"
    runner.decode(
        "all", [DecodeRow(1, GREEDY, np.array([[l, h, 4, p] for (l, h), p in last(runner, grain)], np.int32))]
    )


def last(runner: MockRunner, grain: Granularity) -> list[tuple[tuple[int, ...], int]]:
    pages = pages_of(runner, grain, 20, 1)[..., 0]
    return [(place, int(page)) for place, page in np.ndenumerate(pages)]


@pytest.mark.parametrize("grain", GRAINS)
def test_packed_rows_can_be_attached(grain: Granularity) -> None:
    """Of two pages in the middle four rows stay; a row on them reads its own tokens, and goes on."""
    runner, pages = runner_with(grain)
    kept, target = np.array([1, 2, 4, 7], np.int32), pages_of(runner, grain, 10, 1)
    runner.pack_rows("all", PackRows(pages[..., 1:3], kept, target))
    left = np.concatenate([pages[..., :1], target, pages[..., 3:]], 2)
    lengths = np.full(left.shape[:2], 3 * PAGE - 1, np.int32)
    runner.setup_row(2, (), ())
    seen = TOKENS[:-1]
    runner.unpark("all", UnparkRow(2, left, lengths, seen, None))
    row = runner._rows[2]
    full = runner._rows[1].stamps[0][0]
    positions = [0, 1, 2, 3, *(4 + kept).tolist(), 12, 13, 14]
    assert all(s.tolist() == full[positions].tolist() for layer in row.stamps for s in layer)
    runner.setup_row(3, (), ())
    others = TOKENS.copy()
    others[6] += 1
    with pytest.raises(ContractError, match="of another text"):
        runner.unpark("all", UnparkRow(3, left, lengths, others[:-1], None))
    with pytest.raises(ContractError, match="not in their order"):
        runner.unpark("all", UnparkRow(3, left, lengths, TOKENS[:13], None))


def test_broken_plans_are_noticed() -> None:
    grain = Granularity.LAYER
    runner, pages = runner_with(grain)
    fresh = pages_of(runner, grain, 10, 2)
    probe, pack = ScoreRow(pages, fresh, TOKENS[:5], 16), PackRows(pages, np.arange(8, dtype=np.int32), fresh)
    runner.score_rows("all", probe, None)
    changes = [
        ({"scratch": fresh[..., :1]}, "do not fit"),
        ({"scratch": pages[..., :2]}, "written that are read"),
        ({"scratch": np.zeros_like(fresh)}, "null or listed twice"),
        ({"pages": np.zeros_like(pages)}, "null page is read"),
        ({"pages": pages[..., ::-1].copy()}, "not in the order"),
        ({"pages": np.concatenate([pages[:1], pages[:1, :, ::-1]])}, "different tokens"),
        ({"position": 15}, "sees a row"),
        ({"tokens": TOKENS[:0]}, "not empty"),
    ]
    for change, message in changes:
        with pytest.raises(ContractError, match=message):
            runner.score_rows("all", dataclasses.replace(probe, **change), None)
    packs = [
        ({"rows": np.arange(7, dtype=np.int32)}, "do not fill"),
        ({"rows": np.arange(8, dtype=np.int32)[::-1]}, "not ascending"),
        ({"rows": np.arange(10, 18, dtype=np.int32)}, "not ascending"),
        ({"target": pages[..., :2]}, "written that are read"),
        ({"target": np.repeat(fresh[..., :1], 2, 2)}, "null or listed twice"),
    ]
    for change, message in packs:
        with pytest.raises(ContractError, match=message):
            runner.pack_rows("all", dataclasses.replace(pack, **change))


def test_methods_that_evict_are_refused() -> None:
    runner = MockRunner()
    some = np.ones((1, 1, 1), np.int32)
    with pytest.raises(ContractError, match="no function of the tokens"):
        runner.score_rows("window", ScoreRow(some, some + 1, TOKENS[:1], 4), None)
    with pytest.raises(ContractError, match="no function of the tokens"):
        runner.pack_rows("window", PackRows(some, np.arange(4, dtype=np.int32), some + 1))
