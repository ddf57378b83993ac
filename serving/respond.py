"""From deltas to HTTP: one path for streams and whole answers.

An endpoint gives an `Answer`, which knows how its deltas look; `respond` runs it. A whole answer is the same deltas
collected, so the two can't disagree. The client's disconnect is watched from the first moment to the last, and cancels.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparsejax.detokenize import Delta, TextPiece
from sparsejax.errors import ChainError, RequestError
from sparsejax.request import Request
from sparsejax.serving.answer import Answer
from sparsejax.serving.errors import JSON, describe, error_response
from sparsejax.serving.generation import Generation
from sparsejax.serving.prompts import in_pool
from sparsejax.serving.state import ServerState

KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


async def respond(
    http: HTTPRequest,
    state: ServerState,
    generation: Generation,
    answer: Answer,
    *,
    stream: bool,
    headers: dict[str, str],
    keep_alive_s: float = KEEP_ALIVE_S,
    instead: Callable[[], Awaitable[Request]] | None = None,
) -> Response:
    """Runs a generation. An error before the stream has begun keeps its HTTP status.

    `instead` makes the request that is served where the chain of the first one can't go on.
    """
    timeout_s = _timeout_s(http)
    loop = asyncio.get_running_loop()
    watch = asyncio.ensure_future(disconnected(http.receive))
    watch.add_done_callback(lambda _: generation.abandon())
    timers: list[_KeepAlive | asyncio.TimerHandle] = [_KeepAlive(generation, keep_alive_s)] if stream else []
    started = False
    state.active_requests += 1

    def end() -> None:
        state.active_requests -= 1
        watch.cancel()
        for timer in timers:
            timer.cancel()
        generation.close()

    try:
        generation.submit()
        if timeout_s is not None:
            late = RequestError(f"not done within {timeout_s:g} s", status=408, code="deadline_exceeded")
            timers.append(loop.call_later(timeout_s, generation.refuse, late))
        deltas = await _first(generation)
        if instead is not None and deltas and _missed(deltas[-1].error):
            generation.restart([await instead()])
            deltas = await _first(generation)
        if generation.begun and any(r.diverged_at is not None for r in generation.chains.values()):
            with contextlib.suppress(RequestError):
                await in_pool(state, answer.locate_divergence)
        if stream:
            if deltas and (error := deltas[-1].error) is not None:
                return error_response(error)
            started = True
            return EventStream(_frames(generation, answer, deltas), headers | answer.headers(), end)
        while True:
            for delta in deltas:
                if delta.error is not None:
                    return error_response(delta.error)
                answer.add(delta)
            if generation.finished:
                return JSON(answer.whole(), headers=headers | answer.headers())
            if generation.abandoned:
                return Response(status_code=499)  # nobody reads this
            deltas = await generation.next()
    finally:
        if not started:
            end()


async def _first(generation: Generation) -> list[Delta]:
    """Deltas up to the first that shows something, or to a nudge once all chains are known: headers name them."""
    deltas: list[Delta] = []
    while True:
        news = await generation.next()
        deltas += news
        if any(delta.piece != TextPiece() or delta.finish_reason is not None for delta in news):
            return deltas
        if generation.finished or generation.abandoned or (not news and generation.begun):
            return deltas


def _missed(error: Exception | None) -> bool:
    return isinstance(error, ChainError) and error.recovery in ("resend_full", "new_chain")


class _KeepAlive:
    """Nudges a generation after each `interval_s` without news."""

    def __init__(self, generation: Generation, interval_s: float) -> None:
        self._generation = generation
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def cancel(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        due = self._generation.last_news_s + self._interval_s
        if due <= now:
            self._generation.nudge()
            due = now + self._interval_s
        self._timer = self._loop.call_at(due, self._tick)


def _timeout_s(http: HTTPRequest) -> float | None:
    """The client's deadline, from the header X-Request-Timeout in seconds."""
    given = http.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise RequestError(
            f"X-Request-Timeout must be a positive number of seconds, got {given[:40]!r}", param="X-Request-Timeout"
        )
    return timeout_s


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body was read before, or there is none, so nothing else matters."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _frames(generation: Generation, answer: Answer, deltas: list[Delta]) -> AsyncIterator[bytes]:
    out = b"".join(map(_frame, answer.opening()))
    while not generation.abandoned:
        for delta in deltas:
            if delta.error is not None:
                yield out + _frame(describe(delta.error)[1])
                return
            answer.add(delta)
            out += b"".join(map(_frame, answer.chunks(delta)))
        if generation.finished:
            yield out + b"".join(map(_frame, answer.closing())) + _DONE
            return
        if out or not deltas:
            yield out or _KEEP_ALIVE
        out = b""
        deltas = await generation.next()


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class EventStream(Response):
    """Server-sent events. `on_end` is called exactly once, whatever ends the stream."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], headers: dict[str, str], on_end: Callable[[], None]) -> None:
        self.frames = frames
        self.status_code = 200
        self.background = None
        self._on_end = on_end
        # Proxies (nginx) would otherwise collect the events.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for frame in self.frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client left while we were writing
        finally:
            self._on_end()
