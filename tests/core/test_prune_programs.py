"""Pruning on a device runner: scores against a float32 oracle, packed rows one by one, and what goes on behind them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import prune_programs, prune_steps, registry
from sparsejax.combine import with_granularity
from sparsejax.geometry import Granularity
from sparsejax.models.registry import get_architecture
from sparsejax.pallas_kernels.heads import finish
from sparsejax.pallas_kernels.row_scores import mosaic_tpu
from sparsejax.plans import PackRows, PrefillRow, RowScores, SamplingRow, ScoreRow, UnparkRow
from sparsejax.runner import DeviceRunner
from sparsejax.state import POSITIONS
from tests.contracts.compositions import small
from tests.core.harness import TINY, tiny_weights, tokens_of

WINDOW, CHUNK = 96, 24
TEXT = np.array(tokens_of(1, 32), np.int32)
CASES = [
    ("dense", Granularity.SEQUENCE),
    ("dense", Granularity.HEAD),
    ("quest", Granularity.SEQUENCE),
    ("fp8_kv", Granularity.LAYER),
]
by_case = pytest.mark.parametrize(("name", "grain"), CASES, ids=lambda value: getattr(value, "value", value))


class Device:
    """A runner whose row 1 holds TEXT, on pages in no order, and an allocator.

    Attributes:
      pages: int32 [layers, heads, columns] of row 1.
    """

    def __init__(self, name: str, grain: Granularity, chunk: int = CHUNK, **options) -> None:
        method, self.storage = registry.resolve(name, small(name))
        self.name, self.method = name, with_granularity(method, grain)
        self.page = method.page_size(method.params) or 4
        self.geometry = TINY.geometry(self.page, WINDOW)
        self.runner = DeviceRunner(
            TINY,
            tiny_weights(TINY),
            self.geometry,
            {name: self.method},
            self.storage,
            num_rows=2,
            num_sequence_pages=60,
            decode_buckets=(2,),
            prefill_buckets=((1, 8), (1, chunk)),
            prune=True,
            **options,
        )
        self.shape = self.geometry.table_shape(grain)
        slab = int(np.prod(self.shape))
        self.free = np.random.default_rng(2).permutation(np.arange(slab, 60 * slab)).tolist()
        self.pages = self.take(self.geometry.pages(len(TEXT)))
        self.fill(1, TEXT, self.pages)

    def take(self, columns: int) -> np.ndarray:
        count = int(np.prod(self.shape)) * columns
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32).reshape(*self.shape, columns)

    def fill(self, row: int, tokens: np.ndarray, pages: np.ndarray, before: int = 0) -> np.ndarray:
        """Appends tokens to a row that holds `before` columns, eight at a time; the logits of the last one."""
        if not before:
            self.runner.setup_row(row, (), ())
        for start in range(0, len(tokens), 8):
            columns = np.arange(start // self.page, self.geometry.pages(min(start + 8, len(tokens))))
            mine = pages[..., columns]
            layer, head, column = np.indices(mine.shape).reshape(3, -1)
            updates = np.stack([layer, head, before + columns[column], mine.reshape(-1)], 1).astype(np.int32)
            part = tokens[start : start + 8]
            plan = PrefillRow(row, part, not (before or start), False, SamplingRow(), updates)
            ticket = self.runner.prefill(self.name, [plan])
        return np.asarray(ticket.logits)[0]

    def head_pages(self, pages: np.ndarray, layer: int, head: int) -> np.ndarray:
        parts = self.geometry.head_pages_per_page(self.method.granularity)
        cell = layer * self.geometry.num_kv_heads + head
        return pages[layer % self.shape[0], head % self.shape[1]] * parts + cell % parts

    def arrays(self) -> dict[str, np.ndarray]:
        state = self.runner.state
        return {name: np.asarray(array) for name, array in {**state.pools, **state.page_aux}.items()}

    def stored(self, arrays: dict[str, np.ndarray], pages: np.ndarray, layer: int, head: int) -> dict[str, np.ndarray]:
        """What the pools hold of all rows of pages, in one layer and head."""
        ids = self.head_pages(pages, layer, head)
        pools = {name: arrays[name] for name in self.runner.state.pools}
        return {name: pool[ids].reshape(-1, *pool.shape[2:]) for name, pool in pools.items()}

    def written(self, pages: np.ndarray) -> np.ndarray:
        """bool [head-pages]: those of pages, and the null pages."""
        mask = np.zeros(len(self.runner.state.pools[POSITIONS]), bool)
        mask[: self.geometry.head_pages_per_sequence_page] = True
        parts = self.geometry.head_pages_per_page(self.method.granularity)
        mask[(pages.reshape(-1)[:, None] * parts + np.arange(parts)).reshape(-1)] = True
        return mask

    def probe(self, pages: np.ndarray, tokens: np.ndarray, position: int, scores: RowScores | None = None) -> RowScores:
        scratch = self.take(self.geometry.pages(len(tokens)))
        return self.runner.score_rows(self.name, ScoreRow(pages, scratch, tokens, position), scores)

    def read(self, scores: RowScores) -> np.ndarray:
        found = self.runner.read_scores(scores).result()
        assert found.dtype == np.float32
        assert found.shape == (self.geometry.max_pages * self.page,)
        return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(spec, geometry, storage, weights, tokens, positions, mask):
    """Logits, and of each layer what every query makes of every key: float32 [tokens, q_heads, tokens]."""
    architecture = get_architecture(spec.architecture)
    x, shares = architecture.embed(spec, weights, tokens), []
    for layer in range(spec.num_layers):

        def attend(projected, layer=layer):
            q, k, v = finish(projected)
            payload = storage.encode(storage.params, geometry, jnp.int32(layer), k, v)
            payload = jax.lax.optimization_barrier(payload)  # else XLA for GPUs leaves out the rounding
            tiles = {name: jnp.moveaxis(rows, 1, 0)[None] for name, rows in payload.items()}
            k, v = (rows[0] for rows in storage.load_tile(storage.params, geometry, tiles, jnp.int32(layer)))
            query = q.reshape(len(tokens), geometry.num_kv_heads, geometry.group_size, -1)
            logits = jnp.einsum("qhgd,hsd->qhgs", query, k, precision="highest") * geometry.scale
            share = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -jnp.inf), axis=-1)
            shares.append(share.reshape(len(tokens), geometry.num_q_heads, -1))
            return jnp.einsum("qhgs,hsd->qhgd", share, v, precision="highest").reshape(q.shape)

        x = architecture.layer(spec, weights["layers"][layer], x, positions, attend)
    return architecture.logits(spec, weights, x), jnp.stack(shares)


def oracle(device: Device, rows: np.ndarray, tokens: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole text is computed, then only some rows of it are there for tokens behind it.

    Returns:
      float32 [rows], the largest share that one of the tokens gives each; and the tokens' logits.
    """
    ids, n = np.concatenate([TEXT, tokens]), len(TEXT)
    mask = np.tri(len(ids), dtype=bool)
    mask[n:, :n] = np.isin(np.arange(n), rows)
    positions = np.concatenate([np.arange(n), position + np.arange(len(tokens))]).astype(np.int32)
    given = TINY, device.geometry, device.storage, tiny_weights(TINY), ids, positions, mask
    logits, shares = _forward(*given)
    return np.asarray(shares)[:, n:, :, rows].max((0, 1, 2)), np.asarray(logits)[n:]


