"""FP8 keys and values: OCP E4M3FN codes with a dequantisation multiplier (`x = code * scale`).

Scale modes: "dynamic" one float32 scale per token and head, `max(|x|)/448`, no calibration; "static" one per layer and
"static_head" one per layer and head from a calibration file; "unit" none. Values past 448 * scale saturate.
The prompt attends to what is stored, its own chunk included, so results do not depend on how a prompt was chunked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.arrays import ArraySpec
from sparsejax.errors import MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import choice_param, knob
from sparsejax.pallas_kernels import api
from sparsejax.pallas_kernels.layout import row_width, trim_rows, widen_rows
from sparsejax.storage import Storage

DTYPE = "float8_e4m3fn"
LARGEST = 448.0
SCHEME = {"static": "fp8_e4m3fn_per_layer", "static_head": "fp8_e4m3fn_per_layer_head"}


@dataclasses.dataclass(frozen=True)
class Params:
    fp8_kv_scale_mode: str = knob("dynamic", "'dynamic', 'static', 'static_head' or 'unit'")
    fp8_kv_scale_path: str | None = knob(None, "calibration file of the static modes")

    def __post_init__(self) -> None:
        choice_param("fp8_kv_scale_mode", self.fp8_kv_scale_mode, ("dynamic", "static", "static_head", "unit"))
        if self.static and self.fp8_kv_scale_path is None:
            raise MethodError(f"fp8_kv_scale_mode={self.fp8_kv_scale_mode!r} needs fp8_kv_scale_path")
        if not self.static and self.fp8_kv_scale_path is not None:
            raise MethodError(
                f"fp8_kv_scale_path is only read with a static scale mode, not {self.fp8_kv_scale_mode!r}"
            )

    @property
    def static(self) -> bool:
        return self.fp8_kv_scale_mode.startswith("static")


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Parameters with their scales: (k, v) per layer, each one float per head or a single one."""

    mode: str
    layers: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()
    checkpoint_id: str | None = None
    model_config_sha256: str | None = None


def read_scales(path: str, mode: str) -> Calibrated:
    """Reads a calibration file; anything unexpected is an error, never a fallback."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MethodError(f"fp8_kv_scale_path {path}: {error}") from error
    expected = {"schema_version": 1, "scheme": SCHEME[mode], "scale_convention": "dequant_multiplier"}
    for key, value in expected.items():
        if not isinstance(data, dict) or data.get(key) != value:
            found = data.get(key) if isinstance(data, dict) else type(data).__name__
            raise MethodError(f"fp8_kv_scale_path {path}: {key} must be {value!r}, got {found!r}")
    layers = data.get("layers")
    if not isinstance(layers, dict) or sorted(layers) != sorted(str(i) for i in range(len(layers))):
        raise MethodError(f"fp8_kv_scale_path {path}: layers must have the keys 0..n-1")

    def scales(layer: str, name: str) -> tuple[float, ...]:
        entry: Any = layers[layer].get(name) if isinstance(layers[layer], dict) else None
        values: Any = entry if mode == "static_head" else [entry]
        if not isinstance(values, list) or not values:
            raise MethodError(f"fp8_kv_scale_path {path}: layers.{layer}.{name} must be a list of scales per head")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise MethodError(f"fp8_kv_scale_path {path}: layers.{layer}.{name} must be above 0, got {value!r}")
        return tuple(float(value) for value in values)

    pairs = tuple((scales(str(i), "k"), scales(str(i), "v")) for i in range(len(layers)))
    return Calibrated(mode, pairs, data.get("checkpoint_id"), data.get("model_config_sha256"))


def scale_file(
    layers: list[tuple[list[float], list[float]]], mode: str, checkpoint_id: str, model_config_sha256: str
) -> dict[str, Any]:
    """The content of a calibration file for per-layer (k scales, v scales), each one per head or a single one."""
    if mode == "static":
        entries = {str(i): {"k": max(k), "v": max(v)} for i, (k, v) in enumerate(layers)}
    else:
        entries = {str(i): {"k": k, "v": v} for i, (k, v) in enumerate(layers)}
    return {
        "schema_version": 1,
        "scheme": SCHEME[mode],
        "scale_convention": "dequant_multiplier",
        "checkpoint_id": checkpoint_id,
        "model_config_sha256": model_config_sha256,
        "layers": entries,
    }


def pool_dtype() -> str:
    """XLA for CPUs scatters and gathers 8-bit floats by converting the whole pool and back: it gets their bits."""
    return "uint8" if api.platform() == "cpu" else DTYPE


def payload(params: Calibrated, geometry: Geometry) -> dict[str, ArraySpec]:
    rows = ArraySpec((geometry.page_size, row_width(geometry.head_dim)), pool_dtype(), ("row", "head_dim"))
    specs = {"k": rows, "v": rows}
    if params.mode == "dynamic":
        scale = ArraySpec((geometry.page_size,), "float32", ("row",))
        specs |= {"k_scale": scale, "v_scale": scale}
    return specs


def quantise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Round-to-nearest-even codes of x / scale; `scale` broadcasts. The cast alone would turn overflow into NaN."""
    return jnp.clip(x.astype(jnp.float32) / scale, -LARGEST, LARGEST).astype(DTYPE)


