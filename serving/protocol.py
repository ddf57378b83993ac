"""Request bodies: their types, and checks that name the field at fault.

JSON is read twice on purpose: once into plain values, to see fields nobody knows, once into the types below.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from sparsejax.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
_MAX_NAMED_FIELDS = 20

# OpenAI fields without an effect here that change nothing about the answer a client gets.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    }
)


class StreamOptions(msgspec.Struct):
    """What streams carry beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share. null means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    sparse_method: str | None = None
    store: bool | None = None
    # Conversations that keep their memory (see `chain_fields`).
    chain: bool | None = None
    chain_id: str | None = None
    chain_append: bool | None = None
    chain_lookup: str | None = None
    chain_on_miss: str | None = None
    chain_on_busy: str | None = None
    chain_branch: str | None = None
    chain_expected_tokens: int | None = None
    chain_expected_digest: str | None = None
    chain_priority: int | None = None
    chain_ttl_s: float | None = None
    chain_expected_resume_s: float | None = None
    chain_shared_tokens: int | None = None
    chain_compat: bool | None = None
    cache_salt: str | None = None
    recall: str | None = None
    recall_budget: int | str | None = None
    # Rows that other requests computed (see docs/prefix-cache.md).
    require_unpruned: bool | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: dict[str, Any] | None = None


class OlderResults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What stays of results of tools that are no longer among the newest."""

    keep: float | None = None
    policy: str | None = None


class PrunePolicyFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes of results of tools after the turn (see `prune_policy`)."""

    keep_last_tool_results: int | None = None
    older: OlderResults | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chain_append_start: int | None = None
    chain_match: str | None = None
    prune_policy: PrunePolicyFields | None = None
    # Known, checked, and refused where they would change the answer.
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None


class LookupBody(msgspec.Struct, kw_only=True):
    """POST /v1/chains/lookup: a context as text, messages or token ids, and how a turn would be asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    sparse_method: str | None = None
    chain_id: str | None = None
    chain_append: bool | None = None
    chain_lookup: str | None = None
    chain_on_miss: str | None = None
    chain_on_busy: str | None = None
    chain_branch: str | None = None
    chain_expected_tokens: int | None = None
    chain_expected_digest: str | None = None
    cache_salt: str | None = None


class ForkBody(msgspec.Struct, kw_only=True):
    """POST /v1/chains/{id}/fork."""

    at_tokens: int | None = None


class PinBody(msgspec.Struct, kw_only=True):
    """POST /v1/chains/{id}/pin."""

    ttl_s: float


class EmptyBody(msgspec.Struct, kw_only=True):
    """POST without fields."""


class MatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/chain_cache/routing_match."""

    chain_id: str


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: text, or messages to render."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


def decode_body(body: bytes, body_type: type[T]) -> tuple[T, tuple[str, ...]]:
    """The body as `body_type`, and the names of fields it does not have.

    Raises:
      RequestError: the body is not JSON, not an object, or a field has the wrong type; names it where it can.
    """
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _not_json(body, e) from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        value = msgspec.convert(raw, body_type)
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    except msgspec.ValidationError as e:
        raise _wrong_type(str(e)) from None
    except (OverflowError, ValueError):
        raise _out_of_range(raw) from None
    unknown = dict.fromkeys(_unknown_fields(raw, body_type))
    return value, tuple(unknown)


def _unknown_fields(raw: Mapping[str, Any], body_type: type[msgspec.Struct]) -> Iterable[str]:
    known = set(body_type.__struct_fields__)
    yield from (name for name, value in raw.items() if name not in known | HARMLESS and value is not None)
    options = raw.get("stream_options")
    if isinstance(options, dict):
        yield from (f"stream_options.{k}" for k in options if k not in StreamOptions.__struct_fields__)
    for message in (raw.get("messages") if "messages" in known else None) or ():
        yield from (
            f"messages[].{k}" for k, v in message.items() if k not in Message.__struct_fields__ and v is not None
        )


def ignored_header(names: Iterable[str]) -> str:
    """Field names as a header value: they come from the client, so anything unusual is replaced."""
    safe = [re.sub(r"[^A-Za-z0-9_.\-\[\]]", "?", name[:64]) for name in names]
    more = len(safe) - _MAX_NAMED_FIELDS
    return ", ".join(safe[:_MAX_NAMED_FIELDS]) + (f" and {more} more" if more > 0 else "")


def _wrong_type(message: str) -> RequestError:
    what, _, path = message.partition(" - at `")
    # msgspec writes [...] for the value of a mapping.
    param = path.rstrip("`").removeprefix("$").removeprefix(".").replace("[...]", "") or None
    missing = re.match(r"Object missing required field `(\w+)`", what)
    if missing:
        field = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"{field} is missing", param=field, code="missing_required_parameter")
    return RequestError(f"{param or 'the body'}: {what[:1].lower()}{what[1:]}", param=param, code="invalid_type")


def _not_json(body: bytes, error: Exception) -> RequestError:
    """Names the field where a number that JSON doesn't have (NaN, Infinity, 1e999) is what is wrong."""
    try:
        bad = _first_not_finite(json.loads(body.decode()))
    except UnicodeDecodeError as e:
        return RequestError(f"the body is not valid UTF-8 (byte {e.start})", code="invalid_json")
    except (ValueError, RecursionError):
        bad = None
    if bad is not None:
        return RequestError(f"{bad} must be a finite number", param=bad, code="invalid_type")
    return RequestError(f"the body is not valid JSON: {error}", code="invalid_json")


def _out_of_range(raw: Mapping[str, Any]) -> RequestError:
    for name, value in raw.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return RequestError(f"{name} is out of range", param=name)
    return RequestError("a number in the body is out of range")


def _first_not_finite(value: Any, path: str = "") -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    return next((found for key, item in items if (found := _first_not_finite(item, key)) is not None), None)
