"""Logit thresholds on NVIDIA GPUs through Triton: five kernels, whatever the parameters and the batch.

The vocabulary is split over programs, so that one row keeps many multiprocessors busy. Three kernels read it: its
limits, the size of its bins, and the tokens in those bins that can hold the threshold, which are chosen in between.
One program per row then searches among these, usually a few hundred. Rows that ask for nothing are not read.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.triton_support import platform_problem, power_of_two

MOST_TOKENS = 2**20 - 1  # three counts share 64 bits, and their mass fits as many
BINS = 256
CHOOSE_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are launched; results do not depend on it.

    Attributes:
      block: tokens of a program that reads the vocabulary, a power of two.
      num_warps: warps of such a program.
      collect_warps: the same of programs that collect candidates: they need more registers.
      search_block: candidates that the searching program reads at once, a power of two.
      search_warps: warps of the searching program.
    """

    block: int = 4096
    num_warps: int = 8
    collect_warps: int = 16
    search_block: int = 1024
    search_warps: int = 8


def unsupported(logits: jax.Array) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.logit_threshold`."""
    return platform_problem() or unsupported_shape(logits)


def unsupported_shape(logits: jax.Array) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype.name}, not float32"
    if logits.shape[1] > MOST_TOKENS:
        return f"the vocabulary has {logits.shape[1]} tokens, more than {MOST_TOKENS}"
    return None


def logit_threshold(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """See `api.logit_threshold`."""
    return launch(logits, temperature, top_k, top_p, min_p, Config())


def launch(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    config: Config,
    compute_capability: int | None = None,
) -> jax.Array:
    """The kernels. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.logit_threshold.triton_kernels")
    batch, vocab = logits.shape
    sizes = constants(vocab, config)
    splits = sizes["limits"]["SPLITS"]
    how: dict[str, Any] = {"num_stages": 1, "compute_capability": compute_capability}
    reading: dict[str, Any] = how | {"grid": (splits, batch), "num_warps": config.num_warps}
    collecting: dict[str, Any] = reading | {"num_warps": config.collect_warps}
    row = temperature, top_k, top_p, min_p

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    peaks, lows, counts, cursor = jax_triton.triton_call(
        logits,
        *row,
        kernel=kernels.limits_kernel,
        out_shape=[floats(batch, splits), floats(batch, splits), ints(batch, BINS), ints(batch)],
        name="logit_threshold_limits",
        **reading,
        **sizes["limits"],
    )
    counts, masses, scale = jax_triton.triton_call(
        logits,
        *row,
        peaks,
        lows,
        counts,
        kernel=kernels.bins_kernel,
        out_shape=[
            counts,
            ints(batch, splits, 2),
            floats(batch, 2),
        ],  # pairs of int32 are an int64, which JAX need not know
        input_output_aliases={7: 0},
        name="logit_threshold_bins",
        **reading,
        **sizes["bins"],
    )
    [ends] = jax_triton.triton_call(
        *row,
        scale,
        counts,
        masses,
        kernel=kernels.choose_kernel,
        out_shape=[ints(batch, 2)],
        grid=(batch,),
        num_warps=CHOOSE_WARPS,
        name="logit_threshold_choose",
        **how,
        **sizes["choose"],
    )
    cursor, better_masses, candidates = jax_triton.triton_call(
        logits,
        *row,
        scale,
        ends,
        cursor,
        kernel=kernels.collect_kernel,
        out_shape=[cursor, ints(batch, splits, 2), floats(batch, vocab)],
        input_output_aliases={7: 0},
        name="logit_threshold_collect",
        **collecting,
        **sizes["collect"],
    )
    [threshold] = jax_triton.triton_call(
        *row,
        scale,
        masses,
        cursor,
        better_masses,
        candidates,
        kernel=kernels.search_kernel,
        out_shape=[floats(batch)],
        grid=(batch,),
        num_warps=config.search_warps,
        name="logit_threshold_search",
        **how,
        **sizes["search"],
    )
    return threshold


def constants(vocab: int, config: Config) -> dict[str, dict[str, int]]:
    """What each kernel is compiled for."""
    splits = -(-vocab // config.block)
    row = {"VOCAB": vocab, "SPLITS": splits}
    padded = {"SPLITS_PAD": power_of_two(splits)}
    # The last split may be short, and its least logit no measure of the others.
    full = {"FULL_SPLITS": max(1, vocab // config.block)}
    block = {"BLOCK": config.block}
    return {
        "limits": row | block,
        "bins": row | padded | full | block,
        "choose": row | padded,
        "collect": row | block,
        "search": row | padded | {"BLOCK": config.search_block},
    }
