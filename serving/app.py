"""The ASGI application: routes, middleware and error handlers.

`create_app` needs a `ServerState` only, so the server can listen, report progress and refuse requests politely before
there is an engine.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsejax.config import ServerConfig
from sparsejax.errors import EngineDeadError, RequestError
from sparsejax.serving import (
    chain_answer,
    chains,
    chat,
    completions,
    errors,
    health,
    metrics,
    models,
    prefix_cache,
    prune,
    tokenize,
)
from sparsejax.serving.auth import BearerAuth
from sparsejax.serving.endpoint import IGNORED_HEADER, AppState
from sparsejax.serving.respond import KEEP_ALIVE_S
from sparsejax.serving.state import ServerState

log = logging.getLogger("sparsejax.serving")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def create_app(
    state: ServerState, config: ServerConfig | None = None, *, keep_alive_s: float = KEEP_ALIVE_S
) -> Starlette:
    """The application.

    Args:
      state: phase and, once attached, the engine.
      config: keys, origins, limits.
      keep_alive_s: silence after which a stream gets a comment.
    """
    config = config or ServerConfig()
    handlers: dict[Any, Any] = {
        RequestError: errors.on_request_error,
        EngineDeadError: errors.on_request_error,
        HTTPException: errors.on_http_error,
    }
    # Outermost first: every answer, also a 401 or a crash, has the headers browsers need and a request id.
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", IGNORED_HEADER, *chain_answer.HEADERS],
        ),
        Middleware(RequestID),
        Middleware(BearerAuth, keys=config.api_key),
    ]
    app = Starlette(routes=_routes(), middleware=middleware, exception_handlers=handlers)
    app.state.sparsejax = AppState(
        state=state,
        max_body_bytes=config.max_body_bytes,
        strict_requests=config.strict_requests,
        log_requests=config.enable_log_requests,
        keep_alive_s=keep_alive_s,
    )
    app.state.metrics = metrics.Exporter(state)
    return app


def _routes() -> list[Route]:
    def get(path: str, endpoint: Any) -> Route:
        return Route(path, endpoint, methods=["GET"])

    def post(path: str, endpoint: Any) -> Route:
        return Route(path, endpoint, methods=["POST"])

    return [
        post("/v1/chat/completions", chat.chat_completions),
        post("/v1/completions", completions.completions),
        get("/v1/chains", chains.list_chains),
        post("/v1/chains/lookup", chains.lookup),
        get("/v1/chains/{chain_id}", chains.get_chain),
        Route("/v1/chains/{chain_id}", chains.delete_chain, methods=["DELETE"]),
        post("/v1/chains/{chain_id}/fork", chains.fork_chain),
        post("/v1/chains/{chain_id}/checkpoint", chains.checkpoint_chain),
        post("/v1/chains/{chain_id}/pin", chains.pin_chain),
        post("/v1/chains/{chain_id}/demote", chains.demote_chain),
        post("/v1/chain_cache/routing_match", chains.routing_match),
        *(post(f"/v1/prefix_cache/{name}", endpoint) for name, endpoint in prefix_cache.ENDPOINTS.items()),
        post("/v1/prefix_cache/prune", prune.start),
        get("/v1/prefix_cache/prune", prune.listed),
        get("/v1/prefix_cache/prune/{prune_id}", prune.get),
        Route("/v1/prefix_cache/prune/{prune_id}", prune.cancel, methods=["DELETE"]),
        get("/v1/models", models.list_models),
        get("/v1/models/{name:path}", models.get_model),
        *(post(f"{prefix}/tokenize", tokenize.tokenize) for prefix in ("", "/v1")),
        *(post(f"{prefix}/detokenize", tokenize.detokenize) for prefix in ("", "/v1")),
        *(get(path, health.health) for path in ("/health", "/readyz")),
        *(get(path, health.live) for path in ("/live", "/livez")),
        get("/version", health.version),
        get("/load", health.load),
        get("/server_info", health.server_info),
        get("/debug/rows", health.rows),
        get("/metrics", metrics.metrics),
    ]


class RequestID:
    """Gives each answer an X-Request-Id (the client's, if it is a plausible one), and answers crashes with a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise  # the server logs it and closes the connection
            log.error("%s failed, request id %s", scope["path"], request_id)
            await errors.error_response(error)(scope, receive, send_with_id)
