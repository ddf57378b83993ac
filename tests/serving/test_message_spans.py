"""Tokens of a message's content: exactly those inside it, whatever the template and the chain do around it."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sparsejax.errors import RequestError
from sparsejax.models.load.gguf_reader import read_gguf
from sparsejax.models.load.gguf_tokenizer import gguf_tokenizer
from sparsejax.models.load.tokenizer import Tokenizer
from sparsejax.serving.history import Conversation
from sparsejax.serving.message_spans import aligned, message_of_call, spans
from tests.serving.byte_tokenizer import ByteTokenizer
from tests.serving.test_history import BARE, THINKING, TRIMMING, Talking, with_template

WRAPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<result>"
    "{{ m.content | tojson }}</result>{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
TWICE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} {{ m.content }}<|im_end|>\n{% endfor %}"
DROPPING = "{% for m in messages[-2:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def smollm2(default_model: pathlib.Path) -> Tokenizer:
    return gguf_tokenizer(read_gguf(default_model).metadata)


@pytest.fixture(scope="module")
def tokenizers(smollm2: Tokenizer) -> dict[str | None, Tokenizer]:
    """By template."""
    return {None: smollm2, **{template: with_template(smollm2, template) for template in (THINKING, TRIMMING, BARE)}}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk_of(results: list[Any]) -> list[dict[str, Any]]:
    """A conversation with tool results."""
    messages = [message("system", "Use the tools."), message("user", "Where is it?")]
    for i, result in enumerate(results):
        call = {"id": f"call{i}", "type": "function", "function": {"name": "search", "arguments": {"query": f"q{i}"}}}
        messages += [message("assistant", "", tool_calls=[call]), message("tool", result, tool_call_id=f"call{i}")]
    return [*messages, message("user", "So?")]


def ids_and_spans(
    tokenizer: Any, messages: list[dict[str, Any]], wanted: Any = None, **more: Any
) -> tuple[list[int], dict[int, Any]]:
    conversation = Conversation(messages, True, more)
    ids = tokenizer.encode_sealed(conversation.sealed(tokenizer)[0])
    return ids, spans(tokenizer, conversation, ids, range(len(messages)) if wanted is None else wanted)


def bytes_of(tokenizer: Any, ids: Any, span: tuple[int, int]) -> bytes:
    return b"".join(map(tokenizer.sealed_bytes, ids[slice(*span)]))


def check(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> None:
    """Every content has its tokens, in order, and all that lie wholly inside it but for white space at its ends."""
    ids, found = ids_and_spans(tokenizer, messages)
    text = b"".join(map(tokenizer.sealed_bytes, ids))
    ends = np.cumsum([0, *(len(tokenizer.sealed_bytes(i)) for i in ids)])
    longest = max(len(tokenizer.sealed_bytes(i)) for i in ids if i not in tokenizer.control_ids)
    place = 0
    for i, m in enumerate(messages):
        span, core = found[i], m["content"].strip().encode()
        assert span is not None, (i, m)
        inside = bytes_of(tokenizer, ids, span)
        assert inside in m["content"].encode()
        assert place <= span[0] <= span[1]
        place = span[1]
        if not inside:
            assert len(core) < 2 * longest, "no token of the content was found"
        else:
            # Where the core lies, from where its tokens do; then all tokens within are the span's.
            at = text.find(core, max(0, int(ends[span[0]]) - len(core)))
            while at + len(core) < ends[span[1]] - len(inside) + len(inside.rstrip()):
                at = text.find(core, at + 1)
            first, last = np.searchsorted(ends, at), np.searchsorted(ends, at + len(core), "right") - 1
            assert span[0] <= first, "a whole token of the content is left out"
            assert last <= span[1], "a whole token of the content is left out"


@pytest.mark.parametrize("template", [None, THINKING, TRIMMING, BARE])
def test_93_content_is_found_and_nothing_else(tokenizers: dict[str | None, Tokenizer], template: str | None) -> None:
    results = [
        "The cat is red.",
        "  trimmed\nor not \n\n",
        "The cat is red.",
        "",
        "über 東京 🙂 <tool_response> x",
        ".",
    ]
    check(tokenizers[template], talk_of(results))


PIECES = [
    "cat",
    " ",
    "\n",
    "  ",
    "<|im_end|>",
    "im_end|>",
    "<|im_",
    "</think>",
    "tool",
    "é",
    "🙂",
    "ﬁ",
    "e\u0301",
    "==",
    "1",
]


@given(
    template=st.sampled_from([None, THINKING, TRIMMING, BARE]),
    results=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_93_any_content(tokenizers: dict[str | None, Tokenizer], template: str | None, results: list[str]) -> None:
    check(tokenizers[template], talk_of(results))


def test_93_tokens_across_the_edge_are_left_out(smollm2: Tokenizer) -> None:
    """Here quotes and what follows them are one token: inward."""
    tokenizer = with_template(
        smollm2, "{% for m in messages %}<|im_start|>{{ m.role }} =={{ m.content }}=={% endfor %}"
    )
    messages = [message("user", "=inner="), message("user", "==")]
    ids, found = ids_and_spans(tokenizer, messages)
    assert found[0] is not None
    assert found[1] is not None
    assert bytes_of(tokenizer, ids, found[0]) in (b"inner", b"inner=", b"=inner")
    assert found[1][0] == found[1][1]  # no whole token lies in it


def test_93_wrapped_content(smollm2: Tokenizer) -> None:
    """A template that writes JSON: what stands in the text is the content with its escapes."""
    tokenizer = with_template(smollm2, WRAPPING)
    messages = [message("user", "Go."), message("tool", 'a plain text that is long "enough" to have tokens')]
    ids, found = ids_and_spans(tokenizer, messages)
    assert found[1] is not None
    inside = bytes_of(tokenizer, ids, found[1])
    assert b'\\"enough\\" to have' in inside
    assert b"<result>" not in inside
    assert not inside.startswith(b'"')


@pytest.mark.parametrize("template", [TWICE, DROPPING])
def test_what_is_not_written_once_can_not_be_named(smollm2: Tokenizer, template: str) -> None:
    tokenizer = with_template(smollm2, template)
    _, found = ids_and_spans(tokenizer, [message("user", "one two"), message("tool", "three"), message("user", "four")])
    assert found[0] is None
    assert (found[2] is None) == (template is TWICE)


def test_93_equal_contents_are_told_apart(smollm2: Tokenizer) -> None:
    text = "The very same result, in several places."
    messages = talk_of([text] * 5)
    ids, found = ids_and_spans(smollm2, messages)
    tools = [i for i, m in enumerate(messages) if m["role"] == "tool"]
    assert len({found[i] for i in tools}) == 5
    for number, i in enumerate(tools):
        span = found[i]
        assert span is not None
        before = smollm2.decode(ids[: span[0]])
        assert before.count(text) == number


def test_93_parts_of_content(smollm2: Tokenizer) -> None:
    parts = [{"type": "text", "text": "first part, "}, {"type": "text", "text": "second part"}]
    ids, found = ids_and_spans(smollm2, talk_of([parts]), [3])
    assert found[3] is not None
    assert bytes_of(smollm2, ids, found[3]) == b"first part, second part"


def test_93_rewritten_history(smollm2: Tokenizer) -> None:
    """Ids of another conversation have no tokens of a message that was rewritten, nor of one that moved by it."""
    old, new = talk_of(["what it was", "kept", "same"]), talk_of(["what it is now", "kept", "same"])
    new[5] = message("tool", "changed too", tool_call_id="call1")
    conversation = Conversation(new, True, {})
    ids = smollm2.encode_sealed(Conversation(old, True, {}).sealed(smollm2)[0])
    found = spans(smollm2, conversation, ids, [1, 3, 5, 7])
    assert found[1] is not None
    assert bytes_of(smollm2, ids, found[1]) == b"Where is it?"
    assert found[3] is None
    assert found[5] is None
    assert found[7] is not None
    assert bytes_of(smollm2, ids, found[7]) == b"same"


def test_93_a_result_that_the_ids_have_more_often(smollm2: Tokenizer) -> None:
    """Which one is meant can't be said."""
    new = talk_of(["changed", "the same text"])
    ids = smollm2.encode_sealed(
        Conversation(talk_of(["once", "the same text", "the same text"]), True, {}).sealed(smollm2)[0]
    )
    assert spans(smollm2, Conversation(new, True, {}), ids, [3, 5]) == {3: None, 5: None}


