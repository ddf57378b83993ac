"""Conversations with facts hidden in public-domain prose, and questions that only the conversation can answer.

A context is a transcript: an early turn, then a long document with facts between its paragraphs and a tool result in
its middle. Every answer is a word drawn at random from a seed that occurs nowhere in the prose, and the candidates of a
question are all answers of its context: knowing which words occur is not enough, and guessing scores `Question.chance`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]

TASKS = {
    "single": "one fact of its kind in the document",
    "multi_key": "one of four facts that differ in their key",
    "multi_value": "all three values of one key",
    "variable": "a value told in two steps: who owns it, and who got it from the owner",
    "tool_result": "a field of a tool's JSON in the middle",
    "early_turn": "what the user said in the first turn",
}
NEEDLES = ("single", "multi_key", "tool_result")
"""Tasks whose answer is one fact, told once, at a depth that is known."""
WORDS = (
    "apple banana copper dragon eagle falcon ginger honey ivory jasmine kiwi lemon maple nickel olive panda quartz "
    "rabbit silver tiger umbrella violet walnut yellow zebra coral cotton diamond dolphin elephant garlic giraffe "
    "hammer jacket lion mango monkey onion orange pepper pepperoni piano pizza purple pumpkin robot rocket salmon "
    "shark spider sugar tomato turtle velvet wolf whale guitar basket"
)
PLACES = ("library", "bakery", "harbour", "museum", "garden", "chapel", "tower", "market", "mill", "station", "castle")
NAMES = ("Oliver", "Hugo", "Felix", "Oscar", "Victor", "Martin")
_OPENING = (
    'User: Before we start, remember that my brother calls himself "Peter{early}".\n\n'
    'Assistant: I will remember that your brother calls himself "Peter{early}".\n\n'
)
_READ = "User: Read this document.\n\nDocument:\n\n"
_ASK = "\n\nUser: {ask}\n\nAssistant: {lead}"
_KEYED = 'The password of the {key} is "{key}'
_TOOL = 'Tool: {{"status": "ok", "order": {order}, "items": {items}, "place": "{place}", "label": "type{value}"}}'


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context.

    Attributes:
      task: one of `TASKS`.
      depth: where its first fact lies, as a share of the context.
      ids: tokens that follow the context: the question, and the answer up to the value.
      answers: ids of the value's first token; several where all are asked for.
      candidates: ids of the first tokens that are ranked, answers included.
    """

    task: str
    depth: float
    ids: tuple[int, ...]
    answers: tuple[int, ...]
    candidates: tuple[int, ...]

    @property
    def chance(self) -> float:
        """Expected score of a random ranking."""
        return len(self.answers) / len(self.candidates)


