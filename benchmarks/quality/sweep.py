"""Runs every variant over the same contexts, each of which is prefilled once for all variants that can share it.

A context is prefilled densely, with every statistic that some method of its pool keeps (`variants.recorder`). Each
variant then works on forks, whose pages are shared until they are evicted: it evicts as after any prompt and decodes
forced tokens. That is what the method itself would hold after the same prompt; one whose prefill differs gets a pool
of its own.

Methods that act late are given what they act on (`variants.acts`). Those that replay a prompt do so once per context;
for those that act while decoding, the last tokens of a context are decoded, with the text forced, instead of
prefilled. Both are asked all questions afterwards, as a second turn.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.perplexity import step_bytes
from benchmarks.quality import scores, speed, variants
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
NO_TIME = "the time was up"
AFTER_EVICTION = 32
"""Tokens of a context that are decoded after the latest method that acts while decoding has evicted first."""
Progress = Callable[[str], None]


@dataclasses.dataclass
class Found:
    """What one variant gave for one context.

    Attributes:
      length: tokens of the context.
      nll, kl, same: of each token of the continuation after the first.
      answers: to the context's questions, each part of the prompt, or asked later if the method acts late.
      later: question number -> answer when the context was evicted before it was asked; only of methods that evict
        after a prompt, controls excepted.
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
    """A variant's results by context number, or why there are none: nothing of an invalid run is averaged.

    Attributes:
      acts: see `variants.acts`.
      speed: decode speed beside dense attention, by context length.
      prefill_s: seconds of a prefill by context length; of the reference, and of variants with prefills of their own.
    """

    variant: Variant
    by_context: dict[int, Found] = dataclasses.field(default_factory=dict)
    invalid: str | None = None
    acts: str = "prompt"
    speed: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    prefill_s: dict[int, float] = dataclasses.field(default_factory=dict)


