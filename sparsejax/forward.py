"""What a step does in each layer: store new rows, tell the method, attend. Traced into the programs of `steps`.

Layers are unrolled around an inner jit per role, so layers that behave alike share one trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.geometry import Geometry
from sparsejax.method import (
    DecodedContext,
    HiddenContext,
    Method,
    ObserveContext,
    PrefillContext,
    SelectContext,
    Written,
)
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, Stream, Weights
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.heads import Heads
from sparsejax.pallas_kernels.layout import POSITIONS, LoadTile, PageView
from sparsejax.state import layer_view
from sparsejax.storage import Storage


@dataclasses.dataclass(frozen=True)
class Statics:
    """What a program is compiled for. Hashable.

    Attributes:
      spec: the model.
      geometry: attention shape, page size and window.
      method: the sparse method of every row in the batch.
      storage: how rows are stored.
      implementation: kernel implementation, None or "auto" to choose.
    """

    spec: ModelSpec
    geometry: Geometry
    method: Method
    storage: Storage
    implementation: str | None = None


class Cache(NamedTuple):
    """The arrays that layers update in turn."""

    pools: dict[str, jax.Array]
    page_aux: dict[str, jax.Array]
    row_aux: dict[str, jax.Array]
    request_aux: dict[str, jax.Array]


class Batch(NamedTuple):
    """The rows of a step: what all layers share.

    Attributes:
      rows: int32 [batch].
      table: int32 [layers or 1, heads or 1, batch, columns].
      start: int32 [layers or 1, heads or 1, batch]: rows before this step.
      num_new: int32 [batch]: rows that this step appends.
      positions: int32 [batch, chunk].
      tokens: int32 [batch, chunk].
      part: int32 [batch], of a replay: which one.
    """

    rows: jax.Array
    table: jax.Array
    start: jax.Array
    num_new: jax.Array
    positions: jax.Array
    tokens: jax.Array
    part: jax.Array | None = None


def payload_names(cache: Cache) -> tuple[str, ...]:
    """Pools that the storage owns."""
    return tuple(name for name in cache.pools if name != POSITIONS)


def load_tile(statics: Statics) -> LoadTile:
    """The storage's decoder."""
    return functools.partial(statics.storage.load_tile, statics.storage.params, statics.geometry)


def append(
    statics: Statics, phase: str, layer: jax.Array, batch: Batch, cache: Cache, view: PageView, heads: Heads
) -> tuple[jax.Array, Cache]:
    """Stores new rows after those of `view` and tells the method; returns queries [batch, chunk, q_heads, head_dim]."""
    geometry, storage, method = statics.geometry, statics.storage, statics.method
    encode = functools.partial(storage.encode, storage.params, geometry)
    what = {"num_new": batch.num_new, "positions": batch.positions, "encode": encode, "layer": layer}
    q, k, v, pools = api.append(heads, cache.pools, view, **what, implementation=statics.implementation)
    cache = cache._replace(pools=pools)
    if method.on_write is None or phase == "replay":  # rows of a replay do not stay
        return q, cache
    head_pages, offsets = view.places(batch.num_new, q.shape[1], geometry.page_size)
    # Aux is computed from what attention will read back, so that rebuilding it from pages gives the same.
    # It is encoded again rather than read from the pool, which XLA would copy to be read between two updates.
    tiles = {name: jnp.moveaxis(rows, 2, 1) for name, rows in encode(layer, k, v).items()}
    stored, _ = load_tile(statics)(tiles, layer)
    if method.observe is not None:
        head_pages = head_pages + zero_after([k])  # after what earlier layers observed: see `_layer`
    written = Written(
        phase="token" if phase == "decode" else "chunk",
        rows=batch.rows,
        layer=layer,
        keys=jnp.moveaxis(stored, 1, 2),
        queries=q,
        positions=batch.positions,
        head_pages=head_pages,
        offsets=offsets,
        num_valid=batch.num_new,
        implementation=statics.implementation,
    )
    page_aux, row_aux = method.on_write(method.params, geometry, cache.page_aux, cache.row_aux, written)
    return q, cache._replace(page_aux=dict(page_aux), row_aux=dict(row_aux))


