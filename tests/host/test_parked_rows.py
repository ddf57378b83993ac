"""Rows that leave their place and come back: the mock notices what a device would silently get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from sparsejax.mock import ContractError, MockMethod, MockRunner
from sparsejax.plans import DecodeRow, MaintainRow, PrefillRow, SamplingRow, UnparkRow

GREEDY = SamplingRow()
SEEN = [1, 2, 3, 4, 5, 6]


def pages(*ids: int) -> np.ndarray:
    return np.array([[ids]], np.int32)


def table(*ids: int, start: int = 0) -> np.ndarray:
    return np.array([(0, 0, start + i, page) for i, page in enumerate(ids)], np.int32)


def unpark(parked, row: int = 3, ids=(1, 2), seen=SEEN, length: int | None = None) -> UnparkRow:
    lengths = np.full((1, 1), len(seen) if length is None else length, np.int32)
    return UnparkRow(row, pages(*ids), lengths, np.array(seen, np.int32), parked)


def parked_runner(method: str = "dense"):
    """Six tokens on two pages of four, without a row."""
    runner = MockRunner(methods=(MockMethod(), MockMethod("window", window=3, interval=1)))
    runner.setup_row(1, (), ())
    runner.prefill(method, [PrefillRow(1, np.array(SEEN, np.int32), True, True, GREEDY, table(1, 2))])
    return runner, runner.park(method, 1)


def test_a_parked_row_goes_on_under_another_id() -> None:
    runner, parked = parked_runner()
    runner.setup_row(3, (), ())
    runner.unpark("dense", unpark(parked))
    more = np.array([7, 8], np.int32)
    ticket = runner.prefill("dense", [PrefillRow(3, more, False, True, GREEDY, None)])
    assert ticket.result().tokens.tolist() == runner.generate([*SEEN, 7, 8], 1)
    with pytest.raises(ContractError, match="no owner"):
        runner.decode("dense", [DecodeRow(1, GREEDY)])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"row": 4}, "not set up"),
        ({"seen": [1, 2, 3, 4, 5, 9]}, "other tokens"),
        ({"seen": SEEN[:5], "length": 6}, "other tokens"),
        ({"length": 5}, "rows were parked"),
        ({"ids": (2, 1)}, "did not write"),
        ({"ids": (1,)}, "pages|null page"),
    ],
)
def test_wrong_plans_are_noticed(plan: dict, message: str) -> None:
    runner, parked = parked_runner()
    runner.setup_row(3, (), ())
    with pytest.raises(ContractError, match=message):
        runner.unpark("dense", unpark(parked, **plan))


def test_pages_given_to_somebody_else_are_noticed() -> None:
    runner, parked = parked_runner()
    for row in (2, 3):
        runner.setup_row(row, (), ())
    runner.prefill("dense", [PrefillRow(2, np.array([9] * 5, np.int32), True, True, GREEDY, table(3, 2))])
    with pytest.raises(ContractError, match="did not write"):
        runner.unpark("dense", unpark(parked))
    with pytest.raises(ContractError, match="did not write"):
        runner.export_parked("dense", pages(1, 2), parked)


def test_the_newest_tokens_are_taken_back_unless_a_compaction_saw_them() -> None:
    runner, parked = parked_runner()
    runner.setup_row(3, (), ())
    runner.unpark("dense", unpark(runner.trim("dense", parked, 2), ids=(1,), seen=SEEN[:4]))
    more = np.array([9, 9], np.int32)
    ticket = runner.prefill("dense", [PrefillRow(3, more, False, True, GREEDY, table(2, start=1))])
    assert ticket.result().tokens.tolist() == runner.generate([1, 2, 3, 4, 9, 9], 1)
    runner, parked = parked_runner("window")
    runner.setup_row(3, (), ())
    runner.unpark("window", unpark(parked))
    runner.prefill("window", [PrefillRow(3, np.array([7], np.int32), False, False, GREEDY, None)])
    length = np.full((1, 1), 7, np.int32)
    runner.maintain("window", MaintainRow(3, "evict", "chunk", length, np.full((1, 1), 3, np.int32), pages(4), 1))
    parked = runner.park("window", 3)
    with pytest.raises(ContractError, match="has seen"):
        runner.trim("window", parked, 1)


def test_to_the_host_and_back_without_a_row() -> None:
    runner, parked = parked_runner()
    swapped = runner.export_parked("dense", pages(1, 2), parked)
    assert swapped.nbytes == 128
    back = runner.import_parked("dense", pages(5, 6), swapped)
    runner.copy_pages("dense", ((5, 7), (6, 8)))
    for row, ids in ((3, (5, 6)), (4, (7, 8))):
        runner.setup_row(row, (), ())
        runner.unpark("dense", unpark(back, row, ids))
    for row in (3, 4):
        ticket = runner.prefill("dense", [PrefillRow(row, np.array([row], np.int32), False, True, GREEDY, None)])
        assert ticket.result().tokens.tolist() == runner.generate([*SEEN, row], 1)
