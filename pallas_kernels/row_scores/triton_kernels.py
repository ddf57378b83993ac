"""Triton kernels of row scores. Imports triton: import this module where a kernel is launched.

Keys are read twice for attention mass: the sum over a query's rows must be known before its weights can be summed over
queries, and keeping the logits instead would cost more than reading the keys again.

The blocks of a row and KV head, as far as any query of a program sees, are cut into equal runs, one per program, by
every program for itself, so lengths stay data.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sparsejax.pallas_kernels.decode_attention.triton_kernels import LOG2E, decode

NEG = tl.constexpr(-1e30)


@triton.jit
def place_of(
    tile,
    row,
    head,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """The queries of a tile, TILE_QUERIES of each of GROUP_PAD heads, heads innermost.

    Returns int32 [TILE_QUERIES * GROUP_PAD]: query, int64 index into [batch, QUERIES, HEADS * GROUP], and bool: real.
    """
    lane = tl.arange(0, TILE_QUERIES * GROUP_PAD)
    query, member = tile * TILE_QUERIES + lane // GROUP_PAD, lane % GROUP_PAD
    index = (row.to(tl.int64) * QUERIES + query) * (HEADS * GROUP) + head * GROUP + member
    return query, index, (query < QUERIES) & (member < GROUP)


@triton.jit
def load_queries(
    q,
    limit,
    tile,
    row,
    head,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    LIMIT_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
):
    """A tile of queries [n, DIM], how many rows each sees (0: it is padding), and where they lie."""
    query, index, real = place_of(tile, row, head, QUERIES, HEADS, GROUP, TILE_QUERIES, GROUP_PAD)
    lane = tl.arange(0, DIM)
    rows = tl.load(q + index[:, None] * DIM + lane[None, :], mask=real[:, None], other=0.0)
    limits = limit + (row * LIMIT_HEADS + (head if LIMIT_HEADS > 1 else 0)) * QUERIES
    return rows, tl.load(limits + query, mask=real, other=0), index, real


@triton.jit
def load_keys(
    k,
    k_scale,
    columns,
    place,
    valid,
    stride,
    head_offset,
    SCALED: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys [rows, DIM] and their scales [rows]; 0 where not `valid`."""
    page = tl.load(columns + place // PAGE, mask=valid, other=0).to(tl.int64) * stride + head_offset
    source = page * PAGE + place % PAGE
    keys = decode(
        tl.load(k + source[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=valid[:, None], other=0.0), dtype
    )
    scales = valid.to(tl.float32)
    if SCALED:
        scales = tl.load(k_scale + source, mask=valid, other=0.0)
    return keys, scales


@triton.jit
def lse_kernel(
    q,
    k,
    k_scale,
    table,
    limit,
    offset,
    stride,
    first,
    parts,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BATCH: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    LIMIT_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Log-sum-exp (base 2) of a tile of queries over one run of blocks. Grid (RUNS, HEADS * TILES, BATCH).

    q [BATCH, QUERIES, HEADS * GROUP, DIM]; k [head pages, PAGE, DIM]; k_scale [head pages, PAGE], read if SCALED;
    table [BATCH, TABLE_HEADS, COLUMNS]; limit [BATCH, LIMIT_HEADS, QUERIES]; offset [HEADS];
    parts float32 [RUNS, BATCH, QUERIES, HEADS * GROUP], -inf for a run that holds nothing.
    """
    run, row = tl.program_id(0), tl.program_id(2)
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    query, limits, index, real = load_queries(
        q, limit, tile, row, head, QUERIES, HEADS, LIMIT_HEADS, GROUP, TILE_QUERIES, GROUP_PAD, DIM
    )
    end = tl.max(limits, 0)
    start_block = first // BLOCK
    blocks = tl.maximum((end + BLOCK - 1) // BLOCK - start_block, 0)
    each = (blocks + RUNS - 1) // RUNS
    head_offset = tl.load(offset + head)
    columns = table + (row.to(tl.int64) * TABLE_HEADS + (head if TABLE_HEADS > 1 else 0)) * COLUMNS
    peak = tl.full([TILE_QUERIES * GROUP_PAD], NEG, tl.float32)
    total = tl.zeros([TILE_QUERIES * GROUP_PAD], tl.float32)
    for block in tl.range(start_block + run * each, start_block + tl.minimum((run + 1) * each, blocks)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        keys, scales = load_keys(
            k, k_scale, columns, place, place < end, stride, head_offset, SCALED, PAGE, DIM, query.dtype
        )
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * (SCALE * LOG2E)
        if SCALED:
            logits *= scales[None, :]
        seen = (place[None, :] < limits[:, None]) & (place[None, :] >= first)
        logits = tl.where(seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))  # finite: so what is not seen weighs exactly nothing
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(logits - new_peak[:, None]), 1)
        peak = new_peak
    size = tl.full([1], BATCH * QUERIES, tl.int64) * (HEADS * GROUP)
    tl.store(parts + run * size + index, peak + tl.log2(total), mask=real)


@triton.jit
def votes(
    query,
    limits,
    lse_at,
    keys,
    scales,
    place,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    MASS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """What a tile of queries thinks of a block of rows, per query head of the group: float32 [BLOCK, GROUP_PAD].

    Sums of shares if ADD; else the largest logit, or the base-2 logarithm of the largest share.
    """
    logits = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * (SCALE * LOG2E if MASS else SCALE)
    if SCALED:
        logits *= scales[:, None]
    seen = place[:, None] < limits[None, :]
    if MASS:
        logits = tl.minimum(logits - lse_at[None, :], 0.0)
    if ADD:
        each = tl.where(seen, tl.exp2(logits), 0.0)
        return tl.sum(tl.reshape(each, (BLOCK, TILE_QUERIES, GROUP_PAD)), 1)
    each = tl.where(seen, logits, float("-inf"))
    return tl.max(tl.reshape(each, (BLOCK, TILE_QUERIES, GROUP_PAD)), 1)


@triton.jit
def scores_kernel(
    q,
    k,
    k_scale,
    table,
    limit,
    ends,
    lse,
    offset,
    stride,
    scores,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    MASS: tl.constexpr,
    ADD: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    LIMIT_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Scores of one run of blocks by all queries. Grid (RUNS, HEADS, batch).

    As in `lse_kernel`; ends [batch, LIMIT_HEADS], the largest limits; lse [batch, QUERIES, HEADS * GROUP], natural log,
    read if MASS; scores float32 [batch, HEADS, COLUMNS * PAGE], not written at rows from `ends` on.
    """
    run, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(ends + row * LIMIT_HEADS + (head if LIMIT_HEADS > 1 else 0))
    blocks = (end + BLOCK - 1) // BLOCK
    each = (blocks + RUNS - 1) // RUNS
    head_offset = tl.load(offset + head)
    columns = table + (row.to(tl.int64) * TABLE_HEADS + (head if TABLE_HEADS > 1 else 0)) * COLUMNS
    scores += (row.to(tl.int64) * HEADS + head) * (COLUMNS * PAGE)
    member = tl.arange(0, GROUP_PAD)
    # A window is one tile of queries, which stays where it is while the keys go by.
    query, limits, index, real = load_queries(
        q, limit, 0, row, head, QUERIES, HEADS, LIMIT_HEADS, GROUP, TILE_QUERIES, GROUP_PAD, DIM
    )
    lse_at = tl.load(lse + index, mask=real, other=0.0) * LOG2E if MASS else limits
    for block in tl.range(run * each, tl.minimum((run + 1) * each, blocks)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        valid = place < end
        keys, scales = load_keys(k, k_scale, columns, place, valid, stride, head_offset, SCALED, PAGE, DIM, query.dtype)
        best = votes(
            query, limits, lse_at, keys, scales, place,
            SCALE, SCALED, MASS, ADD, PRECISION, BLOCK, TILE_QUERIES, GROUP_PAD,
        )  # fmt: skip
        if TILES > 1:
            for tile in tl.range(1, TILES):
                others, other_limits, index, real = load_queries(
                    q, limit, tile, row, head, QUERIES, HEADS, LIMIT_HEADS, GROUP, TILE_QUERIES, GROUP_PAD, DIM
                )
                other_lse = tl.load(lse + index, mask=real, other=0.0) * LOG2E if MASS else other_limits
                more = votes(
                    others, other_limits, other_lse, keys, scales, place,
                    SCALE, SCALED, MASS, ADD, PRECISION, BLOCK, TILE_QUERIES, GROUP_PAD,
                )  # fmt: skip
                best = best + more if ADD else tl.maximum(best, more)
        if MASS and not ADD:
            best = tl.exp2(best)
        if SUM:
            found = tl.sum(tl.where(member[None, :] < GROUP, best, 0.0), 1)
        else:
            found = tl.max(best, 1)  # heads that pad the group see nothing
        tl.store(scores + place, found, mask=valid)
