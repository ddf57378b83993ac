"""One public function per operation; each picks an implementation by platform and shape, or the one asked for.

Every attention returns `(out, lse)`: results over disjoint key sets merge (`merge`), so sinks, windows, selected
pages and KV splits compose. Implementations live in a folder per operation; `reference` holds the float32 oracle.
What was chosen is logged once per operation.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import jax

from sparsejax.pallas_kernels.decode_attention import xla as _decode_xla
from sparsejax.pallas_kernels.layout import LoadTile, PageView, Pools
from sparsejax.pallas_kernels.page_scores import xla as _scores_xla
from sparsejax.pallas_kernels.prefill_attention import xla as _prefill_xla
from sparsejax.pallas_kernels.reference import merge

__all__ = ["IMPLEMENTATIONS", "decode_attention", "merge", "page_scores", "prefill_attention"]

log = logging.getLogger("sparsejax.kernels")

IMPLEMENTATIONS: dict[str, dict[str, ModuleType]] = {
    "decode_attention": {"xla": _decode_xla},
    "prefill_attention": {"xla": _prefill_xla},
    "page_scores": {"xla": _scores_xla},
}


@functools.cache
def _choose(operation: str, implementation: str | None) -> ModuleType:
    known = IMPLEMENTATIONS[operation]
    name = "xla" if implementation in (None, "auto") else implementation
    if name not in known:
        raise ValueError(f"{operation} has no implementation {name!r}; known: {', '.join(sorted(known))}")
    log.info("%s: %s", operation, name)
    return known[name]


def decode_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    *,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per row over the first `view.lengths` rows of its pages.

    Args:
      q: [batch, num_q_heads, head_dim].
      pools: head-page arrays; `names` are those that `load_tile` needs.
      view: pages and lengths, at least one row each.
      load_tile: decodes a storage's payload tiles to keys and values.
      layer: int32 scalar, passed to `load_tile`.
      scale: softmax scale.
      implementation: None or "auto" to choose, else a name.

    Returns:
      out [batch, num_q_heads, head_dim] in q's dtype, lse float32 [batch, num_q_heads] (natural log).
    """
    chosen = _choose("decode_attention", implementation)
    return chosen.decode_attention(q, pools, names, view, load_tile, layer, scale)


def prefill_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    *,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of a chunk of queries per row over its pages, which already hold the chunk's own rows.

    Args:
      q: [batch, chunk, num_q_heads, head_dim]; queries past a row's end give unspecified finite results.
      view: pages; `lengths` count history plus chunk.
      start: int32 [batch, heads or 1]: row index of the first query. Query i sees rows <= start + i.
      Others as in `decode_attention`.

    Returns:
      out [batch, chunk, num_q_heads, head_dim] in q's dtype, lse float32 [batch, chunk, num_q_heads].
    """
    chosen = _choose("prefill_attention", implementation)
    return chosen.prefill_attention(q, pools, names, view, start, load_tile, layer, scale)


def page_scores(
    q: jax.Array,
    page_min: jax.Array,
    page_max: jax.Array,
    view: PageView,
    *,
    page_size: int,
    implementation: str | None = None,
) -> jax.Array:
    """Upper bound of every page's attention logit, largest over the query heads of a KV head (Quest, arXiv 2406.10774).

    Args:
      q: [batch, num_q_heads, head_dim].
      page_min, page_max: [num_head_pages, head_dim] element-wise bounds of each head-page's keys.
      view: pages; columns past the last page of the longest row hold unspecified values.

    Returns:
      float32 [batch, num_kv_heads, columns].
    """
    return _choose("page_scores", implementation).page_scores(q, page_min, page_max, view, page_size)
