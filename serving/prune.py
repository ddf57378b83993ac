"""/v1/prefix_cache/prune: jobs that take rows of chosen tokens or messages from what the server has computed."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax import chain_control
from sparsejax.cache.radix_prune import normal_ranges
from sparsejax.errors import ChainFingerprintError, RequestError
from sparsejax.prune_records import POLICIES, PruneInfo, PrunePart, PruneRequest
from sparsejax.request import ChainOptions
from sparsejax.serving import prompts
from sparsejax.serving.chain_fields import MAX_ID_CHARS, tenant_of
from sparsejax.serving.endpoint import answer_headers, app_state, read_body
from sparsejax.serving.errors import JSON
from sparsejax.serving.message_spans import Span, aligned, message_of_call, spans
from sparsejax.serving.prefix_cache import consult
from sparsejax.serving.prefix_fields import PruneBody, PruneEntry, Selected, named, selected, selectors
from sparsejax.serving.protocol import MAX_MESSAGES
from sparsejax.serving.respond import disconnected
from sparsejax.serving.state import Served

if TYPE_CHECKING:
    from sparsejax.caches import Caches

PATH = "/v1/prefix_cache/prune"
MAX_WAIT_S = 60.0
MAX_WAITING = 1000
"""So many requests may wait for jobs at a time."""
MAX_RANGES = 10_000
MAX_BLOCK_TIMEOUT_S = 3600.0
MAX_LISTED = 1000
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")


NOTHING: dict[str, Any] = {
    "object": "prefix_cache.prune",
    "prune_id": None,
    "status": "completed",
    "policy": "drop",
    "range": None,
    "ranges": [],
    "keep_tokens": 0,
    "created_at": None,
    "started_at": None,
    "finished_at": None,
    "result": {
        "range": None,
        "ranges": [],
        "logical_tokens": 0,
        "retained_tokens": 0,
        "freed_device_slots": 0,
        "freed_pages": 0,
        "affected_blocks": 0,
        "quality_degraded": False,
    },
    "error": None,
}
"""The answer where no message has anything that could go: there is no job."""


class Wanted(NamedTuple):
    """A message that is to lose rows: which one, by what name, its tokens, and what of them stays."""

    shown: dict[str, Any]
    span: Span | None
    keep: float | None
    keep_tokens: int


async def start(http: HTTPRequest) -> Response:
    """POST /v1/prefix_cache/prune: queues a job. 202 with its id, 200 if there is nothing that could go."""
    served = app_state(http).state.served()
    body, ignored = await read_body(http, PruneBody)
    _check(body)
    what, chain_id = await _selected(http, served, body)
    entries = await _entries(http, served, body, what) if body.prune is not None else None

    def submit(caches: Caches) -> tuple[PruneInfo | None, list[dict[str, Any]]]:
        size, skipped = caches.radix.index.block_tokens, []
        if entries is None:
            parts = [_part(body, len(what.ids), size)]
        else:
            parts, skipped = parts_of(entries, size)
        if not parts:
            return None, skipped
        return caches.prunes.submit(_request(body, what, chain_id, parts)), skipped

    info, skipped = await consult(served, submit)
    if info is None:
        return JSON(NOTHING | {"skipped": skipped}, headers=answer_headers(ignored))
    headers = answer_headers(ignored) | {"Location": f"{PATH}/{info.prune_id}"}
    return JSON(shown(info) | ({"skipped": skipped} if entries is not None else {}), 202, headers)


async def get(http: HTTPRequest) -> Response:
    """GET /v1/prefix_cache/prune/{id}?wait_s=: a job as it is, or once it is over, if that is soon enough."""
    served, prune_id, tenant = app_state(http).state.served(), http.path_params["prune_id"], tenant_of(http)
    wait_s = _seconds(http, "wait_s", MAX_WAIT_S)
    info = await consult(served, lambda caches: caches.prunes.get(prune_id, tenant))
    if wait_s and not info.ended:
        if not await _over(http, served, prune_id, wait_s):
            return Response(status_code=499)  # nobody reads this
        info = await consult(served, lambda caches: caches.prunes.get(prune_id, tenant))
    return JSON(shown(info))


async def cancel(http: HTTPRequest) -> Response:
    """DELETE /v1/prefix_cache/prune/{id}: ends a job that has changed nothing yet."""
    served, prune_id, tenant = app_state(http).state.served(), http.path_params["prune_id"], tenant_of(http)
    return JSON(shown(await consult(served, lambda caches: caches.prunes.cancel(prune_id, tenant))))


async def listed(http: HTTPRequest) -> Response:
    """GET /v1/prefix_cache/prune?limit=: the caller's jobs, newest first."""
    served, tenant = app_state(http).state.served(), tenant_of(http)
    given = http.query_params.get("limit", "100")
    if not re.fullmatch(r"[0-9]{1,9}", given) or not 1 <= int(given) <= MAX_LISTED:
        raise RequestError(f"limit must be in [1, {MAX_LISTED}], got {given[:40]!r}", param="limit")
    found = await consult(served, lambda caches: caches.prunes.listed(tenant, int(given)))
    return JSON({"object": "list", "data": [shown(info) for info in found]})


