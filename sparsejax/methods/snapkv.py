"""SnapKV (arXiv 2404.14469): the last prompt queries vote for the prompt rows that stay.

Kept are the first S rows, the K best-scored rows, and the last R. The queries of the observation window are carried
across prompt chunks, so the result does not depend on chunking.
"""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import (
    Aux,
    AuxSpec,
    EvictContext,
    Method,
    Phase,
    Written,
    choice_param,
    integer_param,
    knob,
)
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import explicit_view

QUERIES = "snapkv_queries"
log = logging.getLogger("sparsejax.methods")


@dataclasses.dataclass(frozen=True)
class Params:
    sink_keep_tokens: int = knob(64, "first tokens that always stay", "tokens")
    decode_keep_tokens: int = knob(4096, "tokens kept by score", "tokens")
    recent_keep_tokens: int = knob(512, "most recent tokens that stay", "tokens")
    observation_window_size: int = knob(32, "last queries that vote", "tokens")
    sparse_prefill_score_mode: str = knob("logits", "'logits' (largest logit) or 'probability' (attention mass)")
    softmax_domain: str = knob("candidates", "probability mode normalises over 'candidates' or 'all' rows")
    pool_kernel_size: int = knob(1, "odd width of the pooling over neighbouring scores; 1 is none", "tokens")
    pool_type: str = knob("max", "'max' or 'avg' pooling")
    head_mode: str = knob("shared", "one keep set for all heads ('shared') or one per KV head ('per_kv_head')")
    snapkv_decode_eviction: bool = knob(False, "also evict while decoding")
    decode_eviction_interval: int = knob(1024, "decoded tokens between evictions", "tokens")

    def __post_init__(self) -> None:
        for name in ("sink_keep_tokens", "decode_keep_tokens", "recent_keep_tokens"):
            integer_param(name, getattr(self, name), 0)
        for name in ("observation_window_size", "pool_kernel_size", "decode_eviction_interval"):
            integer_param(name, getattr(self, name), 1)
        if self.pool_kernel_size % 2 == 0:
            raise MethodError(f"pool_kernel_size must be odd, got {self.pool_kernel_size}")
        choice_param("sparse_prefill_score_mode", self.sparse_prefill_score_mode, ("logits", "probability"))
        choice_param("softmax_domain", self.softmax_domain, ("candidates", "all"))
        choice_param("pool_type", self.pool_type, ("max", "avg"))
        choice_param("head_mode", self.head_mode, ("shared", "per_kv_head"))
        choice_param("snapkv_decode_eviction", self.snapkv_decode_eviction, (True, False))
        if self.budget == 0:
            raise MethodError("sink_keep_tokens + decode_keep_tokens + recent_keep_tokens must be above 0")

    @property
    def budget(self) -> int:
        """Rows kept by a compaction."""
        return self.sink_keep_tokens + self.decode_keep_tokens + self.recent_keep_tokens


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    window = (params.observation_window_size, geometry.num_q_heads, geometry.head_dim)
    return {QUERIES: AuxSpec("row", window)}


