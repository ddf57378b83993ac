"""Sampling against a NumPy oracle: exact sets, distributions, and independence of company."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax import sampling, steps
from sparsejax.sampling import FLOAT_COLUMNS, INT_COLUMNS, NUM_LOGPROBS
from sparsejax.state import IN_PROMPT, MAX_BIAS, MAX_STOP_IDS

VOCAB, BATCH = 24, 6


def inputs_of(rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Packed inputs; each row gives columns by name over greedy defaults, and `seed`, a 64-bit integer."""
    ints, floats = steps.greedy_inputs(len(rows))
    for i, row in enumerate(rows):
        row = dict(row)
        seed = row.pop("seed", 0) % 2**64
        row["seed_low"], row["seed_high"] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
        for name, value in row.items():
            columns, array = (INT_COLUMNS, ints) if name in INT_COLUMNS else (FLOAT_COLUMNS, floats)
            array[i, columns.index(name)] = value
    return ints, floats


@jax.jit
def _filter(logits, ints, floats):
    return sampling.filter_logits(logits, sampling.SamplingInputs.unpack(ints, floats))


@jax.jit
def _adjust(logits, ints, floats, row):
    return sampling.adjust(logits, sampling.SamplingInputs.unpack(ints, floats), row)


@jax.jit
def _sample(logits, ints, floats, row):
    return sampling.sample(logits, sampling.SamplingInputs.unpack(ints, floats), lambda: row)


@jax.jit
def _logprobs(logits, tokens, ints, floats):
    return sampling.logprobs(logits, tokens, sampling.SamplingInputs.unpack(ints, floats))


