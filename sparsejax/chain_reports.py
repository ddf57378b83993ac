"""What is said of a turn's chain: to its client, in the metrics and in the log."""

from __future__ import annotations

import collections
import dataclasses
import logging

from sparsejax.cache.chain import ChainState, Tier
from sparsejax.cache.evicted import EvictedStore
from sparsejax.chain_rows import DeviceRows
from sparsejax.chain_tiers import Tiers
from sparsejax.metrics import EngineMetrics
from sparsejax.plans import RunnerLimits
from sparsejax.request import ChainReport, RecallReport
from sparsejax.rows import Sequence

log = logging.getLogger("sparsejax.chains")


def report(seq: Sequence, ttl_s: float) -> ChainReport:
    """What the client is told, at the beginning of the turn and at its end.

    Args:
      seq: a choice with a chain.
      ttl_s: how long an idle chain stays, if its client did not say.
    """
    chain = seq.chain
    assert chain is not None
    busy = chain.busy
    return ChainReport(
        chain_id=chain.chain_id,
        status=seq.chain_status,
        parent_id=chain.parent_id,
        reused_tokens=seq.reused,
        prefilled_tokens=len(seq.group.prompt) - seq.reused,
        reason=seq.chain_reason,
        processed_tokens=0 if busy else chain.processed,
        state="active" if busy else chain.state.value,
        gone_reason=chain.reason,
        quality=dataclasses.asdict(chain.quality),
        miss=seq.chain_miss,
        diverged_at=seq.diverged_at,
        restored_from=seq.restored_from,
        retained_tokens=seq.resident_prefix,
        total_tokens=0 if busy else len(chain.ledger),
        expires_s=ttl_s if chain.ttl_s is None else chain.ttl_s,
    )


def claimed(seq: Sequence, metrics: EngineMetrics) -> None:
    """A turn was queued with its chain: counts it and logs one line, quieter if its client knows nothing of chains."""
    chain, options = seq.chain, seq.group.request.chain
    assert chain is not None
    assert options is not None
    metrics.chain_turns.inc(status=seq.chain_status)
    log.log(
        logging.DEBUG if options.implicit else logging.INFO,
        "chain=%s status=%s request=%s method=%s parent=%s turn=%d reused=%d prefill=%d retained=%d from=%s "
        "miss=%s at=%s",
        chain.chain_id,
        seq.chain_status,
        seq.group.request_id,
        seq.group.method,
        chain.parent_id,
        chain.turns + 1,
        seq.base,
        len(seq.group.prompt) - seq.base,
        seq.resident_prefix,
        seq.restored_from,
        seq.chain_miss,
        seq.diverged_at,
    )


def begun(seq: Sequence, metrics: EngineMetrics) -> None:
    """A turn got its row: what it reuses is certain now."""
    metrics.prefix_cache_queries.inc(len(seq.group.prompt))
    metrics.prefix_cache_hits.inc(seq.reused)
    if seq.base:
        metrics.chain_tokens_saved.inc(seq.reused)
    elif seq.chain_status == "recreated":
        # Its client had a chain, so all but the newest message was computed before.
        recomputed = len(seq.group.prompt) - seq.reused
        metrics.chain_tokens_recomputed.inc(recomputed, reason=seq.chain_miss or "unknown")


def recalled(found: RecallReport | None, metrics: EngineMetrics) -> None:
    """A turn is over: counts what it got back of the rows that its method had dropped."""
    if found is None:
        return
    metrics.recall_turns.inc(outcome=(found.reason or ("lent" if found.lent_pages else "none")).replace(" ", "_"))
    metrics.recall_lent_pages.inc(found.lent_pages)
    metrics.recall_bytes.inc(found.bytes_moved)
    if found.lent_pages:
        metrics.recall_seconds.observe(found.seconds)


def recall_gauges(store: EvictedStore, metrics: EngineMetrics) -> None:
    """The host memory of dropped rows."""
    metrics.recall_stored_bytes.set(store.used_bytes)
    metrics.recall_lost_pages.set_total(store.lost_pages)


def gauges(tiers: Tiers, limits: RunnerLimits, metrics: EngineMetrics, taken: int) -> None:
    """Chains by state and tier, the bytes of each tier, and what the index has counted.

    Pages that chains share count for each of them, but never more than the `taken` head-pages of the pool. Copies of
    rows that are on the device count where they are.
    """
    index, entries, pages = tiers.index, collections.Counter[str](), 0
    for chain in index.chains.values():
        idle = chain.state is ChainState.IDLE
        entries[f"idle_{chain.tier.name.lower()}" if idle else chain.state.value] += 1
        for payload in (chain.payload, *(c.payload for c in chain.checkpoints)):
            if isinstance(payload, DeviceRows):
                pages += payload.pages.head_pages
    idle_states = [f"idle_{tier.name.lower()}" for tier in Tier]
    for state in (ChainState.RESTORING.value, ChainState.ACTIVE.value, *idle_states):
        metrics.chain_entries.set(entries[state], state=state)
    page_bytes = limits.page_bytes / limits.geometry.head_pages_per_sequence_page
    for tier, nbytes in zip(Tier, (min(pages, taken) * page_bytes, tiers.host_bytes, tiers.disk_bytes), strict=True):
        metrics.chain_bytes.set(nbytes, tier=tier.name.lower())
    for event, count in index.counts.items():
        if event != "reused_tokens":
            metrics.chain_events.set_total(count, event=event)
