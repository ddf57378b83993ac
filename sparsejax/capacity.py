"""How much fits: page size, rows, pages and program buckets from a configuration and the device's memory.

Everything here is decided before a weight is loaded, so `--explain` can print it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

from sparsejax import cost, registry
from sparsejax.arrays import tree_nbytes
from sparsejax.config import EngineConfig
from sparsejax.cost import format_bytes
from sparsejax.errors import ConfigError, MethodError
from sparsejax.geometry import Geometry
from sparsejax.method import Method
from sparsejax.models.registry import get_architecture
from sparsejax.models.spec import ModelSpec
from sparsejax.state import fixed_nbytes, sequence_page_nbytes
from sparsejax.storage import Storage

GIB = 2**30
_CPU_KV_BYTES = 4 * GIB  # on a laptop the cache is a guest
_CPU_KV_SHARE = 0.25
_DEVICE_FRACTION = 0.9


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What an engine will be built with. Sizes in bytes, pages are sequence pages with the null page counted.

    Attributes:
      usable_bytes: memory the engine may use, or None when the KV pool was given directly.
    """

    spec: ModelSpec
    geometry: Geometry
    methods: dict[str, Method]
    storage: Storage
    num_rows: int
    num_sequence_pages: int
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[tuple[int, int], ...]
    weight_bytes: int
    row_bytes: int
    workspace_bytes: int
    page_bytes: int
    usable_bytes: int | None

    @property
    def kv_bytes(self) -> int:
        return self.num_sequence_pages * self.page_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of dense KV that the pool holds."""
        return (self.num_sequence_pages - 1) * self.geometry.page_size

    def lines(self) -> list[tuple[str, str]]:
        """(topic, fact) for people."""
        spec, geometry = self.spec, self.geometry
        names = ", ".join(self.methods)
        model = f"{spec.architecture}, {spec.num_layers} layers, {spec.dtype}, {format_bytes(self.weight_bytes)}"
        fixed = f"{format_bytes(self.weight_bytes)} weights + {format_bytes(self.workspace_bytes)} workspace"
        fixed += f" + {format_bytes(self.row_bytes)} rows + {format_bytes(self.kv_bytes)} KV"
        usable = f"{format_bytes(self.usable_bytes)} usable: " if self.usable_bytes is not None else ""
        length = geometry.max_model_len
        facts = [
            ("model", model),
            ("method", f"{names}; storage {self.storage.name}, {self.storage.bytes_per_token(geometry):,} bytes/token"),
            ("memory", f"{usable}{fixed}"),
            ("capacity", f"{self.kv_tokens:,} tokens of KV, at most {self.num_rows} rows"),
        ]
        row_bytes = self.storage.bytes_per_token(geometry) / geometry.head_pages_per_sequence_page
        for name, method in self.methods.items():
            row = cost.row_cost(method, geometry, length)
            fits = cost.rows_that_fit(method, geometry, self.num_sequence_pages, length)
            step = cost.decode_cost(geometry, self.weight_bytes, 0, row_bytes, [row.read_tokens])
            fact = f"{name}: {fits} rows of {length:,} tokens, {row.resident_tokens:,} resident each; "
            fact += f"a decode step reads {row.read_tokens:,} of them, {format_bytes(step.kv_bytes)}"
            facts.append(("capacity", fact))
        programs = f"decode rows {_buckets(self.decode_buckets)}; prefill {_prefills(self.prefill_buckets)}"
        facts.append(("programs", programs))
        return facts


def _buckets(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _prefills(values: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{rows}x{tokens}" for rows, tokens in values)


def checkpoint_id(model: str | None) -> str:
    """The checkpoint's name in calibration files: the last part of its path or id."""
    return pathlib.PurePath(model).name if model else "default"


