"""Triton kernel of residual addition and RMS norm. Imports triton: import this module where the kernel is launched."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(x, delta, weight, total, normed, EPS: tl.constexpr, SIZE: tl.constexpr, SIZE_POW2: tl.constexpr):
    """One row. Grid (rows,). x, delta, total, normed [rows, SIZE]; weight [SIZE]."""
    lane = tl.arange(0, SIZE_POW2)
    real = lane < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + lane
    sum_ = tl.load(x + place, mask=real, other=0.0) + tl.load(delta + place, mask=real, other=0.0)
    scale_by = tl.load(weight + lane, mask=real, other=0.0).to(tl.float32)
    tl.store(total + place, sum_, mask=real)
    wide = sum_.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + EPS)
    tl.store(normed + place, (wide * scale * scale_by).to(x.dtype.element_ty), mask=real)