def batches(contexts: Sequence[Context], size: int = BATCH) -> Iterator[list[int]]:
    """Numbers of contexts of one length, at most `size` at a time, in order."""
    by_length: dict[int, list[int]] = {}
    for number, context in enumerate(contexts):
        by_length.setdefault(len(context.ids), []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


def first_ones(contexts: Sequence[Context], few: int | None) -> set[int]:
    """Numbers of the first `few` contexts of each length; of all of them if None."""
    seen: dict[int, int] = {}
    chosen = set()
    for number, context in enumerate(contexts):
        seen[len(context.ids)] = seen.get(len(context.ids), 0) + 1
        if few is None or seen[len(context.ids)] <= few:
            chosen.add(number)
    return chosen


def num_steps(pools: Sequence[Pool], contexts: Sequence[Context], few: int | None = None) -> int:
    """Calls of `progress` that a sweep makes."""
    allowed, total = first_ones(contexts, few), 0
    for pool in pools:
        for numbers in batches(contexts):
            count = len(_shown(pool is pools[0], numbers, allowed))
            total += count + len(pool.variants) * bool(count)
    return total


def _shown(everything: bool, numbers: Sequence[int], allowed: Collection[int]) -> list[int]:
    return [number for number in numbers if everything or number in allowed]


def replay_tokens(pool: Pool, prompt_tokens: int) -> int:
    """Tokens of the longest replay that some method of a pool wants of a prompt."""
    methods = [pool.base, *(variant.method for variant in pool.variants)]
    return max((tokens for method in methods for tokens in method.replay_lengths(prompt_tokens)), default=0)


@dataclasses.dataclass(frozen=True)
class Tail:
    """Tokens at the end of a context that are decoded for methods which act while decoding: in all, and for all."""

    tokens: int = 0
    shared: int = 0


def tail_of(pool: Pool, length: int, geometry: Any) -> Tail:
    """Enough for each of them to evict; nothing is evicted while the first ones are decoded, once for all."""
    late = [v.method for v in pool.variants if variants.acts(v.method, geometry) == "decode"]
    first = [variants.first_eviction(method, length, geometry, length // 4) for method in late]
    evicting = [tokens for tokens in first if tokens]
    if not evicting:
        return Tail()
    tokens = min(max(evicting) + AFTER_EVICTION, length // 2)
    return Tail(tokens, min(evicting) - 1)


class Bench:
    """One pool's runner and the rows on it. Rows 1..BATCH hold prefilled contexts, the next ones questions.

    Args:
      model: `LoadedModel`.
      pool: what is served.
      max_len: most tokens of a row.
      num_questions: of each context.
      question_tokens: of the longest question.
      own_tokens: most that a fork appends.
      replay: tokens of the longest replay.

    Attributes:
      base: the rows of contexts and questions.
      scratch, kept, trunks, timed: row numbers: twice BATCH for what is asked, then BATCH each for evicted contexts,
        contexts without their last tokens, and rows that are timed.
      learned: of each row of the base, what its forks must find (`Rows.learned`).
    """

    def __init__(
        self,
        model: Any,
        pool: Pool,
        max_len: int,
        num_questions: int,
        question_tokens: int,
        own_tokens: int,
        replay: int = 0,
    ):
        self.pool = pool
        self.geometry = model.spec.geometry(pool.page_size, max_len)
        pages = self.geometry.pages
        # Full pages are shared by forks; those written to are a row's own, and so are compacted ones, which grow to
        # at most twice the budget before they are compacted again.
        own = pages(own_tokens) + 2
        kept = max((2 * v.budget if v.budget else max_len for v in pool.variants if v.method.evicts), default=0)
        row_pages = self.geometry.max_pages + (num_questions + 6) * own + 3 * pages(min(kept, max_len))
        self.runner = DeviceRunner(
            model.spec,
            model.weights,
            self.geometry,
            {"base": pool.base, **pool.methods()},
            pool.storage,
            num_rows=BATCH * (num_questions + 6),
            num_sequence_pages=1 + BATCH * row_pages + pages(replay) + self.geometry.max_pages,
            decode_buckets=(BATCH,),
            prefill_buckets=(
                (1, PREFILL_CHUNK),
                (1, -(-question_tokens // 8) * 8),
                *([(1, replay)] if replay > PREFILL_CHUNK else []),
            ),
        )
        self.base = Rows(self.runner, "base", chunk=PREFILL_CHUNK)
        self.first_question = BATCH + 1
        first = BATCH * (num_questions + 1) + 1
        self.scratch = list(range(first, first + 2 * BATCH))
        self.kept, self.trunks, self.timed = (
            list(range(first + i * BATCH, first + (i + 1) * BATCH)) for i in (2, 3, 4)
        )
        self.learned: dict[int, dict[str, np.ndarray]] = {}

    def rows(self, variant: Variant) -> Rows:
        return Rows(self.runner, variant.label, self.base.pool, PREFILL_CHUNK)

    def take(self, rows: Rows, source: int, target: int) -> None:
        """Makes `target` of `rows` a fork of a context or question, as it was when it had been read."""
        self.give(self.base, rows, source, target)

    def give(self, owner: Rows, rows: Rows, source: int, target: int) -> None:
        """A fork that shares pages, and finds beside them what there was when `source` was remembered."""
        owner.teach(source, self.learned.get(source, {}))
        rows.fork(owner, source, target, share=True)

    def remember(self, owner: Rows, row: int) -> None:
        """From now on forks of `row` find what is there now."""
        self.learned[row] = owner.learned(row)

    def bytes_of(self, variant: Variant, rows: Rows, row: int) -> tuple[float, float]:
        """Resident and read bytes of a row's cache, its side arrays included."""
        method, storage = variant.method, variant.storage
        page = sequence_page_nbytes(self.geometry, (method,), storage) / self.geometry.head_pages_per_sequence_page
        span = self.geometry.head_pages_per_page(rows.pages[row].granularity)
        return rows.pages[row].count * span * page, step_bytes(method, storage, self.geometry, rows.length(row))


def run(
    model: Any,
    groups: Sequence[Pool],
    contexts: Sequence[Context],
    progress: Progress = lambda text: None,
    few: int | None = None,
    windows: int = 0,
    most_s: float = math.inf,
    keep: Callable[[list[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Every variant over every context; the first variant of the first group is the reference.

    Args:
      model: `LoadedModel`.
      groups: see `variants.pools`.
      contexts: all with as many questions.
      progress: called after each prefill and after each variant of a batch.
      few: contexts of each length for what costs more than others: pools but the first, and methods that act late.
      windows: decode windows that are timed for each variant and length; 0 times nothing.
      most_s: nothing is begun after so many seconds, and what is left is invalid for that reason. The first group has
        two thirds of them, so that others have their turn.
      keep: called with all outcomes so far after each variant.
    """
    began = time.perf_counter()
    references: dict[int, np.ndarray] = {}
    outcomes = []
    allowed = first_ones(contexts, few)
    num_questions = max(len(context.questions) for context in contexts)
    question_tokens = max(len(question.ids) for context in contexts for question in context.questions)
    continuation = max(len(context.continuation) for context in contexts)
    longest = max(len(context.ids) for context in contexts)
    clock: speed.Clock | None = None
    for pool in groups:
        geometry = model.spec.geometry(pool.page_size, longest)
        tail = tail_of(pool, min(len(context.ids) for context in contexts), geometry)
        replay = max(replay_tokens(pool, len(context.ids)) for context in contexts)
        own_tokens = max(question_tokens, tail.tokens + continuation + speed.tokens(windows))
        max_len = longest + max(own_tokens, replay) + 1
        bench = Bench(model, pool, max_len, num_questions, question_tokens, own_tokens, replay)
        found = [Outcome(variant, acts=variants.acts(variant.method, geometry)) for variant in pool.variants]
        outcomes += found
        last_start = began + most_s * (2 / 3 if pool is groups[0] and len(groups) > 1 else 1)
        for all_numbers in batches(contexts):
            numbers = _shown(pool is groups[0], all_numbers, allowed)
            if not numbers:
                continue
            if outcomes[0].by_context and time.perf_counter() > last_start:
                for outcome in found:
                    outcome.invalid = NO_TIME
                for _ in range(len(numbers) + len(found)):
                    progress(NO_TIME)
                continue
            batch = [contexts[number] for number in numbers]
            finite, times = True, []
            for row, (number, context) in enumerate(zip(numbers, batch, strict=True), 1):
                start = time.perf_counter()
                finite &= _prefill(bench, row, context, tail.tokens)
                times.append(time.perf_counter() - start)
                if number in allowed:
                    bench.base.replay(row, context.ids)
                bench.remember(bench.base, row)
                progress(f"prefill of {len(context.ids)} tokens")
            if tail.shared:
                _decode_trunks(bench, [contexts[number] for number in numbers if number in allowed], tail)
            _ask_base(bench, batch)
            for outcome in found:
                part = _shown(outcome.acts == "prompt", numbers, allowed)
                if pool.why_alone:
                    known = outcome.prefill_s.get(len(batch[0].ids), math.inf)
                    outcome.prefill_s[len(batch[0].ids)] = min(known, *times)
                if outcomes[0].by_context and time.perf_counter() > last_start:
                    outcome.invalid = outcome.invalid or NO_TIME
                    outcome.by_context.clear()
                if outcome.invalid is None and part:
                    try:
                        if not finite:
                            raise NotFiniteError("logits of the prefill are not finite")
                        _measure(bench, outcome, part, batch[: len(part)], references, tail, clock)
                    except NotFiniteError as error:
                        outcome.invalid = str(error)
                        outcome.by_context.clear()
                if clock is None and windows:
                    clock = speed.Clock(bench, found[0].variant, windows)
                if clock is not None and outcome is outcomes[0] and len(batch[0].ids) not in outcome.prefill_s:
                    outcome.prefill_s[len(batch[0].ids)] = clock.prefill_s(batch[0].ids)
                # A process may only have so many maps of memory, and each program needs some.
                if clock is None or outcome is not outcomes[0]:
                    bench.runner.forget(outcome.variant.label)
                    jax.clear_caches()
                progress(outcome.variant.label)
                keep(outcomes)
            if clock is None or clock.bench is not bench or all_numbers != list(batches(contexts))[-1]:
                for row in list(bench.base.pages):
                    bench.base.release(row)
        del bench  # before the next one takes as much memory
        jax.clear_caches()
    return outcomes


def _prefill(bench: Bench, row: int, context: Context, tail: int) -> bool:
    """Reads a context; a row of `trunks` gets it without its last `tail` tokens. Returns whether logits are finite."""
    ids = context.ids
    ticket = bench.base.prefill(row, ids[: len(ids) - tail], finish=False)
    if tail:
        bench.base.fork(bench.base, row, bench.trunks[row - 1], share=True)
        ticket = bench.base.append(row, ids[len(ids) - tail :])
    return bool(ticket.result().ok.all())


def _decode_trunks(bench: Bench, batch: Sequence[Context], tail: Tail) -> None:
    """Decodes what all methods that act while decoding decode alike."""
    trunks = bench.trunks[: len(batch)]
    for row in trunks:
        bench.base.finish_prompt(row)
    for place in range(-tail.tokens, tail.shared - tail.tokens):
        bench.base.logits(trunks, [context.ids[place] for context in batch])


def _ask_base(bench: Bench, batch: Sequence[Context]) -> None:
    """A row for each question: its context and all of it but the last token, which variants decode."""
    row = bench.first_question
    for source, context in enumerate(batch, 1):
        for question in context.questions:
            bench.take(bench.base, source, row)
            bench.base.append(row, question.ids[:-1])
            bench.remember(bench.base, row)
            row += 1


def _measure(
    bench: Bench,
    outcome: Outcome,
    numbers: Sequence[int],
    batch: Sequence[Context],
    references: dict[int, np.ndarray],
    tail: Tail,
    clock: speed.Clock | None,
) -> None:
    variant = outcome.variant
    rows = bench.rows(variant)
    try:
        _evict(bench, outcome, rows, batch, tail)
        found = _continue(bench, outcome, rows, numbers, batch, references, clock)
        asked = [(number, question) for number, context in enumerate(batch) for question in context.questions]
        if outcome.acts == "prompt":
            sources = range(bench.first_question, bench.first_question + len(asked))
            for (number, _), answer in zip(asked, _answers(bench, variant, rows, sources, asked), strict=True):
                found[number].answers.append(answer)
        if outcome.acts != "prompt" or (variant.method.evicts and not variant.control):
            later = [(i, n, q) for i, context in enumerate(batch) for n, q in enumerate(context.questions)]
            if outcome.acts == "prompt":
                later = [entry for entry in later if entry[2].task in LATER]
            answers = _ask_later(bench, variant, rows, later)
            for (context, number, _), answer in zip(later, answers, strict=True):
                if outcome.acts == "prompt":
                    found[context].later[number] = answer
                else:
                    found[context].answers.append(answer)
    finally:
        for row in list(rows.pages):
            rows.release(row)
    outcome.by_context.update(zip(numbers, found, strict=True))


def _evict(bench: Bench, outcome: Outcome, rows: Rows, batch: Sequence[Context], tail: Tail) -> None:
    """Rows `kept` hold the contexts, after whatever the method does to them."""
    kept = bench.kept[: len(batch)]
    for source, row in enumerate(kept, 1):
        if outcome.acts == "decode":
            rows.fork(bench.base, bench.trunks[source - 1], row, share=True)
        else:
            bench.take(rows, source, row)
            rows.finish_prompt(row, replayed=outcome.acts == "replay")
    if outcome.acts == "decode":
        for place in range(tail.shared - tail.tokens, 0):
            rows.logits(kept, [context.ids[place] for context in batch])
    for row in kept:
        bench.remember(rows, row)


def _forced(bench: Bench, variant: Variant, rows: Rows, numbers: Sequence[int], tokens: Sequence[int], rng: Any) -> Any:
    if variant.shuffled:
        runner = bench.runner
        runner.state = variants.shuffle_positions(runner.state, numbers, bench.geometry.max_model_len, rng)
    return rows.logits(numbers, tokens)


def _continue(
    bench: Bench,
    outcome: Outcome,
    rows: Rows,
    numbers: Sequence[int],
    batch: Sequence[Context],
    references: dict[int, np.ndarray],
    clock: speed.Clock | None,
) -> list[Found]:
    """Decodes the prose that follows, with the text forced; then some more with a clock."""
    variant = outcome.variant
    own = bench.scratch[: len(batch)]
    for source, row in zip(bench.kept, own, strict=False):
        bench.give(rows, rows, source, row)
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
    length = len(batch[0].ids)
    if clock is not None and length not in outcome.speed and not variant.control:
        outcome.speed[length] = clock.beside(rows, own)
    for row in own:
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
            bench.take(rows, source, row)
            rows.finish_prompt(row)
        found += _last_token(bench, variant, rows, own, [question for _, question in part], rng)
    return found


def _ask_later(
    bench: Bench, variant: Variant, rows: Rows, asked: Sequence[tuple[int, int, Question]]
) -> list[scores.Answer]:
    """Asks (context, number, question) of contexts that were evicted before; they are again after it: a second turn."""
    rng = np.random.default_rng(0)
    found: list[scores.Answer] = []
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        targets = bench.scratch[BATCH : BATCH + len(part)]
        for (context, _, question), row in zip(part, targets, strict=True):
            bench.give(rows, rows, bench.kept[context], row)
            rows.append(row, question.ids[:-1])
            rows.finish_prompt(row)
        found += _last_token(bench, variant, rows, targets, [question for *_, question in part], rng)
    return found


def _last_token(
    bench: Bench, variant: Variant, rows: Rows, own: Sequence[int], questions: Sequence[Question], rng: Any
) -> list[scores.Answer]:
    logits = np.asarray(_forced(bench, variant, rows, own, [question.ids[-1] for question in questions], rng))
    for row in own:
        rows.release(row)
    return [scores.judge(line, q.answers, q.candidates) for line, q in zip(logits, questions, strict=True)]