def pool_rows(codes: jax.Array) -> jax.Array:
    """Codes as the pool holds them."""
    codes = widen_rows(codes)
    return codes if pool_dtype() == DTYPE else jax.lax.bitcast_convert_type(codes, pool_dtype())


def dequantise(stored: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 of what the pool holds; `scale` broadcasts."""
    codes = stored if stored.dtype == DTYPE else jax.lax.bitcast_convert_type(stored, DTYPE)
    return codes.astype(jnp.float32) * scale


def dynamic_scale(x: jax.Array) -> jax.Array:
    """[..., head_dim] -> float32 [...]."""
    return jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(-1) / LARGEST, 1e-30)


def static_scale(params: Calibrated, layer: jax.Array, which: int, num_heads: int) -> jax.Array:
    """float32 [num_heads] of a layer."""
    if params.mode == "unit":
        return jnp.ones((num_heads,), jnp.float32)
    table = jnp.asarray(
        [[pair[which][0]] * num_heads if len(pair[which]) == 1 else pair[which] for pair in params.layers]
    )
    return table.astype(jnp.float32)[layer]


def encode(
    params: Calibrated, geometry: Geometry, layer: jax.Array, k: jax.Array, v: jax.Array
) -> dict[str, jax.Array]:
    """k and v are [..., kv_heads, head_dim]."""
    if params.mode == "dynamic":
        k_scale, v_scale = dynamic_scale(k), dynamic_scale(v)
        return {
            "k": pool_rows(quantise(k, k_scale[..., None])),
            "v": pool_rows(quantise(v, v_scale[..., None])),
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
    shape = (1,) * (k.ndim - 2) + (k.shape[-2], 1)
    k_scale = static_scale(params, layer, 0, k.shape[-2]).reshape(shape)
    v_scale = static_scale(params, layer, 1, v.shape[-2]).reshape(shape)
    return {"k": pool_rows(quantise(k, k_scale)), "v": pool_rows(quantise(v, v_scale))}


def load_tile(
    params: Calibrated, geometry: Geometry, tiles: Mapping[str, jax.Array], layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tiles are [batch, kv_heads, rows, ...]."""
    if params.mode == "dynamic":
        k_scale, v_scale = tiles["k_scale"][..., None], tiles["v_scale"][..., None]
    else:
        heads = tiles["k"].shape[1]
        k_scale = static_scale(params, layer, 0, heads)[None, :, None, None]
        v_scale = static_scale(params, layer, 1, heads)[None, :, None, None]
    k = dequantise(trim_rows(tiles["k"], geometry.head_dim), k_scale)
    v = dequantise(trim_rows(tiles["v"], geometry.head_dim), v_scale)
    return k.astype(geometry.dtype), v.astype(geometry.dtype)


def check(params: Calibrated, geometry: Geometry, checkpoint_id: str, model_config_sha256: str) -> list[str]:
    """Reasons why the calibration does not belong to this model."""
    if not params.layers:
        return []
    reasons = []
    if len(params.layers) != geometry.num_layers:
        reasons.append(f"the scale file has {len(params.layers)} layers, the model {geometry.num_layers}")
    widths = {len(scales) for pair in params.layers for scales in pair}
    if params.mode == "static_head" and widths != {geometry.num_kv_heads}:
        reasons.append(f"the scale file has {sorted(widths)} scales per layer, the model {geometry.num_kv_heads} heads")
    if params.checkpoint_id != checkpoint_id:
        reasons.append(f"the scale file was made for checkpoint {params.checkpoint_id!r}, not {checkpoint_id!r}")
    if params.model_config_sha256 != model_config_sha256:
        reasons.append("the scale file was made for another model configuration")
    return reasons


def build(params: Params) -> Storage:
    if params.static:
        assert params.fp8_kv_scale_path is not None
        calibrated = read_scales(params.fp8_kv_scale_path, params.fp8_kv_scale_mode)
    else:
        calibrated = Calibrated(params.fp8_kv_scale_mode)
    return Storage(
        "fp8_kv",
        calibrated,
        "8-bit floats with one scale per token and head (or calibrated per layer)",
        payload,
        encode,
        load_tile,
        paper="OCP 8-bit floating point, E4M3",
        key_arrays=("k", "k_scale") if calibrated.mode == "dynamic" else ("k",),
        check=check,
    )


PARAMS = Params
ALIASES = ("fp8", "fp8_e4m3")
NOTES = {
    "Keeps": "Keys and values as 8-bit floats, with one float32 scale per row, layer and KV head each ('dynamic'), or "
    "with calibrated ones.",
    "Costs": "2 x head_dim bytes per row, layer and KV head, and 8 for its scales.",
    "Use it": "When a quarter (float32) or half (bfloat16) of the memory must do. It goes with every method.",
}
