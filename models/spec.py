"""What a decoder-only model looks like, as one frozen record; and the interface that step functions use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from sparsejax.geometry import Geometry
from sparsejax.pallas_kernels.heads import Heads

Weights = dict[str, Any]
Attend = Callable[[Heads], jax.Array]
"""Heads of [...] tokens as projected -> attended [..., num_q_heads, head_dim].

Finishes the heads, writes keys and values to the cache and attends; given by the caller, so model code knows nothing of
caches or methods.
"""
Pick = Callable[[jax.Array], jax.Array]
"""[..., hidden] of all tokens -> [..., hidden] of those that are still needed."""


class Stream(NamedTuple):
    """Hidden states between layers: the residual stream, and what the last layer adds to it, each [..., hidden].

    Apart, because the next norm adds them as it reads them.
    """

    x: jax.Array
    delta: jax.Array


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, half-split (NeoX) layout.

    Attributes:
      theta: base.
      kind: "default", "linear", "llama3", "yarn" or "divisors".
      factor: context extension factor.
      low_freq_factor, high_freq_factor: llama3's band edges.
      original_max_len: window the model was trained on (llama3, yarn).
      beta_fast, beta_slow: yarn's ramp.
      attention_factor: yarn's multiplier of cos and sin; None derives it from `factor`.
      truncate: yarn's ramp begins and ends at whole dimensions.
      divisors: one divisor per frequency ("divisors": how GGUF files carry llama3's scaling).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Static description of a model; hashable, so it can be a static argument of jit.

    Attributes:
      architecture: registry name ("llama", "qwen2", "qwen3").
      max_model_len: longest position the checkpoint supports, in tokens.
      dtype: name of the compute and weight dtype.
      qkv_bias: q, k, v projections have biases (qwen2).
      qk_norm: RMS norm over head_dim on q and k before RoPE (qwen3).
      tie_embeddings: logits use the embedding matrix.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: str = "float32"

    def geometry(self, page_size: int, max_model_len: int | None = None) -> Geometry:
        """The attention geometry for a page size and, optionally, a shorter window."""
        return Geometry(
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            max_model_len=max_model_len or self.max_model_len,
            scale=self.head_dim**-0.5,
            dtype=self.dtype,
            hidden_size=self.hidden_size,
        )


@dataclasses.dataclass(frozen=True)
class TensorSlot:
    """Where one tensor of a Hugging Face checkpoint goes.

    Attributes:
      path: keys of the weight tree, e.g. ("layers", 3, "qkv").
      shape: the tensor's shape in the checkpoint.
      transposed: stored [out, in] there and [in, out] here.
      part: the piece of a fused array that it fills: "q", "k", "v", "gate" or "up"; None for the whole array.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    part: str | None = None


class Architecture(Protocol):
    """A model's pure functions. `weights` is {"embed", "layers": [one dict per layer], "final_norm", "lm_head"?}."""

    def weight_specs(self, spec: ModelSpec) -> Weights:
        """The same tree with an `ArraySpec` for every array. Matrices are [in, out]; "embed" is [vocab, hidden]."""
        ...

    def tensor_slots(self, spec: ModelSpec) -> dict[str, TensorSlot]:
        """Every tensor that a Hugging Face checkpoint must hold, by name."""
        ...

    def embed(self, spec: ModelSpec, weights: Weights, tokens: jax.Array) -> Stream:
        """int32 [...] -> [..., hidden]."""
        ...

    def layer(
        self,
        spec: ModelSpec,
        layer_weights: Weights,
        stream: Stream,
        positions: jax.Array,
        attend: Attend,
        implementation: str | None = None,
        pick: Pick | None = None,
    ) -> Stream:
        """One layer for [...] tokens at int32 positions [...]; `implementation` as in `pallas_kernels.api`.

        `pick` leaves some of the tokens for what follows attention, `attend` then gives these only.
        """
        ...

    def turn(self, spec: ModelSpec, keys: jax.Array, distance: jax.Array) -> jax.Array:
        """Finished keys [..., head_dim] as they would be `distance` (int32 [...], broadcast) positions further on."""
        ...

    def logits(self, spec: ModelSpec, weights: Weights, stream: Stream, implementation: str | None = None) -> jax.Array:
        """[..., hidden] -> float32 [..., vocab], final norm included."""
        ...
