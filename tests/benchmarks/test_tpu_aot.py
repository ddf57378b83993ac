"""What the ahead-of-time check for TPUs says of its numbers, and that it covers every TPU kernel."""

from __future__ import annotations

import json

import pytest

from benchmarks import common, tpu_aot, tpu_kernels, tpu_programs
from sparsejax.pallas_kernels import api


def entry(**changes: int) -> dict[str, int]:
    return {"flops": 10, "bytes_accessed": 1000, "peak_memory_bytes": 500} | changes


@pytest.mark.parametrize(
    ("found", "recorded", "reason"),
    [
        ({"a": entry()}, {"a": entry()}, None),
        ({"a": entry(bytes_accessed=1050)}, {"a": entry()}, None),
        ({"a": entry(bytes_accessed=10, flops=99)}, {"a": entry()}, None),
        ({"a": entry(bytes_accessed=1051)}, {"a": entry()}, "a: bytes_accessed grew from 1,000 to 1,051"),
        ({"a": entry(peak_memory_bytes=530)}, {"a": entry()}, "a: peak_memory_bytes grew"),
        ({}, {"a": entry()}, "a is recorded but was not compiled"),
        ({"a": entry()}, {}, "a has no record"),
    ],
)
def test_growth_and_gaps_are_problems(found, recorded, reason):
    reasons = tpu_aot.problems(found, recorded)
    assert len(reasons) == (reason is not None)
    assert not reasons or reasons[0].startswith(reason)


def test_large_copies_are_counted():
    text = """
      %copy.1 = bf16[1024,1024]{0,1:T(8,128)(2,1)} copy(%parameter.1)
      %copy.2 = f32[2,1024,1024]{2,1,0} copy(%parameter.2), metadata={}
      ROOT %copy.3 = s32[8]{0} copy(%parameter.3)
      %fusion = bf16[1024,1024]{1,0} fusion(%copy.1)
      %copy-done = bf16[1024,1024]{1,0} copy-done(%copy-start)
    """
    assert tpu_aot.copied_bytes(text) == 2 * 2**20 + 4 * 2**21


def test_every_tpu_kernel_is_compiled():
    operations = {operation for operation, known in api.IMPLEMENTATIONS.items() if "mosaic_tpu" in known}
    assert operations == set(tpu_kernels.BUILDERS)


def test_the_record_holds_what_is_compiled():
    recorded = json.loads((common.RESULTS / "tpu_aot.json").read_text("utf-8"))["result"]
    names = [program.name for program in (*tpu_kernels.kernel_programs(None), *tpu_programs.step_programs(None))]
    assert sorted(recorded) == sorted(f"{chip}/{name}" for chip in tpu_aot.CHIPS for name in names)
