"""Returned histories: the ids that a chain wrote and generated, for the text or messages that a client sends back.

To encode a conversation again may give other ids than its chain has, and what a client sends need not be the text that
the chain stands for. Two anchors find the chain's own ids:

- messages: the request begins with all messages of a finished turn, compared as `serving.messages` does. Then its ids
  are the ledger's up to the end of that turn, and what the template writes behind that turn's answer is encoded alone.
- text: from there on, or from the beginning, ledger ids are kept while they stand for the text of the request.

Nothing here decides what a chain reuses: the engine compares ids. So a chain that has changed meanwhile, or a table
that has forgotten, costs reuse and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from sparsejax.errors import RequestError
from sparsejax.request import ChainOptions
from sparsejax.serving.ledger_text import LedgerText, LedgerTexts, Sealing, TextIndex, encode_behind
from sparsejax.serving.messages import Step, Steps, scope_of
from sparsejax.serving.talks import MAX_STEPS, NOTHING, End, Talk, Talks, digest_of_ids

if TYPE_CHECKING:
    from sparsejax.chains import Chains

Match = Literal["messages", "text"]


class Tokenizer(Sealing, Protocol):
    """What is needed of a tokenizer."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def render_chat_sealed(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        after: int | None = None,
        before: int | None = None,
        **template_kwargs: Any,
    ) -> tuple[str, int | None]: ...

    def render_chat_contents(
        self,
        messages: Sequence[Mapping[str, Any]],
        indexes: Sequence[int],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> tuple[str, dict[int, tuple[int, int]]]: ...


@dataclasses.dataclass(frozen=True)
class Known:
    """A chain as it was between two steps of the engine: its ledger, and at which ids states of it end."""

    chain_id: str
    ledger: np.ndarray
    processed: int
    boundaries: tuple[int, ...]


def known_chain(
    chains: Chains, chain_ids: Sequence[str], method: str, options: ChainOptions
) -> tuple[Known | None, list[str]]:
    """The first of some chains that a turn with these options may go on from, and those that are gone.

    For the engine's thread, or another if the chain may be between two states (ids are those of its ledger anyway).
    """
    seed = chains.seed(method, options.salt, options.tenant)
    dead = [chain_id for chain_id in chain_ids if chain_id not in chains.index.chains]
    for chain_id in chain_ids:
        chain = chains.index.chains.get(chain_id)
        if chain is not None and chain.seed == seed and len(chain.ledger):
            kept = (*(checkpoint.processed for checkpoint in chain.checkpoints), chain.processed)
            return Known(chain_id, chain.ledger, chain.processed, kept), dead
    return None, dead


class Conversation:
    """A checked chat request before its template is rendered.

    Args:
      messages: as `prompts.plain_message` makes them.
      add_generation_prompt, variables: of the template.
    """

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> None:
        self.messages = messages
        self.add_generation_prompt = add_generation_prompt
        self.variables = variables

    def steps(self, method: str, options: ChainOptions) -> Steps:
        """For comparing it with conversations of the same tenant, salt, method, tools and template variables."""
        variables = {k: v for k, v in self.variables.items() if k != "continue_final_message"}
        return Steps(scope_of(options.tenant, options.salt, method, variables), self.messages)

    def sealed(self, tokenizer: Tokenizer, after: int | None = None) -> tuple[str, int | None]:
        """Its text, and where in it the answer `messages[after]` ends, or None if that can't be said."""
        text, end = self.render(tokenizer, after=after)
        if after is None or not self.messages[after].get("tool_calls"):
            return text, end
        # Tool calls are written behind the content, in the template's own way, up to the end of the message.
        marks = [tokenizer.sealed_bytes(i).decode() for i in tokenizer.eos_ids if i in tokenizer.control_ids]
        if end is not None:
            return text, min((at for mark in marks if (at := text.find(mark, end)) >= 0), default=None)
        # Templates write a content of nothing otherwise than one of something: look from the other side.
        if after + 1 < len(self.messages):
            _, end = self.render(tokenizer, before=after + 1)
        elif not self.variables.get("continue_final_message"):
            end = len(text)
        ends = [text.rfind(mark, 0, end) for mark in marks] if end is not None else []
        found = max(ends, default=-1)
        last_call = self.messages[after]["tool_calls"][-1].get("function") or {}
        start = max((text.rfind(mark, 0, max(0, found)) for mark in marks), default=-1)
        is_answer = found >= 0 and str(last_call.get("name")) in text[max(0, start) : found]
        return text, found if is_answer else None

    def contents(self, tokenizer: Tokenizer, indexes: Sequence[int]) -> tuple[str, dict[int, tuple[int, int]]]:
        """Its sealed text, and where in it contents of messages begin and end, of those for which that can be said."""
        return tokenizer.render_chat_contents(
            self.messages, indexes, add_generation_prompt=self.add_generation_prompt, **self.variables
        )

    def render(self, tokenizer: Tokenizer, **place: int | None) -> tuple[str, int | None]:
        """Its sealed text, and where in it the content of message `after` ends or that of message `before` begins."""
        return tokenizer.render_chat_sealed(
            self.messages, add_generation_prompt=self.add_generation_prompt, **place, **self.variables
        )

    def suffix(self, tokenizer: Tokenizer, first: int, tail: str = "") -> tuple[str, bool]:
        """Sealed text of what follows message `first - 1`, an answer; the messages before it are not looked at.

        `tail` is an end of the answer that belongs to it. Also whether it begins with a control token, which ends the
        answer as an answer's last id may do.
        """
        opening = {"role": "user", "content": "."}  # templates may want a question before an answer
        shorter = Conversation([opening, *self.messages[first - 1 :]], self.add_generation_prompt, self.variables)
        for conversation, answer in ((shorter, 1), (self, first - 1)):
            try:
                text, end = conversation.sealed(tokenizer, answer)
            except RequestError:
                if conversation is self:
                    raise
                continue
            if end is not None:
                rest = text[end:]
                return tail + rest, not tail and tokenizer.encode_sealed(rest)[:1] in ([i] for i in tokenizer.eos_ids)
        raise RequestError(
            "the chat template does not say where the answer ends; send the whole conversation without"
            " chain_append and chain_append_start",
            param="messages",
            code="append_not_possible",
        )


@dataclasses.dataclass(frozen=True)
class Anchored:
    """The ids of a request.

    Attributes:
      ids: all of its context.
      kept: so many come from the chain's ledger.
      talk: the chain's record up to where messages were matched.
      token: first ledger id that stands for another text than the request's; None if there is none.
      message: first message that is another one than the chain has; None if there is none or it isn't known.
    """

    ids: list[int]
    kept: int = 0
    talk: Talk = NOTHING
    token: int | None = None
    message: int | None = None


def anchor_chat(
    tokenizer: Tokenizer,
    texts: LedgerTexts,
    conversation: Conversation,
    steps: Sequence[Step],
    known: Known,
    talk: Talk,
    match: Match = "messages",
) -> Anchored:
    """Ids of a conversation.

    Args:
      steps: of its messages.
      known: its chain; `talk` is what is remembered of it.
      match: "messages" keeps what a chain has of turns whose messages are equal but for what means nothing, their
        reasoning included; "text" keeps only what the template would write.
    """
    agreed = talk.agreed(steps)
    message = agreed if agreed < min(len(talk.steps), len(steps)) else None
    ends = [end for end in talk.ends if end.messages <= agreed and match == "messages"]
    end = next((e for e in reversed(ends) if digest_of_ids(known.ledger[: e.tokens]) == e.digest), None)
    text, place = conversation.sealed(tokenizer, None if end is None else end.messages - 1)
    ledger = texts.get(tokenizer, known.chain_id, known.ledger)
    found = None
    if end is not None and place is not None:
        start, rest = _behind(tokenizer, end, known, text[place:])
        found = _anchor(tokenizer, ledger, known, start, rest)
    if end is None or found is None:
        end, found = None, _anchor(tokenizer, ledger, known, 0, text)
    if found is None:
        return Anchored(tokenizer.encode_sealed(text), message=message)
    ids, kept, whole = found
    token = whole if whole < len(known.ledger) and whole < len(ids) else None
    return Anchored(ids, kept, talk.beginning(end.messages) if end else NOTHING, token, message)


def anchor_text(tokenizer: Tokenizer, texts: LedgerTexts, text: str, known: Known) -> Anchored:
    """Ids of a sealed text whose chain is `known`."""
    ledger = texts.get(tokenizer, known.chain_id, known.ledger)
    found = _anchor(tokenizer, ledger, known, 0, text)
    if found is None:
        return Anchored(tokenizer.encode_sealed(text))
    ids, kept, whole = found
    return Anchored(ids, kept, token=whole if whole < len(known.ledger) and whole < len(ids) else None)


def _behind(tokenizer: Tokenizer, end: End, known: Known, rest: str) -> tuple[int, str]:
    """How many ids stand for a matched turn, and the text behind them; `rest` is the template's, behind the answer."""
    at, closing = end.tokens, end.closing
    if closing is None:
        return at, end.tail + rest
    # What the template writes instead of the id that ended the answer takes its place, unless it has a row.
    stays = at < min(known.processed, len(known.ledger)) and int(known.ledger[at]) == closing
    if stays and not rest.startswith(tokenizer.sealed_bytes(closing).decode()):
        return at + 1, rest
    return at, rest


def _anchor(
    tokenizer: Tokenizer, ledger: LedgerText, known: Known, start: int, rest: str
) -> tuple[list[int], int, int] | None:
    """(ids, those kept, those before the first difference), or None if the text can't be encoded behind them."""
    data = rest.encode()
    kept, used, whole = ledger.cut(data, start, known.boundaries)
    new = encode_behind(tokenizer, known.ledger[:kept], data[used:].decode())
    return None if new is None or not kept + len(new) else ([*known.ledger[:kept].tolist(), *new], kept, whole)


class History:
    """What a server remembers of the conversations of its chains."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self.talks = Talks(max_steps)
        self.ledgers = LedgerTexts()
        self.texts = TextIndex()

    def forget(self, chain_id: str) -> None:
        """The chain is gone."""
        self.talks.forget(chain_id)
        self.ledgers.forget(chain_id)
        self.texts.forget(chain_id)
