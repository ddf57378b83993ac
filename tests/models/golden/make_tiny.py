"""Makes tiny random checkpoints with transformers, and their logits and greedy tokens with torch, beside this file."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
PROMPT_TOKENS, GREEDY_TOKENS, MIN_LEAD = 48, 64, 0.02
COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA, QWEN2, QWEN3 = transformers.LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config
CHECKPOINTS = {
    "tiny-llama": (LLAMA, {"tie_word_embeddings": False}),
    "tiny-llama-linear": (
        LLAMA,
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "tiny-llama-llama3": (
        LLAMA,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "tiny-llama-yarn": (
        LLAMA,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "tiny-qwen2": (
        QWEN2,
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "tiny-qwen3": (
        QWEN3,
        {
            "tie_word_embeddings": False,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}


def make_model(config: transformers.PreTrainedConfig, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts norms at 1 and biases at 0, which would hide mistakes
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


@torch.no_grad()
def golden(model: torch.nn.Module, seed: int) -> tuple[dict[str, np.ndarray], float]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 256, (1, PROMPT_TOKENS), generator=generator)
    logits = model(tokens).logits[0].numpy()
    greedy, lead = [], np.inf
    for _ in range(GREEDY_TOKENS):
        last = model(tokens).logits[0, -1]
        best = torch.topk(last, 2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        tokens = torch.cat([tokens, best.indices[:1][None]], dim=1)
    prompt = tokens[0, :PROMPT_TOKENS].numpy().astype(np.int32)
    return {"prompt": prompt, "logits": logits, "greedy": np.asarray(greedy, np.int32)}, lead


def main() -> None:
    for name, (config_class, settings) in CHECKPOINTS.items():
        config = config_class(**(COMMON | settings))
        for seed in range(1000):
            model = make_model(config, seed)
            data, lead = golden(model, seed)
            if lead >= MIN_LEAD and len(set(data["greedy"].tolist())) > 8:
                break
        else:
            raise SystemExit(f"{name}: no seed has a clear greedy continuation")
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        shard = "150KB" if name == "tiny-qwen3" else "5GB"
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
        np.savez_compressed(folder / "golden.npz", **data)
        spread = float(data["logits"].std())
        distinct = len(set(data["greedy"].tolist()))
        print(f"{name}: seed {seed}, least lead {lead:.3f}, deviation of logits {spread:.2f}, {distinct} tokens")


if __name__ == "__main__":
    main()
