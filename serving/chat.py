"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax.detokenize import Delta, TextPiece
from sparsejax.errors import RequestError
from sparsejax.request import ChainOptions, Request
from sparsejax.serving import anchoring, prompts
from sparsejax.serving.anchoring import Prompt
from sparsejax.serving.answer import ID, Answer
from sparsejax.serving.append import check_append, suffix_ids
from sparsejax.serving.chain_answer import message_at
from sparsejax.serving.chain_fields import chain_options, prefix_options, tenant_of
from sparsejax.serving.endpoint import answer_headers, app_state, engine_request, log_request, read_body
from sparsejax.serving.generation import Generation
from sparsejax.serving.logprobs import chat_logprobs
from sparsejax.serving.protocol import ChatBody
from sparsejax.serving.prune_policy import PolicyTurn, prune_policy
from sparsejax.serving.respond import respond
from sparsejax.serving.sampling import check_common, sampling_params, unsupported
from sparsejax.serving.state import Served, ServerState


async def chat_completions(http: HTTPRequest) -> Response:
    """Continues a conversation."""
    app = app_state(http)
    served = app.state.served()
    body, ignored = await read_body(http, ChatBody)
    check_common(body, served)
    check_unsupported(body)
    logprobs = _logprobs(body)
    max_tokens, max_tokens_field = _max_tokens(body)
    params = sampling_params(body, served, max_tokens=max_tokens, max_tokens_field=max_tokens_field, logprobs=logprobs)
    hindrance = "n" if params.n > 1 else None
    chain = chain_options(body, served, tenant_of(http), hindrance=hindrance)
    prefix = prefix_options(body, tenant_of(http))
    policy = prune_policy(body, served)
    identity = ID.new("chatcmpl")

    sent: list[Prompt] = []

    async def engine_turn(prompt: Prompt) -> Request:
        sent.append(prompt)
        request_id = identity.engine_id(len(sent) - 1)
        return engine_request(http, request_id, prompt.ids, params, body.sparse_method, served, prefix, prompt.chain)

    async def whole(options: ChainOptions | None) -> Request:
        return await engine_turn(await _prompt(app.state, served, body, options))

    instead = None
    if chain is None or not chain.append:
        request = await whole(chain)
    elif body.chain_append_start is None:
        check_append(body)
        ids, joint = await suffix_ids(app.state, served, body)
        request = await engine_turn(Prompt(ids, dataclasses.replace(chain, append_joint=joint)))
    else:
        check_append(body)
        if chain.on_miss == "serve":
            # All messages are here: what can't be appended is served as a whole.
            options = dataclasses.replace(chain, append=False, expected_tokens=None, expected_digest=None)
            instead = functools.partial(whole, options)
        try:
            request = await engine_turn(await _prompt(app.state, served, body, chain, body.chain_append_start))
        except RequestError as error:
            if instead is None or error.code != "append_not_possible":
                raise
            request, instead = await instead(), None
    generation = Generation(served, [request])

    def ended() -> None:
        """The answer is complete."""
        if policy is not None and body.messages is not None:
            conversation = functools.partial(prompts.conversation, served, body.messages, **template_options(body))
            method, last, report = body.sparse_method or served.default_method, sent[-1], generation.chain()
            chain_id = None if report is None or report.state == "gone" else report.chain_id
            appended = last.chain is not None and last.chain.append
            about = (app.state, served, policy, conversation, last.ids, method, prefix, chain_id, appended)
            PolicyTurn(*about).start()

    answer = ChatAnswer(identity, body, served, generation, sent, ended)
    log_request(http, identity, generation)
    return await respond(
        http,
        app.state,
        generation,
        answer,
        stream=bool(body.stream),
        headers=answer_headers(ignored),
        keep_alive_s=app.keep_alive_s,
        instead=instead,
    )


class ChatAnswer(Answer):
    """Chat's form of an answer."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        identity: ID,
        body: ChatBody,
        served: Served,
        generation: Generation,
        sent: Sequence[Prompt],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(identity, body, served, generation)
        self._messages = body.messages
        self._ended = ended  # called once all choices have ended by themselves
        self._sent = sent  # what the engine got; the last one counts

    def text_fields(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def append_text(self, choice: dict[str, Any], text: str) -> None:
        choice["message"]["content"] += text

    def chunk_fields(self, text: str, last: bool) -> dict[str, Any]:
        return {"delta": {"content": text} if text or not last else {}}

    def logprobs(self, piece: TextPiece) -> dict[str, Any]:
        return chat_logprobs(self.served.tokenizer, piece)

    def opening(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self.chunk({"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None})
            for choice in self.choices
        ]
        chunks[0] |= self._prompt_ids()
        return chunks

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._prompt_ids()

    def add(self, delta: Delta) -> None:
        super().add(delta)
        turn = self._sent[-1].turn
        if turn is not None:
            turn.add(delta, self.choices[0]["message"], self.generation.chain())
        if delta.finish_reason is not None and all(choice["finish_reason"] for choice in self.choices):
            self._ended()

    def locate_divergence(self) -> None:
        self.diverged_message = self._sent[-1].message
        if self.diverged_message is not None:
            return
        report, messages = self.generation.chain(), self._messages
        if report is not None and report.diverged_at is not None and messages:
            ids = self.generation.requests[0].prompt_ids
            self.diverged_message = message_at(self.served.tokenizer, messages, ids, report.diverged_at)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.generation.requests[0].prompt_ids)} if self.return_ids else {}


def check_unsupported(body: ChatBody) -> None:
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


def template_options(body: ChatBody) -> dict[str, Any]:
    """How the template is to render the messages: arguments of `prompts.conversation`."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "variables": {**variables, **(body.chat_template_kwargs or {})},
    }


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


async def _prompt(
    state: ServerState,
    served: Served,
    body: ChatBody,
    chain: ChainOptions | None,
    append_start: int | None = None,
) -> Prompt:
    """The ids of a request; with a chain they are those that it has, as far as the messages are its own."""
    if body.prompt_token_ids is not None:
        if body.messages:
            raise RequestError("send messages or prompt_token_ids, not both", param="prompt_token_ids")
        if not body.prompt_token_ids:
            raise RequestError("prompt_token_ids is empty", param="prompt_token_ids")
        prompts.check_ids(served, body.prompt_token_ids, "prompt_token_ids")
        return Prompt(body.prompt_token_ids, chain)
    if body.messages is None:
        raise RequestError("messages is missing", param="messages", code="missing_required_parameter")
    options = template_options(body)
    if chain is None:
        return Prompt(await prompts.render(state, served, body.messages, **options))
    return await anchoring.chat(
        state,
        served,
        prompts.conversation(served, body.messages, **options),
        body.sparse_method or served.default_method,
        chain,
        append_start=append_start,
        match="text" if body.chain_match == "text" else "messages",
        answer_tokens=_max_tokens(body)[0] or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
