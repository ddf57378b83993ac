"""Carries out what plans say of pruning: the part of `runner.DeviceRunner` that knows the programs of `prune_steps`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sparsejax import prune_steps
from sparsejax.plans import PackRows, RowScores, ScoreRow
from sparsejax.programs import Program
from sparsejax.steps import Statics

if TYPE_CHECKING:
    from sparsejax.recall_programs import RecallPrograms
    from sparsejax.runner import DeviceRunner

PACK_ROWS = 1024
"""Rows of each head that one program copies: padding is copied too, but within the null page."""


class PrunePrograms:
    """Pruning on a device, for methods that keep nothing beside their pages.

    Args:
      runner: whose state the programs replace.
      recall: knows how what a method keeps of each page is built.
      statics: by method.
    """

    def __init__(self, runner: DeviceRunner, recall: RecallPrograms, statics: dict[str, Statics]) -> None:
        self._runner, self._recall, self._statics = runner, recall, statics
        self._geometry = runner.limits.geometry

    # Programs.

    def programs(self) -> Iterator[Program]:
        for name, statics in self._statics.items():
            if statics.method.pure_prefix:
                yield from (self._score(name, tokens) for tokens in self._sizes)
                yield self._pack(name)
                yield from self._recall.page_aux_programs(name)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """Tokens of the programs that score."""
        buckets = self._runner.limits.prefill_buckets
        return sorted({tokens for rows, tokens in buckets if rows == 1} | {max(tokens for _, tokens in buckets)})

    @property
    def _pack_pages(self) -> int:
        return max(1, min(PACK_ROWS // self._geometry.page_size, self._geometry.max_pages))

    @functools.cached_property
    def _nothing(self) -> jax.Array:
        """Scores before there are any."""
        return jax.device_put(np.zeros(self._geometry.max_pages * self._geometry.page_size, np.float32))

    def _shape(self, name: str) -> tuple[int, int]:
        return self._geometry.table_shape(self._statics[name].method.granularity)

    def _call(self, program: Program, *args: Any) -> Any:
        return self._runner._program(program.key, lambda: program)(*args)

    def _score(self, name: str, tokens: int) -> Program:
        def args() -> tuple:
            statics, table = prune_steps.score_statics(self._statics[name]), self._runner._whole_table(name, _NO_PAGES)
            inputs = np.zeros((1, tokens), np.int32), table, np.zeros(3, np.int32)
            return statics, self._runner.weights, self._runner.state, self._nothing, *inputs

        key, label = ("score_rows", name, tokens), f"score_rows[{name} tokens={tokens}]"
        return Program("score_rows", key, label, prune_steps.score_rows, args)

    def _pack(self, name: str) -> Program:
        columns = self._pack_pages

        def args() -> tuple:
            source, target = self._runner._whole_table(name, _NO_PAGES), (*self._shape(name), columns)
            rows = np.zeros(columns * self._geometry.page_size, np.int32)
            return self._statics[name], self._runner.state, source, rows, np.zeros(target, np.int32)

        key, label = ("pack_rows", name, columns), f"pack_rows[{name} pages={columns}]"
        return Program("pack_rows", key, label, prune_steps.pack_rows, args)

    # Plans.

    def score(self, name: str, plan: ScoreRow, scores: RowScores | None) -> RowScores:
        """Scores rows by the queries of some tokens."""
        runner, columns, count = self._runner, plan.pages.shape[2], len(plan.tokens)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or not count:
            raise ValueError(f"score_rows: no program takes {count} tokens; the longest takes {self._sizes[-1]}")
        scratch = plan.scratch[:, :, : self._geometry.pages(count)]
        if scratch.shape[2] < self._geometry.pages(count) or columns + scratch.shape[2] > self._geometry.max_pages:
            given = f"{count} tokens behind {columns} pages, with {scratch.shape[2]} of their own"
            raise ValueError(f"score_rows: {given}, do not fit a table of {self._geometry.max_pages}")
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :count] = plan.tokens
        table = runner._whole_table(name, np.concatenate([plan.pages, scratch], axis=2))
        numbers = np.array([columns * self._geometry.page_size, count, plan.position], np.int32)
        before = self._nothing if scores is None else scores.payload
        args = runner.weights, runner.state, before, tokens, table, numbers
        runner.state, found = self._call(self._score(name, size), *args)
        return RowScores(found)

    def pack(self, name: str, plan: PackRows) -> None:
        """Copies rows to other pages."""
        runner, geometry, size = self._runner, self._geometry, self._pack_pages
        width, page_size = plan.target.shape[2], geometry.page_size
        if len(plan.rows) != width * page_size:
            raise ValueError(f"pack_rows: {len(plan.rows)} rows do not fill {width} pages of {page_size}")
        source = runner._whole_table(name, plan.source)
        for first in range(0, width, size):
            part = plan.target[:, :, first : first + size]
            target, rows = np.zeros((*self._shape(name), size), np.int32), np.zeros(size * page_size, np.int32)
            target[:, :, : part.shape[2]] = part
            rows[: part.shape[2] * page_size] = plan.rows[first * page_size :][: part.shape[2] * page_size]
            runner.state = self._call(self._pack(name), runner.state, source, rows, target)
        self._recall.build_page_aux(name, plan.target)


_NO_PAGES = np.zeros((1, 1, 0), np.int32)
