"""The door: a request is checked against what can never change, before it costs anything."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from sparsejax.errors import CacheTooSmallError, ContextLengthError, RequestError
from sparsejax.memory import Memory
from sparsejax.plans import MethodFacts, RunnerLimits
from sparsejax.request import Request, TokenEvent
from sparsejax.rows import Group


def admissible(
    request: Request, limits: RunnerLimits, memory: Memory, max_chunk: int, on_event: Callable[[TokenEvent], None]
) -> Group:
    """Turns a request into a group of choices, or says why it can never run. Changes nothing; safe in any thread.

    `max_tokens=None` becomes what the window and the cache allow.

    Args:
      request: what was asked.
      limits: the runner's.
      memory: only its sizes are read.
      max_chunk: tokens of the longest prompt chunk.
      on_event: see `Engine.submit`.

    Raises:
      RequestError, ContextLengthError, CacheTooSmallError.
    """
    request.validate(limits.vocab_size)
    method = request.sparse_method or next(iter(limits.methods))
    facts = limits.methods.get(method)
    if facts is None:
        served = ", ".join(limits.methods)
        raise RequestError(f"sparse_method={method!r} is not served; choose one of {served}", param="sparse_method")

    prompt_tokens = len(request.prompt_ids)
    if request.chain is None:
        possible = most_tokens(request, facts, limits, memory, prompt_tokens)
    else:  # what it needs depends on what its chain holds when its turn comes (see `chains`)
        possible = 0
    if min(facts.min_final_chunk(), prompt_tokens) > max_chunk:
        raise RequestError(
            f"method {method} needs a last prompt chunk of {facts.min_final_chunk()} tokens, "
            f"but the largest chunk is {max_chunk}",
            param="sparse_method",
        )
    replay = max(facts.replay_lengths(prompt_tokens), default=0)
    if replay > max_chunk:
        raise RequestError(
            f"method {method} reads the prompt once more in pieces of {replay} tokens, but the largest chunk is "
            f"{max_chunk}",
            param="sparse_method",
        )
    seed = random.getrandbits(64) if request.params.seed is None else request.params.seed
    return Group(request, method, facts, possible, frozenset(limits.eos_ids), seed, on_event)


def most_tokens(
    request: Request,
    facts: MethodFacts,
    limits: RunnerLimits,
    memory: Memory,
    prompt_tokens: int,
    lengths: np.ndarray | None = None,
    reused: int = 0,
) -> int:
    """The most tokens that a request may generate.

    Args:
      request: what was asked.
      facts: of its method.
      limits: the runner's.
      memory: only its sizes are read.
      prompt_tokens: of the whole context.
      lengths: rows held of it already, int32 [layers, heads], or None.
      reused: tokens that these stand for.

    Raises:
      ContextLengthError, CacheTooSmallError.
    """
    method, wanted = facts.name, request.params.max_tokens
    window = limits.geometry.max_model_len
    if prompt_tokens + (wanted or 1) > window:
        output = "1 output token" if (wanted or 1) == 1 else f"{wanted} output tokens"
        raise ContextLengthError(
            f"{prompt_tokens} prompt tokens and {output} exceed the window of {window} tokens",
            param="max_tokens" if wanted and prompt_tokens < window else "prompt",
        )
    replay = 0 if reused else max(facts.replay_lengths(prompt_tokens), default=0)
    if prompt_tokens + replay > window:
        raise ContextLengthError(
            f"method {method} reads a prompt of {prompt_tokens} tokens once more behind itself, in pieces of up to "
            f"{replay}, which exceeds the window of {window} tokens",
            param="prompt",
        )
    limit = wanted or window - prompt_tokens
    suffix = prompt_tokens - reused
    possible = memory.most_tokens(facts, suffix, limit, lengths)
    if possible < (wanted or 1):
        needed, pages = memory.pages_alone(facts, suffix, wanted or 1, lengths), memory.pool.capacity(facts.granularity)
        raise CacheTooSmallError(
            f"{prompt_tokens} prompt tokens and {wanted or 1} output tokens need {needed} cache pages with method "
            f"{method}, but the cache has {pages} ({facts.granularity.value} granularity)",
            param="max_tokens" if possible else "prompt",
        )
    return possible
