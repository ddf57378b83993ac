"""The device side of block-sparse prefill attention on Hopper. Imported only where it is launched.

Copies, products and softmax are those of `prefill_attention`; here a block finds its queries, and its steps in a list.
"""

# pyright: reportPrivateImportUsage=false, reportCallIssue=false

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparsejax.pallas_kernels.block_sparse_attention.mosaic_gpu import (
    COMPUTE_WARPGROUPS,
    LAUNCH_ROWS,
    WARPGROUP_QUERIES,
    Problem,
)
from sparsejax.pallas_kernels.prefill_attention.mosaic_kernels import (
    BLOCK,
    attend_steps,
    copy_steps,
    scratch_types,
    store,
    store_nothing,
)

COMMON = ("q", "k", "v", "table", "offset", "order", "steps")
LISTED = (*COMMON, "whole", "lengths", "start", "blocks")
BIASED = (*COMMON, "bias")
LEAST_TOTAL = 1e-30


def build(problem: Problem):
    """The kernel: arrays as in `LISTED` or `BIASED` -> out as q, and lse float32 [batch, kv_heads, rows].

    q [batch, kv_heads, rows, dim], rows packed; order int32 [blocks of the grid]; steps and whole int32 [batch,
    kv_heads, tiles]; blocks int32 [batch, kv_heads, tiles, columns]; bias float32 [batch, kv_heads, tiles, keys], to be
    added before logits are scaled.
    """
    p = problem
    return plgpu.kernel(
        functools.partial(_body, p),
        out_type=[
            jax.ShapeDtypeStruct((p.batch, p.heads, p.chunk, p.dim), jnp.dtype(p.dtype)),
            jax.ShapeDtypeStruct((p.batch, p.heads, p.chunk), jnp.float32),
        ],
        scratch_types=scratch_types(p),
        grid=(p.batch * p.heads * p.launches,),
        kernel_name="tile_attention" if p.biased else "block_sparse_attention",
        **BLOCK,
    )


def _body(p: Problem, *refs, **scratch):
    *inputs, out, lse = refs
    given = SimpleNamespace(**dict(zip(BIASED if p.biased else LISTED, inputs, strict=True)))
    shared = SimpleNamespace(**scratch)
    index = given.order[lax.axis_index("block")]
    row, rest = lax.div(index, jnp.int32(p.heads * p.launches)), lax.rem(index, jnp.int32(p.heads * p.launches))
    head, launch = lax.div(rest, jnp.int32(p.launches)), lax.rem(rest, jnp.int32(p.launches))
    tile = lax.div(launch, jnp.int32(p.tile_rows // LAUNCH_ROWS))
    steps = given.steps[row, head, tile]
    reads = (_biased if p.biased else _listed)(p, given, row, head, tile)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(p.config.copy_registers, action="decrease")

        @pl.when(steps > 0)
        def _():
            columns = given.table.at[row, head if p.table_heads > 1 else 0]
            copy_steps(p, given.k, given.v, columns, given.offset[head], reads.length, steps, shared, reads.row_of)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(p.config.registers, action="increase")
        begin = pl.multiple_of(launch * LAUNCH_ROWS + warpgroup * WARPGROUP_QUERIES, WARPGROUP_QUERIES)
        rows = pl.ds(begin, WARPGROUP_QUERIES)
        q_smem, lse_smem = shared.q_smem.at[warpgroup], shared.lse_smem.at[warpgroup]

        @pl.when(steps > 0)
        def _():
            q_full = shared.q_full.at[warpgroup]
            plgpu.copy_gmem_to_smem(given.q.at[row, head, rows], q_smem, q_full)
            plgpu.barrier_wait(q_full)
            mask = functools.partial(reads.mask, begin)
            total, peak, acc = attend_steps(p, q_smem, mask, reads.whole, steps, warpgroup, shared)
            store(q_smem, lse_smem, jnp.maximum(total, LEAST_TOTAL), peak, acc)

        @pl.when(steps == 0)
        def _():
            store_nothing(q_smem, lse_smem)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, out.at[row, head, rows])
        plgpu.copy_smem_to_gmem(lse_smem, lse.at[row, head, rows])
        plgpu.wait_smem_to_gmem(0)


def _listed(p: Problem, given: SimpleNamespace, row, head, tile) -> SimpleNamespace:
    """Steps are the blocks of the tile's list; queries see what comes before them."""
    row_head = head if p.row_heads > 1 else 0
    length, start = given.lengths[row, row_head], given.start[row, row_head]
    blocks = given.blocks.at[row, head, tile]

    def row_of(step):
        return blocks[step] * p.config.block_rows

    def mask(begin, logits, step):
        packed = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=plgpu.Layout.WGMMA) + begin
        key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        query = lax.div(packed, jnp.full_like(packed, p.group))
        end = jnp.minimum(query + (start + 1), length) - row_of(step)
        return jnp.where(key < end, logits, -jnp.inf)

    return SimpleNamespace(length=length, whole=given.whole[row, head, tile], row_of=row_of, mask=mask)


def _biased(p: Problem, given: SimpleNamespace, row, head, tile) -> SimpleNamespace:
    """Steps are all keys in turn; a bias says what the tile's queries see."""
    bias = given.bias.at[row, head, tile]

    def row_of(step):
        return step * p.config.block_rows

    def mask(begin, logits, step):
        del begin
        keys = pl.ds(pl.multiple_of(row_of(step), p.config.block_rows), p.config.block_rows)
        own = plgpu.load(bias.at[keys], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return logits + lax.broadcast_in_dim(own, logits.shape, [1])

    return SimpleNamespace(length=jnp.int32(p.columns * p.page), whole=jnp.int32(1), row_of=row_of, mask=mask)
