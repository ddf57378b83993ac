"""One conversation that keeps its memory between turns: its id, what identifies its state, its tokens and its record.

A chain is an exact list of token ids (the ledger) and the rows that a sparse method made of the first `processed` of
them. The last sampled token has no row yet, so after a normal turn `processed` is one less than the ledger has tokens;
after a rollback it may be equal. Nothing here knows pages, rows or devices: a chain's payload is opaque.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparsejax.cache.evicted import EvictedPages
from sparsejax.errors import ChainOwnerError

if TYPE_CHECKING:
    from sparsejax.cache.row_layout import Cuts

PREFIX = "chain_"
FORMAT = 1
STRIDE = 256
"""Tokens between two hashes of a ledger."""

_MAC_BYTES = 8
_HASH_BYTES = 16
_BODY = 1 + 4 + 4 + 16  # format, instance, epoch, random

Origin = Literal["own", "older", "foreign", "forged"]


class ChainIds:
    """Issues ids and recognises them without a table.

    An id holds a format version, the instance, its boot epoch, 128 random bits and a short MAC: whoever has the id has
    the chain, so none can be guessed.

    Args:
      secret: key of the MAC; the same over the restarts of an instance.
      instance: 32-bit number of this worker.
      epoch: number of this boot; grows.
      random: gives so many random bytes.
    """

    def __init__(
        self,
        secret: bytes,
        instance: int = 0,
        epoch: int = 0,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._secret = secret
        self._random = random
        self.instance = instance
        self.epoch = epoch

    def mint(self) -> str:
        """A new id."""
        fields = (FORMAT.to_bytes(1, "big"), self.instance.to_bytes(4, "big"), self.epoch.to_bytes(4, "big"))
        body = b"".join(fields) + self._random(16)
        return PREFIX + base64.urlsafe_b64encode(body + self._mac(body)).decode().rstrip("=")

    def origin(self, chain_id: str) -> Origin:
        """Who issued an id.

        "own" is this boot, "older" an earlier one of this instance, "foreign" another instance (whose MAC can't be
        checked), "forged" nobody.
        """
        text = chain_id.removeprefix(PREFIX)
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        except ValueError:
            return "forged"
        body, mac = raw[:_BODY], raw[_BODY:]
        if not chain_id.startswith(PREFIX) or len(mac) != _MAC_BYTES or body[0] != FORMAT:
            return "forged"
        if int.from_bytes(body[1:5], "big") != self.instance:
            return "foreign"
        epoch = int.from_bytes(body[5:9], "big")
        if not hmac.compare_digest(mac, self._mac(body)) or epoch > self.epoch:
            return "forged"
        return "own" if epoch == self.epoch else "older"

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._secret[:64], digest_size=_MAC_BYTES).digest()


def fingerprint(fields: Mapping[str, Any]) -> bytes:
    """SHA-256 over the canonical JSON of everything that makes two states comparable; 32 bytes.

    Raises:
      TypeError, ValueError: a field has no canonical JSON (another type, NaN).
    """
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def seed_of(fingerprint: bytes, salt: str = "", tenant: str = "") -> bytes:
    """Start of the stride hashes: chains of another fingerprint, salt or tenant never match. 16 bytes."""
    parts = (fingerprint, salt.encode(), tenant.encode())
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=_HASH_BYTES).digest()


def digest_of(ids: np.ndarray) -> bytes:
    """SHA-256 over ids as little-endian int64, whatever the host's byte order; 32 bytes."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).digest()


