"""`python -m sparsejax.serve MODEL`: an OpenAI-compatible HTTP server.

The port is open at once and /health says how far loading is; the model is built in a thread and attached to the app.
SIGTERM or Ctrl-C stop admitting, give running requests time to finish and exit with 0; a second signal exits at once. A
model that can't be loaded, and an engine that dies, exit with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import sparsejax
from sparsejax import cli
from sparsejax.config import Progress, ServerConfig
from sparsejax.errors import ConfigError

if TYPE_CHECKING:
    from sparsejax.llm import Built
    from sparsejax.serving.state import Served, ServerState

log = logging.getLogger("sparsejax")

_WATCH_INTERVAL_S = 0.25
# How long /health says 500 before a dead engine ends the process: probes and clients should see why.
_FAILED_GRACE_S = 2.0
# After the drain: for answers that are being written out.
_CLOSE_TIMEOUT_S = 5
_MAX_HEADER_BYTES = 64 * 1024
# For idle tokenizer threads to notice that their pool is closed.
_THREAD_TIMEOUT_S = 1.0
# As `sparsejax.serving.state` names them.
TOKENIZE_THREADS = "tokenize"


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until told to stop. Returns the process's exit status."""
    command = cli.parse_serve(argv)
    try:
        if command.list_methods:
            from sparsejax import registry

            print(registry_table(registry.available()))
            return 0
        if command.explain:
            from sparsejax import build

            for line in build.explain(command.engine):
                print(line)
            return 0
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    _set_up_logging(command.server)
    return Server(command).run()


def registry_table(entries: dict[str, Any]) -> str:
    """The sparse methods and storages with their knobs, as text."""
    import dataclasses

    lines = []
    for name, entry in entries.items():
        also = f"  (also: {', '.join(entry.aliases)})" if entry.aliases else ""
        lines.append(f"{name:<16}{entry.axis:<12}{entry.summary}{also}")
        if entry.paper:
            lines.append(f"{'':<28}{entry.paper}")
        for knob in dataclasses.fields(entry.params_type):
            unit = f" [{knob.metadata['unit']}]" if knob.metadata.get("unit") else ""
            flag = f"--{knob.name.replace('_', '-')}"
            lines.append(f"{'':<4}{flag:<32}{knob.metadata.get('help', '')}{unit} (default: {knob.default})")
    lines.append("Compose with +, for example --sparse-method A+B: at most one per kind and one storage.")
    return "\n".join(lines)


def serve_built(built: Built, server: ServerConfig) -> Served:
    """What the app needs of a built engine."""
    from sparsejax.serving.state import Served

    methods = tuple(built.limits.methods)
    return Served(
        engine=built.engine,
        tokenizer=built.tokenizer,
        model_names=server.served_model_name or (built.model_name,),
        max_model_len=built.limits.geometry.max_model_len,
        default_method=methods[0],
        methods=methods,
        generation_defaults=built.generation_defaults,
        template_variables=dict(server.default_chat_template_kwargs),
        model_path=built.model_path,
        info=built.info,
        chain_cache=built.engine.settings.chain_cache,
        prefix_cache=built.engine.settings.prefix_cache,
    )


