"""The fields of a request that say how it uses the Chain Cache and the prefix cache, checked."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request as HTTPRequest

from sparsejax.errors import ChainDisabledError, RequestError
from sparsejax.request import ChainOptions, PrefixOptions
from sparsejax.serving.state import Served

MAX_ID_CHARS = 128
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100
MAX_SECONDS = 1e9
MAX_TOKENS = 2**31 - 1

_CHOICES = {
    "chain_lookup": ("prefix", "off"),
    "chain_on_miss": ("serve", "error"),
    "chain_on_busy": ("fork", "error"),
    "chain_branch": ("fork", "rewind"),
    "chain_match": ("messages", "text"),
    "recall": ("off", "host"),
}
# Fields whose presence shows that the client knows of chains.
_TELLING = (
    "chain",
    "chain_id",
    *_CHOICES,
    "chain_append",
    "chain_append_start",
    "chain_expected_tokens",
    "chain_expected_digest",
    "chain_priority",
    "chain_ttl_s",
    "chain_expected_resume_s",
    "chain_shared_tokens",
    "chain_compat",
    "recall_budget",
)


def tenant_of(http: HTTPRequest) -> str:
    """Whose chains a request may see: those of its API key."""
    return http.scope.get("tenant", "")


def chain_options(
    body: Any, served: Served, tenant: str, *, prompts: int = 1, hindrance: str | None = None
) -> ChainOptions | None:
    """How a request uses chains, or None if it doesn't.

    Args:
      body: with the fields of `protocol.GenerationBody`; those it lacks count as not sent.
      served: says whether chains are on.
      tenant: of the request's key.
      prompts: that it has.
      hindrance: the field that makes chains impossible, if one does.

    Raises:
      RequestError: names the field and what is allowed.
      ChainDisabledError: a chain is named where none are kept.
    """
    sent = {name: value for name in _TELLING if (value := getattr(body, name, None)) is not None}
    chain_id = (sent.get("chain_id") or "").strip()
    if len(chain_id) > MAX_ID_CHARS:
        raise RequestError(f"chain_id has {len(chain_id)} characters, at most {MAX_ID_CHARS}", param="chain_id")
    _check(sent, chain_id)
    salt = _salt(body)
    if chain_id:
        if opted_out(body):
            raise RequestError("chain=false and a chain_id exclude each other", param="chain")
        if not served.chain_cache:
            raise ChainDisabledError("chains are off on this server (--chain-cache)", chain_id=chain_id)
        if prompts != 1:
            raise RequestError(f"with a chain_id send exactly one prompt, not {prompts}", param="prompt")
        if hindrance is not None:
            value = getattr(body, hindrance, None)
            raise RequestError(
                f"a chain goes on in one way: with a chain_id leave {hindrance}={value} out", param=hindrance
            )
    if opted_out(body) or not served.chain_cache or hindrance is not None:
        return None
    digest = sent.get("chain_expected_digest")
    return ChainOptions(
        chain_id=chain_id or None,
        append=bool(sent.get("chain_append")) or "chain_append_start" in sent,
        lookup=sent.get("chain_lookup") != "off",
        on_miss=sent.get("chain_on_miss", "serve"),
        on_busy=sent.get("chain_on_busy", "fork"),
        branch=sent.get("chain_branch", "fork"),
        salt=salt,
        tenant=tenant,
        expected_tokens=sent.get("chain_expected_tokens"),
        expected_digest=bytes.fromhex(digest) if digest else None,
        priority=sent.get("chain_priority", 0),
        ttl_s=sent.get("chain_ttl_s"),
        expected_resume_s=sent.get("chain_expected_resume_s"),
        implicit=not sent,
        shared_tokens=sent.get("chain_shared_tokens", 0),
        recall=sent.get("recall", "off"),
        recall_budget=sent.get("recall_budget", ChainOptions.recall_budget),
    )


def prefix_options(body: Any, tenant: str) -> PrefixOptions:
    """Whose rows a request may begin with, and which of them. Arguments and errors as in `chain_options`."""
    return PrefixOptions(_salt(body), tenant, bool(getattr(body, "require_unpruned", None)))


def _salt(body: Any) -> str:
    salt = getattr(body, "cache_salt", None) or ""
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError(f"cache_salt has {len(salt)} characters, at most {MAX_SALT_CHARS}", param="cache_salt")
    return salt


def opted_out(body: Any) -> bool:
    """The client wants no chain."""
    return getattr(body, "chain", None) is False


def asked_for(body: Any) -> bool:
    """The client knows of chains: it sent one of their fields."""
    return any(getattr(body, name, None) is not None for name in _TELLING)


def _check(sent: dict[str, Any], chain_id: str) -> None:
    for name, choices in _CHOICES.items():
        if name in sent and sent[name] not in choices:
            shown = str(sent[name])[:40]
            raise RequestError(f"{name} must be one of {', '.join(choices)}, got {shown!r}", param=name)
    for name in ("chain_append", "chain_append_start", "chain_expected_tokens", "chain_expected_digest"):
        if sent.get(name) not in (None, False) and not chain_id:
            raise RequestError(f"{name} needs a chain_id", param="chain_id")
    if sent.get("chain_append") and "chain_append_start" in sent:
        raise RequestError(
            "chain_append means that messages are new, chain_append_start that they are all: send one of them",
            param="chain_append_start",
        )
    _whole(sent, "chain_append_start", 1, MAX_TOKENS)
    _whole(sent, "chain_expected_tokens", 0, MAX_TOKENS)
    _whole(sent, "chain_shared_tokens", 0, MAX_TOKENS)
    _whole(sent, "chain_priority", -MAX_PRIORITY, MAX_PRIORITY)
    for name in ("chain_ttl_s", "chain_expected_resume_s"):
        if name in sent and not 0 <= sent[name] <= MAX_SECONDS:
            raise RequestError(f"{name} must be in [0, {MAX_SECONDS:g}] seconds, got {sent[name]}", param=name)
    digest = sent.get("chain_expected_digest")
    if digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise RequestError("chain_expected_digest must be 64 hexadecimal digits", param="chain_expected_digest")
    budget = sent.get("recall_budget")
    if isinstance(budget, str) and budget != "all":
        raise RequestError('recall_budget must be a number of tokens or "all"', param="recall_budget")
    if isinstance(budget, int):
        _whole(sent, "recall_budget", 0, MAX_TOKENS)


def _whole(sent: dict[str, Any], name: str, low: int, high: int) -> None:
    if name in sent and not low <= sent[name] <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {sent[name]}", param=name)
