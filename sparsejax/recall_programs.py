"""Carries out what plans say of recall: the part of `runner.DeviceRunner` that knows the programs of `recall_steps`."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sparsejax import recall_steps, transfers
from sparsejax.cache.evicted import EvictedPages, PageScores, held, joined_votes
from sparsejax.geometry import Geometry
from sparsejax.method import Method
from sparsejax.plans import PROBE_TOKENS, FrontRow, LendPages, MaintainRow, ProbeRow
from sparsejax.programs import Program
from sparsejax.state import POSITIONS
from sparsejax.steps import MaintainInputs, Statics

if TYPE_CHECKING:
    from sparsejax.runner import DeviceRunner

PACKED_PAGES = (16, 4, 1)
"""Pages of each head that one program packs, largest first: few programs, and nothing is copied that is not there."""
IN_FLIGHT_BYTES = 1 << 30
"""Of buffers on the device that wait for their copies: from there on the host waits for them, rather than run out of
memory. That is a first compaction, or a loan, of some ten thousand rows."""


class Scores:
    """Scores under way (see `cache.evicted.ScoreTicket`)."""

    def __init__(self, votes: list[tuple[jax.Array, jax.Array]], pages: tuple[EvictedPages, ...], nbytes: int) -> None:
        self._votes, self._pages, self._nbytes = votes, pages, nbytes
        for array in jax.tree.leaves(votes):
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        return all(array.is_ready() for array in jax.tree.leaves(self._votes))

    def result(self) -> PageScores:
        votes, rows = (np.concatenate([np.asarray(block[i]) for block in self._votes], axis=2) for i in range(2))
        positions = [np.asarray(some.payload.pools[POSITIONS])[:, :, : some.width] for some in self._pages]
        there = held(self._pages)[..., None]  # elsewhere are the positions of other rows
        found = np.where(there, np.concatenate(positions, axis=2), 0)
        return PageScores(joined_votes(votes, rows, found), self._nbytes)


class _InFlight:
    """Buffers that were asked for, oldest first."""

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[Any, int]] = collections.deque()
        self._nbytes = 0

    def add(self, arrays: Any, nbytes: int) -> None:
        """One more, of so many bytes until `arrays` are there. Waits for others if that is too much."""
        self._queue.append((arrays, nbytes))
        self._nbytes += nbytes
        while self._nbytes > IN_FLIGHT_BYTES:
            oldest, size = self._queue.popleft()
            jax.block_until_ready(oldest)
            self._nbytes -= size


class RecallPrograms:
    """Recall on a device.

    Args:
      runner: whose state the programs replace.
      statics: by method.
      most_kept: by method, the most rows that a head keeps after each phase.
    """

    def __init__(self, runner: DeviceRunner, statics: dict[str, Statics], most_kept: dict[str, dict[str, int]]) -> None:
        self._runner = runner
        self._geometry = runner.limits.geometry
        self._statics = statics
        self._most_kept = most_kept

    # Programs.

    def programs(self) -> Iterator[Program]:
        """What recall needs of the methods that evict."""
        found = []
        for name, statics in self._statics.items():
            if not (statics.method.evicts and statics.method.recalls):
                continue
            found += [self._spill(name, phase, kept) for phase, kept in sorted(self._most_kept[name].items())]
            found += [self._pack(name, pages) for pages in PACKED_PAGES]
            found += [self._adopt(name, pages) for pages in PACKED_PAGES]
            found += [self._probe(name), self._front(name)]
            found += [self._logits(name, pages) for pages in PACKED_PAGES]
            found += [self._votes(pages) for pages in PACKED_PAGES]
            found += self.page_aux_programs(name)
        yield from {program.key: program for program in found}.values()

    def _call(self, program: Program, *args: Any) -> Any:
        return self._runner._program(program.key, lambda: program)(*args)

    def _shape(self, name: str) -> tuple[int, int]:
        return self._geometry.table_shape(self._statics[name].method.granularity)

    def _width(self, name: str, kept: int = 0) -> int:
        return max(kept, *self._most_kept[name].values()) + self._geometry.page_size - 1

    def _spill(self, name: str, phase: str, kept: int) -> Program:
        def args() -> tuple:
            numbers = np.zeros(self._shape(name), np.int32)
            pages = np.zeros((*numbers.shape, self._columns(kept)), np.int32)
            inputs = MaintainInputs(np.int32(0), numbers, pages, np.int32(0))  # type: ignore[arg-type]
            return self._statics[name], self._runner.state, inputs, numbers

        static = {"phase": phase, "kept": kept, "width": self._width(name, kept)}
        key, label = ("spill", name, phase, kept), f"spill[{name} {phase} keep={kept}]"
        return Program("spill", key, label, recall_steps.spill_step, args, static)

    def _columns(self, kept: int) -> int:
        return self._geometry.pages(kept + self._geometry.page_size - 1)

    def _pack(self, name: str, pages: int, width: int | None = None) -> Program:
        width = width or self._width(name)

        def args() -> tuple:
            geometry, shape = self._geometry, self._shape(name)
            rows = np.zeros((geometry.num_layers, geometry.num_kv_heads, width), np.int32)
            lengths = np.zeros(shape, np.int32)
            table = np.zeros((*shape, geometry.max_pages), np.int32)
            dropped = recall_steps.Dropped(rows, table, lengths, lengths)  # type: ignore[arg-type]
            return self._statics[name], self._runner.state, dropped, np.int32(0)

        key, label = ("pack", name, pages, width), f"pack[{name} pages={pages}]"
        return Program("pack", key, label, recall_steps.pack_rows, args, {"pages": pages})

    def _adopt(self, name: str, pages: int) -> Program:
        def args() -> tuple:
            pack = self._pack(name, pages)
            statics, state, *rest = pack.args()
            packed = jax.eval_shape(functools.partial(pack.function, statics, **pack.static), state, *rest)
            ids = np.zeros((self._geometry.num_layers, self._geometry.num_kv_heads, pages), np.int32)
            return self._runner.state, packed, ids

        return Program("adopt", ("adopt", name, pages), f"adopt[{name} pages={pages}]", recall_steps.adopt_pages, args)

    @property
    def _probe_tokens(self) -> int:
        return min(PROBE_TOKENS, self._geometry.max_model_len)

    def _probe_inputs(self, name: str, plan: ProbeRow | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens, numbers = np.zeros((1, self._probe_tokens), np.int32), np.zeros(3, np.int32)
        updates = []
        if plan is not None:
            tokens[0, : len(plan.tokens)] = plan.tokens
            numbers[:] = plan.row, len(plan.tokens), plan.position
            updates = [(plan.row, plan.table_updates)]
        width = (self._geometry.pages(self._probe_tokens) + 1) * int(np.prod(self._shape(name)))
        return tokens, numbers, self._runner._updates(updates, width)

    def _probe(self, name: str) -> Program:
        def args() -> tuple:
            statics = recall_steps.probe_statics(self._statics[name])
            return statics, self._runner.weights, self._runner.state, *self._probe_inputs(name, None)

        return Program("probe", ("probe", name), f"probe[{name}]", recall_steps.probe_rows, args)

    def _asked(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Queries of a probe, and what they make of what is there."""
        geometry = self._geometry
        shape = geometry.num_layers, recall_steps.VOTERS, geometry.num_q_heads
        queries = jax.ShapeDtypeStruct((*shape, geometry.head_dim), np.dtype(geometry.dtype))
        return queries, jax.ShapeDtypeStruct(shape, np.dtype(np.float32))

    def _logits(self, name: str, pages: int) -> Program:
        geometry, statics = self._geometry, recall_steps.probe_statics(self._statics[name])

        def args() -> tuple:
            storage, shape = statics.storage, (geometry.num_layers, geometry.num_kv_heads)
            specs = storage.payload(storage.params, geometry)
            keys = {
                array: jax.ShapeDtypeStruct((*shape, pages, *specs[array].shape), np.dtype(specs[array].dtype))
                for array in storage.key_arrays
            }
            return statics, *self._asked(), keys, np.zeros(shape, np.int32)

        key, label = ("page_logits", name, pages), f"page_logits[{name} pages={pages}]"
        return Program("page_logits", key, label, recall_steps.page_logits, args)

    def _votes(self, pages: int) -> Program:
        def args() -> tuple:
            _, total = self._asked()
            logits, rows = (
                jax.ShapeDtypeStruct((*total.shape, pages), np.dtype(kind)) for kind in (np.float32, np.int16)
            )
            return logits, rows, total

        key, static = ("page_votes", pages), {"heads": self._geometry.num_kv_heads}
        return Program("page_votes", key, f"page_votes[pages={pages}]", recall_steps.page_votes, args, static)

    def page_aux_programs(self, name: str) -> list[Program]:
        """What `build_page_aux` needs."""
        return [self._page_aux(name)] if _aux_names(self._statics[name].method, self._geometry, "page") else []

    def _page_aux(self, name: str) -> Program:
        def args() -> tuple:
            lengths = np.zeros(self._shape(name), np.int32)
            table = np.zeros((*lengths.shape, self._geometry.max_pages), np.int32)
            return self._statics[name], self._runner.state, table, lengths

        return Program("page_aux", ("page_aux", name), f"page_aux[{name}]", recall_steps.build_page_aux, args)

    def _front(self, name: str) -> Program:
        method = self._statics[name].method
        specs = method.aux_specs(self._geometry)
        counters = tuple(sorted(aux for aux, spec in specs.items() if spec.counts_rows))
        granularity = method.granularity.value

        def args() -> tuple:
            lengths = np.zeros(self._shape(name), np.int32)
            table = np.zeros((*lengths.shape, self._geometry.max_pages), np.int32)
            shift = np.zeros(self._geometry.num_layers, np.int32)
            return self._runner.state, np.int32(0), table, lengths, shift

        static, label = {"granularity": granularity, "counters": counters}, f"set_table[{granularity}]"
        return Program("set_table", ("set_table", granularity, counters), label, recall_steps.set_table, args, static)

    # Plans.

    def spill(self, name: str, plan: MaintainRow) -> tuple[EvictedPages, ...]:
        """A compaction whose dropped rows are packed."""
        geometry, due = self._geometry, plan.kept < plan.length
        assert plan.asked is not None
        dropped, more = plan.length - plan.kept, plan.kept - plan.asked
        whole = (dropped % geometry.page_size == 0) & ((more >= 0) & (more < geometry.page_size) | ~due)
        if not due.any() or not whole.all():
            raise ValueError(f"spill: {plan.kept.tolist()} rows of {plan.length.tolist()} do not leave whole pages")
        most = int(plan.asked[due].max())
        kept = max(most, self._most_kept[name].get(plan.phase, most))
        pages = np.zeros((*plan.kept.shape, self._columns(kept)), np.int32)
        pages[..., : plan.new_pages.shape[2]] = plan.new_pages
        numbers = np.int32(plan.row), plan.kept.astype(np.int32), pages, np.int32(plan.observed_tokens)
        inputs = MaintainInputs(*numbers)  # type: ignore[arg-type]
        program, asked = self._spill(name, plan.phase, kept), plan.asked.astype(np.int32)
        self._runner.state, where = self._call(program, self._runner.state, inputs, asked)
        per_head = np.zeros((geometry.num_layers, geometry.num_kv_heads), np.int32) + dropped // geometry.page_size
        packed, first, in_flight = [], 0, _InFlight()
        while first < per_head.max():
            size = next(n for n in PACKED_PAGES if n <= per_head.max() - first)
            program = self._pack(name, size, self._width(name, kept))
            block = self._call(program, self._runner.state, where, np.int32(first))
            host, nbytes = transfers.to_host(block), sum(leaf.nbytes for leaf in jax.tree.leaves(block))
            in_flight.add(host, nbytes)
            packed.append(EvictedPages(host, np.clip(per_head - first, 0, size), nbytes, block))
            if sum(pages.nbytes for pages in packed) > IN_FLIGHT_BYTES:
                for pages in packed:
                    pages.fresh = None
            first += size
        return tuple(packed)

    def probe(self, name: str, plan: ProbeRow) -> Scores:
        """Scores pages by the queries of some tokens."""
        runner = self._runner
        args = runner.weights, runner.state, *self._probe_inputs(name, plan)
        runner.state, queries, total = self._call(self._probe(name), *args)
        logits, nbytes, in_flight = [], 0, _InFlight()
        for pages in plan.pages:
            names = self._statics[name].storage.key_arrays
            keys = transfers.to_device({array: pages.payload.pools[array] for array in names})
            size = sum(array.nbytes for array in keys.values())
            program = self._logits(name, pages.width)
            *found, total = self._call(program, queries, total, keys, pages.counts.astype(np.int32))
            logits.append(found)
            in_flight.add(total, size)
            nbytes += size
        votes = [self._call(self._votes(found[0].shape[3]), *found, total) for found in logits]
        return Scores(votes, plan.pages, nbytes)

    def lend(self, name: str, plan: LendPages) -> int:
        """Copies packed rows into pages of the pool."""
        runner, geometry, method = self._runner, self._geometry, self._statics[name].method
        there = plan.pages >= 0
        head_pages = runner._head_pages(name, plan.pages[there])
        layers, heads = self._shape(name)
        split = layers, geometry.num_layers // layers, heads, geometry.num_kv_heads // heads, plan.pages.shape[2]

        def in_order(array: np.ndarray) -> np.ndarray:
            """[num_layers, kv_heads, columns] -> an entry for each head-page."""
            return array.reshape(split).transpose(0, 2, 4, 1, 3)[there].reshape(-1)

        entries = in_order(plan.entries)
        index = np.indices(plan.entries.shape)
        layer, head = in_order(index[0]), in_order(index[1])
        moved, start, in_flight = 0, 0, _InFlight()
        if all(pages.fresh is not None for pages in plan.source):
            for pages in plan.source:
                mine = (entries >= start) & (entries < start + pages.width)
                ids = np.zeros((*pages.counts.shape, pages.width), np.int32)
                ids[layer[mine], head[mine], entries[mine] - start] = head_pages[mine]
                program = self._adopt(name, pages.width)
                runner.state = self._call(program, runner.state, pages.fresh, ids)
                start += pages.width
            self.build_page_aux(name, plan.pages)
            return 0
        for ids in runner._blocks(head_pages):
            block = slice(start, start + len(ids))
            content, nbytes = self._gather(method, plan.source, layer[block], head[block], entries[block], len(ids))
            content = jax.device_put(content)
            in_flight.add(content, sum(leaf.nbytes for leaf in jax.tree.leaves(content)))
            runner.state = runner._run("import_rows", None, transfers.import_rows, ids, content)
            moved, start = moved + nbytes, start + len(ids)
        self.build_page_aux(name, plan.pages)
        return moved

    def build_page_aux(self, name: str, pages: np.ndarray) -> None:
        """What the method keeps of each page; `pages` as in `LendPages`."""
        for program in self.page_aux_programs(name):
            lengths = ((pages >= 0).sum(2) * self._geometry.page_size).astype(np.int32)
            table = self._runner._whole_table(name, pages)
            self._runner.state = self._call(program, self._runner.state, table, lengths)

    def _gather(
        self,
        method: Method,
        source: tuple[EvictedPages, ...],
        layer: np.ndarray,
        head: np.ndarray,
        entries: np.ndarray,
        size: int,
    ) -> tuple[transfers.ExportedPages, int]:
        """The content of some head-pages as `transfers.import_rows` takes it, and the bytes that were filled in."""
        state, moving = self._runner.state, _aux_names(method, self._geometry, "token")
        pools = {name: np.zeros((size, *array.shape[1:]), array.dtype) for name, array in state.pools.items()}
        page_aux = {name: np.zeros((size, *array.shape[1:]), array.dtype) for name, array in state.page_aux.items()}
        filled, firsts = 0, np.cumsum([0, *(pages.width for pages in source)])
        owner = np.searchsorted(firsts, entries, side="right") - 1  # -1 for padding
        for number in np.unique(owner[owner >= 0]).tolist():
            mine = np.flatnonzero(owner == number)
            where = layer[mine], head[mine], entries[mine] - firsts[number]
            packed: recall_steps.PackedPages = source[number].payload
            for target, arrays in ((pools, packed.pools), (page_aux, {n: packed.page_aux[n] for n in moving})):
                for name, array in arrays.items():
                    found = np.asarray(array)[where]
                    target[name][mine] = found
                    filled += found.nbytes
        return transfers.ExportedPages(pools, page_aux), filled  # type: ignore[arg-type]

    def front(self, name: str, plan: FrontRow) -> None:
        """Replaces a row's table."""
        # Where a method counts rows, it counts as many in each head of a layer.
        shift = np.broadcast_to(plan.shift[:, 0], self._geometry.num_layers)
        args = np.int32(plan.row), self._runner._whole_table(name, plan.pages), plan.lengths.astype(np.int32)
        program = self._front(name)
        self._runner.state = self._call(program, self._runner.state, *args, shift.astype(np.int32))


def _aux_names(method: Method, geometry: Geometry, per: str) -> list[str]:
    return [name for name, spec in method.aux_specs(geometry).items() if spec.per == per]
