"""Block-sparse prefill attention: the worked examples, the rule in float64 on ragged batches, and the dense limits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import PrefillContext
from sparsejax.methods import flashprefill_v2 as method
from sparsejax.methods.flashprefill_v2 import Params, Rules
from sparsejax.pallas_kernels import api
from tests.core.harness import QUICK
from tests.core.paging import paged
from tests.vectors import make_flashprefill_vectors as maker
from tests.vectors.make_flashprefill_vectors import Rule, sparse_attention
from tests.vectors.test_vectors import HERE, cases

SCALE = 0.6


def context_of(q, k, v, starts, counts, *, scale=SCALE, page=8, storage="plain", grain="sequence", dtype="float32"):
    """Queries [batch, chunk, q_heads, dim] of the last `counts` rows of k and v [batch, rows, kv_heads, dim], paged."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    geometry = Geometry(2, q.shape[2], k.shape[2], k.shape[3], page, -(-k.shape[1] // page) * page, scale, dtype)
    lengths = np.asarray(starts) + np.asarray(counts)
    rows = paged(
        geometry, k, v, lengths, storage=registry.resolve(storage)[1], granularity=Granularity(grain), layer=1, seed=2
    )
    counts = jnp.asarray(counts, jnp.int32)
    return PrefillContext(
        geometry=geometry,
        role="dense",
        layer=rows.layer,
        queries=jnp.asarray(q, dtype),
        view=rows.view,
        start=rows.view.lengths - counts[:, None],
        num_new=counts,
        positions=jnp.zeros(q.shape[:2], jnp.int32),
        pools=rows.pools,
        names=rows.names,
        load_tile=rows.load_tile,
        page_aux={},
        carry=None,
    )


def traced(function, context: PrefillContext, options: dict | None = QUICK):
    """`function` of the context with arrays as arguments of a program."""

    @jax.jit
    def run(queries, pools, table, lengths, start, num_new):
        view = context.view._replace(table=table, lengths=lengths)
        return function(context._replace(queries=queries, pools=pools, view=view, start=start, num_new=num_new))

    view = context.view
    arguments = context.queries, context.pools, view.table, view.lengths, context.start, context.num_new
    return run.lower(*arguments).compile(options)(*arguments)


def planned(rules: Rules, context: PrefillContext):
    """Energies and the plan."""

    def run(context):
        energy = method.energies(rules, context, method.block_means(context, rules.block_size)[0])
        return energy, method.plan(rules, context, energy)

    return traced(run, context)


def rules_of(rule: Rule) -> Rules:
    return Rules(*rule[:8])


# Worked examples


def test_the_generator_reproduces_the_file():
    assert maker.flashprefill_v2() == (HERE / "flashprefill_v2.json").read_text("utf-8")


@pytest.mark.parametrize("name", cases("flashprefill_v2"))
@pytest.mark.parametrize("page", [1, 16])
def test_worked_example(name, page):
    case = cases("flashprefill_v2")[name]
    given, wanted = case["inputs"], case["expected"]
    values = {key.removeprefix("flashprefill_v2_"): value for key, value in case["params"].items()}
    rules = Rules(
        values["k_block_m"],
        values["k_block_n"],
        values["abs_threshold"],
        values["attention_sink_blocks"],
        values["window_blocks"],
        values["last_query_blocks"],
        values["min_sparse_q_len"],
        values["use_mean_correction"],
    )
    arrays = ([given[name]] for name in "qkv")
    context = context_of(*arrays, [given["prefix"]], [len(given["q"])], scale=values["softmax_scale"], page=page)
    energy, plan = planned(rules, context)
    assert [np.flatnonzero(kept).tolist() for kept in plan.kept[0, 0]] == wanted["blocks_per_tile"]
    for found, energies in zip(energy[0, 0], wanted["energies"], strict=True):
        np.testing.assert_allclose(found[: len(energies)], energies, rtol=1e-5, atol=1e-6)
    out = traced(functools.partial(method.attend, rules), context)
    np.testing.assert_allclose(out[0], wanted["output"], rtol=1e-5, atol=2e-6)


# The rule in float64


STARTS, COUNTS = (0, 37, 80, 0, 101, 64), (57, 44, 1, 1, 23, 40)


