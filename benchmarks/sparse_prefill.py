"""Block-sparse prefill attention against dense: the operation with all that finds its blocks, and whole prefills.

    python -m benchmarks.sparse_prefill --json
    python -m benchmarks.sparse_prefill --parts operation      # the attention of one layer, part by part
    python -m benchmarks.sparse_prefill --parts model --methods dense sparse h2o_prefill

Queries, keys and weights are random, so nothing says how sparse attention to them is; the threshold is chosen. For the
operation, pages of keys get a random direction of their own. Energies are measured first, in the model's case over all
layers and chunks of a dense prefill, and the threshold is the least one with which `--density` of the (tile, block)
pairs that are seen would be read. What is then read is measured in a run that is not timed, and stated.

TTFT is that of one request driven by the engine's scheduler, from `add` to its token on the host. `--methods` are
compositions; "sparse" stands for `flashprefill_v2` with the threshold found.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common, quiet, step_timing
from benchmarks.decode_attention import kilo
from benchmarks.prefill_attention import timed
from benchmarks.step_timing import MODELS

BINS = 8192
SPARSE = "sparse"
OPERATION_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """A chunk of queries after so many rows of history, in tokens."""

    chunk: int
    history: int

    def __str__(self) -> str:
        return f"{kilo(self.chunk)} after {kilo(self.history)}" if self.history else f"whole {kilo(self.chunk)}"


class Counts:
    """Numbers that programs report as they run, summed; reading them waits for the programs."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}

    def add(self, name: str, values: Any) -> None:
        """Traced: reports an array of integers."""
        import jax

        jax.debug.callback(functools.partial(self._note, name), values)

    def _note(self, name: str, values: Any) -> None:
        import numpy as np

        self._sums[name] = self._sums.get(name, 0) + np.asarray(values, np.int64)

    def take(self) -> dict[str, Any]:
        import jax

        jax.effects_barrier()
        found, self._sums = self._sums, {}
        return found


def note_energies(counts: Counts, rules: Any, context: Any) -> None:
    """Traced: reports how many blocks are seen, read whatever their energy, and of the others how many in each bin."""
    import jax.numpy as jnp

    from sparsejax.methods import flashprefill_v2 as sparse

    keys, _ = sparse.block_means(context, rules.block_size)
    energy = sparse.energies(rules, context, keys)
    plan = sparse.plan(rules._replace(threshold=2.0), context, energy)  # nothing reaches it
    share = energy / jnp.maximum(energy.max(-1, keepdims=True), 1e-30)
    bins = jnp.where(plan.causal & ~plan.kept, jnp.clip(share * BINS, 0, BINS - 1).astype(jnp.int32), BINS)
    counts.add("causal", plan.causal.sum(dtype=jnp.int32))
    counts.add("always", plan.kept.sum(dtype=jnp.int32))
    counts.add("bins", jnp.bincount(bins.reshape(-1), length=BINS + 1)[:BINS])


def threshold_for(density: float, found: dict[str, Any]) -> float:
    """The least threshold, in steps of a bin, with which at most so many of the seen blocks are read."""
    room = density * found["causal"] - found["always"]
    above = found["bins"][::-1].cumsum()[::-1]  # blocks of this bin and those above
    fitting = [i for i in range(BINS) if above[i] <= room]
    return fitting[0] / BINS if fitting else 1.0


def note_plan(counts: Counts, rules: Any, context: Any) -> None:
    """Traced: reports how many blocks are seen and read."""
    import jax.numpy as jnp

    from sparsejax.methods import flashprefill_v2 as sparse

    keys, _ = sparse.block_means(context, rules.block_size)
    plan = sparse.plan(rules, context, sparse.energies(rules, context, keys))
    counts.add("causal", plan.causal.sum(dtype=jnp.int32))
    counts.add("read", plan.kept.sum(dtype=jnp.int32))


def knobs(threshold: float | None, arguments: argparse.Namespace) -> str:
    """The composition of the sparse method."""
    correct = str(not arguments.no_correction).lower()
    given = f"flashprefill_v2_min_sparse_q_len={arguments.dense_chunk},flashprefill_v2_use_mean_correction={correct}"
    if threshold is not None:
        given += f",flashprefill_v2_abs_threshold={threshold}"
    return f"flashprefill_v2({given})"


