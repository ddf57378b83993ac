"""What eviction costs: scores of a long prompt's rows, the choice, and the move of those that stay, layer by layer.

    python -m benchmarks.eviction_cost --json
    python -m benchmarks.eviction_cost --sweep        # how the score kernels are best launched

One prompt of `--context` tokens is compacted to `--keep` by `snapkv`. Parts are timed alone, all layers in one program:
"lse" and "mass" (the two passes of probability mode), "logits" (the one pass of logits mode), "choice" (the best rows,
ascending) and "move" (every array of the pool, in place). "compaction" is the engine's own program with all of it.
Times are per layer. The floor is what must be moved at the bandwidth of a device copy of this run: keys once for each
pass, kept rows twice (read and written), scores once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, kernels, step_timing
from benchmarks.decode_attention import kilo, random_rows, timed
from benchmarks.sparse_attention import judge

Sides = dict[str, tuple[Callable[[], float], int]]
SWEEP = (
    *((64, 128, 4, stages, programs) for stages in (2, 3, 4) for programs in (1, 2, 3, 4)),
    *((64, 128, 8, 3, programs) for programs in (1, 2, 3)),
    *((128, 128, 8, stages, programs) for stages in (2, 3) for programs in (1, 2)),
    *((32, 128, 4, 4, programs) for programs in (2, 4)),
    *((64, 64, 4, stages, programs) for stages in (3, 4) for programs in (2, 4)),
)
"""What `--sweep` tries: block rows, columns of queries, warps, stages, programs per multiprocessor."""


class Prompt:
    """A KV state that holds one prompt of random rows, as row 1, and pages for what will stay of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from sparsejax import registry
        from sparsejax.geometry import Geometry
        from sparsejax.state import POSITIONS, StateSize, empty_state

        self.arguments, a = arguments, arguments
        heads = a.heads * a.group, a.heads, a.dim
        self.geometry = Geometry(a.layers, *heads, a.page, a.context, a.dim**-0.5, "bfloat16")
        edge = max(1, min(512, a.keep // 4))
        self.knobs = {
            "sink_keep_tokens": edge // 8,
            "recent_keep_tokens": edge,
            "decode_keep_tokens": a.keep - edge - edge // 8,
            "observation_window_size": a.window,
        }
        self.method, self.storage = registry.resolve(f"snapkv+{a.storage}" if a.storage != "plain" else "snapkv")
        self.method = self.with_mode("logits")
        used, new = self.geometry.pages(a.context), self.geometry.pages(a.keep)
        num_pages = 1 + used + new
        state = empty_state(self.geometry, StateSize(1, num_pages, 8), (self.method,), self.storage)
        order = np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32) + 1
        self.table = np.zeros(state.tables["sequence"].shape, np.int32)
        self.table[0, 0, 1, :used] = order[:used]
        self.new_pages = order[None, None, used:]
        self.lengths = np.zeros(state.lengths["sequence"].shape, np.int32)
        self.lengths[0, 0, 1] = a.context
        keys = jax.random.split(jax.random.key(0), 8)
        num_head_pages = num_pages * self.geometry.head_pages_per_sequence_page
        pools = {}
        for i, (name, spec) in enumerate(self.storage.payload(self.storage.params, self.geometry).items()):
            pools[name] = random_rows(keys[i], num_head_pages, spec)
        pools[POSITIONS] = state.pools[POSITIONS]
        row_aux = {
            name: jax.random.normal(keys[7], array.shape, jnp.float32).astype(array.dtype)
            for name, array in state.row_aux.items()
        }
        positions = jnp.asarray([0, a.context], jnp.int32)
        self.state = state.replace(pools=pools, row_aux=row_aux, positions=positions)
        self.names = tuple(name for name in pools if name != POSITIONS)

    def with_mode(self, mode: str) -> Any:
        from sparsejax import registry

        knobs = {**self.knobs, "sparse_prefill_score_mode": mode, "softmax_domain": "all"}
        return registry.resolve("snapkv", knobs)[0]

    @property
    def key_bytes(self) -> int:
        return self._bytes(name for name in self.names if name.startswith("k")) * self.arguments.context

    @property
    def moved_bytes(self) -> int:
        return 2 * self._bytes(self.state.pools) * self.arguments.keep

    @property
    def score_bytes(self) -> int:
        return 4 * self.arguments.context

    def _bytes(self, names: Any) -> int:
        """Of one row of all heads of a layer."""
        pools = self.state.pools
        return sum(pools[name].nbytes // (pools[name].shape[0] * pools[name].shape[1]) for name in names) * (
            self.geometry.num_kv_heads
        )

    def view(self, layer: Any, table: Any, rows: int) -> Any:
        import jax.numpy as jnp

        from sparsejax.geometry import Granularity
        from sparsejax.state import layer_view

        lengths = jnp.full((1, 1, 1), rows, jnp.int32)
        return layer_view(self.geometry, Granularity.SEQUENCE, table[:, :, 1:2], lengths, layer)

    def target(self, layer: Any, table: Any) -> Any:
        """The view of the new pages, whose ids are `table` [1, 1, columns]."""
        import jax.numpy as jnp

        columns = jnp.zeros((1, 1, 2, self.geometry.max_pages), jnp.int32)
        return self.view(layer, columns.at[:, :, 1, : table.shape[2]].set(table), self.arguments.keep)

    def how(self, layer: Any) -> dict[str, Any]:
        def load_tile(tiles, layer):
            return self.storage.load_tile(self.storage.params, self.geometry, tiles, layer)

        return {"load_tile": load_tile, "layer": layer, "scale": self.geometry.scale}


def score_sides(prompt: Prompt, implementation: str, config: Any = None) -> Sides:
    """The passes over the keys. `config` launches the Triton kernels."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.row_scores import triton_gpu

    a = prompt.arguments
    limit = (a.context - a.window + 1 + jnp.arange(a.window, dtype=jnp.int32))[None, None]
    [queries] = [array[:, 1:2] for array in prompt.state.row_aux.values()]  # [layers, 1, window, q_heads, dim]
    layers = jnp.arange(a.layers, dtype=jnp.int32)

    def rows(layer, q, pools, table):
        return q, pools, prompt.names, prompt.view(layer, table, a.context), limit

    def lse(layer, q, pools, table, _):
        if config is not None:
            return triton_gpu.attention_lse(*rows(layer, q, pools, table), 0, *prompt.how(layer).values(), config)
        return api.attention_lse(*rows(layer, q, pools, table), **prompt.how(layer), implementation=implementation)

    def votes(layer, q, pools, table, lse):
        if config is not None:
            how = prompt.how(layer).values()
            return triton_gpu.row_scores(*rows(layer, q, pools, table), lse, "max", *how, config).max(1)
        how = {**prompt.how(layer), "implementation": implementation}
        return api.row_scores(*rows(layer, q, pools, table), lse=lse, group="max", **how).max(1)

    def all_layers(one):
        def run(queries, pools, table, lses):
            return jax.lax.map(lambda each: one(each[0], each[1], pools, table, each[2]), (layers, queries, lses))

        return run

    table, pools = jnp.asarray(prompt.table), prompt.state.pools
    none = jnp.zeros((a.layers, 1, a.window, a.heads * a.group), jnp.float32)
    lses = jax.jit(all_layers(lse))(queries, pools, table, none)

    def logits(layer, q, pools, table, _):
        return votes(layer, q, pools, table, None)

    given = {"lse": (lse, none), "mass": (votes, lses), "logits": (logits, none)}
    return {
        name: (timed(all_layers(one), (queries, pools, table, last), a.layers), a.layers)
        for name, (one, last) in given.items()
    }


def choice_side(prompt: Prompt, implementation: str) -> Sides:
    import jax
    import jax.numpy as jnp

    from sparsejax import eviction

    a, params = prompt.arguments, prompt.method.params
    width = prompt.geometry.max_pages * a.page
    scores = jax.random.normal(jax.random.key(5), (a.layers, 1, width), jnp.float32)

    def run(scores):
        how = {"first": params.sink_keep_tokens, "recent": params.recent_keep_tokens, "implementation": implementation}
        return jax.lax.map(lambda one: eviction.choose_rows(one, jnp.int32(a.context), a.keep, **how), scores)

    return {"choice": (timed(run, (scores,), a.layers), a.layers)}


def move_side(prompt: Prompt, implementation: str) -> Sides:
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api

    a = prompt.arguments
    noise = jax.random.uniform(jax.random.key(6), (a.layers, 1, a.context))
    kept = jnp.sort(jax.lax.top_k(noise, a.keep)[1], axis=-1)[:, None].astype(jnp.int32)  # [layers, 1, 1, keep]

    def run(pools, kept, table, new):
        def move(layer, pools):
            source, target = prompt.view(layer, table, a.context), prompt.target(layer, new)
            return api.move_rows(pools, kept[layer], source, target, implementation=implementation)

        return jax.lax.fori_loop(0, a.layers, move, dict(pools))

    rest = kept, jnp.asarray(prompt.table), jnp.asarray(prompt.new_pages)
    program = jax.jit(run, donate_argnums=0).lower(prompt.state.pools, *rest).compile()

    def step() -> Any:
        prompt.state = prompt.state.replace(pools=program(prompt.state.pools, *rest))
        return prompt.state

    return {"move": (repeated(step, a.layers), a.layers)}


def compaction_side(prompt: Prompt, implementation: str, mode: str) -> Sides:
    import jax.numpy as jnp

    from sparsejax import steps
    from sparsejax.models.spec import ModelSpec

    a = prompt.arguments
    spec = ModelSpec("llama", 8, a.heads * a.group * a.dim, 8, a.layers, a.heads * a.group, a.heads, a.dim, a.context)
    statics = steps.Statics(spec, prompt.geometry, prompt.with_mode(mode), prompt.storage, implementation)
    kept = jnp.full((1, 1), a.keep, jnp.int32)
    inputs = steps.MaintainInputs(jnp.int32(1), kept, jnp.asarray(prompt.new_pages), jnp.int32(a.context))

    def step() -> Any:
        tables, lengths = {"sequence": jnp.asarray(prompt.table)}, {"sequence": jnp.asarray(prompt.lengths)}
        state = prompt.state.replace(tables=tables, lengths=lengths)
        prompt.state = steps.maintain_step(statics, state, inputs, phase="prompt", kept=a.keep)
        return prompt.state

    return {f"compaction, {mode}": (repeated(step, a.layers), a.layers)}


def repeated(step: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Measures seconds per call once; `step` makes `calls` calls on the donated state it returns."""
    import jax

    jax.block_until_ready(step())
    repeats = max(3, 64 // calls)

    def measure() -> float:
        start, out = time.perf_counter(), None
        for _ in range(repeats):
            out = step()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (repeats * calls)

    return measure


def sweep(prompt: Prompt, bandwidth: float) -> None:
    """Prints every launch configuration of the score kernels, the best of each pass first."""
    from sparsejax.pallas_kernels.row_scores import triton_gpu

    default = triton_gpu.default_config(prompt.arguments.dim, 2)
    found: dict[str, list[Any]] = {}
    for config in {triton_gpu.Config(*launch) for launch in SWEEP} | {default}:
        try:
            sides = score_sides(prompt, "triton", config)
        except Exception as error:  # too much shared memory, for one: not a configuration for this device
            print(f"{config}: {type(error).__name__}", flush=True)
            continue
        for name, (measure, calls) in sides.items():
            seconds = statistics.median(measure() for _ in range(5))
            found.setdefault(name, []).append((kernels.device_seconds(measure, calls) or seconds, seconds, config))
    for name, entries in found.items():
        for device, seconds, config in sorted(entries, key=lambda one: one[0]):
            times = f"device {device * 1e6:.1f} us, clock {seconds * 1e6:.1f} us"
            share = f"{prompt.key_bytes / bandwidth / device:.2f} of the floor"
            print(f"{name}: {times}, {share}, {config}{' (default)' if config == default else ''}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser("eviction_cost", (__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--keep", type=int, default=8192, help="tokens that stay")
    parser.add_argument("--window", type=int, default=32, help="queries that vote")
    parser.add_argument("--page", type=int, default=64, help="page size")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--dim", type=int, default=128, help="head size")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--storage", choices=("plain", "fp8_kv"), default="plain", help="how rows are stored")
    parser.add_argument("--implementation", default="auto", help="of ours")
    parser.add_argument("--xla", action="store_true", help="also the portable path")
    parser.add_argument("--no-device-times", dest="device_times", action="store_false", help="make no traces")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each side, in turn")
    parser.add_argument("--sweep", action="store_true", help="look for the best launch of the score kernels instead")
    arguments = parser.parse_args(argv)
    if not 8 <= arguments.keep < arguments.context:
        raise SystemExit("--keep must be at least 8 and below --context")
    if arguments.window > arguments.context:
        raise SystemExit("--window must not be above --context")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run = common.Run("eviction_cost", arguments)
    bandwidth = step_timing.device_bandwidths(None)["measured"]
    prompt = Prompt(arguments)
    if arguments.sweep:
        sweep(prompt, bandwidth)
        return 0
    found: dict[str, Any] = {}
    for name in [arguments.implementation, *(["xla"] if arguments.xla else [])]:
        # Programs that donate the pools come last: the others hold on to those they were given.
        sides = score_sides(prompt, name) | choice_side(prompt, name)
        nbytes = dict.fromkeys(sides, prompt.key_bytes) | {"choice": prompt.score_bytes}
        title = f"{kilo(arguments.keep)} of {kilo(arguments.context)} rows, {name}"
        first = judge(f"{title}: choosing", sides, nbytes, "logits", bandwidth, arguments)
        del sides
        sides = move_side(prompt, name)
        for mode in ("logits", "probability"):
            sides |= compaction_side(prompt, name, mode)
        nbytes = {
            "move": prompt.moved_bytes,
            "compaction, logits": prompt.key_bytes + prompt.moved_bytes,
            "compaction, probability": 2 * prompt.key_bytes + prompt.moved_bytes,
        }
        second = judge(f"{title}: moving, and all of it", sides, nbytes, "move", bandwidth, arguments)
        del sides
        found[name] = {"choosing": first, "moving": second}
        for mode in ("logits", "probability"):
            seconds = second[f"compaction, {mode}"]["seconds"]["median"] * arguments.layers
            found[name][f"all_layers_{mode}_s"] = seconds
            print(f"all {arguments.layers} layers, {mode}: {seconds * 1e3:.2f} ms")
    facts = common.device_facts() | {"q_heads": arguments.heads * arguments.group, "kv_heads": arguments.heads}
    run.finish({"copy_bytes_per_s": bandwidth, **found}, **facts, head_dim=arguments.dim, dtype="bfloat16")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
