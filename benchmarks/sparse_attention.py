"""Decode attention over selected pages of one layer: scores, selection, attention, and all three, against dense.

    python -m benchmarks.sparse_attention --json
    python -m benchmarks.sparse_attention --sweep        # how the selection kernel is best launched

Three parts. "sparse": rows of `--context` tokens of which `--read` are read, in pages; every step alone and all three
as one program, with dense attention over the same pages and the peers of `benchmarks.peers.attention`. "selection":
the choice alone, over pages and over single tokens. "gather": attention over single tokens chosen at random, each a
page of its own, and over as many bytes in whole pages.

Each measurement is one program that does its work for several layers in turn, each with its own pages of one pool, so
that no cache holds what a call reads. "us" is time by the clock, "device us" what a trace of the GPU saw running. The
floor is the bytes that must be read (page summaries, selected rows) at the bandwidth of a device copy of this run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import bars, common, kernels, quiet, step_timing
from benchmarks.decode_attention import kilo, random_rows, timed
from benchmarks.peers import attention as peers

LEAST_BYTES = 2e8
"""That all layers of a program read together: several times what the caches hold."""
SELECTIONS = 64
"""Calls of a program that only selects, unless the number of layers is given."""
SWEEP = ((0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32), (4096, 8), (4096, 16), (16384, 16), (16384, 32))
"""Scores that a program holds (0: the default) and its warps, for `--sweep`."""
Measure = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Case:
    """`read` of `rows` tokens of each sequence, in pages of `page` tokens."""

    batch: int
    rows: int
    read: int
    page: int
    heads: int
    group: int
    dim: int
    num_layers: int | None = None

    def __str__(self) -> str:
        return f"B={self.batch} {kilo(self.read)} of {kilo(self.rows)} page {self.page}"

    @property
    def columns(self) -> int:
        return self.rows // self.page

    @property
    def sizes(self) -> dict[str, int]:
        """Of the selection: the last page is one of those that are read."""
        width = self.read // self.page
        return {"num_scored": width - 1, "width": width, "budget": self.read, "page_size": self.page}

    @property
    def summary_bytes(self) -> int:
        return 4 * self.batch * self.columns * self.heads * self.dim

    @property
    def read_bytes(self) -> int:
        return 4 * self.batch * self.read * self.heads * self.dim

    @property
    def dense_bytes(self) -> int:
        return 4 * self.batch * self.rows * self.heads * self.dim

    @property
    def score_bytes(self) -> int:
        return 4 * self.batch * self.columns * self.heads

    @property
    def layers(self) -> int:
        """Of a program: as told, or enough that no cache helps."""
        return self.num_layers or max(4, min(36, int(-(-LEAST_BYTES // min(self.summary_bytes, self.read_bytes)))))


class Pages:
    """Pools, tables and queries of a case on the device. All layers and heads hold the same rows, in other places."""

    def __init__(self, case: Case, implementation: str) -> None:
        import jax
        import jax.numpy as jnp

        from sparsejax.arrays import ArraySpec

        self.case, self.layers, self.implementation = case, case.layers, implementation
        self.slab = case.layers * case.heads
        num_slabs = 1 + case.batch * case.columns
        keys = jax.random.split(jax.random.key(1), 4)
        spec = ArraySpec((case.page, case.dim), "bfloat16")

        def everywhere(rows):
            wide = jnp.broadcast_to(rows[:, None], (num_slabs, self.slab, *rows.shape[1:]))
            return wide.reshape(num_slabs * self.slab, *rows.shape[1:])

        k, v = (random_rows(key, num_slabs, spec) for key in keys[:2])
        self.pools = {"k": jax.jit(everywhere)(k), "v": jax.jit(everywhere)(v)}
        self.bounds = tuple(jax.jit(lambda rows, f=f: everywhere(f(rows, 1)))(k) for f in (jnp.min, jnp.max))
        table = 1 + jax.random.permutation(keys[2], case.batch * case.columns).astype(jnp.int32)
        self.table = table.reshape(case.batch, 1, case.columns)
        self.lengths = jnp.full((case.batch, 1), case.rows, jnp.int32)
        q = jax.random.normal(keys[3], (case.batch, case.heads * case.group, case.dim), jnp.float32)
        self.q = q.astype(jnp.bfloat16)

    def view(self, layer: int, table: Any, lengths: Any) -> Any:
        import jax.numpy as jnp

        from sparsejax.pallas_kernels.layout import PageView

        heads = jnp.arange(self.case.heads, dtype=jnp.int32)
        return PageView(table, self.slab, layer * self.case.heads + heads, lengths)

    def scores(self, q: Any, bounds: Any, view: Any) -> Any:
        from sparsejax.pallas_kernels import api

        return api.page_scores(q, *bounds, view, page_size=self.case.page, implementation=self.implementation)

    def select(self, scores: Any, view: Any, implementation: str | None = None) -> Any:
        from sparsejax.pallas_kernels import api

        how = {**self.case.sizes, "implementation": implementation or self.implementation}
        return api.select_pages(scores, view, **how)

    def attend(self, q: Any, pools: Any, view: Any) -> Any:
        return attend(q, pools, view, self.implementation)


def attend(q: Any, pools: Any, view: Any, implementation: str) -> Any:
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api

    def load_tile(tiles, layer):
        return tiles["k"], tiles["v"]

    how = {"load_tile": load_tile, "layer": jnp.int32(0), "scale": q.shape[2] ** -0.5}
    return api.decode_attention(q, pools, ("k", "v"), view, **how, implementation=implementation)[0]


def sparse_sides(case: Case, implementation: str, with_peers: bool) -> dict[str, tuple[Measure, int]]:
    """(what measures seconds per layer once, layers of its program) of every side."""
    import jax

    pages = Pages(case, implementation)
    layers = range(pages.layers)
    fixed = pages.bounds, pages.table, pages.lengths

    def scores(q, bounds, table, lengths):
        return [pages.scores(q, bounds, pages.view(layer, table, lengths)) for layer in layers]

    def select(scores, table, lengths):
        return [
            (chosen.table, chosen.lengths)
            for layer in layers
            for chosen in [pages.select(scores[layer], pages.view(layer, table, lengths))]
        ]

    def attend_selected(q, pools, chosen):
        from sparsejax.pallas_kernels.layout import explicit_view

        for head_pages, lengths in chosen:
            q = pages.attend(q, pools, explicit_view(head_pages, lengths))
        return q

    def everything(q, pools, bounds, table, lengths):
        for layer in layers:
            view = pages.view(layer, table, lengths)
            q = pages.attend(q, pools, pages.select(pages.scores(q, bounds, view), view))
        return q

    def dense(q, pools, table, lengths):
        for layer in layers:
            q = pages.attend(q, pools, pages.view(layer, table, lengths))
        return q

    found_scores = jax.jit(scores)(pages.q, *fixed)
    chosen = jax.jit(select)(found_scores, *fixed[1:])
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "scores": (scores, (pages.q, *fixed)),
        "selection": (select, (found_scores, *fixed[1:])),
        "attention": (attend_selected, (pages.q, pages.pools, chosen)),
        "all three": (everything, (pages.q, pages.pools, *fixed)),
        "dense": (dense, (pages.q, pages.pools, *fixed[1:])),
    }
    sides = {name: (timed(function, given, pages.layers), pages.layers) for name, (function, given) in programs.items()}
    if with_peers:
        rows = peers.Rows(case.batch, case.rows, case.heads, case.group, case.dim, case.page)
        sides |= {name: (measure, 0) for name, measure in peers.sides(rows, pages.layers).items()}
    return sides


def selection_sides(case: Case, implementations: dict[str, Any]) -> dict[str, tuple[Measure, int]]:
    """Selection alone. A value of `implementations` is a name or a launch configuration of the Triton kernel."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.layout import PageView
    from sparsejax.pallas_kernels.select_pages import triton_gpu

    calls = case.num_layers or SELECTIONS
    keys = jax.random.split(jax.random.key(2), calls + 1)
    shape = (case.batch, case.heads, case.columns)
    scores = [jax.random.normal(key, shape, jnp.float32) for key in keys[1:]]
    table = jax.random.permutation(keys[0], case.batch * case.columns).astype(jnp.int32)
    table = 1 + table.reshape(case.batch, 1, case.columns)
    lengths = jnp.full((case.batch, 1), case.rows, jnp.int32)

    def program(how):
        def run(scores, table, lengths):
            view = PageView(table, case.heads, jnp.arange(case.heads, dtype=jnp.int32), lengths)
            if isinstance(how, str):
                each = [api.select_pages(one, view, **case.sizes, implementation=how) for one in scores]
            else:
                each = [triton_gpu.launch(one, view, **case.sizes, shared=False, config=how) for one in scores]
            return [(chosen.table, chosen.lengths) for chosen in each]

        return run

    return {
        name: (timed(program(how), (scores, table, lengths), calls), calls) for name, how in implementations.items()
    }


