"""The calibration example, run as a user would, and its file in the engine."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from sparsejax import registry
from sparsejax.capacity import checkpoint_id, model_hash
from sparsejax.errors import MethodError
from sparsejax.models.load import load_model
from sparsejax.models.load.orbax_folder import save_checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    folder = tmp_path_factory.mktemp("calibrate")
    model = folder / "tiny"
    save_checkpoint(load_model("tiny-llama", load_format="dummy", progress=False), model)
    scales = folder / "scales.json"
    text = folder / "text.txt"
    text.write_text("Nothing but text, over and over. " * 40, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "examples" / "calibrate_fp8.py"), str(text), str(scales), str(model)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return model, scales


def test_scale_file_fits_its_model_and_no_other(calibrated: tuple[pathlib.Path, pathlib.Path]) -> None:
    model, scales = calibrated
    spec = load_model(str(model), progress=False).spec
    layers = json.loads(scales.read_text(encoding="utf-8"))["layers"]
    assert len(layers) == spec.num_layers
    assert all(0 < layer[name] < 1 for layer in layers.values() for name in ("k", "v"))
    _, storage = registry.resolve(f"fp8_kv(fp8_kv_scale_mode=static,fp8_kv_scale_path={scales})")
    geometry = spec.geometry(16, 64)
    assert not storage.check(storage.params, geometry, checkpoint_id(str(model)), model_hash(spec))
    assert storage.check(storage.params, geometry, "another", model_hash(spec))
    assert storage.check(storage.params, geometry, checkpoint_id(str(model)), "0" * 64)
    # What was calibrated on does not saturate: codes stay within the format, values come back to 1/16.
    x = jnp.full((1, spec.num_kv_heads, spec.head_dim), 448 * layers["0"]["k"], jnp.float32)
    rows = storage.encode(storage.params, geometry, jnp.int32(0), x, x)
    tiles = jax.tree.map(lambda array: jnp.moveaxis(array[:, None], 2, 1), rows)
    k, _ = storage.load_tile(storage.params, geometry, tiles, jnp.int32(0))
    assert jnp.allclose(k, x[0, 0, 0], rtol=1 / 16)


def test_a_file_of_another_scheme_is_refused(calibrated: tuple[pathlib.Path, pathlib.Path]) -> None:
    _, scales = calibrated
    with pytest.raises(MethodError, match="scheme"):
        registry.resolve(f"fp8_kv(fp8_kv_scale_mode=static_head,fp8_kv_scale_path={scales})")
