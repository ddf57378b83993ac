"""PyramidKV (arXiv 2406.02069): the last queries vote for the rows that stay, and deeper layers keep fewer.

Each layer keeps the first S rows, its best-scored rows, and the last R. While decoding, a layer that has grown by
`decode_eviction_interval` rows past its budget is cut back to it, by the votes of the queries decoded since.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
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
    split_rows,
)

QUERIES, EVICTED_AT = "pyramidkv_queries", "pyramidkv_evicted_at"
log = logging.getLogger("sparsejax.methods")


@dataclasses.dataclass(frozen=True)
class Params:
    sink_keep_tokens: int = knob(64, "first tokens that always stay", "tokens")
    decode_keep_tokens: int = knob(4096, "tokens kept by score in the first layer", "tokens")
    recent_keep_tokens: int = knob(512, "most recent tokens that stay", "tokens")
    observation_window_size: int = knob(32, "last queries that vote", "tokens")
    decode_eviction_interval: int = knob(1024, "decoded tokens between evictions", "tokens")
    sparse_prefill_score_mode: str = knob("probability", "'probability' (attention mass) or 'logits' (largest logit)")
    softmax_domain: str = knob("candidates", "probability mode normalises over 'candidates' or 'all' rows")
    pool_kernel_size: int = knob(1, "odd width of the pooling over neighbouring scores of a prompt", "tokens")
    pool_type: str = knob("max", "'max' or 'avg' pooling")
    head_mode: str = knob("shared", "one keep set for all heads ('shared') or one per KV head ('per_kv_head')")
    pyramid_budget_mode: str = knob("ratio", "budgets follow a 'ratio' per layer, or an 'arithmetic' series around K")
    pyramid_layer_ratios: tuple[float, ...] | str | None = knob(
        None, "ratio of each layer, relative to the first one's; replaces start and least"
    )
    pyramidkv_start_layer: int = knob(0, "layers before it keep everything the first one does", "layer index")
    pyramidkv_start_ratio: float = knob(0.6, "ratio of the start layer")
    pyramidkv_least_layer: int | None = knob(None, "layers from it on have the least ratio; none is the last layer")
    pyramidkv_least_ratio: float = knob(0.01, "ratio of the least layer; linear in between")
    pyramidkv_beta: int = knob(20, "arithmetic: the last layer keeps K divided by it")

    def __post_init__(self) -> None:
        for name in ("sink_keep_tokens", "decode_keep_tokens", "recent_keep_tokens", "pyramidkv_start_layer"):
            integer_param(name, getattr(self, name), 0)
        for name in ("observation_window_size", "pool_kernel_size", "decode_eviction_interval", "pyramidkv_beta"):
            integer_param(name, getattr(self, name), 1)
        if self.pool_kernel_size % 2 == 0:
            raise MethodError(f"pool_kernel_size must be odd, got {self.pool_kernel_size}")
        choice_param("sparse_prefill_score_mode", self.sparse_prefill_score_mode, ("logits", "probability"))
        choice_param("softmax_domain", self.softmax_domain, ("candidates", "all"))
        choice_param("pool_type", self.pool_type, ("max", "avg"))
        choice_param("head_mode", self.head_mode, ("shared", "per_kv_head"))
        choice_param("pyramid_budget_mode", self.pyramid_budget_mode, ("ratio", "arithmetic"))
        object.__setattr__(self, "pyramid_layer_ratios", _numbers(self.pyramid_layer_ratios))
        if self.pyramid_layer_ratios == ():
            raise MethodError("pyramid_layer_ratios must name a ratio for each layer")
        for ratio in self.pyramid_layer_ratios or ():
            _check_ratio("pyramid_layer_ratios", ratio)
        for name in ("pyramidkv_start_ratio", "pyramidkv_least_ratio"):
            _check_ratio(name, getattr(self, name))
        least = self.pyramidkv_least_layer
        if least is not None:
            integer_param("pyramidkv_least_layer", least, self.pyramidkv_start_layer)
        if self.pyramid_layer_ratios is not None and self.pyramid_budget_mode == "arithmetic":
            raise MethodError("pyramid_layer_ratios are read with pyramid_budget_mode=ratio only")
        rises = (
            self.pyramidkv_start_layer == 0 and least != 0 and self.pyramidkv_least_ratio > self.pyramidkv_start_ratio
        )
        if rises and self.pyramid_layer_ratios is None:
            raise MethodError(
                f"pyramidkv_least_ratio={self.pyramidkv_least_ratio} is above pyramidkv_start_ratio="
                f"{self.pyramidkv_start_ratio}: later layers would keep more than decode_keep_tokens"
            )
        if self.budget == 0:
            raise MethodError("sink_keep_tokens + decode_keep_tokens + recent_keep_tokens must be above 0")

    @property
    def protected(self) -> int:
        """Rows that stay whatever their score."""
        return self.sink_keep_tokens + self.recent_keep_tokens

    @property
    def budget(self) -> int:
        """Rows that a layer of ratio one, or one of the mean budget of an arithmetic series, keeps."""
        return self.protected + self.decode_keep_tokens


def _numbers(value: Any) -> Any:
    """A list, or text with commas, semicolons or spaces between numbers, as a tuple."""
    if isinstance(value, str):
        try:
            return tuple(float(part) for part in re.split(r"[,;\s]+", value.strip()))
        except ValueError:
            raise MethodError(f"pyramid_layer_ratios must be numbers, got {value!r}") from None
    if isinstance(value, list | tuple):
        return tuple(value)
    return value if value is None else (value,)


def _check_ratio(name: str, ratio: Any) -> None:
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not number or not math.isfinite(ratio) or not 0 < ratio <= 1:
        raise MethodError(f"{name} must be above 0 and at most 1, got {ratio!r}")


def layer_ratios(params: Params, num_layers: int) -> list[float]:
    """Share of each layer."""
    if params.pyramid_layer_ratios is not None:
        return list(params.pyramid_layer_ratios)  # type: ignore[arg-type]
    start, high, low = (params.pyramidkv_start_layer, params.pyramidkv_start_ratio, params.pyramidkv_least_ratio)
    least = num_layers - 1 if params.pyramidkv_least_layer is None else params.pyramidkv_least_layer
    ratios = []
    for layer in range(num_layers):
        if layer < start:
            ratios.append(1.0)
        elif layer >= least:
            ratios.append(low)
        else:
            ratios.append(high - (high - low) * (layer - start) / (least - start))
    return ratios


@functools.lru_cache(maxsize=64)
def ratio_budgets(params: Params, num_layers: int) -> np.ndarray:
    """Rows that each layer keeps, int32 [num_layers]; the most of any if the ratios are of another number of layers."""
    ratios = layer_ratios(params, num_layers)
    budgets = [params.protected + int(params.decode_keep_tokens * ratio / ratios[0]) for ratio in ratios]
    return np.array(budgets if len(budgets) == num_layers else [max(budgets)] * num_layers, np.int32)


def series(params: Params, num_layers: int, highest: int) -> np.ndarray:
    """Budgets that fall from `highest` by equal steps, with K on average: int32 [num_layers]."""
    lowest = 2 * params.decode_keep_tokens - highest
    step = (highest - lowest) // (num_layers - 1) if num_layers > 1 else 0
    return (params.protected + highest - step * np.arange(num_layers)).astype(np.int32)


def arithmetic_budgets(params: Params, num_layers: int, length: int, uniform: bool = True) -> np.ndarray:
    """Rows that each layer keeps of `length`, int32 [num_layers]; more than there are where nothing is evicted.

    Args:
      length: rows of the longest layer.
      uniform: all layers are as long. Then a row below 2 K keeps as many rows in every layer. A row that has become a
        pyramid stays one, so evicting twice is evicting once.
    """
    scored = params.decode_keep_tokens
    if length < params.budget or (uniform and length < 2 * scored):
        return np.full(num_layers, params.budget, np.int32)
    highest = min(2 * scored - scored // params.pyramidkv_beta, length - params.protected)
    return series(params, num_layers, highest)


@functools.lru_cache(maxsize=64)
def most(params: Params, num_layers: int) -> np.ndarray:
    """The most that each layer may keep after an eviction, int32 [num_layers]."""
    if params.pyramid_budget_mode == "ratio":
        return ratio_budgets(params, num_layers)
    scored = params.decode_keep_tokens
    highest = range(scored, 2 * scored - scored // params.pyramidkv_beta + 1)
    return np.max([series(params, num_layers, value) for value in highest], axis=0)


def _num_layers(lengths: np.ndarray) -> int:
    """Layers that an array over (layers, heads) tells apart."""
    return lengths.shape[0] if lengths.ndim == 2 else 1


def budgets(params: Params, lengths: np.ndarray) -> np.ndarray:
    """Rows that each layer keeps, int32 [layers, 1]; for lengths of no layer in particular the most that any keeps."""
    num_layers = _num_layers(lengths)
    if params.pyramid_budget_mode == "ratio":
        return ratio_budgets(params, num_layers)[:, None]
    uniform = num_layers > 1 and bool((lengths == lengths.max()).all())
    return arithmetic_budgets(params, num_layers, int(lengths.max()), uniform)[:, None]


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    if phase == "chunk":
        return lengths
    limits = budgets(params, lengths)
    if phase == "prompt":
        return np.minimum(lengths, limits)
    return np.where(lengths >= limits + params.decode_eviction_interval, limits, lengths)


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    prompt = lengths + prompt_tokens
    start = keep_count(params, "prompt", prompt) if prompt_tokens else lengths
    limits = most(params, _num_layers(lengths))[:, None] + params.decode_eviction_interval
    return np.maximum(prompt, np.minimum(start + decode_tokens, limits))


def check(params: Params, geometry: Geometry) -> list[str]:
    num_layers, reasons = geometry.num_layers, []
    if params.pyramid_budget_mode == "ratio":
        explicit, start, least = (
            params.pyramid_layer_ratios,
            params.pyramidkv_start_layer,
            params.pyramidkv_least_layer,
        )
        if explicit is not None and len(explicit) != num_layers:
            reasons.append(f"pyramid_layer_ratios has {len(explicit)} ratios, the model {num_layers} layers")
        if explicit is None and start >= num_layers:
            reasons.append(f"pyramidkv_start_layer={start} is not one of the model's {num_layers} layers")
        if explicit is None and least is not None and least >= num_layers:
            reasons.append(f"pyramidkv_least_layer={least} is not one of the model's {num_layers} layers")
        fewest = int(ratio_budgets(params, num_layers).min())
    else:
        highest = 2 * params.decode_keep_tokens - params.decode_keep_tokens // params.pyramidkv_beta
        fewest = int(series(params, num_layers, highest).min())
    if fewest == 0:
        reasons.append("a layer would keep no rows: sink_keep_tokens + recent_keep_tokens must be above 0")
    return reasons


def aux(params: Params, geometry: Geometry) -> dict[str, AuxSpec]:
    window = (params.observation_window_size, geometry.num_q_heads, geometry.head_dim)
    return {QUERIES: AuxSpec("row", window), EVICTED_AT: AuxSpec("row", (), "int32")}


def on_write(params: Params, geometry: Geometry, page_aux: Aux, row_aux: Aux, written: Written) -> tuple[Aux, Aux]:
    """Records queries, and where a layer's rows were last evicted: layers take turns, each by what came since."""
    at, evicted_at = (written.layer, written.rows), row_aux[EVICTED_AT]
    if written.phase == "pack":
        assert written.next_positions is not None
        evicted = written.head_pages[:, 0, 0] != 0  # a layer with nothing due is packed onto the null page
        now = jnp.where(evicted, written.next_positions, evicted_at[at])
        return page_aux, {**row_aux, EVICTED_AT: evicted_at.at[at].set(now)}
    if written.phase == "token":
        return page_aux, row_aux
    evicted_at = evicted_at.at[at].set(written.positions[:, 0] + written.num_valid)
    ring = eviction.record_queries(row_aux[QUERIES], written, params.observation_window_size)
    return page_aux, {**row_aux, QUERIES: ring, EVICTED_AT: evicted_at}


