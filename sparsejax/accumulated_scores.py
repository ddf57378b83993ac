"""Attention that stored rows have received, added up over the queries of a request (arXiv 2306.14048).

One float32 for each stored row and KV head, which moves with its row. Methods that rank rows by it share the array, so
a prompt may be compacted by one of them and its answer by another. Pure functions of arrays; nothing here knows
methods: their `params` have a property `scoring`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import eviction
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import Aux, AuxSpec, EvictContext, Method, ObserveContext, Written, choice_param, integer_param
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView, gather_rows

SCORES, SCORED = "accumulated_scores", "accumulated_rows"
MOST_QUERIES = 128
"""Widest window of the probability mode."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How attention is added up.

    Attributes:
      probability: a row gets its share of each query's attention; else its share of a softmax over the rows' largest
        logits, times the number of queries.
      window: the last queries of a prompt chunk that score; 0 is all of them.
      scaled: logits are scaled as in attention, else not at all; attention mass always is.
      summed: query heads of a prompt chunk are joined by a sum, else by the largest.
      shared: one score for all KV heads.
      decoding: decoded tokens score too (attention mass, query heads summed).
    """

    probability: bool
    window: int
    scaled: bool
    summed: bool
    shared: bool
    decoding: bool = False

    @property
    def additive(self) -> bool:
        """Whether scores are the same however a prompt is cut into chunks, as long as it loses no rows."""
        return self.probability and self.summed and self.window == 0


def check_params(params: Any, prefix: str, decoding: bool = False) -> None:
    """Checks the knobs that members of a family have in common.

    Args:
      params: has `{prefix}_prefill_budget`, `{prefix}_decode_budget`, `{prefix}_recent_ratio`,
        `{prefix}_prefill_score_window`, `{prefix}_logit_scale`, `{prefix}_head_reduction`,
        `sparse_prefill_score_mode` and `head_mode`.
      prefix: first word of the family's knobs.
      decoding: decoded tokens score too.

    Raises:
      MethodError: naming the knob.
    """

    def value(name: str) -> Any:
        return getattr(params, f"{prefix}_{name}")

    for name in ("prefill_budget", "decode_budget"):
        integer_param(f"{prefix}_{name}", value(name), 1)
    if value("prefill_budget") < value("decode_budget"):
        raise MethodError(
            f"{prefix}_prefill_budget={value('prefill_budget')} must be at least "
            f"{prefix}_decode_budget={value('decode_budget')}"
        )
    ratio = value("recent_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1:
        raise MethodError(f"{prefix}_recent_ratio must be a number between 0 and 1, got {ratio!r}")
    integer_param(f"{prefix}_prefill_score_window", value("prefill_score_window"), 0)
    choice_param(f"{prefix}_logit_scale", value("logit_scale"), ("attn", "none", None))  # flags read "none" as None
    choice_param(f"{prefix}_head_reduction", value("head_reduction"), ("reference", "sum"))
    choice_param("sparse_prefill_score_mode", params.sparse_prefill_score_mode, (None, "logits", "probability"))
    choice_param("head_mode", params.head_mode, ("shared", "per_kv_head"))
    if scoring_of(params, prefix, decoding).probability and value("prefill_score_window") > MOST_QUERIES:
        raise MethodError(
            f"{prefix}_prefill_score_window must be at most {MOST_QUERIES} where attention mass is added up "
            f"(0 is the whole chunk), got {value('prefill_score_window')}"
        )


def scoring_of(params: Any, prefix: str, decoding: bool = False) -> Scoring:
    """What the knobs of `check_params` ask for. Decoded tokens add attention mass, so then prompts do as well."""
    return Scoring(
        probability=decoding or params.sparse_prefill_score_mode == "probability",
        window=getattr(params, f"{prefix}_prefill_score_window"),
        scaled=getattr(params, f"{prefix}_logit_scale") == "attn",
        summed=getattr(params, f"{prefix}_head_reduction") == "sum",
        shared=params.head_mode == "shared",
        decoding=decoding,
    )


def accumulates(method: Method) -> bool:
    """Whether a method adds up attention as the hooks below do."""
    return method.observe is observe


def differing_knobs(params: Any, others: Any, prefix: str) -> list[str]:
    """Knobs of `scoring_of` that two members of a family have set differently."""
    names = [f"{prefix}_{name}" for name in ("prefill_score_window", "logit_scale", "head_reduction")]
    names += ["sparse_prefill_score_mode", "head_mode"]
    return [name for name in names if getattr(params, name) != getattr(others, name)]


def recent_rows(budget: int, ratio: float) -> int:
    """How many of `budget` rows are the most recent ones rather than the best."""
    return min(max(1, int(budget * ratio)), budget)


# Hooks


def aux(params: Any, geometry: Geometry) -> dict[str, AuxSpec]:
    """The array of scores, and how many rows of a layer and request have one. The others count as 0."""
    return {SCORES: AuxSpec("token", (), "float32"), SCORED: AuxSpec("row", (), "int32", counts_rows=True)}


def on_write(params: Any, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    """New rows begin at 0. While decoded tokens don't score, their rows wait for that until the next prompt."""
    if written.phase == "pack":
        at = written.layer, written.rows
        packed = written.head_pages[:, 0, 0] != 0  # a layer with nothing due is packed onto the null page
        scored = row_aux[SCORED].at[at].set(jnp.where(packed, written.num_valid, row_aux[SCORED][at]))
        return page_aux, {**row_aux, SCORED: scored}
    if written.phase == "token":  # a decoded token's own row begins with its attention
        return page_aux, row_aux
    scores = page_aux[SCORES].at[written.head_pages, written.offsets].set(0.0)
    return {**page_aux, SCORES: scores}, row_aux


