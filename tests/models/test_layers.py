"""Shared layers: rope formulas, dtypes, the weight trees that architectures declare."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.arrays import is_spec, tree_nbytes
from sparsejax.errors import LoadError
from sparsejax.models import layers
from sparsejax.models.load.dummy import dummy_names, dummy_spec, dummy_weights
from sparsejax.models.registry import architecture_names, get_architecture, spec_from_config
from sparsejax.models.spec import RopeSpec, Stream
from sparsejax.pallas_kernels.heads import Heads, apply_rope, finish, rms_norm
from tests.models.full_attention import full_logits

LLAMA3 = RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
YARN = RopeSpec(1e6, "yarn", 4.0, original_max_len=32768)


def test_default_frequencies() -> None:
    frequencies, multiplier = layers.rope_frequencies(RopeSpec(10000.0), 8)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert multiplier == 1.0
    assert frequencies.dtype == np.float32


def test_linear_divides_every_frequency() -> None:
    plain, _ = layers.rope_frequencies(RopeSpec(10000.0), 64)
    scaled, _ = layers.rope_frequencies(RopeSpec(10000.0, "linear", 4.0), 64)
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_llama3_bands() -> None:
    plain, _ = layers.rope_frequencies(RopeSpec(500000.0), 128)
    scaled, _ = layers.rope_frequencies(LLAMA3, 128)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_yarn_keeps_fast_and_stretches_slow_dimensions() -> None:
    plain, _ = layers.rope_frequencies(RopeSpec(1e6), 128)
    scaled, multiplier = layers.rope_frequencies(YARN, 128)
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[-1], plain[-1] / 4, rtol=1e-6)
    assert multiplier == pytest.approx(0.1 * math.log(4) + 1)
    assert layers.rope_frequencies(dataclasses.replace(YARN, attention_factor=1.5), 128)[1] == 1.5


def test_divisors_say_the_same_as_llama3() -> None:
    plain, _ = layers.rope_frequencies(RopeSpec(500000.0), 128)
    scaled, _ = layers.rope_frequencies(LLAMA3, 128)
    divisors = tuple((plain.astype(np.float64) / scaled).tolist())
    again, _ = layers.rope_frequencies(RopeSpec(500000.0, "divisors", divisors=divisors), 128)
    np.testing.assert_allclose(again, scaled, rtol=1e-6)


def test_unknown_rope_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="longrope"):
        layers.rope_frequencies(RopeSpec(kind="longrope"), 64)


def test_rope_depends_on_distance_only() -> None:
    key = jax.random.key(0)
    q, k = jax.random.normal(key, (2, 1, 32))

    def score(q_position: int, k_position: int) -> float:
        table = layers.rope_table(RopeSpec(), 32, jnp.asarray([q_position, k_position], jnp.int32))
        rotated = apply_rope(jnp.stack([q, k]), table)
        return float(jnp.vdot(rotated[0], rotated[1]))

    assert score(105, 100) == pytest.approx(score(5, 0), abs=1e-4)
    assert abs(score(105, 100) - score(107, 100)) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_computes_in_float32(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (4, 64)), dtype)
    weight = jnp.asarray(np.random.default_rng(1).normal(1, 0.2, 64), dtype)
    x64, weight64 = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * weight64
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-6 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("name", [name for name in dummy_names() if name.startswith("tiny")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_layer_keeps_shape_and_dtype_for_any_leading_axes(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    spec = dummy_spec(name, dtype)
    architecture = get_architecture(spec.architecture)
    weights = jax.tree.map(lambda array: array.abstract(), architecture.weight_specs(spec), is_leaf=is_spec)
    seen = []

    def attend(heads: Heads) -> jax.Array:
        q, k, v = finish(heads)
        seen.append((q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype))
        return q

    tokens = jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32))
    x = jax.eval_shape(lambda w, tokens: architecture.embed(spec, w, tokens), weights, tokens)
    assert {(leaf.shape, leaf.dtype) for leaf in x} == {((*shape, spec.hidden_size), jnp.dtype(dtype))}
    layer = functools.partial(architecture.layer, spec, attend=attend)
    y = jax.eval_shape(layer, weights["layers"][0], x, tokens)
    assert [(leaf.shape, leaf.dtype) for leaf in y] == [(leaf.shape, leaf.dtype) for leaf in x]
    q_shape, kv_shape = (*shape, spec.num_q_heads, spec.head_dim), (*shape, spec.num_kv_heads, spec.head_dim)
    assert seen == [(q_shape, kv_shape, kv_shape, *[jnp.dtype(dtype)] * 3)]
    logits = jax.eval_shape(lambda w, y: architecture.logits(spec, w, y), weights, y)
    assert (logits.shape, logits.dtype) == ((*shape, spec.vocab_size), jnp.dtype(jnp.float32))


@pytest.mark.parametrize("name", dummy_names())
def test_slots_fill_every_array_exactly(name: str) -> None:
    """The tensors of a checkpoint and the arrays of the tree hold the same number of values, array by array."""
    spec = dummy_spec(name, "bfloat16")
    architecture = get_architecture(spec.architecture)
    values: dict[tuple, int] = {}
    for slot in architecture.tensor_slots(spec).values():
        values[slot.path] = values.get(slot.path, 0) + math.prod(slot.shape)
    flat, _ = jax.tree_util.tree_flatten_with_path(architecture.weight_specs(spec), is_leaf=is_spec)
    arrays = {tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path): spec for path, spec in flat}
    assert values == {path: math.prod(array.shape) for path, array in arrays.items()}
    assert all(len(array.axes) == len(array.shape) for array in arrays.values())


def test_parameter_count_of_known_models() -> None:
    def billions(name: str) -> float:
        spec = dummy_spec(name, "bfloat16")
        return tree_nbytes(get_architecture(spec.architecture).weight_specs(spec)) / 2e9

    assert billions("smollm2-135m") == pytest.approx(0.1345, abs=0.0001)
    assert billions("llama-3-8b") == pytest.approx(8.03, abs=0.005)
    assert billions("llama-3.2-1b") == pytest.approx(1.236, abs=0.001)
    assert billions("qwen3-8b") == pytest.approx(8.19, abs=0.005)
    assert billions("qwen2.5-7b") == pytest.approx(7.616, abs=0.005)


def test_tied_logits_read_the_embedding_as_it_lies() -> None:
    spec = dummy_spec("tiny-qwen2", "float32")
    weights = dummy_weights(spec)
    x = Stream(*jnp.ones((2, 4, spec.hidden_size)))
    architecture = get_architecture(spec.architecture)
    compiled = jax.jit(architecture.logits, static_argnums=0).lower(spec, weights, x).compile().as_text()
    assert f"transpose(f32[{spec.vocab_size},{spec.hidden_size}]" not in compiled.replace("%", "")


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(LoadError, match=r"'gpt2'.*llama, qwen2, qwen3.*Qwen3ForCausalLM"):
        get_architecture("gpt2")
    with pytest.raises(LoadError, match="MixtralForCausalLM"):
        spec_from_config({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    assert set(architecture_names()) == {"llama", "qwen2", "qwen3"}


def test_full_attention_mask_restricts_reading() -> None:
    """Tokens whose keys no later query may read have no effect on later logits."""
    spec = dummy_spec("tiny-llama", "float32")
    weights = dummy_weights(spec)
    tokens = np.arange(10) + 5
    allowed = np.ones((10, 10), bool)
    np.testing.assert_array_equal(full_logits(spec, weights, tokens, allowed), full_logits(spec, weights, tokens))
    allowed[:, :3] = False
    np.fill_diagonal(allowed, True)
    changed = tokens.copy()
    changed[:3] = 200
    got, other = (np.asarray(full_logits(spec, weights, ids, allowed)) for ids in (tokens, changed))
    np.testing.assert_array_equal(got[3:], other[3:])
    per_layer = np.broadcast_to(allowed, (spec.num_layers, 10, 10))
    per_head = np.broadcast_to(allowed, (spec.num_layers, spec.num_kv_heads, 10, 10))
    np.testing.assert_array_equal(got, full_logits(spec, weights, tokens, per_layer))
    np.testing.assert_array_equal(got, full_logits(spec, weights, tokens, per_head))