def on_write(params: Params, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    """Keeps the last W queries of each request; a query at position p lies in slot p mod W."""
    if written.phase == "pack" or (written.phase == "token" and not params.snapkv_decode_eviction):
        return page_aux, row_aux
    assert written.queries is not None
    window = params.observation_window_size
    size = min(window, written.keys.shape[1])
    index = written.num_valid[:, None] - size + jnp.arange(size, dtype=jnp.int32)[None]
    rows = jnp.where(index >= 0, written.rows[:, None], 0)  # row 0 swallows what does not exist
    index = jnp.maximum(index, 0)
    queries = jnp.take_along_axis(written.queries, index[:, :, None, None], axis=1)
    slots = jnp.take_along_axis(written.positions, index, axis=1) % window
    stored = row_aux[QUERIES].at[written.layer, rows, slots].set(queries)
    return page_aux, {**row_aux, QUERIES: stored}


def keep_count(params: Params, phase: Phase, length: int) -> int:
    if phase == "prompt":
        due = length > params.budget
    elif phase == "token" and params.snapkv_decode_eviction:
        due = length >= params.budget + params.decode_eviction_interval
    else:
        due = False
    return params.budget if due else length


def peak(params: Params, length: int, prompt_tokens: int, decode_tokens: int) -> int:
    prompt = length + prompt_tokens
    start = keep_count(params, "prompt", prompt) if prompt_tokens else length
    decoded = start + decode_tokens
    if params.snapkv_decode_eviction:
        decoded = min(decoded, params.budget + params.decode_eviction_interval)
    return max(prompt, decoded)


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    window = params.observation_window_size
    slots = jnp.arange(window, dtype=jnp.int32)
    last = context.next_position - 1
    query_positions = last - (last - slots) % window
    in_window = query_positions > last - jnp.minimum(context.observed, window)
    kernel = params.pool_kernel_size if context.phase == "prompt" else 1
    scores = score_rows(params, context, context.row_aux[QUERIES], query_positions, in_window)
    return choose_rows(params, scores, context.length, context.kept, kernel, context.implementation)


def score_rows(
    params: Params, context: EvictContext, queries: jax.Array, query_positions: jax.Array, in_window: jax.Array
) -> jax.Array:
    """Votes for each resident row.

    Args:
      context: the request in one layer.
      queries: [window, q_heads, head_dim].
      query_positions: int32 [window].
      in_window: bool [window].

    Returns:
      float32 [1 or kv_heads, capacity]; rows outside the candidates hold -inf (logits) or 0 (probability).
    """
    geometry = context.geometry
    first, end = params.sink_keep_tokens, context.length - params.recent_keep_tokens
    shared = params.head_mode == "shared"
    logits_mode = params.sparse_prefill_score_mode == "logits"

    # Rows end with the tokens of the window, so a query sees all but those that came after it.
    later = context.next_position - 1 - query_positions
    limit = jnp.where(in_window, context.length - later, 0)[None, None, :]
    arrays = (queries[None], context.pools, context.names, context.view)
    how = {"load_tile": context.load_tile, "layer": context.layer, "scale": geometry.scale}
    how["implementation"] = context.implementation
    if logits_mode:
        lse, num_queries = None, 1.0
    else:
        everything = params.softmax_domain == "all"
        domain = limit if everything else jnp.minimum(limit, end)
        lse = api.attention_lse(*arrays, domain, first=0 if everything else first, **how)
        num_queries = jnp.maximum(in_window.sum(), 1).astype(jnp.float32)
    group = "max" if shared else "sum"
    scores = api.row_scores(*arrays, jnp.minimum(limit, end), lse=lse, group=group, **how)[0] / num_queries
    scores = scores.max(0, keepdims=True) if shared else scores / geometry.group_size
    index = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    return jnp.where((index >= first) & (index < end), scores, -jnp.inf if logits_mode else 0.0)


def pool_scores(scores: jax.Array, kernel: int, pool_type: str) -> jax.Array:
    """Stride-1 pooling along the last axis, same length. Zero padding counts in the divisor of 'avg'."""
    if kernel == 1:
        return scores
    window, strides = (1, kernel), (1, 1)
    if pool_type == "max":
        return jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, window, strides, "SAME")
    return jax.lax.reduce_window(scores, 0.0, jax.lax.add, window, strides, "SAME") / kernel


def choose_rows(
    params: Params, scores: jax.Array, length: jax.Array, kept: int, kernel: int, implementation: str | None = None
) -> jax.Array:
    """int32 [1 or kv_heads, kept] ascending: sinks, best candidates (ties to the lower row), recent rows."""
    index = jnp.arange(scores.shape[1], dtype=jnp.int32)
    first, end = params.sink_keep_tokens, length - params.recent_keep_tokens
    candidate = (index >= first) & (index < end)
    neutral = -jnp.inf if params.pool_type == "max" else 0.0
    if kernel > 1:
        pooled = pool_scores(jnp.where(candidate[None], scores, neutral), kernel, params.pool_type)
    else:
        pooled = scores
    pooled = jnp.where(candidate[None], pooled, jnp.inf)
    # Rows as pages of one row, behind them one more that is chosen anyway: the last page always is.
    pooled = jnp.pad(pooled, ((0, 0), (0, 1)))[None]
    table = jnp.broadcast_to(jnp.arange(pooled.shape[2], dtype=jnp.int32)[None, None], pooled.shape)
    view = explicit_view(table, jnp.full((1, 1), length + 1, jnp.int32))
    chosen = api.select_pages(
        pooled, view, num_scored=kept, width=kept + 1, budget=0, page_size=1, implementation=implementation
    )
    return chosen.table[0, :, :kept]


def build(params: Params) -> Method:
    if params.recent_keep_tokens < params.observation_window_size:
        log.warning(
            "recent_keep_tokens=%d is smaller than observation_window_size=%d: window rows compete with few votes",
            params.recent_keep_tokens,
            params.observation_window_size,
        )
    return Method(
        "snapkv",
        "retention",
        params,
        summary="keep the prompt rows that its last queries attend to",
        paper="arXiv 2404.14469",
        aux=aux,
        on_write=on_write,
        keep_rows=keep_rows,
        keep_count=keep_count,
        peak=peak,
    )


PARAMS = Params
