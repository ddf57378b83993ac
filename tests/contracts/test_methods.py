"""What holds for every method, storage and composition: see docs/architecture.md. Members are found, not listed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Granularity
from sparsejax.methods import quest
from tests.contracts.compositions import (
    COMPOSITIONS,
    DEFAULTS_ARE_FINE,
    EVICTING,
    KNOBS,
    RAGGED,
    RARE,
    SELECTED,
    budget,
    dense_with_storage_of,
    depends_on_chunks,
    start,
)
from tests.core.harness import Session, tokens_of
from tests.core.oracle import Reads

PAGE, LONG = 4, 41
TEXT, NEXT = tokens_of(1, LONG), tokens_of(2, 12)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}

every = pytest.mark.parametrize("name", [*COMPOSITIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)])


def close(found, wanted, **tolerance) -> None:
    np.testing.assert_allclose(found, wanted, **(tolerance or CLOSE))


def follow(session: Session, row: int, tokens: list[int]) -> np.ndarray:
    """Decodes given tokens: logits [tokens, vocab]."""
    return np.stack([session.decode([row], [token])[0] for token in tokens])


def whole(session: Session, row: int, prompt: list[int], tokens: list[int], pieces=()) -> np.ndarray:
    """Prefills and decodes given tokens: logits [1 + tokens, vocab]."""
    first = session.prefill({row: prompt}, pieces=pieces)[row]
    return np.concatenate([first[None], follow(session, row, tokens)])


def kept(session: Session, row: int) -> np.ndarray:
    """Positions of all layers and heads; those that keep fewer begin with negative numbers."""
    geometry = session.geometry
    heads = [(layer, head) for layer in range(geometry.num_layers) for head in range(geometry.num_kv_heads)]
    positions = [session.positions(row, layer, head) for layer, head in heads]
    longest = max(len(found) for found in positions)
    return np.stack([np.concatenate([np.arange(len(found) - longest, 0), found]) for found in positions])


def test_every_knob_has_a_small_value():
    known = set(KNOBS) | DEFAULTS_ARE_FINE
    assert set(registry.method_params()) == known, "give new knobs a small value in KNOBS"


def test_methods_are_equal_when_built_twice():
    # A method is a static argument: if two of the same were different, every session would compile anew.
    for name in COMPOSITIONS:
        first, second = (registry.resolve(name) for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)


PIECES = ([7, 5, 2, 1, 13], [40], [1, 1, 1, 38], [13, 25, 1, 1, 1])  # also ends shorter than a window
CUT = [name for name in COMPOSITIONS if depends_on_chunks(name)]


@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if name not in CUT])
def test_one_shot_equals_chunked(name):
    session = start(name)
    wanted = whole(session, 1, TEXT, NEXT)
    for pieces in PIECES:
        found = whole(session, 2, TEXT, NEXT, pieces)
        close(found, wanted)
        np.testing.assert_array_equal(kept(session, 2), kept(session, 1))
        session.check()
        session.release(2)


@pytest.mark.parametrize("name", CUT)
def test_equal_chunks_give_equal_results(name):
    session, found = start(name), []
    for pieces in PIECES:
        found.append((whole(session, 1, TEXT, NEXT, pieces), kept(session, 1)))
        session.release()
    assert not all(np.allclose(logits, found[0][0], **CLOSE) for logits, _ in found), "it does not depend on chunks"
    for pieces, (logits, positions) in zip(PIECES, found, strict=True):
        first = session.prefill({3: TEXT, 1: tokens_of(9, LONG + 3)}, pieces=pieces)[3]
        close(np.concatenate([first[None], follow(session, 3, NEXT)]), logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(kept(session, 3), positions)
        session.check()
        session.release()


@every
def test_alone_equals_in_company(name):
    session = start(name)
    limit = budget(session.method)
    lengths = [LONG, 1, PAGE - 1, limit + 1, limit, PAGE + 1, PAGE, LONG - 1]
    texts = [tokens_of(10 + i, length) for i, length in enumerate(lengths)]
    alone = []
    for text in texts:
        alone.append((whole(session, 1, text, NEXT), kept(session, 1)))
        session.release()
    for group, order in (((0, 1, 2, 3), (3, 1, 4, 2)), ((4, 5, 6, 7), (2, 4, 1, 3)), ((6, 3, 0), (2, 3, 1))):
        rows = dict(zip(order, group, strict=True))
        first = session.prefill({row: texts[i] for row, i in rows.items()}, order=sorted(order))
        logits = {row: [first[row]] for row in rows}
        for step, token in enumerate(NEXT):
            batch = sorted(rows) if step % 2 else sorted(rows, reverse=True)
            found = session.decode(batch, [token] * len(batch), padding=session.num_rows - len(batch))
            for row, row_logits in zip(batch, found, strict=True):
                logits[row].append(row_logits)
        for row, i in rows.items():
            close(np.stack(logits[row]), alone[i][0], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(kept(session, row), alone[i][1])
        session.check()
        session.release()


def note_decode(reads: Reads, row: int, token: int) -> None:
    """Notes what the last decode step of `row`, alone in its batch, read."""
    session = reads.session
    heads = session.geometry.num_kv_heads
    position = len(reads.tokens)
    jax.effects_barrier()
    selected = {layer: (pages[0], np.broadcast_to(read, (len(read), heads))[0]) for layer, pages, read in SELECTED}
    SELECTED.clear()
    stored = np.asarray(session.state.pools["positions"])
    resident = {}
    for layer in range(session.geometry.num_layers):
        for head in range(heads):
            if layer in selected:
                pages, read = selected[layer]
                resident[layer, head] = stored[pages[head]].reshape(-1)[: read[head]]
            else:
                resident[layer, head] = reads.before[layer, head]
            assert position in resident[layer, head] or layer not in selected  # a query always sees itself
    reads.appended([token], resident)


def run_turns(name: str) -> tuple[Session, Reads, dict[int, np.ndarray], bool]:
    """Two turns of one conversation: session, what was read, logits by position, whether anything was left out."""
    session = start(name)
    layers, heads = session.geometry.num_layers, session.geometry.num_kv_heads
    rows = [(layer, head) for layer in range(layers) for head in range(heads)]
    reads, logits, sparse = Reads(session), {}, False
    for turn, (prompt, answer) in enumerate(((TEXT, NEXT), (tokens_of(3, 3), tokens_of(4, 2)))):
        begin = len(reads.tokens)

        def note_chunk(seen: int, prompt: list[int] = prompt, begin: int = begin) -> None:
            done = len(reads.tokens)
            resident = {of: session.positions(1, *of) for of in rows}  # what was kept and, behind it, the chunk
            before = {of: positions[positions < done] for of, positions in resident.items()}
            reads.appended(prompt[done - begin : seen - begin], before)

        found = session.prefill({1: prompt}, pieces=[2] if turn else [13, 11], first=not turn, on_chunk=note_chunk)
        if not session.method.attends_end:  # else it read what another layer chose
            logits[len(reads.tokens) - 1] = found[1]
        for token in answer:
            reads.before = {of: session.positions(1, *of) for of in rows}
            SELECTED.clear()
            found = session.decode([1], [token])
            note_decode(reads, 1, token)
            logits[len(reads.tokens) - 1] = found[0]
        session.check()
    sparse = any(not reads.mask[:, :, t, :t].all() for t in logits)
    return session, reads, logits, sparse


@every
def test_cached_decode_equals_full_recompute(name):
    session, reads, logits, sparse = run_turns(name)
    oracle, _ = reads.recompute()
    for position, found in logits.items():
        close(found, oracle[position])
    method = session.method
    assert sparse == (method.evicts or method.select is not None), "the knobs are too large to test anything"
    if method.evicts:
        assert (session.rows[1].lengths < session.rows[1].seen).any()
        positions = kept(session, 1)
        assert (np.diff(positions) > 0).all()
        assert (positions[:, -1] == session.rows[1].seen - 1).all()


@every
def test_within_the_budget_everything_is_dense(name):
    session = start(name)
    limit = budget(session.method)
    prompt, tokens = TEXT[: limit - 3], NEXT[:3]
    found = whole(session, 1, prompt, tokens)
    wanted = whole(start(dense_with_storage_of(name)), 1, prompt, tokens)
    close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("granularity", [pytest.param(Granularity.LAYER, marks=pytest.mark.slow), Granularity.HEAD])
@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if name not in RAGGED])
def test_granularity_changes_nothing(name, granularity):
    coarse, fine = start(name), start(name, granularity=granularity)
    wanted, found = (whole(session, 1, TEXT, NEXT, [13]) for session in (coarse, fine))
    close(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(kept(fine, 1), kept(coarse, 1))
    fine.check()


@every
def test_where_pages_lie_changes_nothing(name):
    wanted = whole(start(name), 1, TEXT, NEXT, [13])
    moved = start(name, seed=7)
    moved.prefill({3: TEXT[:9]})  # other rows, other pages
    np.testing.assert_array_equal(whole(moved, 1, TEXT, NEXT, [13]), wanted)


@every
@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["nan", "inf"])
def test_memory_that_nobody_wrote_changes_nothing(name, poison):
    wanted = whole(start(name), 1, TEXT, NEXT, [13])
    np.testing.assert_array_equal(whole(start(name, poison=poison), 1, TEXT, NEXT, [13]), wanted)


@every
def test_a_reused_row_remembers_nothing(name):
    prompt = tokens_of(5, 23)
    wanted = whole(start(name), 1, prompt, NEXT)
    session = start(name)
    whole(session, 1, TEXT, NEXT)
    session.release(1)
    np.testing.assert_array_equal(whole(session, 1, prompt, NEXT), wanted)
    session.check()


@every
def test_interleaved_requests_do_not_meet(name):
    prompts = {1: TEXT, 2: tokens_of(6, 22)}
    wanted = {}
    for row, prompt in prompts.items():
        wanted[row] = whole(start(name), row, prompt, NEXT)
    session = start(name)
    logits = {row: [session.prefill({row: prompt})[row]] for row, prompt in prompts.items()}
    for token in NEXT:
        for row in prompts:
            logits[row].append(session.decode([row], [token])[0])
    for row in prompts:
        close(np.stack(logits[row]), wanted[row], rtol=1e-5, atol=1e-5)


@every
def test_forks_and_swapped_rows_go_on_as_if_nothing_had_happened(name):
    wanted = whole(start(name), 1, TEXT, NEXT)[1:]
    session = start(name)
    session.prefill({1: TEXT})
    begin, rest = NEXT[:5], NEXT[5:]
    follow(session, 1, begin)
    session.fork(1, 2)
    swapped = session.swap_out(1)
    session.prefill({1: tokens_of(7, 30)})  # a stranger takes the row and its pages
    close(follow(session, 2, rest), wanted[5:], rtol=1e-5, atol=1e-5)
    session.swap_in(3, swapped)
    close(follow(session, 3, rest), wanted[5:], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(kept(session, 3), kept(session, 2))
    session.check()


REDUCTIONS = {quest.MIN: lambda keys: keys.min(0), quest.MAX: lambda keys: keys.max(0)}
"""Page aux that is a reduction over the page's keys; a new one is added here."""


