"""Importance less redundancy of resident rows, against NumPy in float64 over whole matrices of similarities."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import redundancy, registry
from sparsejax.geometry import Geometry, Granularity
from tests.core.paging import evict_context, paged
from tests.vectors import make_rkv_vectors as oracle

HEADS, GROUP, WINDOW = 2, 3, 5


def keys_of(seed: int, length: int, dim: int, copies: float = 0.3) -> np.ndarray:
    """[kv_heads, length, dim] in float32, some of them nearly copies of others."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((HEADS, length, dim))
    for _ in range(int(copies * length)):
        source, target = rng.integers(0, length, 2)
        keys[:, target] = keys[:, source] * rng.uniform(0.5, 2) + 0.2 * rng.standard_normal((HEADS, dim))
    return keys.astype(np.float32)


def context_of(keys: np.ndarray, page: int, room: int = 11, storage: str = "plain", observed: int = WINDOW, **how):
    """The keys in scrambled pages, behind them rows and pages full of junk, and the ring of their last queries."""
    heads, length, dim = keys.shape
    geometry = Geometry(1, heads * GROUP, heads, dim, page, length + room, dim**-0.5)
    rows = np.concatenate([keys, np.full((heads, room, dim), np.nan, np.float32)], axis=1).swapaxes(0, 1)[None]
    stored = paged(geometry, rows, rows, length, storage=registry.resolve(storage)[1], **how)
    queries = np.random.default_rng(length).standard_normal((heads * GROUP, WINDOW, dim)).astype(np.float32) * 2
    ring = np.full((WINDOW, heads * GROUP, dim), np.nan, np.float32)
    ring[np.arange(length - WINDOW, length) % WINDOW] = queries.swapaxes(0, 1)
    context = evict_context(registry.resolve("dense")[0], stored, phase="token", observed=observed)
    return context, jnp.asarray(ring), queries


def counted(context) -> jax.Array:
    """Which slots of the ring hold the last `observed` queries."""
    age = (context.next_position - 1 - jnp.arange(WINDOW)) % WINDOW
    return age < context.observed


CASES = [
    # length, page, tile, dim, copies of others, first, recent, kernel
    (6, 4, 4, 8, 0.0, 0, 5, 1),
    (40, 4, 4, 8, 0.3, 0, 5, 3),
    (40, 4, 8, 8, 0.0, 3, 5, 3),
    (64, 8, 16, 16, 1.0, 0, 9, 7),
    (65, 8, 16, 16, 0.3, 2, 7, 5),
    (63, 8, 64, 16, 0.3, 0, 5, 7),
    (300, 16, 64, 32, 0.3, 0, 5, 7),
    (200, 4, 32, 64, 0.0, 0, 5, 7),  # few rows have a similar one, and none among the newest
]


@pytest.mark.parametrize(("length", "page", "tile", "dim", "copies", "first", "recent", "kernel"), CASES)
def test_scores_are_those_of_whole_matrices(length, page, tile, dim, copies, first, recent, kernel):
    keys = keys_of(length, length, dim, copies)
    granularity = Granularity.HEAD if length % 2 else Granularity.SEQUENCE
    context, ring, queries = context_of(keys, page, granularity=granularity)
    exact = keys.astype(np.float64), queries.astype(np.float64)
    repeats, _ = oracle.redundancy(exact[0])
    found = np.asarray(redundancy.key_redundancy(context, tile))
    np.testing.assert_allclose(found[:, :length], repeats, rtol=1e-5)
    assert not found[:, length:].any()
    how = {"first": first, "recent": recent, "kernel": kernel}
    votes = oracle.importance(exact[1], exact[0], first, length - recent, kernel, context.geometry.scale)
    inside, outside = slice(first, length - recent), np.arange(first, length - recent)
    found = np.asarray(redundancy.importance(context, ring, counted(context), **how))
    np.testing.assert_allclose(found[:, inside], votes, rtol=1e-5, atol=1e-8)
    assert np.isneginf(np.delete(found, outside, axis=1)).all()
    wanted = oracle.joint(votes, repeats[:, inside], 0.1)
    found = redundancy.joint_scores(context, ring, counted(context), **how, weight=0.1, tile=tile)
    np.testing.assert_allclose(found[:, inside], wanted, rtol=1e-5, atol=1e-7)
    assert np.isneginf(np.delete(found, outside, axis=1)).all()


def test_fewer_queries_than_the_window_vote_alone():
    keys = keys_of(1, 40, 8)
    for observed in (1, 3):
        context, ring, queries = context_of(keys, 4, observed=observed)
        votes = oracle.importance(queries[:, -observed:].astype(np.float64), keys.astype(np.float64), 0, 35, 3, 8**-0.5)
        found = redundancy.importance(context, ring, counted(context), first=0, recent=5, kernel=3)
        np.testing.assert_allclose(found[:, :35], votes, rtol=1e-5, atol=1e-8)


def test_a_row_without_a_similar_one_makes_the_first_row_less_redundant():
    keys = np.broadcast_to(np.eye(12, dtype=np.float32) + 0.2, (HEADS, 12, 12))  # cosines 0.43: similar to none
    found = np.asarray(redundancy.key_redundancy(context_of(keys, 4)[0], 4))[:, :12]
    np.testing.assert_allclose(found, oracle.redundancy(keys.astype(np.float64))[0], rtol=1e-5)
    assert (found[:, 0] < found[:, 1]).all()
    np.testing.assert_allclose(found[:, 1:], found[:, 1:2].repeat(11, axis=1), rtol=1e-6)


