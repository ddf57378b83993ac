"""What goes into the engine and what comes out. Standard library only."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from sparsejax.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 16
MAX_CHOICES = 128


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {type(value).__name__}", param=name)
    value = float(value)
    inside = (low < value if low_open else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}", param=name)
    return value


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {type(value).__name__}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)
    return value


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. `validate` checks every field and names the one at fault.

    Attributes:
      max_tokens: most tokens to generate; None means up to the model's window.
      min_tokens: end-of-sequence and stop ids are masked before this many tokens.
      temperature: 0 is greedy.
      top_p: nucleus mass in (0, 1].
      top_k: keep the k best; 0 keeps all.
      min_p: keep tokens with at least this share of the best token's probability.
      presence_penalty, frequency_penalty: subtracted from logits of generated tokens, in [-2, 2].
      repetition_penalty: divides (positive) or multiplies (negative) logits of prompt and generated tokens.
      logit_bias: (token id, added logit) pairs, at most 256.
      seed: with the same seed the same request samples the same tokens, alone or in company. None draws one.
      stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
      stop_token_ids: token ids that end the text.
      ignore_eos: go on after end-of-sequence.
      n: independent continuations.
      logprobs: None for none, else how many alternatives (0..20) beside the sampled token.
      skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Lists and mappings are accepted and frozen, so that a request can't change after it was checked.
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        bias = self.logit_bias or ()
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        object.__setattr__(self, "logit_bias", tuple((token, value) for token, value in pairs))

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError naming the field and the limit."""
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}", param="min_tokens"
            )
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for token, value in self.logit_bias:
            _integer("logit_bias", token, 0, vocab_size - 1)
            _number("logit_bias", value, -100.0, 100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each stop must be a string of 1 to {MAX_STOP_STRING_CHARS} characters", param="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class ChainOptions:
    """How a request uses the Chain Cache: conversations that keep their compressed memory between turns.

    Attributes:
      chain_id: the chain to continue; None looks for one if `lookup`, else begins one.
      append: the prompt is only what comes after the chain's tokens.
      append_joint: the first token to append ends the last answer: it is left out if the chain ends with it.
      lookup: without an id, go on from the longest known prefix.
      on_miss: "serve" computes the whole context again where a chain can't be continued, "error" refuses.
      on_busy: "fork" leaves a chain to its other turn, "error" refuses.
      branch: an edited context goes on from a checkpoint: "fork" leaves the chain as it is, "rewind" cuts it.
      salt, tenant: chains are found by the same ones only.
      expected_tokens, expected_digest: what the client believes the chain's tokens to be (see `cache.chain.digest_of`).
      priority: each one doubles what keeping the chain is worth.
      ttl_s: idle longer, it may be dropped; None is the engine's.
      expected_resume_s: when the client thinks that the next turn comes.
      implicit: the client may know nothing of chains: under pressure its chain is dropped rather than moved, until a
        second turn shows that it is a conversation.
      shared_tokens: so many tokens of the prompt begin other conversations too (system prompt, tools): others that come
        without an id start from there.
      recall: "host" keeps the rows that the method drops in host memory, and lends those that the next turn's prompt
        looks for back to that turn; "off" drops them for good.
      recall_budget: most rows that are lent to a turn, in each head; "all" lends whatever there is.
    """

    chain_id: str | None = None
    append: bool = False
    append_joint: bool = False
    lookup: bool = True
    on_miss: Literal["serve", "error"] = "serve"
    on_busy: Literal["fork", "error"] = "fork"
    branch: Literal["fork", "rewind"] = "fork"
    salt: str = ""
    tenant: str = ""
    expected_tokens: int | None = None
    expected_digest: bytes | None = None
    priority: int = 0
    ttl_s: float | None = None
    expected_resume_s: float | None = None
    implicit: bool = False
    shared_tokens: int = 0
    recall: Literal["off", "host"] = "off"
    recall_budget: int | Literal["all"] = 1024

    def validate(self) -> None:
        """Raises RequestError naming the field."""
        for name, choices in (
            ("recall", ("off", "host")),
            ("on_miss", ("serve", "error")),
            ("on_busy", ("fork", "error")),
            ("branch", ("fork", "rewind")),
        ):
            if getattr(self, name) not in choices:
                raise RequestError(f"{name} must be one of {', '.join(choices)}", param=name)
        if self.append and not self.chain_id:
            raise RequestError("append needs a chain_id", param="chain_id")
        _integer("priority", self.priority, -100, 100)
        _integer("shared_tokens", self.shared_tokens, 0, 2**31 - 1)
        if self.recall_budget != "all":
            if isinstance(self.recall_budget, str):
                raise RequestError('recall_budget must be an integer or "all"', param="recall_budget")
            _integer("recall_budget", self.recall_budget, 0, 2**31 - 1)
        for name in ("ttl_s", "expected_resume_s"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), 0.0, 1e9)


