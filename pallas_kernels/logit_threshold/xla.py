"""Logit thresholds for any platform: bisection on float32 bit patterns, exact in 31 steps, only if some row asks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

LEAST_TEMPERATURE = 1e-6
LARGEST_FINITE_KEY = 0x7F7FFFFF


def logit_threshold(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """See `api.logit_threshold`."""
    batch, vocab = logits.shape
    top_k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    asks = (temperature > 0) & ((top_k < vocab) | (top_p < 1.0) | (min_p > 0))

    def search() -> jax.Array:
        # The best token has exactly 0 (a difference taken after the division need not be), so exp(-below) is a token's
        # share of the best, and the best is never cut.
        below = jnp.abs(logits.max(-1, keepdims=True) - logits)  # no -0.0
        below = below / jnp.maximum(temperature, LEAST_TEMPERATURE)[:, None]
        below = jnp.where((jnp.exp(-below) >= min_p[:, None]) | (below == 0), below, jnp.inf)

        keys = _ordered(below)

        def cut_top_k(limit: jax.Array) -> jax.Array:
            found = _least_key(keys, lambda keep: keep.sum(-1) >= top_k)
            return jnp.where(top_k < vocab, jnp.minimum(found, limit), limit)

        def cut_top_p(limit: jax.Array) -> jax.Array:
            mass = jnp.where(keys <= limit[:, None], jnp.exp(-below), 0.0)
            wanted = top_p * mass.sum(-1)
            found = _least_key(keys, lambda keep: jnp.where(keep, mass, 0.0).sum(-1) >= wanted)
            return jnp.where(top_p < 1.0, jnp.minimum(found, limit), limit)

        limit = jnp.full((batch,), LARGEST_FINITE_KEY, jnp.int32)
        limit = jax.lax.cond((asks & (top_k < vocab)).any(), cut_top_k, lambda limit: limit, limit)
        limit = jax.lax.cond((asks & (top_p < 1.0)).any(), cut_top_p, lambda limit: limit, limit)
        least = jnp.where(keys <= limit[:, None], logits, jnp.inf).min(-1)
        return jnp.where(asks & (least < jnp.inf), least, -jnp.inf)

    return jax.lax.cond(asks.any(), search, lambda: jnp.full((batch,), -jnp.inf, jnp.float32))


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 values that are not negative."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _least_key(keys: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Per row the least int32 limit t >= 0 for which enough(keys <= t) holds; it must hold for the largest."""

    def step(i: jax.Array, limit: jax.Array) -> jax.Array:
        candidate = limit ^ (jnp.int32(1) << (30 - i))
        return jnp.where(enough(keys <= candidate[:, None]), candidate, limit)

    return jax.lax.fori_loop(0, 31, step, jnp.full(keys.shape[:1], 2**31 - 1, jnp.int32))
