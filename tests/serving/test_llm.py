"""The offline API and the chat in the terminal, on a MockRunner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sparsejax.chat import Chat, Cost, Local, Remote
from sparsejax.engine import Engine
from sparsejax.errors import ContextLengthError, EngineDeadError, RequestError
from sparsejax.llm import LLM
from sparsejax.mock import EOS, MockRunner
from sparsejax.request import SamplingParams
from sparsejax.settings import EngineSettings
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import POISON, MockBuilt, say_script


def make(runner: MockRunner | None = None, **settings: Any) -> LLM:
    runner = runner or MockRunner(script=say_script)
    return LLM.from_built(MockBuilt(runner, Engine(runner, EngineSettings(**settings))))


def all_free(llm: LLM) -> bool:
    s = llm.built.engine.snapshot
    return not s.busy and s.free_rows == llm.limits.num_rows and not s.rows


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made
        wait_free(made)


def wait_free(llm: LLM) -> None:
    for _ in range(1000):
        if all_free(llm):
            return
        threading.Event().wait(0.002)
    raise AssertionError(llm.built.engine.snapshot)


def test_generate(llm: LLM) -> None:
    (one,) = llm.generate("say:héllo", progress=False)
    assert one.text == "héllo"
    assert one.prompt == "say:héllo"
    assert one.prompt_ids == tuple("say:héllo".encode())
    assert one.token_ids == (*"héllo".encode(), EOS)
    assert one.outputs[0].finish_reason == "stop"
    assert one.stats.ttft_s > 0
    assert one.stats.seen_tokens > 0
    assert one.stats.completion_tokens == len(one.token_ids)
    assert one.stats.tokens_per_s is not None


def test_inputs_of_every_kind(llm: LLM) -> None:
    ids = list(b"say:b")
    assert [c.text for c in llm.generate(["say:a", "say:b"], progress=False)] == ["a", "b"]
    assert [c.text for c in llm.generate(ids, progress=False)] == ["b"]
    assert [c.text for c in llm.generate([ids, ids], progress=False)] == ["b", "b"]
    assert [c.text for c in llm.generate(["say:a", ids], progress=False)] == ["a", "b"]
    assert llm.generate([], progress=False) == []


def test_many_more_prompts_than_rows_and_places_in_the_queue() -> None:
    with make(max_waiting=2) as llm:
        wanted = [f"number {i}" for i in range(100)]
        found = llm.generate([f"say:{text}" for text in wanted], progress=False)
        assert [c.text for c in found] == wanted


def test_params(llm: LLM) -> None:
    params = [SamplingParams(stop="b"), SamplingParams(max_tokens=2), SamplingParams(n=2, logprobs=1)]
    first, second, third = llm.generate(["say:abc"] * 3, params, progress=False)
    assert (first.text, first.outputs[0].stop_reason) == ("a", "b")
    assert (second.text, second.outputs[0].finish_reason) == ("ab", "length")
    assert [o.text for o in third.outputs] == ["abc", "abc"]
    assert [o.index for o in third.outputs] == [0, 1]
    assert third.outputs[0].logprobs is not None
    assert len(third.outputs[0].logprobs) == 4
    assert llm.default_params() == SamplingParams(top_k=5)
    huge = llm.generate("say:x", SamplingParams(max_tokens=10**6), progress=False)
    assert huge[0].text == "x"
    assert llm.generate("say:x", sparse_method="window", progress=False)[0].text == "x"


def test_chat(llm: LLM) -> None:
    one = [{"role": "user", "content": "say:one"}]
    two = [{"role": "user", "content": "say:two"}]
    assert llm.chat(one, progress=False)[0].text == "one"
    assert [c.text for c in llm.chat([one, two], progress=False)] == ["one", "two"]
    assert "".join(d.piece.text for d in llm.stream_chat(one)) == "one"


def test_refusals_come_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"prompt 1 has 5000 tokens .* window of 4096"):
        llm.generate([[1], [1] * 5000], progress=False)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate(["a"], SamplingParams(temperature=-1), progress=False)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [SamplingParams()] * 2, progress=False)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([""], progress=False)
    with pytest.raises(RequestError, match="sparse_method"):
        llm.generate("a", sparse_method="magic", progress=False)
    assert llm.built.engine.snapshot.steps == 0


def test_one_failure_cancels_the_rest() -> None:
    runner = MockRunner(script=say_script, step_s=0.002)
    runner.poison(POISON)
    with make(runner) as llm:
        with pytest.raises(RuntimeError, match="non-finite"):
            llm.generate(["say:" + "x" * 900, "say:Qabc"], progress=False)
        wait_free(llm)


def test_a_dead_engine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    runner = MockRunner(script=say_script)
    with make(runner) as llm:
        runner.fail("decode", 1, RuntimeError("device lost"))
        with pytest.raises(EngineDeadError):
            llm.generate(["say:abc"], progress=False)


def test_interrupt_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = MockRunner(script=say_script, step_s=0.002)
    with make(runner) as llm:
        stream = llm.stream_chat([{"role": "user", "content": "no end"}])
        next(stream)
        stream.close()
        wait_free(llm)

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr("sparsejax.llm.Choice.feed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], progress=False)
        wait_free(llm)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["say:a", "say:b"])
    assert "2/2" in capsys.readouterr().err
    llm.generate(["say:a"], progress=False)
    assert capsys.readouterr().err == ""


class Terminal:
    """Lines to type, and what was shown. An exception in the list is raised instead."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)
        self.shown = ""

    def read(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self.shown += text


def talk(backend: Any, *lines: str | type[BaseException], system: str | None = None) -> tuple[Terminal, Chat]:
    terminal = Terminal(*lines)
    chat = Chat(backend, system, terminal.read, terminal.write)
    chat.run()
    return terminal, chat


@pytest.fixture(params=["local", "remote"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "local":
        with make() as llm:
            yield Local(llm, max_tokens=500)
    else:
        shared: LiveServer = request.getfixturevalue("shared")
        yield Remote(shared.url, max_tokens=500)


def test_conversation(backend: Any) -> None:
    terminal, chat = talk(backend, "/stats", "say:höi", "", "say:again", "/stats", "/exit", "never read")
    assert "no answer yet" in terminal.shown
    assert "höi\n" in terminal.shown
    assert "again\n" in terminal.shown
    assert "seen" in terminal.shown
    assert "read per step" in terminal.shown
    assert "dense" in terminal.shown
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert backend.cost.completion_tokens == 6


def test_commands(backend: Any) -> None:
    terminal, chat = talk(backend, "say:a", "/clear", "/what", "/help", '"""first', 'say:multi"""', system="be brief")
    assert chat.messages[0] == {"role": "system", "content": "be brief"}
    assert chat.messages[1] == {"role": "user", "content": "first\nsay:multi"}
    assert "unknown command /what" in terminal.shown
    assert "/stats" in terminal.shown
    _, chat = talk(backend, "/system new", "/clear")
    assert chat.messages == [{"role": "system", "content": "new"}]


def test_ctrl_c_stops_the_answer_only() -> None:
    class Interrupted:
        cost = Cost()
        closed = 0

        def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
            try:
                yield "so far"
                raise KeyboardInterrupt
            finally:
                self.closed += 1

    backend = Interrupted()
    terminal, chat = talk(backend, "question", KeyboardInterrupt, "question")
    assert terminal.shown.count("(stopped)") == 2
    assert backend.closed == 2
    assert [m["content"] for m in chat.messages] == ["question", "so far"] * 2


def test_errors_are_shown_and_forgotten(servers: Servers) -> None:
    server = servers.start()
    terminal, chat = talk(Remote(server.url), "x" * 5000, "say:fine")
    assert "error: " in terminal.shown
    assert "4096" in terminal.shown
    assert [m["content"] for m in chat.messages] == ["say:fine", "fine"]
    with make() as llm:
        terminal, chat = talk(Local(llm), "x" * 5000)
        assert "4096" in terminal.shown
        assert chat.messages == []


def test_command_line_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    from sparsejax import chat

    assert chat.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert chat.main(["--url", "ftp://x"]) == 2
    assert "--url must look like" in capsys.readouterr().err


def test_command_line_with_a_server(
    shared: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparsejax import chat

    lines = iter(["say:over http", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert chat.main(["--url", shared.url]) == 0
    shown = capsys.readouterr().out
    assert "mock at" in shown
    assert "over http" in shown
