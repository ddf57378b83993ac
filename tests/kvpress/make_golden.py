"""What kvpress 0.5.5 keeps of five prompts in SmolLM2-135M-Instruct, float32, as golden data.

    python make_golden.py PATH_OF_THE_GGUF_FILE

The model is read by transformers and run by torch; nothing of this project takes part. Kept rows are read off the
compressed cache (or off the mask, where a press only masks), not off the scores.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import tempfile

import kvpress
import numpy as np
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parent
# Of each file, where the text begins (in characters) and how many tokens the prompt has with its chat prefix.
PROMPTS = {
    "persuasion": ("data/persuasion.txt", 0, 320),
    "persuasion_later": ("data/persuasion.txt", 20_000, 450),
    "opticks": ("data/opticks.txt", 0, 512),
    "license": ("../LICENSE", 0, 389),
    "code": ("models/golden/make_tiny.py", 0, 601),
}
# Rows whose score is this close to the last kept one's, relative to it, may fall on either side: two float32
# implementations of the model differ by up to 2.4e-5 in observed attention.
NEAR = 1e-4
SCORE_STRIDE = 16  # of the score arrays, every so many rows are kept
SNAPKV = [{"window": 64, "budget": 128}, {"window": 32, "budget": 112}]
STREAMINGLLM = [{"sink": 4, "budget": 128}, {"sink": 16, "budget": 100}]
PYRAMIDKV = {"window": 32, "mean_budget": 160, "beta": 4}
OBSERVED = {"budget": 128}
H2O = {"budget": 128, "recent": 64}
KVZIP = {"chunk": 128, "sink": 4, "budget": 160, "previous": 8}
KERNEL = 5


def watched(press):
    """Notes the scores and the keys that a press was given, by layer."""
    press.seen = {}
    score = press.score

    def noting(module, hidden_states, keys, *rest):
        scores = score(module, hidden_states, keys, *rest)
        press.seen[module.layer_idx] = scores[0].clone(), keys[0].clone()
        return scores

    press.score = noting
    return press


def rows_of(kept: torch.Tensor, dense: torch.Tensor) -> np.ndarray:
    """Where the kept keys [rows, dim] are among all of them, bool [all rows]."""
    place = {row.tobytes(): index for index, row in enumerate(dense.numpy())}
    assert len(place) == len(dense), "two rows have equal keys"
    mask = np.zeros(len(dense), bool)
    mask[[place[row.tobytes()] for row in kept.numpy()]] = True
    assert mask.sum() == len(kept)
    return mask


def edge(scores: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between kept and dropped rows of [..., rows]: the gap relative to the last kept score; which rows are near it."""
    last = np.where(kept, scores, np.inf).min(-1, keepdims=True)
    first = np.where(kept, -np.inf, scores).max(-1, keepdims=True)
    return ((last - first) / last)[..., 0].astype(np.float32), np.abs(scores - last) <= NEAR * last


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Which rows of [..., rows] have the `count` best scores, ties to the lower row."""
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, np.argsort(-scores, -1, kind="stable")[..., :count], True, -1)
    return mask


def selection(name: str, kept: np.ndarray, scores: np.ndarray | None = None) -> dict[str, np.ndarray]:
    out = {f"{name}/kept": np.packbits(kept, axis=-1)}
    if scores is not None:
        gap, near = edge(scores, kept)
        assert (gap >= 0).all()
        out |= {f"{name}/gap": gap, f"{name}/near": np.packbits(near, axis=-1)}
    return out


def ratio(budget: float, length: int) -> float:
    return 1 - budget / length


@torch.no_grad()
def run(model, press, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Kept rows and scores, [layers, kv_heads, rows] both."""
    cache = transformers.DynamicCache()
    with watched(press)(model):
        model.model(input_ids=ids, past_key_values=cache)
    kept, scores = [], []
    for layer, stored in enumerate(cache.layers):
        score, dense = press.seen[layer]
        kept.append([rows_of(*pair) for pair in zip(stored.keys[0], dense, strict=True)])
        scores.append(score.numpy())
    return np.asarray(kept), np.asarray(scores)


