"""Recall on a device runner: with everything lent nothing was ever dropped, and loans leave no trace in statistics."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from sparsejax import combine, recall_programs, recall_steps, registry
from sparsejax.forward import Statics
from sparsejax.plans import FrontRow, LendPages, MaintainRow
from sparsejax.request import ChainOptions, Request, SamplingParams
from sparsejax.runner import DeviceRunner
from sparsejax.scheduler import Scheduler
from sparsejax.settings import EngineSettings
from sparsejax.state import POSITIONS
from tests.contracts.compositions import RAGGED, dense_with_storage_of, small
from tests.core.harness import TINY, Session, run, tiny_weights, tokens_of
from tests.core.test_chains import Conversation, encode

PAGE, WINDOW, CHUNK, COUNT = 4, 128, 24, 6
SETTINGS = EngineSettings(recall_host_bytes=1 << 30)


def runner_of(name: str, knobs: dict | None = None, **options) -> DeviceRunner:
    method, storage = registry.resolve(name, small(name) | (knobs or {}))
    return DeviceRunner(
        TINY,
        tiny_weights(TINY),
        TINY.geometry(PAGE, WINDOW),
        {name: combine.bound(method, encode)},
        storage,
        num_rows=3,
        num_sequence_pages=120,
        decode_buckets=(4,),
        prefill_buckets=((1, CHUNK),),
        **options,
    )


class Watched:
    """A runner whose compactions and loans are looked at: what every row was, and what stands before a row.

    Attributes:
      known: what is stored of each position, by layer and KV head: bytes of all arrays of the storage.
      loans: positions of the rows that were lent, [layer][head], each time they are put before the row's own.
      complete: every row that was ever computed must be there whenever a loan is put in front.
    """

    def __init__(self, runner: DeviceRunner, complete: bool) -> None:
        self.runner, self.complete = runner, complete
        self.known: dict[tuple[int, int], dict[int, bytes]] = {}
        self.loans: list[list[list[list[int]]]] = []
        self.lent: list[LendPages] = []
        self._maintain, self._front, self._lend = runner.maintain, runner.front, runner.lend
        for name in ("maintain", "front", "lend"):
            setattr(runner, name, getattr(self, name))

    def rows(self, method: str, table: np.ndarray, lengths: np.ndarray) -> dict[tuple[int, int], dict[int, bytes]]:
        geometry, grain = self.runner.limits.geometry, self.runner.limits.methods[method].granularity
        parts, found = geometry.head_pages_per_page(grain), {}
        pools = {name: np.asarray(pool) for name, pool in sorted(self.runner.state.pools.items())}
        for layer, head in np.ndindex(geometry.num_layers, geometry.num_kv_heads):
            l, h = layer % lengths.shape[0], head % lengths.shape[1]
            length = int(lengths[l, h])
            part = (layer * geometry.num_kv_heads + head) % parts
            pages = table[l, h, : geometry.pages(length)] * parts + part
            stored = {name: pool[pages].reshape(-1, *pool.shape[2:])[:length] for name, pool in pools.items()}
            positions = stored.pop(POSITIONS).tolist()
            assert len(set(positions)) == length, "a row is there twice"
            rows = (b"".join(rows[i].tobytes() for rows in stored.values()) for i in range(length))
            found[layer, head] = dict(zip(positions, rows, strict=True))
        return found

    def learn(self, method: str, rows: dict[tuple[int, int], dict[int, bytes]]) -> None:
        for key, found in rows.items():
            known = self.known.setdefault(key, {})
            for position, content in found.items():
                assert known.setdefault(position, content) == content, "a row has changed"

    def maintain(self, method: str, plan: MaintainRow):
        grain = self.runner.limits.methods[method].granularity.value
        table = np.asarray(self.runner.state.tables[grain])[:, :, plan.row]
        self.learn(method, self.rows(method, table, plan.length))
        return self._maintain(method, plan)

    def lend(self, method: str, plan: LendPages) -> int:
        self.lent.append(plan)
        return self._lend(method, plan)

    def front(self, method: str, plan: FrontRow) -> None:
        self._front(method, plan)
        rows = self.rows(method, np.maximum(plan.pages, 0), plan.lengths)
        self.learn(method, rows)
        if not plan.lent.any():
            return
        if self.complete:
            assert rows == self.known
        lent = self.rows(method, np.maximum(plan.pages, 0), plan.lent)
        geometry = self.runner.limits.geometry
        layers, heads = range(geometry.num_layers), range(geometry.num_kv_heads)
        self.loans.append([[list(lent[layer, head]) for head in heads] for layer in layers])


class Talk(Conversation):
    """A conversation whose method's dropped rows are kept."""

    def __init__(self, runner: DeviceRunner, budget: object) -> None:
        super().__init__(runner)
        self.scheduler = Scheduler(runner, SETTINGS)
        self.budget = budget

    def turn(self, tokens: list[int], count: int = COUNT) -> list[int]:
        self.turns += 1
        events: list = []
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        how = {} if self.budget is None else {"recall": "host", "recall_budget": self.budget}
        prompt = (*self.context, *tokens)
        request = Request(f"t{self.turns}", prompt, params, chain=ChainOptions(self.chain_id, on_miss="error", **how))
        self.scheduler.add(self.scheduler.prepare(request, events.append))
        while self.scheduler.step():
            self.scheduler.check_integrity()
        assert events[-1].finish_reason == "length", events[-1]
        answer = [token for event in events for token in event.token_ids]
        self.context, self.chain_id = [*prompt, *answer], events[-1].chain.chain_id
        self.report = events[-1].chain.recall
        return answer


