"""Which conversations the chains of a server hold, and how their turns ended (see `serving.history`)."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from sparsejax.serving.messages import Step, Steps

MAX_STEPS = 1 << 18
"""Messages of all chains that are remembered."""
MAX_CANDIDATES = 8
"""Chains with the same beginning that are looked at."""


class Spelling(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a finished turn.

    Attributes:
      messages: so many messages it covers, the last one its answer.
      tokens: ledger ids that stand for them, without one that only ended the answer.
      digest: of these ids.
      closing: the id that ended the answer and is not part of its text, or None.
      tail: end of the answer's text that no whole token stands for: a stop string cut a token.
    """

    messages: int
    tokens: int
    digest: bytes
    closing: int | None = None
    tail: str = ""


@dataclasses.dataclass(frozen=True)
class Talk:
    """The messages of a chain's newest turn, a step for each, and the ends of all its turns."""

    steps: tuple[Step, ...] = ()
    ends: tuple[End, ...] = ()

    def agreed(self, steps: Sequence[Step]) -> int:
        """Messages that a conversation begins with, too: reasoning is the same or left out."""
        for i, (own, other) in enumerate(zip(self.steps, steps, strict=False)):
            if own.digest != other.digest or other.thought not in (None, own.thought):
                return i
        return min(len(self.steps), len(steps))

    def beginning(self, messages: int) -> Talk:
        """The turns that end within so many messages."""
        ends = tuple(end for end in self.ends if end.messages <= messages)
        return Talk(self.steps[: ends[-1].messages] if ends else (), ends)


NOTHING = Talk()
"""What is known of a chain of which nothing is."""


class Talks:
    """Conversations by chain and by how they begin. Bounded; safe in several threads."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._lock = threading.Lock()
        self._talks: collections.OrderedDict[str, Talk] = collections.OrderedDict()
        self._chains: dict[bytes, dict[str, None]] = {}  # digest of a beginning -> chains, the newest last
        self._steps = 0

    def __len__(self) -> int:
        return len(self._talks)

    def get(self, chain_id: str) -> Talk:
        """What is known of a chain; an empty record if nothing is."""
        with self._lock:
            return self._talks.get(chain_id, NOTHING)

    def put(self, chain_id: str, talk: Talk) -> None:
        """Notes a chain's newest turn; the oldest chains go if there is no room."""
        with self._lock:
            self._forget(chain_id)
            self._talks[chain_id] = talk
            self._steps += len(talk.steps)
            for step in talk.steps:
                chains = self._chains.setdefault(step.digest, {})
                chains.pop(chain_id, None)
                chains[chain_id] = None
            while self._steps > self._max_steps:
                self._forget(next(iter(self._talks)))

    def find(self, steps: Sequence[Step]) -> list[str]:
        """Chains that share the longest beginning with a conversation, the newest first."""
        with self._lock:
            for step in reversed(steps):
                if chains := self._chains.get(step.digest):
                    newest = reversed(chains)
                    return [next(newest) for _ in range(min(len(chains), MAX_CANDIDATES))]
        return []

    def forget(self, chain_id: str) -> None:
        """The chain is gone."""
        with self._lock:
            self._forget(chain_id)

    def _forget(self, chain_id: str) -> None:
        talk = self._talks.pop(chain_id, NOTHING)
        self._steps -= len(talk.steps)
        for step in talk.steps:
            chains = self._chains.get(step.digest, {})
            chains.pop(chain_id, None)
            if not chains:
                self._chains.pop(step.digest, None)


class OpenTurn:
    """A chat turn under way: notes its end once it is known. `begun` and `finished` are for the event loop: cheap.

    Args:
      talks: where to.
      tokenizer: of the server.
      steps: of the request's messages.
      ids: of the request; the first of them are `kept`, uint32.
      old: what its chain had of the messages it begins with.
    """

    def __init__(
        self, talks: Talks, tokenizer: Spelling, steps: Steps, ids: Sequence[int], kept: np.ndarray, old: Talk
    ) -> None:
        self._talks = talks
        self._tokenizer = tokenizer
        self._steps = steps
        # Reasoning that the client left out this time is still what its chain has.
        pairs = itertools.zip_longest(steps.steps, old.steps, fillvalue=Step(b"", None))
        self._asked = tuple(Step(new.digest, new.thought or known.thought) for new, known in pairs)
        self._ends = old.ends
        self._tokens = len(ids)
        self._hash = hashlib.blake2b(np.asarray(kept, "<u4").tobytes(), digest_size=16)
        self._hash.update(np.asarray(ids[len(kept) :], "<u4").tobytes())

    def begun(self, chain_id: str) -> None:
        """The turn has a chain: from now on it is found by the request's messages."""
        self._talks.put(chain_id, Talk(self._asked, self._ends))

    def finished(
        self,
        chain_id: str,
        answer: Mapping[str, Any],
        ids: Sequence[int],
        *,
        closed: bool,
        cut: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """The turn has ended by itself or by a stop string.

        Args:
          chain_id: of the chain.
          answer: the message that the client was sent.
          ids: all generated ones.
          closed: the last of them ended the answer and is not in its text.
          cut: a stop string ended the text.
          skip_special_tokens: the text has none.
        """
        tail = b""
        if cut:
            tail = str(answer.get("content") or "").encode()
            hidden = self._tokenizer.special_ids if skip_special_tokens else ()
            for whole, index in enumerate(ids):
                piece = b"" if index in hidden else self._tokenizer.token_bytes(index)
                if not tail.startswith(piece):
                    ids = ids[:whole]
                    break
                tail = tail[len(piece) :]
        closing = None
        if closed and not cut:
            *ids, closing = ids
        self._steps.add(answer)
        self._hash.update(np.asarray(ids, "<u4").tobytes())
        messages, tokens = len(self._steps.steps), self._tokens + len(ids)
        end = End(messages, tokens, self._hash.digest(), closing, tail.decode(errors="replace"))
        self._talks.put(chain_id, Talk((*self._asked, self._steps.steps[-1]), (*self._ends, end)))


def digest_of_ids(ids: np.ndarray) -> bytes:
    """Of uint32 ids, to tell whether a ledger still begins with them."""
    return hashlib.blake2b(np.ascontiguousarray(ids, "<u4").tobytes(), digest_size=16).digest()
