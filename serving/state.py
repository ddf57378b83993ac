"""What the app knows of the engine: nothing yet, loading, ready, draining or failed.

The loading thread writes, request handlers read. Each change replaces one immutable value, so readers need no lock.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from sparsejax.config import Progress
from sparsejax.errors import EngineDeadError, RequestError, ShuttingDownError
from sparsejax.request import Request, TokenEvent
from sparsejax.serving.history import History
from sparsejax.serving.tool_results import ToolResults

if TYPE_CHECKING:
    from sparsejax.caches import Caches
    from sparsejax.chains import Chains
    from sparsejax.engine import EngineSnapshot
    from sparsejax.metrics import EngineMetrics

T = TypeVar("T")

Phase = Literal["loading", "ready", "draining", "failed"]


class Tokenizer(Protocol):
    """What the server needs of a tokenizer (`sparsejax.models.load` makes them)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def control_ids(self) -> Collection[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token: int) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def seal(self, text: str, add_special_tokens: bool = True) -> str | None: ...
    def encode_sealed(self, text: str) -> list[int]: ...
    def sealed_bytes(self, token_id: int) -> bytes: ...
    def render_chat_sealed(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        after: int | None = None,
        before: int | None = None,
        **template_kwargs: Any,
    ) -> tuple[str, int | None]: ...
    def render_chat_contents(
        self,
        messages: Sequence[Mapping[str, Any]],
        indexes: Sequence[int],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> tuple[str, dict[int, tuple[int, int]]]: ...
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]: ...


class Engine(Protocol):
    """What the server needs of an engine (`sparsejax.engine.Engine`)."""

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stop(self, request_id: str, index: int, visible_tokens: int | None = None) -> None: ...
    def ask(self, function: Callable[[Chains], T]) -> Future[T]: ...
    def consult(self, function: Callable[[Caches], T]) -> Future[T]: ...
    def peek(self, function: Callable[[Caches], T]) -> T: ...

    @property
    def snapshot(self) -> EngineSnapshot: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def metrics(self) -> EngineMetrics: ...


@dataclasses.dataclass(frozen=True)
class Served:
    """A running engine and what requests may ask of it.

    Attributes:
      model_names: names the model answers to; the first is shown.
      max_model_len: prompt and answer together, in tokens.
      default_method: sparse method of requests that name none.
      methods: what requests may name.
      generation_defaults: sampling parameters the checkpoint recommends (temperature, top_p, ...).
      template_variables: given to the chat template unless the request says otherwise.
      model_path: where the model came from, for `root` in /v1/models.
      chain_cache: conversations are kept between their turns.
      prefix_cache: requests that begin alike share what they begin with.
      info: facts for /server_info and the info metrics, in groups: {"cache_config": {"page_size": 16, ...}, ...}.
    """

    engine: Engine
    tokenizer: Tokenizer
    model_names: tuple[str, ...]
    max_model_len: int
    default_method: str
    methods: tuple[str, ...] = ()
    generation_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model_path: str = ""
    info: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    chain_cache: bool = True
    prefix_cache: bool = True


class ServerState:
    """Shared by the app, the loading thread and the shutdown code."""

    def __init__(self) -> None:
        self.started_s = time.time()
        self.phase: Phase = "loading"
        self.progress = Progress()
        self.error: BaseException | None = None
        self.active_requests = 0  # HTTP requests that hold engine requests; event loop only
        self.waiting_for_jobs = 0  # HTTP requests that wait for prune jobs; event loop only
        self._served: Served | None = None
        workers = min(4, os.cpu_count() or 1)
        self.history = History()
        self.tool_results = ToolResults()
        self.tasks: set[asyncio.Task[None]] = set()  # what is done after answers; event loop only
        self.tokenize_pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="tokenize")

    def report(self, progress: Progress) -> None:
        """Called by the loading thread."""
        self.progress = progress

    def attach(self, served: Served) -> None:
        """From now on requests are answered."""
        self._served = served
        self.phase = "ready"

    def drain(self) -> None:
        """From now on new requests get 503; running ones go on."""
        if self.phase != "failed":
            self.phase = "draining"

    def fail(self, error: BaseException) -> None:
        """From now on /health says 500."""
        self.error = error
        self.phase = "failed"

    def close(self) -> None:
        self.tokenize_pool.shutdown(wait=False, cancel_futures=True)

    @property
    def attached(self) -> Served | None:
        """The engine whatever the phase, or None while loading."""
        return self._served

    def served(self) -> Served:
        """The engine if it takes requests; raises what the client should see otherwise."""
        if self.phase == "ready" and self._served is not None:
            return self._served
        if self.phase == "draining":
            raise ShuttingDownError("the server is shutting down and takes no new requests", retry_after_s=5)
        if self.phase == "failed":
            raise EngineDeadError(f"the engine has failed: {self.error or type(self.error).__name__}")
        step = self.progress.step
        raise RequestError(f"the model is not ready yet ({step})", status=503, code="loading", retry_after_s=5)
