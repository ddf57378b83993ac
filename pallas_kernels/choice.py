"""Which implementation serves a call: by platform and shape, or the one asked for.

A specialised implementation says why it can't serve a call (`unsupported`), or why it is no better than the next one
(`ONLY_BY_NAME`). Left alone ("auto"), the next one takes such a call, and what was chosen is logged once with the
reasons. `implementation` asks for one by name, or for some operations only: "decode_attention=xla,page_scores=triton".
What was asked for and can't be had is an error; a bare name counts for the operations that have such an
implementation.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from sparsejax.pallas_kernels.add_rms_norm import mosaic_tpu as _norm_tpu
from sparsejax.pallas_kernels.add_rms_norm import triton_gpu as _norm_triton
from sparsejax.pallas_kernels.add_rms_norm import xla as _norm_xla
from sparsejax.pallas_kernels.append import mosaic_tpu as _append_tpu
from sparsejax.pallas_kernels.append import triton_gpu as _append_triton
from sparsejax.pallas_kernels.append import xla as _append_xla
from sparsejax.pallas_kernels.block_sparse_attention import mosaic_gpu as _blocks_mosaic_gpu
from sparsejax.pallas_kernels.block_sparse_attention import xla as _blocks_xla
from sparsejax.pallas_kernels.decode_attention import mosaic_tpu as _decode_tpu
from sparsejax.pallas_kernels.decode_attention import triton_gpu as _decode_triton
from sparsejax.pallas_kernels.decode_attention import xla as _decode_xla
from sparsejax.pallas_kernels.key_similarity import triton_gpu as _similarity_triton
from sparsejax.pallas_kernels.key_similarity import xla as _similarity_xla
from sparsejax.pallas_kernels.logit_threshold import mosaic_tpu as _threshold_tpu
from sparsejax.pallas_kernels.logit_threshold import triton_gpu as _threshold_triton
from sparsejax.pallas_kernels.logit_threshold import xla as _threshold_xla
from sparsejax.pallas_kernels.move_rows import mosaic_tpu as _move_tpu
from sparsejax.pallas_kernels.move_rows import triton_gpu as _move_triton
from sparsejax.pallas_kernels.move_rows import xla as _move_xla
from sparsejax.pallas_kernels.observed_decode_attention import mosaic_tpu as _observed_tpu
from sparsejax.pallas_kernels.observed_decode_attention import triton_gpu as _observed_triton
from sparsejax.pallas_kernels.observed_decode_attention import xla as _observed_xla
from sparsejax.pallas_kernels.page_bounds import mosaic_tpu as _bounds_tpu
from sparsejax.pallas_kernels.page_bounds import triton_gpu as _bounds_triton
from sparsejax.pallas_kernels.page_bounds import xla as _bounds_xla
from sparsejax.pallas_kernels.page_scores import mosaic_tpu as _scores_tpu
from sparsejax.pallas_kernels.page_scores import triton_gpu as _scores_triton
from sparsejax.pallas_kernels.page_scores import xla as _scores_xla
from sparsejax.pallas_kernels.platforms import platform
from sparsejax.pallas_kernels.prefill_attention import mosaic_gpu as _prefill_mosaic_gpu
from sparsejax.pallas_kernels.prefill_attention import mosaic_tpu as _prefill_tpu
from sparsejax.pallas_kernels.prefill_attention import xla as _prefill_xla
from sparsejax.pallas_kernels.row_scores import mosaic_tpu as _rows_tpu
from sparsejax.pallas_kernels.row_scores import triton_gpu as _rows_triton
from sparsejax.pallas_kernels.row_scores import xla as _rows_xla
from sparsejax.pallas_kernels.select_pages import mosaic_tpu as _select_tpu
from sparsejax.pallas_kernels.select_pages import triton_gpu as _select_triton
from sparsejax.pallas_kernels.select_pages import xla as _select_xla
from sparsejax.pallas_kernels.tile_attention import mosaic_gpu as _tiles_mosaic_gpu
from sparsejax.pallas_kernels.tile_attention import xla as _tiles_xla

log = logging.getLogger("sparsejax.kernels")

IMPLEMENTATIONS: dict[str, dict[str, ModuleType]] = {
    "add_rms_norm": {"triton": _norm_triton, "mosaic_tpu": _norm_tpu, "xla": _norm_xla},
    "append": {"triton": _append_triton, "mosaic_tpu": _append_tpu, "xla": _append_xla},
    "decode_attention": {"triton": _decode_triton, "mosaic_tpu": _decode_tpu, "xla": _decode_xla},
    "prefill_attention": {"mosaic_gpu": _prefill_mosaic_gpu, "mosaic_tpu": _prefill_tpu, "xla": _prefill_xla},
    "block_sparse_attention": {"mosaic_gpu": _blocks_mosaic_gpu, "xla": _blocks_xla},
    "tile_attention": {"mosaic_gpu": _tiles_mosaic_gpu, "xla": _tiles_xla},
    "attention_lse": {"triton": _rows_triton, "mosaic_tpu": _rows_tpu, "xla": _rows_xla},
    "row_scores": {"triton": _rows_triton, "mosaic_tpu": _rows_tpu, "xla": _rows_xla},
    "key_similarity": {"triton": _similarity_triton, "xla": _similarity_xla},
    "logit_threshold": {"triton": _threshold_triton, "mosaic_tpu": _threshold_tpu, "xla": _threshold_xla},
    "move_rows": {"triton": _move_triton, "mosaic_tpu": _move_tpu, "xla": _move_xla},
    "observed_decode_attention": {"triton": _observed_triton, "mosaic_tpu": _observed_tpu, "xla": _observed_xla},
    "page_bounds": {"triton": _bounds_triton, "mosaic_tpu": _bounds_tpu, "xla": _bounds_xla},
    "page_scores": {"triton": _scores_triton, "mosaic_tpu": _scores_tpu, "xla": _scores_xla},
    "select_pages": {"triton": _select_triton, "mosaic_tpu": _select_tpu, "xla": _select_xla},
}
"""Implementations of each operation, the best first; the last one, "xla", serves every call on every platform."""


class UnavailableError(ValueError):
    """An implementation that was asked for does not exist or can't serve."""