class Server:
    """One life of the process: listen, load, serve, drain."""

    def __init__(self, command: cli.ServeCommand) -> None:
        self._command = command
        self._console = cli.Console()
        self._exit_status = 0
        self._announced = False
        self._stopping = asyncio.Event()
        self._loader = threading.Thread(target=self._load, name="load", daemon=True)
        self._state: ServerState | None = None
        self._built: Built | None = None

    def run(self) -> int:
        """Serves until a signal or a fatal error; returns the exit status."""
        from sparsejax.serving.state import ServerState

        server = self._command.server
        try:
            listener, address = _listen(server)
        except OSError as e:
            where = f"--uds {server.uds}" if server.uds else f"--host {server.host} --port {server.port}"
            print(f"error: can't listen on {where}: {e.strerror or e}", file=sys.stderr)
            return 1
        self._state = ServerState()
        print(f"sparsejax {sparsejax.__version__}  |  listening on {address}", file=sys.stderr, flush=True)
        try:
            asyncio.run(self._serve(listener, address))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # we are on our way out already
            listener.close()
            if server.uds:
                with contextlib.suppress(OSError):
                    os.unlink(server.uds)  # noqa: PTH108 - sockets
        if self._loader.is_alive() or _tokenizing():
            # A compilation or a runaway template can't be interrupted, and the interpreter would wait for it.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_status)
        return self._exit_status

    async def _serve(self, listener: socket.socket, address: str) -> None:
        import uvicorn

        from sparsejax.serving.app import create_app

        assert self._state is not None
        config = self._command.server
        uvicorn_config = uvicorn.Config(
            create_app(self._state, config),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            root_path=config.root_path,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
        server = _UvicornServer(uvicorn_config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, server)
        http = asyncio.create_task(server.serve(sockets=[listener]))
        self._loader.start()
        watch = asyncio.create_task(self._watch(address))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((http, watch, stopping), return_when=asyncio.FIRST_COMPLETED)
        self._announce(address)
        await self._drain()
        watch.cancel()
        server.should_exit = True
        await http

    def _on_signal(self, server: Any) -> None:
        if self._stopping.is_set():
            print("stopping at once", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)
        self._stopping.set()

    def _load(self) -> None:
        """Runs in the loading thread."""
        from sparsejax.build import build_engine

        assert self._state is not None
        try:
            self._built = build_engine(self._command.engine, self._report)
            self._state.attach(serve_built(self._built, self._command.server))
        except ConfigError as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
            self._state.fail(e)
        except BaseException as e:
            log.exception("the model can't be served")
            self._state.fail(e)
        finally:
            self._console.close()

    def _report(self, progress: Progress) -> None:
        assert self._state is not None
        self._state.report(progress)
        self._console(progress)

    async def _watch(self, address: str) -> None:
        """Returns when there is nothing left to serve: loading failed, or the engine died."""
        state = self._state
        assert state is not None
        while True:
            if state.phase == "failed":
                self._exit_status = 1
                return
            served = state.attached
            if served is not None:
                self._announce(address)
                error = served.engine.failure
                if error is not None:
                    log.error("the engine died: %s", error)
                    state.fail(error)
                    self._exit_status = 1
                    await asyncio.sleep(_FAILED_GRACE_S)
                    return
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _announce(self, address: str) -> None:
        """Says once that requests are answered, also if a signal comes before somebody has looked."""
        assert self._state is not None
        if self._state.attached is not None and not self._announced:
            self._announced = True
            print(f"ready     {address}  (metrics /metrics)", file=sys.stderr, flush=True)

    async def _drain(self) -> None:
        """Lets running requests finish, up to the timeout; then ends them with an error."""
        state, timeout_s = self._state, self._command.server.drain_timeout_s
        assert state is not None
        state.drain()
        if self._built is None:
            return
        if state.active_requests and state.phase == "draining":
            print(
                f"stopping: {state.active_requests} requests may finish within {timeout_s:g} s",
                file=sys.stderr,
                flush=True,
            )
            deadline = asyncio.get_running_loop().time() + timeout_s
            while state.active_requests and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
        # Ends what is left with an error event; those who still listen get it before the server closes.
        await asyncio.to_thread(self._built.engine.close)
        state.close()


def _tokenizing() -> bool:
    """True if a tokenizer thread is still at work a moment after its pool was closed."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(TOKENIZE_THREADS)]
    for thread in threads:
        thread.join(_THREAD_TIMEOUT_S / len(threads))
    return any(thread.is_alive() for thread in threads)


def _uvicorn_server_type() -> type:
    import uvicorn

    class Quiet(uvicorn.Server):
        """Leaves signals to us: uvicorn would raise them again after its shutdown and so change the exit status."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet


def _UvicornServer(config: Any) -> Any:  # noqa: N802 - reads like the class it makes
    return _uvicorn_server_type()(config)


def _listen(server: ServerConfig) -> tuple[socket.socket, str]:
    """The listening socket and the address to show. The port is taken before anything slow happens."""
    if server.uds:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(server.uds).st_mode):  # noqa: PTH116 - a stale socket of an earlier run
                os.unlink(server.uds)  # noqa: PTH108
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(server.uds)
        listener.listen(2048)
        return listener, f"unix:{server.uds}"
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's algorithm off only then, which would cost 40 ms per answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    host = f"[{server.host}]" if family == socket.AF_INET6 else server.host
    scheme = "https" if server.ssl_certfile else "http"
    return listener, f"{scheme}://{host}:{listener.getsockname()[1]}{server.root_path}"


def _set_up_logging(server: ServerConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    if server.disable_log_stats:
        logging.getLogger("sparsejax.engine").setLevel(logging.WARNING)  # its status line is all it says below that
    for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
