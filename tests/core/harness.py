"""Drives the step functions without a scheduler: the shortest host loop that is right, for tests and examples."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import registry, steps
from sparsejax.combine import with_granularity
from sparsejax.geometry import Geometry, Granularity
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, Weights
from sparsejax.sampling import FLOAT_COLUMNS, INT_COLUMNS
from sparsejax.state import StateSize, empty_state

TINY = ModelSpec("llama", 97, 48, 64, 3, 6, 2, 8, 512)


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    """Weights large enough that attention is not uniform."""
    specs = get_architecture(spec.architecture).weight_specs(spec)
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: hasattr(x, "nbytes") and hasattr(x, "fill"))
    rng = np.random.default_rng(seed)
    arrays = []
    for leaf in leaves:
        fan_in = leaf.shape[0] if len(leaf.shape) > 1 else 1
        value = rng.standard_normal(leaf.shape) * (1.5 * fan_in**-0.5) if len(leaf.shape) > 1 else np.ones(leaf.shape)
        arrays.append(jnp.asarray(value, leaf.dtype))
    return jax.tree.unflatten(tree, arrays)


@functools.cache
def tiny_weights(spec: ModelSpec = TINY, seed: int = 0) -> Weights:
    return random_weights(spec, seed)


@dataclasses.dataclass
class Row:
    length: int = 0
    pages: list | None = None  # [layers][heads] lists of page ids
    since: int = 0  # tokens of this phase since it began or since the last compaction


class Session:
    """A device state with a page allocator that hands out pages in a scrambled order."""

    def __init__(
        self,
        method: str = "dense",
        *,
        spec: ModelSpec = TINY,
        weights: Weights | None = None,
        page_size: int | None = None,
        max_len: int | None = None,
        num_rows: int = 4,
        num_pages: int | None = None,
        granularity: Granularity | None = None,
        seed: int = 0,
        params: dict | None = None,
    ):
        self.method, self.storage = registry.resolve(method, params)
        if granularity is not None:
            self.method = with_granularity(self.method, granularity)
        self.weights = tiny_weights(spec) if weights is None else weights
        page_size = self.method.page_size(self.method.params) or page_size or 4
        self.geometry: Geometry = spec.geometry(page_size, max_len)
        self.statics = steps.Statics(spec, self.geometry, self.method, self.storage, return_logits=True)
        self.grain = self.method.granularity
        self.shape = self.geometry.table_shape(self.grain)
        num_pages = num_pages or 2 + 2 * num_rows * self.geometry.max_pages
        size = StateSize(num_rows, num_pages, spec.vocab_size)
        self.state = empty_state(self.geometry, size, (self.method,), self.storage)
        per_slab = int(np.prod(self.shape))
        ids = np.arange(per_slab, num_pages * per_slab)  # slab 0 is null
        rng = np.random.default_rng(seed)
        # Pages of a layer or head granularity serve only the layer and head they are cut for if ids must stay aligned;
        # they need not: any page serves any layer.
        self.free = list(rng.permutation(ids))
        self.rows: dict[int, Row] = {}
        self.peak_pages = 0
        self.total = len(self.free)

    def _columns(self, row: int, new_length: int) -> list[tuple[int, int, int, int, int]]:
        record = self.rows[row]
        updates = []
        for layer in range(self.shape[0]):
            for head in range(self.shape[1]):
                pages = record.pages[layer][head]
                while len(pages) < self.geometry.pages(new_length):
                    pages.append(int(self.free.pop()))
                    updates.append((layer, head, row, len(pages) - 1, pages[-1]))
        self.peak_pages = max(self.peak_pages, self.total - len(self.free))
        return updates

    def _pack(self, updates: list, width: int) -> jnp.ndarray:
        array = np.zeros((width, 5), np.int32)
        if updates:
            array[: len(updates)] = updates
        return jnp.asarray(array)

    def _start(self, row: int) -> None:
        self.rows[row] = Row(pages=[[[] for _ in range(self.shape[1])] for _ in range(self.shape[0])])

    def release(self, row: int) -> None:
        for layer in self.rows.pop(row).pages:
            for pages in layer:
                self.free.extend(pages)

    def _maintain(self, row: int, phase: str) -> None:
        record = self.rows[row]
        kept = self.method.keep_count(self.method.params, phase, record.length)
        if kept == record.length:
            return
        columns = self.geometry.pages(kept)
        new = [[[int(self.free.pop()) for _ in range(columns)] for _ in range(self.shape[1])] for _ in range(self.shape[0])]
        self.peak_pages = max(self.peak_pages, self.total - len(self.free))
        inputs = steps.MaintainInputs(jnp.int32(row), jnp.asarray(new, jnp.int32), jnp.int32(record.since))
        self.state = steps.maintain_step(self.statics, self.state, inputs, phase=phase, kept=kept)
        for layer in record.pages:
            for pages in layer:
                self.free.extend(pages)
        record.pages, record.length, record.since = new, kept, 0

    def prefill(self, prompts: dict[int, list[int]], *, chunk: int = 64, last: bool = True, first: bool = True):
        """Prefills several rows side by side in chunks; returns logits of each row's last token."""
        todo = {row: list(tokens) for row, tokens in prompts.items()}
        if first:
            for row in prompts:
                self._start(row)
        started = set() if first else set(prompts)
        logits = {}
        while any(todo.values()):
            rows = [row for row in todo if todo[row]]
            tokens = np.zeros((len(prompts), chunk), np.int32)
            table = np.zeros((len(prompts), 4), np.int32)
            updates = []
            ending = []
            for i, row in enumerate(rows):
                part, todo[row] = todo[row][:chunk], todo[row][chunk:]
                tokens[i, : len(part)] = part
                ends = last and not todo[row]
                table[i] = row, len(part), row not in started, ends
                started.add(row)
                record = self.rows[row]
                updates += self._columns(row, record.length + len(part))
                record.length += len(part)
                record.since += len(part)
                if not todo[row]:
                    ending.append((i, row))
            width = len(prompts) * (self.geometry.pages(chunk) + 1) * int(np.prod(self.shape))
            inputs = steps.PrefillInputs(
                jnp.asarray(tokens), jnp.asarray(table), *self._greedy(len(prompts)), self._pack(updates, width)
            )
            self.state, out = steps.prefill_chunk(self.statics, self.weights, self.state, inputs)
            for i, row in ending:
                logits[row] = np.asarray(out.logits[i])
                if last:
                    self._maintain(row, "prompt")
                    self.rows[row].since = 0
        return logits

    def decode(self, rows: list[int], tokens: list[int] | None = None, bucket: int | None = None):
        """One step for each row; returns (logits [rows, vocab], sampled tokens)."""
        bucket = bucket or len(rows)
        table = np.zeros((bucket, 2), np.int32)
        table[:, 1] = -1
        updates = []
        for i, row in enumerate(rows):
            table[i, 0] = row
            if tokens is not None:
                table[i, 1] = tokens[i]
            updates += self._columns(row, self.rows[row].length + 1)
            self.rows[row].length += 1
            self.rows[row].since += 1
        width = bucket * int(np.prod(self.shape))
        inputs = steps.DecodeInputs(jnp.asarray(table), *self._greedy(bucket), self._pack(updates, width))
        self.state, out = steps.decode_step(self.statics, self.weights, self.state, inputs)
        for row in rows:
            self._maintain(row, "token")
        packed = np.asarray(out.packed)
        assert packed[: len(rows), 1].all(), "non-finite logits"
        return np.asarray(out.logits)[: len(rows)], packed[: len(rows), 0]

    def generate(self, row: int, prompt: list[int], count: int, *, chunk: int = 64):
        """Greedy tokens and the logits that chose them."""
        logits = [self.prefill({row: prompt}, chunk=chunk)[row]]
        tokens = [int(logits[0].argmax())]
        for _ in range(count - 1):
            found, sampled = self.decode([row])
            logits.append(found[0])
            tokens.append(int(sampled[0]))
        return tokens, np.stack(logits)

    def positions(self, row: int, layer: int = 0, head: int = 0) -> np.ndarray:
        """Logical positions of the rows that a head keeps."""
        record = self.rows[row]
        length = record.length
        pages = record.pages[layer if self.shape[0] > 1 else 0][head if self.shape[1] > 1 else 0]
        geometry = self.geometry
        if self.grain is Granularity.SEQUENCE:
            heads = [(page * geometry.num_layers + layer) * geometry.num_kv_heads + head for page in pages]
        elif self.grain is Granularity.LAYER:
            heads = [page * geometry.num_kv_heads + head for page in pages]
        else:
            heads = pages
        return np.asarray(self.state.pools["positions"])[np.asarray(heads, int)].reshape(-1)[:length]

    @staticmethod
    def _greedy(batch: int):
        ints = np.zeros((batch, len(INT_COLUMNS)), np.int32)
        ints[:, INT_COLUMNS.index("logprobs")] = -1
        floats = np.zeros((batch, len(FLOAT_COLUMNS)), np.float32)
        floats[:, FLOAT_COLUMNS.index("top_p")] = 1
        floats[:, FLOAT_COLUMNS.index("repetition_penalty")] = 1
        return jnp.asarray(ints), jnp.asarray(floats)
