"""/v1/chains: conversations that the server keeps, for those who own them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from sparsejax import chain_control as control
from sparsejax.cache.chain import digest_of
from sparsejax.errors import ChainDisabledError, ChainError, RequestError
from sparsejax.request import ChainOptions
from sparsejax.serving import anchoring, prompts
from sparsejax.serving.append import suffix_ids
from sparsejax.serving.chain_fields import chain_options, tenant_of
from sparsejax.serving.endpoint import AppState, answer_of, app_state, read_body
from sparsejax.serving.errors import JSON
from sparsejax.serving.protocol import ChatBody, EmptyBody, ForkBody, LookupBody, MatchBody, PinBody
from sparsejax.serving.sampling import check_method, check_model
from sparsejax.serving.state import Served

if TYPE_CHECKING:
    from sparsejax.chains import Chains

T = TypeVar("T")

MAX_LISTED = 1000


async def list_chains(http: HTTPRequest) -> Response:
    """GET /v1/chains?state=&limit=: the caller's chains, newest use first."""
    served = _served(http)
    state = http.query_params.get("state") or None
    if state is not None and state not in control.STATES:
        raise RequestError(f"state must be one of {', '.join(control.STATES)}, got {state[:40]!r}", param="state")
    given = http.query_params.get("limit", "100")
    if not given.isdecimal() or not 1 <= int(given) <= MAX_LISTED:
        raise RequestError(f"limit must be in [1, {MAX_LISTED}], got {given[:40]!r}", param="limit")
    found, total = await ask(served, lambda chains: control.listed(chains, tenant_of(http), state, int(given)))
    return JSON({"object": "list", "data": [_shown(info) for info in found], "total": total})


async def get_chain(http: HTTPRequest) -> Response:
    """GET /v1/chains/{id}."""
    return await _with_digest(http, await _on(http, control.get))


async def delete_chain(http: HTTPRequest) -> Response:
    """DELETE /v1/chains/{id}: frees at once what it holds."""
    await _on(http, control.delete)
    return JSON({"id": http.path_params["chain_id"], "object": "chain.deleted", "deleted": True})


async def fork_chain(http: HTTPRequest) -> Response:
    """POST /v1/chains/{id}/fork {at_tokens}: a new chain that goes its own way from here, or from a checkpoint."""
    body, _ = await read_body(http, ForkBody, b"{}")
    if body.at_tokens is not None and body.at_tokens < 1:
        raise RequestError(f"at_tokens must be at least 1, got {body.at_tokens}", param="at_tokens")
    return await _with_digest(http, await _on(http, control.fork, body.at_tokens))


async def checkpoint_chain(http: HTTPRequest) -> Response:
    """POST /v1/chains/{id}/checkpoint: keeps the state as it is beside later ones."""
    await read_body(http, EmptyBody, b"{}")
    return JSON(_shown(await _on(http, control.checkpoint)))


async def pin_chain(http: HTTPRequest) -> Response:
    """POST /v1/chains/{id}/pin {ttl_s}: not given up for so long; 0 ends that."""
    body, _ = await read_body(http, PinBody)
    if not 0 <= body.ttl_s <= control.MAX_PIN_S:
        raise RequestError(f"ttl_s must be in [0, {control.MAX_PIN_S:g}] seconds, got {body.ttl_s}", param="ttl_s")
    return JSON(_shown(await _on(http, control.pin, body.ttl_s)))


async def demote_chain(http: HTTPRequest) -> Response:
    """POST /v1/chains/{id}/demote: to the next tier, off the device."""
    await read_body(http, EmptyBody, b"{}")
    return JSON(_shown(await _on(http, control.demote)))


async def lookup(http: HTTPRequest) -> Response:
    """POST /v1/chains/lookup: what a turn would find, without one."""
    app, served = app_state(http), _served(http)
    body, _ = await read_body(http, LookupBody)
    check_model(body.model, served)
    check_method(body.sparse_method, served)
    options = chain_options(body, served, tenant_of(http))
    assert options is not None
    method = body.sparse_method or served.default_method
    ids, joint = await _lookup_ids(app, served, body, method, options)
    if not ids:
        raise RequestError("there is no token to look up", param="token_ids")
    options = dataclasses.replace(options, append_joint=joint)
    found = await answer_of(served.engine.consult(lambda caches: control.prospect(caches, options, tuple(ids), method)))
    return JSON({"object": "chain.lookup", **dataclasses.asdict(found)})


async def routing_match(http: HTTPRequest) -> Response:
    """POST /v1/chain_cache/routing_match {chain_id}: SparseEngine's question of routers."""
    body, _ = await read_body(http, MatchBody)
    served = app_state(http).state.served()
    answer = {"enabled": served.chain_cache, "present": False, "state": None, "tombstone": False}
    if served.chain_cache:
        try:
            info = await ask(served, lambda chains: control.get(chains, body.chain_id, tenant_of(http)))
            answer |= {"present": True, "state": info.state}
        except ChainError as error:
            answer["tombstone"] = error.code == "chain_gone"
    return JSON(answer)


async def ask(served: Served, function: Callable[[Chains], T]) -> T:
    """What the engine's thread answers, between two steps."""
    return await answer_of(served.engine.ask(function))


def _served(http: HTTPRequest) -> Served:
    served = app_state(http).state.served()
    if not served.chain_cache:
        raise ChainDisabledError("chains are off on this server (--chain-cache)")
    return served


async def _on(http: HTTPRequest, function: Callable[..., T], *args: Any) -> T:
    """Calls a function of `chain_control` for the chain in the path."""
    served, chain_id, tenant = _served(http), http.path_params["chain_id"], tenant_of(http)
    return await ask(served, lambda chains: function(chains, chain_id, tenant, *args))


async def _with_digest(http: HTTPRequest, info: control.ChainInfo) -> Response:
    digest = await prompts.in_pool(app_state(http).state, functools.partial(digest_of, info.ledger))
    return JSON(_shown(info) | {"digest": digest.hex()})


def _shown(info: control.ChainInfo) -> dict[str, Any]:
    fields = {
        field.name: getattr(info, field.name)
        for field in dataclasses.fields(info)
        if field.name not in ("ledger", "chain_id")
    }
    expires_in_s, now = fields.pop("expires_in_s"), time.time()
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
    created, expires = int(now - info.age_s), None if expires_in_s is None else int(now + expires_in_s)
    return {"id": info.chain_id, "object": "chain", "created_at": created, "expires_at": expires, **rounded}


async def _lookup_ids(
    app: AppState, served: Served, body: LookupBody, method: str, options: ChainOptions
) -> tuple[list[int] | tuple[int, ...], bool]:
    given = [name for name in ("messages", "prompt", "token_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError("send one of messages, prompt and token_ids", param=given[-1] if given else "messages")
    if body.token_ids is not None:
        prompts.check_ids(served, body.token_ids, "token_ids")
        return body.token_ids, False
    if body.prompt is not None:
        special = not options.append if body.add_special_tokens is None else body.add_special_tokens
        if options.append:
            return await prompts.encode(app.state, served, body.prompt, add_special_tokens=special), False
        found = await anchoring.text(app.state, served, body.prompt, method, options, add_special_tokens=special)
        return list(found.ids), False
    assert body.messages is not None
    if options.append:
        ids, joint = await suffix_ids(
            app.state, served, ChatBody(messages=body.messages, chat_template_kwargs=body.chat_template_kwargs)
        )
        return list(ids), joint
    conversation = prompts.conversation(
        served,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    found = await anchoring.chat(app.state, served, conversation, method, options)
    return list(found.ids), False
