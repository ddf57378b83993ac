"""Which rows H2O keeps in a running model, against NumPy over queries and keys recomputed from the start."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from sparsejax import registry
from sparsejax.accumulated_scores import SCORED, SCORES
from sparsejax.errors import MethodError
from sparsejax.memory import Memory
from sparsejax.mock import MockRunner
from sparsejax.state import POSITIONS
from tests.contracts.compositions import small
from tests.core.harness import Row, Session, tokens_of
from tests.core.oracle import Reads

WHOLE = "sparse_prefill_score_mode=probability,h2o_prefill_score_window=0,h2o_head_reduction=sum"
DENSE_PROMPT = f"h2o(h2o_prefill_compaction=false,{WHOLE})"
PAPER = f"h2o(head_mode=per_kv_head,h2o_prefill_compaction=false,h2o_decode_eviction_interval=1,{WHOLE})"
VARIANTS = [
    "h2o",
    "h2o+h2o_prefill",
    "h2o(h2o_decode_eviction=false)",
    "h2o(h2o_decode_eviction=false,h2o_logit_scale=none,head_mode=per_kv_head)+fp8_kv",
    "h2o(sparse_prefill_score_mode=probability,head_mode=per_kv_head)",
    "h2o_prefill(sparse_prefill_score_mode=probability)",
    "h2o_prefill(head_mode=per_kv_head,h2o_prefill_score_window=0)",
    DENSE_PROMPT,
    PAPER,
]


@dataclasses.dataclass
class Step:
    """Tokens `begin` to `end` were appended and, unless `after` equals `before`, rows evicted."""

    phase: str
    begin: int
    end: int
    before: np.ndarray  # [layers, heads, rows] positions, the new tokens' included
    after: np.ndarray


class Watched(Session):
    """Notes every step."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, params=small(name), max_len=96, **options)
        self.steps: list[Step] = []

    def all_positions(self, row: int) -> np.ndarray:
        geometry = self.geometry
        heads = range(geometry.num_kv_heads)
        return np.stack([np.stack([self.positions(row, l, h) for h in heads]) for l in range(geometry.num_layers)])

    def _maintain(self, row: int, phase: str) -> None:
        begin, before = self.steps[-1].end if self.steps else 0, self.all_positions(row)
        super()._maintain(row, phase)
        self.steps.append(Step(phase, begin, self.rows[row].seen, before, self.all_positions(row)))

    def scores(self, row: int) -> np.ndarray:
        """[layers, heads, rows]; 0 for rows that have none yet."""
        array, layers = np.asarray(self.state.page_aux[SCORES]), range(self.geometry.num_layers)
        stored = [[array[self.head_pages(row, layer, head)].reshape(-1) for head in range(2)] for layer in layers]
        found = np.asarray(stored)[..., : self.rows[row].length]
        if any(member.params.scoring.decoding for member in self.method.members or (self.method,)):
            return found
        scored = np.asarray(self.state.row_aux[SCORED])[:, row, None, None]
        return np.where(np.arange(found.shape[-1]) < scored, found, 0.0)


TURNS = ((tokens_of(1, 41), (13, 11), tokens_of(2, 9)), (tokens_of(3, 3), (2,), tokens_of(4, 4)))
TURNS += ((tokens_of(5, 20), (1, 8), tokens_of(6, 7)),)


def talk(session: Session, turn: int) -> np.ndarray:
    """One turn: logits of the prompt's last token and of each decoded one."""
    prompt, pieces, answer = TURNS[turn]
    logits = [session.prefill({1: prompt}, pieces=pieces, first=turn == 0)[1]]
    return np.stack(logits + [session.decode([1], [token])[0] for token in answer])


