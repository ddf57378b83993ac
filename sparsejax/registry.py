"""Finds methods and storages by looking into their folders, and turns "a+b+c" into one method and one storage.

A file in `methods/` or `storages/` exports `PARAMS` (a frozen dataclass type) and `build(params)`; optionally
`ALIASES`, `NOTES`, `sized` and `SAMPLES` (see `Entry`). Flags, docs, benchmarks and tests are derived from what is
found here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from sparsejax import combine
from sparsejax.errors import MethodError
from sparsejax.method import Method
from sparsejax.storage import Storage

DEFAULT_METHOD = "dense"
DEFAULT_STORAGE = "plain"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a file declares.

    Attributes:
      name: the file's name.
      kind: "method" or "storage".
      axis: the method's axis, or "storage".
      params_type: dataclass of knobs; field metadata carries `help` and `unit`.
      build: params -> Method or Storage.
      aliases: other names.
      summary, paper: texts of the default instance.
      notes: what its page in docs/methods.md says, by heading; line breaks mean nothing.
      sized: rows -> params with which a request holds about so many rows in each layer, on average, or reads so many
        where nothing is evicted; all that is no size stays at its default. None where rows are not what one chooses.
      samples: params that are worth measuring where there is no `sized`.
    """

    name: str
    kind: str
    axis: str
    params_type: type
    build: Callable[[Any], Any]
    aliases: tuple[str, ...]
    summary: str
    paper: str
    notes: Mapping[str, str]
    sized: Callable[[int], Any] | None
    samples: tuple[Any, ...]


@functools.cache
def available() -> dict[str, Entry]:
    """Every method and storage by name, methods first, in alphabetical order."""
    entries: dict[str, Entry] = {}
    for kind, folder in (("method", "methods"), ("storage", "storages")):
        package = importlib.import_module(f"sparsejax.{folder}")
        for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
            module = importlib.import_module(f"{package.__name__}.{module_info.name}")
            default = module.build(module.PARAMS())
            entries[module_info.name] = Entry(
                name=module_info.name,
                kind=kind,
                axis=getattr(default, "axis", "storage"),
                params_type=module.PARAMS,
                build=module.build,
                aliases=tuple(getattr(module, "ALIASES", ())),
                summary=default.summary,
                paper=default.paper,
                notes=getattr(module, "NOTES", {}),
                sized=getattr(module, "sized", None),
                samples=tuple(getattr(module, "SAMPLES", (module.PARAMS(),))),
            )
    return entries


def method_params() -> dict[str, list[tuple[str, dataclasses.Field]]]:
    """Every knob by name: which members have it, with the dataclass field of each."""
    knobs: dict[str, list[tuple[str, dataclasses.Field]]] = {}
    for entry in available().values():
        for field in dataclasses.fields(entry.params_type):
            knobs.setdefault(field.name, []).append((entry.name, field))
    return knobs


def storage_for_dtype(kv_cache_dtype: str) -> str:
    """The storage that a --kv-cache-dtype value names.

    Raises:
      MethodError: listing what is known.
    """
    storages = {name: entry for name, entry in available().items() if entry.kind == "storage"}
    for name, entry in storages.items():
        if kv_cache_dtype == name or kv_cache_dtype in entry.aliases:
            return name
    known = sorted(alias for name, entry in storages.items() for alias in (name, *entry.aliases))
    raise MethodError(f"--kv-cache-dtype {kv_cache_dtype!r} is not known; choose one of {', '.join(known)}")