def test_the_newest_of_equal_rows_counts_less():
    keys = np.ones((HEADS, 10, 8), np.float32)
    found = np.asarray(redundancy.key_redundancy(context_of(keys, 4)[0], 4))[:, :10]
    np.testing.assert_allclose(found, oracle.redundancy(keys.astype(np.float64))[0], rtol=1e-5)
    assert (found[:, -1] < found[:, 0]).all()


def test_rows_of_zeros_are_like_nothing():
    keys = keys_of(2, 20, 8)
    keys[:, 5] = 0
    found = redundancy.key_redundancy(context_of(keys, 4)[0], 8)
    np.testing.assert_allclose(found[:, :20], oracle.redundancy(keys.astype(np.float64))[0], rtol=1e-5)


def test_what_nobody_wrote_changes_nothing():
    keys, found = keys_of(3, 41, 8), []
    for poison, seed in ((np.nan, 0), (np.inf, 0), (0.0, 1)):
        context, ring, _ = context_of(keys, 4, poison=poison, seed=seed)
        how = {"first": 2, "recent": 5, "kernel": 3, "weight": 0.1, "tile": 8}
        found.append(np.asarray(redundancy.joint_scores(context, ring, counted(context), **how))[:, :41])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_more_room_changes_nothing():
    keys, found = keys_of(4, 30, 8), []
    for room in (2, 90):
        context, ring, _ = context_of(keys, 4, room=room)
        how = {"first": 0, "recent": 5, "kernel": 3, "weight": 0.1, "tile": 8}
        found.append(np.asarray(redundancy.joint_scores(context, ring, counted(context), **how))[:, :25])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_keys_are_compared_as_they_are_stored():
    keys = keys_of(5, 45, 16)
    context, ring, queries = context_of(keys, 4, storage="fp8_kv")
    pages = context.view.head_pages(0, context.view.table.shape[2])
    tiles = {
        name: context.pools[name][pages].reshape(1, HEADS, -1, *context.pools[name].shape[2:]) for name in context.names
    }
    stored = np.asarray(context.load_tile(tiles, context.layer)[0][0])[:, :45].astype(np.float64)
    assert np.abs(stored - keys).max() > 1e-3
    wanted = oracle.joint(
        oracle.importance(queries.astype(np.float64), stored, 0, 40, 3, 0.25), oracle.redundancy(stored)[0][:, :40], 0.1
    )
    how = {"first": 0, "recent": 5, "kernel": 3, "weight": 0.1, "tile": 16}
    found = redundancy.joint_scores(context, ring, counted(context), **how)
    np.testing.assert_allclose(found[:, :40], wanted, rtol=1e-5, atol=1e-7)


def test_bfloat16_keys_are_not_rounded_further():
    keys = np.asarray(jnp.asarray(keys_of(6, 45, 16), jnp.bfloat16).astype(jnp.float32))
    context, _, _ = context_of(keys, 4)
    half = {name: pool.astype(jnp.bfloat16) for name, pool in context.pools.items() if name in context.names}
    found = redundancy.key_redundancy(context._replace(pools={**context.pools, **half}), 16)
    np.testing.assert_allclose(found[:, :45], oracle.redundancy(keys.astype(np.float64))[0], rtol=1e-5)


def test_tiles_fit_into_the_workspace():
    geometry = Geometry(2, 32, 8, 128, 16, 32768, 1.0)
    least = redundancy.workspace_nbytes(geometry, 8, 16)
    assert redundancy.tile_rows(geometry, 8, least - 1) is None
    assert redundancy.tile_rows(geometry, 8, least) == 16
    for limit in (least, 50 << 20, 64 << 20, 200 << 20, 4 << 30):
        tile = redundancy.tile_rows(geometry, 8, limit)
        assert tile is not None
        assert redundancy.workspace_nbytes(geometry, 8, tile) <= limit
        assert tile == redundancy.MAX_TILE_ROWS or redundancy.workspace_nbytes(geometry, 8, 2 * tile) > limit
    short = Geometry(2, 32, 8, 128, 16, 100, 1.0)
    assert redundancy.tile_rows(short, 8, 4 << 30) == 128


def test_no_array_of_all_pairs_is_ever_held():
    keys = keys_of(7, 500, 16)
    context, ring, _ = context_of(keys, 16, room=1548)
    how = {"first": 0, "recent": 5, "kernel": 3, "weight": 0.1}

    @functools.partial(jax.jit, static_argnums=0)
    def score(tile, pools, ring, in_window):
        return redundancy.joint_scores(context._replace(pools=pools), ring, in_window, **how, tile=tile)

    def temporary(tile: int) -> int:
        return score.lower(tile, context.pools, ring, counted(context)).compile().memory_analysis().temp_size_in_bytes

    capacity, bound = 2048, redundancy.workspace_nbytes(context.geometry, WINDOW, 32)
    assert temporary(32) < 1.25 * bound < HEADS * capacity**2 * 4 / 10
