"""Random programs of requests, turns, forks, prune jobs, faults and loss on one engine; what each hit found is checked.

    python -m tests.contracts.pruning_programs [OPERATIONS] [SEED]

runs so many operations (10,000) in programs of a few hundred and prints what was hit and what was wrong.
"""

from __future__ import annotations

import collections
import random
import sys
import time
from typing import Any

import numpy as np

from sparsejax import chain_control
from sparsejax.cache import row_layout
from sparsejax.cache.chain import ChainState
from sparsejax.errors import CacheTooSmallError, ChainError, RequestError
from sparsejax.mock_stamps import positions_of, tokens_of
from sparsejax.prune_jobs import POLICIES, PrunePart, PruneRequest
from sparsejax.request import ChainOptions, PrefixOptions
from tests.contracts.masked import Masked
from tests.contracts.test_radix_cache import PAGE, Shared, words

METHODS = ("dense", "dense", "selects")
REFUSES = ("score_rows", "read_scores", "pack_rows", "unpark")


class Program:
    """One engine and what it was asked for.

    Attributes:
      counts: of what happened.
      hits: of each request, how its rows began: (tokens, missing tokens, tainted).
      wrong: hits whose rows, or what was made of them, are not what they should be.
    """

    def __init__(self, pages: int, inflight: int, swap_bytes: int, rows: int = 4) -> None:
        windows = dict.fromkeys(("decode_window_tokens", "max_decode_window_tokens"), 4)
        settings = {"max_inflight_steps": inflight, "swap_bytes": swap_bytes, "chain_host_bytes": swap_bytes}
        self.bench = Shared(
            {**settings, **windows, "min_decode_window_tokens": 1}, num_sequence_pages=pages, num_rows=rows
        )
        self.counts: collections.Counter[str] = collections.Counter()
        self.hits: dict[str, list[tuple[int, int, bool]]] = collections.defaultdict(list)
        self.begun: dict[str, Masked] = {}
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.jobs: list[str] = []
        unpark = self.bench.runner.unpark

        def checked(method: str, plan: Any) -> None:
            unpark(method, plan)
            self._check_hit(method, plan)

        self.bench.runner.unpark = checked  # type: ignore[method-assign]

    def _check_hit(self, method: str, plan: Any) -> None:
        """Looks at the rows in the pool that a choice begins with."""
        runner, seq = self.bench.runner, self.bench.scheduler.memory.holders.get(plan.row)
        if seq is None or not runner.limits.methods[method].pure_prefix or not len(plan.seen):
            return  # of a prune job, or of a method that drops rows itself
        state = runner._rows[plan.row]
        places, offsets = runner._places(state, 0, 0, 0, int(plan.lengths.max()))
        stamps = runner._pool[places[0], offsets] - runner._cells(state, 0, 0)[0]
        at = positions_of(stamps)
        seen = plan.seen.tolist()
        self.counts["hits"] += 1
        self.counts["hit_tokens"] += len(seen)
        self.counts["hits_on_pruned"] += len(at) < len(seen)
        name = seq.group.request_id
        if at.tolist() != row_layout.positions(seq.cuts, len(seen)).tolist():
            self.wrong.append(f"{name} has other rows than its record says")
        if (tokens_of(stamps) != np.array(seen)[at]).any():
            self.wrong.append(f"{name} has rows of other tokens")
        whole = stamps.tolist() == Masked(seen).stamps
        if not whole and not seq.tainted:
            self.wrong.append(f"{name} is not told what was lost")
        request = seq.group.request
        if not whole and request.prefix is not None and request.prefix.exact:
            self.wrong.append(f"{name} wanted whole rows only")
        self.hits[name].append((len(seen), len(seen) - len(at), seq.tainted))
        if name not in self.begun and not seq.output:
            self.begun[name] = Masked.of(seen, dict(zip(at.tolist(), stamps.tolist(), strict=True)))

    # Operations.

    def do(self, operation: str, *args: int) -> None:
        """One operation; what is refused is part of the program."""
        self.counts[operation] += 1
        try:
            getattr(self, operation)(*args)
        except RequestError as error:
            self.counts["refused"] += 1
            if not isinstance(error, ChainError):
                self.counts[f"refused_{error.code}"] += 1

    def submit(self, beginning: int, cut: int, max_tokens: int, twist: int) -> None:
        prompt = [*words(120, beginning % 2)[:cut], *words(5, beginning)]
        prefix = PrefixOptions(exact=twist % 4 == 3, salt="s" if twist % 7 == 6 else "")
        method = METHODS[twist % 3]
        self.ids.append(self.bench.submit(prompt, max_tokens, method, prefix=prefix, n=1 + (twist % 5 == 4)))

    def turn(self, which: int, more: int, max_tokens: int, twist: int) -> None:
        done = [r for r in self.ids if self.bench.of(r) and self.bench.last(r).chain is not None]
        done = [r for r in done if self.bench.reason(r) == "length" and self.bench.last(r).chain.chain_id]
        method, chain_id, prompt = METHODS[twist % 3], None, [*words(90, which % 2)[: more * 3], *words(5, twist)]
        if done and twist % 4:
            last = done[which % len(done)]
            request = self.bench.requests[last]
            prompt = [*request.prompt_ids, *self.bench.tokens(last), *words(more, twist)][:230]
            method, chain_id = request.sparse_method, self.bench.last(last).chain.chain_id
        options = ChainOptions(chain_id)
        self.ids.append(self.bench.submit(prompt, max_tokens, method, prefix=None, chain=options))

    def prune(self, which: int, start: int, width: int, twist: int) -> None:
        texts: list[tuple[list[int], str, str | None]] = [(words(120, i % 2), METHODS[i % 3], None) for i in range(4)]
        for r in self.ids:
            request = self.bench.requests[r]
            texts.append(([*request.prompt_ids, *self.bench.tokens(r)], request.sparse_method or "dense", None))
        for chain in self.bench.scheduler.chains.index.chains.values():
            if len(chain.ledger):
                texts += 3 * [(chain.ledger.tolist(), chain.method, chain.chain_id)]
        ids, method, chain_id = texts[which % len(texts)]
        if chain_id is None:
            scope = self.bench.scheduler.chains.scope(method, "", "")
            ids = ids[: len(self.bench.index.longest(scope, np.array(ids, np.uint32))) * PAGE]
        blocks = len(ids) // PAGE
        first = start % max(1, blocks)
        stop = min(blocks, first + width)
        ranges = [(first * PAGE, stop * PAGE)]
        if stop + 2 < blocks and twist % 3 == 0:
            ranges.append(((stop + 1) * PAGE, (stop + 2) * PAGE))
        policy = POLICIES[twist % 3]
        total = sum(b - a for a, b in ranges)
        keep = 0 if policy == "drop" else total * (twist % 5) // 6
        part = PrunePart(tuple(ranges), keep)
        request = PruneRequest(
            method,
            np.array(ids, np.uint32),
            (part,),
            policy,
            chain_id=chain_id,
            recompute=twist % 4 == 1,
            observation_tokens=3,
            score_chunk_tokens=16,
            block_timeout_s=0.5,
        )
        self.jobs.append(self.bench.scheduler.prunes.submit(request).prune_id)

    def fork(self, which: int) -> None:
        chains = list(self.bench.scheduler.chains.index.chains)
        if chains:
            chain_control.fork(self.bench.scheduler.chains, chains[which % len(chains)], "")

    def demote(self, which: int) -> None:
        chains = [c for c in self.bench.scheduler.chains.index.chains.values() if c.state is ChainState.IDLE]
        if chains:
            chain_control.demote(self.bench.scheduler.chains, chains[which % len(chains)].chain_id, "")

    def advance(self, steps: int) -> None:
        self.bench.step(steps)

    def cancel(self, which: int) -> None:
        if self.ids:
            self.bench.scheduler.cancel(self.ids[which % len(self.ids)])

    def cancel_job(self, which: int) -> None:
        if self.jobs:
            self.bench.scheduler.prunes.cancel(self.jobs[which % len(self.jobs)], "")

    def preempt(self, which: int) -> None:
        running = self.bench.scheduler.running
        if running and not running[which % len(running)].phase_due:
            self.bench.scheduler._preempt(running[which % len(running)])

    def evict(self, pages: int) -> None:
        if pages % 2:
            self.bench.index.evict(pages)
        else:  # some of them to host memory
            for _ in range(pages):
                self.bench.scheduler.radix.reclaim()
        self.bench.check()

    def drop(self, which: int) -> None:
        chains = [c for c in self.bench.scheduler.chains.index.chains.values() if c.state is ChainState.IDLE]
        if chains:
            self.bench.scheduler.chains.index.drop(chains[which % len(chains)], "deleted")

    def fault(self, which: int) -> None:
        call = ("score_rows", "read_scores", "pack_rows")[which % 3]
        self.bench.runner.fail(call, 1 + which % 2, RequestError("refused"), "before")

    def _path(self, which: int) -> tuple[Any, np.ndarray]:
        """Some known text."""
        method, text = METHODS[which % 3], [words(120, which % 2)]
        text += [[*self.bench.requests[r].prompt_ids] for r in self.ids]
        scope, ids = self.bench.scheduler.chains.scope(method, "", ""), np.array(text[which % len(text)], np.uint32)
        return scope, ids[: len(self.bench.index.longest(scope, ids)) * PAGE]

    def pin(self, which: int) -> None:
        self.bench.index.pin(*self._path(which), 1.0 + which % 5)

    def keep(self, which: int) -> None:
        self.bench.index.set_retention(*self._path(which), which % 3)

    def delete(self, which: int) -> None:
        self.bench.index.delete(*self._path(which))

    def wait(self, tenths: int) -> None:
        self.bench.clock.sleep(tenths / 10)

    # The end.

    def finish(self) -> None:
        """Runs to the end and looks at everything that came out."""
        self.bench.run(20000)
        prunes = self.bench.scheduler.prunes
        assert not prunes.pending
        assert not self.bench.scheduler.memory.lent_rows
        assert not self.bench.scheduler.radix.borrowed
        for job in self.jobs:
            info = prunes.get(job, "")
            self.counts[f"job_{info.status}"] += 1
            assert info.ended
            assert not info.error or info.error["code"] != "internal_error", info
        for request_id in self.ids:
            self._check_tokens(request_id)
        self.bench.clock.sleep(100.0)  # longer than any pin
        self.bench.check_all_free()

    def _check_tokens(self, request_id: str) -> None:
        """What a request got, against the text read token by token on the rows that it began with."""
        request = self.bench.requests[request_id]
        hits = self.hits.get(request_id, ())
        for index in range(request.params.n):
            reason, got = self.bench.reason(request_id, index), self.bench.tokens(request_id, index)
            if reason == "error":
                error = self.bench.last(request_id, index).error
                assert isinstance(error, (CacheTooSmallError, ChainError)), error
            expected = None
            if not any(tainted for _, _, tainted in hits):
                expected = self.bench.alone(request_id, index)
            elif request.params.n == 1 and request_id in self.begun and not self.bench.last(request_id).stats.rebuilt:
                text = self.begun[request_id].copy()
                prompt = list(request.prompt_ids)
                text.read(prompt[len(text.tokens) :])
                expected = text.generate(request.params.max_tokens, request.params.seed)
            if expected is None:
                self.counts["not_compared"] += 1
                continue
            self.counts["compared"] += 1
            self.counts["compared_on_pruned"] += any(tainted for _, _, tainted in hits)
            if got != expected[: len(got)] or (reason == "length" and len(got) < len(expected)):
                self.wrong.append(f"{request_id} has other tokens than its rows give")


