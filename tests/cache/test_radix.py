"""Matches, leases, publication, order of loss, pins and pruning; and a model of the index under random programs."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from sparsejax.cache.chain import as_ids
from sparsejax.cache.pages import IntegrityError
from sparsejax.cache.radix import RadixIndex
from sparsejax.cache.radix_prune import choose_rows, normal_ranges
from sparsejax.cache.radix_records import StalePlanError
from sparsejax.cache.radix_tree import Scope
from sparsejax.errors import PinRefusedError, PrefixNotFoundError, PruneError

SIZE = 4
MINE, OTHER = Scope(b"m" * 16, "a", "dense", b"f"), Scope(b"o" * 16, "b", "dense", b"f")


class Payloads:
    """Pages that must be given back once each, and what is in them."""

    def __init__(self) -> None:
        self.live: dict[int, object] = {}
        self.numbers = itertools.count(1)

    def make(self, content: object = None) -> int:
        number = next(self.numbers)
        self.live[number] = content
        return number

    def release(self, payload: int) -> None:
        del self.live[payload]  # KeyError: released twice


class Box:
    def __init__(self, **options) -> None:
        self.now = 1000.0
        self.rows = Payloads()
        self.index = RadixIndex(SIZE, self.rows.release, lambda: self.now, **{"max_pinned_pages": (64, 32), **options})

    def begin(self, ids, scope: Scope = MINE, **options):
        match = self.index.match(scope, as_ids(ids), **options)
        lease = self.index.lease(match)
        self.index.note(match)
        return match, lease

    def publish(self, lease, ids) -> int:
        plan = self.index.plan_insert(lease, as_ids(ids))
        return self.index.insert(plan, [self.rows.make((tuple(ids), column)) for column in plan.wanted])

    def serve(self, ids, scope: Scope = MINE):
        """A whole request that computes these tokens. Returns what it found."""
        match, lease = self.begin(ids, scope)
        self.publish(lease, ids)
        self.index.release(lease)
        return match

    def prune(self, ids, ranges, keep_pages=None, scope: Scope = MINE, policy: str = "test") -> int:
        """Keeps the first pages of each range."""
        plan = self.index.plan_cut(scope, as_ids(ids), ranges)
        counts = keep_pages or [0] * len(plan)
        kept = [
            ([self.rows.make("kept") for _ in range(n)], rows.positions[: n * SIZE])
            for rows, n in zip(plan, counts, strict=True)
        ]
        return self.index.cut(plan, kept, policy)

    def end(self) -> None:
        self.index.check_integrity()
        self.index.evict(1 << 30)
        assert not self.rows.live
        assert not self.index.roots


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


# Matching and reuse.


@pytest.mark.parametrize("n", [1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 39])
def test_20_reuse_is_whole_blocks_before_the_last_token(n: int) -> None:
    box, ids = Box(), text(n)
    assert box.serve(ids).blocks == ()
    match = box.serve(ids)
    assert len(match.blocks) == (n - 1) // SIZE == match.limit
    assert match.miss is None
    assert len(box.index.match(MINE, as_ids(ids), whole=True).blocks) == n // SIZE
    box.end()


def test_21_22_nothing_beyond_the_common_prefix_and_nothing_of_others() -> None:
    box, ids = Box(), text(40)
    box.serve(ids)
    for at in range(40):
        other = [*ids, 1]
        other[at] += 1
        match = box.index.match(MINE, as_ids(other))
        assert len(match.blocks) == at // SIZE
        assert match.miss is not None
        assert (match.miss.reason, match.miss.token) == ("diverged", at)
    assert box.index.match(OTHER, as_ids(ids)).miss.reason == "cold", "another tenant is told nothing"
    salted = Scope(b"s" * 16, "a", "dense", b"f")
    assert box.index.match(salted, as_ids(ids)).miss.reason == "salt"
    assert box.index.match(Scope(b"q" * 16, "a", "quest", b"g"), as_ids(ids)).miss.reason == "method"
    assert box.index.match(Scope(b"q" * 16, "a", "dense", b"g"), as_ids(ids)).miss.reason == "fingerprint"
    assert box.index.match(MINE, as_ids([*ids, 1, 2])).miss is None
    assert box.index.match(MINE, as_ids([*ids, *text(9)])).miss.reason == "cold"
    box.end()


def test_23_the_first_payload_stays_and_a_block_is_leased_once() -> None:
    box, ids = Box(), text(16)
    (_, first), (_, second) = box.begin(ids), box.begin(ids)
    assert box.publish(first, ids[:8]) == 2
    assert box.publish(first, ids) == 2
    before = list(box.rows.live)
    assert box.publish(second, ids) == 0
    assert list(box.rows.live) == before
    assert [block.refs for block in first.blocks] == [2] * 4
    assert second.columns == [0, 1, 2, 3]
    box.index.check_integrity()
    box.index.release(first)
    with pytest.raises(IntegrityError):
        box.index.release(first)
    assert box.index.evict(10) == 0, "the other one still has them"
    box.index.release(second)
    box.end()


def test_24_a_match_is_outdated_when_it_may_change() -> None:
    box, ids = Box(), text(41)
    box.serve(ids[:20])
    match = box.index.match(MINE, as_ids(ids))
    assert not box.index.outdated(match, as_ids(ids))
    box.serve(text(20, 5))
    assert not box.index.outdated(match, as_ids(ids)), "of another text"
    with pytest.raises(StalePlanError):
        box.index.lease(match)
    box.serve(ids)
    assert box.index.outdated(match, as_ids(ids)), "the next block appeared"
    match = box.index.match(MINE, as_ids(ids))
    assert box.index.delete(MINE, as_ids(text(4, 5)))[0] == 5
    assert not box.index.outdated(match, as_ids(ids)), "another text went"
    box.index.evict(1)
    assert box.index.outdated(match, as_ids(ids)), "its last block went"
    assert box.index.match(MINE, as_ids(ids)).miss.reason == "evicted"
    box.end()


def test_26_plans_change_nothing_and_old_ones_are_refused() -> None:
    box, ids = Box(), text(41)
    _, lease = box.begin(ids)
    plan = box.index.plan_insert(lease, as_ids(ids))
    state = dict(box.index.stats()), box.index.changes
    box.index.match(MINE, as_ids(ids))
    box.index.plan_insert(lease, as_ids(ids))
    with pytest.raises(PrefixNotFoundError):
        box.index.plan_cut(MINE, as_ids(ids), [(0, 4)])
    assert state == (dict(box.index.stats()), box.index.changes)
    box.serve(text(8, 3))
    payloads = [box.rows.make() for _ in plan.wanted]
    with pytest.raises(StalePlanError):
        box.index.insert(plan, payloads)
    for payload in payloads:
        box.rows.release(payload)
    box.index.release(lease)
    box.end()


def test_a_row_can_give_up_its_end_and_publish_another() -> None:
    box, ids = Box(), text(24)
    _, lease = box.begin(ids)
    box.publish(lease, ids)
    other = [*ids[:12], *text(12, 9)]
    with pytest.raises(IntegrityError, match="other tokens"):
        box.index.plan_insert(lease, as_ids([*other, *text(4)]))
    box.index.trim(lease, 3)
    assert box.publish(lease, other) == 3
    box.index.release(lease)
    for known in (ids, other):
        assert len(box.index.match(MINE, as_ids(known), whole=True).blocks) == 6
    box.end()


# Order of loss.


def test_81_leaves_go_first_by_class_and_worth() -> None:
    box = Box(half_life_s=10.0)
    shared, tails = text(8), [text(8, seed) for seed in (1, 2, 3)]
    for tail in tails:
        box.serve([*shared, *tail])
        box.now += 1
    for _ in range(4):
        box.serve([*shared, *tails[0]])  # old, but found again and again
    box.index.set_retention(MINE, as_ids([*shared, *tails[1]]), 1)

    def there() -> list[int]:
        return [len(box.index.match(MINE, as_ids([*shared, *tail]), whole=True).blocks) for tail in tails]

    assert there() == [4, 4, 4]
    box.index.evict(2)
    assert there() == [4, 4, 2]
    box.index.evict(1)
    assert there() == [3, 4, 2], "what stays longer is worth less, but of another class"
    box.end()


def test_81_a_class_is_for_all_below() -> None:
    box = Box()
    ids, others = text(16), text(16, 1)
    box.serve(ids)
    box.serve(others)
    assert box.index.set_retention(MINE, as_ids(ids[:4]), 5) == 4
    box.now += 1e6
    box.serve([*ids, *text(4, 2)])  # what is added has the class of what it follows
    assert box.index.evict(4) == 4
    assert len(box.index.match(MINE, as_ids(ids), whole=True).blocks) == 4
    assert box.index.match(MINE, as_ids(others)).miss.reason == "evicted"
    with pytest.raises(PrefixNotFoundError):
        box.index.set_retention(MINE, as_ids(others), 1)
    box.end()


def test_38_pins_have_a_cap_and_an_end() -> None:
    box = Box(max_pinned_pages=(8, 5))
    a, b, c = text(16), text(16, 1), text(16, 2)
    box.serve(a)
    box.serve(b)
    box.serve(c, OTHER)
    box.index.pin(MINE, as_ids(a), 10.0)
    box.index.pin(MINE, as_ids(a), 5.0)
    assert box.index.stats()["pinned_pages"] == 4, "a block counts once"
    with pytest.raises(PinRefusedError):
        box.index.pin(MINE, as_ids(b), 10.0)
    kept = box.index.pin(OTHER, as_ids(c), 100.0)
    assert box.index.evict(100) == 4
    assert len(box.index.match(MINE, as_ids(a), whole=True).blocks) == 4
    assert box.index.delete(MINE, as_ids(a[:4])) == (0, {"leased": 0, "pinned": 4})
    box.now += 6
    assert box.index.evict(100) == 0
    box.now += 5
    assert box.index.evict(100) == 4
    box.index.unpin(kept)
    box.index.unpin(kept)
    box.end()


def test_82_publication_under_pressure() -> None:
    box = Box(max_blocks=6)
    ids = text(40)
    box.serve(text(16, 1))
    _, lease = box.begin(ids)
    assert box.publish(lease, ids[:16]) == 4, "old ones went"
    assert box.index.num_blocks == 6
    assert box.publish(lease, ids) == 2, "what is in use stays"
    assert len(lease.blocks) == 6
    assert box.publish(lease, ids) == 0
    box.index.release(lease)
    assert len(box.index.match(MINE, as_ids(ids)).blocks) == 6
    box.end()


def test_84_deletion_is_partial_where_blocks_are_held() -> None:
    box, ids = Box(), text(32)
    box.serve(ids)
    box.serve([*ids[:16], *text(16, 1)])
    _, lease = box.begin(ids[:25])
    assert box.index.delete(MINE, as_ids(ids[:4])) == (6, {"leased": 6, "pinned": 0})
    with pytest.raises(PrefixNotFoundError):
        box.index.delete(MINE, as_ids(ids))
    box.index.release(lease)
    assert box.index.delete(MINE, as_ids(ids[:8])) == (5, {"leased": 0, "pinned": 0})
    box.end()


# Pruning.


def test_85_ranges_are_checked() -> None:
    assert normal_ranges([(8, 16), (0, 4), (4, 8)], 20, 4) == [(0, 16)]
    assert normal_ranges([(8, 16), (0, 4)], 20, 4) == [(0, 4), (8, 16)]
    for bad in (
        [],
        [(0, 0)],
        [(4, 0)],
        [(-4, 4)],
        [(0, 24)],
        [(0, 6)],
        [(2, 8)],
        [(0, 8), (4, 12)],
        [(0, True)],
        [(0, 4.0)],
        [(0,)],
    ):
        with pytest.raises(PruneError) as error:
            normal_ranges(bad, 20, 4)
        assert (error.value.status, error.value.param) == (400, "ranges")


def test_86_one_budget_over_ranges() -> None:
    rng = np.random.default_rng(0)
    scores = [rng.random(12), rng.random(8) + 5, np.full(4, np.nan)]
    for keep in range(24):
        chosen = choose_rows(scores, keep, 4)
        assert sum(map(len, chosen)) == keep // 4 * 4
        assert all(len(c) % 4 == 0 and (np.diff(c) > 0).all() for c in chosen)
    assert [len(c) for c in choose_rows(scores, 8, 4)] == [0, 8, 0]
    assert choose_rows([np.zeros(8), np.zeros(4)], 4, 4)[0].tolist() == [0, 1, 2, 3], "ties: the earlier one"
    best = choose_rows([np.array([1.0, 5, 1, 1, 5, 5, 1, 5])], 4, 4)[0]
    assert best.tolist() == [1, 4, 5, 7]
    for bad in (24, -1, True, 1.0):
        with pytest.raises(PruneError, match="keep_tokens"):
            choose_rows(scores, bad, 4)


def test_87_the_route_stays_and_rows_are_gone() -> None:
    box, ids = Box(), text(64)
    box.serve(ids)
    assert box.prune(ids, [(8, 24), (32, 48)], [1, 2]) == 8 - 3
    match = box.index.match(MINE, as_ids(ids), whole=True)
    assert len(match.blocks) == 16
    assert (len(match.pages), match.missing, match.tainted) == (11, 20, 0)
    assert match.columns == (0, 1, -1, -1, -1, -1, 3, 4, -1, -1, -1, -1, 7, 8, 9, 10)
    longer = [*ids, *range(9)]
    _, lease = box.begin(longer)
    assert lease.tainted
    assert box.publish(lease, longer) == 2
    assert lease.columns[-2:] == [11, 12]
    match = box.index.match(MINE, as_ids(longer))
    assert (len(match.blocks), match.missing, match.tainted) == (18, 20, 2)
    box.index.release(lease)
    box.end()


def test_91_exact_requests_stop_before_what_was_pruned() -> None:
    box, ids = Box(), text(32)
    box.serve(ids)
    box.prune(ids, [(8, 16)])
    match = box.index.match(MINE, as_ids(ids), exact=True)
    assert (len(match.blocks), match.missing, match.miss.reason) == (2, 0, "pruned")
    ends_inside = box.index.match(MINE, as_ids(ids[:13]))
    assert (len(ends_inside.blocks), ends_inside.miss.reason, ends_inside.miss.token) == (2, "pruned", 8)
    lease = box.index.lease(match)
    assert not lease.tainted
    assert box.publish(lease, ids) == 0, "all is known already"
    assert box.index.match(MINE, as_ids(ids), whole=True).missing == 8, "what was pruned stays pruned"
    box.index.release(lease)
    box.end()


def test_a_text_that_leaves_a_pruned_range_keeps_its_rows() -> None:
    box, ids = Box(), text(32)
    branch = [*ids[:12], *text(12, 1)]
    box.serve(ids)
    box.serve(branch)
    assert box.prune(ids, [(4, 24)]) == 3, "of five blocks two are needed"
    assert box.index.match(MINE, as_ids(branch), whole=True).missing == 0
    assert len(box.index.match(MINE, as_ids(branch), whole=True).blocks) == 6
    assert box.index.match(MINE, as_ids(ids), whole=True).missing == 20
    assert box.index.delete(MINE, as_ids(branch[:16]))[0] == 3
    assert len(box.rows.live) == 1 + 2, "nobody needs the two any more"
    assert len(box.index.match(MINE, as_ids(ids), whole=True).blocks) == 8
    box.end()


def test_ranges_can_be_pruned_again_as_a_whole() -> None:
    box, ids = Box(), text(48)
    box.serve(ids)
    box.prune(ids, [(8, 24)], [2])
    for bad in ((12, 32), (4, 16), (12, 20), (8, 20)):
        with pytest.raises(PruneError, match=r"pruned before"):
            box.index.plan_cut(MINE, as_ids(ids), [bad])
    (rows,) = box.index.plan_cut(MINE, as_ids(ids), [(8, 24)])
    assert rows.positions.tolist() == list(range(8, 16))
    assert box.prune(ids, [(8, 24)], [1]) == 1
    assert box.prune(ids, [(4, 32)], [2]) == 2
    match = box.index.match(MINE, as_ids(ids), whole=True)
    assert (len(match.blocks), len(match.pages), match.missing) == (12, 7, 20)
    assert box.prune(ids, [(4, 32)], [2]) == 0, "all that is left stays"
    box.end()


def test_89_a_stale_cut_changes_nothing() -> None:
    box, ids = Box(), text(32)
    box.serve(ids)
    plan = box.index.plan_cut(MINE, as_ids(ids), [(4, 12), (16, 24)])
    for wrong in ([box.rows.make()], np.arange(4, 7)), ([box.rows.make()], np.arange(12, 16)), ([1, 1, 1], []):
        with pytest.raises(ValueError, match="kept of a range"):
            box.index.cut(plan, [wrong, ([], np.zeros(0, np.int32))])
    for payload in list(box.rows.live)[-2:]:
        box.rows.release(payload)
    box.prune(ids, [(16, 20)])
    box.serve([*ids, *text(8, 1)])
    with pytest.raises(StalePlanError):
        box.index.cut(plan, [([], np.zeros(0, np.int32))] * 2)
    assert box.index.match(MINE, as_ids(ids), whole=True).missing == 4
    box.end()


def test_88_readers_keep_what_they_have_and_go_on() -> None:
    box, ids = Box(), text(32)
    _, lease = box.begin(ids)
    box.publish(lease, ids[:12])  # it stands in the middle of the range
    box.serve(ids)
    assert box.prune(ids, [(4, 24)]) == 5
    other = [*ids[:12], *text(12, 3)]
    assert box.publish(lease, other) == 3, "two hollow blocks get its rows again"
    assert box.index.stats()["revived_blocks"] == 2
    match = box.index.match(MINE, as_ids(other), whole=True)
    assert (len(match.blocks), match.missing, match.tainted) == (6, 0, 0)
    assert box.index.match(MINE, as_ids(ids), whole=True).missing == 20
    box.index.release(lease)
    box.end()


def test_38_pruned_blocks_count_as_what_they_may_hold_again() -> None:
    box, ids = Box(max_pinned_pages=(8, 5)), text(32)
    _, lease = box.begin(ids)
    box.publish(lease, ids[:12])
    box.serve(ids)
    box.prune(ids, [(4, 24)])
    with pytest.raises(PinRefusedError):
        box.index.pin(MINE, as_ids(ids), 10.0)  # three pages now, eight blocks
    pin = box.index.pin(MINE, as_ids(ids[:20]), 10.0)
    assert box.index.stats()["pinned_pages"] == 5
    assert box.publish(lease, [*ids[:12], *text(12, 3)]) == 3
    assert box.index.stats()["pinned_pages"] == 5
    box.index.unpin(pin)
    assert box.index.stats()["pinned_pages"] == 0
    box.index.release(lease)
    box.end()


def test_a_path_that_is_pruned_twice_under_a_reader_is_closed() -> None:
    box, ids = Box(), text(32)
    box.serve(ids)
    box.prune(ids, [(4, 12)])
    _, lease = box.begin(ids[:13])
    assert lease.columns == [0, -1, -1]
    box.prune(ids, [(4, 24)])
    assert box.publish(lease, [*ids[:12], *text(8, 1)]) == 0
    assert lease.closed
    box.index.release(lease)
    box.end()


# Cost.


def test_a_long_prompt_is_matched_quickly() -> None:
    box = Box()
    box.index.block_tokens = 16
    ids = as_ids(text(131_072))
    match, lease = box.begin(ids)
    plan = box.index.plan_insert(lease, ids)
    box.index.insert(plan, [box.rows.make() for _ in plan.wanted])
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        match = box.index.match(MINE, ids)
        best = min(best, time.perf_counter() - began)
    assert len(match.blocks) == 8191
    assert best < 0.05, f"{best * 1e3:.1f} ms"
    box.index.release(lease)
    began = time.perf_counter()
    assert box.index.evict(8192) == 8192
    assert time.perf_counter() - began < 1.0
    assert not box.rows.live


@pytest.mark.parametrize(("half_lives", "first"), [(0, 1), (3, 1), (4, 3)])
def test_81_what_costs_more_to_compute_again_stays_longer(half_lives: int, first: int) -> None:
    """The last block of the long text costs nine times what the other one does: it is worth 3 half-lives more."""
    box = Box(half_life_s=10.0, cost=lambda start: 1.0 + start)
    box.serve(text(3 * SIZE))
    box.now += 10.0 * half_lives
    box.serve(text(SIZE, 7))
    assert box.index.next_victim().depth == first
    box.end()
