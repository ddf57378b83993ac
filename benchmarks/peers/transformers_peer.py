"""The peer: transformers and torch in float32 on a CPU, driven line by line over standard input and output.

Runs in an environment of its own, which needs torch, transformers and gguf: `PYTHON transformers_peer.py MODEL.gguf`.
Each request is a JSON object on one line, and so is each answer; the first line of output describes the peer.

    {"op": "generate", "prompts": [[ids...], ...], "new_tokens": n} -> {"wall_s", "first_token_s", "token_ids"}
    {"op": "nll", "windows": [[ids...], ...]} -> {"nll": [[-log p of each token after the first], ...]}

Prompts of one request are a batch and must have one length. `generate` is transformers' own, greedy, with its KV cache.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time


class FirstToken:
    """A streamer that notes when the first sampled token came: `put` gets the prompt, then each step's tokens."""

    def __init__(self) -> None:
        self.calls = 0
        self.time_s = 0.0

    def put(self, value) -> None:
        self.calls += 1
        if self.calls == 2:
            self.time_s = time.perf_counter()

    def end(self) -> None:
        pass


class Peer:
    """transformers' model of a GGUF file, dequantised to float32."""

    def __init__(self, path: pathlib.Path) -> None:
        import torch
        import transformers

        self.torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.facts = {
            "peer": "transformers generate, KV cache",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(next(self.model.parameters()).dtype),
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict:
        """Greedy, exactly `new_tokens` for each prompt."""
        torch = self.torch
        ids = torch.tensor(prompts)
        streamer = FirstToken() if len(prompts) == 1 else None  # transformers streams single sequences only
        options = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        with torch.inference_mode():
            start = time.perf_counter()
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=streamer, pad_token_id=0, **options
            )
            end = time.perf_counter()
        return {
            "wall_s": end - start,
            "first_token_s": streamer.time_s - start if streamer else None,
            "token_ids": out[:, ids.shape[1] :].tolist(),
        }

    def nll(self, windows: list[list[int]]) -> dict:
        """Negative log-likelihood in nats of each token after the first, each window in one forward pass."""
        torch = self.torch
        found = []
        with torch.inference_mode():
            for window in windows:
                ids = torch.tensor([window])
                logits = self.model(ids, use_cache=False).logits[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                found.append([round(float(x), 6) for x in loss])
        return {"nll": found}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print must not end up between the answers
    peer = Peer(pathlib.Path(sys.argv[1]))
    print(json.dumps(peer.facts), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        operation = {"generate": peer.generate, "nll": peer.nll}[request.pop("op")]
        print(json.dumps(operation(**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
