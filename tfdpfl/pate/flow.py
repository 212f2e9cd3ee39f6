"""PATE from end to end: teachers vote on a student's examples, a mechanism answers, the student learns."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from tfdpfl._types import Arrays, Axes, Json, Model
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import delta_warning
from tfdpfl.accounting.promises import Promise
from tfdpfl.errors import PrivacyError
from tfdpfl.pate import _examples, pricing
from tfdpfl.pate.aggregators import Aggregator, Answers, InteractiveGNMax
from tfdpfl.pate.analysis import rdp_data_independent
from tfdpfl.pate.epsilon import WARNING, Epsilon
from tfdpfl.pate.sensitivity import SanitizedEpsilon, smooth_sensitivity_release
from tfdpfl.pate.teachers import compiled, inputs_of, labels_for
from tfdpfl.pate.votes import as_counts
from tfdpfl.plots import panels

__all__ = ["PATE", "PATEReport"]

_INTERACTIVE_BATCHES = 5


@dataclass(frozen=True)
class PATEReport:
    """Holds the result of `PATE`. `str` gives it in English; every figure that is private says so.

    Attributes:
        mechanism: The aggregator.
        num_teachers: T.
        queries: How many were put.
        answered: How many got a label.
        answered_by_teachers: How many of these from the teachers' vote.
        epsilon: Data-independent; may be published. With a threshold it is for the number that was answered, which is
            itself an outcome: what is promised beforehand is the budget.
        epsilon_data_dependent: Given the votes; not to be published.
        sanitized: The data-dependent ε with noise to its smooth sensitivity; may be published.
        budget: What ε was not to pass; None if nothing.
        budget_data_dependent: The budget was of the data-dependent ε, so that the number of queries tells about votes.
        vote_accuracy: How often the plurality of the votes is right, where the truth is known. Not to be published.
        label_accuracy: How often the labels are right, where the truth is known.
        student_accuracy: On the test data, where there are some.
        warnings: What must be read before the figures.
    """

    mechanism: str
    num_teachers: int
    queries: int
    answered: int
    answered_by_teachers: int
    epsilon: Epsilon
    epsilon_data_dependent: Epsilon
    sanitized: SanitizedEpsilon
    budget: float | None
    budget_data_dependent: bool
    vote_accuracy: float | None
    label_accuracy: float | None
    student_accuracy: float | None
    warnings: tuple[str, ...] = ()

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        text = (
            f"{self.mechanism}: {self.queries} queries to {self.num_teachers} teachers, {self.answered} answered, "
            f"{self.answered_by_teachers} by the teachers"
        )
        note = "If you publish the sanitised figure, the total costs more than this."
        more = {"mechanisms": [text], "notes": [note], "warnings": self.warnings}
        return self.epsilon.promises(delta, self.budget_data_dependent, **more)

    def __str__(self) -> str:
        lines = [
            f"PATE with {self.num_teachers} teachers, {self.mechanism}",
            f"  {self.queries} queries, {self.answered} answered ({self.answered / max(self.queries, 1):.1%}), "
            f"{self.answered_by_teachers} by the teachers",
            f"  data-independent: epsilon = {self.epsilon:.4g} at delta = {self.epsilon.delta:g} for the answers, "
            "the sanitised figure not released",
            f"  data-dependent: epsilon = {self.epsilon_data_dependent:.4g}",
            f"  {self.sanitized}",
        ]
        if self.budget is not None:
            which = f" (data-dependent; the number of queries is then {WARNING})" if self.budget_data_dependent else ""
            lines.append(f"  budget: {self.budget:g}{which}")
        if self.vote_accuracy is not None:
            lines.append(f"  plurality of the votes right: {self.vote_accuracy:.2%} ({WARNING})")
        if self.label_accuracy is not None:
            lines.append(f"  labels right: {self.label_accuracy:.2%}")
        if self.student_accuracy is not None:
            lines.append(f"  student right: {self.student_accuracy:.2%}")
        lines += [f"  {warning}" for warning in self.warnings]
        return "\n".join([*lines, "  neighbours: data sets of the same size that differ in one teacher's example"])

    def plot(self, path: str | os.PathLike | None = None, *, alone: float | None = None) -> Axes:
        """Draws how often labels and student are right, and what they cost, and returns the figure.

        Bars say which figures may be published and which are drawn from the votes: the picture as a whole is private.
        Under a data-dependent budget all are, since the votes decided how many queries were put.

        Args:
            path: Where to save it as well.
            alone: How often one teacher by itself is right, for comparison.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = panels(1)[0].figure
        figure.clear()
        above, below = figure.subplots(2)
        right = {
            "one teacher alone": (alone, True),
            "plurality of the votes": (self.vote_accuracy, True),
            "labels given to the student": (self.label_accuracy, False),
            "student": (self.student_accuracy, False),
        }
        all_private = self.budget_data_dependent
        known = {
            name: (100 * value, private or all_private) for name, (value, private) in right.items() if value is not None
        }
        costs = {
            "whatever the votes": (float(self.epsilon), all_private),
            "given the votes, with noise": (float(self.sanitized.epsilon), all_private),
            "given the votes": (float(self.epsilon_data_dependent), True),
        }
        least = min((value for value, _ in known.values()), default=0)
        least = 80 if least > 82 else 0
        _bars(above, known, "right, %", "{:.1f} %", least)
        above.set_xlim(least, 104)
        above.set_xticks([tick for tick in above.get_xticks() if tick <= 100])
        _bars(below, costs, f"ε at δ = {self.epsilon.delta:g}: smaller is more private", "{:.3g}", 0)
        below.margins(x=0.15)
        marks = dict(zip(*reversed(below.get_legend_handles_labels()), strict=True))
        names = {"False": "may be published", "True": "private"}
        shown = [name for name in names if name in marks]
        figure.legend([marks[n] for n in shown], [names[n] for n in shown], loc="outside lower center", ncols=2)
        taught = f"teach a student that is right on {self.student_accuracy:.1%}" if self.student_accuracy else "vote"
        figure.suptitle(f"{self.num_teachers} teachers who share no data {taught}", fontsize=11)
        return _saved(figure, path)

    def to_dict(self) -> Json:
        """The figures with their labels, ready for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        sanitized = {**vars(self.sanitized), "unpadded": self.sanitized.unpadded.to_dict()}
        return {
            **fields,
            "epsilon": self.epsilon.to_dict(),
            "epsilon_data_dependent": self.epsilon_data_dependent.to_dict(),
            "sanitized": {**sanitized, "epsilon": self.sanitized.epsilon.to_dict()},
            "vote_accuracy": None if self.vote_accuracy is None else {"value": self.vote_accuracy, "warning": WARNING},
        }


class PATE:
    """Teachers, a mechanism and a student in one.

        flow = PATE(teachers, GNMax(40), student_fn, delta=1e-5, budget=2.0)
        flow.fit(x_public, test_data=(x_test, y_test))
        print(flow.report())
        flow.student_.predict(...)

    The student sees the answers alone, so that it, and all that is computed from it, costs what they cost.

    Args:
        teachers: A fitted `TeacherEnsemble`; anything with `.votes(X)` that gives counts `[queries, classes]`; or such
            counts, one row for each of the student's examples.
        aggregator: LNMax, GNMax, ConfidentGNMax or InteractiveGNMax.
        student_fn: Makes a Keras model, compiled (else Adam and sparse cross-entropy are taken), with K outputs.
        delta: δ, strictly between 0 and 1. From 1 / the number of private examples on it means nothing, which a warning
            says where that number is known.
        budget: ε at which answering stops before it is passed; None: all queries are answered.
        budget_data_dependent: Whether that ε is the data-dependent one. It lets more queries through; their number
            then is private too.
        epochs: Of the student.
        batch_size: Of the student.
        verbose: 1 shows progress, 0 nothing.

    Attributes:
        student_: After `fit`: a plain Keras model.
        answers_: After `fit`: the `Answers`.
        queries_: After `fit`: which of the student's examples were put, in their order.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        teachers: object,
        aggregator: Aggregator,
        student_fn: Callable[[], Model],
        delta: float,
        *,
        budget: float | None = None,
        budget_data_dependent: bool = False,
        epochs: int = 20,
        batch_size: int = 32,
        verbose: int = 1,
    ) -> None:
        if not isinstance(aggregator, Aggregator):
            raise ValueError(f"aggregator must be one of tfdpfl.pate's, for instance GNMax(40), got {aggregator!r}.")
        if not callable(student_fn):
            raise ValueError(f"student_fn must be a function that makes a Keras model, got {student_fn!r}.")
        self.teachers, self.aggregator, self.student_fn = teachers, aggregator, student_fn
        self.delta = pricing.check_delta(delta)
        self.budget = None if budget is None else _checks.real("budget", budget, "the ε to stay within", above=0)
        self.budget_data_dependent = budget_data_dependent
        self.epochs = _checks.whole("epochs", epochs, 1, "the student needs a pass over the answers")
        self.batch_size = _checks.whole("batch_size", batch_size, 1, "for instance 32")
        self.verbose = verbose

    def fit(
        self,
        X: Arrays,
        y: Arrays = None,
        *,
        num_queries: int | None = None,
        queries: Arrays = None,
        semi_supervised: bool = False,
        confidence: float = 0.95,
        rounds: int = 3,
        test_data: tuple[Arrays, Arrays] | None = None,
        seed: int | None = None,
    ) -> PATE:
        """Asks, answers, and trains the student; returns the object.

        Args:
            X: The student's examples, unlabelled, `[n, ...]`.
            y: Their true labels, where they are known: used for the report's accuracies alone.
            num_queries: How many of them to put, at random; None: all, in a random order.
            queries: Which ones to put, in this order, in place of `num_queries`. The choice must not depend on the
                private data.
            semi_supervised: Then teach the student its own labels of the unanswered examples that it is sure of, over
                some rounds. It costs no privacy.
            confidence: The probability at which it is sure.
            rounds: See `semi_supervised`; each takes about half as many steps as the answers did.
            test_data: `(X, y)` for the student's accuracy.
            seed: Of the choice of queries. The noise has the aggregator's.

        Raises:
            ValueError: an argument is out of its range, or no query was answered within the budget.
            PrivacyError: an earlier call has answered queries.
        """
        released = len(vars(self).get("answers_", ()))
        if released:
            raise PrivacyError(
                f"fit has released {released} answers already, and budget and report cover one fit: make another PATE, "
                "and add up what both cost (answers_.dp_event in a PrivacyLedger)."
            )
        X = self._inputs(X)
        self.queries_ = self._choose(_examples.size(X), num_queries, queries, seed)
        shards = getattr(self.teachers, "shards_", None)
        too_large = delta_warning(self.delta, None if shards is None else sum(map(len, shards)))
        if too_large:
            warnings.warn(too_large, stacklevel=2)
        self._sanitized: SanitizedEpsilon | None = None
        self._truth = self._student_accuracy = None
        counts = self._votes(X)
        self._num_classes = counts.shape[1]
        self.answers_ = self._answer(counts, X)
        self.queries_ = self.queries_[: len(self.answers_)]
        labelled = self.answers_.answered
        if not labelled.any():
            put = len(self.answers_)
            paid = f" Its {put} queries have cost ε: add answers_.dp_event to that of another PATE." if put else ""
            raise ValueError(
                f"no query was answered with {self.aggregator} and budget={self.budget}: raise the budget or lower the "
                f"threshold.{paid}"
            )
        rows, labels = self.queries_[labelled], self.answers_.labels[labelled]
        self.student_ = self._taught(_examples.rows(X, rows), labels)
        if semi_supervised:
            self._teach_itself(X, rows, labels, confidence, rounds)
        self._truth = None if y is None else np.asarray(y)[self.queries_]
        if test_data is not None:
            x_test, y_test = test_data
            self._student_accuracy = float(np.mean(self._classes(self._inputs(x_test)) == np.asarray(y_test)))
        return self

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        if not hasattr(self, "answers_"):
            raise ValueError(f"{self!r:.99} has no ε: fit it, or give its answers")
        return self.answers_.promises(delta, self.budget_data_dependent)

    def report(self) -> PATEReport:
        """Returns the figures. The sanitised ε is drawn once, however often this is called.

        Raises:
            ValueError: `fit` has not run.
        """
        self._check_fitted()
        answers, truth = self.answers_, self._truth
        if self._sanitized is None:
            self._sanitized = smooth_sensitivity_release(answers, delta=self.delta)
        right = None if truth is None else float(np.mean(answers.labels[answers.answered] == truth[answers.answered]))
        return PATEReport(
            mechanism=str(self.aggregator),
            num_teachers=int(answers.counts[0].sum()),
            queries=len(answers),
            answered=int(answers.answered.sum()),
            answered_by_teachers=int(answers.by_teachers.sum()),
            epsilon=answers.epsilon(self.delta),
            epsilon_data_dependent=answers.epsilon(self.delta, data_dependent=True),
            sanitized=self._sanitized,
            budget=self.budget,
            budget_data_dependent=self.budget_data_dependent,
            vote_accuracy=None if truth is None else float(np.mean(answers.counts.argmax(axis=1) == truth)),
            label_accuracy=right,
            student_accuracy=self._student_accuracy,
            warnings=tuple(self.aggregator.warnings),
        )

    def plot_margins(self, path: str | os.PathLike | None = None) -> Axes:
        """Draws by how many votes the plurality leads, and returns the figure. It is drawn from the votes: private.

        Args:
            path: Where to save it as well.

        Raises:
            ValueError: `fit` has not run.
            ImportError: matplotlib is not installed.
        """
        self._check_fitted()
        ordered = np.sort(self.answers_.counts, axis=1)
        margins, answered = ordered[:, -1] - ordered[:, -2], self.answers_.by_teachers
        (axes,) = panels(1)
        axes.set(xlabel="votes between the first and the second class", ylabel="queries")
        both = [margins[answered], margins[~answered]]
        axes.hist(both, bins=30, stacked=True, label=["answered", "not answered"])
        axes.legend()
        axes.set_title(f"Vote margins ({WARNING})")
        return _saved(axes.figure, path)

    def plot_costs(self, path: str | os.PathLike | None = None) -> Axes:
        """Draws each query's data-dependent cost beside its data-independent one; as `plot_margins`."""
        self._check_fitted()
        epsilon = self.answers_.epsilon(self.delta, data_dependent=True)
        order = epsilon.order or 8.0
        costs = np.sort(self.answers_.rdp([order])[:, 0])[::-1]
        (axes,) = panels(1)
        axes.set(xlabel="queries, the most expensive first", ylabel=f"RDP at order {order:.3g}")
        axes.plot(np.maximum(costs, 1e-12), label=f"given its votes ({WARNING})")
        most = rdp_data_independent(self.aggregator, [order])[0]
        axes.axhline(most, linestyle="--", color="gray", label="whatever its votes, if answered")
        axes.set_yscale("log")
        axes.legend()
        axes.set_title(f"Cost of each query, total epsilon {epsilon:.3g}")
        return _saved(axes.figure, path)

    # Queries and answers

    def _choose(self, examples: int, num_queries: int | None, queries: Arrays, seed: int | None) -> np.ndarray:
        if queries is not None:
            if num_queries is not None:
                raise ValueError("give num_queries or queries, not both.")
            chosen = np.asarray(queries)
            if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen):
                raise ValueError(f"queries must be indices of examples, got {queries!r}.")
            if chosen.min() < 0 or chosen.max() >= examples:
                raise ValueError(f"queries must be indices from 0 to {examples - 1}, got {chosen.max()}.")
            return chosen
        number = examples
        if num_queries is not None:
            number = _checks.whole("num_queries", num_queries, 1, "how many examples to have labelled")
        if number > examples:
            raise ValueError(f"num_queries must be at most the {examples} examples, got {num_queries}.")
        return np.random.default_rng(seed).permutation(examples)[:number]

    def _votes(self, X: Arrays) -> np.ndarray:
        if hasattr(self.teachers, "votes"):
            return as_counts(self.teachers.votes(_examples.rows(X, self.queries_)))
        counts = as_counts(self.teachers)
        if len(counts) != (examples := _examples.size(X)):
            raise ValueError(f"teachers must have votes on each of the {examples} examples, got {len(counts)} rows.")
        return counts[self.queries_]

    def _answer(self, counts: np.ndarray, X: Arrays) -> Answers:
        mechanism = self.aggregator
        if not isinstance(mechanism, InteractiveGNMax):
            answers = mechanism.aggregate(counts)
            # Beyond the budget noise was drawn, but nothing of it leaves this line.
            return answers.first(self._affordable(answers))
        known: Answers | None = None
        for rows in np.array_split(np.arange(len(counts)), min(_INTERACTIVE_BATCHES, len(counts))):
            if known is None or not known.answered.any():
                student = np.full((len(rows), counts.shape[1]), 1 / counts.shape[1])
            else:
                done = self.queries_[: len(known)][known.answered]
                self.student_ = self._taught(_examples.rows(X, done), known.labels[known.answered])
                student = self._probabilities(_examples.rows(X, self.queries_[rows]))
            answers = mechanism.aggregate(counts[rows], student=student)
            known = answers if known is None else known + answers
            affordable = self._affordable(known)
            if affordable < len(known):
                return known.first(affordable)
            self.answers_ = known  # what is released, should the student's training end with an error
        assert known is not None
        return known

    def _affordable(self, answers: Answers) -> int:
        """How many of the answers, from the first, are within the budget."""
        budget = self.budget
        if budget is None:
            return len(answers)
        if self.budget_data_dependent:
            orders = pricing.ORDERS
            spent = np.cumsum(answers.rdp(orders), axis=0)
            epsilon = lambda k: pricing.epsilon_of_rdp(orders, spent[k - 1], self.delta)[0]  # noqa: E731
        elif len(self.aggregator.parts) == 1:
            epsilon = lambda k: pricing.price_of(self.aggregator.dp_event(k), self.delta)  # noqa: E731
        else:
            return self._filtered(answers, budget)
        return bisect.bisect(range(1, len(answers) + 1), False, key=lambda k: bool(epsilon(k) > budget))

    def _filtered(self, answers: Answers, budget: float) -> int:
        """The same where what is answered is itself an outcome: a filter at an order that is fixed beforehand
        (Feldman & Zrnic 2021, arXiv:2008.11193, Theorem 4.3): before each query there is room for its vote.
        """
        # What is left of the budget after the conversion's own term (Canonne et al. 2020, Proposition 12). Costs are
        # about ρ·λ, so that the best order has the most room for each λ.
        orders = 1 + np.geomspace(0.05, 1e4, 400)
        room = budget - (np.log1p(-1 / orders) - np.log(self.delta * orders) / (orders - 1))
        best = int(np.argmax(room / orders))
        if room[best] <= 0:
            return 0
        check, vote = (
            float(pricing.rdp_of_event(part.event, orders[best : best + 1])[0]) for part in self.aggregator.parts
        )
        spent = np.cumsum(check + vote * answers.by_teachers)
        before = np.concatenate([[0.0], spent[:-1]])
        return int(np.sum(before + check + vote <= room[best]))

    # The student

    def _inputs(self, X: Arrays) -> Arrays:
        return _examples.as_inputs(X, inputs_of(self.student_fn()) if isinstance(X, list) else 1)

    def _taught(self, X: Arrays, labels: np.ndarray) -> Arrays:
        student = compiled(self.student_fn, "student_fn", _examples.zeros_like(_examples.rows(X, slice(0, 1))))
        self._learn(student, X, labels, self.epochs, 2 * bool(self.verbose > 1))
        return student

    def _learn(self, student: Arrays, X: Arrays, labels: np.ndarray, epochs: int, verbose: int = 0) -> None:
        y = labels_for(student.loss, labels, self._num_classes)
        student.fit(X, y, epochs=epochs, batch_size=self.batch_size, verbose=verbose)

    def _teach_itself(self, X: Arrays, rows: np.ndarray, labels: np.ndarray, confidence: float, rounds: int) -> None:
        confidence = _checks.probability("confidence", confidence, "the student's probability, for instance 0.95")
        rest = np.setdiff1d(np.arange(_examples.size(X)), rows)
        for _ in range(_checks.whole("rounds", rounds, 1, "for instance 3")):
            if not len(rest):
                return
            probabilities = self._probabilities(_examples.rows(X, rest))
            sure = probabilities.max(axis=1) >= confidence
            taught = np.concatenate([labels, probabilities[sure].argmax(axis=1)])
            # It goes on from where it is: half as many steps as the answers took.
            epochs = math.ceil(self.epochs / 2 * len(rows) / len(taught))
            self._learn(self.student_, _examples.rows(X, np.concatenate([rows, rest[sure]])), taught, epochs)

    def _probabilities(self, X: Arrays) -> np.ndarray:
        outputs = np.asarray(self.student_.predict(X, batch_size=1024, verbose=0), float)
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ValueError(f"student_fn must make a model with one output for each class, got {outputs.shape}.")
        if outputs.min() >= 0 and np.abs(outputs.sum(axis=1) - 1).max() < 1e-3:
            return outputs
        return special.softmax(outputs, axis=1)

    def _classes(self, X: Arrays) -> np.ndarray:
        outputs = np.asarray(self.student_.predict(X, batch_size=1024, verbose=0))
        return outputs.argmax(axis=1)

    def _check_fitted(self) -> None:
        if not hasattr(self, "answers_"):
            raise ValueError("nothing has been answered: call fit(X) first.")


def _bars(axes: Axes, values: dict[str, tuple[float, bool]], label: str, form: str, start: float) -> None:
    """Bars from above to below, grey where a figure is private."""
    for name, (value, private) in values.items():
        bar = axes.barh(name, value - start, left=start, color="0.7" if private else "tab:blue", label=private)
        axes.bar_label(bar, [form.format(value)], padding=3)
    axes.set_xlabel(label)
    axes.invert_yaxis()


def _saved(figure: Axes, path: str | os.PathLike | None) -> Arrays:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
