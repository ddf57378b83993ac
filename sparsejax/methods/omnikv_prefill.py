"""OmniKV for prompts: a few layers read the whole history and choose which of its rows the layers after them read.

For each chunk, an anchor layer scores the rows of the history by its mean query. Until the next anchor, layers read
the first S rows, the K best, the R before the chunk, and the chunk itself. All rows are stored in all layers; what
decoded tokens read is up to the rest of the composition.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import Method, PrefillContext, integer_param, knob
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView, explicit_view

DENSE, ANCHOR, FOLLOWER = "dense", "anchor", "follower"
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Params:
    omnikv_prefill_full_attention_layers: tuple[int, ...] | str = knob(
        AUTO, "layers that read the whole history, the first one included; 'auto' needs a profile of the model"
    )
    omnikv_prefill_keep_tokens: int = knob(4096, "history rows that other layers read by score", "tokens")
    omnikv_prefill_sink_keep_tokens: int = knob(8, "first tokens that all layers read", "tokens")
    omnikv_prefill_recent_keep_tokens: int = knob(128, "tokens before a chunk that all layers read", "tokens")

    def __post_init__(self) -> None:
        for name in ("keep", "sink_keep", "recent_keep"):
            integer_param(f"omnikv_prefill_{name}_tokens", getattr(self, f"omnikv_prefill_{name}_tokens"), 0)
        object.__setattr__(
            self, "omnikv_prefill_full_attention_layers", _layers(self.omnikv_prefill_full_attention_layers)
        )

    @property
    def anchors(self) -> tuple[int, ...]:
        """Layers that read everything; () if that is still to be found out."""
        layers = self.omnikv_prefill_full_attention_layers
        return layers if isinstance(layers, tuple) else ()

    def width(self, chunk: int) -> int:
        """The most rows that a follower reads."""
        kept = self.omnikv_prefill_sink_keep_tokens + self.omnikv_prefill_keep_tokens
        return kept + self.omnikv_prefill_recent_keep_tokens + chunk


def _layers(value: Any) -> tuple[int, ...] | str:
    """Layer indices of a list, or of text with commas, semicolons or spaces between them, ascending."""
    name = "omnikv_prefill_full_attention_layers"
    if value == AUTO:
        return AUTO
    if isinstance(value, str):
        parts = re.split(r"[,;\s]+", value.strip())
        if not all(part.isdecimal() for part in parts):
            raise MethodError(f"{name} must be 'auto' or layer indices, got {value!r}")
        value = [int(part) for part in parts]
    layers = tuple(value) if isinstance(value, list | tuple) else (value,)
    for layer in layers:
        integer_param(name, layer, 0)
    if len(set(layers)) < len(layers):
        raise MethodError(f"{name} names a layer twice: {layers}")
    if 0 not in layers:
        raise MethodError(f"{name} must include layer 0, which has none before it to follow; got {layers}")
    return tuple(sorted(layers))


def role(params: Params, layer: int) -> str:
    anchors = params.anchors
    if not anchors or (layer in anchors and layer + 1 in anchors):
        return DENSE  # nobody follows it
    return ANCHOR if layer in anchors else FOLLOWER


def check(params: Params, geometry: Geometry) -> list[str]:
    name, anchors = "omnikv_prefill_full_attention_layers", params.anchors
    if not anchors:
        return [f"{name}=auto needs a profile of the model, and there is none: list the layers, 0 among them"]
    if anchors[-1] >= geometry.num_layers:
        return [f"{name}: layer {anchors[-1]} is not one of the model's {geometry.num_layers} layers"]
    return []


def refuses(params: Params, others: tuple[Method, ...]) -> list[str]:
    reason = "reads in some layers the rows that another layer chose, so all must hold the same rows"
    return [f"omnikv_prefill {reason}, and {other.name} evicts" for other in others if other.evicts]


def choose(params: Params, context: PrefillContext) -> tuple[jax.Array, jax.Array]:
    """The rows that followers of this layer read: int32 [batch, width], ascending, and how many of them [batch]."""
    sink, keep = params.omnikv_prefill_sink_keep_tokens, params.omnikv_prefill_keep_tokens
    length, num_new = context.view.lengths[:, 0], context.num_new
    tail = jnp.maximum(length - num_new - params.omnikv_prefill_recent_keep_tokens, sink)
    first, num_chosen = jnp.minimum(sink, length), jnp.minimum(tail - sink, keep)
    place = jnp.arange(params.width(context.queries.shape[1]), dtype=jnp.int32)[None]
    rows = tail[:, None] + place - (first + num_chosen)[:, None]
    if keep:
        best = best_rows(params, context, tail)
        chosen = jnp.take_along_axis(best, jnp.clip(place - first[:, None], 0, keep - 1), axis=1)
        rows = jnp.where(place < (first + num_chosen)[:, None], chosen, rows)
    rows = jnp.where(place < first[:, None], place, rows)
    return jnp.clip(rows, 0, length[:, None] - 1), first + num_chosen + jnp.maximum(length - tail, 0)


def best_rows(params: Params, context: PrefillContext, tail: jax.Array) -> jax.Array:
    """int32 [batch, keep], ascending: the best rows between the first ones and `tail` [batch]; all, if they are fewer.

    All queries of a chunk see all of these rows, so the mean of their logits is the logit of the mean query.
    """
    sink, keep = params.omnikv_prefill_sink_keep_tokens, params.omnikv_prefill_keep_tokens
    queries = context.queries
    counts = jnp.arange(queries.shape[1], dtype=jnp.int32)[None] < context.num_new[:, None]
    total = jnp.where(counts[:, :, None, None], queries.astype(jnp.float32), 0.0).sum(1, keepdims=True)
    mean = total / jnp.maximum(context.num_new, 1).astype(jnp.float32)[:, None, None, None]
    scores = api.row_scores(
        mean.astype(queries.dtype),
        context.pools,
        context.names,
        context.view,
        jnp.minimum(tail, context.view.lengths[:, 0])[:, None, None],
        load_tile=context.load_tile,
        layer=context.layer,
        scale=1.0,
        implementation=context.implementation,
    )
    scores = scores.max(1, keepdims=True)[:, :, sink:]
    # Rows as pages of one row, behind them one more that is chosen anyway: the last page always is.
    table = jnp.broadcast_to(jnp.arange(scores.shape[2], dtype=jnp.int32), scores.shape)
    candidates = explicit_view(table, (tail - sink)[:, None] + 1)
    chosen = api.select_pages(
        scores,
        candidates,
        num_scored=keep,
        width=keep + 1,
        budget=0,
        page_size=1,
        implementation=context.implementation,
    )
    return chosen.table[:, 0, :keep] + sink


def gather(context: PrefillContext, rows: jax.Array, num_rows: jax.Array) -> tuple[dict[str, jax.Array], PageView]:
    """A pool of just these rows as they are stored, and their pages; rows [batch, width], num_rows [batch]."""
    page_size, heads = context.geometry.page_size, context.view.num_heads
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % page_size)))
    batch, width = rows.shape
    num_pages = width // page_size
    pages = context.view.pages_at(rows[:, None] // page_size)  # [batch, heads, width]
    pages = pages.reshape(batch, heads, num_pages, page_size).swapaxes(1, 2)
    offsets = (rows % page_size).reshape(batch, num_pages, 1, page_size)
    pools = {}
    for name in context.names:
        found = context.pools[name].at[pages, offsets].get(mode="promise_in_bounds")
        pools[name] = found.reshape(batch * num_pages * heads, *found.shape[3:])
    table = jnp.arange(batch * num_pages, dtype=jnp.int32).reshape(batch, 1, num_pages)
    return pools, PageView(table, heads, jnp.arange(heads, dtype=jnp.int32), num_rows[:, None])


def attend_prefill(params: Params, context: PrefillContext) -> tuple[jax.Array, Any]:
    geometry, carry = context.geometry, context.carry
    how: dict[str, Any] = {"load_tile": context.load_tile, "layer": context.layer, "scale": geometry.scale}
    how["implementation"] = context.implementation
    pools, view, start = context.pools, context.view, context.start
    if context.role == FOLLOWER and carry is not None:
        rows, num_rows = carry
        num_queries = view.lengths - start  # the rows end with those of the queries
        pools, view = gather(context, rows, num_rows)
        start = jnp.maximum(view.lengths - num_queries, 0)
    elif context.role == ANCHOR:
        capacity = view.table.shape[2] * geometry.page_size
        carry = choose(params, context) if params.width(context.queries.shape[1]) < capacity else None
    out, _ = api.prefill_attention(context.queries, pools, context.names, view, start, **how)
    return out, carry


def build(params: Params) -> Method:
    return Method(
        "omnikv_prefill",
        "prefill",
        params,
        summary="a few layers choose which rows of the history the others read, once per prompt chunk",
        paper="OmniKV (ICLR 2025), extended to prompts",
        role=role,
        attend_prefill=attend_prefill,
        attends_end=True,
        check=check,
        refuses=refuses,
        chunk_dependent=True,
    )


PARAMS = Params
SAMPLES = (Params((0, 2, 8, 18), 512),)
NOTES = {
    "Keeps": """
        Everything. While a prompt is read, layers other than `omnikv_prefill_full_attention_layers` read the first S =
        `omnikv_prefill_sink_keep_tokens` rows, the K = `omnikv_prefill_keep_tokens` of the history whose logits with
        the chunk's mean query are best in the layer of the list before them, the last R =
        `omnikv_prefill_recent_keep_tokens` before the chunk, and the chunk.
    """,
    "Acts": """
        In every chunk of a prompt whose history is longer than S + K + R rows. The choice is made once per chunk, so
        results depend on how a prompt is cut. Decoded tokens read everything, or what a composed selection says.
    """,
    "Costs": """
        All rows. A layer that is not in the list attends to S + K + R + chunk rows instead of all, which are first
        gathered into a pool of their own; a layer in it scores the history with one query more.
    """,
    "Use it": """
        For long prompts in chunks that are short against them, on models whose layers agree on what matters. Which
        layers to list has to be found out for each model.
    """,
}