@dataclasses.dataclass(frozen=True)
class PrefixOptions:
    """How a request uses the radix prefix cache.

    Attributes:
      salt, tenant: rows are found by the same ones only.
      exact: only rows that pruning has had no part in.
    """

    salt: str = ""
    tenant: str = ""
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class RecallReport:
    """What became of rows that a chain's method had dropped, in one turn.

    Attributes:
      evicted_rows: dropped rows of the chain in host memory, on average over layers and heads.
      evicted_pages: the same in pages, over all layers and heads.
      scored_pages: of those that were there when the turn began, how many were scored by its queries; none if all were
        lent.
      lent_pages: how many were lent to the turn.
      lent_rows: the same in rows of the longest head.
      bytes_moved: copied to the device for it.
      seconds: from the beginning of the turn until the rows were there, as the host saw it.
      stored_bytes: host memory that the chain's dropped rows take.
      reason: why less was lent than asked for: "no room" (in the cache), "lost" (pages went for want of host memory),
        "refused" (by the runner), or None.
    """

    evicted_rows: int = 0
    evicted_pages: int = 0
    scored_pages: int = 0
    lent_pages: int = 0
    lent_rows: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    stored_bytes: int = 0
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class ChainReport:
    """What became of a request's chain.

    Attributes:
      chain_id: to continue with.
      status: "created", "resumed", "recreated", "forked", "adopted" or "rewound".
      parent_id: the chain it was forked from.
      reused_tokens, prefilled_tokens: of the prompt.
      reason: why less was reused than could have been, in a sentence.
      miss: the same in a word: "cold", "diverged", "salt", "method", "fingerprint", "busy", "short", "unknown", or how
        the chain ended ("evicted", "expired", "deleted", "restart", ...).
      diverged_at: the first token that is another one than the chain has.
      restored_from: where the reused rows were: "device", "host" or "disk".
      retained_tokens: of the reused ones, those that still have rows.
      processed_tokens: after the turn; 0 while it is under way.
      total_tokens: of the conversation after the turn, the last sampled one included; 0 while it is under way.
      expires_s: seconds of idleness after which the chain may go, once the turn is over.
      state: "active", "idle", or "gone" with `gone_reason`.
      quality: what has been lost so far, by name (see `cache.chain.Quality`).
      recall: of dropped rows, if the request asked for it.
    """

    chain_id: str
    status: str
    parent_id: str | None = None
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    reason: str | None = None
    processed_tokens: int = 0
    state: str = "active"
    gone_reason: str | None = None
    quality: Mapping[str, int | bool] = dataclasses.field(default_factory=dict)
    miss: str | None = None
    diverged_at: int | None = None
    restored_from: str | None = None
    retained_tokens: int = 0
    total_tokens: int = 0
    expires_s: float | None = None
    recall: RecallReport | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      request_id: unique among live requests.
      prompt_ids: token ids, at least one.
      params: sampling parameters.
      sparse_method: method name or composition served by this engine; None takes the engine's default.
      arrival_s: `time.monotonic()` at arrival.
      chain: use of the Chain Cache; None keeps nothing.
      prefix: use of the radix prefix cache; None is the salt and tenant of `chain`, or no use where there is none.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    sparse_method: str | None = None
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    chain: ChainOptions | None = None
    prefix: PrefixOptions | None = None

    def validate(self, vocab_size: int) -> None:
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        check_token_ids(self.prompt_ids, vocab_size, "prompt")
        self.params.validate(vocab_size)
        if self.chain is not None:
            self.chain.validate()
            if self.params.n != 1:
                raise RequestError(f"a chain goes on in one way: n must be 1, not {self.params.n}", param="n")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """JAX clamps bad ids silently, so they must be caught here."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return  # twice as fast as to look at each, which the event loop waits for
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"{param}[{i}]={token!r} is not a token id in [0, {vocab_size - 1}]", param=param)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of one generated token, from the model's raw distribution.

    Attributes:
      token: the sampled id.
      logprob: its log-probability.
      top: (id, logprob) of the best alternatives, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class RequestStats:
    """What a choice cost. Times in seconds of `time.monotonic()` differences, sizes in tokens.

    Of the `cached_tokens`, which were not computed, `resident_prefix_tokens` still had KV when the choice began, and
    `degraded_tokens` lie behind the beginning of a range that was pruned: theirs is missing, or may have been computed
    on what was left. `seen_tokens` were processed, `resident_tokens` still hold KV (both largest over layers and
    heads), `read_tokens` are what the last decode step read, averaged over layers and heads. `preemptions` counts how
    often the choice lost its place; `rebuilt` says that its KV was then recomputed, because the swap space was full,
    rather than restored. `miss`, `miss_reason` and `diverged_at` say why not more was cached, as in `ChainReport`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    resident_prefix_tokens: int = 0
    degraded_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    seen_tokens: int = 0
    resident_tokens: int = 0
    read_tokens: int = 0
    preemptions: int = 0
    rebuilt: bool = False
    miss: str | None = None
    miss_reason: str | None = None
    diverged_at: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first over the time they took; None where there is no second one."""
        return (
            (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s > 0 else None
        )


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """What the engine says of one choice. The last event of a choice has `finish_reason` set, exactly once.

    Attributes:
      request_id: the request.
      index: the choice, 0..n-1.
      token_ids: new tokens, in order. A stop token that ended the text is included.
      logprobs: one per new token, or None if not asked for.
      finish_reason: None while the choice goes on.
      stop_reason: the stop token id that ended it, if one did (None for end-of-sequence).
      error: what went wrong when `finish_reason` is "error".
      stats: set on the last event.
      chain: set on the last event of a request with a chain, and on its first one, which has no token.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: Exception | None = None
    stats: RequestStats | None = None
    chain: ChainReport | None = None
