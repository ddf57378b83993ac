"""Row scores and their log-sum-exps on a GPU against the float32 oracle."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView
from tests.contracts.kernels_gpu.cases import Case, Shape, make, relative_error
from tests.contracts.test_row_scores import WAYS, options_of

pytestmark = pytest.mark.gpu

RAGGED = (1, 0, 63, 64, 65, 700, 127, 1537)


@dataclasses.dataclass(frozen=True)
class Queries:
    """How many queries, and whether they are the last ones of each row or a causal chunk that ends in padding."""

    count: int
    window: bool = True
    first: int = 0

    def __str__(self) -> str:
        return f"{'window' if self.window else 'chunk'}{self.count}-from{self.first}"


WINDOW = Queries(32, first=20)
CASES = [
    *((Shape(RAGGED, page=page), WINDOW) for page in (16, 32, 64, 128)),
    *((Shape(RAGGED, dim=dim, page=16), WINDOW) for dim in (64, 256)),
    *((Shape(RAGGED, heads=h, group=g), WINDOW) for h, g in ((1, 16), (2, 7), (8, 1), (3, 3), (1, 64))),
    *((Shape(RAGGED), Queries(count)) for count in (1, 5, 64, 130)),
    *((Shape(RAGGED, page=16), Queries(count, window=False)) for count in (1, 200)),
    *(
        (Shape(RAGGED, per_head_table=table, per_head_lengths=lengths, dtype=dtype), WINDOW)
        for table, lengths, dtype in ((True, True, "bfloat16"), (True, False, "float32"), (False, True, "bfloat16"))
    ),
    *((Shape(RAGGED, dim=dim, dtype="float32"), WINDOW) for dim in (64, 128, 256)),
    (Shape(RAGGED, dtype="float32"), Queries(70, window=False)),
    (Shape(RAGGED, dtype="float16"), WINDOW),
    (Shape((1,)), WINDOW),
    (Shape((0, 0)), WINDOW),
    (Shape((20000,)), WINDOW),
    (Shape((6000, *(30,) * 40), columns=96), Queries(32)),
    *(
        (Shape(RAGGED, codes="float8_e4m3fn", dim=dim, page=page), WINDOW)
        for dim in (64, 128, 256)
        for page in (16, 64)
    ),
    (Shape(RAGGED, codes="float8_e4m3fn", per_head_table=True, per_head_lengths=True), WINDOW),
    (Shape(RAGGED, codes="float8_e4m3fn", dtype="float32"), WINDOW),
    (Shape(RAGGED, codes="float8_e4m3fn", bits=True), Queries(100, window=False)),
]


def queries_of(case: Case, queries: Queries) -> tuple[jax.Array, np.ndarray]:
    """Queries [batch, count, q_heads, dim] and limits [batch, heads or 1, count]."""
    rng = np.random.default_rng(7)
    batch, q_heads, dim = case.q.shape
    q = jnp.asarray(rng.standard_normal((batch, queries.count, q_heads, dim), np.float32), case.q.dtype)
    index = np.arange(queries.count)
    last = queries.count - 1 if queries.window else queries.count * 2 // 3
    limit = np.asarray(case.view.lengths)[:, :, None] - last + index
    return q, np.maximum(np.where(index <= last, limit, 0), 0).astype(np.int32)


def wanted_of(case: Case, q: jax.Array, limit: np.ndarray, first: int):
    """lse, and scores by way, in float64."""
    batch, heads, rows, dim = case.keys.shape
    query = np.asarray(q, np.float64).reshape(batch, q.shape[1], heads, -1, dim)
    lse = np.full((*query.shape[:4],), -1e30)
    group = query.shape[3]
    mass, share = np.zeros((2, batch, heads, group, rows))
    largest = np.full((batch, heads, group, rows), -np.inf)
    for b, h in itertools.product(range(batch), range(heads)):
        seen = np.arange(rows)[None, :] < limit[b, h % limit.shape[1]][:, None]
        domain = seen & (np.arange(rows) >= first)[None, :]
        for g in range(group):
            logits = query[b, :, h, g] @ case.keys[b, h].astype(np.float64).T * case.scale
            some = domain.any(1)
            peak = np.where(domain, logits, -1e30).max(1, initial=-1e30)
            total = np.where(domain, np.exp(np.minimum(logits - peak[:, None], 0)), 0.0).sum(1)
            lse[b, some, h, g] = peak[some] + np.log(total[some])
            weights = np.exp(np.minimum(logits - lse[b, :, h, g][:, None], 0))
            mass[b, h, g] = np.where(seen, weights, 0.0).sum(0)
            share[b, h, g] = np.where(seen, weights, 0.0).max(0)
            largest[b, h, g] = np.where(seen, logits, -np.inf).max(0)
    votes = {"sum": mass, "max": share, "logit": largest}
    scores = {(kind, name): getattr(votes[kind], name)(2) for kind, name in WAYS}
    return lse.reshape(*q.shape[:3]), scores


ENGINE = (("sum", "sum"), ("max", "max"), ("logit", "max"))


def program(case: Case, first: int, implementation: str, ways=ENGINE):
    """The jitted operations; each of the `ways` is a kernel to compile."""

    @jax.jit
    def run(q, pools, table, offset, lengths, limit):
        view = PageView(table, case.view.stride, offset, lengths)
        how = {**case.how, "implementation": implementation}
        lse = api.attention_lse(q, pools, case.names, view, limit, first=first, **how)
        arrays = (q, pools, case.names, view, limit)
        return lse, {way: api.row_scores(*arrays, **options_of(way, lse), **how) for way in ways}

    return run


def check(case: Case, q, limit, first: int, found, exact: bool) -> None:
    lse, scores = found
    wanted_lse, wanted = wanted_of(case, q, limit, first)
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=1e-6, atol=1e-4 if exact else 4e-2)
    rows = case.keys.shape[2]
    for key, score in scores.items():
        score, expected = np.asarray(score), wanted[key]
        assert score.dtype == np.float32
        outside = -np.inf if key[0] == "logit" else 0.0
        assert (score[:, :, rows:] == outside).all(), key
        np.testing.assert_array_equal(score[:, :, :rows] == outside, expected == outside, err_msg=str(key))
        real = np.isfinite(expected)
        assert relative_error(score[:, :, :rows][real], expected[real]) < (5e-5 if exact else 8e-3), key


@pytest.mark.parametrize(("shape", "queries"), CASES, ids=str)
def test_matches_oracle_and_reads_nothing_else(shape, queries):
    case = make(shape)
    q, limit = queries_of(case, queries)
    run = program(case, queries.first, "triton", ENGINE if queries == WINDOW else tuple(WAYS))
    found = run(q, case.pools, case.view.table, case.view.offset, case.view.lengths, jnp.asarray(limit))
    check(case, q, limit, queries.first, found, shape.dtype == "float32" and shape.codes is None)


def test_limits_are_data():
    case = make(Shape((700, 64, 5), columns=40))
    run = program(case, 0, "triton")
    for lengths in ((700, 64, 5), (1, 1, 1), (699, 0, 2)):
        lengths = jnp.asarray(lengths, jnp.int32)[:, None]
        now = dataclasses.replace(case, view=case.view._replace(lengths=lengths))
        q, limit = queries_of(now, Queries(32))
        found = run(q, case.pools, case.view.table, case.view.offset, lengths, jnp.asarray(limit))
        check(now, q, limit, 0, found, False)
    assert run._cache_size() == 1


def test_choice_on_a_gpu():
    case = make(Shape((70, 3)))
    q, limit = queries_of(case, Queries(32))
    api.row_scores(q, case.pools, case.names, case.view, jnp.asarray(limit), **case.how)
    assert "triton" in api.chosen()["row_scores"]


def test_the_portable_path_agrees():
    case = make(Shape(RAGGED))
    q, limit = queries_of(case, Queries(32))
    arguments = (q, case.pools, case.view.table, case.view.offset, case.view.lengths, jnp.asarray(limit))
    check(case, q, limit, 0, program(case, 0, "xla")(*arguments), False)
