"""A Keras callback that prices the training while it runs, and ends it before the budget is passed."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import tensorflow as tf

from tfdpfl._frames import PLAN, callbacks_of, optimizer_of
from tfdpfl._types import Keywords, Model, Optimizer
from tfdpfl._waiting import explain_wait
from tfdpfl.accounting import PrivacyLedger, PrivacyReport, compute_num_steps
from tfdpfl.accounting._checks import choice, optional, real, whole
from tfdpfl.accounting.calibration import MOST_STEPS
from tfdpfl.accounting.ledger import check_ledger
from tfdpfl.accounting.pricing import check_accountant, check_delta
from tfdpfl.accounting.promises import Promise
from tfdpfl.accounting.run import options_of
from tfdpfl.accounting.sampling import FIXED_ORDER, SAMPLINGS
from tfdpfl.callbacks._fits import (
    LEFT,
    RELEASED,
    Fit,
    executions_of,
    fingerprints,
    fit_arguments,
    keeps_averages,
    length,
    private_optimizer,
    remember_weights,
    running_models,
    stepping,
    steps_on,
)
from tfdpfl.callbacks._sampling import Sampling
from tfdpfl.callbacks._uncovered import choices_by_public_figures, uncovered_choices, uncovered_statistics
from tfdpfl.clipping.models import saved_weights
from tfdpfl.data import declared_sampling
from tfdpfl.data.declared import notes_of
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import _past, _step_table
from tfdpfl.optimizers._loaded import recorded_for
from tfdpfl.optimizers._schedules import PiecewiseConstant

__all__ = ["PrivacyBudget"]

_GENERATOR = (
    "The noise was drawn by {}, in floating point: its last digits are not those of a normal distribution, which an "
    "attacker who sees every digit of the weights may use (Mironov 2012)."
)
_ROWS = (
    "One example is one row of the batches that fit was given. ε is larger for a person, or a record, with several "
    "rows (overlapping windows, augmented copies, several visits): max_examples_per_user=k gives that of k rows."
)
_STREAM = (
    "The data are a stream (steps_per_epoch or repeat), in which the end of a pass is not visible. This ε assumes that "
    "each num_examples rows of it hold an example at most once."
)
_DRAWS = (
    "The model draws random numbers for each example (dropout, noise, augmentation), and ε holds if they are secret. "
    "Their keys are secret, but TensorFlow's generators are no ciphers."
)
_KNOWN_DRAWS = (
    "The model's random numbers (dropout, noise, augmentation) come from the seeds that you set, because the optimizer "
    "has a seed. Anyone who knows these seeds can learn more of an example than ε says."
)
_NOT_FINITE = (
    "{}. Look for missing values first: np.isnan(x).sum(axis=0) counts those of each column. ε still holds, but an "
    "example whose gradient is not finite teaches the model nothing."
)
_GROUPED = (
    "num_microbatches={} clips mean gradients of groups, so an example moves the sum by up to two clips: "
    "noise_multiplier={} counts as half. Leave num_microbatches out to clip each example by itself."
)
_CUT_PASS = (
    "A pass of sampling='random_allocation' was interrupted, and the data only state how many batches an example is "
    "allocated to. So ε counts the steps of this pass as if every example took part in each. It does not for "
    "tfdpfl.data.random_allocation."
)
_START = (
    "The weights that training began with are taken to be public. So ε does not hold if they came from a training "
    "without privacy on these data."
)
_VALIDATION = (
    "PrivateMetrics(validation=True) released figures of the validation data, which are of other people. This ε is not "
    "theirs: the callback's ledger has it."
)
_TINY = 8  # times as large as a batch is, the others are worth a warning


class Releasing(Protocol):
    """Names what releases something of the training data beside the steps."""

    def add_to(self, ledger: PrivacyLedger) -> PrivacyLedger:
        """Adds what it released to a ledger, for the neighbours that the ledger is of."""
        ...


class _Spent:
    """What a budget and its copies know of the trainings that they have seen together.

    Attributes:
      stepped: by weight of the models seen, what steps on it, which counts when its model is gone, too.
      models: those that are still there.
      open: calls of `fit` that have begun and of which no end was seen.
      notes: what is to be said of the trainings so far, each once.
      others: what else spends on the same data, by `add_to(ledger)`.
    """

    def __init__(self) -> None:
        self.stepped: dict[int, dict[int, Optimizer]] = {}
        self.models: weakref.WeakSet[Model] = weakref.WeakSet()
        self.open: list[Fit] = []
        self.notes: dict[str, None] = {}
        self.others: list[Releasing] = []

    def cut_off(self) -> None:
        """Ends the calls of `fit` that were interrupted."""
        running = running_models() if self.open else []
        for fit in [fit for fit in self.open if fit.model not in running]:
            fit.cut_off()
            if fit.cut_pass:
                self.notes[_CUT_PASS] = None
        self.open = [fit for fit in self.open if not fit.ended]


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Writes ``epsilon`` into the logs of every epoch, and stops training before ``target_epsilon`` is passed.

        model.fit(x, y, callbacks=[tfdpfl.callbacks.PrivacyBudget(num_examples=len(x), delta=1e-5)])

    ε is computed for the steps that ran. Before each batch the callback reports its sampling to the optimizer, which
    counts the step in a variable that is saved with it.

    * Batches of `tfdpfl.data.poisson_batches` are Poisson samples.
    * `fit` shuffles arrays and uses each example once an epoch, so ε is computed without amplification.
    * For other data sets and generators pass ``sampling`` and ``batch_size``.
    * If the callback did not announce a step (`train_on_batch`, a second update on one batch), ε assumes that every
      example took part in it. A `fit` without the callback is known if its data state their sampling.

    Use one callback for one data set. It counts all steps of the optimizers of the models that it sees, restarts
    included. Its copies share one budget. A search that copies its callbacks for each trial (keras-tuner,
    scikit-learn's `clone`) spends one ``target_epsilon``, and each copy reports what all of them spent.

    Args:
      num_examples: the size of the training data, which counts as public. None reads it from the data.
      delta: δ of the reported ε, 0 < δ < 1. Keep it below 1 / num_examples, because a larger δ means nothing.
      target_epsilon: the largest ε, or None.
      sampling: "poisson", "shuffle", "fixed_size" or "none", for data that do not state their sampling.
      batch_size: the (expected) batch size, for data that do not state it.
      accountant: "pld" or "rdp".
      ledger: the `ledger` of a callback or an optimizer that used the same data. Steps that this callback sees as well
        count once.
      dataset_name: a name for the data set. Steps on data sets with other names do not count. So use two names only
        for data sets that have no example, and no person, in common.
      max_examples_per_user: how many examples neighbours may differ in, as in `compute_epsilon`: ε, the target and the
        report then are those of a user or owner who has no more (`tfdpfl.data.select_examples`).

    Attributes:
      ledger: what ran so far, as a `PrivacyLedger`. Save its `to_dict()` next to the model. `report` returns its ε.
        The ledger itself is of single examples: pass ``max_examples_per_user`` to its `epsilon` and `report`, too.

    Raises:
      PrivacyError: when training begins, if the optimizer is not private or the model holds another one. It is also
        raised if the sampling is unknown or contradicts the data, if Poisson batches meet an optimizer without
        ``expected_batch_size``, or if not even one step fits the target. After the first step, if it writes batch data
        to a variable that the loss reads or that is saved with the model (also weights that are trained without the
        optimizer), or if there is a target and several updates on one batch.
    """

    def __init__(
        self,
        num_examples: int | None = None,
        delta: float | None = None,
        target_epsilon: float | None = None,
        *,
        sampling: str | None = None,
        batch_size: int | None = None,
        accountant: str = "pld",
        ledger: PrivacyLedger | None = None,
        dataset_name: str | None = None,
        max_examples_per_user: int = 1,
    ):
        super().__init__()
        self._supports_tf_logs = True  # Keras 2 need not fetch them after each batch
        if delta is None:
            raise ValueError("delta=None: give the δ of the guarantee, for example 1e-5 (below 1 / num_examples).")
        remedy = "count the examples, or leave it to the data"
        self.num_examples = optional(whole, "num_examples", num_examples, 1, remedy)
        self.delta = check_delta(delta)
        remedy = "give the ε to stop at, or None to train without a limit"
        self.target_epsilon = optional(real, "target_epsilon", target_epsilon, remedy, above=0)
        self.sampling = optional(choice, "sampling", sampling, (*SAMPLINGS, FIXED_ORDER.name))
        remedy = "count the examples of a batch, or leave it out"
        self.batch_size = optional(whole, "batch_size", batch_size, 1, remedy)
        if self.batch_size and self.num_examples and self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size={self.batch_size} is more than num_examples={self.num_examples}: correct one of the two."
            )
        self.accountant = check_accountant(accountant)
        check_ledger(ledger)
        if dataset_name is not None and (not isinstance(dataset_name, str) or not dataset_name):
            raise ValueError(f"dataset_name={dataset_name!r} must be a name, or None.")
        self.dataset_name = dataset_name
        self.max_examples_per_user = whole(
            "max_examples_per_user", max_examples_per_user, 1, "count the examples of the user with the most"
        )
        self._data_number = _step_table.number_of(dataset_name)
        self._given = PrivacyLedger() if ledger is None else ledger
        if len(self._given) and not len(self._given.of_dataset(self._dataset)):
            raise ValueError(
                f"ledger={ledger!r} is about other data sets than dataset_name={dataset_name!r}. Give the ledger of "
                "this one, or the name that it was made with."
            )
        self._spent = _Spent()
        self._fit: Fit | None = None

    # -- copies ----------------------------------------------------------------------------------------------

    def __copy__(self) -> PrivacyBudget:
        """The same budget for another fit."""
        made = type(self).__new__(type(self))
        made.__dict__ |= {**self.__dict__, "_fit": None}
        return made

    def __deepcopy__(self, memo: dict) -> PrivacyBudget:
        return self.__copy__()

    def __reduce__(self):
        if self.target_epsilon is not None:
            raise PrivacyError(
                f"This PrivacyBudget (target_epsilon={self.target_epsilon:g}) cannot be pickled: a copy in another "
                "process does not see what this one spends, so each would spend the whole target. Make a PrivacyBudget "
                "in each process, with a share of the target, or run the trials in one process (n_jobs=1)."
            )
        settings = (self.num_examples, self.delta, None)
        keywords = {
            "sampling": self.sampling, "batch_size": self.batch_size, "accountant": self.accountant,
            "ledger": self.ledger, "dataset_name": self.dataset_name,
            "max_examples_per_user": self.max_examples_per_user,
        }  # fmt: skip
        return functools.partial(type(self), *settings, **keywords), ()

    # -- Keras's hooks ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._fit is not None and self._fit.model in running_models()[1:]:
            raise PrivacyError(
                "This PrivacyBudget watches a fit that is still running, and was given to another fit inside of it. "
                "Give the inner one a PrivacyBudget of its own, or train after the outer one has ended."
            )
        self._optimizer = optimizer = private_optimizer(self.model)
        call = fit_arguments(self.model)
        for planned in filter(None, (getattr(piece, PLAN, None) for piece in (optimizer, call.get("x"), self))):
            planned.check(optimizer, call)
        data = Sampling(self, optimizer, self._data_number, call).describe()
        fit = Fit(
            self.model, optimizer, data, self._data_number, executions_of(self.model), call, self.params.get("steps")
        )
        for other in self._before_me():
            fit.counts_passes = False
            if other._fit is not None and other._fit.batches != fit.batches:
                raise PrivacyError(
                    "Two PrivacyBudgets of one fit say different things of its data (dataset_name, sampling, "
                    "num_examples or batch_size), but each step counts once. Give the fit one of them."
                )
        if self._fit is not None:
            self._fit.cut_off()
        self._spent.cut_off()
        self._spent.open.append(fit)
        self._fit = fit
        own = {id(optimizer._dp): optimizer._dp}
        self._spent.stepped |= {id(d): d for d in [own, *_past.stepped_on_model(self.model)]}
        self._spent.models.add(self.model)
        for other in RELEASED.get(self.model, ()):
            self.include(other)
        self._limit: int | None = None
        self._nonfinite_before: float = optimizer.num_nonfinite

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        fit = self._running()
        if fit.passes == 0:  # by now all callbacks have begun, one of which may have loaded a state
            self._say_what_is_odd()
            fit.begin()
            steps = fit.steps_of_epoch(self.params.get("steps"))
            self._passes_per_epoch = fit.passes_in_epoch(steps) if steps else None
            self._limit = self._allowed()
            fit.share(self._limit)
            how = ", secure_noise=True" if fit.optimizer._dp.noise.discrete else ""
            how += "" if self.max_examples_per_user == 1 else f", max_examples_per_user={self.max_examples_per_user}"
            search = f"tfdpfl.compute_noise_multiplier(..., sampling={fit.data['sampling']!r}{how})"
            if fit.optimizer.noise is not None:
                search = "tfdpfl.noise.compute_correlated_noise_multiplier"
            if self._is_full(0):
                raise PrivacyError(
                    f"target_epsilon={self.target_epsilon:g} at delta={self.delta:g} leaves no room for another "
                    f"{'epoch' if fit.shuffled else 'step'}{self._spent_before()}. Raise noise_multiplier "
                    f"({search} finds the smallest one that does) or the target."
                )
        self._epoch = epoch
        fit.first = None
        fit.begin_epoch()
        self._passes_before = fit.passes
        fit.begin_passes(self._passes_per_epoch or 1)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        fit = self._running()
        fit.first = batch if fit.first is None else fit.first
        if self._passes_per_epoch is None:  # how long an epoch is turns out as it runs
            fit.begin_passes(self._passes_before + fit.passes_in_epoch(batch + fit.stride) - fit.passes)
        steps = fit.steps_of_epoch(self.params.get("steps"))
        fit.announce(batch, fit.stride if steps is None else min(fit.stride, steps - batch))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        fit = self._running()
        fit.awaited, fit.seen = False, batch + 1 - (fit.first or 0)
        if fit.announced <= 2 * fit.stride:  # by now the step is whole, and the next one has not begun
            fit.optimizer._dp.check_finished(saved_weights(self.model))
        if fit.stride > 1:
            fit.silence()  # the data may have ended in the middle of an execution
        fit.check_rows()
        if self._limit is None:
            return
        self._check_announced()
        if self._is_full(fit.steps, batch + 1):
            self._stop()

    def _check_announced(self) -> None:
        """That a training with a target took no step that was not in the plan."""
        fit = self._running()
        if self._limit is not None and fit.steps > fit.steps_in(fit.announced):
            raise PrivacyError(
                f"The model took {fit.steps} steps on {fit.announced} batches, so "
                f"target_epsilon={self.target_epsilon:g} cannot be kept: ε is known in advance only for one update on "
                "each batch. Make one update on each batch in train_step, leave train_on_batch out of callbacks, or "
                "train without target_epsilon."
            )

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        fit = self._running()
        fit.silence()
        fit.check_pass()
        remember_weights(fit.model)
        if logs is not None:
            # To look for interrupted fits takes as long as a step: Python copies what is in the frame of each fit. No
            # other fit is open, and this one runs, because Keras calls this method.
            known = self._spent.open == [fit]
            logs["epsilon"] = self._priced(self._ledger_so_far() if known else self.ledger)
            self._warn_of_missing_values(logs)
        self._check_announced()
        if self._is_full(fit.steps):
            self._stop()

    def _warn_of_missing_values(self, logs: dict) -> None:
        """Warns of gradients that are not finite, unless the private figures of this fit are hidden. It is no note: a
        statement is published."""
        found = self._running().optimizer.num_nonfinite
        if math.isnan(float(logs.get("loss", 0.0))):
            warnings.warn(_NOT_FINITE.format("The loss is NaN"), stacklevel=4)
        elif found > self._nonfinite_before and not any(
            hasattr(each, "hides") for each in callbacks_of(fit_arguments(self.model))
        ):
            warnings.warn(_NOT_FINITE.format(f"The gradients of {found} examples were not finite"), stacklevel=4)
            self._nonfinite_before = math.inf  # said once

    def on_train_end(self, logs: dict | None = None) -> None:
        self._running().end()
        if keeps_averages(self.model):  # which Keras put in the weights' place since, rounded
            remember_weights(self.model)
        self._spent.cut_off()
        self._check_announced()

    def _before_me(self) -> list[PrivacyBudget]:
        """The other PrivacyBudgets of the fit that have begun already."""
        given = callbacks_of(fit_arguments(self.model))
        return [c for c in given[: given.index(self) if self in given else 0] if isinstance(c, PrivacyBudget)]

    def _running(self) -> Fit:
        assert self._fit is not None
        return self._fit

    def _stop(self) -> None:
        planned = self.params.get("epochs")
        if self.params.get("verbose") and not self.model.stop_training and planned != self._epoch + 1:
            print(f"\nPrivacyBudget stops the training in epoch {self._epoch + 1}, before target_epsilon is passed.")
        self.model.stop_training = True

    # -- what is to be said --------------------------------------------------------------------------------------

    def _say_what_is_odd(self) -> None:
        fit, ledger, call = self._running(), self.ledger, fit_arguments(self.model)
        if ledger.unknown_steps:
            warnings.warn(
                f"{ledger.unknown_steps} steps ran of which only the noise is known. ε counts them as if every "
                "example took part in each. Give every fit on these data a PrivacyBudget.",
                stacklevel=4,
            )
        odd = [
            *_taken_back(fit), *_whose_weights(fit.model, ledger), *_what_batches_hold(fit, call),
            *uncovered_statistics(fit.model, ledger), *uncovered_choices(call),
        ]  # fmt: skip
        for sentence in odd:
            if sentence not in self._spent.notes:
                warnings.warn(sentence, stacklevel=4)
        self._spent.notes |= dict.fromkeys([*odd, *_conditions(fit, call)])
        if self.max_examples_per_user > 1:
            self._spent.notes.pop(_ROWS, None)

    # -- prices ----------------------------------------------------------------------------------------------

    @property
    def _dataset(self) -> str | None:
        return None if self.dataset_name is None else f"{int(self._data_number):x}"

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        promise = self.report().promise("training", self.ledger)
        if self.max_examples_per_user > 1:  # a report merges ledgers, and prices what it merged for single examples
            promise = dataclasses.replace(promise, ledger=None)
        return [promise]

    @property
    def ledger(self) -> PrivacyLedger:
        """All that ran on the data, this far."""
        self._spent.cut_off()
        return self._ledger_so_far()

    def _ledger_so_far(self) -> PrivacyLedger:
        """Returns `ledger`, for a caller that knows that no `fit` was interrupted."""
        return self._ledger_of([dp.ledger() for dp in self._seen()])

    def _ledger_of(
        self, trained: list[PrivacyLedger], record: Callable[[PrivacyLedger], None] = lambda ledger: None
    ) -> PrivacyLedger:
        """Returns the ledger of these trainings, of what was given, of what ``record`` adds and of what else spends on
        the data. The last comes last, because it is stated for the neighbours that all else is of."""
        ledger = PrivacyLedger().merge(self._given)
        for each in trained:
            ledger.merge(each)
        record(ledger)
        for other in self._others():
            other.add_to(ledger)
        return ledger.of_dataset(self._dataset)

    def include(self, other: Releasing) -> None:
        """Adds what ``other`` releases on the same data to the ledger, by its method ``add_to(ledger)``."""
        if other not in self._spent.others:
            self._spent.others.append(other)

    def _others(self) -> list[Releasing]:
        """What else spends on the same data, also in a `fit` of the same models that no budget watched."""
        unwatched = [other for model in self._spent.models for other in RELEASED.get(model, ())]
        return list(dict.fromkeys([*self._spent.others, *unwatched]))

    def _seen(self) -> list[Optimizer]:
        """The mechanisms of the optimizers that were watched, and of others that stepped on the same weights before or
        since."""
        seen: dict[int, Optimizer] = {}
        for stepped in self._spent.stepped.values():
            seen |= stepped
        return list(seen.values())

    def epsilon(self, delta: float | None = None) -> float:
        """Returns the ε of all that ran on the data so far; `report` says what it covers.

        Args:
          delta: the δ of this ε. None uses the ``delta`` of the callback.

        Raises:
          PrivacyError: as `report`.
        """
        return self.report(delta).epsilon

    def report(self, delta: float | None = None) -> PrivacyReport:
        """Returns the ε of all that ran on the data so far, with what it covers.

        Args:
          delta: the δ of this ε. None uses the ``delta`` of the callback.

        Raises:
          PrivacyError: the callback was given to no `fit`, so that it does not know what ran; or the model was trained
            without privacy since.
        """
        if not self._spent.stepped and not len(self._given):
            raise PrivacyError("PrivacyBudget saw no training. Give it to fit: model.fit(..., callbacks=[budget]).")
        for model in list(self._spent.models):
            since = optimizer_of(model)
            if not hasattr(since, "_dp") and int(tf.convert_to_tensor(getattr(since, "iterations", 0))) > 0:
                raise PrivacyError(
                    f"The model was compiled with {type(since).__name__} since and trained on, without privacy, so its "
                    "weights have no ε any more. Read the report before that, or train with private optimizers only."
                )
        generators = dict.fromkeys(dp.source.generator for dp in self._seen() if not dp.noise.discrete)
        notes = [
            *self._spent.notes,
            *(_GENERATOR.format(generator) for generator in generators if generator is not None),
            *dict.fromkeys(_DRAWS if dp.seed is None else _KNOWN_DRAWS for dp in self._seen() if dp.draws_by_example),
            _START,
        ]
        asked = self.delta if delta is None else delta
        return self.ledger.report(asked, self.accountant, notes, self.max_examples_per_user)

    def _priced(self, ledger: PrivacyLedger) -> float:
        return ledger.epsilon(self.delta, self.accountant, self.max_examples_per_user)

    @explain_wait("searching for the last step that target_epsilon allows; each try computes one epsilon")
    def _allowed(self) -> int | None:
        """How many steps (passes, if shuffled) of this fit the target allows."""
        fit, past = self._running(), self.ledger
        dp, discrete = fit.optimizer, fit.optimizer._dp.noise.discrete
        if dp.noise is not None:
            return self._allowed_of_correlated()
        over = fit.clips
        changes = dp.noise_multiplier if isinstance(dp.noise_multiplier, PiecewiseConstant) else None
        if changes and fit.shuffled and self.target_epsilon is not None:
            raise PrivacyError(
                "target_epsilon with a noise_multiplier that changes: an example of shuffled data is in one step of a "
                "pass, which may be the step with the least noise. Use tfdpfl.data.poisson_batches, or give one "
                "multiplier."
            )
        # Over the sensitivity to one example; where it changes, the one that allows most.
        multiplier = (max(changes.values) if changes else dp.noise_multiplier) / over

        trained = [dp.ledger() for dp in self._seen()]

        def with_more(number: int) -> PrivacyLedger:
            return self._ledger_of(trained, lambda ledger: record(ledger, number))

        def record(ledger: PrivacyLedger, number: int) -> None:
            if changes and not fit.shuffled:
                pieces = changes.spent(int(tf.convert_to_tensor(dp.iterations)), number)
            else:
                pieces = [(dp._dp.least_noise, number)]
            for value, times in pieces:
                more: Keywords = {"num_epochs" if fit.shuffled else "num_steps": times * fit.uses}
                ledger.record(value / over, **options_of(discrete), **more, **fit.data)

        def priced(number: int) -> float:
            return self._priced(with_more(number))

        if self.target_epsilon is None:
            if len(past) or self.max_examples_per_user > 1:
                priced(1)  # what cannot be added up is refused now
            with_more(1)  # and what has no price by itself
            return None
        fits = self._planned_number(priced, self.target_epsilon)  # a search for the last step may take a minute
        if fits is not None:
            return fits
        try:
            most = compute_num_steps(
                target_epsilon=self.target_epsilon, noise_multiplier=multiplier, delta=self.delta,
                accountant=self.accountant, max_examples_per_user=self.max_examples_per_user, **options_of(discrete),
                **fit.data,
            )  # fmt: skip
        except PrivacyError:
            raise
        except ValueError:
            return 0
        if fit.shuffled:
            most //= math.ceil(fit.data["num_examples"] / fit.data["batch_size"]) * fit.uses
        if not len(past) and not changes:
            return most
        return bisect.bisect_right(range(1, most + 1), self.target_epsilon, key=priced)

    def _allowed_of_correlated(self) -> int | None:
        """As `_allowed`, for noise whose steps are one mechanism."""
        fit = self._running()
        dp, data = fit.optimizer._dp, fit.data

        def priced(number: int) -> float:
            passes = number if fit.shuffled else fit.passes_in(number * fit.parts)
            steps = number * math.ceil(data["num_examples"] / data["batch_size"]) if fit.shuffled else number
            others = [other.ledger() for other in self._seen() if other is not dp]
            own = dp.noise.segments.ledger(dp.own_rows(), steps, passes, fit.batches, fit.clips)
            return self._priced(self._ledger_of([*others, own]))

        if self.target_epsilon is None:
            priced(1)  # what has no price is refused now
            return None
        fits = self._planned_number(priced, self.target_epsilon)  # a search takes as many prices as the number has bits
        most = sum(self._planned())
        return bisect.bisect_right(range(1, most + 1), self.target_epsilon, key=priced) if fits is None else fits

    def _planned_number(self, priced: Callable[[int], float], target: float) -> int | None:
        """Returns how many steps (passes, if shuffled) Keras will take, if they meet the target."""
        planned, more = self._planned()
        return next((n for n in dict.fromkeys((planned + more, planned)) if priced(n) <= target), None)

    def _planned(self) -> tuple[int, int]:
        """How many steps (passes, if shuffled) Keras says it will take, and an execution's (epoch's) number of them;
        where it does not say, more than any training takes."""
        epochs, steps, fit = self.params.get("epochs"), self.params.get("steps"), self._running()
        if not epochs or not steps:
            return MOST_STEPS, 0
        passes = self._passes_per_epoch or 1
        if fit.shuffled:
            return epochs * passes, passes
        planned = fit.steps_in(epochs * steps)
        return planned, fit.steps_in(epochs * steps + fit.stride) - planned

    def _spent_before(self) -> str:
        """Says what of the target is spent, if something is."""
        past = self.ledger
        if not past.steps:
            return ""
        epsilon = self._priced(past)
        return f": {past.steps} steps that this PrivacyBudget counts have cost {epsilon:.5g}"

    def _is_full(self, steps: int, steps_of_epoch: int | None = None) -> bool:
        """Whether after so many steps of the fit the next one passes the target; if shuffled the next epoch, or pass
        within the epoch."""
        if self._limit is None:
            return False
        fit = self._running()
        if not fit.shuffled:
            return steps + fit.steps_next() > self._limit
        if steps_of_epoch is None:
            return fit.passes + (self._passes_per_epoch or 1) > self._limit
        after = self._passes_before + fit.passes_in_epoch(steps_of_epoch + fit.stride)
        return self._passes_per_epoch is None and after > self._limit