@dataclasses.dataclass(frozen=True)
class Context:
    """A transcript and what is asked about it.

    Attributes:
      ids: exactly the asked length.
      continuation: the prose that comes next, for perplexity and divergence.
      questions: in the order of `TASKS`.
    """

    ids: tuple[int, ...]
    continuation: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Answer words of a tokenizer: told apart by one token, which follows `glue` tokens that all of them share."""

    words: tuple[str, ...]
    first: tuple[int, ...]
    glue: tuple[int, ...]

    @classmethod
    def of(cls, encode: Encode, prose: str, words: Sequence[str] = tuple(WORDS.split())) -> Vocabulary:
        """The words that the prose does not use, one for each distinct first token.

        Raises:
          ValueError: fewer than a context needs.
        """
        known = prose.lower()
        unused = [word for word in words if word not in known]
        ids = {word: encode(" " + word) for word in unused}
        shared = 0
        while len({tuple(x[: shared + 1]) for x in ids.values()}) == 1:
            shared += 1
        first: dict[int, str] = {}
        # A word of one token is told apart by all of it.
        for word in sorted(unused, key=lambda word: (len(ids[word]), word)):
            first.setdefault(ids[word][shared], word)
        if len(first) < _NUM_VALUES:
            raise ValueError(f"this tokenizer tells {len(first)} of the answer words apart; {_NUM_VALUES} are needed")
        some = next(iter(ids.values()))
        return cls(tuple(first.values()), tuple(first), tuple(some[:shared]))


_NUM_VALUES = 11
"""Values of one context: single 1, multi_key 4, multi_value 3, variable 1, tool_result 1, early_turn 1."""


def paragraphs(prose: str) -> list[str]:
    """Non-empty paragraphs, those above 1,200 characters cut between sentences so that facts fit in anywhere."""
    found = []
    for paragraph in filter(None, (part.strip() for part in prose.split("\n\n"))):
        piece = ""
        for sentence in paragraph.replace(". ", ".\n").split("\n"):
            if piece and len(piece) + len(sentence) > 1200:
                found.append(piece)
                piece = ""
            piece = f"{piece} {sentence}".strip()
        found.append(piece)
    return found


def _arranged(
    facts: Sequence[tuple[str, str]], tool: tuple[str, str], seed: int, rng: random.Random
) -> list[tuple[str, str]]:
    """Nine facts and the tool's result in the middle, in an order that is drawn.

    The five that are needles take every second place, those that the context of the next seed leaves free, so two
    contexts have a needle in each tenth.
    """
    middle = len(facts) // 2
    every_second = [place for place in range(seed % 2, len(facts) + 1, 2) if place != middle]
    others = [place for place in range(len(facts) + 1) if place not in (*every_second, middle)]
    rng.shuffle(others)
    needles = [fact for fact in facts if fact[1] == "single" or fact[1].startswith("key")]
    rest = [fact for fact in facts if fact not in needles]
    rng.shuffle(needles)
    rng.shuffle(rest)
    placed = dict(zip([*every_second, *others], [*needles, *rest], strict=True))
    return [tool if place == middle else placed[place] for place in range(len(facts) + 1)]


def make_context(
    encode: Encode,
    prose: Sequence[str],
    vocabulary: Vocabulary,
    length: int,
    continuation: int,
    seed: int,
    start: Sequence[int] = (),
) -> Context:
    """A context of exactly `length` tokens.

    Args:
      encode: text to ids, without special tokens.
      prose: paragraphs; the document starts at one that the seed chooses and goes round.
      vocabulary: answer words.
      length: tokens of the transcript.
      continuation: tokens of prose after it.
      seed: of everything that is drawn.
      start: ids that every text of the model starts with.

    Raises:
      ValueError: the facts do not fit into the length.
    """
    rng = random.Random(seed)
    chosen = rng.sample(range(len(vocabulary.words)), _NUM_VALUES)
    words = [" " + vocabulary.words[i] for i in chosen]
    firsts = [vocabulary.first[i] for i in chosen]
    single, *keyed = range(5)
    several, variable, tool, early = (5, 6, 7), 8, 9, 10
    places = rng.sample(PLACES, 5)
    giver, taker = rng.sample(NAMES, 2)
    order = rng.randrange(10000, 100000)
    document = [(f"The secret word of the old captain is{words[single]}.", "single")]
    document += [
        (_KEYED.format(key=place) + f'{words[i]}".', f"key{n}")
        for n, (place, i) in enumerate(zip(places[:4], keyed, strict=True))
    ]
    document += [(f"One of the presents for Mr. Brown is{words[i]}.", f"value{n}") for n, i in enumerate(several)]
    document.append((f"{giver} owns the{words[variable]}. {giver} gave {taker} what he owns.", "var"))
    items = rng.randrange(2, 30)
    result = _TOOL.format(order=order, items=items, place=places[4], value=words[tool])
    document = _arranged(document, (result, "tool"), seed, rng)

    head = [*start, *encode(_OPENING.format(early=words[early]) + _READ)]
    facts = [(encode(text + "\n\n"), name) for text, name in document]
    room = length - len(head) - sum(len(ids) for ids, _ in facts)
    if room < len(facts):
        raise ValueError(f"contexts need more than {length - room + len(facts)} tokens, not {length}")
    # Facts stand after the paragraph that reaches their place: one in each tenth, with some noise. None stands behind
    # the last paragraph, which the continuation goes on with.
    places_of = [room * (n + rng.uniform(0.1, 0.6)) / len(facts) for n in range(len(facts))]
    ids, depths, used = list(head), {"early": 0.0}, 0
    number = rng.randrange(len(prose))
    pending = list(zip(places_of, facts, strict=True))
    tail: list[int] = []
    while used < room or len(tail) < continuation:
        piece = encode(prose[number % len(prose)] + "\n\n")
        number += 1
        while pending and (used >= pending[0][0] or used + len(piece) >= room):
            _, (fact, name) = pending.pop(0)
            depths[name] = len(ids) / length
            ids += fact
        taken = piece[: room - used]
        ids += taken
        used += len(taken)
        tail += piece[len(taken) :]

    def question(task: str, ask: str, lead: str, fact: str, *answers: int) -> Question:
        follow = encode(_ASK.format(ask=ask, lead=lead)) + list(vocabulary.glue)
        return Question(task, depths[fact], tuple(follow), tuple(firsts[i] for i in answers), tuple(firsts))

    questions = [
        question(
            "single",
            "What is the secret word of the old captain?",
            "The secret word of the old captain is",
            "single",
            single,
        ),
        *(
            question(
                "multi_key",
                f"What is the password of the {places[n]}?",
                _KEYED.format(key=places[n]),
                f"key{n}",
                keyed[n],
            )
            for n in range(4)
        ),
        question(
            "multi_value",
            "What are the presents for Mr. Brown?",
            "One of the presents for Mr. Brown is",
            "value0",
            *several,
        ),
        question("variable", f"What did {giver} give {taker}?", f"{giver} gave {taker} the", "var", variable),
        question(
            "tool_result",
            f"Which label has order {order}?",
            f'"place": "{places[4]}", "label": "type',
            "tool",
            tool,
        ),
        question(
            "early_turn", "What does my brother call himself?", 'Your brother calls himself "Peter', "early", early
        ),
    ]
    assert len(ids) == length
    return Context(tuple(ids), tuple(tail[:continuation]), tuple(questions))
