"""Hyperparameters by random search, priced as one mechanism: many private runs, of which the best alone is kept.

The number of runs must be random. Of a fixed number the best costs up to as many times the ε of one. With a random one
that is drawn apart from the data, the price hardly grows with it (Liu & Talwar 2019, arXiv:1811.07971; Papernot &
Steinke 2022, arXiv:2110.03620).
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, Keywords, Promiser
from tfdpfl.accounting import PrivacyLedger, PrivacyReport, Run, _checks
from tfdpfl.accounting.pricing import is_known_to_renyi_dp, leaves_of
from tfdpfl.accounting.promises import Promise
from tfdpfl.errors import PrivacyError
from tfdpfl.planning import PrivacyPlan

if TYPE_CHECKING:
    from scipy.stats.distributions import rv_frozen

__all__ = ["HyperParameters", "RandomSearch", "Selected"]


_KNOWN_NUMBER = (
    "The number of runs comes from seed={}: for anyone who knows it the number is fixed, and the best of a fixed "
    "number of runs may cost as many times what one costs. To publish the result, search with seed=None."
)


@dataclasses.dataclass(frozen=True)
class Selected:
    """The best run of a search: all of it that may be kept.

    Attributes:
        parameters: its hyperparameters.
        score: what it was chosen by.
        result: what else it returned: a model, weights.
    """

    parameters: Keywords
    score: float
    result: Any


class HyperParameters:
    """The hyperparameters of one run, each drawn when first asked for: what a ``build(hp)`` for keras-tuner takes.

    Its methods are named as those of keras-tuner's class; ``default`` and ``ordered`` have no part in a random search.
    It has no scopes: ask for a hyperparameter that depends on another inside of an ``if``.

    Attributes:
        values: {name: value} of what was drawn.

    Args:
        seed: None draws from the operating system's entropy.
    """

    def __init__(self, seed: int | None = None):
        import numpy as np

        self.values: Keywords = {}
        self._random = None if seed is None else np.random.default_rng(seed)

    def Float(
        self, name: str, min_value: float, max_value: float, step: float | None = None, sampling: str = "linear",
        default: object = None,
    ) -> float:  # fmt: skip
        """A number from ``min_value`` to ``max_value``; with ``step`` one of those that are so far apart, by sums or,
        where ``sampling`` is ``"log"`` or ``"reverse_log"``, by factors.

        Raises:
            ValueError: a range or a step that gives no numbers.
        """
        at = _scale(name, float(min_value), float(max_value), step, sampling)
        return self._ask(name, at)

    def Int(
        self, name: str, min_value: int, max_value: int, step: int | None = None, sampling: str = "linear",
        default: object = None,
    ) -> int:  # fmt: skip
        """As `Float`, a whole number; both ends are among them."""
        at = _scale(name, min_value, max_value + (step is None), step, sampling)
        return self._ask(name, lambda uniform: min(int(at(uniform) + 1e-9), max_value))

    def Choice(self, name: str, values: Sequence, ordered: bool | None = None, default: object = None) -> Any:
        """One of ``values``, each as likely.

        Raises:
            ValueError: there are none.
        """
        if not len(values):
            raise ValueError(f"values={values!r} of {name!r} must list the values to choose from.")
        return self._ask(name, lambda uniform: values[int(uniform * len(values))])

    def Boolean(self, name: str, default: object = False) -> bool:
        """True or False."""
        return self.Choice(name, [False, True])

    def Fixed(self, name: str, value: object) -> Any:
        """``value``."""
        return self.Choice(name, [value])

    def _ask(self, name: str, at: Callable[[float], Any]) -> Any:
        if name not in self.values:
            self.values[name] = at(_uniform() if self._random is None else float(self._random.random()))
        return self.values[name]


def _scale(name: str, low: float, high: float, step: float | None, sampling: str) -> Callable[[float], float]:
    """What gives the number at a share of a range, from 0 to below 1."""
    factors = sampling != "linear"
    if sampling not in ("linear", "log", "reverse_log") or not low <= high or (factors and low <= 0):
        raise ValueError(
            f"sampling={sampling!r} of {name!r} from {low!r} to {high!r}: it must be 'linear', or 'log' or "
            "'reverse_log' of numbers above 0, the smaller one first."
        )
    if step is not None and step <= factors:
        raise ValueError(f"step={step!r} of {name!r} must be above {int(factors)} for {sampling!r}, or None.")

    def at(uniform: float) -> float:
        reverse = sampling == "reverse_log"
        if step is None:
            uniform = 1 - uniform if reverse else uniform
            value = low * (high / low) ** uniform if factors else low + uniform * (high - low)
        else:
            number = 1 + int((math.log(high / low) / math.log(step) if factors else (high - low) / step) + 1e-9)
            place = int(uniform * number)
            value = low * step**place if factors else low + place * step
        return high + low - value if reverse else value

    return at


class RandomSearch:
    """Random search with a random number of runs.

        space = {"learning_rate": [1e-3, 1e-2], "momentum": scipy.stats.uniform(0, 1)}
        search = tfdpfl.tuning.RandomSearch(space, spends=plan, mean_runs=8)
        print(search.report(delta=1e-5).epsilon)  # of the whole search
        best = search.run(train)  # train(parameters) -> (score, result, what it spent)

    Guarantees: hyperparameters are drawn independently for each run, the number of runs from a truncated negative
    binomial distribution, apart from the data. The best run alone is returned. Then all of the search costs
    `RepeatAndSelectDpEvent` (arXiv:2110.03620, Theorem 2), in Rényi DP.

    It takes for granted that nothing else of the runs gets out, not their number, nor the scores of the others (no
    logs). And the score is of the run's private result alone. It is measured on public data, or by another private
    mechanism that is in what a run spends. Of a validation set that is private and read in plain, its examples are not
    protected.

    Args:
        space: {name: values}, each a list, or a distribution with `rvs` (scipy's): as scikit-learn's
            `RandomizedSearchCV` takes them. Or None: `train` is then given a `HyperParameters`, which a ``build(hp)``
            for keras-tuner takes.
        spends: what a run spends at most: a `tfdpfl.PrivacyPlan`, a `tfdpfl.accounting.Run`, or a ledger.
        mean_runs: the mean number of runs, at least 1.
        shape: η of the distribution: 1 is geometric, 0 logarithmic (a heavier tail, at a smaller price).
        num_runs: refused, with the reason: a fixed number of runs has no such price.
        seed: None draws from the operating system's entropy, as privacy needs; a seed is for tests.

    Raises:
        ValueError: an argument is out of its range.
        PrivacyError: the number of runs is fixed, or what a run spends is not private.
    """

    def __init__(
        self,
        space: Mapping[str, Sequence | rv_frozen] | None,
        *,
        spends: Promiser,
        mean_runs: float | None = None,
        shape: float = 1.0,
        num_runs: int | None = None,
        seed: int | None = None,
    ):
        if num_runs is not None or mean_runs is None:
            raise PrivacyError(
                f"num_runs={num_runs!r}: the best of a fixed number of runs may cost as many times what one costs, "
                "because it shows that all others were worse. Give mean_runs: the number is then drawn at random."
            )
        self.mean_runs = _checks.real("mean_runs", mean_runs, "give the mean number of runs", at_least=1)
        remedy = "1 is geometric, 0 logarithmic"
        self.shape = _checks.real("shape", shape, remedy, at_least=0)
        if space is not None and (not isinstance(space, dict) or not space):
            raise ValueError(
                f"space={space!r:.99} must be a dict of names and what to draw from, as scikit-learn's, or None."
            )
        self.space = space
        self._spends, self.adjacency = _spent(spends)
        self._check_known(spends)
        self._times = 0
        self._seed = seed

    def run(self, train: Callable[[Any], tuple[float, Any, Promiser]], *, maximize: bool = True) -> Selected:
        """Trains a hidden number of times, and returns the best run. To run it again costs again.

        Args:
            train: takes hyperparameters (see ``space``), and returns (score, result, what it spent): the last is a
                `PrivacyBudget`, a ledger or an event. A run may spend less than was said, by fewer steps, and nothing
                else.
            maximize: whether the best score is the highest. NaN is the worst.

        Raises:
            PrivacyError: a run spent what was not said.
        """
        self._times += 1  # whatever comes of it
        best: Selected | None = None
        highest, spent_on_best = -math.inf, None
        for parameters in self._draws():
            asked = isinstance(parameters, HyperParameters)
            score, result, spent = train(parameters if asked else dict(parameters))
            parameters = dict(parameters.values) if asked else parameters
            self._check(*_spent(spent))
            score = float(score)
            value = -math.inf if math.isnan(score) else score if maximize else -score
            if best is None or value > highest:
                best, highest, spent_on_best = Selected(parameters, score, result), value, spent
        assert best is not None
        self._note(best.result, spent_on_best)
        return best

    def add_to(self, ledger: PrivacyLedger) -> PrivacyLedger:
        """Adds the searches that ran to a ledger."""
        return ledger.add(self.event, self._times, adjacency=self.adjacency, name=type(self).__name__)

    def _note(self, result: Any, spent: Promiser) -> None:
        """Has every ε that is computed for the best run's model from here on include the search: that it was the best
        tells of the data, too. (Its own steps then count twice.)"""
        import tensorflow as tf

        from tfdpfl.callbacks import PrivacyBudget
        from tfdpfl.callbacks._fits import RELEASED

        if isinstance(spent, PrivacyBudget):
            spent.include(self)
        for model in tf.nest.flatten(result):
            if isinstance(model, tf.keras.Model) and self not in RELEASED.setdefault(model, []):
                RELEASED[model].append(self)

    def number_of_runs(self) -> int:
        """Draws the number of runs, for a tuner that draws hyperparameters at random and each by itself, such as
        keras-tuner's: `RandomSearch(build, max_trials=search.number_of_runs(), ...)`. Keep it hidden, and of that tuner
        its best model alone; one draw is one search, and counts."""
        self._times += 1
        return self._number(self._uniform(self._seed))

    @property
    def event(self) -> DpEvent:
        """A whole search, as a dp-accounting event."""
        return dp_event.RepeatAndSelectDpEvent(self._spends, self.mean_runs, self.shape)

    @property
    def ledger(self) -> PrivacyLedger:
        """The searches that ran; before, the one that is planned."""
        return PrivacyLedger().add(self.event, max(self._times, 1), adjacency=self.adjacency)

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        return [self.report(delta).promise("search", self.ledger)]

    def report(self, delta: float) -> PrivacyReport:
        """The price of `ledger`."""
        note = (
            f"The best of a random number of runs, {self.mean_runs:g} in the mean, is kept. ε does not cover their "
            "number, the other runs, or the examples that scores were measured on."
        )
        known = [] if self._seed is None else [_KNOWN_NUMBER.format(self._seed)]
        return self.ledger.report(delta, "rdp", [note, *known])

    def _check_known(self, spends: Promiser) -> None:
        if not is_known_to_renyi_dp(self.event, self.adjacency):
            raise PrivacyError(
                f"spends={spends!r:.99} has no ε in a search: the best of several runs is priced in Rényi DP, and "
                "random allocation, truncated batches and max_examples_per_user of Poisson batches are known to the "
                "PLD accountant alone. Search with Poisson batches (sampling='poisson') or shuffled ones, without "
                "truncated_batch_size and max_examples_per_user."
            )

    def _check(self, spent: DpEvent, adjacency: str) -> None:
        said, has = (_counts(event) for event in (self._spends, spent))
        more = next((leaf for leaf, n in has.items() if n > said[leaf]), None)
        if more is not None or adjacency != self.adjacency:
            raise PrivacyError(
                f"A run spent {has[more] if more is not None else 0} x {more} ({adjacency}), and spends= allows "
                f"{said[more]} ({self.adjacency}). All runs must cost the same: tune only settings that do not change "
                "ε (learning rates, clips, layers), or give spends= the most expensive run."
            )

    def _draws(self) -> list[Any]:
        from sklearn.model_selection import ParameterSampler

        number = self._number(self._uniform(self._seed))
        seeds = [secrets.randbelow(2**32) if self._seed is None else (self._seed + i) % 2**32 for i in range(number)]
        if self.space is None:
            return [HyperParameters(None if self._seed is None else seed) for seed in seeds]
        # One at a time: several at once would be drawn from lists without repetition.
        return [next(iter(ParameterSampler(self.space, 1, random_state=seed))) for seed in seeds]

    @staticmethod
    def _uniform(seed: int | None) -> float:
        import numpy as np

        return _uniform() if seed is None else float(np.random.default_rng(seed).random())

    def _number(self, uniform: float) -> int:
        """The distribution's quantile (arXiv:2110.03620, Definition 1)."""
        gamma, eta = self._gamma(), self.shape
        if gamma == 1:
            return 1
        # P(1), and from one to the next P(k + 1) = P(k) (1 - gamma) (k + eta) / (k + 1).
        scale = -math.log(gamma) if eta == 0 else math.expm1(-eta * math.log(gamma)) / eta
        first = (1 - gamma) / scale
        number, chance, below = 1, first, first
        while below <= uniform and chance > 1e-300:
            chance *= (1 - gamma) * (number + eta) / (number + 1)
            number, below = number + 1, below + chance
        return number

    def _gamma(self) -> float:
        from scipy.optimize import brentq

        def mean(log_gamma: float) -> float:
            g = math.exp(log_gamma)
            if self.shape == 0:
                return (1 / g - 1) / -log_gamma
            return self.shape * (1 - g) / (g * -math.expm1(self.shape * log_gamma))

        if self.mean_runs <= 1 + 1e-9:
            return 1.0
        return math.exp(brentq(lambda u: mean(u) - self.mean_runs, -60, -1e-9, xtol=1e-14))


def _uniform() -> float:
    return secrets.randbelow(2**53) / 2**53


def _spent(what: Promiser) -> tuple[DpEvent, str]:
    """What was, or is to be spent, as an event, and the neighbours that it is stated for."""
    if isinstance(what, dp_event.DpEvent):
        return what, "add_or_remove_one"
    if isinstance(what, Run):
        return what.dp_event, str(what.adjacency)
    if isinstance(what, PrivacyPlan):
        report = what.report()
        return report.event, report.adjacency
    ledger = what if isinstance(what, PrivacyLedger) else getattr(what, "ledger", None)
    if not isinstance(ledger, PrivacyLedger):
        raise ValueError(
            "The cost of a run must be a plan, a Run, a PrivacyBudget, a ledger or a dp-accounting event, got "
            f"{what!r:.99}"
        )
    return ledger.dp_event, ledger.adjacency


def _counts(event: DpEvent) -> Counter[DpEvent]:
    counts: Counter[DpEvent] = Counter()
    for leaf, n in leaves_of(event):
        counts[leaf] += n
    return counts
