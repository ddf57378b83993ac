"""Every setting, once. Standard library only.

A field's name, type, default and metadata make its command-line flag, environment variable, YAML key, check and help
text (`sparsejax.cli`); nothing about a setting is written twice. Values are checked when a config is made, so the
Python API and the command line refuse the same things in the same words.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from sparsejax.errors import ConfigError

Config = TypeVar("Config", "EngineConfig", "ServerConfig")


def _setting(
    default: Any,
    help: str,
    *,
    group: str,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    kind: str = "",
    metavar: str = "",
) -> Any:
    """A dataclass field with what the command line and the checks need.

    Attributes of `metadata`: `aliases` are other flag spellings without dashes, `low` and `high` are inclusive limits,
    `kind` is "bytes" (accepts 4GiB), "json", "pairs" (NAME=VALUE, may be repeated), "verbatim" (a list whose items may
    contain commas) or empty.
    """
    metadata = {
        "help": help,
        "group": group,
        "aliases": aliases,
        "choices": choices,
        "low": low,
        "high": high,
        "unit": unit,
        "kind": kind,
        "metavar": metavar,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What to load and how to run it."""

    # Model
    model: str | None = _setting(
        None, "local folder, GGUF file or Hugging Face id; without it, a small default model is fetched", group="model"
    )
    tokenizer: str | None = _setting(None, "folder or id of the tokenizer, if not the model's own", group="model")
    revision: str | None = _setting(None, "branch, tag or commit of a Hugging Face id", group="model")
    offline: bool = _setting(False, "never use the network", group="model")
    load_format: str = _setting(
        "auto",
        "checkpoint format; dummy makes random weights from the model's config",
        group="model",
        choices=("auto", "safetensors", "gguf", "orbax", "dummy"),
    )
    dtype: str = _setting(
        "auto",
        "of weights and computation; auto is float32 on CPU and bfloat16 elsewhere",
        group="model",
        choices=("auto", "float32", "bfloat16"),
    )
    max_model_len: int | None = _setting(
        None,
        "longest prompt and answer together; default: the model's own",
        group="model",
        low=1,
        unit="tokens",
    )
    chat_template: str | None = _setting(
        None, "file with a Jinja chat template, or the template itself, instead of the checkpoint's", group="model"
    )
    generation_config: str = _setting(
        "auto",
        "auto takes default sampling parameters from the checkpoint, none takes the API's",
        group="model",
        choices=("auto", "none"),
    )
    seed: int = _setting(0, "of random weights (--load-format dummy)", group="model", low=0, high=2**63 - 1)
    # Sparse method
    sparse_method: str = _setting("dense", "sparse method, or several as a+b (see --list-methods)", group="sparsity")
    request_methods: tuple[str, ...] = _setting(
        (),
        "further methods that requests may choose, with commas between them; they must share a storage",
        group="sparsity",
        metavar="METHOD",
    )
    method_params: tuple[tuple[str, Any], ...] = _setting(
        (),
        "a method's knob; each also has its own flag",
        group="sparsity",
        aliases=("method-param",),
        kind="pairs",
    )
    kv_cache_dtype: str = _setting(
        "auto", "how KV is stored, by dtype name; auto is the sparse method's storage", group="sparsity"
    )
    # Memory and batch
    page_size: int | None = _setting(
        None,
        "rows of one page; default: the method's own, else 16 on CPU and 64 elsewhere",
        group="memory",
        aliases=("block-size",),
        low=1,
        high=1024,
        unit="tokens",
    )
    memory_fraction: float | None = _setting(
        None,
        "share of the device's memory to use; default: by device",
        group="memory",
        aliases=("gpu-memory-utilization",),
        low=0.01,
        high=1.0,
    )
    kv_cache_memory_bytes: int | None = _setting(
        None,
        "KV pool, e.g. 4GiB; overrides --memory-fraction",
        group="memory",
        low=1,
        unit="bytes",
        kind="bytes",
    )
    max_num_seqs: int | None = _setting(
        None, "most sequences decoded together; default: from memory", group="memory", low=1, high=4096
    )
    max_num_batched_tokens: int | None = _setting(
        None, "most prompt tokens of one prefill step; default: by device", group="memory", low=1, unit="tokens"
    )
    max_waiting: int | None = _setting(
        None, "requests that may wait before new ones get 429; default: 4 per row, at least 64", group="memory", low=1
    )
    queue_timeout_s: float = _setting(
        600.0, "longest wait before a request gets 503", group="memory", low=0.1, unit="s"
    )
    stall_target_ms: float = _setting(
        100.0, "longest prefill step while other requests decode", group="memory", low=0.001, unit="ms"
    )
    swap_bytes: int = _setting(
        4 << 30, "host memory for swapped-out requests", group="memory", low=0, unit="bytes", kind="bytes"
    )
    # Chains
    chain_cache: str = _setting(
        "on", "keep the memory of conversations between their turns", group="chains", choices=("on", "off")
    )
    chain_host_bytes: int = _setting(
        4 << 30,
        "host memory for idle chains that the KV pool has no room for",
        group="chains",
        low=0,
        unit="bytes",
        kind="bytes",
    )
    recall_host_bytes: int = _setting(
        0,
        "host memory for rows that methods drop from chains with recall; 0: there is no recall",
        group="chains",
        low=0,
        unit="bytes",
        kind="bytes",
    )
    chain_dir: str | None = _setting(
        None, "directory in which chains outlive the server; default: they don't", group="chains", metavar="DIR"
    )
    chain_disk_bytes: int = _setting(
        64 << 30, "disk space for chains in --chain-dir", group="chains", low=0, unit="bytes", kind="bytes"
    )
    chain_disk_ttl_s: float = _setting(
        7 * 86400.0, "idle time after which a chain on disk goes", group="chains", low=0.001, unit="s"
    )
    chain_ttl_s: float = _setting(
        3600.0,
        "idle time after which a chain goes a tier down, at last away",
        group="chains",
        low=0.001,
        unit="s",
    )
    chain_checkpoints: int = _setting(
        2, "earlier states of each kind that a chain keeps; 0 for none", group="chains", low=0, high=128
    )
    chain_queue_timeout_s: float | None = _setting(
        None,
        "longest wait before a turn that names its chain gets 503; default: --queue-timeout-s",
        group="chains",
        low=0.1,
        unit="s",
    )
    # Prefix cache
    prefix_cache: bool = _setting(
        True, "requests that begin alike share the rows of what they begin with", group="prefix cache"
    )
    tensor_parallel_size: int = _setting(1, "devices that share each layer; only 1 works so far", group="memory", low=1)
    # Compilation
    precompile: str = _setting(
        "all",
        "programs compiled before ready: all, the most used (lazy, the rest at first use), or none",
        group="compilation",
        choices=("all", "lazy", "none"),
    )
    fail_on_retrace: bool = _setting(False, "stop if a program is compiled after start-up", group="compilation")
    attention_impl: str = _setting(
        "auto", "kernel implementation, by name or operation=name,...; auto is the best that fits", group="compilation"
    )
    compilation_cache: bool = _setting(True, "keep compiled programs on disk", group="compilation")
    compilation_cache_dir: str | None = _setting(None, "where; default: the user's cache folder", group="compilation")

    def __post_init__(self) -> None:
        _check(self)
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size}: this version runs on one device; leave it at 1"
            )


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How the HTTP server answers."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for all", group="server")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", group="server", low=0, high=65535)
    uds: str | None = _setting(None, "Unix socket to listen on instead", group="server")
    api_key: tuple[str, ...] = _setting(
        (),
        "key that clients must send; may be repeated; default: none",
        group="server",
        kind="verbatim",
        metavar="KEY",
    )
    served_model_name: tuple[str, ...] = _setting(
        (), "names under which the model answers; default: the model's name", group="server", metavar="NAME"
    )
    allowed_origins: tuple[str, ...] = _setting(
        ("*",), "origins of web pages that may call the server", group="server", metavar="ORIGIN"
    )
    root_path: str = _setting("", "path prefix behind a reverse proxy", group="server")
    ssl_keyfile: str | None = _setting(None, "TLS key", group="server")
    ssl_certfile: str | None = _setting(None, "TLS certificate", group="server")
    default_chat_template_kwargs: tuple[tuple[str, Any], ...] = _setting(
        (), "JSON object of variables for the chat template", group="server", kind="json", metavar="JSON"
    )
    strict_requests: bool = _setting(
        False, "refuse requests with unknown fields instead of naming them in a header", group="server"
    )
    max_body_bytes: int = _setting(
        32 * 2**20, "largest request body", group="server", low=1024, unit="bytes", kind="bytes"
    )
    drain_timeout_s: float = _setting(
        30.0, "time that running requests get to finish at shutdown", group="server", low=0.0, unit="s"
    )
    enable_log_requests: bool = _setting(False, "log each request (sizes, not contents)", group="server")
    disable_log_stats: bool = _setting(False, "no periodic status line", group="server")

    def __post_init__(self) -> None:
        _check(self)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty; leave it out to need no key")


