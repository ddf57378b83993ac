"""Checkpoints by hub id: the local cache first, then a download unless offline."""

from __future__ import annotations

import os
import pathlib
import re

from sparsejax.errors import LoadError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
_CONFIG_PATTERNS = ["config.json", "generation_config.json"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str) -> bool:
    """True for "owner/name"."""
    return _HUB_ID.fullmatch(model) is not None


def is_offline(offline: bool) -> bool:
    """The flag, or HF_HUB_OFFLINE in the environment."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def fetch_snapshot(
    model: str, *, revision: str | None = None, offline: bool = False, config_only: bool = False
) -> pathlib.Path:
    """The local folder of a hub checkpoint, downloaded if it is not in the Hugging Face cache.

    Args:
      model: "owner/name".
      revision: branch, tag or commit.
      config_only: fetch config.json only.

    Raises:
      LoadError: not cached and offline, unknown, gated or unreachable; says what to do.
    """
    import huggingface_hub
    from huggingface_hub import errors

    patterns = _CONFIG_PATTERNS if config_only else _PATTERNS
    arguments = {"revision": revision, "allow_patterns": patterns}
    try:
        cached = pathlib.Path(huggingface_hub.snapshot_download(model, local_files_only=True, **arguments))
        if config_only or _is_complete(cached):
            return cached
        problem = "is only partly in the local cache"
    except (errors.LocalEntryNotFoundError, OSError, ValueError):
        problem = "is not in the local cache"
    where = f"{model}{f' at revision {revision}' if revision else ''}"
    if is_offline(offline):
        raise LoadError(
            f"{where} {problem} and downloads are off (offline); download it once without offline,"
            " or name a local folder or GGUF file"
        )
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(model, **arguments))
    except errors.GatedRepoError:
        raise LoadError(f"{where} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise LoadError(
            f"{where} is neither a local path nor a model on the hub (private ones need HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise LoadError(f"{model} has no revision {revision!r}") from None
    except Exception as error:  # The hub's client raises the errors of whatever transport it uses.
        raise LoadError(
            f"{where} {problem} and the hub can't be reached ({type(error).__name__}: {error});"
            " name a local folder or GGUF file"
        ) from None


def _is_complete(folder: pathlib.Path) -> bool:
    from sparsejax.models.load.hf_folder import safetensors_files

    try:
        return bool(safetensors_files(folder)) and (folder / "config.json").is_file()
    except LoadError:
        return False