def _entry(name: str) -> Entry:
    entries = available()
    if name in entries:
        return entries[name]
    for entry in entries.values():
        if name in entry.aliases and entry.kind == "method":
            return entry
    close = difflib.get_close_matches(name, entries, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise MethodError(f"sparse method {name!r} is not known{hint} (known: {', '.join(entries)})")


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _split(spec: str) -> list[tuple[str, dict[str, Any]]]:
    """Splits "a(x=1,y=2)+b" into [("a", {"x": 1, "y": 2}), ("b", {})]."""
    members = []
    for part in re.split(r"\+(?![^()]*\))", spec.strip()):
        match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", part)
        if match is None:
            raise MethodError(f"can't read {part!r} in sparse method {spec!r}; write name or name(knob=value, ...)")
        knobs = {}
        for pair in filter(None, (piece.strip() for piece in (match[2] or "").split(","))):
            key, equals, value = pair.partition("=")
            if not equals:
                raise MethodError(f"can't read {pair!r} in sparse method {spec!r}; write knob=value")
            knobs[key.strip()] = _parse_value(value.strip())
        members.append((match[1], knobs))
    return members


def resolve(
    spec: str, params: Mapping[str, Any] | None = None, storage: str | None = None, used: set[str] | None = None
) -> tuple[Method, Storage]:
    """The method and storage that a composition names.

    Args:
      spec: names joined by "+", each optionally with its own knobs: "a(decode_keep_tokens=960)+b".
      params: knobs by name, given to every member that has them ("member.knob" to one member only). Knobs in `spec`
        win.
      storage: name of the storage if `spec` names none.
      used: collects the params that applied; if given, the caller judges those that did not.

    Raises:
      MethodError: unknown names or knobs, bad values, members that don't go together.
    """
    params = dict(params or {})
    strict, used = used is None, set() if used is None else used
    methods: list[Method] = []
    storages: list[Storage] = []
    members = _split(spec)
    if storage and not any(_entry(name).kind == "storage" for name, _ in members):
        members.append((storage, {}))
    for name, own in members:
        entry = _entry(name)
        fields = {field.name for field in dataclasses.fields(entry.params_type)}
        values = {key: value for key, value in params.items() if key in fields}
        for key, value in params.items():
            prefix, dot, knob = key.partition(".")
            if dot and prefix in (entry.name, *entry.aliases):
                own = {knob: value, **own}
                used.add(key)
        used |= set(values)
        unknown = sorted(set(own) - fields)
        if unknown:
            allowed = ", ".join(sorted(fields)) or "none"
            raise MethodError(f"{entry.name} has no parameter {unknown[0]!r} (its parameters: {allowed})")
        built = entry.build(entry.params_type(**{**values, **own}))
        (methods if entry.kind == "method" else storages).append(built)
    if strict:
        refuse_unused(params, used, spec)
    if len(storages) > 1:
        raise MethodError(f"{' and '.join(s.name for s in storages)} both decide how rows are stored; choose one")
    if not methods:
        methods.append(_build_default(DEFAULT_METHOD))
    chosen = storages[0] if storages else _build_default(DEFAULT_STORAGE)
    method = combine.compose(tuple(methods))
    if method.rotary == "row" and not chosen.exact:
        raise MethodError(
            f"{method.name} turns stored keys whenever rows move up, and {chosen.name} would round them again each time"
        )
    return method, chosen


def sized(composition: str, rows: int) -> str:
    """A composition whose requests hold about `rows` rows in each layer, or read so many if nothing is evicted.

    Where one member evicts and another selects, the latter reads half of what is held. Knobs that the composition gives
    stay as given.

    Raises:
      MethodError: unknown members, no member that has a size, or one that can't be so small.
    """
    members = [(_entry(name), own) for name, own in _split(composition)]
    evicting = any(entry.sized and entry.axis == "retention" for entry, _ in members)
    parts = []
    for entry, own in members:
        params = entry.params_type() if entry.sized is None else entry.sized(_share(entry, rows, evicting))
        parts.append(spec_of(entry, dataclasses.replace(params, **own) if own else params))
    if all(entry.sized is None for entry, _ in members):
        raise MethodError(f"{composition!r} has no size to choose")
    return "+".join(parts)


def _share(entry: Entry, rows: int, evicting: bool) -> int:
    return rows // 2 if evicting and entry.axis == "selection" else rows


def spec_of(entry: Entry, params: Any) -> str:
    """What one writes for a member with these params: its name, and the knobs that differ from their defaults."""
    texts = {True: "true", False: "false", None: "none"}
    knobs = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            text = texts[value] if value is None or isinstance(value, bool) else value
            if isinstance(value, tuple):
                text = ";".join(map(str, value))  # a comma would end the knob
            knobs.append(f"{field.name}={text}")
    return f"{entry.name}({','.join(knobs)})" if knobs else entry.name


def refuse_unused(params: Mapping[str, Any], used: set[str], spec: str) -> None:
    """Raises MethodError for a knob that no member has."""
    for name in sorted(set(params) - used):
        owners = ", ".join(owner for owner, _ in method_params().get(name, ()))
        reason = f"it belongs to {owners}" if owners else "no method has it"
        raise MethodError(f"parameter {name!r} does not apply to {spec!r}: {reason}")


def _build_default(name: str) -> typing.Any:
    entry = available()[name]
    return entry.build(entry.params_type())