def observe(params: Any, context: ObserveContext) -> tuple[Aux, Aux]:
    """Adds what the new queries think of the rows that they see."""
    scoring: Scoring = params.scoring
    scores, row_aux = context.page_aux[SCORES], context.row_aux
    if context.phase == "chunk":
        at = context.layer, context.rows
        if not scoring.decoding:
            scores = clear_rows(scores, context.view, row_aux[SCORED][at], context.start)
        scores = add_to_rows(scores, context.view, chunk_scores(scoring, context))
        row_aux = {**row_aux, SCORED: row_aux[SCORED].at[at].set(context.view.lengths.max(1))}
    elif context.phase == "token" and scoring.decoding:
        _, page_aux = attend_token(params, context)  # attention goes elsewhere
        return page_aux, row_aux
    return {**context.page_aux, SCORES: scores}, row_aux


def attend_token(params: Any, context: ObserveContext) -> tuple[jax.Array, Aux]:
    """Attention of decoded tokens [batch, q_heads, head_dim], added to the rows that receive it."""
    out, scores = api.observed_decode_attention(
        context.queries[:, 0],
        context.page_aux[SCORES],
        *_rows(context),
        shared=params.scoring.shared,
        scale=context.geometry.scale,
        **_how(context),
    )
    return out, {**context.page_aux, SCORES: scores}


def keep_rows(context: EvictContext, shared: bool, ratio: float) -> jax.Array:
    """The most recent rows and, of the others, those with the highest scores: int32 [1 or kv_heads, kept]."""
    scores = rows_scores(context.page_aux[SCORES], context.view)[0]
    return eviction.choose_rows(
        scores[:1] if shared else scores,
        context.length,
        context.kept,
        recent=recent_rows(context.kept, ratio),
        implementation=context.implementation,
    )


# Arrays


def chunk_scores(scoring: Scoring, context: ObserveContext) -> jax.Array:
    """What the scored queries of a prompt chunk add to each row: float32 [batch, kv_heads, capacity]."""
    count = context.queries.shape[1]
    size = min(scoring.window, count) or count
    step = jnp.arange(size, dtype=jnp.int32)[None]
    index = step if size == count else jnp.maximum(context.num_valid[:, None] - size, 0) + step
    queries = context.queries
    if size < count:
        queries = jnp.take_along_axis(queries, index[:, :, None, None], axis=1)
    scored = index < context.num_valid[:, None]
    # Rows end with the chunk, so a query sees all rows before the chunk and those of it up to its own.
    limit = jnp.where(scored[:, None], context.start[:, :, None] + index[:, None] + 1, 0)
    if scoring.probability:
        return _attention_mass(scoring, context, queries, limit, "sum" if scoring.summed else "max")
    scale = context.geometry.scale if scoring.scaled else 1.0
    largest = api.row_scores(queries, *_rows(context), limit, scale=scale, **_how(context))
    largest = _joined(scoring, largest, "max")
    peak = largest.max(-1, keepdims=True)
    mass = jnp.exp(largest - jnp.where(jnp.isfinite(peak), peak, 0.0))  # 0 where nobody looked
    num_scored = scored.sum(1).astype(jnp.float32)[:, None, None]
    return num_scored * mass / jnp.maximum(mass.sum(-1, keepdims=True), 1e-30)


def rows_scores(scores: jax.Array, view: PageView) -> jax.Array:
    """float32 [batch, kv_heads, capacity] of the rows of a view; anything past their end."""
    return gather_rows(scores, view.head_pages(0, view.table.shape[2]))


def add_to_rows(scores: jax.Array, view: PageView, gained: jax.Array) -> jax.Array:
    """Adds `gained` [batch, kv_heads, capacity] to the rows of a view."""
    head_pages = view.held_pages(scores.shape[1])
    return scores.at[head_pages].add(gained.reshape(*head_pages.shape, -1))


def clear_rows(scores: jax.Array, view: PageView, first: jax.Array, end: jax.Array) -> jax.Array:
    """Sets rows of a view to 0: those from `first` int32 [batch] to before `end` int32 [batch, heads or 1]."""
    head_pages = view.held_pages(scores.shape[1])
    found = rows_scores(scores, view)
    row = jnp.arange(found.shape[2], dtype=jnp.int32)[None, None]
    cleared = jnp.where((row >= first[:, None, None]) & (row < end[:, :, None]), 0.0, found)
    return scores.at[head_pages].set(cleared.reshape(*head_pages.shape, -1))


def _attention_mass(
    scoring: Scoring, context: ObserveContext, queries: jax.Array, limit: jax.Array, join: str
) -> jax.Array:
    how = {"scale": context.geometry.scale, **_how(context)}
    lse = api.attention_lse(queries, *_rows(context), limit, **how)
    return _joined(scoring, api.row_scores(queries, *_rows(context), limit, lse=lse, group=join, **how), join)


def _joined(scoring: Scoring, scores: jax.Array, join: str) -> jax.Array:
    """The scores of all KV heads as one, if they are shared."""
    if not scoring.shared:
        return scores
    one = scores.max(1, keepdims=True) if join == "max" else scores.sum(1, keepdims=True)
    return jnp.broadcast_to(one, scores.shape)


def _rows(context: ObserveContext) -> tuple[Any, Any, Any]:
    return context.pools, context.names, context.view


def _how(context: ObserveContext) -> dict[str, Any]:
    return {"load_tile": context.load_tile, "layer": context.layer, "implementation": context.implementation}
