"""`sparsejax.serve` as a process of its own, with a MockRunner in place of the model. Usage: as sparsejax.serve.

MOCK_LOAD: "ok", "slow" (until killed), "refused" (ConfigError), "crash". MOCK_STEP_S: device time of a step.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

from sparsejax.config import EngineConfig, Progress
from sparsejax.engine import Engine
from sparsejax.errors import ConfigError
from sparsejax.mock import MockRunner
from tests.serving.mocks import POISON, MockBuilt, say_script


def build_engine(config: EngineConfig, progress: Any) -> MockBuilt:
    load = os.environ.get("MOCK_LOAD", "ok")
    progress(Progress("model", detail="mock, 0 GiB"))
    for done in range(4):
        progress(Progress("compile", done, 3, "programs", f"decode[{done}]"))
    if load == "slow":
        threading.Event().wait()
    if load == "refused":
        raise ConfigError("--model: no such folder")
    if load == "crash":
        raise ZeroDivisionError("a bug")
    runner = MockRunner(script=say_script, step_s=float(os.environ.get("MOCK_STEP_S", "0")), verify=False)
    if os.environ.get("MOCK_DIE"):
        runner.fail("decode", int(os.environ["MOCK_DIE"]), RuntimeError("device lost"))
    runner.poison(POISON)
    return MockBuilt(runner, Engine(runner))


def explain(config: EngineConfig) -> list[str]:
    return [f"page_size {config.page_size}"]


if __name__ == "__main__":
    build: Any = types.ModuleType("sparsejax.build")
    build.build_engine, build.explain = build_engine, explain
    registry: Any = types.ModuleType("sparsejax.registry")
    registry.method_params = dict
    registry.available = dict
    sys.modules |= {"sparsejax.build": build, "sparsejax.registry": registry}
    import sparsejax
    from sparsejax import serve

    sparsejax.build, sparsejax.registry = build, registry  # type: ignore[attr-defined]
    status = serve.main(sys.argv[1:])
    assert "jax" not in sys.modules
    sys.exit(status)
