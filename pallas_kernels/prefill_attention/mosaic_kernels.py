"""The device side of paged prefill attention on Hopper. Imported only where it is launched.

A block has three warpgroups. One copies pages to shared memory by TMA; the other two each attend with 64 queries, and
share what was copied: they are two query heads of one KV head, or two runs of queries where heads can't be paired.

Each step issues its product of queries and keys before the product of weights and values of the step before it, so that
the tensor cores have work while the exponentials of a step are taken. The two warpgroups take turns in issuing products
(`turn`), which puts one's exponentials beside the other's products.
"""

# pyright: reportPrivateImportUsage=false, reportCallIssue=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparsejax.pallas_kernels.prefill_attention.mosaic_gpu import COMPUTE_WARPGROUPS, WARPGROUP_QUERIES, Problem

TILE = (8, 64)  # rows and 16-bit channels of the core matrices that a swizzle of 128 bytes goes over
NEG = -1e30
LOG2_E = math.log2(math.e)
SHARER = "sharer"
BLOCK = {
    "grid_names": ("block",),
    "num_threads": COMPUTE_WARPGROUPS + 1,
    "thread_name": "warpgroup",
    "compiler_params": plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
}
"""How every kernel with these warpgroups is launched."""


def build(problem: Problem):
    """The kernel: (q, k, v, table, offset, lengths, start) -> out and lse [batch, q_heads, chunk]."""
    p = problem
    dtype = jnp.dtype(p.dtype)
    q_heads = p.heads * p.group
    cluster = {"cluster": (p.sharers,), "cluster_names": (SHARER,)} if p.sharers > 1 else {}
    return plgpu.kernel(
        functools.partial(_body, p),
        out_type=[
            jax.ShapeDtypeStruct((p.batch, p.chunk, q_heads, p.dim), dtype),
            jax.ShapeDtypeStruct((p.batch, q_heads, p.chunk), jnp.float32),
        ],
        scratch_types=scratch_types(p),
        grid=(p.batch * p.heads * p.query_blocks * p.head_blocks // p.sharers,),
        kernel_name="prefill_attention",
        **BLOCK,
        **cluster,
    )


def scratch_types(p: Problem) -> dict[str, Any]:
    """What a block has in shared memory."""
    dtype = jnp.dtype(p.dtype)
    transforms = (plgpu.TilingTransform(TILE), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((p.config.stages, p.config.block_rows, p.dim), dtype, transforms=transforms)
    full, free = (_barriers(arrivals, p.config.stages) for arrivals in (p.copies, COMPUTE_WARPGROUPS))
    if p.sharers > 1:  # a copy lands in all blocks of a cluster, so all of them must have freed its place
        free = plgpu.ClusterBarrier(
            collective_axes=(SHARER,), num_arrivals=COMPUTE_WARPGROUPS, num_barriers=p.config.stages
        )
    return {
        "q_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, WARPGROUP_QUERIES, p.dim), dtype, transforms=transforms),
        "k_smem": ring,
        "v_smem": ring,
        "lse_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, WARPGROUP_QUERIES), jnp.float32),
        "q_full": _barriers(1, COMPUTE_WARPGROUPS),
        "k_full": full,
        "v_full": full,
        "k_free": free,
        "v_free": free,
        "last_full": plgpu.Barrier(num_arrivals=p.copies),
        "turn": _barriers(1, COMPUTE_WARPGROUPS),
    }


def _barriers(arrivals: int, number: int) -> plgpu.Barrier:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)


def _divmod(a, b):
    b = jnp.int32(b)
    return lax.div(a, b), lax.rem(a, b)


def _place(p: Problem, lengths):
    """Which row, KV head, queries and group of query heads the block of this index attends with.

    Blocks with most keys come first, those of all query heads of some KV heads together: as many KV heads as the L2
    cache holds the rows of.
    """
    index = lax.axis_index("block")
    if p.sharers > 1:
        index = index * p.sharers + lax.axis_index(SHARER)
    rest, lane = _divmod(index, p.head_blocks)
    row, rest = _divmod(rest, p.heads * p.query_blocks)
    head_bytes = lengths[row, 0] * (4 * p.dim)
    together = jnp.int32(1)
    for number in (n for n in range(2, p.heads + 1) if p.heads % n == 0):
        together = jnp.where(head_bytes <= p.config.cache_bytes // number, jnp.int32(number), together)
    section, rest = _divmod(rest, together * p.query_blocks)
    block, head = _divmod(rest, together)
    return row, section * together + head, p.query_blocks - 1 - block, lane


def _body(p: Problem, q, k, v, table, offset, lengths, start, out, lse, **scratch):
    shared = SimpleNamespace(**scratch)
    row, head, query_block, lane = _place(p, lengths)
    row_head = head if p.row_heads > 1 else 0
    length = lengths[row, row_head]
    block_start = query_block * p.block_queries
    first = start[row, row_head] + block_start  # row of the first query
    needed = jnp.minimum(length, first + p.block_queries)
    steps = jnp.where(first < length, lax.div(needed + (p.config.block_rows - 1), jnp.int32(p.config.block_rows)), 0)
    warpgroup = lax.axis_index("warpgroup")

    def row_of(step):
        return step * p.config.block_rows

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(p.config.copy_registers, action="decrease")

        @pl.when(steps > 0)
        def _():
            table_head = head if p.table_heads > 1 else 0
            copy_steps(p, k, v, table.at[row, table_head], offset[head], length, steps, shared, row_of)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(p.config.registers, action="increase")
        if p.paired_heads:
            own, query_head = 0, (head * p.group + lane * COMPUTE_WARPGROUPS) + warpgroup
        else:
            own, query_head = warpgroup * WARPGROUP_QUERIES, head * p.group + lane
        begin = block_start + own
        inside = begin < p.chunk
        begin = pl.multiple_of(jnp.minimum(begin, p.chunk - WARPGROUP_QUERIES), WARPGROUP_QUERIES)
        q_smem, lse_smem = shared.q_smem.at[warpgroup], shared.lse_smem.at[warpgroup]

        @pl.when(steps > 0)
        def _():
            q_full = shared.q_full.at[warpgroup]
            plgpu.copy_gmem_to_smem(q.at[row, pl.ds(begin, WARPGROUP_QUERIES), query_head], q_smem, q_full)
            plgpu.barrier_wait(q_full)
            whole = lax.div(jnp.minimum(length, first + own + 1), jnp.int32(p.config.block_rows))
            mask = functools.partial(_mask, first + own, length, row_of)
            store(q_smem, lse_smem, *attend_steps(p, q_smem, mask, whole, steps, warpgroup, shared))

        @pl.when(steps == 0)
        def _():
            store_nothing(q_smem, lse_smem)

        plgpu.commit_smem()

        @pl.when(inside)
        def _():
            plgpu.copy_smem_to_gmem(q_smem, out.at[row, pl.ds(begin, WARPGROUP_QUERIES), query_head])
            plgpu.copy_smem_to_gmem(lse_smem, lse.at[row, query_head, pl.ds(begin, WARPGROUP_QUERIES)])
            plgpu.wait_smem_to_gmem(0)


def _mask(first, length, row_of, logits, step):
    """Logits of the keys that 64 queries see, the first of which is row `first`."""
    query = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=plgpu.Layout.WGMMA)
    key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    end = jnp.minimum(query + (first + 1), length) - row_of(step)
    return jnp.where(key < end, logits, -jnp.inf)


def store(out, lse, total, peak, acc) -> None:
    """What `attend_steps` found, as the kernel's results in shared memory."""
    out[...] = (acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])).astype(out.dtype)
    lse[...] = (peak + jnp.log2(total)) * (1 / LOG2_E)


