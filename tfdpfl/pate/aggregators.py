"""The noisy votes: LNMax, GNMax and its two thrifty forms.

A mechanism is data (its noise) made of parts (`Argmax`, `Threshold`). Each part says what it costs: as a
dp-accounting event, and as bounds on Rényi DP with and without the votes.

Neighbours: one example is replaced, so one teacher's vote moves from one class to another. Noise multipliers in events
are relative to the sensitivity under that relation: the counts move by √2 in L2, their maximum by 1.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl._types import Arrays, DpEvent
from tfdpfl.accounting import _checks
from tfdpfl.accounting.events import composed
from tfdpfl.accounting.pricing import LARGEST_PURE_EPSILON
from tfdpfl.accounting.promises import Promise, of_seed
from tfdpfl.pate import bounds, pricing
from tfdpfl.pate.epsilon import Epsilon, votes_promise
from tfdpfl.pate.votes import as_counts

if TYPE_CHECKING:
    from tfdpfl.noise import Source

__all__ = [
    "Aggregator",
    "Answers",
    "ConfidentGNMax",
    "GNMax",
    "InteractiveGNMax",
    "LNMax",
    "Queries",
    "Threshold",
    "read_queries",
]

NO_LABEL = -1
_FRESH_FROM = 20.0  # scales of Laplace noise, where our generator's normals are still exact to a part in 10^9


class _Gaussian:
    """Noise N(0, σ²) on what one example moves by √`squared` in L2: its RDP at order λ is λ·`squared` / (2σ²)."""

    sigma: float
    squared: float
    norm = 2

    @property
    def moved(self) -> float:
        """How far one example moves the votes in `norm`."""
        return math.sqrt(self.squared)

    @property
    def scale(self) -> float:
        """Of the noise, in votes."""
        return self.sigma

    def noise(self, source: Source, shape: tuple[int, ...]) -> np.ndarray:
        return self.sigma * source.normals(shape)

    @property
    def event(self) -> DpEvent:
        import dp_accounting

        return dp_accounting.GaussianDpEvent(self.sigma / self.moved)

    @property
    def rho(self) -> float:
        return self.squared / (2 * self.sigma**2)

    def rdp_of_log_q(self, log_q: np.ndarray, orders: np.ndarray) -> np.ndarray:
        return bounds.rdp_gaussian(log_q, math.sqrt(2 / self.squared) * self.sigma, orders)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.asarray(orders, float) / self.sigma / self.sigma * (self.squared / 2)


class _Argmax:
    log_q_of_gap: Callable[[np.ndarray], np.ndarray]
    step = 2.0  # how far a gap moves when one vote does

    def log_q(self, counts: np.ndarray) -> np.ndarray:
        return bounds.log_q(counts, self.log_q_of_gap)

    def log_q_of_position(self, gap: np.ndarray, classes: int) -> np.ndarray:
        """ln q of a query whose `classes - 1` rivals are all `gap` votes behind."""
        return bounds.capped_log_q(math.log(classes - 1) + self.log_q_of_gap(gap), classes)


@dataclass(frozen=True)
class GaussianArgmax(_Gaussian, _Argmax):
    """argmax(counts + N(0, σ²))."""

    sigma: float
    squared = 2.0  # two counts move by 1 each

    def log_q_of_gap(self, gap: np.ndarray) -> np.ndarray:
        return bounds.log_q_gaussian_of_gap(gap, self.sigma)


@dataclass(frozen=True)
class LaplaceArgmax(_Argmax):
    """argmax(counts + Laplace(1/γ))."""

    gamma: float
    norm = 1
    moved = 2.0

    @property
    def scale(self) -> float:
        """Of the noise, in votes."""
        return 1 / self.gamma

    def noise(self, source: Source, shape: tuple[int, ...]) -> np.ndarray:
        return _laplace(source, shape) / self.gamma

    @property
    def event(self) -> DpEvent:
        import dp_accounting

        # A vote that moves changes two counts by 1 each: two Laplace mechanisms of 1/γ, whose price is about half of
        # the 2γ-DP that the papers account for.
        return dp_accounting.SelfComposedDpEvent(dp_accounting.LaplaceDpEvent(1 / self.gamma), 2)

    @property
    def rho(self) -> float:
        return self.gamma**2

    def log_q_of_gap(self, gap: np.ndarray) -> np.ndarray:
        return bounds.log_q_laplace_of_gap(gap, self.gamma)

    def rdp_of_log_q(self, log_q: np.ndarray, orders: np.ndarray) -> np.ndarray:
        return bounds.rdp_laplace(log_q, self.gamma, orders)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.minimum(2 * self.gamma, 2 * self.gamma**2 * np.asarray(orders, float))


@dataclass(frozen=True)
class Threshold(_Gaussian):
    """max(scores) + N(0, σ²) >= threshold, a score being a count less a public number."""

    threshold: float
    sigma: float
    step = 1.0
    squared = 1.0

    def log_q(self, scores: np.ndarray) -> np.ndarray:
        return bounds.log_q_threshold(scores.max(axis=1) - self.threshold, self.sigma)

    def log_q_of_position(self, distance: np.ndarray, classes: int) -> np.ndarray:
        """ln q of a query whose largest score is `distance` from the threshold."""
        return bounds.log_q_threshold(distance, self.sigma)


Part = GaussianArgmax | LaplaceArgmax | Threshold


@dataclass(frozen=True, eq=False)
class Queries:
    """Holds what a mechanism was asked. All of it is private.

    Attributes:
        mechanism: The aggregator.
        counts: The votes, `[queries, classes]`.
        scores: What a threshold looked at, `[queries, classes]`, where that is not `counts`.
        answered: bool `[queries]`, which ones the teachers' vote answered.
    """

    mechanism: Aggregator
    counts: np.ndarray
    scores: np.ndarray | None
    answered: np.ndarray

    @property
    def event(self) -> DpEvent:
        """What ran, as a dp-accounting event."""
        return self.mechanism.dp_event(len(self.counts), int(self.answered.sum()))

    def seen(self) -> Iterator[tuple[Arrays, np.ndarray, Arrays]]:
        """Each part, what it looked at, and the queries it ran on."""
        for part in self.mechanism.parts:
            if isinstance(part, Threshold):
                yield part, self.counts if self.scores is None else self.scores, slice(None)
            elif self.answered.any():
                yield part, self.counts[self.answered], self.answered

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """The data-dependent RDP, `[queries, orders]`."""
        out = np.zeros((len(self.counts), len(orders)))
        for part, seen, rows in self.seen():
            out[rows] += part.rdp_of_log_q(part.log_q(seen), orders)
        return out

    def epsilon(self, delta: float, data_dependent: bool) -> Epsilon:
        """ε at `delta`; see `Aggregator.epsilon`."""
        delta = pricing.check_delta(delta)
        independent = pricing.price_of(self.event, delta)
        if not data_dependent:
            return independent
        steps = [(part, part.log_q(seen)) for part, seen, _ in self.seen()]
        epsilon = pricing.best_epsilon(lambda orders: pricing.composed_rdp(steps, orders), delta)
        # Which of the two is less tells about the votes, so that the label stays.
        return epsilon if epsilon <= independent else Epsilon(independent, delta, data_dependent=True)


@dataclass(frozen=True, eq=False)
class Answers:
    """Holds the labels that a mechanism released, and their cost.

    Attributes:
        labels: int64 `[queries]`; -1 where there is none.
        answered: bool `[queries]`: there is a label.
        by_teachers: bool `[queries]`: the teachers' noisy vote gave it. Differs from `answered` only where
            Interactive-GNMax kept the student's own label.
        cost: float64 `[queries]`: the query's ρ. Its RDP at every order λ is at most ρ·λ whatever the votes (zCDP,
            Bun & Steinke 2016), so costs may be added and published.
        mechanism: The aggregator.
        counts: The votes, `[queries, classes]`. Private.
        scores: What a threshold looked at, `[queries, classes]`, where that is not `counts`. Private.

    A part of the answers (by a mask, a slice) has the ε of all: the answers may have decided which part, and the other
    queries were put as well.

    `repr` shows neither votes nor anything computed from them.
    """

    labels: np.ndarray
    answered: np.ndarray
    by_teachers: np.ndarray
    cost: np.ndarray
    mechanism: Aggregator
    counts: np.ndarray = dataclasses.field(repr=False)
    scores: np.ndarray | None = dataclasses.field(repr=False, default=None)
    _whole: Answers | None = dataclasses.field(repr=False, default=None)  # that these are a part of

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return (
            f"Answers({int(self.answered.sum())} of {len(self)} answered by {self.mechanism}, "
            f"rho={float(self._all.cost.sum()):.6g})"
        )

    @property
    def _all(self) -> Answers:
        """Returns the answers to all queries that were put together with these."""
        return self if self._whole is None else self._whole

    def __getitem__(self, queries: Arrays) -> Answers:
        """The answers to some of the queries: a slice, a mask or indices. Their ε is that of all."""
        return self._changed(lambda name, value: value[queries], self._all)

    def first(self, number: int) -> Answers:
        """Returns the first answers at the price of these alone: only where nothing of the others is ever released. (Of
        what is a part itself, the first have the price of the whole.)"""
        return self._changed(lambda name, value: value[:number], self._whole)

    def __add__(self, other: Answers) -> Answers:
        """Both, one after the other."""
        if self.mechanism != other.mechanism:
            raise ValueError(f"answers must come from one mechanism, got {self.mechanism} and {other.mechanism}.")
        whole = None
        if self._whole is not None or other._whole is not None:
            whole = self._all if self._all is other._all else self._all + other._all
        return self._changed(lambda name, value: np.concatenate([value, getattr(other, name)]), whole)

    def _changed(self, change: Callable[[str, np.ndarray], np.ndarray], whole: Answers | None) -> Answers:
        """The same with other arrays, given the name and the value of each, as a part of ``whole``."""
        arrays = {name: change(name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return Answers(**{**vars(self), **arrays, "_whole": whole})

    @property
    def queries(self) -> Queries:
        """Returns what the mechanism was asked. Private."""
        asked = self._all
        return Queries(asked.mechanism, asked.counts, asked.scores, asked.by_teachers)

    @property
    def dp_event(self) -> DpEvent:
        """Returns the dp-accounting event of what ran."""
        return self.queries.event

    def promises(self, delta: float, private: bool = False) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        asked = self._all
        text = (
            f"{self.mechanism}: {len(asked)} queries, {int(asked.answered.sum())} answered, "
            f"{int(asked.by_teachers.sum())} by the teachers"
        )
        # The event has the replacement in it.
        how = {"event": self.dp_event, "event_adjacency": "add_or_remove_one", "mechanisms": [text]}
        how["warnings"] = self.mechanism.warnings
        return [votes_promise(private, **how)]

    def epsilon(self, delta: float, data_dependent: bool = False) -> Epsilon:
        """ε at `delta`; see `Aggregator.epsilon`."""
        return self.queries.epsilon(delta, data_dependent)

    def rdp(self, orders: Arrays) -> np.ndarray:
        """The data-dependent RDP `[queries, orders]`: private, like the votes."""
        return self.queries.rdp(pricing.check_orders(orders))


@dataclass(frozen=True)
class Aggregator(abc.ABC):
    """Holds what the mechanisms have in common. Do not use it by itself.

    `seed=None` draws noise by a key of the operating system's entropy, another one for every call. Copies of an
    aggregator, in other processes too, do not repeat each other. With a seed they do, and whoever knows it can subtract
    the noise: it is for tests.

    Args:
        seed: For tests only; keyword only.
    """

    seed: int | None = dataclasses.field(default=None, repr=False, compare=False, kw_only=True)
    _seeded: Source | None = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seeded", None if self.seed is None else self._new_source())

    def _new_source(self) -> Source:
        from tfdpfl.noise import Source  # which imports TensorFlow: analysis does without

        return Source(self.seed)

    @property
    def _source(self) -> Source:
        return self._seeded or self._new_source()

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Returns what runs on a query, in its order; the last one only where the query is answered."""

    def _answer(self, counts: np.ndarray) -> Answers:
        """Draws the noise of a mechanism that answers every query."""
        (vote,) = self.parts
        everyone = np.ones(len(counts), bool)
        labels = np.argmax(_noisy(counts, vote, self._source), axis=1)
        return Answers(labels, everyone, everyone, np.full(len(counts), vote.rho), self, counts)

    def aggregate(self, votes: Arrays, num_classes: int | None = None, *, num_teachers: int | None = None) -> Answers:
        """Answers every query once. Asking again costs again.

        Args:
            votes: Counts `[queries, classes]`; or predictions `[teachers, queries]` with `num_classes`.
            num_classes: See `tfdpfl.pate.as_counts`.
            num_teachers: Checked against the votes where it is given.

        Raises:
            ValueError: the votes are malformed; see `tfdpfl.pate.as_counts`.
        """
        return self._answer(as_counts(votes, num_classes, num_teachers))

    def stream(self, batches: Iterable[Arrays], num_classes: int | None = None, **options: Any) -> Iterator[Answers]:
        """Answers batches of votes one by one, for more queries than fit in memory. Arguments as `aggregate`."""
        for votes in batches:
            yield self.aggregate(votes, num_classes, **options)

    @property
    def warnings(self) -> list[str]:
        """Returns what must be read before the figures."""
        return of_seed(self.seed is not None)

    def promises(self, delta: float) -> list[Promise]:
        """Refuses, because an aggregator has spent nothing: its `Answers` are a part of a report."""
        raise ValueError(f"{self!r:.99} has no ε: fit it, or give its answers")

    def dp_event(self, num_queries: int, num_answered: int | None = None) -> DpEvent:
        """Returns what `num_queries` queries run, as a dp-accounting event under replacement of one example.

        Args:
            num_queries: Queries put.
            num_answered: How many the teachers' vote answered; None: all, the worst that can happen. (GNMax and LNMax
                answer all.)

        Raises:
            ValueError: not 0 <= num_answered <= num_queries.
        """
        import dp_accounting

        queries = _checks.whole("num_queries", num_queries, 0, "give the number of queries put")
        answered = queries
        if num_answered is not None:
            answered = _checks.whole("num_answered", num_answered, 0, "give the number of queries answered")
        if answered > queries or (answered < queries and len(self.parts) == 1):
            raise ValueError(
                f"num_answered must be {'at most' if len(self.parts) > 1 else ''} num_queries={queries} for "
                f"{type(self).__name__}, got {num_answered!r}: leave it out for all."
            )
        counts = [queries, answered][-len(self.parts) :]
        pairs = [(part.event, count) for part, count in zip(self.parts, counts, strict=True) if count]
        events = []
        for event, count in pairs:
            if isinstance(event, dp_accounting.SelfComposedDpEvent):
                event, count = event.event, event.count * count
            events.append(dp_accounting.SelfComposedDpEvent(event, count))
        return composed(events)

    def epsilon(
        self,
        votes: Arrays,
        delta: float,
        data_dependent: bool = True,
        *,
        num_classes: int | None = None,
        num_teachers: int | None = None,
        answered: Arrays = None,
        student: Arrays = None,
    ) -> Epsilon:
        """Returns ε at `delta` of answering these queries, with its label.

        Data-dependent: the sum of each query's RDP given its votes (2018, Theorem 6; 2017, Theorem 3), at the best real
        order, by the tight conversion. It is itself private: see `smooth_sensitivity_release`. Else: the price of
        `dp_event`, which holds whatever the votes.

        Args:
            votes: As in `aggregate`.
            delta: δ, strictly between 0 and 1, well below 1 / the number of private examples.
            data_dependent: See above.
            num_classes: As in `aggregate`.
            num_teachers: As in `aggregate`.
            answered: bool `[queries]`, which ones the teachers' vote answered, for the forms with a threshold; None:
                all, the worst that can happen.
            student: Interactive-GNMax's, as in its `aggregate`.

        Raises:
            ValueError: `delta` is not between 0 and 1, or the votes or the mask are malformed.
        """
        queries = read_queries(self, votes, num_classes, num_teachers, answered, student)
        return queries.epsilon(delta, data_dependent)

    def _scores(self, counts: np.ndarray, student: Arrays) -> np.ndarray | None:
        """What the threshold looks at, where that is not the counts."""
        if student is not None:
            raise ValueError(f"student is for InteractiveGNMax; leave it out for {type(self).__name__}.")
        return None

    def _mask(self, answered: Arrays, queries: int) -> np.ndarray:
        if answered is None:
            return np.ones(queries, bool)
        mask = np.asarray(answered)
        if mask.shape != (queries,) or mask.dtype != bool:
            raise ValueError(
                f"answered must be a mask of bools, one for each of the {queries} queries; got {mask.dtype} of "
                f"shape {mask.shape}."
            )
        if len(self.parts) == 1 and not mask.all():
            raise ValueError(f"answered must be all True: {type(self).__name__} answers every query.")
        return mask


