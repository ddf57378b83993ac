"""Conversations of an agent with tools around public-domain prose, the same for the same seed.

A script has a system prompt that describes tools, what the user wants, and what the tools answer, turn by turn. What
the assistant says is the model's: whatever it is, it stands in the transcript as it came.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common

Count = Callable[[str], int]
Message = dict[str, Any]

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "name": "read_page",
        "description": "Returns the text of one page of a book.",
        "parameters": {"title": "string", "page": "integer, from 1"},
    },
    {
        "name": "search_library",
        "description": "Returns titles and pages on which all words of a query occur, best first.",
        "parameters": {"query": "string", "limit": "integer, at most 20"},
    },
    {
        "name": "take_note",
        "description": "Keeps a sentence that will be needed for the report.",
        "parameters": {"text": "string"},
    },
)
_SYSTEM = (
    "You are a research assistant in a library. You work in small steps. In every step you answer with one JSON object "
    'that calls a tool, and with nothing else: {{"name": NAME, "arguments": {{...}}}}. The result of the tool comes '
    "back as the next message. Never make up what a page says. These are the tools:\n\n{tools}\n\nGo on until the user "
    "stops you."
)
_GOAL = (
    "My name is {name}, my order has the number {order}. Please read {title} from page {page} on, page by page, and "
    "note what is said there about {subject}."
)
_TITLES = {"persuasion.txt": "Persuasion", "opticks.txt": "Opticks"}
_SUBJECTS = ("family", "light", "the sea", "money", "nature", "friends", "houses", "motion", "travel", "manners")
_NAMES = ("Alice", "Bruno", "Clara", "David", "Emma", "Frank", "Greta", "Henry", "Irene", "Jacob", "Laura", "Simon")


@dataclasses.dataclass(frozen=True)
class Script:
    """What an agent's client says, whatever the model does.

    Attributes:
      system: the same for all agents.
      goal: first message of the user.
      results: JSON texts; the n-th is the tool's answer before turn n + 2.
    """

    system: str
    goal: str
    results: tuple[str, ...]

    @property
    def turns(self) -> int:
        return 1 + len(self.results)

    def opening(self) -> list[Message]:
        """Messages of the first turn."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.goal}]

    def reply(self, turn: int) -> Message:
        """What comes between the answers of turn - 1 and of `turn`, which is at least 2."""
        return {"role": "tool", "content": self.results[turn - 2]}


def system_prompt() -> str:
    return _SYSTEM.format(tools="\n".join(json.dumps(tool) for tool in TOOLS))


def script(count: Count, turns: int, result_tokens: int, seed: int, goal_tokens: int = 0) -> Script:
    """A script of `turns` turns.

    Args:
      count: tokens of a text.
      turns: at least 1.
      result_tokens: the most that each result has; it has about as many.
      seed: of everything that is drawn.
      goal_tokens: with more than the goal needs, the user quotes prose until it has about as many.

    Raises:
      ValueError: a result of so few tokens holds no text.
    """
    rng = random.Random(seed)
    name = rng.choice(common.TEXTS)
    words = common.prose_of(name).split()
    title, page, place = _TITLES[name], rng.randrange(2, 90), rng.randrange(len(words))
    subject, who, order = rng.choice(_SUBJECTS), rng.choice(_NAMES), rng.randrange(10**5, 10**6)
    goal = _GOAL.format(name=who, order=order, title=title, page=page, subject=subject)
    if goal_tokens:
        quoted = goal + " I have read this so far:"
        found = _most_words(lambda text: count(f"{quoted} {text}"), words, place, goal_tokens)
        if found:
            goal = f"{quoted} {_text(words, place, found)}"
            place += found
    results = []
    for number in range(page, page + turns - 1):

        def shown(text: str, number: int = number) -> str:
            return json.dumps({"status": "ok", "title": title, "page": number, "text": text}, ensure_ascii=False)

        found = _most_words(lambda text, shown=shown: count(shown(text)), words, place, result_tokens)
        if not found:
            raise ValueError(f"a result of {result_tokens} tokens has no room for text")
        results.append(shown(_text(words, place, found)))
        place += found
    return Script(system_prompt(), goal, tuple(results))


def _text(words: Sequence[str], place: int, number: int) -> str:
    """So many words from a place on, from the start again at the end."""
    return " ".join(words[(place + i) % len(words)] for i in range(number))


def _most_words(count: Count, words: Sequence[str], place: int, tokens: int) -> int:
    """The most words from a place on with which a text has at most so many tokens; 0 if there is no room for one."""
    low, high = 0, tokens  # no word has less than one token
    while low < high:
        middle = (low + high + 1) // 2
        if count(_text(words, place, middle)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low
