"""Where TPU weights differ from others: in how they lie, never in what they are."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sparsejax.models import layers, weight_layout
from sparsejax.models.load import dummy


def test_other_platforms_keep_what_they_have():
    weights = {"a": jax.numpy.ones((2, 3, 4))}
    assert weight_layout.place(weights) is weights


def test_weights_turned_for_a_tpu_are_the_same_weights(monkeypatch):
    spec = dummy.dummy_spec("tiny-qwen3", "float32")
    wanted = jax.tree.map(np.asarray, dummy.dummy_weights(spec))
    monkeypatch.setattr(weight_layout.api, "platform", lambda: "tpu")
    placed = weight_layout.place(dummy.dummy_weights(spec))
    jax.tree.map(np.testing.assert_array_equal, placed, wanted)
    gate_up = placed["layers"][0]["gate_up"]
    assert gate_up.format.layout.major_to_minor == (1, 0, 2)
    x = np.ones((3, gate_up.shape[0]), np.float32)
    found = jax.jit(layers.linear)(x, gate_up)
    np.testing.assert_allclose(found, layers.linear(x, jax.numpy.asarray(np.asarray(gate_up))), rtol=1e-5)


@pytest.mark.parametrize(("num_axes", "order"), [(2, (0, 1)), (3, (1, 0, 2)), (4, (1, 2, 0, 3))])
def test_the_input_axis_is_next_to_the_last(num_axes, order):
    layout = weight_layout.tpu_layout(num_axes)
    assert layout is not None
    assert layout.major_to_minor == order
