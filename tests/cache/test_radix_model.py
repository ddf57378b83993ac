"""The radix index against dictionaries of token tuples, under random programs: what is found is what was computed."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsejax.cache.chain import as_ids
from sparsejax.cache.radix import RadixIndex
from sparsejax.cache.radix_records import StalePlanError
from sparsejax.cache.radix_tree import Scope, chained
from sparsejax.errors import PinRefusedError, PrefixNotFoundError, PruneError
from tests.cache.test_radix import Payloads

SIZE = 2
HALF_LIFE_S = 8.0
SCOPES = Scope(b"x" * 16, "x"), Scope(b"y" * 16, "y")
PINNED, PINNED_EACH = 12, 8

PICK = st.integers(-8, 7)
TEXT = st.lists(st.integers(0, 1), max_size=7)

Tokens = tuple[int, ...]
Row = tuple[Tokens, frozenset[int]]
"""What a stored row is a function of: all tokens up to its own, and the positions that had no row when it was made."""


@dataclasses.dataclass
class Entry:
    """A block as the model sees it. `base` is the text before its rows; both are None if it is hollow."""

    rows: list[Row] | None
    base: Tokens | None
    cut: bool = False
    tainted: bool = False
    refs: int = 0
    pins: int = 0
    retention: int = 0
    hits: int = 0
    used_s: float = 0.0


@dataclasses.dataclass
class Reader:
    """A running request: its tokens, what its row holds, and which blocks it leases."""

    scope: Scope
    lease: object
    tokens: list[int]
    pages: list[list[Row]]
    columns: list[int]  # of leased blocks
    missing: frozenset[int]
    tainted: bool
    closed: bool = False

    @property
    def path(self) -> Tokens:
        return tuple(self.tokens[: len(self.columns) * SIZE])


def chosen(options, pick: int):
    """One of some options; negative numbers pick from the end, where what is new stands."""
    return options[pick % len(options)]


class Model:
    """Blocks of one scope, by all tokens up to their end."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.entries: dict[Tokens, Entry] = {}

    def prefixes(self, path: Tokens) -> list[Tokens]:
        return [path[:end] for end in range(SIZE, len(path) + 1, SIZE)]

    def is_leaf(self, path: Tokens) -> bool:
        return not any(len(other) == len(path) + SIZE and other[: len(path)] == path for other in self.entries)

    def held(self, path: Tokens) -> bool:
        return self.entries[path].refs > 0 or self.entries[path].pins > 0

    def tidy(self) -> None:
        """Until nothing changes: covered blocks that nothing rests on lose their rows, hollow leaves go."""
        while True:
            rests = {entry.base for entry in self.entries.values() if entry.base is not None}
            covered = {
                part
                for path, entry in self.entries.items()
                if entry.cut
                for part in self.prefixes(path)[:-1]
                if len(part) > len(entry.base)
            }
            idle = [p for p, e in self.entries.items() if e.rows is not None and p in covered and p not in rests]
            for path in idle:
                entry = self.entries[path]
                entry.rows, entry.base, entry.cut = None, None, False
            dead = [p for p, e in self.entries.items() if e.rows is None and self.is_leaf(p) and not self.held(p)]
            for path in dead:
                del self.entries[path]
            if not idle and not dead:
                return

    def rows(self, path: Tokens) -> list[Row]:
        """All rows before the end of a block that has some."""
        found: list[Row] = []
        while path:
            entry = self.entries[path]
            found = entry.rows + found
            path = entry.base
        return found

    def longest(self, ids: Tokens, exact: bool) -> Tokens:
        best: Tokens = ()
        for path in self.prefixes(ids):
            entry = self.entries.get(path)
            if entry is None or (exact and (entry.rows is None or entry.cut or entry.tainted)):
                break
            if entry.rows is not None:
                best = path
        return best

    def digest(self, path: Tokens) -> bytes:
        digest = self.scope.seed
        for part in self.prefixes(path):
            digest = chained(digest, np.array(part[-SIZE:], "<u4").tobytes())
        return digest


