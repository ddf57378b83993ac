"""An agent that searches the documentation for many turns and gives up what it no longer needs.

python examples/agent_with_pruning.py --serve               starts a server with the default model (fetched once)
python examples/agent_with_pruning.py http://127.0.0.1:8000 talks to one that runs
python examples/agent_with_pruning.py --serve --compare     the same turns again without pruning
python examples/agent_with_pruning.py --serve --policy      the server does it by itself (`prune_policy`)

The default model is too small to call tools reliably, so which search comes next is scripted. What it says of the
results is its own. After each turn all results but the newest two are pruned: the server keeps the conversation, every
later token of it stays cached, and only the rows of these results go.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

from sparsejax.serving.client import Answer, Client, ClientError

DOCS = sorted((pathlib.Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
SYSTEM = "You answer questions about a program's documentation in one short sentence, from the search results."
PLAN = (
    ("How do I start the server?", "start the server quickstart"),
    ("How do I talk to it in the terminal?", "chat terminal command"),
    ("Which methods evict rows?", "methods evict rows memory"),
    ("What is a page?", "page size rows pages"),
    ("What does quest do?", "quest selects pages"),
    ("What does snapkv keep?", "snapkv keeps window prompt"),
    ("How is quality measured?", "quality measured tasks divergence"),
    ("What is a chain?", "chain conversation kept memory"),
    ("How do I resume a conversation?", "resume chain conversation id"),
    ("Can chains be forked?", "fork chain checkpoint"),
    ("What happens when memory is full?", "memory full reclaim preempt"),
    ("Does it survive a restart?", "restart chain folder disk"),
    ("What is recall?", "recall dropped rows host"),
    ("How do I set the context length?", "max model len context window option"),
    ("How many requests run at once?", "concurrent requests rows max num seqs"),
    ("Which metrics are there?", "metrics prometheus counter"),
    ("How do I use an API key?", "api key bearer authentication"),
    ("How fast is decoding on a CPU?", "decode speed CPU tokens per second"),
    ("Which GPUs are supported?", "GPU CUDA kernels supported"),
    ("What does JAX have to do with it?", "JAX Pallas kernels"),
    ("What is a storage?", "storage fp8 codes precision"),
    ("How do I write a method?", "write a new method module"),
    ("What if the server does not start?", "troubleshooting server start error"),
    ("Which licence do dependencies have?", "dependencies packages reasons"),
)


class Search:
    """The tool: paragraphs of some files, the best match for a query first."""

    def __init__(self, files: list[pathlib.Path], result_chars: int) -> None:
        self._chars = result_chars
        self._parts = [
            (f"{path.name}: {part.strip()}", Counter(_words(part)))
            for path in files
            for part in re.split(r"\n(?=#)|\n\n", path.read_text("utf-8"))
            if len(part) > 80
        ]
        found = Counter(word for _, words in self._parts for word in words)
        self._weight = {word: math.log(len(self._parts) / count) for word, count in found.items()}

    def __call__(self, query: str) -> str:
        wanted = set(_words(query))

        def score(part: tuple[str, Counter[str]]) -> float:
            text, words = part
            hits = sum(self._weight.get(word, 0.0) * min(2, words[word]) for word in wanted)
            return hits / math.log(50 + len(text))

        best = sorted(self._parts, key=score, reverse=True)[:3]
        return "\n\n".join(text for text, _ in best)[: self._chars]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


class Agent:
    """A conversation in which each turn asks, searches and answers."""

    def __init__(self, client: Client, search: Search, arguments: argparse.Namespace, prunes: bool) -> None:
        self._client, self._search, self._arguments, self._prunes = client, search, arguments, prunes
        self.messages: list[dict] = [{"role": "system", "content": SYSTEM}]
        self.chain_id: str | None = None
        # What is pruned is so for all requests that begin alike under this salt: each run has its own.
        self._salt = f"{os.getpid()}-{prunes}"
        self._pruned: set[str] = set()
        self.saved_tokens = 0

    def turn(self, question: str, query: str) -> tuple[Answer, float]:
        """The model's answer, and the seconds that the turn took, pruning included."""
        began = time.perf_counter()
        number = len(self.messages)
        call = {"name": "search", "arguments": f'{{"query": "{query}"}}'}
        self.messages += [
            {"role": "user", "content": question},
            {
                "role": "assistant",  # scripted: what a larger model would write itself
                "content": f"search({query!r})",
                "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{number}", "content": self._search(query)},
        ]
        fields = {"max_tokens": self._arguments.max_tokens, "temperature": 0, "repetition_penalty": 1.1}
        fields["cache_salt"] = self._salt
        if self._prunes and self._arguments.policy:
            fields["prune_policy"] = {"keep_last_tool_results": self._arguments.keep_last}
        if self.chain_id is not None:
            fields["chain_id"] = self.chain_id
        answer = self._client.chat(self.messages, **fields)
        self.chain_id = answer.chain_id
        self.messages.append(answer.message)
        if self._prunes and not self._arguments.policy:
            self._prune()
        return answer, time.perf_counter() - began

    def _prune(self) -> None:
        """Gives up all results but the newest ones."""
        calls = [message["tool_call_id"] for message in self.messages if message["role"] == "tool"]
        old = [call for call in calls[: max(0, len(calls) - self._arguments.keep_last)] if call not in self._pruned]
        if old:
            wanted = [{"tool_call_id": call, "keep": 0} for call in old]
            named = {"chain_id": self.chain_id, "cache_salt": self._salt}
            job = self._client.prune(self.messages, wanted, policy="drop", **named)
            self.saved_tokens += job.freed_tokens
            self._pruned.update(old)


