"""What tests put in place of a model. Light to import: servers in processes of their own start with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sparsejax.engine import Engine
from sparsejax.mock import EOS, MockRunner, hash_script
from tests.serving.byte_tokenizer import ByteTokenizer

SAY = b"say:"
POISON = ord("!")  # said for "Q", so that only an answer contains it, never a prompt


def say_script(history: Sequence[int], position: int, seed: int) -> int:
    """Continues with what the prompt's last "say:" line asks for, then ends; without one, with letters."""
    prompt = bytes(i for i in history[: len(history) - position] if i < 256)
    _, found, rest = prompt.rpartition(SAY)
    if not found:
        return hash_script(history, position, seed)
    wanted = rest.split(b"\n")[0]
    if position >= len(wanted):
        return EOS
    return POISON if wanted[position] == ord("Q") else wanted[position]


@dataclasses.dataclass
class MockBuilt:
    runner: MockRunner
    engine: Engine
    tokenizer: Any = dataclasses.field(default_factory=ByteTokenizer)
    model_name: str = "mock"
    model_path: str = "mock"
    generation_defaults: dict[str, Any] = dataclasses.field(default_factory=lambda: {"max_new_tokens": 9, "top_k": 5})
    info: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def limits(self) -> Any:
        return self.runner.limits