def tolerance(name: str) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 1e-3} if "fp8" in name else {"rtol": 1e-4, "atol": 1e-6}


def pruned(device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Half of the rows in [8, 24) are gone: the pages that are left, and the indexes of their rows."""
    kept = np.sort(np.random.default_rng(5).permutation(16)[:8]).astype(np.int32)
    first, last = 8 // device.page, 24 // device.page
    target = device.take(8 // device.page)
    device.runner.pack_rows(device.name, PackRows(device.pages[..., first:last], kept, target))
    pages = np.concatenate([device.pages[..., :first], target, device.pages[..., last:]], 2)
    return pages, np.concatenate([np.arange(8), 8 + kept, np.arange(24, 32)])


@by_case
def test_scores_are_those_of_the_oracle(name: str, grain: Granularity) -> None:
    device = Device(name, grain)
    near = tolerance(name)
    texts = [np.array(tokens_of(seed, size), np.int32) for seed, size in ((3, 5), (4, CHUNK))]
    # All rows; as many as stand before a window of the text itself; and what is left of a pruned text.
    pages, rows = pruned(device)
    window = TEXT[24:]
    for some, left, tokens, at in (
        (device.pages, np.arange(32), texts[0], 32),
        (device.pages[..., : 24 // device.page], np.arange(24), window, 24),
        (pages, rows, texts[1], 40),
    ):
        found = device.read(device.probe(some, tokens, at))
        np.testing.assert_allclose(found[: len(left)], oracle(device, left, tokens, at)[0], **near)
        assert not found[len(left) :].any()
    first = device.probe(pages, texts[0], 32)
    both = device.read(device.probe(pages, texts[1], 32, first))
    alone = [oracle(device, rows, tokens, 32)[0] for tokens in texts]
    np.testing.assert_allclose(device.read(first)[: len(rows)], alone[0], **near)
    np.testing.assert_allclose(both[: len(rows)], np.maximum(*alone), **near)
    assert ((alone[0] > alone[1]).any(), (alone[0] < alone[1]).any()) == (True, True)


def test_queries_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune_steps, "MOST_QUERIES", 10)
    assert prune_steps.queries_at_once(TINY.num_q_heads // TINY.num_kv_heads) == 5
    device, tokens = Device("dense", Granularity.SEQUENCE, chunk=22), np.array(tokens_of(4, 21), np.int32)
    found = device.read(device.probe(device.pages, tokens, 32))
    np.testing.assert_allclose(found[:32], oracle(device, np.arange(32), tokens, 32)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 7, 8, 16, 64])
def test_tpu_kernels_take_a_part(group_size: int) -> None:
    """They pad queries to whole tiles of 8 (32-bit) or 16 (16-bit) rows."""
    count = prune_steps.queries_at_once(group_size)
    assert all(-(-n // 16) * 16 * group_size <= mosaic_tpu.MOST_QUERIES for n in (count, max(1, count - 5)))


@by_case
def test_a_probe_leaves_nothing_behind(name: str, grain: Granularity) -> None:
    device = Device(name, grain)
    before, state = device.arrays(), jax.tree.map(np.asarray, device.runner.state)
    tokens = np.array(tokens_of(3, 5), np.int32)
    scratch = device.take(device.geometry.pages(5) + 1)
    device.runner.score_rows(name, ScoreRow(device.pages, scratch, tokens, 32), None)
    after = jax.tree.map(np.asarray, device.runner.state)
    used = device.written(scratch[..., :-1])
    for array in state.pools:
        np.testing.assert_array_equal(after.pools[array][~used], before[array][~used], err_msg=array)
    assert (after.pools[POSITIONS][used] != before[POSITIONS][used]).any()
    for field in ("page_aux", "row_aux", "request_aux", "tables", "lengths", "positions", "counts", "last_tokens"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, field), getattr(state, field))


@by_case
@pytest.mark.parametrize("rows", [8, 1024])
def test_packed_rows_are_those_that_were_asked_for(
    name: str, grain: Granularity, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program, or in several that each take two pages."""
    monkeypatch.setattr(prune_programs, "PACK_ROWS", rows)
    device = Device(name, grain)
    before = device.arrays()
    count = 20 // device.page * device.page
    kept = np.sort(np.random.default_rng(6).permutation(28)[:count]).astype(np.int32)
    source, target = device.pages[..., 4 // device.page :], device.take(count // device.page)
    device.runner.pack_rows(name, PackRows(source, kept, target))
    after, used = device.arrays(), device.written(target)
    for array, content in before.items():
        np.testing.assert_array_equal(after[array][~used], content[~used], err_msg=array)
    page_aux = [aux for aux, spec in device.method.aux_specs(device.geometry).items() if spec.per == "page"]
    assert bool(page_aux) == (name == "quest")
    for layer, head in np.ndindex(device.geometry.num_layers, device.geometry.num_kv_heads):
        old, new = (device.stored(a, p, layer, head) for a, p in ((before, source), (after, target)))
        assert new[POSITIONS].tolist() == (4 + kept).tolist()
        for array, content in old.items():
            np.testing.assert_array_equal(new[array], content[kept], err_msg=array)
        if page_aux:
            ids, keys = device.head_pages(target, layer, head), new["k"].reshape(-1, device.page, TINY.head_dim)
            np.testing.assert_array_equal(after["quest_min"][ids], keys.min(1))
            np.testing.assert_array_equal(after["quest_max"][ids], keys.max(1))


@by_case
def test_a_row_goes_on_from_what_is_left(name: str, grain: Granularity) -> None:
    device = Device(name, grain)
    pages, rows = pruned(device)
    device.runner.setup_row(2, (), ())
    lengths = np.full(device.shape, len(rows), np.int32)
    device.runner.unpark(name, UnparkRow(2, pages, lengths, TEXT, None))
    suffix = np.array(tokens_of(7, 7), np.int32)
    logits = device.fill(2, suffix, device.take(device.geometry.pages(7)), pages.shape[2])
    near = 5e-2 if "fp8" in name else 1e-3
    np.testing.assert_allclose(logits, oracle(device, rows, suffix, 32)[1][-1], rtol=near, atol=near)
    full = oracle(device, np.arange(32), suffix, 32)[1][-1]
    assert np.abs(logits - full).max() > 0.1, "the rows that are gone would have made no difference"


def test_nothing_is_compiled_while_prefixes_are_pruned() -> None:
    name = "quest"
    device = Device(name, Granularity.SEQUENCE, fail_on_retrace=True)
    programs = list(device.runner._prune.programs())
    assert {p.key for p in programs} < {p.key for p in device.runner.programs()}
    assert len({p.key for p in programs}) == len(programs) == 4
    for _ in device.runner.compile(programs):
        pass
    device.runner.seal()
    scores = None
    for size, columns in ((1, 1), (8, 8), (9, 4), (CHUNK, 8)):
        tokens = np.array(tokens_of(size, size), np.int32)
        scores = device.probe(device.pages[..., :columns], tokens, 32, scores)
    assert scores is not None
    assert device.read(scores)[:32].all()
    for columns in (1, 3):
        rows = np.arange(columns * device.page, dtype=np.int32)
        device.runner.pack_rows(name, PackRows(device.pages, rows, device.take(columns)))
    assert device.runner.num_late_compiles == 0


def test_what_does_not_fit_is_refused() -> None:
    device = Device("dense", Granularity.SEQUENCE)
    tokens = np.array(tokens_of(3, CHUNK + 1), np.int32)
    with pytest.raises(ValueError, match="no program takes 25 tokens; the longest takes 24"):
        device.probe(device.pages, tokens, 32)
    with pytest.raises(ValueError, match="no program takes 0 tokens"):
        device.probe(device.pages, tokens[:0], 32)
    with pytest.raises(ValueError, match="5 tokens behind 8 pages, with 1 of their own"):
        device.runner.score_rows("dense", ScoreRow(device.pages, device.take(1), tokens[:5], 32), None)
    with pytest.raises(ValueError, match="do not fit a table of 24"):
        device.probe(np.repeat(device.pages, 3, 2), tokens[:1], 96)
    with pytest.raises(ValueError, match="5 rows do not fill 2 pages of 4"):
        device.runner.pack_rows("dense", PackRows(device.pages, np.arange(5, dtype=np.int32), device.take(2)))
