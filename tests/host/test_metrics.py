"""Plain metric objects."""

from __future__ import annotations

import pytest

from sparsejax.metrics import Counter, EngineMetrics, Gauge, Histogram


def test_counter_and_gauge() -> None:
    counter = Counter("n", "help")
    counter.inc()
    counter.inc(2.5)
    assert counter.samples() == [("", 3.5)]
    labelled = Counter("n", "help", "reason")
    assert labelled.samples() == []
    labelled.inc(reason="stop")
    assert labelled.value(reason="stop") == 1
    assert labelled.value(reason="length") == 0
    with pytest.raises(ValueError, match="takes label 'reason'"):
        labelled.inc()
    gauge = Gauge("g", "help")
    gauge.set(4)
    gauge.set(2)
    assert gauge.value() == 2


def test_histogram_is_cumulative_with_inclusive_bounds() -> None:
    histogram = Histogram("h", "help", (1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 9):
        histogram.observe(value)
    assert histogram.samples() == [("", [2, 3, 4, 5], 17.0)]
    assert histogram.count() == 5


def test_names_are_unique_and_complete() -> None:
    names = [metric.name for metric in EngineMetrics().all()]
    assert len(set(names)) == len(names)
    expected = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens request_success "
        "num_preemptions time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
        "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_inference_time_seconds request_prompt_tokens request_generation_tokens "
        "request_params_n request_params_max_tokens iteration_tokens_total kv_seen_tokens kv_resident_tokens "
        "kv_selected_tokens kv_kept_ratio pages_evicted maintenance_steps jit_compilations jit_compile_seconds"
    )
    assert not set(expected.split()) - set(names)
    assert all(metric.help and metric.kind in ("counter", "gauge", "histogram") for metric in EngineMetrics().all())
