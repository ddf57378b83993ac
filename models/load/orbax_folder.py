"""Orbax checkpoints: weights in this package's layout, the spec as JSON, the tokenizer's files beside them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax.arrays import is_spec
from sparsejax.errors import LoadError
from sparsejax.models.load.hf_folder import read_json, read_optional_json
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec, RopeSpec, Weights

if TYPE_CHECKING:
    from sparsejax.models.load import LoadedModel
    from sparsejax.models.load.tokenizer import Tokenizer

SPEC, WEIGHTS, TOKENIZER = "sparsejax.json", "weights", "tokenizer"
_FORMAT = 1


def is_orbax_folder(folder: pathlib.Path) -> bool:
    """True for a folder that `save_checkpoint` wrote."""
    return (folder / SPEC).is_file() and (folder / WEIGHTS).is_dir()


def save_checkpoint(model: LoadedModel, folder: str | pathlib.Path, overwrite: bool = False) -> pathlib.Path:
    """Writes a model so that `load_model(folder)` reads it back: fused layout, no conversion at the next start.

    Raises:
      LoadError: the folder exists and is not empty (unless `overwrite`).
    """
    import orbax.checkpoint as ocp

    folder = pathlib.Path(folder).expanduser().resolve()
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise LoadError(f"{folder} is not empty; choose another folder or overwrite it")
        if not is_orbax_folder(folder):
            raise LoadError(f"{folder} is not a checkpoint of sparsejax, so it is not overwritten")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / WEIGHTS, model.weights)
    (folder / TOKENIZER).mkdir()
    model.tokenizer.save(folder / TOKENIZER)
    # Last, so that a folder with a spec is a whole checkpoint.
    record = {
        "format": _FORMAT,
        "name": model.name,
        "spec": dataclasses.asdict(model.spec),
        "generation_defaults": model.generation_defaults,
    }
    (folder / SPEC).write_text(json.dumps(record, indent=2) + "\n")
    return folder


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """The JSON beside the weights. Raises LoadError for another format."""
    record = read_json(folder / SPEC)
    if record.get("format") != _FORMAT or not isinstance(record.get("spec"), dict):
        raise LoadError(f"{folder / SPEC} has format {record.get('format')!r}; this version reads format {_FORMAT}")
    return record


def orbax_spec(folder: pathlib.Path, dtype: str) -> ModelSpec:
    """The saved ModelSpec, for another compute dtype if need be."""
    values = dict(read_record(folder)["spec"])
    try:
        rope = dict(values.pop("rope"))
        rope["divisors"] = tuple(rope.get("divisors", ()))
        spec = ModelSpec(**values, rope=RopeSpec(**rope))
    except (KeyError, TypeError) as error:
        raise LoadError(f"{folder / SPEC} does not describe a model: {error}") from None
    get_architecture(spec.architecture)
    return dataclasses.replace(spec, dtype=dtype)


def load_orbax_weights(folder: pathlib.Path, spec: ModelSpec) -> Weights:
    """Restores the weights, cast to `spec.dtype`. Raises LoadError if the tree or a shape differs."""
    import orbax.checkpoint as ocp

    specs = get_architecture(spec.architecture).weight_specs(spec)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=sharding),
        specs,
        is_leaf=is_spec,
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder.resolve() / WEIGHTS, wanted)
    except (ValueError, KeyError, OSError) as error:
        raise LoadError(f"the weights in {folder / WEIGHTS} do not match {SPEC}: {error}") from None


def load_orbax_tokenizer(folder: pathlib.Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer saved beside the weights."""
    from sparsejax.models.load.tokenizer import load_tokenizer

    settings = read_optional_json(folder / TOKENIZER / "generation_config.json")
    return load_tokenizer(folder / TOKENIZER, offline=True, chat_template=chat_template, generation_config=settings)
