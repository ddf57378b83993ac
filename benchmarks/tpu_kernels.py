"""TPU kernels as shapes, for compilers: nothing here allocates or runs anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.tpu_programs import MODELS, Model, Program
from sparsejax.pallas_kernels.specs import AttentionShape

LAYERS = 2  # of the pools that kernels are compiled with
CHUNK = 512  # queries of a prefill kernel
WINDOW = 32  # queries of an observation window
KEPT = 1024  # rows that an eviction keeps

_rows = functools.partial(AttentionShape, dtype="bfloat16")
SHAPES = (
    _rows("llama-3-8b", (8192,) * 16, 8, 4, 128, 64),
    _rows("llama-3-8b-layer", (8192,) * 16, 8, 4, 128, 16, "layer"),
    _rows("llama-3-8b-head", (2048,) * 16, 8, 4, 128, 64, "head"),
    _rows("llama-3-8b-fp8", (8192,) * 16, 8, 4, 128, 128, scaled_codes=True),
    _rows("llama-3-8b-float32", (8192,) * 16, 8, 4, 128, 64, dtype="float32"),
    _rows("smollm2-135m", (8192,) * 16, 3, 3, 64, 16),
    _rows("smollm2-135m-page-64", (8192,) * 16, 3, 3, 64, 64),
    _rows("multi-query-dim-256", (8192,) * 16, 1, 16, 256, 32),
    _rows("no-groups", (8192,) * 16, 32, 1, 128, 128),
)
"""What each kernel is compiled for alone: lengths are the width of the tables."""
SOME = ("llama-3-8b", "llama-3-8b-head", "llama-3-8b-fp8", "smollm2-135m")
"""Names of those that stand for the others, where less depends on them."""


def kernel_programs(sharding: Any) -> Iterator[Program]:
    """Every TPU kernel in the shapes that it takes."""
    from sparsejax.pallas_kernels import api

    for operation, known in api.IMPLEMENTATIONS.items():
        if "mosaic_tpu" not in known:
            continue
        sizes = MODELS if operation in OF_MODELS else [shape for shape in SHAPES if _wanted(operation, shape)]
        for name, build in BUILDERS[operation].items():
            for size in sizes:
                yield Program(f"{name}/{size.name}", functools.partial(build, size, sharding))


def _wanted(operation: str, shape: AttentionShape) -> bool:
    """Whether a kernel takes a shape, and differs for it."""
    if operation == "page_scores":
        return shape.num_kv_heads % 8 == 0 and shape.granularity != "head"
    if operation == "page_bounds" and shape.head_dim % 128:
        return False
    return operation.endswith("attention") or shape.name in SOME


def paged(shape: AttentionShape, sharding: Any, batch: int) -> tuple[Any, ...]:
    """Pools, a view's arrays, its stride, the storage and its geometry."""
    import jax.numpy as jnp

    from sparsejax import registry
    from sparsejax.geometry import Geometry, Granularity

    grain, heads = Granularity(shape.granularity), shape.num_kv_heads
    scale, longest = shape.head_dim**-0.5, max(shape.lengths)
    sizes = (LAYERS, shape.num_q_heads, heads, shape.head_dim, shape.page_size, longest)
    geometry = Geometry(*sizes, scale, shape.dtype)
    storage = registry.resolve("fp8_kv" if shape.scaled_codes else "plain")[1]
    num_head_pages = (len(shape.lengths) * geometry.max_pages + 1) * geometry.head_pages_per_sequence_page
    pools = {
        name: array((num_head_pages, *spec.shape), spec.dtype, sharding)
        for name, spec in storage.payload(storage.params, geometry).items()
    }
    table_heads = geometry.table_shape(grain)[1]
    table = array((batch, table_heads, geometry.max_pages), jnp.int32, sharding)
    arrays = (table, array((heads,), jnp.int32, sharding), array((batch, 1), jnp.int32, sharding))
    return pools, arrays, geometry.head_pages_per_page(grain), storage, geometry


def array(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=sharding)


