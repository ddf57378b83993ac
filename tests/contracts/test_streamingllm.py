"""Rotary embedding by row index: what is stored, what is read, and what must not change."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.errors import MethodError
from sparsejax.geometry import Granularity
from sparsejax.models import layers
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import RopeSpec
from sparsejax.pallas_kernels.heads import Heads, finish
from tests.contracts import test_methods as contract
from tests.core.harness import TINY, Session, tokens_of
from tests.vectors.test_vectors import HERE

NAME = "streamingllm(streamingllm_position_mode=reindex)"
YARN = dataclasses.replace(TINY, rope=RopeSpec(kind="yarn", factor=4.0, original_max_len=32))
KNOBS = {"sink_keep_tokens": 2, "recent_keep_tokens": 5, "streamingllm_position_mode": "reindex"}


def turned(x: np.ndarray, places: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """x [rows, heads, dim] with the rotation of places [rows], in float64."""
    frequencies, multiplier = layers.rope_frequencies(rope, x.shape[-1])
    angles = places[:, None, None] * frequencies.astype(np.float64)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles) * multiplier, np.sin(angles) * multiplier
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Model:
    """Keeps keys as they are before rotation, and turns all of a row whenever it is read."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stored: list[list[np.ndarray]] = []  # [layers] of keys, values

    def read(self, tokens: list[int]) -> np.ndarray:
        """Appends tokens; logits of the last one."""
        session, spec = self.session, self.session.spec
        architecture, group = get_architecture(spec.architecture), spec.num_q_heads // spec.num_kv_heads
        x = architecture.embed(spec, session.weights, jnp.asarray(tokens, jnp.int32))
        for layer in range(spec.num_layers):

            def attend(projected: Heads, layer: int = layer):
                one = jnp.ones((1, 1, spec.head_dim // 2))
                plain = projected._replace(cos=one, sin=jnp.zeros_like(one))
                q, k, v = (np.asarray(each, np.float64) for each in finish(plain))
                if layer == len(self.stored):
                    self.stored.append([k[:0], v[:0]])
                keys, values = (np.concatenate(pair) for pair in zip(self.stored[layer], (k, v), strict=True))
                self.stored[layer] = [keys, values]
                rows = np.arange(len(keys))
                at = rows[-len(q) :]
                q, keys = turned(q, at, spec.rope), turned(keys, rows, spec.rope)
                logits = np.einsum("thd,shd->hts", q, np.repeat(keys, group, axis=1)) * spec.head_dim**-0.5
                logits = np.where(rows[None] <= at[:, None], logits, -np.inf)
                mass = np.exp(logits - logits.max(-1, keepdims=True))
                mass /= mass.sum(-1, keepdims=True)
                return jnp.asarray(np.einsum("hts,shd->thd", mass, np.repeat(values, group, axis=1)), jnp.float32)

            positions = jnp.zeros(len(tokens), jnp.int32)
            x = architecture.layer(spec, session.weights["layers"][layer], x, positions, attend)
        return np.asarray(architecture.logits(spec, session.weights, x))[-1]

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""
        self.stored = [[array[rows] for array in pair] for pair in self.stored]

    @property
    def length(self) -> int:
        return len(self.stored[0][0])


def sinks_and_recent(length: int) -> list[int]:
    return [0, 1, *range(length - 5, length)]


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize("spec", [TINY, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("granularity", [None, Granularity.HEAD])
def test_rows_are_read_at_their_index(spec, ratio, granularity):
    params = KNOBS | {"streamingllm_decode_trigger_ratio": ratio}
    session = Session("streamingllm", params=params, spec=spec, granularity=granularity)
    original = Session("streamingllm", params=params | {"streamingllm_position_mode": "original"}, spec=spec)
    model, moved = Model(session), False
    for turn, (prompt, answer) in enumerate(((tokens_of(1, 23), tokens_of(2, 17)), (tokens_of(3, 6), tokens_of(4, 9)))):
        found = session.prefill({1: prompt}, pieces=[9, 3], first=not turn)[1]
        original.prefill({1: prompt}, pieces=[9, 3], first=not turn)
        np.testing.assert_allclose(found, model.read(prompt), rtol=1e-4, atol=1e-4)
        if model.length > 7:
            model.keep(sinks_and_recent(model.length))
        for token in answer:
            found = session.decode([1], [token])[0]
            np.testing.assert_allclose(found, model.read([token]), rtol=1e-4, atol=1e-4)
            moved |= not np.allclose(found, original.decode([1], [token])[0], rtol=1e-2, atol=1e-2)
            if model.length > 7 and model.length >= int(ratio * 7):
                model.keep(sinks_and_recent(model.length))
            assert session.rows[1].length == model.length
        session.check()
    assert moved, "positions made no difference"
    for layer, (keys, _) in enumerate(model.stored):
        wanted = turned(keys, np.arange(len(keys)), spec.rope)
        for head in range(spec.num_kv_heads):
            np.testing.assert_allclose(session.stored("k", 1, layer, head), wanted[:, head], rtol=1e-4, atol=1e-4)


def test_the_worked_example():
    (case,) = (
        case
        for case in json.loads((HERE / "streamingllm.json").read_text("utf-8"))["cases"]
        if case["name"] == "reindex_rotary_positions"
    )
    retained, new = case["inputs"]["retained_positions_before_append"], case["inputs"]["new_token_position"]
    text = tokens_of(1, new + 1)
    session = Session("streamingllm", params=case["params"] | {"streamingllm_decode_trigger_ratio": 2.0})
    session.prefill({1: text[:new]})
    assert session.positions(1).tolist() == retained
    session.decode([1], [text[new]])
    assert session.positions(1).tolist() == [*retained, new]
    spec, places = session.spec, case["expected"]["key_rotary_positions"]
    architecture, keys = get_architecture(spec.architecture), []

    def attend(projected: Heads):
        keys.append(np.asarray(finish(projected)[1]))
        return jnp.zeros((len(places), spec.num_q_heads, spec.head_dim))

    tokens = jnp.asarray([text[position] for position in [*retained, new]], jnp.int32)
    stream = architecture.embed(spec, session.weights, tokens)
    architecture.layer(spec, session.weights["layers"][0], stream, jnp.asarray(places, jnp.int32), attend)
    for head in range(spec.num_kv_heads):  # of the first layer, whose keys depend on nothing but their tokens
        np.testing.assert_allclose(session.stored("k", 1, 0, head), keys[0][:, head], rtol=1e-5, atol=1e-5)
    assert case["expected"]["query_rotary_position"] == places[-1]  # its query is at the place of its key


@pytest.mark.parametrize(
    "equality",
    [
        contract.test_one_shot_equals_chunked,
        contract.test_alone_equals_in_company,
        contract.test_within_the_budget_everything_is_dense,
        contract.test_where_pages_lie_changes_nothing,
        contract.test_a_reused_row_remembers_nothing,
        contract.test_forks_and_swapped_rows_go_on_as_if_nothing_had_happened,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_equalities_hold(equality):
    equality(NAME)


def test_bounds_of_pages_follow_turned_keys():
    contract.test_page_aux_is_a_reduction_of_the_stored_keys(f"{NAME}+quest")


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["nan", "inf"])
def test_memory_that_nobody_wrote_is_not_turned(poison):
    contract.test_memory_that_nobody_wrote_changes_nothing(NAME, poison)


def test_storages_that_round_are_refused():
    for composition, storage in ((f"{NAME}+fp8_kv", None), (NAME, "fp8_kv"), (f"{NAME}+quest+fp8_kv", None)):
        with pytest.raises(MethodError, match="round"):
            registry.resolve(composition, storage=storage)
    registry.resolve(f"{NAME}+quest+plain")
    registry.resolve("streamingllm+fp8_kv")


def test_keys_of_16_bits_are_not_turned_too_often():
    half, full = (TINY.geometry(16, 64) for _ in range(2))
    half = dataclasses.replace(half, dtype="bfloat16")
    for ratio, turns in ((2.0, 1), (1.125, 8), (1.1, 9), (1.0, 512)):
        for mode in ("original", "reindex"):
            knobs = {"streamingllm_position_mode": mode, "streamingllm_decode_trigger_ratio": ratio}
            method, _ = registry.resolve("streamingllm", knobs)
            refused = mode == "reindex" and turns > 8
            assert method.check(method.params, full) == []
            assert any(f"{turns} times" in reason for reason in method.check(method.params, half)) == refused
            assert bool(method.check(method.params, half)) == refused