def _taken_back(fit: Fit) -> Iterator[str]:
    taken_back = fit.optimizer._dp.counter.taken_back(fit.optimizer._dp_ledger)
    if taken_back:
        yield (
            f"A state was loaded that knows of {taken_back} steps less than this optimizer has taken. These steps "
            "stay counted, because they ran."
        )


def _whose_weights(model: Model, ledger: PrivacyLedger) -> Iterator[str]:
    """Yields sentences if something else than the steps of this ledger made the weights."""
    weights, single = fingerprints(model)
    numbers = {weights, *single}
    steps, left = LEFT.get(model, (None, ()))
    if steps == steps_on(model) and weights not in left:
        yield (
            "The weights are not those that private steps left: something else changed them (load_weights, "
            "set_weights, training with another optimizer). This ε includes the cost of the new weights only if "
            "this ledger has it."
        )
    for file, steps in recorded_for(model, ledger).items():
        yield (
            f"The weights come from {file}, which records {steps} private steps, and this ε does not include these "
            "steps. If they were on these data, too, load the file with its optimizer (load_model without "
            "compile=False; compile before load_weights), or pass the ledger of that training as ledger=."
        )
    for other, (steps, left) in list(LEFT.items()):
        theirs = [dp.ledger() for dp in stepping(other).values()] if numbers & left and other is not model else []
        if any(not taken.origins <= ledger.origins for taken in theirs):
            yield (
                f"{'The' if weights in left else 'Some'} weights are those that {steps} private steps on another "
                "model left, and this ε does not include these steps. If they were on these data, too, pass the "
                "ledger of that training as ledger=."
            )


