"""What it takes to go on with a long conversation whose compressed rows were kept, against reading it again.

    python -m benchmarks.chain_resume --json

One conversation of `--context` tokens, which `snapkv` reduces to `--keep` rows, through the engine's own scheduler; the
model has the given shape and random weights. Then turns of `--suffix` new tokens each, in turn with the rows on the
device, and with the rows in host memory alone. "resume" is the time until the rows are a row's again: from before the
first transfer is submitted until the device has carried out the last, nothing else running. "first token" is a whole
turn's: from the request to its first token, suffix included, waiting for nothing in between. The floor of a resume from
the host is its bytes at the bandwidth of a copy from page-locked memory, measured in the same run. "prefill" is the
time to the first token of a whole conversation of that length, the second one of the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import common, step_timing
from benchmarks.step_timing import MODELS

METHOD = "snapkv"
GOALS_S = {"device": 5e-3, "host": 60e-3}
COPY_BYTES = 1 << 30


def timed_runner() -> type:
    """A `DeviceRunner` that notes how long each resume took, transfers and programs included."""
    import jax

    from sparsejax.runner import DeviceRunner

    class TimedRunner(DeviceRunner):
        timing = False
        seconds = 0.0

        def _timed(self, work: Any) -> Any:
            if not self.timing:
                return work()
            jax.block_until_ready(self.state)
            start = time.perf_counter()
            result = work()
            jax.block_until_ready(self.state)
            self.seconds += time.perf_counter() - start
            return result

        def import_parked(self, method: str, pages: Any, swapped: Any) -> Any:
            return self._timed(lambda: super(TimedRunner, self).import_parked(method, pages, swapped))

        def unpark(self, method: str, plan: Any) -> None:
            return self._timed(lambda: super(TimedRunner, self).unpark(method, plan))

    return TimedRunner


class Conversation:
    """An engine with one conversation in it."""

    def __init__(self, spec: Any, weights: Any, arguments: argparse.Namespace) -> None:
        import numpy as np

        from sparsejax import registry
        from sparsejax.programs import compile_workers
        from sparsejax.scheduler import Scheduler
        from sparsejax.settings import EngineSettings

        model = MODELS[arguments.model]
        context, self.suffix = arguments.context // model.shrink, arguments.suffix
        keep, page = arguments.keep // model.shrink, model.page_size
        method, storage = registry.resolve(step_timing.composition(METHOD, keep, model))
        turns = 4 + 4 * arguments.rounds
        longest = context + turns * (self.suffix + arguments.answer + 1)
        geometry = spec.geometry(page, -(-longest // page) * page)
        chunk = min(arguments.chunk, context)
        # The prompt, what a compaction moves to, and the kept rows of both conversations.
        pages = 1 + geometry.pages(longest) + 4 * geometry.pages(keep + turns * (self.suffix + arguments.answer))
        self.runner = timed_runner()(
            spec,
            weights,
            geometry,
            {METHOD: method},
            storage,
            num_rows=2,
            num_sequence_pages=pages,
            decode_buckets=(1,),
            prefill_buckets=((1, max(page, self.suffix + 1)), (1, chunk)),
            implementation=arguments.implementation,
        )
        names = {"decode", "maintain", "sample", "setup_row", "prefill", "park_row", "unpark_row"}
        names |= {"export_rows", "import_rows", "copy_pages"}
        wanted = [program for program in self.runner.programs() if program.name in names]
        for compiled in self.runner.compile(wanted, compile_workers()):
            print(f"{compiled.program.label}: {compiled.lower_s + compiled.compile_s:.1f} s", flush=True)
        # Blocks of the prefix cache would stand for rows that are on the host.
        settings = EngineSettings(
            max_num_batched_tokens=chunk, chain_host_bytes=64 << 30, chain_ttl_s=1e6, prefix_cache=False
        )
        self.scheduler = Scheduler(self.runner, settings)
        self.answer = arguments.answer
        self.rng = np.random.default_rng(0)
        self.spec, self.context, self.count = spec, context, 0
        self.ledger: list[int] = []
        self.chain_id = ""

    def begin(self) -> float:
        """A new conversation; seconds to its first token."""
        self.ledger, self.chain_id = self.random_ids(self.context), ""
        return self.turn([])

    def random_ids(self, count: int) -> list[int]:
        return self.rng.integers(0, self.spec.vocab_size, count).tolist()

    def turn(self, more: list[int]) -> float:
        """Goes on with so many new tokens; seconds to the first token."""
        from sparsejax.request import ChainOptions, Request, SamplingParams

        self.ledger += more
        self.count += 1
        first, events = 0.0, []

        def note(event: Any) -> None:
            nonlocal first
            if event.token_ids and not first:
                first = time.perf_counter()
            events.append(event)

        options = ChainOptions(chain_id=self.chain_id or None, lookup=False, on_miss="error")
        params = SamplingParams(max_tokens=self.answer, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        request = Request(f"turn {self.count}", tuple(self.ledger), params, chain=options)
        self.scheduler.add(self.scheduler.prepare(request, note))
        while self.scheduler.step():
            pass
        last = events[-1]
        if last.finish_reason != "length" or last.chain is None or last.chain.state != "idle":
            raise RuntimeError(f"a turn ended with {last}")
        if self.chain_id and last.chain.status != "resumed":
            raise RuntimeError(f"a turn was {last.chain.status}, not resumed: {last.chain.reason}")
        self.chain_id = last.chain.chain_id
        self.ledger += [token for event in events for token in event.token_ids]
        return first - start

    @property
    def chain(self) -> Any:
        return self.scheduler.chains.index.find(self.chain_id)

    def resume_s(self, tier: str) -> tuple[float, float, int]:
        """Seconds that the rows took to be a row's again, of a turn's first token, and bytes that were on the host."""
        nbytes = self.place(tier)
        runner = self.runner
        runner.timing, runner.seconds = True, 0.0
        try:
            self.turn(self.random_ids(self.suffix))
        finally:
            runner.timing = False
        resume = runner.seconds
        self.place(tier)
        return resume, self.turn(self.random_ids(self.suffix)), nbytes

    def place(self, tier: str) -> int:
        """Moves the rows to a tier, and waits until they are there; bytes on the host."""
        import jax

        if tier == "host" and not self.scheduler.chains.tiers.demote(self.chain):
            raise RuntimeError("the rows found no room on the host")
        jax.block_until_ready(self.runner.state)
        payload = self.chain.payload
        if tier == "host":
            jax.block_until_ready(payload.swapped.payload.arrays)
            return payload.swapped.nbytes
        return 0


def host_bandwidth() -> float:
    """Bytes per second of a copy from page-locked host memory to the device."""
    import jax
    import jax.numpy as jnp

    from sparsejax import transfers

    host = jax.block_until_ready(transfers.to_host([jnp.ones(COPY_BYTES // 32, jnp.float32) for _ in range(8)]))
    nbytes, seconds = sum(array.nbytes for array in host), []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(transfers.to_device(host))
        seconds.append(time.perf_counter() - start)
    return nbytes / sorted(seconds)[2]


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    spec, weights = step_timing.load(arguments)
    bandwidth = host_bandwidth()
    print(f"copy from page-locked host memory: {bandwidth / 1e9:.1f} GB/s", flush=True)
    conversation = Conversation(spec, weights, arguments)
    conversation.begin()
    prefill = conversation.begin()
    print(f"first turn of {conversation.context} tokens: {prefill:.3f} s", flush=True)
    for tier in GOALS_S:  # whatever happens once
        conversation.resume_s(tier)
    found: dict[str, Any] = {tier: {"resume": [], "first": []} for tier in GOALS_S}
    nbytes = 0
    for _ in range(arguments.rounds):
        for tier, entry in found.items():
            resume, first, on_host = conversation.resume_s(tier)
            entry["resume"].append(resume)
            entry["first"].append(first)
            nbytes = max(nbytes, on_host)
    resident = int(conversation.chain.ledger.size - conversation.chain.quality.evicted_tokens)
    result: dict[str, Any] = {"prefill_s": prefill, "host_bytes_per_s": bandwidth, "bytes": nbytes}
    result |= {"context": conversation.context, "resident_tokens": resident, "tiers": {}}
    for tier, entry in found.items():
        resume, first = common.summary(entry["resume"]), common.summary(entry["first"])
        facts = {"resume_s": resume, "first_token_s": first, "goal_s": GOALS_S[tier]}
        facts |= {"met": resume["median"] <= GOALS_S[tier], "prefill_over_resume": prefill / resume["median"]}
        facts |= {"prefill_over_first_token": prefill / first["median"]}
        if tier == "host":
            facts |= {"floor_s": nbytes / bandwidth, "over_floor": resume["median"] * bandwidth / nbytes}
        result["tiers"][tier] = facts
    return result, spec


HEADER = (
    "rows",
    "resume ms",
    "goal ms",
    "floor ms",
    "x floor",
    "first token ms",
    "prefill / resume",
    "prefill / first",
)


def cells(tier: str, entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        tier,
        f"{entry['resume_s']['median'] * 1e3:.2f}",
        f"{entry['goal_s'] * 1e3:g}",
        f"{entry['floor_s'] * 1e3:.1f}" if "floor_s" in entry else "-",
        f"{entry['over_floor']:.2f}" if "over_floor" in entry else "-",
        f"{entry['first_token_s']['median'] * 1e3:.1f}",
        f"{entry['prefill_over_resume']:,.0f}",
        f"{entry['prefill_over_first_token']:,.0f}",
    )


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("chain_resume", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-8b", help="shape; small ones shrink tokens")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: by device")
    parser.add_argument("--implementation", help="of the kernels; chosen if not given")
    parser.add_argument("--context", type=int, default=131072, help="tokens of the conversation")
    parser.add_argument("--keep", type=int, default=8192, help="rows that its first turn leaves")
    parser.add_argument("--suffix", type=int, default=32, help="new tokens of a turn")
    parser.add_argument("--answer", type=int, default=2, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens of a program")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each tier, in turn")
    arguments = parser.parse_args(argv)
    step_timing.reserve_memory()
    run = common.Run("chain_resume", arguments)
    result, spec = measure(arguments)
    print(common.table(HEADER, [cells(tier, entry) for tier, entry in result["tiers"].items()]))
    run.finish(result, **step_timing.facts(spec, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
