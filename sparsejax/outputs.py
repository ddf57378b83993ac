"""What the offline API returns. Standard library only."""

from __future__ import annotations

import dataclasses

from sparsejax.detokenize import Delta
from sparsejax.request import ChainReport, FinishReason, RequestStats, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Output:
    """One continuation of a prompt.

    Attributes:
      index: 0..n-1.
      text: without the stop string or token that ended it.
      token_ids: all generated ids, the one that ended the text included.
      finish_reason: "stop" or "length".
      stop_reason: the stop string or token id that ended the text; None for end-of-sequence or length.
      logprobs: one per token, if asked for.
      stats: what it cost: times in seconds; tokens seen, still resident and read per step.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: RequestStats


@dataclasses.dataclass(frozen=True)
class Completion:
    """What `generate` and `chat` return for one prompt.

    Attributes:
      prompt: the text, or None if ids or messages were given.
      prompt_ids: what the model saw.
      outputs: `SamplingParams.n` continuations.
      chain: what became of the prompt's chain, if it has one; `chain.chain_id` continues it.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    chain: ChainReport | None = None

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the first continuation."""
        return self.outputs[0].token_ids

    @property
    def stats(self) -> RequestStats:
        """Cost of the first continuation."""
        return self.outputs[0].stats


class Gathered:
    """Deltas of one choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.piece.text)
        self.token_ids += delta.piece.token_ids
        self.logprobs += delta.piece.logprobs
        if delta.finish_reason is not None:
            self.last = delta

    def output(self, index: int) -> Output:
        assert self.last is not None
        assert self.last.finish_reason is not None
        return Output(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            logprobs=tuple(self.logprobs) or None,
            stats=self.last.stats or RequestStats(),
        )