def _what_batches_hold(fit: Fit, call: Keywords) -> Iterator[str]:
    if fit.uses > 1:
        yield (
            "Batches continue from one pass over the data into the next, so one batch may hold an example "
            f"{fit.uses} times, and ε counts each pass as {fit.uses}. Use a number of batches in an epoch that "
            "gradient_accumulation_steps divides, without .repeat() before .batch(), or use Poisson batches."
        )
    expected, batch = fit.optimizer.expected_batch_size, fit.data["batch_size"]
    if expected is not None and abs(batch - expected) >= 1 and not 0.5 < batch / expected < 2:
        yield (
            f"The optimizer divides by expected_batch_size={expected:g}, but batches hold {batch} examples: its "
            f"steps are {batch / expected:.3g} times what the learning rate says. ε does not change."
        )
    cut = call.get("steps_per_epoch") or call.get("validation_split")
    number = 0 if cut else length(call.get("x")) or 0
    rest = number % fit.physical
    if expected is None and fit.parts == 1 and 0 < _TINY * rest <= fit.physical:
        yield (
            f"The last batch of each epoch has {rest} of the {number} examples. The optimizer divides by the batch "
            f"size, so this batch has {fit.physical / rest:.3g} times the noise of the others. Give the optimizer "
            f"expected_batch_size={batch}, or leave out examples (x[:{number - rest}]). ε does not change."
        )


