"""Drives the step functions without a scheduler: the shortest host loop that is right, for tests.

Programs are compiled once per process and shared by all sessions of one shape. The session's own programs sample
greedily and are compiled with little optimisation, because compiling is what costs time here; `tests/core/test_hlo.py`
looks at the real ones, and sampling has a suite of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import registry, sampling, steps, transfers
from sparsejax.arrays import is_spec
from sparsejax.combine import bound, with_granularity
from sparsejax.geometry import Geometry, Granularity
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.state import POSITIONS, StateSize, empty_state

TINY = ModelSpec("llama", 61, 32, 48, 2, 4, 2, 8, 512)


@functools.cache
def tiny_weights(spec: ModelSpec = TINY, seed: int = 0) -> Weights:
    """Random weights large enough that attention is far from uniform."""
    specs = get_architecture(spec.architecture).weight_specs(spec)
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    rng = np.random.default_rng(seed)
    arrays = []
    for leaf in leaves:
        if len(leaf.shape) == 1:
            value = np.ones(leaf.shape)
        else:
            value = rng.standard_normal(leaf.shape) * (2.5 * leaf.shape[0] ** -0.5)
        arrays.append(jnp.asarray(value, leaf.dtype))
    return jax.tree.unflatten(tree, arrays)


def tokens_of(seed: int, count: int, vocab_size: int = TINY.vocab_size) -> list[int]:
    """A random text."""
    return np.random.default_rng(seed).integers(1, vocab_size, count).tolist()


QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiler options that halve compile times; results stay the same up to rounding."""

_PROGRAMS: dict[Hashable, Any] = {}


def forget_programs() -> None:
    """Lets go of all programs: each takes several of the memory maps that a process may have."""
    _PROGRAMS.clear()


def run(function: Any, *args: Any, **static: Any) -> Any:
    """Calls a jitted function through a program compiled quickly and kept for the life of the process."""
    statics = [arg for arg in args if isinstance(arg, steps.Statics)]
    arrays = [arg for arg in args if not isinstance(arg, steps.Statics)]
    leaves, tree = jax.tree.flatten(arrays)
    shapes = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
    key = (function, *statics, tree, shapes, *sorted(static.items()))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = function.lower(*args, **static).compile(QUICK)
    return _PROGRAMS[key](*arrays)


@dataclasses.dataclass
class Row:
    """What the host knows of a row.

    Attributes:
      pages: [layers][heads] lists of page ids.
      lengths: int32 [layers, heads], resident rows.
      seen: logical tokens.
      since: tokens of this phase since it began or since the last compaction.
      done: tokens of this phase since it began.
      most: most rows it has held, [layers, heads].
    """

    pages: list[list[list[int]]]
    lengths: np.ndarray
    seen: int = 0
    since: int = 0
    done: int = 0
    most: Any = 0

    @property
    def length(self) -> int:
        """Rows of the longest head."""
        return int(self.lengths.max())


