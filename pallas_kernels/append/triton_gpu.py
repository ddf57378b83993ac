"""Head norms, rotary embedding, encoding and storing of new rows on NVIDIA GPUs: one Triton kernel instead of nine.

A decode step of one row spends as long on the small kernels between its matrix products as on its attention; this one
reads what the product left and writes queries and pages, nothing in between.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels import payload
from sparsejax.pallas_kernels.heads import Heads
from sparsejax.pallas_kernels.layout import POSITIONS, Encode, PageView, Pools
from sparsejax.pallas_kernels.triton_support import DTYPES, codes_problem, platform_problem, power_of_two


def unsupported(heads: Heads, pools: Pools, view: PageView, encode: Encode) -> str | None:
    """Why this call can't run here, or None. Arguments as in `api.append`."""
    if (problem := platform_problem()) is not None:
        return problem
    if (problem := unsupported_shape(heads, pools, view, encode)) is not None:
        return problem
    return codes_problem() if "k_scale" in pools else None


def unsupported_shape(heads: Heads, pools: Pools, view: PageView, encode: Encode) -> str | None:
    """The part of `unsupported` that does not depend on the device."""
    dtype, dim = heads.qkv.dtype, heads.qkv.shape[-1]
    if dtype.name not in DTYPES:
        return f"heads are {dtype.name}, not one of {', '.join(DTYPES)}"
    if dim < 32 or dim != power_of_two(dim):
        return f"head_dim is {dim}, not a power of two from 32"
    if payload.recognise_encoder(encode, pools, dtype, dim) is None:
        found = ", ".join(f"{name} {pools[name].dtype.name}" for name in sorted(pools))
        return f"rows are stored ({found}) in a way the kernel does not know"
    if (heads.q_norm is None) != (heads.k_norm is None):
        return "only one of query and key heads is normed"
    return None


def append(
    heads: Heads,
    pools: Pools,
    view: PageView,
    num_new: jax.Array,
    positions: jax.Array,
    encode: Encode,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """See `api.append`."""
    return launch(heads, pools, view, num_new, positions)


def launch(
    heads: Heads,
    pools: Pools,
    view: PageView,
    num_new: jax.Array,
    positions: jax.Array,
    compute_capability: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """The kernel. `compute_capability` (such as 90) is only needed where no GPU can be asked."""
    jax_triton = importlib.import_module("jax_triton")
    kernels = importlib.import_module("sparsejax.pallas_kernels.append.triton_kernels")
    batch, chunk, num_heads, _, dim = heads.qkv.shape
    group = heads.group_size
    scaled = "k_scale" in pools
    stored = ("k", "v", POSITIONS, "k_scale", "v_scale") if scaled else ("k", "v", POSITIONS)
    arrays = [pools[name] for name in stored]
    spare = () if scaled else (jax.ShapeDtypeStruct((1,), jnp.float32),) * 2  # scales that nobody reads or writes
    norms = [heads.qkv] * 2 if heads.q_norm is None else [heads.q_norm, heads.k_norm]
    inputs = [
        heads.qkv,
        heads.cos,
        heads.sin,
        *norms,
        view.table,
        view.lengths,
        view.offset,
        num_new,
        positions,
        *arrays,
        *(positions for _ in spare),
        view.stride,
    ]
    first = len(inputs) - 1 - len(arrays) - len(spare)
    new = jax.ShapeDtypeStruct((batch, chunk, num_heads, dim), heads.qkv.dtype)
    q, k, v, *results = jax_triton.triton_call(
        *inputs,
        kernel=kernels.append_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, chunk, num_heads * group, dim), heads.qkv.dtype),
            new,
            new,
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
            *spare,
        ],
        input_output_aliases={first + i: 3 + i for i in range(len(arrays))},
        grid=(batch * chunk, num_heads),
        name="append",
        num_warps=1 if dim <= 64 else 2,
        num_stages=1,
        compute_capability=compute_capability,
        EPS=float(heads.eps),
        NORM=heads.q_norm is not None,
        SCALED=scaled,
        CHUNK=chunk,
        HEADS=num_heads,
        GROUP=group,
        GROUP_POW2=power_of_two(group),
        HALF=dim // 2,
        PAGE=pools[POSITIONS].shape[1],
        COLUMNS=view.table.shape[2],
        TABLE_HEADS=view.table.shape[1],
        LENGTHS_HEADS=view.lengths.shape[1],
    )
    return q, k, v, {**pools, **dict(zip(stored, results, strict=False))}
