"""Paged prefill attention of one layer on a GPU: TFLOP/s beside cuDNN, torch and a matrix product of the same run.

    python -m benchmarks.prefill_attention --json --plot prefill.svg
    python -m benchmarks.prefill_attention --sweep --only "32K*"      # how the Mosaic kernel is best launched

First, small ragged cases are compared with the float32 oracle; whatever a kernel must not read there is NaN. Then each
shape is timed as one program that calls the operation for several layers in turn, each with pages of its own in random
order. Only products that causality asks for are counted: 4 * head_dim per query, head and key that it sees. The peers,
where they can run, get contiguous keys and values and serve the shapes without history: cuDNN through
jax.nn.dot_product_attention, and torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib.util
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import bars, common, quiet

Q_HEADS, HEADS, DIM, PAGE = 32, 8, 128, 64
MATMUL = 8192
LARGEST_ERROR = 2e-2


@dataclasses.dataclass(frozen=True)
class Shape:
    """`batch` chunks of new rows, each after `history` rows."""

    chunk: int
    history: int = 0
    batch: int = 1

    def __str__(self) -> str:
        after = f" after {_kilo(self.history)}" if self.history else ""
        return f"{_kilo(self.chunk)}{after}" + (f" B={self.batch}" if self.batch > 1 else "")

    @property
    def rows(self) -> int:
        return self.history + self.chunk

    @property
    def flops(self) -> int:
        """Of both products, of the keys that each query sees and no others."""
        keys = self.chunk * self.history + self.chunk * (self.chunk + 1) // 2
        return self.batch * Q_HEADS * keys * 4 * DIM

    @property
    def layers(self) -> int:
        """Enough for about 40 ms at 600 TFLOP/s, at most 48."""
        return max(1, min(48, round(24e12 / self.flops)))


def _kilo(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


SHAPES = (
    Shape(8192),
    Shape(8192, batch=2),
    Shape(32768),
    Shape(131072),
    Shape(4096),
    Shape(4096, 32768),
    Shape(4096, 126976),
    Shape(512, 32768),
)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A small case that is checked, not timed."""

    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    heads: int = 2
    group: int = 4
    dim: int = 128
    page: int = 64
    per_head: bool = False
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return (
            f"{self.dtype} {self.heads}x{self.group} heads of {self.dim}, page {self.page}"
            f"{', per head' if self.per_head else ''}, lengths {self.lengths}, chunks {self.chunks}"
        )


_LENGTHS, _CHUNKS = (1, 0, 63, 64, 65, 700, 127, 1537, 129), (1, 0, 63, 1, 65, 130, 100, 200, 128)
CHECKS = (
    Ragged(_LENGTHS, _CHUNKS),
    Ragged(_LENGTHS, _CHUNKS, page=16),
    Ragged(_LENGTHS, _CHUNKS, page=128),
    Ragged(_LENGTHS, _CHUNKS, dim=64),
    Ragged(_LENGTHS, _CHUNKS, dim=256),
    Ragged(_LENGTHS, _CHUNKS, heads=3, group=3),
    Ragged(_LENGTHS, _CHUNKS, heads=8, per_head=True),
    Ragged(_LENGTHS, _CHUNKS, dtype="float16"),
    Ragged((2048,), (2048,)),
    Ragged((5000,), (333,)),
)

LAUNCHES: tuple[dict[str, Any], ...] = (
    {},
    {"sharers": 1},
    {"stages": 3},
    {"registers": 240, "copy_registers": 24},
    {"cache_bytes": 8 << 20},
    {"cache_bytes": 1 << 30},
    {"block_rows": 64, "stages": 4},
    {"block_rows": 192},
)
"""What `--sweep` tries instead of the defaults of `mosaic_gpu.Config`."""


