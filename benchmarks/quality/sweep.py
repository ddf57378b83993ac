"""Runs every variant over the same contexts, each of which is prefilled once for all variants that can share it.

A context is prefilled densely, with every statistic that some method of its pool keeps (`variants.recorder`). Each
variant then works on forks, whose pages are shared until they are evicted: it evicts as after any prompt and decodes
forced tokens. That is what the method itself would hold after the same prompt; one whose prefill differs gets a pool
of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.perplexity import step_bytes
from benchmarks.quality import scores, variants
from benchmarks.quality.tasks import Context, Question
from benchmarks.quality.variants import Pool, Variant
from benchmarks.rows import NotFiniteError, Rows
from sparsejax.runner import DeviceRunner
from sparsejax.state import sequence_page_nbytes

LATER = ("single", "multi_key", "early_turn")
"""Tasks that are asked once more after the eviction."""
BATCH = 4
"""Contexts in memory at once, and rows of a decode step."""
PREFILL_CHUNK = 512
Progress = Callable[[str], None]


@dataclasses.dataclass
class Found:
    """What one variant gave for one context.

    Attributes:
      length: tokens of the context.
      nll, kl, same: of each token of the continuation after the first.
      answers: to the context's questions, each part of the prompt.
      later: question number -> answer when the context was evicted before it was asked; only of methods that evict,
        controls excepted.
      resident_bytes, read_bytes: at the end of the continuation.
    """

    length: int
    nll: list[float]
    kl: list[float]
    same: list[bool]
    answers: list[scores.Answer]
    later: dict[int, scores.Answer]
    resident_bytes: float
    read_bytes: float


@dataclasses.dataclass
class Outcome:
    """A variant's results by context number, or why there are none: nothing of an invalid run is averaged."""

    variant: Variant
    by_context: dict[int, Found] = dataclasses.field(default_factory=dict)
    invalid: str | None = None


