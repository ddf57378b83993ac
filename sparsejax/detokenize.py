"""From token ids to text, piece by piece. Standard library only.

`IncrementalDecoder` never splits a character, `TextStream` adds stop strings and says which tokens belong to which
piece of text, and `Choice` turns the engine's events of one choice into the deltas that every front end shows
(`sparsejax.llm`, the HTTP server, the chat REPL). Ids are taken one at a time whatever the chunks they arrive in, so
the result doesn't depend on how the stream was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

from sparsejax.request import ChainReport, FinishReason, RequestStats, SamplingParams, TokenEvent, TokenLogprob

REPLACEMENT = "\ufffd"

# Tokens after which the decoder drops old context, and pending tokens after which it stops waiting for a character.
_WINDOW_TOKENS = 16
_MAX_PENDING_TOKENS = 64
# Prompt tokens that tokenizers need to see to write the first word as it stands in the text.
CONTEXT_TOKENS = 16
# A character of UTF-8 has at most this many bytes, and a token at least one.
_MAX_CHARACTER_TOKENS = 4


class Detokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @property
    def special_ids(self) -> Collection[int]: ...


class IncrementalDecoder:
    """Decodes ids as they come; the pieces joined equal the decoding of all ids at once.

    A piece ends at a character boundary: text whose tail is U+FFFD may be half a character, and waits for the next
    token. `context_ids` are decoded before the first id but not returned: tokenizers that write a word's leading space
    only inside a text need them.
    """

    def __init__(
        self, tokenizer: Detokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = frozenset(tokenizer.special_ids) if skip_special_tokens else frozenset()
        self._window = [i for i in context_ids if i not in self._skip]
        self._shown = self._decode(self._window)  # text of the window that was returned
        self._clean = len(self._window)  # ids of the window at the last character boundary
        self._anchor = 0  # ids of the window at the boundary before that

    @property
    def pending(self) -> bool:
        """True while the last id ended inside a character."""
        return self._clean < len(self._window)

    def push(self, token: int) -> str:
        """Text that became certain with this token; may be empty."""
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            if len(self._window) - self._clean > _MAX_PENDING_TOKENS:
                return self._give_up(text)
            certain = text.rstrip(REPLACEMENT)
            if not certain.startswith(self._shown):
                return ""
            piece, self._shown = certain[len(self._shown) :], certain
            return piece
        piece = self._after_shown(text)
        self._anchor, self._clean, self._shown = self._clean, len(self._window), text
        if self._clean > _WINDOW_TOKENS:
            self._window = self._window[self._anchor :]
            self._anchor, self._clean, self._shown = 0, len(self._window), self._decode(self._window)
        return piece

    def finish(self) -> str:
        """What was held back: an incomplete character comes out as the tokenizer decodes it (U+FFFD)."""
        if not self.pending:
            return ""
        piece = self._after_shown(self._decode(self._window))
        self._window, self._shown, self._clean, self._anchor = [], "", 0, 0
        return piece

    def _after_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # The decoder rewrote text that is already out (a byte run that turned out invalid): decode the rest alone.
        return self._decode(self._window[self._clean :])

    def _give_up(self, text: str) -> str:
        """Ends a long run of invalid bytes where nothing that may still come can change it."""
        cut = len(self._window) - _MAX_CHARACTER_TOKENS
        head = self._decode(self._window[:cut])
        if head + self._decode(self._window[cut:]) != text or not head.startswith(self._shown):
            return ""  # inside a character; one of the next tokens will do
        piece = head[len(self._shown) :]
        self._window, self._shown, self._clean, self._anchor = self._window[cut:], "", 0, 0
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        # Special ids were filtered already, so that both settings see the same decoding of the rest.
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Text that may be shown, and the tokens that are out with it.

    Attributes:
      text: may be empty, also when there are tokens (special tokens have no text).
      token_ids: in order.
      offsets: where each token's text starts, in characters from the start of the whole text.
      visible: False for tokens without text (skipped special tokens).
      logprobs: one per token, or empty if none were given.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    visible: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass
class _Held:
    token: int
    logprob: TokenLogprob | None
    offset: int
    end: int  # characters that must be out before this token is
    visible: bool


class TextStream:
    """Text of one choice with stop strings.

    A stop string ends the text the moment its last character appears; of several that end there the longest counts.
    Nothing of it is shown unless `include_stop`. Text is held back only while it can still become a stop string.
    Tokens leave with the piece that holds the end of their text. The first `min_tokens` tokens are not searched.
    """

    def __init__(
        self,
        tokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids)
        self._special = frozenset(tokenizer.special_ids) if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held_text = ""
        self._held: list[_Held] = []
        self._produced = 0  # characters decoded
        self._shown = 0  # characters returned
        self.num_tokens = 0
        self._out = 0  # tokens returned
        self.visible_tokens: int | None = None  # with a stop string: tokens that lie before it, whole
        self.stop_string: str | None = None
        self.finished = False

    def push(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        *,
        ends_with_stop_token: bool = False,
    ) -> TextPiece:
        """Takes new tokens. After a stop string (`finished`) further tokens are ignored.

        `ends_with_stop_token`: the last id ended the choice; its text is left out unless `include_stop`.
        """
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} tokens")
        text: list[str] = []
        for i, token in enumerate(ids):
            if self.finished:
                break
            hide = ends_with_stop_token and i == len(ids) - 1 and not self._include_stop
            text.append(self._push_one(token, None if logprobs is None else logprobs[i], hide))
        return self._piece("".join(text))

    def finish(self) -> TextPiece:
        """Ends the text: everything held back comes out. Does nothing after a stop string or a second time."""
        if self.finished:
            return TextPiece()
        text = self._search(self._decoder.finish())
        if not self.finished:
            text += self._held_text
            self._held_text = ""
            self._shown = self._produced
            self.finished = True
        return self._piece(text)

    def _push_one(self, token: int, logprob: TokenLogprob | None, hide: bool) -> str:
        self.num_tokens += 1
        offset = self._produced
        visible = not hide and token not in self._special
        text = self._decoder.push(token) if visible else ""
        end = offset + len(text) + (visible and self._decoder.pending)
        self._held.append(_Held(token, logprob, offset, end, visible))
        return self._search(text)

    def _search(self, new: str) -> str:
        """Adds decoded text and returns what may be shown."""
        self._produced += len(new)
        text = self._held_text + new
        if self.num_tokens > self._min_tokens:
            ends = [(start + len(stop), -len(stop), stop) for stop in self._stop if (start := text.find(stop)) >= 0]
            if ends:
                end, _, stop = min(ends)
                text = text[: end if self._include_stop else end - len(stop)]
                cut = self._shown + len(text)
                before = next((i for i, h in enumerate(self._held) if h.end > cut), len(self._held))
                self.visible_tokens = self._out + before
                self.stop_string, self.finished, self._held_text = stop, True, ""
                self._shown = self._produced  # nothing more will come: every token is out
                return text
            keep = self._possible_stop(text)
        else:
            keep = 0
        self._held_text = text[len(text) - keep :]
        text = text[: len(text) - keep]
        self._shown += len(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Characters at the end of `text` that can still become a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest

    def _piece(self, text: str) -> TextPiece:
        count = 0
        while count < len(self._held) and (self.finished or self._held[count].end <= self._shown):
            count += 1
        out, self._held = self._held[:count], self._held[count:]
        self._out += count
        return TextPiece(
            text=text,
            token_ids=tuple(h.token for h in out),
            offsets=tuple(h.offset for h in out),
            visible=tuple(h.visible for h in out),
            logprobs=tuple(h.logprob for h in out if h.logprob is not None),
        )


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new in one choice. `finish_reason` is set on the last delta, exactly once.

    Attributes:
      index: the choice.
      piece: text and tokens.
      finish_reason: "stop", "length", "cancelled" or "error".
      stop_reason: the stop string or stop token id that ended the text; None for end-of-sequence.
      stats: what the choice cost, on the last delta.
      error: what went wrong when `finish_reason` is "error".
      chain: what became of the choice's chain: on its first delta, which has no token, and on the last.
    """

    index: int
    piece: TextPiece
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    error: Exception | None = None
    chain: ChainReport | None = None


