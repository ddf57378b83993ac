"""One error object for every refusal: `{"error": {message, type, param, code}}`, as OpenAI's clients expect.

Those of chains say more: see `docs/chains.md`.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sparsejax.errors import ChainError, EngineDeadError, RequestError

log = logging.getLogger("sparsejax.serving")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_DEFAULT_RETRY_AFTER_S = 1
_MOST_CHARS = 2000
"""Of one text in an error object: what a client sent is not sent back whole."""


class JSON(Response):
    """A JSON response encoded by msgspec, which refuses NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and error object of an exception. Unexpected ones are logged, and show no internals."""
    if isinstance(error, RequestError):
        status, message, param, code = error.status, error.message, error.param, error.code
    elif isinstance(error, EngineDeadError):
        status, message, param, code = error.status, str(error), None, error.code
    else:
        log.error("a request failed", exc_info=error)
        status, message, param, code = 500, "internal error; the server's log has the details", None, "internal_error"
    message, param = _short(message), param and _short(param)
    body = {"message": message, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}
    if not isinstance(error, ChainError):
        return status, {"error": body}
    chain_id = error.chain_id and _short(error.chain_id)
    body |= {
        "type": "chain_error",
        "chain_id": chain_id,
        "retryable": error.retryable,
        "recovery": error.recovery,
        "reason": error.reason,
        "token": error.token,
    }
    # What clients of SparseEngine look at.
    return status, {"error": body, "detail": {"code": code, "chain_id": chain_id, "message": message}}


def _short(text: str) -> str:
    """Its beginning and its end, if it is long."""
    half = _MOST_CHARS // 2
    return text if len(text) <= _MOST_CHARS else f"{text[:half]} ... {text[-half:]}"


def error_response(error: Exception) -> JSON:
    """The response of a refusal, with Retry-After where trying again makes sense."""
    status, body = describe(error)
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None or status in (429, 503):
        headers["Retry-After"] = str(max(1, round(retry_after_s or _DEFAULT_RETRY_AFTER_S)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSON(body, status, headers)


async def on_request_error(request: Request, error: Exception) -> Response:
    """Handler of RequestError and EngineDeadError."""
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of the router's 404 and 405; a plain OPTIONS is answered with the allowed methods."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    if error.status_code == 404:
        refusal = RequestError(f"there is no {request.url.path} here", status=404, code="not_found")
    elif error.status_code == 405:
        allowed = headers.get("Allow", "")
        refusal = RequestError(
            f"{request.url.path} does not take {request.method}; allowed: {allowed}",
            status=405,
            code="method_not_allowed",
        )
    else:
        refusal = RequestError(error.detail, status=error.status_code, code="http_error")
    response = error_response(refusal)
    response.headers.update(headers)
    return response
