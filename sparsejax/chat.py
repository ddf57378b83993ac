"""`python -m sparsejax.chat MODEL`: talk to a model in the terminal, in this process or on a server (`--url`)."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import sparsejax
from sparsejax import cli
from sparsejax.config import EngineConfig, ServerConfig
from sparsejax.errors import ConfigError, EngineDeadError, RequestError
from sparsejax.request import ChainOptions

HELP = """\
/clear          forget the conversation
/system TEXT    set the system message (and forget the conversation)
/stats          what the last answer cost: speed, and tokens seen, kept and read
/exit           leave (also Ctrl-D)
\"\"\"             starts and ends a message of several lines
Ctrl-C stops an answer; what was said so far stays in the conversation."""


@dataclasses.dataclass
class Cost:
    """What an answer cost. Filled while it streams."""

    method: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    cached_tokens: int = 0
    seen_tokens: int = 0
    resident_tokens: int = 0
    read_tokens: int = 0

    def line(self) -> str:
        """One line for people."""
        parts = []
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.2f} s")
        reused = f" ({self.cached_tokens} reused)" if self.cached_tokens else ""
        parts.append(f"{self.prompt_tokens}{reused} + {self.completion_tokens} tokens")
        if self.seen_tokens:
            parts.append(f"seen {self.seen_tokens}, kept {self.resident_tokens}, read per step {self.read_tokens}")
        if self.method:
            parts.append(self.method)
        return "  |  ".join(parts)


class Backend(Protocol):
    """Who answers."""

    cost: Cost

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer; closing the iterator stops it."""
        ...

    def close(self) -> None: ...


class Local:
    """An engine in this process."""

    def __init__(self, llm: Any, **params: Any) -> None:
        self._llm = llm
        self._params = llm.default_params(**params)
        self._method = next(iter(llm.limits.methods))
        self._chain_id: str | None = None
        self.cost = Cost()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.cost = Cost(method=self._method)
        # Each answer goes on from what the one before left in memory.
        chain = ChainOptions(self._chain_id) if self._llm.built.engine.settings.chain_cache else None
        with contextlib.closing(self._llm.stream_chat(messages, self._params, chain=chain)) as deltas:
            for delta in deltas:
                if delta.chain is not None:
                    self._chain_id = delta.chain.chain_id
                if delta.piece.text:
                    yield delta.piece.text
                if delta.stats is not None:
                    stats = delta.stats
                    self.cost = Cost(
                        self._method,
                        stats.prompt_tokens,
                        stats.completion_tokens,
                        stats.ttft_s,
                        stats.tokens_per_s,
                        stats.cached_tokens,
                        stats.seen_tokens,
                        stats.resident_tokens,
                        stats.read_tokens,
                    )

    def close(self) -> None:
        self._llm.close()


class Remote:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None, **params: Any) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://host:port, got {url!r}")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._params = params
        self.cost = Cost()
        self.model = model or self._first_model()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.cost = Cost()
        began = time.monotonic()
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._params,
        }
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", f"{self._path}/v1/chat/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read())
            for event in _events(response):
                if "error" in event:
                    raise _refusal(500, json.dumps(event).encode())
                self._note(event, began)
                for choice in event.get("choices") or ():
                    if text := (choice.get("delta") or {}).get("content"):
                        if self.cost.ttft_s is None:
                            self.cost.ttft_s = time.monotonic() - began
                        yield text

    def close(self) -> None:
        """There is nothing to close between answers."""

    def _note(self, event: dict[str, Any], began: float) -> None:
        usage, extra = event.get("usage") or {}, event.get("sparsejax") or {}
        self.cost.prompt_tokens = usage.get("prompt_tokens", self.cost.prompt_tokens)
        self.cost.completion_tokens = usage.get("completion_tokens", self.cost.completion_tokens)
        self.cost.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for name in ("method", "ttft_s", "tokens_per_s", "seen_tokens", "resident_tokens", "read_tokens"):
            if extra.get(name) is not None:
                setattr(self.cost, name, extra[name])
        if usage and not self.cost.tokens_per_s and self.cost.ttft_s is not None:  # another server: measured here
            decode_s = time.monotonic() - began - self.cost.ttft_s
            self.cost.tokens_per_s = max(0, self.cost.completion_tokens - 1) / max(decode_s, 1e-9)

    def _first_model(self) -> str:
        with contextlib.closing(self._connect()) as connection:
            connection.request("GET", f"{self._path}/v1/models", headers=self._headers)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise _refusal(response.status, data)
            return json.loads(data)["data"][0]["id"]

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in response:
        line = raw.decode().strip()
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _refusal(status: int, data: bytes) -> RequestError:
    try:
        message = json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = data.decode(errors="replace")[:500] or f"HTTP status {status}"
    return RequestError(message, status=status)