def on_decoded(params: Params, context: DecodedContext) -> Aux:
    ring = eviction.record_decoded(context.row_aux[QUERIES], context, params.observation_window_size)
    return {**context.row_aux, QUERIES: ring}


def score_rows(params: Params, context: EvictContext) -> jax.Array:
    """Votes for each row, pooled: float32 [1 or kv_heads, capacity]."""
    protected = {"first": params.sink_keep_tokens, "recent": params.recent_keep_tokens}
    observed = context.observed
    if context.phase == "token":
        observed = context.next_position - context.row_aux[EVICTED_AT]
    scores = eviction.window_votes(
        context,
        context.row_aux[QUERIES],
        *eviction.ring_positions(context.next_position, params.observation_window_size, observed),
        **protected,
        probability=params.sparse_prefill_score_mode == "probability",
        everything=params.softmax_domain == "all",
        shared=params.head_mode == "shared",
    )
    kernel = params.pool_kernel_size if context.phase == "prompt" else 1
    return eviction.pool_candidates(scores, context.length, kernel, params.pool_type, **protected)


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    scores = score_rows(params, context)
    return eviction.choose_counted_rows(
        scores,
        context.length,
        context.kept,
        jnp.broadcast_to(context.counts.max(), scores.shape[:1]),  # all heads of a layer keep as many
        first=params.sink_keep_tokens,
        recent=params.recent_keep_tokens,
    )


