"""Triton kernels of key similarity. Imports triton: import this module where a kernel is launched.

Norms first; then all rows against the newest ones; then the few that found nothing there against all others, in pieces
that any program may take; then what each column adds up to. How far rows are resident is data. Sums of floats have a
fixed order and the others are maxima and integers, so results don't depend on which program comes first.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sparsejax.pallas_kernels.row_scores.triton_kernels import load_keys


@triton.jit
def last_similar(
    keys, norms, row, others, other_norms, column, THRESHOLD: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The largest `column` whose key is similar to each of `keys` and another one, else -1. `norms` are inverse."""
    cosine = tl.dot(keys, tl.trans(others), input_precision=PRECISION) * norms[:, None] * other_norms[None, :]
    similar = (cosine > THRESHOLD) & (row[:, None] != column[None, :])
    return tl.max(tl.where(similar, column[None, :], -1), 1)


@triton.jit
def norms_kernel(
    k,
    k_scale,
    table,
    ends,
    offset,
    stride,
    norms,
    sums,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Inverse norms as codes need them, and the sum of unit keys of each run. Grid (RUNS, HEADS).

    k [head pages, PAGE, DIM]; k_scale [head pages, PAGE], read if SCALED; table [TABLE_HEADS, COLUMNS]; ends int32 [2]:
    rows, and rows before the newest ones; offset [HEADS]; norms float32 [HEADS, COLUMNS * PAGE], not written past the
    end; sums float32 [RUNS, HEADS, DIM].
    """
    run, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(ends)
    head_offset = tl.load(offset + head)
    columns = table + (head if TABLE_HEADS > 1 else 0) * COLUMNS
    total = tl.zeros([DIM], tl.float32)
    for tile in tl.range(run, (end + ROWS - 1) // ROWS, RUNS):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < end
        keys, scales = load_keys(k, k_scale, columns, row, valid, stride, head_offset, SCALED, PAGE, DIM, COMPUTE)
        keys = keys.to(tl.float32)
        inverse = scales / (scales * tl.sqrt(tl.sum(keys * keys, 1)) + 1e-8)  # 0 past the end
        total += tl.sum(keys * inverse[:, None], 0)
        tl.store(norms + head * (COLUMNS * PAGE) + row, inverse, mask=valid)
    tl.store(sums + (run * HEADS + head) * DIM + tl.arange(0, DIM), total)


@triton.jit
def newest_kernel(
    k,
    table,
    ends,
    offset,
    norms,
    stride,
    last,
    missing,
    num_missing,
    THRESHOLD: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Each row's last similar one of the newest. Grid (RUNS, HEADS).

    As in `norms_kernel`; last int32 [HEADS, COLUMNS * PAGE], -1 without any; missing int32 of the same shape, the rows
    without any in no particular order, and num_missing int32 [HEADS] how many, zero before.
    """
    run, head = tl.program_id(0), tl.program_id(1)
    end, first = tl.load(ends), tl.load(ends + 1)
    head_offset = tl.load(offset + head)
    columns = table + (head if TABLE_HEADS > 1 else 0) * COLUMNS
    norms += head * (COLUMNS * PAGE)
    last += head * (COLUMNS * PAGE)
    missing += head * (COLUMNS * PAGE)
    for tile in tl.range(run, (end + ROWS - 1) // ROWS, RUNS):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < end
        keys, _ = load_keys(k, k, columns, row, valid, stride, head_offset, False, PAGE, DIM, COMPUTE)
        inverse = tl.load(norms + row, mask=valid, other=0.0)
        found = tl.full([ROWS], -1, tl.int32)
        for start in tl.range(first, end, ROWS):
            column = start + tl.arange(0, ROWS)
            there = column < end
            others, _ = load_keys(k, k, columns, column, there, stride, head_offset, False, PAGE, DIM, COMPUTE)
            other_inverse = tl.load(norms + column, mask=there, other=0.0)
            found = tl.maximum(
                found, last_similar(keys, inverse, row, others, other_inverse, column, THRESHOLD, PRECISION)
            )
        tl.store(last + row, found, mask=valid)
        misses = valid & (found < 0)
        place = tl.atomic_add(num_missing + head, tl.sum(misses.to(tl.int32), 0))
        tl.store(missing + place + tl.cumsum(misses.to(tl.int32), 0) - 1, row, mask=misses)


@triton.jit
def others_kernel(
    k,
    table,
    ends,
    offset,
    norms,
    missing,
    num_missing,
    last,
    stride,
    found_last,
    THRESHOLD: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Rows that found nothing among the newest against all others. Grid (RUNS, HEADS).

    As in `newest_kernel`; `last` and `found_last` are the same memory. A piece of work is a tile of rows and a span of
    columns, the last span first: rows that have found something need no earlier one.
    """
    run, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(ends + 1), tl.load(num_missing + head)
    head_offset = tl.load(offset + head)
    columns = table + (head if TABLE_HEADS > 1 else 0) * COLUMNS
    norms += head * (COLUMNS * PAGE)
    missing += head * (COLUMNS * PAGE)
    found_last += head * (COLUMNS * PAGE)
    tiles, spans = (count + ROWS - 1) // ROWS, (first + SPAN - 1) // SPAN
    for piece in tl.range(run, tiles * spans, RUNS):
        begin = (spans - 1 - piece // tiles) * SPAN
        stop = tl.minimum(begin + SPAN, first)
        index = piece % tiles * ROWS + tl.arange(0, ROWS)
        valid = index < count
        row = tl.load(missing + index, mask=valid, other=0)
        known = tl.load(found_last + row, mask=valid, other=stop)  # others may be raising it
        if tl.min(known, 0) < stop:
            keys, _ = load_keys(k, k, columns, row, valid, stride, head_offset, False, PAGE, DIM, COMPUTE)
            inverse = tl.load(norms + row, mask=valid, other=0.0)
            found = tl.full([ROWS], -1, tl.int32)
            for start in tl.range(begin, stop, ROWS):
                column = start + tl.arange(0, ROWS)
                there = column < stop
                others, _ = load_keys(k, k, columns, column, there, stride, head_offset, False, PAGE, DIM, COMPUTE)
                other_inverse = tl.load(norms + column, mask=there, other=0.0)
                found = tl.maximum(
                    found, last_similar(keys, inverse, row, others, other_inverse, column, THRESHOLD, PRECISION)
                )
            tl.atomic_max(found_last + row, found, mask=valid & (found >= 0))


@triton.jit
def sums_kernel(
    k,
    table,
    ends,
    offset,
    norms,
    sums,
    last,
    stride,
    own,
    dropped,
    ONE: tl.constexpr,
    COMPUTE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """What the columns of all cosines add up to, and what is dropped of that. Grid (RUNS, HEADS).

    As in `newest_kernel`; own float32 [HEADS, COLUMNS * PAGE], not written past the end; dropped int32 of the same
    shape, zero before, in fixed point: `ONE` is 1.
    """
    run, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(ends)
    head_offset = tl.load(offset + head)
    columns = table + (head if TABLE_HEADS > 1 else 0) * COLUMNS
    norms += head * (COLUMNS * PAGE)
    last += head * (COLUMNS * PAGE)
    own += head * (COLUMNS * PAGE)
    dropped += head * (COLUMNS * PAGE)
    total = tl.zeros([DIM], tl.float32)
    for part in tl.range(0, RUNS):
        total += tl.load(sums + (part * HEADS + head) * DIM + tl.arange(0, DIM))
    for tile in tl.range(run, (end + ROWS - 1) // ROWS, RUNS):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < end
        keys, _ = load_keys(k, k, columns, row, valid, stride, head_offset, False, PAGE, DIM, COMPUTE)
        units = keys.to(tl.float32) * tl.load(norms + row, mask=valid, other=0.0)[:, None]
        match = tl.maximum(tl.load(last + row, mask=valid, other=0), 0)
        others, _ = load_keys(k, k, columns, match, valid, stride, head_offset, False, PAGE, DIM, COMPUTE)
        others = others.to(tl.float32) * tl.load(norms + match, mask=valid, other=0.0)[:, None]
        cosine = tl.where(match == row, 0.0, tl.sum(units * others, 1))
        tl.store(own + row, tl.sum(units * (total[None, :] - units), 1), mask=valid)
        tl.atomic_add(dropped + match, tl.floor(cosine * ONE + 0.5).to(tl.int32), mask=valid)
