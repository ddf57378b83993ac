"""KVzip (arXiv 2505.23416): prompt rows stay that the model attends to while it repeats the prompt.

After the prompt, pieces of it are run once more behind it, each after a short instruction. What the queries of these
replays attend to among the prompt's rows is their score, whatever will be asked later. The rows of a replay are
dropped again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import eviction
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import (
    Aux,
    AuxSpec,
    EvictContext,
    Method,
    ObserveContext,
    Phase,
    Written,
    choice_param,
    integer_param,
    knob,
    number_param,
)
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import gather_rows
from sparsejax.replay_texts import INSTRUCTION, replay_spans, replay_text

SCORES = "kvzip_scores"


@dataclasses.dataclass(frozen=True)
class Params:
    kvzip_token_budget: int = knob(4096, "prompt rows that stay", "tokens")
    kvzip_score_chunk_size: int = knob(2048, "prompt tokens that one replay repeats", "tokens")
    kvzip_prev_postfix_size: int = knob(64, "tokens before them with which a replay begins", "tokens")
    kvzip_instruction: str = knob(INSTRUCTION, "text before each replay")
    kvzip_variant: str = knob(
        "global_token",
        "one keep set for all layers and heads ('global_token'), one for each KV head ('per_head_uniform'), or the "
        "best rows of all heads of a layer, which then keep different numbers ('pair')",
    )
    kvzip_query_reduction: str = knob("mean", "'global_token' takes the 'mean' or the 'max' over a replay's queries")
    head_budget_floor: float = knob(0.2, "'pair': share of the mean that every head keeps, in (0, 1]")
    head_budget_ceiling: float = knob(3.0, "'pair': most that a head keeps, as a multiple of the mean")
    kvzip_protect_sink: int = knob(0, "first tokens that always stay, within the budget", "tokens")
    kvzip_protect_recent: int = knob(0, "last prompt tokens that always stay, within the budget", "tokens")

    instruction_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("kvzip_token_budget", "kvzip_score_chunk_size"):
            integer_param(name, getattr(self, name), 1)
        for name in ("kvzip_prev_postfix_size", "kvzip_protect_sink", "kvzip_protect_recent"):
            integer_param(name, getattr(self, name), 0)
        if not isinstance(self.kvzip_instruction, str) or not self.kvzip_instruction:
            raise MethodError(f"kvzip_instruction must be a text, got {self.kvzip_instruction!r}")
        choice_param("kvzip_variant", self.kvzip_variant, ("global_token", "per_head_uniform", "pair"))
        number_param("head_budget_floor", self.head_budget_floor, 0, 1)
        number_param("head_budget_ceiling", self.head_budget_ceiling, 1, 1e6)
        choice_param("kvzip_query_reduction", self.kvzip_query_reduction, ("mean", "max"))
        if self.kvzip_query_reduction != "mean" and self.kvzip_variant != "global_token":
            raise MethodError(f"kvzip_query_reduction belongs to 'global_token': {self.kvzip_variant!r} takes the max")
        protected = self.kvzip_protect_sink + self.kvzip_protect_recent
        if protected > self.kvzip_token_budget:
            raise MethodError(
                f"kvzip_protect_sink + kvzip_protect_recent = {protected} exceed "
                f"kvzip_token_budget={self.kvzip_token_budget}"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most rows that a head keeps where heads differ."""
        least = max(1, int(self.head_budget_floor * self.kvzip_token_budget))
        return least, int(self.head_budget_ceiling * self.kvzip_token_budget)


@dataclasses.dataclass(frozen=True)
class Bound(Params):
    """Parameters with the instruction as token ids."""

    instruction_ids: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]


def bind(params: Params, encode: Callable[[str], list[int]]) -> Params:
    ids = tuple(encode(params.kvzip_instruction))
    if not ids:
        raise MethodError(f"kvzip_instruction={params.kvzip_instruction!r} has no tokens")
    knobs = {field.name: getattr(params, field.name) for field in dataclasses.fields(Params)}
    return Bound(**knobs, instruction_ids=ids)


