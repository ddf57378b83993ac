"""Request bodies of /v1/prefix_cache, and from what they name to token ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request as HTTPRequest

from sparsejax.errors import RequestError
from sparsejax.request import ChainOptions, PrefixOptions
from sparsejax.serving import anchoring, prompts
from sparsejax.serving.chain_fields import prefix_options, tenant_of
from sparsejax.serving.chat import check_unsupported, template_options
from sparsejax.serving.endpoint import app_state
from sparsejax.serving.history import Conversation
from sparsejax.serving.protocol import ChatBody, Message
from sparsejax.serving.sampling import check_method, check_model
from sparsejax.serving.state import Served

SELECTORS = ("token_ids", "text", "prompt", "messages", "chat")


class SelectorBody(msgspec.Struct, kw_only=True):
    """A beginning, in one of five ways, and whose rows are meant. `prompt` is another name of `text`."""

    model: str | None = None
    sparse_method: str | None = None
    cache_salt: str | None = None
    token_ids: list[int] | None = None
    text: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    chat: list[Message] | ChatBody | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PrefixMatchBody(SelectorBody, kw_only=True):
    """POST /v1/prefix_cache/match and routing_match."""

    require_unpruned: bool | None = None


class InspectBody(SelectorBody, kw_only=True):
    """POST /v1/prefix_cache/inspect."""

    include_subtree: bool | None = None
    offset: int | None = None
    limit: int | None = None


class PriorityBody(SelectorBody, kw_only=True):
    """POST /v1/prefix_cache/set_eviction_priority."""

    priority: int


class RetentionBody(SelectorBody, kw_only=True):
    """POST /v1/prefix_cache/set_retention."""

    retention: int


class PrefixPinBody(SelectorBody, kw_only=True):
    """POST /v1/prefix_cache/pin."""

    ttl_s: float


class PruneEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message that is to lose rows. Unknown fields are refused: what is ignored here would cost rows."""

    message: int | None = None
    tool_call_id: str | None = None
    keep: float | None = None
    keep_tokens: int | None = None


class PruneBody(SelectorBody, kw_only=True):
    """POST /v1/prefix_cache/prune."""

    chain_id: str | None = None
    ranges: list[tuple[int, int]] | None = None
    range_start: int | None = None
    range_end: int | None = None
    prune: list[PruneEntry] | None = None
    keep_tokens: int | None = None
    keep: float | None = None
    policy: str | None = None
    observation_tokens: int | None = None
    score_chunk_size: int | None = None
    prev_postfix_size: int | None = None
    allow_recompress: bool | None = None
    recompute: bool | None = None
    block_timeout_s: float | None = None
    idempotency_key: str | None = None


@dataclasses.dataclass(frozen=True)
class Selected:
    """A beginning as token ids, and where rows of it may be.

    Attributes:
      ids: uint32 [n].
      method: sparse method of the requests that are meant.
      options: their salt and tenant.
      conversation: the messages, if there were any.
    """

    ids: np.ndarray
    method: str
    options: PrefixOptions
    conversation: Conversation | None = None


async def selected(
    http: HTTPRequest, served: Served, body: SelectorBody, chain: ChainOptions | None = None, *, wait: bool = True
) -> Selected:
    """What a body names. Messages and text of a conversation that the server keeps get the ids that it has.

    Args:
      http: of the request; its key says whose rows are meant.
      served: the model.
      body: the request.
      chain: the conversation, if one is named.
      wait: for the engine's thread, where it knows more.

    Raises RequestError.
    """
    method, options = named(http, served, body)
    given = selectors(body)
    if len(given) != 1:
        text = f"send exactly one of {', '.join(SELECTORS)}" + (f", not {' and '.join(given)}" if given else "")
        raise RequestError(text, param=given[-1] if given else "token_ids", code="invalid_selector")
    state = app_state(http).state
    chain = chain or ChainOptions(salt=options.salt, tenant=options.tenant)
    if body.token_ids is not None:
        if not body.token_ids:
            raise RequestError("token_ids is empty", param="token_ids")
        prompts.check_ids(served, body.token_ids, "token_ids")
        return Selected(np.asarray(body.token_ids, np.uint32), method, options)
    text = body.text if body.text is not None else body.prompt
    if text is not None:
        special = body.add_special_tokens is not False
        how = {"add_special_tokens": special, "wait": wait}
        found = await anchoring.text(state, served, text, method, chain, **how, param=given[0])
        conversation = None
    else:
        conversation = _conversation(served, body)
        found = await anchoring.chat(state, served, conversation, method, chain, wait=wait)
    prompts.check_ids(served, found.ids, given[0])
    if not found.ids:
        raise RequestError(f"{given[0]} has no token", param=given[0])
    return Selected(np.asarray(found.ids, np.uint32), method, options, conversation)


def named(http: HTTPRequest, served: Served, body: SelectorBody) -> tuple[str, PrefixOptions]:
    """The method that a body means, and whose rows. What it does not say its `chat` may say. Raises RequestError."""
    method, options = body.sparse_method, prefix_options(body, tenant_of(http))
    check_model(body.model, served)
    chat = body.chat
    if isinstance(chat, ChatBody):
        check_model(chat.model, served)
        inner = prefix_options(chat, options.tenant)
        method = chat.sparse_method if method is None else method
        salt = inner.salt if body.cache_salt is None else options.salt
        options = dataclasses.replace(options, salt=salt, exact=options.exact or inner.exact)
    check_method(method, served)
    return method or served.default_method, options


def selectors(body: SelectorBody) -> list[str]:
    """The ways in which a body names a beginning."""
    return [name for name in SELECTORS if getattr(body, name) is not None]


def _conversation(served: Served, body: SelectorBody) -> Conversation:
    chat = body.chat
    if isinstance(chat, ChatBody):
        check_unsupported(chat)
        if chat.messages is None:
            raise RequestError("chat.messages is missing", param="chat.messages", code="missing_required_parameter")
        return prompts.conversation(served, chat.messages, **template_options(chat))
    messages = body.messages if body.messages is not None else chat
    assert messages is not None
    return prompts.conversation(
        served, messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
    )
