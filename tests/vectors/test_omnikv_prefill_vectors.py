"""Worked examples of history that a few layers choose for the others, computed by the functions that serve."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import PrefillContext
from sparsejax.methods import omnikv_prefill
from tests.core.paging import paged
from tests.vectors.make_omnikv_prefill_vectors import omnikv_prefill as text
from tests.vectors.test_vectors import HERE, cases

CASES = cases("omnikv_prefill")


def test_the_generator_reproduces_the_file():
    assert text() == (HERE / "omnikv_prefill.json").read_text("utf-8")


def chunk_context(case: dict, granularity: Granularity, padding: int) -> PrefillContext:
    """The chunk in layer 0, with so many queries behind it that are none."""
    k = np.asarray(case["inputs"]["k"]).swapaxes(0, 1)[None]  # [1, rows, kv_heads, dim]
    queries = np.asarray(case["inputs"]["q_chunk"], np.float32).swapaxes(0, 1)[None]  # [1, chunk, q_heads, dim]
    chunk, length = queries.shape[1], k.shape[1]
    geometry = Geometry(1, queries.shape[2], k.shape[2], k.shape[3], 4, 24, 0.5)
    rows = paged(geometry, k, k, length, granularity=granularity)
    start = rows.view.lengths - chunk
    return PrefillContext(
        geometry=geometry,
        role="anchor",
        layer=rows.layer,
        queries=jnp.asarray(np.pad(queries, ((0, 0), (0, padding), (0, 0), (0, 0)), constant_values=np.nan)),
        view=rows.view,
        start=start,
        num_new=jnp.full(1, chunk, jnp.int32),
        positions=start[:, :1] + jnp.arange(chunk + padding, dtype=jnp.int32)[None],
        pools=rows.pools,
        names=rows.names,
        load_tile=rows.load_tile,
        page_aux={},
        carry=None,
    )


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("name", ["pruned", "history_fits", "first_chunk"])
def test_followers_read_the_rows_of_the_file(name, granularity, padding):
    case = CASES[name]
    method, _ = registry.resolve("omnikv_prefill", case["params"])
    context = chunk_context(case, granularity, padding)
    rows, count = omnikv_prefill.choose(method.params, context)
    assert rows[0, : int(count[0])].tolist() == case["expected"]["visible_rows"]
    assert ((rows >= 0) & (rows < context.view.lengths[0, 0])).all()
    pools, view = omnikv_prefill.gather(context, rows, count)
    found = np.asarray(pools["k"])[np.asarray(view.head_pages(0, view.table.shape[2]))[0]]
    found = found.reshape(2, -1, 4)[:, : int(view.lengths[0, 0])]
    keys = np.asarray(case["inputs"]["k"])[:, case["expected"]["visible_rows"]]
    np.testing.assert_array_equal(found, keys)


def test_layers_follow_the_anchor_before_them():
    case = CASES["anchor_map"]
    params, layers = case["params"], case["inputs"]["num_layers"]
    method, _ = registry.resolve("omnikv_prefill", params)
    roles = method.roles(layers)
    targets: dict[str, list[int]] = {}
    anchor = None
    for layer, role in enumerate(roles):
        if role == omnikv_prefill.FOLLOWER:
            targets.setdefault(str(anchor), []).append(layer)
        else:
            anchor = layer
    assert targets == case["expected"]["targets"]
    scoring = [layer for layer, role in enumerate(roles) if role == omnikv_prefill.ANCHOR]
    assert scoring == case["expected"]["scoring_layers"]
    written = "; ".join(map(str, params["omnikv_prefill_full_attention_layers"]))
    assert registry.resolve("omnikv_prefill", {"omnikv_prefill_full_attention_layers": written})[0] == method