class Choice:
    """Turns the engine's events of one choice into deltas.

    When `stop_requested` turns true a stop string was found and the caller must ask the engine to stop the choice; the
    last delta follows with the engine's last event.
    """

    def __init__(
        self, tokenizer: Detokenizer, params: SamplingParams, index: int, context_ids: Sequence[int] = ()
    ) -> None:
        self.index = index
        self._stream = TextStream(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            context_ids=context_ids,
        )

    @property
    def stop_requested(self) -> bool:
        return self._stream.stop_string is not None

    @property
    def visible_tokens(self) -> int | None:
        """Tokens that lie before the stop string, whole; None without one."""
        return self._stream.visible_tokens

    def seen_of(self, report: ChainReport | None) -> int | None:
        """Tokens of the conversation up to the stop string, if the chain has more: it was found after the turn."""
        if report is None or report.state != "idle" or self.visible_tokens is None:
            return None
        tokens = report.reused_tokens + report.prefilled_tokens + self.visible_tokens
        return tokens if tokens < report.total_tokens else None

    @property
    def num_tokens(self) -> int:
        """Tokens generated, up to and including the one that ended a stop string."""
        return self._stream.num_tokens

    def feed(self, event: TokenEvent) -> Delta:
        """The delta of one event; may be empty (text held back)."""
        reason = event.finish_reason
        by_token = reason == "stop" and bool(event.token_ids)
        piece = self._stream.push(event.token_ids, event.logprobs, ends_with_stop_token=by_token)
        if reason is None:
            return Delta(self.index, piece, chain=event.chain)
        tail = self._stream.finish()
        stats = event.stats and dataclasses.replace(event.stats, completion_tokens=self.num_tokens)
        stop_string = self._stream.stop_string
        if stop_string is not None:
            return Delta(self.index, _join(piece, tail), "stop", stop_string, stats, None, event.chain)
        return Delta(self.index, _join(piece, tail), reason, event.stop_reason, stats, event.error, event.chain)


def _join(a: TextPiece, b: TextPiece) -> TextPiece:
    return TextPiece(
        a.text + b.text,
        a.token_ids + b.token_ids,
        a.offsets + b.offsets,
        a.visible + b.visible,
        a.logprobs + b.logprobs,
    )
