"""Paged decode attention on a GPU against the float32 oracle."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView
from tests.contracts.kernels_gpu.cases import Shape, make, relative_error

pytestmark = pytest.mark.gpu

RAGGED = (1, 0, 63, 64, 65, 700, 127, 1537)
SHAPES = [
    *(Shape(RAGGED, page=page) for page in (16, 32, 64, 128)),
    *(Shape(RAGGED, dim=dim, page=page) for dim in (64, 256) for page in (16, 128)),
    *(Shape(RAGGED, heads=heads, group=group) for heads, group in ((1, 16), (2, 7), (8, 1), (3, 3), (2, 8))),
    *(
        Shape(RAGGED, per_head_table=table, per_head_lengths=lengths, page=page, dtype=dtype)
        for table, lengths in ((True, True), (True, False), (False, True))
        for page, dtype in ((16, "float32"), (64, "bfloat16"))
    ),
    *(Shape(RAGGED, dim=dim, dtype="float32") for dim in (64, 128, 256)),
    Shape(RAGGED, dtype="float16"),
    Shape((5,), page=16),
    Shape((1,)),
    Shape((0, 0)),
    Shape((20000,)),
    Shape((6000, *(30,) * 40), columns=96),
    Shape((100,) * 128, columns=64),
    Shape((33,) * 300, heads=2, group=2, per_head_table=True, per_head_lengths=True),
    *(Shape(RAGGED, codes="float8_e4m3fn", dim=dim, page=page) for dim in (64, 128, 256) for page in (16, 64)),
    Shape(RAGGED, codes="float8_e4m3fn", per_head_table=True, per_head_lengths=True),
    Shape(RAGGED, codes="float8_e4m3fn", dtype="float32"),
    *(Shape(RAGGED, codes="float8_e4m3fn", bits=True, page=page) for page in (16, 128)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_oracle_and_reads_nothing_else(shape):
    case = make(shape)
    out, lse = program(case)(case.q, case.pools, case.view.table, case.view.offset, case.view.lengths)
    wanted, wanted_lse = case.wanted()
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    assert np.isfinite(np.asarray(out, np.float32)).all()
    exact = shape.dtype == "float32" and shape.codes is None
    assert relative_error(out, wanted) < (2e-5 if exact else 6e-3)
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=1e-6, atol=1e-4 if exact else 1e-2)


def program(case, traces=None):
    """The jitted operation on (q, pools, table, offset, lengths); adds to `traces` when it is traced."""

    @jax.jit
    def run(q, pools, table, offset, lengths):
        if traces is not None:
            traces.append(1)
        view = PageView(table, case.view.stride, offset, lengths)
        return api.decode_attention(q, pools, case.names, view, **case.how, implementation="triton")

    return run


def test_choice_on_a_gpu():
    case = make(Shape((70, 3)))
    out, _ = api.decode_attention(*case.arguments, **case.how)
    assert "triton" in api.chosen()["decode_attention"]
    assert relative_error(out, case.wanted()[0]) < 6e-3


def test_lengths_are_data():
    traces = []
    case = make(Shape((700, 64, 5), columns=40))

    run = program(case, traces)
    for lengths in ((700, 64, 5), (1, 1, 1), (699, 0, 2)):
        lengths = jnp.asarray(lengths, jnp.int32)[:, None]
        out, lse = run(case.q, case.pools, case.view.table, case.view.offset, lengths)
        wanted, wanted_lse = case.wanted(lengths)
        assert relative_error(out, wanted) < 6e-3
        np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=1e-6, atol=1e-2)
    assert len(traces) == 1


def test_pool_beyond_int32():
    dim, page, heads = 128, 64, 2
    pages = 2**31 // (dim * page) + 64
    key = jax.random.key(3)
    small = jax.random.normal(key, (2, 32, page, dim), jnp.float32).astype(jnp.bfloat16)
    ids = jnp.arange(pages - 32, pages, dtype=jnp.int32)
    fill = jax.jit(lambda rows: jnp.full((pages, page, dim), jnp.nan, jnp.bfloat16).at[ids].set(rows))
    pools = {"k": fill(small[0]), "v": fill(small[1])}
    q = jax.random.normal(key, (2, 8, dim), jnp.float32).astype(jnp.bfloat16)
    lengths = jnp.full((2, heads), 8 * page - 3, jnp.int32)
    view = PageView(ids.reshape(2, heads, 8), 1, jnp.zeros(heads, jnp.int32), lengths)

    def load_tile(tiles, layer):
        return tiles["k"], tiles["v"]

    how = {"load_tile": load_tile, "layer": jnp.int32(0), "scale": 0.1}
    out, _ = api.decode_attention(q, pools, ("k", "v"), view, **how, implementation="triton")
    del pools
    near = view._replace(table=view.table - (pages - 32))
    wanted, _ = api.decode_attention(q, {"k": small[0], "v": small[1]}, ("k", "v"), near, **how, implementation="xla")
    assert relative_error(out, wanted) < 6e-3


def test_donated_pools_are_not_copied():
    case = make(Shape((300, 70), layers=4, columns=400))
    heads = case.view.num_heads

    @jax.jit
    def layer_step(layer, q, pools, table, lengths):
        view = PageView(table, case.view.stride, layer * heads + jnp.arange(heads, dtype=jnp.int32), lengths)
        pages = view.pages_at((lengths - 1)[:, :, None] // 64)[:, :, 0]
        pools = {name: pool.at[pages, (lengths - 1) % 64].set(q[:, ::4]) for name, pool in pools.items()}
        how = {"load_tile": case.load_tile, "layer": layer, "scale": 0.1, "implementation": "triton"}
        return api.decode_attention(q, pools, case.names, view, **how)[0], pools

    def step(q, pools, table, lengths):
        for layer in range(4):
            q, pools = layer_step(jnp.int32(layer), q, pools, table, lengths)
        return q, pools

    arguments = (case.q, case.pools, case.view.table, case.view.lengths)
    text = jax.jit(step, donate_argnums=1).lower(*arguments).compile().as_text()
    shape = ",".join(map(str, case.pools["k"].shape))
    assert text.count("decode_attention_merge") or text.count("triton_kernel_call") >= 8
    assert not re.findall(rf"bf16\[{shape}\]\S* copy", text)
