"""Triton kernels of paged decode attention: attend to runs of blocks, then merge the runs of each row.

All blocks of all rows and KV heads stand in one line, which is cut into equal shares, one per program, at run time and
by every program for itself (`plan`). So a long row in short company is spread over the device, a program may end one
row and begin the next, and all programs end together whatever the lengths. The part that program p contributes to
row r of the line goes to slot p + r: along the line p and r never fall and one of them grows, so no two parts meet.

Imports triton: import this module where a kernel is launched.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def plan(
    lengths,
    CAPACITY: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRIES_POW2: tl.constexpr,
    HEADS_PER_ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
):
    """Rows and blocks of every entry of `lengths`, two int32 [ENTRIES_POW2], and the blocks of a share."""
    entry = tl.arange(0, ENTRIES_POW2)
    rows = tl.load(lengths + entry, mask=entry < ENTRIES, other=0)
    rows = tl.minimum(rows, CAPACITY)
    blocks = (rows + BLOCK - 1) // BLOCK
    each = tl.maximum((tl.sum(blocks) * HEADS_PER_ENTRY + PROGRAMS - 1) // PROGRAMS, LEAST_BLOCKS)
    return rows, blocks, each


@triton.jit
def decode(tile, dtype: tl.constexpr):
    """Stored rows in the compute dtype; uint8 are the bits of 8-bit floats."""
    if tile.dtype == tl.uint8:
        tile = tile.to(tl.float8e4nv, bitcast=True)
    return tile.to(dtype)


@triton.jit
def halves(pairs):
    """The two 8-bit floats (e4m3) in each uint16, as float16: (lower byte, upper byte).

    The one instruction that Triton uses too; it would take bytes that it has taken apart, and could not turn round.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.f16x2.e4m3x2 both, $2; mov.b32 {$0, $1}, both; }",
        "=h,=h,h",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    table,
    lengths,
    offset,
    stride,
    part_out,
    part_lse,
    all_logits,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
    LOGITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRIES_POW2: tl.constexpr,
    HEADS_PER_ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
):
    """One share of the line of blocks. Grid (programs,), at most PROGRAMS.

    q [batch, HEADS * GROUP, DIM]; k, v [head pages, PAGE, DIM]; k_scale, v_scale [head pages, PAGE], read if SCALED.
    With PAIRS codes are read two at a time, as even and odd channels that are multiplied apart: what loads 16 bits can
    be turned round on the way to the tensor cores, and what loads 8 can't.
    table [batch, TABLE_HEADS, COLUMNS]; lengths [ENTRIES], of rows (HEADS_PER_ENTRY = HEADS) or of rows and heads (1);
    offset [HEADS]; part_out [slots, GROUP, DIM] and part_lse [slots, GROUP] (base 2), float32; all_logits float32
    [batch, HEADS * GROUP, COLUMNS * PAGE] (base 2), written only if LOGITS, and not past the end of a row.
    """
    program = tl.program_id(0)
    rows, blocks, each = plan(
        lengths, COLUMNS * PAGE, ENTRIES, ENTRIES_POW2, HEADS_PER_ENTRY, BLOCK, PROGRAMS, LEAST_BLOCKS
    )
    index = tl.arange(0, ENTRIES_POW2)
    ends = tl.cumsum(blocks, 0) * HEADS_PER_ENTRY
    start = program * each
    end = tl.minimum(start + each, tl.sum(blocks) * HEADS_PER_ENTRY)
    member = tl.arange(0, GROUP_PAD)
    lane = tl.arange(0, DIM)
    HALF: tl.constexpr = DIM // 2
    pair = tl.arange(0, HALF)
    real = member < GROUP
    while start < end:
        entry = tl.sum((ends <= start).to(tl.int32))
        mine = index == entry
        length = tl.sum(tl.where(mine, rows, 0))
        num_blocks = tl.sum(tl.where(mine, blocks, 0))
        within = start - tl.sum(tl.where(index < entry, blocks, 0)) * HEADS_PER_ENTRY
        first = within % num_blocks
        last = tl.minimum(num_blocks, first + end - start)
        line_row = entry * HEADS_PER_ENTRY + within // num_blocks
        row, head = line_row // HEADS, line_row % HEADS

        head_offset = tl.load(offset + head)
        columns = table + (row.to(tl.int64) * TABLE_HEADS + (head if TABLE_HEADS > 1 else 0)) * COLUMNS
        queries = q + line_row * GROUP * DIM + member[:, None] * DIM
        if PAIRS:
            # Scaled first, so that float16 has room for them.
            even = tl.load(queries + 2 * pair[None, :], mask=real[:, None], other=0.0).to(tl.float32)
            odd = tl.load(queries + 2 * pair[None, :] + 1, mask=real[:, None], other=0.0).to(tl.float32)
            even, odd = (even * (SCALE * LOG2E)).to(tl.float16), (odd * (SCALE * LOG2E)).to(tl.float16)
            out_even = tl.zeros([GROUP_PAD, HALF], tl.float32)
            out_odd = tl.zeros([GROUP_PAD, HALF], tl.float32)
        else:
            query = tl.load(queries + lane[None, :], mask=real[:, None], other=0.0)
            out = tl.zeros([GROUP_PAD, DIM], tl.float32)
        peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        for block in tl.range(first, last):
            place = block * BLOCK + tl.arange(0, BLOCK)
            valid = place < length
            page = tl.load(columns + place // PAGE, mask=valid, other=0).to(tl.int64) * stride + head_offset
            source = page * PAGE + place % PAGE
            if PAIRS:
                tile = source[:, None] * HALF + pair[None, :]
                codes = k.to(tl.pointer_type(tl.uint16), bitcast=True) + tile
                keys_even, keys_odd = halves(tl.load(codes, mask=valid[:, None], other=0))
                logits = tl.dot(odd, tl.trans(keys_odd), tl.dot(even, tl.trans(keys_even)))
            else:
                tile = source[:, None] * DIM + lane[None, :]
                keys = decode(tl.load(k + tile, mask=valid[:, None], other=0.0), query.dtype)
                logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (SCALE * LOG2E)
            if SCALED:
                logits *= tl.load(k_scale + source, mask=valid, other=0.0)[None, :]
            if LOGITS:
                query_row = (line_row * GROUP + member).to(tl.int64) * (COLUMNS * PAGE)
                tl.store(all_logits + query_row[:, None] + place[None, :], logits, mask=real[:, None] & valid[None, :])
            logits = tl.where(valid[None, :], logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))  # finite: every block has a valid row
            weights = tl.exp2(logits - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            peak = new_peak
            total = total * decay + tl.sum(weights, 1)
            if PAIRS:
                scales = tl.load(v_scale + source, mask=valid, other=0.0)
                most = tl.max(scales, 0)  # above 0: every block has a valid row; shares of it fit a float16
                weights = (weights * (scales / most)[None, :]).to(tl.float16)
                codes = v.to(tl.pointer_type(tl.uint16), bitcast=True) + tile
                values_even, values_odd = halves(tl.load(codes, mask=valid[:, None], other=0))
                out_even = out_even * decay[:, None] + tl.dot(weights, values_even) * most
                out_odd = out_odd * decay[:, None] + tl.dot(weights, values_odd) * most
            else:
                if SCALED:
                    weights *= tl.load(v_scale + source, mask=valid, other=0.0)[None, :]
                values = decode(tl.load(v + tile, mask=valid[:, None], other=0.0), query.dtype)
                out = out * decay[:, None]
                out = tl.dot(weights.to(query.dtype), values, out, input_precision=PRECISION)

        slot = program + line_row
        parts = part_out + slot.to(tl.int64) * GROUP * DIM + member[:, None] * DIM
        if PAIRS:
            tl.store(parts + 2 * pair[None, :], out_even / total[:, None], mask=real[:, None])
            tl.store(parts + 2 * pair[None, :] + 1, out_odd / total[:, None], mask=real[:, None])
        else:
            tl.store(parts + lane[None, :], out / total[:, None], mask=real[:, None])
        tl.store(part_lse + slot * GROUP + member, peak + tl.log2(total), mask=real)
        start += last - first


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    lengths,
    out,
    lse,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRIES_POW2: tl.constexpr,
    HEADS_PER_ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    TILE: tl.constexpr,
):
    """Joins the parts of one query head of one row. Grid (HEADS * GROUP, batch).

    out [batch, HEADS * GROUP, DIM]; lse float32 [batch, HEADS * GROUP], natural log; a row of length 0 has 0 and -1e30.
    """
    q_head, row = tl.program_id(0), tl.program_id(1)
    line_row, member = row * HEADS + q_head // GROUP, q_head % GROUP
    entry = line_row // HEADS_PER_ENTRY
    _, blocks, each = plan(lengths, CAPACITY, ENTRIES, ENTRIES_POW2, HEADS_PER_ENTRY, BLOCK, PROGRAMS, LEAST_BLOCKS)
    index = tl.arange(0, ENTRIES_POW2)
    num_blocks = tl.sum(tl.where(index == entry, blocks, 0))
    before = tl.sum(tl.where(index < entry, blocks, 0)) * HEADS_PER_ENTRY + line_row % HEADS_PER_ENTRY * num_blocks
    first = before // each  # program of the first part
    num_parts = tl.where(num_blocks > 0, (before + num_blocks - 1) // each - first + 1, 0)

    each_part = tl.arange(0, PARTS_POW2)
    slot = (first + line_row + each_part) * GROUP + member
    parts = tl.load(part_lse + slot, mask=each_part < num_parts, other=float("-inf"))
    peak = tl.maximum(tl.max(parts, 0), -1e30)
    total = tl.sum(tl.exp2(parts - peak), 0)

    lane = tl.arange(0, DIM)
    joined = tl.zeros([DIM], tl.float32)
    for start in tl.range(0, num_parts, TILE):
        part = start + tl.arange(0, TILE)
        valid = part < num_parts
        part_slot = (first + line_row + part) * GROUP + member
        weight = tl.exp2(tl.load(part_lse + part_slot, mask=valid, other=float("-inf")) - peak)
        tile = part_slot.to(tl.int64)[:, None] * DIM + lane[None, :]
        joined += tl.sum(tl.load(part_out + tile, mask=valid[:, None], other=0.0) * weight[:, None], 0)
    found = num_parts > 0
    total = tl.where(found, total, 1.0)
    target = row * HEADS * GROUP + q_head
    tl.store(out + target.to(tl.int64) * DIM + lane, joined / total)
    tl.store(lse + target, tl.where(found, (peak + tl.log2(total)) * LN2, -1e30))