class Machine(RuleBasedStateMachine):
    """Readers, pins, cuts and evictions in any order."""

    @initialize(max_blocks=st.sampled_from([6, 20, 1000]))
    def begin(self, max_blocks: int) -> None:
        self.now, self.max_blocks = 100.0, max_blocks
        self.payloads = Payloads()
        self.index = RadixIndex(
            SIZE,
            self.payloads.release,
            lambda: self.now,
            HALF_LIFE_S,
            lambda start: 1.0 + start,
            max_ghosts=4,
            max_blocks=max_blocks,
            max_pinned_pages=(PINNED, PINNED_EACH),
        )
        self.models = {scope: Model(scope) for scope in SCOPES}
        self.readers: list[Reader] = []
        self.pins: list[tuple[object, Scope, Tokens, float]] = []

    # What the model does by itself.

    def pages(self) -> int:
        return sum(len(e.rows or ()) // SIZE for m in self.models.values() for e in m.entries.values())

    def blocks(self) -> int:
        return sum(len(m.entries) for m in self.models.values())

    def victim(self) -> tuple[Model, Tokens] | None:
        def key(item: tuple[Model, Tokens]) -> tuple[int, float, bytes]:
            model, path = item
            e = model.entries[path]
            cost = math.log2(1.0 + len(path) - SIZE)
            return e.retention, e.used_s / HALF_LIFE_S + math.log2(1 + e.hits) + cost, model.digest(path)

        free = [(m, p) for m in self.models.values() for p in m.entries if m.is_leaf(p) and not m.held(p)]
        return min(free, key=key, default=None)

    def drop(self, model: Model, path: Tokens) -> None:
        del model.entries[path]
        model.tidy()

    def expire(self) -> None:
        for pin in [pin for pin in self.pins if pin[3] <= self.now]:
            self.end_pin(pin)

    def end_pin(self, pin) -> None:
        self.pins.remove(pin)
        _, scope, path, _ = pin
        for part in self.models[scope].prefixes(path):
            self.models[scope].entries[part].pins -= 1
        self.models[scope].tidy()

    # Readers.

    @rule(pick=PICK, scope=st.sampled_from(SCOPES), new=TEXT, exact=st.booleans(), publishes=st.booleans())
    def start(self, pick: int, scope: Scope, new: list[int], exact: bool, publishes: bool) -> None:
        """A request finds exactly what the model knows of its prompt."""
        model = self.models[scope]
        known = chosen([(), *sorted(model.entries)], pick)
        ids = (*known, *new)
        if not ids:
            return
        match = self.index.match(scope, as_ids(list(ids)), exact=exact)
        found = model.longest(ids[: (len(ids) - 1) // SIZE * SIZE], exact)
        assert len(match.blocks) * SIZE == len(found)
        rows = [row for payload in match.pages for row in self.payloads.live[payload]]
        assert rows == model.rows(found), "the pages are those of this text, in their order"
        positions = [len(tokens) - 1 for tokens, _ in rows]
        assert positions == sorted(set(positions)), "no row comes twice"
        assert all(tokens == ids[: len(tokens)] for tokens, _ in rows), "a row of another text"
        missing = frozenset(range(len(found))) - set(positions)
        assert match.missing == len(missing)
        for block, column in enumerate(match.columns):
            if column >= 0:
                own = [len(tokens) - 1 for tokens, _ in self.payloads.live[match.pages[column]]]
                assert own == list(range(block * SIZE, (block + 1) * SIZE))
        tainted = any(without for _, without in rows)
        assert not (exact and (missing or tainted)), "an exact request gets exact rows"
        assert (match.miss is None) == (len(match.blocks) == match.limit)
        lease = self.index.lease(match)
        self.index.note(match)
        for part in model.prefixes(found):
            model.entries[part].refs += 1
            model.entries[part].hits += 1
            model.entries[part].used_s = self.now
        tainted = bool(missing) or any(model.entries[part].tainted for part in model.prefixes(found))
        pages = [self.payloads.live[payload] for payload in match.pages]
        reader = Reader(scope, lease, list(found), pages, list(match.columns), missing, tainted)
        self.readers.append(reader)
        self.compute(reader, ids[len(found) :])
        if publishes:
            self.publish(-1, [])

    def compute(self, reader: Reader, new) -> None:
        """The row gets tokens, and pages once they are full."""
        for token in new:
            reader.tokens.append(token)
            if len(reader.tokens) % SIZE == 0:
                end = len(reader.tokens)
                reader.pages.append([(tuple(reader.tokens[: p + 1]), reader.missing) for p in range(end - SIZE, end)])

    @precondition(lambda self: self.readers)
    @rule(pick=PICK, new=TEXT)
    def publish(self, pick: int, new: list[int]) -> None:
        reader = chosen(self.readers, pick)
        self.compute(reader, new)
        plan = self.index.plan_insert(reader.lease, as_ids(reader.tokens))
        payloads = [self.payloads.make(reader.pages[column]) for column in plan.wanted]
        inserted = self.index.insert(plan, payloads)
        assert inserted == self.published(reader)

    def published(self, reader: Reader) -> int:
        """What the model makes of it."""
        model = self.models[reader.scope]
        whole = tuple(reader.tokens[: len(reader.tokens) // SIZE * SIZE])
        later = [part for part in model.prefixes(whole) if len(part) > len(reader.path)]
        if reader.closed or not later:
            return 0
        known = [part for part in later if part in model.entries]
        fresh = later[len(known) :]
        hollow: list[Tokens] = []
        above = model.prefixes((known or [reader.path])[-1]) if fresh else []
        while above and model.entries[above[-1]].rows is None:
            hollow.insert(0, above.pop())
        shift = len(reader.pages) - len(whole) // SIZE
        columns = [
            reader.columns[len(p) // SIZE - 1] if len(p) <= len(reader.path) else len(p) // SIZE - 1 + shift
            for p in hollow
        ]
        if -1 in columns:
            reader.closed = True
            return 0
        for part in known:
            model.entries[part].refs += 1
            reader.columns.append(len(part) // SIZE - 1 + shift)
        for part, column in zip(hollow, columns, strict=True):
            entry = model.entries[part]
            entry.rows, entry.base = reader.pages[column], part[:-SIZE]
        for part in fresh:
            column = len(part) // SIZE - 1 + shift
            parent = model.entries.get(part[:-SIZE])
            retention = parent.retention if parent else 0
            model.entries[part] = Entry(reader.pages[column], part[:-SIZE], False, reader.tainted, 1)
            model.entries[part].retention, model.entries[part].used_s = retention, self.now
            reader.columns.append(column)
        while self.blocks() > self.max_blocks and (victim := self.victim()) is not None:
            self.drop(*victim)
        while self.blocks() > self.max_blocks:  # all others are held
            del model.entries[fresh.pop()]
            reader.columns.pop()
        for part in hollow:
            entry = model.entries[part]
            if fresh:
                entry.tainted = entry.tainted or reader.tainted
            else:  # nothing needs their rows
                entry.rows = entry.base = None
        model.tidy()
        return len(fresh)

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        """A request ends or is cancelled; what it has published stays."""
        reader = chosen(self.readers, pick)
        self.readers.remove(reader)
        self.index.release(reader.lease)
        self.give_back(reader, 0)

    def give_back(self, reader: Reader, blocks: int) -> None:
        model = self.models[reader.scope]
        for part in reversed(model.prefixes(reader.path)[blocks:]):
            model.entries[part].refs -= 1
            model.entries[part].used_s = self.now
        model.tidy()

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        reader = chosen(self.readers, pick)
        lists = {name: list(getattr(reader, name)) for name in ("tokens", "pages", "columns")}
        closed = reader.lease.closed
        other = dataclasses.replace(reader, lease=self.index.share(reader.lease), **lists)
        assert other.lease.closed == closed
        for part in self.models[reader.scope].prefixes(reader.path):
            self.models[reader.scope].entries[part].refs += 1
        self.readers.append(other)

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def trim(self, pick: int) -> None:
        """A row goes back to an earlier token of its own."""
        reader = chosen(self.readers, pick)
        first = max((i + 1 for i, column in enumerate(reader.columns) if column < 0), default=0)
        blocks = chosen(range(first, len(reader.columns) + 1), pick)
        self.index.trim(reader.lease, blocks)
        self.give_back(reader, blocks)
        dropped = len(reader.tokens) // SIZE - blocks
        del reader.pages[len(reader.pages) - dropped :], reader.tokens[blocks * SIZE :], reader.columns[blocks:]

    # Pressure.

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        freed, before = self.index.evict(pages), self.pages()
        self.expire()
        while before - self.pages() < pages and (victim := self.victim()) is not None:
            self.drop(*victim)
        assert freed == before - self.pages()

    @rule(seconds=st.sampled_from([0.5, 3.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(pick=PICK, scope=st.sampled_from(SCOPES), ttl_s=st.sampled_from([1.0, 20.0]))
    def pin(self, pick: int, scope: Scope, ttl_s: float) -> None:
        model = self.models[scope]
        self.expire()
        if not model.entries:
            with pytest.raises(PrefixNotFoundError):
                self.index.pin(scope, as_ids([0] * SIZE), ttl_s)
            return
        path = chosen(sorted(model.entries), pick)
        for part in model.prefixes(path):
            model.entries[part].pins += 1
        mine = self.pinned(model)
        if mine > PINNED_EACH or sum(map(self.pinned, self.models.values())) > PINNED:
            for part in model.prefixes(path):
                model.entries[part].pins -= 1
            with pytest.raises(PinRefusedError):
                self.index.pin(scope, as_ids(list(path)), ttl_s)
            return
        pin = self.index.pin(scope, as_ids(list(path)), ttl_s)
        self.pins.append((pin, scope, path, self.now + ttl_s))

    def pinned(self, model: Model) -> int:
        return sum(max(1, len(e.rows or ()) // SIZE) for e in model.entries.values() if e.pins)

    @precondition(lambda self: self.pins)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        pin = chosen(self.pins, pick)
        self.index.unpin(pin[0])
        self.end_pin(pin)

    @rule(pick=PICK, scope=st.sampled_from(SCOPES), retention=st.integers(-1, 1))
    def retain(self, pick: int, scope: Scope, retention: int) -> None:
        model = self.models[scope]
        if not model.entries:
            return
        path = chosen(sorted(model.entries), pick)
        below = [other for other in model.entries if other[: len(path)] == path]
        for other in below:
            model.entries[other].retention = retention
        assert self.index.set_retention(scope, as_ids(list(path)), retention) == len(below)

    @rule(pick=PICK, scope=st.sampled_from(SCOPES))
    def delete(self, pick: int, scope: Scope) -> None:
        model = self.models[scope]
        if not model.entries:
            return
        path = chosen(sorted(model.entries), pick)
        before = self.blocks()
        for other in sorted(model.entries, key=lambda p: (-len(p), model.digest(p))):
            if other[: len(path)] == path and other in model.entries and model.is_leaf(other) and not model.held(other):
                self.drop(model, other)
        assert self.index.delete(scope, as_ids(list(path)))[0] == before - self.blocks()

    # Pruning.

    @rule(pick=PICK, scope=st.sampled_from(SCOPES), seed=st.integers(0, 1 << 16), stale=st.booleans())
    def prune(self, pick: int, scope: Scope, seed: int, stale: bool) -> None:
        """Ranges of a known text lose all but some random rows."""
        model = self.models[scope]
        if not model.entries:
            return
        text = chosen(sorted(model.entries), pick)
        rng, kept, stays = np.random.default_rng(seed), [], []
        ends = np.sort(rng.choice(len(text) // SIZE + 1, min(4, len(text) // SIZE + 1), replace=False)) * SIZE
        pairs = [(ends[0], ends[-1])] if len(ends) < 4 or seed % 2 else [ends[:2], ends[2:]]
        ranges = [(int(start), int(stop)) for start, stop in pairs]
        if len(ranges) == 2 and ranges[0][1] == ranges[1][0]:
            ranges = [(ranges[0][0], ranges[1][1])]
        parts = [self.resident(model, text[:start], text[:stop]) for start, stop in ranges]
        ids = as_ids(list(text))
        if None in parts:
            with pytest.raises(PruneError):
                self.index.plan_cut(scope, ids, ranges)
            return
        plan = self.index.plan_cut(scope, ids, ranges)
        for rows, resident in zip(plan, parts, strict=True):
            assert rows.positions.tolist() == [len(tokens) - 1 for tokens, _ in resident]
            assert [r for p in rows.pages for r in self.payloads.live[p]] == resident
            count = int(rng.integers(0, len(rows.pages) + 1))
            rest = np.sort(rng.permutation(len(resident))[: count * SIZE])
            left = [resident[i] for i in rest]
            stays.append(left)
            pages = [self.payloads.make(left[i : i + SIZE]) for i in range(0, len(left), SIZE)]
            kept.append((pages, rows.positions[rest]))
        freed, before = self.index.cut(plan, kept), self.pages()
        for rows, resident, left in zip(plan, parts, stays, strict=True):
            if len(left) < len(resident):
                entry = model.entries[text[: rows.stop]]
                entry.rows, entry.base, entry.cut = left, text[: rows.start], True
                model.tidy()
        assert freed == before - self.pages()
        if stale and stays[0] != parts[0]:
            with pytest.raises(StalePlanError):
                self.index.cut(plan, [([], np.zeros(0, np.int32)) for _ in plan])

    def resident(self, model: Model, base: Tokens, path: Tokens) -> list[Row] | None:
        """The rows of a range; None if it lies partly in one that was pruned."""
        found: list[Row] = []
        while len(path) > len(base):
            entry = model.entries[path]
            if entry.rows is None:
                return None
            found, path = entry.rows + found, entry.base
        return found if path == base and (not base or model.entries[base].rows is not None) else None

    # Books.

    @invariant()
    def books(self) -> None:
        self.index.check_integrity()
        assert (self.index.num_blocks, self.index.num_pages) == (self.blocks(), self.pages())
        assert len(self.payloads.live) == self.pages(), "a payload is lost, or has two owners"
        assert self.index.stats()["pinned_pages"] == sum(map(self.pinned, self.models.values()))
        assert self.index.free_pages == sum(
            len(e.rows or ()) // SIZE for m in self.models.values() for p, e in m.entries.items() if not m.held(p)
        )
        there: dict[bytes, dict] = {scope.seed: {} for scope in SCOPES}
        for block in self.index.blocks():
            pages = None if block.pages is None else [self.payloads.live[payload] for payload in block.pages]
            there[block.scope.seed][block.digest] = pages, block.cut is not None, block.refs, block.pins
        for scope, model in self.models.items():
            expected = {}
            for path, e in model.entries.items():
                rows = None if e.rows is None else [e.rows[i : i + SIZE] for i in range(0, len(e.rows), SIZE)]
                expected[model.digest(path)] = rows, e.cut, e.refs, e.pins
            assert there[scope.seed] == expected
        for reader in self.readers:
            assert (reader.lease.columns, reader.lease.closed) == (reader.columns, reader.closed)
            assert reader.lease.tainted == reader.tainted
        victim = self.index.next_victim()
        expected = self.victim()
        assert (victim is None) == (expected is None)
        if victim is not None and expected is not None:
            assert victim.digest == expected[0].digest(expected[1])

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for reader in self.readers:
                self.index.release(reader.lease)
            self.now += 1e6
            self.index.evict(1 << 30)
            self.index.check_integrity()
            assert not self.payloads.live
            assert not self.index.num_blocks


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestMachine = Machine.TestCase

OPERATIONS = 900
RULES = {  # how often, with what
    "start": (8, ("pick", "scope", "new", "exact", "publishes")),
    "publish": (6, ("pick", "new")),
    "end": (6, ("pick",)),
    "fork": (2, ("pick",)),
    "trim": (1, ("pick",)),
    "evict": (1, ("pages",)),
    "wait": (2, ("seconds",)),
    "pin": (1, ("pick", "scope", "ttl_s")),
    "unpin": (1, ("pick",)),
    "retain": (1, ("pick", "scope", "retention")),
    "delete": (1, ("pick", "scope")),
    "prune": (5, ("pick", "scope", "seed", "stale")),
}


@pytest.mark.parametrize("max_blocks", [8, 24, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_long_programs_go_deep(seed: int, max_blocks: int) -> None:
    """The same rules in long programs: what takes many steps to come about comes about."""
    rng = np.random.default_rng([seed, max_blocks])
    machine = Machine()
    machine.begin(max_blocks=max_blocks)
    names, weights = list(RULES), np.array([often for often, _ in RULES.values()], float)
    for _ in range(OPERATIONS):
        name = names[rng.choice(len(names), p=weights / weights.sum())]
        if name in ("start", "fork") and len(machine.readers) > 6:
            name = "end"
        if (name in ("publish", "end", "fork", "trim") and not machine.readers) or (
            name == "unpin" and not machine.pins
        ):
            continue
        some = {
            "pick": int(rng.integers(1 << 16)),
            "scope": SCOPES[int(rng.random() < 0.2)],
            "new": rng.integers(0, 2, rng.integers(8)).tolist(),
            "exact": bool(rng.random() < 0.2),
            "publishes": bool(rng.random() < 0.7),
            "pages": int(rng.integers(1, 5)),
            "seconds": float(rng.choice([0.5, 3.0, 50.0], p=[0.6, 0.35, 0.05])),
            "ttl_s": 5.0,
            "retention": int(rng.integers(-1, 2)),
            "seed": int(rng.integers(1 << 16)),
            "stale": True,
        }
        getattr(machine, name)(**{key: some[key] for key in RULES[name][1]})
        machine.books()
    counts = machine.index.counts
    machine.teardown()
    if max_blocks > 8:
        assert min(counts["cuts"], counts["revived_blocks"], counts["evicted_blocks"], counts["miss_pruned"]) > 0
        assert counts["hit_tokens"] > 0.2 * counts["query_tokens"]