def reductions(session: Session) -> list[str]:
    specs = session.method.aux_specs(session.geometry)
    return [name for name, spec in specs.items() if spec.per == "page"]


@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if reductions(start(name))])
def test_page_aux_is_a_reduction_of_the_stored_keys(name):
    session = start(name)
    assert set(reductions(session)) <= set(REDUCTIONS), "add what it is a reduction of"
    geometry = session.geometry

    def check(row: int) -> None:
        aux = {key: np.asarray(session.state.page_aux[key]) for key in reductions(session)}
        for layer in range(geometry.num_layers):
            for head in range(geometry.num_kv_heads):
                payload = {key: session.stored(key, row, layer, head) for key in session.state.pools}
                tiles = {key: rows[None, None] for key, rows in payload.items() if key != "positions"}
                keys = session.storage.load_tile(session.storage.params, geometry, tiles, np.int32(layer))[0][0, 0]
                for column, page in enumerate(session.head_pages(row, layer, head)):
                    block = np.asarray(keys)[column * PAGE : (column + 1) * PAGE]
                    for key, array in aux.items():
                        np.testing.assert_array_equal(array[page], REDUCTIONS[key](block))

    session.prefill({1: TEXT}, pieces=[6, 3, 1])
    check(1)  # packed after the prompt where the method evicts
    follow(session, 1, NEXT)
    check(1)
    session.prefill({1: tokens_of(8, 7)}, pieces=[2], first=False)
    session.fork(1, 2)
    check(2)


@pytest.mark.parametrize("name", EVICTING)
def test_eviction_gives_pages_back(name):
    session = start(name)
    idle = len(session.free)
    session.prefill({1: TEXT}, pieces=[LONG - 1])
    kept_rows = session.method.kept_after("chunk", np.full(session.shape, LONG - 1))
    kept_rows = session.method.kept_after("prompt", kept_rows + 1)
    if (kept_rows == LONG).all():  # it evicts only while it decodes
        follow(session, 1, NEXT)
        kept_rows = session.rows[1].lengths
    if session.method.ragged:
        lengths = session.rows[1].lengths
        assert (lengths.sum(1) == kept_rows.sum(1)).all()
        assert (lengths != kept_rows).any()
        kept_rows = lengths
    assert (kept_rows < session.rows[1].seen).any()
    assert idle - len(session.free) == sum(session.geometry.pages(int(n)) for n in kept_rows.flat)
    session.release(1)
    assert len(session.free) == idle
