"""Paged prefill attention on a Hopper GPU against float64."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, mosaic_support
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.prefill_attention import mosaic_gpu
from tests.contracts.kernels_gpu.cases import Case, Shape, make, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper():
    if (problem := mosaic_support.platform_problem()) is not None:
        pytest.skip(problem)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A case with queries [batch, chunk, q_heads, dim] whose row index of the first is `start` [batch, heads or 1]."""

    case: Case
    q: jax.Array
    start: jax.Array

    @property
    def how(self):
        return {"load_tile": self.case.load_tile, "layer": jnp.int32(0), "scale": self.case.scale}

    def wanted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """out, lse, and which [batch, chunk, q_heads] are queries of the sequence, all else being zero."""
        case = self.case
        batch, heads, _, dim = case.keys.shape
        lengths, start = (np.broadcast_to(np.asarray(x), (batch, heads)) for x in (case.view.lengths, self.start))
        q = np.asarray(self.q, np.float64)
        chunk = q.shape[1]
        q = q.reshape(batch, chunk, heads, -1, dim)
        out, lse, real = np.zeros(q.shape), np.zeros(q.shape[:4]), np.zeros(q.shape[:4], bool)
        for b, h in np.ndindex(batch, heads):
            count = min(max(lengths[b, h] - start[b, h], 0), chunk)
            n = start[b, h] + count
            logits = np.einsum("qgd,sd->qgs", q[b, :count, h], case.keys[b, h, :n]) * case.scale
            seen = np.arange(n)[None, :] <= start[b, h] + np.arange(count)[:, None]
            logits = np.where(seen[:, None], logits, -np.inf)
            peak = logits.max(2, keepdims=True, initial=-1e30)
            weights = np.exp(logits - peak)
            total = weights.sum(2, keepdims=True)
            out[b, :count, h] = np.einsum("qgs,sd->qgd", weights / total, case.values[b, h, :n])
            lse[b, :count, h] = (peak + np.log(total))[..., 0]
            real[b, :count, h] = True
        return out.reshape(self.q.shape), lse.reshape(self.q.shape[:3]), real.reshape(self.q.shape[:3])


def prefill(shape: Shape, chunks: tuple[int, ...], chunk: int | None = None) -> Prefill:
    """New rows of each sequence, in a chunk of the longest or of more queries."""
    case = make(shape)
    rng = np.random.default_rng(7)
    size = (len(chunks), chunk or max(chunks), shape.heads * shape.group, shape.dim)
    q = jnp.asarray(rng.standard_normal(size, np.float32).astype(jnp.dtype(shape.dtype)))
    start = jnp.maximum(case.view.lengths - jnp.asarray(chunks, jnp.int32)[:, None], 0)
    return Prefill(case, q, start)


OPERATION = functools.partial(api.prefill_attention, implementation="mosaic_gpu")


def program(made: Prefill, operation=OPERATION):
    case = made.case

    @jax.jit
    def run(q, pools, table, offset, lengths, start):
        view = PageView(table, case.view.stride, offset, lengths)
        return operation(q, pools, case.names, view, start, **made.how)

    return run


def arguments(made: Prefill):
    view = made.case.view
    return made.q, made.case.pools, view.table, view.offset, view.lengths, made.start


LENGTHS, CHUNKS = (1, 0, 63, 64, 65, 700, 127, 1537, 129), (1, 0, 63, 1, 65, 130, 100, 200, 128)
SHAPES = [
    *((Shape(LENGTHS, page=page), CHUNKS) for page in (8, 16, 32, 64, 128, 256)),
    *((Shape(LENGTHS, dim=dim, page=page), CHUNKS) for dim in (64, 256) for page in (16, 64, 128)),
    *((Shape(LENGTHS, heads=heads, group=group), CHUNKS) for heads, group in ((1, 16), (2, 7), (8, 1), (3, 3), (2, 8))),
    *(
        (Shape(LENGTHS, per_head_table=table, per_head_lengths=lengths, page=page), CHUNKS)
        for table, lengths in ((True, True), (True, False), (False, True))
        for page in (16, 64)
    ),
    (Shape(LENGTHS, dtype="float16"), CHUNKS),
    (Shape((5,), page=64), (5,)),
    (Shape((0, 0)), (0, 1)),
    (Shape((4096,)), (4096,)),
    (Shape((20000,)), (1000,)),
    (Shape((3000, *(30,) * 40), columns=96), (2000, *(30,) * 40)),
]


