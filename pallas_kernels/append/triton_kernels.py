"""Triton kernel that finishes the heads of a token and stores its key and value. Imports triton."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def store_code(pool, target, value, scale):
    """Stores value / scale as an 8-bit float."""
    code = tl.div_rn(value, tl.zeros_like(value) + scale)
    tl.store(pool + target, tl.minimum(tl.maximum(code, -LARGEST), LARGEST).to(tl.float8e4nv))


@triton.jit
def append_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    table,
    lengths,
    offset,
    num_new,
    positions,
    k_in,
    v_in,
    positions_in,
    k_scale_in,
    v_scale_in,
    stride,
    q,
    k,
    v,
    k_pool,
    v_pool,
    stored_positions,
    k_scale,
    v_scale,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_HEADS: tl.constexpr,
    LENGTHS_HEADS: tl.constexpr,
):
    """One KV head of one token. Grid (batch * CHUNK, HEADS).

    qkv [batch, CHUNK, HEADS, GROUP + 2, 2 * HALF]; cos, sin float32 [batch, CHUNK, HALF]; q_norm, k_norm [2 * HALF],
    read if NORM; table [batch, TABLE_HEADS, COLUMNS]; lengths [batch, LENGTHS_HEADS]; offset [HEADS]; num_new [batch];
    positions [batch, CHUNK]; q [batch, CHUNK, HEADS * GROUP, 2 * HALF]; k, v [batch, CHUNK, HEADS, 2 * HALF];
    k_pool, v_pool [head pages, PAGE, 2 * HALF]; stored_positions and, if SCALED, k_scale, v_scale [head pages, PAGE].
    The pools are outputs aliased to the inputs `*_in`. Tokens past a row's end go to the null page.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row, step = token // CHUNK, token % CHUNK
    # The chain of dependent loads first, so that it runs beside everything else.
    place = tl.load(lengths + row * LENGTHS_HEADS + (head if LENGTHS_HEADS > 1 else 0)) + step
    column = tl.minimum(place // PAGE, COLUMNS - 1)
    entry = tl.load(table + (row.to(tl.int64) * TABLE_HEADS + (head if TABLE_HEADS > 1 else 0)) * COLUMNS + column)
    head_offset, position = tl.load(offset + head), tl.load(positions + token)
    valid = step < tl.load(num_new + row)

    dtype = qkv.dtype.element_ty
    member = tl.arange(0, GROUP_POW2)
    lane = tl.arange(0, HALF)
    line = token.to(tl.int64) * HEADS + head
    source = qkv + line * (GROUP + 2) * (2 * HALF) + lane
    queries = source[None, :] + member[:, None] * (2 * HALF)
    real = (member < GROUP)[:, None]
    q_first = tl.load(queries, mask=real, other=0.0).to(tl.float32)
    q_second = tl.load(queries + HALF, mask=real, other=0.0).to(tl.float32)
    k_first = tl.load(source + GROUP * (2 * HALF)).to(tl.float32)
    k_second = tl.load(source + GROUP * (2 * HALF) + HALF).to(tl.float32)
    v_first = tl.load(source + (GROUP + 1) * (2 * HALF))
    v_second = tl.load(source + (GROUP + 1) * (2 * HALF) + HALF)
    cosine = tl.load(cos + token * HALF + lane)
    sine = tl.load(sin + token * HALF + lane)
    if NORM:
        weight_first, weight_second = tl.load(q_norm + lane)[None, :], tl.load(q_norm + HALF + lane)[None, :]
        scale = tl.rsqrt((tl.sum(q_first * q_first, 1) + tl.sum(q_second * q_second, 1)) / (2 * HALF) + EPS)[:, None]
        q_first = (q_first * scale * weight_first.to(tl.float32)).to(dtype).to(tl.float32)
        q_second = (q_second * scale * weight_second.to(tl.float32)).to(dtype).to(tl.float32)
        weight_first, weight_second = tl.load(k_norm + lane), tl.load(k_norm + HALF + lane)
        scale = tl.rsqrt(tl.sum(k_first * k_first + k_second * k_second, 0) / (2 * HALF) + EPS)
        k_first = (k_first * scale * weight_first.to(tl.float32)).to(dtype).to(tl.float32)
        k_second = (k_second * scale * weight_second.to(tl.float32)).to(dtype).to(tl.float32)

    target = q + (line * GROUP + member[:, None]) * (2 * HALF) + lane[None, :]
    tl.store(target, (q_first * cosine[None, :] - q_second * sine[None, :]).to(dtype), mask=real)
    tl.store(target + HALF, (q_second * cosine[None, :] + q_first * sine[None, :]).to(dtype), mask=real)
    key_first = (k_first * cosine - k_second * sine).to(dtype)
    key_second = (k_second * cosine + k_first * sine).to(dtype)
    new = line * (2 * HALF) + lane
    tl.store(k + new, key_first)
    tl.store(k + new + HALF, key_second)
    tl.store(v + new, v_first)
    tl.store(v + new + HALF, v_second)

    page = tl.where(valid, entry.to(tl.int64) * stride + head_offset, 0)
    cell = page * PAGE + place % PAGE
    tl.store(stored_positions + cell, position)
    base = cell * (2 * HALF) + lane
    if SCALED:
        wide_first, wide_second = key_first.to(tl.float32), key_second.to(tl.float32)
        scale = tl.max(tl.maximum(tl.abs(wide_first), tl.abs(wide_second)), 0)
        scale = tl.maximum(tl.div_rn(scale, LARGEST), 1e-30)
        tl.store(k_scale + cell, scale)
        store_code(k_pool, base, wide_first, scale)
        store_code(k_pool, base + HALF, wide_second, scale)
        wide_first, wide_second = v_first.to(tl.float32), v_second.to(tl.float32)
        scale = tl.max(tl.maximum(tl.abs(wide_first), tl.abs(wide_second)), 0)
        scale = tl.maximum(tl.div_rn(scale, LARGEST), 1e-30)
        tl.store(v_scale + cell, scale)
        store_code(v_pool, base, wide_first, scale)
        store_code(v_pool, base + HALF, wide_second, scale)
    else:
        tl.store(k_pool + base, key_first)
        tl.store(k_pool + base + HALF, key_second)
        tl.store(v_pool + base, v_first)
        tl.store(v_pool + base + HALF, v_second)
