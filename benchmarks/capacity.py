"""The largest batch that fits the device's memory at a context, by method, and what it gives in tokens per second.

    python -m benchmarks.capacity --json
    python -m benchmarks.capacity --contexts 131072 32768 8192 --prove

What fits follows from page counts: all methods get the memory that the engine would use on this device (or --memory-gib
of it), which must hold the weights, the workspace and the state of each row, and then pages. Rows are prefilled one
after the other, so all but the last hold what their method keeps of the context and a page of new tokens, and the last
one its whole prompt, with the pages that its compaction needs. The batch that fits then decodes for real, on a pool of
all those pages filled directly (as `benchmarks.decode_step` does, which says how steps are timed and what the floor
is); one row more has too few pages. --prove also tries to allocate what that row would need: the engine leaves some
memory of the device unused, so this can succeed.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import bars, common, step_timing
from benchmarks.decode_attention import kilo
from benchmarks.step_timing import MODELS, Filled, Model, composition

KEPT = (8192, 4096, 2048)
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """`method` is for people, `composition` for the registry. `context` is in tokens."""

    method: str
    composition: str
    context: int

    def __str__(self) -> str:
        return f"{self.method} L={kilo(self.context)}"


def cases(model: Model, contexts: list[int]) -> list[Case]:
    """Dense first: the others are compared with it."""
    read = 2048 // model.shrink
    quest = f"quest {kilo(read)}", composition("quest", read, model)
    found = []
    for context in (context // model.shrink for context in contexts):
        budgets = [kept // model.shrink for kept in KEPT if kept // model.shrink < context]
        kept = [(f"snapkv {kilo(n)}", composition("snapkv", n, model)) for n in budgets]
        kept += [(f"streamingllm {kilo(n)}", composition("streamingllm", n, model)) for n in budgets[:1]]
        found += [Case(*method, context) for method in (("dense", "dense"), *kept, quest, ("fp8_kv", "fp8_kv"))]
    return found


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where a device's memory goes with some rows, in bytes; pages are sequence pages, the null page included."""

    weight_bytes: int
    workspace_bytes: int
    row_bytes: int
    page_bytes: int
    pages: int
    pages_needed: int

    @property
    def fits(self) -> bool:
        return self.pages_needed <= self.pages


def plan(case: Case, spec: Any, page_size: int, batch: int, arguments: Any, usable_bytes: int | None = None) -> Any:
    """The engine's `Capacity` for a batch; sizes are those of an engine with `usable_bytes`, if given, for KV alone."""
    from sparsejax import capacity
    from sparsejax.config import EngineConfig

    longest = step_timing.window(case.context, page_size)
    config = EngineConfig(
        sparse_method=case.composition,
        max_model_len=longest,
        max_num_seqs=batch,
        page_size=page_size,
        memory_fraction=arguments.memory_fraction,
        kv_cache_memory_bytes=usable_bytes,
    )
    return capacity.plan(config, dataclasses.replace(spec, max_model_len=longest), "default")


