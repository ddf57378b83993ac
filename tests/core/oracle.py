"""A whole forward pass without cache or pages: dense attention over keys and values as a storage gives them back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.geometry import Geometry
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.pallas_kernels.heads import finish
from sparsejax.storage import Storage
from tests.core.harness import Session
from tests.models.full_attention import dense_attention


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(spec: ModelSpec, geometry: Geometry, storage: Storage, weights: Weights, tokens, mask):
    architecture = get_architecture(spec.architecture)
    x, heads, hidden = architecture.embed(spec, weights, tokens), [], []
    for layer in range(spec.num_layers):

        def attend(projected, layer=layer):
            q, k, v = finish(projected)
            payload = storage.encode(storage.params, geometry, jnp.int32(layer), k, v)
            payload = jax.lax.optimization_barrier(payload)  # else XLA for GPUs leaves out the rounding
            tiles = {name: jnp.moveaxis(rows, 1, 0)[None] for name, rows in payload.items()}
            stored = storage.load_tile(storage.params, geometry, tiles, jnp.int32(layer))
            k, v = (jnp.moveaxis(rows[0], 0, 1) for rows in stored)
            heads.append((q, k))
            return dense_attention(q, k, v, mask[layer], geometry.scale)

        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        x = architecture.layer(spec, weights["layers"][layer], x, positions, attend)
        hidden.append(x.x + x.delta)
    return architecture.logits(spec, weights, x), heads, hidden


class Reads:
    """Which keys each query of a sequence may read, noted while a session runs.

    Attributes:
      tokens: the sequence so far.
      mask: bool [layers, kv_heads, max_len, max_len].
      before: positions resident before the step under way, by (layer, head).
    """

    def __init__(self, session: Session) -> None:
        geometry = session.geometry
        size = geometry.max_model_len
        self.session = session
        self.tokens: list[int] = []
        self.before: dict[tuple[int, int], np.ndarray] = {}
        self.mask = np.zeros((geometry.num_layers, geometry.num_kv_heads, size, size), bool)

    def appended(self, tokens: list[int], resident: dict[tuple[int, int], np.ndarray]) -> None:
        """New queries see the rows that are `resident` per (layer, head), themselves and each other, causally."""
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        for (layer, head), positions in resident.items():
            self.mask[layer, head, start:end, positions] = True
            self.mask[layer, head, start:end, start:end] = np.tri(len(tokens), dtype=bool)

    def recompute(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Everything from the start: logits [tokens so far, vocab], and each layer's queries and keys after RoPE."""
        logits, heads, _ = self._run()
        return np.asarray(logits)[: len(self.tokens)], [(np.asarray(q), np.asarray(k)) for q, k in heads]

    def hidden(self) -> list[np.ndarray]:
        """The residual stream after each layer, [tokens so far, hidden_size]."""
        return [np.asarray(x)[: len(self.tokens)] for x in self._run()[2]]

    def _run(self):
        session = self.session
        size = session.geometry.max_model_len
        padded = np.zeros(size, np.int32)
        padded[: len(self.tokens)] = self.tokens
        mask = self.mask | np.eye(size, dtype=bool)  # padding must see something
        arguments = (session.spec, session.geometry, session.storage, session.weights)
        return _forward(*arguments, jnp.asarray(padded), jnp.asarray(mask))
