"""Our server as a process of its own, and conversations with it, turn by turn, over HTTP."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks import common
from benchmarks.conversation import Count, Message, Script
from benchmarks.load import client, prompts

PATH = client.ENDPOINTS["chat"]
QUICK_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_ADDRESS = re.compile(r"http://[\d.]+:\d+")
_STOP_S = 30.0
_SHOWN = 3000


class Server:
    """`python -m sparsejax.serve` on a free port, from `start` to `stop` or `kill`; as a context manager too.

    Args:
      options: of the command line.
      timeout_s: until it must be ready.
    """

    def __init__(self, options: Sequence[str], timeout_s: float = 1800.0) -> None:
        self.options, self.timeout_s = list(options), timeout_s
        self.root = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Starts it and waits until it is ready.

        Returns:
          Seconds that took.

        Raises:
          SystemExit: it ended, or was not ready in time; says what it wrote.
        """
        assert self._process is None
        begun = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="sparsejax-bench-")
        log = pathlib.Path(self._folder.name) / "log"
        command = [sys.executable, "-m", "sparsejax.serve", "--port", "0", *self.options]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, cwd=common.ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            while not self._ready(log):
                if self._process.poll() is not None:
                    raise SystemExit(f"the server ended with status {self._process.returncode}:\n{_tail(log)}")
                if time.perf_counter() - begun > self.timeout_s:
                    raise SystemExit(f"the server was not ready after {self.timeout_s:g} s:\n{_tail(log)}")
                time.sleep(0.1)
        except BaseException:
            self.kill()
            raise
        return time.perf_counter() - begun

    def _ready(self, log: pathlib.Path) -> bool:
        if not self.root:
            found = _ADDRESS.search(log.read_text("utf-8", errors="replace"))
            self.root = found[0] if found else ""
        if not self.root:
            return False
        try:
            return httpx.get(f"{self.root}/health", timeout=10, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """SIGKILL: nothing is written or said any more."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, so that it may finish."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        process, self._process, self.root = self._process, None, ""
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _tail(log: pathlib.Path) -> str:
    return log.read_text("utf-8", errors="replace")[-_SHOWN:]


@dataclasses.dataclass(frozen=True)
class Model:
    """What a server serves, and who counts its tokens."""

    name: str
    counter: prompts.Counter


def model_of(http: httpx.Client, root: str) -> Model:
    """Asks a server of ours."""
    name = http.get(f"{root}/v1/models").raise_for_status().json()["data"][0]["id"]
    counter = prompts.server_counter(http, root, name)
    if counter is None:
        raise SystemExit(f"{root} does not count tokens at /tokenize")
    return Model(name, counter)


def tokens_of(http: httpx.Client, root: str, model: str, messages: Sequence[Message]) -> int:
    """Tokens of messages in the server's chat template, the opening of an answer not among them."""
    body = {"model": model, "messages": list(messages), "add_generation_prompt": False}
    return len(http.post(f"{root}/tokenize", json=body).raise_for_status().json()["tokens"])


def forget(http: httpx.Client, root: str, talks: Sequence[Conversation]) -> None:
    """Ends the chains of conversations that are over, so that their rows are in nobody's way."""
    for talk in talks:
        if talk.chain_id is not None:
            http.delete(f"{root}/v1/chains/{talk.chain_id}").raise_for_status()


def without_opening(count: Count) -> Count:
    """Counts tokens without those that open a prompt."""
    opening = count("")
    return lambda text: count(text) - opening


class Conversation:
    """What one agent has said and heard.

    Args:
      script: what its client says.
      fields: of every request: model, max_tokens, sparse_method, ...
      chain: further fields of requests that are turns of a chain; None for requests without chains.
    """

    def __init__(self, script: Script, fields: Mapping[str, Any], chain: Mapping[str, Any] | None = None) -> None:
        self.script, self.fields, self.chain = script, dict(fields), chain
        self.messages: list[Message] = []
        self.chain_id: str | None = None
        self.turn = 0

    def ask(self, turn: int | None = None) -> client.Ask:
        """The next turn's request, or that of a turn whose messages are known, without changing anything."""
        turn = self.turn + 1 if turn is None else turn
        body: dict[str, Any] = {**self.fields, "messages": self.before(turn)}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["chain"] = self.chain is not None
        if self.chain is not None:
            body |= self.chain
            if self.chain_id is not None:
                body["chain_id"] = self.chain_id
        return client.Ask(json.dumps(body).encode(), None, int(self.fields["max_tokens"]))

    def before(self, turn: int) -> list[Message]:
        """The messages that a turn sends: those of the turns before it, and the one that is new.

        Raises:
          ValueError: the turn before was not answered yet, or the script ends.
        """
        if not 1 <= turn <= min(self.turn + 1, self.script.turns):
            raise ValueError(f"turn {turn} of {self.script.turns} after {self.turn} answers")
        if turn == 1:
            return self.script.opening()
        # Two messages to begin with, then a result and an answer in each turn.
        return [*self.messages[: 2 * turn - 1], self.script.reply(turn)]

    def take(self, text: str, chain: Mapping[str, Any] | None = None) -> None:
        """Adds the answer of the next turn, and goes on with its chain."""
        messages = self.before(self.turn + 1)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.turn += 1
        if chain is not None and chain.get("id"):
            self.chain_id = chain["id"]


def quick_server(folder: pathlib.Path) -> dict[str, Any]:
    """Options for random weights, and fields that keep answers to letters, which stay what they are in a prompt."""
    path = folder / "tiny.json"
    path.write_text(json.dumps(QUICK_MODEL), "utf-8")
    options = ["--model", str(path), "--load-format", "dummy", "--precompile", "none"]
    options += ["--max-num-seqs", "4", "--kv-cache-memory-bytes", "64MiB"]
    letters = {str(byte): 50.0 for byte in range(ord("a"), ord("z") + 1)}
    return {"server_options": options, "extra_body": {"logit_bias": letters}}
