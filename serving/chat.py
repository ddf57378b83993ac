"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax.detokenize import Delta
from sparsejax.errors import RequestError
from sparsejax.serving import prompts
from sparsejax.serving.endpoint import ID, answer_headers, app_state, engine_request, log_request, read_body
from sparsejax.serving.generation import Generation
from sparsejax.serving.logprobs import chat_logprobs
from sparsejax.serving.protocol import ChatBody
from sparsejax.serving.respond import Totals, cost_block, respond
from sparsejax.serving.sampling import check_common, sampling_params, unsupported
from sparsejax.serving.state import Served


async def chat_completions(http: HTTPRequest) -> Response:
    """Continues a conversation."""
    app = app_state(http)
    served = app.state.served()
    body, ignored = await read_body(http, ChatBody)
    check_common(body, served)
    _check_unsupported(body)
    logprobs = _logprobs(body)
    max_tokens, max_tokens_field = _max_tokens(body)
    params = sampling_params(body, served, max_tokens=max_tokens, max_tokens_field=max_tokens_field, logprobs=logprobs)
    prompt_ids = await _prompt_ids(app.state, served, body)
    identity = ID.new("chatcmpl")
    request = engine_request(http, identity.engine_id(0), prompt_ids, params, body.sparse_method, served)
    generation = Generation(served, [request])
    answer = ChatAnswer(identity, body, served, generation)
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


class ChatAnswer:
    """Deltas as chat chunks, or as one completion."""

    def __init__(self, identity: ID, body: ChatBody, served: Served, generation: Generation) -> None:
        self._served = served
        self._prompt_ids = list(generation.requests[0].prompt_ids) if body.return_token_ids else None
        self._token_ids = bool(body.return_token_ids)
        self._logprobs = bool(body.logprobs)
        self._method = body.sparse_method or served.default_method
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        n = generation.requests[0].params.n
        self._totals = Totals(generation, n)
        self._choices: list[dict[str, Any]] = [_empty_choice(index, self._token_ids) for index in range(n)]
        self._head = {
            "id": identity.text,
            "created": identity.created,
            "model": served.model_names[0] if body.model is None else body.model,
            "system_fingerprint": identity.fingerprint,
        }

    def opening(self) -> list[dict[str, Any]]:
        chunks = []
        for choice in self._choices:
            shown = {"index": choice["index"], "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks.append(self._chunk({**shown, "logprobs": None}))
        if chunks and self._prompt_ids is not None:
            chunks[0]["prompt_token_ids"] = self._prompt_ids
        return chunks

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        piece = delta.piece
        logprobs = chat_logprobs(self._served.tokenizer, piece) if self._logprobs and piece.token_ids else None
        shown_ids = self._token_ids and piece.token_ids
        if not piece.text and logprobs is None and not shown_ids and delta.finish_reason is None:
            return []
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": piece.text} if piece.text or delta.finish_reason is None else {},
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
        choice["message"]["content"] += delta.piece.text
        if self._token_ids:
            choice["token_ids"] += delta.piece.token_ids
        if self._logprobs and delta.piece.token_ids:
            new = chat_logprobs(self._served.tokenizer, delta.piece)
            if choice["logprobs"] is None:
                choice["logprobs"] = new
            else:
                choice["logprobs"]["content"] += new["content"]
        if delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason

    def whole(self) -> dict[str, Any]:
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": self._choices,
            "usage": self._totals.usage(),
            "sparsejax": self._totals.cost(self._method),
        }
        if self._prompt_ids is not None:
            answer["prompt_token_ids"] = self._prompt_ids
        return answer

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": list(choices)}
        if self._continuous:
            chunk["usage"] = self._totals.usage()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


def _empty_choice(index: int, token_ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": "", "refusal": None},
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
    if token_ids:
        choice["token_ids"] = []
    return choice


def _check_unsupported(body: ChatBody) -> None:
    """Known fields that would change the answer and are not implemented."""
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", 'tool calling is not supported; leave tools out or send tool_choice "none"')
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", 'tool calling is not supported; only "none" is possible')
    if body.functions and body.function_call != "none":
        raise unsupported("functions", "tool calling is not supported")
    if body.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", "tool calling is not supported")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise unsupported("response_format", 'only {"type": "text"} is supported')
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", 'only ["text"] is supported')
    if body.audio is not None:
        raise unsupported("audio", "audio is not supported")
    if body.web_search_options is not None:
        raise unsupported("web_search_options", "web search is not supported")
    if body.chat_template is not None:
        raise unsupported("chat_template", "templates are set by the server's --chat-template")


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= 20:
            raise RequestError(f"top_logprobs must be in [0, 20], got {body.top_logprobs}", param="top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={old} and max_completion_tokens={new} differ; send one of them", param="max_completion_tokens"
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


async def _prompt_ids(state: Any, served: Served, body: ChatBody) -> Sequence[int]:
    if body.prompt_token_ids is not None:
        if body.messages:
            raise RequestError("send messages or prompt_token_ids, not both", param="prompt_token_ids")
        if not body.prompt_token_ids:
            raise RequestError("prompt_token_ids is empty", param="prompt_token_ids")
        prompts.check_ids(served, body.prompt_token_ids, "prompt_token_ids")
        return body.prompt_token_ids
    if body.messages is None:
        raise RequestError("messages is missing", param="messages", code="missing_required_parameter")
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return await prompts.render(
        state,
        served,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables={**variables, **(body.chat_template_kwargs or {})},
    )
