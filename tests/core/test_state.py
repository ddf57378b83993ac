"""Padding, the null row and the null page touch nobody; a row that goes wrong goes wrong alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import steps
from sparsejax.arrays import tree_nbytes
from sparsejax.errors import MethodError
from sparsejax.geometry import Granularity
from sparsejax.method import AuxSpec, Method
from sparsejax.state import StateSize, empty_state, fixed_nbytes, layer_view, sequence_page_nbytes, state_specs
from tests.contracts.compositions import COMPOSITIONS, start
from tests.core.harness import Session, tokens_of

TEXT, NEXT = tokens_of(1, 30), tokens_of(2, 8)


def of_row(session: Session, row: int) -> list[np.ndarray]:
    """Every bit of the state that belongs to a row."""
    state, pages = session.state, session.all_head_pages(row)
    arrays = [array[pages] for array in (*state.pools.values(), *state.page_aux.values())]
    arrays += [array[:, row] for array in state.row_aux.values()]
    arrays += [array[:, :, row] for array in (*state.tables.values(), *state.lengths.values())]
    arrays += [state.positions[row], state.last_tokens[row], state.counts[row]]
    arrays += [state.bias_ids[row], state.bias_values[row], state.stop_ids[row]]
    return [np.asarray(array) for array in arrays]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_steps_touch_only_their_rows(name):
    session = start(name)
    session.prefill({1: TEXT, 3: TEXT[:9]})
    session.decode([1, 3])
    before = [of_row(session, row) for row in (1, 3)]
    session.decode([])  # nothing but padding
    session.prefill({2: TEXT}, pieces=[7])
    for _ in NEXT:
        session.decode([2], padding=2)
    session.fork(2, 4)
    session.release(4)
    session.swap_in(4, session.swap_out(2))
    for row, kept in zip((1, 3), before, strict=True):
        for found, wanted in zip(of_row(session, row), kept, strict=True):
            assert found.tobytes() == wanted.tobytes()
    session.check()


def spoil(session: Session, row: int) -> None:
    """Puts NaN into a stored key of every page of the row, in the first layer."""
    pages = session.head_pages(row, 0, 0)
    name = "k_scale" if "k_scale" in session.state.pools else "k"
    pool = session.state.pools[name]
    session.state = session.state.replace(pools={**session.state.pools, name: pool.at[pages, 0].set(jnp.nan)})


@pytest.mark.parametrize("name", ["dense", "dense+fp8_kv", "snapkv", "quest", "snapkv+quest+fp8_kv"])
def test_a_row_goes_wrong_alone(name):
    healthy, session = start(name), start(name)
    rows = {1: TEXT, 2: TEXT[:9], 3: TEXT[:17]}
    for each in (healthy, session):
        each.prefill(rows)
    spoil(session, 2)
    session.prefill({2: NEXT}, first=False)  # the chunk's padding is wrong too, and is written to the null page
    healthy.prefill({2: NEXT}, first=False)
    for token in NEXT:
        wanted, found = (each.decode([1, 2, 3], [token] * 3) for each in (healthy, session))
        assert session.outputs[:, 1].tolist() == [1, 0, 1]
        assert healthy.outputs[:, 1].tolist() == [1, 1, 1]
        np.testing.assert_array_equal(found[[0, 2]], wanted[[0, 2]])
        assert not np.isfinite(found[1]).all()
        assert ((session.outputs[:, 0] >= 0) & (session.outputs[:, 0] < session.spec.vocab_size)).all()
    session.release(2)
    healthy.release(2)
    for each in (healthy, session):  # the next owner of the row and its pages is well
        each.free.sort()
    wanted, found = (each.generate(2, TEXT, 4) for each in (healthy, session))
    np.testing.assert_array_equal(found, wanted)


def test_wrong_logits_in_prefill_are_reported_for_their_row():
    session = start("dense")
    bad = {**session.weights, "embed": session.weights["embed"].at[5].set(jnp.inf)}
    session.weights = bad
    tokens = [token for token in TEXT if token != 5]
    first = session.prefill({1: tokens, 2: [3, 5, 7]})
    assert np.isfinite(first[1]).all()
    session.decode([1, 2], [4, 4])
    assert session.outputs[:, 1].tolist() == [1, 0]


def test_bytes_are_what_arrays_take():
    session = Session("snapkv+quest+fp8_kv")
    geometry, methods = session.geometry, (session.method,)
    size = StateSize(3, 11, 61)
    state = empty_state(geometry, size, methods, session.storage)
    total = sum(array.nbytes for array in jax.tree.leaves(state))
    assert tree_nbytes(state_specs(geometry, size, methods, session.storage)) == total
    page = sequence_page_nbytes(geometry, methods, session.storage)
    assert fixed_nbytes(geometry, 3, 61, methods, session.storage) + 11 * page == total


def test_methods_that_disagree_about_an_array_are_refused():
    session = Session("snapkv")

    def aux(params, geometry):
        return {"snapkv_queries": AuxSpec("row", (1,))}

    other = Method("other", "retention", aux=aux)
    with pytest.raises(MethodError, match=r"other.*snapkv_queries"):
        state_specs(session.geometry, StateSize(1, 2, 61), (session.method, other), session.storage)
    same = dataclasses.replace(session.method, name="twin")
    state_specs(session.geometry, StateSize(1, 2, 61), (session.method, same), session.storage)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_head_pages_of_all_allocations_are_disjoint(granularity):
    geometry = Session().geometry
    layers, heads = geometry.table_shape(granularity)
    num_pages = 5 * layers * heads  # as many as five sequence pages give
    found = []
    for page in range(num_pages):
        layer_of_page = [page % layers] if layers > 1 else range(geometry.num_layers)
        for layer in layer_of_page:
            table = jnp.full((layers, heads, 1, 1), page, jnp.int32)
            view = layer_view(geometry, granularity, table, jnp.ones((layers, heads, 1), jnp.int32), jnp.int32(layer))
            pages = np.asarray(view.head_pages(0, 1))[0, :, 0]
            found += sorted(set(pages.tolist()))
    assert sorted(found) == list(range(5 * geometry.head_pages_per_sequence_page))


def test_table_updates():
    pages = np.arange(12).reshape(2, 3, 2)
    updates = steps.table_updates(4, pages, first_column=5, width=16)
    table = np.zeros((2, 3, 6, 8), int)
    table[tuple(updates[:, :4].T)] = updates[:, 4]
    np.testing.assert_array_equal(table[:, :, 4, 5:7], pages)
    assert not updates[12:].any()
    assert steps.table_updates(1, pages).shape == (12, 5)
    with pytest.raises(ValueError, match="width"):
        steps.table_updates(1, pages, width=11)
