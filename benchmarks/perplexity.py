"""Perplexity on real text: dense against transformers, and what each sparse method loses for the bytes it saves.

    python -m benchmarks.perplexity                      # compares with benchmarks/golden/perplexity_smollm2.json
    python -m benchmarks.perplexity --peer-python PYTHON # has transformers compute its side again

About 20,000 tokens of public-domain English are cut into windows. For each method the first half of a window is
prefilled and evicted as after any prompt; the second half is then decoded one forced token at a time, all windows as
one batch, through `decode_step`, with selection and eviction as when serving. Scored are the tokens of the second half.
Dense decoding is also scored token by token from the second token of each window on, which is the perplexity of the
whole text.

Bytes are those of the last step, per window: resident are all pages held with their side arrays, read are the KV
rows and page summaries that one step looks at.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.peers import TransformersPeer

GOLDEN = common.ROOT / "benchmarks" / "golden" / "perplexity_smollm2.json"


def methods(budgets: Sequence[int]) -> list[str]:
    """Compositions to score; budgets in tokens kept or read, sinks and recent tokens included."""
    found = ["fp8_kv"]
    for budget in budgets:
        sink, recent = min(64, budget // 8), budget // 4
        middle = budget - sink - recent
        kept = f"sink_keep_tokens={sink},decode_keep_tokens={middle},recent_keep_tokens={recent}"
        window = f"observation_window_size={min(32, recent)}"
        snapkv = f"snapkv({kept},{window},snapkv_decode_eviction=true,decode_eviction_interval={budget // 8})"
        streaming = f"sink_keep_tokens={sink},recent_keep_tokens={budget - sink}"
        found += [
            f"streamingllm({streaming},streamingllm_decode_trigger_ratio=1.125)",
            snapkv,
            f"quest({kept})",
            f"{snapkv}+quest({_halved(budget)})+fp8_kv",
        ]
    return found


def _halved(budget: int) -> str:
    half = budget // 2
    return f"sink_keep_tokens={min(64, half // 8)},decode_keep_tokens={half - min(64, half // 8)},recent_keep_tokens=0"


def perplexity(nll: Sequence[Sequence[float]]) -> float:
    """exp of the mean negative log-likelihood (nats) over all tokens of all windows."""
    count = sum(map(len, nll))
    if not count:
        raise ValueError("no tokens were scored")
    return math.exp(sum(map(math.fsum, nll)) / count)


@dataclasses.dataclass(frozen=True)
class Score:
    """What one method gave: nats of each scored token by window, bytes of the last step per window, seconds in all."""

    nll: list[list[float]]
    resident_bytes: float
    read_bytes: float
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll)


def score(model: Any, method: str, windows: list[list[int]], prompt_tokens: int) -> Score:
    """Scores windows[i][prompt_tokens:], decoded one by one after a prompt of `prompt_tokens`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.rows import Rows
    from sparsejax import registry
    from sparsejax.runner import DeviceRunner
    from sparsejax.state import sequence_page_nbytes

    start = time.perf_counter()
    chosen, storage = registry.resolve(method)
    size, count = len(windows[0]), len(windows)
    geometry = model.spec.geometry(chosen.page_size(chosen.params) or 16, size)
    reasons = chosen.check(chosen.params, geometry)
    if reasons:
        raise SystemExit(f"{method}: " + "; ".join(reasons))
    runner = DeviceRunner(
        model.spec,
        model.weights,
        geometry,
        {method: chosen},
        storage,
        num_rows=count,
        num_sequence_pages=1 + (count + 1) * geometry.max_pages,
        decode_buckets=(count,),
        prefill_buckets=((1, min(512, prompt_tokens)),),
    )

    @jax.jit
    def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
        chosen_logit = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - chosen_logit

    rows = Rows(runner, method)
    ids = np.asarray(windows, np.int32)
    first = [
        loss(rows.prefill(i + 1, window[:prompt_tokens]).logits, ids[i : i + 1, prompt_tokens])
        for i, window in enumerate(windows)
    ]
    losses = [np.concatenate([np.asarray(x) for x in first])]
    numbers = list(range(1, count + 1))
    losses += [
        loss(rows.logits(numbers, ids[:, place].tolist()), ids[:, place + 1])  # type: ignore[arg-type]
        for place in range(prompt_tokens, size - 1)
    ]
    page_bytes = sequence_page_nbytes(geometry, (chosen,), storage) / geometry.head_pages_per_sequence_page
    resident_bytes = rows.used_head_pages * page_bytes / count
    read_bytes = step_bytes(chosen, storage, geometry, rows.length(1))
    nll = np.stack([np.asarray(x) for x in losses], axis=1).astype(np.float64).tolist()
    return Score(nll, resident_bytes, read_bytes, time.perf_counter() - start)


def step_bytes(method: Any, storage: Any, geometry: Any, length: int) -> float:
    """Bytes that a decode step reads of one request's cache: KV rows, and the summaries of all pages if it selects."""
    from sparsejax.arrays import ArraySpec, tree_nbytes

    read = method.rows_read(length, geometry) * storage.bytes_per_token(geometry)
    if method.select is None:
        return read
    specs = [spec for spec in method.aux_specs(geometry).values() if spec.per == "page"]
    page = tree_nbytes([ArraySpec(spec.shape, spec.dtype or geometry.dtype) for spec in specs])
    return read + page * geometry.pages(length) * geometry.head_pages_per_sequence_page


def fingerprint(windows: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(windows).encode()).hexdigest()[:16]


