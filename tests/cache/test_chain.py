"""Ids, identity, continuation rules, lookup, order of loss; and a model of the index under random programs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsejax.cache.chain import (
    Chain,
    ChainIds,
    ChainState,
    Checkpoint,
    Tier,
    as_ids,
    common_prefix,
    digest_of,
    fingerprint,
    seed_of,
    stride_hashes,
)
from sparsejax.cache.chain_index import ChainIndex, Turn
from sparsejax.errors import (
    ChainBusyError,
    ChainError,
    ChainFingerprintError,
    ChainGoneError,
    ChainMismatchError,
    ChainNotFoundError,
    ChainOwnerError,
)

KEY = b"k" * 32
PRINT = fingerprint({"model": "m", "method": "window"})
SEED = seed_of(PRINT)


class Payloads:
    """Rows that must be released once each."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.next = 0

    def make(self) -> int:
        self.next += 1
        self.live.add(self.next)
        return self.next

    def release(self, payload: int) -> None:
        self.live.remove(payload)  # KeyError: released twice


class Box:
    def __init__(self, epoch: int = 0, rows: Payloads | None = None, **options) -> None:
        self.now = 100.0
        self.rows = rows or Payloads()
        numbers = itertools.count(1)
        ids = ChainIds(KEY, 0, epoch, random=lambda size: next(numbers).to_bytes(size, "big"))
        self.index = ChainIndex(ids, self.rows.release, lambda: self.now, **options)
        self.turns = 0

    def turn(self, ids, chain_id=None, **options) -> Turn:
        options = {"seed": SEED, "fingerprint": PRINT, "method": "window", "chain_id": chain_id, **options}
        return Turn(as_ids(ids), **options)

    def begin(self, ids, chain_id=None, **options):
        plan = self.index.plan(self.turn(ids, chain_id, **options))
        self.turns += 1
        owner = f"t{self.turns}"
        chain = self.index.apply(plan, owner)
        if plan.forks:
            self.index.place(chain, self.rows.make(), 10, chain.tier)
        return plan, chain, owner

    def complete(self, chain, owner, ledger, processed=None, size=10) -> None:
        payload = self.index.start(chain, owner) or self.rows.make()
        self.index.finish(
            chain, owner, as_ids(ledger), len(ledger) - 1 if processed is None else processed, payload, size
        )

    def talk(self, ids, answer, chain_id=None, **options):
        """A whole turn; returns its plan and chain."""
        plan, chain, owner = self.begin(ids, chain_id, **options)
        self.complete(chain, owner, [*plan.ids.tolist(), *answer])
        return plan, chain


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


# Identity.


def test_ids_tell_who_issued_them() -> None:
    ids = ChainIds(KEY, instance=7, epoch=3)
    mine = ids.mint()
    assert mine.startswith("chain_")
    assert len({ids.mint() for _ in range(100)}) == 100
    assert ids.origin(mine) == "own"
    assert ChainIds(KEY, 7, 4).origin(mine) == "older"
    assert ChainIds(KEY, 8, 3).origin(mine) == "foreign"
    assert ChainIds(b"other", 7, 3).origin(mine) == "forged"
    assert ChainIds(KEY, 7, 2).origin(mine) == "forged", "from the future"
    for i in range(len("chain_") + 12, len(mine) - 1):  # past the fields that say where it is from
        other = "A" if mine[i] != "A" else "B"
        assert ids.origin(mine[:i] + other + mine[i + 1 :]) == "forged", i
    for bad in ("", "chain_", mine[6:], mine[:-3], mine + "AAAA", "chain_" + "é" * 44, "chain_*" + mine[7:]):
        assert ids.origin(bad) == "forged"


