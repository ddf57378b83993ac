"""What can be asked of chains from outside: to list, fork, keep, pin, move and end them. For `Engine.ask`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sparsejax.cache.chain import Chain, ChainState, Checkpoint, Tier, as_ids
from sparsejax.caches import Caches
from sparsejax.chain_rows import DeviceRows, lengths_of, size_of, tier_of
from sparsejax.chains import Chains
from sparsejax.errors import ChainBusyError, ChainCapacityError, ChainError, ChainMismatchError, RequestError
from sparsejax.request import ChainOptions, ChainReport, PrefixOptions

MAX_PIN_S = 86_400.0
MAX_PINNED_SHARE = 0.5
"""Of the cache's pages, pinned chains may hold so many."""
STATES = ("idle", "active", "restoring")


@dataclasses.dataclass(frozen=True)
class ChainInfo:
    """One chain as its owner may see it. Sizes in tokens, times in seconds; ages are of the moment of asking.

    Attributes:
      chain_id, parent_id, state, tier, method: see `cache.chain.Chain`.
      total_tokens: of the conversation, the last sampled one included.
      processed_tokens: of these, those that need no prefill any more.
      retained_tokens: of these, those that still have rows (longest head); None while a turn has them.
      size: head-pages on the device, bytes elsewhere.
      turns: finished ones.
      checkpoints: earlier states: kind, processed_tokens and tier of each, oldest first.
      quality: what was lost so far (see `cache.chain.Quality`).
      priority: of its client.
      age_s, idle_s: since it began, and since it was last used.
      expires_in_s: idleness left to it; None while a turn has it.
      pinned_s: left of its pin, 0 without one.
      ledger: all token ids, uint32; never changed in place.
    """

    chain_id: str
    parent_id: str | None
    state: str
    tier: str
    method: str
    total_tokens: int
    processed_tokens: int
    retained_tokens: int | None
    size: int
    turns: int
    checkpoints: tuple[dict[str, Any], ...]
    quality: dict[str, Any]
    priority: int
    age_s: float
    idle_s: float
    expires_in_s: float | None
    pinned_s: float
    ledger: np.ndarray = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Prospect:
    """What a turn would find. Attributes are those of `ChainReport`; `chain_id` is the chain it would go on from."""

    status: str
    chain_id: str | None
    total_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    retained_tokens: int
    restored_from: str | None
    checkpoint: str | None
    reason: str | None
    miss: str | None
    diverged_at: int | None


def describe(chains: Chains, chain: Chain) -> ChainInfo:
    """A chain as it is now."""
    now, ttl_s = chains.now_s, chains.ttl_s if chain.ttl_s is None else chain.ttl_s
    return ChainInfo(
        chain_id=chain.chain_id,
        parent_id=chain.parent_id,
        state=chain.state.value,
        tier=chain.tier.name.lower(),
        method=chain.method,
        total_tokens=len(chain.ledger),
        processed_tokens=chain.processed,
        retained_tokens=None if chain.payload is None else int(lengths_of(chain.payload).max()),
        size=0 if chain.payload is None else size_of(chain.payload),
        turns=chain.turns,
        checkpoints=tuple(
            {"kind": c.kind, "processed_tokens": c.processed, "tier": c.tier.name.lower()} for c in chain.checkpoints
        ),
        quality=dataclasses.asdict(chain.quality),
        priority=chain.priority,
        age_s=now - chain.created_s,
        idle_s=0.0 if chain.busy else now - chain.used_s,
        expires_in_s=None if chain.busy else max(0.0, max(chain.used_s, chain.placed_s) + ttl_s - now),
        pinned_s=max(0.0, chain.pinned_until_s - now),
        ledger=chain.ledger,
    )


def listed(chains: Chains, tenant: str, state: str | None, limit: int) -> tuple[list[ChainInfo], int]:
    """The chains of a tenant, newest use first, at most `limit`; and how many there are in all."""
    mine = [
        chain
        for chain in chains.index.chains.values()
        if chain.tenant == tenant and (state is None or chain.state.value == state)
    ]
    mine.sort(key=lambda chain: -chain.used_tick)
    return [describe(chains, chain) for chain in mine[:limit]], len(mine)


def get(chains: Chains, chain_id: str, tenant: str) -> ChainInfo:
    """Raises ChainNotFoundError, ChainGoneError."""
    return describe(chains, chains.index.find(chain_id, tenant))


def delete(chains: Chains, chain_id: str, tenant: str) -> None:
    """Ends a chain and frees what it holds. Raises ChainBusyError while a turn has it."""
    chains.index.drop(chains.index.find(chain_id, tenant), "deleted")


def fork(chains: Chains, chain_id: str, tenant: str, at: int | None = None) -> ChainInfo:
    """A new idle chain that shares what another has processed; the two go their own ways from there.

    Args:
      chains: of the engine.
      chain_id, tenant: the chain to copy.
      at: processed tokens of the checkpoint to begin with; None is the chain as it is.

    Raises:
      ChainBusyError: a turn has it, and no checkpoint was named.
      ChainMismatchError: there is no such checkpoint.
      ChainCapacityError: there is no room for the copy.
    """
    source = chains.index.find(chain_id, tenant)
    number = None
    if at is not None and (source.busy or at != source.processed):
        number = next((i for i, c in enumerate(source.checkpoints) if c.processed == at), None)
        if number is None:
            kept = ", ".join(str(c.processed) for c in source.checkpoints) or "none"
            text = f"chain {chain_id} has no state of {at} tokens; checkpoints: {kept}"
            raise ChainMismatchError(text, chain_id=chain_id, reason="no_checkpoint")
    if number is None:
        _idle(source)
    payload = chains.copy(source, number)
    if payload is None:
        raise ChainCapacityError(f"no room for a copy of chain {chain_id}", chain_id=chain_id, retry_after_s=5.0)
    return describe(chains, chains.index.fork(source, number, payload, size_of(payload), tier_of(payload)))


