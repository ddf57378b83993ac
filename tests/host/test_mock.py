"""The mock notices broken plans: otherwise the scheduler's tests would prove nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsejax.geometry import Granularity
from sparsejax.launches import RunnerError
from sparsejax.mock import ContractError, MockMethod, MockRunner, hash_script
from sparsejax.plans import DecodeRow, ForkRow, MaintainRow, PrefillRow, SamplingRow
from sparsejax.request import Request, SamplingParams
from sparsejax.rows import RowPages
from tests.host.bench import Bench

GREEDY = SamplingRow()


def table(*pages: int, start: int = 0) -> np.ndarray:
    return np.array([(0, 0, start + i, page) for i, page in enumerate(pages)], np.int32)


def chunk(row: int, tokens: list[int], pages: np.ndarray | None, first: bool = True) -> PrefillRow:
    return PrefillRow(row, np.array(tokens, np.int32), first, True, GREEDY, pages)


def runner_with(row: int = 1, pages: tuple[int, ...] = (1, 2)) -> MockRunner:
    """Row 1 holds six tokens on two pages of four."""
    runner = MockRunner(methods=(MockMethod(), MockMethod("window", window=3, interval=1)))
    runner.setup_row(row, (), ())
    runner.prefill("dense", [chunk(row, [1, 2, 3, 4, 5, 6], table(*pages))])
    return runner


def test_a_good_plan_passes() -> None:
    runner = runner_with()
    runner.decode("dense", [DecodeRow(1, GREEDY)])
    runner.decode("dense", [DecodeRow(1, GREEDY)])
    ticket = runner.decode("dense", [DecodeRow(1, GREEDY, table(3, start=2))])
    assert ticket.is_ready()
    assert ticket.result().tokens.shape == (1,)
    with pytest.raises(ContractError, match="collected twice"):
        ticket.result()


def test_a_missing_page_is_noticed() -> None:
    runner = runner_with()
    runner.decode("dense", [DecodeRow(1, GREEDY)])
    runner.decode("dense", [DecodeRow(1, GREEDY)])
    with pytest.raises(ContractError, match="null page"):
        runner.decode("dense", [DecodeRow(1, GREEDY)])


def test_a_page_given_to_somebody_else_is_noticed() -> None:
    runner = runner_with()
    runner.setup_row(2, (), ())
    runner.prefill("dense", [chunk(2, [9, 9, 9, 9, 9], table(3, 2))])
    with pytest.raises(ContractError, match="reads what it did not write"):
        runner.decode("dense", [DecodeRow(1, GREEDY)])


def test_an_append_to_a_shared_page_is_noticed() -> None:
    runner = runner_with()
    runner.setup_row(2, (), ())
    runner.fork("dense", ForkRow(1, 2, table(1, 2), ()))  # the partial page should have been copied
    runner.decode("dense", [DecodeRow(1, GREEDY, token=7)])
    runner.decode("dense", [DecodeRow(2, GREEDY, token=8)])
    with pytest.raises(ContractError, match="reads what it did not write"):
        runner.decode("dense", [DecodeRow(1, GREEDY)])


def test_a_fork_with_a_wrong_copy_is_noticed() -> None:
    runner = runner_with()
    runner.setup_row(2, (), ())
    with pytest.raises(ContractError, match="reads what it did not write"):
        runner.fork("dense", ForkRow(1, 2, table(1, 3), ((1, 3),)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"length": np.array([[5]], np.int32)}, "has"),
        ({"kept": np.array([[2]], np.int32)}, "keeps"),
        ({"new_pages": np.array([[[1]]], np.int32)}, "fresh pages"),
        ({"new_pages": np.array([[[0]]], np.int32)}, "fresh pages"),
        ({"new_pages": np.array([[[5, 6]]], np.int32)}, "wrong shape"),
        ({"observed_tokens": 3}, "observed_tokens"),
    ],
)
def test_a_wrong_compaction_is_noticed(change: dict, complaint: str) -> None:
    runner = MockRunner(methods=(MockMethod("window", window=3, interval=1),))
    runner.setup_row(1, (), ())
    runner.prefill("window", [chunk(1, [1, 2, 3, 4, 5, 6], table(1, 2))])
    length, kept = np.array([[6]], np.int32), np.array([[3]], np.int32)
    plan = MaintainRow(1, "evict", "token", length, kept, np.array([[[5]]], np.int32), 0)
    with pytest.raises(ContractError, match=complaint):
        runner.maintain("window", dataclasses.replace(plan, **change))
    runner.maintain("window", plan)
    runner.decode("window", [DecodeRow(1, GREEDY)])


def test_rows_without_setup_owner_or_token_are_noticed() -> None:
    runner = runner_with()
    with pytest.raises(ContractError, match="not set up"):
        runner.prefill("dense", [chunk(2, [1], table(3))])
    runner.setup_row(2, (), ())
    with pytest.raises(ContractError, match="no owner"):
        runner.decode("dense", [DecodeRow(2, GREEDY)])
    with pytest.raises(ContractError, match="belongs to dense"):
        runner.decode("window", [DecodeRow(1, GREEDY)])
    with pytest.raises(ContractError, match="no bucket"):
        runner.prefill("dense", [chunk(2, [1] * 257, table(*range(3, 70)))])


def test_swapped_rows_come_back_as_they_left_and_nowhere_else() -> None:
    runner = runner_with()
    pages = np.array([[[1, 2]]], np.int32)
    with pytest.raises(ContractError, match="other pages"):
        runner.export_row("dense", 1, pages[..., ::-1])
    swapped = runner.export_row("dense", 1, pages)
    runner.setup_row(2, (), ())
    runner.prefill("dense", [chunk(2, [9] * 8, table(1, 2))])
    runner.setup_row(3, (), ())
    runner.import_row("dense", 3, np.array([[[7, 8]]], np.int32), swapped)
    runner.decode("dense", [DecodeRow(3, GREEDY)])


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("damage", ["swap layers", "free early", "shift columns"])
def test_table_mistakes_of_a_scheduler_are_noticed(granularity: Granularity, damage: str) -> None:
    """Damage a real scheduler's plans: each mistake is caught at the next step of some row."""
    bench = Bench(methods=(MockMethod("m", granularity),), num_layers=3)
    bench.submit(20, 40)
    bench.step(3)
    bench.checks = False
    (seq,) = bench.scheduler.running
    pages: RowPages = seq.pages
    if damage == "free early":
        bench.scheduler.memory.pool.free(granularity, pages.held()[:4])
        bench.submit(30, 5)
    else:
        append = pages.append

        def damaged(tokens: int) -> np.ndarray | None:
            updates = append(tokens)
            if updates is not None and damage == "shift columns":
                updates[:, 2] += 1
            elif updates is not None and len(updates) > 1:
                updates[:, 3] = updates[::-1, 3]
                updates[0, 3] = updates[1, 3]
            elif updates is not None:
                updates[:, 3] = pages.table[0, 0, 0]
            return updates

        pages.append = damaged  # type: ignore[method-assign]
    with pytest.raises(RunnerError, match="ContractError"):
        bench.run()


def test_the_text_is_printable_and_depends_on_everything() -> None:
    runner = MockRunner()
    text = bytes(runner.generate(b"hello", 200, 1))
    assert text.decode("ascii").isprintable()
    assert text != bytes(runner.generate(b"hello", 200, 2))
    assert text != bytes(runner.generate(b"hellp", 200, 1))
    assert hash_script([1, 2], 0, 3) == hash_script([1, 2], 0, 3)
    echo = MockRunner(script="echo")
    assert bytes(echo.generate(b"abc", 7)) == b"abcabca"


def test_verification_may_be_turned_off() -> None:
    bench = Bench(verify=False)
    bench.submit(500, 30)
    bench.run()
    bench.check_done("r000")


def test_requests_carry_their_own_clock() -> None:
    request = Request("a", (1,), SamplingParams())
    assert request.arrival_s > 0
