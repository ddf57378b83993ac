"""Starts an installed server the way a user would, asks it for answers, stops it and starts it again.

Standard library only: it runs in an environment that has nothing but sparsejax. The server runs in a folder that has
its own `models/` and `serving/` packages, which must not be imported. Usage: python .ci/smoke.py [server options]
"""

from __future__ import annotations

import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

READY_WITHIN_S = 420  # the first start fetches the default model and compiles
STOP_WITHIN_S = 60
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def fetch(url: str, body: dict | None = None, timeout_s: float = 180) -> tuple[int, str]:
    """(HTTP status, text). GET without a body, else POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until_ready(process: subprocess.Popen[bytes], base: str) -> float:
    """Polls /health. Returns seconds until it said 200."""
    began = time.monotonic()
    while time.monotonic() - began < READY_WITHIN_S:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with status {process.returncode} before it was ready")
        try:
            status, text = fetch(f"{base}/health", timeout_s=5)
        except OSError:  # not listening yet
            status, text = 0, ""
        if status == 200:
            return time.monotonic() - began
        if status not in {0, 503}:
            raise RuntimeError(f"/health answered {status} while starting: {text}")
        time.sleep(0.2)
    raise RuntimeError(f"not ready after {READY_WITHIN_S} s; /health last said {status}: {text}")


def ask(base: str) -> str:
    """Asks the same question unstreamed and streamed; both must answer the same. Returns the text."""
    status, text = fetch(f"{base}/v1/models")
    assert status == 200, text
    model = json.loads(text)["data"][0]["id"]
    body = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    status, text = fetch(f"{base}/v1/chat/completions", body)
    assert status == 200, text
    answer = json.loads(text)
    content = answer["choices"][0]["message"]["content"]
    assert "Paris" in content, text
    assert 0 < answer["usage"]["completion_tokens"] <= 24, text

    status, text = fetch(f"{base}/v1/chat/completions", body | {"stream": True})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200, text
    assert events[-1] == "[DONE]", text
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert streamed == content, (streamed, content)
    status, text = fetch(f"{base}/v1/chat/completions", body | {"temperature": -1})
    assert status == 400, text
    assert json.loads(text)["error"]["param"] == "temperature", text
    return content


def serve_once(command: list[str], folder: pathlib.Path, label: str) -> str:
    """One life of a server: start, answer, stop. Returns its answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    log = folder / f"{label}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], cwd=folder, stdout=output, stderr=output)
        try:
            ready_s = wait_until_ready(process, base)
            answer = ask(base)
            first_answer_s = time.monotonic() - began
            process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_WITHIN_S)
            assert status in {0, -signal.SIGTERM}, f"the server exited with status {status} on SIGTERM"
        except BaseException:
            print(log.read_text(errors="replace")[-20_000:], file=sys.stderr)
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    print(
        f"smoke: {label} start ready in {ready_s:.1f} s, answers after {first_answer_s:.1f} s: {answer!r}", flush=True
    )
    return answer


def main() -> int:
    """Two lives of a server, started in the two ways a user may start it."""
    options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for package in ("models", "serving", "pallas_kernels"):
            (folder / package).mkdir()
            (folder / package / "__init__.py").write_text(
                f"raise RuntimeError('the user\\'s {package} was imported')\n"
            )
        script = str(pathlib.Path(sys.executable).with_name("sparsejax"))
        first = serve_once([sys.executable, "-m", "sparsejax.serve", *options], folder, "first")
        second = serve_once([script, "serve", *options], folder, "second")
        assert first == second, (first, second)
    return 0


if __name__ == "__main__":
    sys.exit(main())
