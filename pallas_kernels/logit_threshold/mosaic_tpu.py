"""Logit thresholds on TPUs through Mosaic: eight rows at a time are read once, and searched in vector memory.

The same bisection on float32 bit patterns as anywhere, but its rounds touch no HBM. Probability mass is summed in
integers (2 * MASS_BITS after the point): no sum depends on an order, so none depends on the batch or on block sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparsejax.pallas_kernels.layout import LANES
from sparsejax.pallas_kernels.logit_threshold.xla import LARGEST_FINITE_KEY, LEAST_TEMPERATURE
from sparsejax.pallas_kernels.tpu_support import platform_problem

ROWS = 8  # of a program
BLOCK = 2048  # tokens that are in registers at once
MASS_BITS = 19
MOST_TOKENS = 2**19 - BLOCK  # a lane's sum of MASS_BITS-bit numbers has 31 bits
VMEM_BYTES = 16 * 2**20  # for anything but rows and keys
PARAMETERS = 4
NEVER = 2**31 - 1


def unsupported(logits: jax.Array) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.logit_threshold`."""
    if (problem := platform_problem()) is not None:
        return problem
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype.name}, not float32"
    if logits.shape[1] > MOST_TOKENS:
        return f"the vocabulary has {logits.shape[1]} tokens, more than {MOST_TOKENS}"
    return None


