"""Messages that are appended to a chain: what the chat template writes behind the last answer.

The chain has the exact tokens of all that came before, so only the rest is rendered and encoded: behind a stand-in for
the conversation, whose own part is cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsejax.errors import RequestError
from sparsejax.serving import prompts
from sparsejax.serving.protocol import ChatBody, Message
from sparsejax.serving.state import Served, ServerState

_QUESTION = Message(role="user", content=".")
_ANSWER = Message(role="assistant", content=".")
# Tokens that templates write behind the one that ends an answer: a line break, at most a few.
_MAX_BEHIND_END = 4


def check_append(body: ChatBody) -> None:
    """Raises RequestError for messages that can't follow an answer."""
    if body.prompt_token_ids is not None and body.chain_append_start is None:
        return
    messages, start = body.messages, body.chain_append_start
    if not messages:
        raise RequestError("messages is missing", param="messages", code="missing_required_parameter")
    if body.continue_final_message:
        raise RequestError("continue_final_message can't be appended to a chain", param="continue_final_message")
    if start is None:
        return
    if not 1 <= start < len(messages):
        raise RequestError(
            f"chain_append_start must be in [1, {len(messages) - 1}], the first new message, got {start}",
            param="chain_append_start",
        )
    if messages[start - 1].role != "assistant":
        raise RequestError(
            f"chain_append_start={start} must follow an answer, but messages[{start - 1}] is of role "
            f"{messages[start - 1].role[:40]}",
            param="chain_append_start",
        )


async def suffix_ids(state: ServerState, served: Served, body: ChatBody) -> tuple[Sequence[int], bool]:
    """(ids to append, whether the first of them ends the answer before them)."""
    if body.prompt_token_ids is not None and body.chain_append_start is None:
        prompts.check_ids(served, body.prompt_token_ids, "prompt_token_ids")
        return body.prompt_token_ids, False
    assert body.messages is not None
    start = body.chain_append_start
    answer, new = (_ANSWER, body.messages) if start is None else (body.messages[start - 1], body.messages[start:])
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}

    async def render(messages: Sequence[Message], prompt: bool) -> list[int]:
        return await prompts.render(state, served, messages, add_generation_prompt=prompt, variables=variables)

    before = await render([_QUESTION, answer], False)
    whole = await render([_QUESTION, answer, *new], body.add_generation_prompt is not False)
    if whole[: len(before)] != before or len(whole) == len(before):
        raise RequestError(
            "the chat template writes an answer in another way once messages follow it; send the whole conversation "
            "without chain_append and chain_append_start",
            param="chain_append_start" if start is not None else "chain_append",
            code="append_not_possible",
        )
    return _with_end(served.tokenizer, before, whole)


def _with_end(tokenizer: Any, before: Sequence[int], whole: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Begins with the token that ended the answer, if the template writes one: models may stop without it."""
    ends = [i for i in range(max(0, len(before) - _MAX_BEHIND_END), len(before)) if before[i] in tokenizer.eos_ids]
    return (whole[ends[-1] :], True) if ends else (whole[len(before) :], False)
