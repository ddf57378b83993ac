"""The shortest right host loop over a `DeviceRunner`: prefill and fork rows, feed them tokens, evict when due.

No scheduler, no sharing, no sampling to wait for: for measurements that need the step itself, or its logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from sparsejax.cache.pages import PagePool
from sparsejax.geometry import Granularity
from sparsejax.plans import CountRow, DecodeRow, ForkRow, MaintainRow, PrefillRow, ReplayRow, SamplingRow
from sparsejax.rows import RowPages
from sparsejax.runner import DeviceRunner, StepTicket
from sparsejax.state import POSITIONS


class NotFiniteError(RuntimeError):
    """A step gave logits that are NaN or infinite."""


@dataclasses.dataclass
class Phase:
    """Where a row is: tokens of this phase (prompt or decode) in all, and since the last compaction."""

    decoding: bool = False
    done: int = 0
    observed: int = 0


class Rows:
    """Rows of one method on one runner, with the pages they hold.

    Args:
      runner: owns the device state; nobody else may use it meanwhile, but other `Rows` of the same pool.
      method: one of the runner's methods.
      pool: that of other rows on this runner, so that they can be forked; None for a runner of one's own.
      chunk: tokens of a prompt chunk; the runner's largest if not given.
    """

    def __init__(
        self, runner: DeviceRunner, method: str, pool: PagePool | None = None, chunk: int | None = None
    ) -> None:
        self._runner = runner
        self._chunk = chunk or max(size for rows, size in runner.limits.prefill_buckets if rows == 1)
        self.name = method
        self.method = runner.limits.methods[method]
        self.pool = pool or PagePool(runner.limits.geometry, runner.limits.num_sequence_pages)
        self.pages: dict[int, RowPages] = {}
        self._phases: dict[int, Phase] = {}
        geometry, served = runner.limits.geometry, runner.limits.methods.values()
        specs = {aux: spec for facts in served for aux, spec in facts.aux_specs(geometry).items()}
        self._token_aux = [aux for aux, spec in specs.items() if spec.per == "token"]

    @property
    def used_head_pages(self) -> int:
        return self.pool.num_head_pages - self.pool.free_head_pages

    def length(self, row: int) -> int:
        """Resident tokens of a head, on average."""
        return self.pages[row].length

    def positions(self, row: int) -> list[list[np.ndarray]]:
        """Logical positions of the rows that each layer and head holds, int32 [layers][heads][held]."""
        table = self._head_pages(row)
        layers, heads = table.shape[:2]
        stored = np.asarray(self._runner.state.pools[POSITIONS])[table].reshape(layers, heads, -1)
        lengths = np.broadcast_to(self.pages[row].lengths, (layers, heads))
        return [[stored[i, j, : lengths[i, j]] for j in range(heads)] for i in range(layers)]

    def learned(self, row: int) -> dict[str, np.ndarray]:
        """What methods have written down of each of the row's stored tokens: arrays of its head-pages."""
        table = self._head_pages(row)
        return {name: np.asarray(self._runner.state.page_aux[name])[table] for name in self._token_aux}

    def teach(self, row: int, learned: dict[str, np.ndarray]) -> None:
        """Puts back what was `learned`: forks share pages, and what one learns of them is not for the others."""
        if not learned:
            return
        table, page_aux = self._head_pages(row), dict(self._runner.state.page_aux)
        for name, values in learned.items():
            array = np.array(page_aux[name])
            array[table] = values
            page_aux[name] = jax.numpy.asarray(array)
        self._runner.state = self._runner.state.replace(page_aux=page_aux)

    def _head_pages(self, row: int) -> np.ndarray:
        """int32 [layers, heads, columns]; the null page of some head where a head has fewer."""
        pages, geometry = self.pages[row], self._runner.limits.geometry
        layers, heads = geometry.num_layers, geometry.num_kv_heads
        layer, head = np.arange(layers)[:, None, None], np.arange(heads)[None, :, None]
        table = np.broadcast_to(pages.table, (layers, heads, pages.table.shape[-1]))
        if pages.granularity is Granularity.SEQUENCE:
            return (table * layers + layer) * heads + head
        return table * heads + head if pages.granularity is Granularity.LAYER else table

    def prefill(self, row: int, tokens: Sequence[int], *, finish: bool = True) -> StepTicket:
        """Replaces the row by a prompt and, unless more of it is to come, evicts what the method says.

        The ticket's logits row 0 is that of the last token, before replays and the eviction.
        """
        self.release(row)
        self.pages[row] = RowPages(self.pool, self.method.granularity)
        ticket = self.append(row, tokens)
        if finish:
            self.finish_prompt(row, tokens)
        return ticket

    def append(self, row: int, tokens: Sequence[int]) -> StepTicket:
        """Appends prompt tokens chunk by chunk; the row is new if it holds nothing."""
        pages = self.pages[row]
        first, end = not pages.length, len(tokens)
        if first or self._phases[row].decoding:
            self._phases[row] = Phase()
        size, ticket = self._chunk, None
        for start in range(0, end, size):
            chunk = np.asarray(tokens[start : start + size], np.int32)
            last = start + size >= end
            plan = PrefillRow(row, chunk, first and start == 0, last, SamplingRow(), pages.append(len(chunk)))
            ticket = self._runner.prefill(self.name, [plan])
            self._count(row, len(chunk))
            if not last:
                self._maintain(row, "chunk")
        if ticket is None:
            raise ValueError("a prompt needs at least one token")
        return ticket

    def finish_prompt(self, row: int, prompt: Sequence[int] = (), *, replayed: bool = False) -> None:
        """Evicts what the method says once a prompt is complete; what follows is decoded, or is another prompt.

        A method that replays prompts replays `prompt`, unless that was `replayed`. Without either the row's first
        prompt is taken to be over: what such a method is given later stays.
        """
        if prompt and not replayed:
            self.replay(row, prompt)
        if self.method.replays is None or prompt or replayed:
            self._maintain(row, "prompt")
        self._phases[row] = Phase()

    def replay(self, row: int, prompt: Sequence[int]) -> None:
        """Shows the method what it wants to see of a prompt once more."""
        pages, ids = self.pages[row], np.asarray(prompt, np.int32)
        for index in range(len(self.method.replay_lengths(len(ids)))):
            tokens = self.method.replay_ids(ids, index)
            updates = pages.append(len(tokens))
            self._runner.replay(self.name, ReplayRow(row, tokens, index, updates))
            pages.truncate(len(tokens))

    def fork(self, other: Rows, source: int, target: int, *, share: bool | None = None) -> None:
        """Replaces the row `target` by a copy of `source` of `other`, which may be of another method.

        What can be shared is not copied. With `share` no full page is, and the caller sees to it that rows learn
        nothing from each other (`teach`). The methods must have one granularity, and `other` must have kept all that
        this method's statistics are made of.
        """
        self.release(target)
        if share is None:
            share = not (self.method.private_rows or other.method.private_rows)
        pages, copies = other.pages[source].fork(share=share)
        self.pages[target], self._phases[target] = pages, dataclasses.replace(other._phases[source])
        self._runner.fork(self.name, ForkRow(source, target, pages.updates(), copies))

    def logits(self, rows: Sequence[int], tokens: Sequence[int]) -> jax.Array:
        """Appends one token to each row like `decode`: float32 [len(rows), vocab].

        Raises:
          NotFiniteError: what a model or method computed is not a number.
        """
        ticket = self.decode(list(rows), list(tokens))
        if not ticket.result().ok.all():
            raise NotFiniteError(f"{self.name}: logits are not finite")
        return ticket.logits[: len(rows)]

    def decode(self, rows: list[int], tokens: list[int | None]) -> StepTicket:
        """Appends one token to each row (None: the one it sampled last), then evicts what the method says."""
        plans = [
            DecodeRow(row, SamplingRow(), self.pages[row].append(1), token)
            for row, token in zip(rows, tokens, strict=True)
        ]
        ticket = self._runner.decode(self.name, plans)
        for row in rows:
            self._phases[row].decoding = True
            self._count(row, 1)
            self._maintain(row, "token")
        return ticket

    def release(self, row: int) -> None:
        """Frees the row's pages, if it has any."""
        if row in self.pages:
            self.pages.pop(row).release()

    def _count(self, row: int, tokens: int) -> None:
        self._phases[row].done += tokens
        self._phases[row].observed += tokens

    def _maintain(self, row: int, phase: str) -> None:
        pages, state = self.pages[row], self._phases[row]
        if not self.method.may_evict(phase, state.done):
            return
        kept = self.method.kept_after(phase, pages.lengths)
        if (kept == pages.lengths).all():
            return
        if self.method.most_counted(phase, pages.lengths):
            plan = CountRow(row, phase, pages.lengths.copy(), state.observed)
            kept = self._runner.count(self.name, plan).result()
        pages.compact(
            kept,
            lambda new: self._runner.maintain(
                self.name, MaintainRow(row, "evict", phase, pages.lengths.copy(), kept, new, state.observed)
            ),
        )
        state.observed = 0
