"""Whole steps of models as shapes, for compilers: nothing here allocates or runs anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile: `build` gives a jitted function, its arguments as shapes, and its static arguments."""

    name: str
    build: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


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
MODELS = (LLAMA_8B, SMOLLM2)
PACK_ROWS = 1024
KINDS = (
    ("prefill", "dense"),
    ("decode", "dense"),
    ("decode", "quest(quest_chunk_size={page_size})"),
    ("maintain", "snapkv"),
    ("score", "dense"),
    ("pack", "dense"),
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
    """Prefill, decode, sampling, compaction and pruning of each model, as the runner compiles them."""
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

    from sparsejax import prune_steps, registry, steps
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
        shape = geometry.table_shape(method.granularity)
        kept = int(method.kept_after("prompt", np.full(shape, model.max_model_len, np.int32)).max())
        inputs = steps.MaintainInputs(ints(), ints(*shape), ints(*shape, geometry.pages(kept)), ints())
        return steps.maintain_step, (statics, state, inputs), {"phase": "prompt", "kept": kept}
    if kind == "sample":
        logits = jax.ShapeDtypeStruct((model.rows, spec.vocab_size), np.float32, sharding=sharding)
        sampling = abstract(greedy_inputs(model.rows), sharding)
        return steps.sample_step, (state, logits, ints(model.rows, 2), *sampling), {"mode": None}
    table = ints(*geometry.table_shape(method.granularity), geometry.max_pages)
    if kind == "pack":
        rows = PACK_ROWS, *table.shape[:2], PACK_ROWS // model.page_size
        return prune_steps.pack_rows, (statics, state, table, ints(rows[0]), ints(*rows[1:])), {}
    weights = abstract(get_architecture(spec.architecture).weight_specs(spec), sharding, tpu_layout)
    if kind == "decode":
        return steps.decode_logits, (statics, weights, state, ints(model.rows, 2), ints(model.rows, 5)), {}
    if kind == "score":
        capacity = geometry.max_pages * model.page_size
        scores = jax.ShapeDtypeStruct((capacity,), np.float32, sharding=sharding)
        given = scores, ints(1, model.chunk), table, ints(3)
        return prune_steps.score_rows, (prune_steps.score_statics(statics), weights, state, *given), {}
    prompt = ints(1, model.chunk), ints(1, 4), ints(geometry.pages(model.chunk), 5)
    return steps.prefill_logits, (statics, weights, state, *prompt), {}
