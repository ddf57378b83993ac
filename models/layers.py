"""Building blocks that architectures share: pure functions over arrays, exact under strict dtype and rank promotion.

Norms and rotary embeddings are computed in float32; matrix products run in the weights' dtype (true float32 where that
is float32, on every platform), and only logits come out in float32 whatever the weights are.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.models.spec import RopeSpec
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.heads import apply_rope


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    # Accelerators multiply float32 in TF32 or bfloat16 by default; who asks for float32 weights wants float32.
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


_CPU_PARTS = 4


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., in] times [in, *out] -> [..., *out], in x's dtype."""
    inner = x.shape[-1]
    if x.size == inner and inner % _CPU_PARTS == 0 and api.platform() == "cpu":
        # XLA's CPU backend multiplies one row by a matrix on one thread; a batch of parts is spread over all.
        parts = x.reshape(_CPU_PARTS, 1, inner // _CPU_PARTS)
        split = weight.reshape(_CPU_PARTS, inner // _CPU_PARTS, math.prod(weight.shape[1:]))
        sums = jax.lax.dot_general(parts, split, (((2,), (1,)), ((0,), (0,))), precision=_precision(x)).sum(0)
        return sums.reshape(*x.shape[:-1], *weight.shape[1:])
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())), precision=_precision(x))


def logits(x: jax.Array, weight: jax.Array, contract: int) -> jax.Array:
    """[..., hidden] -> float32 [..., vocab].

    `contract` is the weight's hidden axis: 0 for a head, 1 for an embedding (read as it lies, not transposed).
    """
    dimensions = (((x.ndim - 1,), (contract,)), ((), ()))
    return jax.lax.dot_general(
        x, weight, dimensions, precision=_precision(x), preferred_element_type=jnp.dtype(jnp.float32)
    )


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """silu(x gate) * (x up), times down.

    x [..., hidden], gate_up [hidden, 2, intermediate], down [intermediate, hidden] -> [..., hidden].
    """
    both = linear(x, gate_up)
    return linear(jax.nn.silu(both[..., 0, :]) * both[..., 1, :], down)


def project_qkv(x: jax.Array, qkv: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Query, key and value heads from one matrix, before norms and RoPE.

    One matrix product instead of three, and a split over KV heads is a split of one axis.

    Args:
      x: [..., hidden].
      qkv: [hidden, num_kv_heads, group_size + 2, head_dim]; for each KV head its query heads, then its key, its value.
      bias: [num_kv_heads, group_size + 2, head_dim] or None.

    Returns:
      [..., num_kv_heads, group_size + 2, head_dim].
    """
    heads = linear(x, qkv)
    return heads if bias is None else heads + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def rope_frequencies(rope: RopeSpec, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [head_dim // 2], and the multiplier of cos and sin.

    Sources: RoPE (Su et al. 2021), position interpolation ("linear", Chen et al. 2023), Llama 3.1's banded scaling
    ("llama3"), YaRN (Peng et al. 2023). Computed in float64 on the host: these are constants of the program.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "default":
        scaled, multiplier = frequencies, 1.0
    elif rope.kind == "linear":
        scaled, multiplier = frequencies / rope.factor, 1.0
    elif rope.kind == "llama3":
        scaled, multiplier = _llama3(rope, frequencies), 1.0
    elif rope.kind == "yarn":
        scaled, multiplier = _yarn(rope, frequencies, head_dim)
    elif rope.kind == "divisors":
        scaled, multiplier = frequencies / np.asarray(rope.divisors, np.float64), 1.0
    else:
        raise ValueError(f"unknown rope kind {rope.kind!r}: expected default, linear, llama3, yarn or divisors")
    return scaled.astype(np.float32), multiplier


def _llama3(rope: RopeSpec, frequencies: np.ndarray) -> np.ndarray:
    # Long wavelengths are stretched by `factor`, short ones kept, those between blended by how often they turn
    # within the original window.
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn(rope: RopeSpec, frequencies: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    def dimension_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    multiplier = rope.attention_factor
    if multiplier is None:
        multiplier = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return frequencies * (1 - stretch + stretch / rope.factor), multiplier


def rope_table(rope: RopeSpec, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, head_dim // 2], for int32 positions [...]; the 1 stands for the head axis."""
    frequencies, multiplier = rope_frequencies(rope, head_dim)
    frequencies = jnp.asarray(frequencies).reshape((1,) * (positions.ndim + 1) + frequencies.shape)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles) * multiplier, jnp.sin(angles) * multiplier


def rope_turn(rope: RopeSpec, keys: jax.Array, distance: jax.Array) -> jax.Array:
    """Keys [..., head_dim] of some positions as they would be `distance` (int32 [...]) positions further on."""
    frequencies, _ = rope_frequencies(rope, keys.shape[-1])  # the multiplier is in the keys already
    frequencies = jnp.asarray(frequencies).reshape((1,) * distance.ndim + frequencies.shape)
    angles = distance.astype(jnp.float32)[..., None] * frequencies
    return apply_rope(keys, (jnp.cos(angles), jnp.sin(angles)))
