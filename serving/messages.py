"""What two conversations have in common when a client sends one back.

A client may change what it was given in ways that mean nothing: leave out the reasoning, write the arguments of a tool
call with other spaces, key order and escapes, send text in parts, trim an answer. Messages are compared in a form that
does not see this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

OPEN, CLOSE = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_MAX_EXACT = 2**53
_DIGEST_BYTES = 16


class Step(NamedTuple):
    """A conversation up to one message.

    Attributes:
      digest: of all messages to this one, reasoning left out.
      thought: digest of this message's reasoning, None if it has none.
    """

    digest: bytes
    thought: bytes | None


class Steps:
    """The steps of a conversation, message by message.

    Args:
      scope: of `scope_of`; conversations of different scopes have nothing in common.
      messages: the first ones, as `prompts.plain_message` makes them.
    """

    def __init__(self, scope: bytes, messages: Iterable[Mapping[str, Any]] = ()) -> None:
        self.steps: list[Step] = []
        self._digest = scope
        self._calls: dict[str, int] = {}
        for message in messages:
            self.add(message)

    def add(self, message: Mapping[str, Any]) -> None:
        """The next message."""
        content, thought = _canonical(message, self._calls)
        self._digest = _digest(self._digest + content.encode(errors="surrogatepass"))
        self.steps.append(Step(self._digest, _digest(thought.encode(errors="surrogatepass")) if thought else None))


def scope_of(tenant: str, salt: str, method: str, variables: Mapping[str, Any]) -> bytes:
    """What conversations must agree in, besides their messages: variables are the template's, tools included."""
    return _digest(canonical_json([tenant, salt, method, variables]).encode(errors="surrogatepass"))


def canonical_json(value: Any) -> str:
    """JSON that is equal for equal values: keys sorted, whole floats as integers, as JavaScript writes them."""
    return json.dumps(_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of an answer, both without white space around them.

    Reasoning comes first and ends with </think>; its beginning may be part of the prompt, its end may be missing.
    """
    before, closed, rest = text.partition(CLOSE)
    opened = before.lstrip().startswith(OPEN)
    if not opened and (not closed or OPEN in before):
        return "", text.strip()
    return before.lstrip().removeprefix(OPEN).strip(), rest.strip()


def _canonical(message: Mapping[str, Any], known_calls: dict[str, int]) -> tuple[str, str]:
    """(everything but the reasoning, the reasoning). Ids of tool calls count by the order in which they appear."""
    role, content = message.get("role"), message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    thought, calls = "", []
    if role == "assistant":
        thought, text = split_reasoning(text)
        thought = str(message.get("reasoning_content") or "").strip() or thought
        text, calls = _written_calls(text)
        for call in message.get("tool_calls") or ():
            if isinstance(call.get("id"), str):
                known_calls.setdefault(call["id"], len(known_calls))
            calls.append(_call(call.get("function")))
        if message.get("function_call"):
            calls.append(_call(message["function_call"]))
    call_id = message.get("tool_call_id")
    number = None if call_id is None else known_calls.setdefault(call_id, len(known_calls))
    return canonical_json([role, message.get("name"), text, calls, number]), thought


def _call(function: Any) -> Any:
    """[name, arguments by value]."""
    if not isinstance(function, Mapping):
        return function
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", arguments)
    return [function.get("name"), arguments]


def _written_calls(text: str) -> tuple[str, list[Any]]:
    """An answer without the tool calls that the model wrote in it, and these, if each can be read."""
    calls: list[Any] = []
    kept, found, rest = text.partition(OPEN_CALL)
    while found:
        written, closed, behind = rest.partition(CLOSE_CALL)
        call = _parsed(written, None) if closed else None
        if not isinstance(call, dict) or "name" not in call:
            return text, []
        calls.append(_call(call))
        between, found, rest = behind.partition(OPEN_CALL)
        kept += between
    return kept.strip(), calls


def _parsed(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