@dataclasses.dataclass(frozen=True)
class Progress:
    """One report of a start-up under way, given to the `progress` callback of whoever builds the engine.

    Attributes:
      step: what goes on ("download", "load", "compile"), or what a fact is about ("model", "memory").
      done, total: in `unit`; with total 0 this is a fact that `detail` states in full.
      unit: "bytes", "programs", ...
      detail: what is being worked on, or the fact.
    """

    step: str = "start"
    done: int = 0
    total: int = 0
    unit: str = ""
    detail: str = ""


def flag_name(field_name: str) -> str:
    """The flag of a field: `max_model_len` is --max-model-len."""
    return "--" + field_name.replace("_", "-")


def field_types(config_type: type) -> dict[str, Any]:
    """Resolved annotation of each field."""
    return typing.get_type_hints(config_type)


def fields_by_name(*config_types: type) -> dict[str, dataclasses.Field[Any]]:
    """All fields by name and by alias (underscored)."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for config_type in config_types:
        for field in dataclasses.fields(config_type):
            found[field.name] = field
            for alias in field.metadata["aliases"]:
                found[alias.replace("-", "_")] = field
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """', did you mean X?' or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {match[0]}?" if match else ""


def engine_config(options: Mapping[str, Any], method_knobs: Iterable[str] = ()) -> EngineConfig:
    """An EngineConfig from Python keyword arguments; knobs of methods may be given by name.

    Raises ConfigError for an unknown name, with the nearest known one.
    """
    fields = fields_by_name(EngineConfig)
    knobs = set(method_knobs)
    values: dict[str, Any] = {}
    params = dict(_pairs(options.get("method_params") or ()))
    for name, value in options.items():
        if name in knobs:
            params[name] = value
        elif name not in fields:
            raise ConfigError(f"unknown option {name}{nearest(name, [*fields, *knobs])}")
        elif fields[name].name != "method_params":
            values[fields[name].name] = value
    return EngineConfig(**values, method_params=tuple(params.items()))


