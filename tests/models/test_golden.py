"""The same logits and greedy tokens as transformers with torch (golden/README.md)."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from sparsejax.models.load import LoadedModel, hf_folder, load_model
from sparsejax.models.registry import spec_from_config
from sparsejax.models.spec import ModelSpec, Weights
from tests.models.checkpoints import GOLDEN, TINY_FOLDERS
from tests.models.full_attention import full_logits, greedy_tokens

TOLERANCE = 2e-3


def load_tiny(folder: pathlib.Path, dtype: str = "float32") -> tuple[ModelSpec, Weights, dict[str, np.ndarray]]:
    spec = spec_from_config(hf_folder.read_json(folder / "config.json"), dtype)
    return spec, hf_folder.load_safetensors(folder, spec, progress=False), dict(np.load(folder / "golden.npz"))


@pytest.mark.parametrize("folder", TINY_FOLDERS, ids=lambda folder: folder.name)
def test_tiny_models_equal_transformers(folder: pathlib.Path) -> None:
    spec, weights, golden = load_tiny(folder)
    logits = np.asarray(full_logits(spec, weights, golden["prompt"]))
    assert np.abs(logits - golden["logits"]).max() <= TOLERANCE
    assert greedy_tokens(spec, weights, golden["prompt"], 64) == golden["greedy"].tolist()


@pytest.mark.parametrize("folder", TINY_FOLDERS, ids=lambda folder: folder.name)
def test_bfloat16_stays_near_float32(folder: pathlib.Path) -> None:
    spec, weights, golden = load_tiny(folder, "bfloat16")
    logits = np.asarray(full_logits(spec, weights, golden["prompt"]))
    assert logits.dtype == np.float32
    error = np.sqrt(np.mean(np.square(logits - golden["logits"])))
    assert error < 0.03 * golden["logits"].std()


def test_every_rope_kind_and_architecture_has_golden_data() -> None:
    specs = [load_tiny(folder)[0] for folder in TINY_FOLDERS]
    assert {spec.rope.kind for spec in specs} == {"default", "linear", "llama3", "yarn"}
    assert {spec.architecture for spec in specs} == {"llama", "qwen2", "qwen3"}
    assert {spec.tie_embeddings for spec in specs} == {True, False}


@pytest.mark.parametrize("change", ["rope", "eps", "norm", "bias"])
def test_golden_data_notice_each_part(change: str) -> None:
    """The comparison is worth something only if a small mistake anywhere exceeds the tolerance."""
    import dataclasses

    import jax

    folder = GOLDEN / ("tiny-qwen2" if change == "bias" else "tiny-qwen3" if change == "norm" else "tiny-llama-llama3")
    spec, weights, golden = load_tiny(folder)
    if change == "rope":
        spec = dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, kind="default"))
    elif change == "eps":
        spec = dataclasses.replace(spec, rms_norm_eps=1e-2)
    else:
        name = "qkv_bias" if change == "bias" else "k_norm"
        weights = jax.tree_util.tree_map_with_path(lambda path, x: x * 0.9 if name in str(path) else x, weights)
    assert np.abs(np.asarray(full_logits(spec, weights, golden["prompt"])) - golden["logits"]).max() > 10 * TOLERANCE


@pytest.fixture(scope="module")
def smollm2(default_model: pathlib.Path) -> LoadedModel:
    return load_model(str(default_model), progress=False)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "smollm2.npz"))


@pytest.mark.parametrize("prompt", ["chat", "code", "prose"])
def test_smollm2_equals_transformers(smollm2: LoadedModel, golden: dict[str, np.ndarray], prompt: str) -> None:
    ids, greedy = golden[f"{prompt}/ids"], golden[f"{prompt}/greedy"]
    # With the golden continuation appended, one pass gives the prompt's logits and every greedy choice: each choice
    # depends on the tokens before it only, so all are right if each is right after the ones before.
    # All prompts are padded to one length, for one compilation; causality makes the padding harmless.
    tokens = np.zeros(464, np.int32)
    tokens[: len(ids) + len(greedy)] = np.concatenate([ids, greedy])
    logits = np.asarray(full_logits(smollm2.spec, smollm2.weights, tokens))[: len(ids) + len(greedy)]
    shown = logits[golden[f"{prompt}/positions"]]
    assert np.abs(shown[:, ::16] - golden[f"{prompt}/logits"]).max() <= TOLERANCE
    assert np.abs(shown.max(-1) - golden[f"{prompt}/max"]).max() <= TOLERANCE
    logsumexp = np.log(np.exp(shown - shown.max(-1, keepdims=True)).sum(-1)) + shown.max(-1)
    assert np.abs(logsumexp - golden[f"{prompt}/logsumexp"]).max() <= TOLERANCE
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == greedy.tolist()


def test_smollm2_tokenizer_equals_golden_ids(smollm2: LoadedModel, golden: dict[str, np.ndarray]) -> None:
    texts, expected = json.loads(str(golden["texts"])), json.loads(str(golden["text_ids"]))
    for text, ids in zip(texts, expected, strict=True):
        assert smollm2.tokenizer.encode(text) == ids
        assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
    chat = json.loads(str(golden["chat_messages"]))
    assert smollm2.tokenizer.render_chat(chat) == golden["chat/ids"].tolist()
