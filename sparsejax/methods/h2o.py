"""H2O (arXiv 2306.14048): keep the rows that have received most attention so far, and the most recent ones.

Scores carry on across chunks, decoded tokens and turns. Alone it also compacts prompts between chunks, which
`h2o_prefill_compaction` switches off: the paper evicts from the whole prompt. `NOTES` has the paper's settings.
"""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np

from sparsejax import accumulated_scores
from sparsejax.accumulated_scores import Scoring
from sparsejax.method import EvictContext, Method, Phase, choice_param, integer_param, knob

log = logging.getLogger("sparsejax.methods")


@dataclasses.dataclass(frozen=True)
class Params:
    h2o_prefill_budget: int = knob(8192, "tokens kept between prompt chunks", "tokens")
    h2o_decode_budget: int = knob(4096, "tokens kept after the prompt", "tokens")
    h2o_recent_ratio: float = knob(0.5, "share of a budget that goes to the most recent tokens")
    h2o_prefill_score_window: int = knob(128, "last queries of a chunk that score; 0 is all", "tokens")
    sparse_prefill_score_mode: str | None = knob(None, "'logits' (the default) or 'probability' (attention mass)")
    h2o_logit_scale: str | None = knob("attn", "scale of 'logits': that of attention ('attn') or 'none'")
    h2o_head_reduction: str = knob("reference", "a chunk's query heads join by their largest ('reference') or 'sum'")
    head_mode: str = knob("shared", "one keep set for all heads ('shared') or one per KV head ('per_kv_head')")
    h2o_prefill_compaction: bool = knob(True, "where no prefill method is composed, compact between prompt chunks")
    h2o_decode_eviction: bool = knob(False, "also score and evict while decoding; forces 'probability'")
    h2o_decode_eviction_interval: int = knob(128, "decoded tokens between evictions", "tokens")

    def __post_init__(self) -> None:
        integer_param("h2o_decode_eviction_interval", self.h2o_decode_eviction_interval, 1)
        for name in ("h2o_prefill_compaction", "h2o_decode_eviction"):
            choice_param(name, getattr(self, name), (True, False))
        accumulated_scores.check_params(self, "h2o", self.h2o_decode_eviction)

    @property
    def scoring(self) -> Scoring:
        return accumulated_scores.scoring_of(self, "h2o", self.h2o_decode_eviction)

    @property
    def budget(self) -> int:
        """Rows kept after a prompt."""
        return self.h2o_decode_budget

    @property
    def trigger(self) -> int:
        """Rows at which a decoding request is compacted."""
        return self.h2o_decode_budget + self.h2o_decode_eviction_interval


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    if phase == "token" and params.h2o_decode_eviction:
        return np.where(lengths >= params.trigger, params.h2o_decode_budget, lengths)
    if phase == "chunk" and params.h2o_prefill_compaction:
        return np.minimum(lengths, params.h2o_prefill_budget)
    if phase == "prompt" or (phase == "pressure" and params.h2o_decode_eviction):
        return np.minimum(lengths, params.h2o_decode_budget)
    return lengths


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    prompt = lengths + prompt_tokens
    decoded = (keep_count(params, "prompt", prompt) if prompt_tokens else lengths) + decode_tokens
    if params.h2o_decode_eviction:
        decoded = np.minimum(decoded, params.trigger)
    return np.maximum(prompt, decoded)


def prompt_peak(params: Params, lengths: np.ndarray, prompt_tokens: int, chunk_tokens: int) -> np.ndarray:
    if not params.h2o_prefill_compaction:
        return lengths + prompt_tokens
    return np.maximum(lengths, params.h2o_prefill_budget) + chunk_tokens


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    return accumulated_scores.keep_rows(context, params.scoring.shared, params.h2o_recent_ratio)


def build(params: Params) -> Method:
    scoring = params.scoring
    if scoring.decoding and params.sparse_prefill_score_mode != "probability":
        log.warning("h2o_decode_eviction adds up attention mass, so sparse_prefill_score_mode is 'probability'")
    return Method(
        "h2o",
        "retention",
        params,
        summary="keep the tokens that have received most attention, and the most recent ones",
        paper="arXiv 2306.14048",
        aux=accumulated_scores.aux,
        on_write=accumulated_scores.on_write,
        observe=accumulated_scores.observe,
        attend_token=accumulated_scores.attend_token if scoring.decoding else None,
        keep_rows=keep_rows,
        keep_count=keep_count,
        peak=peak,
        prompt_peak=prompt_peak,
        private_rows=True,
        chunk_dependent=params.h2o_prefill_compaction or not scoring.additive,
    )


def sized(rows: int) -> Params:
    return Params(h2o_decode_budget=rows, h2o_prefill_budget=max(Params.h2o_prefill_budget, rows))


PARAMS = Params
NOTES = {
    "Keeps": """
        The rows that have received most attention and, as `h2o_recent_ratio` of the budget, the most recent ones; the
        first rows are not protected. Scores add up over chunks, turns and, with decode eviction, decoded tokens. Layers
        choose for themselves; heads share a choice unless `head_mode=per_kv_head`.
    """,
    "Acts": """
        After a prompt that leaves more than `h2o_decode_budget` rows. Between chunks of a long prompt too, down to
        `h2o_prefill_budget`, unless another prefill method is composed or `h2o_prefill_compaction` is off; results then
        depend on the chunk size. With `h2o_decode_eviction` whenever `h2o_decode_eviction_interval` more rows have been
        decoded, or earlier if pages run out.
    """,
    "Costs": """
        The budget and all decoded rows (at most the interval with decode eviction) per layer, and one float32 for each
        row and KV head. Scoring passes over the keys once per chunk ('logits') or twice ('probability'), with at most
        `h2o_prefill_score_window` queries; with decode eviction, decoded tokens add up the weights of their attention.
    """,
    "Use it": """
        When what the text dwells on matters more than what its end asks for. As in the paper, but for the positions of
        keys: `head_mode=per_kv_head,sparse_prefill_score_mode=probability,h2o_prefill_score_window=0,
        h2o_head_reduction=sum,h2o_prefill_compaction=false,h2o_decode_eviction=true,h2o_decode_eviction_interval=1`.
    """,
}
