"""GET /v1/models: one model, under each name it answers to."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax.serving.endpoint import app_state
from sparsejax.serving.errors import JSON
from sparsejax.serving.sampling import check_model
from sparsejax.serving.state import Served, ServerState


async def list_models(http: HTTPRequest) -> Response:
    """All names."""
    state = app_state(http).state
    served = state.served()
    return JSON({"object": "list", "data": [_card(state, served, name) for name in served.model_names]})


async def get_model(http: HTTPRequest) -> Response:
    """One name; names may contain slashes."""
    state = app_state(http).state
    served = state.served()
    name = http.path_params["name"]
    check_model(name, served)
    return JSON(_card(state, served, name))


def _card(state: ServerState, served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "sparsejax",
        "root": served.model_path or served.model_names[0],
        "parent": None,
        "max_model_len": served.max_model_len,
        "sparsejax": {"method": served.default_method, "methods": list(served.methods)},
    }