def shown(info: PruneInfo) -> dict[str, Any]:
    """A job as clients see it."""
    ranges = [list(pair) for pair in info.ranges]
    return {
        "object": "prefix_cache.prune",
        "prune_id": info.prune_id,
        "status": info.status,
        "policy": info.policy,
        "range": [min(start for start, _ in ranges), max(stop for _, stop in ranges)],
        "ranges": ranges,
        "keep_tokens": info.keep_tokens,
        "created_at": _rounded(info.created_s),
        "started_at": _rounded(info.started_s),
        "finished_at": _rounded(info.finished_s),
        "result": info.result,
        "error": info.error,
    }


def parts_of(entries: Sequence[Wanted], block_tokens: int) -> tuple[list[PrunePart], list[dict[str, Any]]]:
    """A budget for each message, over the whole blocks inside its content; and messages that nothing is taken from.

    A share that is to stay is that of these blocks, rounded up to whole ones.
    """
    parts: list[PrunePart] = []
    skipped = []
    for entry in entries:
        inside = aligned(entry.span, block_tokens)
        if entry.span is None:
            reason = "not_found"
        elif inside is None:
            reason = "shorter_than_a_block"
        else:
            width = inside[1] - inside[0]
            keep = entry.keep_tokens if entry.keep is None else share_of(entry.keep, width, block_tokens)
            if keep < width:
                parts.append(PrunePart((inside,), keep))
                continue
            reason = "nothing_to_drop"
        tokens = 0 if entry.span is None else entry.span[1] - entry.span[0]
        skipped.append({**entry.shown, "reason": reason, "tokens": tokens})
    return parts, skipped


