"""StreamingLLM (arXiv 2309.17453): keep the first S tokens (attention sinks) and the last R, drop the middle unscored.

Keys keep the rotation of their original position, or take that of the row they lie in ("reindex"). The prompt is
prefilled densely and compacted at its end; while decoding, the row grows to `ratio * (S + R)` rows and is cut back to
S + R.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import EvictContext, Method, Phase, choice_param, integer_param, knob

MOST_TURNS = 8
"""Rotations of a stored key in a dtype of 16 bits: after 8 it is 0.7% off, after 64 4%, after 512 26%."""


@dataclasses.dataclass(frozen=True)
class Params:
    sink_keep_tokens: int = knob(64, "first tokens that always stay", "tokens")
    recent_keep_tokens: int = knob(512, "most recent tokens that stay", "tokens")
    streamingllm_decode_trigger_ratio: float = knob(
        2.0, "decode compacts once the row holds this multiple of sink + recent tokens; at least 1"
    )
    streamingllm_position_mode: str = knob(
        "original", "rotary embedding sees a token's 'original' position, or the index of its row ('reindex')"
    )

    def __post_init__(self) -> None:
        integer_param("sink_keep_tokens", self.sink_keep_tokens, 0)
        integer_param("recent_keep_tokens", self.recent_keep_tokens, 1)
        choice_param("streamingllm_position_mode", self.streamingllm_position_mode, ("original", "reindex"))
        ratio = self.streamingllm_decode_trigger_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not math.isfinite(ratio) or ratio < 1:
            raise MethodError(f"streamingllm_decode_trigger_ratio must be a number of at least 1, got {ratio!r}")

    @property
    def budget(self) -> int:
        return self.sink_keep_tokens + self.recent_keep_tokens

    @property
    def reindexes(self) -> bool:
        return self.streamingllm_position_mode == "reindex"

    @property
    def turns(self) -> int:
        """How often a row moves up while decoding, before it is dropped."""
        return -(-self.recent_keep_tokens // max(1, self.trigger - self.budget))

    @property
    def trigger(self) -> int:
        return int(self.streamingllm_decode_trigger_ratio * self.budget)


def keep_count(params: Params, phase: Phase, lengths: np.ndarray) -> np.ndarray:
    if phase == "prompt":
        return np.minimum(lengths, params.budget)
    if phase == "token":
        return np.where(lengths >= params.trigger, np.minimum(lengths, params.budget), lengths)
    return lengths


def peak(params: Params, lengths: np.ndarray, prompt_tokens: int, decode_tokens: int) -> np.ndarray:
    prompt = lengths + prompt_tokens
    start = keep_count(params, "prompt", prompt) if prompt_tokens else lengths
    # A step appends before it compacts, so the row reaches the trigger (or one past the budget if they coincide).
    return np.maximum(prompt, np.minimum(start + decode_tokens, max(params.trigger, params.budget + 1)))


def keep_rows(params: Params, context: EvictContext) -> jax.Array:
    """Sinks, then the last R rows; the same for every layer and head."""
    index = jnp.arange(context.kept, dtype=jnp.int32)
    tail = context.length - context.kept + index
    return jnp.where(index < params.sink_keep_tokens, index, tail)[None]


def check(params: Params, geometry: Geometry) -> list[str]:
    if params.reindexes and geometry.dtype != "float32" and params.turns > MOST_TURNS:
        ratio = f"streamingllm_decode_trigger_ratio={params.streamingllm_decode_trigger_ratio}"
        turns = f"turns a {geometry.dtype} key up to {params.turns} times, rounding each time"
        return [f"streamingllm_position_mode=reindex with {ratio} {turns}; choose one that does at most {MOST_TURNS}"]
    return []


def build(params: Params) -> Method:
    return Method(
        "streamingllm",
        "retention",
        params,
        summary="keep the first and the most recent tokens",
        paper="arXiv 2309.17453",
        keep_rows=keep_rows,
        keep_count=keep_count,
        peak=peak,
        rotary="row" if params.reindexes else "position",
        check=check,
    )


def sized(rows: int) -> Params:
    sink = min(64, rows // 8)
    return Params(sink, rows - sink, streamingllm_decode_trigger_ratio=1.125)


PARAMS = Params
NOTES = {
    "Keeps": """
        The first S = `sink_keep_tokens` rows and the last R = `recent_keep_tokens`, the same in every layer and head.
        What lies between is dropped unseen.
    """,
    "Acts": """
        After a prompt that leaves more than S + R rows; while decoding, whenever the row has grown to
        `streamingllm_decode_trigger_ratio` times as many. Keys keep their original positions, so the text can't grow
        past the model's window. With `streamingllm_position_mode=reindex` a token stands at the index of its row, and
        keys that move up are turned back as far, which rounds them once more in the compute dtype: once while decoding
        with a ratio of 2, and at the end of each turn. In 16 bits ratios that turn a key more than 8 times are refused,
        and so are storages that round by themselves.
    """,
    "Costs": "Between S + R rows per layer and the ratio times as many; nothing is scored.",
    "Use it": """
        For fluent text whose beginning and present matter: chat, summaries of what was just said. It can't find what
        was told in the middle.
    """,
}
ALIASES = ("attention-sink", "attention_sink")
