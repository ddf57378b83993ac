"""From a configuration to a running engine: size, load, allocate, compile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from sparsejax import combine
from sparsejax.array_files import OrbaxFiles
from sparsejax.cache.chain_store import ChainStore
from sparsejax.capacity import Capacity, check_replays, checkpoint_id, plan
from sparsejax.chain_disk import Disk
from sparsejax.config import EngineConfig, Progress
from sparsejax.engine import Engine
from sparsejax.errors import ConfigError
from sparsejax.identity import identity, knobs
from sparsejax.metrics import EngineMetrics
from sparsejax.models import load
from sparsejax.models.load.default_model import cache_dir
from sparsejax.pallas_kernels import api
from sparsejax.plans import RunnerLimits
from sparsejax.programs import compile_workers
from sparsejax.replay_texts import INSTRUCTION
from sparsejax.runner import DeviceRunner
from sparsejax.settings import EngineSettings

log = logging.getLogger("sparsejax")

Report = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True)
class BuiltEngine:
    """A running engine and what belongs to it (see `sparsejax.llm.Built`)."""

    engine: Engine
    runner: DeviceRunner
    tokenizer: Any
    capacity: Capacity
    model_name: str
    model_path: str
    generation_defaults: Mapping[str, Any]
    info: Mapping[str, Mapping[str, Any]]

    @property
    def limits(self) -> RunnerLimits:
        return self.runner.limits


def build_engine(config: EngineConfig, progress: Report | None) -> BuiltEngine:
    """Loads the model, allocates the KV pool, compiles the programs and starts the engine thread.

    Args:
      config: every setting.
      progress: called with each `Progress`; may be called from this thread only.

    Raises:
      ConfigError: a setting, the checkpoint or the memory does not allow it; says what to do.
    """
    report: Report = progress or (lambda _: None)
    _prepare_backend(config)
    device = jax.devices()[0]
    report(Progress(detail=f"jax {jax.__version__}, {device.platform}, {device.device_kind}"))
    kernels = _kernels(config)
    spec = load.load_spec(config.model, config.load_format, config.dtype, config.revision, config.offline)
    # What can't fit is refused before anything large is read.
    plan(config, spec, checkpoint_id(config.model))
    report(Progress("load", detail=config.model or "the default model"))
    loaded = load.load_model(
        config.model,
        load_format=config.load_format,
        dtype=config.dtype,
        tokenizer=config.tokenizer,
        revision=config.revision,
        offline=config.offline,
        seed=config.seed,
        chat_template=config.chat_template,
        progress=progress is not None,
    )
    capacity = plan(config, loaded.spec, checkpoint_id(config.model))
    for topic, fact in capacity.lines():
        report(Progress(topic, detail=f"{loaded.name}: {fact}" if topic == "model" else fact))
    encode = functools.partial(loaded.tokenizer.encode, add_special_tokens=False)
    methods = {name: combine.bound(method, encode) for name, method in capacity.methods.items()}
    check_replays(methods, capacity.geometry.max_model_len, capacity.prefill_buckets)
    capacity = dataclasses.replace(capacity, methods=methods)
    metrics = EngineMetrics()

    def count_compilation(program: str, seconds: float) -> None:
        metrics.jit_compilations.inc(program=program)
        metrics.jit_compile_seconds.inc(seconds)

    runner = DeviceRunner(
        loaded.spec,
        loaded.weights,
        capacity.geometry,
        capacity.methods,
        capacity.storage,
        num_rows=capacity.num_rows,
        num_sequence_pages=capacity.num_sequence_pages,
        decode_buckets=capacity.decode_buckets,
        prefill_buckets=capacity.prefill_buckets,
        eos_ids=tuple(loaded.tokenizer.eos_ids),
        implementation=config.attention_impl,
        fail_on_retrace=config.fail_on_retrace,
        on_compile=count_compilation,
        # Without a directory no other engine's chains are ever seen.
        identity=identity(loaded.spec, loaded.weights, loaded.tokenizer, capacity.storage)
        if config.chain_dir
        else None,
        knobs=knobs(capacity.methods),
        recall=config.recall_host_bytes > 0,
        prune=config.prefix_cache,
    )
    with _asked_for(config):
        compile_programs(runner, config.precompile, report)
    settings = EngineSettings(
        max_waiting=config.max_waiting,
        queue_timeout_s=config.queue_timeout_s,
        max_num_batched_tokens=max(rows * tokens for rows, tokens in capacity.prefill_buckets),
        stall_target_ms=config.stall_target_ms,
        swap_bytes=config.swap_bytes,
        chain_cache=config.chain_cache == "on",
        prefix_cache=config.prefix_cache,
        chain_host_bytes=config.chain_host_bytes,
        recall_host_bytes=config.recall_host_bytes,
        chain_ttl_s=config.chain_ttl_s,
        chain_checkpoints=config.chain_checkpoints,
        chain_queue_timeout_s=config.chain_queue_timeout_s,
        chain_disk_bytes=config.chain_disk_bytes,
        chain_disk_ttl_s=config.chain_disk_ttl_s,
    )
    defaults = loaded.generation_defaults if config.generation_config == "auto" else {}
    return BuiltEngine(
        engine=Engine(runner, settings, metrics, _open_disk(config, runner, report), tuple(encode(INSTRUCTION))),
        runner=runner,
        tokenizer=loaded.tokenizer,
        capacity=capacity,
        model_name=loaded.name,
        model_path=str(loaded.path or loaded.name),
        generation_defaults=defaults,
        info=_info(capacity, kernels),
    )


def _open_disk(config: EngineConfig, runner: DeviceRunner, report: Report) -> Disk | None:
    """The directory of chains, if one was asked for."""
    if config.chain_dir is None or config.chain_cache != "on":
        return None
    store = ChainStore(pathlib.Path(config.chain_dir).expanduser(), OrbaxFiles())
    report(Progress("chains", detail=f"{len(store.found)} in {store.path}, {len(store.dropped)} dropped"))
    return Disk(store, runner, config.chain_disk_bytes)


def compile_programs(runner: DeviceRunner, precompile: str, report: Report) -> None:
    """Compiles what serving needs: "all", the two most used programs ("lazy"), or none of them."""
    programs = list(runner.programs())
    if precompile == "none":
        programs = []
    elif precompile == "lazy":
        programs = programs[:1] + [p for p in programs if p.name == "prefill"][:1]
    left = [program.label for program in programs]

    def tell() -> None:
        # The first that is not done is under way, alone or beside others.
        report(Progress("compile", len(programs) - len(left), len(programs), "programs", next(iter(left), "")))

    if programs:
        tell()
    for compiled in runner.compile(programs, compile_workers()):
        left.remove(compiled.program.label)
        tell()
    if precompile == "all":
        runner.seal()


def explain(config: EngineConfig) -> list[str]:
    """The memory arithmetic, buckets and kernels of a configuration, without loading weights."""
    _prepare_backend(config)
    kernels = _kernels(config)
    spec = load.load_spec(config.model, config.load_format, config.dtype, config.revision, config.offline)
    capacity = plan(config, spec, checkpoint_id(config.model))
    device = jax.devices()[0]
    lines = [f"{'device':<9} jax {jax.__version__}, {device.platform}, {device.device_kind}"]
    lines += [f"{topic:<9} {fact}" for topic, fact in capacity.lines()]
    lines += [f"{'kernels':<9} {operation}: {name}" for operation, name in kernels.items()]
    return lines


def _kernels(config: EngineConfig) -> dict[str, str]:
    """The implementation of each kernel operation, if its shapes are supported."""
    with _asked_for(config):
        return api.expected(config.attention_impl)


@contextlib.contextmanager
def _asked_for(config: EngineConfig) -> Iterator[None]:
    """A kernel that was asked for and can't be had is a wrong setting."""
    try:
        yield
    except api.UnavailableError as error:
        raise ConfigError(f"--attention-impl {config.attention_impl}: {error}") from None


def _info(capacity: Capacity, kernels: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    device = jax.devices()[0]
    default = next(iter(capacity.methods))
    return {
        "build": {"jax": jax.__version__, "device": device.device_kind, "platform": device.platform},
        "cache_config": {
            "page_size": capacity.geometry.page_size,
            "num_sequence_pages": capacity.num_sequence_pages,
            "kv_bytes": capacity.kv_bytes,
            "num_rows": capacity.num_rows,
            "sparse_method": default,
            "storage": capacity.storage.name,
        },
        "attention_impl": dict(kernels),
    }


def _prepare_backend(config: EngineConfig) -> None:
    """Settings that must come before the device is first used. What the user set in the environment wins."""
    if config.memory_fraction is not None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(min(config.memory_fraction + 0.03, 0.98)))
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if config.compilation_cache:
        theirs = getattr(jax.config, "jax_compilation_cache_dir", None)
        folder = config.compilation_cache_dir or theirs or str(cache_dir() / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
