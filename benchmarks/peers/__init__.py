"""Other engines that benchmarks compare with. Each runs in its own process and its own Python environment."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

_SCRIPT = pathlib.Path(__file__).with_name("transformers_peer.py")


class TransformersPeer:
    """Talks to `transformers_peer.py`. A context manager; the process ends with it.

    Args:
      python: interpreter of an environment with torch, transformers and gguf.
      model: GGUF file.
    """

    def __init__(self, python: pathlib.Path, model: pathlib.Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(_SCRIPT), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self.facts: dict[str, Any] = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> TransformersPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the peer ended with status {self._process.wait()}; run {_SCRIPT.name} by hand to see why "
                "(its environment needs torch, transformers and gguf)"
            )
        return json.loads(line)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer (see `transformers_peer.py`)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()
