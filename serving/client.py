"""A small synchronous client: chat, and what the server keeps of a conversation, in Python.

    from sparsejax.serving.client import Client

    with Client("http://127.0.0.1:8000") as client:
        answer = client.chat(messages, max_tokens=64)
        client.prune(messages, [{"tool_call_id": "call_3", "keep": 0}])
        print(client.match(messages))

Knows HTTP and nothing of the engine. Needs httpx (`pip install "sparsejax[client]"`). Whatever OpenAI's own client can
do needs no other one; this one adds what it has no methods for.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

_OVER = frozenset({"completed", "failed", "blocked", "cancelled"})
_LONGEST_POLL_S = 20.0


class ClientError(Exception):
    """The server refused, or could not be reached.

    Attributes:
      status: HTTP status, None if there was no answer.
      code, param: as the server names them.
      body: its whole error object.
    """

    def __init__(self, message: str, status: int | None = None, body: Mapping[str, Any] | None = None) -> None:
        super().__init__(message if status is None else f"{message} (HTTP status {status})")
        self.status = status
        self.body = dict(body or {})
        self.code: str | None = self.body.get("code")
        self.param: str | None = self.body.get("param")


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
      message: to append to the conversation.
      text: its content.
      finish_reason: "stop" or "length".
      prompt_tokens, completion_tokens: of the request.
      cached_tokens: of the prompt, those that were not computed again.
      resident_tokens: of these, those that have rows: fewer where a range was pruned.
      degraded_tokens: of these, those whose rows are missing or were computed while others were.
      chain_id: of the conversation's chain, None without one.
      ttft_s, total_s: from sending to the first text, and to the end, by this machine's clock.
      fields: everything else that came: `usage`, `chain`, `sparsejax`.
    """

    message: dict[str, Any]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    resident_tokens: int
    degraded_tokens: int
    chain_id: str | None
    ttft_s: float
    total_s: float
    fields: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def text(self) -> str:
        return self.message["content"] or ""


@dataclasses.dataclass(frozen=True)
class Match:
    """What a request with these tokens would begin with.

    Attributes:
      enabled: rows are shared at all; if not, `reason` says why.
      block_size: tokens of a block.
      prompt_tokens: that were asked for; usable_tokens of them could be found at most.
      matched_tokens: found; resident_kv_tokens of them have rows.
      quality_degraded: some of them were pruned.
      miss: why less was found than could have been.
      fields: the whole answer.
    """

    enabled: bool
    block_size: int
    prompt_tokens: int
    usable_tokens: int
    matched_tokens: int
    resident_kv_tokens: int
    quality_degraded: bool
    reason: str | None
    miss: dict[str, Any] | None
    fields: dict[str, Any] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class PruneJob:
    """A prune job as it was when the server was asked.

    Attributes:
      prune_id: of the job; None if there was nothing that could go, so that there is none.
      status: queued, running, completed, failed, cancelled, or blocked: what it needs was not to be had in time.
      policy, ranges: what is pruned, [start, stop) in tokens.
      result: once completed: `logical_tokens`, `retained_tokens`, `freed_device_slots` and more.
      error: once failed: `message` and `code`.
      fields: the whole answer, for instance `skipped`: what of the request has no whole block.
    """

    prune_id: str | None
    status: str
    policy: str | None
    ranges: list[list[int]]
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    fields: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def over(self) -> bool:
        """It will not change any more."""
        return self.status in _OVER

    @property
    def freed_tokens(self) -> int:
        """Rows that it took away."""
        return 0 if self.result is None else self.result["freed_device_slots"]


@dataclasses.dataclass(frozen=True)
class Chain:
    """A conversation that the server keeps.

    Attributes:
      state: idle, active, ...; processed_tokens of its total_tokens have been computed.
      fields: the whole answer.
    """

    chain_id: str
    state: str
    total_tokens: int
    processed_tokens: int
    fields: dict[str, Any] = dataclasses.field(repr=False)


