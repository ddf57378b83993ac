"""Random weights from a config alone, for benchmarks and tests of speed and memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.arrays import ArraySpec, is_spec
from sparsejax.errors import LoadError
from sparsejax.models.load.hf_folder import CONFIG, read_json
from sparsejax.models.load.tokenizer import Tokenizer, byte_level_alphabet, import_transformers
from sparsejax.models.registry import get_architecture, spec_from_config
from sparsejax.models.spec import ModelSpec, RopeSpec, Weights

_LLAMA31_ROPE = RopeSpec(
    theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
)
# vocab, hidden, intermediate, layers, query heads, KV heads, head size, window
_SHAPES: dict[str, tuple[str, tuple[int, ...], dict]] = {
    "llama-3-8b": ("llama", (128256, 4096, 14336, 32, 32, 8, 128, 8192), {"rope": RopeSpec(theta=500000.0)}),
    "llama-3.1-8b": ("llama", (128256, 4096, 14336, 32, 32, 8, 128, 131072), {"rope": _LLAMA31_ROPE}),
    "llama-3.2-1b": (
        "llama",
        (128256, 2048, 8192, 16, 32, 8, 64, 131072),
        {"rope": dataclasses.replace(_LLAMA31_ROPE, factor=32.0), "tie_embeddings": True},
    ),
    "smollm2-135m": (
        "llama",
        (49152, 576, 1536, 30, 9, 3, 64, 8192),
        {"rope": RopeSpec(theta=100000.0), "tie_embeddings": True},
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        (151936, 896, 4864, 24, 14, 2, 64, 32768),
        {"rope": RopeSpec(theta=1e6), "rms_norm_eps": 1e-6, "tie_embeddings": True},
    ),
    "qwen2.5-7b": (
        "qwen2",
        (152064, 3584, 18944, 28, 28, 4, 128, 32768),
        {"rope": RopeSpec(theta=1e6), "rms_norm_eps": 1e-6},
    ),
    "qwen3-0.6b": (
        "qwen3",
        (151936, 1024, 3072, 28, 16, 8, 128, 40960),
        {"rope": RopeSpec(theta=1e6), "rms_norm_eps": 1e-6, "tie_embeddings": True},
    ),
    "qwen3-8b": (
        "qwen3",
        (151936, 4096, 12288, 36, 32, 8, 128, 40960),
        {"rope": RopeSpec(theta=1e6), "rms_norm_eps": 1e-6},
    ),
    "tiny-llama": ("llama", (256, 64, 128, 2, 4, 2, 16, 512), {}),
    "tiny-qwen2": ("qwen2", (256, 64, 128, 2, 4, 2, 16, 512), {"tie_embeddings": True}),
    "tiny-qwen3": ("qwen3", (256, 64, 128, 2, 4, 2, 32, 512), {"tie_embeddings": True}),
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Bytes that never occur in UTF-8 lend their ids to the control tokens, so 256 ids are enough for any text.
_CONTROL_IDS = {"<|endoftext|>": 0xFF, "<|im_start|>": 0xFE, "<|im_end|>": 0xFD}


DEFAULT = "smollm2-135m"


def dummy_names() -> tuple[str, ...]:
    """Names of the built-in configs."""
    return tuple(_SHAPES)


def dummy_spec(model: str, dtype: str) -> ModelSpec:
    """The ModelSpec of a built-in config, a folder with config.json, or a config.json file."""
    if model in _SHAPES:
        architecture, sizes, rest = _SHAPES[model]
        shape: tuple[Any, ...] = sizes
        return ModelSpec(
            architecture, *shape, qkv_bias=architecture == "qwen2", qk_norm=architecture == "qwen3", dtype=dtype, **rest
        )
    path = pathlib.Path(model).expanduser()
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise LoadError(
            f"load format dummy needs a config: {model} is neither a folder with {CONFIG}, nor a {CONFIG} file,"
            f" nor one of {', '.join(_SHAPES)}"
        )
    return spec_from_config(read_json(path), dtype)


def dummy_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    """Random weights, made on the device: the same for the same spec and seed. Norms are 1, biases are small.

    Matrices are normal with variance 1 / fan-in (the residual stream then grows slowly and logits spread).
    """
    specs = get_architecture(spec.architecture).weight_specs(spec)
    flat, tree = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    root = jax.random.key(seed)
    arrays = [_random_array(jax.random.fold_in(root, index), path, array) for index, (path, array) in enumerate(flat)]
    return jax.tree.unflatten(tree, arrays)


def _random_array(key: jax.Array, path: tuple, array: ArraySpec) -> jax.Array:
    name = str(path[-1].key)
    if name.endswith("norm"):
        return jnp.ones(array.shape, array.dtype)
    fan_in = array.shape[1] if name == "embed" else array.shape[0]
    scale = 0.1 if name.endswith("bias") else 1.0 / math.sqrt(fan_in)
    return _scaled_normal(key, array.shape, array.dtype, scale)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scaled_normal(key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    # Drawn in the target dtype: no float32 copy of a large matrix.
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def dummy_tokenizer(vocab_size: int, chat_template: str | None = None) -> Tokenizer:
    """A tokenizer of one id per byte, for models with random weights. Ids from 256 on decode to "<id>"."""
    transformers = import_transformers()
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    if vocab_size < 256:
        raise LoadError(f"load format dummy needs vocab_size of at least 256 for its byte tokenizer, got {vocab_size}")
    pieces = [*byte_level_alphabet(), *(f"<{index}>" for index in range(256, vocab_size))]
    for token, index in _CONTROL_IDS.items():
        pieces[index] = token
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CONTROL_IDS])
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    hf.chat_template = _CHAT_TEMPLATE
    return Tokenizer(hf, [_CONTROL_IDS["<|endoftext|>"]], chat_template)
