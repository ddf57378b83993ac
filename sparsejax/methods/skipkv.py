"""SkipKV (arXiv 2512.07993): while decoding, sentences of the answer go that a later sentence repeats.

Once a row is long enough, the candidates between its first and last rows are ranked by importance less redundancy of
their keys, and less a penalty for each row of a sentence that a later one repeats. Sentences are told apart by
delimiter tokens and compared by the mean of their hidden states; prompts have none. Steering of activations is not part
of this version.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import eviction, redundancy, sentences
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import (
    Aux,
    AuxSpec,
    DecodedContext,
    EvictContext,
    HiddenContext,
    Method,
    Phase,
    choice_param,
    integer_param,
    knob,
    split_rows,
)
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import POSITIONS

ALIASES = ("skip-kv", "skip_kv")
QUERIES = "skipkv_queries"
SENTENCES = tuple(f"skipkv_{name}" for name in sentences.Sentences._fields)
DELIMITERS = ("\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n", "?\n\n")
TOKEN_SIMILAR = 0.8
"""Cosine from which 'step' importance counts two tokens as similar."""
TILE_NBYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Params:
    sink_keep_tokens: int = knob(64, "first tokens that always stay", "tokens")
    decode_keep_tokens: int = knob(4096, "tokens kept by score", "tokens")
    recent_keep_tokens: int = knob(512, "most recent tokens that stay", "tokens")
    skipkv_compression_interval: int = knob(128, "decoded tokens between compactions", "tokens")
    skipkv_importance: str = knob("window", "'window': last queries less key redundancy; 'step': the last query alone")
    skipkv_observation_tokens: int = knob(8, "last queries that vote", "tokens")
    skipkv_kernel_size: int = knob(7, "odd width of the max pooling over neighbouring importance; 1 is none", "tokens")
    skipkv_mix_lambda: float = knob(0.1, "weight of importance; the rest is that of redundancy")
    head_mode: str = knob("shared", "one keep set for all heads ('shared') or one per KV head ('per_kv_head')")
    skipkv_enable_sentence_scoring: bool = knob(True, "penalise sentences that a later one repeats")
    skipkv_sentence_score_weight: float = knob(1.0, "weight of that penalty")
    skipkv_similarity_threshold: float = knob(0.95, "least cosine of a sentence and its repetition")
    skipkv_sentence_min_tokens: int = knob(4, "shorter sentences are forgotten", "tokens")
    skipkv_sentence_max_tokens: int = knob(256, "longer sentences are split", "tokens")
    skipkv_sentence_embedding_layer: int = knob(-1, "layer whose hidden states are compared; -1 is the last", "layers")
    skipkv_max_tracked_sentences: int = knob(256, "sentences remembered; the oldest makes room", "sentences")
    skipkv_delimiter_ids: tuple[int, ...] = knob(
        (), "token ids that end a sentence, separated by semicolons; by default line ends of the tokenizer"
    )
    skipkv_alpha: float = knob(0.1, "'step' only: weight of token redundancy")
    skipkv_redundancy_window: int = knob(64, "'step' only: last candidates compared with each other", "tokens")
    skipkv_max_redundancy_tokens: int = knob(4096, "upper limit of skipkv_redundancy_window", "tokens")
    skipkv_segment_size: int = knob(32, "'step' only: segments compared where no sentence is repeated", "tokens")
    skipkv_enable_activation_steering: bool = knob(False, "not part of this version")

    def __post_init__(self) -> None:
        object.__setattr__(self, "skipkv_delimiter_ids", _ids(self.skipkv_delimiter_ids))
        for name in ("sink_keep_tokens", "decode_keep_tokens", "recent_keep_tokens"):
            integer_param(name, getattr(self, name), 0)
        for name in (
            "skipkv_compression_interval",
            "skipkv_observation_tokens",
            "skipkv_kernel_size",
            "skipkv_sentence_min_tokens",
            "skipkv_max_tracked_sentences",
            "skipkv_redundancy_window",
            "skipkv_max_redundancy_tokens",
            "skipkv_segment_size",
        ):
            integer_param(name, getattr(self, name), 1)
        if self.skipkv_kernel_size % 2 == 0:
            raise MethodError(f"skipkv_kernel_size must be odd, got {self.skipkv_kernel_size}")
        integer_param("skipkv_sentence_embedding_layer", self.skipkv_sentence_embedding_layer, -1)
        integer_param("skipkv_sentence_max_tokens", self.skipkv_sentence_max_tokens, self.skipkv_sentence_min_tokens)
        for name, high in (
            ("skipkv_mix_lambda", 1.0),
            ("skipkv_similarity_threshold", 1.0),
            ("skipkv_sentence_score_weight", math.inf),
            ("skipkv_alpha", math.inf),
        ):
            _number(name, getattr(self, name), high)
        choice_param("skipkv_importance", self.skipkv_importance, ("window", "step"))
        choice_param("head_mode", self.head_mode, ("shared", "per_kv_head"))
        choice_param("skipkv_enable_sentence_scoring", self.skipkv_enable_sentence_scoring, (True, False))
        if self.skipkv_enable_activation_steering is not False:
            raise MethodError(
                "skipkv_enable_activation_steering must be False: steering needs vectors made for the model, and this"
                " version has no place to add them to its activations"
            )
        if self.head_mode == "per_kv_head" and self.skipkv_importance == "step":
            raise MethodError("head_mode='per_kv_head' needs skipkv_importance='window': 'step' joins the heads' keys")
        for low, high in (
            ("skipkv_observation_tokens", "skipkv_compression_interval"),
            ("skipkv_observation_tokens", "recent_keep_tokens"),
            ("skipkv_redundancy_window", "skipkv_max_redundancy_tokens"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise MethodError(f"{low}={getattr(self, low)} must not be above {high}={getattr(self, high)}")

    @property
    def budget(self) -> int:
        """Rows kept by a compaction."""
        return self.sink_keep_tokens + self.decode_keep_tokens + self.recent_keep_tokens

    @property
    def trigger(self) -> int:
        """Rows from which a compaction is due."""
        return self.budget + self.skipkv_compression_interval

    @property
    def protected(self) -> dict[str, int]:
        """Rows at the beginning and at the end that stay whatever their score."""
        return {"first": self.sink_keep_tokens, "recent": self.recent_keep_tokens}

    def has_table(self, geometry: Geometry) -> bool:
        """Whether there is room for sentences, with or without delimiters: memory is planned before they are known."""
        return self.skipkv_enable_sentence_scoring and geometry.hidden_size > 0 and self.acts(geometry)

    def tells_sentences(self, geometry: Geometry) -> bool:
        """Whether sentences are tracked: not without delimiters."""
        return self.has_table(geometry) and bool(self.skipkv_delimiter_ids)

    def acts(self, geometry: Geometry) -> bool:
        """Whether any request can grow long enough to be compacted."""
        return geometry.max_model_len >= self.trigger


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids from a sequence, from a single id, or from text."""
    if isinstance(value, str):
        try:
            value = tuple(int(part) for part in value.replace(";", ",").split(","))
        except ValueError:
            raise MethodError(f"skipkv_delimiter_ids must be token ids, got {value!r}") from None
    ids = (value,) if isinstance(value, int) else value
    if not isinstance(ids, (tuple, list)):
        raise MethodError(f"skipkv_delimiter_ids must be token ids, got {value!r}")
    for token in ids:
        integer_param("skipkv_delimiter_ids", token, 0)
    return tuple(ids)