@torch.no_grad()
def run_kvzip(model, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Rows that the press leaves unmasked with one ratio per layer, its scores, the replays."""
    press = kvpress.KVzipPress(ratio(KVZIP["budget"], ids.shape[1]), True, KVZIP["sink"], False, KVZIP["chunk"])
    noted = {}
    prepare, compress = press.prepare, press.compress_post

    def preparing(*args):
        pairs = prepare(*args)
        noted["replays"] = [replay[0].tolist() for _, replay in pairs]
        assert press.prefix_length == 0
        return pairs

    def compressing(model):
        noted["scores"] = press.score_val[:, 0].numpy().copy()
        compress(model)

    press.prepare, press.compress_post = preparing, compressing
    with press(model):
        model.model(input_ids=ids, past_key_values=transformers.DynamicCache())
    kept = np.ones(noted["scores"].shape, bool)
    for layer, block in enumerate(model.model.layers):
        _, heads, rows = block.self_attn.masked_key_indices
        kept[layer, heads, rows] = False
        block.self_attn.masked_key_indices = None
    return kept, noted["scores"], noted["replays"]


def golden(name: str, ids: list[int], eager, sdpa) -> dict[str, np.ndarray]:
    tokens, length = torch.tensor([ids]), len(ids)
    out = {f"{name}/ids": np.asarray(ids, np.int32)}
    for case in STREAMINGLLM:
        press = kvpress.StreamingLLMPress(ratio(case["budget"] + 0.5, length), n_sink=case["sink"])
        kept, _ = run(sdpa, press, tokens)
        assert (kept == kept[:1, :1]).all()
        out |= selection(f"{name}/streamingllm{case['sink']}", kept[0, 0])
    for case in SNAPKV:
        press = kvpress.SnapKVPress(ratio(case["budget"] + 0.5, length), case["window"], KERNEL)
        kept, scores = run(sdpa, press, tokens)
        given, _ = run(eager, press_again(press), tokens)
        print(f"  snapkv {case}: eager differs in {(given != kept).sum()} of {kept.size} rows")
        out |= selection(f"{name}/snapkv{case['window']}", kept, scores)
    press = kvpress.PyramidKVPress(
        ratio(PYRAMIDKV["mean_budget"], length), PYRAMIDKV["window"], KERNEL, PYRAMIDKV["beta"]
    )
    kept, scores = run(sdpa, press, tokens)
    assert (kept.sum(-1) == kept.sum(-1)[:, :1]).all()
    out |= selection(f"{name}/pyramidkv", kept, scores)
    out[f"{name}/pyramidkv/budgets"] = kept.sum(-1)[:, 0].astype(np.int32)

    kept, scores = run(eager, kvpress.ObservedAttentionPress(ratio(OBSERVED["budget"] + 0.5, length)), tokens)
    out |= selection(f"{name}/observed", kept, scores)
    out[f"{name}/observed/scores"] = scores[..., ::SCORE_STRIDE]
    # The same scores before the division by the number of queries that see a row, and summed over the group: heavy
    # hitters among all but the recent rows, which stay too.
    group = eager.config.num_attention_heads // eager.config.num_key_value_heads
    sums = (scores * np.arange(length, 0, -1, dtype=np.float32) * group)[..., : length - H2O["recent"]]
    heavy = best(sums, H2O["budget"] - H2O["recent"])
    gap, near = edge(sums, heavy)
    recent = [(0, 0), (0, 0), (0, H2O["recent"])]
    out |= {
        f"{name}/h2o/kept": np.packbits(np.pad(heavy, recent, constant_values=True), axis=-1),
        f"{name}/h2o/gap": gap,
        f"{name}/h2o/near": np.packbits(np.pad(near, recent), axis=-1),
    }

    kept, scores, replays = run_kvzip(sdpa, tokens)
    out[f"{name}/kvzip/replays"] = np.concatenate(replays).astype(np.int32)
    out[f"{name}/kvzip/replay_lengths"] = np.asarray([len(replay) for replay in replays], np.int32)
    out[f"{name}/kvzip/scores"] = scores[..., ::SCORE_STRIDE].copy()
    scores[..., : KVZIP["sink"]] = scores.max() + 1  # as the press does before it chooses
    # The press chooses among all heads of a layer at once; the other set has equally many rows in every head.
    flat = selection(f"{name}/kvzip_by_layer", kept.reshape(len(kept), -1), scores.reshape(len(scores), -1))
    return out | flat | selection(f"{name}/kvzip", best(scores, KVZIP["budget"]), scores)


def press_again(press):
    return type(press)(press.compression_ratio, press.window_size, press.kernel_size)


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers ignores the file's pre-tokenizer name "smollm": single digits, as in the original.
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(False, use_regex=True)]
    )
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation=attention
        ).eval()
        for attention in ("eager", "sdpa")
    ]
    marker = "dummy"
    prefix = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False).split(marker)[0]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer.chat_template = None  # KVzipPress replays all but a template's prefix, the member all
        tokenizer.save_pretrained(folder)
        for model in models:
            model.config._name_or_path = folder  # where KVzipPress looks for the tokenizer
        arrays = {}
        for name, (file, start, length) in PROMPTS.items():
            text = (TESTS / file).resolve().read_text("utf-8")[start:]
            ids = tokenizer(prefix + text, add_special_tokens=False).input_ids[:length]
            assert len(ids) == length
            print(f"{name}: {length} tokens: {tokenizer.decode(ids)[-60:]!r}")
            arrays |= golden(name, ids, *models)
    settings = {
        "snapkv": SNAPKV,
        "streamingllm": STREAMINGLLM,
        "pyramidkv": PYRAMIDKV,
        "observed": OBSERVED,
        "h2o": H2O,
        "kvzip": KVZIP,
        "kernel": KERNEL,
        "score_stride": SCORE_STRIDE,
        "prompts": list(PROMPTS),
    }
    arrays["settings"] = np.asarray(json.dumps(settings))
    np.savez_compressed(HERE / "kvpress.npz", **arrays)


if __name__ == "__main__":
    main()
