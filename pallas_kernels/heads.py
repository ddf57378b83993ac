"""From a layer's one matrix product to finished heads: head norms and rotary embedding. Imports jax only.

Computed in float32 and rounded to the input's dtype after each of the two, whatever the platform.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Heads(NamedTuple):
    """Queries, keys and values of some tokens as projected, and what is still to be done to them.

    Attributes:
      qkv: [..., num_kv_heads, group_size + 2, head_dim]; for each KV head its query heads, its key, its value.
      cos, sin: float32 [..., 1, head_dim // 2], the rotary table at the tokens' positions.
      q_norm, k_norm: [head_dim] weights of an RMS norm over each query and key head, or None.
      eps: of these norms.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    eps: float = 0.0

    @property
    def group_size(self) -> int:
        return self.qkv.shape[-2] - 2


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019), in float32. x [..., n], weight [n]."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (x32 * scale * weight).astype(x.dtype)


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates [..., heads, head_dim] in the half-split layout: channel i pairs with i + head_dim // 2."""
    cos, sin = table
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def finish(heads: Heads) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [..., num_q_heads, head_dim], k and v [..., num_kv_heads, head_dim], normed and rotated."""
    qkv = heads.qkv
    q = qkv[..., :-2, :].reshape(*qkv.shape[:-3], qkv.shape[-3] * heads.group_size, qkv.shape[-1])
    k, v = qkv[..., -2, :], qkv[..., -1, :]
    if heads.q_norm is not None:
        q = rms_norm(q, heads.q_norm, heads.eps)
    if heads.k_norm is not None:
        k = rms_norm(k, heads.k_norm, heads.eps)
    table = (heads.cos, heads.sin)
    return apply_rope(q, table), apply_rope(k, table), v