def attention(operation: str, shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Decode attention of a batch, or prefill attention of one chunk."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.layout import PageView

    decoding = operation == "decode_attention"
    batch = len(shape.lengths) if decoding else 1
    pools, arrays, stride, storage, geometry = paged(shape, sharding, batch)
    load_tile = functools.partial(storage.load_tile, storage.params, geometry)

    def compute(q: Any, pools: Any, table: Any, offset: Any, lengths: Any) -> Any:
        view = PageView(table, stride, offset, lengths)
        start = () if decoding else (lengths - CHUNK,)
        how = {"load_tile": load_tile, "layer": jnp.int32(0), "scale": shape.head_dim**-0.5}
        return getattr(api, operation)(q, pools, tuple(pools), view, *start, **how, implementation="mosaic_tpu")

    queries = () if decoding else (CHUNK,)
    q = array((batch, *queries, shape.num_q_heads, shape.head_dim), shape.dtype, sharding)
    return jax.jit(compute), (q, pools, *arrays), {}


def page_scores(shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Scores of all pages of a batch."""
    import jax

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.layout import PageView

    batch = len(shape.lengths)
    pools, arrays, stride, *_ = paged(shape, sharding, batch)

    def compute(q: Any, low: Any, high: Any, table: Any, offset: Any, lengths: Any) -> Any:
        view = PageView(table, stride, offset, lengths)
        return api.page_scores(q, low, high, view, page_size=shape.page_size, implementation="mosaic_tpu")

    bounds = array((pools["k"].shape[0], shape.head_dim), shape.dtype, sharding)
    q = array((batch, shape.num_q_heads, shape.head_dim), shape.dtype, sharding)
    return jax.jit(compute), (q, bounds, bounds, *arrays), {}


def row_scores(operation: str, shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the last queries of one sequence think of its rows: attention mass, or the sums that it needs."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.layout import PageView

    pools, arrays, stride, storage, geometry = paged(shape, sharding, 1)
    load_tile = functools.partial(storage.load_tile, storage.params, geometry)

    def compute(q: Any, pools: Any, table: Any, offset: Any, lengths: Any, limit: Any, lse: Any) -> Any:
        view = PageView(table, stride, offset, lengths)
        how = {"load_tile": load_tile, "layer": jnp.int32(0), "scale": shape.head_dim**-0.5}
        options = {"lse": lse} if operation == "row_scores" else {}
        names = tuple(pools)
        return getattr(api, operation)(q, pools, names, view, limit, **options, **how, implementation="mosaic_tpu")

    q = array((1, WINDOW, shape.num_q_heads, shape.head_dim), shape.dtype, sharding)
    limit = array((1, 1, WINDOW), jnp.int32, sharding)
    lse = array((1, WINDOW, shape.num_q_heads), jnp.float32, sharding)
    return jax.jit(compute, keep_unused=True), (q, pools, *arrays, limit, lse), {}


def append(chunk: int, shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """New rows of a batch, or of one chunk."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.heads import Heads
    from sparsejax.pallas_kernels.layout import POSITIONS, PageView

    batch = len(shape.lengths) if chunk == 1 else 1
    pools, arrays, stride, storage, geometry = paged(shape, sharding, batch)
    pools[POSITIONS] = array((pools["k"].shape[0], shape.page_size), jnp.int32, sharding)
    encode = functools.partial(storage.encode, storage.params, geometry)

    def compute(pools: Any, qkv: Any, cos: Any, sin: Any, table: Any, offset: Any, lengths: Any, new: Any) -> Any:
        view = PageView(table, stride, offset, lengths)
        positions = jnp.zeros((batch, chunk), jnp.int32)
        how = {"num_new": new, "positions": positions, "encode": encode, "layer": jnp.int32(0)}
        return api.append(Heads(qkv, cos, sin), pools, view, **how, implementation="mosaic_tpu")

    qkv = array((batch, chunk, shape.num_kv_heads, shape.group_size + 2, shape.head_dim), shape.dtype, sharding)
    angle = array((batch, chunk, 1, shape.head_dim // 2), jnp.float32, sharding)
    new = array((batch,), jnp.int32, sharding)
    return jax.jit(compute, donate_argnums=0), (pools, qkv, angle, angle, *arrays, new), {}


def move_rows(shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The rows that one sequence keeps, to pages of their own."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.layout import POSITIONS, PageView

    pools, (table, offset, lengths), stride, *_ = paged(shape, sharding, 1)
    pools[POSITIONS] = array((pools["k"].shape[0], shape.page_size), jnp.int32, sharding)

    def compute(pools: Any, rows: Any, old: Any, new: Any, offset: Any, lengths: Any) -> Any:
        source, target = (PageView(table, stride, offset, lengths) for table in (old, new))
        return api.move_rows(pools, rows, source, target, implementation="mosaic_tpu")

    rows = array((1, 1, KEPT), jnp.int32, sharding)
    return jax.jit(compute, donate_argnums=0), (pools, rows, table, table, offset, lengths), {}


def select_pages(shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The best eighth of the pages of every row of a batch."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api
    from sparsejax.pallas_kernels.layout import PageView

    batch = len(shape.lengths)
    _, arrays, stride, *_ = paged(shape, sharding, batch)
    columns = arrays[0].shape[2]
    sizes = {"num_scored": columns // 8, "width": columns // 8 + 1, "budget": 0, "page_size": shape.page_size}

    def compute(scores: Any, table: Any, offset: Any, lengths: Any) -> Any:
        view = PageView(table, stride, offset, lengths)
        chosen = api.select_pages(scores, view, **sizes, implementation="mosaic_tpu")
        return chosen.table, chosen.lengths

    scores = array((batch, shape.num_kv_heads, columns), jnp.float32, sharding)
    return jax.jit(compute), (scores, *arrays), {}


def page_bounds(chunk: int, shape: AttentionShape, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Bounds of the pages to which new rows of a batch were written, or of one chunk."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api

    batch, heads = len(shape.lengths) if chunk == 1 else 1, shape.num_kv_heads
    pools, (table, *_), *_ = paged(shape, sharding, batch)

    def compute(low: Any, high: Any, keys: Any, head_pages: Any, offsets: Any, num_valid: Any) -> Any:
        how = {"num_valid": num_valid, "page_size": shape.page_size, "implementation": "mosaic_tpu"}
        return api.page_bounds(low, high, keys, head_pages, offsets, **how)

    bounds = array((pools["k"].shape[0], shape.head_dim), shape.dtype, sharding)
    keys = array((batch, chunk, heads, shape.head_dim), shape.dtype, sharding)
    head_pages = array((batch, chunk, heads), jnp.int32, sharding)
    offsets = array((batch, chunk, table.shape[1]), jnp.int32, sharding)
    new = array((batch,), jnp.int32, sharding)
    return jax.jit(compute, donate_argnums=(0, 1)), (bounds, bounds, keys, head_pages, offsets, new), {}


def logit_threshold(model: Model, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Thresholds of a batch."""
    import jax
    import jax.numpy as jnp

    from sparsejax.pallas_kernels import api

    floats = array((model.rows,), jnp.float32, sharding)
    logits = array((model.rows, model.config["vocab_size"]), jnp.float32, sharding)
    compute = functools.partial(api.logit_threshold, implementation="mosaic_tpu")
    return jax.jit(compute), (logits, floats, array((model.rows,), jnp.int32, sharding), floats, floats), {}


def add_rms_norm(tokens: int, model: Model, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The residual stream of a decode step, or of a chunk."""
    import jax

    from sparsejax.pallas_kernels import api

    def compute(x: Any, delta: Any, weight: Any) -> Any:
        return api.add_rms_norm(x, delta, weight, 1e-5, implementation="mosaic_tpu")

    size = model.config["hidden_size"]
    stream = array((tokens, size), "bfloat16", sharding)
    return jax.jit(compute), (stream, stream, array((size,), "bfloat16", sharding)), {}


BUILDERS: dict[str, dict[str, Callable[..., Any]]] = {
    "append": {"append": functools.partial(append, 1), "append_chunk": functools.partial(append, CHUNK)},
    "decode_attention": {"decode_attention": functools.partial(attention, "decode_attention")},
    "observed_decode_attention": {},  # decode_attention and row_scores, no kernel of its own
    "prefill_attention": {"prefill_attention": functools.partial(attention, "prefill_attention")},
    "attention_lse": {"attention_lse": functools.partial(row_scores, "attention_lse")},
    "row_scores": {"row_scores": functools.partial(row_scores, "row_scores")},
    "move_rows": {"move_rows": move_rows},
    "page_scores": {"page_scores": page_scores},
    "page_bounds": {
        "page_bounds": functools.partial(page_bounds, 1),
        "page_bounds_chunk": functools.partial(page_bounds, CHUNK),
    },
    "select_pages": {"select_pages": select_pages},
    "logit_threshold": {"logit_threshold": logit_threshold},
    "add_rms_norm": {
        "add_rms_norm": functools.partial(add_rms_norm, 16),
        "add_rms_norm_chunk": functools.partial(add_rms_norm, CHUNK),
    },
}
"""Programs of each operation with a TPU kernel: of a shape of pages, or of a model."""
OF_MODELS = ("add_rms_norm", "logit_threshold")
"""Operations whose programs take a model."""
