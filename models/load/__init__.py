"""The door to checkpoints: `load_model` and `load_spec`.

A model is named by nothing (the default model), a GGUF file, a Hugging Face folder, an Orbax folder, a hub id, or, for
random weights, a built-in config. Every refusal is a LoadError that says what to do.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from sparsejax.errors import LoadError
from sparsejax.models.spec import ModelSpec, Weights

if TYPE_CHECKING:
    from sparsejax.models.load.tokenizer import Tokenizer

LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "fp32": "float32", "bf16": "bfloat16"}
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      name: short name for people and for /v1/models.
      spec: its shape.
      weights: the tree of `Architecture.weight_specs`, on the device.
      tokenizer: text to ids.
      generation_defaults: sampling defaults of the checkpoint's generation_config.json, without those it leaves out.
      path: where the weights came from; None for random weights of a built-in config.
    """

    name: str
    spec: ModelSpec
    weights: Weights
    tokenizer: Tokenizer
    generation_defaults: dict[str, Any]
    path: pathlib.Path | None


@dataclasses.dataclass(frozen=True)
class _Source:
    name: str
    load_format: str
    path: pathlib.Path | None


def load_spec(
    model: str | None = None,
    load_format: str = "auto",
    dtype: str | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> ModelSpec:
    """The shape of a model without its weights; arguments as for `load_model`."""
    source = _locate(model, load_format, revision, offline, config_only=True)
    return _spec(source, model, resolve_dtype(dtype))


def load_model(
    model: str | None = None,
    *,
    load_format: str = "auto",
    dtype: str | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    seed: int = 0,
    chat_template: str | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads weights onto the default device, and the tokenizer.

    Args:
      model: None (SmolLM2-135M-Instruct), a GGUF file, a folder (Hugging Face or Orbax) or a hub id; with load_format
        "dummy" a built-in config's name or a config.json.
      load_format: "auto", "safetensors", "gguf", "orbax" or "dummy".
      dtype: "float32", "bfloat16", or None or "auto": float32 on CPU, bfloat16 elsewhere.
      tokenizer: folder or hub id to take the tokenizer from instead.
      revision: branch, tag or commit of a hub id.
      offline: never use the network.
      seed: of random weights.
      chat_template: a Jinja template, or a file with one, instead of the checkpoint's.
      progress: show progress bars on a terminal.

    Raises:
      LoadError: what is wrong with which file or flag, and what to do.
    """
    from sparsejax.models import weight_layout
    from sparsejax.models.load import tokenizer as tokenizers

    template = tokenizers.read_chat_template(chat_template) if chat_template else None
    source = _locate(model, load_format, revision, offline, progress=progress)
    spec = _spec(source, model, resolve_dtype(dtype))
    generation: dict[str, Any] = {}
    if source.load_format == "dummy":
        from sparsejax.models.load import dummy

        weights = dummy.dummy_weights(spec, seed)
        made = dummy.dummy_tokenizer(spec.vocab_size, template) if tokenizer is None else None
    elif source.load_format == "gguf":
        from sparsejax.models.load import gguf_model, gguf_reader, gguf_tokenizer

        file = gguf_reader.read_gguf(_path(source))
        made = gguf_tokenizer.gguf_tokenizer(file.metadata, template) if tokenizer is None else None
        weights = gguf_model.load_gguf_weights(file, spec, progress)
    elif source.load_format == "orbax":
        from sparsejax.models.load import orbax_folder

        folder = _path(source)
        generation = orbax_folder.read_record(folder).get("generation_defaults", {})
        made = orbax_folder.load_orbax_tokenizer(folder, template) if tokenizer is None else None
        weights = orbax_folder.load_orbax_weights(folder, spec)
    else:
        from sparsejax.models.load import hf_folder

        folder = _path(source)
        settings = hf_folder.read_optional_json(folder / "generation_config.json")
        generation = {key: settings[key] for key in _GENERATION_KEYS if settings.get(key) is not None}
        ends = settings if "eos_token_id" in settings else hf_folder.read_json(folder / hf_folder.CONFIG)
        made = None
        if tokenizer is None:
            made = tokenizers.load_tokenizer(folder, offline=True, chat_template=template, generation_config=ends)
        weights = hf_folder.load_safetensors(folder, spec, progress)
    if made is None:
        assert tokenizer is not None
        made = tokenizers.load_tokenizer(tokenizer, offline=offline, chat_template=template)
    return LoadedModel(source.name, spec, weight_layout.place(weights), made, generation, source.path)


def resolve_dtype(dtype: str | None) -> str:
    """A dtype flag to "float32" or "bfloat16"."""
    if dtype is None or dtype == "auto":
        import jax

        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in _DTYPES:
        raise LoadError(f"--dtype {dtype} is not supported: use auto, float32 or bfloat16")
    return _DTYPES[dtype]


def _path(source: _Source) -> pathlib.Path:
    assert source.path is not None
    return source.path


def _spec(source: _Source, model: str | None, dtype: str) -> ModelSpec:
    if source.load_format == "dummy":
        from sparsejax.models.load import dummy

        return dummy.dummy_spec(model or dummy.DEFAULT, dtype)
    if source.load_format == "gguf":
        from sparsejax.models.load import gguf_model, gguf_reader

        return gguf_model.gguf_spec(gguf_reader.read_gguf(_path(source)), dtype)
    if source.load_format == "orbax":
        from sparsejax.models.load import orbax_folder

        return orbax_folder.orbax_spec(_path(source), dtype)
    from sparsejax.models import registry
    from sparsejax.models.load import hf_folder

    return registry.spec_from_config(hf_folder.read_json(_path(source) / hf_folder.CONFIG), dtype)


def _locate(
    model: str | None,
    load_format: str,
    revision: str | None,
    offline: bool,
    config_only: bool = False,
    progress: bool = True,
) -> _Source:
    """Which files, in which format; downloads them if need be."""
    from sparsejax.models.load import hub

    if load_format not in LOAD_FORMATS:
        raise LoadError(f"--load-format {load_format} is unknown: use {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        return _locate_dummy(model)
    if model is None:
        if load_format not in ("auto", "gguf"):
            raise LoadError(f"--load-format {load_format} needs a --model; the default model is a GGUF file")
        from sparsejax.models.load import default_model

        path = default_model.fetch_default_model(offline=offline, progress=progress)
        return _Source(default_model.NAME, "gguf", path)
    path = pathlib.Path(model).expanduser()
    if not path.exists():
        if path.suffix == ".gguf" or not hub.is_hub_id(model):
            raise LoadError(
                f"--model {model} does not exist: give a GGUF file, a folder with config.json and safetensors, an Orbax"
                " folder of sparsejax, or a hub id (owner/name)"
            )
        if load_format in ("gguf", "orbax"):
            raise LoadError(f"--load-format {load_format} needs a local path; {model} does not exist")
        folder = hub.fetch_snapshot(model, revision=revision, offline=offline, config_only=config_only)
        return _Source(model, "safetensors", folder)
    return _Source(path.resolve().stem if path.is_file() else path.resolve().name, _format_of(path, load_format), path)


def _locate_dummy(model: str | None) -> _Source:
    from sparsejax.models.load import dummy

    name = model or dummy.DEFAULT
    path = pathlib.Path(name).expanduser()
    known = name in dummy.dummy_names()
    return _Source(name if known else path.resolve().name, "dummy", None if known else path)


def _format_of(path: pathlib.Path, load_format: str) -> str:
    from sparsejax.models.load import hf_folder, orbax_folder

    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        found = "gguf" if is_gguf else None
        shown = "a GGUF file" if is_gguf else "a file that is not GGUF"
    elif orbax_folder.is_orbax_folder(path):
        found, shown = "orbax", "an Orbax folder"
    elif (path / hf_folder.CONFIG).is_file():
        found, shown = "safetensors", "a Hugging Face folder"
    else:
        ggufs = sorted(path.glob("*.gguf"))
        hint = f" (it holds {ggufs[0].name}: name that file)" if ggufs else ""
        raise LoadError(f"--model {path} has neither config.json nor {orbax_folder.SPEC}{hint}")
    if load_format not in ("auto", found) or found is None:
        wanted = "" if load_format == "auto" else f", not {load_format}"
        raise LoadError(f"--model {path} is {shown}{wanted}")
    return found
