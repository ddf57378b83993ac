"""SnapKV (arXiv 2404.14469): the last prompt queries vote for the prompt rows that stay.

Kept are the first S rows, the K best-scored rows, and the last R. The queries of the observation window are carried
across prompt chunks, so the result does not depend on chunking.
"""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np

from sparsejax import eviction
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry, Granularity
from sparsejax.method import (
    Aux,
    AuxSpec,
    DecodedContext,
    EvictContext,
    Method,
    Phase,
    Written,
    choice_param,
    integer_param,
    knob,
    number_param,
    split_rows,
)

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
    head_budgets: str = knob(
        "uniform", "heads keep equally many rows ('uniform') or share those of their layer by score ('adaptive')"
    )
    head_budget_floor: float = knob(0.2, "adaptive: share of the mean that every head keeps, in (0, 1]")
    head_budget_ceiling: float = knob(3.0, "adaptive: most that a head keeps, as a multiple of the mean")
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
        choice_param("head_budgets", self.head_budgets, ("uniform", "adaptive"))
        number_param("head_budget_floor", self.head_budget_floor, 0, 1)
        number_param("head_budget_ceiling", self.head_budget_ceiling, 1, 1e6)
        choice_param("snapkv_decode_eviction", self.snapkv_decode_eviction, (True, False))
        if self.adaptive and self.head_mode != "per_kv_head":
            raise MethodError("head_budgets='adaptive' needs head_mode='per_kv_head'")
        if self.adaptive and self.snapkv_decode_eviction:
            raise MethodError("head_budgets='adaptive' shares the rows of a prompt: leave snapkv_decode_eviction out")
        if self.budget == 0:
            raise MethodError("sink_keep_tokens + decode_keep_tokens + recent_keep_tokens must be above 0")

    @property
    def budget(self) -> int:
        """Rows kept by a compaction, by a head on average."""
        return self.sink_keep_tokens + self.decode_keep_tokens + self.recent_keep_tokens

    @property
    def adaptive(self) -> bool:
        return self.head_budgets == "adaptive"

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most rows that a head keeps."""
        return max(1, int(self.head_budget_floor * self.budget)), int(self.head_budget_ceiling * self.budget)


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    window = (params.observation_window_size, geometry.num_q_heads, geometry.head_dim)
    return {QUERIES: AuxSpec("row", window)}


def on_write(params: Params, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    if written.phase != "chunk":
        return page_aux, row_aux
    ring = eviction.record_queries(row_aux[QUERIES], written, params.observation_window_size)
    return page_aux, {**row_aux, QUERIES: ring}


def on_decoded(params: Params, context: DecodedContext) -> Aux:
    ring = eviction.record_decoded(context.row_aux[QUERIES], context, params.observation_window_size)
    return {**context.row_aux, QUERIES: ring}


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    if phase == "prompt":
        return np.minimum(lengths, params.budget)
    if phase == "token" and params.snapkv_decode_eviction:
        return np.where(lengths >= params.budget + params.decode_eviction_interval, params.budget, lengths)
    return lengths


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    prompt = lengths + prompt_tokens
    decoded = (keep_count(params, "prompt", prompt) if prompt_tokens else lengths) + decode_tokens
    if params.snapkv_decode_eviction:
        decoded = np.minimum(decoded, params.budget + params.decode_eviction_interval)
    return np.maximum(prompt, decoded)


def score_rows(params: Params, context: EvictContext) -> jax.Array:
    """Votes for each row, pooled: float32 [1 or kv_heads, capacity]."""
    protected = {"first": params.sink_keep_tokens, "recent": params.recent_keep_tokens}
    scores = eviction.window_votes(
        context,
        context.row_aux[QUERIES],
        *eviction.ring_positions(context.next_position, params.observation_window_size, context.observed),
        **protected,
        probability=params.sparse_prefill_score_mode == "probability",
        everything=params.softmax_domain == "all",
        shared=params.head_mode == "shared",
    )
    kernel = params.pool_kernel_size if context.phase == "prompt" else 1
    lengths = context.view.lengths[0] if params.adaptive else context.length
    return eviction.pool_candidates(scores, lengths, kernel, params.pool_type, **protected)


def counted(params: Params, phase: Phase, lengths: np.ndarray) -> int:
    return min(params.bounds[1], int(lengths.max())) if params.adaptive and phase == "prompt" else 0


def count_rows(params: Params, context: EvictContext) -> jax.Array:
    return eviction.head_budgets(
        score_rows(params, context),
        context.view.lengths[0],
        context.geometry.num_kv_heads * params.budget,
        *params.bounds,
        first=params.sink_keep_tokens,
        recent=params.recent_keep_tokens,
    )


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    if params.adaptive:
        return eviction.choose_counted_rows(
            score_rows(params, context),
            context.view.lengths[0],
            context.kept,
            context.counts,
            first=params.sink_keep_tokens,
            recent=params.recent_keep_tokens,
        )
    return eviction.choose_rows(
        score_rows(params, context),
        context.length,
        context.kept,
        first=params.sink_keep_tokens,
        recent=params.recent_keep_tokens,
        implementation=context.implementation,
    )


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
        on_decoded=on_decoded if params.snapkv_decode_eviction else None,
        keep_rows=keep_rows,
        keep_count=keep_count,
        counted=counted,
        count_rows=count_rows if params.adaptive else None,
        granularity=Granularity.HEAD if params.adaptive else Granularity.SEQUENCE,
        peak=peak,
    )


def sized(rows: int) -> Params:
    split = split_rows(rows)
    return Params(**split, observation_window_size=max(1, min(32, split["recent_keep_tokens"])))


PARAMS = Params
NOTES = {
    "Keeps": """
        The first S = `sink_keep_tokens` rows, the last R = `recent_keep_tokens`, and of those between them the K =
        `decode_keep_tokens` that the last W = `observation_window_size` queries of the prompt vote for. Layers choose
        for themselves; heads share a choice unless `head_mode=per_kv_head`. With `head_budgets=adaptive` the heads of
        a layer then share the rows, too (arXiv 2407.11550): the best of all heads stay, at least `head_budget_floor`
        and at most `head_budget_ceiling` times the mean in each.
    """,
    "Acts": """
        Once, after the last chunk of a prompt that has left more than S + K + R rows. The window's queries are carried
        across chunks, so the choice does not depend on how the prompt was cut. With `snapkv_decode_eviction` again
        whenever `decode_eviction_interval` more rows have been decoded.
    """,
    "Costs": """
        S + K + R rows per layer and all decoded ones (at most the interval with decode eviction), and W queries per
        layer. The votes are one pass of W queries over the keys: 2 x q_heads x W x n x head_dim operations per layer.
    """,
    "Use it": """
        When the prompt's end says what is asked of it: question answering over documents, tools, code. What a later
        turn asks for may be gone.
    """,
}
