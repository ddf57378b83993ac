"""Command line, environment and YAML, all generated from the config dataclasses.

A setting comes from its flag, else from SPARSEJAX_<FLAG>, else from the --config file, else from its default. Unknown
names are errors that suggest the nearest known one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import sparsejax
from sparsejax import config
from sparsejax.config import Progress
from sparsejax.errors import ConfigError

ENV_PREFIX = "SPARSEJAX_"

_OUTER_COMMA = re.compile(r",(?![^()]*\))")
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

_GROUPS = {
    "model": "model",
    "sparsity": "sparse method",
    "memory": "memory and batching",
    "chains": "conversations (chains)",
    "prefix cache": "shared beginnings (prefix cache)",
    "compilation": "compilation",
    "server": "HTTP server",
}

Knobs = Mapping[str, Sequence[tuple[str, dataclasses.Field[Any]]]]
"""Knobs of sparse methods by name: which members have each, with the field (see `sparsejax.registry.method_params`)."""


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line, suggests the nearest flag and exits with 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n(--help lists all flags)\n")

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Like parse_args, with suggestions for unknown flags."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            what = "unknown flag" if flag.startswith("-") else "unexpected argument"
            self.error(f"{what} {flag}{config.nearest(flag, known)}")
        return args


def add_settings(parser: argparse.ArgumentParser, *config_types: type, knobs: Knobs | None = None) -> None:
    """Adds one flag per field (and alias) of the dataclasses, and one per method knob."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for config_type in config_types:
        hints = config.field_types(config_type)
        for field in dataclasses.fields(config_type):
            title = _GROUPS[field.metadata["group"]]
            group = groups.setdefault(title, parser.add_argument_group(title))
            names = [config.flag_name(field.name), *(f"--{alias}" for alias in field.metadata["aliases"])]
            _add_flag(group, field, hints[field.name], names)
    if knobs:
        group = parser.add_argument_group("knobs of sparse methods (--list-methods shows whose)")
        for name, owners in sorted(knobs.items()):
            flag = config.flag_name(name)
            if flag not in parser._option_string_actions:
                help_text = "; ".join(_knob_help(member, field) for member, field in owners)
                options: dict[str, Any] = {"dest": f"knob:{name}", "default": argparse.SUPPRESS, "metavar": "X"}
                group.add_argument(flag, help=help_text.replace("%", "%%"), **options)


def _knob_help(member: str, field: dataclasses.Field[Any]) -> str:
    unit = f" [{field.metadata['unit']}]" if field.metadata.get("unit") else ""
    return f"{member}: {field.metadata.get('help', '')}{unit} (default: {field.default})"