def batches(contexts: Sequence[Context], size: int = BATCH) -> Iterator[list[int]]:
    """Numbers of contexts of one length, at most `size` at a time, in order."""
    by_length: dict[int, list[int]] = {}
    for number, context in enumerate(contexts):
        by_length.setdefault(len(context.ids), []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


def num_steps(pools: Sequence[Pool], contexts: Sequence[Context]) -> int:
    """Calls of `progress` that a sweep makes."""
    return sum(len(contexts) + len(pool.variants) * len(list(batches(contexts))) for pool in pools)


class Bench:
    """One pool's runner and the rows on it. Rows 1..BATCH hold prefilled contexts, the next ones questions.

    Args:
      model: `LoadedModel`.
      pool: what is served.
      max_len: most tokens of a row.
      num_questions: of each context.
      question_tokens: of the longest question.
      own_tokens: most that a fork appends.
    """

    def __init__(self, model: Any, pool: Pool, max_len: int, num_questions: int, question_tokens: int, own_tokens: int):
        self.pool = pool
        self.geometry = model.spec.geometry(pool.page_size, max_len)
        methods = {"base": pool.base, **{variant.label: variant.method for variant in pool.variants}}
        pages = self.geometry.pages
        # Full pages are shared by forks; those written to are a row's own, and so are compacted ones, which grow to
        # at most twice the budget before they are compacted again.
        own = pages(own_tokens) + 2
        kept = max((2 * v.budget if v.budget else max_len for v in pool.variants if v.method.evicts), default=0)
        num_pages = 1 + BATCH * (self.geometry.max_pages + (num_questions + 4) * own + 2 * pages(min(kept, max_len)))
        self.runner = DeviceRunner(
            model.spec,
            model.weights,
            self.geometry,
            methods,
            pool.storage,
            num_rows=BATCH * (num_questions + 3),
            num_sequence_pages=num_pages,
            decode_buckets=(BATCH,),
            prefill_buckets=((1, PREFILL_CHUNK), (1, -(-question_tokens // 8) * 8)),
        )
        self.base = Rows(self.runner, "base")
        self.first_question = BATCH + 1
        self.scratch = list(range(BATCH * (num_questions + 1) + 1, BATCH * (num_questions + 3) + 1))

    def rows(self, variant: Variant) -> Rows:
        return Rows(self.runner, variant.label, self.base.pool)

    def bytes_of(self, variant: Variant, rows: Rows, row: int) -> tuple[float, float]:
        """Resident and read bytes of a row's cache, its side arrays included."""
        method, storage = variant.method, variant.storage
        page = sequence_page_nbytes(self.geometry, (method,), storage) / self.geometry.head_pages_per_sequence_page
        span = self.geometry.head_pages_per_page(method.granularity)
        return rows.pages[row].count * span * page, step_bytes(method, storage, self.geometry, rows.length(row))


def run(
    model: Any, groups: Sequence[Pool], contexts: Sequence[Context], progress: Progress = lambda text: None
) -> list[Outcome]:
    """Every variant over every context; the first variant of the first group is the reference.

    Args:
      model: `LoadedModel`.
      groups: see `variants.pools`.
      contexts: all with as many questions.
      progress: called after each prefill and after each variant of a batch.
    """
    references: dict[int, np.ndarray] = {}
    outcomes = []
    num_questions = max(len(context.questions) for context in contexts)
    question_tokens = max(len(question.ids) for context in contexts for question in context.questions)
    continuation = max(len(context.continuation) for context in contexts)
    longest = max(len(context.ids) for context in contexts)
    own_tokens = max(continuation, question_tokens)
    max_len = longest + own_tokens + 1
    for pool in groups:
        bench = Bench(model, pool, max_len, num_questions, question_tokens, own_tokens)
        found = [Outcome(variant) for variant in pool.variants]
        outcomes += found
        for numbers in batches(contexts):
            batch = [contexts[number] for number in numbers]
            finite = True
            for row, context in enumerate(batch, 1):
                finite &= bool(bench.base.prefill(row, context.ids).result().ok.all())
                progress(f"prefill of {len(context.ids)} tokens")
            _ask_base(bench, batch)
            for outcome in found:
                if outcome.invalid is None:
                    try:
                        if not finite:
                            raise NotFiniteError("logits of the prefill are not finite")
                        _measure(bench, outcome, numbers, batch, references)
                    except NotFiniteError as error:
                        outcome.invalid = str(error)
                        outcome.by_context.clear()
                progress(outcome.variant.label)
            for row in list(bench.base.pages):
                bench.base.release(row)
        del bench  # before the next one takes as much memory
    return outcomes


def _ask_base(bench: Bench, batch: Sequence[Context]) -> None:
    """A row for each question: its context and all of it but the last token, which variants decode."""
    row = bench.first_question
    for source, context in enumerate(batch, 1):
        for question in context.questions:
            bench.base.fork(bench.base, source, row)
            bench.base.append(row, question.ids[:-1])
            row += 1


def _measure(
    bench: Bench, outcome: Outcome, numbers: Sequence[int], batch: Sequence[Context], references: dict[int, np.ndarray]
) -> None:
    rows = bench.rows(outcome.variant)
    try:
        found = _continue(bench, outcome.variant, rows, numbers, batch, references)
        asked = [(number, question) for number, context in enumerate(batch) for question in context.questions]
        sources = range(bench.first_question, bench.first_question + len(asked))
        for (number, _), answer in zip(asked, _answers(bench, outcome.variant, rows, sources, asked), strict=True):
            found[number].answers.append(answer)
        if outcome.variant.method.evicts and not outcome.variant.control:
            _ask_later(bench, outcome.variant, rows, batch, found)
    finally:
        for row in list(rows.pages):
            rows.release(row)
    outcome.by_context.update(zip(numbers, found, strict=True))


def _forced(bench: Bench, variant: Variant, rows: Rows, numbers: Sequence[int], tokens: Sequence[int], rng: Any) -> Any:
    if variant.shuffled:
        runner = bench.runner
        runner.state = variants.shuffle_positions(runner.state, numbers, bench.geometry.max_model_len, rng)
    return rows.logits(numbers, tokens)


def _continue(
    bench: Bench,
    variant: Variant,
    rows: Rows,
    numbers: Sequence[int],
    batch: Sequence[Context],
    references: dict[int, np.ndarray],
) -> list[Found]:
    """Decodes the prose that follows, with the text forced."""
    own = bench.scratch[: len(batch)]
    for source, row in enumerate(own, 1):
        rows.fork(bench.base, source, row)
        rows.finish_prompt(row)
    ids = np.asarray([context.continuation for context in batch], np.int32)
    is_reference = any(number not in references for number in numbers)
    rng = np.random.default_rng(numbers[0])
    compared, kept = [], []
    for place in range(ids.shape[1] - 1):
        logits = _forced(bench, variant, rows, own, ids[:, place].tolist(), rng)
        if is_reference:
            kept.append(np.asarray(logits))
            reference = logits
        else:
            reference = np.stack([references[number][place] for number in numbers])
        compared.append(scores.compare(reference, logits, ids[:, place + 1].tolist()))
    if is_reference:
        for i, number in enumerate(numbers):
            references[number] = np.stack([logits[i] for logits in kept])
    found = []
    for i, row in enumerate(own):
        nll, kl, same = ([getattr(step, name)[i].item() for step in compared] for name in scores.Comparison._fields)
        if not all(map(math.isfinite, (*nll, *kl))):
            raise NotFiniteError(f"{variant.label}: the divergence from dense attention is not finite")
        found.append(Found(len(batch[i].ids), nll, kl, same, [], {}, *bench.bytes_of(variant, rows, row)))
        rows.release(row)
    return found


def _answers(
    bench: Bench, variant: Variant, rows: Rows, sources: Sequence[int], asked: Sequence[tuple[int, Question]]
) -> list[scores.Answer]:
    """Evicts forks of the base's rows, decodes the last token of each question and judges what comes next."""
    found: list[scores.Answer] = []
    rng = np.random.default_rng(len(asked))
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        own = bench.scratch[: len(part)]
        for source, row in zip(sources[start : start + BATCH], own, strict=True):
            rows.fork(bench.base, source, row)
            rows.finish_prompt(row)
        found += _last_token(bench, variant, rows, own, [question for _, question in part], rng)
    return found


def _ask_later(bench: Bench, variant: Variant, rows: Rows, batch: Sequence[Context], found: Sequence[Found]) -> None:
    """The context is evicted before the question is known, and once more after it: a second turn."""
    rng = np.random.default_rng(0)
    kept, own = bench.scratch[:BATCH], bench.scratch[BATCH:]
    for source in range(1, len(batch) + 1):
        rows.fork(bench.base, source, kept[source - 1])
        rows.finish_prompt(kept[source - 1])
    asked = [
        (context, number, question)
        for context in range(len(batch))
        for number, question in enumerate(batch[context].questions)
        if question.task in LATER
    ]
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        targets = own[: len(part)]
        for (context, _, question), row in zip(part, targets, strict=True):
            rows.fork(rows, kept[context], row)
            rows.append(row, question.ids[:-1])
            rows.finish_prompt(row)
        answers = _last_token(bench, variant, rows, targets, [question for *_, question in part], rng)
        for (context, number, _), answer in zip(part, answers, strict=True):
            found[context].later[number] = answer


def _last_token(
    bench: Bench, variant: Variant, rows: Rows, own: Sequence[int], questions: Sequence[Question], rng: Any
) -> list[scores.Answer]:
    logits = np.asarray(_forced(bench, variant, rows, own, [question.ids[-1] for question in questions], rng))
    for row in own:
        rows.release(row)
    return [scores.judge(line, q.answers, q.candidates) for line, q in zip(logits, questions, strict=True)]
