"""Versions, devices and settings for a bug report: `python -m sparsejax.collect_env`.

Prints nothing secret: variables whose name suggests a credential are shown as "set", and paths in home directories
lose the user's name.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import sparsejax

Report = dict[str, dict[str, str]]

PACKAGES = (
    "sparsejax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "jax-triton", "flax", "numpy",
    "ml_dtypes", "orbax-checkpoint", "safetensors", "gguf", "transformers", "tokenizers", "huggingface_hub", "jinja2",
    "msgspec", "starlette", "uvicorn", "uvloop", "httptools", "prometheus-client", "torch",
)  # fmt: skip

SETTINGS = re.compile(r"^(SPARSEJAX|JAX|XLA|LIBTPU|TPU|NCCL|CUDA|NVIDIA|TF_CPP|HF|TRANSFORMERS|OMP)_|^LD_LIBRARY_PATH$")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)


def without_home(text: str) -> str:
    """Replaces home directories, this user's and others', by "~"."""
    home = str(pathlib.Path.home())
    if home not in {"/", ""}:
        text = re.sub(rf"{re.escape(home)}(?=$|[/:;,\s'\"])", "~", text)
    return re.sub(r"(/home|/Users|/var/home)/[^/:;,\s'\"]+", "~", text)


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter; those that are missing are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["sparsejax"] = f"{sparsejax.__version__} ({_origin()})"
    return dict(sorted(found.items()))


def _origin() -> str:
    root = pathlib.Path(sparsejax.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        return "installed"
    commit = _command("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")
    return f"checkout, commit {commit}" if commit else "checkout"


def system() -> dict[str, str]:
    """Python, operating system, processor and memory."""
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} usable",
        "memory": _memory(),
        "nvidia": _command("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        or "none found",
    }


def devices() -> dict[str, str]:
    """What JAX sees. A backend that can't start is part of the report, not an error."""
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        return {"error": without_home(str(error))}
    report = {"backend": jax.default_backend(), "count": str(len(found))}
    for device in found:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        report[str(device.id)] = device.device_kind + (f", {limit / 2**30:.1f} GiB for JAX" if limit else "")
    report["compilation_cache"] = without_home(getattr(jax.config, "jax_compilation_cache_dir", None) or "none")
    return report


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that change how sparsejax, JAX and the loaders behave."""
    return {
        name: "set" if SECRET.search(name) else without_home(value)
        for name, value in sorted(environment.items())
        if SETTINGS.search(name)
    }


def collect() -> Report:
    """The whole report, by section."""
    return {
        "versions": versions(),
        "system": system(),
        "devices": devices(),
        "environment": settings(os.environ),
    }


def render(report: Report) -> str:
    """Aligned plain text."""
    lines = []
    for section, values in report.items():
        width = max((len(name) for name in values), default=0)
        lines += [section, *(f"  {name:<{width}}  {value}" for name, value in values.items() or [("none", "")]), ""]
    return "\n".join(lines).rstrip()


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _command(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(result.stdout.split("\n")).strip("; ")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m sparsejax.collect_env", description="Facts for a bug report.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