KNOBS = {
    # Nothing is dropped before the first prompt has been computed whole.
    "h2o": {"h2o_prefill_budget": 40},
    "h2o(h2o_decode_eviction=false)": {"h2o_prefill_budget": 40},
}
QUICK = ("snapkv+fp8_kv", "pyramidkv", RAGGED[0])
SLOW = ("snapkv", "streamingllm", *KNOBS, "h2o+fp8_kv")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_with_everything_lent_a_chain_says_what_it_would_had_nothing_been_dropped(name: str) -> None:
    runner = runner_of(name, KNOBS.get(name, KNOBS["h2o"] if name.startswith("h2o") else None))
    watched, talk = Watched(runner, complete=True), Talk(runner, "all")
    dense = Talk(runner_of(dense_with_storage_of(name)), None)
    prompt = tokens_of(1, CHUNK)
    assert talk.turn(prompt, 1) == dense.turn(prompt, 1)
    # Where heads are counted the turn is over before the counts are there, and all rows stay.
    assert (talk.report.evicted_rows == 0) == runner.limits.methods[name].ragged
    for n, tokens in enumerate([tokens_of(2, 7), tokens_of(3, 30), tokens_of(4, 1)]):
        before = talk.report.evicted_pages
        assert talk.turn(tokens) == dense.turn(tokens), f"turn {n + 2}"
        assert talk.report.lent_pages == talk.report.evicted_pages >= before
        assert talk.report.scored_pages == 0
    assert len(watched.loans) >= 3
    everything = talk.scheduler.chains.index.chains[talk.chain_id].processed
    for key, known in watched.known.items():
        assert sorted(known)[: everything - COUNT] == list(range(everything - COUNT)), key