class Client:
    """Talks to one server. Close it, or use it as a context manager.

    Args:
      url: of the server, with or without /v1.
      api_key: sent as a bearer token.
      model: name in requests; None is whatever the server has.
      fields: of every chat request, for instance {"temperature": 0}.
      timeout_s: for the next byte of an answer.
      http: an `httpx.Client` to use instead of one of its own; it stays open.

    Every method raises ClientError with the server's message if it refuses, or if it can't be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        fields: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        http: httpx.Client | None = None,
    ) -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._fields = dict(fields or {})
        self._timeout_s = timeout_s
        self._own = http is None
        self._http = httpx.Client() if http is None else http

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its connections."""
        if self._own:
            self._http.close()

    def ready(self) -> bool:
        """The server answers and takes requests."""
        try:
            return self._http.get(f"{self._root}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """The next message of a conversation.

        Args:
          messages: as OpenAI's.
          fields: of the request: max_tokens, temperature, chain_id, prune_policy, require_unpruned, ...
        """
        body = {**self._fields, "messages": list(messages), **fields, "stream": True}
        body["stream_options"] = {"include_usage": True}
        began = time.perf_counter()
        said, first_s, finish, last = [], None, None, {}
        for event in self._events("/v1/chat/completions", body):
            if "error" in event:
                raise _refused(None, event)
            last |= {name: value for name, value in event.items() if value is not None and name != "choices"}
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                if text := (choice.get("delta") or {}).get("content"):
                    first_s = time.perf_counter() if first_s is None else first_s
                    said.append(text)
        ended = time.perf_counter()
        usage = last.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Answer(
            message={"role": "assistant", "content": "".join(said)},
            finish_reason=finish,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            cached_tokens=cached,
            resident_tokens=details.get("resident_tokens", cached),
            degraded_tokens=details.get("degraded_tokens", 0),
            chain_id=last.get("chain_id"),
            ttft_s=(ended if first_s is None else first_s) - began,
            total_s=ended - began,
            fields=last,
        )

    def match(
        self,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        **fields: Any,
    ) -> Match:
        """How much of a conversation, a text or some tokens is there. Give exactly one of the three.

        Args:
          fields: of the request: sparse_method, cache_salt, require_unpruned, ...
        """
        body = {"messages": messages and list(messages), "text": text, "token_ids": token_ids and list(token_ids)}
        body = {name: value for name, value in body.items() if value is not None} | fields
        return _made(Match, self._ask("POST", "/v1/prefix_cache/match", body))

    def prune(
        self,
        messages: Sequence[Mapping[str, Any]],
        prune: Sequence[Mapping[str, Any]],
        *,
        policy: str | None = None,
        wait: bool = True,
        timeout_s: float = 900.0,
        **fields: Any,
    ) -> PruneJob:
        """Takes rows of some messages out of what the server keeps of a conversation.

        Args:
          messages: the conversation, as it was sent or with answers that came since.
          prune: {"message": index} or {"tool_call_id": id}, each with "keep": the share of its tokens that stays.
          policy: which of them: "drop" (none), "snapkv_global", "kvzip_global"; None leaves that to the server.
          wait: until the job is over; else it is returned as it begins.
          timeout_s: longest wait.
          fields: of the request: chain_id, sparse_method, cache_salt, recompute, ...

        Raises:
          ClientError: the job failed, or was not over in time, too.
        """
        body: dict[str, Any] = {"messages": list(messages), "prune": [dict(one) for one in prune], **fields}
        if policy is not None:
            body["policy"] = policy
        job = _made(PruneJob, self._ask("POST", "/v1/prefix_cache/prune", body))
        return job if job.over or not wait or job.prune_id is None else self.wait(job.prune_id, timeout_s)

    def wait(self, prune_id: str, timeout_s: float = 900.0) -> PruneJob:
        """A prune job once it is over. Raises ClientError if it failed or takes longer."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            job = self.job(prune_id, wait_s=max(0.0, min(left, _LONGEST_POLL_S)))
            if job.over:
                return _checked(job)
            if left <= 0:
                raise ClientError(f"prune job {prune_id} is still {job.status} after {timeout_s:g} s", body=job.fields)

    def job(self, prune_id: str, wait_s: float = 0.0) -> PruneJob:
        """A prune job as it is now, or as soon as it is over within `wait_s`."""
        return _made(PruneJob, self._ask("GET", f"/v1/prefix_cache/prune/{prune_id}", params={"wait_s": f"{wait_s:g}"}))

    def cancel(self, prune_id: str) -> PruneJob:
        """Ends a prune job that is not over."""
        return _made(PruneJob, self._ask("DELETE", f"/v1/prefix_cache/prune/{prune_id}"))

    def chains(self, state: str | None = None, limit: int = 100) -> list[Chain]:
        """Conversations that the server keeps for this key, the last used first."""
        params = {"limit": str(limit)} | ({} if state is None else {"state": state})
        found = self._ask("GET", "/v1/chains", params=params)["data"]
        return [_made(Chain, {**one, "chain_id": one["id"]}) for one in found]

    def drop_chain(self, chain_id: str) -> None:
        """Ends a conversation that the server keeps."""
        self._ask("DELETE", f"/v1/chains/{chain_id}")

    def _ask(
        self, verb: str, path: str, body: dict[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        if body is not None and self._model is not None:
            body.setdefault("model", self._model)
        options: dict[str, Any] = {} if body is None else {"json": body}
        try:
            response = self._http.request(
                verb,
                self._root + path,
                params=dict(params or {}),
                headers=self._headers,
                timeout=self._timeout_s,
                **options,
            )
        except httpx.HTTPError as error:
            raise ClientError(f"{self._root}: {error or type(error).__name__}") from error
        if response.status_code >= 400:
            raise _refused(response.status_code, _parsed(response.content))
        return _parsed(response.content)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._model is not None:
            body.setdefault("model", self._model)
        try:
            with self._http.stream(
                "POST", self._root + path, json=body, headers=self._headers, timeout=self._timeout_s
            ) as response:
                if response.status_code >= 400:
                    raise _refused(response.status_code, _parsed(response.read()))
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _parsed(data)
        except httpx.HTTPError as error:
            raise ClientError(f"{self._root}: {error or type(error).__name__}") from error


def _parsed(data: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        shown = data if isinstance(data, str) else data.decode(errors="replace")
        raise ClientError(f"the answer is not a JSON object: {shown[:200]!r}")
    return value


def _refused(status: int | None, answer: Mapping[str, Any]) -> ClientError:
    body = answer.get("error")
    body = body if isinstance(body, Mapping) else {}
    return ClientError(str(body.get("message") or "the server refused"), status, body)


def _made(kind: type[T], answer: Mapping[str, Any]) -> T:
    """A dataclass from the fields that it has, with the whole answer in `fields`."""
    try:
        names = [field.name for field in dataclasses.fields(kind) if field.name != "fields"]  # type: ignore[arg-type]
        values = {name: answer[name] for name in names} | {"fields": dict(answer)}
    except KeyError as error:
        raise ClientError(f"the answer has no {error.args[0]}: {json.dumps(answer)[:200]}") from None
    return kind(**values)


def _checked(job: PruneJob) -> PruneJob:
    if job.status == "completed":
        return job
    error = job.error or {}
    raise ClientError(f"prune job {job.prune_id} {job.status}: {error.get('message', 'no reason given')}", body=error)
