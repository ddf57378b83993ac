"""Liveness, readiness, version, load and per-row view."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import sparsejax
from sparsejax.serving.endpoint import app_state
from sparsejax.serving.errors import JSON
from sparsejax.serving.state import ServerState

# A busy engine without a step for so long is taken for stuck; compiling a large program may take a minute.
STUCK_AFTER_S = 120.0


async def live(http: HTTPRequest) -> Response:
    """200 while the process answers: restart it only when this fails."""
    return JSON({"status": "alive"})


async def health(http: HTTPRequest) -> Response:
    """Readiness: 200 when requests are answered, 503 while loading, draining or stuck, 500 when the engine died."""
    status, body = readiness(app_state(http).state)
    return JSON(body, status, {"Retry-After": "5"} if status == 503 else None)


def readiness(state: ServerState) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of /health."""
    body: dict[str, Any] = {"status": state.phase, "uptime_s": round(time.time() - state.started_s, 3)}
    if state.phase == "loading":
        return 503, body | {"progress": dataclasses.asdict(state.progress)}
    if state.phase == "failed":
        return 500, body | {"error": _first_line(state.error)}
    served = state.attached
    assert served is not None
    if served.engine.failure is not None:
        return 500, body | {"status": "failed", "error": _first_line(served.engine.failure)}
    snapshot = served.engine.snapshot
    step_age_s = snapshot.last_step_age_s
    body |= {"running": snapshot.running, "waiting": snapshot.waiting, "last_step_age_s": round(step_age_s, 3)}
    if step_age_s > STUCK_AFTER_S:
        return 503, body | {"status": "stuck"}
    return (200 if state.phase == "ready" else 503), body


async def version(http: HTTPRequest) -> Response:
    """The package's version."""
    return JSON({"version": sparsejax.__version__})


async def load(http: HTTPRequest) -> Response:
    """How busy the server is."""
    state = app_state(http).state
    snapshot = state.served().engine.snapshot
    return JSON(
        {
            "server_load": state.active_requests,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "swapped": snapshot.swapped,
            "kv_cache_usage": round(snapshot.kv_usage, 6),
        }
    )


async def server_info(http: HTTPRequest) -> Response:
    """What runs here: model, method, limits and the resolved settings."""
    state = app_state(http).state
    served = state.served()
    return JSON(
        {
            "version": sparsejax.__version__,
            "model": served.model_names[0],
            "max_model_len": served.max_model_len,
            "method": served.default_method,
            "methods": list(served.methods),
            "chain_cache": served.chain_cache,
            "prefix_cache": served.prefix_cache,
            "info": {name: dict(facts) for name, facts in served.info.items()},
        }
    )


async def rows(http: HTTPRequest) -> Response:
    """Resident choices: state, tokens seen, resident and read, method."""
    snapshot = app_state(http).state.served().engine.snapshot
    return JSON({"rows": [row._asdict() for row in snapshot.rows]})


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
