"""Settings of the engine and its scheduler. Standard library only."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsejax.errors import ConfigError


def _setting(default: Any, help: str, low: float, high: float = float("inf"), unit: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "unit": unit})


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How the engine queues, batches and reserves. `None` means a value derived from the runner's limits."""

    max_waiting: int | None = _setting(None, "requests that may wait; more get 429. None: 4 per row", 1)
    queue_timeout_s: float = _setting(600.0, "longest wait for admission", 0.001, unit="s")
    max_inflight_steps: int = _setting(2, "steps submitted before the oldest is collected; 1 is synchronous", 1, 4)
    max_num_batched_tokens: int = _setting(8192, "padded tokens of one prefill program", 1, unit="tokens")
    stall_target_ms: float = _setting(100.0, "longest prefill program while others decode", 0.001, unit="ms")
    decode_window_tokens: int = _setting(
        1024, "tokens promised ahead to a decoding request, at first", 1, unit="tokens"
    )
    min_decode_window_tokens: int = _setting(64, "smallest adapted window", 1, unit="tokens")
    max_decode_window_tokens: int = _setting(4096, "largest adapted window", 1, unit="tokens")
    starvation_bound_s: float = _setting(2.0, "wait that lifts a request by one priority class", 0.001, unit="s")
    swap_bytes: int = _setting(
        4 << 30, "host memory for swapped-out requests; beyond it they are recomputed", 0, unit="B"
    )
    chain_cache: bool = _setting(True, "keep conversations between their turns", 0, 1)
    prefix_cache: bool = _setting(True, "share pages of requests that begin alike", 0, 1)
    chain_queue_timeout_s: float | None = _setting(
        None, "longest wait of a turn that names its chain. None: queue_timeout_s", 0.001, unit="s"
    )
    chain_host_bytes: int = _setting(4 << 30, "host memory for idle chains that the cache has no room for", 0, unit="B")
    chain_ttl_s: float = _setting(
        3600.0, "idle time after which a chain goes a tier down, at last away", 0.001, unit="s"
    )
    chain_disk_bytes: int = _setting(64 << 30, "disk space for chains, if they have a directory", 0, unit="B")
    chain_disk_ttl_s: float = _setting(7 * 86400.0, "idle time after which a chain on disk goes", 0.001, unit="s")
    chain_checkpoints: int = _setting(
        2, "states at turn ends that a chain keeps, its last one included; 0 for none", 0, 128
    )
    recall_host_bytes: int = _setting(
        0, "host memory for rows that methods dropped from chains with recall; 0 turns recall off", 0, unit="B"
    )
    status_interval_s: float = _setting(10.0, "time between status lines in the log", 0.001, unit="s")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low, high = getattr(self, field.name), field.metadata["low"], field.metadata["high"]
            if value is None and field.default is None:
                continue
            integral = "float" not in str(field.type)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ConfigError(f"{field.name}={value!r} must be True or False")
                continue
            if isinstance(value, bool) or not isinstance(value, int if integral else (int, float)):
                kind = "an integer" if integral else "a number"
                raise ConfigError(f"{field.name}={value!r} must be {kind}")
            if not low <= value <= high:
                limit = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
                raise ConfigError(f"{field.name}={value!r} must be {limit}")
        if not self.min_decode_window_tokens <= self.max_decode_window_tokens:
            raise ConfigError(
                f"min_decode_window_tokens={self.min_decode_window_tokens} is larger than "
                f"max_decode_window_tokens={self.max_decode_window_tokens}"
            )
