"""Prompts of a known number of tokens for any server, and when they are due.

Text is made of words until the server's own tokenizer (`/tokenize` as vLLM, llama.cpp and sparsejax have it,
`/extras/tokenize` of llama-cpp-python) counts what was asked for; without one by the default model's tokenizer, and
without that by a stated guess per word.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks import common

TOKENS_PER_WORD = 4 / 3
"""The guess where there is no tokenizer: English words, with the space before them."""
# One token each, with the space before them, in the vocabularies of all models that we know.
FILLERS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on", "be", "at", "by")
_TURNS = 24


class Counter(NamedTuple):
    """Counts the tokens of a text, its special ones included. `how` says by what; `exact` is False for a guess."""

    how: str
    exact: bool
    count: Callable[[str], int]

    def of_answer(self, text: str) -> int:
        """Tokens of a text that continues another one: without those that open a prompt."""
        return self.count(text) - self.count("")


def server_counter(http: httpx.Client, root: str, model: str) -> Counter | None:
    """The server's own tokenizer, None if it has no endpoint for it. Asks through `http`."""
    bodies = {
        # llama.cpp's server names the text `content`, the others `prompt`; each ignores what it does not know.
        "/tokenize": lambda text: {"model": model, "prompt": text, "content": text, "add_special": True},
        "/extras/tokenize": lambda text: {"model": model, "input": text},
    }

    def count(path: str, text: str) -> int:
        response = http.post(root + path, json=bodies[path](text))
        response.raise_for_status()
        return len(response.json()["tokens"])

    for path in bodies:
        try:
            if count(path, "one two three") < 3:
                continue
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            continue
        return Counter(path, True, lambda text, path=path: count(path, text))
    return None


def local_counter() -> Counter | None:
    """The default model's tokenizer, None if the model was never fetched."""
    from sparsejax.errors import LoadError
    from sparsejax.models.load import default_model, gguf_reader, gguf_tokenizer

    try:
        path = default_model.fetch_default_model(offline=True)
        tokenizer = gguf_tokenizer.gguf_tokenizer(gguf_reader.read_gguf(path).metadata)
    except LoadError:
        return None
    return Counter(f"tokenizer of {default_model.NAME}", False, lambda text: len(tokenizer.encode(text)))


def guess() -> Counter:
    return Counter("words x 4/3", False, lambda text: round(len(text.split()) * TOKENS_PER_WORD))


def vocabulary() -> list[str]:
    """Distinct words of the test texts, sorted."""
    return sorted({word for word in re.findall(r"\b[a-z]{2,12}\b", common.prose()) if word not in FILLERS})


def text_of(
    rng: np.random.Generator, tokens: int, count: Callable[[str], int], words: Sequence[str], opening: str = ""
) -> tuple[str, int]:
    """Random words after `opening`, `tokens` tokens in all.

    Returns:
      The text and how many tokens it has: rarely not what was asked for, where words don't add up.
    """
    chosen: list[str] = []
    best = ("", math.inf)
    per_word = 1.5
    for _ in range(_TURNS):
        text = " ".join(filter(None, [opening, *chosen]))
        found = count(text)
        if abs(found - tokens) < abs(best[1] - tokens):
            best = text, found
        missing = tokens - found
        if missing == 0:
            break
        if missing > 8:
            more = max(1, int(0.95 * missing / per_word))
            chosen += rng.choice(words, more).tolist()
            per_word = max(1.0, found / len(text.split())) if chosen[:-more] else per_word
        elif missing > 0:
            chosen += rng.choice(FILLERS, missing).tolist()
        else:
            del chosen[-max(1, int(-missing / per_word)) :]
    return best[0], int(best[1])


def length_near(rng: np.random.Generator, tokens: int, range_ratio: float) -> int:
    """Uniform from `tokens` x (1 - ratio) to `tokens` x (1 + ratio), at least 1."""
    low, high = math.floor(tokens * (1 - range_ratio)), math.ceil(tokens * (1 + range_ratio))
    return max(1, int(rng.integers(low, high + 1)))


class Prompt(NamedTuple):
    """`content` is a text, or the messages of a chat. `tokens` None: nobody counted."""

    content: Any
    tokens: int | None
    output_tokens: int


def random_prompts(
    rng: np.random.Generator, count: int, input_len: int, output_len: int, range_ratio: float, counter: Counter
) -> list[Prompt]:
    """Distinct random texts: no cached prefix helps."""
    words = vocabulary()
    found = []
    for _ in range(count):
        want, output = length_near(rng, input_len, range_ratio), length_near(rng, output_len, range_ratio)
        found.append(Prompt(*text_of(rng, want, counter.count, words), output))
    return found


def prefix_prompts(
    rng: np.random.Generator,
    count: int,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    counter: Counter,
) -> list[Prompt]:
    """`num_prefixes` shared openings with a tail of their own for each request, in random order."""
    words = vocabulary()
    prefixes = [text_of(rng, prefix_len, counter.count, words)[0] for _ in range(min(count, num_prefixes))]
    found = []
    for i in range(count):
        opening = prefixes[i % len(prefixes)]
        found.append(Prompt(*text_of(rng, prefix_len + suffix_len, counter.count, words, opening), output_len))
    return [found[i] for i in rng.permutation(count)]


def file_prompts(path: pathlib.Path, count: int, output_len: int, chat: bool) -> list[Prompt]:
    """The first `count` lines of a JSONL file: `prompt` or, for a chat, `messages`; `output_tokens` if it has them.

    Raises:
      SystemExit: too few lines, or a line that is not such an object.
    """
    found: list[Prompt] = []
    for number, line in enumerate(filter(str.strip, path.read_text("utf-8").splitlines()), 1):
        if len(found) == count:
            break
        try:
            item = json.loads(line)
            content = item["messages"] if chat and "messages" in item else item["prompt"]
            found.append(Prompt(content, None, int(item.get("output_tokens", output_len))))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}, item {number}: no JSON object with a prompt ({error!r})") from None
    if len(found) < count:
        raise SystemExit(f"{path} has {len(found)} prompts, fewer than --num-prompts {count}")
    return found


def arrivals(rng: np.random.Generator, count: int, rate: float, burstiness: float) -> list[float]:
    """When requests are due, in seconds, the first at once.

    Gaps follow a gamma distribution of mean 1/rate and shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is steadier. A rate of inf: all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
