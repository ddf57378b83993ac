"""Errors a user can act on.

Every refusal says what is wrong, names the field and the limit, and carries the HTTP status and the OpenAI-style
code under which the server reports it. All of them are `ValueError`s or `RuntimeError`s, so Python callers need no
special handling.
"""

from __future__ import annotations


class RequestError(ValueError):
    """One request is refused; nothing else is affected and no state is left behind.

    Attributes:
      message: what is wrong and what to do.
      param: the request field at fault, or None.
      code: short machine-readable code.
      status: HTTP status.
      retry_after_s: seconds after which trying again makes sense, or None.
    """

    status = 400
    code = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.retry_after_s = retry_after_s


class ContextLengthError(RequestError):
    """Prompt plus requested output exceed the model's window."""

    code = "context_length_exceeded"


class CacheTooSmallError(RequestError):
    """The request could not run even on an empty cache."""

    code = "prompt_too_large_for_cache"


class QueueFullError(RequestError):
    """More requests wait than `max_waiting` allows."""

    status = 429
    code = "queue_full"


class QueueTimeoutError(RequestError):
    """The request waited longer than `queue_timeout_s` without being admitted."""

    status = 503
    code = "queue_timeout"


class ShuttingDownError(RequestError):
    """The server drains and takes no new work."""

    status = 503
    code = "shutting_down"


class EngineDeadError(RuntimeError):
    """The engine loop stopped on an error; the process must be restarted."""

    status = 500
    code = "engine_dead"


class ConfigError(ValueError):
    """A start-up setting is wrong; the message names the flag, the value and what is allowed."""


class MethodError(ConfigError):
    """A sparse method, its parameters or a composition is refused; lists every reason."""


class LoadError(ConfigError):
    """A checkpoint cannot be used; lists what is missing, unexpected or of the wrong shape."""
