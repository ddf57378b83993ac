"""Tokens that run behind rows for the sake of their queries, and are forgotten: what recall and pruning share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.forward import Batch, Cache, Statics, layers
from sparsejax.method import Method
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import Weights


def probing(statics: Statics, name: str, **hooks: Any) -> Statics:
    """The same model and storage under a method that has these hooks only, and so touches nobody's statistics."""
    return dataclasses.replace(statics, method=Method(name, "none", granularity=statics.method.granularity, **hooks))


def run_probe(
    statics: Statics,
    weights: Weights,
    pools: dict[str, jax.Array],
    tokens: jax.Array,
    table: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    position: jax.Array,
    aux: dict[str, jax.Array],
) -> Cache:
    """Runs tokens behind rows. Causal attention, to all rows; nothing but pages is written.

    Args:
      statics: from `probing`.
      weights: the model's weights.
      pools: of the state.
      tokens: int32 [1, chunk].
      table: int32 [layers, heads, 1, columns] of the granularity, with pages for the tokens' own rows.
      start: int32 [layers, heads, 1], rows before them.
      num_new: int32 [1], tokens that count.
      position: int32 scalar, of the first.
      aux: what the hooks keep, as their `row_aux`.

    Returns:
      the pools, and `aux` in `row_aux`.
    """
    positions = position + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    batch = Batch(jnp.zeros(1, jnp.int32), table, start, num_new, positions, tokens)
    model = get_architecture(statics.spec.architecture)
    stream = model.embed(statics.spec, weights, tokens)
    return layers(statics, "prefill", weights, stream, batch, Cache(pools, {}, aux, {}))[1]
