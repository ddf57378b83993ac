"""Residual addition and RMS norm for any platform."""

from __future__ import annotations

import jax

from sparsejax.pallas_kernels.heads import rms_norm


def add_rms_norm(x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    x = x + delta
    return x, rms_norm(x, weight, eps)
