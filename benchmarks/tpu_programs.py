"""Kernels and whole steps as shapes, for compilers: nothing here allocates or runs anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile: `build` gives a jitted function, its arguments as shapes, and its static arguments."""

    name: str
    build: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


# Models


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's shape, and the sizes it is compiled for. `layers` may be fewer than the model has."""

    name: str
    config: dict[str, Any]
    layers: int
    page_size: int
    max_model_len: int
    rows: int
    pages: int
    chunk: int


LLAMA_8B = Model(
    "llama-3-8b",
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    layers=4,
    page_size=64,
    max_model_len=8192,
    rows=16,
    pages=512,
    chunk=512,
)
SMOLLM2 = Model(
    "smollm2-135m",
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    layers=30,
    page_size=16,
    max_model_len=8192,
    rows=16,
    pages=2048,
    chunk=512,
)
KINDS = (
    ("prefill", "dense"),
    ("decode", "dense"),
    ("decode", "quest(quest_chunk_size={page_size})"),
    ("maintain", "snapkv"),
    ("sample", "dense"),
)


def abstract(specs: Any, sharding: Any, layout_of: Callable[[int], Any] = lambda num_axes: None) -> Any:
    """Shapes on a device, of a tree of `ArraySpec` or of anything with shape and dtype; layouts by number of axes."""
    import jax
    from jax.experimental.layout import Format

    from sparsejax.arrays import is_spec

    def leaf(x: Any) -> Any:
        layout = layout_of(len(x.shape))
        place = sharding if layout is None else Format(layout, sharding)
        return jax.ShapeDtypeStruct(x.shape, jax.numpy.dtype(x.dtype), sharding=place)

    return jax.tree.map(leaf, specs, is_leaf=is_spec)


def step_programs(sharding: Any) -> Iterator[Program]:
    """Prefill, decode, sampling and compaction of each model, as the runner compiles them."""
    wanted = [(LLAMA_8B, *kind) for kind in KINDS]
    # Selection and sampling differ little between models, and take long to compile.
    wanted += [(SMOLLM2, *kind) for kind in KINDS if kind[1] in ("dense", "snapkv") and kind[0] != "sample"]
    wanted.append((dataclasses.replace(LLAMA_8B, page_size=128, pages=256), "decode", "fp8_kv"))
    for model, kind, method in wanted:
        build = functools.partial(step, model, kind, method, sharding)
        facts = {"layers": model.layers, "layers_of_model": model.config["num_hidden_layers"]}
        yield Program(f"{model.name}/{kind}/{method.partition('(')[0]}", build, facts)


def step(model: Model, kind: str, members: str, sharding: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A whole step with its weights and state as shapes."""
    import jax
    import numpy as np

    from sparsejax import registry, steps
    from sparsejax.models.registry import get_architecture, spec_from_config
    from sparsejax.models.weight_layout import tpu_layout
    from sparsejax.sampling import greedy_inputs
    from sparsejax.state import StateSize, state_specs

    spec = dataclasses.replace(spec_from_config(model.config, "bfloat16"), num_layers=model.layers)
    geometry = spec.geometry(model.page_size, model.max_model_len)
    method, storage = registry.resolve(members.format(page_size=model.page_size))
    statics = steps.Statics(spec, geometry, method, storage)
    size = StateSize(model.rows, model.pages, spec.vocab_size)
    state = abstract(state_specs(geometry, size, (method,), storage), sharding)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

    if kind == "maintain":
        kept = method.keep_count(method.params, "prompt", model.max_model_len)
        new_pages = ints(*geometry.table_shape(method.granularity), geometry.pages(kept))
        inputs = steps.MaintainInputs(ints(), new_pages, ints())
        return steps.maintain_step, (statics, state, inputs), {"phase": "prompt", "kept": kept}
    if kind == "sample":
        logits = jax.ShapeDtypeStruct((model.rows, spec.vocab_size), np.float32, sharding=sharding)
        sampling = abstract(greedy_inputs(model.rows), sharding)
        return steps.sample_step, (state, logits, ints(model.rows, 2), *sampling), {"mode": None}
    weights = abstract(get_architecture(spec.architecture).weight_specs(spec), sharding, tpu_layout)
    if kind == "decode":
        return steps.decode_logits, (statics, weights, state, ints(model.rows, 2), ints(model.rows, 5)), {}
    prompt = ints(1, model.chunk), ints(1, 4), ints(geometry.pages(model.chunk), 5)
    return steps.prefill_logits, (statics, weights, state, *prompt), {}


# Kernels


def kernel_programs(sharding: Any) -> Iterator[Program]:
    """Every TPU kernel in the shapes of `SHAPES` that it takes."""
    from sparsejax.pallas_kernels import api

    for operation, known in api.IMPLEMENTATIONS.items():
        if "mosaic_tpu" not in known:
            continue
        for name, build in BUILDERS[operation].items():
            for shape in SHAPES:
                if _wanted(operation, shape):
                    yield Program(f"{name}/{shape.name}", functools.partial(build, shape, sharding))


def _wanted(operation: str, shape: AttentionShape) -> bool:
    """Whether a kernel takes a shape, and differs for it."""
    if operation == "page_scores":
        return shape.num_kv_heads % 8 == 0 and shape.granularity != "head"
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


BUILDERS: dict[str, dict[str, Callable[..., Any]]] = {
    "append": {"append": functools.partial(append, 1), "append_chunk": functools.partial(append, CHUNK)},
    "decode_attention": {"decode_attention": functools.partial(attention, "decode_attention")},
    "prefill_attention": {"prefill_attention": functools.partial(attention, "prefill_attention")},
    "attention_lse": {"attention_lse": functools.partial(row_scores, "attention_lse")},
    "row_scores": {"row_scores": functools.partial(row_scores, "row_scores")},
    "move_rows": {"move_rows": move_rows},
    "page_scores": {"page_scores": page_scores},
}
"""Programs of each operation with a TPU kernel."""
