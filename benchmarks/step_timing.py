"""What `benchmarks.decode_step` and `benchmarks.capacity` share: model shapes, steps of a filled runner, their floor.

Steps are submitted as the engine's scheduler does: step n+1 before the small outputs of step n are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import bars, common, filled_state
from benchmarks.decode_attention import copy_bandwidth

NOMINAL_BYTES_PER_S = {"NVIDIA H200": 4.3e12}
"""What a copy reaches at best, by device kind."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A built-in config, by how much contexts and budgets are divided for it, and how methods are set up."""

    config: str
    shrink: int
    page_size: int
    dense_layers: int = 2  # of methods that select


MODELS = {
    "qwen3-8b": Model("qwen3-8b", 1, 64),
    "smollm2": Model("smollm2-135m", 16, 16),
    "tiny": Model("tiny-qwen3", 128, 16, 1),
}


def composition(method: str, budget: int, model: Model) -> str:
    """The registry's name of `method` with `budget` tokens kept or read, sinks and recent ones included."""
    if method in ("dense", "fp8_kv"):
        return method
    sink, recent = min(64, budget // 8), min(512, budget // 4)
    if method == "streamingllm":
        # Two pages of new tokens between evictions, so that some lie in every window of steps.
        ratio = 1 + 2 * model.page_size / budget
        knobs = f"sink_keep_tokens={sink},recent_keep_tokens={budget - sink}"
        return f"streamingllm({knobs},streamingllm_decode_trigger_ratio={ratio})"
    knobs = f"sink_keep_tokens={sink},decode_keep_tokens={budget - sink - recent},recent_keep_tokens={recent}"
    if method == "quest":
        return f"quest({knobs},quest_chunk_size={model.page_size},quest_skip_layers={model.dense_layers})"
    return f"{method}({knobs},observation_window_size={min(32, recent)})"


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes that a step must read."""

    weight_bytes: int
    kv_bytes: int
    summary_bytes: int

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.summary_bytes


def read_weight_bytes(spec: Any) -> int:
    """Bytes of all weights that a decode step reads: an embedding table counts only where it is the head too."""
    from sparsejax.arrays import tree_nbytes
    from sparsejax.models.registry import get_architecture

    specs = get_architecture(spec.architecture).weight_specs(spec)
    table = 0 if spec.tie_embeddings else tree_nbytes(specs["embed"])
    return tree_nbytes(specs) - table


def floor(spec: Any, geometry: Any, method: Any, storage: Any, batch: int, resident: int) -> Floor:
    """What one step of `batch` rows with `resident` rows of KV each must read."""
    from sparsejax.arrays import ArraySpec, tree_nbytes

    rows = method.rows_read(resident, geometry)
    summaries = 0
    if method.select is not None:
        specs = [aux for aux in method.aux_specs(geometry).values() if aux.per == "page"]
        page = tree_nbytes([ArraySpec(aux.shape, aux.dtype or geometry.dtype) for aux in specs])
        selecting = sum(role != "dense" for role in method.roles(geometry.num_layers))
        summaries = batch * geometry.pages(resident) * selecting * geometry.num_kv_heads * page
    return Floor(read_weight_bytes(spec), batch * rows * storage.bytes_per_token(geometry), summaries)


# A filled runner and its steps


@dataclasses.dataclass(frozen=True)
class Timed:
    """Means over the steps of one round: of whole steps, and of the host's time inside `decode`."""

    step_s: float
    host_s: float


def take_steps(runner: Any, method: str, batch: int, steps: int) -> Timed:
    """Runs one step and then `steps` timed ones, one ahead of the results.

    Raises:
      RuntimeError: logits were not finite.
    """
    from sparsejax.plans import DecodeRow, SamplingRow

    def plan(step: int) -> list[DecodeRow]:
        return [DecodeRow(i + 1, SamplingRow(position=step)) for i in range(batch)]

    ticket, fine = runner.decode(method, plan(0)), True
    start = host = 0.0
    for step in range(1, steps + 1):
        rows = plan(step)
        before = time.perf_counter()
        following = runner.decode(method, rows)
        host += time.perf_counter() - before
        fine &= bool(ticket.result().ok.all())
        start = start or time.perf_counter()
        ticket = following
    fine &= bool(ticket.result().ok.all())
    end = time.perf_counter()
    if not fine:
        raise RuntimeError(f"{method}: logits are not finite")
    return Timed((end - start) / steps, host / steps)


class Filled:
    """A `DeviceRunner` whose pool is full of random rows, for some methods that share a storage.

    Args:
      spec, weights: the model.
      compositions: registry names by the names that cases use.
      batch: rows, and the only decode bucket.
      context: tokens of each row's text.
      page_size: tokens.
      implementation: of the kernels, None to choose.
      num_sequence_pages: of the pool, the null page included; as many as the rows need if not given.

    Attributes:
      resident: rows that each method leaves of such a text; a row needs pages for them and one more for new rows.
      compile_s: seconds spent on compiling programs of the runner, so far.
    """

    def __init__(
        self,
        spec: Any,
        weights: Any,
        compositions: dict[str, str],
        batch: int,
        context: int,
        page_size: int,
        implementation: str | None,
        num_sequence_pages: int | None = None,
    ) -> None:
        from sparsejax import registry
        from sparsejax.runner import DeviceRunner

        resolved = {name: registry.resolve(text) for name, text in compositions.items()}
        (self.storage,) = {storage for _, storage in resolved.values()}
        self.methods = {name: method for name, (method, _) in resolved.items()}
        self.spec, self.context = spec, context
        self.resident = {name: resident_tokens(method, context) for name, method in self.methods.items()}
        self.geometry = spec.geometry(page_size, window(context, page_size))
        self.compile_s = 0.0
        pages = self.geometry.pages(max(self.resident.values())) + 1
        self.runner = DeviceRunner(
            spec,
            weights,
            self.geometry,
            self.methods,
            self.storage,
            num_rows=batch,
            num_sequence_pages=num_sequence_pages or 1 + batch * pages,
            decode_buckets=(batch,),
            prefill_buckets=((1, 16),),
            implementation=implementation,
            on_compile=self._count_compilation,
        )
        filled_state.fill_pages(self.runner, self.storage)
        filled_state.assign_pages(self.runner)

    def _count_compilation(self, _: str, seconds: float) -> None:
        self.compile_s += seconds

    def rewind(self, method: str, batch: int) -> None:
        """Undoes what steps did: rows 1..batch are as the prompt left them."""
        filled_state.set_rows(self.runner, batch, self.resident[method], self.context)

    def round(self, method: str, batch: int, steps: int) -> Timed:
        self.rewind(method, batch)
        return take_steps(self.runner, method, batch, steps)

    def floor(self, method: str, batch: int) -> Floor:
        return floor(self.spec, self.geometry, self.methods[method], self.storage, batch, self.resident[method])

    def facts(self, method: str) -> dict[str, int]:
        """Rows of the cache by what happens to them."""
        resident = self.resident[method]
        read = self.methods[method].rows_read(resident, self.geometry)
        return {"resident_tokens": resident, "read_tokens": read}


def window(context: int, page_size: int) -> int:
    """Tokens of the longest row: the context in whole pages, and a page of new tokens."""
    return (-(-context // page_size) + 1) * page_size


def resident_tokens(method: Any, context: int) -> int:
    """Rows that stay of a prompt of `context` tokens."""
    import numpy as np

    return int(method.kept_after("prompt", np.asarray([context], np.int32))[0])


def seconds(rounds: Sequence[Timed]) -> list[float]:
    """Of a step, by round."""
    return [timed.step_s for timed in rounds]


def judge(batch: int, found: Sequence[Timed], limit: Floor, bandwidths: dict[str, float]) -> dict[str, Any]:
    """Rounds of one case against its floor."""
    steps = seconds(found)
    median = common.summary(steps)["median"]
    return {
        "step_s": common.summary(steps),
        "tokens_per_s": batch / median,
        "host_s": common.summary([timed.host_s for timed in found]),
        "floor_bytes": dataclasses.asdict(limit),
        "floor_s": {name: limit.nbytes / bandwidth for name, bandwidth in bandwidths.items()},
        "step_over_floor": {name: median / (limit.nbytes / bandwidth) for name, bandwidth in bandwidths.items()},
    }


def cells(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    over, faster = entry["step_over_floor"], entry.get("faster_than_dense")
    nominal = "nominal" in over
    return (
        name,
        f"{entry['step_s']['median'] * 1e3:.3f}",
        f"{entry['step_s']['spread']:.1%}",
        f"{entry['tokens_per_s']:,.1f}",
        f"{entry['host_s']['median'] * 1e3:.3f}",
        f"{entry['floor_s']['measured'] * 1e3:.3f}",
        f"{over['measured']:.3f}",
        f"{entry['floor_s']['nominal'] * 1e3:.3f}" if nominal else "-",
        f"{over['nominal']:.3f}" if nominal else "-",
        f"{faster['ratio']:.2f}" if faster else "-",
        f"{entry['compile_s']:.1f}",
    )


HEADER = (
    "case",
    "step ms",
    "spread",
    "tokens/s",
    "host ms",
    "floor ms",
    "step/floor",
    "nominal ms",
    "step/nominal",
    "x dense",
    "compile s",
)


def line(name: str, entry: dict[str, Any]) -> str:
    shown = zip(HEADER[1:], cells(name, entry)[1:], strict=True)
    return f"{name}: " + ", ".join(f"{title} {cell}" for title, cell in shown if cell != "-")


def read_bandwidth() -> float:
    """Bytes per second of sums over 256 MB: what a CPU reads, with no fresh pages to write as a copy has."""
    import jax
    import jax.numpy as jnp

    source = jnp.ones((64, 1 << 20), jnp.float32)
    total = jax.jit(lambda x: x.sum(1))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        total(source).block_until_ready()
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times[1:])


def device_bandwidths(given: float | None) -> dict[str, float]:
    """Bytes per second: "measured" now, "nominal" as given or as known for this device. Prints them.

    Measured is a device copy; on a CPU, sums.
    """
    import jax

    device = jax.devices()[0]
    found = {"measured": read_bandwidth() if device.platform == "cpu" else copy_bandwidth()}
    nominal = given * 1e12 if given else NOMINAL_BYTES_PER_S.get(device.device_kind)
    if nominal:
        found["nominal"] = nominal
    shown = ", ".join(f"{name} {value / 1e12:.3f} TB/s" for name, value in found.items())
    print(f"{device.device_kind}: {shown}", flush=True)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of both benchmarks."""
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-8b", help="shape; small ones shrink contexts")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: by device")
    parser.add_argument("--implementation", help="of the kernels; chosen if not given")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nominal", type=float, metavar="TB_PER_S", help="bandwidth of the second floor")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases whose name matches one")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="draw the result")


def prepare(arguments: argparse.Namespace) -> None:
    """What must come before the device is first used, and refusals."""
    bars.check(arguments.plot)
    page_size = MODELS[arguments.model].page_size
    if not 2 <= arguments.steps < page_size:
        raise SystemExit(f"--steps must be from 2 to {page_size - 1}: a row has one page of room")
    reserve_memory()


def reserve_memory() -> None:
    """Lets JAX have most of a GPU's memory; before the device is first used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model's spec and random weights, made on the device."""
    import jax

    from sparsejax.models.load import dummy, resolve_dtype

    common.use_compilation_cache()
    start = time.perf_counter()
    spec = dummy.dummy_spec(MODELS[arguments.model].config, resolve_dtype(arguments.dtype))
    weights = jax.block_until_ready(dummy.dummy_weights(spec))
    print(f"{spec.architecture}, {spec.dtype}: weights made in {time.perf_counter() - start:.1f} s", flush=True)
    return spec, weights


def matching(cases: Sequence[Any], patterns: Sequence[str]) -> list[Any]:
    """Cases whose text matches a pattern; SystemExit if none does."""
    found = [case for case in cases if any(fnmatch.fnmatchcase(str(case), pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(f"--only matches none of: {'; '.join(map(str, cases))}")
    return found


def facts(spec: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """For the manifest."""
    return {
        **common.device_facts(),
        "model": MODELS[arguments.model].config,
        "dtype": spec.dtype,
        "page_size": MODELS[arguments.model].page_size,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