def model_hash(spec: ModelSpec) -> str:
    """sha256 of the model's configuration: everything that changes what a cached value means, but the dtype."""
    fields = {name: value for name, value in dataclasses.asdict(spec).items() if name != "dtype"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def resolve_methods(config: EngineConfig) -> tuple[dict[str, Method], Storage]:
    """The served methods by the name requests use, default first, and the storage they share.

    Raises:
      MethodError: unknown or clashing names and knobs; methods with different storages or page sizes.
    """
    params: Mapping[str, Any] = dict(config.method_params)
    wanted = None if config.kv_cache_dtype == "auto" else registry.storage_for_dtype(config.kv_cache_dtype)
    used: set[str] = set()
    methods: dict[str, Method] = {}
    storage: Storage | None = None
    for text in (config.sparse_method, *config.request_methods):
        name = text.replace(" ", "")
        method, found = registry.resolve(name, params, storage.name if storage else wanted, used)
        if wanted is not None and found.name != wanted:
            raise MethodError(
                f"--kv-cache-dtype {config.kv_cache_dtype} asks for storage {wanted}, method {text!r} for {found.name}"
            )
        if storage is not None and found != storage:
            raise MethodError(f"method {text!r} stores KV as {found.name}, {config.sparse_method!r} as {storage.name}")
        storage = found
        methods[name] = method
    registry.refuse_unused(params, used, ", ".join(methods))
    assert storage is not None
    return methods, storage


def resolve_page_size(config: EngineConfig, methods: Mapping[str, Method]) -> int:
    """The pool's page size: what methods insist on, else the flag, else by platform."""
    demands = {name: method.page_size(method.params) for name, method in methods.items()}
    sizes = {size for size in demands.values() if size is not None}
    if config.page_size is not None:
        sizes.add(config.page_size)
    if len(sizes) > 1:
        asked = ", ".join(f"{name} needs {size}" for name, size in demands.items() if size is not None)
        flag = f"--page-size is {config.page_size}; " if config.page_size is not None else ""
        raise MethodError(f"the pool has one page size, but {flag}{asked}")
    if sizes:
        return sizes.pop()
    return 16 if jax.default_backend() == "cpu" else 64


def plan(config: EngineConfig, spec: ModelSpec, checkpoint_id: str) -> Capacity:
    """Sizes everything.

    Raises:
      ConfigError: it does not fit, or settings contradict each other or the model.
    """
    methods, storage = resolve_methods(config)
    max_model_len = config.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ConfigError(f"--max-model-len {max_model_len} is longer than the model's {spec.max_model_len} tokens")
    geometry = spec.geometry(resolve_page_size(config, methods), max_model_len)
    reasons = [reason for method in methods.values() for reason in method.check(method.params, geometry)]
    reasons += storage.check(storage.params, geometry, checkpoint_id, model_hash(spec))
    if reasons:
        raise MethodError("; ".join(dict.fromkeys(reasons)))
    cpu = jax.default_backend() == "cpu"
    num_rows = config.max_num_seqs or (16 if cpu else 128)
    decode_buckets = _decode_buckets(num_rows, 4 if cpu else 2)
    prefill_buckets = _prefill_buckets(config.max_num_batched_tokens, max_model_len, num_rows, cpu)
    check_replays(methods, max_model_len, prefill_buckets)
    weight_bytes = tree_nbytes(get_architecture(spec.architecture).weight_specs(spec))
    served = tuple(methods.values())
    row_bytes = fixed_nbytes(geometry, num_rows, spec.vocab_size, served, storage)
    workspace_bytes = _workspace_bytes(spec, decode_buckets, prefill_buckets)
    page_bytes = sequence_page_nbytes(geometry, served, storage)
    needed = num_rows * geometry.max_pages + 1  # more than every row at full length is of no use
    usable: int | None = None
    if config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes
    elif cpu:
        available = _host_available_bytes()
        if config.memory_fraction is not None:
            usable = int(config.memory_fraction * available)
            kv_bytes = usable - weight_bytes - row_bytes - workspace_bytes
        else:
            kv_bytes = min(_CPU_KV_BYTES, int(_CPU_KV_SHARE * available))
            usable = kv_bytes + weight_bytes + row_bytes + workspace_bytes
    else:
        usable = int((config.memory_fraction or _DEVICE_FRACTION) * _device_bytes())
        kv_bytes = usable - weight_bytes - row_bytes - workspace_bytes
    pages = min(kv_bytes // page_bytes, needed)
    # Less than one full row could not serve the window.
    least = geometry.max_pages + 1
    if cpu and config.kv_cache_memory_bytes is None:
        pages = whole_rows(pages, geometry.max_pages)
    if pages < least:
        source = "--kv-cache-memory-bytes" if config.kv_cache_memory_bytes is not None else "memory"
        raise ConfigError(
            f"{source} leaves {format_bytes(max(kv_bytes, 0))} for KV ({max(pages, 0) * geometry.page_size:,} tokens), "
            f"but one sequence of --max-model-len {max_model_len} needs {format_bytes(least * page_bytes)}; "
            "lower --max-model-len or give more memory"
        )
    return Capacity(
        spec=spec,
        geometry=geometry,
        methods=methods,
        storage=storage,
        num_rows=num_rows,
        num_sequence_pages=pages,
        decode_buckets=decode_buckets,
        prefill_buckets=prefill_buckets,
        weight_bytes=weight_bytes,
        row_bytes=row_bytes,
        workspace_bytes=workspace_bytes,
        page_bytes=page_bytes,
        usable_bytes=usable,
    )


def check_replays(
    methods: Mapping[str, Method], max_model_len: int, prefill_buckets: tuple[tuple[int, int], ...]
) -> None:
    """Raises MethodError if a method reads prompts once more in pieces that no prefill program takes."""
    longest = max(tokens for _, tokens in prefill_buckets)
    for name, method in methods.items():
        replay = max(method.replay_lengths(max_model_len), default=0)
        if replay > longest:
            raise MethodError(
                f"{name} reads prompts once more in pieces of {replay} tokens, but the longest prompt chunk has "
                f"{longest}: make the pieces shorter, or give --max-num-batched-tokens {replay}"
            )


def whole_rows(pages: int, row_pages: int) -> int:
    """Rounds a pool, null page included, down to 1, 2, 3, 4, 6, 8, 12, ... rows of full length, if it holds one.

    What a host has to spare differs from start to start, and compiled programs are only found again for a pool of the
    same size.
    """
    rows = (pages - 1) // row_pages
    if rows < 1:
        return pages
    power = 1 << (rows.bit_length() - 1)
    half = power // 2
    return 1 + (power + half if rows >= power + half else power) * row_pages


def _decode_buckets(num_rows: int, ratio: int) -> tuple[int, ...]:
    sizes, size = [], 1
    while size < num_rows:
        sizes.append(size)
        size *= ratio
    return (*sizes, num_rows)


def _prefill_buckets(
    max_num_batched_tokens: int | None, max_model_len: int, num_rows: int, cpu: bool
) -> tuple[tuple[int, int], ...]:
    """(rows, chunk tokens): short and long chunks of one prompt, and several prompts side by side."""
    budget = max_num_batched_tokens or (512 if cpu else 4096)
    longest = max(16, 1 << (max_model_len - 1).bit_length())
    if cpu:
        shapes = [(1, 32), (1, 128), (1, budget), (4, 32), (4, budget // 4)]
    else:
        shapes = [(1, 64), (1, 512), (1, budget), (4, budget // 4), (16, budget // 16)]
    fitting = {(rows, min(tokens, longest)) for rows, tokens in shapes if rows <= num_rows}
    return tuple(sorted((rows, tokens) for rows, tokens in fitting if tokens >= 1 and rows * tokens <= max(budget, 32)))


def _workspace_bytes(
    spec: ModelSpec, decode_buckets: tuple[int, ...], prefill_buckets: tuple[tuple[int, int], ...]
) -> int:
    """Upper estimate of what one program needs beside its arguments: activations of one layer, and float32 logits."""
    itemsize = 2 if spec.dtype == "bfloat16" else 4
    tokens = max(rows * chunk for rows, chunk in prefill_buckets)
    width = 4 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.num_q_heads * spec.head_dim
    # Attention scores of a chunk against one block of keys, float32, a few copies.
    scores = 3 * tokens * spec.num_q_heads * 512 * 4
    rows = max(decode_buckets[-1], max(rows for rows, _ in prefill_buckets))
    return tokens * width * itemsize + scores + 6 * rows * spec.vocab_size * 4


def _host_available_bytes() -> int:
    """What the host can give without swapping, or what is free where it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text("utf-8"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 * GIB


def _device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError("the device does not say how much memory it has; give --kv-cache-memory-bytes")
    return int(stats["bytes_limit"])