def read_queries(
    mechanism: Aggregator,
    votes: Arrays,
    num_classes: int | None = None,
    num_teachers: int | None = None,
    answered: Arrays = None,
    student: Arrays = None,
) -> Queries:
    """Returns what a mechanism is asked. Arguments and errors as `Aggregator.epsilon`."""
    counts = as_counts(votes, num_classes, num_teachers)
    scores = mechanism._scores(counts, student)
    return Queries(mechanism, counts, scores, mechanism._mask(answered, len(counts)))


def _laplace(source: Source, shape: tuple[int, ...]) -> np.ndarray:
    """Laplace noise of scale 1, float64, which ends nowhere although the generator's normals do.

    Half of the squares of two normals is exponential, whichever way they point: with a sign it is Laplace. An
    exponential number has no memory, so one that passes an end continues with a fresh one.
    """
    a, b = source.normals((2, *shape)).astype(np.float64)
    size, end = (a * a + b * b) / 2, _FRESH_FROM
    while np.any(far := size > end):
        c, d = source.normals((2, int(far.sum()))).astype(np.float64)
        size[far] = end + (c * c + d * d) / 2
        end += _FRESH_FROM
    return np.copysign(size, a)


@dataclass(frozen=True)
class LNMax(Aggregator):
    """argmax(counts + Laplace(1/γ)), 2γ-DP a query (2017, section 2.1).

    Args:
        gamma: γ, above 0; the scale of the noise is 1/γ votes.
        seed: For tests only; keyword only.

    Raises:
        ValueError: γ is not above 0, or so large (above 350) that no noise would come.
    """

    gamma: float

    def __post_init__(self) -> None:
        _checks.real("gamma", self.gamma, "the scale of the noise is 1/gamma votes, for instance 0.05", above=0)
        if 2 * self.gamma > LARGEST_PURE_EPSILON:
            raise ValueError(
                f"gamma={self.gamma:g} is larger than {LARGEST_PURE_EPSILON / 2:g}. A query costs epsilon = 2 gamma, "
                "and noise that changes the answer is then too rare for a float, so every answer would be the true "
                "plurality. Use a smaller gamma, for example 0.05."
            )
        super().__post_init__()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (LaplaceArgmax(self.gamma),)