def pages_needed(method: Any, geometry: Any, batch: int, context: int) -> int:
    """Sequence pages for `batch` rows of `context` tokens, prefilled in turn, with a page of new tokens for each."""
    from sparsejax.cost import row_cost

    width = geometry.head_pages_per_sequence_page
    row = row_cost(method, geometry, context)
    at_rest = row.resident_head_pages + width
    last = max(row.peak_head_pages, at_rest)
    return 1 + -(-((batch - 1) * at_rest + last) // width)


def memory(case: Case, spec: Any, page_size: int, batch: int, arguments: Any, usable_bytes: int) -> Memory:
    """How a batch shares `usable_bytes`: what is left of them becomes pages."""
    found = plan(case, spec, page_size, batch, arguments, usable_bytes)
    (method,) = found.methods.values()
    fixed = found.weight_bytes + found.workspace_bytes + found.row_bytes
    return Memory(
        weight_bytes=found.weight_bytes,
        workspace_bytes=found.workspace_bytes,
        row_bytes=found.row_bytes,
        page_bytes=found.page_bytes,
        pages=max(0, usable_bytes - fixed) // found.page_bytes,
        pages_needed=pages_needed(method, found.geometry, batch, case.context),
    )


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number from 1 for which `fits` holds, 0 if there is none. What fits, fits in smaller numbers."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def usable_bytes(spec: Any, page_size: int, arguments: Any) -> int:
    """Memory that the engine would use on this device, or what was given."""
    import jax

    if arguments.memory_gib is not None:
        return int(arguments.memory_gib * GIB)
    if jax.default_backend() == "cpu":
        raise SystemExit("a CPU's memory belongs to others: say how much to use with --memory-gib")
    return plan(Case("dense", "dense", page_size), spec, page_size, 1, arguments).usable_bytes


def decode(case: Case, spec: Any, weights: Any, arguments: Any, bandwidths: dict, batch: int, pages: int) -> dict:
    """Rounds of steps of the whole batch on a full pool."""
    page_size = MODELS[arguments.model].page_size
    compositions = {case.method: case.composition}
    filled = Filled(
        spec, weights, compositions, batch, case.context, page_size, arguments.implementation, num_sequence_pages=pages
    )
    filled.round(case.method, batch, 2)
    rounds = [filled.round(case.method, batch, arguments.steps) for _ in range(arguments.rounds)]
    found = step_timing.judge(batch, rounds, filled.floor(case.method, batch), bandwidths)
    return found | filled.facts(case.method) | {"compile_s": filled.compile_s}


def out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def allocates(case: Case, spec: Any, page_size: int, batch: int, need: Memory) -> bool:
    """Whether the device has room for the state and the workspace of a batch, beside the weights that it holds."""
    import jax
    import jax.numpy as jnp

    from sparsejax import registry
    from sparsejax.state import StateSize, empty_state

    method, storage = registry.resolve(case.composition)
    geometry = spec.geometry(page_size, step_timing.window(case.context, page_size))
    size = StateSize(batch, need.pages_needed, spec.vocab_size)
    try:
        state = empty_state(geometry, size, (method,), storage)
        jax.block_until_ready((state, jnp.zeros(need.workspace_bytes, jnp.uint8)))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def measure(case: Case, spec: Any, weights: Any, arguments: Any, bandwidths: dict, usable: int) -> dict[str, Any]:
    """The largest batch of one case, why it is the largest, and its speed."""
    import jax

    page_size = MODELS[arguments.model].page_size

    def need(batch: int) -> Memory:
        return memory(case, spec, page_size, batch, arguments, usable)

    batch = largest(lambda batch: need(batch).fits)
    more = need(batch + 1)
    shown = f"{more.pages_needed:,} pages, and there are {more.pages:,}"
    print(f"{case}: {batch} rows fit; {batch + 1} need {shown}", flush=True)
    entry: dict[str, Any] = {"batch": batch, "one_more": dataclasses.asdict(more)}
    if batch:
        entry["memory"] = dataclasses.asdict(need(batch))
        try:
            entry |= decode(case, spec, weights, arguments, bandwidths, batch, need(batch).pages)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            print(f"{case} B={batch}: out of memory, although it should fit", flush=True)
        else:
            print(step_timing.line(f"{case} B={batch}", entry), flush=True)
        gc.collect()
    if arguments.prove:
        entry["one_more_allocates"] = allocates(case, spec, page_size, batch + 1, more)
        words = "can be allocated beyond the budget" if entry["one_more_allocates"] else "can't be allocated"
        print(f"{case}: {batch + 1} rows {words}", flush=True)
    return entry


HEADER = ("case", "batch", "x dense", "step ms", "spread", "tokens/s", "x dense", "step/floor", "KV pages", "one more")


def cells(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    more = f"{entry['one_more']['pages_needed']:,} of {entry['one_more']['pages']:,}"
    if "step_s" not in entry:
        return name, f"{entry['batch']:,}", *["-"] * 7, more
    against = entry.get("over_dense", {})
    return (
        name,
        f"{entry['batch']:,}",
        f"{against['batch']:.1f}" if against else "-",
        f"{entry['step_s']['median'] * 1e3:.2f}",
        f"{entry['step_s']['spread']:.1%}",
        f"{entry['tokens_per_s']:,.1f}",
        f"{against['tokens_per_s']:.2f}" if against else "-",
        f"{entry['step_over_floor']['measured']:.3f}",
        f"{entry['memory']['pages']:,}",
        more,
    )


def compare(found: dict[str, dict[str, Any]], base: str) -> None:
    """Adds "over_dense" to cases whose dense one is known."""
    for name, entry in found.items():
        dense = found.get(f"{base}{name[name.index(' L=') :]}")
        if dense and dense is not entry and "tokens_per_s" in dense and "tokens_per_s" in entry:
            entry["over_dense"] = {key: entry[key] / dense[key] for key in ("batch", "tokens_per_s")}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("capacity", __doc__.splitlines()[0])
    step_timing.add_options(parser)
    parser.add_argument("--contexts", type=int, nargs="+", default=[131072], help="tokens; small models divide them")
    parser.add_argument("--memory-gib", type=float, help="memory in all; by default what the engine would use")
    parser.add_argument("--memory-fraction", type=float, help="as for sparsejax")
    parser.add_argument("--prove", action="store_true", help="also try to allocate the next larger batch")
    arguments = parser.parse_args(argv)
    step_timing.prepare(arguments)
    model = MODELS[arguments.model]
    chosen = step_timing.matching(cases(model, arguments.contexts), arguments.only)
    run = common.Run("capacity", arguments)
    start = time.perf_counter()
    bandwidths = step_timing.device_bandwidths(arguments.nominal)
    spec, weights = step_timing.load(arguments)
    usable = usable_bytes(spec, model.page_size, arguments)
    print(f"{usable / GIB:.2f} GiB for weights, workspace, rows and pages", flush=True)
    found: dict[str, dict[str, Any]] = {}
    result = {"bytes_per_s": bandwidths, "usable_bytes": usable, "cases": found}
    facts = step_timing.facts(spec, arguments)
    for case in chosen:
        found[str(case)] = measure(case, spec, weights, arguments, bandwidths, usable)
        compare(found, "dense")
        run.keep(result, **facts)
        gc.collect()  # the next pool needs the memory
    print(common.table(HEADER, [cells(name, entry) for name, entry in found.items()]))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if arguments.plot:
        speeds = {"tokens/s of the largest batch": [entry.get("tokens_per_s", 0.0) for entry in found.values()]}
        bars.write(arguments.plot, f"Largest batch, {model.config}, {spec.dtype}", list(found), speeds, "tokens/s")
    run.finish(result, **facts)
    return 0 if all("tokens_per_s" in entry for entry in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
