"""Conversations with tool results of which some are pruned: what benchmarks.prefix_prune asks, and its numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.conversation import Message, Script, system_prompt
from benchmarks.quality import scores, tasks

CLOSE = 0.95
"""Share of the unpruned probability from which an answer counts as unchanged."""
_GOAL = "Read the pages that follow, and remember every password."
_CALL = '{{"name": "read_page", "arguments": {{"title": "{title}", "page": {page}}}}}'
_FACT = 'The password of the {key} is "{key} {value}".'
_ASK = "What is the password of the {key}?"
_LEAD = 'The password of the {key} is "{key}'


@dataclasses.dataclass(frozen=True)
class Question:
    """Two messages behind a history: what is asked, and the answer's beginning; `word` of the vocabulary is next."""

    messages: tuple[Message, Message]
    word: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A conversation, and what is asked about it.

    Attributes:
      history: its messages before the question.
      pruned: indexes of the results that are to go.
      kept, gone: questions about a result that stays, and about one that goes.
    """

    history: tuple[Message, ...]
    pruned: tuple[int, ...]
    kept: Question
    gone: Question

    @property
    def edited(self) -> list[Message]:
        """The history of a client that takes these results out itself."""
        return without(self.history, self.pruned)


def without(messages: Sequence[Message], indexes: Sequence[int]) -> list[Message]:
    """Messages with some contents replaced."""
    return [{**m, "content": "(removed)"} if i in indexes else dict(m) for i, m in enumerate(messages)]


def make_case(vocabulary: tasks.Vocabulary, results: int, result_words: int, share: float, seed: int) -> Case:
    """A conversation with `results` pages of about `result_words` words, of which a share is to go.

    Four pages state a password: two that stay and two that go.

    Raises:
      ValueError: fewer than two pages stay or go.
    """
    rng = random.Random(seed)
    number = round(results * share)
    if not 2 <= number <= results - 2:
        raise ValueError(f"{number} of {results} results go: at least two must, and two must stay")
    gone = sorted(rng.sample(range(results), number))
    places = [*rng.sample([i for i in range(results) if i not in gone], 2), *rng.sample(gone, 2)]
    keys = rng.sample(tasks.PLACES, len(places))
    values = rng.sample(range(len(vocabulary.words)), len(places))
    told = dict(zip(places, zip(keys, values, strict=True), strict=True))
    words = common.prose_of(rng.choice(common.TEXTS)).split()
    at = rng.randrange(len(words))
    messages: list[Message] = [{"role": "system", "content": system_prompt()}, {"role": "user", "content": _GOAL}]
    for i in range(results):
        page = [words[(at + n) % len(words)] for n in range(result_words)]
        at += result_words
        if i in told:
            key, value = told[i]
            page.insert(result_words // 2, _FACT.format(key=key, value=vocabulary.words[value]))
        messages.append({"role": "assistant", "content": _CALL.format(title="Notes", page=i + 1)})
        messages.append(
            {"role": "tool", "content": json.dumps({"status": "ok", "page": i + 1, "text": " ".join(page)})}
        )
    messages.append({"role": "assistant", "content": "I have read all pages."})

    def question(key: str, value: int) -> Question:
        ask = {"role": "user", "content": _ASK.format(key=key)}
        return Question((ask, {"role": "assistant", "content": _LEAD.format(key=key)}), value)

    kept, lost = question(*told[places[0]]), question(*told[places[2]])
    return Case(tuple(messages), tuple(3 + 2 * i for i in gone), kept, lost)


def transcript(script: Script, title: str = "Notes") -> list[Message]:
    """A whole conversation of a script, its answers calls of a tool; the results are messages 3, 5, 7, ..."""
    messages = script.opening()
    for turn in range(2, script.turns + 1):
        messages.append({"role": "assistant", "content": _CALL.format(title=title, page=turn - 1)})
        messages.append(script.reply(turn))
    return messages


def oldest(tokens: Mapping[int, int], share: float) -> list[int]:
    """The first messages that together have at least a share of the tokens of all, by index."""
    wanted, found = share * sum(tokens.values()), []
    for index in sorted(tokens):
        if sum(tokens[i] for i in found) >= wanted:
            break
        found.append(index)
    return found


# Numbers


@dataclasses.dataclass(frozen=True)
class Found:
    """The answer's token. `rank` counts from 1; one more than are looked at if it is not among them."""

    logprob: float
    rank: int
    cached_tokens: int = 0
    resident_tokens: int = 0


