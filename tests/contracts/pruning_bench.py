"""A scheduler on a mock runner that prunes, and what is to be left."""

from __future__ import annotations

import numpy as np

from sparsejax.prune_jobs import PruneInfo, PrunePart, PruneRequest
from sparsejax.request import ChainOptions
from tests.contracts.masked import Masked
from tests.contracts.test_radix_cache import PAGE, Shared, words

METHODS = ["dense", "selects"]


class Pruned(Shared):
    """A bench that prunes."""

    def prune(self, ids, *ranges, keep: int = 0, method: str = "dense", run: bool = True, **options) -> PruneInfo:
        parts = options.pop("parts", None) or (PrunePart(ranges, keep),)
        request = PruneRequest(method, np.array(ids, np.uint32), parts, **options)
        jobs = self.scheduler.prunes
        info = jobs.submit(request)
        while run and not jobs.get(info.prune_id, request.tenant).ended:
            self.step()
        return jobs.get(info.prune_id, request.tenant)

    def resident(self, ids, method: str = "dense") -> tuple[int, int]:
        """Tokens of a text that are found, and rows that a request on them gets."""
        match = self.index.match(self.scheduler.chains.scope(method, "", ""), np.array(ids, np.uint32), whole=True)
        return len(match.blocks) * PAGE, len(match.pages) * PAGE

    def turn(self, ids, count: int = 8, chain_id: str | None = None, **options):
        """A turn of a chain: its report and its tokens."""
        request_id = self.submit(list(ids), count, prefix=None, chain=ChainOptions(chain_id, **options))
        self.run()
        event = self.last(request_id)
        assert event.finish_reason == "length", event
        return event.chain, self.tokens(request_id)

    def tokens_on(self, prompt, count: int = 8, **options) -> list[int]:
        """The tokens of a request, which may not be what it would get alone."""
        request_id = self.submit(list(prompt), count, **options)
        self.run()
        assert self.reason(request_id) == "length"
        return self.tokens(request_id)

    def seed(self) -> int:
        """Of the next request."""
        return len(self.requests)


def keeps(bench: Pruned, ranges, keep: int, method: str = "dense", protected: int = 1 << 30) -> list[list[int]]:
    """The tokens of each range that stay: an independent choice, one budget for all, whole pages of each range."""
    score = bench.runner.prune.score
    tokens = words(200)
    best: list[tuple[float, int, list[int]]] = []
    for i, (start, stop) in enumerate(ranges):
        rows = [(float("inf") if p >= protected else score(tokens[p], p), p) for p in range(start, stop)]
        if method == "selects":
            pages = [rows[at : at + PAGE] for at in range(0, len(rows), PAGE)]
        else:
            rows.sort(key=lambda row: (-row[0], row[1]))
            pages = [rows[at : at + PAGE] for at in range(0, len(rows), PAGE)]
        best += [(-sum(np.float64(value) for value, _ in page), i, [p for _, p in page]) for page in pages]
    best.sort(key=lambda page: page[0])
    kept: list[list[int]] = [[] for _ in ranges]
    for _, i, positions in best[: keep // PAGE]:
        kept[i] = sorted([*kept[i], *positions])
    return kept


def masked(tokens: list[int], gone: set[int]) -> Masked:
    """A text of which some tokens were never seen by others."""
    text = Masked()
    for position, token in enumerate(tokens):
        text.read([token])
        if position in gone:
            text.drop([position])
    return text