def test_17_every_field_changes_the_fingerprint_and_order_does_not() -> None:
    fields = {"model": "m", "layers": [1, 2], "rope": {"base": 1e4, "scale": None}, "chunk": 64}
    assert fingerprint(fields) == fingerprint(dict(reversed(list(fields.items()))))
    others = [{**fields, name: "else"} for name in fields] + [{**fields, "salt": ""}]
    assert len({fingerprint(other) for other in (fields, *others)}) == len(others) + 1
    with pytest.raises(ValueError, match=r"NaN|nan|JSON"):
        fingerprint({"x": float("nan")})
    seeds = {
        seed_of(PRINT, salt, tenant) for salt, tenant in [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
    }
    assert len(seeds) == 5


def test_18_19_digest_and_ids() -> None:
    ids = as_ids([1, 2, 0xFFFFFFFF])
    assert digest_of(ids) == digest_of(ids.astype(">i8"))
    for bad in ([-1], [2**32], [0.5]):
        with pytest.raises(ChainOwnerError):
            as_ids(bad)


def test_stride_hashes_grow_and_cover_everything_before() -> None:
    ids = as_ids(tokens(1000))
    hashes = stride_hashes(SEED, ids)
    assert len(hashes) == 1 + 1000 // 256
    assert stride_hashes(SEED, ids, hashes[:2]) == hashes
    changed = ids.copy()
    changed[0] += 1
    assert not set(stride_hashes(SEED, changed)[1:]) & set(hashes)
    assert common_prefix(ids, changed) == 0
    assert common_prefix(ids[:10], ids) == 10


# Continuation.


def test_worked_examples() -> None:
    box = Box()
    first = tokens(60)
    plan, chain = box.talk(first, tokens(20, 1))  # a
    assert (plan.status, plan.reused, chain.processed, len(chain.ledger)) == ("created", 0, 79, 80)
    assert chain.digest == digest_of(chain.ledger[:79])
    history = chain.ledger.tolist()
    plan, _ = box.talk([*history, *tokens(8, 2)], [5], chain.chain_id)  # b
    assert (plan.status, plan.reused, len(plan.ids) - plan.reused) == ("resumed", 79, 9)
    plan, _ = box.talk(tokens(8, 3), [6], chain.chain_id, append=True)  # c
    assert (plan.status, plan.reused, len(plan.ids)) == ("resumed", 88, 97)
    plan, _ = box.talk(chain.ledger.tolist(), [7], chain.chain_id)  # g: only the unprocessed token is new
    assert len(plan.ids) - plan.reused == 1
    edited = [1, *chain.ledger.tolist()[1:]]
    with pytest.raises(ChainMismatchError, match="diverged at token 0"):  # f, strict
        box.index.plan(box.turn(edited, chain.chain_id, on_miss="error"))
    plan, other = box.talk(edited, [8], chain.chain_id)
    assert plan.status == "recreated"
    assert "diverged at token 0" in (plan.reason or "")
    assert other is not chain
    assert chain.state is ChainState.IDLE, "the old chain can still be resumed"
    with pytest.raises(ChainMismatchError, match="only 50 were sent"):  # h, strict
        box.index.plan(box.turn(first[:50], chain.chain_id, on_miss="error"))
    box.index.drop(chain, "evicted")
    assert box.index.plan(box.turn([*history, 4], chain.chain_id, lookup=False)).status == "recreated"  # j
    with pytest.raises(ChainGoneError, match="evicted") as gone:  # k
        box.index.plan(box.turn([4], chain.chain_id, append=True))
    assert (gone.value.status, gone.value.code, gone.value.recovery) == (410, "chain_gone", "resend_full")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ChainNotFoundError, 404),
        (ChainBusyError, 409),
        (ChainMismatchError, 409),
        (ChainFingerprintError, 409),
        (ChainGoneError, 410),
        (ChainOwnerError, 500),
    ],
)
def test_errors_have_their_status(error: type[ChainError], status: int) -> None:
    found = error("text", chain_id="chain_x")
    assert (found.status, found.chain_id, found.param) == (status, "chain_x", "chain_id")
    assert found.recovery in ("resend_full", "retry_later", "new_chain", "none")
    assert found.retryable == (error is ChainBusyError)


def test_58_a_busy_chain_is_refused_or_forked_from_a_checkpoint() -> None:
    box = Box()
    _, chain = box.talk(tokens(30), [1, 2])
    box.index.add_checkpoint(chain, Checkpoint("prompt_end", 30, box.rows.make()))
    history = chain.ledger.tolist()
    _, _, owner = box.begin([*history, 9], chain.chain_id)
    with pytest.raises(ChainBusyError):
        box.index.plan(box.turn([*history, 9], chain.chain_id, on_busy="error"))
    with pytest.raises(ChainBusyError):
        box.index.plan(box.turn([9], chain.chain_id, append=True))
    plan, fork, _ = box.begin([*history, 9], chain.chain_id)
    assert (plan.status, plan.reused, plan.forks, fork.parent_id) == ("forked", 30, True, chain.chain_id)
    with pytest.raises(ChainBusyError):
        box.index.drop(chain, "deleted")
    box.complete(chain, owner, [*history, 9, 10])
    assert chain.processed == 33