class Chat:
    """The conversation and its commands.

    Args:
      backend: who answers.
      system: system message, or None.
      read: asks for a line; raises EOFError at the end, KeyboardInterrupt on Ctrl-C.
      write: shows text as it is.
    """

    def __init__(
        self,
        backend: Backend,
        system: str | None = None,
        read: Callable[[str], str] | None = None,
        write: Callable[[str], Any] | None = None,
    ) -> None:
        self._backend = backend
        self._read = read or input
        self._write = write or _write
        self.messages: list[dict[str, str]] = []
        self._set_system(system)

    def run(self) -> None:
        """Until /exit or end of input."""
        while True:
            try:
                line = self._read_message()
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write("\n(/exit or Ctrl-D leaves)\n")
                continue
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line.strip()):
                    return
            else:
                self._ask(line)

    def _read_message(self) -> str:
        line = self._read("> ")
        if not line.startswith('"""'):
            return line
        lines = [line.removeprefix('"""')]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
            lines.append(self._read(". "))
        lines[-1] = lines[-1].removesuffix('"""')
        return "\n".join(lines).strip("\n")

    def _command(self, line: str) -> bool:
        """False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self.messages = [m for m in self.messages if m["role"] == "system"]
            self._write("(cleared)\n")
        elif name == "/system":
            self._set_system(rest.strip() or None)
            self._write("(system message set, conversation cleared)\n")
        elif name == "/stats":
            cost = self._backend.cost
            self._write((cost.line() if cost.completion_tokens else "no answer yet") + "\n")
        elif name in ("/help", "/?"):
            self._write(HELP + "\n")
        else:
            self._write(f"unknown command {name}; /help lists them\n")
        return True

    def _set_system(self, text: str | None) -> None:
        self.messages = [{"role": "system", "content": text}] if text else []

    def _ask(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        said: list[str] = []
        try:
            with contextlib.closing(self._backend.answer(self.messages)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    said.append(piece)
                    self._write(piece)
            self._write("\n")
        except KeyboardInterrupt:
            self._write("\n(stopped)\n")
        except (RequestError, OSError, http.client.HTTPException) as e:
            self._write(f"\nerror: {e}\n")
            if not said:
                self.messages.pop()  # as if it had not been asked
                return
        self.messages.append({"role": "assistant", "content": "".join(said)})


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and chats until told to stop. Returns the process's exit status."""
    parser = cli.Parser(prog="python -m sparsejax.chat", usage="%(prog)s [MODEL] [flags]", description=__doc__)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", default=None, help="the same as --model")
    parser.add_argument("--url", default=None, help="chat with a server instead, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", default=os.environ.get("SPARSEJAX_API_KEY"), metavar="KEY", help="the server's key"
    )
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, default=None, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, default=None, metavar="T", help="0 is greedy")
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file with settings")
    parser.add_argument("--version", action="version", version=f"sparsejax {sparsejax.__version__}")
    remote = "--url" in (sys.argv[1:] if argv is None else argv)
    knobs = {} if remote else cli.method_knobs()
    cli.add_settings(parser, EngineConfig, knobs=knobs)
    args = vars(parser.parse(argv))
    positional = args.pop("positional_model")
    if positional is not None:
        args.setdefault("model", positional)
    params = {name: args[name] for name in ("max_tokens", "temperature") if args[name] is not None}
    try:
        backend: Backend
        if args["url"]:
            backend = Remote(args["url"], args["api_key"], args.get("model"), **params)
            what = f"{backend.model} at {args['url']}"
        else:
            backend, what = _local(args, knobs, params)
    except (ConfigError, RequestError, EngineDeadError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except OSError as e:
        print(f"error: no server answers at {args['url']}: {e}", file=sys.stderr)
        return 1
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()
    try:
        print(f"{what}  (/help lists commands)")
        Chat(backend, args["system"]).run()
    finally:
        backend.close()
    return 0


def _local(args: dict[str, Any], knobs: cli.Knobs, params: dict[str, Any]) -> tuple[Local, str]:
    from sparsejax.llm import LLM

    # A config file may hold the server's settings too; they are checked and not used here.
    config, _ = cli.resolve(args, EngineConfig, ServerConfig, knobs=knobs, yaml_path=args["config"])
    console = cli.Console()
    try:
        llm = LLM.from_config(config, console)
    finally:
        console.close()
    return Local(llm, **params), llm.built.model_name


if __name__ == "__main__":
    sys.exit(main())
