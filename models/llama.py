"""Llama 1 to 3.x and models of the same shape (SmolLM2, TinyLlama): no biases, no head norms."""

from __future__ import annotations

from sparsejax.models.decoder import Decoder

LLAMA = Decoder("llama")