class Session:
    """A device state with a page allocator that hands out pages in a scrambled order.

    Args:
      method: composition, as in `registry.resolve`.
      spec, weights: the model.
      page_size, max_len: in tokens.
      num_rows: rows; also the batch bucket of all programs.
      chunk: longest prompt chunk in tokens.
      granularity: overrides the method's.
      seed: of the order of pages.
      params: knobs.
      poison: what the pool, the null page and page aux hold before anybody writes to them.
      select: replaces the method's `select` hook.
      encode: token ids of a text, for methods that ask for them.
    """

    def __init__(
        self,
        method: str = "dense",
        *,
        spec: ModelSpec = TINY,
        weights: Weights | None = None,
        page_size: int = 4,
        max_len: int = 64,
        num_rows: int = 4,
        chunk: int = 48,
        granularity: Granularity | None = None,
        seed: int = 0,
        params: dict | None = None,
        poison: float | None = None,
        select: Any = None,
        encode: Callable[[str], list[int]] | None = None,
    ):
        self.method, self.storage = registry.resolve(method, params)
        if granularity is not None:
            self.method = with_granularity(self.method, granularity)
        if encode is not None:
            self.method = bound(self.method, encode)
        if select is not None:
            self.method = dataclasses.replace(self.method, select=select)
        self.spec = spec
        self.weights = tiny_weights(spec) if weights is None else weights
        page_size = self.method.page_size(self.method.params) or page_size
        self.geometry: Geometry = spec.geometry(page_size, max_len)
        self.statics = steps.Statics(spec, self.geometry, self.method, self.storage)
        self.grain = self.method.granularity
        self.shape = self.geometry.table_shape(self.grain)
        self.num_rows, self.chunk = num_rows, chunk
        num_pages = 1 + num_rows * (self.geometry.max_pages + 4)
        size = StateSize(num_rows, num_pages, spec.vocab_size)
        self.state = empty_state(self.geometry, size, (self.method,), self.storage)
        if poison is not None:
            self.poison(poison)
        slab = int(np.prod(self.shape))
        self.all_pages = set(range(slab, num_pages * slab))  # slab 0 holds the null pages
        self.free = np.random.default_rng(seed).permutation(sorted(self.all_pages)).tolist()
        self.rows: dict[int, Row] = {}

    def poison(self, value: float) -> None:
        """Fills every page, the null page included, and all page and row aux."""

        def fill(array):
            junk = value if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo(array.dtype).max
            return jnp.full_like(array, junk)

        filled = [jax.tree.map(fill, tree) for tree in (self.state.pools, self.state.page_aux, self.state.row_aux)]
        self.state = self.state.replace(pools=filled[0], page_aux=filled[1], row_aux=filled[2])

    # Pages

    def _take(self, columns: int) -> list[list[list[int]]]:
        return [[[self.free.pop() for _ in range(columns)] for _ in range(self.shape[1])] for _ in range(self.shape[0])]

    def _grow(self, row: int, tokens: int) -> list[tuple[int, int, int, int, int]]:
        """Appends pages for `tokens` more; returns the table updates."""
        record, updates = self.rows[row], []
        record.lengths = record.lengths + tokens
        record.seen, record.since, record.done = record.seen + tokens, record.since + tokens, record.done + tokens
        record.most = np.maximum(record.most, record.lengths)
        for layer, heads in enumerate(record.pages):
            for head, pages in enumerate(heads):
                while len(pages) < self.geometry.pages(int(record.lengths[layer, head])):
                    pages.append(self.free.pop())
                    updates.append((layer, head, row, len(pages) - 1, pages[-1]))
        return updates

    def _pack(self, updates: list, width: int) -> np.ndarray:
        array = np.zeros((width, 5), np.int32)
        array[: len(updates)] = np.reshape(updates, (-1, 5))
        return array

    def _free(self, pages: Iterable[list[list[int]]]) -> None:
        self.free[:0] = [page for heads in pages for ids in heads for page in ids]

    def _table(self, pages: list[list[list[int]]], columns: int) -> np.ndarray:
        """int32 [layers, heads, columns], 0 past the end."""
        table = np.zeros((*self.shape, columns), np.int32)
        for layer, heads in enumerate(pages):
            for head, ids in enumerate(heads):
                table[layer, head, : len(ids)] = ids
        return table

    def release(self, *rows: int) -> None:
        """Gives the rows' pages back. The device is not told."""
        for row in rows or tuple(self.rows):
            self._free(self.rows.pop(row).pages)

    def head_pages(self, row: int, layer: int, head: int) -> np.ndarray:
        """Head-page ids of a row."""
        pages = self.rows[row].pages[layer if self.shape[0] > 1 else 0][head if self.shape[1] > 1 else 0]
        heads = self.geometry.num_kv_heads
        if self.grain is Granularity.SEQUENCE:
            pages = [(page * self.geometry.num_layers + layer) * heads + head for page in pages]
        elif self.grain is Granularity.LAYER:
            pages = [page * heads + head for page in pages]
        return np.asarray(pages, np.int32)

    def all_head_pages(self, row: int) -> np.ndarray:
        """Head-page ids of a row in all layers and heads."""
        geometry = self.geometry
        pages = [
            self.head_pages(row, layer, head)
            for layer in range(geometry.num_layers)
            for head in range(geometry.num_kv_heads)
        ]
        return np.concatenate(pages)

    def stored(self, name: str, row: int, layer: int = 0, head: int = 0) -> np.ndarray:
        """The resident rows of a pool array."""
        pages = np.asarray(self.state.pools[name])[self.head_pages(row, layer, head)]
        lengths = self.rows[row].lengths
        length = lengths[layer if self.shape[0] > 1 else 0, head if self.shape[1] > 1 else 0]
        return pages.reshape(-1, *pages.shape[2:])[:length]

    def positions(self, row: int, layer: int = 0, head: int = 0) -> np.ndarray:
        """Logical positions of the rows that a head keeps."""
        return self.stored(POSITIONS, row, layer, head)

    def check(self) -> None:
        """The host's integers are the device's, and every page has one owner."""
        lengths = np.asarray(self.state.lengths[self.grain.value])
        table = np.asarray(self.state.tables[self.grain.value])
        owned = list(self.free)
        for row, record in self.rows.items():
            assert (lengths[:, :, row] == record.lengths).all(), (row, lengths[:, :, row], record.lengths)
            assert int(self.state.positions[row]) == record.seen
            for layer, heads in enumerate(record.pages):
                for head, ids in enumerate(heads):
                    assert len(ids) == self.geometry.pages(int(record.lengths[layer, head]))
                    assert table[layer, head, row, : len(ids)].tolist() == ids
                    owned += ids
        assert len(owned) == len(self.all_pages)
        assert set(owned) == self.all_pages
        assert not lengths[:, :, 0].any()
        assert not table[:, :, 0].any()

    # Steps

    def _maintain(self, row: int, phase: str) -> None:
        record, geometry = self.rows[row], self.geometry
        if not self.method.may_evict(phase, record.done):
            return
        kept = self.method.kept_after(phase, record.lengths)
        if (kept == record.lengths).all():
            return
        if most := self.method.most_counted(phase, np.full_like(kept, geometry.max_model_len)):
            numbers = np.int32(row), np.int32(record.since)
            kept = np.asarray(run(steps.count_step, self.statics, self.state, *numbers, phase=phase, kept=most))
        due = kept < record.lengths
        new, old = copy.deepcopy(record.pages), [[[] for _ in heads] for heads in record.pages]
        fresh: list[list[list[int]]] = copy.deepcopy(old)
        for layer, head in np.argwhere(due):
            old[layer][head] = record.pages[layer][head]
            fresh[layer][head] = [self.free.pop() for _ in range(geometry.pages(int(kept[layer, head])))]
            new[layer][head] = fresh[layer][head]
        longest = np.full_like(kept, geometry.max_model_len)
        most = self.method.most_counted(phase, longest) or int(self.method.kept_after(phase, longest).max())
        table = self._table(fresh, geometry.pages(most))
        inputs = steps.MaintainInputs(np.int32(row), kept, table, np.int32(record.since))  # type: ignore[arg-type]
        self.state = run(steps.maintain_step, self.statics, self.state, inputs, phase=phase, kept=most)
        self._free(old)
        record.pages, record.lengths, record.since = new, kept, 0

    def _replay(self, row: int, prompt: list[int]) -> None:
        """What the method wants to see of a prompt once more; pages of a replay are taken for it alone."""
        record, width = self.rows[row], (self.geometry.pages(self.chunk) + 1) * int(np.prod(self.shape))
        for index in range(len(self.method.replay_lengths(len(prompt)))):
            ids = self.method.replay_ids(np.asarray(prompt, np.int32), index)
            tokens, table = np.zeros((1, self.chunk), np.int32), np.array([[row, len(ids), index]], np.int32)
            tokens[0, : len(ids)] = ids
            before = copy.deepcopy(record)
            inputs = tokens, table, self._pack(self._grow(row, len(ids)), width)
            self.state, ok = run(steps.replay_chunk, self.statics, self.weights, self.state, *inputs)
            assert ok.all()
            known = {page for heads in before.pages for pages in heads for page in pages}
            self.free[:0] = [page for heads in record.pages for pages in heads for page in pages if page not in known]
            self.rows[row] = record = before

    def prefill(
        self,
        prompts: dict[int, list[int]],
        *,
        pieces: Sequence[int] = (),
        first: bool = True,
        order: Sequence[int] | None = None,
        on_chunk: Callable[[int], None] | None = None,
    ) -> dict[int, np.ndarray]:
        """Appends prompts to rows side by side; returns the logits of each row's last token.

        Args:
          prompts: tokens by row.
          pieces: sizes of the first chunks; whatever is left comes in chunks as large as the program takes.
          first: the rows are new; False continues them.
          order: in which the rows stand in the batch.
          on_chunk: called with the tokens seen by the first row once its chunk is stored, before anything is evicted.
        """
        todo = {row: list(prompts[row]) for row in order or prompts}
        for row in prompts:
            if first:
                self.rows[row] = Row(self._take(0), np.zeros(self.shape, np.int32))
            self.rows[row].since = self.rows[row].done = 0
        opening, sizes, logits = set(prompts) if first else set(), iter(pieces), {}
        while any(todo.values()):
            size = next(sizes, self.chunk)
            rows = [row for row in todo if todo[row]]
            tokens, table = np.zeros((self.num_rows, self.chunk), np.int32), np.zeros((self.num_rows, 4), np.int32)
            updates = []
            for i, row in enumerate(rows):
                part, todo[row] = todo[row][:size], todo[row][size:]
                tokens[i, : len(part)] = part
                table[i] = row, len(part), row in opening, not todo[row]
                updates += self._grow(row, len(part))
            opening -= set(rows)
            width = self.num_rows * (self.geometry.pages(self.chunk) + 1) * int(np.prod(self.shape))
            ints, floats = steps.greedy_inputs(self.num_rows)
            inputs = steps.PrefillInputs(tokens, table, ints, floats, self._pack(updates, width))  # type: ignore[arg-type]
            self.state, out = run(
                steps.prefill_chunk, self.statics, self.weights, self.state, inputs, mode=sampling.GREEDY
            )
            if on_chunk is not None:
                on_chunk(self.rows[rows[0]].seen)
            for i, row in enumerate(rows):
                if todo[row]:
                    self._maintain(row, "chunk")
                    continue
                logits[row] = np.asarray(out.logits[i])
                if first or self.method.replays is None:  # what is appended to a replayed row stays
                    self._replay(row, prompts[row])
                    self._maintain(row, "prompt")
                self.rows[row].since = self.rows[row].done = 0
        return logits

    def decode(self, rows: Sequence[int], tokens: Sequence[int] | None = None, *, padding: int = 0) -> np.ndarray:
        """Appends one token to each row: `tokens`, or what was sampled. Returns logits [rows, vocab].

        `padding` puts that many null rows before the others.
        """
        table = np.full((self.num_rows, 2), (0, -1), np.int32)
        updates = []
        for i, row in enumerate(rows):
            table[padding + i] = row, -1 if tokens is None else tokens[i]
            updates += self._grow(row, 1)
        ints, floats = steps.greedy_inputs(self.num_rows)
        packed = self._pack(updates, self.num_rows * int(np.prod(self.shape)))
        inputs = steps.DecodeInputs(table, ints, floats, packed)  # type: ignore[arg-type]
        self.state, out = run(steps.decode_step, self.statics, self.weights, self.state, inputs, mode=sampling.GREEDY)
        for row in rows:
            self._maintain(row, "token")
        self.outputs = np.asarray(out.packed)[padding : padding + len(rows)]
        return np.asarray(out.logits)[padding : padding + len(rows)]

    def generate(self, row: int, prompt: list[int], count: int, *, pieces: Sequence[int] = ()) -> np.ndarray:
        """Prefills, then decodes greedily: logits [count, vocab] of the last prompt token and the next ones."""
        logits = [self.prefill({row: prompt}, pieces=pieces)[row]]
        logits += [self.decode([row])[0] for _ in range(count - 1)]
        return np.stack(logits)

    # Rows on the move

    def fork(self, source: int, target: int) -> None:
        """Makes `target` a copy of `source` on pages of its own."""
        record = self.rows[source]
        pages = [[[self.free.pop() for _ in ids] for ids in heads] for heads in record.pages]
        self.rows[target] = dataclasses.replace(record, pages=pages)
        updates = [
            (layer, head, target, column, page)
            for layer, heads in enumerate(pages)
            for head, ids in enumerate(heads)
            for column, page in enumerate(ids)
        ]
        packed = self._pack(updates, self.geometry.max_pages * int(np.prod(self.shape)))
        args = (self.state, np.int32(source), np.int32(target), packed)
        self.state = run(transfers.fork_row, *args, granularity=self.grain.value)
        ids = [self._padded(self.all_head_pages(row)) for row in (source, target)]
        self.state = run(transfers.copy_pages, self.state, *ids)

    def _padded(self, head_pages: np.ndarray) -> np.ndarray:
        out = np.zeros(self.geometry.max_pages * self.geometry.head_pages_per_sequence_page, np.int32)
        out[: len(head_pages)] = head_pages
        return out

    def swap_out(self, row: int) -> tuple[Row, Any, Any]:
        """A row and its pages on the host; the row is released."""
        state = run(transfers.export_row_state, self.state, np.int32(row), granularity=self.grain.value)
        pages = run(transfers.export_rows, self.state, self._padded(self.all_head_pages(row)))
        record = copy.deepcopy(self.rows[row])
        self.release(row)
        return record, jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, pages)

    def swap_in(self, row: int, swapped: tuple[Row, Any, Any]) -> None:
        """Brings a row back under any id, on fresh pages."""
        record, row_state, exported = swapped
        pages = [[[self.free.pop() for _ in ids] for ids in heads] for heads in record.pages]
        self.rows[row] = dataclasses.replace(record, pages=pages)
        ids = self._padded(self.all_head_pages(row))
        self.state = run(transfers.import_rows, self.state, ids, exported)
        table = self._table(pages, self.geometry.max_pages)
        args = (self.state, np.int32(row), row_state, table)
        self.state = run(transfers.import_row_state, *args, granularity=self.grain.value)
