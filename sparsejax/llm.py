"""The offline API: `LLM` loads a model and answers prompts in this process."""

from __future__ import annotations

import collections
import dataclasses
import queue
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sparsejax import chain_control
from sparsejax.config import EngineConfig, Progress, engine_config
from sparsejax.detokenize import CONTEXT_TOKENS, Choice, Delta
from sparsejax.errors import ContextLengthError, EngineDeadError, QueueFullError, RequestError
from sparsejax.outputs import Completion, Gathered, Output
from sparsejax.plans import RunnerLimits
from sparsejax.request import ChainOptions, PrefixOptions, Request, SamplingParams, TokenEvent

__all__ = ["LLM", "Built", "Completion", "Output"]

if TYPE_CHECKING:
    from sparsejax.engine import Engine

Messages = Sequence[Mapping[str, Any]]
Chain = ChainOptions | Sequence[ChainOptions | None] | None

# Requests handed to the engine at a time, per row: enough to keep it busy, few enough that none waits for long.
_REQUESTS_PER_ROW = 2


class Built(Protocol):
    """What `sparsejax.build.build_engine` returns.

    Attributes:
      engine: running.
      tokenizer: see `sparsejax.models.load.tokenizer.Tokenizer`.
      limits: what the runner can hold; `limits.methods` are the served methods, the default first.
      model_name: short name, e.g. the folder's.
      model_path: where the weights came from.
      generation_defaults: sampling parameters the checkpoint recommends.
      info: facts in groups, e.g. {"cache_config": {"page_size": 16, ...}, "attention_impl": {...}}.
    """

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def limits(self) -> RunnerLimits: ...
    @property
    def model_name(self) -> str: ...
    @property
    def model_path(self) -> str: ...
    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...
    @property
    def info(self) -> Mapping[str, Mapping[str, Any]]: ...