def share_of(keep: float, tokens: int, block_tokens: int) -> int:
    """Whole blocks that hold a share of some tokens, in tokens."""
    return -(-math.ceil(round(keep * tokens, 6)) // block_tokens) * block_tokens


def _check(body: PruneBody) -> None:
    """What can be said without the text. Raises RequestError."""
    pair = body.range_start is not None or body.range_end is not None
    given = [name for name in ("ranges", "prune") if getattr(body, name) is not None] + ["range_start"] * pair
    if len(given) != 1:
        text = "send exactly one of ranges, range_start with range_end, and prune"
        raise RequestError(text, param=given[-1] if given else "ranges", code="invalid_prune")
    if pair and (body.range_start is None or body.range_end is None):
        absent = "range_start" if body.range_start is None else "range_end"
        raise RequestError(f"{absent} is missing", param=absent, code="missing_required_parameter")
    if body.ranges is not None and len(body.ranges) > MAX_RANGES:
        raise RequestError(f"{len(body.ranges)} ranges, at most {MAX_RANGES} are allowed", param="ranges")
    _share("keep", body.keep)
    if body.keep is not None and body.keep_tokens is not None:
        raise RequestError("keep and keep_tokens exclude each other", param="keep")
    if body.prune is None and body.keep is None and body.keep_tokens is None:
        raise RequestError("keep_tokens is missing", param="keep_tokens", code="missing_required_parameter")
    if body.policy is not None and body.policy not in POLICIES:
        raise RequestError(f"policy must be one of {', '.join(POLICIES)}, got {body.policy[:40]!r}", param="policy")
    _whole("observation_tokens", body.observation_tokens, 1)
    _whole("score_chunk_size", body.score_chunk_size, 1)
    _whole("prev_postfix_size", body.prev_postfix_size, 0)
    timeout_s = body.block_timeout_s
    if timeout_s is not None and not 0 <= timeout_s <= MAX_BLOCK_TIMEOUT_S:
        text = f"block_timeout_s must be in [0, {MAX_BLOCK_TIMEOUT_S:g}] seconds, got {timeout_s}"
        raise RequestError(text, param="block_timeout_s")
    for name in ("idempotency_key", "chain_id"):
        value = getattr(body, name)
        if value is not None and not 1 <= len(value) <= MAX_ID_CHARS:
            raise RequestError(f"{name} must have 1 to {MAX_ID_CHARS} characters, got {len(value)}", param=name)
    if body.prune is not None:
        _check_entries(body)


def _check_entries(body: PruneBody) -> None:
    assert body.prune is not None
    if not body.prune or len(body.prune) > MAX_MESSAGES:
        raise RequestError(f"prune must name 1 to {MAX_MESSAGES} messages, not {len(body.prune)}", param="prune")
    if body.messages is None and body.chat is None:
        raise RequestError("prune names messages: send them as messages or chat", param="messages")
    if body.keep_tokens is not None:
        raise RequestError("with prune send keep or keep_tokens for each message", param="keep_tokens")
    for i, entry in enumerate(body.prune):
        if (entry.message is None) == (entry.tool_call_id is None):
            raise RequestError("name a message or a tool_call_id", param=f"prune[{i}]")
        if entry.keep is not None and entry.keep_tokens is not None:
            raise RequestError("keep and keep_tokens exclude each other", param=f"prune[{i}].keep")
        if entry.keep is None and entry.keep_tokens is None and body.keep is None:
            name = f"prune[{i}].keep"
            raise RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
        _share(f"prune[{i}].keep", entry.keep)
        _whole(f"prune[{i}].keep_tokens", entry.keep_tokens, 0)


async def _selected(http: HTTPRequest, served: Served, body: PruneBody) -> tuple[Selected, str | None]:
    """The text, and the conversation whose rows are meant too."""
    if body.chain_id is None:
        return await selected(http, served, body), None
    chain_id, tenant = body.chain_id, tenant_of(http)
    _, options = named(http, served, body)

    def find(caches: Caches) -> tuple[str, np.ndarray]:
        chain = caches.chains.index.find(chain_id, tenant)
        info = chain_control.describe(caches.chains, chain)
        if caches.chains.seed(info.method, options.salt, tenant) != chain.seed:
            raise ChainFingerprintError(f"chain {chain_id} has another cache_salt", chain_id=chain_id, reason="salt")
        return info.method, info.ledger

    method, ledger = await consult(served, find)
    if body.sparse_method not in (None, method):
        text = f"chain {chain_id} was made by {method}, not {body.sparse_method}"
        raise ChainFingerprintError(text, chain_id=chain_id, reason="method")
    if not selectors(body):
        return Selected(ledger, method, options), chain_id
    body.sparse_method = method
    chain = ChainOptions(chain_id=chain_id, salt=options.salt, tenant=tenant)
    return await selected(http, served, body, chain), chain_id


async def _entries(http: HTTPRequest, served: Served, body: PruneBody, what: Selected) -> list[Wanted]:
    """The messages that a body names, with their tokens."""
    assert what.conversation is not None
    assert body.prune is not None
    conversation, messages = what.conversation, what.conversation.messages
    indexes: list[int] = []
    for i, entry in enumerate(body.prune):
        index = _index(messages, entry, f"prune[{i}]")
        if index in indexes:
            raise RequestError(f"message {index} is named twice", param=f"prune[{i}]")
        indexes.append(index)
    found = await prompts.in_pool(
        app_state(http).state, lambda: spans(served.tokenizer, conversation, what.ids, sorted(indexes))
    )
    wanted = []
    for index, entry in zip(indexes, body.prune, strict=True):
        name = {"message": index} | ({"tool_call_id": entry.tool_call_id} if entry.tool_call_id is not None else {})
        keep = body.keep if entry.keep is None and entry.keep_tokens is None else entry.keep
        wanted.append(Wanted(name, found[index], keep, entry.keep_tokens or 0))
    return wanted


def _index(messages: Sequence[Any], entry: PruneEntry, where: str) -> int:
    if entry.tool_call_id is not None:
        try:
            return message_of_call(messages, entry.tool_call_id)
        except RequestError as error:
            raise RequestError(error.message, param=f"{where}.tool_call_id") from None
    assert entry.message is not None
    if not 0 <= entry.message < len(messages):
        text = f"there is no message {entry.message}: the conversation has {len(messages)}, counted from 0"
        raise RequestError(text, param=f"{where}.message")
    return entry.message


def _part(body: PruneBody, tokens: int, block_tokens: int) -> PrunePart:
    """The one budget of a body with ranges. Raises PruneError."""
    pairs = [(body.range_start, body.range_end)] if body.ranges is None else body.ranges
    ranges = normal_ranges(pairs, tokens, block_tokens)  # type: ignore[arg-type]
    width = sum(stop - start for start, stop in ranges)
    keep = body.keep_tokens
    if body.keep is not None:
        keep = min(share_of(body.keep, width, block_tokens), width - block_tokens)
    assert keep is not None
    return PrunePart(tuple(ranges), keep)


def _request(body: PruneBody, what: Selected, chain_id: str | None, parts: list[PrunePart]) -> PruneRequest:
    keeps = any(part.keep_tokens for part in parts)
    sent = {
        "observation_tokens": body.observation_tokens,
        "score_chunk_tokens": body.score_chunk_size,
        "prev_postfix_tokens": body.prev_postfix_size,
        "block_timeout_s": body.block_timeout_s,
        "idempotency_key": body.idempotency_key,
    }
    return PruneRequest(
        method=what.method,
        ids=what.ids[: max(stop for part in parts for _, stop in part.ranges)],
        parts=tuple(parts),
        policy=body.policy or ("kvzip_global" if keeps else "drop"),
        salt=what.options.salt,
        tenant=what.options.tenant,
        chain_id=chain_id,
        recompute=bool(body.recompute),
        **{name: value for name, value in sent.items() if value is not None},  # type: ignore[arg-type]
    )


async def _over(http: HTTPRequest, served: Served, prune_id: str, wait_s: float) -> bool:
    """Waits for the end of a job. Returns False if the client has left."""
    state = app_state(http).state
    if state.waiting_for_jobs >= MAX_WAITING:
        raise RequestError(
            f"{MAX_WAITING} requests wait for jobs already; ask without wait_s",
            status=503,
            code="too_many_waiting",
            retry_after_s=1.0,
        )
    state.waiting_for_jobs += 1
    gone = asyncio.ensure_future(disconnected(http.receive))
    over: asyncio.Future[PruneInfo] | None = None
    try:
        tenant = tenant_of(http)
        over = asyncio.wrap_future(await consult(served, lambda caches: caches.prunes.watch(prune_id, tenant)))
        await asyncio.wait((over, gone), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return over.done() or not gone.done()
    finally:
        state.waiting_for_jobs -= 1
        gone.cancel()
        if over is not None:
            over.cancel()


def _seconds(http: HTTPRequest, name: str, most: float) -> float:
    given = http.query_params.get(name, "0")
    if not _SECONDS.fullmatch(given) or float(given) > most:
        raise RequestError(f"{name} must be in [0, {most:g}] seconds, got {given[:40]!r}", param=name)
    return float(given)


def _share(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 1:
        raise RequestError(f"{name} must be at least 0 and less than 1, got {value}", param=name)


def _whole(name: str, value: int | None, least: int) -> None:
    if value is not None and not least <= value < 2**31:
        raise RequestError(f"{name} must be at least {least}, got {value}", param=name)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