def reference(arguments: argparse.Namespace, model: Any, windows: list[list[int]]) -> dict[str, Any] | None:
    """transformers' nats per window, over all tokens after the first and over the second half."""
    split = len(windows[0]) // 2
    if arguments.peer_python:
        with TransformersPeer(arguments.peer_python, model.path) as peer:
            nll = peer.ask("nll", windows=windows)["nll"]
            found = {
                **{key: peer.facts[key] for key in ("transformers", "torch", "dtype", "attention")},
                "model": model.name,
                "windows": len(windows),
                "window_tokens": len(windows[0]),
                "token_ids_sha256": fingerprint(windows),
                "all_nll": [round(math.fsum(window), 4) for window in nll],
                "second_half_nll": [round(math.fsum(window[split - 1 :]), 4) for window in nll],
            }
        if arguments.write_golden:
            GOLDEN.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        return found
    if GOLDEN.is_file():
        found = json.loads(GOLDEN.read_text("utf-8"))
        if found["token_ids_sha256"] == fingerprint(windows):
            return found
        print("the golden file is for other windows; transformers is left out (--peer-python computes it)")
    return None


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("perplexity", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax; the peer needs a GGUF file")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--peer-python", type=pathlib.Path, help="interpreter with torch, transformers and gguf")
    parser.add_argument("--write-golden", action="store_true", help=f"keep the peer's numbers in {GOLDEN.name}")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--window-tokens", type=int, default=2048)
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 1024], help="tokens kept or read")
    parser.add_argument("--methods", nargs="*", help="compositions to score instead of the usual ones")
    arguments = parser.parse_args(argv)
    if arguments.write_golden and not arguments.peer_python:
        parser.error("--write-golden needs --peer-python")
    run = common.Run("perplexity", arguments)
    result, facts = measure(arguments)
    run.finish(result, **facts)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    from sparsejax.models.load import load_model

    common.use_compilation_cache()
    model = load_model(arguments.model, load_format=arguments.load_format, dtype="float32")
    windows = common.windows(model.tokenizer.encode(common.prose()), arguments.windows, arguments.window_tokens)
    split = arguments.window_tokens // 2
    peer = reference(arguments, model, windows)
    whole = score(model, "dense", windows, 1)
    dense = score(model, "dense", windows, split)
    tail = [window[split - 1 :] for window in whole.nll]
    result: dict[str, Any] = {
        "dense": {
            "perplexity_all": whole.perplexity,
            "perplexity": dense.perplexity,
            "perplexity_token_by_token": perplexity(tail),
            "resident_bytes": dense.resident_bytes,
            "read_bytes": dense.read_bytes,
            "nll": [math.fsum(window) for window in dense.nll],
            "all_nll": [math.fsum(window) for window in whole.nll],
        }
    }
    scored = sum(map(len, dense.nll))
    print(f"{model.name}: {arguments.windows} windows of {arguments.window_tokens} tokens, {scored} scored")
    print(f"dense, all {sum(map(len, whole.nll))} tokens one by one: {whole.perplexity:.4f}")
    print(f"dense, second halves: {dense.perplexity:.4f} after a prefill, {perplexity(tail):.4f} token by token")
    if peer is not None:
        count = arguments.windows * (arguments.window_tokens - 1)
        all_of_it = math.exp(math.fsum(peer["all_nll"]) / count)
        half = math.exp(math.fsum(peer["second_half_nll"]) / scored)
        result["transformers"] = {**peer, "perplexity_all": all_of_it, "perplexity": half}
        result["dense"]["over_transformers_all"] = whole.perplexity / all_of_it
        result["dense"]["over_transformers"] = dense.perplexity / half
        print(f"transformers {peer['transformers']}: {all_of_it:.4f} and {half:.4f}")
        apart = max(abs(whole.perplexity / all_of_it - 1), abs(dense.perplexity / half - 1))
        verdict = "met" if apart <= 0.005 else "missed"
        print(f"dense differs from transformers by {apart:.4%} at most  goal 0.5%: {verdict}")
    rows = [_row("dense", dense, dense)]
    result["methods"] = {}
    for method in methods(arguments.budgets) if arguments.methods is None else arguments.methods:
        found = score(model, method, windows, split)
        result["methods"][method] = {
            "perplexity": found.perplexity,
            "loss": found.perplexity / dense.perplexity - 1,
            "resident_bytes": found.resident_bytes,
            "read_bytes": found.read_bytes,
            "resident_share": found.resident_bytes / dense.resident_bytes,
            "read_share": found.read_bytes / dense.read_bytes,
            "nll": [math.fsum(window) for window in found.nll],
            "seconds": found.seconds,
        }
        rows.append(_row(method, found, dense))
        print(f"  {found.perplexity:.4f}  {method}", flush=True)
    header = ("method", "perplexity", "loss", "resident MB", "of dense", "read MB", "of dense")
    print(common.table(header, rows))
    facts = {
        **common.device_facts(),
        "model": model.name,
        "dtype": model.spec.dtype,
        "scored_tokens": scored,
        "token_ids_sha256": fingerprint(windows),
    }
    return result, facts


def _row(name: str, found: Score, dense: Score) -> list[str]:
    return [
        name,
        f"{found.perplexity:.3f}",
        f"{found.perplexity / dense.perplexity - 1:+.2%}",
        f"{found.resident_bytes / 1e6:.1f}",
        f"{found.resident_bytes / dense.resident_bytes:.0%}",
        f"{found.read_bytes / 1e6:.1f}",
        f"{found.read_bytes / dense.read_bytes:.0%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