class LLM:
    """A model in this process.

    Args:
      model: local folder, GGUF file or Hugging Face id; None takes the small default model.
      sparse_method: method or composition, as "a+b".
      options: any setting of `sparsejax.config.EngineConfig` (max_model_len=8192, dtype="float32", ...) and any knob of
        the sparse method, by name.

    Raises:
      ConfigError: a setting is unknown or wrong.

    Example:
      >>> with LLM() as llm:
      ...     print(llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].text)
    """

    def __init__(self, model: str | None = None, sparse_method: str = "dense", **options: Any) -> None:
        from sparsejax import cli
        from sparsejax.build import build_engine

        settings = engine_config({"model": model, "sparse_method": sparse_method, **options}, cli.method_knobs())
        # Loading and compiling take a while; who sits at a terminal sees how far they are.
        console = cli.Console() if sys.stderr.isatty() else None
        try:
            self._start(build_engine(settings, console))
        finally:
            if console is not None:
                console.close()

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Callable[[Progress], None] | None = None) -> LLM:
        """An LLM from a whole configuration. `progress` is called while it loads and compiles."""
        from sparsejax.build import build_engine

        return cls.from_built(build_engine(config, progress))

    @classmethod
    def from_built(cls, built: Built) -> LLM:
        """An LLM around an engine that runs already; `close` closes it."""
        llm = cls.__new__(cls)
        llm._start(built)
        return llm

    def _start(self, built: Built) -> None:
        self.built = built
        self.tokenizer = built.tokenizer
        self.limits = built.limits
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the engine and frees the device memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.built.engine.close()

    def default_params(self, **changes: Any) -> SamplingParams:
        """Sampling parameters as the checkpoint recommends them."""
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        recommended = {name: value for name, value in self.built.generation_defaults.items() if name in known}
        return SamplingParams(**{**recommended, **changes})

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sparse_method: str | None = None,
        progress: bool = True,
        chain: Chain = None,
        prefix: PrefixOptions | None = None,
    ) -> list[Completion]:
        """Continues prompts, batched as the engine can.

        Args:
          prompts: one prompt or several; a prompt is a text or a list of token ids.
          sampling_params: for all prompts, or one for each; None takes the checkpoint's recommendation.
          sparse_method: one of the served methods; None takes the default.
          progress: show a progress bar.
          chain: keep the conversation's memory, for all prompts or one for each; None keeps nothing. With
            `ChainOptions()` a chain begins, or a known beginning is found; with `ChainOptions(chain_id=...)` one goes
            on, and only what is new is computed; with `append=True`, too, the prompt is only what is new.
          prefix: with whom the prompts share what they begin with (see docs/prefix-cache.md); None shares with all of
            this process that have no salt, and that of `chain` where there is one.

        Returns:
          One completion per prompt, in order.

        Raises:
          RequestError: a prompt or parameter is refused; nothing is left running.
          ChainError: a chain can't go on as it was asked to.
          EngineDeadError: the engine stopped.

        Example:
          >>> first = llm.generate("Once upon a time", chain=ChainOptions())[0]
          >>> goes_on = ChainOptions(first.chain.chain_id, append=True)
          >>> llm.generate(" The end came when", chain=goes_on)[0].stats.cached_tokens
        """
        given, texts = self._prompts(prompts, special=not _appends(chain))
        return self._complete(given, texts, sampling_params, sparse_method, progress, True, chain, prefix)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sparse_method: str | None = None,
        progress: bool = True,
        chain: Chain = None,
        prefix: PrefixOptions | None = None,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[Completion]:
        """Answers one conversation or several.

        Args:
          messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
          sampling_params, sparse_method, progress, chain, prefix: as in `generate`; messages are always the whole
            conversation.
          add_generation_prompt: end the prompt with the opening of an assistant message.
          template_variables: for the chat template, e.g. enable_thinking=False.

        Returns:
          One completion per conversation, in order.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if many else [messages]
        _whole_messages(chain)
        prompts = [self._render(one, add_generation_prompt, template_variables) for one in conversations]
        texts: list[str | None] = [None] * len(prompts)
        return self._complete(prompts, texts, sampling_params, sparse_method, progress, False, chain, prefix)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        sparse_method: str | None = None,
        chain: ChainOptions | None = None,
        prefix: PrefixOptions | None = None,
        **template_variables: Any,
    ) -> Iterator[Delta]:
        """Answers one conversation piece by piece; closing the iterator cancels the answer.

        With `chain` the first delta has no text and says what became of it, and so does the last one (`Delta.chain`).
        A chain outlives a cancelled answer.
        """
        _whole_messages(chain)
        prompt = self._render(messages, True, template_variables)
        params = self.default_params() if sampling_params is None else sampling_params
        requests = self._requests([prompt], [params], sparse_method, [chain], prefix)
        for _, delta in self._run(requests, context=False):
            yield delta

    def _render(self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]) -> list[int]:
        return self.tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)

    def _prompts(self, prompts: Any, special: bool) -> tuple[list[Sequence[int]], list[str | None]]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        encode = self.tokenizer.encode
        ids = [encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
        return ids, [prompt if isinstance(prompt, str) else None for prompt in prompts]

    def _complete(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sparse_method: str | None,
        progress: bool,
        context: bool,
        chain: Chain,
        prefix: PrefixOptions | None,
    ) -> list[Completion]:
        if sampling_params is None:
            sampling_params = self.default_params()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling_params for {len(prompts)} prompts", param="sampling_params")
        chains = [chain] * len(prompts) if chain is None or isinstance(chain, ChainOptions) else list(chain)
        if len(chains) != len(prompts):
            raise RequestError(f"{len(chains)} chains for {len(prompts)} prompts", param="chain")
        requests = self._requests(prompts, params, sparse_method, chains, prefix)
        gathered = [[Gathered() for _ in range(request.params.n)] for request in requests]
        with _bar(len(requests), progress) as bar:
            tokens = 0
            for number, delta in self._run(requests, context):
                gathered[number][delta.index].add(delta)
                if delta.finish_reason is not None:
                    tokens += delta.stats.completion_tokens if delta.stats else 0
                    if all(choice.last is not None for choice in gathered[number]):
                        bar.update(1)
                        bar.set_postfix_str(f"{tokens} tokens, {tokens / max(bar.format_dict['elapsed'], 1e-9):.1f}/s")
        return [
            Completion(
                text,
                request.prompt_ids,
                tuple(choice.output(i) for i, choice in enumerate(choices)),
                choices[0].last.chain if choices[0].last else None,
            )
            for text, request, choices in zip(texts, requests, gathered, strict=True)
        ]

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        sparse_method: str | None,
        chains: Sequence[ChainOptions | None],
        prefix: PrefixOptions | None,
    ) -> list[Request]:
        """Checked requests: a wrong one is refused before any of them runs."""
        batch, window = uuid.uuid4().hex, self.limits.geometry.max_model_len
        requests = []
        for i, (ids, one, chain) in enumerate(zip(prompts, params, chains, strict=True)):
            shares = PrefixOptions() if prefix is None and chain is None else prefix
            request = Request(f"llm-{batch}-{i}", tuple(ids), one, sparse_method, chain=chain, prefix=shares)
            request.validate(self.limits.vocab_size)
            if len(request.prompt_ids) >= window:
                raise ContextLengthError(
                    f"prompt {i} has {len(request.prompt_ids)} tokens and leaves no room for an answer in the window "
                    f"of {window} tokens",
                    param="prompt",
                )
            if one.max_tokens is not None:  # more than the window holds means up to its end, as over HTTP
                one = dataclasses.replace(one, max_tokens=min(one.max_tokens, window - len(request.prompt_ids)))
            requests.append(dataclasses.replace(request, params=one))
        return requests

    def _end_chain(self, request: Request, choice: Choice, delta: Delta) -> Delta:
        """The engine may have ended a turn before its stop string was found: the chain forgets what nobody has seen."""
        tokens, report = choice.seen_of(delta.chain), delta.chain
        if tokens is None or report is None or request.chain is None:
            return delta
        tenant = request.chain.tenant
        found = self.built.engine.ask(lambda chains: chain_control.take_back(chains, tenant, report, tokens))
        return dataclasses.replace(delta, chain=found.result())

    def _run(self, requests: Sequence[Request], context: bool) -> Iterator[tuple[int, Delta]]:
        """(request number, delta) as they come. Cancels what is left when closed or interrupted."""
        engine = self.built.engine
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        waiting = collections.deque(enumerate(requests))
        choices: dict[tuple[str, int], tuple[int, Choice]] = {}
        stopping: set[tuple[str, int]] = set()
        most = max(1, _REQUESTS_PER_ROW * self.limits.num_rows)
        try:
            while waiting or choices:
                while waiting and (not choices or len(choices) + waiting[0][1].params.n <= most):
                    number, request = waiting[0]
                    try:
                        engine.submit(request, events.put)
                    except QueueFullError:
                        if not choices:
                            raise
                        break
                    waiting.popleft()
                    tail = request.prompt_ids[-CONTEXT_TOKENS:] if context else ()
                    for index in range(request.params.n):
                        choice = Choice(self.tokenizer, request.params, index, tail)
                        choices[request.request_id, index] = number, choice
                event = events.get()
                key = event.request_id, event.index
                if key not in choices:
                    continue
                number, choice = choices[key]
                delta = choice.feed(event)
                if choice.stop_requested and key not in stopping and delta.finish_reason is None:
                    stopping.add(key)
                    engine.stop(*key, choice.visible_tokens)
                if delta.finish_reason is not None:
                    del choices[key]
                    delta = self._end_chain(requests[number], choice, delta)
                if delta.finish_reason == "error":
                    raise delta.error or EngineDeadError("the engine gave no reason")
                if delta.finish_reason == "cancelled":
                    raise RequestError("the request was cancelled", status=503, code="cancelled")
                yield number, delta
        finally:
            for request_id in {request_id for request_id, _ in choices}:
                engine.cancel(request_id)


def _appends(chain: Chain) -> bool:
    """Some prompt goes on with a text: it doesn't begin like one of its own."""
    options = [chain] if chain is None or isinstance(chain, ChainOptions) else chain
    return any(one is not None and one.append for one in options)


def _whole_messages(chain: Chain) -> None:
    if _appends(chain):
        raise RequestError("send the whole conversation; only generate() takes append=True", param="append")


def _bar(total: int, enabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", disable=not enabled, dynamic_ncols=True)