@pytest.mark.parametrize(("shape", "chunks"), SHAPES, ids=lambda value: str(value) if isinstance(value, Shape) else "")
def test_matches_oracle_and_reads_nothing_else(shape, chunks):
    made = prefill(shape, chunks)
    out, lse = program(made)(*arguments(made))
    wanted, wanted_lse, real = made.wanted()
    assert out.dtype == made.q.dtype
    assert lse.dtype == jnp.float32
    out, lse = np.asarray(out, np.float32), np.asarray(lse)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert relative_error(np.where(real[..., None], out, 0), wanted) < 6e-3
    np.testing.assert_allclose(np.where(real, lse, 0), wanted_lse, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize(
    "config",
    [
        mosaic_gpu.Config(stages=3),
        mosaic_gpu.Config(sharers=1),
        mosaic_gpu.Config(block_rows=64, stages=4),
    ],
    ids=str,
)
def test_other_launches(config):
    made = prefill(Shape(LENGTHS, group=4), CHUNKS)
    out, _ = program(made, functools.partial(mosaic_gpu.prefill_attention, config=config))(*arguments(made))
    wanted, _, real = made.wanted()
    assert relative_error(np.where(real[..., None], np.asarray(out, np.float32), 0), wanted) < 6e-3


@pytest.mark.parametrize("chunk", [1, 63, 64, 200, 256])
def test_chunks_of_any_size(chunk):
    made = prefill(Shape((300, 60)), (min(chunk, 190), 1), chunk)
    out, _ = program(made)(*arguments(made))
    wanted, _, real = made.wanted()
    assert out.shape == made.q.shape
    assert relative_error(np.where(real[..., None], np.asarray(out, np.float32), 0), wanted) < 6e-3


def test_choice_on_a_gpu():
    made = prefill(Shape((300, 60)), (64, 3))
    case = made.case
    out, _ = api.prefill_attention(made.q, case.pools, case.names, case.view, made.start, **made.how)
    assert "mosaic_gpu" in api.chosen()["prefill_attention"]
    wanted, _, real = made.wanted()
    assert relative_error(np.where(real[..., None], np.asarray(out, np.float32), 0), wanted) < 6e-3


def test_pool_beyond_int32():
    dim, page, heads, columns = 128, 64, 2, 8
    pages = 2**31 // (dim * page) + 64
    key = jax.random.key(3)
    small = jax.random.normal(key, (2, 32, page, dim), jnp.float32).astype(jnp.bfloat16)
    ids = jnp.arange(pages - 32, pages, dtype=jnp.int32)
    fill = jax.jit(lambda rows: jnp.full((pages, page, dim), jnp.nan, jnp.bfloat16).at[ids].set(rows))
    pools = {"k": fill(small[0]), "v": fill(small[1])}
    q = jax.random.normal(key, (2, 192, 8, dim), jnp.float32).astype(jnp.bfloat16)
    lengths = jnp.full((2, heads), columns * page - 3, jnp.int32)
    view = PageView(ids.reshape(2, heads, columns), 1, jnp.zeros(heads, jnp.int32), lengths)

    def load_tile(tiles, layer):
        return tiles["k"], tiles["v"]

    how = {"load_tile": load_tile, "layer": jnp.int32(0), "scale": 0.1}
    out, _ = api.prefill_attention(q, pools, ("k", "v"), view, lengths - 192, **how, implementation="mosaic_gpu")
    del pools
    near = view._replace(table=view.table - (pages - 32))
    pools = {"k": small[0], "v": small[1]}
    wanted, _ = api.prefill_attention(q, pools, ("k", "v"), near, lengths - 192, **how, implementation="xla")
    assert relative_error(out, wanted) < 6e-3


def test_donated_pools_are_not_copied():
    made = prefill(Shape((300, 70), layers=4, columns=40), (64, 64))
    case, heads = made.case, made.case.view.num_heads

    def step(q, pools, table, lengths, start):
        for layer in range(4):
            view = PageView(table, case.view.stride, layer * heads + jnp.arange(heads, dtype=jnp.int32), lengths)
            pages = view.pages_at((lengths - 1)[:, :, None] // 64)[:, :, 0]
            pools = {name: pool.at[pages, (lengths - 1) % 64].set(q[:, 0, ::4]) for name, pool in pools.items()}
            how = made.how | {"implementation": "mosaic_gpu"}
            q, _ = api.prefill_attention(q, pools, case.names, view, start, **how)
        return q, pools

    inputs = (made.q, case.pools, case.view.table, case.view.lengths, made.start)
    text = jax.jit(step, donate_argnums=1).lower(*inputs).compile().as_text()
    shape = ",".join(map(str, case.pools["k"].shape))
    assert text.count("mosaic_gpu") >= 4
    assert not re.findall(rf"bf16\[{shape}\]\S* copy", text)