_chosen: dict[str, dict[str, tuple[str, ...]]] = {}
"""Operation -> implementation -> reasons against better ones, of every call traced so far."""


def chosen() -> dict[str, tuple[str, ...]]:
    """The implementations that calls traced so far were given, by operation."""
    return {operation: tuple(names) for operation, names in _chosen.items()}


def expected(implementation: str | None = None) -> dict[str, str]:
    """What each operation will use on this platform if its shapes are supported. Traces nothing.

    Raises:
      UnavailableError: what was asked for can't run on this platform.
    """
    names = {}
    for operation, known in IMPLEMENTATIONS.items():
        name = _wanted(operation, implementation)
        if name is not None and (problem := _platform_problem(known[name])) is not None:
            raise UnavailableError(f"{operation} can't use implementation {name!r}: {problem}")
        names[operation] = name or next(
            n for n, module in known.items() if (_platform_problem(module) or _drawback(module)) is None
        )
    return names


def _platform_problem(module: ModuleType) -> str | None:
    """Why an implementation can't run on this platform; portable ones don't define `platform_problem`."""
    platform_problem = getattr(module, "platform_problem", None)
    return None if platform_problem is None else platform_problem()


def _wanted(operation: str, implementation: str | None) -> str | None:
    """The name asked for, None to choose."""
    if implementation in (None, "auto"):
        return None
    assert implementation is not None
    known = IMPLEMENTATIONS[operation]
    if "=" not in implementation:
        everything = sorted({name for names in IMPLEMENTATIONS.values() for name in names})
        if implementation not in everything:
            raise UnavailableError(f"no implementation {implementation!r}; known: auto, {', '.join(everything)}")
        return implementation if implementation in known else None
    pairs = {key: value for key, _, value in (part.strip().partition("=") for part in implementation.split(","))}
    if unknown := sorted(set(pairs) - set(IMPLEMENTATIONS)):
        raise UnavailableError(f"unknown operation {unknown[0]!r}; known: {', '.join(sorted(IMPLEMENTATIONS))}")
    name = pairs.get(operation, "auto")
    if name == "auto":
        return None
    if name not in known:
        raise UnavailableError(f"{operation} has no implementation {name!r}; known: {', '.join(sorted(known))}")
    return name


def _problem(module: ModuleType, arguments: tuple[Any, ...]) -> str | None:
    """Why an implementation can't serve a call; those that serve every call don't define `unsupported`."""
    unsupported = getattr(module, "unsupported", None)
    return None if unsupported is None else unsupported(*arguments)


def _drawback(module: ModuleType) -> str | None:
    """Why an implementation is only used where it is asked for by name; most don't define `ONLY_BY_NAME`."""
    return getattr(module, "ONLY_BY_NAME", None)


def choose(operation: str, implementation: str | None, *arguments: Any) -> ModuleType:
    """The implementation for a call; `arguments` are what `unsupported` takes."""
    known = IMPLEMENTATIONS[operation]
    name = _wanted(operation, implementation)
    if name is not None:
        if (problem := _problem(known[name], arguments)) is not None:
            raise UnavailableError(f"{operation} can't use implementation {name!r}: {problem}")
        _note(operation, name, ())
        return known[name]
    reasons, best = [], False
    for name, module in known.items():
        problem = _problem(module, arguments)
        drawback = _drawback(module) if problem is None else None
        if problem is None and drawback is None:
            _note(operation, name, tuple(reasons), best)
            return module
        reasons.append(f"{name}: {problem or drawback}")
        best = best or drawback is not None
    raise AssertionError(f"no implementation serves every call of {operation}")


def _note(operation: str, name: str, reasons: tuple[str, ...], best: bool = False) -> None:
    """Logs a choice the first time it is made for these reasons; what costs speed on an accelerator is a warning.

    It costs none if it is the `best` that is known, chosen over one that could serve the call too.
    """
    made = _chosen.setdefault(operation, {})
    if made.get(name) == reasons:
        return
    made[name] = reasons
    slow = not best and (platform() == "gpu" or (platform() == "tpu" and name == "xla"))
    level = logging.WARNING if reasons and slow else logging.INFO
    log.log(level, "%s: %s%s", operation, name, f" ({'; '.join(reasons)})" if reasons else "")