def _conditions(fit: Fit, call: Keywords) -> Iterator[str]:
    """Yields what ε relies on."""
    optimizer, x = fit.optimizer, call.get("x")
    yield from choices_by_public_figures(call)
    if any(getattr(each, "hides", None) and each.validation for each in callbacks_of(call)):
        yield _VALIDATION
    if fit.own:
        yield _ROWS
    if fit.own and not fit.whole:
        yield _STREAM
    yield from notes_of(x)
    declared = declared_sampling(x)
    if declared is not None and declared.seed is not None:
        yield (
            f"The Poisson batches come from seed={declared.seed}: anyone who knows it knows the batches, and the "
            "same seed draws the same ones again. To publish the model, draw them with seed=None."
        )
    segments = optimizer._dp.noise.segments
    if segments is not None and fit.scheme.same_order and segments.order_is_not_known:
        yield (
            "The training continues from a saved state. ε holds if the data come in the same order as before: not "
            "shuffled, or with a fixed seed. The uses of an example are then as far apart as ε assumes."
        )
    if fit.clips > 1:
        yield _GROUPED.format(optimizer.num_microbatches, optimizer.noise_multiplier)
    if optimizer._dp.seed is not None:
        yield (
            f"The noise comes from seed={optimizer._dp.seed}: anyone who knows it can subtract the noise. To "
            "publish the model, train with seed=None."
        )