def _spans(params: Params, prompt_tokens: int) -> list[tuple[int, int]]:
    """The prompt tokens [start, stop) of each replay."""
    if prompt_tokens <= params.kvzip_token_budget:
        return []
    return replay_spans([(0, prompt_tokens)], params.kvzip_score_chunk_size, params.kvzip_prev_postfix_size)


def replays(params: Params, prompt_tokens: int) -> tuple[int, ...]:
    return tuple(len(params.instruction_ids) + stop - start for start, stop in _spans(params, prompt_tokens))


def replay_tokens(params: Params, prompt: np.ndarray, index: int) -> np.ndarray:
    return replay_text(prompt, _spans(params, len(prompt))[index], params.instruction_ids)


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    return {SCORES: AuxSpec("token", (), "float32")}


def on_write(params: Params, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    if written.phase != "chunk":
        return page_aux, row_aux
    zeroed = page_aux[SCORES].at[written.head_pages, written.offsets].set(0.0)
    return {**page_aux, SCORES: zeroed}, row_aux


def observe(params: Params, context: ObserveContext) -> tuple[Aux, Aux]:
    """The running maximum over replays of each prompt row's score in this layer and KV head."""
    if context.phase != "replay":
        return context.page_aux, context.row_aux
    scores = context.page_aux[SCORES]
    if params.kvzip_variant == "global_token":
        page_size, columns = context.geometry.page_size, context.view.table.shape[2]
        pages = context.view.head_pages(0, columns)
        held = (jnp.arange(columns, dtype=jnp.int32) * page_size)[None, None] < context.start[:, :, None]
        found = prompt_shares(params, context).reshape(*pages.shape, page_size)
        scores = scores.at[jnp.where(held, pages, 0)].max(found)
    else:
        rows, found = chunk_shares(params, context)
        pages = context.view.pages_at(rows // context.geometry.page_size)
        held = rows < context.start[:, :, None]
        scores = scores.at[jnp.where(held, pages, 0), rows % context.geometry.page_size].max(found)
    return {**context.page_aux, SCORES: scores}, context.row_aux


def prompt_shares(params: Params, context: ObserveContext) -> jax.Array:
    """Attention that each prompt row gets from a replay whose queries see the prompt only.

    Returns:
      float32 [batch, kv_heads, capacity]: mean (or largest) over the replay's queries, largest over query heads.
    """
    q = context.queries
    valid = jnp.arange(q.shape[1], dtype=jnp.int32)[None] < context.num_valid[:, None]
    limit = jnp.where(valid[:, None], context.start[:, :, None], 0)
    how = {"load_tile": context.load_tile, "layer": context.layer, "scale": context.geometry.scale}
    arrays = (q, context.pools, context.names, context.view, limit)
    lse = api.attention_lse(*arrays, implementation=context.implementation, **how)
    score = functools.partial(api.row_scores, *arrays, lse=lse, implementation=context.implementation, **how)
    if params.kvzip_query_reduction == "max":
        return score(over="max")
    return score() / jnp.maximum(context.num_valid, 1).astype(jnp.float32)[:, None, None]


def _grouped(q: jax.Array, heads: int) -> jax.Array:
    """[batch, queries, q_heads, dim] -> float32 [batch, kv_heads, group * queries, dim]."""
    batch, queries, q_heads, dim = q.shape
    q = q.astype(jnp.float32).reshape(batch, queries, heads, q_heads // heads, dim)
    return q.transpose(0, 2, 3, 1, 4).reshape(batch, heads, -1, dim)


def _logits(q: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """q [..., queries, dim], keys [..., rows, dim] -> float32 [..., queries, rows]."""
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum("...qd,...sd->...qs", q, keys.astype(jnp.float32), precision=precision) * scale


def attention_shares(
    q: jax.Array,
    chunk: jax.Array,
    sink: jax.Array,
    replay: jax.Array,
    chunk_seen: jax.Array,
    sink_seen: jax.Array,
    valid: jax.Array,
    scale: float,
) -> jax.Array:
    """The published score of one KV head: the largest share of attention over a replay's queries and query heads.

    Args:
      q: float32 [batch, group, queries, dim].
      chunk, sink, replay: keys [batch, rows, dim]; row i of the replay is that of query i.
      chunk_seen, sink_seen: bool [batch, rows], rows that there are.
      valid: bool [batch, queries].
      scale: of the logits.

    Returns:
      float32 [batch, rows of the chunk].
    """
    causal = jnp.tri(q.shape[2], dtype=bool)[None]
    seen = (chunk_seen[:, None], sink_seen[:, None], causal)
    logits = [
        jnp.where(mask[:, None], _logits(q, keys[:, None], scale), -jnp.inf)
        for mask, keys in zip(seen, (chunk, sink, replay), strict=True)
    ]
    share = jax.nn.softmax(jnp.concatenate(logits, axis=3), axis=3)[..., : chunk.shape[1]]
    return jnp.where(valid[:, None, :, None], share, 0.0).max((1, 2))


def chunk_shares(params: Params, context: ObserveContext) -> tuple[jax.Array, jax.Array]:
    """What the rows of a chunk get from their own replay, which sees the protected first rows, the chunk, and itself.

    Returns:
      rows int32 [batch, heads or 1, chunk], which may pass the end of the prompt, and their scores float32 [batch,
      kv_heads, chunk].
    """
    geometry, view = context.geometry, context.view
    batch, queries = context.queries.shape[:2]
    size, num_sinks = params.kvzip_score_chunk_size, params.kvzip_protect_sink
    end, step = context.start[:, :, None], jnp.arange(queries, dtype=jnp.int32)[None, None]
    assert context.part is not None
    first = (context.part * size)[:, None, None]
    chunk = first + jnp.arange(size, dtype=jnp.int32)[None, None]
    sink = jnp.broadcast_to(jnp.arange(num_sinks, dtype=jnp.int32)[None, None], (batch, 1, num_sinks))
    # Nothing was evicted before its prompt was over: the heads of a request are equally long.
    seen = (
        (chunk < end)[:, 0],
        (sink < jnp.minimum(first, end))[:, 0],
        (step < context.num_valid[:, None, None])[:, 0],
    )
    query = _grouped(context.queries, view.num_heads)
    query = query.reshape(batch, view.num_heads, geometry.group_size, queries, -1)
    keys = [_keys(context, rows) for rows in (chunk, sink, end + step)]
    heads = tuple(jnp.moveaxis(x, 1, 0) for x in (query, *keys))

    def one(head: Sequence[jax.Array]) -> jax.Array:  # a head's logits at once
        q, *sides = head
        return attention_shares(q, sides[0], sides[1], sides[2], seen[0], seen[1], seen[2], geometry.scale)

    found = jax.lax.map(one, heads)
    return chunk, jnp.moveaxis(found, 0, 1)


def _keys(context: ObserveContext, rows: jax.Array) -> jax.Array:
    """Keys of rows int32 [batch, heads or 1, n]: [batch, kv_heads, n, dim]."""
    page_size = context.geometry.page_size
    pages = context.view.pages_at(rows // page_size)
    tiles = {name: context.pools[name][pages, rows % page_size] for name in context.names}
    return context.load_tile(tiles, context.layer)[0]


def survey(params: Params, context: EvictContext) -> jax.Array:
    """This layer's say in what all layers keep together, float32 [capacity]."""
    return row_scores(context).max(0)


def row_scores(context: EvictContext) -> jax.Array:
    """float32 [kv_heads, capacity]."""
    return gather_rows(context.page_aux[SCORES], context.view.head_pages(0, context.view.table.shape[2]))[0]


def counted(params: Params, phase: Phase, lengths: np.ndarray) -> int:
    shared = params.kvzip_variant == "pair" and phase == "prompt"
    return min(params.bounds[1], int(lengths.max())) if shared else 0


def count_rows(params: Params, context: EvictContext) -> jax.Array:
    total = context.geometry.num_kv_heads * params.kvzip_token_budget
    protected = {"first": params.kvzip_protect_sink, "recent": params.kvzip_protect_recent}
    return eviction.head_budgets(row_scores(context), context.length, total, *params.bounds, **protected)


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    if params.kvzip_variant == "pair":
        protected = {"first": params.kvzip_protect_sink, "recent": params.kvzip_protect_recent}
        chosen = row_scores(context), context.length, context.kept, context.counts
        return eviction.choose_counted_rows(*chosen, **protected)
    return eviction.choose_rows(
        row_scores(context) if context.survey is None else context.survey[None],
        context.length,
        context.kept,
        first=params.kvzip_protect_sink,
        recent=params.kvzip_protect_recent,
        implementation=context.implementation,
    )


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    return np.minimum(lengths, params.kvzip_token_budget) if phase == "prompt" else lengths


def due(params: Params, phase: Phase, done_tokens: int) -> bool:
    return phase == "prompt"


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    prompt = lengths + prompt_tokens
    kept = keep_count(params, "prompt", prompt) if prompt_tokens else lengths
    return np.maximum(prompt, kept + decode_tokens)


def refuses(params: Params, others: tuple[Method, ...]) -> list[str]:
    sparse = [other.name for other in others if other.axis == "prefill"]
    return [f"kvzip scores a prompt that was read whole, {name} reads it sparsely" for name in sparse]


def build(params: Params) -> Method:
    shared = params.kvzip_variant == "global_token"
    return Method(
        "kvzip",
        "retention",
        params,
        summary="keep the prompt rows that the model needs to repeat the prompt",
        paper="arXiv 2505.23416",
        aux=aux,
        on_write=on_write,
        observe=observe,
        survey=survey if shared else None,
        survey_reduction="max",
        keep_rows=keep_rows,
        keep_count=keep_count,
        counted=counted,
        count_rows=count_rows if params.kvzip_variant == "pair" else None,
        granularity=Granularity.HEAD if params.kvzip_variant == "pair" else Granularity.SEQUENCE,
        due=due,
        peak=peak,
        replays=replays,
        replay_tokens=replay_tokens,
        refuses=refuses,
        bind=bind,
    )


def sized(rows: int) -> Params:
    return Params(rows)


PARAMS = Params
NOTES = {
    "Keeps": """
        The `kvzip_token_budget` prompt rows that the model attends to most while it repeats the prompt, and everything
        decoded. All layers and heads keep the same rows; with `kvzip_variant=per_head_uniform` each KV head has its
        own, scored as published: attention is shared with the replay itself, and a row is scored by its own piece only.
        With `pair` the heads of a layer share its rows by that score: the best of all heads stay, at least
        `head_budget_floor` and at most `head_budget_ceiling` times the mean in each.
    """,
    "Acts": """
        Once, after the last chunk of a first prompt of more than `kvzip_token_budget` rows. The prompt is read again in
        pieces of `kvzip_score_chunk_size` tokens, each behind `kvzip_instruction` and the `kvzip_prev_postfix_size`
        tokens before it, one piece per iteration beside decoding requests. The first token is that of the dense prompt
        and does not wait. What is appended to the row later stays.
    """,
    "Costs": """
        The budget's rows per layer and all decoded ones; while the prompt is read again, its n rows and those of one
        piece. Reading it again costs about twice the attention of the prefill and once its products. One float32 per
        stored row and KV head.
    """,
    "Use it": """
        When one prompt is asked many things that nobody knows yet: what stays does not depend on a question. Prompts
        must leave room for one piece within the model's window.
    """,
}
