"""Bearer keys. Everything needs one except the health probes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from sparsejax.errors import RequestError
from sparsejax.serving.errors import error_response

OPEN_PATHS = frozenset({"/health", "/live", "/livez", "/readyz"})


class BearerAuth:
    """Middleware that answers 401 unless `Authorization: Bearer KEY` matches one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["tenant"] = ""
        if scope["type"] == "http" and self._keys and not self._allowed(scope):
            error = RequestError(
                "a valid API key is needed: send Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if route_path(scope) in OPEN_PATHS:
            return True
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, so that the time says nothing about which one came close.
        matching = [key for key in self._keys if hmac.compare_digest(given.strip(), key)]
        if matching:
            scope["tenant"] = tenant_of(matching[0])
        return bool(matching)


def tenant_of(key: bytes) -> str:
    """Whose chains a key's requests see: a digest, so that no record holds the key."""
    return hashlib.sha256(b"sparsejax tenant\0" + key).hexdigest()[:32]


def route_path(scope: Scope) -> str:
    """The path without the proxy's prefix."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path
