"""The threshold kernels compiled (triton) and lowered (jax-triton, JAX's CUDA plugin) for GPUs on any machine."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest

from sparsejax import sampling, steps
from sparsejax.pallas_kernels import choice, triton_support
from sparsejax.pallas_kernels.logit_threshold import triton_gpu

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
lowers = pytest.mark.skipif(
    triton_support.import_problem() is not None or not any(map(importlib.util.find_spec, PLUGINS)),
    reason="needs jax-triton and JAX's CUDA plugin, though no GPU",
)
FLOATS = {"logits", "temperature", "top_p", "min_p", "peaks", "lows", "scale", "candidates", "threshold"}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("vocab", [32_000, 151_936])
@pytest.mark.parametrize("kernel", ["limits", "bins", "choose", "collect", "search"])
def test_compiles_and_spills_nothing(kernel, vocab, capability, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from sparsejax.pallas_kernels.logit_threshold import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(triton_kernels, f"{kernel}_kernel")
    config = triton_gpu.Config()
    constants = triton_gpu.constants(vocab, config)[kernel]
    pointers = {name: "*fp32" if name in FLOATS else "*i32" for name in function.arg_names if name not in constants}
    source = triton.compiler.ASTSource(
        function,
        {name: pointers.get(name, "constexpr") for name in function.arg_names},
        constants,
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in pointers},
    )
    others = {"choose": triton_gpu.CHOOSE_WARPS, "collect": config.collect_warps, "search": config.search_warps}
    warps = others.get(kernel, config.num_warps)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 1}
    )
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "STACK:0" in usage
    assert "LOCAL:0" in usage
    found = re.search(r"REG:(\d+)", usage)
    assert found is not None
    assert int(found[1]) * 32 * warps <= 65536  # a multiprocessor has no more


@lowers
@pytest.mark.parametrize("batch", [1, 64])
def test_lowers(batch):
    run = functools.partial(triton_gpu.launch, config=triton_gpu.Config(), compute_capability=90)
    shapes = [jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    logits = jax.ShapeDtypeStruct((batch, 151_936), jnp.float32)
    lowered = jax.jit(run).trace(logits, *shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@triton_kernel_call") == 5
    assert text.count("output_operand_alias<") == 2
    assert lowered.out_info.shape == (batch,)


@lowers
def test_the_sampling_program_never_branches_on_data(monkeypatch):
    """On a GPU the host waits for the predicate of a branch and for the condition of a loop."""
    launch = functools.partial(triton_gpu.launch, config=triton_gpu.Config(), compute_capability=90)
    monkeypatch.setattr(triton_gpu, "logit_threshold", launch)
    monkeypatch.setattr(triton_gpu, "unsupported", triton_gpu.unsupported_shape)
    monkeypatch.setattr(choice, "_chosen", {})
    ints, floats = steps.greedy_inputs(3)

    def run(logits, ints, floats):
        return sampling.sample(logits, sampling.SamplingInputs.unpack(ints, floats), tuple, sampling.SAMPLE)

    logits = jax.ShapeDtypeStruct((3, 5000), jnp.float32)
    text = jax.jit(run).trace(logits, ints, floats).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 5
    for operation in ("stablehlo.case", "stablehlo.if", "stablehlo.while"):
        assert operation not in text
