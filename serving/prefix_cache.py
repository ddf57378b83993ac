"""/v1/prefix_cache: what the server has computed of a beginning, for those who own it; to keep or delete that."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax import radix_control as control
from sparsejax.errors import PrefixNotFoundError, RequestError
from sparsejax.radix_reports import Pinned
from sparsejax.request import PrefixOptions
from sparsejax.serving.endpoint import answer_headers, answer_of, app_state, read_body
from sparsejax.serving.errors import JSON, describe
from sparsejax.serving.prefix_fields import (
    InspectBody,
    PrefixMatchBody,
    PrefixPinBody,
    PriorityBody,
    RetentionBody,
    SelectorBody,
    selected,
)
from sparsejax.serving.state import Served

if TYPE_CHECKING:
    from sparsejax.caches import Caches

T = TypeVar("T")

DEFAULT_LISTED_BLOCKS = 1024


async def match(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/match: how much of a beginning a request would not have to compute."""
    found, ignored = await _on(http, PrefixMatchBody, control.match)
    return JSON({"object": "prefix_cache.match", "supported": True, **_shown(found)}, headers=answer_headers(ignored))


async def routing_match(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/routing_match: the same at once, whatever the engine is doing; for routers."""
    served = app_state(http).state.served()
    body, ignored = await read_body(http, PrefixMatchBody)
    what = await selected(http, served, body, wait=False)
    found = served.engine.peek(lambda caches: control.routed(caches, what.method, what.options, what.ids))
    return JSON({"object": "prefix_cache.match", "supported": True, **_shown(found)}, headers=answer_headers(ignored))


async def inspect(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/inspect: the blocks of a beginning."""

    def options(body: InspectBody) -> dict[str, Any]:
        limit = DEFAULT_LISTED_BLOCKS if body.limit is None else body.limit
        _whole("limit", limit, 0, control.MAX_LISTED_BLOCKS)
        _whole("offset", body.offset or 0, 0, 2**31 - 1)
        return {"offset": body.offset or 0, "limit": limit, "subtree": bool(body.include_subtree)}

    found, ignored = await _on(http, InspectBody, control.inspect, options)
    return JSON({"object": "prefix_cache.path", **_shown(found)}, headers=answer_headers(ignored))


async def delete_subtree(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/delete_subtree: gives up the end of a beginning and all that follows it, if unused."""
    answer = {"object": "prefix_cache.deleted", "deleted_block_ids": [], "deleted_block_count": 0}
    try:
        found, ignored = await _on(http, SelectorBody, control.delete_subtree)
    except PrefixNotFoundError as error:
        status, refusal = describe(error)
        answer |= {"blocked_blocks": [{"block_id": None, "reason": "not_found"}], "blocked_block_count": 0}
        return JSON(answer | refusal, status)
    answer |= _shown(found)
    if found.deleted_block_count:
        return JSON(answer, headers=answer_headers(ignored))
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.blocked_reasons.items())
    text = f"none of {found.blocked_block_count} blocks could go: {reasons}"
    status, refusal = describe(RequestError(text, status=409, code="prefix_in_use"))
    return JSON(answer | refusal, status)


async def set_retention(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/set_retention {retention}: blocks of a higher class go later."""
    found, ignored = await _on(http, RetentionBody, control.set_retention, lambda body: _class(body.retention))
    return JSON({"object": "prefix_cache.retention", **_shown(found)}, headers=answer_headers(ignored))


async def set_eviction_priority(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/set_eviction_priority {priority}: SparseEngine's, in which higher ones go earlier."""
    found, ignored = await _on(
        http, PriorityBody, control.set_retention, lambda body: _class(-body.priority, "priority")
    )
    return JSON({"object": "prefix_cache.retention", **_shown(found)}, headers=answer_headers(ignored))


async def pin(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/pin {ttl_s}: a beginning is not given up for so long; 0 ends that."""

    def keep(caches: Caches, method: str, options: PrefixOptions, ids: np.ndarray, ttl_s: float) -> Pinned:
        what = caches, method, options, ids
        return control.pin(*what, ttl_s) if ttl_s else control.unpin(*what)

    def options(body: PrefixPinBody) -> dict[str, Any]:
        if not 0 <= body.ttl_s <= control.MAX_PIN_S:
            raise RequestError(f"ttl_s must be in [0, {control.MAX_PIN_S:g}] seconds, got {body.ttl_s}", param="ttl_s")
        return {"ttl_s": body.ttl_s}

    return _pin_answer(*await _on(http, PrefixPinBody, keep, options))


async def unpin(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/unpin: ends a pin."""
    return _pin_answer(*await _on(http, SelectorBody, control.unpin))


async def consult(served: Served, function: Callable[[Caches], T]) -> T:
    """What the engine's thread answers, between two steps."""
    return await answer_of(served.engine.consult(function))


async def _on(
    http: HTTPRequest,
    body_type: type[Any],
    function: Callable[..., T],
    options: Callable[[Any], dict[str, Any]] = lambda body: {},
) -> tuple[T, tuple[str, ...]]:
    """Calls a function of `radix_control` for what the body names. Also the names of its unknown fields."""
    served = app_state(http).state.served()
    body, ignored = await read_body(http, body_type)
    more = options(body)
    what = await selected(http, served, body)
    answer = await consult(served, lambda caches: function(caches, what.method, what.options, what.ids, **more))
    return answer, ignored


def _pin_answer(found: Pinned, ignored: tuple[str, ...]) -> Response:
    shown = _shown(found)
    expires = round(time.time() + shown.pop("ttl_s"), 3) if found.pinned else None
    return JSON({"object": "prefix_cache.pin", **shown, "expires_at": expires}, headers=answer_headers(ignored))


def _class(retention: int, param: str = "retention") -> dict[str, Any]:
    most = control.MAX_RETENTION
    if not -most <= retention <= most:
        given = retention if param == "retention" else -retention
        raise RequestError(f"{param} must be in [{-most}, {most}], got {given}", param=param)
    return {"retention": retention}


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)


def _shown(record: Any) -> dict[str, Any]:
    """A record of `radix_reports` for JSON, which takes those inside it as they are."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


ENDPOINTS = {
    "match": match,
    "routing_match": routing_match,
    "inspect": inspect,
    "delete_subtree": delete_subtree,
    "set_retention": set_retention,
    "set_eviction_priority": set_eviction_priority,
    "pin": pin,
    "unpin": unpin,
}
"""By the last part of their path; all are posts."""
