"""What a chat request holds: JSON values, checked, and copies of them with every string changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsejax.errors import RequestError

_MAX_DEPTH = 64


def joined(content: Any, where: str) -> str:
    """A message's text: a string, or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, Mapping)):
        raise RequestError(
            f"{where} must be a string or a list of text parts, got {type(content).__name__}", param="messages"
        )
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = repr(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f'{where}[{index}] must be {{"type": "text", "text": string}}, got {kind}', param="messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def check_data(value: Any, where: str, param: str, depth: int = 0) -> None:
    """RequestError unless `value` is made of JSON types and not too deep."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where.split('.')[0]} is nested deeper than {_MAX_DEPTH} levels", param=param)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{where} has a key that is no string: {key!r}", param=param)
            check_data(item, f"{where}.{key}" if depth < 3 else where, param, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_data(item, where, param, depth + 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{where} contains a lone surrogate, which is not Unicode text", param=param) from None
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise RequestError(f"{where} must be a JSON value, got {type(value).__name__}", param=param)


def map_strings(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """A copy with every string and key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_key(key): map_strings(item, change, change_key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change, change_key) for item in value]
    return value


def map_request(
    request: Mapping[str, Any], change: Callable[[str], str], change_key: Callable[[str], str]
) -> dict[str, Any]:
    """`map_strings` on the template's variables; their names and the messages' roles stay."""
    changed = {name: map_strings(value, change, change_key) for name, value in request.items()}
    for message, original in zip(changed["messages"], request["messages"], strict=True):
        message["role"] = original["role"]
    return changed
