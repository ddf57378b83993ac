"""Paged decode attention of one layer on a GPU: time against the bytes it must read and a device copy of this run.

    python -m benchmarks.decode_attention --json
    python -m benchmarks.decode_attention --sweep        # how the Triton kernel is best launched

Each measurement is one program that calls the operation for several layers in turn, each with its own pages of one
pool (so the caches don't help), the queries of each being the results of the one before; time of the host that the
device can't hide counts. The peers (`benchmarks.peers.attention`), where importable: FlashInfer on pages of the same
size, torch on contiguous keys and values. The floor is the time a device copy takes for the same bytes, counting what
it reads and what it writes; a read alone can be faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import bars, common, kernels, quiet
from benchmarks.peers import attention as peers

Q_HEADS, HEADS, DIM = 32, 8, 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """`max_rows` is what the page table has room for; lengths are at most that."""

    batch: int
    rows: int
    page: int = 64
    codes: bool = False
    per_head: bool = False
    max_rows: int | None = None

    def __str__(self) -> str:
        marks = (", fp8" if self.codes else "") + (", per head" if self.per_head else "")
        room = f" of {kilo(self.max_rows)}" if self.max_rows else ""
        return f"B={self.batch} L={kilo(self.rows)}{room} page {self.page}{marks}"

    @property
    def nbytes(self) -> int:
        """Keys and values, with scales."""
        per_row = DIM + 4 if self.codes else 2 * DIM
        return 2 * self.batch * HEADS * self.rows * per_row

    @property
    def layers(self) -> int:
        """Enough for 1 GB, so that no cache holds what a call reads, and at least 4."""
        return max(4, min(36, -(-(10**9) // self.nbytes)))


def kilo(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


SHAPES = (
    Shape(16, 32768),
    Shape(64, 2048),
    Shape(1, 131072),
    Shape(1, 2048),
    Shape(1, 2048, max_rows=131072),
    Shape(16, 2048),
    Shape(4, 32768),
    Shape(16, 32768, page=16),
    Shape(64, 2048, page=16),
    Shape(64, 2048, per_head=True),
    Shape(16, 32768, codes=True),
    Shape(64, 2048, codes=True),
)


LAUNCHES = (
    *((64, 4, stages, programs) for stages, programs in ((4, 2), (4, 3), (5, 2))),
    *((32, 4, stages, programs) for stages, programs in ((4, 4), (5, 3), (5, 4), (6, 3))),
    (32, 2, 5, 4),
    (128, 4, 3, 2),
    *((128, 8, stages, programs) for stages, programs in ((3, 2), (4, 2), (5, 1))),
)
"""What `--sweep` tries: block rows, warps, stages, programs per multiprocessor."""


def random_rows(key: Any, num_pages: int, spec: Any) -> Any:
    """[num_pages, *spec.shape]: random scales, or random bits that are small floats.

    Drawing normals in float32 first would take three times the memory.
    """
    import jax
    import jax.numpy as jnp

    def draw(key):
        full = (num_pages, *spec.shape)
        if jnp.dtype(spec.dtype) == jnp.float32:
            return jax.random.uniform(key, full, jnp.float32, 0.5, 1.5)
        if jnp.dtype(spec.dtype) == jnp.bfloat16:
            bits = jax.random.bits(key, full, jnp.uint16) & 0x83FF | 0x3C00
            return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
        bits = jax.random.bits(key, full, jnp.uint8) & 0x9F | 0x20
        return bits if jnp.dtype(spec.dtype) == jnp.uint8 else jax.lax.bitcast_convert_type(bits, spec.dtype)

    return jax.jit(draw)(key)


def timed(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> Callable[[], float]:
    """Compiles a function that makes `calls` calls; the result measures seconds per call once.

    Programs are sent off without waiting, so that the device need not wait for the host as long as it has more to do.
    """
    import jax

    program = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(program(*arguments))
    repeats = max(3, 64 // calls)  # so that one dispatch and one wait weigh little

    def measure() -> float:
        start, out = time.perf_counter(), None
        for _ in range(repeats):
            out = program(*arguments)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (repeats * calls)

    return measure


def prepare(shape: Shape) -> Callable[..., Callable[[], float]]:
    """Makes inputs; the result compiles for (implementation, config) a function that measures seconds per call once."""
    import jax
    import jax.numpy as jnp

    from sparsejax import registry
    from sparsejax.geometry import Geometry
    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.decode_attention import triton_gpu as triton
    from sparsejax.pallas_kernels.layout import PageView

    storage = registry.resolve("fp8_kv" if shape.codes else "plain")[1]
    room = shape.max_rows or shape.rows
    geometry = Geometry(shape.layers, Q_HEADS, HEADS, DIM, shape.page, room, DIM**-0.5, "bfloat16")
    used, columns = geometry.pages(shape.rows), geometry.max_pages
    slab = shape.layers * HEADS
    slabs = 1 + shape.batch * used
    keys = jax.random.split(jax.random.key(0), 6)

    specs = storage.payload(storage.params, geometry)
    pools = {name: random_rows(keys[i], slabs * slab, spec) for i, (name, spec) in enumerate(specs.items())}
    table = 1 + jax.random.permutation(keys[4], shape.batch * used).astype(jnp.int32).reshape(shape.batch, 1, used)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, columns - used)))
    lengths = jnp.full((shape.batch, HEADS if shape.per_head else 1), shape.rows, jnp.int32)
    q = jax.random.normal(keys[5], (shape.batch, Q_HEADS, DIM), jnp.float32).astype(jnp.bfloat16)

    def load_tile(tiles, layer):
        return storage.load_tile(storage.params, geometry, tiles, layer)

    heads = jnp.arange(HEADS, dtype=jnp.int32)

    def one(layer, q, pools, table, lengths, implementation, config):
        if shape.per_head:
            entries = table * slab + layer * HEADS + heads[None, :, None]
            view = PageView(entries, 1, jnp.zeros(HEADS, jnp.int32), lengths)
        else:
            view = PageView(table, slab, layer * HEADS + heads, lengths)
        names = tuple(pools)
        if config is not None:
            return triton.decode_attention(q, pools, names, view, load_tile, layer, geometry.scale, config)[0]
        how = {"load_tile": load_tile, "layer": layer, "scale": geometry.scale, "implementation": implementation}
        return api.decode_attention(q, pools, names, view, **how)[0]

    def compiled(implementation: str, config: Any = None) -> Callable[[], float]:
        def all_layers(q, pools, table, lengths):
            for layer in range(shape.layers):
                q = one(jnp.int32(layer), q, pools, table, lengths, implementation, config)
            return q

        return timed(all_layers, (q, pools, table, lengths), shape.layers)

    return compiled


def copy_bandwidth() -> float:
    """Bytes per second of a device copy of 2 GiB, read and written bytes counted; the median of ten."""
    import jax
    import jax.numpy as jnp

    source = jax.random.bits(jax.random.key(0), (1 << 29,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    copy(source).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(4):
            out = copy(source)
        out.block_until_ready()
        times.append((time.perf_counter() - start) / 4)
    return 2 * source.nbytes / statistics.median(times)


def sides(shape: Shape, arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    compiled = prepare(shape)
    result = {"ours": compiled(arguments.implementation)}
    if arguments.xla:
        result["xla"] = compiled("xla")
    plain = shape.page == 64 and not (shape.codes or shape.per_head or shape.max_rows)
    if plain and not arguments.no_peers:
        rows = peers.Rows(shape.batch, shape.rows, HEADS, Q_HEADS // HEADS, DIM, shape.page)
        result |= peers.sides(rows, shape.layers)
    return result


def sweep(shapes: tuple[Shape, ...], bandwidth: float) -> None:
    """Prints the best launch configurations of the Triton kernel."""
    from sparsejax.pallas_kernels.decode_attention.triton_gpu import Config

    for shape in shapes:
        found, compiled = [], prepare(shape)
        for launch in LAUNCHES:
            config = Config(*launch)
            try:
                measure = compiled("triton", config)
            except Exception as error:  # too much shared memory, for one: not a configuration for this device
                print(f"{shape} {config}: {type(error).__name__}", flush=True)
                continue
            found.append((statistics.median(measure() for _ in range(5)), config))
        for seconds, config in sorted(found, key=lambda pair: pair[0])[:5]:
            share = shape.nbytes / bandwidth / seconds
            print(f"{shape}: {seconds * 1e6:.1f} us, {share:.3f} of the floor, {config}", flush=True)


def _is_side(entry: Any) -> bool:
    return isinstance(entry, dict) and "bytes_per_s" in entry


def main() -> None:
    parser = common.parser("decode_attention", (__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--implementation", default="auto", help="of ours")
    parser.add_argument("--xla", action="store_true", help="also the portable path")
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each side, in turn")
    parser.add_argument("--only", nargs="+", default=["*"], help="shapes whose description matches one of these")
    parser.add_argument("--sweep", action="store_true", help="look for the best launch configuration instead")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="draw the bandwidths")
    arguments = parser.parse_args()
    bars.check(arguments.plot)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory too
    run = common.Run("decode_attention", arguments)
    bandwidth = copy_bandwidth()
    print(f"device copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    shapes = tuple(shape for shape in SHAPES if any(fnmatch.fnmatchcase(str(shape), only) for only in arguments.only))
    if arguments.sweep:
        sweep(shapes, bandwidth)
        return
    rows, result = [], {}
    for shape in shapes:
        measured = sides(shape, arguments)
        found = quiet.alternate(measured, arguments.rounds, patience_s=arguments.patience_s).found
        floor = shape.nbytes / bandwidth
        entry: dict[str, Any] = {"bytes": shape.nbytes, "layers": shape.layers, "floor_s": floor}
        for name, samples in found.items():
            seconds = statistics.median(samples)
            # Peers are timed by events around a captured graph; so that ours can be compared, a trace tells how much of
            # the time by the clock is the device's.
            device = kernels.device_seconds(measured[name], shape.layers) if name in ("ours", "xla") else None
            entry[name] = {
                "seconds": common.summary(samples),
                "device_s": device,
                "bytes_per_s": shape.nbytes / seconds,
                "share_of_floor": floor / seconds,
            }
            if name != "ours":
                entry[name]["time_over_ours"] = common.ratio(samples, found["ours"])
            rows.append(
                (
                    str(shape),
                    name,
                    f"{seconds * 1e6:.1f}",
                    f"{device * 1e6:.1f}" if device else "-",
                    f"{shape.nbytes / seconds / 1e12:.2f}",
                    f"{floor / seconds:.2f}",
                )
            )
            print(*rows[-1], flush=True)
        result[str(shape)] = entry
    print(common.table(("shape", "side", "us", "device us", "TB/s", "of floor"), rows))
    if arguments.plot:
        names = list(dict.fromkeys(name for entry in result.values() for name in entry if _is_side(entry[name])))
        series = {
            name: [entry[name]["bytes_per_s"] / 1e12 if name in entry else 0.0 for entry in result.values()]
            for name in names
        }
        bars.write(arguments.plot, "Decode attention of one layer", list(result), series, "TB/s")
    facts = common.device_facts() | {"q_heads": Q_HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "bfloat16"}
    run.finish({"copy_bytes_per_s": bandwidth, "shapes": result}, **facts)


if __name__ == "__main__":
    main()
