"""Sampling from the logits of a batch: time of the sampling program by what rows ask for, and of the threshold alone.

    python -m benchmarks.sampling --json
    python -m benchmarks.sampling --sweep                # how the threshold kernels are best launched

"ours" is the implementation that `--implementation` names, "xla" the portable one. Each measurement is one program
that samples from several arrays of logits in turn (of large batches more than the caches hold); the position of a draw
is the token before, so that nothing is left out. Logits are normal, with a standard deviation of `--spread`. "us" is
time by the clock, "device us" what a trace of the GPU saw running. The floor is one reading of the logits at the
bandwidth of a device copy of this run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import common, kernels, quiet, step_timing
from benchmarks.decode_attention import timed

LEAST_BYTES = 2e8
"""That all calls of a program read together, if they are many rows: several times what the caches hold."""
CASES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k + top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
}
"""What every row asks for."""
SWEEP = {
    "block": (2048, 4096, 8192),
    "num_warps": (4, 8, 16),
    "collect_warps": (8, 16),
    "search_block": (512, 1024, 2048),
    "search_warps": (4, 8, 16),
}
"""What `--sweep` tries, one field at a time."""
Measure = Callable[[], float]


class Batch:
    """Logits of several calls, and packed parameters."""

    def __init__(self, batch: int, arguments: argparse.Namespace) -> None:
        import jax
        import jax.numpy as jnp

        self.batch = batch
        self.nbytes = 4 * batch * arguments.vocab
        self.calls = arguments.calls or max(4, min(8, -(-int(LEAST_BYTES) // self.nbytes)))
        draw = jax.jit(lambda key: arguments.spread * jax.random.normal(key, (batch, arguments.vocab), jnp.float32))
        self.logits = tuple(draw(key) for key in jax.random.split(jax.random.key(0), self.calls))

    def parameters(self, case: str) -> tuple[Any, Any]:
        from sparsejax import sampling

        ints, floats = sampling.greedy_inputs(self.batch)
        for name, value in CASES[case].items():
            columns, array = (
                (sampling.INT_COLUMNS, ints) if name in sampling.INT_COLUMNS else (sampling.FLOAT_COLUMNS, floats)
            )
            array[:, columns.index(name)] = value
        ints[:, sampling.INT_COLUMNS.index("seed_low")] = range(self.batch)
        return ints, floats

    def sampled(self, case: str, implementation: str) -> Measure:
        """Seconds per call of what `steps.sample_step` does with the logits."""
        import jax.numpy as jnp

        from sparsejax import sampling

        mode = sampling.GREEDY if case == "greedy" else sampling.SAMPLE

        def run(logits: tuple[Any, ...], ints: Any, floats: Any) -> Any:
            inputs = sampling.SamplingInputs.unpack(ints, floats)
            tokens = jnp.zeros(self.batch, jnp.int32)
            for one in logits:
                at = inputs._replace(position=tokens)
                tokens = sampling.sample(one, at, tuple, mode, implementation)  # no bias in these modes
            return tokens

        return timed(run, (self.logits, *self.parameters(case)), self.calls)

    def thresholds(self, case: str, threshold: Callable[..., Any]) -> Measure:
        """Seconds per call of the threshold alone."""
        from sparsejax import sampling

        def run(logits: tuple[Any, ...], ints: Any, floats: Any) -> Any:
            inputs = sampling.SamplingInputs.unpack(ints, floats)
            row = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p
            return [threshold(one, *row) for one in logits]

        return timed(run, (self.logits, *self.parameters(case)), self.calls)


def sides(batch: Batch, case: str, arguments: argparse.Namespace) -> dict[str, Measure]:
    from sparsejax.pallas_kernels import api

    found = {}
    names = {"ours": arguments.implementation} | ({} if arguments.no_xla or case == "greedy" else {"xla": "xla"})
    for side, name in names.items():
        found[side] = batch.sampled(case, name)
        if case not in ("greedy", "temperature"):
            alone = functools.partial(api.logit_threshold, implementation=name)
            found[f"{side}, threshold"] = batch.thresholds(case, alone)
    return found


def sweep(arguments: argparse.Namespace) -> None:
    """Prints the threshold's time for every launch that differs from the default in one field."""
    from sparsejax.pallas_kernels.logit_threshold import triton_gpu

    default = triton_gpu.Config()
    launches = [default]
    for field, values in SWEEP.items():
        changed = (dataclasses.replace(default, **{field: value}) for value in values)
        launches += [config for config in changed if config != default]
    for size, case in itertools.product(arguments.batches, ("top-k + top-p", "top-p")):
        batch, found = Batch(size, arguments), []
        for config in launches:
            measure = batch.thresholds(case, functools.partial(triton_gpu.launch, config=config))
            seconds = statistics.median(measure() for _ in range(5))
            found.append((kernels.device_seconds(measure, batch.calls) or seconds, seconds, config))
        for device, seconds, config in sorted(found, key=lambda one: one[0]):
            mark = " (default)" if config == default else ""
            print(f"B={size} {case}: device {device * 1e6:.1f} us, clock {seconds * 1e6:.1f} us, {config}{mark}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser("sampling", (__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens of the vocabulary")
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="what rows ask for")
    parser.add_argument("--calls", type=int, help="of a program; by default enough for 200 MB of logits, from 4 to 8")
    parser.add_argument("--implementation", default="auto", help="of ours")
    parser.add_argument("--no-xla", action="store_true", help="ours only")
    parser.add_argument("--no-device-times", dest="device_times", action="store_false", help="make no traces")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each side, in turn")
    parser.add_argument("--sweep", action="store_true", help="look for the best launch of the threshold instead")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run = common.Run("sampling", arguments)
    if arguments.sweep:
        sweep(arguments)
        return 0
    bandwidth = step_timing.device_bandwidths(None)["measured"]
    rows, result = [], {}
    for size in arguments.batches:
        batch = Batch(size, arguments)
        for case in arguments.cases:
            measured = sides(batch, case, arguments)
            rounds = quiet.alternate(measured, arguments.rounds, patience_s=arguments.patience_s)
            entry: dict[str, Any] = {"bytes": batch.nbytes, "calls": batch.calls, "quiet": rounds.facts}
            for name, samples in rounds.found.items():
                seconds = statistics.median(samples)
                entry[name] = {"seconds": common.summary(samples)}
                device = kernels.device_seconds(measured[name], batch.calls) if arguments.device_times else None
                if device is not None:
                    entry[name]["device_s"] = device
                times = f"{seconds * 1e6:.1f}", f"{device * 1e6:.1f}" if device else "-"
                rows.append((f"B={size} {case}", name, *times, f"{batch.nbytes / bandwidth * 1e6:.1f}"))
                print(*rows[-1], flush=True)
            for name in [name for name in rounds.found if name.startswith("xla")]:
                entry[name]["time_over_ours"] = common.ratio(
                    rounds.found[name], rounds.found[name.replace("xla", "ours")]
                )
            result[f"B={size} {case}"] = entry
    print(common.table(("case", "side", "us", "device us", "floor us"), rows))
    facts = common.device_facts() | {"vocab": arguments.vocab, "dtype": "float32"}
    run.finish({"copy_bytes_per_s": bandwidth, "cases": result}, **facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