def run(client: Client, search: Search, arguments: argparse.Namespace, prunes: bool) -> dict[str, float]:
    """All turns, one printed line each. Returns totals."""
    agent = Agent(client, search, arguments, prunes)
    print(f"{'with' if prunes else 'without'} pruning")
    print(f"{'turn':>4} {'context':>8} {'cached':>8} {'resident':>8} {'saved':>7} {'first s':>8} {'turn s':>7}  answer")
    totals = dict.fromkeys(("computed", "cached", "resident_at_end", "saved", "seconds"), 0.0)
    for number in range(arguments.turns):
        question, query = PLAN[number % len(PLAN)]
        answer, seconds = agent.turn(question, query)
        saved = answer.cached_tokens - answer.resident_tokens
        said = " ".join(answer.text.split())[:48]
        shown = f"{number + 1:4} {answer.prompt_tokens:8} {answer.cached_tokens:8} {answer.resident_tokens:8} {saved:7}"
        print(f"{shown} {answer.ttft_s:8.2f} {seconds:7.2f}  {said}", flush=True)
        totals["computed"] += answer.prompt_tokens - answer.cached_tokens
        totals["cached"] += answer.cached_tokens
        totals["resident_at_end"] = answer.resident_tokens
        totals["saved"] = saved
        totals["seconds"] += seconds
    print(", ".join(f"{name.replace('_', ' ')} {value:,.0f}" for name, value in totals.items()), "\n")
    if agent.chain_id is not None:
        with contextlib.suppress(ClientError):  # given up by the server meanwhile
            client.drop_chain(agent.chain_id)
    return totals


@contextlib.contextmanager
def server(options: list[str]) -> Iterator[str]:
    """A server of its own with the default model; its address, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sparsejax.serve", "--host", "127.0.0.1", "--port", str(port), *options]
    print("starting a server, which takes a minute or two the first time ...", flush=True)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                while not client.ready():
                    if process.poll() is not None:
                        log.seek(0)
                        raise SystemExit(f"the server ended with status {process.returncode}:\n{log.read()[-2000:]}")
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="of a running server")
    parser.add_argument("--api-key", help="of that server")
    parser.add_argument("--serve", action="store_true", help="start a server with the default model")
    parser.add_argument("--compare", action="store_true", help="then the same turns without pruning")
    parser.add_argument("--policy", action="store_true", help="let the server prune, after each turn")
    parser.add_argument("--turns", type=int, default=len(PLAN))
    parser.add_argument("--keep-last", type=int, default=2, help="newest results that stay whole")
    parser.add_argument("--result-chars", type=int, default=900, help="of each search, at most")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--server-options", nargs=argparse.REMAINDER, default=[], help="with --serve; must come last")
    arguments = parser.parse_args(argv)
    if arguments.serve == (arguments.url is not None):
        parser.error("give a server's URL, or --serve")
    search = Search(DOCS, arguments.result_chars)
    place = server(arguments.server_options) if arguments.serve else contextlib.nullcontext(arguments.url)
    with place as url, Client(url, api_key=arguments.api_key) as client:
        try:
            totals = run(client, search, arguments, prunes=True)
            plain = run(client, search, arguments, prunes=False) if arguments.compare else None
        except ClientError as error:
            print(error, file=sys.stderr)
            return 1
    if plain is not None:
        rows, time_s = (totals[key] / max(plain[key], 1e-9) for key in ("resident_at_end", "seconds"))
        print(f"with pruning the last turn read {rows:.0%} of the rows; all turns took {time_s:.0%} of the time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
