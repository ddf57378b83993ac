"""examples/agent_with_pruning.py against the mock: every turn goes on from the one before, and old results go."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from typing import Any

import pytest

from sparsejax.config import ServerConfig
from sparsejax.mock import MockRunner
from tests.conftest import ROOT
from tests.serving.conftest import LiveServer, Servers
from tests.serving.mocks import say_script
from tests.serving.test_prune_policy import jobs

OPTIONS = ["--turns", "6", "--result-chars", "60", "--max-tokens", "4"]


@pytest.fixture(scope="module")
def example() -> Any:
    path = ROOT / "examples" / "agent_with_pruning.py"
    spec = importlib.util.spec_from_file_location("agent_with_pruning", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def live(servers: Servers) -> LiveServer:
    return servers.start(MockRunner(script=say_script))


def lines_of(text: str) -> list[list[int]]:
    """context, cached, resident and saved of each turn."""
    found = re.findall(r"^ *\d+ +(\d+) +(\d+) +(\d+) +(\d+) +\d+\.\d+ +\d+\.\d+", text, re.MULTILINE)
    return [[int(number) for number in line] for line in found]


@pytest.mark.parametrize("policy", [False, True])
def test_the_agent_gives_up_old_results(
    example: Any,
    live: LiveServer,
    policy: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = example.Search.__call__

    def slow(self: Any, query: str) -> str:
        """Tools take time, in which the server prunes."""
        live.wait_for(lambda: not live.state.tasks)
        live.wait_for(lambda: all(info.ended for info in jobs(live)))
        return search(self, query)

    monkeypatch.setattr(example.Search, "__call__", slow)
    assert example.main([live.url, *OPTIONS, "--compare", *(["--policy"] if policy else [])]) == 0
    shown = capsys.readouterr().out
    pruned, plain = (lines_of(part) for part in shown.split("without pruning"))
    assert len(pruned) == len(plain) == 6
    for (context, cached, resident, saved), (before, *_) in zip(pruned[1:], pruned, strict=False):
        assert before <= cached < context, "a turn did not go on from the one before"
        assert saved == cached - resident
    assert [line[3] > 0 for line in pruned] == [False, False, False, True, True, True]
    assert all(line[3] == 0 for line in plain)
    assert "with pruning the last turn read" in shown


def test_a_refusal_is_one_line(example: Any, servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    url = servers.start(config=ServerConfig(api_key=("secret",))).url
    assert example.main([url, *OPTIONS]) == 1
    assert re.fullmatch(r".*API key.*status 401\)\n", capsys.readouterr().err)
    assert example.main([url, *OPTIONS, "--turns", "1", "--api-key", "secret"]) == 0


def test_the_search_finds_what_is_asked_for(example: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.md").write_text("# Cats\n\n" + "The cat sits on the mat, and it likes to stay there. " * 3)
    (tmp_path / "b.md").write_text("# Dogs\n\n" + "The dog runs through the garden and barks at everyone. " * 3)
    search = example.Search(sorted(tmp_path.glob("*.md")), 80)
    assert search("where is the cat").startswith("a.md: The cat")
    assert search("dog garden").startswith("b.md: The dog")
    assert len(search("cat")) == 80


def test_one_of_two_ways_to_reach_a_server(example: Any) -> None:
    for options in ([], ["http://127.0.0.1:1", "--serve"]):
        with pytest.raises(SystemExit):
            example.main(options)