_OBSERVED: dict[str, Literal["chunk", "token", "replay"]] = {
    "prefill": "chunk",
    "decode": "token",
    "replay": "replay",
}


def observe_context(
    statics: Statics,
    phase: str,
    layer: jax.Array,
    batch: Batch,
    cache: Cache,
    view: PageView,
    start: jax.Array,
    queries: jax.Array,
) -> ObserveContext:
    """What the method sees of all rows of `view` and new queries [batch, chunk, q_heads, head_dim]."""
    return ObserveContext(
        geometry=statics.geometry,
        phase=_OBSERVED[phase],
        layer=layer,
        rows=batch.rows,
        queries=queries,
        num_valid=batch.num_new,
        positions=batch.positions,
        view=view,
        start=start,
        pools=cache.pools,
        names=payload_names(cache),
        load_tile=load_tile(statics),
        page_aux=cache.page_aux,
        row_aux=cache.row_aux,
        part=batch.part,
        implementation=statics.implementation,
    )


def changed(before: Mapping[str, jax.Array], after: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Arrays that are not those of before."""
    return [array for name, array in after.items() if array is not before[name]]


def zero_after(arrays: list[jax.Array]) -> jax.Array:
    """int32 scalar 0, known only once arrays are there: orders what made them and what uses it."""
    firsts = [array[(0,) * array.ndim] for array in arrays]
    odd = [first.astype(jnp.int32) & 1 for first in firsts]
    return jnp.minimum(sum(odd, jnp.int32(0)), 0)


def _last_tokens(num_new: jax.Array, x: jax.Array) -> jax.Array:
    """[batch, chunk, ...] -> [batch, ...]: of each row's last new token."""
    last = jnp.maximum(num_new - 1, 0).reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, last, axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("statics", "role", "phase", "ends"))
