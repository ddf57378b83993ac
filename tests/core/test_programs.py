"""What the compiler makes of the step functions: the state is updated in place, whatever the pool's size."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from sparsejax import prune_steps, sampling, steps, transfers
from sparsejax.arrays import is_spec
from sparsejax.state import StateSize, state_specs
from tests.contracts.compositions import start

REINDEX = "streamingllm(streamingllm_position_mode=reindex)+quest"
COMPOSITIONS = [
    "dense",
    "quest",
    "snapkv",
    "dense+fp8_kv",
    "snapkv+quest+fp8_kv",
    "pyramidkv",
    "omnikv_prefill",
    REINDEX,
]
NUM_PAGES = 60_000
"""Enough that the smallest pool array is far larger than anything else a program needs."""


@functools.cache
def compiled(composition: str) -> tuple[dict, steps.KVState]:
    """Every program of a composition, compiled for a state that is never allocated."""
    session = start(composition)
    geometry, statics, weights = session.geometry, session.statics, session.weights
    size = StateSize(session.num_rows, NUM_PAGES, session.spec.vocab_size)
    specs = state_specs(geometry, size, (session.method,), session.storage)
    state = jax.tree.map(lambda spec: spec.abstract(), specs, is_leaf=is_spec)
    batch, per_row = session.num_rows, int(np.prod(session.shape))
    ints, floats = steps.greedy_inputs(batch)
    updates = np.zeros((batch * 13 * per_row, 5), np.int32)
    decode = steps.DecodeInputs(np.zeros((batch, 2), np.int32), ints, floats, updates)  # type: ignore[arg-type]
    tokens, rows = np.zeros((batch, session.chunk), np.int32), np.zeros((batch, 4), np.int32)
    prefill = steps.PrefillInputs(tokens, rows, ints, floats, updates)  # type: ignore[arg-type]
    row, ids = np.int32(1), np.zeros(24, np.int32)
    pages = np.zeros((*session.shape, 4), np.int32)
    grain = {"granularity": session.grain.value}
    exported = jax.eval_shape(transfers.export_rows, state, ids)
    row_state = jax.eval_shape(functools.partial(transfers.export_row_state, **grain), state, row)
    table = np.zeros((*session.shape, geometry.max_pages), np.int32)
    bias = (np.zeros(256, np.int32), np.zeros(256, np.float32), np.zeros(32, np.int32))
    lowered = {
        "decode_step": steps.decode_step.lower(statics, weights, state, decode, mode=sampling.GREEDY),
        "prefill_chunk": steps.prefill_chunk.lower(statics, weights, state, prefill, mode=sampling.GREEDY),
        "copy_pages": transfers.copy_pages.lower(state, ids, ids),
        "import_rows": transfers.import_rows.lower(state, ids, exported),
        "fork_row": transfers.fork_row.lower(state, row, row, updates, **grain),
        "import_row_state": transfers.import_row_state.lower(state, row, row_state, table, **grain),
        "setup_row": transfers.setup_row.lower(state, row, *bias),
    }
    if session.method.evicts:
        inputs = steps.MaintainInputs(row, np.zeros(session.shape, np.int32), pages, row)  # type: ignore[arg-type]
        lowered["maintain_step"] = steps.maintain_step.lower(statics, state, inputs, phase="prompt", kept=13)
    if session.method.pure_prefix:
        lowered["score_rows"] = scoring(statics, weights, state, session.chunk)
        rows = np.zeros(8 * geometry.page_size, np.int32)
        lowered["pack_rows"] = prune_steps.pack_rows.lower(statics, state, table, rows, table[..., :8])
    return {name: program.compile() for name, program in lowered.items()}, state


def scoring(statics: steps.Statics, weights, state: steps.KVState, chunk: int):
    """The program that scores rows of a table of any width."""
    shape, columns = statics.geometry.table_shape(statics.method.granularity), statics.geometry.max_pages
    scores, table = np.zeros(columns * statics.geometry.page_size, np.float32), np.zeros((*shape, columns), np.int32)
    given = scores, np.zeros((1, chunk), np.int32), table, np.zeros(3, np.int32)
    return prune_steps.score_rows.lower(prune_steps.score_statics(statics), weights, state, *given)


def nbytes(tree) -> int:
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_the_whole_state_is_aliased(composition):
    programs, state = compiled(composition)
    for name, program in programs.items():
        assert program.memory_analysis().alias_size_in_bytes == nbytes(state), name


def shapes_of(text: str, operations: str) -> list[tuple[int, ...]]:
    found = re.findall(rf"= \w+\[([\d,]+)\]\S* (?:{operations})\(", text)
    return [tuple(map(int, shape.split(","))) for shape in found]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_pools_are_never_copied(composition):
    programs, state = compiled(composition)
    pools = [*state.pools.values(), *state.page_aux.values()]
    smallest = min(nbytes(pool) for pool in pools)
    for name, program in programs.items():
        text = program.as_text()
        copies = shapes_of(text, "copy|copy-start|convert|bitcast-convert|transpose|select|broadcast|pad|concatenate")
        assert not [shape for shape in copies if shape[0] == pools[0].shape[0]], name
        # Whatever the operation is called: nothing as large as a pool exists beside the state.
        assert program.memory_analysis().temp_size_in_bytes < smallest / 2, name


@pytest.mark.parametrize("composition", ["h2o", "kvzip", "dense"])
def test_rows_that_are_observed_are_not_copied(composition):
    """They are read between two layers that store rows, in a loop over pages: nothing but attention orders the two."""
    session = start(composition)
    geometry = dataclasses.replace(session.geometry, max_model_len=1024 * session.geometry.page_size)
    statics = dataclasses.replace(session.statics, geometry=geometry)
    specs = state_specs(geometry, StateSize(1, NUM_PAGES, session.spec.vocab_size), (session.method,), session.storage)
    state = jax.tree.map(lambda spec: spec.abstract(), specs, is_leaf=is_spec)
    given = np.zeros((1, 3), np.int32), np.zeros((1, 5), np.int32)
    if session.method.pure_prefix:
        lowered = scoring(statics, session.weights, state, 8)
    elif session.method.replays is not None:
        lowered = steps.replay_chunk.lower(statics, session.weights, state, np.zeros((1, 8), np.int32), *given)
    else:
        lowered = steps.decode_logits.lower(statics, session.weights, state, given[0][:, :2], given[1])
    smallest = min(nbytes(pool) for pool in [*state.pools.values(), *state.page_aux.values()])
    assert lowered.compile().memory_analysis().temp_size_in_bytes < smallest / 2


def test_the_guards_can_fail():
    """A step that copies its pool is caught by both guards."""
    _, state = compiled("dense")

    def step(state):
        pools = {name: array.T.at[0].set(0).T for name, array in state.pools.items()}
        return state.replace(pools=pools), state.pools["positions"].sum(0) + pools["positions"][::-1].sum(0)

    program = jax.jit(step, donate_argnums=0).lower(state).compile()
    pool = next(iter(state.pools.values()))
    big = [s for s in shapes_of(program.as_text(), "copy|transpose|convert|broadcast|select") if pool.shape[0] in s]
    assert big or program.memory_analysis().temp_size_in_bytes > nbytes(pool) / 2
    program = jax.jit(step).lower(state).compile()
    assert program.memory_analysis().alias_size_in_bytes == 0


def test_only_the_last_token_goes_through_the_end_of_the_last_layer():
    session = start("dense")
    statics, spec = session.statics, session.spec
    inputs = np.zeros((4, 16), np.int32), np.zeros((4, 4), np.int32), np.zeros((4, 5), np.int32)
    jaxpr = steps.prefill_logits.trace(statics, session.weights, session.state, *inputs).jaxpr
    layers = [eqn for eqn in jaxpr.eqns if eqn.params.get("name") == "_layer"]
    assert len(layers) == spec.num_layers
    x, delta = zip(*((eqn.outvars[0].aval.shape, eqn.outvars[1].aval.shape) for eqn in layers), strict=True)
    assert list(x) == list(delta) == [(4, 16, spec.hidden_size)] * (spec.num_layers - 1) + [(4, spec.hidden_size)]
    assert len({id(eqn.params["jaxpr"]) for eqn in layers}) == 2
    inner = str(layers[-1].params["jaxpr"])
    assert f"[4,16,2,{spec.intermediate_size}]" not in inner
    assert f"[4,2,{spec.intermediate_size}]" in inner


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_layers_of_one_role_share_one_trace(composition):
    session = start(composition)
    deep = dataclasses.replace(session.spec, num_layers=6)
    weights = {**session.weights, "layers": [session.weights["layers"][0]] * 6}
    geometry = deep.geometry(4, 64)
    statics = dataclasses.replace(session.statics, spec=deep, geometry=geometry)
    size = StateSize(4, 20, deep.vocab_size)
    specs = state_specs(geometry, size, (session.method,), session.storage)
    state = jax.tree.map(lambda spec: spec.abstract(), specs, is_leaf=is_spec)
    ints, floats = steps.greedy_inputs(4)
    inputs = steps.DecodeInputs(np.zeros((4, 2), np.int32), ints, floats, np.zeros((4, 5), np.int32))  # type: ignore[arg-type]
    jaxpr = steps.decode_step.trace(statics, weights, state, inputs, mode=sampling.GREEDY).jaxpr
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == "_layer"]
    assert len(calls) == 6
    roles = session.method.roles(6)
    assert len({id(eqn.params["jaxpr"]) for eqn in calls}) == len(set(roles))
