"""Page selection on NVIDIA GPUs through Triton: one program per row and KV head, no sort."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import PageView, explicit_view
from sparsejax.pallas_kernels.select_pages.xla import shared_scores
from sparsejax.pallas_kernels.triton_support import platform_problem, power_of_two

MOST_COLUMNS = 2**20 - 1  # three counts share 64 bits


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Attributes:
      block: scores that a program holds at once, a power of two up to 16,384; of longer rows it reads all blocks in
        every round of the search.
      num_warps: warps of a program.
    """

    block: int
    num_warps: int


def default_config(columns: int) -> Config:
    """Whole rows in registers where they fit, at 8 to 16 scores per thread."""
    block = min(8192, max(128, power_of_two(columns)))
    return Config(block, max(1, min(16, block // 256)))


def unsupported(scores: jax.Array, view: PageView) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.select_pages`."""
    if (problem := platform_problem()) is not None:
        return problem
    return unsupported_shape(scores, view)


def unsupported_shape(scores: jax.Array, view: PageView) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype.name}, not float32"
    if scores.shape[2] > MOST_COLUMNS:
        return f"rows have {scores.shape[2]} columns, more than {MOST_COLUMNS}"
    return None


def select_pages(
    scores: jax.Array, view: PageView, num_scored: int, width: int, budget: int, page_size: int, shared: bool
) -> PageView:
    """See `api.select_pages`."""
    return launch(scores, view, num_scored, width, budget, page_size, shared, default_config(scores.shape[2]))


def launch(
    scores: jax.Array,
    view: PageView,
    num_scored: int,
    width: int,
    budget: int,
    page_size: int,
    shared: bool,
    config: Config,
    compute_capability: int | None = None,
) -> PageView:
    """The kernel. `compute_capability` (such as 90) is only needed where no GPU can be asked.

    The best score over heads is taken beforehand, by XLA: every program would have to read all heads' scores.
    """
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.select_pages.triton_kernels")
    batch, heads, _ = scores.shape
    if shared:
        scores = shared_scores(scores, view.lengths, page_size)
    head_pages, lengths = jax_triton.triton_call(
        scores,
        view.table,
        view.lengths,
        view.offset,
        view.stride,
        kernel=kernels.select_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, width), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
        ],
        grid=(heads, batch),
        name="select_pages",
        num_warps=config.num_warps,
        num_stages=1,
        compute_capability=compute_capability,
        **constants(scores, view, num_scored, width, budget, page_size, config),
    )
    return explicit_view(head_pages, lengths)


def constants(
    scores: jax.Array, view: PageView, num_scored: int, width: int, budget: int, page_size: int, config: Config
) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "NUM_SCORED": num_scored,
        "WIDTH": width,
        "BUDGET": budget,
        "PAGE": page_size,
        "HEADS": view.num_heads,
        "COLUMNS": scores.shape[2],
        "SCORE_HEADS": scores.shape[1],
        "TABLE_HEADS": view.table.shape[1],
        "LENGTHS_HEADS": view.lengths.shape[1],
        "BLOCK": config.block,
        "WIDTH_BLOCK": min(1024, power_of_two(width)),
    }
