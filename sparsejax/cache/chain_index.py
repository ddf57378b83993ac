"""All chains of an engine: which one a turn continues, who has it, what is dropped first, what is known of the dead.

`plan` reads and decides, `apply` changes: between a refusal and the index as it was there is no difference. One thread
changes the index. It owns logical identity, never rows: payloads are opaque, and given to `release` once nobody needs
them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from sparsejax.cache import chain_miss
from sparsejax.cache.chain import (
    STRIDE,
    Chain,
    ChainIds,
    ChainState,
    Checkpoint,
    Quality,
    Tier,
    common_prefix,
    digest_of,
    stride_hashes,
)
from sparsejax.cache.chain_miss import Miss
from sparsejax.errors import (
    ChainBusyError,
    ChainError,
    ChainFingerprintError,
    ChainGoneError,
    ChainMismatchError,
    ChainNotFoundError,
    ChainOwnerError,
)

Status = Literal["created", "resumed", "recreated", "forked", "adopted", "rewound"]

PRUNED = Miss("pruned", "the chain's rows were pruned, or computed on what was left, and exact ones were asked for")

_GAP_SMOOTHING = 0.3
_DEFAULT_GAP_S = 60.0  # between two turns, before a chain had two


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a request asks of the chains.

    Attributes:
      ids: uint32, the whole context, or with `append` only what comes after the chain's ledger.
      seed, fingerprint, method, tenant: of the state that it can use (see `Chain`).
      chain_id: the chain to continue; None looks for one if `lookup`, else creates one.
      on_miss: "serve" computes everything again where a chain can't be continued, "error" raises.
      on_busy: "fork" continues from the newest checkpoint of a busy chain, "error" raises.
      branch: what becomes of a chain whose context was edited: "fork" leaves it, "rewind" cuts it.
      expected_tokens, expected_digest: what the client believes the ledger to be.
      append_joint: the first id to append ends the last answer: left out if the ledger ends with it.
      implicit: see `Chain`.
      exact: states that pruning has had a part in can't be used.
    """

    ids: np.ndarray
    seed: bytes
    fingerprint: bytes
    method: str
    tenant: str = ""
    chain_id: str | None = None
    append: bool = False
    lookup: bool = True
    on_miss: Literal["serve", "error"] = "serve"
    on_busy: Literal["fork", "error"] = "fork"
    branch: Literal["fork", "rewind"] = "fork"
    expected_tokens: int | None = None
    expected_digest: bytes | None = None
    append_joint: bool = False
    implicit: bool = False
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a turn will go on. Valid while `source.version` is `version`.

    Attributes:
      status: what the client is told.
      turn: what was asked.
      ids: uint32, the whole context.
      reused: tokens that need no prefill.
      source: the chain whose state is used; None starts from nothing.
      checkpoint: index of the earlier state that is used; None is the head.
      forks: the source stays as it is and a new chain begins as a copy.
      reason: why nothing, or not the head of the named chain, is used.
      hashes: stride hashes of `ids`, if they were computed.
      miss: the same in a word; `diverged_at` is where the tokens part ways, if they do (see `chain_miss`).
    """

    status: Status
    turn: Turn
    ids: np.ndarray
    reused: int = 0
    source: Chain | None = None
    checkpoint: int | None = None
    forks: bool = False
    reason: str | None = None
    version: int = 0
    miss: str | None = None
    diverged_at: int | None = None
    hashes: tuple[bytes, ...] = ()


class ChainIndex:
    """The chains, by id and by what they have processed.

    Args:
      ids: issues ids.
      release: called with each payload that is dropped.
      clock: seconds, monotonic.
      max_tombstones: dead ids whose end is remembered.
      max_checkpoints: of each kind, in each chain.
      cost: what computing so many tokens again takes, in any unit, for the order of victims.
    """

    def __init__(
        self,
        ids: ChainIds,
        release: Callable[[Any], None],
        clock: Callable[[], float],
        max_tombstones: int = 1024,
        max_checkpoints: int = 2,
        cost: Callable[[int], float] = float,
    ) -> None:
        self.ids = ids
        self.chains: dict[str, Chain] = {}
        self.tombstones: collections.OrderedDict[str, tuple[str, str]] = collections.OrderedDict()  # tenant, reason
        self._dead: collections.OrderedDict[bytes, str] = collections.OrderedDict()  # by hash of the last state
        self.counts: collections.Counter[str] = collections.Counter()
        self._release = release
        self._clock = clock
        self._max_tombstones = max_tombstones
        self._max_checkpoints = max_checkpoints
        self._cost = cost
        self.on_gone: Callable[[Chain], None] = lambda chain: None
        self.changes = 0  # grows whenever any chain's state or payload changes
        self._tick = 0
        self._buckets: dict[bytes, dict[Chain, None]] = {}  # stride hash -> chains with a boundary in that stride
        self._keys: dict[Chain, set[bytes]] = {}

    # Planning.

    def plan(self, turn: Turn) -> Plan:
        """Decides how a turn goes on. Changes nothing.

        Raises:
          ChainError: see `errors`; with `on_miss="serve"` only for turns that lack the whole context.
        """
        if turn.chain_id is None:
            return self._plan_unnamed(turn)
        try:
            chain = self.find(turn.chain_id, turn.tenant)
            return self._plan_named(turn, chain)
        except ChainError as error:
            if turn.append or turn.on_miss == "error" or isinstance(error, ChainBusyError):
                raise
            return self._plan_unnamed(turn, chain_miss.of_error(error))

    def find(self, chain_id: str, tenant: str = "") -> Chain:
        """The chain with this id, if this tenant may see it.

        Raises:
          ChainNotFoundError, ChainGoneError.
        """
        chain = self.chains.get(chain_id)
        if chain is not None and chain.tenant == tenant:
            return chain
        origin = self.ids.origin(chain_id)
        unknown = "restart" if origin == "older" else "forgotten"
        owner, reason = self.tombstones.get(chain_id, (tenant, unknown))
        if chain is not None or owner != tenant or origin in ("forged", "foreign"):
            shown = "foreign" if origin == "foreign" else "forged"  # that another tenant has it is not said
            raise ChainNotFoundError(f"chain {chain_id} is not known here ({shown} id)", chain_id=chain_id)
        raise ChainGoneError(f"chain {chain_id} is gone ({reason})", chain_id=chain_id, reason=reason)

    def _plan_named(self, turn: Turn, chain: Chain) -> Plan:
        name = chain.chain_id
        if turn.seed != chain.seed:
            what = chain_miss.differing(chain, turn)
            raise ChainFingerprintError(f"chain {name} has another {what}", chain_id=name, reason=what)
        if chain.busy and (turn.append or turn.on_busy == "error"):
            raise ChainBusyError(f"chain {name} has a turn under way", chain_id=name, retry_after_s=1.0)
        ids, ledger = turn.ids, chain.ledger
        if turn.expected_tokens not in (None, len(ledger)):
            text = f"chain {name} has {len(ledger)} tokens, not {turn.expected_tokens}"
            raise ChainMismatchError(text, chain_id=name, reason="expected_tokens")
        if turn.expected_digest is not None and turn.expected_digest != digest_of(ledger):
            text = f"the tokens of chain {name} have another digest"
            raise ChainMismatchError(text, chain_id=name, reason="expected_digest")
        if turn.append:
            joint = turn.append_joint and len(ledger) and ledger[-1] == ids[0]
            ids = np.concatenate([ledger, ids[1:] if joint else ids])
        common = common_prefix(ledger, ids)
        whole = not turn.exact or not chain.quality.pruned
        if not chain.busy and whole and common >= chain.processed < len(ids):
            return Plan("resumed", turn, ids, chain.processed, chain, version=chain.version)
        miss = self._why(chain, ids, common) if whole else PRUNED
        refusal = ChainMismatchError(f"chain {name}: {miss.text}", chain_id=name, reason=miss.reason, token=miss.token)
        if turn.append:
            raise refusal
        fits = [c.processed <= common and c.processed < len(ids) for c in chain.checkpoints]
        fits = [ok and not (turn.exact and c.quality.pruned) for ok, c in zip(fits, chain.checkpoints, strict=True)]
        best = max(
            (i for i, ok in enumerate(fits) if ok), key=lambda i: (chain.checkpoints[i].processed, i), default=None
        )
        if best is not None:
            forks = chain.busy or turn.branch == "fork"
            reused = chain.checkpoints[best].processed
            status: Status = "forked" if forks else "rewound"
            how = miss.text, chain.version, miss.reason, miss.token
            return Plan(status, turn, ids, reused, chain, best, forks, *how)
        if chain.busy:
            return self._plan_unnamed(turn, miss)
        raise refusal

    def _why(self, chain: Chain, ids: np.ndarray, common: int) -> Miss:
        if chain.busy:
            return Miss("busy", "busy")
        if common < min(chain.processed, len(ids)):
            text = f"diverged at token {common}: {chain.ledger[common]} was processed, {ids[common]} was sent"
            return Miss("diverged", text, common)
        text = f"{chain.processed} tokens were processed and only {len(ids)} were sent: there is none to go on with"
        return Miss("short", text)

    def _plan_unnamed(self, turn: Turn, miss: Miss | None = None) -> Plan:
        """`miss` says why the named chain can't be used, if one was named."""
        ids, searched = turn.ids, turn.lookup and not turn.append
        hashes = stride_hashes(turn.seed, ids) if searched else []
        found = self._lookup(hashes, ids, turn.exact) if searched else None
        if found is None:
            status: Status = "recreated" if miss else "created"
            if miss is None and turn.exact and searched and self._lookup(hashes, ids) is not None:
                miss = PRUNED
            elif miss is None:
                chains = reversed(self.chains.values())
                miss = chain_miss.of_nothing(chains, self._dead, turn, hashes) if searched else chain_miss.COLD
            how = {"reason": miss.text, "miss": miss.reason, "diverged_at": miss.token, "hashes": tuple(hashes)}
            return Plan(status, turn, ids, **how)
        chain, checkpoint = found
        reused = chain.processed if checkpoint is None else chain.checkpoints[checkpoint].processed
        miss = miss or chain_miss.of_divergence(chain, ids, reused)
        adopts = checkpoint is None and not chain.named
        plan = Plan("adopted" if adopts else "forked", turn, ids, reused, chain, checkpoint, not adopts)
        plan = dataclasses.replace(plan, version=chain.version)
        return dataclasses.replace(plan, reason=miss.text, miss=miss.reason, diverged_at=miss.token) if miss else plan

    def lookup(self, seed: bytes, ids: np.ndarray) -> tuple[Chain, int | None] | None:
        """The state that has processed the longest proper prefix of `ids`: a chain, and a checkpoint or None: its head.

        Ties: idle before busy, nearer tiers, most recently used, smallest id.

        Args:
          seed: see `Chain`.
          ids: uint32 [n].
        """
        return self._lookup(stride_hashes(seed, ids), ids)

    def _lookup(self, hashes: list[bytes], ids: np.ndarray, exact: bool = False) -> tuple[Chain, int | None] | None:
        for stride in range(len(hashes) - 1, -1, -1):
            found = [
                (boundary, not chain.busy, -tier, chain.used_tick, chain, checkpoint)
                for chain in self._buckets.get(hashes[stride], ())
                for boundary, tier, checkpoint in _boundaries(chain)
                if boundary // STRIDE == stride
                and boundary < len(ids)
                and not (exact and _state(chain, checkpoint).quality.pruned)
                and np.array_equal(chain.ledger[stride * STRIDE : boundary], ids[stride * STRIDE : boundary])
            ]
            if found:
                best = max(key[:4] for key in found)
                *_, chain, checkpoint = min(
                    (f for f in found if f[:4] == best), key=lambda f: (f[4].chain_id, f[5] or 0)
                )
                return chain, checkpoint
        return None

    # Turns.

    def apply(self, plan: Plan, owner: str) -> Chain:
        """Gives a chain to a turn: RESTORING, owned by `owner`. The payload of a fork is the caller's to copy.

        Raises:
          ChainOwnerError: the source has changed since it was planned. Nothing was changed.
        """
        source, turn = plan.source, plan.turn
        if source is not None and (
            source.version != plan.version
            or source.state is ChainState.GONE
            or (source.busy and plan.checkpoint is None)
            or (plan.checkpoint is not None and plan.checkpoint >= len(source.checkpoints))
        ):
            raise ChainOwnerError("a plan is older than its chain", chain_id=source.chain_id)
        self._tick += 1
        self.counts[plan.status] += 1
        now = self._clock()
        if source is None or plan.forks:
            chain = Chain(self.ids.mint(), turn.seed, turn.fingerprint, turn.method, turn.tenant, ChainState.RESTORING)
            chain.created_tick, chain.created_s, chain.implicit = self._tick, now, turn.implicit
            chain.hashes = list(plan.hashes)  # of what `start` will be given
            if source is not None:
                state = source if plan.checkpoint is None else source.checkpoints[plan.checkpoint]
                chain.parent_id, chain.tier, chain.quality = source.chain_id, state.tier, state.quality
                chain.evicted, chain.cuts = state.evicted, state.cuts
                chain.ledger, chain.processed = source.ledger[: plan.reused], plan.reused
                source.used_tick = self._tick
            self.chains[chain.chain_id] = chain
        else:
            chain = source
            if plan.checkpoint is not None:
                self._rewind(chain, plan.checkpoint)
            chain.named = chain.named or turn.chain_id is not None
            chain.implicit = chain.implicit and turn.implicit
            if chain.turns:
                gap = max(0.0, now - chain.used_s)
                chain.gap_s = gap if chain.gap_s is None else chain.gap_s + _GAP_SMOOTHING * (gap - chain.gap_s)
        chain.state, chain.owner = ChainState.RESTORING, owner
        self._touch(chain, now)
        return chain

    def fork(self, source: Chain, checkpoint: int | None, payload: Any, size: int, tier: Tier) -> Chain:
        """A new idle chain like the head of another, or like one of its checkpoints. `payload` is its own copy."""
        state = source if checkpoint is None else source.checkpoints[checkpoint]
        chain = Chain(
            self.ids.mint(), source.seed, source.fingerprint, source.method, source.tenant, ChainState.IDLE, tier
        )
        chain.ledger = source.ledger if checkpoint is None else source.ledger[: state.processed]
        chain.hashes = stride_hashes(chain.seed, chain.ledger, source.hashes[: len(chain.ledger) // STRIDE + 1] or None)
        chain.processed, chain.quality, chain.parent_id = state.processed, state.quality, source.chain_id
        chain.evicted, chain.cuts = state.evicted, state.cuts
        chain.payload, chain.size, chain.named = payload, size, True
        chain.priority, chain.ttl_s = source.priority, source.ttl_s
        self._tick += 1
        chain.created_tick, chain.created_s = self._tick, self._clock()
        self.chains[chain.chain_id] = chain
        self.counts["forked"] += 1
        self._touch(chain, chain.created_s)
        return chain

    def cut(self, chain: Chain, tokens: int) -> bool:
        """Takes back what an idle chain has behind its first `tokens`: it goes on from the newest state before that.

        Returns False, with nothing changed, if there is none.
        """
        if chain.busy:
            raise ChainBusyError(f"chain {chain.chain_id} has a turn under way", chain_id=chain.chain_id)
        kept = [i for i, c in enumerate(chain.checkpoints) if c.processed <= tokens]
        if not kept:
            return False
        ledger = chain.ledger[:tokens]
        self._rewind(chain, max(kept, key=lambda i: (chain.checkpoints[i].processed, i)))
        chain.ledger, chain.hashes = ledger, chain.hashes[: tokens // STRIDE + 1]
        self._touch(chain, chain.used_s)
        return True

    def _rewind(self, chain: Chain, index: int) -> None:
        """Back to a checkpoint: later states are dropped. The ledger loses what came after."""
        target, later = chain.checkpoints[index], chain.checkpoints[index + 1 :]
        for payload in (chain.payload, *(c.payload for c in later)):
            self._release(payload)
        chain.checkpoints = [c for c in chain.checkpoints[:index] if c.processed <= target.processed]
        chain.ledger, chain.processed = chain.ledger[: target.processed], target.processed
        chain.payload, chain.tier, chain.quality = target.payload, target.tier, target.quality
        chain.evicted, chain.cuts = target.evicted, target.cuts
        self.counts["rewinds"] += 1

    def start(self, chain: Chain, owner: str, ledger: np.ndarray | None = None) -> Any:
        """The turn got its place: takes the payload out of the record, since it is written from now on.

        `ledger` is its whole context, which checkpoints may be made of.
        """
        self._check_owner(chain, owner)
        if ledger is not None:
            if len(chain.ledger):
                chain.hashes = chain.hashes[: common_prefix(chain.ledger, ledger) // STRIDE + 1]
            chain.ledger = ledger
            self._register(chain)
        chain.state = ChainState.ACTIVE
        self.counts["reused_tokens"] += chain.processed
        payload, chain.payload = chain.payload, None
        chain.size = 0
        chain.version += 1
        self.changes += 1
        return payload

    def finish(
        self,
        chain: Chain,
        owner: str,
        ledger: np.ndarray,
        processed: int,
        payload: Any,
        size: int = 0,
        tier: Tier = Tier.DEVICE,
        quality: Quality | None = None,
    ) -> None:
        """The turn is over and the chain IDLE.

        Args:
          chain, owner: of the turn.
          ledger: uint32, all tokens of the conversation.
          processed: of these, those that `payload` covers; at least as many as when the turn began.
          payload: the rows; dropping them frees `size` in `tier`.
          quality: what they have lost; None leaves the record.

        Raises:
          ChainOwnerError: another turn's, or tokens that the chain can't have. Nothing was changed.
        """
        self._check_owner(chain, owner)
        known = chain.ledger[: chain.processed]
        if not chain.processed <= processed <= len(ledger) or not np.array_equal(ledger[: len(known)], known):
            raise ChainOwnerError(
                f"{processed} of {len(ledger)} tokens can't follow {chain.processed} processed ones",
                chain_id=chain.chain_id,
            )
        same = common_prefix(chain.ledger, ledger)
        for checkpoint in [c for c in chain.checkpoints if c.processed > same]:  # of tokens that are not part of it
            chain.checkpoints.remove(checkpoint)
            self._release(checkpoint.payload)
        chain.ledger, chain.processed = ledger, processed
        chain.hashes = stride_hashes(chain.seed, ledger, chain.hashes[: same // STRIDE + 1] or None)
        chain.payload, chain.size, chain.tier = payload, size, tier
        chain.quality = quality or chain.quality
        chain.state, chain.owner = ChainState.IDLE, None
        chain.turns += 1
        self._tick += 1
        self.counts["finished"] += 1
        self._touch(chain, self._clock())

    def restore(self, chain: Chain) -> None:
        """Takes over an idle chain that an earlier boot has left. Such chains come oldest use first."""
        self._tick += 1
        chain.created_tick = self._tick
        self.chains[chain.chain_id] = chain
        self.counts["restored"] += 1
        self._touch(chain, chain.used_s)

    def unclaim(self, chain: Chain, owner: str) -> None:
        """The turn ended before it wrote anything: the chain is as it was; one without a state is gone."""
        self._check_owner(chain, owner)
        if chain.state is not ChainState.RESTORING:
            raise ChainOwnerError("a turn that has begun can't be taken back", chain_id=chain.chain_id)
        if not chain.processed or chain.payload is None:
            self._bury(chain, "interrupted")
            return
        if not chain.hashes:
            chain.hashes = stride_hashes(chain.seed, chain.ledger)
        chain.state, chain.owner = ChainState.IDLE, None
        self._touch(chain, self._clock())

    def forget(self, chain: Chain, owner: str) -> None:
        """A turn that has not begun gives up what it would have reused: it will compute its whole context."""
        self._check_owner(chain, owner)
        if chain.state is not ChainState.RESTORING or chain.payload is None:
            raise ChainOwnerError("there is nothing to give up", chain_id=chain.chain_id)
        self.drop_checkpoints(chain)
        self._release(chain.payload)
        chain.payload, chain.size, chain.tier = None, 0, Tier.DEVICE
        chain.ledger, chain.processed, chain.hashes = chain.ledger[:0], 0, []
        chain.quality, chain.evicted, chain.cuts = Quality(rebuilt=True), (), ()
        self.counts["forgotten"] += 1
        self._touch(chain, chain.used_s)

    def fail(self, chain: Chain, owner: str, reason: str) -> None:
        """The turn lost the state: GONE."""
        self._check_owner(chain, owner)
        self._bury(chain, reason)

    def drop(self, chain: Chain, reason: str) -> None:
        """Ends an idle chain. Raises ChainBusyError while a turn has it."""
        if chain.busy:
            raise ChainBusyError(f"chain {chain.chain_id} has a turn under way", chain_id=chain.chain_id)
        self._bury(chain, reason)

    # Payloads.

    def place(self, chain: Chain, payload: Any, size: int, tier: Tier) -> None:
        """The rows of a chain that no turn writes are somewhere else now. The old payload is the caller's."""
        if chain.state not in (ChainState.IDLE, ChainState.RESTORING):
            raise ChainOwnerError("only rows that nobody writes can be moved", chain_id=chain.chain_id)
        chain.payload, chain.size, chain.tier = payload, size, tier
        chain.placed_s = self._clock()
        chain.version += 1
        self.changes += 1

    def add_checkpoint(self, chain: Chain, checkpoint: Checkpoint) -> None:
        """Keeps an earlier state; the oldest of its kind goes if there are too many."""
        if not 0 < checkpoint.processed <= len(chain.ledger):
            raise ChainOwnerError("a checkpoint must be within the ledger", chain_id=chain.chain_id)
        chain.checkpoints.append(checkpoint)
        alike = [c for c in chain.checkpoints if c.kind == checkpoint.kind]
        for old in alike[: len(alike) - self._max_checkpoints]:
            chain.checkpoints.remove(old)
            self._release(old.payload)
        self.counts["checkpoints"] += 1
        self._touch(chain, chain.used_s)

    def take_checkpoint(self, chain: Chain, processed: int) -> Checkpoint | None:
        """Removes the newest state of exactly so many tokens, and gives it away."""
        found = next((c for c in reversed(chain.checkpoints) if c.processed == processed), None)
        if found is not None:
            chain.checkpoints.remove(found)
            self._touch(chain, chain.used_s)
        return found

    def drop_checkpoints(self, chain: Chain, prefixes: bool = True) -> int:
        """Drops earlier states of a chain, `prefixes` that others may begin with among them. Returns how many."""
        stay = [] if prefixes else [c for c in chain.checkpoints if c.kind == "prefix"]
        dropped = chain.checkpoints if prefixes else [c for c in chain.checkpoints if c.kind != "prefix"]
        chain.checkpoints = stay
        for checkpoint in dropped:
            self._release(checkpoint.payload)
        self._touch(chain, chain.used_s)
        return len(dropped)

    def drop_behind(self, chain: Chain, tokens: int) -> None:
        """Drops earlier states of a chain that have processed more than so many tokens."""
        dropped = [c for c in chain.checkpoints if c.processed > tokens]
        chain.checkpoints = [c for c in chain.checkpoints if c.processed <= tokens]
        for checkpoint in dropped:
            self._release(checkpoint.payload)
        self._touch(chain, chain.used_s)

    # Order of loss.

    def value(self, chain: Chain, now: float) -> float:
        """What keeping a chain is worth: chance of an early return x cost of computing it again, per byte."""
        gap = chain.resume_hint_s or chain.gap_s or _DEFAULT_GAP_S
        halvings = min(1000.0, max(0.0, now - chain.used_s) / max(gap, 1e-3)) - chain.priority
        return 2.0**-halvings * self._cost(chain.processed) / max(1, chain.size)

    def victims(self, tier: Tier = Tier.DEVICE) -> list[Chain]:
        """Idle chains in `tier` that are not pinned, least valuable first; ties: oldest use, then id."""
        now = self._clock()
        idle = (c for c in self.chains.values() if c.state is ChainState.IDLE and c.tier is tier)
        free = [c for c in idle if c.pinned_until_s <= now]
        return sorted(free, key=lambda c: (self.value(c, now), c.used_tick, c.chain_id))

    def expired(self, ttl_s: float) -> list[Chain]:
        """Idle chains that outlived their ttl (`ttl_s` if they have none), longest first; pinned ones excepted."""
        now = self._clock()
        late = [
            c
            for c in self.chains.values()
            if c.state is ChainState.IDLE
            and now - max(c.used_s, c.placed_s) > (ttl_s if c.ttl_s is None else c.ttl_s)
            and c.pinned_until_s <= now
        ]
        return sorted(late, key=lambda c: (c.used_s, c.used_tick, c.chain_id))

    # Books.

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what there is now."""
        states = collections.Counter(chain.state for chain in self.chains.values())
        return {
            **self.counts,
            "entries": len(self.chains),
            "active": states[ChainState.ACTIVE] + states[ChainState.RESTORING],
            "idle": states[ChainState.IDLE],
            "tombstones": len(self.tombstones),
            "tombstone_capacity": self._max_tombstones,
            "history_tokens": sum(len(chain.ledger) for chain in self.chains.values()),
        }

    def check_integrity(self, deep: bool = False) -> None:
        """Re-adds states, owners and the lookup table; raises ChainOwnerError. `deep` computes all hashes again."""
        buckets: dict[bytes, set[Chain]] = {}
        for chain_id, chain in self.chains.items():
            owned = chain.owner is not None
            if chain_id != chain.chain_id or chain.state is ChainState.GONE or chain.busy != owned:
                raise ChainOwnerError(f"a {chain.state.value} chain has owner {chain.owner}", chain_id=chain_id)
            if chain.processed > len(chain.ledger) or (chain.state is ChainState.IDLE and chain.payload is None):
                raise ChainOwnerError("an idle chain has no rows, or more than tokens", chain_id=chain_id)
            if chain.state is ChainState.ACTIVE and chain.payload is not None:
                raise ChainOwnerError("a turn and the record both have the rows", chain_id=chain_id)
            hashes = stride_hashes(chain.seed, chain.ledger) if deep else chain.hashes
            for boundary, _, _ in _boundaries(chain):
                buckets.setdefault(hashes[boundary // STRIDE], set()).add(chain)
        if buckets != {key: set(chains) for key, chains in self._buckets.items()}:
            raise ChainOwnerError("the lookup table does not list what the chains have processed")

    def _check_owner(self, chain: Chain, owner: str) -> None:
        if not chain.busy or chain.owner != owner:
            raise ChainOwnerError(f"{owner} does not have the chain, {chain.owner} does", chain_id=chain.chain_id)

    def _touch(self, chain: Chain, now: float) -> None:
        """Something has changed: clock, version and lookup table."""
        chain.used_tick, chain.used_s = self._tick, now
        chain.version += 1
        self.changes += 1
        self._register(chain)

    def _register(self, chain: Chain) -> None:
        for key in self._keys.pop(chain, ()):
            bucket = self._buckets[key]
            del bucket[chain]
            if not bucket:
                del self._buckets[key]
        boundaries = [] if chain.state is ChainState.GONE else _boundaries(chain)
        if boundaries:
            chain.hashes = stride_hashes(
                chain.seed, chain.ledger, chain.hashes[: len(chain.ledger) // STRIDE + 1] or None
            )
            keys = self._keys[chain] = {chain.hashes[boundary // STRIDE] for boundary, _, _ in boundaries}
            for key in keys:
                self._buckets.setdefault(key, {})[chain] = None

    def _bury(self, chain: Chain, reason: str) -> None:
        payloads = [chain.payload, *(c.payload for c in chain.checkpoints)]
        chain.state, chain.owner, chain.reason = ChainState.GONE, None, reason
        chain.payload, chain.checkpoints, chain.evicted, chain.cuts = None, [], (), ()
        self._touch(chain, chain.used_s)
        del self.chains[chain.chain_id]
        self.tombstones[chain.chain_id] = chain.tenant, reason
        if STRIDE <= chain.processed < len(chain.hashes) * STRIDE:
            self._dead[chain.hashes[chain.processed // STRIDE]] = reason
            if len(self._dead) > self._max_tombstones:
                self._dead.popitem(last=False)
        while len(self.tombstones) > self._max_tombstones:
            self.tombstones.popitem(last=False)
        self.counts[f"gone_{reason}"] += 1
        for payload in payloads:
            if payload is not None:
                self._release(payload)
        self.on_gone(chain)


def _boundaries(chain: Chain) -> list[tuple[int, Tier, int | None]]:
    """(tokens processed, tier, checkpoint or None) of each state from which a turn could go on."""
    states: list[tuple[int, Tier, int | None]] = []
    if chain.state is ChainState.IDLE:
        states.append((chain.processed, chain.tier, None))
    states.extend((c.processed, c.tier, i) for i, c in enumerate(chain.checkpoints))
    return states


def _state(chain: Chain, checkpoint: int | None) -> Chain | Checkpoint:
    return chain if checkpoint is None else chain.checkpoints[checkpoint]
