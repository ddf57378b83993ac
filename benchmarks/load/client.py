"""Streamed requests to an OpenAI-compatible server, and when each line of an answer reached the client's socket.

While a load runs, nothing is parsed: lines are kept with the time at which their first byte arrived. `read` makes
answers of them afterwards, so that a client on the server's machine takes little of its time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import httpx

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Below the 5 s of uvicorn's default: a connection that the server is about to close is not used again.
_KEEP_ALIVE_S = 4.0


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request before it is sent.

    Attributes:
      body: encoded JSON.
      prompt_tokens: of the prompt's text, by the server's tokenizer; None where nobody counted.
      output_tokens: the most that it may give.
    """

    body: bytes
    prompt_tokens: int | None
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class Record:
    """What came back. Times are `time.perf_counter`'s, in seconds.

    Attributes:
      due_s: when the request should have been sent; `sent_s` is later where --max-concurrency held it back.
      lines: arrival of the first byte, and payload, of each `data:` line.
      failure: what kind of failure, None if the stream ended by itself.
    """

    ask: Ask
    due_s: float
    sent_s: float
    end_s: float
    lines: tuple[tuple[float, bytes], ...] = ()
    failure: str | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One whole answer.

    Attributes:
      times_s: arrivals of its pieces of text.
      counted_by: who counted its tokens.
      chain: what our server says of the conversation's chain.
    """

    sent_s: float
    end_s: float
    times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    counted_by: str
    cached_tokens: int | None = None
    cost: dict[str, Any] | None = None
    text: str = ""
    chain: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float:
        """From the request to the first byte of the first piece of text."""
        return self.times_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From the request to the last piece of text."""
        return self.times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None where there is no second one."""
        if self.output_tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times_s)]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A request without a whole answer."""

    kind: str
    detail: str
    sent_s: float
    end_s: float


class Lines:
    """Cuts arriving bytes into lines and notes when each began to arrive."""

    def __init__(self) -> None:
        self.data: list[tuple[float, bytes]] = []
        self._rest = b""
        self._since_s = 0.0

    def feed(self, data: bytes, now_s: float) -> None:
        if not self._rest:
            self._since_s = now_s
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                self.data.append((self._since_s, line[5:].strip()))
            self._since_s = now_s

    def close(self) -> None:
        """The stream ended: a last line needs no line break."""
        if self._rest:
            self.feed(b"\n", self._since_s)


def root_of(url: str) -> str:
    """`http://HOST:PORT/PREFIX` without a final `/v1`; SystemExit if it is no such thing."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SystemExit(f"--base-url must be [NAME=]http://HOST:PORT or https://HOST:PORT, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def headers_of(api_key: str | None) -> dict[str, str]:
    # Compressed events could not be timed.
    found = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return found | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


class Client:
    """Concurrent streams from one server; use it as an async context manager.

    Args:
      root: of `root_of`.
      path: of the endpoint.
      timeout_s: for a whole answer.
    """

    def __init__(self, root: str, path: str, api_key: str | None, timeout_s: float) -> None:
        self._url, self._timeout_s = root + path, timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, headers=headers_of(api_key), trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._http.aclose()

    async def send(self, ask: Ask, due_s: float | None = None) -> Record:
        """Sends one request and waits for the end of its stream. Failures become part of the record."""
        lines, failure, detail = Lines(), None, ""
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.stream("POST", self._url, content=ask.body) as response:
                    if response.status_code != 200:
                        failure = f"HTTP {response.status_code}"
                        detail = (await response.aread()).decode(errors="replace")[:300]
                    else:
                        async for data in response.aiter_raw():
                            lines.feed(data, time.perf_counter())
        except TimeoutError:
            failure, detail = "timeout", f"no whole answer after {self._timeout_s:g} s"
        except httpx.ConnectError as error:
            failure, detail = "no connection", str(error)
        except httpx.HTTPError as error:
            failure, detail = "connection lost", f"{type(error).__name__}: {error}"
        end_s = time.perf_counter()
        lines.close()
        return Record(ask, sent_s if due_s is None else due_s, sent_s, end_s, tuple(lines.data), failure, detail)


async def drive(
    client: Client, asks: list[Ask], arrivals_s: list[float], max_concurrency: int | None
) -> tuple[list[Record], float]:
    """Sends each request when it is due, or as soon after as `max_concurrency` allows.

    Args:
      arrivals_s: when each is due, in seconds from now, ascending. All zero: a closed loop of `max_concurrency`.

    Returns:
      Records in the order of `asks`, and seconds from the start to the end of the last answer.
    """
    places = asyncio.Semaphore(max_concurrency or len(asks) or 1)
    start_s = time.perf_counter()

    async def one(ask: Ask, due_s: float) -> Record:
        async with places:
            return await client.send(ask, due_s)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for ask, arrival_s in zip(asks, arrivals_s, strict=True):
            due_s = start_s + arrival_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(ask, due_s)))
    records = [task.result() for task in tasks]
    return records, max((record.end_s for record in records), default=start_s) - start_s


def read(record: Record, count: Callable[[str], int] | None = None) -> Answer | Failure:
    """The answer in a record.

    Output tokens are the server's `usage`; without it all that were asked for if it says that it stopped for length;
    else what `count` finds in the text; else the pieces.
    """

    def failed(kind: str, detail: str = "") -> Failure:
        return Failure(kind, detail, record.sent_s, record.end_s)

    if record.failure:
        return failed(record.failure, record.detail)
    times, texts = [], []
    usage: dict[str, Any] = {}
    cost = chain = finish = None
    done = False
    for time_s, data in record.lines:
        if data == b"[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            return failed("not JSON", data[:100].decode(errors="replace"))
        if chunk.get("error"):
            return failed("error in the stream", json.dumps(chunk["error"])[:300])
        text = "".join(map(_text, chunk.get("choices") or ()))
        if text:
            times.append(time_s)
            texts.append(text)
        finish = next((c["finish_reason"] for c in chunk.get("choices") or () if c.get("finish_reason")), finish)
        usage = chunk.get("usage") or usage
        cost = chunk.get("sparsejax") or cost
        chain = chunk.get("chain") or chain
    if not done:
        return failed("cut short", f"no [DONE] after {len(times)} pieces of text")
    if not times:
        return failed("no text", f"finish_reason {finish}")
    if "completion_tokens" in usage:
        tokens, counted_by = usage["completion_tokens"], "usage"
    elif finish == "length":
        tokens, counted_by = record.ask.output_tokens, "finish_reason"
    elif count is not None:
        tokens, counted_by = count("".join(texts)), "tokenizer"
    else:
        tokens, counted_by = len(times), "pieces"
    return Answer(
        sent_s=record.sent_s,
        end_s=record.end_s,
        times_s=tuple(times),
        prompt_tokens=usage.get("prompt_tokens", record.ask.prompt_tokens or 0),
        output_tokens=tokens,
        counted_by=counted_by,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        cost=cost,
        text="".join(texts),
        chain=chain,
    )


def _text(choice: dict[str, Any]) -> str:
    """Text of a choice in a chunk: of a completion, or of a chat's answer or reasoning."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
