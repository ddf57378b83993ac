"""Bounds of pages that rows were written to: what a recount of each page gives, and nothing else touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api


@dataclasses.dataclass(frozen=True)
class Case:
    """`lengths` of each sequence before `new` rows are written, of at most `chunk`."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    chunk: int
    page: int = 16
    heads: int = 2
    dim: int = 64
    dtype: str = "float32"
    per_head: bool = False
    adjacent: bool = False  # heads of a page lie side by side


CASES = (
    Case((0, 1, 15, 16, 40), (1, 1, 1, 1, 0), 1),
    Case((5, 32), (1, 1), 1, 32, 3, 128, "bfloat16", per_head=True),
    Case((0, 7, 16, 33), (50, 9, 1, 0), 50),
    Case((0, 0, 63), (128, 64, 2), 128, 64, 2, 128, "bfloat16", per_head=True),
    Case((3,), (100,), 100, 16, 1, 80),
)


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function)(*arguments)


def check(case: Case, implementation: str, call: Callable[..., Any] = compiled) -> None:
    """`call(function, *arguments)` is how the function is run."""
    rng = np.random.default_rng(len(case.lengths))
    batch, columns = len(case.lengths), -(-(max(case.lengths) + case.chunk) // case.page)
    if case.adjacent:
        entries = 1 + rng.permutation(batch * columns).reshape(batch, 1, columns)
        pages = entries * case.heads + np.arange(case.heads)[:, None]
    else:
        pages = 1 + rng.permutation(batch * case.heads * columns).reshape(batch, case.heads, columns)
    num_pages = -(-(pages.max() + 1) // 8) * 8  # as TPUs need it
    everything = rng.standard_normal((batch, columns * case.page, case.heads, case.dim))
    everything = np.asarray(jnp.asarray(everything, case.dtype), np.float32)
    low, high = (np.full((num_pages, case.dim), 7.0, np.float32) for _ in range(2))  # what freed pages leave behind

    def recount(sequence: int, length: int, first: int = 0) -> None:
        for column in range(first // case.page, -(-length // case.page)):
            rows = everything[sequence, column * case.page : min((column + 1) * case.page, length)]
            low[pages[sequence, :, column]], high[pages[sequence, :, column]] = rows.min(0), rows.max(0)

    for sequence, length in enumerate(case.lengths):
        recount(sequence, length)
    before = [jnp.asarray(bounds, case.dtype) for bounds in (low, high)]
    index = np.asarray(case.lengths)[:, None] + np.arange(case.chunk)
    valid = np.arange(case.chunk) < np.asarray(case.new)[:, None]
    kept = np.minimum(index, columns * case.page - 1)
    keys = everything[np.arange(batch)[:, None], kept]
    head_pages = np.where(valid[:, :, None], pages[np.arange(batch)[:, None], :, kept // case.page], 0)
    offsets = np.broadcast_to((index % case.page)[:, :, None], (batch, case.chunk, case.heads if case.per_head else 1))
    for sequence, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        recount(sequence, length + new, length)

    def compute(low, high, keys, head_pages, offsets, num_valid):
        options = {"num_valid": num_valid, "page_size": case.page, "implementation": implementation}
        return api.page_bounds(low, high, keys, head_pages, offsets, **options)

    arrays = [jnp.asarray(keys, case.dtype), *(jnp.asarray(x, jnp.int32) for x in (head_pages, offsets, case.new))]
    found = call(compute, *before, *arrays)
    for bounds, wanted in zip(found, (low, high), strict=True):
        assert bounds.dtype == jnp.dtype(case.dtype)
        np.testing.assert_array_equal(np.asarray(bounds, np.float32)[1:], wanted[1:])  # the null page has no bounds


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.chunk}-{case.page}-{case.dim}")
def test_bounds_are_those_of_the_pages(case):
    check(case, "xla")
