"""Triton kernel that adds attention to the scores of rows. Imports triton: import this module where it is launched."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sparsejax.pallas_kernels.decode_attention.triton_kernels import LOG2E


@triton.jit
def add_kernel(
    logits,
    lse,
    table,
    lengths,
    offset,
    before,
    stride,
    scores,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    LENGTHS_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Adds the weights of one query per head to the scores of some blocks of rows of all heads. Grid (RUNS, batch).

    logits float32 [batch, HEADS * GROUP, COLUMNS * PAGE], base 2; lse float32 [batch, HEADS * GROUP], natural log;
    table [batch, TABLE_HEADS, COLUMNS]; lengths [batch, LENGTHS_HEADS]; offset [HEADS]; scores float32 [head pages,
    PAGE], the same memory as `before`.
    """
    run, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, HEADS_POW2 * GROUP_POW2)
    query = lane // GROUP_POW2 * GROUP + lane % GROUP_POW2
    real = (lane // GROUP_POW2 < HEADS) & (lane % GROUP_POW2 < GROUP)
    lengths += batch * LENGTHS_HEADS
    query_length = tl.load(lengths + (lane // GROUP_POW2 if LENGTHS_HEADS > 1 else lane * 0), mask=real, other=0)
    query_lse = tl.load(lse + batch * (HEADS * GROUP) + query, mask=real, other=0.0) * LOG2E
    logits += (batch * (HEADS * GROUP) + query[:, None]) * (COLUMNS * PAGE)

    head = tl.arange(0, HEADS_POW2)
    length = tl.load(lengths + (head if LENGTHS_HEADS > 1 else head * 0), mask=head < HEADS, other=0)
    head_offset = tl.load(offset + head, mask=head < HEADS, other=0)
    columns = table + (batch * TABLE_HEADS + (head if TABLE_HEADS > 1 else head * 0)) * COLUMNS
    end = tl.minimum(tl.max(length, 0), COLUMNS * PAGE)
    for block in tl.range(run, (end + BLOCK - 1) // BLOCK, RUNS):
        row = block * BLOCK + tl.arange(0, BLOCK)
        seen = row[None, :] < query_length[:, None]
        found = tl.load(logits + row[None, :], mask=seen, other=float("-inf"))
        weights = tl.where(seen, tl.exp2(tl.minimum(found - query_lse[:, None], 0.0)), 0.0)
        mass = tl.sum(tl.reshape(weights, (HEADS_POW2, GROUP_POW2, BLOCK)), 1)
        if SHARED:
            mass = tl.broadcast_to(tl.sum(mass, 0)[None, :], (HEADS_POW2, BLOCK))
        held = row[None, :] < length[:, None]
        page = tl.load(columns[:, None] + row[None, :] // PAGE, mask=held, other=0).to(tl.int64) * stride
        target = scores + (page + head_offset[:, None]) * PAGE + row[None, :] % PAGE
        old = tl.load(target, mask=row[None, :] < length[:, None] - 1, other=0.0)  # the last row is new
        tl.store(target, old + mass, mask=held)