@dataclass(frozen=True)
class GNMax(Aggregator):
    """argmax(counts + N(0, σ²)) (2018, section 4.1).

    Args:
        sigma: σ, in votes, above 0.
        seed: For tests only; keyword only.

    Raises:
        ValueError: σ is not above 0.
    """

    sigma: float

    def __post_init__(self) -> None:
        _check_sigma("sigma", self.sigma)
        super().__post_init__()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (GaussianArgmax(self.sigma),)


@dataclass(frozen=True)
class ConfidentGNMax(Aggregator):
    """Answers by GNMax(σ) where the largest count passes a noisy threshold (2018, Algorithm 1).

    The threshold costs λ/(2σ₁²) on every query, GNMax only where it answers.

    Args:
        threshold: T, in votes.
        sigma_threshold: σ₁ of the threshold's noise, in votes, above 0.
        sigma: σ₂ of GNMax, in votes, above 0.
        seed: For tests only; keyword only.

    Raises:
        ValueError: T is not finite or a σ is not above 0.
    """

    threshold: float
    sigma_threshold: float
    sigma: float

    def __post_init__(self) -> None:
        _checks.real("threshold", self.threshold, "give the votes a plurality needs", at_least=-1e300)
        _check_sigma("sigma_threshold", self.sigma_threshold)
        _check_sigma("sigma", self.sigma)
        super().__post_init__()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Threshold(self.threshold, self.sigma_threshold), GaussianArgmax(self.sigma))

    def _answer(self, counts: np.ndarray, scores: np.ndarray | None = None) -> Answers:
        seen = counts if scores is None else scores
        source, (check, vote) = self._source, self.parts
        passed = _noisy(seen.max(axis=1), check, source) >= self.threshold
        labels = np.full(len(counts), NO_LABEL)
        labels[passed] = np.argmax(_noisy(counts[passed], vote, source), axis=1)
        return Answers(labels, passed, passed, check.rho + passed * vote.rho, self, counts, scores)


