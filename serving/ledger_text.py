"""What the ids of a ledger stand for, as bytes, and where a text leaves it.

Text is sealed (see `sparsejax.models.load.chat_prompt`): control tokens are stand-ins that no request can contain, so
equal bytes mean the same control tokens in the same places.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

MAX_CACHED_BYTES = 128 << 20
_BLOCK_BYTES = 1 << 16
_DIGEST_BYTES = 16


class Sealing(Protocol):
    """What is needed of a tokenizer."""

    @property
    def control_ids(self) -> Collection[int]: ...

    def encode_sealed(self, text: str) -> list[int]: ...
    def sealed_bytes(self, token_id: int) -> bytes: ...


class LedgerText:
    """The bytes of a list of ids.

    Args:
      tokenizer: says what each id stands for.
      ids: uint32 [n].
      old: the text of an earlier state of the same chain, to begin from what they share.

    Attributes:
      ids: as given.
      data: bytes of all ids.
      offsets: int64 [n + 1], where each id's bytes begin and where the last one's end.
    """

    def __init__(self, tokenizer: Sealing, ids: np.ndarray, old: LedgerText | None = None) -> None:
        self._tokenizer = tokenizer
        shared = 0 if old is None else _common(old.ids, ids)
        new = ids[shared:]
        known = {i: tokenizer.sealed_bytes(i) for i in np.unique(new).tolist()}
        pieces = [known[i] for i in new.tolist()]
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        if old is None or not shared:
            head, starts = b"", np.zeros(1, np.int64)
        else:
            starts = old.offsets[: shared + 1]
            head = old.data[: starts[-1]]
        self.ids = ids
        self.data = head + b"".join(pieces)
        self.offsets = np.concatenate([starts, starts[-1] + np.cumsum(sizes)])

    def cut(self, text: bytes, start: int, boundaries: Sequence[int]) -> tuple[int, int, int]:
        """How far a text goes along the ids from `start` on, and where to leave them.

        All ids are kept if the text goes on behind them; else those up to the last boundary before the difference:
        one of `boundaries` (where states were kept) or the end of a control token, where text divides cleanly.

        Returns:
          (ids kept, bytes of the text that those from `start` cover, ids before the first difference).
        """
        first = int(self.offsets[start])
        same = common_bytes(memoryview(self.data)[first:], text)
        whole = int(np.searchsorted(self.offsets, first + same, "right")) - 1
        places = self.offsets[start : whole + 1] - first

        def divides(at: int) -> bool:
            """No character of the text lies on both sides of the end of id `at`."""
            place = int(places[at - start])
            return place == len(text) or text[place] & 0xC0 != 0x80

        if whole == len(self.ids) and divides(whole):
            kept = whole
        else:
            control = np.isin(self.ids[start:whole], list(self._tokenizer.control_ids))
            last = start + int(np.flatnonzero(control)[-1]) + 1 if control.any() else start
            kept = max([last, *(at for at in boundaries if last < at <= whole and divides(at))])
        return kept, int(places[kept - start]), whole


class LedgerTexts:
    """The texts of the chains asked for last, so that a turn pays for its new ids only. Safe in several threads."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._texts: collections.OrderedDict[str, LedgerText] = collections.OrderedDict()
        self._bytes = 0

    def get(self, tokenizer: Sealing, chain_id: str, ids: np.ndarray) -> LedgerText:
        """The text of a chain whose ledger is `ids` now."""
        with self._lock:
            old = self._texts.get(chain_id)
        text = LedgerText(tokenizer, ids, old)
        with self._lock:
            self._forget(chain_id)
            self._texts[chain_id] = text
            self._bytes += _size(text)
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._texts)))
        return text

    def forget(self, chain_id: str) -> None:
        with self._lock:
            self._forget(chain_id)

    def _forget(self, chain_id: str) -> None:
        text = self._texts.pop(chain_id, None)
        if text is not None:
            self._bytes -= _size(text)


class TextIndex:
    """Chains by the text that they stand for, so that a longer text finds the one it goes on from.

    Texts are known by scope, length and digest. Bounded; safe in several threads.
    """

    def __init__(self, max_chains: int = 1024) -> None:
        self._max_chains = max_chains
        self._lock = threading.Lock()
        self._keys: collections.OrderedDict[str, tuple[bytes, int, bytes]] = collections.OrderedDict()
        self._chains: dict[bytes, dict[int, dict[bytes, dict[str, None]]]] = {}  # scope, length, digest

    def put(self, chain_id: str, scope: bytes, text: bytes) -> None:
        """The chain stands for this text now."""
        digest = _text_digest(text)
        with self._lock:
            self._forget(chain_id)
            self._keys[chain_id] = scope, len(text), digest
            of_length = self._chains.setdefault(scope, {}).setdefault(len(text), {})
            of_length.setdefault(digest, {})[chain_id] = None
            while len(self._keys) > self._max_chains:
                self._forget(next(iter(self._keys)))

    def find(self, scope: bytes, text: bytes) -> list[str]:
        """Chains of the longest text that begins this one, the newest first."""
        with self._lock:
            lengths = sorted(n for n in self._chains.get(scope, ()) if n <= len(text))
        hasher, done, digests = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0, []
        for length in lengths:
            hasher.update(text[done:length])
            digests.append((length, hasher.copy().digest()))
            done = length
        with self._lock:
            of_scope = self._chains.get(scope, {})
            for length, digest in reversed(digests):
                if chains := of_scope.get(length, {}).get(digest):
                    return list(reversed(chains))
        return []

    def forget(self, chain_id: str) -> None:
        with self._lock:
            self._forget(chain_id)

    def _forget(self, chain_id: str) -> None:
        key = self._keys.pop(chain_id, None)
        if key is None:
            return
        scope, length, digest = key
        of_scope = self._chains[scope]
        of_length = of_scope[length]
        of_length[digest].pop(chain_id)
        if not of_length[digest]:
            of_length.pop(digest)
        if not of_length:
            of_scope.pop(length)
        if not of_scope:
            self._chains.pop(scope)


def encode_behind(tokenizer: Sealing, kept: np.ndarray, text: str) -> list[int] | None:
    """Ids of sealed text that goes on behind `kept`, or None if it can't be encoded alone.

    Behind a control token the ids are those that the whole text would have. Elsewhere they need not be, and tokenizers
    that begin a text differently can't do it.
    """
    if not text or not len(kept):
        return tokenizer.encode_sealed(text) if text else []
    last = int(kept[-1])
    if last in tokenizer.control_ids:
        seed = tokenizer.sealed_bytes(last).decode()
        ids = tokenizer.encode_sealed(seed + text)
        return ids[1:] if ids[:1] == [last] else None
    ids = tokenizer.encode_sealed(text)
    return ids if b"".join(map(tokenizer.sealed_bytes, ids)) == text.encode() else None


def common_bytes(a: bytes | memoryview, b: bytes | memoryview) -> int:
    """Bytes that two texts have in common from the start."""
    return _common(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Elements that two arrays have in common from the start."""
    size = min(len(a), len(b))
    for start in range(0, size, _BLOCK_BYTES):
        end = min(size, start + _BLOCK_BYTES)
        if not np.array_equal(a[start:end], b[start:end]):
            return start + int(np.argmax(a[start:end] != b[start:end]))
    return size


def _size(text: LedgerText) -> int:
    return len(text.data) + text.offsets.nbytes + text.ids.nbytes


def _text_digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