@pytest.mark.slow
@pytest.mark.parametrize("in_flight_bytes", [1 << 30, 1000])
@pytest.mark.parametrize("name", [RAGGED[1], "rkv", "snapkv+quest"])
def test_everything_is_lent_as_it_was(name: str, in_flight_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows go after replays, by what heads contain, or while decoding; and if the host waits for copies."""
    monkeypatch.setattr(recall_programs, "IN_FLIGHT_BYTES", in_flight_bytes)
    runner = runner_of(name)
    watched, talk = Watched(runner, complete=True), Talk(runner, "all")
    for n in range(3):
        talk.turn(tokens_of(n, 20), 12)
        assert talk.report.evicted_rows > 0
    assert len(watched.loans) >= 2
    assert talk.report.lent_pages == talk.report.evicted_pages


class Lent(Session):
    """A session in which rows that were dropped are put before a row by hand, and taken away before a compaction."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.saved: dict[tuple[int, int], dict[int, dict[str, np.ndarray]]] = {}
        self.loan: list[list[list[int]]] | None = None  # pages
        self.counters = [name for name, spec in self.method.aux_specs(self.geometry).items() if spec.counts_rows]

    def save(self, row: int) -> None:
        """Remembers all rows by position."""
        names = [*self.state.pools, *recall_steps.per_token(self.statics)]
        arrays = {name: np.asarray({**self.state.pools, **self.state.page_aux}[name]) for name in names}
        for layer, head in np.ndindex(self.geometry.num_layers, self.geometry.num_kv_heads):
            pages, saved = self.head_pages(row, layer, head), self.saved.setdefault((layer, head), {})
            for i, position in enumerate(self.positions(row, layer, head).tolist()):
                page, offset = pages[i // PAGE], i % PAGE
                saved[position] = {name: array[page, offset].copy() for name, array in arrays.items()}

    def lend(self, row: int, positions: list[list[list[int]]]) -> None:
        """Puts saved rows before a row: `positions` [layer][head] of whole pages."""
        columns = len(positions[0][0]) // PAGE
        self.loan = self._take(columns)
        everything = {**self.state.pools, **self.state.page_aux}
        for layer, head in np.ndindex(self.geometry.num_layers, self.geometry.num_kv_heads):
            own, self.rows[row].pages = self.rows[row].pages, self.loan
            pages = self.head_pages(row, layer, head)
            self.rows[row].pages = own
            for i, position in enumerate(positions[layer][head]):
                for name, content in self.saved[layer, head][position].items():
                    everything[name] = everything[name].at[pages[i // PAGE], i % PAGE].set(content)
        pools = {name: everything[name] for name in self.state.pools}
        self.state = self.state.replace(pools=pools, page_aux={n: everything[n] for n in self.state.page_aux})
        self._show(row, 1)
        table = self._table(self.loan, self.geometry.max_pages)
        lengths = np.full(self.shape, columns * PAGE, np.int32)
        if any(spec.per == "page" for spec in self.method.aux_specs(self.geometry).values()):
            self.state = run(recall_steps.build_page_aux, self.statics, self.state, table, lengths)

    def _show(self, row: int, sign: int) -> None:
        """The device sees the loan before the row's own (1), or its own only (-1)."""
        assert self.loan is not None
        record, grain = self.rows[row], self.grain.value
        count = len(self.loan[0][0])
        both = [
            [(lent if sign > 0 else []) + own for lent, own in zip(lents, owns, strict=True)]
            for lents, owns in zip(self.loan, record.pages, strict=True)
        ]
        lengths = record.lengths + (count * PAGE if sign > 0 else 0)
        table = self.state.tables[grain].at[:, :, row].set(self._table(both, self.geometry.max_pages))
        row_aux = {
            name: array.at[:, row].add(sign * count * PAGE) if name in self.counters else array
            for name, array in self.state.row_aux.items()
        }
        self.state = self.state.replace(
            tables={**self.state.tables, grain: table},
            lengths={**self.state.lengths, grain: self.state.lengths[grain].at[:, :, row].set(lengths)},
            row_aux=row_aux,
        )

    def take_away(self, row: int) -> None:
        if self.loan is not None:
            self._show(row, -1)
            self.loan = None

    def _grow(self, row: int, tokens: int) -> list:
        shift = 0 if self.loan is None else len(self.loan[0][0])
        return [(l, h, row, column + shift, page) for l, h, row, column, page in super()._grow(row, tokens)]

    def _maintain(self, row: int, phase: str) -> None:
        if self.loan is None:
            self.save(row)
            super()._maintain(row, phase)
            return
        loan = copy.deepcopy(self.loan)
        self.take_away(row)
        self.save(row)
        super()._maintain(row, phase)
        self.loan = loan
        self._show(row, 1)


BY_HAND = {  # name: knobs, prompts so long that every compaction drops whole pages
    "h2o": ({"h2o_decode_eviction": False, "h2o_prefill_budget": 40}, (23, 7, 6)),
    "snapkv+quest": ({"snapkv_decode_eviction": False}, (21, 7, 6)),
}


@pytest.mark.parametrize("name", ["h2o", pytest.param("snapkv+quest", marks=pytest.mark.slow)])
def test_a_turn_after_one_with_a_loan_equals_both_by_hand(name: str) -> None:
    """Statistics that a method keeps are those of the rows that stay, whatever stood before them for a turn."""
    knobs, sizes = BY_HAND[name]
    runner = runner_of(name, knobs)
    watched, served = Watched(runner, complete=False), Talk(runner, PAGE)
    session = Lent(name, params=small(name) | knobs, page_size=PAGE, max_len=WINDOW, chunk=CHUNK)
    layers, heads = range(session.geometry.num_layers), range(session.geometry.num_kv_heads)
    last: list[int] = []
    for n, size in enumerate(sizes):
        tokens, count = tokens_of(n + 1, size), 1 if n == 0 else COUNT
        watched.loans.clear()
        answer = served.turn(tokens, count)
        if n:
            assert served.report.lent_rows == PAGE
            assert served.report.scored_pages > served.report.lent_pages
            session.lend(1, watched.loans[0])
        logits = [session.prefill({1: [*last, *tokens]}, first=not n)[1]]
        logits += [session.decode([1])[0] for _ in range(count - 1)]
        session.take_away(1)
        assert answer == np.stack(logits).argmax(-1).tolist(), f"turn {n + 1}"
        assert served.positions() == [[session.positions(1, l, h).tolist() for h in heads] for l in layers]
        last = answer[-1:]
    for aux, array in served.chain.payload.parked.payload.row_aux.items():
        np.testing.assert_allclose(array, session.state.row_aux[aux][:, 1], rtol=2e-4, atol=2e-5, err_msg=aux)


def test_the_probe_sees_what_a_prompt_sees_and_leaves_nothing_behind() -> None:
    """Its queries are those that the method takes down when the same tokens are computed in earnest."""
    name = "snapkv"
    runner = runner_of(name)
    served = Talk(runner, PAGE)
    served.turn(tokens_of(1, CHUNK), 1)
    before = served.chain.payload.parked.payload
    queries: list[np.ndarray] = []
    call = runner._recall._call

    def watched(program, *args):
        found = call(program, *args)
        if program.name == "probe":
            queries.append(np.asarray(found[1]))
        return found

    runner._recall._call = watched
    suffix = tokens_of(2, 9)
    events: list = []
    prompt = (*served.context, *suffix)
    options = ChainOptions(served.chain_id, recall="host", recall_budget=PAGE)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    served.scheduler.add(served.scheduler.prepare(Request("probe", prompt, params, chain=options), events.append))
    served.scheduler.step()
    assert served.scheduler.running[0].awaits_scores
    served.scheduler.cancel("probe")
    while served.scheduler.step():
        pass
    after = served.chain.payload.parked.payload
    assert all((np.asarray(before.row_aux[aux]) == array).all() for aux, array in after.row_aux.items())
    served.budget = None
    served.turn(suffix, 1)
    window = small(name)["observation_window_size"]
    ring = np.asarray(served.chain.payload.parked.payload.row_aux["snapkv_queries"])
    positions = np.arange(len(prompt) - window, len(prompt))
    np.testing.assert_allclose(queries[0][:, -window:], ring[:, positions % window], rtol=1e-4, atol=1e-5)


def test_the_page_that_matches_best_is_lent() -> None:
    """Keys that match a query of the prompt's end in one head are planted in a dropped page: every head gets it."""
    runner = runner_of("pyramidkv")
    watched, served = Watched(runner, complete=False), Talk(runner, PAGE)
    watched.learn = lambda method, rows: None  # what is planted was never computed
    served.turn(tokens_of(1, CHUNK), 1)
    evicted, queries = served.chain.evicted, []
    call = runner._recall._call

    def planting(program, *args):
        if program.name == "page_logits" and not queries:
            asked, total, keys, counts = args
            queries.append(np.asarray(asked)[1, -1, 3])  # of KV head 1
            planted = np.array(keys["k"])
            planted[1, 1, 0, 2] = 50.0 * queries[0] / np.abs(queries[0]).max()
            args = asked, total, {"k": planted}, counts
        return call(program, *args)

    runner._recall._call = planting
    served.turn(tokens_of(2, 9), 1)
    pages = np.concatenate([np.asarray(some.payload.pools[POSITIONS]) for some in evicted], axis=2)
    wanted = pages[1, 1, 0].tolist()
    assert watched.loans[0][1][1] == wanted
    for layer, head in np.ndindex(pages.shape[:2]):
        shared = [len(set(page) & set(wanted)) for page in pages[layer, head].tolist()]
        lent = watched.loans[0][layer][head]
        assert len(set(lent) & set(wanted)) == max(shared), "what one head is sure of is there for all"


def test_votes_are_squared_shares_of_attention() -> None:
    """Of everything that a query may look at: what the chain still has, its own prompt and all dropped pages."""
    name = "snapkv+fp8_kv"
    method, storage = registry.resolve(name, small(name))
    geometry = TINY.geometry(PAGE, WINDOW)
    statics = recall_steps.probe_statics(Statics(TINY, geometry, method, storage))
    rng = np.random.default_rng(0)
    layers, heads, pages, dim, voters = geometry.num_layers, geometry.num_kv_heads, 3, geometry.head_dim, 5
    keys = rng.standard_normal((2, layers, heads, pages, PAGE, dim)).astype(np.float32)
    queries = rng.standard_normal((layers, recall_steps.VOTERS, geometry.num_q_heads, dim)).astype(np.float32)
    total = rng.standard_normal(queries.shape[:3]).astype(np.float32)
    total[:, :-voters] = -np.inf
    counts = [np.full((layers, heads), 3, np.int32), np.array([[1, 3]] * layers, np.int32)]
    found, sums, decoded = [], total, []
    for block, count in zip(keys, counts, strict=True):
        stored = storage.encode(storage.params, geometry, 0, block, block)
        packed = {array: stored[array] for array in storage.key_arrays}
        logits, rows, sums = run(recall_steps.page_logits, statics, queries, sums, packed, count)
        found.append((logits, rows))
        flat = {n: a.reshape(layers, heads, pages * PAGE, *a.shape[4:]) for n, a in stored.items()}
        decoded.append(np.asarray(storage.load_tile(storage.params, geometry, flat, 0)[0]))
    logits = np.concatenate(
        [np.einsum("lwhgd,lhnd->lwhgn", queries.reshape(*queries.shape[:2], heads, -1, dim), k) for k in decoded], -1
    )
    there = np.concatenate([np.arange(pages) < count[..., None] for count in counts], -1)
    logits = np.where(np.repeat(there, PAGE, -1)[:, None, :, None], logits * geometry.scale, -np.inf)[:, -voters:]
    mass = np.exp(logits)
    rest = np.exp(total[:, -voters:]).reshape(*mass.shape[:4])
    share = (mass / (mass.sum(-1) + rest)[..., None]).reshape(*mass.shape[:4], -1, PAGE).sum(-1)
    votes = [run(recall_steps.page_votes, *block, sums, heads=heads) for block in found]
    expected = (share**2).sum((1, 3))
    np.testing.assert_allclose(np.concatenate([votes for votes, _ in votes], 2), expected, rtol=1e-4)
    best = mass.reshape(*share.shape, PAGE).argmax(-1)
    surest = np.moveaxis(share, 2, 1).reshape(layers, heads, -1, share.shape[-1]).argmax(2, keepdims=True)
    rows = np.take_along_axis(np.moveaxis(best, 2, 1).reshape(layers, heads, -1, share.shape[-1]), surest, 2)[:, :, 0]
    there &= expected > 0
    assert (np.concatenate([rows for _, rows in votes], 2) == rows)[there].all()


@pytest.mark.slow
def test_nothing_is_compiled_while_chains_are_served() -> None:
    name = "snapkv+quest+fp8_kv"
    runner = runner_of(name, recall=True, fail_on_retrace=True)
    for _ in runner.compile(runner.programs(), 2):
        pass
    runner.seal()
    for budget in ("all", 2 * PAGE):
        talk = Talk(runner, budget)
        for n in range(4):
            talk.turn(tokens_of(n, 25))
        assert talk.report.lent_pages > 0
    assert runner.num_late_compiles == 0
