"""The kernels of tiles for Hopper as far as a machine without a GPU can take them: what they serve, and lowering."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.pallas_kernels.block_sparse_attention import mosaic_gpu
from sparsejax.pallas_kernels.block_sparse_attention.tiles import num_tiles
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.tile_attention import mosaic_gpu as tile_mosaic_gpu
from tests.contracts.kernels_gpu.test_prefill_lowering import call, lowers


def unsupported(block=128, tile=128, **fields) -> str | None:
    q, pools, names, view, _, load_tile = call(**fields)
    return mosaic_gpu.unsupported_shape(q, pools, names, view, load_tile, block, tile)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "queries are float32, not one of bfloat16, float16"),
        ({"tile": 64}, "tiles of 64 rows are not a multiple of 128"),
        ({"block": 32}, "blocks of 32 rows are neither a multiple of 64 nor a part of 32"),
        ({"block": 192}, "blocks of 192 rows are neither a multiple of 64 nor a part of 128"),
        ({"page": 48}, "pages of 48 rows neither divide 128 rows nor are their multiple, or are below 8"),
    ],
)
def test_shapes_without_a_kernel_say_why(fields, reason):
    assert unsupported(**fields) == reason


@pytest.mark.parametrize(
    ("dim", "dtype", "tile", "reason"),
    [
        (96, "bfloat16", 128, "head_dim is 96, not one of 64, 128, 256"),
        (128, "float32", 128, "queries, keys and values are float32, not all one of bfloat16, float16"),
        (128, "bfloat16", 64, "tiles of 64 rows are not a multiple of 128"),
        (128, "bfloat16", 256, None),
    ],
)
def test_biased_keys_without_a_kernel_say_why(dim, dtype, tile, reason):
    q, keys = (jax.ShapeDtypeStruct((1, 2, 4, dim), jnp.dtype(dtype)) for _ in range(2))
    assert tile_mosaic_gpu.unsupported_shape(q, keys, keys, tile) == reason


def lowered_text(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@lowers
@pytest.mark.parametrize(
    ("block", "tile", "fields"),
    [
        (128, 128, {}),
        (128, 128, {"dtype": "float16"}),
        (64, 128, {"page": 16}),
        (512, 384, {"chunk": 100}),
        (128, 128, {"group": 3}),
        (128, 256, {"group": 16, "page": 256}),
        (64, 128, {"dim": 256}),
        (128, 128, {"dim": 64}),
        (128, 128, {"per_head": True, "heads": 8}),
    ],
    ids=str,
)
def test_lists_lower_for_cuda(block, tile, fields):
    assert unsupported(block, tile, **fields) is None
    q, pools, names, view, start, load_tile = call(**fields)
    heads = view.num_heads
    count = jax.ShapeDtypeStruct((3, heads, num_tiles(q.shape[1], q.shape[2] // heads, tile)), jnp.int32)
    blocks = jax.ShapeDtypeStruct((*count.shape, 4), jnp.int32)

    def two_layers(q, pools, table, offset, lengths, start, blocks, count):
        found = []
        for layer in range(2):
            own = PageView(table, view.stride, offset + layer, lengths)
            how = (block, tile, load_tile, jnp.int32(layer), 0.1)
            q, lse = mosaic_gpu.block_sparse_attention(q, pools, names, own, start, blocks, count, *how)
            found.append(lse)
        return q, found[0] + found[1]

    arguments = (q, pools, view.table, view.offset, view.lengths, start, blocks, count)
    assert lowered_text(two_layers, *arguments).count("mosaic_gpu_v2") == 1  # one copy, called by both layers


@lowers
@pytest.mark.parametrize(("dim", "group", "tile", "keys"), [(128, 4, 128, 1024), (64, 3, 256, 100), (256, 1, 128, 70)])
def test_biased_keys_lower_for_cuda(dim, group, tile, keys):
    q = jax.ShapeDtypeStruct((2, 300, 2 * group, dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 2, keys, dim), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((2, 2, num_tiles(300, group, tile), keys), jnp.float32)
    text = lowered_text(lambda q, k, v, bias: tile_mosaic_gpu.tile_attention(q, k, v, bias, tile, 0.1), q, k, k, bias)
    assert text.count("mosaic_gpu_v2") == 1


def test_long_lists_are_launched_first():
    fields = {"batch": 1, "chunk": 512, "heads": 2, "group": 4, "dim": 128, "page": 64, "columns": 4, "stride": 1}
    fields |= {
        "table_heads": 1,
        "row_heads": 1,
        "dtype": "bfloat16",
        "scale": 0.1,
        "config": mosaic_gpu.config_of(128, 128),
    }
    steps = jnp.asarray([[[3, 2], [5, 100]]], jnp.int32)
    order = mosaic_gpu.launch_order(mosaic_gpu.Problem(**fields, tile_rows=256), steps)
    assert np.asarray(order).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    order = mosaic_gpu.launch_order(mosaic_gpu.Problem(**fields, tile_rows=256), steps[:, ::-1])
    assert np.asarray(order).tolist() == [3, 2, 1, 0, 7, 6, 5, 4]
