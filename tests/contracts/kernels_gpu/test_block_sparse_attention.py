"""Attention of tiles over listed blocks and over biased keys on a Hopper GPU, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, mosaic_support
from sparsejax.pallas_kernels.block_sparse_attention.tiles import num_tiles
from tests.contracts import tiles
from tests.contracts.kernels_gpu.cases import Shape, make, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper():
    if (problem := mosaic_support.platform_problem()) is not None:
        pytest.skip(problem)


def compare(out, lse, wanted, wanted_lse, real):
    out, lse = np.asarray(out, np.float32), np.asarray(lse)
    assert np.isfinite(out).all()
    seen = (wanted_lse > -1e29) & real
    assert relative_error(np.where(real[..., None], out, 0), np.where(real[..., None], wanted, 0)) < 6e-3
    np.testing.assert_allclose(lse[seen], wanted_lse[seen], rtol=1e-6, atol=1e-2)
    assert lse[real & ~seen].max(initial=-1e30) < -1e29


LENGTHS, CHUNKS = (1, 0, 63, 64, 65, 700, 127, 1537, 129), (1, 0, 63, 1, 65, 130, 100, 200, 128)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("shape", "block", "tile"),
    [
        (Shape(LENGTHS), 128, 128),
        (Shape(LENGTHS), 128, 256),
        (Shape(LENGTHS), 64, 128),
        (Shape(LENGTHS), 512, 128),
        (Shape(LENGTHS, page=16), 128, 128),
        (Shape(LENGTHS, page=128), 64, 128),
        (Shape(LENGTHS, page=256), 128, 384),
        (Shape(LENGTHS, dim=64), 128, 128),
        (Shape(LENGTHS, dim=256), 128, 128),
        (Shape(LENGTHS, heads=1, group=16), 128, 128),
        (Shape(LENGTHS, heads=2, group=7), 128, 128),
        (Shape(LENGTHS, heads=8, group=1), 128, 128),
        (Shape(LENGTHS, per_head_table=True, per_head_lengths=True), 128, 128),
        (Shape(LENGTHS, dtype="float16"), 128, 128),
    ],
    ids=str,
)
def test_lists_match_the_oracle_and_nothing_else_is_read(shape, block, tile, seed):
    case, chunk = make(shape, seed=seed), max(CHUNKS)
    rng = np.random.default_rng(seed)
    size = (len(LENGTHS), chunk, shape.heads * shape.group, shape.dim)
    q = jnp.asarray(rng.standard_normal(size, np.float32).astype(jnp.dtype(shape.dtype)))
    start = jnp.maximum(case.view.lengths - jnp.asarray(CHUNKS, jnp.int32)[:, None], 0)
    starts, lengths = (np.broadcast_to(np.asarray(x), (len(LENGTHS), shape.heads)) for x in (start, case.view.lengths))
    columns = -(-max(LENGTHS) // block)
    blocks, count = tiles.random_lists(rng, starts, lengths, chunk, shape.group, tile, block, columns)

    @jax.jit
    def run(q, pools, table, lengths, start, blocks, count):
        view = case.view._replace(table=table, lengths=lengths)
        how = case.how | {"block_size": block, "tile_rows": tile, "implementation": "mosaic_gpu"}
        return api.block_sparse_attention(q, pools, case.names, view, start, blocks, count, **how)

    out, lse = run(q, case.pools, case.view.table, case.view.lengths, start, jnp.asarray(blocks), jnp.asarray(count))
    scale = case.scale
    wanted = tiles.listed_attention(q, case.keys, case.values, starts, lengths, blocks, count, tile, block, scale)
    real = np.arange(chunk)[None, :, None] < np.repeat(lengths - starts, shape.group, 1)[:, None, :]
    compare(out, lse, *wanted, np.broadcast_to(real, lse.shape))


def test_all_blocks_are_prefill_attention():
    case, chunk = make(Shape((9000, 5000))), 4096
    q = jax.random.normal(jax.random.key(1), (2, chunk, 32, 128), jnp.bfloat16)
    start = case.view.lengths - chunk
    count = jnp.full((2, 8, num_tiles(chunk, 4, 128)), 71, jnp.int32)
    blocks = jnp.broadcast_to(jnp.arange(71, dtype=jnp.int32), (*count.shape, 71))
    how = case.how | {"implementation": "mosaic_gpu"}
    rest = case.pools, case.names, case.view, start
    out, lse = api.block_sparse_attention(q, *rest, blocks, count, block_size=128, tile_rows=128, **how)
    wanted, wanted_lse = api.prefill_attention(q, *rest, **how)
    assert relative_error(out, wanted) < 3e-3
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    ("dim", "group", "tile", "keys"), [(128, 4, 128, 1024), (128, 4, 256, 1000), (64, 3, 256, 100), (256, 1, 128, 70)]
)
def test_biased_keys(dim, group, tile, keys):
    rng = np.random.default_rng(4)
    q = jnp.asarray(rng.standard_normal((2, 300, 2 * group, dim)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.standard_normal((2, 2, keys, dim)), jnp.bfloat16) for _ in range(2))
    bias = rng.standard_normal((2, 2, num_tiles(300, group, tile), keys)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.7] = -np.inf
    bias[0, 1, 0], bias[0, 1, 1, keys // 3 :], bias[1, 0, 0, : keys // 2] = -np.inf, -np.inf, -np.inf
    attend = functools.partial(api.tile_attention, tile_rows=tile, scale=0.1, implementation="mosaic_gpu")
    out, lse = jax.jit(attend)(q, k, v, jnp.asarray(bias))
    wanted = tiles.biased_attention(q, np.asarray(k, np.float32), np.asarray(v, np.float32), bias, tile, 0.1)
    compare(out, lse, *wanted, np.ones(lse.shape, bool))


def test_a_method_that_lists_blocks():
    """What the engine runs, by the kernels chosen for this device and by XLA alone, on the same plan."""
    from sparsejax.methods import flashprefill_v2 as method
    from tests.contracts.test_flashprefill import context_of, traced

    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((2, 9000, 2, 128)) for _ in range(2))
    k += rng.standard_normal((2, 141, 2, 128)).repeat(64, axis=1)[:, :9000]  # so that blocks differ
    q = rng.standard_normal((2, 5000, 8, 128))
    q += 1.5 * rng.standard_normal((2, 157, 1, 128)).repeat(32, axis=1)[:, :5000]  # and tiles lean to some of them
    context = context_of(q, k, v, [4000, 100], [5000, 4400], scale=0.1, page=64, dtype="bfloat16")
    rules = method.Rules(128, 128, 0.3, 2, 4, 8, 4096, True)

    def run(context):
        energy = method.energies(rules, context, method.block_means(context, rules.block_size)[0])
        return method.plan(rules, context, energy), method.attend(rules, context)

    plan, out = traced(run, context, None)
    other, wanted = traced(run, context._replace(implementation="xla"), None)
    assert 0.02 < plan.kept.sum() / plan.causal.sum() < 0.8
    same = np.asarray((plan.kept == other.kept).all(-1).all(1))  # [batch, tiles]
    assert same.mean() > 0.9  # means and logits are rounded to bfloat16, and a block may lie at the threshold
    rows = np.repeat(same, 32, axis=1)[:, :5000] & (np.arange(5000)[None] < np.array([[5000], [4400]]))
    assert relative_error(np.asarray(out)[rows], np.asarray(wanted)[rows]) < 1e-2
