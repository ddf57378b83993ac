"""One public function per operation; each picks an implementation by platform and shape (`choice`), or by name.

Every attention returns `(out, lse)`: results over disjoint key sets merge (`merge`), so sinks, windows, selected
pages and KV splits compose. Implementations live in a folder per operation; `reference` holds the float32 oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.block_sparse_attention.tiles import num_tiles, pack_queries, packed_positions
from sparsejax.pallas_kernels.choice import IMPLEMENTATIONS, UnavailableError, choose, chosen, expected
from sparsejax.pallas_kernels.heads import Heads
from sparsejax.pallas_kernels.layout import Encode, LoadTile, PageView, Pools
from sparsejax.pallas_kernels.platforms import platform
from sparsejax.pallas_kernels.reference import merge

__all__ = [
    "IMPLEMENTATIONS",
    "UnavailableError",
    "add_rms_norm",
    "append",
    "attention_lse",
    "block_sparse_attention",
    "chosen",
    "decode_attention",
    "expected",
    "key_similarity",
    "logit_threshold",
    "merge",
    "move_layers",
    "move_rows",
    "num_tiles",
    "observed_decode_attention",
    "pack_queries",
    "packed_positions",
    "page_bounds",
    "page_scores",
    "platform",
    "prefill_attention",
    "row_scores",
    "select_pages",
    "tile_attention",
]


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Adds to the residual stream and norms the sum (Zhang and Sennrich 2019); the norm is computed in float32.

    Args:
      x, delta: [..., n].
      weight: [n].
      eps: added to the mean of squares.
      implementation: as in `decode_attention`.

    Returns:
      x + delta, and its norm times the weight, both [..., n] in x's dtype.
    """
    module = choose("add_rms_norm", implementation, x, delta, weight)
    return module.add_rms_norm(x, delta, weight, eps)