def as_ids(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    """Token ids as uint32 [n]. Raises ChainOwnerError if one does not fit."""
    wide = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if wide.dtype == np.uint32:
        return wide
    if wide.size and (wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() > 0xFFFFFFFF):
        raise ChainOwnerError("token ids must be integers in [0, 2^32)")
    return wide.astype(np.uint32)


def stride_hashes(seed: bytes, ids: np.ndarray, known: list[bytes] | None = None) -> list[bytes]:
    """Hashes of the first 0, 256, 512, ... ids: each covers all before it.

    Args:
      seed: of `seed_of`.
      ids: uint32 [n].
      known: the first hashes, if they were computed before.
    """
    hashes = list(known or [seed])
    data = np.ascontiguousarray(ids, "<u4").view(np.uint8).data
    for end in range(len(hashes) * STRIDE, len(ids) + 1, STRIDE):
        block = hashlib.blake2b(hashes[-1], digest_size=_HASH_BYTES)
        block.update(data[4 * (end - STRIDE) : 4 * end])
        hashes.append(block.digest())
    return hashes


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Ids that two arrays have in common from the start."""
    size = min(len(a), len(b))
    if np.array_equal(a[:size], b[:size]):
        return size
    return int(np.argmax(a[:size] != b[:size]))


class ChainState(enum.Enum):
    """Who may do what with a chain. RESTORING: a turn owns it and waits for its place; ACTIVE: a turn writes it."""

    IDLE = "idle"
    RESTORING = "restoring"
    ACTIVE = "active"
    GONE = "gone"


class Tier(enum.IntEnum):
    """Where the rows are; the nearer, the better."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclasses.dataclass(frozen=True)
class Quality:
    """What the state of a chain has lost on its way.

    Attributes:
      evicted_tokens: resident rows fewer than processed tokens, of the longest head.
      inexact_rollback_tokens: tokens taken back although statistics of the method had seen them.
      rebuilt: computed again from its tokens, so the history of its evictions is another one.
      interrupted: the last turn was cut off by its client.
      recalled_tokens: rows lent back to turns so far, of the longest head. They were there for the new tokens of their
        turn; what was computed while they were away stays as it was.
      pruned_tokens: of `evicted_tokens`, those whose rows a client had taken away.
      degraded: some row was computed while rows that a client had taken away were missing.
    """

    evicted_tokens: int = 0
    inexact_rollback_tokens: int = 0
    rebuilt: bool = False
    interrupted: bool = False
    recalled_tokens: int = 0
    pruned_tokens: int = 0
    degraded: bool = False

    @property
    def pruned(self) -> bool:
        """Pruning has had a part in it."""
        return self.pruned_tokens > 0 or self.degraded


@dataclasses.dataclass
class Checkpoint:
    """An earlier state of a chain: its first `processed` tokens, and a payload of its own. Others as in `Chain`."""

    kind: Literal["prefix", "prompt_end", "turn_end"]
    processed: int
    payload: Any
    tier: Tier = Tier.DEVICE
    quality: Quality = Quality()
    evicted: tuple[EvictedPages, ...] = ()
    cuts: Cuts = ()


@dataclasses.dataclass(eq=False)
class Chain:
    """The record of one conversation. Only `ChainIndex` changes it.

    Attributes:
      chain_id: as issued.
      seed: of the stride hashes: fingerprint, salt and tenant in one.
      fingerprint, method: of the state; `method` is for display.
      tenant: who may see it.
      state, tier: see there; `reason` says why it is GONE.
      owner: the turn that has it, while RESTORING or ACTIVE.
      ledger: uint32 ids, the last sampled one included.
      processed: tokens that have rows, or whose effect has.
      payload: the rows, opaque; `size` is what dropping them frees, in a unit of their tier.
      evicted: rows that its method has dropped, where they are kept; of states that are shared, shared.
      cuts: ranges whose rows were pruned, where all heads have rows of the same tokens.
      checkpoints: earlier states, oldest first.
      turns: finished turns.
      parent_id: the chain it was forked from.
      named: a client knows its id.
      implicit: no client has asked for a chain so far.
      created_tick, used_tick: logical clock.
      created_s, used_s: seconds of the index's clock.
      placed_s: when its rows last went to another tier.
      gap_s: smoothed time between turns, None before the second one.
      resume_hint_s, priority, ttl_s, pinned_until_s: what its client says of it.
      version: counts changes, so a plan can tell that it is old.
    """

    chain_id: str
    seed: bytes
    fingerprint: bytes
    method: str
    tenant: str
    state: ChainState
    tier: Tier = Tier.DEVICE
    owner: str | None = None
    reason: str | None = None
    ledger: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint32))
    processed: int = 0
    payload: Any = None
    size: int = 0
    evicted: tuple[EvictedPages, ...] = ()
    cuts: Cuts = ()
    checkpoints: list[Checkpoint] = dataclasses.field(default_factory=list)
    quality: Quality = Quality()
    turns: int = 0
    parent_id: str | None = None
    named: bool = False
    implicit: bool = False
    created_tick: int = 0
    used_tick: int = 0
    created_s: float = 0.0
    used_s: float = 0.0
    placed_s: float = float("-inf")
    gap_s: float | None = None
    resume_hint_s: float | None = None
    priority: int = 0
    ttl_s: float | None = None
    pinned_until_s: float = float("-inf")
    version: int = 0
    hashes: list[bytes] = dataclasses.field(default_factory=list)

    @property
    def digest(self) -> bytes:
        """Of the processed tokens."""
        return digest_of(self.ledger[: self.processed])

    @property
    def busy(self) -> bool:
        """A turn has it."""
        return self.state in (ChainState.RESTORING, ChainState.ACTIVE)
