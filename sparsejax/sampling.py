"""Sampling on the device. A row samples the same token alone or in company: its randomness is (seed, position) only.

No sort of the vocabulary: top-k, top-p and min-p are one threshold on the logits (`api.logit_threshold`). Ties at it
all stay.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.pallas_kernels import api
from sparsejax.state import IN_PROMPT, KVState

NUM_LOGPROBS = 20

# Columns of the packed sampling inputs.
INT_COLUMNS = ("mode", "top_k", "seed_low", "seed_high", "position", "logprobs", "mask_stops", "has_bias")
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
GREEDY, SAMPLE, GENERAL = 0, 1, 2


class SamplingInputs(NamedTuple):
    """Sampling parameters of a batch, one array per column of `INT_COLUMNS` (int32) and `FLOAT_COLUMNS` (float32).

    `mode` is what the row needs at least: GREEDY (argmax), SAMPLE (temperature and thresholds) or GENERAL (also
    penalties, logit bias, masked stop ids). `logprobs` >= 0 asks for log-probabilities.
    """

    mode: jax.Array
    top_k: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    position: jax.Array
    logprobs: jax.Array
    mask_stops: jax.Array
    has_bias: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array

    @classmethod
    def unpack(cls, ints: jax.Array, floats: jax.Array) -> SamplingInputs:
        """From int32 [batch, len(INT_COLUMNS)] and float32 [batch, len(FLOAT_COLUMNS)]."""
        return cls(*ints.T, *floats.T)


def greedy_inputs(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The packed sampling inputs that pick the best token of each row."""
    ints, floats = np.zeros((batch, len(INT_COLUMNS)), np.int32), np.zeros((batch, len(FLOAT_COLUMNS)), np.float32)
    ints[:, INT_COLUMNS.index("logprobs")] = -1
    floats[:, FLOAT_COLUMNS.index("top_p")] = 1.0
    floats[:, FLOAT_COLUMNS.index("repetition_penalty")] = 1.0
    return ints, floats


class RowBias(NamedTuple):
    """What GENERAL sampling knows of each row: counts [batch, vocab], bias and stop ids (see `KVState`)."""

    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    stop_ids: jax.Array


def adjust(logits: jax.Array, inputs: SamplingInputs, row: RowBias) -> jax.Array:
    """Penalties, logit bias and masked stop ids on float32 [batch, vocab]."""
    generated = row.counts & (IN_PROMPT - 1)
    seen = row.counts != 0
    repetition = inputs.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= inputs.frequency_penalty[:, None] * generated.astype(jnp.float32)
    logits -= inputs.presence_penalty[:, None] * (generated > 0).astype(jnp.float32)
    batch = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    bias = jnp.where(inputs.has_bias[:, None] != 0, row.bias_values, 0.0)
    logits = logits.at[batch, row.bias_ids].add(bias)
    masked = (inputs.mask_stops[:, None] != 0) & (row.stop_ids >= 0)
    floor = jnp.where(masked, -jnp.inf, jnp.inf)
    return logits.at[batch, jnp.maximum(row.stop_ids, 0)].min(floor)


def filter_logits(logits: jax.Array, inputs: SamplingInputs, implementation: str | None = None) -> jax.Array:
    """Temperature-scaled logits with everything outside min-p, top-k and top-p at -inf, in this order.

    The best token has 0. Rows of temperature 0 are not filtered.
    """
    threshold = api.logit_threshold(
        logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, implementation=implementation
    )
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(inputs.temperature, 1e-6)[:, None]
    return jnp.where(logits >= threshold[:, None], scaled, -jnp.inf)


def _keys(inputs: SamplingInputs) -> jax.Array:
    def one(low, high, position):
        key = jax.random.key(0, impl="threefry2x32")
        for word in (low, high, position):
            key = jax.random.fold_in(key, word)
        return key

    words = (inputs.seed_low, inputs.seed_high, inputs.position)
    return jax.vmap(one)(*(jax.lax.bitcast_convert_type(word, jnp.uint32) for word in words))


