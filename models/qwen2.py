"""Qwen2 and Qwen2.5, dense: llama with biases on the query, key and value projections."""

from __future__ import annotations

import jax

from sparsejax.models import layers
from sparsejax.models.decoder import Decoder
from sparsejax.models.spec import ModelSpec, Weights


class Qwen2(Decoder):
    """The shared decoder with projection biases."""

    def heads(self, spec: ModelSpec, layer_weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return layers.project_qkv(x, layer_weights["qkv"], layer_weights["qkv_bias"])


QWEN2 = Qwen2("qwen2")
