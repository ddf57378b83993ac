"""R-KV (arXiv 2505.24133): while decoding, rows go that the last queries ignore or that later rows repeat.

Every `rkv_compression_interval` tokens of an answer, the request is cut to its budget: the rows with the best
importance less redundancy stay, and the last ones, whose queries vote. By default all layers and heads keep the same
rows; nothing is compacted after a prompt.

`due` counts the tokens of the present answer whose rows are resident; `keep_count` answers as if due. The host's peak
holds for any number of them.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from sparsejax import eviction, redundancy
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
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
    split_rows,
)

ALIASES = ("r-kv", "r_kv")
QUERIES = "rkv_queries"
LEGACY = {
    "rkv_similarity_threshold": 0.5,
    "rkv_recent_similar_keep": 1,
    "rkv_redundancy_window": 0,
    "rkv_max_redundancy_tokens": None,
}


@dataclasses.dataclass(frozen=True)
class Params:
    sink_keep_tokens: int = knob(64, "enlarges the budget; no row is kept for being first", "tokens")
    decode_keep_tokens: int = knob(4096, "budget", "tokens")
    recent_keep_tokens: int = knob(512, "enlarges the budget", "tokens")
    rkv_compression_interval: int = knob(128, "decoded tokens between compactions", "tokens")
    rkv_observation_tokens: int = knob(8, "last queries that vote; their rows always stay", "tokens")
    rkv_alpha: float = knob(0.1, "weight of importance; the rest is that of redundancy")
    rkv_kernel_size: int = knob(7, "odd width of the max pooling over neighbouring importance; 1 is none", "tokens")
    rkv_scope: str = knob("global", "one keep set for all layers ('global'), one 'per_layer' or one 'per_head'")
    rkv_compress_prompt: bool = knob(False, "also compact once after the prompt")
    rkv_score_chunk_mb: int = knob(512, "most memory that scoring one request may take", "MiB")
    rkv_similarity_threshold: float = knob(0.5, "fixed: cosine of similar keys")
    rkv_recent_similar_keep: int = knob(1, "fixed: newest similar rows that do not count as redundant", "tokens")
    rkv_redundancy_window: int = knob(0, "fixed: 0 compares all rows", "tokens")
    rkv_max_redundancy_tokens: int | None = knob(None, "fixed: compares all rows", "tokens")

    def __post_init__(self) -> None:
        for name in ("sink_keep_tokens", "decode_keep_tokens", "recent_keep_tokens"):
            integer_param(name, getattr(self, name), 0)
        for name in ("rkv_compression_interval", "rkv_observation_tokens", "rkv_kernel_size", "rkv_score_chunk_mb"):
            integer_param(name, getattr(self, name), 1)
        if self.rkv_observation_tokens > self.rkv_compression_interval:
            raise MethodError(
                f"rkv_observation_tokens={self.rkv_observation_tokens} must not be above"
                f" rkv_compression_interval={self.rkv_compression_interval}"
            )
        alpha = self.rkv_alpha
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
            raise MethodError(f"rkv_alpha must be a number in [0, 1], got {alpha!r}")
        if self.rkv_kernel_size % 2 == 0:
            raise MethodError(f"rkv_kernel_size must be odd, got {self.rkv_kernel_size}")
        choice_param("rkv_scope", self.rkv_scope, ("global", "per_layer", "per_head"))
        choice_param("rkv_compress_prompt", self.rkv_compress_prompt, (True, False))
        for name, only in LEGACY.items():
            value = getattr(self, name)
            if isinstance(value, bool) or value != only:
                raise MethodError(f"{name} can only be {only}, got {value!r}: it is no choice of this method")
        if self.budget <= self.rkv_observation_tokens:
            raise MethodError(
                f"sink_keep_tokens + decode_keep_tokens + recent_keep_tokens is {self.budget}: it must be above"
                f" rkv_observation_tokens={self.rkv_observation_tokens}"
            )

    @property
    def budget(self) -> int:
        """Rows kept by a compaction."""
        return self.sink_keep_tokens + self.decode_keep_tokens + self.recent_keep_tokens

    @property
    def trigger(self) -> int:
        """Rows from which a compaction is due at the end of an interval."""
        return self.budget + self.rkv_compression_interval

    def tile(self, geometry: Geometry) -> int | None:
        """Rows that are compared with as many others at a time."""
        return redundancy.tile_rows(geometry, self.rkv_observation_tokens, self.rkv_score_chunk_mb << 20)


def acts(params: Params, geometry: Geometry) -> bool:
    """Whether any request can grow long enough to be compacted."""
    return geometry.max_model_len >= (params.budget + 1 if params.rkv_compress_prompt else params.trigger)


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    if not acts(params, geometry):
        return {}
    return {QUERIES: AuxSpec("row", (params.rkv_observation_tokens, geometry.num_q_heads, geometry.head_dim))}


def check(params: Params, geometry: Geometry) -> list[str]:
    if not acts(params, geometry) or params.tile(geometry) is not None:
        return []
    least = redundancy.workspace_nbytes(geometry, params.rkv_observation_tokens, geometry.page_size) / 2**20
    reason = f"rkv_score_chunk_mb={params.rkv_score_chunk_mb} is too little to score a request of"
    return [f"{reason} {geometry.max_model_len} tokens: that takes {least:.1f} MiB"]


def on_write(params: Params, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    if written.phase != "chunk" or not acts(params, geometry):
        return page_aux, row_aux
    ring = eviction.record_queries(row_aux[QUERIES], written, params.rkv_observation_tokens)
    return page_aux, {**row_aux, QUERIES: ring}


def on_decoded(params: Params, context: DecodedContext) -> Aux:
    if not acts(params, context.geometry):
        return context.row_aux
    ring = eviction.record_decoded(context.row_aux[QUERIES], context, params.rkv_observation_tokens)
    return {**context.row_aux, QUERIES: ring}


def due(params: Params, phase: Phase, done_tokens: int) -> bool:
    if phase == "token":
        return done_tokens > 0 and done_tokens % params.rkv_compression_interval == 0
    return phase == "prompt" and params.rkv_compress_prompt


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    if phase == "token":
        return np.where(lengths >= params.trigger, params.budget, lengths)
    if phase == "prompt" and params.rkv_compress_prompt:
        return np.minimum(lengths, params.budget)
    return lengths


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    interval, prompt = params.rkv_compression_interval, lengths + prompt_tokens
    if not prompt_tokens:
        # The end of an interval may be a whole interval away, and may come just before the row is long enough.
        return np.minimum(lengths + decode_tokens, np.maximum(lengths, params.trigger - 1) + interval)
    start = keep_count(params, "prompt", prompt)
    intervals = np.maximum(-(-(params.trigger - start) // interval), 1)  # until the first compaction
    longest = np.maximum(start + intervals * interval, params.trigger)
    # As much as this says when it is asked again in the middle, where the distance to that end is not known.
    return np.maximum(prompt, np.minimum(start + decode_tokens, longest + interval - 1))


def score_rows(params: Params, context: EvictContext) -> jax.Array:
    """Importance less redundancy, float32 [kv_heads, capacity]; -inf for the last rows, whose queries vote."""
    window = params.rkv_observation_tokens
    _, in_window = eviction.ring_positions(context.next_position, window, context.observed)
    tile = params.tile(context.geometry)
    assert tile is not None
    return redundancy.joint_scores(
        context,
        context.row_aux[QUERIES],
        in_window,
        first=0,
        recent=window,
        kernel=params.rkv_kernel_size,
        weight=params.rkv_alpha,
        tile=tile,
    )


def survey(params: Params, context: EvictContext) -> jax.Array:
    """The score of one layer, float32 [1, capacity]: the mean over its KV heads."""
    return score_rows(params, context).mean(0, keepdims=True)


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    if params.rkv_scope == "per_head":
        scores = score_rows(params, context)
    elif params.rkv_scope == "per_layer":
        scores = survey(params, context)
    else:
        assert context.survey is not None
        scores = context.survey
    window, how = params.rkv_observation_tokens, context.implementation
    return eviction.choose_rows(scores, context.length, context.kept, recent=window, implementation=how)


def build(params: Params) -> Method:
    return Method(
        "rkv",
        "retention",
        params,
        summary="while decoding, drop rows that the last queries ignore or that later rows repeat",
        paper="arXiv 2505.24133",
        aux=aux,
        on_write=on_write if params.rkv_compress_prompt else None,
        on_decoded=on_decoded,
        survey=survey if params.rkv_scope == "global" else None,
        keep_rows=keep_rows,
        keep_count=keep_count,
        due=due,
        peak=peak,
        check=check,
    )


def sized(rows: int) -> Params:
    return Params(**split_rows(rows), rkv_observation_tokens=max(1, min(8, rows // 4)))


PARAMS = Params
NOTES = {
    "Keeps": """
        B = `sink_keep_tokens` + `decode_keep_tokens` + `recent_keep_tokens` rows: the last w =
        `rkv_observation_tokens`, and the best of the others by `rkv_alpha` x importance - (1 - `rkv_alpha`) x
        redundancy. Importance is the attention of the last w queries, redundancy the similarity of a key to all other
        keys; of similar rows the newest counts as least redundant. All layers and heads keep the same rows unless
        `rkv_scope` says otherwise. The first rows of a prompt have no privilege.
    """,
    "Acts": """
        While decoding, after every `rkv_compression_interval` tokens of an answer, if the row has grown to B +
        interval; not after a prompt, however long, unless `rkv_compress_prompt=true`. Each turn counts anew.
    """,
    "Costs": """
        Up to B + 2 x interval rows per layer, the whole prompt before the first compaction, and w queries per layer.
        Comparing keys takes up to 2 x kv_heads x n^2 x head_dim operations per layer and compaction, far fewer where
        most rows have a similar one among the newest, in tiles of at most `rkv_score_chunk_mb`.
    """,
    "Use it": """
        For long reasoning, where most of the cache is the model's own text and much of that says the same again.
    """,
}