def compare(found: Sequence[Found], full: Sequence[Found]) -> dict[str, Any]:
    """One side against the unpruned text, case by case; the ratio of probabilities is a geometric mean."""
    differences = [a.logprob - b.logprob for a, b in zip(found, full, strict=True)]
    close = sum(a.rank <= b.rank and a.logprob >= b.logprob + math.log(CLOSE) for a, b in zip(found, full, strict=True))
    count = len(found)
    return {
        "cases": count,
        "ranked_first": scores.wilson(sum(one.rank == 1 for one in found), count),
        "within_5_percent": scores.wilson(close, count),
        "probability_over_full": math.exp(statistics.fmean(differences)),
        "worst_logprob_over_full": min(differences),
        "logprobs": [one.logprob for one in found],
        "ranks": [one.rank for one in found],
        "cached_tokens": statistics.fmean(one.cached_tokens for one in found),
        "resident_tokens": statistics.fmean(one.resident_tokens for one in found),
    }


def answers(found: Mapping[str, Sequence[tuple[Found, Found]]]) -> dict[str, Any]:
    """Of each side, its answers from results that stay and from those that go, against those of the side "full"."""
    (kept, gone) = zip(*found["full"], strict=True)
    sides = {side: compare([one for one, _ in own], kept) for side, own in found.items()}
    for side, own in found.items():
        sides[side]["gone"] = compare([one for _, one in own], gone)
    return sides


def sharing(shared: int, block: int, answers: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What requests with the same beginning computed: (prompt tokens, cached tokens) of each.

    `most_prefilled` is one beginning and everybody's own rest, up to a block longer.
    """
    prefilled = sum(prompt - cached for prompt, cached in answers)
    return {
        "requests": len(answers),
        "shared_tokens": shared,
        "prompt_tokens": sum(prompt for prompt, _ in answers),
        "prefilled_tokens": prefilled,
        "suffix_tokens": sum(prompt - shared for prompt, _ in answers),
        "most_prefilled": shared + sum(prompt - shared // block * block for prompt, _ in answers),
        "prefilled_without": sum(prompt for prompt, _ in answers),
    }


def goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the run should show."""
    found = []

    def add(goal: str, value: Any, met: bool) -> None:
        found.append({"goal": goal, "found": value, "met": met})

    if "sharing" in result:
        one = result["sharing"]
        within = one["prefilled_tokens"] <= one["most_prefilled"]
        add(f"{one['requests']} requests: one prefix and suffixes prefilled", one["prefilled_tokens"], within)
        over = one["ttft_over"]["ratio"]
        add("first token sooner than without a prefix cache, ratio", over, over > 1)
    if "pruning" in result:
        for name in ("path", "chain"):
            side = result["pruning"]["sides"].get(name)
            if side is not None:
                kept = min(side["kept_share"])
                add(f"{name}: remaining tokens cached after pruning, at least 99%", kept, kept >= 0.99)
                over = result["pruning"]["over"][name]["edited"]["ratio"]
                add(f"{name}: next turn at least 5x faster than computing the edited history", over, over >= 5)
        behind = max(result["pruning"]["sides"]["edited"]["cached_behind_cut"])
        add("without pruning: tokens cached behind the cut", behind, behind == 0)
    if "quality" in result:
        for name, side in result["quality"]["sides"].items():
            if name.startswith("drop") or "global" in name:
                same = side["ranked_first"][0]
                add(f"{name}: answers from what was kept still ranked first, at least 95%", same, same >= 0.95)
    return found
