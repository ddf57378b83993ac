"""Which payload layouts a kernel can decode itself.

`load_tile` is plain jnp and can't be traced into a Triton kernel. A kernel therefore knows a few layouts, and one of
them is used only if the storage's `load_tile` computes exactly what the layout's own function does (both are traced and
their expressions compared), whatever the storage is called. A storage that differs keeps the portable path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.pallas_kernels.layout import Encode, LoadTile, Pools, trim_rows, widen_rows

PLAIN, ROW_SCALED = "plain", "row_scaled"
CODES = jnp.float8_e4m3fn


def _plain(tiles, layer, dtype, head_dim):
    return trim_rows(tiles["k"], head_dim), trim_rows(tiles["v"], head_dim)


def _row_scaled(tiles, layer, dtype, head_dim):
    def codes(name):
        rows = trim_rows(tiles[name], head_dim)
        return jax.lax.bitcast_convert_type(rows, CODES) if rows.dtype == jnp.uint8 else rows

    k = codes("k").astype(jnp.float32) * tiles["k_scale"][..., None]
    v = codes("v").astype(jnp.float32) * tiles["v_scale"][..., None]
    return k.astype(dtype), v.astype(dtype)


_DECODERS = {
    ("k", "v"): (PLAIN, _plain),
    ("k", "k_scale", "v", "v_scale"): (ROW_SCALED, _row_scaled),
}


def recognise(
    load_tile: LoadTile,
    pools: Pools,
    names: tuple[str, ...],
    dtype: jax.typing.DTypeLike,
    head_dim: int | None = None,
) -> str | None:
    """The layout whose decoding equals `load_tile` with results of `dtype`, or None.

    `head_dim` is only needed where stored rows may be longer (`layout.row_width`).
    PLAIN: "k" and "v" are keys and values. ROW_SCALED: codes "k" and "v", `CODES` or their bits as uint8, times
    float32 "k_scale" and "v_scale" per row.
    """
    if (known := _DECODERS.get(tuple(sorted(names)))) is None:
        return None
    layout, decode = known
    tiles = {name: jax.ShapeDtypeStruct((1, 1, *pools[name].shape[1:]), pools[name].dtype) for name in names}
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    head_dim = head_dim or tiles["k"].shape[-1]
    wanted = _expressions(lambda tiles, layer: decode(tiles, layer, dtype, head_dim), tiles, layer)
    if any(result.dtype != dtype for result in jax.eval_shape(load_tile, tiles, layer)):
        return None
    return layout if _expressions(load_tile, tiles, layer) == wanted else None


def _encode_plain(layer, k, v, dtype):
    return {"k": widen_rows(k.astype(dtype)), "v": widen_rows(v.astype(dtype))}


def _encode_row_scaled(layer, k, v, dtype):
    largest = float(jnp.finfo(CODES).max)

    def scale(x):
        return jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(-1) / largest, 1e-30)

    def codes(x, scale):
        return jnp.clip(x.astype(jnp.float32) / scale[..., None], -largest, largest).astype(CODES)

    k_scale, v_scale = scale(k), scale(v)
    rows = {"k": codes(k, k_scale), "v": codes(v, v_scale), "k_scale": k_scale, "v_scale": v_scale}
    return {name: widen_rows(row) if row.dtype == CODES else row for name, row in rows.items()}


_ENCODERS = {
    ("k", "v"): (PLAIN, _encode_plain),
    ("k", "k_scale", "v", "v_scale"): (ROW_SCALED, _encode_row_scaled),
}


def recognise_encoder(encode: Encode, pools: Pools, dtype: jax.typing.DTypeLike, head_dim: int) -> str | None:
    """The layout whose encoding equals `encode` for keys and values of `dtype`, or None; layouts as in `recognise`."""
    row = jax.ShapeDtypeStruct((1, 1, 1, head_dim), jnp.dtype(dtype))
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    rows = jax.eval_shape(encode, layer, row, row)
    if (known := _ENCODERS.get(tuple(sorted(rows)))) is None:
        return None
    layout, function = known
    if any(pools[name].shape[2:] != row.shape[3:] or pools[name].dtype != row.dtype for name, row in rows.items()):
        return None
    if layout == ROW_SCALED and rows["k"].dtype != CODES:
        return None  # bits of codes, as CPUs hold them
    wanted = _expressions(lambda layer, k, v: function(layer, k, v, dtype), layer, row, row)
    return layout if _expressions(encode, layer, row, row) == wanted else None


def _expressions(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each result is computed from, as nested tuples: equal whatever the order of independent steps."""
    closed = jax.make_jaxpr(function)(*arguments)
    known: dict[Any, Any] = {var: ("argument", i) for i, var in enumerate(closed.jaxpr.invars)}
    known |= {var: ("constant", id(value)) for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def expression(atom: Any) -> Any:
        return ("literal", str(atom.aval), str(atom.val)) if hasattr(atom, "val") else known[atom]

    for equation in closed.jaxpr.eqns:
        inputs = tuple(expression(atom) for atom in equation.invars)
        for i, var in enumerate(equation.outvars):
            known[var] = (equation.primitive.name, str(sorted(equation.params.items())), inputs, i, str(var.aval))
    return [(str(atom.aval), expression(atom)) for atom in closed.jaxpr.outvars]
