"""Models from GGUF files: metadata to ModelSpec, quantised tensors to float weights.

Names and conventions: llama.cpp's gguf-py tensor mapping and convert_hf_to_gguf. For the llama architecture that
converter permutes the rows of q and k from half-split to interleaved rotary order; here they are put back.
"""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

import numpy as np

from sparsejax.errors import LoadError
from sparsejax.models.load.assemble import Assembler
from sparsejax.models.load.gguf_reader import GgufFile, GgufTensor
from sparsejax.models.load.progress import bytes_bar
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, RopeSpec, Weights

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_PERMUTED = {"llama"}


def gguf_spec(file: GgufFile, dtype: str) -> ModelSpec:
    """The ModelSpec that a file's metadata describe. Raises LoadError for missing keys and unknown architectures."""
    metadata = file.metadata
    if int(metadata.get("split.count", 1)) > 1:
        raise LoadError(f"{file.path} is one of {metadata['split.count']} parts; merge them (gguf-split --merge) first")
    name = metadata.get("general.architecture", "(none)")
    get_architecture(name)

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if not isinstance(value, (int, float)):
            problem = "is missing" if value is None else f"is {value!r}, expected one number"
            raise LoadError(f"{file.path}: metadata {name}.{key} {problem}")
        return value

    hidden_size, num_q_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden_size // num_q_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise LoadError(f"{file.path}: {name}.{key}={number(key)} differs from the head size {head_dim}")
    for key in ("expert_count", "attention.sliding_window"):
        if number(key, 0):
            raise LoadError(f"{file.path}: {name}.{key}={number(key)} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise LoadError(f"{file.path} holds no token_embd.weight: it is a vocabulary or an adapter, not a model")
    max_model_len = number("context_length")
    return ModelSpec(
        architecture=name,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=number("attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        max_model_len=max_model_len,
        rms_norm_eps=_shortest_float32(number("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, name, head_dim, max_model_len),
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        tie_embeddings="output.weight" not in file.tensors,
        dtype=dtype,
    )


def load_gguf_weights(file: GgufFile, spec: ModelSpec, progress: bool = True) -> Weights:
    """Dequantises every tensor, places it on the device in `spec.dtype`, checks that none is missing or left over."""
    names = {name: _hugging_face_name(name) for name in file.tensors if name != _ROPE_FREQS}
    found = {names[name]: file.tensors[name].shape for name in names}
    assembler = Assembler(spec, found, str(file.path))
    tensors = [tensor for name, tensor in file.tensors.items() if name in names and assembler.wants(names[name])]
    total_bytes = sum(tensor.data.nbytes for tensor in tensors)
    # numpy releases the interpreter lock in its loops, so dequantisation scales over threads; the window bounds memory.
    workers = min(8, os.cpu_count() or 1)
    with (
        bytes_bar(total_bytes, "loading weights", progress) as bar,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        window = 2 * workers
        futures = [pool.submit(_float_tensor, tensor, spec) for tensor in tensors[:window]]
        for index, tensor in enumerate(tensors):
            value = futures[index].result()
            futures[index] = None  # type: ignore[call-overload]
            if index + window < len(tensors):
                futures.append(pool.submit(_float_tensor, tensors[index + window], spec))
            assembler.add(names[tensor.name], value)
            bar.update(tensor.data.nbytes)
    return assembler.finish()


def _float_tensor(tensor: GgufTensor, spec: ModelSpec) -> np.ndarray:
    value = tensor.dequantize()
    if spec.architecture in _PERMUTED:
        if ".attn_q." in tensor.name:
            value = half_split_rows(value, spec.num_q_heads)
        elif ".attn_k." in tensor.name:
            value = half_split_rows(value, spec.num_kv_heads)
    # The device may alias aligned host memory, and the file's pages must not outlive the mapping's owner.
    return np.array(value) if np.may_share_memory(value, tensor.data) else np.ascontiguousarray(value)


def half_split_rows(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from interleaved (2i, 2i + 1) to half-split (i, i + head_dim // 2) rotary order."""
    head_dim = x.shape[0] // num_heads
    return x.reshape(num_heads, head_dim // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def interleaved_rows(x: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `half_split_rows`."""
    head_dim = x.shape[0] // num_heads
    return x.reshape(num_heads, 2, head_dim // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _hugging_face_name(name: str) -> str:
    """The name a slot would have; names this mapping does not know come back as they are, and are reported."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER_NAMES:
        return f"model.layers.{pieces[1]}.{_LAYER_NAMES[pieces[2]]}.{pieces[3]}"
    return name


def _shortest_float32(value: float) -> float:
    """9.999999747378752e-06 -> 1e-05: the decimal that was written before float32 rounded it."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, name: str, head_dim: int, context_length: int) -> RopeSpec:
    metadata = file.metadata
    theta = float(metadata.get(f"{name}.rope.freq_base", 10000.0))
    if _ROPE_FREQS in file.tensors:
        divisors = file.tensors[_ROPE_FREQS].dequantize().astype(np.float64)
        if divisors.shape != (head_dim // 2,):
            raise LoadError(f"{file.path}: {_ROPE_FREQS} has shape {divisors.shape}, expected ({head_dim // 2},)")
        return RopeSpec(theta=theta, kind="divisors", divisors=tuple(divisors.tolist()))
    prefix = f"{name}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    factor = float(metadata.get(prefix + "factor", metadata.get(f"{name}.rope.scale_linear", 1.0)))
    if kind == "yarn":
        original = int(metadata.get(prefix + "original_context_length", context_length))
        # llama.cpp multiplies its own temperature by this factor, which is 1 unless a file says otherwise.
        if float(metadata.get(prefix + "attn_factor", 1.0)) != 1.0:
            raise LoadError(f"{file.path}: {prefix}attn_factor={metadata[prefix + 'attn_factor']} is not supported")
        return RopeSpec(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_len=original,
            beta_fast=float(metadata.get(prefix + "yarn_beta_fast", 32.0)),
            beta_slow=float(metadata.get(prefix + "yarn_beta_slow", 1.0)),
        )
    if kind not in ("none", "linear"):
        raise LoadError(f"{file.path}: rope scaling {kind!r} is not supported: use none, linear or yarn")
    if factor not in (0.0, 1.0):
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    return RopeSpec(theta=theta)