def logit_threshold(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """See `api.logit_threshold`."""
    batch, vocab = logits.shape
    by_count = (top_k > 0) & (top_k < vocab)
    asks = (temperature > 0) & (by_count | (top_p < 1.0) | (min_p > 0))

    def search() -> jax.Array:
        count = jnp.where(by_count, top_k, vocab)
        least = _search(logits, temperature, count, top_p, min_p, asks & by_count, asks & (top_p < 1.0))
        return jnp.where(asks & (least < jnp.inf), least, -jnp.inf)

    return jax.lax.cond(asks.any(), search, lambda: jnp.full((batch,), -jnp.inf, jnp.float32))


def _search(
    logits: jax.Array,
    temperature: jax.Array,
    count: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    by_count: jax.Array,
    by_mass: jax.Array,
) -> jax.Array:
    """float32 [batch]: the least logit that stays, infinite if none does. All rows are searched, asked or not."""
    batch, vocab = logits.shape
    rows = min(ROWS, batch)
    programs = -(-batch // rows)
    size = -(-vocab // BLOCK) * BLOCK
    # Whether some row of a program needs a search: by count, by mass.
    needed = [jnp.pad(own, (0, programs * rows - batch)).reshape(programs, rows).any(1) for own in (by_count, by_mass)]
    floats = jnp.stack([temperature, top_p, min_p, count.astype(jnp.float32)], 1)  # counts are below 2^24
    row = pl.BlockSpec((rows, 1), lambda i, *_: (i, 0))
    least = pl.pallas_call(
        functools.partial(_kernel, vocab),
        out_shape=jax.ShapeDtypeStruct((batch, 1), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(programs,),
            in_specs=[
                pl.BlockSpec((rows, size), lambda i, *_: (i, 0)),
                pl.BlockSpec((rows, PARAMETERS), lambda i, *_: (i, 0)),
            ],
            out_specs=row,
            scratch_shapes=[pltpu.VMEM((rows, size), jnp.int32)],
        ),
        cost_estimate=pl.CostEstimate(
            flops=31 * 16 * logits.size, bytes_accessed=4 * logits.size, transcendentals=33 * logits.size
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=3 * ROWS * size * 4 + VMEM_BYTES
        ),
        name="logit_threshold",
    )(jnp.stack(needed, 1).astype(jnp.int32).reshape(-1), logits, floats)
    return least[:, 0]


def _kernel(vocab: int, needed: Any, logits: Any, parameters: Any, least: Any, keys: Any) -> None:
    """The threshold of each row of a block [rows, tokens]; tokens past the vocabulary are arbitrary.

    needed [2 * programs]; parameters [rows, PARAMETERS]: temperature, top-p, min-p, top-k. keys int32 [rows, tokens]:
    bits of how far each token is below the best one, in units of temperature; NEVER for those that min-p cuts.
    """
    rows, size = keys.shape
    temperature, top_p, min_p, count = (parameters[:, j : j + 1] for j in range(PARAMETERS))
    temperature = jnp.maximum(temperature, LEAST_TEMPERATURE)

    def over(ref: Any, start: Any, work: Callable[[Any, jax.Array, jax.Array], Any]) -> Any:
        """`start` after `work(carry, tile, first token)` for every [rows, LANES] of `ref`."""

        def block(i: jax.Array, carry: Any) -> Any:
            first = pl.multiple_of(i * BLOCK, BLOCK)
            tokens = ref[:, pl.ds(first, BLOCK)]
            for lane in range(0, BLOCK, LANES):
                carry = work(carry, tokens[:, lane : lane + LANES], first + lane)
            return carry

        return jax.lax.fori_loop(0, size // BLOCK, block, start)

    def constant(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((rows, LANES), value, dtype)

    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def larger(peak: jax.Array, logit: jax.Array, first: jax.Array) -> jax.Array:
        return jnp.where(first + lane < vocab, jnp.maximum(peak, logit), peak)

    peak = over(logits, constant(-jnp.inf), larger).max(1, keepdims=True)

    def write(i: jax.Array, _: int) -> int:
        first = pl.multiple_of(i * BLOCK, BLOCK)
        below = jnp.abs(peak - logits[:, pl.ds(first, BLOCK)]) / temperature
        token = first + jax.lax.broadcasted_iota(jnp.int32, (rows, BLOCK), 1)
        stays = (token < vocab) & (below < jnp.inf) & ((jnp.exp(-below) >= min_p) | (below == 0))
        keys[:, pl.ds(first, BLOCK)] = jnp.where(stays, jax.lax.bitcast_convert_type(below, jnp.int32), NEVER)
        return 0

    jax.lax.fori_loop(0, size // BLOCK, write, 0)

    def number(limit: jax.Array) -> jax.Array:
        """float32 [rows, 1]: how many keys are at most `limit`, exact."""

        def add(total: jax.Array, key: jax.Array, _first: jax.Array) -> jax.Array:
            return total + (key <= limit).astype(jnp.int32)

        return over(keys, constant(0, jnp.int32), add).astype(jnp.float32).sum(1, keepdims=True)

    def mass(limit: jax.Array) -> jax.Array:
        """float32 [rows, 1]: mass of the keys at most `limit`, that of the best being 1. Rounded from exact sums."""

        def add(totals: tuple[jax.Array, jax.Array], key: jax.Array, _first: jax.Array) -> tuple[jax.Array, jax.Array]:
            share = jnp.where(key <= limit, jnp.exp(-jax.lax.bitcast_convert_type(key, jnp.float32)), 0.0)
            units = share * 2.0**MASS_BITS
            high = units.astype(jnp.int32)
            low = ((units - high.astype(jnp.float32)) * 2.0**MASS_BITS).astype(jnp.int32)
            return totals[0] + high, totals[1] + low

        high, low = over(keys, (constant(0, jnp.int32),) * 2, add)
        high, low = high + (low >> MASS_BITS), low & (2**MASS_BITS - 1)
        # Numbers of at most 16 bits, whose sums over the lanes are exact in float32.
        parts = high >> 16, high & 0xFFFF, low >> (MASS_BITS - 16)
        large, middle, small = (part.astype(jnp.float32).sum(1, keepdims=True) for part in parts)
        return (large * 2.0**16 + middle + small * 2.0**-16) * 2.0**-MASS_BITS

    def search(wanted: jax.Array, enough: Callable[[jax.Array], jax.Array], own: jax.Array) -> jax.Array:
        """Int32 [rows, 1]: the least limit with `enough(limit) >= wanted`. Not searched for if `own` is 0."""

        def step(i: jax.Array, limit: jax.Array) -> jax.Array:
            candidate = limit ^ (jnp.int32(1) << (30 - i))
            return jnp.where(enough(candidate) >= wanted, candidate, limit)

        return jax.lax.fori_loop(0, 31 * own, step, jnp.full((rows, 1), NEVER, jnp.int32))

    program = pl.program_id(0)
    limit = jnp.minimum(search(count, number, needed[2 * program]), LARGEST_FINITE_KEY)
    by_mass = needed[2 * program + 1]
    total = jax.lax.fori_loop(0, by_mass, lambda _i, _total: mass(limit), jnp.zeros((rows, 1), jnp.float32))
    wanted = jnp.where(top_p < 1.0, top_p * total, jnp.inf)
    limit = jnp.minimum(limit, search(wanted, mass, by_mass))

    def smallest(i: jax.Array, found: jax.Array) -> jax.Array:
        first = pl.multiple_of(i * BLOCK, BLOCK)
        kept = jnp.where(keys[:, pl.ds(first, BLOCK)] <= limit, logits[:, pl.ds(first, BLOCK)], jnp.inf)
        return jnp.minimum(found, kept.min(1, keepdims=True))

    least[...] = jax.lax.fori_loop(0, size // BLOCK, smallest, jnp.full((rows, 1), jnp.inf, jnp.float32))
