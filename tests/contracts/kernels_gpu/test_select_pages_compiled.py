"""The selection kernel compiled (triton) and lowered (jax-triton, JAX's CUDA plugin) for GPUs on any machine."""

from __future__ import annotations

import subprocess

import jax
import jax.numpy as jnp
import pytest

from sparsejax.pallas_kernels import triton_support
from sparsejax.pallas_kernels.layout import PageView
from sparsejax.pallas_kernels.select_pages import triton_gpu

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("columns", "num_scored", "page", "own"),
    [
        (440, 291, 16, False),
        (2048, 31, 64, False),
        (2048, 31, 64, True),
        (8192, 127, 16, False),
        (131072, 2047, 1, False),
    ],
)
def test_compiles_and_holds_its_scores_in_registers(columns, num_scored, page, own, capability, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget

    from sparsejax.pallas_kernels.select_pages import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    scores = jax.ShapeDtypeStruct((16, 8, columns), jnp.float32)
    table = jax.ShapeDtypeStruct((16, 8 if own else 1, columns), jnp.int32)
    lengths = jax.ShapeDtypeStruct((16, 8 if own else 1), jnp.int32)
    view = PageView(table, 8, jax.ShapeDtypeStruct((8,), jnp.int32), lengths)  # type: ignore[arg-type]
    config = triton_gpu.default_config(columns)
    sizes = num_scored, num_scored + 1, (num_scored + 1) * page, page
    constants = triton_gpu.constants(scores, view, *sizes, config)  # type: ignore[arg-type]
    pointers = dict.fromkeys(("table", "lengths", "offset", "head_pages", "selected_lengths"), "*i32")
    signature = {"scores": "*fp32", "stride": "i32"} | pointers | dict.fromkeys(constants, "constexpr")
    names = triton_kernels.select_kernel.arg_names
    source = triton.compiler.ASTSource(
        triton_kernels.select_kernel,
        {name: signature[name] for name in names},
        constants,
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    options = {"num_warps": config.num_warps, "num_stages": 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "STACK:0" in usage
    assert "LOCAL:0" in usage


@pytest.mark.skipif(triton_support.import_problem() is not None, reason="needs jax-triton and JAX's CUDA plugin")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_lowers(own, shared):
    def run(scores, table, lengths, offset):
        view = PageView(table, 8, offset, lengths)
        config = triton_gpu.default_config(scores.shape[2])
        chosen = triton_gpu.launch(scores, view, 31, 40, 2560, 64, shared, config, compute_capability=90)
        return chosen.table, chosen.lengths

    heads = 8 if own else 1
    shapes = [(16, heads, 2048), (16, heads), (8,)]
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    lowered = jax.jit(run).trace(jax.ShapeDtypeStruct((16, 8, 2048), jnp.float32), *integers)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@triton_kernel_call") == 1
    assert [result.shape for result in lowered.out_info] == [(16, 8, 40), (16, 8)]
