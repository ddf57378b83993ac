"""Multiple-choice tasks from a local folder, in the form that lm-eval harnesses reduce theirs to.

Every FOLDER/NAME.jsonl is a task, every line an object with "context" (string), "choices" (strings) and "gold" (number
of the right one). A choice is scored by the log-likelihood of its tokens after the context, decoded under the method;
"acc" takes the likeliest, "acc_norm" the likeliest per character. White space at the end of a context belongs to the
choices, and both are encoded together.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.quality import scores
from benchmarks.quality.sweep import BATCH, Bench, replay_tokens
from benchmarks.quality.variants import Pool, Variant
from benchmarks.rows import NotFiniteError, Rows


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of a task: ids of the context and of each choice, characters of each choice, and the right one."""

    context: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    characters: tuple[int, ...]
    gold: int


def read_folder(folder: pathlib.Path, encode: Callable[[str], list[int]], limit: int | None) -> dict[str, list[Item]]:
    """Tasks by name; `limit` is the most items of each.

    Raises:
      ValueError: no task, or a line that is not as it should be, with file and line.
    """
    tasks = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()][:limit]
        tasks[path.stem] = [_item(line, f"{path.name} line {i}", encode) for i, line in enumerate(lines, 1)]
    if not any(tasks.values()):
        raise ValueError(f"{folder} has no .jsonl file with tasks")
    return {name: items for name, items in tasks.items() if items}


def _item(line: str, where: str, encode: Callable[[str], list[int]]) -> Item:
    try:
        found = json.loads(line)
        context, choices, gold = found["context"], found["choices"], found["gold"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: an object with context, choices and gold is needed ({error!r})") from error
    texts = isinstance(context, str) and isinstance(choices, list) and all(isinstance(x, str) and x for x in choices)
    if not texts or len(choices) < 2:
        raise ValueError(f"{where}: context must be a text and choices at least two texts")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
        raise ValueError(f"{where}: gold must be the number of a choice, 0 to {len(choices) - 1}, got {gold!r}")
    head = context.rstrip()
    space = context[len(head) :]
    ids = encode(head)
    if len(ids) < 2:
        raise ValueError(f"{where}: the context must have at least two tokens")
    ends = []
    for choice in choices:
        whole = encode(head + space + choice)
        if whole[: len(ids)] != ids or len(whole) == len(ids):
            # The tokenizer joins both over the border: then the choice is encoded by itself.
            whole = ids + encode(space + choice)
        ends.append(tuple(whole[len(ids) :]))
    return Item(tuple(ids), tuple(ends), tuple(len(choice) for choice in choices), gold)


def judge(logprobs: Sequence[float], characters: Sequence[int], gold: int) -> tuple[bool, bool]:
    """(acc, acc_norm) of one item; ties count against."""
    norm = [value / count for value, count in zip(logprobs, characters, strict=True)]

    def first(values: Sequence[float]) -> bool:
        return sum(value >= values[gold] for value in values) == 1

    return first(logprobs), first(norm)


def run(
    model: Any, groups: Sequence[Pool], tasks: dict[str, list[Item]], progress: Callable[[str], None]
) -> dict[str, Any]:
    """By task: items, chance and, by variant, both accuracies with Wilson intervals, or why the variant is invalid."""
    items = [(name, item) for name, found in tasks.items() for item in found]
    longest = max(len(item.context) + max(map(len, item.choices)) for _, item in items) + 1
    if longest > model.spec.max_model_len:
        raise ValueError(f"an item has {longest} tokens, the model's window {model.spec.max_model_len}")
    result: dict[str, Any] = {
        name: {
            "items": len(found),
            "chance": math.fsum(1 / len(item.choices) for item in found) / len(found),
            "variants": {},
        }
        for name, found in tasks.items()
    }
    for pool in groups:
        replay = max(replay_tokens(pool, len(item.context)) for _, item in items)
        most = 1 + max(replay, *(len(choice) for _, item in items for choice in item.choices))
        bench = Bench(model, pool, longest + most, 1, 8, most, replay)
        verdicts: dict[tuple[str, str], list[tuple[bool, bool]]] = {}
        invalid: dict[str, str] = {}
        for name, item in items:
            bench.base.prefill(1, item.context[:-1], finish=False)
            for variant in pool.variants:
                try:
                    if variant.label not in invalid:
                        found = logprobs(bench, variant, item)
                        key = name, variant.label
                        verdicts.setdefault(key, []).append(judge(found, item.characters, item.gold))
                except NotFiniteError as error:
                    invalid[variant.label] = str(error)
                progress(f"{name} {variant.label}")
            bench.base.release(1)
        for (name, label), found in verdicts.items():
            if label not in invalid:
                acc, norm = (scores.wilson(sum(pair[i] for pair in found), len(found)) for i in (0, 1))
                result[name]["variants"][label] = {"acc": acc, "acc_norm": norm}
        for label, why in invalid.items():
            for facts in result.values():
                facts["variants"][label] = {"invalid": why}
    return result


def logprobs(bench: Bench, variant: Variant, item: Item) -> list[float]:
    """Nats of each choice after the context, which row 1 of the base holds without its last token."""
    rows = Rows(bench.runner, variant.label, bench.base.pool)
    found = [0.0] * len(item.choices)
    try:
        for start in range(0, len(item.choices), BATCH):
            part = list(range(start, min(start + BATCH, len(item.choices))))
            row_of = dict(zip(part, bench.scratch, strict=False))
            for row in row_of.values():
                rows.fork(bench.base, 1, row)
                rows.finish_prompt(row, item.context[:-1])
            for place in range(max(len(item.choices[i]) for i in part)):
                live = [i for i in part if place < len(item.choices[i])]
                fed = [item.choices[i][place - 1] if place else item.context[-1] for i in live]
                logits = np.asarray(rows.logits([row_of[i] for i in live], fed), np.float64)
                top = logits.max(axis=1, keepdims=True)
                lse = (top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))[:, 0]
                for line, i in enumerate(live):
                    found[i] += float(logits[line, item.choices[i][place]] - lse[line])
    finally:
        for row in list(rows.pages):
            rows.release(row)
    return found


def markdown(result: dict[str, Any]) -> str:
    """A table for each task."""
    parts = []
    for name, facts in result.items():
        parts.append(f"## {name}\n\n{facts['items']} items, chance {facts['chance']:.2f}; intervals are of 95%.")
        lines = ["| method | acc | acc_norm |", "|---|---|---|"]
        for label, found in facts["variants"].items():
            shown = [f"invalid: {found['invalid']}", ""] if "invalid" in found else [found["acc"], found["acc_norm"]]
            lines.append(f"| {label} | {shown[0]} | {shown[1]} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