def gather_sides(case: Case, implementation: str) -> dict[str, tuple[Measure, int]]:
    """Attention over tokens and over pages, both chosen at random for each head and layer, both ascending."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels.layout import explicit_view

    pages = Pages(case, implementation)
    lengths = jnp.full((case.batch, case.heads), case.read, jnp.int32)

    def choose(key, num, of):
        """[batch, heads, num] different columns, ascending."""
        noise = jax.random.uniform(key, (case.batch, case.heads, of))
        return jnp.sort(jnp.argsort(noise, -1)[..., :num], -1).astype(jnp.int32)

    def chosen(layer):
        view = pages.view(layer, pages.table, pages.lengths)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(3), layer))
        whole = view.pages_at(choose(keys[0], case.read // case.page, case.columns))
        tokens = choose(keys[1], case.read, case.rows)
        single = view.pages_at(tokens // case.page) * case.page + tokens % case.page
        return whole, single

    choices = [jax.jit(chosen, static_argnums=0)(layer) for layer in range(pages.layers)]
    tokens = {name: pool.reshape(-1, 1, case.dim) for name, pool in pages.pools.items()}
    sides = {}
    for name, pools, which in (("pages", pages.pools, 0), ("tokens", tokens, 1)):

        def run(q, pools, tables):
            for table in tables:
                q = attend(q, pools, explicit_view(table, lengths), implementation)
            return q

        given = pages.q, pools, [choice[which] for choice in choices]
        sides[name] = timed(run, given, pages.layers), pages.layers
    return sides


def judge(
    name: str,
    sides: dict[str, tuple[Measure, int]],
    nbytes: dict[str, int],
    base: str,
    bandwidth: float,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Measures all sides in turn. `nbytes` by side, where one has a floor; times are also given over that of `base`."""
    rounds = quiet.alternate(
        {side: measure for side, (measure, _) in sides.items()}, arguments.rounds, patience_s=arguments.patience_s
    )
    rows, result = [], {}
    for side, samples in rounds.found.items():
        seconds = statistics.median(samples)
        entry: dict[str, Any] = {"seconds": common.summary(samples)}
        calls = sides[side][1]
        if arguments.device_times and calls:
            entry["device_s"] = kernels.device_seconds(sides[side][0], calls)
        if side in nbytes:
            floor = nbytes[side] / bandwidth
            entry |= {"bytes": nbytes[side], "floor_s": floor, "share_of_floor": floor / seconds}
            entry["bytes_per_s"] = nbytes[side] / seconds
        if side != base and base in rounds.found:
            entry[f"time_over_{base.replace(' ', '_')}"] = common.ratio(samples, rounds.found[base])
        result[side] = entry
        device, floor_s = entry.get("device_s"), entry.get("floor_s")
        rows.append(
            (
                side,
                f"{seconds * 1e6:.1f}",
                f"{device * 1e6:.1f}" if device else "-",
                f"{floor_s * 1e6:.1f}" if floor_s else "-",
                f"{entry['bytes_per_s'] / 1e12:.2f}" if floor_s else "-",
                f"{seconds / statistics.median(rounds.found[base]):.2f}",
            )
        )
    print(f"\n{name}")
    print(common.table(("side", "us", "device us", "floor us", "TB/s", f"x {base}"), rows), flush=True)
    result["quiet"] = rounds.facts
    return result


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser("sparse_attention", (__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--parts", nargs="+", choices=("sparse", "selection", "gather"), help="not all of them")
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 1])
    parser.add_argument("--context", type=int, default=131072, help="tokens of a sequence")
    parser.add_argument("--read", type=int, default=2048, help="tokens that are read of it")
    parser.add_argument("--pages", nargs="+", type=int, default=[64, 16], help="page sizes; peers at the first")
    parser.add_argument("--gather-context", type=int, default=32768, help="tokens of a sequence in the last part")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--dim", type=int, default=128, help="head size")
    parser.add_argument("--layers", type=int, help="of a program; enough that no cache helps if not given")
    parser.add_argument("--implementation", default="auto", help="of ours")
    parser.add_argument("--xla", action="store_true", help="also the portable selection")
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--no-device-times", dest="device_times", action="store_false", help="make no traces")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each side, in turn")
    parser.add_argument("--sweep", action="store_true", help="look for the best launch of the selection instead")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="draw the times of the first part")
    arguments = parser.parse_args(argv)
    bars.check(arguments.plot)
    for size in arguments.pages:
        if arguments.read % size or arguments.context % size or arguments.read < 2 * size:
            raise SystemExit(f"--context and --read must be multiples of pages of {size}, --read of at least two")
    if max(arguments.read + 1, *arguments.pages) > min(arguments.context, arguments.gather_context):
        raise SystemExit("--read must be below --context and --gather-context")
    return arguments


