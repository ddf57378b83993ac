"""Qwen3, dense: llama with an RMS norm over each query and key head before RoPE."""

from __future__ import annotations

import jax

from sparsejax.models import layers
from sparsejax.models.decoder import Decoder
from sparsejax.models.spec import ModelSpec, Weights


class Qwen3(Decoder):
    """The shared decoder with head norms."""

    def heads(self, spec: ModelSpec, layer_weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = layers.project_qkv(x, layer_weights["qkv"])
        q = layers.rms_norm(q, layer_weights["q_norm"], spec.rms_norm_eps)
        k = layers.rms_norm(k, layer_weights["k_norm"], spec.rms_norm_eps)
        return q, k, v


QWEN3 = Qwen3("qwen3")
