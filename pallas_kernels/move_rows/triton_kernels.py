"""Triton kernel that moves rows. Imports triton: import this module where the kernel is launched."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_kernel(
    pool,
    rows,
    source_table,
    source_offset,
    target_table,
    target_offset,
    source_stride,
    target_stride,
    out,
    KEPT: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS_HEADS: tl.constexpr,
    SOURCE_HEADS: tl.constexpr,
    SOURCE_COLUMNS: tl.constexpr,
    TARGET_HEADS: tl.constexpr,
    TARGET_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows of one KV head. Grid (ceil(KEPT / BLOCK), HEADS, batch).

    pool [head pages, PAGE, WIDTH], the same memory as `out`; rows [batch, ROWS_HEADS, KEPT]; tables [batch, heads or 1,
    columns]; offsets [HEADS]. What is read is never written: no page is both a source and a target.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = index < KEPT
    row = tl.load(rows + (batch * ROWS_HEADS + (head if ROWS_HEADS > 1 else 0)) * KEPT + index, mask=valid, other=0)
    source_table += (batch * SOURCE_HEADS + (head if SOURCE_HEADS > 1 else 0)) * SOURCE_COLUMNS
    target_table += (batch * TARGET_HEADS + (head if TARGET_HEADS > 1 else 0)) * TARGET_COLUMNS
    old = tl.load(source_table + row // PAGE, mask=valid, other=0).to(tl.int64) * source_stride
    new = tl.load(target_table + index // PAGE, mask=valid, other=0).to(tl.int64) * target_stride
    old = (old + tl.load(source_offset + head)) * PAGE + row % PAGE
    new = (new + tl.load(target_offset + head)) * PAGE + index % PAGE
    lane = tl.arange(0, WIDTH_POW2)
    mask = valid[:, None] & (lane < WIDTH)[None, :]
    tl.store(
        out + new[:, None] * WIDTH + lane[None, :],
        tl.load(pool + old[:, None] * WIDTH + lane[None, :], mask=mask),
        mask=mask,
    )