def checkpoint(chains: Chains, chain_id: str, tenant: str) -> ChainInfo:
    """Keeps the state of an idle chain beside later ones; the oldest of its kind goes if there are too many.

    Raises:
      ChainBusyError, ChainCapacityError.
    """
    chain = chains.index.find(chain_id, tenant)
    _idle(chain)
    if not any(c.processed == chain.processed for c in chain.checkpoints):
        payload = chains.copy(chain, None)
        if payload is None:
            raise ChainCapacityError(f"no room to keep chain {chain_id} twice", chain_id=chain_id, retry_after_s=5.0)
        state = payload, tier_of(payload), chain.quality, chain.evicted, chain.cuts
        kept = Checkpoint("turn_end", chain.processed, *state)
        chains.index.add_checkpoint(chain, kept)
    return describe(chains, chain)


def pin(chains: Chains, chain_id: str, tenant: str, ttl_s: float) -> ChainInfo:
    """Keeps a chain where it is for so many seconds; 0 ends that.

    Raises:
      ChainCapacityError: pinned chains would hold more than their share of the cache.
    """
    chain = chains.index.find(chain_id, tenant)
    now, pool = chains.now_s, chains.memory.pool
    if ttl_s:
        others = [c for c in chains.index.chains.values() if c is not chain and c.pinned_until_s > now]
        pages = sum(c.size for c in (chain, *others) if c.tier is Tier.DEVICE)
        if pages > MAX_PINNED_SHARE * pool.num_head_pages:
            text = f"pinned chains would hold {pages} of {pool.num_head_pages} pages, at most half may be pinned"
            raise ChainCapacityError(text, chain_id=chain_id, retry_after_s=5.0)
    chain.pinned_until_s = now + ttl_s if ttl_s else float("-inf")
    return describe(chains, chain)


def demote(chains: Chains, chain_id: str, tenant: str) -> ChainInfo:
    """Moves an idle chain a tier down: from the device to the host, without its checkpoints, or from there to disk.

    One that is at the host stays there if it is not on disk.

    Raises:
      ChainBusyError, ChainCapacityError.
    """
    chain = chains.index.find(chain_id, tenant)
    _idle(chain)
    if isinstance(chain.payload, DeviceRows):
        if not chains.tiers.demote(chain):
            text = f"the host has no room for chain {chain_id}"
            raise ChainCapacityError(text, chain_id=chain_id, retry_after_s=5.0)
        chains.index.drop_checkpoints(chain)
    else:
        chains.tiers.lower(chain)
    return describe(chains, chain)


def take_back(chains: Chains, tenant: str, report: ChainReport, tokens: int) -> ChainReport:
    """Ends a chain's last turn earlier than the engine did: a stop string was found when the turn was over already.

    Args:
      chains: of the engine.
      tenant: the chain's.
      report: of the end of the turn.
      tokens: of the conversation, up to the stop string.

    Returns:
      The report as it is now. The chain goes on from the newest state before the stop string; without one it is gone.
    """
    try:
        chain = chains.index.find(report.chain_id, tenant)
    except ChainError:
        return report
    if chain.busy or len(chain.ledger) != report.total_tokens:  # the next turn has begun already
        return report
    if not chains.index.cut(chain, tokens):
        chains.index.drop(chain, "rollback")
        return dataclasses.replace(report, state="gone", gone_reason="rollback")
    chains.index.place(chain, chain.payload, size_of(chain.payload), tier_of(chain.payload))
    quality = dataclasses.asdict(chain.quality)
    processed, total = chain.processed, len(chain.ledger)
    return dataclasses.replace(report, processed_tokens=processed, total_tokens=total, quality=quality)


def prospect(caches: Caches, options: ChainOptions, ids: tuple[int, ...], method: str) -> Prospect:
    """What a turn with these options and tokens would find now, of chains or of shared rows. Changes nothing.

    Raises:
      ChainError: what the turn would be refused with.
    """
    chains = caches.chains
    if method not in chains.methods:
        raise RequestError(f"sparse_method {method!r} is not served", param="sparse_method")
    plan = chains.index.plan(chains.turn(options, as_ids(ids), method))
    source, retained = plan.source, 0
    state = source if source is None or plan.checkpoint is None else source.checkpoints[plan.checkpoint]
    if state is not None and state.payload is not None:
        retained = int(lengths_of(state.payload).max())
    reused, tier = plan.reused, state.tier.name.lower() if state else None
    blocks = caches.radix.prospect(method, PrefixOptions(options.salt, options.tenant), plan.ids)
    if blocks is not None and caches.radix.beats(blocks, reused, state):
        size = caches.radix.index.block_tokens
        reused, retained, tier = len(blocks.blocks) * size, len(blocks.pages) * size, "device"
    return Prospect(
        status=plan.status,
        chain_id=source.chain_id if source else None,
        total_tokens=len(plan.ids),
        reused_tokens=reused,
        prefilled_tokens=len(plan.ids) - reused,
        retained_tokens=retained,
        restored_from=tier,
        checkpoint=state.kind if isinstance(state, Checkpoint) else None,
        reason=plan.reason,
        miss=plan.miss,
        diverged_at=plan.diverged_at,
    )


def _idle(chain: Chain) -> None:
    if chain.state is not ChainState.IDLE:
        raise ChainBusyError(f"chain {chain.chain_id} has a turn under way", chain_id=chain.chain_id, retry_after_s=1.0)
