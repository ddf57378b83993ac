"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax.detokenize import Delta
from sparsejax.errors import RequestError
from sparsejax.serving import prompts
from sparsejax.serving.endpoint import ID, AppState, answer_headers, app_state, engine_request, log_request, read_body
from sparsejax.serving.errors import JSON
from sparsejax.serving.generation import Generation
from sparsejax.serving.logprobs import completion_logprobs
from sparsejax.serving.protocol import MAX_PROMPTS, CompletionBody
from sparsejax.serving.respond import Totals, cost_block, respond
from sparsejax.serving.sampling import check_common, sampling_params, unsupported
from sparsejax.serving.state import Served

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(http: HTTPRequest) -> Response:
    """Continues one or more prompts."""
    app = app_state(http)
    served = app.state.served()
    body, ignored = await read_body(http, CompletionBody)
    check_common(body, served)
    _check_unsupported(body)
    scoring = bool(body.echo) and body.max_tokens == 0
    max_tokens = 1 if scoring else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(
        body, served, max_tokens=max_tokens, max_tokens_field="max_tokens", logprobs=_logprobs(body)
    )
    prompt_ids = await _prompt_ids(app, served, body)
    identity = ID.new("cmpl")
    requests = [
        engine_request(http, identity.engine_id(i), ids, params, body.sparse_method, served)
        for i, ids in enumerate(prompt_ids)
    ]
    generation = Generation(served, requests, prompt_context=True)
    answer = CompletionAnswer(identity, body, served, generation)
    if scoring and not body.stream:
        return JSON(answer.whole(), headers=answer_headers(ignored))
    if scoring:
        raise RequestError("max_tokens=0 can't be streamed: nothing is generated", param="stream")
    log_request(http, identity, generation)
    return await respond(
        http,
        app.state,
        generation,
        answer,
        stream=bool(body.stream),
        headers=answer_headers(ignored),
        keep_alive_s=app.keep_alive_s,
    )


class CompletionAnswer:
    """Deltas as completion chunks, or as one completion. Choices are numbered prompt by prompt."""

    def __init__(self, identity: ID, body: CompletionBody, served: Served, generation: Generation) -> None:
        self._served = served
        self._return_ids = bool(body.return_token_ids)
        self._logprobs = body.logprobs is not None
        self._method = body.sparse_method or served.default_method
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        n = generation.requests[0].params.n
        self._totals = Totals(generation, n)
        self._echo: list[str] = []
        self._prompt_ids: list[list[int]] = []
        for request in generation.requests:
            echoed = served.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) if body.echo else ""
            self._echo += [echoed] * n
            self._prompt_ids += [list(request.prompt_ids)] * n
        if body.echo and isinstance(body.prompt, str):
            self._echo = [body.prompt] * len(self._echo)
        elif body.echo and isinstance(body.prompt, list) and all(isinstance(p, str) for p in body.prompt):
            self._echo = [str(prompt) for prompt in body.prompt for _ in range(n)]
        self._choices = [self._empty_choice(index) for index in range(len(self._echo))]
        self._head = {
            "id": identity.text,
            "object": "text_completion",
            "created": identity.created,
            "model": served.model_names[0] if body.model is None else body.model,
            "system_fingerprint": identity.fingerprint,
        }

    def opening(self) -> list[dict[str, Any]]:
        """The echoed prompt comes first, as a chunk of its own."""
        chunks = []
        for choice in self._choices:
            if choice["text"] or self._return_ids:
                chunk: dict[str, Any] = {
                    "index": choice["index"],
                    "text": choice["text"],
                    "logprobs": None,
                    "finish_reason": None,
                }
                if self._return_ids:
                    chunk["prompt_token_ids"] = choice["prompt_token_ids"]
                chunks.append(self._chunk(chunk))
        return chunks

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        piece = delta.piece
        shown_ids = self._return_ids and piece.token_ids
        logprobs = self._piece_logprobs(delta) if self._logprobs and piece.token_ids else None
        if not piece.text and logprobs is None and not shown_ids and delta.finish_reason is None:
            return []
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if shown_ids:
            choice["token_ids"] = list(piece.token_ids)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        chunk = self._chunk(choice)
        if delta.stats is not None:
            chunk["sparsejax"] = cost_block(self._method, delta.stats)
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        if not self._include_usage:
            return []
        chunk = self._chunk()
        chunk["usage"] = self._totals.usage()
        chunk["sparsejax"] = self._totals.cost(self._method)
        return [chunk]

    def add(self, delta: Delta) -> None:
        self._totals.add(delta)
        choice = self._choices[delta.index]
        choice["text"] += delta.piece.text
        if self._return_ids:
            choice["token_ids"] += delta.piece.token_ids
        if self._logprobs and delta.piece.token_ids:
            new = self._piece_logprobs(delta)
            old = choice["logprobs"]
            if old is None:
                choice["logprobs"] = new
            else:
                for name, values in new.items():
                    old[name] = old[name] + values if old[name] is not None and values is not None else None
        if delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason

    def whole(self) -> dict[str, Any]:
        for choice in self._choices:
            # Only a request for no tokens at all ends without a last delta.
            choice["finish_reason"] = choice["finish_reason"] or "length"
        return {
            **self._head,
            "choices": self._choices,
            "usage": self._totals.usage(),
            "sparsejax": self._totals.cost(self._method),
        }

    def _piece_logprobs(self, delta: Delta) -> dict[str, Any]:
        return completion_logprobs(self._served.tokenizer, delta.piece, len(self._echo[delta.index]))

    def _empty_choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo[index],
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._return_ids:
            choice |= {"token_ids": [], "prompt_token_ids": self._prompt_ids[index]}
        return choice

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": list(choices)}
        if self._continuous:
            chunk["usage"] = self._totals.usage()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


def _check_unsupported(body: CompletionBody) -> None:
    if body.prompt is None:
        raise RequestError("prompt is missing", param="prompt", code="missing_required_parameter")
    if body.suffix:
        raise unsupported("suffix", "filling in the middle is not supported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"it must equal n={body.n or 1}, got {body.best_of}")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise unsupported("response_format", 'only {"type": "text"} is supported')
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "log-probabilities of the prompt are not supported")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "echo with logprobs needs log-probabilities of the prompt, which are not supported")


def _logprobs(body: CompletionBody) -> int | None:
    if body.logprobs is not None and not 0 <= body.logprobs <= 20:
        raise RequestError(f"logprobs must be in [0, 20], got {body.logprobs}", param="logprobs")
    return body.logprobs


async def _prompt_ids(app: AppState, served: Served, body: CompletionBody) -> list[list[int]]:
    """One list of ids per prompt."""
    prompt = body.prompt
    assert prompt is not None
    special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif not prompt:
        raise RequestError("prompt is empty; give at least one", param="prompt")
    elif all(isinstance(item, int) for item in prompt):
        prompts.check_ids(served, prompt, "prompt")  # type: ignore[arg-type]
        return [list(prompt)]  # type: ignore[list-item]
    else:
        items = list(prompt)
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"{len(items)} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
    kinds = {type(item) for item in items}
    if kinds not in ({str}, {list}):
        raise RequestError(
            "prompt must be a string, strings, token ids or lists of token ids, not a mix", param="prompt"
        )
    found: list[list[int]] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            ids = await prompts.encode(app.state, served, item, add_special_tokens=special)
        else:
            prompts.check_ids(served, item, f"prompt[{i}]")
            ids = item
        if not ids:
            raise RequestError(f"prompt{f'[{i}]' if len(items) > 1 else ''} is empty", param="prompt")
        found.append(ids)
    return found