@dataclass(frozen=True)
class InteractiveGNMax(ConfidentGNMax):
    """Asks the teachers only where they contradict the student (2018, Algorithm 2).

    The threshold looks at max(counts - M·p), M the number of teachers and p the student's probabilities. If it
    passes, GNMax answers; if it does not and the student is sure, the student's own label stands; else none. The
    student must have been trained on nothing but earlier answers.

    Args:
        threshold: T, in votes.
        sigma_threshold: σ₁ of the threshold's noise, in votes, above 0.
        sigma: σ₂ of GNMax, in votes, above 0.
        confidence: The least probability at which the student's own label stands, in (0, 1].
        seed: For tests only; keyword only.

    Raises:
        ValueError: an argument is out of its range.
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        value = _checks.real("confidence", self.confidence, "the student's probability, for instance 0.9", above=0)
        if value > 1:
            raise ValueError(f"confidence must be at most 1, got {value:g}: it is a probability, for instance 0.9.")
        super().__post_init__()

    def aggregate(
        self,
        votes: Arrays,
        num_classes: int | None = None,
        *,
        student: Arrays = None,
        num_teachers: int | None = None,
    ) -> Answers:
        """Answers every query once.

        Args:
            votes: As all but `student`, see `Aggregator.aggregate`.
            student: The student's probabilities, `[queries, classes]`; their rows sum to 1.

        Raises:
            ValueError: the votes or the probabilities are malformed.
        """
        counts = as_counts(votes, num_classes, num_teachers)
        scores, probabilities = student_scores(counts, student)
        answers = self._answer(counts, scores)
        keeps = ~answers.answered & (probabilities.max(axis=1) >= self.confidence)
        labels = np.where(keeps, probabilities.argmax(axis=1), answers.labels)
        return dataclasses.replace(answers, labels=labels, answered=answers.answered | keeps)

    def _scores(self, counts: np.ndarray, student: Arrays) -> np.ndarray:
        return student_scores(counts, student)[0]


def student_scores(counts: np.ndarray, student: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Interactive-GNMax's `counts - M·p`, and p, checked."""
    if student is None:
        raise ValueError("student must be the student's probabilities [queries, classes]; got None.")
    probabilities = np.asarray(student, float)
    if probabilities.shape != counts.shape:
        raise ValueError(f"student must have the shape of the counts, {counts.shape}, got {probabilities.shape}.")
    in_range = np.isfinite(probabilities).all() and probabilities.min() >= 0
    if not in_range or np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3:
        raise ValueError("student must hold probabilities whose rows sum to 1: apply a softmax to logits.")
    return counts - counts[0].sum() * probabilities, probabilities


def _check_sigma(name: str, value: object) -> None:
    _checks.real(name, value, "the noise's standard deviation in votes, for instance 40", above=0)


def _noisy(values: np.ndarray, part: Part, source: Source) -> np.ndarray:
    noise, charge = part.noise(source, values.shape), part.moved / part.scale
    return _replay_hook.released(
        [values], [values + noise], [noise], [part.scale], charge, replaced=charge, norm=part.norm, by_row=True
    )[0]
