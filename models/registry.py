"""Architectures by name, and model specs from Hugging Face configs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparsejax.errors import LoadError
from sparsejax.models.llama import LLAMA
from sparsejax.models.qwen2 import QWEN2
from sparsejax.models.qwen3 import QWEN3
from sparsejax.models.spec import Architecture, ModelSpec, RopeSpec

_ARCHITECTURES: dict[str, Architecture] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
_CLASS_NAMES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def architecture_names() -> tuple[str, ...]:
    """Registry names, for messages and tests."""
    return tuple(_ARCHITECTURES)


def get_architecture(name: str) -> Architecture:
    """The pure functions of an architecture; LoadError lists the known ones."""
    try:
        return _ARCHITECTURES[name]
    except KeyError:
        raise LoadError(
            f"unknown architecture {name!r}: sparsejax knows {', '.join(_ARCHITECTURES)}"
            f" (in config.json: {', '.join(_CLASS_NAMES)})"
        ) from None


def spec_from_config(config: Mapping[str, Any], dtype: str = "float32") -> ModelSpec:
    """A ModelSpec from the contents of a Hugging Face config.json.

    Refuses what would silently compute something else: other activations, biases, partial rotation, sliding windows,
    quantised weights.
    """
    name = _architecture_name(config)
    get_architecture(name)
    reader = _Config(config)
    hidden_size = reader.integer("hidden_size")
    num_q_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_q_heads)
    default_head_dim = 128 if name == "qwen3" else hidden_size // num_q_heads
    head_dim = reader.integer("head_dim", default_head_dim)
    if num_q_heads % num_kv_heads:
        raise LoadError(f"num_attention_heads={num_q_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if head_dim % 2:
        raise LoadError(f"head_dim={head_dim} must be even for rotary embeddings")
    reader.expect("hidden_act", "silu")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    reader.expect("use_sliding_window", False)
    reader.expect("quantization_config", None)
    max_model_len = reader.integer("max_position_embeddings", 2048)
    rope = _rope(config, max_model_len)
    if rope.kind == "yarn":
        max_model_len = max(max_model_len, int(rope.original_max_len * rope.factor))
    return ModelSpec(
        architecture=name,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=max_model_len,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype,
    )


def _architecture_name(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures") or []
    for class_name in classes:
        if class_name in _CLASS_NAMES:
            return _CLASS_NAMES[class_name]
    if classes:
        return str(classes[0])
    if "model_type" not in config:
        raise LoadError("config.json names no architecture: it has neither 'architectures' nor 'model_type'")
    return str(config["model_type"])


class _Config:
    """Typed reads that name the key at fault."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise LoadError(f"config.json: {key} must be a number, got {value!r}")
        return float(value)

    def expect(self, key: str, supported: object) -> None:
        value = self._config.get(key, supported)
        if value != supported and not (supported is False and value is None):
            shown = "..." if isinstance(value, dict) else repr(value)
            raise LoadError(f"config.json: {key}={shown} is not supported, only {key}={supported!r}")


def _rope(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """Reads both spellings: rope_parameters (transformers 5) and rope_theta with rope_scaling (before)."""
    scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    rotated = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotated != 1.0:
        raise LoadError(f"config.json: partial_rotary_factor={rotated} is not supported, only 1.0")
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = original or max_position
    try:
        if kind == "default":
            return RopeSpec(theta=float(theta))
        if kind == "linear":
            return RopeSpec(theta=float(theta), kind=kind, factor=float(scaling["factor"]))
        if kind == "llama3":
            return RopeSpec(
                theta=float(theta),
                kind=kind,
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_len=int(original),
            )
        if kind == "yarn":
            factor = scaling.get("factor") or max_position / original
            return RopeSpec(
                theta=float(theta),
                kind=kind,
                factor=float(factor),
                original_max_len=int(original),
                beta_fast=float(scaling.get("beta_fast") or 32.0),
                beta_slow=float(scaling.get("beta_slow") or 1.0),
                attention_factor=_yarn_attention_factor(scaling, float(factor)),
                truncate=bool(scaling.get("truncate", True)),
            )
    except KeyError as missing:
        raise LoadError(f"config.json: rope scaling of type {kind!r} lacks {missing}") from None
    raise LoadError(f"config.json: rope type {kind!r} is not supported: use default, linear, llama3 or yarn")


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float | None:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return None


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context extension factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
