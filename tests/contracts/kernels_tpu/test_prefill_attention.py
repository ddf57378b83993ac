"""Prefill attention on TPUs against the oracle, in interpret mode."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api, reference, specs
from sparsejax.pallas_kernels.layout import explicit_view
from sparsejax.pallas_kernels.prefill_attention import mosaic_tpu
from tests.contracts.kernels_tpu.cases import ATTENTION, CODES, by_name, interpret, slow, stored
from tests.contracts.test_kernels import real_queries, tolerance


def attend(shape, lengths=None, start=None, view_of=lambda rows: rows.view, module=api, **options):
    rows, q = stored(shape, **options)
    view = view_of(rows)
    lengths = np.asarray(view.lengths if lengths is None else lengths, np.int32)
    start = lengths - np.asarray(shape.chunks, np.int32)[:, None] if start is None else start

    def compute(q, pools, table, lengths, start):
        viewed = view._replace(table=table, lengths=lengths)
        return module.prefill_attention(q, pools, rows.names, viewed, start, **rows.how)

    arguments = (view.table, jnp.asarray(lengths), jnp.asarray(start, jnp.int32))
    return interpret(compute, q, rows.pools, *arguments)


def check(shape, found, wanted, real):
    out, lse = found
    assert out.dtype == shape.dtype
    assert np.isfinite(np.asarray(out, np.float32)).all()  # queries past a row's end are junk, but finite
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], wanted[0][real], **tolerance(shape.dtype))
    np.testing.assert_allclose(lse[real], wanted[1][real], **tolerance(shape.dtype))


@by_name(argvalues=ATTENTION)
def test_every_shape(shape):
    check(shape, attend(shape), attend(shape, module=reference), real_queries(shape))


def test_empty_rows_and_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "MOST_QUERIES", 16)
    monkeypatch.setattr(mosaic_tpu, "LONGEST_BLOCK", 16)
    shape = specs.AttentionShape("blocks", (50, 1, 1, 60), 2, 2, 128, chunks=(30, 1, 1, 7))
    lengths, start = [[50], [0], [1], [60]], [[20], [0], [0], [53]]
    real = real_queries(shape) & (np.asarray(lengths) > 0)
    out, lse = attend(shape, lengths, start)
    check(shape, (out, lse), attend(shape, lengths, start, module=reference), real)
    assert (out[1] == 0).all()


def test_heads_with_pages_and_lengths_of_their_own():
    shape = specs.AttentionShape("own", (70, 33), 2, 2, 128, chunks=(20, 33))
    lengths, start = np.asarray([[70, 30], [20, 33]]), np.asarray([[50, 10], [0, 0]])
    real = np.arange(33) < np.minimum(lengths - start, [[20], [33]]).min(1)[:, None]

    def view(rows):
        return explicit_view(jnp.asarray(rows.head_pages), rows.view.lengths)

    check(shape, attend(shape, lengths, start, view), attend(shape, lengths, start, view, reference), real)


@pytest.mark.parametrize("shape", [slow(specs.SMALL[1]), slow(CODES)], ids=lambda shape: shape.name)
def test_poison_and_place_change_nothing(shape):
    wanted = attend(shape, poison=0.0)
    for found, expected in zip(attend(shape, poison=float("inf"), seed=9), wanted, strict=True):
        real = real_queries(shape)
        np.testing.assert_array_equal(found[real], expected[real])
