"""What an answer looks like, whole or in chunks: the part that chat and text completions share."""

from __future__ import annotations

import abc
import dataclasses
import time
import uuid
from typing import Any

import sparsejax
from sparsejax.detokenize import Delta, TextPiece
from sparsejax.request import RequestStats
from sparsejax.serving.chain_answer import chain_headers, chain_ids, chain_object, miss_object, prefix_headers
from sparsejax.serving.chain_fields import asked_for
from sparsejax.serving.generation import Generation
from sparsejax.serving.protocol import GenerationBody
from sparsejax.serving.state import Served


@dataclasses.dataclass(frozen=True)
class ID:
    """Identity of an answer: what OpenAI calls id, created and system_fingerprint."""

    text: str
    created: int
    fingerprint: str = f"sparsejax-{sparsejax.__version__}"

    @classmethod
    def new(cls, prefix: str) -> ID:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()))

    def engine_id(self, prompt: int) -> str:
        """The engine's id of one prompt. The client's X-Request-Id is not used: it need not be unique."""
        return f"{self.text}-{prompt}"


class Answer(abc.ABC):
    """Turns deltas into chunks, and collects them into a whole answer.

    Every delta is given to `add`, streamed or not, so usage and cost are the same. Subclasses say what differs between
    the endpoints; `whole_object` and `chunk_object` are OpenAI's names of the two forms.
    """

    whole_object = ""
    chunk_object = ""

    def __init__(self, identity: ID, body: GenerationBody, served: Served, generation: Generation) -> None:
        self.served = served
        self.generation = generation
        self.num_choices_per_prompt = generation.requests[0].params.n
        self.return_ids = bool(body.return_token_ids)
        self._method = body.sparse_method or served.default_method
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._logprobs = generation.requests[0].params.logprobs is not None
        self._stats: dict[int, RequestStats] = {}
        self._compat = bool(body.chain_compat)
        self._asked = asked_for(body)  # a client that asked for a chain is told that it has none
        self.diverged_message: int | None = None
        self._head = {
            "id": identity.text,
            "object": "",
            "created": identity.created,
            "model": body.model or served.model_names[0],
            "system_fingerprint": identity.fingerprint,
        }
        self.choices = [
            self._empty_choice(index) for index in range(self.num_choices_per_prompt * len(generation.requests))
        ]

    # What differs.

    @abc.abstractmethod
    def text_fields(self, text: str) -> dict[str, Any]:
        """How a choice of a whole answer starts."""

    @abc.abstractmethod
    def append_text(self, choice: dict[str, Any], text: str) -> None:
        """Adds text to a choice of the whole answer."""

    @abc.abstractmethod
    def chunk_fields(self, text: str, last: bool) -> dict[str, Any]:
        """How a choice of a chunk shows new text."""

    @abc.abstractmethod
    def logprobs(self, piece: TextPiece) -> dict[str, Any]:
        """Log-probabilities of a piece; lists in it are joined over pieces."""

    @abc.abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first delta."""

    # What is shared.

    def locate_divergence(self) -> None:
        """Finds the message where the chain and the prompt part ways, if there are messages. Takes time."""
        self.diverged_message = None

    def headers(self) -> dict[str, str]:
        """Of what was reused, if there is exactly one prompt; without a chain that is known in the end."""
        if len(self.generation.requests) != 1:
            return {}
        if self.generation.chain() is None:
            stats = self._stats.get(0)
            return {} if stats is None else prefix_headers(stats, self._method, self.diverged_message)
        return chain_headers(self.generation.chain(), self._method, self._compat, self.diverged_message)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of one delta: none if nothing of it shows."""
        piece, last = delta.piece, delta.finish_reason is not None
        logprobs = self.logprobs(piece) if self._logprobs and piece.token_ids else None
        ids = list(piece.token_ids) if self.return_ids else []
        if not (piece.text or logprobs or ids or last):
            return []
        choice = {
            "index": delta.index,
            **self.chunk_fields(piece.text, last),
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if ids:
            choice["token_ids"] = ids
        if last:
            choice["stop_reason"] = delta.stop_reason
        if last:
            choice |= self._chain_of_choice(delta.index)
        chunk = self.chunk(choice)
        if delta.stats is not None:
            chunk["sparsejax"] = self._cost(delta.stats)
        if last and len(self.generation.requests) == 1 and (report := self.generation.chain()) is not None:
            chunk["chain"] = chain_object(report)
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        """Chunks after the last delta: usage, if asked for."""
        if not self._include_usage:
            return []
        return [{**self.chunk(), "usage": self.usage(), "sparsejax": self._cost(*self._stats.values())}]

    def add(self, delta: Delta) -> None:
        """Collects a delta."""
        if delta.stats is not None:
            self._stats[delta.index] = delta.stats
        choice, piece = self.choices[delta.index], delta.piece
        self.append_text(choice, piece.text)
        if self.return_ids:
            choice["token_ids"] += piece.token_ids
        if self._logprobs and piece.token_ids:
            new, old = self.logprobs(piece), choice["logprobs"] or {}
            choice["logprobs"] = {name: old[name] + new[name] if old.get(name) else new[name] for name in new}
        if delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once all deltas were added."""
        if len(self.generation.requests) > 1:
            for choice in self.choices:
                choice |= self._chain_of_choice(choice["index"])
        return {
            **self._head,
            "object": self.whole_object,
            **self._chain(whole=True),
            "choices": self.choices,
            "usage": self.usage(),
            "sparsejax": self._cost(*self._stats.values()),
        }

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """A chunk with these choices."""
        chunk = {**self._head, "object": self.chunk_object, **self._chain(), "choices": list(choices)}
        if self._continuous_usage:
            chunk["usage"] = self.usage()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object so far. A prompt counts once however many choices it has.

        What is not known yet, in a chunk before the last, is None or left out.
        """
        prompt, reused = 0, []
        for i, request in enumerate(self.generation.requests):
            report = self.generation.chain(i)  # with appended prompts only the engine knows the whole context
            prompt += len(request.prompt_ids) if report is None else report.reused_tokens + report.prefilled_tokens
            reused += [report.reused_tokens] if report else []
        completion = self.generation.completion_tokens()
        first_choices = [stats for index, stats in self._stats.items() if index % self.num_choices_per_prompt == 0]
        details = None
        if len(first_choices) == len(self.generation.requests):
            details = {
                "cached_tokens": sum(stats.cached_tokens for stats in first_choices),
                "resident_tokens": sum(stats.resident_prefix_tokens for stats in first_choices),
                "degraded_tokens": sum(stats.degraded_tokens for stats in first_choices),
            }
        elif len(reused) == len(self.generation.requests):
            details = {"cached_tokens": sum(reused)}
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        if self.generation.chains and details is not None:  # where clients of SparseEngine look
            usage["cached_tokens"] = usage["reused_tokens"] = details["cached_tokens"]
        return usage

    def _chain(self, whole: bool = False) -> dict[str, Any]:
        """Fields of the answer or a chunk. With several prompts each choice has its own."""
        if len(self.generation.requests) > 1:
            return {}
        report = self.generation.chain()
        if report is None:
            return {"chain_id": None, "chain_status": "disabled"} if self._asked else {}
        return chain_ids(report, self._compat) | ({"chain": chain_object(report)} if whole else {})

    def _chain_of_choice(self, index: int) -> dict[str, Any]:
        if len(self.generation.requests) == 1:
            return {}
        report = self.generation.chain(index // self.num_choices_per_prompt)
        return {} if report is None else {**chain_ids(report, self._compat), "chain": chain_object(report)}

    def _cost(self, *stats: RequestStats) -> dict[str, Any]:
        found = cost(self._method, *stats)
        if len(self.generation.requests) == 1:
            known = self.generation.chain() or self._stats.get(0)
            if known is not None:
                found["cache_miss"] = miss_object(known, self.diverged_message)
        return found

    def _empty_choice(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            **self.text_fields(""),
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        return choice | {"token_ids": []} if self.return_ids else choice


def cost(method: str, *all_stats: RequestStats) -> dict[str, Any]:
    """The `sparsejax` object of a response; of several choices the largest sizes and times, and the mean speed."""
    if not all_stats:
        return {"method": method}
    speeds = [stats.tokens_per_s for stats in all_stats if stats.tokens_per_s]
    return {
        "method": method,
        "queue_s": round(max(stats.queue_s for stats in all_stats), 6),
        "prefill_s": round(max(stats.prefill_s for stats in all_stats), 6),
        "ttft_s": round(min(stats.ttft_s for stats in all_stats), 6),
        "decode_s": round(max(stats.decode_s for stats in all_stats), 6),
        "tokens_per_s": round(sum(speeds) / len(speeds), 3) if speeds else None,
        "seen_tokens": max(stats.seen_tokens for stats in all_stats),
        "resident_tokens": max(stats.resident_tokens for stats in all_stats),
        "retained_fraction": round(
            min(1.0, min(stats.resident_tokens / max(1, stats.seen_tokens) for stats in all_stats)), 6
        ),
        "read_tokens": max(stats.read_tokens for stats in all_stats),
        "preemptions": sum(stats.preemptions for stats in all_stats),
    }
