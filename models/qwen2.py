"""Qwen2 and Qwen2.5, dense: llama with biases on the query, key and value projections."""

from __future__ import annotations

import jax

from sparsejax.models import layers
from sparsejax.models.decoder import Decoder
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.pallas_kernels.heads import Heads


class Qwen2(Decoder):
    """The shared decoder with projection biases."""

    def heads(self, spec: ModelSpec, layer_weights: Weights, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> Heads:
        return Heads(layers.project_qkv(x, layer_weights["qkv"], layer_weights["qkv_bias"]), *rope)


QWEN2 = Qwen2("qwen2")
