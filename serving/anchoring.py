"""From a request with a chain to its token ids: what is looked up where, off the event loop (see `serving.history`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsejax.detokenize import Delta
from sparsejax.errors import EngineDeadError
from sparsejax.request import ChainOptions, ChainReport
from sparsejax.serving import prompts
from sparsejax.serving.history import (
    Anchored,
    Conversation,
    History,
    Known,
    Match,
    anchor_chat,
    anchor_text,
    known_chain,
)
from sparsejax.serving.messages import Steps, scope_of
from sparsejax.serving.state import Served, ServerState, Tokenizer
from sparsejax.serving.talks import NOTHING, OpenTurn, Talk

ASK_TIMEOUT_S = 5.0
"""Wait for what the engine knows of a chain; without it less is reused."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the engine gets of a request, and who notes how its turn ends.

    Attributes:
      ids: the whole context, or what is appended to the chain if `chain.append` says so.
      chain: use of the Chain Cache, None for none.
      turn: to be told of the turn's deltas.
      message: first message that is another one than the chain has, or None.
    """

    ids: Sequence[int]
    chain: ChainOptions | None = None
    turn: Turn | None = None
    message: int | None = None


class Turn:
    """Follows a turn by its deltas. For the event loop.

    Args:
      history: notes it.
      begun: called with the id of the turn's chain when it is known.
      finished: called with that id, what the client was sent, the ids, whether the last one is hidden, and the last
        delta.
    """

    def __init__(
        self,
        history: History,
        begun: Callable[[str], None],
        finished: Callable[[str, Any, list[int], bool, Delta], None],
    ) -> None:
        self._history = history
        self._begun = begun
        self._finished = finished
        self._chain_id: str | None = None
        self._ids: list[int] = []
        self._hidden = False  # the last id is not in the text

    def add(self, delta: Delta, answer: Any, report: ChainReport | None) -> None:
        """The next delta; `answer` is what the client was sent with it, `report` what is known of the chain."""
        self._ids += delta.piece.token_ids
        if delta.piece.visible:
            self._hidden = not delta.piece.visible[-1]
        if report is None:
            return
        if report.state == "gone":
            self._history.forget(report.chain_id)
        elif delta.finish_reason in ("stop", "length"):
            with contextlib.suppress(RecursionError):  # arguments of a tool call that nobody could send back
                self._finished(report.chain_id, answer, self._ids, self._hidden, delta)
        elif self._chain_id is None:
            self._begun(report.chain_id)
        self._chain_id = report.chain_id


async def chat(
    state: ServerState,
    served: Served,
    conversation: Conversation,
    method: str,
    chain: ChainOptions,
    *,
    append_start: int | None = None,
    match: Match = "messages",
    answer_tokens: int = 1,
    skip_special_tokens: bool = True,
    wait: bool = True,
) -> Prompt:
    """Ids of a chat request with a chain.

    Args:
      conversation: its messages.
      method: sparse method that it will use.
      chain: what it asks for; `append` is set here.
      append_start: index of the first message that the chain doesn't have; only what follows it is read.
      match: see `history.anchor_chat`.
      answer_tokens: room that the window should have for the answer.
      skip_special_tokens: of the request.
      wait: for the engine's thread to say what the chain has; else that is read beside it, and may be changing.

    Raises RequestError.
    """
    history, tokenizer = state.history, served.tokenizer

    def prepare() -> tuple[Steps, list[str]]:
        prompts.refuse_huge_messages(served, conversation.messages)
        steps = conversation.steps(method, chain)
        return steps, history.talks.find(steps.steps)

    steps, found = await prompts.in_pool(state, prepare)
    known = await _known(served, history, found, method, chain, wait)

    def work() -> Prompt:
        talk = history.talks.get(known.chain_id) if known else NOTHING
        if append_start is not None:
            suffix, joint = conversation.suffix(tokenizer, append_start, _tail(talk, known))
            ids = tokenizer.encode_sealed(suffix)
            options = dataclasses.replace(chain, append=True, append_joint=joint)
            if known is None:  # the engine says why
                return Prompt(ids, options)
            ledger = known.ledger.tolist()
            whole = [*ledger, *(ids[1:] if joint and ledger[-1:] == ids[:1] else ids)]
            anchored = Anchored(whole, len(ledger), talk.beginning(talk.agreed(steps.steps)))
            turn = _chat_turn(history, tokenizer, steps, anchored, known, skip_special_tokens)
            return Prompt(ids, options, turn)
        if known is None:
            text, _ = conversation.sealed(tokenizer)
            anchored = Anchored(tokenizer.encode_sealed(text))
        else:
            about = (tokenizer, history.ledgers, conversation, steps.steps, known, talk)
            anchored = anchor_chat(*about, match)
            if match == "messages" and len(anchored.ids) + answer_tokens > served.max_model_len:
                # What the chain has beyond the template's text, old reasoning, must not be what fills the window.
                anchored = min(anchored, anchor_chat(*about, "text"), key=lambda found: len(found.ids))
        turn = _chat_turn(history, tokenizer, steps, anchored, known, skip_special_tokens)
        return Prompt(anchored.ids, chain, turn, anchored.message)

    return await prompts.in_pool(state, work)


async def text(
    state: ServerState,
    served: Served,
    prompt: str,
    method: str,
    chain: ChainOptions,
    *,
    add_special_tokens: bool = True,
    wait: bool = True,
    param: str = "prompt",
) -> Prompt:
    """Ids of a text completion request with a chain. Arguments as in `chat`, `param` is the field with the text.

    Raises RequestError.
    """
    history, tokenizer = state.history, served.tokenizer
    scope = scope_of(chain.tenant, chain.salt, method, {})

    def prepare() -> tuple[str | None, list[str]]:
        prompts.refuse_huge(served, prompt, param)
        sealed = tokenizer.seal(prompt, add_special_tokens)
        return sealed, [] if sealed is None else history.texts.find(scope, sealed.encode())

    sealed, found = await prompts.in_pool(state, prepare)
    if sealed is None:
        return Prompt(await prompts.encode(state, served, prompt, add_special_tokens=add_special_tokens), chain)
    known = await _known(served, history, found, method, chain, wait)

    def work() -> Prompt:
        if known is None:
            anchored = Anchored(tokenizer.encode_sealed(sealed))
        else:
            anchored = anchor_text(tokenizer, history.ledgers, sealed, known)

        def finished(chain_id: str, answer: str, ids: list[int], hidden: bool, delta: Delta) -> None:
            history.texts.put(chain_id, scope, (sealed + (tokenizer.seal(answer, False) or "")).encode())

        turn = Turn(history, lambda chain_id: history.texts.put(chain_id, scope, sealed.encode()), finished)
        return Prompt(anchored.ids, chain, turn, anchored.message)

    return await prompts.in_pool(state, work)


async def _known(
    served: Served, history: History, found: Sequence[str], method: str, chain: ChainOptions, wait: bool
) -> Known | None:
    """The chain whose ids are looked at: the named one, else the first of those found that is still there."""
    names = [chain.chain_id, *found] if chain.chain_id else [*found] if chain.lookup else []
    if not names:
        return None
    try:
        if wait:
            answer = served.engine.ask(lambda chains: known_chain(chains, names, method, chain))
            known, dead = await asyncio.wait_for(asyncio.wrap_future(answer), ASK_TIMEOUT_S)
        else:
            known, dead = served.engine.peek(lambda caches: known_chain(caches.chains, names, method, chain))
    except (EngineDeadError, TimeoutError):  # a dead engine says so when it gets the request
        return None
    for chain_id in dead:
        history.forget(chain_id)
    return known


def _tail(talk: Talk, known: Known | None) -> str:
    """End of a chain's last answer that its ledger does not have."""
    end = talk.ends[-1] if talk.ends else None
    return end.tail if end is not None and known is not None and end.tokens == len(known.ledger) else ""


def _chat_turn(
    history: History,
    tokenizer: Tokenizer,
    steps: Steps,
    anchored: Anchored,
    known: Known | None,
    skip_special_tokens: bool,
) -> Turn:
    kept = known.ledger[: anchored.kept] if known else np.zeros(0, np.uint32)
    turn = OpenTurn(history.talks, tokenizer, steps, anchored.ids, kept, anchored.talk)

    def finished(chain_id: str, answer: Any, ids: list[int], hidden: bool, delta: Delta) -> None:
        cut = isinstance(delta.stop_reason, str)
        closed = delta.finish_reason == "stop" and not cut and hidden
        turn.finished(chain_id, answer, ids, closed=closed, cut=cut, skip_special_tokens=skip_special_tokens)

    return Turn(history, turn.begun, finished)