def ragged(group: int, kv_heads: int = 2, chunk: int = 57, dim: int = 8, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = max(s + c for s, c in zip(STARTS, COUNTS, strict=True))
    k, v = (rng.standard_normal((len(STARTS), rows, kv_heads, dim)) * 1.5 for _ in range(2))
    return rng.standard_normal((len(STARTS), chunk, kv_heads * group, dim)) * 1.5, k, v


@pytest.mark.parametrize(
    ("group", "rule", "fields"),
    [
        (2, Rule(16, 8, 0.4, 1, 1, 1, 0, True, SCALE), {}),
        (2, Rule(16, 8, 0.4, 0, 1, 0, 0, True, SCALE), {"page": 4, "grain": "layer"}),
        (2, Rule(16, 8, 0.4, 0, 2, 1, 0, False, SCALE), {"page": 16, "grain": "head"}),
        (1, Rule(16, 16, 0.8, 2, 1, 1, 0, True, SCALE), {}),
        (4, Rule(16, 4, 0.2, 1, 3, 2, 0, True, SCALE), {}),
        (3, Rule(16, 8, 0.4, 1, 1, 1, 0, True, SCALE), {}),  # tiles that begin between two heads of a position
        (5, Rule(32, 8, 1.0, 0, 1, 0, 0, True, SCALE), {}),
        (2, Rule(16, 8, 0.4, 1, 1, 1, 41, True, SCALE), {}),  # some rows are short enough to be dense
    ],
)
def test_ragged_batches_follow_the_rule(group, rule, fields):
    """Each row alone in float64, so company changes nothing; everything that may not be read is NaN."""
    q, k, v = ragged(group)
    context = context_of(q, k, v, STARTS, COUNTS, **fields)
    _, plan = planned(rules_of(rule), context)
    out = np.asarray(traced(functools.partial(method.attend, rules_of(rule)), context))
    assert np.isfinite(out).all()
    sparse = 0
    for b, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        rows = start + count
        wanted = sparse_attention(q[b, :count], k[b, :rows], v[b, :rows], start, rule)
        tiles = len(wanted.blocks) // 2
        kept = [[np.flatnonzero(tile).tolist() for tile in head[:tiles]] for head in plan.kept[b]]
        assert [*kept[0], *kept[1]] == wanted.blocks
        assert not plan.kept[b, :, tiles:].any()
        np.testing.assert_allclose(out[b, :count], wanted.out, rtol=1e-4, atol=1e-5)
        sparse += sum(len(blocks) < 1 + blocks[-1] for blocks in wanted.blocks)
    assert sparse > 5


def test_encoded_rows_are_pooled_as_they_are_read_back():
    q, k, v = ragged(2)
    rule = Rule(16, 8, 0.4, 1, 1, 1, 0, True, SCALE)
    context = context_of(q, k, v, STARTS, COUNTS, storage="fp8_kv")
    pages = np.asarray(context.view.head_pages(0, context.view.table.shape[2]))
    tiles = {name: jnp.asarray(np.asarray(context.pools[name])[pages]) for name in context.names}
    stored = (np.asarray(x) for x in context.load_tile(tiles, context.layer))
    k, v = (np.moveaxis(x.reshape(*x.shape[:2], -1, x.shape[4]), 1, 2) for x in stored)
    out = np.asarray(traced(functools.partial(method.attend, rules_of(rule)), context))
    wanted = sparse_attention(q[1, :44], k[1, :81].astype(np.float64), v[1, :81].astype(np.float64), 37, rule)
    np.testing.assert_allclose(out[1, :44], wanted.out, rtol=1e-4, atol=1e-5)


def test_many_segments_are_pooled_like_one(monkeypatch):
    context = context_of(*ragged(2), STARTS, COUNTS)
    whole = traced(lambda context: method.block_means(context, 8), context)
    monkeypatch.setattr(method, "SEGMENT_ROWS", 32)
    parts = traced(lambda context: method.block_means(context, 8), context)
    for found, wanted in zip(parts, whole, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


# Dense limits


def dense(context: PrefillContext) -> jax.Array:
    how = {"load_tile": context.load_tile, "layer": context.layer, "scale": context.geometry.scale}
    return api.prefill_attention(context.queries, context.pools, context.names, context.view, context.start, **how)[0]


@pytest.mark.parametrize("correct", [True, False])
def test_threshold_0_is_dense(correct):
    rules = Rules(16, 8, 0.0, 0, 1, 0, 0, correct)
    context = context_of(*ragged(2), STARTS, COUNTS)
    out, wanted = (np.asarray(traced(f, context)) for f in (functools.partial(method.attend, rules), dense))
    for b, count in enumerate(COUNTS):
        np.testing.assert_allclose(out[b, :count], wanted[b, :count], rtol=1e-5, atol=1e-6)


def test_short_chunks_are_dense_bit_by_bit():
    params = Params(flashprefill_v2_abs_threshold=1.0)
    context = context_of(*ragged(2), STARTS, COUNTS)
    out, carry = traced(functools.partial(method.attend_prefill, params), context)
    assert carry is None
    np.testing.assert_array_equal(out, traced(dense, context))


def test_the_sizes_of_the_engine():
    """Params as they are served: tiles of 128 rows, blocks of 64 keys, pages of 32."""
    rng = np.random.default_rng(5)
    knobs = {"k_block_n": 64, "abs_threshold": 0.7, "attention_sink_blocks": 1, "window_blocks": 1}
    knobs |= {"last_query_blocks": 1, "min_sparse_q_len": 64}
    name = "flash-prefill-v2(" + ",".join(f"flashprefill_v2_{key}={value}" for key, value in knobs.items()) + ")"
    served, _ = registry.resolve(name)
    assert served.name == "flashprefill_v2"
    assert served.axis == "prefill"
    assert served.chunk_dependent
    k, v = (rng.standard_normal((1, 700, 1, 16)) * 2 for _ in range(2))
    k += rng.standard_normal((1, 11, 1, 16)).repeat(64, axis=1)[:, :700] * 2  # so that blocks differ
    q = rng.standard_normal((1, 200, 4, 16)) * 2
    context = context_of(q, k, v, [500], [200], page=32)
    assert served.attend_prefill is not None
    out, _ = traced(functools.partial(served.attend_prefill, served.params), context)
    rule = Rule(128, 64, 0.7, 1, 1, 1, 64, True, SCALE)
    wanted = sparse_attention(q[0], k[0], v[0], 500, rule)
    assert min(map(len, wanted.blocks)) <= 4
    np.testing.assert_allclose(out[0], wanted.out, rtol=1e-4, atol=1e-5)


# Parameters


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("k_block_m", 24, "must be a multiple of 16, got 24"),
        ("k_block_m", 0, "must be at least 16, got 0"),
        ("k_block_n", 32, "must be at least 64, got 32"),
        ("k_block_n", 192, "must be a power of two of at least 64, got 192"),
        ("k_block_n", 128.0, "must be an integer, got 128.0"),
        ("abs_threshold", 1.5, r"must be a number in \[0, 1\], got 1.5"),
        ("abs_threshold", -0.1, r"must be a number in \[0, 1\], got -0.1"),
        ("abs_threshold", float("nan"), r"must be a number in \[0, 1\], got nan"),
        ("abs_threshold", True, r"must be a number in \[0, 1\], got True"),
        ("attention_sink_blocks", -1, "must be at least 0, got -1"),
        ("window_blocks", 0, "must be at least 1, got 0"),
        ("last_query_blocks", -1, "must be at least 0, got -1"),
        ("min_sparse_q_len", -1, "must be at least 0, got -1"),
        ("use_mean_correction", "no", "must be one of True, False, got 'no'"),
    ],
)
def test_bad_parameters_are_refused(name, value, reason):
    with pytest.raises(MethodError, match=f"flashprefill_v2_{name} {reason}"):
        Params(**{f"flashprefill_v2_{name}": value})


def test_a_threshold_must_be_given():
    geometry = Geometry(2, 4, 2, 8, 16, 64, 0.5)
    without, _ = registry.resolve("flashprefill_v2")
    reasons = without.check(without.params, geometry)
    assert reasons == ["flashprefill_v2_abs_threshold must be given: it depends on the model, and larger is sparser"]
    given, _ = registry.resolve("flashprefill_v2(flashprefill_v2_abs_threshold=0)")
    assert given.check(given.params, geometry) == []
