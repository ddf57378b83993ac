"""From outcomes to claims: summaries with intervals, the verdict on the controls, a Markdown page and pictures."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import lines
from benchmarks.perplexity import perplexity
from benchmarks.quality import scores
from benchmarks.quality.scores import Interval
from benchmarks.quality.sweep import LATER, Found, Outcome
from benchmarks.quality.tasks import NEEDLES, TASKS, Context

DEPTHS = 10
"""Parts of a context by which needles are told apart."""
LATE_MARKS = {"replay": " [r]", "decode": " [d]"}
LATER_KEYS = ("question_in_prompt", "question_later")


def summarise(outcomes: Sequence[Outcome], contexts: Sequence[Context]) -> dict[str, Any]:
    """By context length: the tasks, what each variant gave, and whether the controls lost.

    Dense comes first; variants without a budget come before those with the smallest.
    """
    result = {}
    for length in dict.fromkeys(len(context.ids) for context in contexts):
        numbers = [number for number, context in enumerate(contexts) if len(context.ids) == length]
        if outcomes[0].invalid is not None:
            raise RuntimeError(f"the reference is invalid: {outcomes[0].invalid}")
        tasks = _tasks(outcomes[0], contexts, numbers)
        kept = [task for task, facts in tasks.items() if facts["dropped"] is None]
        found = {outcome.variant.label: _variant(outcome, outcomes[0], contexts, numbers, kept) for outcome in outcomes}
        chance = [facts["chance"] for facts in tasks.values() if facts["dropped"] is None]
        result[str(length)] = {
            "contexts": len(numbers),
            "scored_tokens": sum(len(outcomes[0].by_context[number].nll) for number in numbers),
            "chance": math.fsum(chance) / len(chance) if chance else None,
            "tasks": tasks,
            "variants": found,
            "controls": verdicts(found),
        }
    return result


def _by_task(found: Found, context: Context, task: str) -> list[scores.Answer]:
    return [answer for answer, q in zip(found.answers, context.questions, strict=True) if q.task == task]


def _tasks(reference: Outcome, contexts: Sequence[Context], numbers: Sequence[int]) -> dict[str, Any]:
    """What dense scores, what guessing would, and why a task is dropped if it is."""
    result = {}
    for task, about in TASKS.items():
        answers = [a for number in numbers for a in _by_task(reference.by_context[number], contexts[number], task)]
        questions = [q for number in numbers for q in contexts[number].questions if q.task == task]
        if not answers:
            continue
        hits, trials = sum(a.hits for a in answers), sum(a.trials for a in answers)
        chance = math.fsum(q.chance for q in questions) / len(questions)
        result[task] = {
            "about": about,
            "questions": len(questions),
            "dense": scores.wilson(hits, trials),
            "chance": chance,
            "depths": [q.depth for q in questions],
            "dropped": scores.drop_reason(hits, trials, chance),
        }
    return result


def _by_depth(own: Sequence[Found], contexts: Sequence[Context], kept: Sequence[str]) -> list[list[int]]:
    """Right answers and questions about needles by the tenth of the context in which the fact lies."""
    counts = [[0, 0] for _ in range(DEPTHS)]
    for found, context in zip(own, contexts, strict=True):
        for question, answer in zip(context.questions, found.answers, strict=True):
            if question.task in kept and question.task in NEEDLES:
                part = counts[min(DEPTHS - 1, int(question.depth * DEPTHS))]
                part[0] += answer.hits
                part[1] += answer.trials
    return counts


def _share(answers: Sequence[scores.Answer]) -> float:
    return sum(a.hits for a in answers) / sum(a.trials for a in answers)


def _variant(
    outcome: Outcome, reference: Outcome, contexts: Sequence[Context], numbers: Sequence[int], kept: Sequence[str]
) -> dict[str, Any]:
    variant = outcome.variant
    result: dict[str, Any] = {
        "family": variant.family,
        "budget_tokens": variant.budget,
        "spec": variant.spec,
        "control": variant.control,
        "acts": outcome.acts,
    }
    if outcome.invalid is not None or not outcome.by_context:
        return {**result, "invalid": outcome.invalid or "not measured yet"}
    numbers = [number for number in numbers if number in outcome.by_context]
    result["contexts"] = len(numbers)
    own = [outcome.by_context[number] for number in numbers]
    dense = [reference.by_context[number] for number in numbers]
    apart = [[a - b for a, b in zip(found.nll, base.nll, strict=True)] for found, base in zip(own, dense, strict=True)]
    same = [value for found in own for value in found.same]
    result |= {
        "perplexity": perplexity([found.nll for found in own]),
        "loss": Interval(*(math.expm1(x) if x < 700 else math.inf for x in scores.bootstrap(apart))),
        "kl_nats": scores.bootstrap([found.kl for found in own]),
        "top1_agreement": scores.wilson(sum(same), len(same)),
        "resident_bytes": math.fsum(f.resident_bytes for f in own) / len(own),
        "read_bytes": math.fsum(f.read_bytes for f in own) / len(own),
        "resident_share": math.fsum(f.resident_bytes for f in own) / math.fsum(f.resident_bytes for f in dense),
        "read_share": math.fsum(f.read_bytes for f in own) / math.fsum(f.read_bytes for f in dense),
        "tasks": {},
        "raw": {
            "nll": [math.fsum(f.nll) for f in own],
            "kl": [math.fsum(f.kl) for f in own],
            "same": [sum(f.same) for f in own],
            "answers": [[list(answer) for answer in f.answers] for f in own],
            "later": [{str(number): list(answer) for number, answer in f.later.items()} for f in own],
        },
    }
    for task in TASKS:
        answers = [_by_task(f, contexts[n], task) for f, n in zip(own, numbers, strict=True)]
        flat = [answer for of_context in answers for answer in of_context]
        if flat:
            result["tasks"][task] = {
                "score": scores.wilson(sum(a.hits for a in flat), sum(a.trials for a in flat)),
                "exact": scores.wilson(sum(a.exact for a in flat), len(flat)),
                "logprob": scores.bootstrap([[a.logprob for a in of_context] for of_context in answers]),
            }
    if kept:
        # Each task counts alike; contexts are what is drawn again.
        per_context = [
            [math.fsum(_share(_by_task(f, contexts[n], task)) for task in kept) / len(kept)]
            for f, n in zip(own, numbers, strict=True)
        ]
        questions = sum(question.task in kept for n in numbers for question in contexts[n].questions)
        result["retrieval"] = scores.cautious(per_context, questions)
        by_depth = _by_depth(own, [contexts[n] for n in numbers], kept)
        hits, trials = (sum(part[i] for part in by_depth) for i in (0, 1))
        if trials:
            result |= {"needles": scores.wilson(hits, trials), "needles_by_depth": by_depth}
    result |= _costs(outcome, reference, len(contexts[numbers[0]].ids))
    asked = [task for task in LATER if task in kept]
    if asked and outcome.acts != "prompt":
        answers = [
            a for f, n in zip(own, numbers, strict=True) for task in asked for a in _by_task(f, contexts[n], task)
        ]
        result[LATER_KEYS[1]] = scores.wilson(sum(a.hits for a in answers), sum(a.trials for a in answers))
    elif asked and any(f.later for f in own):
        pairs = [
            (f.answers[i], answer)
            for f, n in zip(own, numbers, strict=True)
            for i, answer in f.later.items()
            if contexts[n].questions[i].task in asked
        ]
        for key, answers in zip(LATER_KEYS, zip(*pairs, strict=True), strict=True):
            result[key] = scores.wilson(sum(a.hits for a in answers), sum(a.trials for a in answers))
    return result


def _costs(outcome: Outcome, reference: Outcome, length: int) -> dict[str, Any]:
    """Times beside dense attention, where they were taken."""
    found: dict[str, Any] = {}
    if length in outcome.speed:
        found["decode_speed"] = outcome.speed[length]
    if outcome is not reference and length in outcome.prefill_s and length in reference.prefill_s:
        found["prefill_time"] = outcome.prefill_s[length] / reference.prefill_s[length]
    return found


def verdicts(found: dict[str, Any]) -> dict[str, Any]:
    """For each control: is its divergence clearly (interval against interval) above, and its retrieval below, that of
    every valid method of its budget (of all methods, if it has none)?"""
    result = {}
    valid = {name: facts for name, facts in found.items() if "invalid" not in facts}
    for name, control in valid.items():
        if not control["control"]:
            continue
        others = {
            other: facts
            for other, facts in valid.items()
            if not facts["control"] and control["budget_tokens"] in (None, facts["budget_tokens"])
        }
        if not others:
            continue
        closest = max(others, key=lambda other: _most(others[other]["kl_nats"]))
        entry = {
            "compared_with": len(others),
            "closest": closest,
            "kl_clearly_worst": control["kl_nats"].low > _most(others[closest]["kl_nats"]),
        }
        if "retrieval" in control:
            least = min(facts["retrieval"].value for facts in others.values())
            entry["retrieval_worst"] = control["retrieval"].value < least
        result[name] = entry
    return result


def _most(interval: Interval) -> float:
    """The upper bound; of a single context, which has none, the value."""
    return interval.high if math.isfinite(interval.high) else interval.value


# Markdown


def markdown(result: dict[str, Any], manifest: dict[str, Any], pictures: Sequence[pathlib.Path]) -> str:
    """One page: what ran, the pictures, and the tables of each length."""
    facts = [f"{manifest['model']}, {manifest['dtype']}, {manifest['device']}, {manifest['cpu']}", manifest["date"]]
    facts += [f"commit {manifest['git_commit']}", f"`{manifest['command']}`"]
    parts = ["# Quality", "How to read this: docs/quality.md.", "; ".join(map(str, facts)) + "."]
    parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    for length, found in result["lengths"].items():
        parts.append(f"## {length} tokens")
        parts.append(f"{found['contexts']} contexts, {found['scored_tokens']} scored tokens; intervals are of 95%.")
        parts.append(_table(*_main_rows(found)))
        notes = {
            "replay": "the context is read once more before it is evicted, and all questions come after that",
            "decode": "it acts while decoding: the end of the context is decoded, and all questions come after that",
        }
        acting = {facts["acts"] for facts in found["variants"].values()}
        parts += ["\n".join(f"-{LATE_MARKS[acts]}: {why}." for acts, why in notes.items() if acts in acting)]
        parts.append("### Tasks")
        parts.append(_table(*_task_rows(found)))
        dropped = {task: facts["dropped"] for task, facts in found["tasks"].items() if facts["dropped"]}
        parts += ["\n".join(f"- `{task}` is dropped: {why}." for task, why in dropped.items())] if dropped else []
        if any("needles_by_depth" in facts for facts in found["variants"].values()):
            parts += ["### Needles by depth", _table(*_depth_rows(found))]
        parts += ["### Controls", "\n".join(f"- {line}" for line in control_lines(found))]
    return "\n\n".join(parts) + "\n"


def control_lines(found: dict[str, Any]) -> list[str]:
    """The verdict on each control, in words."""
    shown = []
    for name, entry in found["controls"].items():
        kl = "clearly worst" if entry["kl_clearly_worst"] else f"NOT clearly worse than {entry['closest']}"
        text = f"{name}: divergence {kl} of {entry['compared_with'] + 1}"
        if "retrieval_worst" in entry:
            text += ", retrieval " + ("worst" if entry["retrieval_worst"] else "NOT worst")
        shown.append(text)
    return shown


def _main_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = [
        "method",
        "contexts",
        "resident",
        "MB",
        "read",
        "decode",
        "prefill time",
        "perplexity",
        "loss",
        "KL, nats",
    ]
    header += ["same top token", "needles", "retrieval", "question in prompt", "question later"]
    rows = []
    for name, facts in found["variants"].items():
        shown = f"{name} (control)" if facts["control"] else name
        shown += LATE_MARKS.get(facts["acts"], "")
        if "invalid" in facts:
            rows.append([shown, f"invalid: {facts['invalid']}", *[""] * (len(header) - 2)])
            continue
        rows.append(
            [
                shown,
                str(facts["contexts"]),
                f"{facts['resident_share']:.0%}",
                f"{facts['resident_bytes'] / 1e6:.1f}",
                f"{facts['read_share']:.0%}",
                f"{facts['decode_speed']['ratio']:.2f}x" if "decode_speed" in facts else "-",
                f"{facts['prefill_time']:.2f}x" if "prefill_time" in facts else "-",
                f"{facts['perplexity']:.2f}",
                f"{facts['loss'].value:+.1%}",
                str(facts["kl_nats"]),
                str(facts["top1_agreement"]),
                *(str(facts[key]) if key in facts else "-" for key in ("needles", "retrieval", *LATER_KEYS)),
            ]
        )
    return header, rows


def _task_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = list(found["tasks"])
    rows = [["chance", *(f"{found['tasks'][name]['chance']:.2f}" for name in names)]]
    for label, facts in found["variants"].items():
        if "invalid" not in facts:
            rows.append([label, *(str(facts["tasks"][name]["score"]) for name in names)])
    return ["method", *names], rows


def _depth_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [label, *(f"{hits}/{trials}" if trials else "-" for hits, trials in facts["needles_by_depth"])]
        for label, facts in found["variants"].items()
        if "needles_by_depth" in facts
    ]
    return ["method", *(f"{i / DEPTHS:.0%} to {(i + 1) / DEPTHS:.0%}" for i in range(DEPTHS))], rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    out = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(out + ["| " + " | ".join(row) + " |" for row in rows])


# Pictures


def pictures(result: dict[str, Any], stem: pathlib.Path) -> dict[pathlib.Path, str]:
    """SVG texts by path, for the longest contexts: retrieval and divergence against bytes held and bytes read."""
    length = max(result["lengths"], key=int)
    found = result["lengths"][length]
    valid = [facts for facts in found["variants"].values() if "invalid" not in facts]
    titles = {"retrieval": "retrieval score", "kl_nats": "KL from dense attention, nats per token"}
    sizes = {"resident": "bytes held, of dense", "read": "bytes read per step, of dense"}
    drawn = {}
    for key, y_label in titles.items():
        for size, x_label in sizes.items():
            series: dict[str, list[lines.Point]] = {}
            for facts in valid:
                log_fails = key == "kl_nats" and facts.get(key, Interval(0, 0, 0)).value <= 0
                if key in facts and not log_fails and not (facts["control"] and facts["budget_tokens"] is None):
                    point = lines.Point(facts[f"{size}_share"], *facts[key])
                    series.setdefault(facts["family"], []).append(point)
            if len(series) > lines.MOST_SERIES:
                print(f"no picture of {key} by {size} bytes: {len(series)} families can't be told apart")
            if not 0 < len(series) <= lines.MOST_SERIES:
                continue
            levels = {"chance": found["chance"]} if key == "retrieval" and found["chance"] is not None else {}
            title = f"{'Facts found' if key == 'retrieval' else 'Divergence'} at {length} tokens of context"
            how = {"log_x": True, "log_y": key == "kl_nats", "levels": levels, "percent_x": True}
            path = stem.with_name(f"{stem.name}_{'retrieval' if key == 'retrieval' else 'divergence'}_{size}.svg")
            drawn[path] = lines.svg(title, series, x_label, y_label, **how)
    return drawn
