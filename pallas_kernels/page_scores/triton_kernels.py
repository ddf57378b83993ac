"""Triton kernel of page scores. Imports triton: import this module where the kernel is launched."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    q,
    page_min,
    page_max,
    table,
    lengths,
    offset,
    stride,
    scores,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    LENGTHS_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK pages of one row and KV head. Grid (ceil(COLUMNS / BLOCK), HEADS, batch).

    q [batch, HEADS * GROUP, DIM]; page_min, page_max [head pages, DIM]; table [batch, TABLE_HEADS, COLUMNS];
    lengths [batch, LENGTHS_HEADS]; offset [HEADS]; scores float32 [batch, HEADS, COLUMNS]. Columns past a row's
    last page are not written.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row * LENGTHS_HEADS + (head if LENGTHS_HEADS > 1 else 0))
    num_pages = tl.minimum((length + PAGE - 1) // PAGE, COLUMNS)
    first = tl.program_id(0) * BLOCK
    if first >= num_pages:
        return
    column = first + tl.arange(0, BLOCK)
    valid = column < num_pages
    table += (row.to(tl.int64) * TABLE_HEADS + (head if TABLE_HEADS > 1 else 0)) * COLUMNS
    page = tl.load(table + column, mask=valid, other=0).to(tl.int64) * stride + tl.load(offset + head)

    member = tl.arange(0, GROUP_PAD)
    lane = tl.arange(0, DIM)
    real = member < GROUP
    q += (row * HEADS + head) * GROUP * DIM
    query = tl.load(q + member[:, None] * DIM + lane[None, :], mask=real[:, None], other=0.0)
    # max(q*m, q*M) = max(q, 0).M + min(q, 0).m
    zero = tl.zeros_like(query)
    tile = page[:, None] * DIM + lane[None, :]
    high = tl.load(page_max + tile, mask=valid[:, None], other=0.0)
    low = tl.load(page_min + tile, mask=valid[:, None], other=0.0)
    bound = tl.dot(tl.maximum(query, zero).to(query.dtype), tl.trans(high), input_precision=PRECISION)
    bound = tl.dot(tl.minimum(query, zero).to(query.dtype), tl.trans(low), bound, input_precision=PRECISION)
    best = tl.max(tl.where(real[:, None], bound, float("-inf")), 0)
    tl.store(scores + (row.to(tl.int64) * HEADS + head) * COLUMNS + column, best, mask=valid)