def rules_of(threshold: float, arguments: argparse.Namespace) -> Any:
    from sparsejax import registry

    return registry.resolve(knobs(threshold, arguments))[0].params.rules


# One layer's attention


class Operation:
    """Random rows of some layers in scattered pages, and a chunk of queries."""

    def __init__(self, shape: Shape, model: step_timing.Model, dtype: str) -> None:
        import jax
        import jax.numpy as jnp

        from sparsejax.models.load import dummy
        from sparsejax.pallas_kernels.layout import PageView

        spec = dummy.dummy_spec(model.config, dtype)
        self.geometry = spec.geometry(model.page_size, shape.chunk + shape.history)
        heads, columns, dim = spec.num_kv_heads, self.geometry.max_pages, spec.head_dim
        self.shape, self.layers = shape, OPERATION_LAYERS if shape.history else 1
        self.slab = self.layers * heads
        keys = jax.random.split(jax.random.key(0), 5)
        size = ((1 + columns) * self.slab, model.page_size, dim)

        @jax.jit
        def rows(key, own):
            noise, lean = jax.random.normal(key, size, dtype), jax.random.normal(own, (size[0], 1, dim), dtype)
            return noise + lean  # so that pages differ in their means

        self.pools = {"k": rows(keys[0], keys[1]), "v": rows(keys[2], keys[1])}
        table = 1 + jax.random.permutation(keys[3], columns).astype(jnp.int32)
        lengths = jnp.full((1, 1), shape.chunk + shape.history, jnp.int32)
        self.view = PageView(table[None, None], self.slab, jnp.arange(heads, dtype=jnp.int32), lengths)
        self.q = jax.random.normal(keys[4], (1, shape.chunk, spec.num_q_heads, dim), dtype)

    def context(self, layer: int, q: Any, pools: Any, table: Any, lengths: Any) -> Any:
        import jax.numpy as jnp

        from sparsejax.method import PrefillContext

        offset = layer * self.geometry.num_kv_heads + self.view.offset
        return PrefillContext(
            geometry=self.geometry,
            role="dense",
            layer=jnp.int32(layer),
            queries=q,
            view=self.view._replace(table=table, lengths=lengths, offset=offset),
            start=lengths - self.shape.chunk,
            num_new=jnp.full(1, self.shape.chunk, jnp.int32),
            positions=jnp.zeros(q.shape[:2], jnp.int32),
            pools=pools,
            names=("k", "v"),
            load_tile=lambda tiles, layer: (tiles["k"], tiles["v"]),
            page_aux={},
            carry=None,
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.pools, self.view.table, self.view.lengths

    def program(self, part: Callable[[Any], Any]) -> Callable[..., list[Any]]:
        """`part` of every layer's context."""

        def run(*arguments):
            return [part(self.context(layer, *arguments)) for layer in range(self.layers)]

        return run

    def count(self, part: Callable[[Any], None], counts: Counts) -> dict[str, Any]:
        import jax

        jax.block_until_ready(jax.jit(self.program(part))(*self.arguments))
        return counts.take()


def parts_of(rules: Any) -> dict[str, Callable[[Any], Any]]:
    """What is timed. Each part computes what it needs; "until ..." are the steps up to and with it."""
    from sparsejax.methods import flashprefill_v2 as sparse
    from sparsejax.pallas_kernels import api

    def dense(context):
        how = {"load_tile": context.load_tile, "layer": context.layer, "scale": context.geometry.scale}
        return api.prefill_attention(context.queries, context.pools, context.names, context.view, context.start, **how)

    def means(context):
        return sparse.block_means(context, rules.block_size)

    def energies(context):
        return sparse.energies(rules, context, means(context)[0])

    def lists(context):
        return sparse.lists(sparse.plan(rules, context, energies(context)).kept)

    return {
        "dense": dense,
        "until means": means,
        "until energies": energies,
        "until lists": lists,
        "without correction": functools.partial(sparse.attend, rules._replace(correct=False)),
        "sparse": functools.partial(sparse.attend, rules),
    }


def measure_operation(shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    from sparsejax.models.load import resolve_dtype

    made = Operation(shape, MODELS[arguments.model], resolve_dtype(arguments.dtype))
    counts = Counts()
    rules = rules_of(0.0, arguments)._replace(dense_chunk=0)
    found = made.count(functools.partial(note_energies, counts, rules), counts)
    rules = rules._replace(threshold=threshold_for(arguments.density, found))
    read = made.count(functools.partial(note_plan, counts, rules), counts)
    density = float(read["read"] / read["causal"])
    sides = {name: timed(made.program(part), made.arguments, made.layers) for name, part in parts_of(rules).items()}
    samples = quiet.alternate(sides, arguments.rounds).found
    entry = {name: common.summary(seconds) for name, seconds in samples.items()}
    ratio = common.ratio(samples["dense"], samples["sparse"])
    shown = ", ".join(f"{name} {summary['median'] * 1e3:.3f} ms" for name, summary in entry.items())
    print(f"{shape}: {density:.4f} read (threshold {rules.threshold:.4f}), {shown}: {ratio['ratio']:.2f}x", flush=True)
    return {"density": density, "threshold": rules.threshold, "seconds": entry, "dense_over_sparse": ratio}


# Whole prefills


class Model:
    """A runner with some methods, and one prompt that requests bring."""

    def __init__(self, spec: Any, weights: Any, methods: dict[str, Any], arguments: argparse.Namespace) -> None:
        import numpy as np

        from sparsejax import registry
        from sparsejax.programs import compile_workers
        from sparsejax.runner import DeviceRunner
        from sparsejax.settings import EngineSettings

        model = MODELS[arguments.model]
        context, chunk = arguments.context // model.shrink, arguments.chunk // model.shrink
        geometry = spec.geometry(model.page_size, step_timing.window(context, model.page_size))
        _, storage = registry.resolve("dense")
        self.runner = DeviceRunner(
            spec,
            weights,
            geometry,
            methods,
            storage,
            num_rows=1,
            num_sequence_pages=2 * geometry.max_pages
            if any(m.evicts for m in methods.values())
            else geometry.max_pages + 1,
            decode_buckets=(1,),
            prefill_buckets=((1, chunk),),
            implementation=arguments.implementation,
        )
        wanted = [p for p in self.runner.programs() if p.name in ("prefill", "maintain", "sample", "setup_row")]
        start = time.perf_counter()
        programs = list(self.runner.compile(wanted, compile_workers()))
        print(
            f"{', '.join(methods)}: {len(programs)} programs compiled in {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        self.settings = EngineSettings(max_num_batched_tokens=chunk)
        self.prompt = tuple(np.random.default_rng(0).integers(0, spec.vocab_size, context).tolist())

    def ttft(self, method: str) -> float:
        """Seconds until the first token of a request is on the host.

        Raises:
          RuntimeError: the request failed.
        """
        from sparsejax.request import Request, SamplingParams
        from sparsejax.scheduler import Scheduler

        events: list[Any] = []
        scheduler = Scheduler(self.runner, self.settings)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
        request = scheduler.prepare(Request("0", self.prompt, params, method), events.append)
        start = time.perf_counter()
        scheduler.add(request)
        while not any(event.token_ids or event.finish_reason for event in events):
            scheduler.step()
        seconds = time.perf_counter() - start
        while scheduler.step():
            pass
        if failed := [event.error for event in events if event.error is not None]:
            raise RuntimeError(f"{method}: {failed[0]}")
        return seconds


def probing(method: Any, counts: Counts, probe: Callable[..., None]) -> Any:
    """A method whose prompt chunks attend as ever, and report."""
    from sparsejax.method import Method
    from sparsejax.pallas_kernels import api

    def attend_prefill(params: Any, context: Any) -> Any:
        probe(counts, params.rules, context)
        if probe is note_plan:
            return method.attend_prefill(params, context)
        how = {"load_tile": context.load_tile, "layer": context.layer, "scale": context.geometry.scale}
        how["implementation"] = context.implementation
        q, pages = context.queries, (context.pools, context.names, context.view)
        return api.prefill_attention(q, *pages, context.start, **how)[0], None

    assert isinstance(method, Method)
    return dataclasses.replace(method, attend_prefill=attend_prefill)


def measure_model(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results, and facts for the manifest."""
    from sparsejax import registry

    spec, weights = step_timing.load(arguments)
    counts, result = Counts(), {}
    others = {name: registry.resolve(name)[0] for name in arguments.methods if name != SPARSE}
    probe = registry.resolve(knobs(0.0, arguments))[0]
    first = Model(spec, weights, others | {"probe": probing(probe, counts, note_energies)}, arguments)
    sides: dict[str, Callable[[], float]] = {name: functools.partial(first.ttft, name) for name in others}
    if SPARSE in arguments.methods:
        threshold = arguments.threshold
        if threshold is None:
            first.ttft("probe")
            threshold = threshold_for(arguments.density, counts.take())
        method = registry.resolve(knobs(threshold, arguments))[0]
        second = Model(spec, weights, {SPARSE: method, "count": probing(method, counts, note_plan)}, arguments)
        second.ttft("count")
        read = counts.take()
        density = float(read["read"] / read["causal"])
        print(f"threshold {threshold:.4f}: {density:.4f} of the blocks read, {1 / density:.1f}x sparse", flush=True)
        result |= {"threshold": threshold, "density": density, "sparsity": 1 / density}
        sides[SPARSE] = functools.partial(second.ttft, SPARSE)
    samples = quiet.alternate(sides, arguments.model_rounds).found
    base = next(iter(samples))
    result["ttft_s"] = {name: common.summary(seconds) for name, seconds in samples.items()}
    result[f"{base}_over"] = {name: common.ratio(samples[base], seconds) for name, seconds in samples.items()}
    rows = [
        (name, f"{result['ttft_s'][name]['median']:.3f}", f"{result[f'{base}_over'][name]['ratio']:.2f}")
        for name in samples
    ]
    print(common.table(("method", "TTFT, s", f"{base} over it"), rows), flush=True)
    return result, step_timing.facts(spec, arguments)


SHAPES = (Shape(4096, 28672), Shape(4096, 126976), Shape(32768, 0), Shape(131072, 0))


def shapes_of(model: step_timing.Model) -> Sequence[Shape]:
    return [Shape(shape.chunk // model.shrink, shape.history // model.shrink) for shape in SHAPES]


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("sparse_prefill", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-8b", help="shape; small ones shrink tokens")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: by device")
    parser.add_argument("--implementation", help="of the kernels; chosen if not given")
    parser.add_argument("--parts", nargs="+", choices=("operation", "model"), default=["operation", "model"])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="shapes of the operation")
    parser.add_argument("--methods", nargs="+", default=["dense", SPARSE], metavar="COMPOSITION")
    parser.add_argument("--context", type=int, default=131072, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--density", type=float, default=0.11, help="share of blocks to read, for the threshold")
    parser.add_argument("--threshold", type=float, help="of the model's case, instead of finding one")
    parser.add_argument(
        "--dense-chunk", type=int, default=4096, help="flashprefill_v2_min_sparse_q_len", metavar="TOKENS"
    )
    parser.add_argument("--no-correction", action="store_true", help="leave out the means of blocks that are not read")
    parser.add_argument("--rounds", type=int, default=5, help="of the operation")
    parser.add_argument("--model-rounds", type=int, default=2, help="of whole prefills")
    arguments = parser.parse_args(argv)
    step_timing.reserve_memory()
    run = common.Run("sparse_prefill", arguments)
    start = time.perf_counter()
    result: dict[str, Any] = {}
    facts: dict[str, Any] = common.device_facts()
    if "operation" in arguments.parts:
        shapes = step_timing.matching(shapes_of(MODELS[arguments.model]), arguments.only)
        result["operation"] = {str(shape): measure_operation(shape, arguments) for shape in shapes}
    if "model" in arguments.parts:
        result["model"], facts = measure_model(arguments)
    print(f"{time.perf_counter() - start:.0f} s in all")
    run.finish(result, **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