def _number(name: str, value: object, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not 0 <= value <= high:  # type: ignore[arg-type]
        limits = f"in [0, {high:g}]" if math.isfinite(high) else "at least 0"
        raise MethodError(f"{name} must be a number {limits}, got {value!r}")


def bind(params: Params, encode: Callable[[str], list[int]]) -> Params:
    """Fills in the delimiters: the last token of each text that ends a line."""
    if params.skipkv_delimiter_ids or not params.skipkv_enable_sentence_scoring:
        return params
    ids = {tokens[-1] for tokens in map(encode, DELIMITERS) if tokens}
    return dataclasses.replace(params, skipkv_delimiter_ids=tuple(sorted(ids)))


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    if not params.acts(geometry):
        return {}
    ring = params.skipkv_observation_tokens, geometry.num_q_heads, geometry.head_dim
    arrays = {QUERIES: AuxSpec("row", ring)}
    if params.has_table(geometry):
        tracked, width = params.skipkv_max_tracked_sentences, geometry.hidden_size
        kinds = ((tracked, 2), "int32"), ((tracked, width), "float32"), ((3,), "int32"), ((width,), "float32")
        arrays |= {name: AuxSpec("request", *kind) for name, kind in zip(SENTENCES, kinds, strict=True)}
    return arrays


def check(params: Params, geometry: Geometry) -> list[str]:
    layer = params.skipkv_sentence_embedding_layer
    if layer < geometry.num_layers:
        return []
    return [f"skipkv_sentence_embedding_layer={layer} is none of this model's {geometry.num_layers} layers"]


def on_decoded(params: Params, context: DecodedContext) -> Aux:
    if not params.acts(context.geometry):
        return context.row_aux
    ring = eviction.record_decoded(context.row_aux[QUERIES], context, params.skipkv_observation_tokens)
    return {**context.row_aux, QUERIES: ring}


def hidden_layer(params: Params, num_layers: int) -> int:
    return params.skipkv_sentence_embedding_layer % num_layers


def on_hidden(params: Params, context: HiddenContext) -> Aux:
    if not params.tells_sentences(context.geometry):
        return context.request_aux
    state = sentences.advance(
        sentences.Sentences(*(context.request_aux[name] for name in SENTENCES)),
        context.rows,
        context.live,
        context.tokens,
        context.positions,
        context.hidden,
        delimiters=params.skipkv_delimiter_ids,
        min_tokens=params.skipkv_sentence_min_tokens,
        max_tokens=params.skipkv_sentence_max_tokens,
    )
    return {**context.request_aux, **dict(zip(SENTENCES, state, strict=True))}


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    return np.where((phase == "token") & (lengths >= params.trigger), params.budget, lengths)


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    start = lengths + prompt_tokens
    return np.minimum(start + decode_tokens, np.maximum(start + 1, params.trigger))


def row_positions(context: EvictContext) -> jax.Array:
    """Logical positions of all rows, int32 [kv_heads, capacity]."""
    pages = context.view.head_pages(0, context.view.table.shape[2])[0]
    return context.pools[POSITIONS][pages].reshape(pages.shape[0], -1)


def row_penalties(params: Params, context: EvictContext) -> jax.Array:
    """What candidates lose as part of a sentence that is repeated, before it is weighted: [1 or kv_heads, capacity]."""
    positions = row_positions(context)
    if params.head_mode == "shared":
        positions = positions[:1]
    if not params.tells_sentences(context.geometry):
        return jnp.zeros(positions.shape, jnp.float32)
    spans, embeddings, opened, _ = (context.request_aux[name] for name in SENTENCES)
    repeats = sentences.repeated(embeddings, opened[2], params.skipkv_similarity_threshold)
    competing = eviction.candidates(positions.shape[1], context.length, **params.protected)
    return jnp.where(competing[None], sentences.penalties(positions, spans, repeats), 0.0)


def window_scores(params: Params, context: EvictContext) -> jax.Array:
    """Importance to the last queries less redundancy, float32 [1 or kv_heads, capacity]."""
    window, geometry = params.skipkv_observation_tokens, context.geometry
    _, in_window = eviction.ring_positions(context.next_position, window, context.observed)
    tile = redundancy.tile_rows(geometry, window, redundancy.workspace_nbytes(geometry, window, 0) + TILE_NBYTES)
    scores = redundancy.joint_scores(
        context,
        context.row_aux[QUERIES],
        in_window,
        **params.protected,
        kernel=params.skipkv_kernel_size,
        weight=params.skipkv_mix_lambda,
        tile=tile or geometry.page_size,
    )
    return scores.mean(0, keepdims=True) if params.head_mode == "shared" else scores


def step_importance(params: Params, context: EvictContext) -> jax.Array:
    """Attention of the last query, the most of any head, over all rows but the first: float32 [1, capacity]."""
    slot = (context.next_position - 1) % params.skipkv_observation_tokens
    arrays = context.row_aux[QUERIES][slot][None, None], context.pools, context.names, context.view
    how: dict[str, Any] = {"load_tile": context.load_tile, "layer": context.layer, "scale": context.geometry.scale}
    how["implementation"] = context.implementation
    limit = jnp.reshape(context.length, (1, 1, 1))
    lse = api.attention_lse(*arrays, limit, first=params.sink_keep_tokens, **how)
    return api.row_scores(*arrays, limit, lse=lse, group="max", **how)[0].max(0, keepdims=True)


class Window(NamedTuple):
    """The last candidates, all KV heads of a row as one vector; what is not `valid` holds zeros.

    Attributes:
      rows: int32 [window], ascending.
      valid: bool [window].
      keys: float32 [window, kv_heads * head_dim].
    """

    rows: jax.Array
    valid: jax.Array
    keys: jax.Array


def last_candidates(params: Params, context: EvictContext) -> Window:
    """The `skipkv_redundancy_window` candidates before the recent rows."""
    window, page_size = params.skipkv_redundancy_window, context.geometry.page_size
    rows = context.length - params.recent_keep_tokens - window + jnp.arange(window, dtype=jnp.int32)
    valid = rows >= params.sink_keep_tokens
    at = jnp.maximum(rows, 0)[None, None]
    pages = context.view.pages_at(at // page_size)
    payload = {name: context.pools[name][pages, at % page_size] for name in context.names}
    keys, _ = context.load_tile(payload, context.layer)
    keys = jnp.moveaxis(keys[0].astype(jnp.float32), 0, 1).reshape(window, -1)
    return Window(rows, valid, jnp.where(valid[:, None], keys, 0.0))


def _cosines(x: jax.Array) -> jax.Array:
    """Of all pairs of rows, 0 on the diagonal."""
    unit = x / jnp.maximum(jnp.sqrt((x * x).sum(1, keepdims=True)), 1e-6)
    cosine = jnp.matmul(unit, unit.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(jnp.eye(len(x), dtype=bool), 0.0, cosine)


def token_redundancy(window: Window) -> jax.Array:
    """Softmax over the window of mean similarity to its other tokens, less the latest similar one: float32 [window]."""
    cosine = _cosines(window.keys)
    cosine = jnp.where(cosine < TOKEN_SIMILAR, 0.0, cosine)
    index = jnp.arange(len(cosine), dtype=jnp.int32)
    future = (cosine > 0) & (index[None, :] > index[:, None])
    latest = jnp.where(future, index[None, :], -1).max(1)
    total = jnp.where(index[None, :] == latest[:, None], 0.0, cosine).sum(1)
    mean = total / jnp.maximum(window.valid.sum(), 1).astype(jnp.float32)
    mass = jnp.where(window.valid, jnp.exp(mean - mean.max()), 0.0)
    return mass / mass.sum()


def segment_penalties(window: Window, size: int, threshold: float) -> jax.Array:
    """How closely a later segment of `size` tokens repeats that of each, 0 below the threshold: float32 [window]."""
    count = -(-len(window.rows) // size)
    segment = jnp.cumsum(window.valid) - 1
    member = (segment[:, None] // size == jnp.arange(count)[None, :]) & window.valid[:, None]
    member = member.astype(jnp.float32)
    total = jnp.matmul(member.T, window.keys, precision=jax.lax.Precision.HIGHEST)
    cosine = _cosines(total / jnp.maximum(member.sum(0), 1.0)[:, None])
    later = jnp.arange(count)[None, :] > jnp.arange(count)[:, None]
    repeats = jnp.where(later & (cosine >= threshold), cosine, 0.0).max(1)
    return member @ repeats


def step_scores(params: Params, context: EvictContext, penalty: jax.Array) -> jax.Array:
    """Attention of the last query less redundancy among the last candidates, float32 [1, capacity].

    Where no candidate has a `penalty` [1, capacity], those candidates lose that of their segments instead.
    """
    scores = step_importance(params, context)
    window = last_candidates(params, context)
    loss = params.skipkv_alpha * token_redundancy(window)
    segments = segment_penalties(window, params.skipkv_segment_size, params.skipkv_similarity_threshold)
    loss = loss + jnp.where((penalty > 0).any(), 0.0, segments)
    target = jnp.where(window.valid, window.rows, scores.shape[1])  # past the end: dropped
    return scores.at[0, target].add(-loss, mode="drop")


def score_rows(params: Params, context: EvictContext) -> jax.Array:
    """Score of each candidate, float32 [1 or kv_heads, capacity]; other rows hold anything."""
    penalty = row_penalties(params, context)
    if params.skipkv_importance == "window":
        scores = window_scores(params, context)
    else:
        scores = step_scores(params, context, penalty)
    return scores - params.skipkv_sentence_score_weight * penalty


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    scores, how = score_rows(params, context), context.implementation
    return eviction.choose_rows(scores, context.length, context.kept, **params.protected, implementation=how)


def build(params: Params) -> Method:
    return Method(
        "skipkv",
        "retention",
        params,
        summary="while decoding, drop sentences of the answer that later ones repeat",
        paper="arXiv 2512.07993",
        aux=aux,
        on_decoded=on_decoded,
        on_hidden=on_hidden,
        hidden_layer=hidden_layer,
        keep_rows=keep_rows,
        keep_count=keep_count,
        peak=peak,
        bind=bind,
        check=check,
    )


def sized(rows: int) -> Params:
    split = split_rows(rows)
    return Params(**split, skipkv_observation_tokens=max(1, min(8, split["recent_keep_tokens"])))


PARAMS = Params
NOTES = {
    "Keeps": """
        The first S = `sink_keep_tokens` rows, the last R = `recent_keep_tokens`, and of those between them the best K =
        `decode_keep_tokens` by importance less key redundancy, less a penalty for rows of a sentence that a later one
        repeats. Layers choose for themselves; heads share a choice unless `head_mode=per_kv_head`.
    """,
    "Acts": """
        While decoding, when the row has grown to S + K + R + `skipkv_compression_interval`; never after a prompt.
        Sentences are those of answers: they end with a line, with `skipkv_sentence_max_tokens` or with the answer, and
        are compared by the mean of their hidden states. Without a tokenizer or `skipkv_delimiter_ids` only keys are
        compared. `skipkv_importance=step` is the simpler score of one query. Activations are not steered.
    """,
    "Costs": """
        Up to the interval more than S + K + R rows per layer, the whole prompt before the first compaction,
        `skipkv_observation_tokens` queries per layer, and `skipkv_max_tracked_sentences` x hidden_size float32 per
        request. A decode step adds one hidden state to a sum; a compaction compares keys (up to 2 x kv_heads x n^2
        x head_dim operations per layer) and sentences.
    """,
    "Use it": """
        For long reasoning that says whole sentences again: plans, checks and restatements of the question.
    """,
}
