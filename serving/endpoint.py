"""What every endpoint does: read the body within limits, make engine requests, name ignored fields, log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from sparsejax.errors import RequestError
from sparsejax.request import ChainOptions, PrefixOptions, Request, SamplingParams
from sparsejax.serving.answer import ID
from sparsejax.serving.generation import Generation
from sparsejax.serving.protocol import decode_body, ignored_header
from sparsejax.serving.respond import KEEP_ALIVE_S
from sparsejax.serving.state import Served, ServerState

T = TypeVar("T", bound=msgspec.Struct)
A = TypeVar("A")

log = logging.getLogger("sparsejax.serving")

ANSWER_TIMEOUT_S = 30.0
IGNORED_HEADER = "X-Sparsejax-Ignored-Fields"


@dataclasses.dataclass(frozen=True)
class AppState:
    """What the app was made with; `request.app.state.sparsejax`."""

    state: ServerState
    max_body_bytes: int
    strict_requests: bool
    log_requests: bool
    keep_alive_s: float = KEEP_ALIVE_S


def app_state(http: HTTPRequest) -> AppState:
    """The app's settings and state."""
    return http.app.state.sparsejax


async def read_body(http: HTTPRequest, body_type: type[T], empty: bytes = b"") -> tuple[T, tuple[str, ...]]:
    """The checked body and the names of its unknown fields. `empty` stands for a body without a byte.

    Raises RequestError: 413 above the size limit (counted, whatever Content-Length says), 400 otherwise.
    """
    app = app_state(http)
    limit = app.max_body_bytes
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
    except ClientDisconnect:
        raise RequestError("the client left before the body was complete", status=499, code="disconnected") from None
    body, unknown = decode_body(b"".join(parts) or empty, body_type)
    if unknown and app.strict_requests:
        raise RequestError(f"unknown field {unknown[0][:200]}", param=unknown[0][:200], code="unknown_parameter")
    return body, unknown


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes or more, at most {limit} are allowed", status=413, code="body_too_large"
    )


async def answer_of(future: Future[A]) -> A:
    """What the engine's thread was asked. Raises a 503 if it takes too long; then it is not asked any more."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise RequestError(
            f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s",
            status=503,
            code="engine_busy",
            retry_after_s=5.0,
        ) from None


def engine_request(
    http: HTTPRequest,
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    sparse_method: str | None,
    served: Served,
    prefix: PrefixOptions,
    chain: ChainOptions | None = None,
) -> Request:
    """A checked engine request. `max_tokens` beyond the window means up to its end, unless requests are strict."""
    room = served.max_model_len - len(prompt_ids)
    if params.max_tokens is not None and room > 0 and not app_state(http).strict_requests:
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
    request = Request(request_id, tuple(prompt_ids), params, sparse_method, chain=chain, prefix=prefix)
    request.validate(served.tokenizer.vocab_size)
    return request


def answer_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Headers of a successful answer."""
    return {IGNORED_HEADER: ignored_header(ignored)} if ignored else {}


def log_request(http: HTTPRequest, identity: ID, generation: Generation) -> None:
    """One line per request with --enable-log-requests: sizes, never contents."""
    if app_state(http).log_requests:
        first = generation.requests[0]
        log.info(
            "%s %s id=%s prompts=%d prompt_tokens=%d n=%d max_tokens=%s method=%s",
            http.url.path,
            http.scope.get("request_id", ""),
            identity.text,
            len(generation.requests),
            sum(len(request.prompt_ids) for request in generation.requests),
            first.params.n,
            first.params.max_tokens,
            first.sparse_method or generation.served.default_method,
        )
