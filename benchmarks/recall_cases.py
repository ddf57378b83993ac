"""Conversations that state a password early and ask for it at the end: the cases of benchmarks.chain_recall."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.quality import tasks

_SYSTEM = "You are a careful reader. You remember what the user tells you and answer in few words."
_PART = "This is part {number} of the book.\n\n{text}"
_NOTED = "Noted."
_ASK = "What is the password of the {key}?"
_LEAD = 'The password of the {key} is "{key}'
_DISTRACTORS = (4, 7)
"""Turns that state another password."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One conversation.

    Attributes:
      contexts: ids that each turn sends; each begins with the one before.
      answer: the id that the last turn asks for.
      fact: ids of the sentence that states it lie at these positions.
    """

    contexts: tuple[tuple[int, ...], ...]
    answer: int
    fact: range


def make_case(tokenizer: Any, vocabulary: tasks.Vocabulary, turns: int, turn_tokens: int, seed: int) -> Case:
    """A conversation of `turns` turns, each but the last with about `turn_tokens` tokens of prose.

    Raises:
      ValueError: the tokenizer joins tokens over the border of two turns.
    """
    rng = random.Random(seed)
    keys = rng.sample(tasks.PLACES, 1 + len(_DISTRACTORS))
    values = rng.sample(range(len(vocabulary.words)), len(keys))
    told = dict(zip((2, *_DISTRACTORS), zip(keys, values, strict=True), strict=True))
    words = common.prose_of(rng.choice(common.TEXTS)).split()
    place = rng.randrange(len(words))
    messages: list[dict[str, str]] = [{"role": "system", "content": _SYSTEM}]
    contexts: list[tuple[int, ...]] = []
    fact = ""
    for turn in range(1, turns):
        size = max(4, round(turn_tokens * 3 / 4))
        excerpt = [words[(place + i) % len(words)] for i in range(size)]
        place += size
        text = " ".join(excerpt)
        if turn in told:
            key, value = told[turn]
            sentence = f'{_LEAD.format(key=key)} {vocabulary.words[value]}".'
            fact = sentence if turn == 2 else fact
            text = " ".join(excerpt[: size // 2]) + f"\n\n{sentence}\n\n" + " ".join(excerpt[size // 2 :])
        messages.append({"role": "user", "content": _PART.format(number=turn, text=text)})
        contexts.append(tuple(tokenizer.render_chat(messages, add_generation_prompt=True)))
        messages.append({"role": "assistant", "content": _NOTED})
    key, value = told[2]
    messages.append({"role": "user", "content": _ASK.format(key=key)})
    lead = tokenizer.encode(_LEAD.format(key=key), add_special_tokens=False)
    last = [*tokenizer.render_chat(messages, add_generation_prompt=True), *lead, *vocabulary.glue]
    contexts.append(tuple(last))
    for before, after in itertools.pairwise(contexts):
        if after[: len(before)] != before:
            raise ValueError("a turn's tokens do not begin with those of the turn before")
    stated = tokenizer.encode(fact, add_special_tokens=False)
    return Case(tuple(contexts), vocabulary.first[value], span(contexts[1], stated))


def span(ids: Sequence[int], part: Sequence[int]) -> range:
    """Where a part lies in ids. Raises ValueError if it is nowhere."""
    for start in range(len(ids) - len(part) + 1):
        if list(ids[start : start + len(part)]) == list(part):
            return range(start, start + len(part))
    raise ValueError("the fact's tokens are not those of the context")
