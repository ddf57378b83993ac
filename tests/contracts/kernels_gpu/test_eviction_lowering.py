"""The Triton kernels of eviction as far as a machine without a GPU can take them: what they serve, and lowering."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from sparsejax.pallas_kernels import triton_support
from sparsejax.pallas_kernels.decode_attention import triton_gpu as decode_triton
from sparsejax.pallas_kernels.key_similarity import triton_gpu as similarity_triton
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.move_rows import triton_gpu as move_triton
from sparsejax.pallas_kernels.observed_decode_attention import triton_gpu as observed_triton
from sparsejax.pallas_kernels.row_scores import triton_gpu as rows_triton
from tests.contracts.kernels_gpu.cases import row_scaled

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
lowers = pytest.mark.skipif(
    triton_support.import_problem() is not None or not any(map(importlib.util.find_spec, PLUGINS)),
    reason="needs jax-triton and JAX's CUDA plugin, though no GPU",
)


def call(queries=32, heads=8, group=4, dim=128, page=64, dtype="bfloat16", codes=None, own=1):
    """Query, pools, names, view, limit and load_tile as shapes."""
    rows = (40, page)
    pools = {name: jax.ShapeDtypeStruct((*rows, dim), jnp.dtype(codes or dtype)) for name in ("k", "v")}
    if codes:
        pools |= {name: jax.ShapeDtypeStruct(rows, jnp.float32) for name in ("k_scale", "v_scale")}
    table, lengths, limit = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, own, 4), (2, own), (2, own, queries))
    )
    view = PageView(table, 1 if own > 1 else heads, jax.ShapeDtypeStruct((heads,), jnp.int32), lengths)  # type: ignore[arg-type]
    q = jax.ShapeDtypeStruct((2, queries, heads * group, dim), jnp.dtype(dtype))
    return q, pools, view, limit, row_scaled(dtype) if codes else lambda tiles, layer: (tiles["k"], tiles["v"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"codes": "uint8"}, None),
        ({"dim": 96}, "head_dim is 96, not one of 64, 128, 256"),
        ({"group": 64, "dim": 256, "heads": 1, "dtype": "float32"}, "65536 bytes, more than 32768"),
        ({"dtype": "float64"}, "queries are float64, not one of bfloat16, float16, float32"),
    ],
)
def test_what_scores_serve(fields, reason, monkeypatch):
    monkeypatch.setattr(triton_support, "capability", lambda: (9, 0))
    with jax.enable_x64(fields.get("dtype") == "float64"):
        q, pools, view, _, load_tile = call(**fields)
        found = rows_triton.unsupported_shape(q, pools, tuple(pools), view, load_tile)
    assert (found is None) if reason is None else found is not None and found.endswith(reason), found


def test_what_scores_do_not_know():
    q, pools, view, _, load_tile = call()

    def doubled(tiles, layer):
        k, v = load_tile(tiles, layer)
        return k * 2, v

    assert "decoded in a way" in (rows_triton.unsupported_shape(q, pools, tuple(pools), view, doubled) or "")


@pytest.mark.parametrize(
    ("dtype", "shape", "capability", "reason"),
    [
        ("bfloat16", (64, 128), (8, 0), None),
        ("int32", (64,), (8, 0), None),
        ("uint8", (64, 2, 12), (8, 0), None),
        ("float8_e4m3fn", (64, 128), (9, 0), None),
        ("float8_e4m3fn", (64, 128), (8, 6), "8-bit floats need compute capability 8.9"),
        ("int4", (64, 128), (9, 0), "rows of 'k' are int4"),
        ("bfloat16", (64, 5000), (9, 0), "a row of 'k' has 5000 elements, more than 4096"),
    ],
)
def test_what_can_be_moved(dtype, shape, capability, reason, monkeypatch):
    monkeypatch.setattr(triton_support, "capability", lambda: capability)
    found = move_triton.unsupported_shape({"k": jax.ShapeDtypeStruct((9, *shape), jnp.dtype(dtype))})  # type: ignore[dict-item]
    assert (found is None) if reason is None else found is not None and found.startswith(reason), found


@lowers
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"queries": 1, "group": 7, "heads": 2},
        {"queries": 300, "dim": 64, "own": 8},
        {"codes": "float8_e4m3fn"},
        {"codes": "uint8", "page": 16},
        {"dtype": "float32", "dim": 256},
    ],
    ids=str,
)
def test_scores_lower(fields):
    q, pools, view, limit, _ = call(**fields)
    scaled, config = "codes" in fields, rows_triton.Config(32, 64)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)

    def run(q, pools, table, lengths, offset, limit, lse):
        at = PageView(table, view.stride, offset, lengths)
        found = rows_triton.launch_lse(q, pools, at, limit, 3, scaled, 0.1, config, 132, 90)
        how = {"scaled": scaled, "scale": 0.1, "config": config, "num_cores": 132, "compute_capability": 90}
        mass = rows_triton.launch_scores(q, pools, at, limit, lse, "sum", **how)
        share = rows_triton.launch_scores(q, pools, at, limit, lse, "max", over="max", **how)
        return found, mass, share, rows_triton.launch_scores(q, pools, at, limit, None, "max", **how)

    arguments = (q, pools, view.table, view.lengths, view.offset, limit, lse)
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 4


@lowers
@pytest.mark.parametrize(("shape", "dtype"), [((16, 128), "bfloat16"), ((16, 96), "uint8"), ((16,), "int32")])
def test_moves_lower_in_place(shape, dtype):
    pool = jax.ShapeDtypeStruct((40, *shape), jnp.dtype(dtype))
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def run(pool, rows, old, new, offset):
        lengths = rows[:, :, 0]
        views = (PageView(table, 8, offset, lengths) for table in (old, new))
        return move_triton.launch(pool, rows, *views, compute_capability=90)

    arguments = (pool, ints((2, 1, 50)), ints((2, 1, 9)), ints((2, 1, 4)), ints((8,)))
    text = jax.jit(run, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 1
    assert "output_operand_alias<" in text


@lowers
@pytest.mark.parametrize("fields", [{}, {"own": 8}, {"codes": "uint8", "page": 16}, {"dtype": "float32", "dim": 256}])
def test_similarity_lowers(fields):
    _, pools, view, _, _ = call(**fields)
    config, dtype = similarity_triton.Config(32, 4), fields.get("dtype", "bfloat16")

    def run(pools, table, lengths, offset):
        at = PageView(table[:1], view.stride, offset, lengths[:1])
        return similarity_triton.launch(pools, at, 0.5, dtype, "codes" in fields, config, 132, 90)

    arguments = (pools, view.table, view.lengths, view.offset)
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 4


@lowers
@pytest.mark.parametrize("fields", [{}, {"own": 8, "group": 7}, {"codes": "uint8", "page": 16}])
def test_observed_attention_lowers_in_place(fields):
    q, pools, view, _, _ = call(queries=1, **fields)
    scores = jax.ShapeDtypeStruct(pools["k"].shape[:2], jnp.float32)
    config = decode_triton.Config(32, num_stages=3)

    def run(scores, q, pools, table, lengths, offset):
        at = PageView(table, view.stride, offset, lengths)
        how = (at, "codes" in fields, 0.1, config, 132, 90)
        out, lse, logits = decode_triton.launch(q[:, 0], pools, *how, with_logits=True)
        return out, observed_triton.launch(scores, logits, lse, at, True, 132, 90)

    arguments = (scores, q, pools, view.table, view.lengths, view.offset)
    text = jax.jit(run, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 3
    assert "output_operand_alias<" in text