def append(
    heads: Heads,
    pools: Pools,
    view: PageView,
    *,
    num_new: jax.Array,
    positions: jax.Array,
    encode: Encode,
    layer: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Finishes the heads of new tokens (norms, rotary embedding) and stores their keys, values and positions.

    Args:
      heads: of [batch, chunk] tokens.
      pools: head-page arrays, positions included; those that change are updated in place where they are donated.
      view: pages; new rows go after the first `view.lengths` ones.
      num_new: int32 [batch], at most chunk; what comes after them is written to the null page.
      positions: int32 [batch, chunk], logical positions.
      encode: encodes keys and values as the storage holds them.
      layer: int32 scalar, passed to `encode`.
      implementation: as in `decode_attention`.

    Returns:
      queries [batch, chunk, num_q_heads, head_dim], keys and values [batch, chunk, num_kv_heads, head_dim] before they
      are encoded, and all pools.
    """
    module = choose("append", implementation, heads, pools, view, encode)
    return module.append(heads, pools, view, num_new, positions, encode, layer)


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
      implementation: None or "auto" to choose, a name, or "operation=name,...".

    Returns:
      out [batch, num_q_heads, head_dim] in q's dtype, lse float32 [batch, num_q_heads] (natural log).

    Raises:
      ValueError: the implementation asked for is unknown or can't serve this call.
    """
    module = choose("decode_attention", implementation, q, pools, names, view, load_tile)
    return module.decode_attention(q, pools, names, view, load_tile, layer, scale)


def observed_decode_attention(
    q: jax.Array,
    scores: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    *,
    shared: bool,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` that adds the attention which each row receives to its score (arXiv 2306.14048).

    The last row of a view is the query's own: its score begins here, whatever was there.

    Args:
      scores: float32 [num_head_pages, page_size]; updated in place where it is donated.
      shared: every KV head gets what all of them add up to; else what its own query heads do.
      Others as in `decode_attention`. Pages of different rows differ.

    Returns:
      out as `decode_attention`, and the scores.

    Raises:
      ValueError: the implementation asked for is unknown or can't serve this call.
    """
    module = choose("observed_decode_attention", implementation, q, pools, names, view, load_tile)
    return module.observed_decode_attention(q, scores, pools, names, view, shared, load_tile, layer, scale)


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
    module = choose("prefill_attention", implementation, q, pools, names, view, load_tile)
    return module.prefill_attention(q, pools, names, view, start, load_tile, layer, scale)


def block_sparse_attention(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    start: jax.Array,
    blocks: jax.Array,
    num_blocks: jax.Array,
    *,
    block_size: int,
    tile_rows: int,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`prefill_attention` of which each tile of queries reads only the blocks of keys that are listed for it.

    A tile is `tile_rows` packed rows of one KV head: row r is query r // group of the chunk, query head r % group.

    Args:
      q, pools, names, view, start, load_tile, layer, scale, implementation: as in `prefill_attention`.
      blocks: int32 [batch, kv_heads, tiles, columns], ascending: block b is rows b * block_size and following. Blocks
        that none of a tile's queries may see are not read.
      num_blocks: int32 [batch, kv_heads, tiles]: the first `num_blocks` entries count.
      block_size: rows of a block.
      tile_rows: packed rows of a tile.

    Returns:
      out [batch, chunk, num_q_heads, head_dim] in q's dtype, lse float32 [batch, chunk, num_q_heads]. A query of the
      sequence that sees no row of its blocks gives zeros and at most -1e29.

    Raises:
      ValueError: lists don't fit the queries, or as in `decode_attention`.
    """
    _check_tiles(q, view.num_heads, blocks.shape, tile_rows)
    module = choose("block_sparse_attention", implementation, q, pools, names, view, load_tile, block_size, tile_rows)
    return module.block_sparse_attention(
        q, pools, names, view, start, blocks, num_blocks, block_size, tile_rows, load_tile, layer, scale
    )


def tile_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array,
    *,
    tile_rows: int,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of tiles of queries over keys that lie side by side, with a bias for each tile and key.

    Means of blocks are such keys: a bias of log(n) makes one count as n.

    Args:
      q: [batch, chunk, num_q_heads, head_dim]; tiles as in `block_sparse_attention`.
      k, v: [batch, num_kv_heads, keys, head_dim], finite.
      bias: float32 [batch, num_kv_heads, tiles, keys], added to scaled logits; -inf for keys that a tile does not see.
      tile_rows: packed rows of a tile.
      scale: softmax scale.
      implementation: as in `decode_attention`.

    Returns:
      As `block_sparse_attention`.

    Raises:
      ValueError: the bias doesn't fit the queries, or as in `decode_attention`.
    """
    _check_tiles(q, k.shape[1], bias.shape, tile_rows)
    module = choose("tile_attention", implementation, q, k, v, tile_rows)
    return module.tile_attention(q, k, v, bias, tile_rows, scale)


def _check_tiles(q: jax.Array, heads: int, shape: tuple[int, ...], tile_rows: int) -> None:
    wanted = (q.shape[0], heads, num_tiles(q.shape[1], q.shape[2] // heads, tile_rows))
    if shape[:3] != wanted:
        raise ValueError(f"what is given per tile has shape {shape}; [batch, kv_heads, tiles] are {list(wanted)}")


def attention_lse(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    *,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    first: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Log-sum-exp of each query's logits over rows of its pages: what `row_scores` needs to speak of attention mass.

    Prefill attention returns the same for queries that see all rows before them; this is for other queries (an
    observation window) and other domains (`first`, a lower `limit`).

    Args:
      q: [batch, queries, num_q_heads, head_dim].
      pools, names, view, load_tile, layer, scale, implementation: as in `decode_attention`.
      limit: int32 [batch, heads or 1, queries]: a query sees the rows below it, at most `view.lengths`; none of them if
        it is 0, so padding and causality are both data.
      first: rows below it are not counted.

    Returns:
      float32 [batch, queries, num_q_heads] (natural log), -1e30 where a query sees nothing.

    Raises:
      ValueError: the implementation asked for is unknown or can't serve this call.
    """
    module = choose("attention_lse", implementation, q, pools, names, view, load_tile)
    return module.attention_lse(q, pools, names, view, limit, first, load_tile, layer, scale)


def row_scores(
    q: jax.Array,
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    limit: jax.Array,
    *,
    load_tile: LoadTile,
    layer: jax.Array,
    scale: float,
    lse: jax.Array | None = None,
    group: str = "max",
    over: str = "sum",
    implementation: str | None = None,
) -> jax.Array:
    """What queries think of each resident row: attention mass, or the largest logit.

    One operation for observation windows (arXiv 2404.14469) and for scores that accumulate over all queries
    (arXiv 2306.14048): a chunk of queries or a single one, causal or not, whatever `lse` is normalised over.

    Args:
      q: [batch, queries, num_q_heads, head_dim].
      pools, names, view, load_tile, layer, scale, implementation: as in `decode_attention`.
      limit: int32 [batch, heads or 1, queries]: a query votes for the rows below it, at most `view.lengths`.
      lse: float32 [batch, queries, num_q_heads], natural log. Given, a query's share of a row is exp(logit - lse), at
        most 1; else a query head's score of a row is the largest logit.
      group: how the query heads of a KV head join: "max" or "sum".
      over: how the shares of a query head's queries join: "sum" or "max".

    Returns:
      float32 [batch, num_kv_heads, columns * page_size]. Rows that no query votes for, those past the end included,
      hold 0 with `lse` and -inf without.

    Raises:
      ValueError: `group`, `over` or the implementation asked for is unknown, or the implementation can't serve this
        call.
    """
    for name, join in (("group", group), ("over", over)):
        if join not in ("max", "sum"):
            raise ValueError(f"{name} must be 'max' or 'sum', got {join!r}")
    module = choose("row_scores", implementation, q, pools, names, view, load_tile)
    return module.row_scores(q, pools, names, view, limit, lse, group, load_tile, layer, scale, over=over)


def key_similarity(
    pools: Pools,
    names: tuple[str, ...],
    view: PageView,
    *,
    threshold: float,
    tile_rows: int,
    load_tile: LoadTile,
    layer: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """How similar each resident key of one row is to its others; the newest of similar ones counts less.

    With C the cosines of all pairs, 0 on the diagonal, and for each row i the largest column of those above `threshold`
    (column 0 without any) set to 0, these are C's column means (arXiv 2505.24133). A column's sum is its product with
    the sum of all keys less what was set to 0, so similarities are only searched for that column.

    Args:
      pools, names, load_tile, layer, implementation: as in `decode_attention`.
      view: pages of one row; all heads hold as many rows.
      threshold: cosine above which two keys count as similar.
      tile_rows: rows that are compared at a time where that takes memory, a multiple of the page size.

    Returns:
      float32 [num_kv_heads, columns * page_size]; anything past the end.

    Raises:
      ValueError: the implementation asked for is unknown or can't serve this call.
    """
    module = choose("key_similarity", implementation, pools, names, view, load_tile)
    return module.key_similarity(pools, names, view, threshold, tile_rows, load_tile, layer)


def logit_threshold(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """The least logit of each row that min-p, top-k and top-p leave, in this order, of softmax(logits / temperature).

    No sort of the vocabulary. Ties at a threshold all stay, the best token too; -inf is no token. Results of a row do
    not depend on the others. min-p (arXiv 2407.01082) keeps tokens with at least `min_p` of the best one's
    probability, top-p (arXiv 1904.09751) the fewest best ones whose share of the mass left by the two others reaches
    `top_p`.

    Args:
      logits: float32 [batch, vocab].
      temperature: float32 [batch]; a row at 0 is greedy: it asks for nothing, whatever its other parameters.
      top_k: int32 [batch], 0 or at least vocab to cut nothing.
      top_p: float32 [batch], 1 to cut nothing.
      min_p: float32 [batch], 0 to cut nothing.
      implementation: as in `decode_attention`.

    Returns:
      float32 [batch], -inf for rows that ask for nothing.

    Raises:
      ValueError: the implementation asked for is unknown or can't serve this call.
    """
    module = choose("logit_threshold", implementation, logits)
    return module.logit_threshold(logits, temperature, top_k, top_p, min_p)


def move_rows(
    pools: Pools, rows: jax.Array, source: PageView, target: PageView, *, implementation: str | None = None
) -> dict[str, jax.Array]:
    """Copies rows of some pages to the beginning of others, as they are stored. All other pages stay as they are.

    Args:
      pools: head-page arrays [num_head_pages, page_size, ...], all of them moved alike; updated in place where donated.
      rows: int32 [batch, kv_heads or 1, kept]: index among the rows of `source` of what becomes row 0, 1, ... of
        `target`.
      source, target: pages; `target` has no page in common with `source`, nor one twice. Lengths are not read.
      implementation: as in `decode_attention`.

    Returns:
      the pools.

    Raises:
      ValueError: the implementation asked for is unknown or can't serve this call.
    """
    module = choose("move_rows", implementation, pools, rows, target)
    return module.move_rows(pools, rows, source, target)


def move_layers(
    pools: Pools,
    rows: jax.Array,
    views: Callable[[jax.Array], tuple[PageView, PageView]],
    *,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """`move_rows` of one sequence in all layers: at once where that needs no more memory, else one after the other.

    Args:
      pools, implementation: as in `move_rows`.
      rows: int32 [layers, kv_heads or 1, kept].
      views: layer -> source and target, with a batch of 1. No target has a page in common with any source.

    Returns:
      the pools.

    Raises:
      ValueError: as in `move_rows`.
    """
    module = choose("move_rows", implementation, pools, rows[:1], views(jnp.int32(0))[1])
    if hasattr(module, "move_layers"):
        return module.move_layers(pools, rows, views)

    def move(layer: jax.Array, pools: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return module.move_rows(pools, rows[layer][None], *views(layer))

    return jax.lax.fori_loop(0, rows.shape[0], move, dict(pools))


def page_bounds(
    page_min: jax.Array,
    page_max: jax.Array,
    keys: jax.Array,
    head_pages: jax.Array,
    offsets: jax.Array,
    *,
    num_valid: jax.Array,
    page_size: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Widens the element-wise bounds of pages by rows that were written to them.

    A row at offset 0 opens its page: it overwrites what the bounds held, so freed pages need no clearing. The rows of a
    sequence are consecutive.

    Args:
      page_min, page_max: [num_head_pages, head_dim]; updated in place where they are donated.
      keys: [batch, rows, kv_heads, head_dim].
      head_pages: int32 [batch, rows, kv_heads].
      offsets: int32 [batch, rows, heads or 1], row within its page.
      num_valid: int32 [batch]: the first rows that count; the others are on the null page, which has no bounds.
      page_size: rows of a page.
      implementation: as in `decode_attention`.

    Returns:
      page_min and page_max.
    """
    module = choose("page_bounds", implementation, page_min, page_max, keys)
    return module.page_bounds(page_min, page_max, keys, head_pages, offsets, num_valid, page_size)


def page_scores(
    q: jax.Array,
    page_min: jax.Array,
    page_max: jax.Array,
    view: PageView,
    *,
    page_size: int,
    implementation: str | None = None,
) -> jax.Array:
    """Upper bound of every page's attention logit, largest over the query heads of a KV head (arXiv 2406.10774).

    Args:
      q: [batch, num_q_heads, head_dim].
      page_min, page_max: [num_head_pages, head_dim] element-wise bounds of each head-page's keys.
      view: pages; columns past the last page of the longest row hold unspecified values.

    Returns:
      float32 [batch, num_kv_heads, columns].
    """
    module = choose("page_scores", implementation, q, page_min, page_max, view)
    return module.page_scores(q, page_min, page_max, view, page_size)


def select_pages(
    scores: jax.Array,
    view: PageView,
    *,
    num_scored: int,
    width: int,
    budget: int,
    page_size: int,
    shared: bool = False,
    implementation: str | None = None,
) -> PageView:
    """The pages with the best scores and the last page of every row and head, or all pages of a short row.

    Chosen are the best `num_scored` of the pages before the last, ties to the lower page, NaN as -inf, -0.0 as +0.0.
    A row of at most `budget` rows or `num_scored` + 1 pages is taken whole. Pages of one row select single rows.

    Args:
      scores: float32 [batch, kv_heads, columns]; columns that are not before a row's last page hold anything.
      view: the pages that were scored, with as many columns.
      num_scored: pages chosen by score, at most `columns`.
      width: columns of the result, at least `num_scored` + 1 and enough for `budget` rows (or all columns).
      budget: rows up to which a row is taken whole.
      page_size: rows of a page.
      shared: one choice for all heads of a row, by the best score over the heads.
      implementation: as in `decode_attention`.

    Returns:
      A view of head-pages int32 [batch, kv_heads, width], ascending in the row, null pages (0) past the end, with
      lengths int32 [batch, kv_heads].

    Raises:
      ValueError: sizes that don't fit each other, or as in `decode_attention`.
    """
    batch, _, columns = view.table.shape
    if scores.shape != (batch, view.num_heads, columns):
        raise ValueError(f"scores have shape {scores.shape}, the view's pages {(batch, view.num_heads, columns)}")
    if not 1 <= num_scored <= columns:
        raise ValueError(f"num_scored is {num_scored}, not in [1, {columns}], the columns of the view")
    if width < max(num_scored + 1, min(-(-budget // page_size), columns)):
        raise ValueError(f"width {width} has no room for {num_scored} pages and the last, or for {budget} rows")
    module = choose("select_pages", implementation, scores, view)
    return module.select_pages(scores, view, num_scored, width, budget, page_size, shared)
