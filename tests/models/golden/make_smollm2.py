"""Golden data of SmolLM2-135M-Instruct from its GGUF file, read by transformers and run by torch in float32.

    python make_smollm2.py PATH_OF_THE_GGUF_FILE

Neither this project's GGUF reader, nor its layers take part; of the tokenizer only the way of splitting digits is ours.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent.parent / "data"
GREEDY_TOKENS, VOCAB_STRIDE, MIN_LEAD = 64, 16, 0.005
CHAT = [
    {"role": "system", "content": "You are a terse geography teacher."},
    {"role": "user", "content": "What is the capital of France, and which river runs through it?"},
]
CODE = '''def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
'''
TEXTS = [
    "Hello, world!",
    "In 1789, 26 people paid $1,234.56 for 7 loaves.",
    "  leading spaces and\ttabs\nnew lines\r\n\r\n   \n",
    "naïve café — “quoted” … 100°C ½",
    "日本語のテキスト 中文 한국어 עברית العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 🤖",
    "I'm you're it's WE'LL don't",
    "for(int i=0;i<10;i++){x[i]+=0x1F;}//done",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|>",
    "e\u0301 ﬁ ﷺ \u00a0\u200b\ufeff|",
    "",
    " ",
    "a" * 300,
]


def prompts(tokenizer) -> dict[str, list[int]]:
    prose = (DATA / "persuasion.txt").read_text("utf-8")
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    return {
        "chat": tokenizer(chat, add_special_tokens=False).input_ids,
        "code": tokenizer(CODE, add_special_tokens=False).input_ids,
        "prose": tokenizer(prose, add_special_tokens=False).input_ids[:400],
    }


@torch.no_grad()
def golden(model, ids: list[int]) -> tuple[dict[str, np.ndarray], float]:
    tokens = torch.tensor([ids])
    logits = model(tokens).logits[0]
    positions = np.asarray(sorted({0, 1, 20, len(ids) // 2, 200, len(ids) - 1}))
    positions = positions[positions < len(ids)]
    greedy, lead = [], np.inf
    state = model(tokens, use_cache=True)
    for _ in range(GREEDY_TOKENS):
        best = torch.topk(state.logits[0, -1], 2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        state = model(best.indices[:1][None], past_key_values=state.past_key_values, use_cache=True)
    return {
        "ids": np.asarray(ids, np.int32),
        "positions": positions.astype(np.int32),
        "logits": logits[positions, ::VOCAB_STRIDE].numpy(),
        "max": logits[positions].max(-1).values.numpy(),
        "logsumexp": torch.logsumexp(logits[positions], -1).numpy(),
        "greedy": np.asarray(greedy, np.int32),
    }, lead


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers 5.24 ignores the file's pre-tokenizer name "smollm": single digits, as in the original.
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(False, use_regex=True)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    arrays = {}
    for name, ids in prompts(tokenizer).items():
        data, lead = golden(model, ids)
        print(f"{name}: {len(ids)} tokens, least lead {lead:.3f}: {tokenizer.decode(data['greedy'])!r}")
        if lead < MIN_LEAD:
            raise SystemExit(f"{name}: the continuation is not clear enough; choose another prompt")
        arrays |= {f"{name}/{key}": value for key, value in data.items()}
    arrays["texts"] = np.asarray(json.dumps(TEXTS))
    arrays["text_ids"] = np.asarray(json.dumps([tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]))
    arrays["chat_messages"] = np.asarray(json.dumps(CHAT))
    np.savez_compressed(HERE / "smollm2.npz", **arrays)


if __name__ == "__main__":
    main()