def build(params: Params) -> Method:
    if params.recent_keep_tokens < params.observation_window_size:
        log.warning(
            "recent_keep_tokens=%d is smaller than observation_window_size=%d: window rows compete with few votes",
            params.recent_keep_tokens,
            params.observation_window_size,
        )
    return Method(
        "pyramidkv",
        "retention",
        params,
        summary="keep the prompt rows that its last queries attend to, fewer in deeper layers",
        paper="arXiv 2406.02069",
        granularity=Granularity.LAYER,
        aux=aux,
        on_write=on_write,
        on_decoded=on_decoded,
        keep_rows=keep_rows,
        keep_count=keep_count,
        peak=peak,
        check=check,
    )


def sized(rows: int) -> Params:
    split = split_rows(rows)
    mean_share = (1 + Params.pyramidkv_least_ratio / Params.pyramidkv_start_ratio) / 2
    split["decode_keep_tokens"] = round(split["decode_keep_tokens"] / mean_share)
    return Params(**split, observation_window_size=max(1, min(32, split["recent_keep_tokens"])))


PARAMS = Params
NOTES = {
    "Keeps": """
        As `snapkv`, but fewer rows the deeper a layer lies. The first layer keeps S + K + R rows, layer i S + K x r_i /
        r_0 + R. The ratios fall in a line from `pyramidkv_start_ratio` to `pyramidkv_least_ratio`, or are
        `pyramid_layer_ratios` (numbers between commas, or between semicolons where commas part knobs). With
        `pyramid_budget_mode=arithmetic` the budgets are the authors' series with K on average.
    """,
    "Acts": """
        After the last chunk of a prompt, in each layer that holds more than its budget. While decoding, in each layer
        that has grown `decode_eviction_interval` rows past its budget, by the votes of the queries decoded since. In
        arithmetic mode prompts below 2 K rows leave S + K + R rows in every layer.
    """,
    "Costs": """
        With the default ratios a little more than half of the rows that `snapkv` holds with the same knobs (2658 of
        4672 in 32 layers), the interval on top while decoding, and W queries per layer. Layers have pages of their own,
        so what a deep layer does not keep is free for others. The votes cost as much as those of `snapkv`.
    """,
    "Use it": """
        Where `snapkv` is right and memory is short: deep layers look at few tokens. Give it twice the K to hold as
        much.
    """,
}