def no_bias(batch: int, vocab: int = VOCAB) -> sampling.RowBias:
    zeros = jnp.zeros((batch, MAX_BIAS), jnp.int32)
    stops = jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32)
    return sampling.RowBias(jnp.zeros((batch, vocab), jnp.int32), zeros, zeros.astype(jnp.float32), stops)


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The oracle: which tokens may be drawn. Ties at a threshold all stay."""
    scaled = (logits - logits.max()) / np.float32(temperature)
    share = np.exp(scaled)
    keep = share >= np.float32(min_p)
    if 0 < top_k < len(logits):
        kept = np.sort(scaled[keep])[::-1]
        keep &= scaled >= kept[min(top_k, len(kept)) - 1]
    if top_p < 1:
        mass = np.where(keep, share, 0.0)
        order = np.sort(mass[keep])[::-1]
        enough = np.flatnonzero(np.cumsum(order, dtype=np.float64) >= top_p * order.sum(dtype=np.float64) - 1e-7)
        keep &= mass >= order[enough[0]]
    return keep


PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 1000]),
        "top_p": st.sampled_from([0.001, 0.3, 0.5, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    }
)


@given(seed=st.integers(0, 10_000), rows=st.lists(PARAMETERS, min_size=BATCH, max_size=BATCH), ties=st.booleans())
@settings(max_examples=150)
def test_the_allowed_sets_are_exact(seed, rows, ties):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((BATCH, VOCAB)) * 3).astype(np.float32)
    if ties:
        logits = np.round(logits)  # many equal logits, signed zeros among them
        logits[logits == 0] *= rng.choice([1.0, -1.0])
    found = np.asarray(_filter(logits, *inputs_of(rows)))
    for i, row in enumerate(rows):
        wanted = allowed(logits[i], **row)
        np.testing.assert_array_equal(np.isfinite(found[i]), wanted, err_msg=str(row))
        scaled = (logits[i] - logits[i].max()) / np.float32(row["temperature"])
        np.testing.assert_allclose(found[i][wanted], scaled[wanted], rtol=1e-5, atol=1e-5)


def test_tokens_masked_before_stay_masked():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [3, 9]] = 1.0, 0.5
    for row in ({"top_k": 5}, {"top_p": 0.9999}, {"min_p": 0.0}):
        found = np.asarray(_filter(logits, *inputs_of([{"temperature": 1.0, **row}])))
        assert np.flatnonzero(np.isfinite(found[0])).tolist() == [3, 9]


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.3, 2.5])
def test_the_best_token_is_never_cut(temperature):
    logits = np.random.default_rng(8).standard_normal((64, VOCAB)).astype(np.float32) * 5
    row = {"temperature": temperature, "min_p": 1.0, "top_p": 1e-6, "top_k": 1}
    found = np.asarray(_filter(logits, *inputs_of([row] * 64)))
    assert np.isfinite(found[np.arange(64), logits.argmax(-1)]).all()


def test_greedy_takes_the_first_of_the_best():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [4, 7]] = 2.0
    logits[1, VOCAB - 1] = 1e-6
    for company in ({}, {"mode": sampling.SAMPLE, "temperature": 1.0}, {"mode": sampling.GENERAL, "temperature": 1.0}):
        tokens = _sample(logits, *inputs_of([{}, {}, company]), no_bias(3))
        assert tokens[:2].tolist() == [4, VOCAB - 1]


def test_penalties_bias_and_masked_stops():
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((2, VOCAB)).astype(np.float32)
    counts = np.zeros((2, VOCAB), np.int32)
    counts[0, 1], counts[0, 2], counts[0, 3] = 3, IN_PROMPT, IN_PROMPT | 2  # generated, in the prompt, both
    bias = no_bias(2)
    ids, values = np.zeros((2, MAX_BIAS), np.int32), np.zeros((2, MAX_BIAS), np.float32)
    ids[:, :3], values[:, :3] = [5, 6, 0], [10.0, -100.0, 1.5]
    stops = np.full((2, MAX_STOP_IDS), -1, np.int32)
    stops[:, :2] = [7, 0]
    row = bias._replace(counts=jnp.asarray(counts), bias_ids=ids, bias_values=values, stop_ids=stops)
    knobs = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    flags = {"has_bias": 1, "mask_stops": 1}
    found = np.asarray(_adjust(logits, *inputs_of([knobs | flags, {}]), row))
    np.testing.assert_array_equal(found[1], logits[1])  # neutral parameters change nothing, bit for bit
    wanted = logits[0].copy()
    seen = counts[0] != 0
    wanted[seen] = np.where(wanted[seen] > 0, wanted[seen] / 1.7, wanted[seen] * 1.7)
    wanted[[1, 3]] -= np.array([3, 2]) * 0.25 + 0.5  # only what was generated
    wanted[[5, 6, 0]] += [10.0, -100.0, 1.5]
    wanted[[7, 0]] = -np.inf
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6, atol=1e-6)


def test_logprobs():
    rng = np.random.default_rng(4)
    for vocab in (VOCAB, NUM_LOGPROBS - 5):
        logits = (rng.standard_normal((2, vocab)) * 4).astype(np.float32)
        tokens = np.array([3, vocab - 1], np.int32)
        wanted = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        found = _logprobs(logits, tokens, *inputs_of([{"logprobs": 0}, {}]))  # one row asks: all get them
        np.testing.assert_allclose(found.chosen, wanted[[0, 1], tokens], rtol=1e-5, atol=1e-5)
        width = min(vocab, NUM_LOGPROBS)
        best = np.argsort(-wanted, axis=-1, kind="stable")[:, :width]
        np.testing.assert_array_equal(found.top_ids[:, :width], best)
        np.testing.assert_allclose(found.top[:, :width], np.take_along_axis(wanted, best, 1), rtol=1e-5, atol=1e-5)
        assert np.isneginf(np.asarray(found.top)[:, width:]).all()
    nothing = _logprobs(logits, tokens, *inputs_of([{}, {}]))
    assert not np.asarray(nothing.chosen).any()


DRAW = {"mode": sampling.SAMPLE, "temperature": 1.0}


def test_the_same_token_alone_and_in_any_company():
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((8, VOCAB)) * 2).astype(np.float32)
    rows = [
        DRAW | {"seed": 1, "position": 7},
        DRAW | {"seed": 2, "top_k": 5},
        DRAW | {"seed": 3, "top_p": 0.8},
        DRAW | {"seed": 4, "min_p": 0.1, "temperature": 0.5},
        DRAW | {"seed": 5, "mode": sampling.GENERAL, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {},
        DRAW | {"seed": 2**64 - 1, "position": 2**31 - 1},
        DRAW | {"seed": 6, "top_k": 3, "top_p": 0.5, "min_p": 0.05},
    ]
    counts = rng.integers(0, 3, (8, VOCAB)).astype(np.int32)
    together = _sample(logits, *inputs_of(rows), no_bias(8)._replace(counts=jnp.asarray(counts)))
    for i, row in enumerate(rows):
        for bucket in (1, 4):
            batch, place = [{}] * (bucket - 1) + [row], bucket - 1
            some = np.zeros((bucket, VOCAB), np.float32)
            some[place] = logits[i]
            seen = np.zeros((bucket, VOCAB), np.int32)
            seen[place] = counts[i]
            alone = _sample(some, *inputs_of(batch), no_bias(bucket)._replace(counts=jnp.asarray(seen)))
            assert int(alone[place]) == int(together[i])


@pytest.mark.parametrize(
    ("mode", "row"),
    [
        (sampling.GREEDY, {}),
        (sampling.SAMPLE, {"mode": sampling.SAMPLE, "temperature": 0.8, "top_k": 5, "top_p": 0.7}),
        (sampling.SAMPLE, {"mode": sampling.SAMPLE, "temperature": 2.0}),
    ],
)
def test_a_program_for_what_a_batch_needs_samples_what_the_general_one_does(mode, row):
    rows = [{**row, "seed": i, "position": 3 * i} for i in range(BATCH - 1)]
    ints, floats = inputs_of([*rows, {}])  # greedy company
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (BATCH, VOCAB)), jnp.float32)

    @functools.partial(jax.jit, static_argnames="mode")
    def draw(logits, ints, floats, mode):
        return sampling.sample(logits, sampling.SamplingInputs.unpack(ints, floats), lambda: no_bias(BATCH), mode)

    np.testing.assert_array_equal(draw(logits, ints, floats, mode), draw(logits, ints, floats, None))


@pytest.mark.parametrize("mode", [sampling.GREEDY, sampling.SAMPLE])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_some_token_and_leaves_the_others_alone(mode, poison):
    row = {"mode": sampling.SAMPLE, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    ints, floats = inputs_of([row | {"seed": i} for i in range(BATCH)])
    logits = np.random.default_rng(1).normal(0, 3, (BATCH, VOCAB)).astype(np.float32)

    def draw(logits):
        inputs = sampling.SamplingInputs.unpack(ints, floats)
        return np.asarray(sampling.sample(jnp.asarray(logits), inputs, lambda: no_bias(BATCH), mode))

    wanted = draw(logits)
    for part in (slice(3, 4), slice(None)):
        poisoned = logits.copy()
        poisoned[2, part] = poison
        found = draw(poisoned)
        assert 0 <= found[2] < VOCAB
        np.testing.assert_array_equal(np.delete(found, 2), np.delete(wanted, 2))


def test_every_bit_of_the_seed_and_the_position_counts():
    flat = np.zeros((1, 1_000_003), np.float32)  # so large that equal draws are no coincidence

    @functools.cache
    def draw(seed: int, position: int = 0) -> int:
        row = no_bias(1, 1)._replace(counts=jnp.zeros((1, 1), jnp.int32))
        return int(_sample(flat, *inputs_of([DRAW | {"seed": seed, "position": position}]), row)[0])

    assert draw(11) == draw(11 + 2**64)
    found = {draw(0)} | {draw(1 << bit) for bit in range(0, 64, 7)} | {draw(1 << 63), draw(1 << 31), draw(1 << 32)}
    found |= {draw(0, position) for position in (1, 2, 1000, 2**30)}
    assert len(found) == 1 + len({*range(0, 64, 7), 63, 31, 32}) + 4


@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.15},
        {"temperature": 1.0, "mode": sampling.GENERAL, "repetition_penalty": 1.5},
    ],
    ids=lambda row: "+".join(row),
)
def test_draws_follow_the_distribution(row):
    draws, vocab = 8192, 12
    rng = np.random.default_rng(6)
    logits = rng.standard_normal(vocab).astype(np.float32)
    knobs = {"temperature": row["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    keep = allowed(logits, **{name: row.get(name, value) for name, value in knobs.items()})
    ints, floats = inputs_of([DRAW | row | {"seed": 99}] * draws)
    ints[:, INT_COLUMNS.index("position")] = np.arange(draws)
    tokens = np.asarray(_sample(np.tile(logits, (draws, 1)), ints, floats, no_bias(draws, vocab)))
    share = np.where(keep, np.exp(logits.astype(np.float64) / row["temperature"]), 0.0)
    expected = draws * share / share.sum()
    found = np.bincount(tokens, minlength=vocab)
    assert not found[~keep].any()
    statistic = ((found - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    # Wilson-Hilferty: this quantile is passed once in 10,000 times; seeds are fixed, so always or never.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (statistic, limit)