def draw(random_: random.Random) -> tuple[str, *tuple[int, ...]]:
    """One operation."""
    below = random_.randrange
    kinds = [
        (8, lambda: ("submit", below(4), 1 + below(110), 1 + below(12), below(35))),
        (6, lambda: ("turn", below(9), 1 + below(25), 1 + below(12), below(35))),
        (7, lambda: ("prune", below(999), below(30), 1 + below(9), below(60))),
        (9, lambda: ("advance", 1 + below(14))),
        (1, lambda: ("cancel", below(99))),
        (1, lambda: ("cancel_job", below(99))),
        (1, lambda: ("fork", below(9))),
        (1, lambda: ("demote", below(9))),
        (1, lambda: ("preempt", below(5))),
        (1, lambda: ("evict", 1 + below(9))),
        (1, lambda: ("drop", below(9))),
        (1, lambda: ("fault", below(6))),
        (1, lambda: ("pin", below(99))),
        (1, lambda: ("keep", below(99))),
        (1, lambda: ("delete", below(99))),
        (1, lambda: ("wait", below(40))),
    ]
    kind = random_.choices(kinds, [weight for weight, _ in kinds])[0][1]
    return kind()


def run(operations: int, seed: int, of_each: int = 250) -> tuple[collections.Counter[str], list[str]]:
    """So many operations, in programs of `of_each`. Returns what happened, and what was wrong."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for number in range(-(-operations // of_each)):
        random_ = random.Random(f"{seed}-{number}")
        program = Program(random_.randint(60, 240), random_.randint(1, 4), random_.choice([0, 4000, 1 << 30]))
        try:
            for _ in range(of_each):
                program.do(*draw(random_))
                counts["operations"] += 1
            program.finish()
        except Exception as error:
            error.add_note(f"program {number} of seed {seed}")
            raise
        counts += program.counts
        wrong += [f"program {number}: {text}" for text in program.wrong]
    return counts, wrong


def main() -> None:
    operations, seed = (int(arg) for arg in [*sys.argv[1:], "10000", "0"][:2])
    began_s = time.monotonic()
    counts, wrong = run(operations, seed)
    for name, count in sorted(counts.items()):
        print(f"{name:28} {count}")
    print(f"wrong-content hits: {len(wrong)} of {counts['hits']}, {time.monotonic() - began_s:.0f} s")
    for text in wrong:
        print(text)


if __name__ == "__main__":
    main()