def store_nothing(out, lse) -> None:
    """The results of queries that see no key."""
    out[...] = plgpu.layout_cast(jnp.zeros(out.shape, out.dtype), plgpu.Layout.WGMMA)
    lse[...] = plgpu.layout_cast(jnp.full(lse.shape, NEG, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def copy_steps(p: Problem, k, v, table, offset, length, steps, shared, row_of: Callable[[Any], Any]) -> None:
    """Copies keys of a step, then values of the step before, which is how they are used.

    A step is `config.block_rows` rows from row `row_of(step)` on, and only the last may pass the `length`.
    """

    def pages(step):
        """First row within its page, where a step is less than a page, and head-page of each copy of a step.

        Columns past the table belong to no row.
        """
        row = row_of(step)
        columns = [lax.div(row + i * p.copy_rows, jnp.int32(p.page)) for i in range(p.copies)]
        inner = lax.rem(row, jnp.int32(p.page)) if p.copy_rows < p.page else None
        return inner, tuple(table[jnp.minimum(column, p.columns - 1)] * p.stride + offset for column in columns)

    def copy(pool, ring, step, full, found):
        inner, head_pages = found
        for i, page in enumerate(head_pages):
            source = pool.at[page]
            if inner is not None:  # then a step is one copy
                source = source.at[pl.ds(pl.multiple_of(inner, p.copy_rows), p.copy_rows)]
            target = ring.at[slot_of(step), pl.ds(i * p.copy_rows, p.copy_rows)]
            plgpu.copy_gmem_to_smem(source, target, full, collective_axes=SHARER if p.sharers > 1 else None)

    def slot_of(step):
        return lax.rem(step, jnp.int32(p.config.stages))

    def wait_free(free, step):
        @pl.when(step >= p.config.stages)
        def _():
            plgpu.barrier_wait(free.at[slot_of(step)])

    first = pages(jnp.int32(0))
    copy(k, shared.k_smem, jnp.int32(0), shared.k_full.at[0], first)

    def body(step, before):
        found = pages(step)
        wait_free(shared.k_free, step)
        copy(k, shared.k_smem, step, shared.k_full.at[slot_of(step)], found)
        wait_free(shared.v_free, step - 1)
        copy(v, shared.v_smem, step - 1, shared.v_full.at[slot_of(step - 1)], before)
        return found

    found = lax.fori_loop(1, steps, body, first)
    last = steps - 1
    v_full = shared.v_full.at[slot_of(last)]
    wait_free(shared.v_free, last)
    valid = length - row_of(last)  # rows of the last step that belong to the sequence

    @pl.when(valid >= p.config.block_rows)
    def _():
        copy(v, shared.v_smem, last, v_full, found)

    @pl.when(valid < p.config.block_rows)
    def _():
        # What lies past the end is not ours: a weight of zero would still turn its infinities into NaN.
        last_full = shared.last_full
        copy(v, shared.v_smem, last, last_full, found)
        plgpu.barrier_wait(last_full)
        _clear(p, shared.v_smem.at[slot_of(last)], valid)
        plgpu.commit_smem()
        for _ in range(p.copies):
            plgpu.barrier_arrive(v_full)

    if p.sharers > 1:  # a block must not end before the others have arrived at its barriers for the last time
        for free, end in ((shared.k_free, steps), (shared.v_free, last)):

            @pl.loop(jnp.maximum(steps - p.config.stages, 0), end)
            def _(step, free=free):
                plgpu.barrier_wait(free.at[slot_of(step)])


def _clear(p: Problem, values, valid):
    """Zeroes the rows from `valid` on."""
    shape = (2048 // p.dim, p.dim)  # the layout needs a multiple of four tiles
    layout = plgpu.Layout.SMEM_GMEM_COPY(shape, values.dtype, 128)

    @pl.loop(lax.div(valid, jnp.int32(shape[0])), p.config.block_rows // shape[0])
    def _(i):
        begin = pl.multiple_of(i * shape[0], shape[0])
        rows = values.at[pl.ds(begin, shape[0])]
        kept = plgpu.load(rows, layout=layout)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + begin
        rows[...] = jnp.where(row < valid, kept, jnp.zeros_like(kept))


def attend_steps(p: Problem, q_smem, mask, whole, steps, warpgroup, shared):
    """(sums of weights, largest logits in base 2, weighted values) of the 64 queries in `q_smem`.

    Args:
      mask: (logits [64, block_rows] before they are scaled, step) -> the same, -inf where a query sees no key.
      whole: steps before it need no mask, except for the first, which always has one.
      steps: at least one; others as in `copy_steps`.
    """
    other = COMPUTE_WARPGROUPS - 1 - warpgroup
    factor = p.scale * LOG2_E

    def slot_of(step):
        return lax.rem(step, jnp.int32(p.config.stages))

    def products(step, values=None):
        """Logits of a step; `values` issues the other product of a turn, if it has one."""
        slot = slot_of(step)

        def run(logits):
            plgpu.barrier_wait(shared.k_full.at[slot])
            plgpu.barrier_wait(shared.turn.at[warpgroup])
            plgpu.wgmma(logits, q_smem, shared.k_smem.at[slot].transpose((1, 0)))
            if values:
                values()
            plgpu.barrier_arrive(shared.turn.at[other])
            return plgpu.wgmma_accumulator_load(logits, wait_n=1 if values else 0)

        found = pl.run_scoped(run, plgpu.ACC((WARPGROUP_QUERIES, p.config.block_rows), jnp.float32))
        plgpu.barrier_arrive(shared.k_free.at[slot])
        return found

    def weigh(logits, peak):
        """Weights relative to the new peak, their sums, and the new peak."""
        # A query that sees nothing yet has a peak all the same, so that -inf weighs nothing.
        new = jnp.maximum(NEG if peak is None else peak, logits.max(axis=1) * factor)
        weights = jnp.exp2(logits * factor - lax.broadcast_in_dim(new, logits.shape, [0]))
        return weights, weights.sum(axis=1), new

    @pl.when(warpgroup == COMPUTE_WARPGROUPS - 1)
    def _():
        plgpu.barrier_arrive(shared.turn.at[0])

    weights, total, peak = weigh(mask(products(jnp.int32(0)), jnp.int32(0)), None)
    weights = weights.astype(q_smem.dtype)

    def accumulate(acc):
        def body(step, carry, masked):
            total, peak, weights = carry
            before = slot_of(step - 1)

            def values():
                plgpu.barrier_wait(shared.v_full.at[before])
                plgpu.wgmma(acc, weights, shared.v_smem.at[before])

            logits = products(step, values)
            if masked:
                logits = mask(logits, step)
            new_weights, new_total, new_peak = weigh(logits, peak)
            decay = jnp.exp2(peak - new_peak)
            total = total * decay + new_total
            # Exponentials before the wait for the values of the step before, not after it.
            new_weights, total, new_peak, decay = lax.optimization_barrier((new_weights, total, new_peak, decay))
            done = acc[...]
            plgpu.barrier_arrive(shared.v_free.at[before])
            acc[...] = done * lax.broadcast_in_dim(decay, done.shape, [0])
            return total, new_peak, new_weights.astype(q_smem.dtype)

        bare = jnp.clip(whole, 1, steps)
        carry = lax.fori_loop(1, bare, functools.partial(body, masked=False), (total, peak, weights))
        last_total, last_peak, last = lax.fori_loop(bare, steps, functools.partial(body, masked=True), carry)
        slot = slot_of(steps - 1)
        plgpu.barrier_wait(shared.v_full.at[slot])
        plgpu.wgmma(acc, last, shared.v_smem.at[slot])
        return last_total, last_peak, acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((WARPGROUP_QUERIES, p.dim), jnp.float32))
