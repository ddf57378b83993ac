"""From request fields to the engine's SamplingParams."""

from __future__ import annotations

import re
from typing import Any

from sparsejax.errors import RequestError
from sparsejax.request import MAX_LOGIT_BIAS, SamplingParams
from sparsejax.serving.protocol import GenerationBody
from sparsejax.serving.state import Served

# Sampling fields that are taken over as they are. A checkpoint may recommend values for those it names.
_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "n",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationBody, served: Served, *, max_tokens: int | None, max_tokens_field: str, logprobs: int | None
) -> SamplingParams:
    """Checked parameters: the request's, else the checkpoint's recommendation, else the API's default.

    Raises RequestError naming the field.
    """
    vocab_size = served.tokenizer.vocab_size
    values: dict[str, Any] = {}
    for name in _PLAIN:
        value = getattr(body, name)
        if value is None:
            value = served.generation_defaults.get(name)
        if value is not None:
            values[name] = value
    top_k = body.top_k if body.top_k is not None else served.generation_defaults.get("top_k")
    if top_k is not None:
        values["top_k"] = _top_k(top_k, vocab_size)
    if max_tokens is not None:
        if max_tokens < 1:
            raise RequestError(f"{max_tokens_field} must be at least 1, got {max_tokens}", param=max_tokens_field)
        values["max_tokens"] = min(max_tokens, 2**31 - 1)
    params = SamplingParams(
        **values,
        stop=_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        logprobs=logprobs,
    )
    params.validate(vocab_size)
    return params


def check_model(name: str | None, served: Served) -> None:
    """Raises a 404 for a model that isn't here; no name means the only one."""
    if name is not None and name not in served.model_names:
        raise RequestError(
            f"the model {name[:200]!r} does not exist here; this server has {', '.join(served.model_names)}",
            param="model",
            code="model_not_found",
            status=404,
        )


def check_method(name: str | None, served: Served) -> None:
    """Raises a 400 for a sparse method that isn't served; no name means the default."""
    if name is not None and name not in served.methods:
        raise RequestError(
            f"sparse_method {name[:200]!r} is not served; choose one of {', '.join(served.methods)}",
            param="sparse_method",
        )


def check_common(body: GenerationBody, served: Served) -> None:
    """Fields of both endpoints that are not sampling."""
    check_model(body.model, served)
    if body.store:
        raise RequestError("store must be false: answers are not kept", param="store", code="unsupported_value")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed with stream=true", param="stream_options")
    check_method(body.sparse_method, served)


def unsupported(field: str, what: str) -> RequestError:
    """The refusal of a known field that would change the answer."""
    return RequestError(f"{field}: {what}", param=field, code="unsupported_parameter")


def _top_k(value: Any, vocab_size: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return 0 if value == -1 else min(value, vocab_size)  # -1 is how vLLM's clients say "all"
    return value


def _stop(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _logit_bias(value: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if value is not None and len(value) > MAX_LOGIT_BIAS:
        message = f"logit_bias has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed"
        raise RequestError(message, param="logit_bias")
    pairs: dict[int, float] = {}
    for key, bias in (value or {}).items():
        if not re.fullmatch("-?[0-9]{1,19}", key):
            raise RequestError(f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias")
        token = int(key)
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias: {token} is not a token id in [0, {vocab_size - 1}]", param="logit_bias")
        pairs[token] = bias
    return tuple(pairs.items())
