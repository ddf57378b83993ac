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


class ChainError(RequestError):
    """A turn can't continue its chain. Nothing was changed, unless a subclass says so.

    Attributes:
      chain_id: the chain, where one was named.
      recovery: what a client can do: "resend_full", "retry_later", "new_chain" or "none".
      reason: why, in a word ("evicted", "diverged", "salt", ...), where there is more to say than the code does.
      token: where the tokens part ways, if they do.
    """

    status = 500
    code = "chain_cache_error"
    recovery = "none"

    def __init__(
        self,
        message: str,
        *,
        chain_id: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
        token: int | None = None,
    ) -> None:
        super().__init__(message, param="chain_id" if chain_id else None, retry_after_s=retry_after_s)
        self.chain_id = chain_id
        self.reason = reason
        self.token = token

    @property
    def retryable(self) -> bool:
        """The same request may succeed later."""
        return self.recovery == "retry_later"


class ChainDisabledError(ChainError):
    """A chain was asked for where none are kept, or with what chains can't have."""

    status, code, recovery = 400, "chain_mode_disabled", "new_chain"


class ChainNotFoundError(ChainError):
    """The id was never issued here, or belongs to another instance."""

    status, code, recovery = 404, "chain_not_found", "resend_full"


class ChainBusyError(ChainError):
    """Another turn of the chain is under way."""

    status, code, recovery = 409, "chain_busy", "retry_later"


class ChainMismatchError(ChainError):
    """The turn does not continue what the chain has processed."""

    status, code, recovery = 409, "chain_prefix_mismatch", "resend_full"


class ChainFingerprintError(ChainError):
    """The chain was made by another model, method, storage or salt."""

    status, code, recovery = 409, "chain_fingerprint_mismatch", "new_chain"


class ChainGoneError(ChainError):
    """The chain existed and was evicted, deleted, lost or left behind by a restart."""

    status, code, recovery = 410, "chain_gone", "resend_full"


class ChainOwnerError(ChainError):
    """The books of a chain are wrong: a defect of the engine."""

    status, code = 500, "chain_owner_mismatch"


class ChainCapacityError(ChainError):
    """There is no room, even without all idle chains."""

    status, code, recovery = 503, "chain_capacity_unavailable", "retry_later"


class PrefixDisabledError(RequestError):
    """The prefix cache is off, or a method's rows can't be shared."""

    code = "prefix_cache_disabled"


class PrefixNotFoundError(RequestError):
    """The prefix cache does not have these tokens, or not all of them."""

    status, code = 404, "prefix_not_found"


class PinRefusedError(RequestError):
    """Pinned prefixes would hold more of the cache than they may."""

    status, code = 409, "pin_quota_exceeded"


class PruneError(RequestError):
    """Rows of these ranges can't be taken. Nothing was changed."""

    code = "invalid_prune"

    def __init__(self, message: str, *, param: str = "ranges") -> None:
        super().__init__(message, param=param)


class PruneNotFoundError(RequestError):
    """There is no prune job with this id, or it was forgotten."""

    status, code = 404, "prune_not_found"


class PruneConflictError(RequestError):
    """A prune job is not in the state for this, or its rows keep changing."""

    status, code = 409, "prune_conflict"


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
