"""Decode attention by other libraries on the same GPU, each in a captured graph, so that the host costs nothing."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

MOST_BYTES = 20e9
"""Of keys and values that a peer may hold; at least two layers, so that no cache helps."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is attended to: `rows` of each sequence in bfloat16, in pages of `page` rows where a peer has pages."""

    batch: int
    rows: int
    heads: int
    group: int
    dim: int
    page: int

    @property
    def nbytes(self) -> int:
        return 4 * self.batch * self.rows * self.heads * self.dim


def sides(rows: Rows, layers: int) -> dict[str, Callable[[], float]]:
    """What measures seconds per call once, for every peer that is importable; one reads its own memory."""
    layers = max(2, min(layers, int(MOST_BYTES // rows.nbytes)))
    found: dict[str, Callable[[], float]] = {}
    if not importlib.util.find_spec("torch"):
        return found
    import torch

    if not torch.cuda.is_available():
        return found
    makers: dict[str, Callable[[], Callable[[], float]]] = {}
    if importlib.util.find_spec("flashinfer"):
        cache = functools.cache(lambda: _pages(rows, layers))  # both kinds of kernel read the same pages
        makers["flashinfer"] = lambda: flashinfer(rows, cache(), tensor_cores=True)
        makers["flashinfer_cuda_cores"] = lambda: flashinfer(rows, cache(), tensor_cores=False)
    makers["torch_sdpa"] = lambda: torch_sdpa(rows, layers)
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # such as a compiler that is not there: ours are measured all the same
            print(f"peer {name} left out: {type(error).__name__}: {str(error).strip()[:300]}", flush=True)
    return found


def _pages(rows: Rows, layers: int) -> list[Any]:
    """[pages, 2, page, heads, dim] of each layer."""
    import torch

    size = (rows.batch * (rows.rows // rows.page), 2, rows.page, rows.heads, rows.dim)
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]


def flashinfer(rows: Rows, cache: list[Any], tensor_cores: bool) -> Callable[[], float]:
    """Its paged decode wrapper, planned once, on scattered full pages."""
    import flashinfer
    import torch

    columns = rows.rows // rows.page
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        torch.arange(0, rows.batch * columns + 1, columns, dtype=torch.int32, device="cuda"),
        torch.randperm(rows.batch * columns, device="cuda").to(torch.int32),
        torch.full((rows.batch,), rows.page, dtype=torch.int32, device="cuda"),
        rows.heads * rows.group,
        rows.heads,
        rows.dim,
        rows.page,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = torch.randn((rows.batch, rows.heads * rows.group, rows.dim), device="cuda", dtype=torch.bfloat16)

    def run():
        out = q
        for pages in cache:
            out = wrapper.run(out, pages)
        return out

    return _graph(run, len(cache))


def torch_sdpa(rows: Rows, layers: int) -> Callable[[], float]:
    """On contiguous rows; the query heads of a group become queries of one head, which the flash kernels split best."""
    import torch

    size = (rows.batch, rows.heads, rows.rows, rows.dim)
    keys, values = ([torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(layers)] for _ in range(2))
    q = torch.randn((rows.batch, rows.heads, rows.group, rows.dim), device="cuda", dtype=torch.bfloat16)

    def run():
        out = q
        for k, v in zip(keys, values, strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(out, k, v)
        return out

    return _graph(run, layers)


def _graph(run: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Replays a captured graph of `run`, timed by events: seconds per call."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    kept = run, out  # the graph reads what they hold, and torch would give that memory away

    def measure() -> float:
        assert kept
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / (3 * calls)

    return measure
