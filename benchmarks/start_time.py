"""From nothing to the first answer: cold and warm starts of the server, and what importing costs.

    python -m benchmarks.start_time              # this interpreter: empty caches, then full ones; imports
    python -m benchmarks.start_time --install    # also a fresh virtual environment and pip install -e . before it

Cold is a start with an empty cache folder: the default model is downloaded, every program compiled. Warm is the same
command again. Each ends with the whole first answer of /v1/chat/completions. Imports are timed in fresh interpreters,
in turn; `import sparsejax` alone loads no JAX, so what counts is JAX and sparsejax together over JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import common, quiet

IMPORTS = {
    "jax": "import jax",
    "jax + sparsejax": "import jax, sparsejax",
    "sparsejax": "import sparsejax",
    "names": "import jax; from sparsejax import LLM, SamplingParams",
}
_QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
_ADDRESS = re.compile(r"http://[\d.]+:(\d+)")


def import_seconds(python: str, statement: str) -> float:
    """Wall-clock seconds of one fresh interpreter that runs `statement`, its start included."""
    start = time.perf_counter()
    subprocess.run([python, "-c", statement], cwd=common.ROOT, check=True)
    return time.perf_counter() - start


def measure_imports(python: str, repeats: int) -> dict[str, Any]:
    """Seconds by statement, and the ratios to `import jax`."""
    sides = {name: lambda text=text: import_seconds(python, text) for name, text in IMPORTS.items()}
    for side in sides.values():
        side()  # bytecode caches
    found = quiet.alternate(sides, repeats).found
    result: dict[str, Any] = {name: common.summary(times) for name, times in found.items()}
    result["over_jax"] = {name: common.ratio(found[name], found["jax"]) for name in ("jax + sparsejax", "names")}
    return result


def environment(cache: pathlib.Path) -> dict[str, str]:
    """The caller's environment with caches in `cache` only."""
    kept = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    return {**kept, "SPARSEJAX_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}


def install(folder: pathlib.Path, extra: list[str]) -> tuple[str, float]:
    """A virtual environment with this checkout in it; returns its interpreter and the seconds it took."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", *extra, "-e", str(common.ROOT)], check=True)
    return python, time.perf_counter() - start


@contextlib.contextmanager
def server(python: str, options: list[str], env: dict[str, str], log: pathlib.Path) -> Iterator[subprocess.Popen]:
    """`python -m sparsejax.serve` on a free port. Ends with the block."""
    with log.open("w") as file:
        command = [python, "-m", "sparsejax.serve", "--port", "0", *options]
        process = subprocess.Popen(command, cwd=common.ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def first_answer(python: str, options: list[str], env: dict[str, str], timeout_s: float) -> dict[str, float]:
    """Seconds from the command to the open port, to ready, and to the end of the first answer."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        start = time.perf_counter()
        with server(python, options, env, log) as process:

            def wait_for(found: Any) -> float:
                while not found():
                    if process.poll() is not None:
                        raise SystemExit(
                            f"the server ended with status {process.returncode}:\n{log.read_text()[-2000:]}"
                        )
                    if time.perf_counter() - start > timeout_s:
                        raise SystemExit(f"the server was not ready after {timeout_s:g} s:\n{log.read_text()[-2000:]}")
                    time.sleep(0.02)
                return time.perf_counter() - start

            listening = wait_for(lambda: _ADDRESS.search(log.read_text(errors="replace")))
            match = _ADDRESS.search(log.read_text(errors="replace"))
            assert match is not None
            port = int(match[1])
            ready = wait_for(lambda: _request(port, "GET", "/health")[0] == 200)
            status, body = _request(port, "POST", "/v1/chat/completions", _QUESTION)
            answered = time.perf_counter() - start
            if status != 200 or not json.loads(body)["choices"][0]["message"]["content"]:
                raise SystemExit(f"the first answer failed: {status} {body[:500]!r}")
    return {"listening_s": listening, "ready_s": ready, "answer_s": answered}


def _request(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body; status 0 while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
    except ConnectionError:
        return 0, b""
    finally:
        connection.close()


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("start_time", __doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="start from a fresh virtual environment")
    parser.add_argument("--pip-option", action="append", default=[], help="further option of pip install; repeatable")
    parser.add_argument("--skip-cold", action="store_true", help="use the caches as they are")
    parser.add_argument("--warm-starts", type=int, default=3)
    parser.add_argument("--import-repeats", type=int, default=15, help="0 leaves imports out")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("options", nargs="*", help="further options of sparsejax.serve, after --")
    arguments = parser.parse_args(argv)
    run = common.Run("start_time", arguments)
    run.finish(measure(arguments))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    python = sys.executable
    with tempfile.TemporaryDirectory(prefix="sparsejax-start-") as folder:
        env = environment(pathlib.Path(folder) / "cache")
        if arguments.skip_cold:
            env = dict(os.environ)
        installed = 0.0
        if arguments.install:
            python, installed = install(pathlib.Path(folder) / "venv", arguments.pip_option)
            result["install_s"] = installed
            print(f"virtual environment and pip install -e .: {installed:.1f} s")
        if not arguments.skip_cold:
            cold = result["cold"] = first_answer(python, arguments.options, env, arguments.timeout_s)
            whole = installed + cold["answer_s"]
            what = "install and cold start" if arguments.install else "cold start (installed already)"
            print(f"{what} to first answer: {whole:.1f} s ({_steps(cold)})  {_verdict(whole, 240)}")
            result["cold_total_s"] = whole
        warm = []
        for _ in range(arguments.warm_starts):
            warm.append(first_answer(python, arguments.options, env, arguments.timeout_s))
            print(f"warm start to first answer: {warm[-1]['answer_s']:.1f} s ({_steps(warm[-1])})", flush=True)
        if warm:
            result["warm"] = {key: common.summary([start[key] for start in warm]) for key in warm[0]}
            median = result["warm"]["answer_s"]["median"]
            print(f"warm start, median: {median:.1f} s  {_verdict(median, 20)}")
        if arguments.import_repeats:
            imports = result["imports"] = measure_imports(python, arguments.import_repeats)
            rows = [
                (name, f"{imports[name]['median']:.3f}", f"{imports[name]['min']:.3f}", f"{imports[name]['max']:.3f}")
                for name in IMPORTS
            ]
            print(common.table(("import, s", "median", "min", "max"), rows))
            found = imports["over_jax"]["jax + sparsejax"]["ratio"]
            print(f"jax + sparsejax over jax: x {found:.3f}  {_verdict(found, 1.1)}")
    return result


def _steps(start: dict[str, float]) -> str:
    return f"listening after {start['listening_s']:.1f}, ready after {start['ready_s']:.1f}"


def _verdict(found: float, limit: float) -> str:
    return f"goal at most {limit:g}: {'met' if found <= limit else 'missed'}"


if __name__ == "__main__":
    sys.exit(main())
