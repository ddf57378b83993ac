"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax.errors import RequestError
from sparsejax.request import check_token_ids
from sparsejax.serving import prompts
from sparsejax.serving.endpoint import answer_headers, app_state, read_body
from sparsejax.serving.errors import JSON
from sparsejax.serving.logprobs import token_label
from sparsejax.serving.protocol import DetokenizeBody, TokenizeBody
from sparsejax.serving.sampling import check_model


async def tokenize(http: HTTPRequest) -> Response:
    """Token ids of a text or of rendered messages, exactly as a completion or chat request would get them."""
    app = app_state(http)
    served = app.state.served()
    body, ignored = await read_body(http, TokenizeBody)
    check_model(body.model, served)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = await prompts.render(
            app.state,
            served,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
    else:
        special = body.add_special_tokens is not False
        ids = await prompts.encode(app.state, served, body.prompt or "", add_special_tokens=special, limit=False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [token_label(served.tokenizer, token) for token in ids]
    return JSON(answer, headers=answer_headers(ignored))


async def detokenize(http: HTTPRequest) -> Response:
    """Text of token ids; special tokens are spelled out unless skip_special_tokens."""
    app = app_state(http)
    served = app.state.served()
    body, ignored = await read_body(http, DetokenizeBody)
    check_model(body.model, served)
    check_token_ids(body.tokens, served.tokenizer.vocab_size, "tokens")
    skip = bool(body.skip_special_tokens)
    text = await prompts.in_pool(app.state, lambda: served.tokenizer.decode(body.tokens, skip_special_tokens=skip))
    return JSON({"prompt": text}, headers=answer_headers(ignored))
