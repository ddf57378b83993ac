"""Worked examples of budgets that shrink with depth, computed by the functions that serve."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.methods import pyramidkv
from tests.core.paging import evict_context, paged
from tests.vectors.make_pyramidkv_vectors import arithmetic_budgets
from tests.vectors.make_pyramidkv_vectors import pyramidkv as text
from tests.vectors.test_vectors import HERE, cases, knobs

CASES = cases("pyramidkv")
ARITHMETIC = [name for name in CASES if name.startswith("arithmetic")]
RATIO = [name for name in CASES if "budgets" in CASES[name]["expected"] and name not in ARITHMETIC]


def kept(method, layers: int, rows: int) -> list[int]:
    """Rows that each layer keeps of a prompt."""
    return method.kept_after("prompt", np.full((layers, 1), rows))[:, 0].tolist()


def series(capacity: int, window: int, beta: int):
    """The method as its authors run it: no sinks, and the window is what stays of the end."""
    params = {"pyramid_budget_mode": "arithmetic", "sink_keep_tokens": 0, "decode_keep_tokens": capacity - window}
    params |= {"recent_keep_tokens": window, "observation_window_size": window, "pyramidkv_beta": beta}
    return registry.resolve("pyramidkv", params)[0]


def test_the_generator_reproduces_the_file():
    assert text() == (HERE / "pyramidkv.json").read_text("utf-8")


@pytest.mark.parametrize("name", RATIO)
def test_budgets_follow_the_ratios(name):
    case, layers = CASES[name], CASES[name]["inputs"]["num_kv_layers"]
    params = {} if case["params"] == {"all": "defaults"} else case["params"]
    method, _ = registry.resolve("pyramidkv", params)
    budgets = case["expected"]["budgets"]
    assert kept(method, layers, 10_000) == budgets
    assert kept(method, layers, budgets[1]) == [min(budget, budgets[1]) for budget in budgets]
    assert method.kept_after("prompt", np.array([[10_000]])).tolist() == [[max(budgets)]]
    found = pyramidkv.layer_ratios(method.params, layers)
    np.testing.assert_allclose(found, case["expected"].get("ratios", found), atol=1e-6)


@pytest.mark.parametrize("separator", [",", "; ", " "])
def test_ratios_may_be_text(separator):
    case = CASES["explicit_ratios"]
    ratios = case["params"]["pyramid_layer_ratios"]
    written = registry.resolve("pyramidkv", {"pyramid_layer_ratios": separator.join(map(str, ratios))})[0]
    assert written == registry.resolve("pyramidkv", {"pyramid_layer_ratios": ratios})[0]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_budgets_form_a_series(name):
    case = CASES[name]
    params, inputs = case["params"], case["inputs"]
    method = series(params["capacity"], params["observation_window_size"], params["pyramidkv_beta"])
    assert kept(method, inputs["num_kv_layers"], inputs["n"]) == case["expected"]["budgets"]


@pytest.mark.parametrize("seed", range(20))
def test_any_series_is_the_reference_one(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        layers, window, scored = (int(rng.integers(low, high)) for low, high in ((2, 13), (1, 17), (1, 121)))
        beta, rows = int(rng.integers(1, 31)), int(rng.integers(1, 601))
        method = series(scored + window, window, beta)
        found = kept(method, layers, rows)
        wanted = arithmetic_budgets(layers, scored + window, window, rows, beta)
        assert found == [min(rows, budget) for budget in wanted]
        again = method.kept_after("prompt", np.array(found)[:, None])[:, 0]
        assert again.tolist() == found  # a pyramid stays one


@pytest.mark.parametrize("granularity", list(Granularity))
def test_layers_keep_the_best_of_the_same_votes(granularity):
    case = CASES["same_score_three_layer_budgets"]
    k = np.asarray(case["inputs"]["k"]).swapaxes(0, 1)[None]  # [1, rows, kv_heads, dim]
    queries = np.asarray(case["inputs"]["q_window"], np.float32).swapaxes(0, 1)  # [window, q_heads, dim]
    length, window = k.shape[1], len(queries)
    geometry = Geometry(1, queries.shape[1], k.shape[2], k.shape[3], 4, 24, case["params"]["softmax_scale"])
    rows = paged(geometry, k, k, length, granularity=granularity)
    ring = np.zeros_like(queries)
    ring[np.arange(length - window, length) % window] = queries
    method, _ = registry.resolve("pyramidkv", knobs(case["params"]) | {"decode_keep_tokens": 6})
    row_aux = {pyramidkv.QUERIES: jnp.asarray(ring), pyramidkv.EVICTED_AT: jnp.int32(0)}
    context = evict_context(method, rows, row_aux=row_aux, observed=length)
    votes = pyramidkv.score_rows(method.params, context)[0, 1:12]
    np.testing.assert_allclose(votes, case["expected"]["candidate_score"], rtol=1e-5, atol=1e-6)
    for layer in case["expected"]["layers"]:
        budget = layer["budget"]
        counted = context._replace(counts=jnp.full_like(context.counts, budget))
        found = pyramidkv.keep_rows(method.params, counted)
        assert found[:, :budget].tolist() == [layer["keep"]]
