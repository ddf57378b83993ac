"""Qwen3, dense: llama with an RMS norm over each query and key head before RoPE."""

from __future__ import annotations

import jax

from sparsejax.models import layers
from sparsejax.models.decoder import Decoder
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.pallas_kernels.heads import Heads


class Qwen3(Decoder):
    """The shared decoder with head norms."""

    def heads(self, spec: ModelSpec, layer_weights: Weights, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> Heads:
        norms = layer_weights["q_norm"], layer_weights["k_norm"]
        return Heads(layers.project_qkv(x, layer_weights["qkv"]), *rope, *norms, eps=spec.rms_norm_eps)


QWEN3 = Qwen3("qwen3")
