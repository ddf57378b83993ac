"""Triton kernel of page bounds. Imports triton: import this module where the kernel is launched."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds_kernel(
    keys,
    head_pages,
    offsets,
    num_valid,
    min_in,
    max_in,
    page_min,
    page_max,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    OFFSETS_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The new rows of one page of one head. Grid (pages that CHUNK rows can touch, HEADS, batch).

    keys [batch, CHUNK, HEADS, DIM]; head_pages [batch, CHUNK, HEADS]; offsets [batch, CHUNK, OFFSETS_HEADS]; num_valid
    [batch]; page_min, page_max [head pages, DIM], aliased to min_in and max_in.
    """
    run, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = row * CHUNK
    valid = tl.load(num_valid + row)
    opening = tl.load(offsets + line * OFFSETS_HEADS + (head if OFFSETS_HEADS > 1 else 0))  # of the first new row
    first = tl.maximum(run * PAGE - opening, 0)
    last = tl.minimum((run + 1) * PAGE - opening, valid)
    if first >= last:
        return
    page = tl.load(head_pages + (line + first) * HEADS + head).to(tl.int64)
    lane = tl.arange(0, DIM_POW2)
    real = lane < DIM
    place = page * DIM + lane
    fresh = (opening == 0) | (run > 0)
    # What the bounds held before, unless the page was opened by the first of these rows.
    low = tl.load(min_in + place, mask=real, other=0.0).to(tl.float32)
    high = tl.load(max_in + place, mask=real, other=0.0).to(tl.float32)
    low, high = tl.where(fresh, float("inf"), low), tl.where(fresh, float("-inf"), high)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = (index < last)[:, None] & real[None, :]
        source = ((line + index).to(tl.int64) * HEADS + head)[:, None] * DIM + lane[None, :]
        tile = tl.load(keys + source, mask=inside, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.min(tl.where(inside, tile, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, tile, float("-inf")), 0))
    tl.store(page_min + place, low.to(page_min.dtype.element_ty), mask=real)
    tl.store(page_max + place, high.to(page_max.dtype.element_ty), mask=real)