def _pairs(value: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(value.items()) if isinstance(value, Mapping) else tuple((name, item) for name, item in value)


def without_none(annotation: Any) -> tuple[Any, bool]:
    """The type beside None, and whether None is allowed."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return inner[0], len(inner) < len(typing.get_args(annotation))
    return annotation, False


def _check(config: Any) -> None:
    """Types, choices and limits of every field; normalises lists and mappings to tuples."""
    hints = field_types(type(config))
    for field in dataclasses.fields(config):
        value, meta, name = getattr(config, field.name), field.metadata, flag_name(field.name)
        base, optional = without_none(hints[field.name])
        if value is None and optional:
            continue
        if isinstance(value, bool) and meta["choices"] == ("on", "off"):
            value = "on" if value else "off"
            object.__setattr__(config, field.name, value)
        if meta["kind"] in ("pairs", "json"):
            object.__setattr__(config, field.name, _pairs(value))
        elif typing.get_origin(base) is tuple:
            items: tuple[Any, ...] = (value,) if isinstance(value, str) else tuple(cast("Iterable[Any]", value or ()))
            if not all(isinstance(item, str) for item in items):
                raise ConfigError(f"{name} must be strings, got {value!r}")
            object.__setattr__(config, field.name, items)
        elif base is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, field.name, float(value))
        elif not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
            raise ConfigError(f"{name} must be {_TYPE_WORDS[base]}, got {value!r}")
        _check_limits(name, getattr(config, field.name), meta)


_TYPE_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _check_limits(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(
            f"{name} must be one of {', '.join(meta['choices'])}, got {value!r}{nearest(str(value), meta['choices'])}"
        )
    low, high = meta["low"], meta["high"]
    unit = f" {meta['unit']}" if meta["unit"] else ""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}")
    if low is not None and value < low:
        raise ConfigError(f"{name} must be at least {low:g}{unit}, got {value}")
    if high is not None and value > high:
        raise ConfigError(f"{name} must be at most {high:g}{unit}, got {value}")
