"""The decoder that llama, qwen2 and qwen3 share: pre-norm attention and SwiGLU blocks over a token embedding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparsejax.arrays import ArraySpec
from sparsejax.models import layers
from sparsejax.models.spec import Attend, ModelSpec, Pick, Stream, TensorSlot, Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.heads import Heads


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Implements `Architecture`; an architecture overrides what differs.

    Layer weights: attn_norm [hidden], qkv [hidden, num_kv_heads, group_size + 2, head_dim] (see `layers.project_qkv`),
    out [num_q_heads * head_dim, hidden], mlp_norm [hidden], gate_up [hidden, 2, intermediate],
    down [intermediate, hidden].
    """

    name: str

    def weight_specs(self, spec: ModelSpec) -> Weights:
        tree: Weights = {
            "embed": _array(spec, (spec.vocab_size, spec.hidden_size), ("vocab", "hidden")),
            "layers": [self.layer_specs(spec) for _ in range(spec.num_layers)],
            "final_norm": _array(spec, (spec.hidden_size,), ("hidden",)),
        }
        if not spec.tie_embeddings:
            tree["lm_head"] = _array(spec, (spec.hidden_size, spec.vocab_size), ("hidden", "vocab"))
        return tree

    def layer_specs(self, spec: ModelSpec) -> Weights:
        """`ArraySpec`s of one layer."""
        group = spec.num_q_heads // spec.num_kv_heads
        hidden, inner = spec.hidden_size, spec.intermediate_size
        heads_shape = (spec.num_kv_heads, group + 2, spec.head_dim)
        heads_axes = ("kv_head", "head_of_group", "head_dim")
        tree = {
            "attn_norm": _array(spec, (hidden,), ("hidden",)),
            "qkv": _array(spec, (hidden, *heads_shape), ("hidden", *heads_axes)),
            "out": _array(spec, (spec.num_q_heads * spec.head_dim, hidden), ("q_heads", "hidden")),
            "mlp_norm": _array(spec, (hidden,), ("hidden",)),
            "gate_up": _array(spec, (hidden, 2, inner), ("hidden", "gate_or_up", "intermediate")),
            "down": _array(spec, (inner, hidden), ("intermediate", "hidden")),
        }
        if spec.qkv_bias:
            tree["qkv_bias"] = _array(spec, heads_shape, heads_axes)
        if spec.qk_norm:
            tree["q_norm"] = _array(spec, (spec.head_dim,), ("head_dim",))
            tree["k_norm"] = _array(spec, (spec.head_dim,), ("head_dim",))
        return tree

    def tensor_slots(self, spec: ModelSpec) -> dict[str, TensorSlot]:
        hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        q_size, kv_size = spec.num_q_heads * dim, spec.num_kv_heads * dim
        slots = {
            "model.embed_tokens.weight": TensorSlot(("embed",), (spec.vocab_size, hidden)),
            "model.norm.weight": TensorSlot(("final_norm",), (hidden,)),
        }
        if not spec.tie_embeddings:
            slots["lm_head.weight"] = TensorSlot(("lm_head",), (spec.vocab_size, hidden), transposed=True)
        for index in range(spec.num_layers):
            prefix, path = f"model.layers.{index}.", ("layers", index)
            slots |= {
                prefix + "input_layernorm.weight": TensorSlot((*path, "attn_norm"), (hidden,)),
                prefix + "self_attn.o_proj.weight": TensorSlot((*path, "out"), (hidden, q_size), transposed=True),
                prefix + "post_attention_layernorm.weight": TensorSlot((*path, "mlp_norm"), (hidden,)),
                prefix + "mlp.gate_proj.weight": TensorSlot((*path, "gate_up"), (inner, hidden), part="gate"),
                prefix + "mlp.up_proj.weight": TensorSlot((*path, "gate_up"), (inner, hidden), part="up"),
                prefix + "mlp.down_proj.weight": TensorSlot((*path, "down"), (hidden, inner), transposed=True),
            }
            for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                name = f"{prefix}self_attn.{part}_proj."
                slots[name + "weight"] = TensorSlot((*path, "qkv"), (size, hidden), part=part)
                if spec.qkv_bias:
                    slots[name + "bias"] = TensorSlot((*path, "qkv_bias"), (size,), part=part)
            if spec.qk_norm:
                for part in ("q", "k"):
                    slots[f"{prefix}self_attn.{part}_norm.weight"] = TensorSlot((*path, f"{part}_norm"), (dim,))
        return slots

    def embed(self, spec: ModelSpec, weights: Weights, tokens: jax.Array) -> Stream:
        with jax.named_scope("embed"):
            x = weights["embed"][tokens]
            return Stream(x, jnp.zeros_like(x))

    def heads(self, spec: ModelSpec, layer_weights: Weights, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> Heads:
        """Heads from the normed input [..., hidden]; `rope` is the rotary table at its positions."""
        return Heads(layers.project_qkv(x, layer_weights["qkv"]), *rope)

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
        eps = spec.rms_norm_eps
        norm = functools.partial(api.add_rms_norm, eps=eps, implementation=implementation)
        with jax.named_scope("attention"):
            x, normed = norm(stream.x, stream.delta, layer_weights["attn_norm"])
            table = layers.rope_table(spec.rope, spec.head_dim, positions)
            attended = attend(self.heads(spec, layer_weights, normed, table))
            x = x if pick is None else pick(x)
            merged = attended.reshape(*x.shape[:-1], spec.num_q_heads * spec.head_dim)
            delta = layers.linear(merged, layer_weights["out"])
        with jax.named_scope("mlp"):
            x, normed = norm(x, delta, layer_weights["mlp_norm"])
            return Stream(x, layers.swiglu(normed, layer_weights["gate_up"], layer_weights["down"]))

    def turn(self, spec: ModelSpec, keys: jax.Array, distance: jax.Array) -> jax.Array:
        return layers.rope_turn(spec.rope, keys, distance)

    def logits(self, spec: ModelSpec, weights: Weights, stream: Stream, implementation: str | None = None) -> jax.Array:
        with jax.named_scope("logits"):
            norm = functools.partial(api.add_rms_norm, eps=spec.rms_norm_eps, implementation=implementation)
            _, x = norm(stream.x, stream.delta, weights["final_norm"])
            if spec.tie_embeddings:
                return layers.logits(x, weights["embed"], contract=1)
            return layers.logits(x, weights["lm_head"], contract=0)


def _array(spec: ModelSpec, shape: tuple[int, ...], axes: tuple[str, ...]) -> ArraySpec:
    return ArraySpec(shape, spec.dtype, axes)