def _add_flag(group: Any, field: dataclasses.Field[Any], annotation: Any, names: list[str]) -> None:
    meta = field.metadata
    unit = f" [{meta['unit']}]" if meta["unit"] else ""
    default = "" if field.default in (None, (), "") else f" (default: {_shown(field.default)})"
    options: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": f"{meta['help']}{unit}{default}".replace("%", "%%"),
    }
    if annotation is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif isinstance(field.default, tuple) and meta["kind"] != "json":
        options |= {"action": "append", "metavar": meta["metavar"] or "NAME=VALUE"}
    elif meta["choices"]:
        options["metavar"] = "{" + ",".join(meta["choices"]) + "}"
    else:
        options["metavar"] = meta["metavar"] or field.name.rpartition("_")[2].upper()
    group.add_argument(*names, **options)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def resolve(
    args: Mapping[str, Any],
    *config_types: type,
    knobs: Knobs | None = None,
    environ: Mapping[str, str] | None = None,
    yaml_path: str | None = None,
) -> tuple[Any, ...]:
    """One config per type from flags (`args`: field name -> raw value), environment and YAML.

    Raises ConfigError naming the flag, variable or key at fault.
    """
    knobs = knobs or {}
    environ = os.environ if environ is None else environ
    hints = {name: hint for config_type in config_types for name, hint in config.field_types(config_type).items()}
    fields = {field.name: field for config_type in config_types for field in dataclasses.fields(config_type)}
    by_any_name = config.fields_by_name(*config_types)
    values: dict[str, Any] = {}
    params: dict[str, Any] = {}

    def take(name: str, raw: Any, source: str) -> None:
        value = parse_value(fields[name], hints[name], raw, source)
        if name == "method_params":
            params.update(value)
        else:
            values[name] = value

    def knob_value(raw: Any) -> Any:
        return parse_scalar(raw) if isinstance(raw, str) else raw

    for key, raw in _read_yaml(yaml_path).items():
        name = str(key).replace("-", "_")
        if name in by_any_name:
            take(by_any_name[name].name, raw, f"{key} in {yaml_path}")
        elif name in knobs:
            params[name] = knob_value(raw)
        else:
            known = [*by_any_name, *knobs]
            raise ConfigError(f"unknown key {key} in {yaml_path}{config.nearest(name, known)}")
    for name in (*by_any_name, *knobs):
        variable = ENV_PREFIX + name.upper()
        if variable not in environ:
            continue
        if name in by_any_name:
            take(by_any_name[name].name, environ[variable], variable)
        else:
            params[name] = knob_value(environ[variable])
    for name, raw in args.items():
        if name in fields:
            take(name, raw, config.flag_name(name))
        elif name.startswith("knob:"):
            params[name.removeprefix("knob:")] = knob_value(raw)
    for name in params:
        # "member.knob" goes to one member only.
        if knobs and name.rpartition(".")[2] not in knobs:
            raise ConfigError(f"unknown method parameter {name}{config.nearest(name, knobs)}")
    if params:
        values["method_params"] = tuple(params.items())
    made = []
    for config_type in config_types:
        own = {field.name for field in dataclasses.fields(config_type)}
        made.append(config_type(**{name: value for name, value in values.items() if name in own}))
    return tuple(made)


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        loaded = yaml.safe_load(pathlib.Path(path).read_text("utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path} is not valid YAML: {e}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold a mapping of settings, got {type(loaded).__name__}")
    return loaded


@dataclasses.dataclass(frozen=True)
class ServeCommand:
    """What `python -m sparsejax.serve` was asked to do."""

    engine: config.EngineConfig
    server: config.ServerConfig
    explain: bool = False
    list_methods: bool = False


def method_knobs() -> Knobs:
    """Knobs of every method and storage, by name. Imports the methods, and so JAX."""
    from sparsejax import registry

    return registry.method_params()


def parse_serve(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "python -m sparsejax.serve",
    knobs: Knobs | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServeCommand:
    """Parses the server's command line. A wrong setting prints one line and exits with 2."""
    knobs = method_knobs() if knobs is None else knobs
    parser = Parser(
        prog=prog,
        usage="%(prog)s [MODEL] [flags]",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        epilog=f"Each flag is also {ENV_PREFIX}<FLAG> in the environment and a key of the --config file.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", default=None, help="the same as --model")
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file with settings")
    parser.add_argument("--explain", action="store_true", help="print memory, buckets and kernels, load nothing, exit")
    parser.add_argument("--list-methods", action="store_true", help="print the sparse methods and their knobs, exit")
    parser.add_argument("--version", action="version", version=f"sparsejax {sparsejax.__version__}")
    add_settings(parser, config.EngineConfig, config.ServerConfig, knobs=knobs)
    args = vars(parser.parse(argv))
    positional = args.pop("positional_model")
    if positional is not None and args.setdefault("model", positional) != positional:
        parser.error(f"the model is given twice: {positional} and --model {args['model']}")
    try:
        engine, server = resolve(
            args,
            config.EngineConfig,
            config.ServerConfig,
            knobs=knobs,
            environ=environ,
            yaml_path=args["config"],
        )
    except ConfigError as e:
        parser.error(str(e))
    return ServeCommand(engine, server, args["explain"], args["list_methods"])


def parse_value(field: dataclasses.Field[Any], annotation: Any, raw: Any, source: str) -> Any:
    """Converts a string (flag, environment) or a YAML value to the field's type.

    `source` names where it came from in errors.
    """
    kind = field.metadata["kind"]
    if kind == "pairs":
        return _parse_pairs(raw, source)
    if kind == "json":
        return _parse_json(raw, source)
    base, optional = config.without_none(annotation)
    if optional and (raw is None or (isinstance(raw, str) and raw.lower() in ("none", "auto"))):
        return None
    if typing.get_origin(base) is tuple:
        items = [str(item) for item in (raw if isinstance(raw, (list, tuple)) else [raw])]
        if kind == "verbatim":
            return tuple(items)
        # Commas inside brackets belong to a method's knobs: a(x=1,y=2),b.
        return tuple(part.strip() for item in items for part in _OUTER_COMMA.split(item) if part.strip())
    if base is bool:
        return _parse_bool(raw, source)
    if base is int:
        return _parse_bytes(raw, source) if kind == "bytes" else _parse_int(raw, source)
    if base is float:
        try:
            if isinstance(raw, bool):
                raise ValueError
            return float(raw)
        except (TypeError, ValueError):
            raise ConfigError(f"{source} must be a number, got {raw!r}") from None
    if isinstance(raw, bool) and field.metadata["choices"] == ("on", "off"):
        return "on" if raw else "off"  # YAML takes these words for its own
    if not isinstance(raw, str):
        raise ConfigError(f"{source} must be a string, got {raw!r}")
    return raw


def parse_scalar(text: str) -> Any:
    """A knob's value as written: integer, number, true/false, else the string."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _parse_bool(raw: Any, source: str) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{source} must be true or false, got {raw!r}")


def _parse_int(raw: Any, source: str) -> int:
    try:
        if isinstance(raw, (bool, float)):
            raise ValueError
        text = str(raw).strip().lower()
        # 32k is how context lengths are written.
        return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    except ValueError:
        raise ConfigError(f"{source} must be an integer, got {raw!r}") from None


def _parse_bytes(raw: Any, source: str) -> int:
    text = str(raw).strip().lower().replace(" ", "")
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = _SIZE_UNITS.get(text[len(digits) :])
    try:
        if unit is None or isinstance(raw, bool):
            raise ValueError
        return int(float(digits) * unit) if "." in digits else int(digits) * unit
    except (ValueError, OverflowError):
        raise ConfigError(f"{source} must be a size such as 4GiB, 500MB or a number of bytes, got {raw!r}") from None


def _parse_pairs(raw: Any, source: str) -> tuple[tuple[str, Any], ...]:
    if isinstance(raw, Mapping):
        return tuple((str(k).replace("-", "_"), v) for k, v in raw.items())
    pairs = []
    for item in raw if isinstance(raw, (list, tuple)) else str(raw).split(","):
        name, equals, value = str(item).partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{source} must be NAME=VALUE, got {item!r}")
        pairs.append((name.strip().replace("-", "_"), parse_scalar(value)))
    return tuple(pairs)


def _parse_json(raw: Any, source: str) -> tuple[tuple[str, Any], ...]:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError as e:
        raise ConfigError(f"{source} is not valid JSON: {e}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source} must be a JSON object, got {raw!r}")
    return tuple(value.items())


class Console:
    """Shows start-up: bars on a terminal, plain lines elsewhere."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._bar: Any = None
        self._step = ""

    def __call__(self, progress: Progress) -> None:
        if progress.total == 0:
            self._finish()
            self._line(f"{progress.step:<9} {progress.detail}")
        elif self._terminal:
            self._show_bar(progress)
        elif progress.unit != "bytes" or progress.step != self._step or progress.done == progress.total:
            self._step = "" if progress.done == progress.total else progress.step
            done = f"{progress.done}/{progress.total} {progress.unit}"
            self._line(f"{progress.step:<9} {done}  {progress.detail}".rstrip())

    def close(self) -> None:
        self._finish()

    def _show_bar(self, progress: Progress) -> None:
        from tqdm import tqdm

        if self._bar is None or self._step != progress.step:
            self._finish()
            self._step = progress.step
            size = progress.unit == "bytes"
            self._bar = tqdm(
                total=progress.total,
                desc=f"{progress.step:<9}",
                unit="B" if size else f" {progress.unit}",
                unit_scale=size,
                unit_divisor=1024,
                file=self._stream,
                dynamic_ncols=True,
            )
        self._bar.set_postfix_str(progress.detail, refresh=False)
        self._bar.update(progress.done - self._bar.n)
        if progress.done >= progress.total:
            self._finish()

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar, self._step = None, ""

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
