"""The page pool against a model that keeps plain sets."""

from __future__ import annotations

import collections

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsejax.cache.pages import (
    AliasedPageError,
    DuplicatePageError,
    MissingPageError,
    PageError,
    PagePool,
    PoolExhaustedError,
)
from sparsejax.errors import ConfigError
from sparsejax.geometry import Geometry, Granularity

GEOMETRY = Geometry(3, 4, 2, 8, 4, 256, 1.0)
ANY = st.sampled_from(list(Granularity))


def pool_of(pages: int = 9) -> PagePool:
    return PagePool(GEOMETRY, pages)


def head_pages(granularity: Granularity, page: int) -> range:
    width = GEOMETRY.head_pages_per_page(granularity)
    return range(page * width, (page + 1) * width)


class PoolMachine(RuleBasedStateMachine):
    """Holders own pages; a page's owners are counted in a plain dict."""

    @initialize(pages=st.integers(2, 9))
    def start(self, pages: int) -> None:
        self.pool = pool_of(pages)
        self.pages = pages
        self.holders: list[tuple[Granularity, np.ndarray]] = []

    @rule(granularity=ANY, n=st.integers(0, 30))
    def alloc(self, granularity: Granularity, n: int) -> None:
        free = self.pool.free_pages(granularity)
        fits = self.pool.fits({granularity: n})
        assert fits == (n <= free)
        if not fits:
            with pytest.raises(PoolExhaustedError):
                self.pool.alloc(granularity, n)
            assert self.pool.free_pages(granularity) == free
            return
        ids = self.pool.alloc(granularity, n)
        assert ids.dtype == np.int32
        assert len(set(ids.tolist())) == n
        assert self.pool.free_pages(granularity) == free - n
        if n:
            self.holders.append((granularity, ids))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        granularity, ids = data.draw(st.sampled_from(self.holders))
        some = np.array(data.draw(st.lists(st.sampled_from(ids.tolist()), unique=True, min_size=1)), np.int32)
        self.pool.share(granularity, some)
        self.holders.append((granularity, some))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        granularity, ids = self.holders.pop(index)
        cut = data.draw(st.integers(0, len(ids)))
        self.pool.free(granularity, ids[:cut])
        if cut < len(ids):
            self.holders.append((granularity, ids[cut:]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def double_free(self, data: st.DataObject) -> None:
        """Freeing more references than exist is refused and changes nothing."""
        granularity, ids = data.draw(st.sampled_from(self.holders))
        page = ids[:1]
        owners = sum(int(page[0] in held) for g, held in self.holders if g is granularity)
        with pytest.raises(PageError, match="double free"):
            self.pool.free(granularity, np.repeat(page, owners + 1))

    @invariant()
    def universe(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.holders)
        live = collections.Counter(h for g, ids in self.holders for page in ids for h in head_pages(g, int(page)))
        held_as = collections.defaultdict(set)
        for granularity, ids in self.holders:
            for page in ids:
                for h in head_pages(granularity, int(page)):
                    held_as[h].add((granularity, int(page)))
        assert all(len(owners) == 1 for owners in held_as.values()), "one head-page in two pages"
        assert min(live, default=6) >= 6, "the null slab was handed out"
        assert self.pool.free_head_pages == (self.pages - 1) * 6 - len(live)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_slab_returns_when_its_last_part_does() -> None:
    pool = pool_of(3)
    layers = pool.alloc(Granularity.LAYER, 4)
    assert pool.free_pages(Granularity.SEQUENCE) == 0
    assert pool.free_pages(Granularity.LAYER) == 2
    pool.free(Granularity.LAYER, layers[1:])
    assert pool.free_pages(Granularity.SEQUENCE) == 1
    pool.free(Granularity.LAYER, layers[:1])
    assert pool.free_pages(Granularity.SEQUENCE) == 2
    assert pool.free_head_pages == 12


def test_ids_follow_the_affine_map() -> None:
    pool = pool_of(9)
    (sequence,) = pool.alloc(Granularity.SEQUENCE, 1)
    layers = pool.alloc(Granularity.LAYER, 3)
    heads = pool.alloc(Granularity.HEAD, 6)
    assert sorted(h for page in layers for h in head_pages(Granularity.LAYER, page)) == list(
        range(layers.min() * 2, layers.min() * 2 + 6)
    )
    everything = [*head_pages(Granularity.SEQUENCE, sequence), *heads]
    everything += [h for page in layers for h in head_pages(Granularity.LAYER, page)]
    assert len(set(everything)) == 18


def test_fits_weighs_granularities_together() -> None:
    pool = pool_of(4)  # three slabs
    assert pool.fits({Granularity.SEQUENCE: 1, Granularity.LAYER: 3, Granularity.HEAD: 6})
    assert not pool.fits({Granularity.SEQUENCE: 1, Granularity.LAYER: 4, Granularity.HEAD: 1})
    pool.alloc(Granularity.LAYER, 1)  # its slab has two layer pages left
    assert pool.fits({Granularity.SEQUENCE: 2, Granularity.LAYER: 2})
    assert not pool.fits({Granularity.SEQUENCE: 2, Granularity.LAYER: 3})


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("page", [-1, 0, 10**6])
def test_null_and_unknown_pages_are_refused(granularity: Granularity, page: int) -> None:
    pool = pool_of()
    held = pool.alloc(granularity, 3)
    for operation in (pool.free, pool.share):
        with pytest.raises(PageError, match="null or unknown"):
            operation(granularity, np.array([held[0], page]))
    pool.check_integrity([(granularity, held)])  # nothing was freed by half


@pytest.mark.parametrize("granularity", Granularity)
def test_every_part_of_the_null_slab_is_refused(granularity: Granularity) -> None:
    pool = pool_of()
    for page in range(pool.parts(granularity)):
        with pytest.raises(PageError):
            pool.free(granularity, np.array([page]))


def test_a_page_of_another_granularity_is_refused() -> None:
    pool = pool_of(2)
    (page,) = pool.alloc(Granularity.SEQUENCE, 1)
    with pytest.raises(PageError):
        pool.free(Granularity.LAYER, np.array([page * 3]))


def test_integrity_tells_the_three_failures_apart() -> None:
    pool = pool_of()
    held = pool.alloc(Granularity.LAYER, 4)
    with pytest.raises(MissingPageError):
        pool.check_integrity([(Granularity.LAYER, held[:3])])
    with pytest.raises(DuplicatePageError):
        pool.check_integrity([(Granularity.LAYER, held), (Granularity.LAYER, held[:1])])
    pool.free(Granularity.LAYER, held[:1])
    with pytest.raises(AliasedPageError):
        pool.check_integrity([(Granularity.LAYER, held)])
    with pytest.raises(AliasedPageError):
        pool.check_integrity([(Granularity.LAYER, held[1:]), (Granularity.HEAD, np.array([int(held[1]) * 2]))])
    pool.check_integrity([(Granularity.LAYER, held[1:])])


def test_broken_free_list_is_seen() -> None:
    pool = pool_of()
    pool._free[0] = pool._free[1]
    with pytest.raises(DuplicatePageError):
        pool.check_integrity([])
    pool = pool_of()
    pool._num_free -= 1
    with pytest.raises(MissingPageError):
        pool.check_integrity([])


def test_too_small_a_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        pool_of(1)
    with pytest.raises(ValueError, match="-1"):
        pool_of().alloc(Granularity.HEAD, -1)
