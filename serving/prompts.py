"""Text and messages to token ids, off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from sparsejax.errors import ContextLengthError, RequestError
from sparsejax.request import check_token_ids
from sparsejax.serving.history import Conversation
from sparsejax.serving.protocol import MAX_MESSAGES, Message
from sparsejax.serving.state import Served, ServerState

T = TypeVar("T")

TOKENIZE_TIMEOUT_S = 30.0

# Of a text with many more characters than this per token of the window, a part is encoded first: it may be too long
# already.
_CHARACTERS_PER_TOKEN = 16

# Template variables that are arguments of the rendering function, not of the template.
_RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


async def in_pool(state: ServerState, work: Callable[[], T]) -> T:
    """Runs tokenizer work in the pool; gives up after TOKENIZE_TIMEOUT_S."""
    try:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(state.tokenize_pool, work), TOKENIZE_TIMEOUT_S)
    except RecursionError:
        raise RequestError("the request is nested too deeply") from None
    except TimeoutError:
        raise RequestError(
            f"tokenizing took longer than {TOKENIZE_TIMEOUT_S:g} s", status=503, code="tokenize_timeout"
        ) from None


async def encode(
    state: ServerState, served: Served, text: str, *, add_special_tokens: bool = True, limit: bool = True
) -> list[int]:
    """Token ids of a text. With `limit`, a text that can't fit the window is refused before all of it is encoded."""

    def work() -> list[int]:
        if limit:
            refuse_huge(served, text, "prompt")
        return served.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await in_pool(state, work)


def refuse_huge(served: Served, text: str, param: str) -> None:
    """Refuses a text that can't fit the window without encoding all of it."""
    part = served.max_model_len * _CHARACTERS_PER_TOKEN
    if len(text) > 2 * part:
        num_tokens = len(served.tokenizer.encode(text[:part], add_special_tokens=False))
        if num_tokens > served.max_model_len:
            raise ContextLengthError(
                f"{param}: a text of {len(text)} characters does not fit: its first {part} are {num_tokens} tokens "
                f"already, and the window has {served.max_model_len}",
                param=param,
            )


def check_ids(served: Served, ids: Sequence[int], param: str) -> None:
    """Checks token ids from a client; a list that can't fit is refused before it is walked through."""
    if len(ids) > served.max_model_len:
        raise ContextLengthError(
            f"{param} has {len(ids)} tokens, the window has {served.max_model_len}", param=param.partition("[")[0]
        )
    check_token_ids(ids, served.tokenizer.vocab_size, param)


async def render(
    state: ServerState,
    served: Served,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, through the chat template.

    Raises RequestError naming the message at fault.
    """
    checked = conversation(
        served,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )

    def work() -> list[int]:
        refuse_huge_messages(served, checked.messages)
        return served.tokenizer.render_chat(
            checked.messages, add_generation_prompt=checked.add_generation_prompt, **checked.variables
        )

    return await in_pool(state, work)


def refuse_huge_messages(served: Served, messages: Sequence[Mapping[str, Any]]) -> None:
    """`refuse_huge` for each text of a conversation."""
    for message in messages:
        content = message["content"]
        for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
            refuse_huge(served, text, "messages")


def conversation(
    served: Served,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Conversation:
    """The checked messages and template variables of a request. Raises RequestError naming the message at fault."""
    if not served.tokenizer.has_chat_template:
        raise RequestError(
            "this model has no chat template; use /v1/completions or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    if not messages:
        raise RequestError("messages is empty; send at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"{len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages")
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise RequestError(f"{name} can't be set through chat_template_kwargs", param="chat_template_kwargs")
    final = messages[-1]
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if final.role != "assistant":
            raise RequestError(
                f"continue_final_message needs a last message of role assistant, not {final.role[:40]}",
                param="continue_final_message",
            )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    plain = [plain_message(i, message) for i, message in enumerate(messages)]
    chosen = {**served.template_variables, **(variables or {})}
    if continue_final_message:
        chosen["continue_final_message"] = True
    return Conversation(plain, bool(add_generation_prompt), chosen)


def plain_message(index: int, message: Message) -> dict[str, Any]:
    """A message as the tokenizer takes it: absent fields left out, tool arguments as objects."""
    where = f"messages[{index}]"
    plain = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            if part.type != "text":
                raise RequestError(
                    f"{where}.content[{i}]: only text is supported, not {part.type[:40]!r}",
                    param=f"{where}.content[{i}].type",
                    code="unsupported_parameter",
                )
            if part.text is None:
                raise RequestError(f"{where}.content[{i}].text is missing", param=f"{where}.content[{i}].text")
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    elif message.content is None:
        if message.role != "assistant" or not (message.tool_calls or message.function_call or message.refusal):
            raise RequestError(f"{where}.content is missing", param=f"{where}.content")
        plain["content"] = message.refusal or ""
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.role == "developer":
        plain["role"] = "system"  # OpenAI's newer name of the same role; templates know the older one
    if message.reasoning is not None and message.reasoning_content is None:
        plain["reasoning_content"] = plain.pop("reasoning")
    return plain


def _tool_call(tool_call: Mapping[str, Any]) -> dict[str, Any]:
    """A past tool call with its arguments as an object, which is what templates expect; key order is kept."""
    call = dict(tool_call)
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return call
        if isinstance(arguments, dict):
            call["function"] = {**function, "arguments": arguments}
    return call
