"""One decode step at a long context: dense against sparse methods, in time, bytes and pages.

    python -m benchmarks.sparse_decode

Steps: the cache is filled with random rows straight in the device state (nothing is prefilled), as each method leaves
it after a prompt of `--context` tokens; all methods share one pool and take turns. Random rows make selection as hard
as it gets, and cost the same as real ones.
Pages: a real prompt of `--context` tokens goes through the engine under each method; its pool says what is in use while
the answer is decoded.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import sys
import time
from typing import Any

from benchmarks import common, quiet
from benchmarks.perplexity import step_bytes


def methods(budget: int) -> list[str]:
    """The compared compositions: `budget` tokens kept or read, sinks and recent ones included."""
    sink, recent = min(64, budget // 8), budget // 8
    kept = f"sink_keep_tokens={sink},decode_keep_tokens={budget - sink - recent},recent_keep_tokens={recent}"
    window = f"observation_window_size={min(32, recent)}"
    return ["dense", f"snapkv({kept},{window})", f"quest({kept})"]


def fill(runner: Any, methods: list[Any], storage: Any, rows: int, context: int, seed: int = 0) -> None:
    """Random keys and values in every page, and a table that gives each row its own pages.

    Stored and summarised by the storage's and the methods' own functions, a page of all layers and heads at a time.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sparsejax.method import Written

    limits = runner.limits
    geometry = limits.geometry
    block, page_size = geometry.head_pages_per_sequence_page, geometry.page_size
    key = jax.random.key(seed)
    layer = jnp.int32(0)

    def write_page(i: jax.Array, arrays: Any) -> Any:
        pools, page_aux, row_aux = arrays
        shape = (2, page_size, block, geometry.head_dim)
        k, v = jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -1.7, 1.7)
        payload = storage.encode(storage.params, geometry, layer, k, v)  # [page_size, block, ...]
        pools = dict(pools)
        for name, values in payload.items():
            pools[name] = jax.lax.dynamic_update_slice_in_dim(pools[name], values.swapaxes(0, 1), i * block, 0)
        head_pages = i * block + jnp.arange(block, dtype=jnp.int32)
        written = Written(
            phase="pack",
            rows=jnp.zeros(1, jnp.int32),
            layer=layer,
            keys=k[None].astype(geometry.dtype),
            queries=None,
            positions=jnp.zeros((1, page_size), jnp.int32),
            head_pages=jnp.broadcast_to(head_pages, (1, page_size, block)),
            offsets=jnp.arange(page_size, dtype=jnp.int32)[None, :, None],
            num_valid=jnp.full(1, page_size, jnp.int32),
        )
        for method in methods:
            if method.on_write is not None:
                page_aux, row_aux = method.on_write(method.params, geometry, page_aux, row_aux, written)
        return pools, dict(page_aux), dict(row_aux)

    def write(state: Any) -> Any:
        arrays = (dict(state.pools), dict(state.page_aux), dict(state.row_aux))
        pools, page_aux, row_aux = jax.lax.fori_loop(1, limits.num_sequence_pages, write_page, arrays)
        return state.replace(pools=pools, page_aux=page_aux, row_aux=row_aux)

    state = jax.jit(write, donate_argnums=0)(runner.state)
    (name,) = state.tables
    if state.tables[name].shape[:2] != (1, 1):
        raise SystemExit(f"methods that allocate per {name} are not covered")
    columns = (limits.num_sequence_pages - 1) // rows
    table = np.zeros(state.tables[name].shape, np.int32)
    table[0, 0, 1 : rows + 1, :columns] = 1 + np.arange(rows * columns).reshape(rows, columns)
    positions = np.full(state.positions.shape, context, np.int32)
    runner.state = state.replace(tables={name: jnp.asarray(table)}, positions=jnp.asarray(positions))


def rewind(runner: Any, resident: int, context: int) -> None:
    """Makes every row hold `resident` tokens of a text of `context` tokens."""
    import jax.numpy as jnp

    state = runner.state
    (name,) = state.lengths
    runner.state = state.replace(
        lengths={name: jnp.full_like(state.lengths[name], resident)},
        positions=jnp.full_like(state.positions, context),
    )


