"""What an answer says of its chain, and of shared rows: headers, the `chain` object, why not more was reused."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from sparsejax.request import ChainReport, RequestStats
from sparsejax.serving.protocol import Message
from sparsejax.serving.state import Tokenizer

CHAIN_ID_HEADER = "X-Sparsejax-Chain-Id"
STATUS_HEADER = "X-Sparsejax-Chain-Status"
REFERENCE_ID_HEADER = "X-SparseVLLM-Chain-ID"
CACHED_HEADER = "X-Sparsejax-Cached-Tokens"
RETAINED_HEADER = "X-Sparsejax-Retained-Fraction"
METHOD_HEADER = "X-Sparsejax-Method"
MISS_HEADER = "X-Sparsejax-Cache-Miss"
HEADERS = (
    CHAIN_ID_HEADER,
    STATUS_HEADER,
    REFERENCE_ID_HEADER,
    CACHED_HEADER,
    RETAINED_HEADER,
    METHOD_HEADER,
    MISS_HEADER,
)

# What clients made for SparseEngine know.
_COMPAT = {"adopted": "created", "forked": "created", "rewound": "resumed"}


def chain_headers(report: ChainReport | None, method: str, compat: bool, message: int | None) -> dict[str, str]:
    """Headers of an answer whose prompt has a chain."""
    if report is None:
        return {}
    headers = {
        CHAIN_ID_HEADER: report.chain_id,
        REFERENCE_ID_HEADER: report.chain_id,
        STATUS_HEADER: status_of(report, compat),
    }
    return headers | _reuse(report.reused_tokens, report.retained_tokens, report, method, message)


def prefix_headers(stats: RequestStats, method: str, message: int | None) -> dict[str, str]:
    """Headers of an answer without a chain, once it has ended."""
    return _reuse(stats.cached_tokens, stats.resident_prefix_tokens, stats, method, message)


def _reuse(
    reused: int, retained: int, why: ChainReport | RequestStats, method: str, message: int | None
) -> dict[str, str]:
    headers = {
        CACHED_HEADER: str(reused),
        METHOD_HEADER: method.replace("\n", " ").encode("latin-1", "replace").decode("latin-1"),
    }
    if reused:
        headers[RETAINED_HEADER] = f"{min(1.0, retained / reused):.4f}"
    if why.miss is not None:
        where = "" if why.diverged_at is None else f"; token={why.diverged_at}"
        headers[MISS_HEADER] = why.miss + where + ("" if message is None else f"; message={message}")
    return headers


def status_of(report: ChainReport, compat: bool = False) -> str:
    """How the chain was found, "invalidated" once it is gone; with `compat` in SparseEngine's words."""
    if report.state == "gone":
        return "invalidated"
    return _COMPAT.get(report.status, report.status) if compat else report.status


def chain_ids(report: ChainReport | None, compat: bool = False) -> dict[str, Any]:
    """What every chunk carries."""
    return {} if report is None else {"chain_id": report.chain_id, "chain_status": status_of(report, compat)}


def chain_object(report: ChainReport) -> dict[str, Any]:
    """The `chain` object of an answer."""
    over = report.state != "active"
    expires = report.expires_s if report.state == "idle" else None
    quality = dict(report.quality)
    described = {
        "id": report.chain_id,
        "status": report.status,
        "state": report.state,
        "gone_reason": report.gone_reason,
        "parent_id": report.parent_id,
        "processed_tokens": report.processed_tokens if over else None,
        "total_tokens": report.total_tokens if over else None,
        "reused_tokens": report.reused_tokens,
        "prefilled_tokens": report.prefilled_tokens,
        "retained_tokens": report.retained_tokens,
        "restored_from": report.restored_from,
        "recomputed": report.status == "recreated",
        "state_rebuilt": bool(quality.get("rebuilt")),
        "interrupted": bool(quality.get("interrupted")),
        "expires_at": None if expires is None else int(time.time() + expires),
        "quality": quality,
    }
    if report.recall is not None:
        described["recall"] = dataclasses.asdict(report.recall)
    return described


def miss_object(found: ChainReport | RequestStats, message: int | None) -> dict[str, Any] | None:
    """Why less was reused than could have been; None if nothing was missed."""
    if found.miss is None:
        return None
    detail = found.reason if isinstance(found, ChainReport) else found.miss_reason
    return {"reason": found.miss, "token": found.diverged_at, "message": message, "detail": detail}


def message_at(tokenizer: Tokenizer, messages: Sequence[Message], ids: Sequence[int], token: int) -> int | None:
    """The message that a token of a rendered conversation belongs to, or None if that can't be said.

    Looks for the contents one after the other in the decoded prompt; templates may leave some out. Takes time: not for
    the event loop.
    """
    before = len(tokenizer.decode(ids[:token], skip_special_tokens=False))
    text, place = tokenizer.decode(ids, skip_special_tokens=False), 0
    for number, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        content = (content or "").strip()
        start = text.find(content, place) if content else -1
        if start < 0:
            continue
        place = start + len(content)
        if before < place:
            return number
    return None
