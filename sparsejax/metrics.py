"""Counters, gauges and histograms as plain objects. Standard library only.

The engine thread writes, any thread reads; a value read may be an instant old, never torn. The server turns
`EngineMetrics.all()` into its exposition format and adds prefix and model label. Names are those of vLLM where vLLM
has the same thing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from sparsejax.request import Request, RequestStats

Labels = tuple[tuple[str, str], ...]

_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
_SMALL_BUCKETS = (1, 2, 5, 10, 20, 50, 100)


class Metric:
    """A named value. `kind` is "counter", "gauge" or "histogram"; `label` names the one label it has, or is None."""

    kind = ""

    def __init__(self, name: str, help: str, label: str | None = None) -> None:
        self.name = name
        self.help = help
        self.label = label


class Counter(Metric):
    """Only grows."""

    kind = "counter"

    def __init__(self, name: str, help: str, label: str | None = None) -> None:
        super().__init__(name, help, label)
        self._values: dict[str, float] = {} if label else {"": 0.0}

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Adds; the keyword must be the metric's label."""
        key = _label_value(self, labels)
        self._values[key] = self._values.get(key, 0.0) + amount

    def set_total(self, total: float, **labels: str) -> None:
        """Takes over what somebody else has counted; that never goes down."""
        self._values[_label_value(self, labels)] = total

    def value(self, **labels: str) -> float:
        return self._values.get(_label_value(self, labels), 0.0)

    def samples(self) -> list[tuple[str, float]]:
        """(label value, value) pairs; the label value is "" where there is no label."""
        return list(self._values.items())


class Gauge(Counter):
    """Goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        self._values[_label_value(self, labels)] = value


class Histogram(Metric):
    """Counts of observations up to each bound, their sum and number."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: tuple[float, ...], label: str | None = None) -> None:
        super().__init__(name, help, label)
        self.bounds = bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        if label is None:
            self._counts[""], self._sums[""] = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, **labels: str) -> None:
        key = _label_value(self, labels)
        counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect.bisect_left(self.bounds, value)] += 1
        self._sums[key] = self._sums.get(key, 0.0) + value

    def count(self, **labels: str) -> int:
        return sum(self._counts.get(_label_value(self, labels), ()))

    def samples(self) -> list[tuple[str, list[int], float]]:
        """(label value, cumulative counts per bound with +Inf last, sum)."""
        out = []
        for key, counts in list(self._counts.items()):
            total, cumulative = 0, []
            for n in counts:
                total += n
                cumulative.append(total)
            out.append((key, cumulative, self._sums.get(key, 0.0)))
        return out


def _label_value(metric: Metric, labels: dict[str, str]) -> str:
    if not labels and metric.label is None:
        return ""
    if set(labels) != ({metric.label} if metric.label else set()):
        raise ValueError(f"{metric.name} takes label {metric.label!r}, got {sorted(labels)}")
    return next(iter(labels.values()), "")