def measure_steps(arguments: argparse.Namespace, model: Any, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Times of one decode step of the whole batch by method, and how quiet the machine was."""
    import numpy as np

    from sparsejax import registry
    from sparsejax.plans import DecodeRow, SamplingRow
    from sparsejax.runner import DeviceRunner

    context, batch, steps = arguments.context, arguments.batch, arguments.steps
    resolved = {name: registry.resolve(name) for name in names}
    storages = {storage for _, storage in resolved.values()}
    if len(storages) > 1:
        raise SystemExit("methods of one run share a pool, so they must share a storage: run once for each storage")
    (storage,) = storages
    sizes = {m.page_size(m.params) for m, _ in resolved.values()} - {None}
    geometry = model.spec.geometry(sizes.pop() if sizes else 16, -(-(context + steps + 1) // 16) * 16)
    runner = DeviceRunner(
        model.spec,
        model.weights,
        geometry,
        {name: method for name, (method, _) in resolved.items()},
        storage,
        num_rows=batch,
        num_sequence_pages=1 + batch * geometry.max_pages,
        decode_buckets=(batch,),
        prefill_buckets=((1, 16),),
    )
    fill(runner, [method for method, _ in resolved.values()], storage, batch, context)
    rows = [DecodeRow(i + 1, SamplingRow(), None, 1 + i) for i in range(batch)]
    prompt = np.asarray([context], np.int32)
    resident = {name: int(method.kept_after("prompt", prompt)[0]) for name, (method, _) in resolved.items()}

    def take_steps(name: str) -> list[float]:
        rewind(runner, resident[name], context)
        runner.decode(name, rows).result()  # after the rewind, and the first time compiles
        times = []
        for _ in range(steps - 1):
            start = time.perf_counter()
            ticket = runner.decode(name, rows)
            ok = ticket.result().ok
            times.append(time.perf_counter() - start)
            if not ok.all():
                raise RuntimeError(f"{name}: logits are not finite")
        return times

    for name in names:
        take_steps(name)
    sides = {name: lambda name=name: take_steps(name) for name in names}
    rounds = quiet.alternate(sides, arguments.rounds, patience_s=arguments.patience_s)
    found = rounds.found
    result = {}
    for name in names:
        method = resolved[name][0]
        medians = [common.summary(times)["median"] for times in found[name]]
        held = batch * geometry.pages(resident[name]) * geometry.page_size
        result[name] = {
            "step_s": common.summary([t for times in found[name] for t in times]),
            "round_medians_s": medians,
            "resident_tokens": resident[name],
            "read_tokens": method.rows_read(resident[name], geometry),
            "resident_bytes": held * storage.bytes_per_token(geometry),
            "read_bytes": batch * step_bytes(method, storage, geometry, resident[name]),
        }
        if name != names[0]:
            base = [common.summary(times)["median"] for times in found[names[0]]]
            result[name]["faster_than_first"] = common.ratio(base, medians)
    return result, rounds.facts


@dataclasses.dataclass(frozen=True)
class Pages:
    """Head-pages in use while an answer is decoded, and the most seen before."""

    decoding: int
    most: int
    evicted: int
    resident_tokens: int


def measure_pages(arguments: argparse.Namespace, name: str) -> list[Pages]:
    """One prompt after another through the engine under one method."""
    from sparsejax import LLM, SamplingParams
    from sparsejax.request import Request

    context = arguments.context
    found = []
    with LLM(
        arguments.model,
        name,
        load_format=arguments.load_format,
        max_model_len=context + 64,
        max_num_seqs=2,  # so that the pool has room for a row and its compaction
        generation_config="none",
        precompile="none",
    ) as llm:
        engine = llm.built.engine
        ids = llm.tokenizer.encode(common.prose())
        for number, prompt in enumerate(common.windows(ids, arguments.prompts, context)):
            before = engine.snapshot
            events: queue.SimpleQueue = queue.SimpleQueue()
            used: list[int] = []  # when each token came; the engine calls back between two steps

            def on_event(event: Any, events: Any = events, used: list[int] = used) -> None:
                used.append(_used_pages(engine))
                events.put(event)

            params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
            engine.submit(Request(f"pages-{number}", tuple(prompt), params), on_event)
            most, event = 0, None
            while event is None or event.finish_reason is None:
                most = max(most, _used_pages(engine))
                try:
                    event = events.get(timeout=0.01)
                except queue.Empty:
                    event = None
            if event.finish_reason != "length":
                raise RuntimeError(f"the request ended with {event.finish_reason}: {event.error}")
            resident = event.stats.resident_tokens
            deadline = time.monotonic() + 10
            while _used_pages(engine) and time.monotonic() < deadline:
                time.sleep(0.01)
            if _used_pages(engine):
                raise RuntimeError(f"{name}: {_used_pages(engine)} pages were not returned")
            granularity = next(iter(llm.limits.methods.values())).granularity
            evicted = engine.snapshot.evicted_pages - before.evicted_pages
            evicted *= llm.limits.geometry.head_pages_per_page(granularity)
            found.append(Pages(used[len(used) // 2], max(most, *used), evicted, resident))
    return found


def _used_pages(engine: Any) -> int:
    snapshot = engine.snapshot
    return snapshot.total_pages - snapshot.free_pages


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("sparse_decode", __doc__.splitlines()[0])
    parser.add_argument("--model", help="as for sparsejax")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--context", type=int, default=7000, help="tokens")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--budget", type=int, default=1024, help="tokens kept or read")
    parser.add_argument("--steps", type=int, default=8, help="steps per round and method; the first is not timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1, help="real prompts for the count of pages; 0 skips it")
    parser.add_argument("--methods", nargs="+", help="compositions; all are compared with the first")
    arguments = parser.parse_args(argv)
    run = common.Run("sparse_decode", arguments)
    result, facts = measure(arguments)
    run.finish(result, **facts)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    from sparsejax.models.load import load_model

    common.use_compilation_cache()
    names = arguments.methods or methods(arguments.budget)
    model = load_model(arguments.model, load_format=arguments.load_format)
    steps, quietness = measure_steps(arguments, model, names)
    first = names[0]
    rows = []
    for name in names:
        found = steps[name]
        faster = found.get("faster_than_first")
        rows.append(
            (
                name.partition("(")[0],
                f"{found['step_s']['median'] * 1e3:.1f}",
                f"{found['step_s']['spread']:.0%}",
                f"{arguments.batch / found['step_s']['median']:.1f}",
                f"x {faster['ratio']:.2f}" if faster else "1",
                f"{found['resident_bytes'] / 1e6:,.0f}",
                f"{found['read_bytes'] / 1e6:,.0f}",
                f"{found['read_bytes'] / found['step_s']['median'] / 1e9:.1f}",
            )
        )
    print(f"{model.name}, {model.spec.dtype}: {arguments.batch} rows at {arguments.context} tokens of context")
    header = ("method", "step ms", "spread", "tokens/s", f"vs {first}", "resident MB", "read MB", "read GB/s")
    print(common.table(header, rows))
    for name in names[1:]:
        found = steps[name]["faster_than_first"]
        goal = "met" if found["ratio"] > 1 else "missed"
        print(f"{name.partition('(')[0]}: faster than {first} x {found['ratio']:.2f}  goal above 1: {goal}")
    result: dict[str, Any] = {"steps": steps}
    if arguments.prompts:
        result["pages"] = compare_pages(arguments, names)
    facts = {**common.device_facts(), **quietness, "model": model.name, "dtype": model.spec.dtype}
    return result, facts


def compare_pages(arguments: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    found = {name: measure_pages(arguments, name) for name in names}
    base = common.summary([pages.decoding for pages in found[names[0]]])["median"]
    result, rows = {}, []
    for name, runs in found.items():
        decoding = common.summary([pages.decoding for pages in runs])["median"]
        freed = 1 - decoding / base
        result[name] = {"prompts": [dataclasses.asdict(pages) for pages in runs], "freed_of_first": freed}
        most, evicted = (max(getattr(pages, field) for pages in runs) for field in ("most", "evicted"))
        rows.append((name.partition("(")[0], f"{decoding:,.0f}", f"{most:,}", f"{evicted:,}", f"{freed:.1%}"))
    print(f"head-pages of one real prompt of {arguments.context} tokens, as the engine's pool counts them")
    print(common.table(("method", "while decoding", "most", "evicted", f"freed vs {names[0]}"), rows))
    return result


if __name__ == "__main__":
    sys.exit(main())