class Spaced(ByteTokenizer):
    """Begins each piece of text with a space, as some tokenizers do."""

    def encode_sealed(self, text: str) -> list[int]:
        ids: list[int] = []
        for token in super().encode_sealed(text):
            if token < 256 and (not ids or ids[-1] >= 256):
                ids.append(ord(" "))
            ids.append(token)
        return ids


def test_tokenizers_that_add_a_space() -> None:
    tokenizer: Any = Spaced()
    messages = [message("user", "hello"), message("tool", " to you"), message("tool", "hello")]
    ids, found = ids_and_spans(tokenizer, messages)
    assert [bytes_of(tokenizer, ids, found[i]) for i in range(3)] == [b"hello", b" to you", b"hello"]
    assert found[0] == (7, 12)  # <bos> user:


def test_spaces_that_the_ids_do_not_have(smollm2: Tokenizer) -> None:
    tokenizer = with_template(smollm2, "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    new, old = (["a b", "  c d e"], ["other", " c d e"])
    ids = tokenizer.encode_sealed(Conversation([message("user", c) for c in old], True, {}).sealed(tokenizer)[0])
    assert spans(tokenizer, Conversation([message("user", c) for c in new], True, {}), ids, [0, 1]) == {
        0: None,
        1: None,
    }


def test_many_that_can_not_be_named_among_many_that_can(smollm2: Tokenizer) -> None:
    written = "{% if m.role == 'user' %}{{ m.content }} {% endif %}{{ m.content }}"
    tokenizer = with_template(
        smollm2, "{% for m in messages %}<|im_start|>{{ m.role }}\n" + written + "<|im_end|>\n{% endfor %}"
    )
    messages = [message(("user", "tool")[i % 2], f"the content of number {i}") for i in range(60)]
    ids, found = ids_and_spans(tokenizer, messages)
    for i, span in found.items():
        assert (span is None) == (i % 2 == 0)
        assert span is None or bytes_of(tokenizer, ids, span).decode() == messages[i]["content"]


def test_ids_of_a_chain_with_more_than_the_template_writes(smollm2: Tokenizer) -> None:
    """Reasoning that the template drops later stays in the chain: results behind it are found, equal ones too."""
    qwen_like = with_template(smollm2, THINKING)
    talking = Talking(qwen_like)
    messages = [message("user", "Look.")]
    for turn in range(3):
        thought = qwen_like.encode_sealed(f"Reasoning number {turn} about it.\n")
        text = qwen_like.encode_sealed(qwen_like.seal("</think>\n\nI look it up.", False) or "")
        answer = [
            *qwen_like.encode_sealed(qwen_like.seal("<think>\n", False) or ""),
            *thought,
            *text,
            qwen_like.eos_ids[0],
        ]
        talking.turn(messages, answer, {"content": "I look it up."})
        messages = [
            *messages,
            message("assistant", "I look it up."),
            message("tool", "equal results of the tool", tool_call_id=str(turn)),
            message("user", f"question {turn}"),
        ]
    anchored = talking.ask(messages)
    conversation = talking.conversation(messages)
    assert len(anchored.ids) > len(qwen_like.encode_sealed(conversation.sealed(qwen_like)[0]))
    found = spans(qwen_like, conversation, anchored.ids, [2, 5, 8, 9])
    for number, i in enumerate((2, 5, 8)):
        span = found[i]
        assert span is not None
        assert bytes_of(qwen_like, anchored.ids, span) == b"equal results of the tool"
        assert qwen_like.decode(anchored.ids[: span[0]]).count("equal results") == number
    assert found[9] is not None
    assert bytes_of(qwen_like, anchored.ids, found[9]) == b"question 2"


def test_other_ids_of_the_same_text(smollm2: Tokenizer) -> None:
    """Ids that no encoder would give: tokens inside are those inside, whatever they are."""
    rng = random.Random(0)
    messages = talk_of(["some result with a few words in it", "another one"])
    conversation = Conversation(messages, True, {})
    text, _ = conversation.sealed(smollm2)
    pieces = text.split(" ")
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        whole = piece if number == 0 else " " + piece
        cut = rng.randint(0, len(whole)) if "\ue000" not in whole else 0
        ids += [*smollm2.encode_sealed(whole[:cut]), *smollm2.encode_sealed(whole[cut:])]
    for i, span in spans(smollm2, conversation, ids, [3, 5]).items():
        assert span is not None
        assert bytes_of(smollm2, ids, span) in messages[i]["content"].encode()
        assert len(bytes_of(smollm2, ids, span)) > len(messages[i]["content"]) - 8


def test_what_follows_does_not_matter(smollm2: Tokenizer) -> None:
    messages = talk_of(["a result"])
    ids, found = ids_and_spans(smollm2, messages, [3])
    again = spans(smollm2, Conversation(messages, True, {}), np.asarray([*ids, 5, 6, 7], np.uint32), [3])
    assert again == found


def test_tokens_of_bytes() -> None:
    """One token per byte: the numbers can be counted by hand."""
    tokenizer: Any = ByteTokenizer()
    ids, found = ids_and_spans(tokenizer, [message("user", "hello"), message("tool", "wörld")])
    assert found == {0: (6, 11), 1: (18, 24)}  # <bos>user:hello\n<bos>tool:
    assert bytes(ids[18:24]) == "wörld".encode()


def test_messages_that_are_not_there(smollm2: Tokenizer) -> None:
    messages = talk_of(["one", "two"])
    for wanted in (-1, len(messages)):
        with pytest.raises(RequestError, match="there is no message"):
            ids_and_spans(smollm2, messages, [wanted])
    assert message_of_call(messages, "call1") == 5
    with pytest.raises(RequestError, match="no message has the tool_call_id 'call9'"):
        message_of_call(messages, "call9")
    with pytest.raises(RequestError, match=r"messages \[3, 5\] all have"):
        message_of_call([*messages[:5], {**messages[5], "tool_call_id": "call0"}], "call0")


@pytest.mark.parametrize(
    ("span", "blocks"),
    [((0, 32), (0, 32)), ((1, 32), (16, 32)), ((1, 31), None), ((5, 5), None), ((16, 47), (16, 32)), (None, None)],
)
def test_aligned_inward(span: Any, blocks: Any) -> None:
    assert aligned(span, 16) == blocks


@pytest.mark.parametrize("template", [None, THINKING, TRIMMING, BARE, WRAPPING, TWICE, DROPPING])
def test_contents_found_together_are_those_found_alone(smollm2: Tokenizer, template: str | None) -> None:
    tokenizer = smollm2 if template is None else with_template(smollm2, template)
    results = [" one\n", "two", "", "</think> three", "<|im_end|>", "two", "im_end|> 東京"]
    messages = talk_of([*results, [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]])
    conversation = Conversation(messages, True, {})
    indexes = range(len(messages))
    text, together = conversation.contents(tokenizer, indexes)
    assert text == conversation.sealed(tokenizer)[0]
    for index in indexes:
        begin, end = (conversation.render(tokenizer, **{side: index})[1] for side in ("before", "after"))
        if index in together:
            assert together[index] == (begin, end), index
    alone = [i for i in indexes if conversation.render(tokenizer, before=i)[1] is not None]
    assert set(together) >= {i for i in alone if template in (None, TRIMMING, BARE, WRAPPING)}
    if template is TWICE:
        assert together == {}
