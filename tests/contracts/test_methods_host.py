"""The host's arithmetic is what the device does: rows kept, the most rows held, rows read, pages returned."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from sparsejax import registry
from sparsejax.errors import MethodError
from tests.contracts.compositions import METHODS, SELECTED, start
from tests.core.harness import Session, tokens_of

RETENTION = st.fixed_dictionaries(
    {
        "sink_keep_tokens": st.integers(0, 5),
        "recent_keep_tokens": st.integers(1, 9),
        "decode_keep_tokens": st.integers(0, 9),
        "snapkv_decode_eviction": st.booleans(),
        "decode_eviction_interval": st.integers(1, 9),
        "streamingllm_decode_trigger_ratio": st.floats(1, 4),
        "h2o_prefill_budget": st.integers(9, 20),
        "h2o_decode_budget": st.integers(1, 9),
        "h2o_prefill_compaction": st.booleans(),
        "h2o_decode_eviction": st.booleans(),
        "h2o_decode_eviction_interval": st.integers(1, 9),
        "quest_chunk_size": st.sampled_from([1, 4, 16]),
        "quest_skip_layers": st.integers(0, 3),
        "rkv_compression_interval": st.integers(3, 9),
        "rkv_observation_tokens": st.integers(1, 3),
        "rkv_compress_prompt": st.booleans(),
        "skipkv_compression_interval": st.integers(2, 9),
        "skipkv_observation_tokens": st.integers(1, 2),
    }
)
TURNS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4)


def kept(method, phase: str, lengths: np.ndarray, done: int) -> np.ndarray:
    if not method.may_evict(phase, done):
        return lengths
    found = method.kept_after(phase, lengths)
    assert found.shape == lengths.shape
    assert ((found > 0) & (found <= lengths)).all()
    return found


def build(name: str, knobs: dict):
    try:
        return registry.resolve(name, knobs, used=set())[0]
    except MethodError:
        reject()  # knobs that don't go together


@pytest.mark.parametrize("name", METHODS)
@given(knobs=RETENTION, turns=TURNS, cut=st.integers(1, 40))
@settings(max_examples=100)
def test_rows_never_pass_the_promised_peak(name, knobs, turns, cut):
    method = build(name, knobs)
    length = np.zeros(Session().geometry.table_shape(method.granularity), np.int32)
    for prompt, decode in turns:
        promise = method.peak_rows(length, prompt, decode)
        assert (promise <= length + prompt + decode).all()
        tighter = method.peak_rows(length, prompt, decode, cut)  # told the longest chunk
        assert (tighter <= promise).all()
        promise, most = tighter, length
        for begin in range(0, prompt, cut):
            length = length + min(cut, prompt - begin)
            most = np.maximum(most, length)
            length = kept(method, "prompt" if begin + cut >= prompt else "chunk", length, min(begin + cut, prompt))
        for done in range(decode):
            rest = method.peak_rows(length, 0, decode - done)
            assert (rest <= promise).all()
            length = length + 1
            assert (length <= rest).all()  # a promise made in the middle of decoding holds too
            most = np.maximum(most, length)
            length = kept(method, "token", length, done + 1)
        assert (most <= promise).all()


@pytest.mark.parametrize("name", METHODS)
@given(knobs=RETENTION)
@settings(max_examples=30)
def test_arrays_of_lengths_are_treated_one_by_one(name, knobs):
    method, geometry = build(name, knobs), Session().geometry
    lengths = np.arange(1, 61, dtype=np.int32).reshape(3, 20)
    for phase in ("chunk", "prompt", "token", "pressure"):
        shape = geometry.table_shape(method.granularity)
        for length in range(1, 61):
            found = method.kept_after(phase, np.full(shape, length))
            assert found.dtype == np.int32
            np.testing.assert_array_equal(method.kept_after(phase, found), found)  # nothing is due right after
            assert method.evicts or (found == length).all()
        for rows in (lengths, lengths[::-1]):  # one layer's or head's length does not matter to another
            uneven = np.resize(rows, shape)
            found = method.kept_after(phase, uneven)
            for at in np.ndindex(shape):
                assert found[at] == method.kept_after(phase, np.full(shape, uneven[at]))[at]
    for length in range(1, 61):
        assert 0 < method.rows_read(length, geometry) <= length


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["prompt", "decode", "release"]), st.integers(1, 3), st.integers(1, 20), st.integers(1, 9)
    ),
    min_size=4,
    max_size=9,
)


@pytest.mark.parametrize("name", ["dense", "streamingllm+quest", "snapkv+quest+fp8_kv"])
@given(operations=OPERATIONS)
@settings(max_examples=12)
def test_the_device_follows_the_host(name, operations):
    session = start(name)
    method, room = session.method, session.geometry.max_model_len
    for kind, row, count, piece in operations:
        record = session.rows.get(row)
        if kind == "release" and record:
            session.release(row)
        elif kind == "prompt" and (record is None or record.length + count <= room):
            if record:
                record.most = 0
            promise = method.peak_rows(record.lengths if record else np.zeros(session.shape), count, 0)
            session.prefill({row: tokens_of(count, count)}, pieces=[piece] * 20, first=record is None)
            assert (session.rows[row].most <= promise).all()
        elif kind == "decode" and record and record.length + count <= room:
            record.most = 0
            promise = method.peak_rows(record.lengths, 0, count)
            for token in tokens_of(row, count):
                session.decode([row], [token])
            assert (record.most <= promise).all()
        session.check()
    session.release()
    session.check()
    assert len(session.free) == len(session.all_pages)


@pytest.mark.parametrize("name", [name for name in METHODS if start(name).method.select])
def test_rows_read_are_what_the_host_says(name):
    session = start(name)
    layers, heads = session.geometry.num_layers, session.geometry.num_kv_heads
    session.prefill({1: tokens_of(1, 9)})
    for token in tokens_of(2, 40):
        SELECTED.clear()
        lengths = session.rows[1].lengths + 1
        length = int(lengths.max())
        session.decode([1], [token])
        jax.effects_barrier()
        read = {layer: np.broadcast_to(rows[0], (heads,)) for layer, _, rows in SELECTED}
        assert len(read) == layers
        if (lengths == length).all():  # where layers differ the host estimates
            assert session.method.rows_read(length, session.geometry) == round(np.mean(list(read.values())))
