"""Ids to text: no character split, no stop string shown, the same text however the ids are cut into chunks."""

from __future__ import annotations

import itertools
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.detokenize import Choice, IncrementalDecoder, TextStream
from sparsejax.mock import EOS
from sparsejax.request import RequestStats, SamplingParams, TokenEvent, TokenLogprob
from tests.serving.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


class WordTokenizer:
    """Pieces of text with a leading-space rule as in sentencepiece: the first word's space is dropped."""

    special_ids = frozenset({0})
    pieces = ("<s>", "\u2581Hello", "\u2581world", "!", "\u2581", "\u65e5\u672c", "a", "b")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [self.pieces[i] for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return "".join(shown).replace("\u2581", " ").removeprefix(" ")


class ByteFallbackTokenizer:
    """Bytes as in sentencepiece with byte fallback: a run that isn't UTF-8 becomes one U+FFFD per byte."""

    special_ids = frozenset({256})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raw = bytes(i for i in ids if i < 256)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(raw)


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """`ids` cut at the given places (taken modulo)."""
    places = sorted({cut % (len(ids) + 1) for cut in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(places)]


def run(stream: TextStream, parts: Sequence[Sequence[int]]) -> tuple[list[str], list[Any]]:
    texts, tokens = [], []
    for part in parts:
        logprobs = [TokenLogprob(token, -float(i)) for i, token in enumerate(part)]
        piece = stream.push(part, logprobs)
        texts.append(piece.text)
        tokens += zip(piece.token_ids, piece.offsets, piece.visible, strict=True)
        assert [logprob.token for logprob in piece.logprobs] == list(piece.token_ids)
    piece = stream.finish()
    texts.append(piece.text)
    tokens += zip(piece.token_ids, piece.offsets, piece.visible, strict=True)
    return texts, tokens


TEXTS = st.text(st.sampled_from("aAé日本👩‍👧🏽नมࠀ\u0301 \n\ufffd"), max_size=40)
IDS = st.one_of(TEXTS.map(lambda text: list(text.encode())), st.lists(st.integers(0, 257), max_size=60))


@given(ids=IDS, cuts=st.lists(st.integers(0, 100), max_size=8), skip=st.booleans())
def test_any_cut_gives_the_one_shot_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    texts, tokens = run(TextStream(BYTES, skip_special_tokens=skip), chunks(ids, cuts))
    assert "".join(texts) == BYTES.decode(ids, skip_special_tokens=skip)
    assert [token for token, _, _ in tokens] == ids


@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_piece_holds_half_a_character(text: str) -> None:
    stream = TextStream(BYTES)
    pieces = [stream.push([byte]).text for byte in text.encode()]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text  # nothing is held back once a character is complete


@given(ids=st.lists(st.integers(0, 7), max_size=40), cuts=st.lists(st.integers(0, 50), max_size=5))
def test_leading_spaces(ids: list[int], cuts: list[int]) -> None:
    tokenizer = WordTokenizer()
    texts, _ = run(TextStream(tokenizer), chunks(ids, cuts))
    assert "".join(texts) == tokenizer.decode(ids)


def test_context_keeps_the_space_of_the_first_word() -> None:
    stream = TextStream(WordTokenizer(), context_ids=[1])
    assert stream.push([2]).text == " world"


@given(text=st.text(st.sampled_from("aé日👋"), max_size=40))
def test_byte_fallback(text: str) -> None:
    texts, _ = run(TextStream(ByteFallbackTokenizer()), [[byte] for byte in text.encode()])
    assert "".join(texts) == text


def test_byte_fallback_with_a_broken_tail() -> None:
    texts, _ = run(TextStream(ByteFallbackTokenizer()), [[byte] for byte in "é".encode() + b"\xf0\x9f"])
    assert "".join(texts) == "é\ufffd\ufffd"


@pytest.mark.parametrize("ids", [[0x80] * 1000, [0xE2] * 1000, [0xF0, 0x9F] * 500, [0xE2, 0x82] * 500 + [0xAC]])
def test_long_runs_of_broken_bytes(ids: list[int]) -> None:
    """The window stays small (no quadratic cost), the text is exact."""
    longest = 0

    class Counting(ByteTokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    decoder = IncrementalDecoder(Counting())
    text = "".join(decoder.push(i) for i in ids) + decoder.finish()
    assert text == BYTES.decode(ids)
    assert longest < 100


def one_shot(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The rule in a few lines: the stop string that ends first wins, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


ALPHABET = st.text(st.sampled_from("abé"), min_size=1, max_size=6)


@given(
    text=st.text(st.sampled_from("abé"), max_size=40),
    stops=st.lists(ALPHABET, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    include=st.booleans(),
)
def test_stop_strings(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    stream = TextStream(BYTES, stop=stops, include_stop=include)
    texts, tokens = run(stream, chunks(list(text.encode()), cuts))
    wanted, stop = one_shot(text, stops, include)
    assert "".join(texts) == wanted
    assert stream.stop_string == stop
    # Tokens up to the one that completed the stop string, and none after it.
    if stop is not None:
        whole, _ = one_shot(text, stops, True)
        assert stream.num_tokens == len(tokens) == len(whole.encode())
    # What was shown never had to be taken back.
    shown = ""
    for piece in texts:
        shown += piece
        assert wanted.startswith(shown)


@given(text=st.text(st.sampled_from("ab"), max_size=30), stops=st.lists(ALPHABET, min_size=1, max_size=3))
def test_only_a_possible_stop_is_held_back(text: str, stops: list[str]) -> None:
    stream = TextStream(BYTES, stop=stops)
    shown = ""
    for i, byte in enumerate(text.encode()):
        shown += stream.push([byte]).text
        if stream.finished:
            break
        held = text[: i + 1].removeprefix(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_stop_string_in_a_broken_character_at_the_end() -> None:
    stream = TextStream(BYTES, stop=["\ufffd"])
    assert stream.push([*b"a", 0xE2]).text == "a"
    assert stream.finish().text == ""
    assert stream.stop_string == "\ufffd"


def test_min_tokens_come_before_stop_strings() -> None:
    stream = TextStream(BYTES, stop=["b"], min_tokens=3)
    assert stream.push(list(b"abab")).text == "aba"
    assert stream.stop_string == "b"
    assert stream.num_tokens == 4


def test_offsets_and_order_of_tokens() -> None:
    stream = TextStream(BYTES, stop=["xyz"])
    piece = stream.push(list("aéx".encode()))
    assert piece.text == "aé"
    assert piece.token_ids == tuple("aé".encode())
    assert piece.offsets == (0, 1, 1)
    tail = stream.finish()
    assert (tail.text, tail.token_ids, tail.offsets) == ("x", (ord("x"),), (2,))


def test_a_real_tokenizer(default_model: pathlib.Path) -> None:
    """Random ids and many scripts through the default model's byte-level tokenizer."""
    from sparsejax.models.load import gguf_reader, gguf_tokenizer

    tokenizer = gguf_tokenizer.gguf_tokenizer(gguf_reader.read_gguf(default_model).metadata, None)
    rng = random.Random(0)
    for i in range(100):
        if i % 2:
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 80))]
        else:
            text = "Grüße 👩‍👩‍👧 日本語 हिन्दी ไทย" + "".join(chr(rng.randrange(0x20, 0x2FFF)) for _ in range(20))
            ids = tokenizer.encode(text, add_special_tokens=False)
        for skip in (True, False):
            stream = TextStream(tokenizer, skip_special_tokens=skip)
            text = "".join(stream.push([token]).text for token in ids) + stream.finish().text
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_wrong_number_of_logprobs() -> None:
    with pytest.raises(ValueError, match="1 logprobs for 2 tokens"):
        TextStream(BYTES).push([1, 2], [TokenLogprob(1, 0.0)])


def event(ids: Sequence[int] = (), reason: Any = None, **fields: Any) -> TokenEvent:
    stats = RequestStats(completion_tokens=99) if reason else None
    return TokenEvent("r", 0, tuple(ids), None, reason, stats=stats, **fields)


def test_choice_ends_with_eos() -> None:
    choice = Choice(BYTES, SamplingParams(), 3)
    assert choice.feed(event(b"ab")).piece.text == "ab"
    last = choice.feed(event([EOS], "stop"))
    assert (last.index, last.piece.text, last.finish_reason, last.stop_reason) == (3, "", "stop", None)
    assert last.stats is not None
    assert last.stats.completion_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab.")])
def test_choice_ends_with_a_stop_token(include: bool, text: str) -> None:
    choice = Choice(BYTES, SamplingParams(include_stop_str_in_output=include), 0)
    pieces = [choice.feed(event(b"ab")), choice.feed(event(b".", "stop", stop_reason=ord(".")))]
    assert "".join(delta.piece.text for delta in pieces) == text
    assert pieces[-1].stop_reason == ord(".")
    assert choice.num_tokens == 3


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_choice_with_a_stop_string_ends_as_stop(reason: Any) -> None:
    choice = Choice(BYTES, SamplingParams(stop=("b",)), 0)
    assert choice.feed(event(b"abc")).piece.text == "a"
    assert choice.stop_requested
    assert choice.feed(event(b"more")).piece.text == ""
    last = choice.feed(event(b"even more", reason))
    assert (last.finish_reason, last.stop_reason, last.piece.text) == ("stop", "b", "")
    assert choice.num_tokens == 2


def test_choice_passes_errors_on() -> None:
    error = RuntimeError("x")
    last = Choice(BYTES, SamplingParams(), 0).feed(event(reason="error", error=error))
    assert (last.finish_reason, last.error) == ("error", error)
