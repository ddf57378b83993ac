"""What is measured: how far logits are from a reference, and how often the right answer ranks first; with intervals.

Imports jax inside functions only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Z95 = 1.959964
RESAMPLES = 2000


class Interval(NamedTuple):
    """An estimate and its 95% confidence interval, which is infinite where one context says nothing about others."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return f"{self.value:.3g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def wilson(hits: float, trials: int) -> Interval:
    """A share of independent trials, with Wilson's score interval.

    Raises:
      ValueError: no trials, or more hits than trials.
    """
    if trials < 1 or not 0 <= hits <= trials * (1 + 1e-12):
        raise ValueError(f"{hits} hits of {trials} trials is no share")
    share, z2 = min(1.0, hits / trials), Z95 * Z95
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def bootstrap(clusters: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Mean of all values, with the interval of means when whole clusters (contexts) are drawn again.

    Values of one cluster depend on each other, so they are drawn together. One cluster alone says nothing about
    others: its interval is infinite.

    Raises:
      ValueError: no values.
    """
    kept = [cluster for cluster in clusters if len(cluster)]
    if not kept:
        raise ValueError("no values")
    sums = np.asarray([math.fsum(cluster) for cluster in kept])
    counts = np.asarray([len(cluster) for cluster in kept])
    mean = float(sums.sum() / counts.sum())
    if len(kept) == 1:
        return Interval(mean, -math.inf, math.inf)
    drawn = np.random.default_rng(seed).integers(0, len(kept), (RESAMPLES, len(kept)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(mean, float(low), float(high))


def cautious(clusters: Sequence[Sequence[float]], trials: int, seed: int = 0) -> Interval:
    """Mean of shares per cluster; its interval is the union of `bootstrap`'s and of Wilson's for so many questions.

    A few clusters that agree by luck would give `bootstrap` an interval without width.
    """
    drawn = bootstrap(clusters, seed)
    counted = wilson(drawn.value * trials, trials)
    return Interval(drawn.value, max(0.0, min(drawn.low, counted.low)), min(1.0, max(drawn.high, counted.high)))


class Comparison(NamedTuple):
    """Per row: nats of the target, KL(reference || method) in nats, and whether both put the same token first."""

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray


@functools.cache
def _compare() -> Any:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def compare(reference: Any, logits: Any, targets: Any) -> tuple[Any, Any, Any]:
        p, q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(q, targets[:, None], axis=1)[:, 0]
        kl = (jnp.exp(p) * (p - q)).sum(1)
        return nll, kl, reference.argmax(1) == logits.argmax(1)

    return compare


def compare(reference: Any, logits: Any, targets: Sequence[int]) -> Comparison:
    """Compares next-token distributions.

    Args:
      reference, logits: float32 [rows, vocab].
      targets: the true next tokens.
    """
    found = _compare()(reference, logits, np.asarray(targets, np.int32))
    return Comparison(*(np.asarray(x) for x in found))


class Answer(NamedTuple):
    """How one question was answered.

    Attributes:
      hits: answers that rank among the first len(answers) candidates.
      trials: answers.
      exact: some answer is the likeliest token of the whole vocabulary.
      logprob: nats of the likeliest answer.
    """

    hits: int
    trials: int
    exact: bool
    logprob: float


def judge(logits: np.ndarray, answers: Sequence[int], candidates: Sequence[int]) -> Answer:
    """Ranks the candidates. An answer that shares its logit with another candidate ranks below it.

    Args:
      logits: float32 [vocab].
      answers: ids of right tokens.
      candidates: ids of all ranked tokens, answers included.

    Raises:
      ValueError: logits that are not finite, or answers that are no candidates.
    """
    if not np.isfinite(logits).all():
        raise ValueError("logits are not finite")
    if not set(answers) <= set(candidates):
        raise ValueError("every answer must be a candidate")
    ranked = np.asarray([logits[i] for i in candidates], np.float64)
    places = [int((ranked >= logits[i]).sum()) for i in answers]  # 1 is first; ties count against
    top = logits.max()
    lse = float(top) + math.log(float(np.exp(logits.astype(np.float64) - top).sum()))
    best = max(answers, key=lambda i: logits[i])
    exact = bool(logits[best] == top and (logits == top).sum() == 1)
    return Answer(sum(place <= len(answers) for place in places), len(answers), exact, float(logits[best]) - lse)


def drop_reason(hits: int, trials: int, chance: float) -> str | None:
    """Why dense attention's score makes a task useless, or None: its interval must lie above chance."""
    found = wilson(hits, trials)
    if found.low > chance:
        return None
    return f"dense scores {found.value:.2f} (at least {found.low:.2f}), chance is {chance:.2f}"
