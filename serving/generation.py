"""One HTTP request's work in the engine: submit, deltas, cancel.

The engine calls back on its own thread; events go through a deque and wake the event loop at most once per batch, so
that a loop under load handles many tokens per wake-up. Order within a choice is the engine's.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Sequence

from sparsejax import chain_control
from sparsejax.detokenize import CONTEXT_TOKENS, Choice, Delta, TextPiece
from sparsejax.errors import EngineDeadError, RequestError, ShuttingDownError
from sparsejax.request import ChainReport, Request, TokenEvent
from sparsejax.serving.state import Served

# Events that may wait for a client that does not read; then the request is cancelled.
MAX_PENDING_EVENTS = 10_000


class Generation:
    """Prompts of one HTTP request and their choices, numbered prompt by prompt.

    Create and use it on the event loop. Whoever creates it must call `close` in the end: it cancels what still runs.
    """

    def __init__(self, served: Served, requests: Sequence[Request], *, prompt_context: bool = False) -> None:
        self.served = served
        self._prompt_context = prompt_context
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._wake_scheduled = False
        self._events: collections.deque[TokenEvent] = collections.deque()
        self._closed = False
        self._refusal: Exception | None = None
        self._nudged = False
        self.abandoned = False
        self.last_news_s = self._loop.time()
        self._take(requests)

    def _take(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.chains: dict[str, ChainReport] = {}  # by request, as last heard
        self._choices: dict[tuple[str, int], Choice] = {}
        self._open: set[tuple[str, int]] = set()
        self._stopping: set[tuple[str, int]] = set()
        self._late: list[tuple[int, str, int]] = []
        for request in self.requests:
            context = request.prompt_ids[-CONTEXT_TOKENS:] if self._prompt_context else ()
            for index in range(request.params.n):
                key = request.request_id, index
                self._choices[key] = Choice(self.served.tokenizer, request.params, len(self._choices), context)
                self._open.add(key)

    def submit(self) -> None:
        """Hands everything to the engine, or nothing: a refusal of one prompt cancels the others and is raised."""
        try:
            for request in self.requests:
                self.served.engine.submit(request, self._on_event)
        except BaseException:
            self.close()
            raise

    def restart(self, requests: Sequence[Request]) -> None:
        """Begins again with other requests after a refusal; nothing of the first ones was shown."""
        self._take(requests)
        self._closed = False
        self.submit()

    def _on_event(self, event: TokenEvent) -> None:
        """Runs on the engine's thread."""
        self._events.append(event)
        full = len(self._events) > MAX_PENDING_EVENTS
        if self._wake_scheduled and not full:
            return
        self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._give_up if full else self._wake.set)
        except RuntimeError:  # the loop is closed: the server is gone, nobody waits
            self._events.clear()

    def _give_up(self) -> None:
        self.refuse(RequestError("the client reads too slowly", status=503, code="interrupted"))

    def refuse(self, error: Exception) -> None:
        """Ends everything with an error, unless it has ended already."""
        if not self._closed and not self.finished:
            self._refusal = error
            self.close()
            self._wake.set()

    @property
    def finished(self) -> bool:
        """All choices have ended."""
        return not self._open

    @property
    def begun(self) -> bool:
        """The engine has said what became of the chain of each prompt that has one."""
        return all(r.chain is None or r.request_id in self.chains for r in self.requests)

    def chain(self, prompt: int = 0) -> ChainReport | None:
        """What became of a prompt's chain, as far as it is known."""
        return self.chains.get(self.requests[prompt].request_id)

    async def next(self) -> list[Delta]:
        """Waits for news and returns all there is. Empty when all has ended, was abandoned, or after a `nudge`.

        The last delta of a request that goes wrong carries the error; nothing comes after it.
        """
        # No task and no timer per token: this is the hot path of a loaded server.
        while not (self.finished or self.abandoned):
            await self._wake.wait()
            deltas = self._drain()
            while self._late:
                await self._take_back(deltas, *self._late.pop())
            if deltas:
                self.last_news_s = self._loop.time()
                return deltas
            if self._nudged:
                self._nudged = False
                break
        return []

    def nudge(self) -> None:
        """Lets `next` return although there is nothing new."""
        self._nudged = True
        self._wake.set()

    def abandon(self) -> None:
        """The client has gone: cancels everything."""
        self.abandoned = True
        self.close()
        self._wake.set()

    def _drain(self) -> list[Delta]:
        self._wake.clear()
        self._wake_scheduled = False
        if self._refusal is not None:
            return [self._abort(self._refusal)]
        deltas = []
        while self._events:
            event = self._events.popleft()
            key = event.request_id, event.index
            if key not in self._open:
                continue
            choice = self._choices[key]
            delta = choice.feed(event)
            if delta.chain is not None:
                self.chains[event.request_id] = delta.chain
            if choice.stop_requested and key not in self._stopping and delta.finish_reason is None:
                self._stopping.add(key)
                self.served.engine.stop(event.request_id, event.index, choice.visible_tokens)
            if delta.finish_reason in ("error", "cancelled"):
                # Only a closing engine cancels of its own accord.
                error = delta.error or ShuttingDownError("the server is shutting down; the answer is not complete")
                deltas.append(self._abort(error, delta.index))
                break
            if delta.finish_reason is not None:
                self._open.discard(key)
            if delta.finish_reason is not None or delta.piece != TextPiece() or delta.chain is not None:
                deltas.append(delta)
            if delta.finish_reason is not None and (tokens := choice.seen_of(delta.chain)) is not None:
                self._late.append((len(deltas) - 1, event.request_id, tokens))
        return deltas

    async def _take_back(self, deltas: list[Delta], number: int, request_id: str, tokens: int) -> None:
        """The engine has ended a turn before its stop string was found: the chain forgets what nobody has seen."""
        request = next(r for r in self.requests if r.request_id == request_id)
        tenant, report = request.chain.tenant if request.chain else "", self.chains[request_id]
        answer = self.served.engine.ask(lambda chains: chain_control.take_back(chains, tenant, report, tokens))
        with contextlib.suppress(EngineDeadError):
            self.chains[request_id] = report = await asyncio.wrap_future(answer)
            deltas[number] = dataclasses.replace(deltas[number], chain=report)

    def _abort(self, error: Exception, index: int = 0) -> Delta:
        self.close()
        self._open.clear()
        return Delta(index, TextPiece(), "error", error=error)

    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self._choices.values())

    def close(self) -> None:
        """Cancels whatever still runs. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for request_id in {request_id for request_id, _ in self._open}:
            self.served.engine.cancel(request_id)
        self._events.clear()