@pytest.mark.parametrize("branch", ["fork", "rewind"])
def test_66_an_edit_goes_on_from_a_checkpoint(branch) -> None:
    box = Box()
    _, chain = box.talk(tokens(30), [1, 2, 3])
    box.index.add_checkpoint(chain, Checkpoint("prompt_end", 30, box.rows.make()))
    box.talk([*chain.ledger.tolist(), *tokens(10, 4)], [4], chain.chain_id)
    ledger = chain.ledger.tolist()
    edited = [*ledger[:31], 77, 78]
    plan, other, owner = box.begin(edited, chain.chain_id, branch=branch)
    assert (plan.status, plan.reused) == ("forked" if branch == "fork" else "rewound", 30)
    assert (other is chain) == (branch == "rewind")
    box.complete(other, owner, [*edited, 5])
    assert chain.ledger.tolist() == (ledger if branch == "fork" else [*edited, 5])
    box.index.check_integrity(deep=True)
    for c in list(box.index.chains.values()):
        box.index.drop(c, "deleted")
    assert not box.rows.live


def test_17_fingerprint_salt_tenant() -> None:
    box = Box()
    _, chain = box.talk(tokens(30), [1])
    more = [*chain.ledger.tolist(), 5]
    other = fingerprint({"model": "n"})
    for changes, text in (
        ({"fingerprint": other, "seed": seed_of(other)}, "fingerprint"),
        ({"seed": seed_of(PRINT, "salt")}, "salt"),
    ):
        with pytest.raises(ChainFingerprintError, match=text):
            box.index.plan(box.turn(more, chain.chain_id, on_miss="error", **changes))
        assert box.index.plan(box.turn(more, **changes)).status == "created", "no match without an id either"
    with pytest.raises(ChainNotFoundError):
        box.index.plan(box.turn(more, chain.chain_id, on_miss="error", tenant="b"))
    with pytest.raises(ChainNotFoundError, match="foreign"):
        box.index.find(ChainIds(KEY, 9).mint())


def test_expectations_of_appended_turns() -> None:
    box = Box()
    _, chain = box.talk(tokens(30), [1])
    right = {"expected_tokens": 31, "expected_digest": digest_of(chain.ledger)}
    assert box.index.plan(box.turn([5], chain.chain_id, append=True, **right)).reused == 30
    for wrong in ({"expected_tokens": 30}, {"expected_digest": b"0" * 32}):
        with pytest.raises(ChainMismatchError):
            box.index.plan(box.turn([5], chain.chain_id, append=True, **{**right, **wrong}))


def test_13_finish_is_checked() -> None:
    box = Box()
    _, chain = box.talk(tokens(30), [1])
    ledger = chain.ledger.tolist()
    _, _, owner = box.begin([*ledger, 5], chain.chain_id)
    payload = box.index.start(chain, owner)
    for who, ids, processed in (
        ("t999", [*ledger, 5, 6], 31),
        (owner, [*ledger, 5, 6], 29),
        (owner, [*ledger, 5], 33),
        (owner, [0, *ledger[1:], 5, 6], 32),
    ):
        with pytest.raises(ChainOwnerError):
            box.index.finish(chain, who, as_ids(ids), processed, payload)
    box.index.finish(chain, owner, as_ids([*ledger, 5, 6]), 33, payload)
    with pytest.raises(ChainOwnerError):
        box.index.finish(chain, owner, as_ids([*ledger, 5, 6]), 33, payload)


def test_26_planning_changes_nothing_and_old_plans_are_refused() -> None:
    box = Box()
    _, chain = box.talk(tokens(30), [1])
    before = copy.deepcopy((box.index.chains, box.index.tombstones, box.index.counts, box.index._buckets))
    more = [*chain.ledger.tolist(), 5]
    plan = box.index.plan(box.turn(more, chain.chain_id))
    for bad in ({"on_miss": "error", "tenant": "x"}, {"append": True, "expected_tokens": 3}):
        with pytest.raises(ChainError):
            box.index.plan(box.turn(more, chain.chain_id, **bad))
    after = box.index.chains, box.index.tombstones, box.index.counts, box.index._buckets
    assert repr(before) == repr(after)
    box.talk(more, [6], chain.chain_id)
    with pytest.raises(ChainOwnerError, match="older"):
        box.index.apply(plan, "late")


