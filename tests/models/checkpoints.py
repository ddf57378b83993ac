"""Small checkpoints for loader tests, written in other formats than the golden folders'."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from sparsejax.models.load.gguf_model import interleaved_rows
from sparsejax.models.load.tokenizer import byte_level_alphabet
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec

GOLDEN = pathlib.Path(__file__).parent / "golden"
TINY_FOLDERS = sorted(path.parent for path in GOLDEN.glob("tiny-*/config.json"))
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a Hugging Face checkpoint for `spec`, float32."""
    rng = np.random.default_rng(seed)
    slots = get_architecture(spec.architecture).tensor_slots(spec)
    return {name: rng.normal(0, 0.1, slot.shape).astype(np.float32) for name, slot in slots.items()}


def byte_vocabulary(vocab_size: int = 256) -> list[str]:
    """Byte-level tokens with the control tokens in place of bytes that UTF-8 never uses."""
    tokens = byte_level_alphabet() + [f"<{index}>" for index in range(256, vocab_size)]
    for index, token in enumerate(CONTROL_TOKENS):
        tokens[0xFD + index] = token
    return tokens


_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, index, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_GGUF_LAYER[module]}.{kind}"


def write_gguf(
    path: pathlib.Path,
    spec: ModelSpec,
    tensors: dict[str, np.ndarray],
    *,
    quantised: str | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, object] | None = None,
    tokenizer: dict[str, object] | None = None,
) -> pathlib.Path:
    """A GGUF file as llama.cpp's converter would write it. `quantised` is a type for the matrices, e.g. "Q8_0"."""
    import gguf

    writer = gguf.GGUFWriter(str(path), spec.architecture)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_q_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](key, value)
    tokens = byte_vocabulary(spec.vocab_size)
    kinds = [3 if token in CONTROL_TOKENS else 1 for token in tokens]
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["a b"],
    }
    tokens[tokens.index("<256>") if "<256>" in tokens else 0] = "ab"
    fields |= {"eos_token_id": 0xFF, "chat_template": CHAT_TEMPLATE} | (tokenizer or {})
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(fields["tokens"])
    writer.add_token_types(fields["token_type"])
    if fields["merges"]:
        writer.add_token_merges(fields["merges"])
    if "scores" in fields:
        writer.add_token_scores(fields["scores"])
    writer.add_eos_token_id(fields["eos_token_id"])
    writer.add_chat_template(fields["chat_template"])
    for name, value in tensors.items():
        if spec.architecture == "llama" and ".q_proj." in name:
            value = interleaved_rows(value, spec.num_q_heads)
        elif spec.architecture == "llama" and ".k_proj." in name:
            value = interleaved_rows(value, spec.num_kv_heads)
        if quantised is not None and value.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(gguf_name(name), gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value))
    for name, value in (extra_tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf_folder(
    folder: pathlib.Path, config: dict[str, object], tensors: dict[str, np.ndarray], shards: int = 1
) -> pathlib.Path:
    """config.json, safetensors and a byte-level tokenizer."""
    from safetensors.numpy import save_file

    from sparsejax.models.load.dummy import dummy_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dummy_tokenizer(256).save(folder)
    return folder
