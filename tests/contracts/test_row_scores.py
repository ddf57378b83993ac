"""Scores of resident rows and rows moved between pages, against their oracles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.pallas_kernels import api, reference, specs
from sparsejax.pallas_kernels.move_rows import triton_gpu as move_triton
from sparsejax.pallas_kernels.move_rows import xla as move_xla
from sparsejax.pallas_kernels.row_scores import xla as rows_xla
from sparsejax.state import layer_view
from tests.contracts.test_kernels import by_name, real_queries, rows_of, tolerance
from tests.core.harness import QUICK

NAMES = ("one-row", "page-16", "page-32-layer", "page-64-head", "page-128", "multi-query", "bfloat16", "fp8-bfloat16")
SOME = [shape for shape in specs.SMALL if shape.name in NAMES]
GROUPS = ("max", "sum")
WAYS = [(kind, group) for kind in ("logit", "sum", "max") for group in GROUPS]
"""What joins over queries: the largest logit, or attention mass summed or at its largest; and how heads join."""


def limits(shape, per_head: bool = False) -> np.ndarray:
    """int32 [batch, heads or 1, queries]: causal in a chunk of ragged length; padding sees nothing."""
    chunks, lengths = np.asarray(shape.chunks)[:, None], np.asarray(shape.lengths)[:, None]
    index = np.arange(max(shape.chunks))[None, :]
    limit = np.where(index < chunks, lengths - chunks + index + 1, 0).astype(np.int32)[:, None]
    return np.repeat(limit, shape.num_kv_heads, axis=1) if per_head else limit


def options_of(way: tuple[str, str], lse) -> dict:
    """Keywords of `api.row_scores`."""
    kind, group = way
    return {"lse": None if kind == "logit" else lse, "group": group, "over": "max" if kind == "max" else "sum"}


@functools.cache
def program(module, shape, first: int = 0, block: int = 0):
    """Compiled (q, pools, table, limit) -> lse, and scores by way; `block` is what was patched."""
    rows, q = rows_of(shape)
    how = (rows.load_tile, rows.layer, rows.geometry.scale)
    keywords = dict(zip(("load_tile", "layer", "scale"), how, strict=True))

    def compute(q, pools, table, limit):
        arrays = (q, pools, rows.names, rows.view._replace(table=table), limit)
        if module is api:
            lse = api.attention_lse(*arrays, first=first, **keywords)
            score = functools.partial(api.row_scores, *arrays, **keywords)
            scores = {way: score(**options_of(way, lse)) for way in WAYS}
        else:
            lse = module.attention_lse(*arrays, first, *how)
            score = functools.partial(module.row_scores, *arrays)
            scores = {}
            for way in WAYS:
                options = options_of(way, lse)
                scores[way] = score(options["lse"], options["group"], *how, over=options["over"])
        return lse, scores

    arguments = (q, rows.pools, rows.view.table, jnp.asarray(limits(shape)))
    return jax.jit(compute).lower(*arguments).compile(QUICK)


@functools.cache
def compute(module, shape, first: int = 0, block: int = 0, **options):
    rows, q = rows_of(shape, **options)
    found = program(module, shape, first, block)(q, rows.pools, rows.view.table, jnp.asarray(limits(shape)))
    return jax.tree.map(np.asarray, found)


def close(dtype: str) -> dict:
    # Keys and queries are exact in both, so bfloat16 costs no more than the order of sums.
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == "bfloat16" else tolerance(dtype)


@by_name(argvalues=SOME)
@pytest.mark.parametrize("first", [0, 16])
def test_scores_and_lse(first, shape):
    wanted_lse, wanted = compute(reference, shape, first)
    lse, scores = compute(api, shape, first)
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, wanted_lse, **close(shape.dtype))
    for key, expected in wanted.items():
        assert scores[key].dtype == np.float32
        np.testing.assert_allclose(scores[key], expected, err_msg=str(key), **close(shape.dtype))


@by_name(argvalues=SOME)
def test_the_oracle_is_a_sum_of_softmax_rows(shape):
    """Against numpy in float64 over the rows as stored, one query head at a time."""
    rows, q = rows_of(shape)
    tiles = {name: np.asarray(rows.pools[name])[rows.head_pages] for name in rows.names}
    tiles = {name: tile.reshape(*tile.shape[:2], -1, *tile.shape[4:]) for name, tile in tiles.items()}
    k = np.asarray(jax.jit(rows.load_tile)(tiles, rows.layer)[0], np.float64)
    query, limit = np.asarray(q, np.float64), limits(shape)[:, 0]
    lse, scores = compute(reference, shape)
    for b in range(len(shape.lengths)):
        for head in range(shape.num_kv_heads):
            mass, share, largest = [], [], []
            for h in range(head * shape.group_size, (head + 1) * shape.group_size):
                mass.append(np.zeros(k.shape[2]))
                share.append(np.zeros(k.shape[2]))
                largest.append(np.full(k.shape[2], -np.inf))
                for i, seen in enumerate(limit[b]):
                    if seen == 0:
                        assert lse[b, i, h] == np.float32(-1e30)
                        continue
                    logits = k[b, head, :seen] @ query[b, i, h] * rows.geometry.scale
                    total = np.exp(logits - logits.max()).sum()
                    np.testing.assert_allclose(lse[b, i, h], logits.max() + np.log(total), rtol=1e-4, atol=1e-4)
                    mass[-1][:seen] += np.exp(logits - logits.max()) / total
                    share[-1][:seen] = np.maximum(share[-1][:seen], np.exp(logits - logits.max()) / total)
                    largest[-1][:seen] = np.maximum(largest[-1][:seen], logits)
            for kind, votes in (("sum", mass), ("max", share), ("logit", largest)):
                np.testing.assert_allclose(scores[kind, "max"][b, head], np.max(votes, 0), rtol=1e-3, atol=1e-4)
                np.testing.assert_allclose(scores[kind, "sum"][b, head], np.sum(votes, 0), rtol=1e-3, atol=1e-4)


@by_name(argvalues=SOME)
def test_a_chunk_s_lse_is_that_of_its_attention(shape):
    rows, q = rows_of(shape)
    start = jnp.asarray(np.asarray(rows.view.lengths) - np.asarray(shape.chunks, np.int32)[:, None])
    attention = functools.partial(api.prefill_attention, names=rows.names, view=rows.view, start=start, **rows.how)
    wanted = np.asarray(jax.jit(attention).lower(q, rows.pools).compile(QUICK)(q, rows.pools)[1])
    real = real_queries(shape)
    np.testing.assert_allclose(compute(api, shape)[0][real], wanted[real], **tolerance(shape.dtype))


@by_name(argvalues=SOME)
def test_mass_is_neither_lost_nor_made(shape):
    total = compute(api, shape)[1]["sum", "sum"].sum(2)
    wanted = np.broadcast_to(np.asarray(shape.chunks)[:, None] * shape.group_size, total.shape)
    np.testing.assert_allclose(total, wanted, rtol=1e-4)


def test_chunks_accumulate_to_the_whole():
    """What a method adds up over chunks, and over decoded tokens, is the score of all queries at once."""
    shape = specs.SMALL[1]
    lse, scores = compute(api, shape)
    rows, q = rows_of(shape)
    limit = limits(shape)
    score = functools.partial(
        api.row_scores, pools=rows.pools, names=rows.names, view=rows.view, group="sum", **rows.how
    )
    total = 0
    for part in (slice(0, 5), slice(5, 6), slice(6, None)):
        total = total + score(q[:, part], limit=jnp.asarray(limit[:, :, part]), lse=jnp.asarray(lse[:, part]))
    np.testing.assert_allclose(total, scores["sum", "sum"], rtol=1e-5, atol=1e-5)


def test_limits_per_head():
    shape = specs.SMALL[1]
    rows, q = rows_of(shape)
    limit = limits(shape, per_head=True)
    limit[:, 1] //= 2
    arrays = (q, rows.pools, rows.names, rows.view, jnp.asarray(limit))
    lse, scores = api.attention_lse(*arrays, **rows.how), api.row_scores(*arrays, **rows.how)
    wanted = reference.attention_lse(*arrays, 0, *rows.how.values())
    np.testing.assert_allclose(lse, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        scores, reference.row_scores(*arrays, None, "max", *rows.how.values()), rtol=2e-5, atol=2e-5
    )
    assert (np.isneginf(np.asarray(scores)).sum(2)[:, 1] >= np.isneginf(np.asarray(scores)).sum(2)[:, 0]).all()


@by_name(argvalues=[shape for shape in SOME if shape.name in ("page-16", "page-64-head", "fp8-bfloat16")])
def test_poison_and_place_change_nothing(shape):
    wanted = compute(api, shape, poison=0.0)
    for options in ({"poison": float("nan")}, {"poison": float("inf")}, {"poison": float("nan"), "seed": 9}):
        jax.tree.map(np.testing.assert_array_equal, compute(api, shape, **options), wanted)


@pytest.mark.parametrize("block", [16, 64, 4096])
def test_block_size_changes_nothing(block, monkeypatch):
    monkeypatch.setattr(rows_xla, "BLOCK_ROWS", block)
    wanted_lse, wanted = compute(reference, specs.SMALL[1])
    lse, scores = compute(api, specs.SMALL[1], block=block)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-5, atol=2e-5)
    for key, expected in wanted.items():
        np.testing.assert_allclose(scores[key], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["group", "over"])
def test_an_unknown_join_is_refused(name):
    rows, q = rows_of(specs.SMALL[0])
    limit = jnp.asarray(limits(specs.SMALL[0]))
    with pytest.raises(ValueError, match=f"{name} must be 'max' or 'sum', got 'mean'"):
        api.row_scores(q, *rows.pages, limit, **{name: "mean"}, **rows.how)


# Rows that move


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("storage", ["plain", "fp8_kv"])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_moved_rows(granularity, storage, per_head):
    """Every array, bit for bit: kept rows are where they belong and nothing else has changed."""
    geometry = Geometry(2, 4, 2, 8, 4, 32, 1.0, "bfloat16")
    rng = np.random.default_rng(3)
    kind = registry.resolve(storage)[1]
    layers, heads = geometry.table_shape(granularity)
    per_page = geometry.head_pages_per_page(granularity)
    batch, length, kept, num_pages = 2, 30, 9, 100
    specs_of = kind.payload(kind.params, geometry)
    pools = {
        name: rng.integers(0, 200, (num_pages * per_page, *spec.shape)).astype(jnp.dtype(spec.dtype))
        for name, spec in specs_of.items()
    }
    pools["positions"] = rng.integers(0, 99, (num_pages * per_page, geometry.page_size)).astype(np.int32)
    ids = 1 + rng.permutation(num_pages - 1)[: layers * heads * batch * 11]
    ids = ids.reshape(layers, heads, batch, 11).astype(np.int32)
    new_pages = np.pad(ids[..., 8:], ((0, 0), (0, 0), (0, 0), (0, 5)))  # null pages past the end
    views = []
    for table, rows in ((ids[..., :8], length), (new_pages, kept)):
        lengths = jnp.full((layers, heads, batch), rows, jnp.int32)
        views.append(layer_view(geometry, granularity, jnp.asarray(table), lengths, jnp.int32(1)))
    choices = [np.sort(rng.permutation(length)[:kept]) for _ in range(batch * (2 if per_head else 1))]
    keep = jnp.asarray(np.reshape(choices, (batch, -1, kept)), jnp.int32)
    pools = {name: jnp.asarray(pool) for name, pool in pools.items()}
    found = jax.jit(lambda pools, keep: api.move_rows(pools, keep, *views))(pools, keep)
    wanted = reference.move_rows(pools, keep, *views)
    assert set(found) == set(pools)
    for name, pool in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(pool), err_msg=name)
        assert (np.asarray(pool) != np.asarray(pools[name])).any()


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_moved_layers(granularity, joined, per_head, monkeypatch):
    """All layers one after the other, and as the heads of one view, whose kernel is replaced."""
    geometry, rng = Geometry(3, 4, 2, 8, 4, 32, 1.0), np.random.default_rng(4)
    layers, heads = geometry.table_shape(granularity)
    length, kept, num_pages = 30, 9, 100
    pool = jnp.asarray(rng.random((num_pages * geometry.head_pages_per_page(granularity), 4, 8)), jnp.float32)
    ids = 1 + rng.permutation(num_pages - 1)[: layers * heads * 11].reshape(layers, heads, 1, 11).astype(np.int32)
    keep = [np.sort(rng.permutation(length)[:kept]) for _ in range(3 * (2 if per_head else 1))]
    keep = jnp.asarray(np.reshape(keep, (3, -1, kept)), jnp.int32)

    def views(layer):
        lengths = jnp.full((layers, heads, 1), kept, jnp.int32)
        tables = jnp.asarray(ids[..., :8]), jnp.asarray(ids[..., 8:])
        return tuple(layer_view(geometry, granularity, table, lengths, layer) for table in tables)

    wanted = {"k": pool}
    for layer in range(3):
        wanted = reference.move_rows(wanted, keep[layer][None], *views(jnp.int32(layer)))
    if joined:
        monkeypatch.setattr(move_triton, "move_rows", move_xla.move_rows)
        found = jax.jit(lambda pools, keep: move_triton.move_layers(pools, keep, views))({"k": pool}, keep)
    else:
        found = jax.jit(lambda pools, keep: api.move_layers(pools, keep, views))({"k": pool}, keep)
    np.testing.assert_array_equal(found["k"], wanted["k"])
    assert (np.asarray(found["k"]) != np.asarray(pool)).any()
