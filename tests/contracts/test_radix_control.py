"""What the control API says of the prefix cache, against what requests find, in any order of changes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sparsejax import radix_control as control
from sparsejax.errors import PinRefusedError, PrefixDisabledError, PrefixNotFoundError, PruneError, RequestError
from sparsejax.prune_records import PrunePart, PruneRequest
from sparsejax.radix_reports import PrefixMatch
from sparsejax.request import PrefixOptions
from tests.contracts.test_radix_cache import PAGE, Shared, words

MINE, OTHER = PrefixOptions(tenant="a"), PrefixOptions(tenant="b")


def array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, np.uint32)


class Controlled(Shared):
    """A bench that is asked what it has."""

    @property
    def caches(self):
        return self.scheduler.caches

    def match(self, ids: list[int], options: PrefixOptions = MINE) -> PrefixMatch:
        found = control.match(self.caches, "dense", options, array(ids))
        routed = control.routed(self.caches, "dense", options, array(ids))
        assert routed.snapshot
        for name in ("matched_tokens", "resident_kv_tokens", "quality_degraded", "last_block_id", "usable_tokens"):
            assert getattr(routed, name) == getattr(found, name), name
        return found

    def agree(self, ids: list[int]) -> None:
        """All that is said of some tokens agrees with itself, and with what a request gets."""
        found = self.match(ids)
        path = control.inspect(self.caches, "dense", MINE, array(ids[: found.matched_tokens]))
        assert path.hit_len == found.matched_tokens
        assert (
            path.resident_kv_tokens == found.resident_kv_tokens == sum(b.resident_kv_tokens for b in path.path_blocks)
        )
        assert found.quality_degraded == any(b.quality_degraded for b in path.path_blocks)
        assert found.matched_tokens - found.resident_kv_tokens == self.missing(path)
        exact = self.match(ids, PrefixOptions(tenant="a", exact=True))
        assert exact.matched_tokens <= found.matched_tokens
        assert not exact.quality_degraded
        assert exact.resident_kv_tokens == exact.matched_tokens
        assert self.match(ids, OTHER).matched_tokens == 0
        self.scheduler.check_integrity()

    @staticmethod
    def missing(path) -> int:
        records = {tuple(b.prune["range"]): b.prune for b in path.path_blocks if b.prune}
        return sum(record["logical_tokens"] - record["retained_tokens"] for record in records.values())

    def prune(self, ids: list[int], start: int, stop: int, keep: int = 0) -> None:
        part = PrunePart(((start, stop),), keep)
        policy = "kvzip_global" if keep else "drop"
        info = self.caches.prunes.submit(PruneRequest("dense", array(ids), (part,), policy, tenant="a"))
        self.run()
        assert self.caches.prunes.get(info.prune_id, "a").status == "completed"


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    bench = Controlled(num_sequence_pages=161)
    texts = [words(draw.choice([12, 24, 40, 60]), i % 3)[: 12 + 4 * i] + words(20, 10 + i) for i in range(8)]
    done = {"pinned": 0, "deleted": 0, "pruned": 0}
    for _ in range(120):
        ids = draw.choice(texts)
        some = array(ids[: PAGE * draw.randint(1, len(ids) // PAGE)])
        what = draw.choice(["serve", "serve", "serve", "prune", "pin", "unpin", "delete", "class", "evict"])
        try:
            if what == "serve":
                want = bench.match([*ids, 250, 251]).matched_tokens
                request_id = bench.submit([*ids, 250, 251], max_tokens=2, prefix=MINE)
                bench.run()
                assert bench.last(request_id).stats.cached_tokens == want, "what was said is what it got"
            elif what == "prune":
                known = bench.match([*ids, 250]).matched_blocks
                if known > 1:
                    start = draw.randrange(known - 1)
                    stop = draw.randint(start + 1, known - 1)
                    bench.prune(ids, PAGE * start, PAGE * stop, draw.choice([0, PAGE * (stop - start) // 2]))
                    done["pruned"] += 1
            elif what == "pin":
                found = control.pin(bench.caches, "dense", MINE, some, draw.choice([5.0, 1e4]))
                assert 0 < found.pinned_pages <= found.max_pinned_pages
                done["pinned"] += 1
            elif what == "unpin":
                found = control.unpin(bench.caches, "dense", MINE, some)
                assert not bench.index.pins_on(
                    bench.index.longest(bench.caches.chains.scope("dense", "", "a"), some)[-1]
                )
            elif what == "delete":
                path = control.inspect(bench.caches, "dense", MINE, some, subtree=True)
                gone = control.delete_subtree(bench.caches, "dense", MINE, some)
                assert path.subtree is not None
                assert gone.deleted_block_count + gone.blocked_block_count == path.subtree["block_count"]
                assert len(set(gone.deleted_block_ids)) == gone.deleted_block_count
                assert sum(gone.blocked_reasons.values()) == gone.blocked_block_count
                assert (gone.blocked_block_count > 0) == bool(
                    control.inspect(bench.caches, "dense", MINE, some).hit_len == len(some)
                ), "what is left is what was in the way"
                done["deleted"] += gone.deleted_block_count
            elif what == "class":
                found = control.set_retention(bench.caches, "dense", MINE, some, draw.randint(-3, 3))
                shown = control.inspect(bench.caches, "dense", MINE, some).path_blocks[-1]
                assert (shown.retention, shown.block_id) == (found.retention, found.root_block_id)
            else:
                bench.index.evict(draw.randint(1, 30))
        except (PrefixNotFoundError, PinRefusedError, PruneError):
            pass
        for text in draw.sample(texts, 3):
            bench.agree(text)
    assert all(count > 0 for count in done.values()), done
    for text in texts:
        for end in range(PAGE, len(text) + 1, PAGE):
            if control.inspect(bench.caches, "dense", MINE, array(text[:end])).hit_len == end:
                control.unpin(bench.caches, "dense", MINE, array(text[:end]))
    assert not bench.index.pinned_pages["a"]
    bench.check_all_free()


def test_what_asks_for_methods_that_share_nothing() -> None:
    bench = Controlled()
    for found in (
        control.match(bench.caches, "window", MINE, array(words(20))),
        control.routed(bench.caches, "window", MINE, array(words(20))),
        control.inspect(bench.caches, "window", MINE, array(words(20))),
    ):
        assert not found.enabled
        assert "window" in (found.reason or "")
    for function in (control.delete_subtree, control.unpin):
        with pytest.raises(PrefixDisabledError):
            function(bench.caches, "window", MINE, array(words(20)))
        with pytest.raises(RequestError, match="not served"):
            function(bench.caches, "no such", MINE, array(words(20)))


def test_lists_are_bounded_and_counts_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_LISTED_BLOCKS", 3)
    monkeypatch.setattr(control, "MAX_SUBTREE_BLOCKS", 4)
    bench = Controlled()
    bench.serve(words(40), prefix=MINE)
    counts = control.inspect(bench.caches, "dense", MINE, array(words(4)), subtree=True).subtree
    assert counts is not None
    assert (counts["block_count"], counts["truncated"]) == (4, True)
    gone = control.delete_subtree(bench.caches, "dense", MINE, array(words(4)))
    assert (len(gone.deleted_block_ids), gone.deleted_block_count) == (3, 11)
    bench.check_all_free()
