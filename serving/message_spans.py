"""Which tokens of a conversation are the content of one message.

The template says where a content begins and ends in the text that it writes (`models.load.chat_prompt`). From there to
tokens it goes over bytes: what each id stands for is known (`ledger_text`), so no other tokenizer, no search for the
content's words, and no mark in what the model reads is needed. Ids of a chain may stand for more than the template
writes now, reasoning that it leaves out for instance: text between two control tokens is then found by itself and its
neighbours, in order.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsejax.errors import RequestError
from sparsejax.serving.history import Conversation, Tokenizer
from sparsejax.serving.ledger_text import LedgerText, common_bytes

Span = tuple[int, int]
"""[start, stop) of tokens."""


def spans(
    tokenizer: Tokenizer,
    conversation: Conversation,
    ids: Sequence[int] | np.ndarray | LedgerText,
    wanted: Iterable[int],
) -> dict[int, Span | None]:
    """The tokens that lie wholly inside the content of messages.

    Takes time, a few renderings: not for the event loop.

    Args:
      tokenizer: of the server.
      conversation: checked messages (`prompts.conversation`).
      ids: its tokens, as encoded or as a chain has them (`anchoring.chat`), or their text; there may be more behind.
      wanted: indexes of messages.

    Returns:
      {index: [start, stop)}: empty (start == stop) for a content without a whole token; None where the tokens can't be
      named: the template does not write the content as it is, or `ids` are another conversation's.

    Raises:
      RequestError: there is no such message, or the template refuses the messages.
    """
    ledger = ids if isinstance(ids, LedgerText) else LedgerText(tokenizer, np.asarray(ids, np.uint32))
    indexes = list(dict.fromkeys(wanted))
    for index in indexes:
        if not 0 <= index < len(conversation.messages):
            raise RequestError(
                f"there is no message {index}: the conversation has {len(conversation.messages)}", param="message"
            )
    text, known = conversation.contents(tokenizer, indexes)
    places = _Places(tokenizer, text.encode(), ledger)
    found: dict[int, Span | None] = {}
    for index in indexes:
        place = known.get(index) or _alone(tokenizer, conversation, text, index)
        if place is None:
            found[index] = None
        else:
            start = len(text[: place[0]].encode())
            found[index] = places.tokens(start, start + len(text[slice(*place)].encode()))
    return found


def _alone(tokenizer: Tokenizer, conversation: Conversation, text: str, index: int) -> tuple[int, int] | None:
    """Where the content of one message begins and ends in the text: each end in a rendering of its own."""
    one, begin = conversation.render(tokenizer, before=index)
    other, end = conversation.render(tokenizer, after=index)
    if begin is None or end is None or not one == other == text or begin > end:
        return None
    return begin, end


def message_of_call(messages: Sequence[Mapping[str, Any]], tool_call_id: str) -> int:
    """Index of the result of a tool call. Raises RequestError if there is none or more than one."""
    indexes = [i for i, message in enumerate(messages) if message.get("tool_call_id") == tool_call_id]
    if len(indexes) == 1:
        return indexes[0]
    shown = repr(tool_call_id[:80])
    if not indexes:
        raise RequestError(f"no message has the tool_call_id {shown}", param="tool_call_id")
    raise RequestError(f"messages {indexes[:8]} all have the tool_call_id {shown}: name one", param="tool_call_id")


def aligned(span: Span | None, block_tokens: int) -> Span | None:
    """The whole blocks inside a span, or None if there is none."""
    if span is None:
        return None
    start, stop = -(-span[0] // block_tokens) * block_tokens, span[1] // block_tokens * block_tokens
    return (start, stop) if start < stop else None


class _Piece(NamedTuple):
    """Text between two control tokens, in bytes [start, stop), and what tells it from others."""

    start: int
    stop: int
    key: tuple[bytes, bytes, bytes]


class _Places:
    """From bytes of a template's text to the ids that stand for them."""

    def __init__(self, tokenizer: Tokenizer, text: bytes, ledger: LedgerText) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._ledger = ledger
        self._same = common_bytes(text, ledger.data)
        self._pairs: list[tuple[_Piece, _Piece | None]] | None = None

    def tokens(self, start: int, stop: int) -> Span | None:
        """[start, stop) of tokens inside these bytes of the text, or None if they aren't there."""
        if stop > self._same:
            content = self._text[start:stop]
            begin, end = self._moved(start, begins=start < stop), self._moved(stop, begins=False)
            if begin is None or end is None or self._ledger.data[begin:end] != content:
                return None
            start, stop = begin, end
        offsets = self._ledger.offsets
        first, last = int(np.searchsorted(offsets, start, "left")), int(np.searchsorted(offsets, stop, "right")) - 1
        return first, max(first, last)

    def _moved(self, place: int, begins: bool) -> int | None:
        """Where a place of the text lies in the ledger's; it begins or ends something."""
        if self._pairs is None:
            self._pairs = self._paired()
        for piece, own in self._pairs:
            inside = piece.start <= place < piece.stop if begins else piece.start < place <= piece.stop
            if inside or piece.start == piece.stop == place:
                # From the end: tokenizers may put a space at the beginning of a text.
                return None if own is None else own.stop - (piece.stop - place)
        return None

    def _paired(self) -> list[tuple[_Piece, _Piece | None]]:
        """Each piece of the text and the ledger's own: equal ones in order, if both have as many of them."""
        theirs, own = self._pieces_of_text(), self._pieces_of_ledger()
        mine: dict[tuple[bytes, bytes, bytes], list[_Piece]] = collections.defaultdict(list)
        for piece in own:
            mine[piece.key].append(piece)
        counts = collections.Counter(piece.key for piece in theirs)
        ordered = {key: iter(pieces) for key, pieces in mine.items() if len(pieces) == counts[key]}
        return [(piece, next(ordered[piece.key]) if piece.key in ordered else None) for piece in theirs]

    def _pieces_of_text(self) -> list[_Piece]:
        marks = sorted(map(self._tokenizer.sealed_bytes, self._tokenizer.control_ids), key=len, reverse=True)
        found = re.finditer(b"|".join(map(re.escape, marks)) or rb"(?!)", self._text)
        return _pieces(self._text, [match.span() for match in found])

    def _pieces_of_ledger(self) -> list[_Piece]:
        offsets = self._ledger.offsets
        at = np.flatnonzero(np.isin(self._ledger.ids, list(self._tokenizer.control_ids)))
        return _pieces(self._ledger.data, list(zip(offsets[at].tolist(), offsets[at + 1].tolist(), strict=True)))


def _pieces(data: bytes, marks: Sequence[tuple[int, int]]) -> list[_Piece]:
    """What lies between marks, each a [start, stop) of bytes, in order."""
    edges = [(0, 0), *marks, (len(data), len(data))]
    pieces = []
    for (start, stop), (next_start, next_stop) in itertools.pairwise(edges):
        body = data[stop:next_start].lstrip(b" ")
        pieces.append(_Piece(stop, next_start, (data[start:stop], body, data[next_start:next_stop])))
    return pieces
