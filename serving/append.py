"""Messages that are appended to a chain: what the chat template writes behind the last answer.

The chain has the exact tokens of all that came before, so only the rest is rendered and encoded: behind a stand-in for
the conversation, whose own part is cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsejax.errors import RequestError
from sparsejax.serving import prompts
from sparsejax.serving.protocol import ChatBody, Message
from sparsejax.serving.state import Served, ServerState

_QUESTION = Message(role="user", content=".")
_ANSWER = Message(role="assistant", content=".")


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
    """(ids to append of messages that are all new, whether the first of them ends the answer before them)."""
    if body.prompt_token_ids is not None:
        prompts.check_ids(served, body.prompt_token_ids, "prompt_token_ids")
        return body.prompt_token_ids, False
    assert body.messages is not None
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    conversation = prompts.conversation(
        served,
        [_QUESTION, _ANSWER, *body.messages],
        add_generation_prompt=body.add_generation_prompt,
        variables=variables,
    )

    def work() -> tuple[list[int], bool]:
        prompts.refuse_huge_messages(served, conversation.messages)
        text, joint = conversation.suffix(served.tokenizer, 2)
        return served.tokenizer.encode_sealed(text), joint

    return await prompts.in_pool(state, work)