class EngineMetrics:
    """Everything the engine counts."""

    def __init__(self) -> None:
        self.num_requests_running = Gauge("num_requests_running", "Choices that own a row")
        self.num_requests_waiting = Gauge(
            "num_requests_waiting", "Choices that wait for a row, swapped-out ones included"
        )
        self.num_requests_swapped = Gauge("num_requests_swapped", "Choices swapped out to host memory")
        self.kv_cache_usage_perc = Gauge("kv_cache_usage_perc", "Share of cache pages in use, 0 to 1")
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = Counter("generation_tokens", "Generated tokens")
        self.request_success = Counter("request_success", "Finished choices", "finished_reason")
        self.num_preemptions = Counter("num_preemptions", "Choices that lost their row to others")
        self.prefix_cache_queries = Counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_cache_hits = Counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.prefix_cache_misses = Counter(
            "prefix_cache_misses", "Requests that reuse less than they could have, by why", "reason"
        )
        self.prefix_cache_blocks = Gauge("prefix_cache_blocks", "Pages of tokens that the prefix cache knows")
        self.prefix_cache_pages = Gauge(
            "prefix_cache_pages",
            "Pages that it holds: free to go, held by rows, conversations or pins, and of these pinned",
            "state",
        )
        self.prefix_cache_host_blocks = Gauge("prefix_cache_host_blocks", "Pages of tokens that are in host memory")
        self.prefix_cache_host_bytes = Gauge("prefix_cache_host_bytes", "Host memory that they take")
        self.prefix_cache_events = Counter("prefix_cache_events", "Pages of tokens that came or went", "event")
        self.prefix_cache_pruned_tokens = Counter("prefix_cache_pruned_tokens", "Tokens whose rows were pruned")
        self.prune_jobs = Counter("prune_jobs", "Prune jobs that are over, by how they ended", "status")
        self.prune_freed_slots = Counter("prune_freed_slots", "Rows (tokens) that prune jobs took, of paths or chains")
        self.prune_recomputed_tokens = Counter(
            "prune_recomputed_tokens", "Tokens that prune jobs computed again behind a range"
        )
        self.chain_turns = Counter("chain_turns", "Turns with a chain, by what became of it", "status")
        self.chain_tokens_saved = Counter("chain_tokens_saved", "Prompt tokens that chains spared")
        self.chain_tokens_recomputed = Counter(
            "chain_tokens_recomputed", "Prompt tokens computed again because a named chain could not go on", "reason"
        )
        self.chain_events = Counter(
            "chain_events", "Changes of chains: moves, checkpoints, rewinds, and how they ended", "event"
        )
        self.chain_entries = Gauge("chain_entries", "Chains, by state and tier", "state")
        self.chain_bytes = Gauge("chain_bytes", "Bytes of idle chains, by tier", "tier")
        self.chain_restore_seconds = Histogram(
            "chain_restore_seconds",
            "Time to read a turn's rows and give them back, by the tier they were in; the device may still copy",
            _TIME_BUCKETS,
            "tier",
        )
        self.recall_turns = Counter(
            "recall_turns", "Turns that asked for dropped rows: lent some, none, or why less than asked for", "outcome"
        )
        self.recall_lent_pages = Counter("recall_lent_pages", "Dropped pages that were lent to turns")
        self.recall_bytes = Counter("recall_bytes", "Bytes copied to the device to score and lend dropped rows")
        self.recall_seconds = Histogram(
            "recall_seconds", "From the beginning of a turn until its dropped rows were there", _TIME_BUCKETS
        )
        self.recall_stored_bytes = Gauge("recall_stored_bytes", "Host memory that dropped rows take")
        self.recall_lost_pages = Counter("recall_lost_pages", "Dropped pages given up for want of host memory")

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(name, help, _TIME_BUCKETS)

        self.time_to_first_token_seconds = seconds("time_to_first_token_seconds", "Arrival to first token")
        self.inter_token_latency_seconds = seconds("inter_token_latency_seconds", "Between two tokens of a choice")
        self.request_time_per_output_token_seconds = seconds(
            "request_time_per_output_token_seconds", "Mean time per token after the first"
        )
        self.e2e_request_latency_seconds = seconds("e2e_request_latency_seconds", "Arrival to last token")
        self.request_queue_time_seconds = seconds("request_queue_time_seconds", "Arrival to admission")
        self.request_prefill_time_seconds = seconds("request_prefill_time_seconds", "Admission to first token")
        self.request_decode_time_seconds = seconds("request_decode_time_seconds", "First to last token")
        self.request_inference_time_seconds = seconds("request_inference_time_seconds", "Admission to last token")
        self.prune_queue_seconds = seconds("prune_queue_seconds", "From the request of a prune job to its first slice")
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens per request", _TOKEN_BUCKETS)
        self.request_generation_tokens = Histogram("request_generation_tokens", "Tokens per choice", _TOKEN_BUCKETS)
        self.request_params_n = Histogram("request_params_n", "Choices asked for", _SMALL_BUCKETS)
        self.request_params_max_tokens = Histogram("request_params_max_tokens", "Most tokens asked for", _TOKEN_BUCKETS)
        self.iteration_tokens_total = Histogram("iteration_tokens_total", "Tokens per program", _TOKEN_BUCKETS)

        self.kv_seen_tokens = Gauge("kv_seen_tokens", "Tokens processed by resident choices")
        self.kv_resident_tokens = Gauge("kv_resident_tokens", "Tokens they still hold in the cache")
        self.kv_selected_tokens = Gauge("kv_selected_tokens", "Tokens that one decode step reads")
        self.kv_kept_ratio = Gauge("kv_kept_ratio", "Resident over seen tokens, 0 to 1")
        self.pages_evicted = Counter("pages_evicted", "Pages that eviction returned to the pool")
        self.maintenance_steps = Counter("maintenance_steps", "Maintenance programs", "kind")
        self.jit_compilations = Counter("jit_compilations", "Compiled programs", "program")
        self.jit_compile_seconds = Counter("jit_compile_seconds", "Time spent compiling")

    def all(self) -> Iterator[Metric]:
        """Every metric."""
        return (metric for metric in vars(self).values() if isinstance(metric, Metric))

    def finished(self, request: Request, index: int, reason: str, stats: RequestStats) -> None:
        """Records the end of one choice; what the choices of a request share is counted with the first."""
        self.request_success.inc(finished_reason=reason)
        if index == 0:
            self.prompt_tokens.inc(stats.prompt_tokens)
            self.request_prompt_tokens.observe(stats.prompt_tokens)
            self.request_params_n.observe(request.params.n)
            if request.params.max_tokens is not None:
                self.request_params_max_tokens.observe(request.params.max_tokens)
        self.request_generation_tokens.observe(stats.completion_tokens)
        self.e2e_request_latency_seconds.observe(stats.queue_s + stats.prefill_s + stats.decode_s)
        if stats.completion_tokens:
            self.request_prefill_time_seconds.observe(stats.prefill_s)
            self.request_decode_time_seconds.observe(stats.decode_s)
            self.request_inference_time_seconds.observe(stats.prefill_s + stats.decode_s)
        if stats.completion_tokens > 1:
            self.request_time_per_output_token_seconds.observe(stats.decode_s / (stats.completion_tokens - 1))