# Lookup.


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_68_lookup_adopts_forks_or_misses(length: int) -> None:
    box = Box()
    ids = tokens(length)
    _, chain = box.talk(ids, [3, 4])
    head = chain.ledger.tolist()
    assert box.index.lookup(SEED, as_ids(head[:-1])) is None, "a proper prefix is needed"
    assert box.index.lookup(SEED, as_ids(head)) == (chain, None)
    for i in {0, length // 2, length}:
        wrong = [*head, 9]
        wrong[i] += 1
        assert box.index.lookup(SEED, as_ids(wrong)) is None
    plan, same = box.talk([*head, 9], [5])
    assert (plan.status, same) == ("adopted", chain)
    box.talk([*chain.ledger.tolist(), 9], [5], chain.chain_id)
    plan, other = box.talk([*chain.ledger.tolist(), 9], [5])
    assert (plan.status, plan.reused, other is chain) == ("forked", chain.processed, False), "it was called by its name"


def test_lookup_takes_the_longest_and_breaks_ties() -> None:
    box = Box()
    ids = tokens(600)
    _, short = box.talk(ids[:300], [ids[300]])
    _, long = box.talk(ids[:500], [ids[500]], lookup=False)
    assert box.index.lookup(SEED, as_ids(ids)) == (long, None)
    assert box.index.lookup(SEED, as_ids(ids[:400])) == (short, None)
    _, twin = box.talk(ids[:500], [ids[500]], lookup=False)
    assert box.index.lookup(SEED, as_ids(ids)) == (twin, None), "most recent"
    box.index.place(twin, twin.payload, 10, Tier.HOST)
    assert box.index.lookup(SEED, as_ids(ids)) == (long, None), "nearer"
    box.index.drop(long, "deleted")
    box.index.drop(twin, "deleted")
    assert box.index.lookup(SEED, as_ids(ids)) == (short, None)


def test_lookup_of_128k_tokens_takes_milliseconds() -> None:
    box = Box()
    ids = tokens(131_072)
    for n in range(20):
        box.talk(ids[: 120_000 + n], [ids[120_000 + n]], lookup=False)
    prompt = as_ids(ids)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        chain, _ = box.index.lookup(SEED, prompt) or pytest.fail("nothing was found")
        times.append(time.perf_counter() - start)
    assert chain.processed == 120_019
    assert min(times) < 4e-3, times  # 2 ms is the goal on an idle machine


# Order of loss.


def test_27_victims() -> None:
    box = Box(cost=lambda n: n * 1e-3)
    _, a = box.talk(tokens(100, 1), [1])
    _, b = box.talk(tokens(100, 2), [1])
    _, c = box.talk(tokens(400, 3), [1])
    assert box.index.victims() == [a, b, c], "LRU among equals, dear ones last"
    b.size = 1000
    assert box.index.victims()[0] is b, "most bytes per second lost"
    b.priority = 10
    assert box.index.victims()[0] is a
    a.resume_hint_s, c.gap_s = 1000.0, 1.0
    box.now += 300
    assert box.index.victims()[0] is c, "it was expected long ago"
    c.pinned_until_s = box.now + 1
    assert c not in box.index.victims()
    box.now += 2
    assert c in box.index.victims()
    _, _, owner = box.begin([*a.ledger.tolist(), 5], a.chain_id)
    assert a not in box.index.victims()
    box.complete(a, owner, [*a.ledger.tolist(), 5, 6])
    b.ttl_s = c.ttl_s = 10.0
    assert box.index.expired(1e9) == [b, c]
    box.index.place(b, b.payload, 1, Tier.HOST)
    assert b not in box.index.victims()
    assert box.index.victims(Tier.HOST) == [b]


def test_65_tombstones_are_bounded_and_dead_ids_stay_gone() -> None:
    box = Box(max_tombstones=3)
    dead = []
    for n in range(5):
        _, chain = box.talk(tokens(10, n), [1])
        box.index.drop(chain, "evicted")
        dead.append(chain.chain_id)
    assert list(box.index.tombstones) == dead[2:]
    with pytest.raises(ChainGoneError, match="forgotten"):
        box.index.find(dead[0])
    later = ChainIndex(ChainIds(KEY, epoch=1), box.rows.release, lambda: 0.0)
    with pytest.raises(ChainGoneError, match="restart"):
        later.find(dead[0])
    assert box.index.stats()["gone_evicted"] == 5
    assert not box.rows.live


def test_61_a_turn_that_never_began_leaves_the_chain_as_it_was() -> None:
    box = Box()
    _, new, owner = box.begin(tokens(10))
    box.index.unclaim(new, owner)
    assert new.state is ChainState.GONE
    _, chain = box.talk(tokens(30), [1])
    before = chain.ledger, chain.processed, chain.payload
    _, _, owner = box.begin([*chain.ledger.tolist(), 5], chain.chain_id)
    box.index.unclaim(chain, owner)
    assert (chain.ledger is before[0], chain.processed, chain.payload) == (True, *before[1:])
    plan, fork, owner = box.begin([*chain.ledger.tolist(), 5])
    assert plan.forks, "its name was used"
    box.index.unclaim(fork, owner)
    assert fork.state is ChainState.IDLE, "a copy that nobody used is as good as its source"


# Random programs.


@dataclasses.dataclass
class Known:
    """What the model knows of a chain."""

    ledger: list[int]
    processed: int
    checkpoints: list[tuple[str, int, list[int]]]
    named: bool


class Machine(RuleBasedStateMachine):
    """Chains against lists of tokens; every payload has one owner and is released once."""

    @initialize(tombstones=st.integers(1, 4))
    def begin(self, tombstones: int) -> None:
        self.tombstones, self.boots = tombstones, 0
        self.box = Box(max_tombstones=tombstones)
        self.known: dict[str, Known] = {}
        self.active: dict[str, tuple] = {}  # chain id -> (plan, chain, owner, payload or None before start)
        self.dead: set[str] = set()

    @rule(
        data=st.data(), n=st.integers(0, 300), named=st.booleans(), options=st.sampled_from([{}, {"branch": "rewind"}])
    )
    def turn(self, data, n: int, named: bool, options: dict) -> None:
        """A turn on some history, maybe cut and edited; tokens are few, so prefixes repeat."""
        history: list[int] = []
        chain_id = None
        if self.known:
            chain_id = data.draw(st.sampled_from(sorted(self.known)))
            known = self.known[chain_id]
            cut = data.draw(st.sampled_from([0, 0, 0, 1, 2, len(known.ledger) // 2]))
            history = known.ledger[: len(known.ledger) - cut]
        ids = [*history, *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)), *([7] * n)]
        plan, chain, owner = self.box.begin(ids, chain_id if named else None, **options)
        assert plan.ids.tolist() == ids
        assert 0 <= plan.reused < len(ids)
        if plan.source is None:
            assert chain.chain_id not in self.known
            assert plan.reused == 0
        else:
            source = self.known[plan.source.chain_id]
            states = [(None, source.processed, source.ledger), *source.checkpoints]
            _, processed, ledger = states[0 if plan.checkpoint is None else 1 + plan.checkpoint]
            assert plan.reused == processed
            assert ids[:processed] == ledger[:processed], "what is reused is a prefix of what was sent"
            assert plan.forks == (chain.chain_id != plan.source.chain_id)
            assert plan.source.chain_id not in self.active or plan.checkpoint is not None
            assert not (plan.status == "adopted" and source.named)
        if not named:
            reusable = [
                processed
                for key, k in self.known.items()
                for _, processed, ledger in [
                    (0, k.processed if key not in self.active else -1, k.ledger),
                    *k.checkpoints,
                ]
                if 0 < processed < len(ids) and ids[:processed] == ledger[:processed]
            ]
            assert plan.reused == max(reusable, default=0), "the longest prefix that anybody has"
        known = self.known.setdefault(chain.chain_id, Known([], 0, [], False))
        known.named = known.named or (named and not plan.forks and plan.source is not None)
        if plan.status == "rewound":
            _, processed, ledger = known.checkpoints[plan.checkpoint]
            kept = [c for c in known.checkpoints[: plan.checkpoint] if c[1] <= processed]
            known.checkpoints, known.ledger, known.processed = kept, ledger[:processed], processed
        elif plan.source is not None and plan.forks:
            known.ledger, known.processed = ids[: plan.reused], plan.reused
        self.active[chain.chain_id] = plan, chain, owner

    @precondition(lambda self: self.active)
    @rule(data=st.data(), answer=st.lists(st.integers(0, 1), min_size=1, max_size=4), more=st.booleans())
    def finish(self, data, answer: list[int], more: bool) -> None:
        plan, chain, owner = self.active.pop(data.draw(st.sampled_from(sorted(self.active))))
        ledger = [*plan.ids.tolist(), *answer]
        processed = len(ledger) - (0 if more else 1)
        self.box.complete(chain, owner, ledger, processed)
        known = self.known[chain.chain_id]
        known.ledger, known.processed = ledger, processed

    @precondition(lambda self: self.active)
    @rule(data=st.data(), started=st.booleans())
    def lose(self, data, started: bool) -> None:
        """The turn ends in the queue, or with its rows lost."""
        _, chain, owner = self.active.pop(data.draw(st.sampled_from(sorted(self.active))))
        had = chain.payload is not None
        if started:
            payload = self.box.index.start(chain, owner)
            if payload is not None:
                self.box.rows.release(payload)
            self.box.index.fail(chain, owner, "failure")
        else:
            self.box.index.unclaim(chain, owner)
        if started or not had:
            del self.known[chain.chain_id]
            self.dead.add(chain.chain_id)

    def idle(self) -> list[str]:
        return sorted(set(self.known) - set(self.active))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), kind=st.sampled_from(["prompt_end", "turn_end"]))
    def checkpoint(self, data, kind) -> None:
        chain_id = data.draw(st.sampled_from(self.idle()))
        known, chain = self.known[chain_id], self.box.index.chains[chain_id]
        at = data.draw(st.integers(1, known.processed))
        self.box.index.add_checkpoint(chain, Checkpoint(kind, at, self.box.rows.make()))
        known.checkpoints.append((kind, at, known.ledger[:at]))
        alike = [c for c in known.checkpoints if c[0] == kind]
        for old in alike[:-2]:
            known.checkpoints.remove(old)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), how=st.sampled_from(["drop", "evict", "host", "disk", "checkpoints"]))
    def pressure(self, data, how: str) -> None:
        index = self.box.index
        if how == "evict":
            victims = index.victims()
            if not victims:
                return
            chain = victims[0]
        else:
            chain = index.chains[data.draw(st.sampled_from(self.idle()))]
        assert chain.chain_id not in self.active
        if how in ("host", "disk"):
            self.box.rows.release(chain.payload)
            index.place(chain, self.box.rows.make(), 5, Tier[how.upper()])
        elif how == "checkpoints":
            assert index.drop_checkpoints(chain) == len(self.known[chain.chain_id].checkpoints)
            self.known[chain.chain_id].checkpoints = []
        else:
            index.drop(chain, "evicted")
            del self.known[chain.chain_id]
            self.dead.add(chain.chain_id)

    @rule()
    def restart(self) -> None:
        """Only what is on disk is left, as it was; all else is gone, and its ids are not unknown."""
        old, self.boots = self.box, self.boots + 1
        self.box = Box(self.boots, old.rows, max_tombstones=self.tombstones)
        self.active.clear()
        found = []
        for chain in old.index.chains.values():
            states = [chain.payload, *(c.payload for c in chain.checkpoints)]
            stays = chain.state is ChainState.IDLE and chain.tier is Tier.DISK
            for payload in states[stays:]:
                if payload is not None:
                    old.rows.release(payload)
            if stays:
                found.append(chain)
            else:
                del self.known[chain.chain_id]
                self.dead.add(chain.chain_id)
        for chain in sorted(found, key=lambda c: c.used_tick):
            new = Chain(chain.chain_id, chain.seed, chain.fingerprint, chain.method, "", ChainState.IDLE, Tier.DISK)
            new.ledger, new.processed, new.payload, new.named = (
                chain.ledger,
                chain.processed,
                chain.payload,
                chain.named,
            )
            self.box.index.restore(new)
            self.known[chain.chain_id].checkpoints = []

    @rule(seconds=st.sampled_from([0.1, 100.0]))
    def wait(self, seconds: float) -> None:
        self.box.now += seconds

    @invariant()
    def books(self) -> None:
        index = self.box.index
        index.check_integrity(deep=True)
        assert set(index.chains) == set(self.known)
        for chain_id, known in self.known.items():
            chain = index.chains[chain_id]
            assert (chain.ledger.tolist(), chain.processed) == (known.ledger, known.processed)
            assert chain.busy == (chain_id in self.active)
            assert [(c.kind, c.processed) for c in chain.checkpoints] == [c[:2] for c in known.checkpoints]
        held = [
            p for c in index.chains.values() for p in (c.payload, *(x.payload for x in c.checkpoints)) if p is not None
        ]
        assert sorted(held) == sorted(self.box.rows.live), "a payload is lost, or has two owners"
        for chain_id in self.dead:
            with pytest.raises(ChainGoneError):
                index.find(chain_id)

    def teardown(self) -> None:
        if hasattr(self, "box"):
            for _, chain, owner in self.active.values():
                self.box.index.fail(chain, owner, "end")
            for chain in list(self.box.index.chains.values()):
                self.box.index.drop(chain, "end")
            assert not self.box.rows.live


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