def sweep(cases: dict[str, Case]) -> None:
    """Prints every launch configuration of the selection kernel, the best first."""
    from sparsejax.pallas_kernels.select_pages import triton_gpu

    for name, case in cases.items():
        default = triton_gpu.default_config(case.columns)
        configs = {triton_gpu.Config(block or default.block, warps) for block, warps in SWEEP} | {default}
        found = []
        for config in configs:
            try:
                [(measure, calls)] = selection_sides(case, {"": config}).values()
            except Exception as error:  # too many registers, for one: not a configuration for this device
                print(f"{name} {config}: {type(error).__name__}", flush=True)
                continue
            seconds = statistics.median(measure() for _ in range(5))
            found.append((kernels.device_seconds(measure, calls) or seconds, seconds, config))
        for device, seconds, config in sorted(found, key=lambda one: one[0]):
            mark = " (default)" if config == default else ""
            print(f"{name}: device {device * 1e6:.2f} us, clock {seconds * 1e6:.2f} us, {config}{mark}", flush=True)


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory too
    run = common.Run("sparse_attention", arguments)
    parts = arguments.parts or ("sparse", "selection", "gather")
    size = arguments.heads, arguments.group, arguments.dim, arguments.layers
    most = max(arguments.batches)
    choices = {page: Case(most, arguments.context, arguments.read, page, *size) for page in arguments.pages}
    choices[1] = Case(most, arguments.gather_context, arguments.read, 1, *size)
    selections = {f"{c.columns} pages x {c.heads} x {c.batch}, {c.sizes['num_scored']}": c for c in choices.values()}
    if arguments.sweep:
        sweep(selections)
        return 0
    bandwidth = step_timing.device_bandwidths(None)["measured"]
    found: dict[str, Any] = {part: {} for part in parts}
    if "sparse" in parts:
        for page in arguments.pages:
            for batch in arguments.batches:
                case = Case(batch, arguments.context, arguments.read, page, *size)
                sides = sparse_sides(
                    case, arguments.implementation, page == arguments.pages[0] and not arguments.no_peers
                )
                nbytes = dict.fromkeys(sides, case.dense_bytes) | {
                    "scores": case.summary_bytes,
                    "selection": case.score_bytes,
                    "attention": case.read_bytes,
                    "all three": case.summary_bytes + case.read_bytes,
                }
                found["sparse"][str(case)] = judge(str(case), sides, nbytes, "all three", bandwidth, arguments)
                del sides
                gc.collect()  # the next pool needs the memory
    if "selection" in parts:
        implementations = {"ours": arguments.implementation} | ({"xla": "xla"} if arguments.xla else {})
        for name, case in selections.items():
            sides = selection_sides(case, implementations)
            nbytes = dict.fromkeys(sides, case.score_bytes)
            found["selection"][name] = judge(f"select of {name}", sides, nbytes, "ours", bandwidth, arguments)
    if "gather" in parts:
        case = Case(most, arguments.gather_context, arguments.read, arguments.pages[0], *size)
        sides = gather_sides(case, arguments.implementation)
        nbytes = dict.fromkeys(sides, case.read_bytes)
        found["gather"][str(case)] = judge(f"gather {case}", sides, nbytes, "tokens", bandwidth, arguments)
    if arguments.plot and "sparse" in parts:
        labels = [f"{case}: {side}" for case, sides in found["sparse"].items() for side in sides if side != "quiet"]
        times = [
            entry["seconds"]["median"] * 1e6
            for sides in found["sparse"].values()
            for side, entry in sides.items()
            if side != "quiet"
        ]
        bars.write(arguments.plot, "Decode attention of one layer", labels, {"time": times}, "us")
    facts = common.device_facts() | {"q_heads": size[0] * size[1], "kv_heads": size[0], "head_dim": size[2]}
    run.finish({"copy_bytes_per_s": bandwidth, **found}, **facts, dtype="bfloat16")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
