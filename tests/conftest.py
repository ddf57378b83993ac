"""Settings every test runs under, and what several test folders share.

JAX reads its settings from the environment when it is first imported, so they are set here without importing it: tests
of host code stay fast, and servers started by tests inherit the same strictness.
"""

from __future__ import annotations

import gc
import os
import pathlib
import sys

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

STRICT = {
    "JAX_PLATFORMS": "cpu",  # for accelerators: JAX_PLATFORMS=cuda pytest -m gpu
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache" / "tests"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    "HF_HUB_OFFLINE": "1",
}
for _name, _value in STRICT.items():
    os.environ.setdefault(_name, _value)
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()

# The same examples in every run: a failure seen once is seen again.
hypothesis.settings.register_profile("sparsejax", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("sparsejax")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips accelerator tests on machines without the accelerator, saying what was found."""
    for marker, platform in (("gpu", "cuda"), ("tpu", "tpu")):
        if item.get_closest_marker(marker):
            import jax

            found = jax.default_backend()
            if found != marker:
                pytest.skip(f"needs a {marker}; JAX runs on {found} (JAX_PLATFORMS={platform} chooses)")


MOST_MAPS = 32_000
"""Memory maps above which compiled programs are let go; Linux ends a process that asks for more than 65,530."""


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Keeps a process that compiles thousands of programs within what the system allows."""
    maps, jax = pathlib.Path("/proc/self/maps"), sys.modules.get("jax")
    if jax is None or not maps.exists():
        return
    _done.append(item.nodeid)
    if len(_done) % 20 == 0 and maps.read_bytes().count(b"\n") > MOST_MAPS:
        harness = sys.modules.get("tests.core.harness")
        if harness is not None:
            harness.forget_programs()
        jax.clear_caches()
        gc.collect()


_done: list[str] = []


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """tests/data: the texts and golden files."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def prose(data_dir: pathlib.Path) -> str:
    """About 22,000 tokens of English prose (see tests/data/README.md)."""
    return "\n\n".join((data_dir / name).read_text("utf-8").strip() for name in ("persuasion.txt", "opticks.txt"))


@pytest.fixture(scope="session")
def default_model() -> pathlib.Path:
    """Path of the default model's GGUF file; skips where it is neither in the cache nor to be fetched."""
    from sparsejax.errors import LoadError
    from sparsejax.models.load.default_model import fetch_default_model

    try:
        return fetch_default_model(progress=False)
    except LoadError as error:
        pytest.skip(f"no default model: {error}")
