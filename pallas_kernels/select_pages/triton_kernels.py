"""Triton kernel of page selection: a threshold search on the order of float32 bits, then a compaction.

Imports triton: import this module where the kernel is launched.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # key of columns that can't be chosen
HIGHEST = tl.constexpr(2**31 - 1)  # above the key of every score
FIELD = tl.constexpr(20)  # bits of a count
FIELD_MASK = tl.constexpr(2**20 - 1)


@triton.jit
def load_keys(scores, column, candidates):
    """int32 in the order of the scores: NaN as -inf, -0.0 as +0.0, LOWEST from column `candidates` on."""
    valid = column < candidates
    score = tl.load(scores + column, mask=valid, other=float("-inf"))
    bits = tl.where(score > float("-inf"), score, float("-inf")).to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    return tl.where(valid, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)


@triton.jit
def above_lowest(keys):
    """The keys, HIGHEST instead of LOWEST."""
    return tl.where(keys == LOWEST, HIGHEST, keys)


@triton.jit
def at_least(keys, first, second, third):
    """Int64 per key: 1 in each of three fields whose threshold the key reaches; sums hold three counts."""
    one = (keys >= first).to(tl.int64)
    two = (keys >= second).to(tl.int64) << FIELD
    return one + two + ((keys >= third).to(tl.int64) << 2 * FIELD)


@triton.jit
def select_kernel(
    scores,
    table,
    lengths,
    offset,
    stride,
    head_pages,
    selected_lengths,
    NUM_SCORED: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORE_HEADS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    LENGTHS_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    """The pages of one row and KV head. Grid (HEADS, batch).

    scores float32 [batch, SCORE_HEADS, COLUMNS]; table [batch, TABLE_HEADS, COLUMNS]; lengths [batch, LENGTHS_HEADS];
    offset [HEADS]; head_pages [batch, HEADS, WIDTH] and selected_lengths [batch, HEADS] int32. Scores that are not
    before the last page are not read.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row * LENGTHS_HEADS + (head if LENGTHS_HEADS > 1 else 0))
    num_pages = (length + PAGE - 1) // PAGE
    last = num_pages - 1
    head_offset = tl.load(offset + head)
    scores += (row.to(tl.int64) * SCORE_HEADS + (head if SCORE_HEADS > 1 else 0)) * COLUMNS
    table += (row.to(tl.int64) * TABLE_HEADS + (head if TABLE_HEADS > 1 else 0)) * COLUMNS
    target = row * HEADS + head
    head_pages += target.to(tl.int64) * WIDTH

    whole = (length <= BUDGET) | (num_pages <= NUM_SCORED + 1)
    # What no score decides: all pages, or the last one and the null pages behind it.
    for start in tl.range(tl.where(whole, 0, NUM_SCORED // WIDTH_BLOCK * WIDTH_BLOCK), WIDTH, WIDTH_BLOCK):
        slot = start + tl.arange(0, WIDTH_BLOCK)
        real = tl.where(whole, slot < num_pages, slot == NUM_SCORED)
        page = tl.load(table + tl.where(whole, slot, last), mask=real, other=0) * stride + head_offset
        mine = (slot < WIDTH) & (whole | (slot >= NUM_SCORED))
        tl.store(head_pages + slot, tl.where(real, page, 0), mask=mine)
    tl.store(selected_lengths + target, tl.where(whole, length, NUM_SCORED * PAGE + length - last * PAGE))
    if whole:
        return

    RESIDENT: tl.constexpr = COLUMNS <= BLOCK
    lane = tl.arange(0, BLOCK)
    if RESIDENT:
        keys = load_keys(scores, lane, last)
        entries = tl.load(table + lane, mask=lane < last, other=0)  # all, so as not to wait for the search
        least, largest = above_lowest(keys), keys
    else:
        least = tl.full([BLOCK], HIGHEST, tl.int32)
        largest = tl.full([BLOCK], LOWEST, tl.int32)
        for start in tl.range(0, last, BLOCK):
            keys = load_keys(scores, start + lane, last)
            least = tl.minimum(least, above_lowest(keys))
            largest = tl.maximum(largest, keys)
    # Always: `found` keys are at or above low, at least NUM_SCORED; `above` are at or above high, fewer.
    low = tl.min(least, 0).to(tl.int64)
    high = tl.max(largest, 0).to(tl.int64) + 1
    found = last
    above = last * 0
    while (found != NUM_SCORED) & (high - low > 1):
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        t1, t2, t3 = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        if RESIDENT:
            counts = tl.sum(at_least(keys, t1, t2, t3), 0)
        else:
            each = tl.zeros([BLOCK], tl.int64)
            for start in tl.range(0, last, BLOCK):
                each += at_least(load_keys(scores, start + lane, last), t1, t2, t3)
            counts = tl.sum(each, 0)
        n1 = (counts & FIELD_MASK).to(tl.int32)
        n2 = ((counts >> FIELD) & FIELD_MASK).to(tl.int32)
        n3 = (counts >> 2 * FIELD).to(tl.int32)
        enough1, enough2, enough3 = n1 >= NUM_SCORED, n2 >= NUM_SCORED, n3 >= NUM_SCORED
        above = tl.where(enough3, above, tl.where(enough2, n3, tl.where(enough1, n2, n1)))
        high = tl.where(enough3, high, tl.where(enough2, third, tl.where(enough1, second, first)))
        found = tl.where(enough3, n3, tl.where(enough2, n2, tl.where(enough1, n1, found)))
        low = tl.where(enough3, third, tl.where(enough2, second, tl.where(enough1, first, low)))

    # Keys in [low, high) are equal, or all of them are chosen.
    missing = NUM_SCORED - above
    bottom, top = low.to(tl.int32), high.to(tl.int32)
    above_before, equal_before = last * 0, last * 0
    for start in tl.range(0, last, BLOCK):
        column = start + lane
        if not RESIDENT:
            keys = load_keys(scores, column, last)
        over = keys >= top
        equal = (keys >= bottom) & (keys < top)
        # Two prefix sums in one: both stay below 2^16 in a block.
        ones = (over.to(tl.int32) << 16) + equal.to(tl.int32)
        sums = tl.cumsum(ones, 0)
        num_above = above_before + (sums >> 16)
        num_equal = equal_before + (sums & 0xFFFF)
        chosen = over | (equal & (num_equal <= missing))
        place = num_above + tl.minimum(num_equal, missing) - 1
        if not RESIDENT:
            entries = tl.load(table + column, mask=chosen, other=0)
            total = tl.sum(ones, 0)
            above_before += total >> 16
            equal_before += total & 0xFFFF
        tl.store(head_pages + place, entries * stride + head_offset, mask=chosen)
