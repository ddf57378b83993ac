"""Decode attention on TPUs against the oracle, in interpret mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from sparsejax.pallas_kernels import api, reference, specs, tpu_pages
from sparsejax.pallas_kernels.decode_attention import mosaic_tpu
from sparsejax.pallas_kernels.layout import explicit_view
from tests.contracts.kernels_tpu.cases import ATTENTION, CODES, by_name, interpret, slow, stored
from tests.contracts.test_kernels import tolerance


def attend(shape, lengths=None, view_of=lambda rows: rows.view, module=api, params=None, **options):
    rows, q = stored(shape, **options)
    view = view_of(rows)
    lengths = view.lengths if lengths is None else jnp.asarray(lengths, jnp.int32)

    def compute(q, pools, table, lengths):
        viewed = view._replace(table=table, lengths=lengths)
        return module.decode_attention(q, pools, rows.names, viewed, **rows.how)

    return interpret(compute, q[:, 0], rows.pools, view.table, lengths, **(params or {}))


@by_name(argvalues=ATTENTION)
def test_every_shape(shape):
    wanted, wanted_lse = attend(shape, module=reference)
    out, lse = attend(shape)
    assert out.dtype == shape.dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, **tolerance(shape.dtype))
    np.testing.assert_allclose(lse, wanted_lse, **tolerance(shape.dtype))


@pytest.mark.parametrize("shape", [specs.SMALL[1], CODES], ids=lambda shape: shape.name)
def test_rows_without_keys(shape):
    lengths = np.asarray(shape.lengths)[:, None] * (np.arange(len(shape.lengths)) % 2)[:, None]
    wanted, _ = attend(shape, lengths, module=reference)
    out, lse = attend(shape, lengths)
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, **tolerance(shape.dtype))
    assert (out[::2] == 0).all()
    assert (lse[::2] < -1e29).all()


def test_heads_with_pages_and_lengths_of_their_own():
    shape = specs.AttentionShape("own", (70, 33), 3, 2, 128)
    lengths = [[70, 1, 0], [16, 33, 17]]

    def view(rows):
        return explicit_view(jnp.asarray(rows.head_pages), rows.view.lengths)

    out, lse = attend(shape, lengths, view)
    wanted, wanted_lse = attend(shape, lengths, view, module=reference)
    np.testing.assert_allclose(out, wanted, **tolerance(shape.dtype))
    np.testing.assert_allclose(lse, wanted_lse, **tolerance(shape.dtype))
    shared, _ = attend(shape, lengths)
    np.testing.assert_array_equal(shared, out)


@pytest.mark.parametrize("shape", [specs.SMALL[1], slow(CODES)], ids=lambda shape: shape.name)
def test_poison_and_place_change_nothing(shape):
    wanted = attend(shape, poison=0.0)
    for found, expected in zip(attend(shape, poison=float("inf"), seed=9), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_blocks_change_nothing(monkeypatch):
    shape = specs.SMALL[3]
    wanted = attend(shape, module=reference)
    monkeypatch.setattr(mosaic_tpu, "LONGEST_BLOCK", 64)
    for found, expected in zip(attend(shape), wanted, strict=True):
        np.testing.assert_allclose(found, expected, **tolerance(shape.dtype))


def test_no_copy_meets_a_read(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "LONGEST_BLOCK", 16)
    attend(specs.AttentionShape("races", (40, 90), 2, 2, 128), params={"detect_races": True})
    races = interpret_pallas_call.races
    assert races is not None
    assert not races.races_found


def test_codes_decode_exactly():
    bits = jnp.arange(256, dtype=jnp.uint8)
    wanted = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32))
    found = np.asarray(tpu_pages.decode(bits, jnp.float32))
    finite = np.isfinite(wanted)
    assert finite.sum() == 254
    np.testing.assert_array_equal(found[finite], wanted[finite])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
