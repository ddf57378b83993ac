"""Why a turn reuses less than its client may have hoped for, in a word and in a sentence."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from sparsejax.cache.chain import STRIDE, Chain, common_prefix
from sparsejax.errors import ChainBusyError, ChainError, ChainNotFoundError

if TYPE_CHECKING:
    from sparsejax.cache.chain_index import Turn

MIN_TOKENS = 32
"""Fewer tokens in common are no hint that a conversation is the same."""
MAX_CHAINS = 64
"""The newest so many chains are compared with a turn that matches none."""


@dataclasses.dataclass(frozen=True)
class Miss:
    """One reason.

    Attributes:
      reason: a word, see `ChainReport.miss`.
      text: a sentence.
      token: where tokens part ways, if they do.
    """

    reason: str
    text: str
    token: int | None = None


COLD = Miss("cold", "cold")


def of_error(error: ChainError) -> Miss:
    """Of a named chain that can't be continued."""
    known = "unknown" if isinstance(error, ChainNotFoundError) else "busy" if isinstance(error, ChainBusyError) else "-"
    return Miss(error.reason or known, error.message, error.token)


def of_divergence(chain: Chain, ids: np.ndarray, reused: int) -> Miss | None:
    """Of a turn that goes on from an earlier state than the chain's newest; None if nothing else was possible."""
    common = _common(chain, ids, None)
    if chain.busy or common <= reused or common >= len(chain.ledger):
        return Miss("busy", f"chain {chain.chain_id} has a turn under way") if chain.busy else None
    return _parting(chain, ids, common)


def of_nothing(chains: Iterable[Chain], dead: Mapping[bytes, str], turn: Turn, hashes: list[bytes]) -> Miss:
    """Of a turn that no chain fits: looks for the one that its client may have meant.

    Args:
      chains: all there are, newest first.
      dead: stride hash of the last state of chains that are gone, and how they ended.
      turn: what was asked.
      hashes: stride hashes of its tokens.
    """
    best, found = MIN_TOKENS - 1, COLD
    for stride in range(len(hashes) - 1, 0, -1):
        if hashes[stride] in dead:
            reason = dead[hashes[stride]]
            best = stride * STRIDE
            found = Miss(reason, f"a chain of at least {best} of these tokens is gone ({reason})")
            break
    beginning = turn.ids[:MIN_TOKENS].tobytes()
    for chain in itertools.islice(chains, MAX_CHAINS):
        if chain.tenant != turn.tenant or chain.ledger[:MIN_TOKENS].tobytes() != beginning:
            continue
        common = _common(chain, turn.ids, hashes if chain.seed == turn.seed else None)
        if common <= best:
            continue
        best = common
        if chain.seed == turn.seed:
            found = _parting(chain, turn.ids, common)
        else:
            what = differing(chain, turn)
            found = Miss(what, f"chain {chain.chain_id} has the first {common} of these tokens, but another {what}")
    return found


def _parting(chain: Chain, ids: np.ndarray, common: int) -> Miss:
    """Of tokens that are a chain's up to `common`."""
    if common >= len(ids):
        return Miss("short", f"all {common} tokens are those of chain {chain.chain_id}: there is none to go on with")
    return Miss("diverged", f"diverged from chain {chain.chain_id} at token {common}", common)


def differing(chain: Chain, turn: Turn) -> str:
    """What tells a chain of another seed apart: "method", "fingerprint" or "salt"."""
    if chain.fingerprint == turn.fingerprint:
        return "salt"
    return "method" if chain.method != turn.method else "fingerprint"


def _common(chain: Chain, ids: np.ndarray, hashes: list[bytes] | None) -> int:
    """Tokens in common; strides whose hashes are known to be equal are not compared one by one."""
    low = 0
    if hashes is not None:  # equal hashes mean that all before them is equal
        high = min(len(chain.hashes), len(hashes)) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if chain.hashes[middle] == hashes[middle]:
                low = middle
            else:
                high = middle - 1
    start = low * STRIDE
    # The next hash differs, so the difference is near; where it is not known the rest is compared as well.
    near = common_prefix(chain.ledger[start : start + STRIDE], ids[start : start + STRIDE])
    return start + (near if near < STRIDE else common_prefix(chain.ledger[start:], ids[start:]))
