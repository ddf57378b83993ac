"""What is said of rows that requests share: to the client of one, and in the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsejax.cache.radix_records import Match
from sparsejax.metrics import EngineMetrics
from sparsejax.rows import Sequence

if TYPE_CHECKING:
    from sparsejax.radix_cache import RadixCache

_EVENTS = {
    "inserted_blocks": "inserted",
    "duplicate_blocks": "duplicate",
    "revived_blocks": "revived",
    "evicted_blocks": "evicted",
}


def begun(seq: Sequence, match: Match, metrics: EngineMetrics) -> None:
    """A choice got its row, and begins with what was found: counts it, and keeps why not more was found.

    A turn that named its chain, or whose chain says where it parted ways, has a better reason already.
    """
    miss, options = match.miss, seq.group.request.chain
    seq.prefix_miss = miss
    if seq.chain is not None and options is not None:
        if seq.attached:
            seq.restored_from = "device"
        if options.chain_id is None and (seq.attached or seq.chain_miss in (None, "cold")):
            seq.chain_miss, seq.chain_reason = (miss.reason, miss.text) if miss else (None, None)
            seq.diverged_at = miss.token if miss is not None and miss.reason == "diverged" else None
    elif seq.preemptions == 0:
        metrics.prefix_cache_queries.inc(len(seq.group.prompt))
        metrics.prefix_cache_hits.inc(seq.attached)
        if miss is not None:
            metrics.prefix_cache_misses.inc(reason=miss.reason)


def gauges(radix: RadixCache, metrics: EngineMetrics) -> None:
    """What there is now, and what the index has counted."""
    index = radix.index
    metrics.prefix_cache_blocks.set(index.num_blocks)
    pinned = index.pinned_pages.total()
    for state, pages in (("free", index.free_pages), ("held", index.num_pages - index.free_pages), ("pinned", pinned)):
        metrics.prefix_cache_pages.set(pages, state=state)
    host = radix.host
    metrics.prefix_cache_host_blocks.set(len(host.blocks))
    metrics.prefix_cache_host_bytes.set(host.used_bytes)
    metrics.prefix_cache_events.set_total(host.stored, event="stored")
    metrics.prefix_cache_events.set_total(host.promoted, event="promoted")
    for name, event in _EVENTS.items():
        metrics.prefix_cache_events.set_total(index.counts[name], event=event)
    metrics.prefix_cache_pruned_tokens.set_total(index.counts["cut_tokens"])
