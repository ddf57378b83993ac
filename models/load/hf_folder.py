"""Hugging Face folders: config.json and one or several safetensors files."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from sparsejax.errors import LoadError
from sparsejax.models.load.assemble import Assembler
from sparsejax.models.load.progress import bytes_bar
from sparsejax.models.spec import ModelSpec, Weights

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file; LoadError names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} must hold a JSON object")
    return value


def read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """`read_json`, or {} if there is no such file."""
    return read_json(path) if path.is_file() else {}


def safetensors_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The weight files of a folder, in order: those of the index, or the single file."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise LoadError(f"{folder / INDEX} has no weight_map of file names")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if pathlib.PurePath(name).name != name]
        if outside:
            raise LoadError(f"{folder / INDEX} names files outside its folder: {outside[0]!r}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise LoadError(f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:10])}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise LoadError(f"{folder} has {len(others)} safetensors files but no {INDEX}")
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
    hint = " (pickled weights are not read: they can run code; convert them to safetensors)" if pickles else ""
    raise LoadError(f"{folder} has no safetensors weights{hint}")


def load_safetensors(folder: pathlib.Path, spec: ModelSpec, progress: bool = True) -> Weights:
    """Reads every tensor of the folder, one at a time, onto the device in `spec.dtype`.

    Raises:
      LoadError: unreadable files, tensors in no float dtype, or any difference from what the config asks for.
    """
    import safetensors

    files = safetensors_files(folder)
    homes: dict[str, pathlib.Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    try:
        for path in files:
            with safetensors.safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(name)
                    if name in homes:
                        raise LoadError(f"{name} is in both {homes[name].name} and {path.name}")
                    homes[name], shapes[name] = path, tuple(view.get_shape())
                    item_bytes = _FLOATS.get(view.get_dtype(), 0)
                    sizes[name] = item_bytes
                    for length in shapes[name]:
                        sizes[name] *= length
                    if not item_bytes and not name.endswith(".rotary_emb.inv_freq"):
                        raise LoadError(
                            f"{path.name}: {name} is {view.get_dtype()}; only float weights are read, quantised"
                            " safetensors are not (a GGUF file may be)"
                        )
        assembler = Assembler(spec, shapes, str(folder))
        wanted = [name for name in homes if assembler.wants(name)]
        with bytes_bar(sum(sizes[name] for name in wanted), "loading weights", progress) as bar:
            for path in files:
                with safetensors.safe_open(path, framework="np") as file:
                    for name in file.keys():  # noqa: SIM118
                        if assembler.wants(name):
                            assembler.add(name, file.get_tensor(name))
                            bar.update(sizes[name])
    except (safetensors.SafetensorError, OSError) as error:
        raise LoadError(f"the weights in {folder} cannot be read: {error}") from None
    return assembler.finish()
