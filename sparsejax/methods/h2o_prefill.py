"""H2O between prompt chunks: a long prompt never holds more rows than a budget and one chunk.

Rows are ranked by the attention they have received (arXiv 2306.14048; compacting between chunks is not in the paper).
It is lossy prefill: later chunks only see what is left, so results depend on the chunk size. The last chunk stays whole
unless the retention method, which then shares the scores, says otherwise.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from sparsejax import accumulated_scores
from sparsejax.accumulated_scores import Scoring
from sparsejax.method import EvictContext, Method, Phase, knob


@dataclasses.dataclass(frozen=True)
class Params:
    h2o_prefill_budget: int = knob(8192, "tokens kept between prompt chunks", "tokens")
    h2o_decode_budget: int = knob(4096, "h2o_prefill_budget is at least that", "tokens")
    h2o_recent_ratio: float = knob(0.5, "share of a budget that goes to the most recent tokens")
    h2o_prefill_score_window: int = knob(128, "last queries of a chunk that score; 0 is all", "tokens")
    sparse_prefill_score_mode: str | None = knob(None, "'logits' (the default) or 'probability' (attention mass)")
    h2o_logit_scale: str | None = knob("attn", "scale of 'logits': that of attention ('attn') or 'none'")
    h2o_head_reduction: str = knob("reference", "a chunk's query heads join by their largest ('reference') or 'sum'")
    head_mode: str = knob("shared", "one keep set for all heads ('shared') or one per KV head ('per_kv_head')")

    def __post_init__(self) -> None:
        accumulated_scores.check_params(self, "h2o")

    @property
    def scoring(self) -> Scoring:
        return accumulated_scores.scoring_of(self, "h2o")

    @property
    def budget(self) -> int:
        """Rows kept between chunks."""
        return self.h2o_prefill_budget


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    return np.minimum(lengths, params.h2o_prefill_budget) if phase == "chunk" else lengths


def prompt_peak(params: Params, lengths: np.ndarray, prompt_tokens: int, chunk_tokens: int) -> np.ndarray:
    return np.maximum(lengths, params.h2o_prefill_budget) + chunk_tokens


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    return accumulated_scores.keep_rows(context, params.scoring.shared, params.h2o_recent_ratio)


def refuses(params: Params, others: tuple[Method, ...]) -> list[str]:
    """It goes with nothing else, or with a member that carries the scores on (and whatever that one goes with)."""
    partners = [other for other in others if accumulated_scores.accumulates(other)]
    if not partners:
        names = " and ".join(other.name for other in others)
        return [f"h2o_prefill needs dense attention or a method that accumulates attention as it does, not {names}"]
    reasons = []
    for partner in partners:
        shared = f"h2o_prefill and {partner.name} share their scores, so both need the same"
        reasons += [f"{shared} {name}" for name in accumulated_scores.differing_knobs(params, partner.params, "h2o")]
        kept = int(partner.kept_after("prompt", np.full((1, 1), np.iinfo(np.int32).max)).max())
        if kept > params.h2o_prefill_budget:
            reasons.append(f"h2o_prefill_budget={params.h2o_prefill_budget} is less than {partner.name} keeps ({kept})")
    return reasons


def build(params: Params) -> Method:
    return Method(
        "h2o_prefill",
        "prefill",
        params,
        summary="between prompt chunks keep the tokens that have received most attention, and the most recent ones",
        paper="extends arXiv 2306.14048",
        aux=accumulated_scores.aux,
        on_write=accumulated_scores.on_write,
        observe=accumulated_scores.observe,
        keep_rows=keep_rows,
        keep_count=keep_count,
        prompt_peak=prompt_peak,
        refuses=refuses,
        private_rows=True,
        chunk_dependent=True,
    )


def sized(rows: int) -> Params:
    return Params(h2o_prefill_budget=rows, h2o_decode_budget=min(4096, rows))


PARAMS = Params
NOTES = {
    "Keeps": """
        The rows that have received most attention and, as `h2o_recent_ratio` of the `h2o_prefill_budget`, the most
        recent ones. Layers choose for themselves; heads share a choice unless `head_mode=per_kv_head`.
    """,
    "Acts": """
        After every chunk of a prompt but the last, so the prompt's end and the answer stay whole. Later chunks see what
        is left: results depend on the chunk size. It goes with dense attention and with `h2o`, which carries the scores
        on; `h2o` alone does the same.
    """,
    "Costs": """
        The budget and one chunk of rows per layer, and one float32 for each row and KV head; attention of a chunk to no
        more than that. Scoring passes over the keys once per chunk ('logits') or twice ('probability') with at most
        `h2o_prefill_score_window` queries.
    """,
    "Use it": "For prompts that don't fit, or whose attention takes too long, when their bulk may be lost.",
}
ALIASES = ("h2o-prefill",)