def check(case: Ragged, implementation: str, config: Any = None) -> float:
    """The largest error, relative of a query's result and absolute of its lse; infinite if anything is not finite."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sparsejax.pallas_kernels import reference
    from sparsejax.pallas_kernels.layout import PageView

    rng = np.random.default_rng(0)
    batch, own = len(case.lengths), case.heads if case.per_head else 1
    lengths = np.repeat(np.asarray(case.lengths, np.int32)[:, None], own, 1)
    start = lengths - np.asarray(case.chunks, np.int32)[:, None]
    columns = -(-max(case.lengths) // case.page)
    table = (1 + rng.permutation(batch * own * columns)).reshape(batch, own, columns).astype(np.int32)
    table = np.where(np.arange(columns) < -(-lengths // case.page)[:, :, None], table, 0)
    stride = 1 if case.per_head else case.heads
    offset = np.zeros(case.heads, np.int32) if case.per_head else np.arange(case.heads, dtype=np.int32)
    head_pages = np.broadcast_to(table * stride, (batch, case.heads, columns)) + offset[:, None]
    full = np.broadcast_to(lengths, (batch, case.heads))
    b, h, row = np.nonzero(np.arange(columns * case.page) < full[:, :, None])
    pools = {}
    for name in ("k", "v"):
        pool = np.full(((1 + batch * own * columns) * stride, case.page, case.dim), np.nan, np.float32)
        pool[head_pages[b, h, row // case.page], row % case.page] = rng.standard_normal((len(b), case.dim))
        pools[name] = jnp.asarray(pool, case.dtype)
    chunk = max(case.chunks)
    q = jnp.asarray(rng.standard_normal((batch, chunk, case.heads * case.group, case.dim)), case.dtype)
    view = PageView(jnp.asarray(table), stride, jnp.asarray(offset), jnp.asarray(lengths))
    layer, scale = jnp.int32(0), case.dim**-0.5

    @jax.jit
    def both(q, pools, table, lengths, start):
        given = view._replace(table=table, lengths=lengths)
        found = _attend(implementation, config, q, pools, given, start, layer, scale)
        return found, reference.prefill_attention(q, pools, ("k", "v"), given, start, _plain, layer, scale)

    (out, lse), (wanted, wanted_lse) = both(q, pools, view.table, view.lengths, jnp.asarray(start))
    out, lse, wanted, wanted_lse = (np.asarray(x, np.float32) for x in (out, lse, wanted, wanted_lse))
    if not (np.isfinite(out).all() and np.isfinite(lse).all()):
        return float("inf")
    real = np.arange(chunk)[None, :] < np.asarray(case.chunks)[:, None]
    out, wanted = out[real], wanted[real]
    error = np.linalg.norm(out - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(max(error.max(), np.abs(lse[real] - wanted_lse[real]).max()))


def _plain(tiles, layer):
    return tiles["k"], tiles["v"]


def _attend(implementation, config, q, pools, view, start, layer, scale):
    """(out, lse) of the operation, or of the Mosaic kernel launched in a certain way."""
    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.prefill_attention import mosaic_gpu

    names = ("k", "v")
    if config is not None:
        return mosaic_gpu.prefill_attention(q, pools, names, view, start, _plain, layer, scale, config)
    how = {"load_tile": _plain, "layer": layer, "scale": scale, "implementation": implementation}
    return api.prefill_attention(q, pools, names, view, start, **how)


def prepare(shape: Shape) -> Callable[..., Callable[[], float]]:
    """Makes inputs; the result compiles for (implementation, config) a function that measures seconds per call once."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels.layout import PageView

    slab, columns = shape.layers * HEADS, -(-shape.rows // PAGE)
    keys = jax.random.split(jax.random.key(0), 4)
    size = ((1 + shape.batch * columns) * slab, PAGE, DIM)
    pools = {name: _normal(key, size) for name, key in zip(("k", "v"), keys, strict=False)}
    table = 1 + jax.random.permutation(keys[2], shape.batch * columns).astype(jnp.int32)
    table = table.reshape(shape.batch, 1, columns)
    lengths = jnp.full((shape.batch, 1), shape.rows, jnp.int32)
    start = jnp.full((shape.batch, 1), shape.history, jnp.int32)
    q = _normal(keys[3], (shape.batch, shape.chunk, Q_HEADS, DIM))
    heads = jnp.arange(HEADS, dtype=jnp.int32)

    def compiled(implementation: str, config: Any = None) -> Callable[[], float]:
        def all_layers(q, pools, table, lengths, start):
            views = (PageView(table, slab, layer * HEADS + heads, lengths) for layer in range(shape.layers))
            given = ((q, pools, view, start, jnp.int32(layer), DIM**-0.5) for layer, view in enumerate(views))
            return [_attend(implementation, config, *arguments)[0] for arguments in given]

        return timed(all_layers, (q, pools, table, lengths, start), shape.layers)

    return compiled


def _normal(key: Any, size: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    import jax

    return jax.jit(lambda key: jax.random.normal(key, size, dtype))(key)


def timed(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> Callable[[], float]:
    """Compiles a program that holds `calls` calls; the result measures seconds per call."""
    import jax

    program = jax.jit(function).lower(*arguments).compile()

    def measure() -> float:
        jax.block_until_ready(program(*arguments))  # so that every side starts with the clocks of its own load
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return (time.perf_counter() - start) / calls

    measure()
    return measure


def cudnn(shape: Shape) -> Callable[[], float]:
    import jax

    keys = jax.random.split(jax.random.key(1), 3)
    sizes = ((shape.batch, shape.chunk, heads, DIM) for heads in (Q_HEADS, HEADS, HEADS))
    q, k, v = (_normal(key, size) for key, size in zip(keys, sizes, strict=True))

    def all_layers(queries, k, v):
        attend = jax.nn.dot_product_attention
        return [attend(q, k, v, scale=DIM**-0.5, is_causal=True, implementation="cudnn") for q in queries]

    # The same queries, but as arguments of their own: what is seen to be equal is computed once.
    return timed(all_layers, ([q] * shape.layers, k, v), shape.layers)


def torch_sdpa(shape: Shape) -> Callable[[], float]:
    import torch

    sizes = ((shape.batch, heads, shape.chunk, DIM) for heads in (Q_HEADS, HEADS, HEADS))
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)

    def run():
        for _ in range(shape.layers):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def measure() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / shape.layers

    measure()
    return measure


def matmul_flops_per_s(size: int = MATMUL, dtype: str = "bfloat16") -> float:
    """Of a product of two square matrices of random numbers, the median of seven measurements."""
    import jax

    a, b = (_normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    calls = 8

    def products(a, b):
        for _ in range(calls):
            a = a @ b * (size**-0.5)
        return a

    measure = timed(products, (a, b), calls)
    return 2 * size**3 / statistics.median(measure() for _ in range(7))


def sides(shape: Shape, arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    result = {"ours": prepare(shape)(arguments.implementation)}
    if arguments.no_peers or shape.history:
        return result
    peers = {"cudnn": cudnn} | ({"torch_sdpa": torch_sdpa} if importlib.util.find_spec("torch") else {})
    for name, make in peers.items():
        try:
            result[name] = make(shape)
        except Exception as error:  # a peer that can't serve a shape is not a reason to stop
            print(f"{shape}: no {name} ({type(error).__name__}: {str(error)[:200]})", flush=True)
    return result


def sweep(shapes: tuple[Shape, ...]) -> None:
    """Prints how fast each launch configuration of the Mosaic kernel is, of those that are right."""
    from sparsejax.pallas_kernels.prefill_attention.mosaic_gpu import Config, default_config

    configs: dict[str, Config] = {}
    for change in LAUNCHES:
        config = dataclasses.replace(default_config(DIM), **change)
        try:
            error = check(CHECKS[0], "mosaic_gpu", config)
        except Exception as failure:  # too much shared memory, for one: not a configuration for this device
            print(f"{change}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
            continue
        print(f"{change}: largest error {error:.2e}", flush=True)
        if error < LARGEST_ERROR:
            configs[str(change)] = config
    if not configs:
        raise SystemExit("no configuration can be launched here")
    for shape in shapes:
        compiled = prepare(shape)
        measures = {name: compiled("mosaic_gpu", config) for name, config in configs.items()}
        samples = quiet.alternate(measures, 5).found
        for name, seconds in sorted(samples.items(), key=lambda pair: statistics.median(pair[1])):
            print(f"{shape}: {shape.flops / statistics.median(seconds) / 1e12:.0f} TFLOP/s, {name}", flush=True)


def main() -> None:
    parser = common.parser("prefill_attention", (__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--implementation", default="auto", help="of ours")
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--no-check", action="store_true", help="don't compare with the oracle first")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side, in turn")
    parser.add_argument("--only", nargs="+", default=["*"], help="shapes whose description matches one of these")
    parser.add_argument("--sweep", action="store_true", help="look for the best launch configuration instead")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="draw the result")
    arguments = parser.parse_args()
    bars.check(arguments.plot)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory too
    run = common.Run("prefill_attention", arguments)
    errors = {}
    for case in () if arguments.no_check else CHECKS:
        errors[str(case)] = error = check(case, arguments.implementation)
        print(f"{case}: largest error {error:.2e}{'' if error < LARGEST_ERROR else '  WRONG'}", flush=True)
    shapes = tuple(shape for shape in SHAPES if any(fnmatch.fnmatchcase(str(shape), only) for only in arguments.only))
    if arguments.sweep:
        sweep(shapes)
        return
    ceiling = matmul_flops_per_s()
    print(f"product of {MATMUL}^3: {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    rows, result = [], {}
    for shape in shapes:
        found = quiet.alternate(sides(shape, arguments), arguments.rounds).found
        entry: dict[str, Any] = {"flops": shape.flops, "layers": shape.layers}
        for name, samples in found.items():
            speed = shape.flops / statistics.median(samples)
            entry[name] = {
                "seconds": common.summary(samples),
                "flops_per_s": speed,
                "share_of_matmul": speed / ceiling,
            }
            if name != "ours":
                entry[name]["time_over_ours"] = common.ratio(samples, found["ours"])
            spread = entry[name]["seconds"]["spread"]
            rows.append(
                (
                    str(shape),
                    name,
                    f"{statistics.median(samples) * 1e3:.3f}",
                    f"{speed / 1e12:.0f}",
                    f"{speed / ceiling:.2f}",
                    f"{spread:.1%}",
                )
            )
            print(*rows[-1], flush=True)
        result[str(shape)] = entry
    print(common.table(("shape", "side", "ms", "TFLOP/s", "of matmul", "spread"), rows))
    facts = common.device_facts() | {"q_heads": Q_HEADS, "kv_heads": HEADS, "head_dim": DIM, "page": PAGE}
    run.finish({"matmul_flops_per_s": ceiling, "errors": errors, "shapes": result}, dtype="bfloat16", **facts)
    if arguments.plot:
        names = sorted({name for entry in result.values() for name in entry} - {"flops", "layers"})
        series = {
            name: [entry[name]["flops_per_s"] / 1e12 if name in entry else 0.0 for entry in result.values()]
            for name in names
        }
        bars.write(arguments.plot, "Prefill attention, bf16", list(result), series, "TFLOP/s")


if __name__ == "__main__":
    main()
