"""The full-recompute oracle: a whole forward pass with dense causal attention, no cache, no pages, no method.

Every cached, paged or sparse path must agree with it: a dense one exactly, a sparse one when given the mask of the keys
that the method keeps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.pallas_kernels.heads import Heads, finish


def full_logits(spec: ModelSpec, weights: Weights, tokens, mask=None) -> jax.Array:
    """Logits at every position of one sequence.

    Args:
      spec: the model.
      weights: its weights.
      tokens: int [T].
      mask: bool, True where query row t may read key row s, besides the causal rule. [T, T] for all layers and heads,
        [L, T, T] per layer, or [L, H, T, T] per layer and KV head (its whole group of query heads reads the same keys).

    Returns:
      float32 [T, vocab_size].
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if mask is not None:
        mask = jnp.asarray(mask, jnp.bool_)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape) if mask.ndim == 2 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
        lengths = (spec.num_layers, spec.num_kv_heads, tokens.size, tokens.size)
        mask = jnp.broadcast_to(mask, lengths)
    return _full_logits(spec, weights, tokens, mask)


@jax.jit(static_argnums=0)
def _full_logits(spec: ModelSpec, weights: Weights, tokens: jax.Array, mask: jax.Array | None) -> jax.Array:
    architecture = get_architecture(spec.architecture)
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    causal = positions[:, None] >= positions[None, :]
    x = architecture.embed(spec, weights, tokens)
    for index in range(spec.num_layers):
        allowed = causal[None] if mask is None else jnp.logical_and(causal[None], mask[index])

        def attend(heads: Heads, allowed: jax.Array = allowed) -> jax.Array:
            return dense_attention(*finish(heads), allowed, spec.head_dim**-0.5)

        x = architecture.layer(spec, weights["layers"][index], x, positions, attend)
    return architecture.logits(spec, weights, x)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, scale: float) -> jax.Array:
    """q [T, num_q_heads, d], k and v [T, num_kv_heads, d], allowed [1 or num_kv_heads, T, T] -> [T, num_q_heads, d].

    Scores and softmax in float32. Query head h reads KV head h // group_size.
    """
    length, num_q_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(length, num_kv_heads, num_q_heads // num_kv_heads, dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision=highest) * scale
    scores = jnp.where(allowed[:, None], scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("kgts,skd->tkgd", probabilities, v.astype(jnp.float32), precision=highest)
    return out.reshape(length, num_q_heads, dim).astype(q.dtype)


def greedy_tokens(spec: ModelSpec, weights: Weights, prompt, num_tokens: int) -> list[int]:
    """The continuation that picks the best token each time, every step recomputed from the start.

    The sequence is padded to its final length, so one program serves all steps; causality makes padding harmless.
    """
    tokens = np.zeros(len(prompt) + num_tokens, np.int32)
    tokens[: len(prompt)] = prompt
    for length in range(len(prompt), len(tokens)):
        tokens[length] = int(jnp.argmax(full_logits(spec, weights, tokens)[length - 1]))
    return tokens[len(prompt) :].tolist()
