"""sparsejax: a sparse-first LLM inference engine in JAX and Pallas.

`LLM` and `SamplingParams` serve; `sparsejax.steps` holds the pure step functions for research code. Everything is
imported on first use, so `import sparsejax` costs what `import jax` costs.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout the code folders models/, serving/ and pallas_kernels/ lie beside this package; in a wheel they are
# inside it. Only a checkout has pyproject.toml next to the package.
_root = pathlib.Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "pallas_kernels").is_dir():
    __path__.append(str(_root))

_EXPORTS = {
    "LLM": "sparsejax.llm",
    "SamplingParams": "sparsejax.request",
    "ChainOptions": "sparsejax.request",
    "Method": "sparsejax.method",
    "Storage": "sparsejax.storage",
    "KVState": "sparsejax.state",
    "decode_step": "sparsejax.steps",
    "prefill_chunk": "sparsejax.steps",
    "maintain_step": "sparsejax.steps",
    "copy_pages": "sparsejax.transfers",
    "export_rows": "sparsejax.transfers",
    "import_rows": "sparsejax.transfers",
}

if TYPE_CHECKING:
    from sparsejax.llm import LLM
    from sparsejax.method import Method
    from sparsejax.request import ChainOptions, SamplingParams
    from sparsejax.state import KVState
    from sparsejax.steps import decode_step, maintain_step, prefill_chunk
    from sparsejax.storage import Storage
    from sparsejax.transfers import copy_pages, export_rows, import_rows

__all__ = [
    "LLM",
    "ChainOptions",
    "KVState",
    "Method",
    "SamplingParams",
    "Storage",
    "__version__",
    "copy_pages",
    "decode_step",
    "export_rows",
    "import_rows",
    "maintain_step",
    "prefill_chunk",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