def gained(params: Any, geometry: Any, step: Step, q: np.ndarray, k: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What a step adds to the rows of one layer, float64 [heads, rows]; q and k are those of all positions."""
    decoding = step.phase == "token"
    count = 1 if decoding else min(params.h2o_prefill_score_window or 99, step.end - step.begin)
    query_at = np.arange(step.end - count, step.end)
    grouped = q.reshape(len(q), geometry.num_kv_heads, geometry.group_size, -1)[query_at].astype(np.float64)
    logits = np.stack([np.einsum("wgd,sd->gws", grouped[:, h], k[at, h]) for h, at in enumerate(rows)])
    seen = rows[:, None, None, :] <= query_at[None, None, :, None]
    shared = params.head_mode == "shared"
    if getattr(params, "h2o_decode_eviction", False) or params.sparse_prefill_score_mode == "probability":
        mass = np.where(seen, np.exp(logits * geometry.scale), 0.0)
        mass = (mass / mass.sum(-1, keepdims=True)).sum(2)  # [heads, group, rows]
        join = np.sum if decoding or params.h2o_head_reduction == "sum" else np.max
        mass = join(mass, axis=(0, 1))[None] if shared else join(mass, axis=1)
        return np.broadcast_to(mass, rows.shape)
    largest = np.where(seen, logits, -np.inf).max((1, 2))
    largest = largest.max(0, keepdims=True) if shared else largest
    largest = largest - largest.max(-1, keepdims=True)
    mass = np.exp(largest * (geometry.scale if params.h2o_logit_scale == "attn" else 1.0))
    return np.broadcast_to(count * mass / mass.sum(-1, keepdims=True), rows.shape)


def check_against_numpy(session: Watched, text: list[int]) -> int:
    """Replays all steps; returns how many evictions there were."""
    reads, geometry = Reads(session), session.geometry
    method = session.method
    params = (method.members or (method,))[0].params
    layers, heads = range(geometry.num_layers), range(geometry.num_kv_heads)
    for step in session.steps:
        resident = {(l, h): step.before[l, h][step.before[l, h] < step.begin] for l in layers for h in heads}
        reads.appended(text[step.begin : step.end], resident)
    _, tensors = reads.recompute()
    scores = np.zeros((geometry.num_layers, geometry.num_kv_heads, geometry.max_model_len))
    for step in session.steps:
        kept = step.after.shape[2]
        for layer in layers:
            rows = step.before[layer]
            of = np.arange(len(rows))[:, None], rows
            scoring = step.phase != "token" or getattr(params, "h2o_decode_eviction", False)
            if scoring and step.end > step.begin:
                scores[layer][of] += gained(params, geometry, step, *tensors[layer], rows)
            recent = max(1, int(kept * params.h2o_recent_ratio))
            for head, at in enumerate(rows):
                order = np.argsort(-scores[layer, head, at[: len(at) - recent]], kind="stable")
                best = np.sort(order[: kept - recent]) if kept < len(at) else np.arange(len(at) - recent)
                wanted = at[[*best, *range(len(at) - recent, len(at))]]
                np.testing.assert_array_equal(step.after[layer, head], wanted, err_msg=f"{step.phase} at {step.end}")
    final = session.steps[-1].after
    wanted = np.take_along_axis(scores, final, axis=2)
    np.testing.assert_allclose(session.scores(1), wanted, rtol=1e-4, atol=1e-4)
    return sum(step.after.shape != step.before.shape for step in session.steps)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_stays_is_what_received_most_attention(name):
    session = Watched(name)
    text: list[int] = []
    for turn, (prompt, _, answer) in enumerate(TURNS):
        talk(session, turn)
        text += prompt + answer
    assert check_against_numpy(session, text) >= 3
    phases = {step.phase for step in session.steps if step.after.shape != step.before.shape}
    assert ("chunk" in phases) == (name not in (DENSE_PROMPT, PAPER))
    assert ("prompt" in phases) == (session.method.axis == "retention")
    session.check()


def test_rows_can_be_given_back_before_they_are_due():
    session = Watched("h2o")
    talk(session, 0)
    assert session.rows[1].length > 11
    session._maintain(1, "pressure")
    assert session.rows[1].length == 11
    session.check()
    assert check_against_numpy(session, TURNS[0][0] + TURNS[0][2]) >= 4
    quiet = registry.resolve("h2o", small("h2o") | {"h2o_decode_eviction": False})[0]
    assert quiet.kept_after("pressure", np.full((1, 1), 50)) == 50


def test_alone_it_compacts_between_chunks_as_if_composed():
    alone, composed = Watched("h2o"), Watched("h2o+h2o_prefill")
    for turn in range(len(TURNS)):
        np.testing.assert_array_equal(talk(alone, turn), talk(composed, turn))
    np.testing.assert_array_equal(alone.all_positions(1), composed.all_positions(1))
    np.testing.assert_array_equal(alone.scores(1), composed.scores(1))


def test_beside_another_prefill_method_it_only_scores_chunks():
    everything = "flashprefill_v2(flashprefill_v2_abs_threshold=0)"
    alone, composed = Watched("h2o(h2o_prefill_compaction=false)"), Watched(f"h2o+{everything}")
    for turn in range(len(TURNS)):
        np.testing.assert_allclose(talk(composed, turn), talk(alone, turn), rtol=1e-4, atol=1e-4)
    assert "chunk" not in {step.phase for step in composed.steps if step.after.shape != step.before.shape}
    np.testing.assert_array_equal(composed.all_positions(1), alone.all_positions(1))
    np.testing.assert_allclose(composed.scores(1), alone.scores(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["h2o", "h2o(h2o_decode_eviction=false)", "h2o_prefill", PAPER])
def test_a_second_turn_is_the_same_on_rows_put_there_by_hand(name):
    first = Watched(name)
    talk(first, 0)
    record, geometry = first.rows[1], first.geometry
    other = Watched(name, seed=5, poison=np.nan)
    other.rows[1] = Row(other._take(0), np.zeros(other.shape, np.int32))
    updates = other._grow(1, record.length)
    other.rows[1].seen = record.seen
    layer, head, row, column, page = np.array(updates).T
    grain = other.grain.value
    table = other.state.tables[grain].at[layer, head, row, column].set(page)
    lengths = other.state.lengths[grain].at[:, :, 1].set(record.length)
    pools, page_aux = dict(other.state.pools), dict(other.state.page_aux)
    index = np.arange(record.length)
    for layer in range(geometry.num_layers):
        for head in range(geometry.num_kv_heads):
            at = other.head_pages(1, layer, head)[index // geometry.page_size], index % geometry.page_size
            for pool in pools:
                pools[pool] = pools[pool].at[at].set(first.stored(pool, 1, layer, head))
            page_aux[SCORES] = page_aux[SCORES].at[at].set(first.scores(1)[layer, head])
    other.state = other.state.replace(
        pools=pools,
        page_aux=page_aux,
        row_aux={SCORED: other.state.row_aux[SCORED].at[:, 1].set(first.state.row_aux[SCORED][:, 1])},
        tables={**other.state.tables, grain: table},
        lengths={**other.state.lengths, grain: lengths},
        positions=other.state.positions.at[1].set(record.seen),
    )
    assert POSITIONS in pools
    for turn in (1, 2):
        np.testing.assert_allclose(talk(other, turn), talk(first, turn), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(other.all_positions(1), first.all_positions(1))
    np.testing.assert_allclose(other.scores(1), first.scores(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["h2o", "h2o+h2o_prefill", "h2o_prefill"])
def test_a_long_prompt_needs_pages_for_its_budget_and_one_chunk(name):
    session, chunk, prompt = Session("dense"), 16, 400
    limits = MockRunner(num_sequence_pages=64, prefill_buckets=((1, 8), (1, chunk))).limits
    memory = Memory(dataclasses.replace(limits, geometry=session.geometry))
    method = registry.resolve(name, small(name))[0]
    pages = session.geometry.pages
    kept = pages(17)  # of a compaction
    decoded = 0 if "h2o" in name.split("+") else 8 - 1
    assert memory.pages_alone(method, prompt, 8) == pages(17 + chunk + decoded) + kept
    off = small("h2o") | {"h2o_prefill_compaction": False}
    assert memory.pages_alone(registry.resolve("h2o", off)[0], prompt, 8) == pages(prompt) + pages(11)


def test_scores_of_earlier_turns_count():
    session = Watched("h2o")
    talk(session, 0)
    before = session.all_positions(1)
    talk(session, 2)
    # In each layer a row that was dropped, of those that are not among the most recent ones.
    dropped = [
        np.flatnonzero(~np.isin(at[0], now[0]))[0] for at, now in zip(before, session.all_positions(1), strict=True)
    ]
    session = Watched("h2o")
    talk(session, 0)
    array, page_size = session.state.page_aux[SCORES], session.geometry.page_size
    for layer, row in enumerate(dropped):
        for head in range(session.geometry.num_kv_heads):
            array = array.at[session.head_pages(1, layer, head)[row // page_size], row % page_size].add(1e6)
    session.state = session.state.replace(page_aux={**session.state.page_aux, SCORES: array})
    talk(session, 2)
    for layer, row in enumerate(dropped):
        assert (session.all_positions(1)[layer] == before[layer, :, row][:, None]).any(1).all()


def test_summed_attention_does_not_depend_on_chunks():
    session = Watched(DENSE_PROMPT)
    assert not session.method.chunk_dependent
    prompt, found = TURNS[0][0], []
    for row, pieces in enumerate(([], [13, 25, 1, 1], [1, 1, 1, 38], [7, 5, 2, 1, 13]), 1):
        session.prefill({row: prompt}, pieces=pieces)
        found.append((session.all_positions(row), session.scores(row)))
    for positions, scores in found[1:]:
        np.testing.assert_array_equal(positions, found[0][0])
        np.testing.assert_allclose(scores, found[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["h2o", "h2o_prefill", DENSE_PROMPT.replace("sum", "reference"), DENSE_PROMPT.replace("window=0", "window=3")],
)
def test_what_depends_on_chunks_says_so(name):
    assert registry.resolve(name, small(name))[0].chunk_dependent


def test_without_decode_eviction_decoded_rows_score_nothing():
    session = Watched("h2o(h2o_decode_eviction=false)", poison=np.nan)
    talk(session, 0)
    scores, positions = session.scores(1), session.all_positions(1)
    decoded = positions >= 41
    assert decoded.sum() == 9 * 4
    assert (scores[decoded] == 0).all()
    assert (scores[~decoded] > 0).all()


def test_decode_eviction_asks_for_attention_mass(caplog):
    with caplog.at_level(logging.WARNING, "sparsejax.methods"):
        quiet = registry.resolve("h2o(h2o_decode_eviction=true,sparse_prefill_score_mode=probability)")[0]
        assert not caplog.records
        forced = registry.resolve("h2o(h2o_decode_eviction=true,sparse_prefill_score_mode=logits)")[0]
        assert "sparse_prefill_score_mode" in caplog.text
    assert forced.params.scoring == quiet.params.scoring
    with pytest.raises(MethodError, match="h2o_prefill_score_window"):
        registry.resolve("h2o(h2o_decode_eviction=true,h2o_prefill_score_window=129)")
    assert registry.resolve("h2o(h2o_prefill_score_window=129)")


def test_composed_members_score_once():
    # Both keep the same scores: if both added to them, they would be twice what they are.
    session = Watched("h2o_prefill+h2o")  # in any order, the one that also scores decoded tokens scores
    wanted = Watched("h2o")
    for turn in range(2):
        talk(session, turn)
        talk(wanted, turn)
    np.testing.assert_array_equal(session.scores(1), wanted.scores(1))
