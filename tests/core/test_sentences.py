"""Sentences of several requests side by side, against a plain program for one token of one request at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import sentences
from tests.core.answers import Answer

DELIMITERS, LEAST, MOST, TRACKED, WIDTH, THRESHOLD = (7, 9), 2, 5, 4, 6, 0.9
LIMITS = {"delimiters": DELIMITERS, "min_tokens": LEAST, "max_tokens": MOST}


def new_answer() -> Answer:
    return Answer(DELIMITERS, LEAST, MOST, TRACKED, THRESHOLD)


def empty(rows: int, junk: float = 0.0) -> sentences.Sentences:
    """Zeros, but for row 0."""
    shapes = (rows, TRACKED, 2), (rows, TRACKED, WIDTH), (rows, 3), (rows, WIDTH)
    arrays = [np.zeros(shape, np.int32 if i % 2 == 0 else np.float32) for i, shape in enumerate(shapes)]
    for array in arrays:
        array[0] = junk if array.dtype == np.float32 else 3
    return sentences.Sentences(*map(jnp.asarray, arrays))


def check(state: sentences.Sentences, row: int, answer: Answer) -> None:
    closed = int(state.open[row, 2])
    assert closed == answer.closed
    repeats = sentences.repeated(state.embeddings[row], state.open[row, 2], THRESHOLD)
    spans = np.asarray(state.spans[row])
    order = [i % TRACKED for i in range(max(0, closed - TRACKED), closed)]
    assert spans[order].tolist() == answer.spans
    np.testing.assert_allclose(np.asarray(repeats)[order], answer.repeats, rtol=1e-5)
    positions = np.arange(120)
    found = sentences.penalties(jnp.asarray(positions).reshape(2, 60), state.spans[row], repeats)
    np.testing.assert_allclose(np.ravel(found), [answer.penalty(p) for p in positions], rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_rows_side_by_side_are_what_each_is_alone(seed):
    rng = np.random.default_rng(seed)
    themes = rng.standard_normal((3, WIDTH))  # sentences repeat each other
    state, answers, at, theme = empty(6, np.nan), {row: new_answer() for row in (1, 4, 5)}, {1: 3, 4: 50, 5: 0}, {}
    repeated = longest = 0
    for step in range(70):
        rows = [int(row) for row in rng.permutation([1, 4, 5])[: rng.integers(1, 4)]]
        tokens, hidden = rng.integers(5, 11, len(rows)), np.zeros((len(rows), WIDTH), np.float32)
        for i, row in enumerate(rows):
            if rng.random() < 0.05:
                at[row] += int(rng.integers(1, 5))  # another prompt
            if not answers[row].hidden or row not in theme:
                theme[row] = themes[rng.integers(0, 3)]
            hidden[i] = theme[row] + 0.1 * rng.standard_normal(WIDTH)
            answers[row].add(int(tokens[i]), at[row], hidden[i].astype(np.float64))
        live = np.array([True] * len(rows) + [False] * 2)
        order = rng.permutation(len(live))  # padding stands anywhere

        def batch(values, fill=0, order=order):
            values = np.asarray(values)
            return jnp.asarray(np.concatenate([values, np.full((2, *values.shape[1:]), fill, values.dtype)])[order])

        positions = batch([at[row] for row in rows])
        state = sentences.advance(
            state, batch(rows), jnp.asarray(live[order]), batch(tokens, 9), positions, batch(hidden, np.nan), **LIMITS
        )
        for row in rows:
            at[row] += 1
        for row, answer in answers.items():
            if step % 10 == 9:
                check(state, row, answer)
            repeated += sum(r > 0 for r in answer.repeats)
            longest = max(longest, len(answer.spans))
    assert longest == TRACKED
    assert repeated > 20
    assert int(state.open[1, 2]) > TRACKED  # the oldest were dropped


def test_a_sentence_ends_where_the_answer_ended():
    state = empty(2)
    for position, token in ((3, 1), (4, 1), (5, 1), (9, 9), (10, 1), (20, 1), (21, 9)):
        one = (jnp.asarray([value]) for value in (1, True, token, position))
        state = sentences.advance(state, *one, jnp.ones((1, WIDTH)), **LIMITS)
    # [9, 10) and [10, 11) are too short.
    assert state.spans[1].tolist() == [[3, 6], [20, 22], [0, 0], [0, 0]]
    assert state.open[1].tolist()[1:] == [0, 2]


def test_padding_touches_nothing_but_row_0():
    before = empty(3)
    rows = jnp.asarray([0, 0])
    dead = jnp.zeros(2, bool)
    after = sentences.advance(before, rows, dead, jnp.asarray([9, 1]), rows, jnp.ones((2, WIDTH)), **LIMITS)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])
