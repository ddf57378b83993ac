"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax.detokenize import Delta, TextPiece
from sparsejax.errors import RequestError
from sparsejax.request import ChainOptions
from sparsejax.serving import anchoring, prompts
from sparsejax.serving.anchoring import Prompt
from sparsejax.serving.answer import ID, Answer
from sparsejax.serving.chain_fields import chain_options, prefix_options, tenant_of
from sparsejax.serving.endpoint import AppState, answer_headers, app_state, engine_request, log_request, read_body
from sparsejax.serving.errors import JSON
from sparsejax.serving.generation import Generation
from sparsejax.serving.logprobs import completion_logprobs
from sparsejax.serving.protocol import MAX_PROMPTS, CompletionBody
from sparsejax.serving.respond import respond
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
    prompts_given = len(body.prompt) if isinstance(body.prompt, list) and not _is_ids(body.prompt) else 1
    hindrance = "n" if params.n > 1 else "echo" if body.echo else None
    chain = chain_options(body, served, tenant_of(http), prompts=prompts_given, hindrance=hindrance)
    prefix = prefix_options(body, tenant_of(http))
    sent = await _prompts(app, served, body, chain)
    identity = ID.new("cmpl")
    requests = [
        engine_request(
            http, identity.engine_id(i), prompt.ids, params, body.sparse_method, served, prefix, prompt.chain
        )
        for i, prompt in enumerate(sent)
    ]
    generation = Generation(served, requests, prompt_context=True)
    answer = CompletionAnswer(identity, body, served, generation, sent)
    if scoring:
        return _only_the_prompt(body, answer, answer_headers(ignored))
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


def _only_the_prompt(body: CompletionBody, answer: CompletionAnswer, headers: dict[str, str]) -> Response:
    """The answer to echo with max_tokens=0: the engine has nothing to do."""
    if body.stream:
        raise RequestError("max_tokens=0 can't be streamed: nothing is generated", param="stream")
    for choice in answer.choices:
        choice["finish_reason"] = "length"
    return JSON(answer.whole(), headers=headers)


class CompletionAnswer(Answer):
    """The text endpoint's form of an answer. Choices are numbered prompt by prompt."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, identity: ID, body: CompletionBody, served: Served, generation: Generation, sent: Sequence[Prompt]
    ) -> None:
        super().__init__(identity, body, served, generation)
        self._sent = sent
        for choice in self.choices:
            prompt = choice["index"] // self.num_choices_per_prompt
            if body.echo:
                choice["text"] = self._echoed(body, prompt)
            if self.return_ids:
                choice["prompt_token_ids"] = list(generation.requests[prompt].prompt_ids)

    def text_fields(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def append_text(self, choice: dict[str, Any], text: str) -> None:
        choice["text"] += text

    def chunk_fields(self, text: str, last: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, piece: TextPiece) -> dict[str, Any]:
        return completion_logprobs(self.served.tokenizer, piece)

    def add(self, delta: Delta) -> None:
        super().add(delta)
        prompt = delta.index // self.num_choices_per_prompt
        turn = self._sent[prompt].turn
        if turn is not None:
            turn.add(delta, self.choices[delta.index]["text"], self.generation.chain(prompt))

    def opening(self) -> list[dict[str, Any]]:
        """The echoed prompt and its ids, if asked for."""
        chunks = []
        for choice in self.choices:
            if choice["text"] or self.return_ids:
                shown = {name: choice[name] for name in ("index", "text", "logprobs", "finish_reason")}
                if self.return_ids:
                    shown["prompt_token_ids"] = choice["prompt_token_ids"]
                chunks.append(self.chunk(shown))
        return chunks

    def _echoed(self, body: CompletionBody, prompt: int) -> str:
        """The text as it was sent; token ids decoded."""
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        text = given[prompt] if prompt < len(given) else None
        if isinstance(text, str):
            return text
        ids = self.generation.requests[prompt].prompt_ids
        return self.served.tokenizer.decode(ids, skip_special_tokens=False)


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


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(isinstance(item, int) for item in prompt)


async def _prompts(app: AppState, served: Served, body: CompletionBody, chain: ChainOptions | None) -> list[Prompt]:
    """The prompts' ids; those of a text that a chain stands for are the chain's own."""
    prompt = body.prompt
    assert prompt is not None
    appended = chain is not None and chain.append  # what is appended doesn't begin like a text of its own
    special = body.add_special_tokens is not False and not (appended and body.add_special_tokens is None)
    method = body.sparse_method or served.default_method
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif not prompt:
        raise RequestError("prompt is empty; give at least one", param="prompt")
    elif _is_ids(prompt):
        prompts.check_ids(served, prompt, "prompt")  # type: ignore[arg-type]
        return [Prompt(list(prompt), chain)]  # type: ignore[arg-type]
    else:
        items = list(prompt)
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"{len(items)} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
    kinds = {type(item) for item in items}
    if kinds not in ({str}, {list}):
        raise RequestError(
            "prompt must be a string, strings, token ids or lists of token ids, not a mix", param="prompt"
        )
    found: list[Prompt] = []
    for i, item in enumerate(items):
        if not isinstance(item, str):
            prompts.check_ids(served, item, f"prompt[{i}]")
            one = Prompt(item, chain)
        elif chain is None or appended:
            one = Prompt(await prompts.encode(app.state, served, item, add_special_tokens=special), chain)
        else:
            one = await anchoring.text(app.state, served, item, method, chain, add_special_tokens=special)
        if not one.ids:
            raise RequestError(f"prompt{f'[{i}]' if len(items) > 1 else ''} is empty", param="prompt")
        found.append(one)
    return found