def _draw(logits: jax.Array, inputs: SamplingInputs, implementation: str | None) -> jax.Array:
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(_keys(inputs))
    sampled = jnp.argmax(filter_logits(logits, inputs, implementation) + noise, axis=-1)
    greedy = jnp.argmax(logits, axis=-1)
    return jnp.where(inputs.temperature > 0, sampled, greedy).astype(jnp.int32)


def sample(
    logits: jax.Array, inputs: SamplingInputs, bias, mode: int | None = None, implementation: str | None = None
) -> jax.Array:
    """Samples one token per row.

    Args:
      logits: float32 [batch, vocab].
      inputs: parameters.
      bias: () -> RowBias, called only where a row needs GENERAL sampling.
      mode: the most that any row needs, None to look at the parameters.
      implementation: kernel implementation, None or "auto" to choose.

    Returns:
      int32 [batch].
    """
    ways = (
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        lambda: _draw(logits, inputs, implementation),
        lambda: _draw(adjust(logits, inputs, bias()), inputs, implementation),
    )
    return jax.lax.switch(inputs.mode.max(), ways) if mode is None else ways[mode]()


class Logprobs(NamedTuple):
    """Log-probabilities of the raw distribution: of the sampled tokens [batch], and the best `NUM_LOGPROBS`."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def logprobs(logits: jax.Array, tokens: jax.Array, inputs: SamplingInputs) -> Logprobs:
    """Zeros unless some row asked."""
    batch, vocab = logits.shape
    width = min(NUM_LOGPROBS, vocab)

    def compute():
        normalised = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(normalised, tokens[:, None], axis=1)[:, 0]
        top, top_ids = jax.lax.top_k(normalised, width)
        pad = ((0, 0), (0, NUM_LOGPROBS - width))
        return Logprobs(chosen, jnp.pad(top_ids.astype(jnp.int32), pad), jnp.pad(top, pad, constant_values=-jnp.inf))

    return jax.lax.cond((inputs.logprobs >= 0).any(), compute, lambda: _no_logprobs(batch))


def _no_logprobs(batch: int) -> Logprobs:
    empty = jnp.zeros((batch, NUM_LOGPROBS), jnp.float32)
    return Logprobs(jnp.zeros((batch,), jnp.float32), empty.astype(jnp.int32), empty)


def sample_rows(
    state: KVState,
    logits: jax.Array,
    rows: jax.Array,
    wanted: jax.Array,
    ints: jax.Array,
    floats: jax.Array,
    mode: int | None = None,
    implementation: str | None = None,
) -> tuple[KVState, jax.Array]:
    """Samples for float32 [batch, vocab]; rows that are not `wanted` keep their last token. See `steps.sample_step`."""
    inputs = SamplingInputs.unpack(ints, floats)
    ok = jnp.isfinite(logits).all(-1)
    # Without log-probabilities and penalties a row that is not finite harms nobody, and a copy of all logits is saved.
    finite = jnp.where(ok[:, None], logits, 0.0) if mode is None else logits

    def bias() -> RowBias:
        return RowBias(state.counts[rows], state.bias_ids[rows], state.bias_values[rows], state.stop_ids[rows])

    with jax.named_scope("sample"):
        tokens = sample(finite, inputs, bias, mode, implementation)
        found = logprobs(finite, tokens, inputs) if mode is None else _no_logprobs(len(rows))
    target = jnp.where(wanted, rows, 0)
    state = state.replace(
        last_tokens=state.last_tokens.at[target].set(tokens),
        counts=state.counts.at[target, tokens].add(1),
    )
    return state, _pack(jnp.where(wanted, tokens, -1), ok, found)


def _pack(tokens: jax.Array, ok: jax.Array, found: Logprobs) -> jax.Array:
    def bits(x):
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    head = jnp.stack([tokens, ok.astype(jnp.int32), bits(found.chosen)], axis=1)
    return jnp.concatenate([head, found.top_ids, bits(found.top)], axis=1)