def _layer(
    statics: Statics,
    role: str,
    phase: str,
    ends: bool,
    layer: jax.Array,
    weights: Weights,
    stream: Stream,
    batch: Batch,
    cache: Cache,
    carry: Any,
) -> tuple[Stream, Cache, Any, jax.Array | None]:
    """One layer of a decode step (hidden states [batch, hidden]), or of a chunk or replay ([batch, chunk, hidden]).

    If it `ends` one of the latter, it stores keys and values of all tokens as ever, but only each row's last token
    attends and goes on ([batch, hidden]): nothing reads what the others would become. The last result are the queries
    [batch, q_heads, head_dim] of a decode step.
    """
    geometry, method = statics.geometry, statics.method
    view = layer_view(geometry, method.granularity, batch.table, batch.start, layer)
    box: dict[str, Any] = {"cache": cache, "carry": carry, "queries": None}
    attention = {"load_tile": load_tile(statics), "layer": layer, "scale": geometry.scale}
    attention["implementation"] = statics.implementation

    def attend(heads: Heads) -> jax.Array:
        decoding = phase == "decode"
        if decoding:
            heads = heads._replace(qkv=heads.qkv[:, None], cos=heads.cos[:, None], sin=heads.sin[:, None])
        q, cache = append(statics, phase, layer, batch, box["cache"], view, heads)
        box["cache"] = cache
        if decoding:
            box["queries"] = q[:, 0]
        grown = view._replace(lengths=jnp.maximum(view.lengths + batch.num_new[:, None], 1))
        seen = observe_context(statics, phase, layer, batch, cache, grown, view.lengths, q)
        if decoding and method.attend_token is not None:
            out, page_aux = method.attend_token(method.params, seen)
            box["cache"] = cache._replace(page_aux=dict(page_aux))
            return out
        learned: list[jax.Array] = []
        if method.observe is not None:
            page_aux, row_aux = method.observe(method.params, seen)
            learned = changed(cache.page_aux, page_aux) + changed(cache.row_aux, row_aux)
            box["cache"] = cache = cache._replace(page_aux=dict(page_aux), row_aux=dict(row_aux))
        if learned:
            # Attention waits for what was observed, so that no later layer can store rows before this one's are read.
            # XLA would copy whole pools instead.
            grown = grown._replace(lengths=grown.lengths + zero_after(learned))
        names = payload_names(cache)
        if phase == "prefill" and method.attend_prefill is not None and (method.attends_end or not ends):
            pick = functools.partial(_last_tokens, batch.num_new)
            asking = q, batch.positions
            queries, query_at = (pick(x)[:, None] for x in asking) if ends else asking
            context = PrefillContext(
                geometry=geometry,
                role=role,
                layer=layer,
                queries=queries,
                view=grown,
                start=grown.lengths - 1 if ends else view.lengths,
                num_new=jnp.minimum(batch.num_new, 1) if ends else batch.num_new,
                positions=query_at,
                pools=cache.pools,
                names=names,
                load_tile=load_tile(statics),
                page_aux=cache.page_aux,
                carry=box["carry"],
                implementation=statics.implementation,
            )
            out, box["carry"] = method.attend_prefill(method.params, context)
            return out[:, 0] if ends else out
        if not decoding and not ends:
            out, _ = api.prefill_attention(q, cache.pools, names, grown, view.lengths, **attention)
            return out
        q = q[:, 0] if decoding else _last_tokens(batch.num_new, q)
        if decoding and method.select is not None:
            context = SelectContext(
                geometry, role, layer, q, grown, cache.page_aux, box["carry"], statics.implementation
            )
            selection = method.select(method.params, context)
            grown, box["carry"] = selection.view, selection.carry
        out, _ = api.decode_attention(q, cache.pools, names, grown, **attention)
        return out

    positions = batch.positions
    if method.rotary == "row":
        positions = view.lengths[:, :1] + jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    positions = positions[:, 0] if phase == "decode" else positions
    model = get_architecture(statics.spec.architecture)
    pick = functools.partial(_last_tokens, batch.num_new) if ends else None
    stream = model.layer(statics.spec, weights, stream, positions, attend, statics.implementation, pick)
    return stream, box["cache"], box["carry"], box["queries"]


def layers(
    statics: Statics, phase: str, weights: Weights, stream: Stream, batch: Batch, cache: Cache
) -> tuple[Stream, Cache]:
    """All layers of a decode step ("decode"), a prefill chunk ("prefill") or a replay ("replay").

    The results of the two latter are each row's last token.
    """
    carry, queries = None, []
    method, num_layers = statics.method, statics.geometry.num_layers
    watched = method.hidden_layer(method.params, num_layers) if phase == "decode" and method.on_hidden else None
    for layer, role in enumerate(method.roles(num_layers)):
        ends = phase != "decode" and layer == num_layers - 1
        layer_weights = weights["layers"][layer]
        with jax.named_scope(f"layer_{layer}"):
            stream, cache, carry, asked = _layer(
                statics, role, phase, ends, jnp.int32(layer), layer_weights, stream, batch, cache, carry
            )
        queries.append(asked)
        if layer == watched:
            assert method.on_hidden is not None
            seen = batch.rows, batch.num_new > 0, batch.tokens[:, 0], batch.positions[:, 0], stream.x + stream.delta
            request_aux = method.on_hidden(method.params, HiddenContext(statics.geometry, *seen, cache.request_aux))
            cache = cache._replace(request_aux=dict(request_aux))
    if phase == "decode" and method.on_decoded is not None:
        seen = batch.rows, batch.num_new > 0, batch.positions[:, 0], jnp.stack(queries)
        row_aux = method.on_decoded(method.params, DecodedContext(statics.geometry, *seen, cache.row_aux))
        cache = cache._replace(row_aux=dict(row_aux))
    return stream, cache
