"""FlashPrefill V2 (arXiv 2608.19758): block-sparse attention of prompt chunks; what is stored is untouched.

A tile of queries reads the blocks of keys that its queries' logits with the blocks' mean keys point to, the first
blocks and those around it. Blocks that it does not read can still count through their mean key and value.

Tiles begin where a chunk begins, and the rules about a chunk's length and its last tiles are about the chunk, so how a
prompt is cut changes the result. It is only through these rules: nothing is carried from chunk to chunk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import Method, PrefillContext, choice_param, integer_param, knob
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import PageView, explicit_view, load_block, pad_columns

SEGMENT_ROWS = 16384
MEAN_PAGE = 64


@dataclasses.dataclass(frozen=True)
class Params:
    flashprefill_v2_k_block_m: int = knob(128, "queries of a tile, counted over the query heads of a KV head", "rows")
    flashprefill_v2_k_block_n: int = knob(128, "keys of a block, a power of two", "tokens")
    flashprefill_v2_abs_threshold: float | None = knob(
        None, "share of a tile's strongest block that a block must reach to be read, in [0, 1]; must be given"
    )
    flashprefill_v2_attention_sink_blocks: int = knob(2, "first blocks, which every tile reads", "blocks")
    flashprefill_v2_window_blocks: int = knob(4, "blocks up to a tile's own, which it reads", "blocks")
    flashprefill_v2_last_query_blocks: int = knob(8, "last tiles of a chunk, which read everything", "tiles")
    flashprefill_v2_min_sparse_q_len: int = knob(4096, "chunks of at most this length read everything", "tokens")
    flashprefill_v2_use_mean_correction: bool = knob(True, "blocks that are not read count through their means")

    def __post_init__(self) -> None:
        m, n = self.flashprefill_v2_k_block_m, self.flashprefill_v2_k_block_n
        integer_param("flashprefill_v2_k_block_m", m, 16)
        if m % 16:
            raise MethodError(f"flashprefill_v2_k_block_m must be a multiple of 16, got {m}")
        integer_param("flashprefill_v2_k_block_n", n, 64)
        if n & (n - 1):
            raise MethodError(f"flashprefill_v2_k_block_n must be a power of two of at least 64, got {n}")
        threshold = self.flashprefill_v2_abs_threshold
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if threshold is not None and not (number and 0 <= threshold <= 1):
            raise MethodError(f"flashprefill_v2_abs_threshold must be a number in [0, 1], got {threshold!r}")
        integer_param("flashprefill_v2_attention_sink_blocks", self.flashprefill_v2_attention_sink_blocks, 0)
        integer_param("flashprefill_v2_window_blocks", self.flashprefill_v2_window_blocks, 1)
        integer_param("flashprefill_v2_last_query_blocks", self.flashprefill_v2_last_query_blocks, 0)
        integer_param("flashprefill_v2_min_sparse_q_len", self.flashprefill_v2_min_sparse_q_len, 0)
        choice_param("flashprefill_v2_use_mean_correction", self.flashprefill_v2_use_mean_correction, (True, False))

    @property
    def rules(self) -> Rules:
        """The same, checked to be complete."""
        if self.flashprefill_v2_abs_threshold is None:
            raise MethodError(NO_THRESHOLD)
        return Rules(
            tile_rows=self.flashprefill_v2_k_block_m,
            block_size=self.flashprefill_v2_k_block_n,
            threshold=float(self.flashprefill_v2_abs_threshold),
            sink_blocks=self.flashprefill_v2_attention_sink_blocks,
            window_blocks=self.flashprefill_v2_window_blocks,
            last_tiles=self.flashprefill_v2_last_query_blocks,
            dense_chunk=self.flashprefill_v2_min_sparse_q_len,
            correct=self.flashprefill_v2_use_mean_correction,
        )


NO_THRESHOLD = "flashprefill_v2_abs_threshold must be given: it depends on the model, and larger is sparser"


class Rules(NamedTuple):
    """Params by short names: rows of a tile and of a block, what is read whatever its score, and the correction."""

    tile_rows: int
    block_size: int
    threshold: float
    sink_blocks: int
    window_blocks: int
    last_tiles: int
    dense_chunk: int
    correct: bool


class Plan(NamedTuple):
    """What tiles read: bool [batch, kv_heads, tiles, blocks].

    Attributes:
      causal: blocks of which any query of the tile sees a row.
      kept: those that are read.
      corrected: those that all its queries see wholly and none reads.
    """

    causal: jax.Array
    kept: jax.Array
    corrected: jax.Array


def check(params: Params, geometry: Geometry) -> list[str]:
    return [NO_THRESHOLD] if params.flashprefill_v2_abs_threshold is None else []


def attend_prefill(params: Params, context: PrefillContext) -> tuple[jax.Array, None]:
    rules = params.rules
    q, attention = context.queries, _attention(context)
    pages = context.pools, context.names, context.view
    if q.shape[1] <= rules.dense_chunk:
        return api.prefill_attention(q, *pages, context.start, **attention)[0], None
    return attend(rules, context), None


def attend(rules: Rules, context: PrefillContext) -> jax.Array:
    """Attention of a chunk in which some row may be long enough to be sparse: [batch, chunk, q_heads, head_dim]."""
    q, attention = context.queries, _attention(context)
    pages = context.pools, context.names, context.view
    shape = {"block_size": rules.block_size, "tile_rows": rules.tile_rows}
    keys, values = block_means(context, rules.block_size)
    found = plan(rules, context, energies(rules, context, keys))
    blocks, count = lists(found.kept)
    part = api.block_sparse_attention(q, *pages, context.start, blocks, count, **shape, **attention)
    if not rules.correct:
        return part[0]
    bias = jnp.where(found.corrected, math.log(rules.block_size), -jnp.inf).astype(jnp.float32)
    how = {"tile_rows": rules.tile_rows, "scale": context.geometry.scale, "implementation": context.implementation}
    return api.merge([part, api.tile_attention(q, keys, values, bias, **how)])[0].astype(q.dtype)


def _attention(context: PrefillContext) -> dict:
    how = {"load_tile": context.load_tile, "layer": context.layer, "scale": context.geometry.scale}
    return how | {"implementation": context.implementation}


def block_means(context: PrefillContext, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Mean keys and values [batch, kv_heads, blocks, head_dim] of complete blocks, in the compute dtype.

    Sums are float32. Of a block that is not complete the result is finite, and means nothing.
    """
    page = context.geometry.page_size
    whole = math.lcm(page, block_size)  # rows of whole pages and blocks
    capacity = context.view.table.shape[2] * page
    segment = min(max(SEGMENT_ROWS // whole, 1) * whole, -(-capacity // whole) * whole)
    view = pad_columns(context.view, segment // page)
    num_segments = view.table.shape[2] * page // segment

    def means(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages = view.head_pages(first // page, segment // page)
        row = first + jnp.arange(segment, dtype=jnp.int32)[None, None]
        valid = (row < view.lengths[:, :, None])[..., None]

        def mean(x: jax.Array) -> jax.Array:
            x = jnp.where(valid, x, 0).astype(jnp.float32)
            x = x.reshape(*x.shape[:2], -1, block_size, x.shape[3]).sum(3)
            return (x * (1 / block_size)).astype(context.queries.dtype)

        k, v = load_block(context.pools, context.names, pages, context.load_tile, context.layer)
        return mean(k), mean(v)

    def joined(x: jax.Array) -> jax.Array:  # [segments, batch, heads, blocks, dim]
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4])[:, :, : -(-capacity // block_size)]

    if num_segments == 1:
        return tuple(joined(x[None]) for x in means(jnp.int32(0)))  # type: ignore[return-value]
    keys, values = jax.lax.map(means, jnp.arange(num_segments, dtype=jnp.int32) * segment)
    return joined(keys), joined(values)


class Bounds(NamedTuple):
    """Of tiles, int32 [batch, kv_heads or 1, tiles].

    Attributes:
      first, last: blocks that hold the row of a tile's first and last query.
      complete: blocks before it are complete once the last query's row is there.
      live: bool [batch, 1, tiles], whether the tile holds queries of the sequence.
      num_live: how many do, int32 [batch, 1, 1].
    """

    first: jax.Array
    last: jax.Array
    complete: jax.Array
    live: jax.Array
    num_live: jax.Array


def bounds(rules: Rules, context: PrefillContext) -> Bounds:
    """Where the tiles of each row's new queries lie among the blocks."""
    group = context.queries.shape[2] // context.view.num_heads
    tiles = api.num_tiles(context.queries.shape[1], group, rules.tile_rows)
    begin = jnp.arange(tiles, dtype=jnp.int32)[None, None, :] * rules.tile_rows
    rows = (context.num_new * group)[:, None, None]  # packed
    start = context.start[:, :, None]
    end = start + (jnp.minimum(begin + rules.tile_rows, rows) - 1) // group
    return Bounds(
        first=(start + begin // group) // rules.block_size,
        last=end // rules.block_size,
        complete=(end + 1) // rules.block_size,
        live=begin < rows,
        num_live=(rows + rules.tile_rows - 1) // rules.tile_rows,
    )


def energies(rules: Rules, context: PrefillContext, keys: jax.Array) -> jax.Array:
    """Float32 [batch, kv_heads, tiles, blocks]: sums over a tile's queries of exp(logit - the tile's largest logit).

    Logits are those with the blocks' mean `keys` [batch, kv_heads, blocks, head_dim]. A query counts for complete
    blocks whose first row it sees.
    """
    q, heads = context.queries, context.view.num_heads
    batch, _, q_heads, dim = q.shape
    group, m = q_heads // heads, rules.tile_rows
    tiles = api.num_tiles(q.shape[1], group, m)
    position = api.packed_positions(tiles, m, group)
    if m % group == 0:  # a tile is whole positions, and queries can stay as they are
        q = jnp.pad(q, ((0, 0), (0, tiles * m // group - q.shape[1]), (0, 0), (0, 0)))
        q, position = q.reshape(batch * tiles, m // group, q_heads, dim), position[:, ::group]
    else:  # each packed row as a query of its own, of as many heads as there are KV heads
        q = jnp.moveaxis(api.pack_queries(q, heads, m).reshape(batch, heads, tiles, m, dim), 1, 3)
        q = q.reshape(batch * tiles, m, heads, dim)
    limit = (context.start[:, :, None, None] + position[None, None]) // rules.block_size + 1
    limit = jnp.minimum(limit, bounds(rules, context).complete[..., None])
    limit = jnp.where(position[None, None] < context.num_new[:, None, None, None], limit, 0)
    limit = jnp.moveaxis(limit, 1, 2).reshape(batch * tiles, -1, q.shape[1])

    pools, view = _mean_pages(keys, tiles)
    how = {"load_tile": _plain, "layer": context.layer, "scale": context.geometry.scale}
    how["implementation"] = context.implementation
    largest = api.row_scores(q, pools, ("k", "v"), view, limit, group="max", **how).max(-1)
    largest = jnp.where(largest > -jnp.inf, largest, 0.0)
    peak = jnp.broadcast_to(jnp.repeat(largest, q.shape[2] // heads, axis=1)[:, None], q.shape[:3])
    sums = api.row_scores(q, pools, ("k", "v"), view, limit, lse=peak, group="sum", **how)
    return jnp.moveaxis(sums.reshape(batch, tiles, heads, -1), 1, 2)[..., : keys.shape[2]]


def _mean_pages(keys: jax.Array, tiles: int) -> tuple[dict[str, jax.Array], PageView]:
    """Mean keys as pages that each of `tiles` times `batch` sequences has, for `row_scores`."""
    batch, heads, blocks, dim = keys.shape
    columns = -(-blocks // MEAN_PAGE)
    pool = jnp.pad(keys, ((0, 0), (0, 0), (0, columns * MEAN_PAGE - blocks), (0, 0))).reshape(-1, MEAN_PAGE, dim)
    table = jnp.arange(batch * heads * columns, dtype=jnp.int32).reshape(batch, 1, heads, columns)
    table = jnp.broadcast_to(table, (batch, tiles, heads, columns)).reshape(batch * tiles, heads, columns)
    return {"k": pool, "v": pool}, explicit_view(table, jnp.full((batch * tiles, 1), blocks, jnp.int32))


def _plain(tiles, layer):
    return tiles["k"], tiles["v"]


def plan(rules: Rules, context: PrefillContext, energy: jax.Array) -> Plan:
    """Which blocks tiles read, by their energies float32 [batch, kv_heads, tiles, blocks]."""
    at = bounds(rules, context)
    tile = jnp.arange(energy.shape[2], dtype=jnp.int32)[None, None]
    dense = (context.num_new <= rules.dense_chunk)[:, None, None] | (tile >= at.num_live - rules.last_tiles)
    block = jax.lax.broadcasted_iota(jnp.int32, energy.shape, 3)
    first, last, complete, live, dense = (x[..., None] for x in (at.first, at.last, at.complete, at.live, dense))
    causal = live & (block <= last)
    strong = (block < complete) & (energy >= rules.threshold * energy.max(-1, keepdims=True))
    near = (block < rules.sink_blocks) | (block > first - rules.window_blocks)
    kept = causal & (dense | strong | near)
    return Plan(causal, kept, live & (block < first) & ~kept)


def lists(kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ascending indices int32 [..., blocks] of what is kept, bool [..., blocks], and how many they are."""
    shape = kept.shape
    kept = kept.reshape(-1, shape[-1])
    place = jnp.where(kept, jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1, shape[-1])
    row, block = (jax.lax.broadcasted_iota(jnp.int32, kept.shape, axis) for axis in (0, 1))
    found = jnp.zeros(kept.shape, jnp.int32).at[row, place].set(block, mode="drop", unique_indices=True)
    return found.reshape(shape), kept.sum(1, dtype=jnp.int32).reshape(shape[:-1])


def build(params: Params) -> Method:
    return Method(
        "flashprefill_v2",
        "prefill",
        params,
        summary="prompt chunks read the blocks of keys that their mean keys point to",
        paper="arXiv 2608.19758",
        attend_prefill=attend_prefill,
        check=check,
        chunk_dependent=True,
    )


PARAMS = Params
ALIASES = ("flash-prefill-v2", "flash_prefill_v2", "flashprefill-v2")
SAMPLES = tuple(
    Params(
        flashprefill_v2_k_block_n=64,
        flashprefill_v2_abs_threshold=threshold,
        flashprefill_v2_window_blocks=2,
        flashprefill_v2_last_query_blocks=1,
        flashprefill_v2_min_sparse_q_len=256,
    )
    for threshold in (0.05, 0.3)
)
NOTES = {
    "Keeps": """
        Everything. The queries of a prompt chunk come in tiles; each tile reads the key blocks whose mean key draws at
        least `flashprefill_v2_abs_threshold` of what its strongest block draws, the first
        `flashprefill_v2_attention_sink_blocks` and the last `flashprefill_v2_window_blocks` up to its own. With
        `flashprefill_v2_use_mean_correction` a block that is not read counts through its mean key and value.
    """,
    "Acts": """
        In prompt chunks of more than `flashprefill_v2_min_sparse_q_len` tokens; their last
        `flashprefill_v2_last_query_blocks` tiles read everything. Results depend on how a prompt is cut. Decoding is
        dense.
    """,
    "Costs": """
        All rows, and no more. Attention of a prompt costs the share of blocks that are read, and before that one pass
        over the keys for their means and 2 x q_heads x chunk x (n / block) x head_dim operations for the energies of
        blocks, per layer.
    """,
    "Use it": """
        For long prompts whose first token should come sooner. The threshold must be calibrated for a model: larger is
        sparser, 0 reads everything.
    """,
}
