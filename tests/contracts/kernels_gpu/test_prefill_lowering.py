"""The prefill kernel for Hopper as far as a machine without a GPU can take it: what it serves, and lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from sparsejax import registry
from sparsejax.geometry import Geometry
from sparsejax.pallas_kernels import mosaic_support
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.prefill_attention import mosaic_gpu

lowers = pytest.mark.skipif(
    mosaic_support.import_problem() is not None, reason=f"no Mosaic GPU: {mosaic_support.import_problem()}"
)


def call(storage="plain", heads=2, group=4, dim=128, page=64, chunk=256, dtype="bfloat16", per_head=False):
    """Query, pools, names, view, start and load_tile as shapes, for a storage of the registry."""
    geometry = Geometry(2, heads * group, heads, dim, page, 4 * page, 0.125, dtype)
    stored = registry.resolve(storage)[1]
    specs = stored.payload(stored.params, geometry)
    pools = {name: jax.ShapeDtypeStruct((40, *spec.shape), jnp.dtype(spec.dtype)) for name, spec in specs.items()}
    own = heads if per_head else 1
    table, rows = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, own, 4), (3, own)))
    view = PageView(table, 4, jax.ShapeDtypeStruct((heads,), jnp.int32), rows)  # type: ignore[arg-type]
    q = jax.ShapeDtypeStruct((3, chunk, heads * group, dim), jnp.dtype(dtype))
    return q, pools, tuple(pools), view, rows, functools.partial(stored.load_tile, stored.params, geometry)


def unsupported(**fields) -> str | None:
    q, pools, names, view, _, load_tile = call(**fields)
    return mosaic_gpu.unsupported_shape(q, pools, names, view, load_tile)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "queries are float32, not one of bfloat16, float16"),
        ({"dim": 96}, "head_dim is 96, not one of 64, 128, 256"),
        ({"page": 48}, "pages of 48 rows neither divide 128 rows nor are their multiple, or are below 8"),
        ({"page": 4}, "pages of 4 rows neither divide 128 rows nor are their multiple, or are below 8"),
    ],
)
def test_shapes_without_a_kernel_say_why(fields, reason):
    assert unsupported(**fields) == reason


def test_encoded_rows_say_why():
    reason = unsupported(storage="fp8_kv")
    assert reason is not None
    assert "are not keys and values as they are used" in reason


@lowers
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "float16"},
        {"chunk": 100},
        *({"dim": dim, "page": page} for dim in (64, 128, 256) for page in (16, 32, 64, 128)),
        *({"group": group} for group in (1, 3, 16)),
        {"per_head": True, "heads": 8},
    ],
    ids=str,
)
def test_lowers_for_cuda(fields):
    assert unsupported(**fields) is None
    q, pools, names, view, start, load_tile = call(**fields)

    def two_layers(q, pools, table, offset, lengths, start):
        lse = []
        for layer in range(2):
            own = PageView(table, view.stride, offset + layer, lengths)
            q, found = mosaic_gpu.prefill_attention(q, pools, names, own, start, load_tile, jnp.int32(layer), 0.1)
            lse.append(found)
        return q, lse[0] + lse[1]

    arguments = (q, pools, view.table, view.offset, view.lengths, start)
    lowered = jax.jit(two_layers).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.out_info[0].shape == q.shape
    assert lowered.out_info[1].shape == q.shape[:3]
    assert lowered.as_text().count("mosaic_gpu_v2") == 1  # one copy, called by both layers


@lowers
@pytest.mark.parametrize(
    "config",
    [
        mosaic_gpu.Config(stages=3),
        mosaic_gpu.Config(sharers=1),
        mosaic_gpu.Config(block_rows=64, stages=4),
    ],
    ids=str,
)
def test_other_launches_lower_for_cuda(config):
    q, pools, names, view, start, load_tile = call()
    attend = functools.partial(mosaic_gpu.prefill_attention, load_tile=load_tile, layer=0, scale=0.1, config=config)

    def run(q, pools, table, offset, lengths, start):
        return attend(q, pools, names, PageView(table, view.stride, offset, lengths), start)

    arguments = (q, pools, view.table, view.offset, view.lengths, start)
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.out_info[0].shape == q.shape


def test_a_scale_must_be_positive():
    q, pools, _, view, _, _ = call()
    with pytest.raises(ValueError, match=r"scale must be positive, got -1\.0"):
        mosaic_gpu.describe(q, pools, view, -1.0)
