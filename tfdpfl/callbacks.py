"""A Keras callback that prices the training while it runs, and ends it before the budget is passed."""

from __future__ import annotations

import bisect
import copy
import math
import warnings
import weakref
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl._frames import PLAN, running_fits
from tfdpfl.accounting import PrivacyLedger, PrivacyReport, _checks, compute_num_steps
from tfdpfl.accounting.calibration import MOST_STEPS
from tfdpfl.accounting.pricing import ACCOUNTANTS, check_delta
from tfdpfl.accounting.run import ADJACENCIES_OF, SAMPLINGS
from tfdpfl.clipping.models import saved_weights
from tfdpfl.data import SamplingDeclaration, declared_sampling, made_from, passed_through
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import DPOptimizer, _counts, stepped_on
from tfdpfl.optimizers._schedules import Pieces

_GENERATOR = (
    "The noise was drawn by {}, in floating point: its last digits are not those of a normal distribution, which an "
    "attacker who sees every digit of the weights may use (Mironov 2012)."
)
_START = "The weights that training began with are taken to be public."


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Writes ``epsilon`` into the logs of every epoch, and stops training before ``target_epsilon`` is passed.

        model.fit(x, y, callbacks=[tfdpfl.callbacks.PrivacyBudget(num_examples=len(x), delta=1e-5)])

    What is priced is what ran. Before each batch the callback tells the optimizer how the batch was drawn, and the
    optimizer counts its step so, in a variable that is saved with it. Batches of `tfdpfl.data.poisson_batches` are
    Poisson samples; arrays given to `fit` are shuffled, each example used once an epoch, and priced without
    amplification; for other data sets and generators say ``sampling`` and ``batch_size``. Steps that the callback did
    not announce (`train_on_batch`, a `fit` without it, a second update on one batch) are priced as if every example
    took part in each.

    One callback serves one data set: all steps count that were taken by the optimizers of the models it sees, restarts
    included.

    Args:
      num_examples: size of the training data; None takes it from the data. The size counts as public.
      delta: δ of the reported ε, 0 < δ < 1; below 1 / num_examples to mean anything.
      target_epsilon: the ε not to pass, or None.
      sampling: "poisson", "shuffle", "fixed_size" or "none", for data that do not say themselves.
      batch_size: (expected) batch size, likewise.
      accountant: "pld" or "rdp".
      ledger: what other optimizers did on the same data: the `ledger` of a callback, or of an optimizer. Steps that
        this one sees as well count once.
      dataset_name: a name for the data set. Steps on data sets of other names do not count: give two names only to
        data sets that have no example, and no person, in common.

    Attributes:
      report: a `PrivacyReport` of what ran so far.
      ledger: it as a `PrivacyLedger`, which `to_dict` makes ready to be saved next to the model.

    Raises:
      PrivacyError: when training begins, if the optimizer is not private or the model holds another one, the sampling
        is unknown or contradicts the data, Poisson batches meet an optimizer without ``expected_batch_size``, or not
        even one step fits the target; after the first step, if it writes batch data to a variable that the loss reads
        or that is saved with the model (weights that are trained without the optimizer, too), or if there is a target
        and several updates on one batch.
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
    ):
        super().__init__()
        if delta is None:
            raise ValueError("delta=None: give the δ of the promise, for example 1e-5 (below 1 / num_examples).")
        if num_examples is not None:
            num_examples = _checks.whole("num_examples", num_examples, 1, "count the examples, or leave it to the data")
        self.num_examples = num_examples
        self.delta = check_delta(delta)
        if target_epsilon is not None:
            mend = "give the ε to stop at, or None to train without a limit"
            target_epsilon = _checks.real("target_epsilon", target_epsilon, mend, above=0)
        self.target_epsilon = target_epsilon
        self.sampling = None if sampling is None else _checks.choice("sampling", sampling, (*SAMPLINGS, "fixed_order"))
        if batch_size is not None:
            batch_size = _checks.whole("batch_size", batch_size, 1, "count the examples of a batch, or leave it out")
            if num_examples is not None and batch_size > num_examples:
                raise ValueError(f"batch_size={batch_size} is more than num_examples={num_examples}: one is off.")
        self.batch_size = batch_size
        self.accountant = _checks.choice("accountant", accountant, ACCOUNTANTS)
        if ledger is not None and not isinstance(ledger, PrivacyLedger):
            raise ValueError(f"ledger={ledger!r:.99} must be a PrivacyLedger: PrivacyLedger.from_dict makes one.")
        if dataset_name is not None and (not isinstance(dataset_name, str) or not dataset_name):
            raise ValueError(f"dataset_name={dataset_name!r} must be a name, or None.")
        self.dataset_name = dataset_name
        self._data_number = _counts.number_of(dataset_name)
        self._given = PrivacyLedger() if ledger is None else ledger
        if len(self._given) and not len(self._given.of_dataset(self._dataset)):
            raise ValueError(
                f"ledger={ledger!r} is about other data sets than dataset_name={dataset_name!r}. Give the ledger of "
                "this one, or the name that it was made with."
            )
        # By weight of the models seen, what steps on it, which counts when its model is gone, too.
        self._stepped: dict[int, dict[int, Any]] = {}
        self._fit: _Fit | None = None
        self._notes: dict[str, None] = {}  # what is to be said of the trainings so far, each once

    # -- Keras's hooks ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._fit is not None and self._fit.model in _running_fits()[1:]:
            raise PrivacyError(
                "This PrivacyBudget watches a fit that is still running, and was given to another inside of it. Give "
                "the inner one a PrivacyBudget of its own, or train after the outer one has ended."
            )
        self._optimizer = optimizer = private_optimizer(self.model)
        # Keras 3 has the number itself, Keras 2 a variable under another name.
        held = getattr(self.model, "steps_per_execution", None) or getattr(self.model, "_steps_per_execution", None)
        per_call = 1 if held is None else held.numpy() if hasattr(held, "numpy") else held
        call = _fit_arguments(self.model)
        for planned in filter(None, (getattr(piece, PLAN, None) for piece in (optimizer, call.get("x"), self))):
            planned.check(optimizer, call)
        data = self._describe(call)
        fit = _Fit(self.model, optimizer, data, self._data_number, int(per_call), call, self.params.get("steps"))
        for other in self._before_me():
            fit.counts_passes = False
            if other._fit is not None and other._fit.batches != fit.batches:
                raise PrivacyError(
                    "Two PrivacyBudgets of one fit say different things of its data (dataset_name, sampling, "
                    "num_examples or batch_size), and a step is counted once. Give the fit one of them."
                )
        if self._fit is not None:
            self._fit.cut_off()
        self._fit = fit
        own = {id(optimizer._dp): optimizer._dp}
        self._stepped |= {id(d): d for d in [own, *map(stepped_on, _weights(self.model))]}
        self._limit: int | None = None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        fit = self._running()
        if fit.passes == 0:  # by now all callbacks have begun, one of which may have loaded a state
            self._say_what_is_odd()
            fit.begin()
            steps = self.params.get("steps")
            self._passes_per_epoch = fit.passes_in(steps) if steps else None
            self._limit = self._allowed()
            if self._is_full(0):
                raise PrivacyError(
                    f"target_epsilon={self.target_epsilon:g} at delta={self.delta:g} leaves no room for another "
                    f"{'epoch' if fit.shuffled else 'step'}. Raise noise_multiplier "
                    f"(tfdpfl.compute_noise_multiplier(..., sampling={fit.data['sampling']!r}) finds the smallest one "
                    "that does) or the target."
                )
        self._epoch = epoch
        fit.first = None
        self._passes_before = fit.passes
        fit.begin_passes(self._passes_per_epoch or 1)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        fit = self._running()
        fit.first = batch if fit.first is None else fit.first
        if self._passes_per_epoch is None:  # how long an epoch is turns out as it runs
            fit.begin_passes(self._passes_before + fit.passes_in(batch + fit.stride) - fit.passes)
        steps = self.params.get("steps")
        fit.announce(batch, fit.stride if steps is None else min(fit.stride, steps - batch))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        fit = self._running()
        fit.awaited, fit.seen = False, batch + 1 - (fit.first or 0)
        if fit.announced <= 2 * fit.stride:  # by now the step is whole, and the next one has not begun
            fit.optimizer._dp.check_finished(saved_weights(self.model))
        if fit.stride > 1:
            fit.silence()  # the data may have ended in the middle of an execution
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
                f"The model took {fit.steps} steps on {fit.announced} batches, so target_epsilon="
                f"{self.target_epsilon:g} cannot be held: only one update on a batch has a price that is known before. "
                "Make one update a batch in train_step, leave train_on_batch out of callbacks, or train without "
                "target_epsilon."
            )

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        fit = self._running()
        fit.silence()
        fit.check_pass()
        _, left = _LEFT.get(fit.model, (0, set()))
        _LEFT[fit.model] = (_steps_on(fit.model), left | {_fingerprint(fit.model)})
        if logs is not None:
            logs["epsilon"] = self.ledger.epsilon(self.delta, self.accountant)
        self._check_announced()
        if self._is_full(fit.steps):
            self._stop()

    def on_train_end(self, logs: dict | None = None) -> None:
        self._running().end()
        self._check_announced()

    def _before_me(self) -> list[PrivacyBudget]:
        """The other PrivacyBudgets of the fit that have begun already."""
        given = getattr(_fit_arguments(self.model).get("callbacks"), "callbacks", [])
        return [c for c in given[: given.index(self) if self in given else 0] if isinstance(c, PrivacyBudget)]

    def _running(self) -> _Fit:
        assert self._fit is not None
        return self._fit

    def _stop(self) -> None:
        planned = self.params.get("epochs")
        if self.params.get("verbose") and not self.model.stop_training and planned != self._epoch + 1:
            print(f"\nPrivacyBudget stops the training in epoch {self._epoch + 1}, before target_epsilon is passed.")
        self.model.stop_training = True

    # -- what is to be said --------------------------------------------------------------------------------------

    def _say_what_is_odd(self) -> None:
        fit = self._running()
        optimizer, counter, ledger = fit.optimizer, fit.optimizer._dp.counter, self.ledger
        taken_back = counter.taken_back(optimizer._dp_ledger)
        if taken_back:
            self._say(
                f"A state was loaded that knows of {taken_back} steps less than this optimizer has taken. They stay "
                "counted: what ran, ran."
            )
        if ledger.unknown_steps:
            warnings.warn(
                f"{ledger.unknown_steps} steps ran of which only the noise is known, and are priced as if every "
                "example took part in each. Give every fit on these data a PrivacyBudget.",
                stacklevel=4,
            )
        weights = _fingerprint(fit.model)
        steps, left = _LEFT.get(fit.model, (None, ()))
        if steps == _steps_on(fit.model) and weights not in left:
            self._say(
                "The weights are not those that private steps left: something else changed them (load_weights, "
                "set_weights, training with another optimizer). What was spent on the new ones is in this ε only if "
                "this ledger has it."
            )
        for model, (steps, left) in list(_LEFT.items()):
            theirs = [dp.ledger() for dp in _stepping(model).values()] if weights in left else []
            if any(not other.origins <= ledger.origins for other in theirs):
                self._say(
                    f"The weights are those that {steps} private steps on another model left, which are not in this ε. "
                    "If they were on these data, too, give PrivacyBudget that training's ledger=."
                )
        if fit.uses > 1:
            self._say(
                f"Batches reach from one pass over the data into the next, so that one may hold an example {fit.uses} "
                f"times, and each pass is priced as {fit.uses}. Take a number of batches an epoch that "
                "gradient_accumulation_steps divides, without .repeat() in front of .batch(), or Poisson batches."
            )
        expected, batch = optimizer.expected_batch_size, fit.data["batch_size"]
        if expected is not None and not 0.5 <= batch / expected <= 2:
            self._say(
                f"The optimizer divides by expected_batch_size={expected:g}, but batches hold {batch} examples: its "
                f"steps are {batch / expected:.3g} times what the learning rate says. ε is as it would be."
            )
        declared = declared_sampling(_fit_arguments(self.model).get("x"))
        if declared is not None and declared.seed is not None:
            self._notes[
                f"The Poisson batches come from seed={declared.seed}: who knows it knows the batches, and the same "
                "seed gives the same ones again. For a model to publish draw them with seed=None."
            ] = None
        chain = optimizer._dp.chain
        if chain is not None and fit.data["sampling"] == "fixed_order" and chain.order_is_not_known:
            self._notes[
                "The training goes on from a saved state. That an example's uses lie as far apart as is priced holds "
                "if the data come in the same order as before it: not shuffled, or with a fixed seed."
            ] = None
        if optimizer._dp.seed is not None:
            self._notes[
                f"The noise comes from seed={optimizer._dp.seed}: who knows it can take the noise off. For a model to "
                "publish train with seed=None."
            ] = None

    def _say(self, text: str) -> None:
        if text not in self._notes:
            self._notes[text] = None
            warnings.warn(text, stacklevel=4)

    # -- prices ----------------------------------------------------------------------------------------------

    @property
    def _dataset(self) -> str | None:
        return None if self.dataset_name is None else f"{int(self._data_number):x}"

    @property
    def ledger(self) -> PrivacyLedger:
        """All that ran on the data, this far."""
        if self._fit is not None and self._fit.model not in _running_fits():
            self._fit.cut_off()
        ledger = PrivacyLedger().merge(self._given)
        for dp in self._seen():
            ledger.merge(dp.ledger())
        return ledger.of_dataset(self._dataset)

    def _seen(self) -> list[Any]:
        """The mechanisms of the optimizers that were watched, and of others that stepped on the same weights before or
        since."""
        seen: dict[int, Any] = {}
        for stepped in self._stepped.values():
            seen |= stepped
        return list(seen.values())

    @property
    def report(self) -> PrivacyReport:
        """The price of all that ran on the data, this far.

        Raises:
          PrivacyError: the callback was given to no `fit`, so that it does not know what ran; or the model was trained
            without privacy since.
        """
        if self._fit is None and not len(self._given):
            raise PrivacyError("PrivacyBudget saw no training. Give it to fit: model.fit(..., callbacks=[budget]).")
        if self._fit is not None:
            since = getattr(self._fit.model, "optimizer", None)
            since = getattr(since, "inner_optimizer", since)
            if not hasattr(since, "_dp") and int(getattr(since, "iterations", 0)) > 0:
                raise PrivacyError(
                    f"The model was compiled with {type(since).__name__} since and trained on, without privacy: its "
                    "weights have no ε any more. Read the report before that, or train with a private optimizer alone."
                )
        generators = dict.fromkeys(dp.source.generator for dp in self._seen() if not dp.secure_noise)
        notes = [
            *self._notes,
            *(_GENERATOR.format(generator) for generator in generators if generator is not None),
            _START,
        ]
        return self.ledger.report(self.delta, self.accountant, notes)

    def _allowed(self) -> int | None:
        """How many steps (passes, if shuffled) of this fit the target allows."""
        fit, past = self._running(), self.ledger
        dp = fit.optimizer
        if dp.noise is not None:
            return self._allowed_of_correlated()
        halved = dp.num_microbatches not in (None, fit.physical)
        over = 2 if halved else 1
        changes = dp.noise_multiplier if isinstance(dp.noise_multiplier, Pieces) else None
        if changes and fit.shuffled and self.target_epsilon is not None:
            raise PrivacyError(
                "target_epsilon with a noise_multiplier that changes: an example of shuffled data is in one step of a "
                "pass, which may be that of the least noise. Use tfdpfl.data.poisson_batches, or give one multiplier."
            )
        # Over the sensitivity to one example; where it changes, the one that allows most.
        multiplier = (max(changes.values) if changes else dp.noise_multiplier) / over

        def priced(number: int) -> float:
            ledger = copy.deepcopy(past)
            if changes and not fit.shuffled:
                pieces = changes.spent(int(np.asarray(dp.iterations)), number)
            else:
                pieces = [(dp._dp.least_noise, number)]
            for value, times in pieces:
                more: dict[str, Any] = {"epochs" if fit.shuffled else "steps": times * fit.uses}
                ledger.record(value / over, discrete=dp.secure_noise, **more, **fit.data)
            return ledger.epsilon(self.delta, self.accountant)

        if self.target_epsilon is None:
            if len(past):
                priced(1)  # what cannot be added up is refused now
            return None
        planned, more = self._planned()
        for number in (planned + more, planned):  # the search for the last step that fits may take a minute
            if priced(number) <= self.target_epsilon:
                return number
        try:
            most = compute_num_steps(
                target_epsilon=self.target_epsilon, noise_multiplier=multiplier, delta=self.delta,
                accountant=self.accountant, **fit.data,
            )  # fmt: skip
        except PrivacyError:
            raise
        except ValueError:
            return 0
        if fit.shuffled:
            most //= max(fit.data["num_examples"] // fit.data["batch_size"], 1) * fit.uses
        if not len(past) and not dp.secure_noise and not changes:  # what is discrete costs a little more
            return most
        return bisect.bisect_right(range(1, most + 1), self.target_epsilon, key=priced)

    def _allowed_of_correlated(self) -> int | None:
        """As `_allowed`, for noise whose steps are one mechanism."""
        fit = self._running()
        dp, data = fit.optimizer._dp, fit.data

        def priced(number: int) -> float:
            passes = number if fit.shuffled else fit.passes_in(number)
            steps = number * math.ceil(data["num_examples"] / data["batch_size"]) if fit.shuffled else number
            ledger = PrivacyLedger().merge(self._given)
            for other in self._seen():
                if other is not dp:
                    ledger.merge(other.ledger())
            ledger.merge(dp.chain.ledger(dp.rows(), steps, passes, fit.batches))
            return ledger.of_dataset(self._dataset).epsilon(self.delta, self.accountant)

        if self.target_epsilon is None:
            priced(1)  # what has no price is refused now
            return None
        most = sum(self._planned())
        if priced(most) <= self.target_epsilon:
            return most
        return bisect.bisect_right(range(1, most + 1), self.target_epsilon, key=priced)

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
        after = self._passes_before + fit.passes_in(steps_of_epoch + fit.stride)
        return self._passes_per_epoch is None and after > self._limit

    # -- the data --------------------------------------------------------------------------------------------

    def _describe(self, call: dict[str, Any]) -> dict[str, Any]:
        """num_examples, batch_size and sampling of the data that `fit` was given."""
        x = call.get("x")
        declared = declared_sampling(x)
        if declared is not None:
            self._check_uses(declared, call)
        if self._optimizer.noise is not None:
            self._check_bounded(declared, call)
            if declared is not None:
                return self._bounded(declared)
        if declared is not None:
            return self._poisson(declared, call) if declared.kind == "poisson" else self._in_order(declared, call)
        length = _length(x)
        if length is not None:
            if self.sampling not in (None, "shuffle"):
                raise PrivacyError(
                    f"sampling={self.sampling!r}, but fit was given arrays, which it shuffles. Leave sampling out, or "
                    "pass tfdpfl.data.poisson_batches((x, y), ...) to fit."
                )
            n = self.num_examples if self.num_examples is not None else length
            if length > n or (length < n and not call.get("validation_split")):
                raise ValueError(f"num_examples={n}, but fit was given {length} examples; give their number.")
            batch = min(call.get("batch_size") or 32, length)
            self._check_batch_size(batch)
            rows = self._optimizer.rows_per_unit
            if rows > 1 and (call.get("shuffle", True) or length % rows or batch % rows):
                raise PrivacyError(
                    f"With rows_per_unit={rows} rows in a row are one unit, and fit tears units apart: give it "
                    f"shuffle=False, whole units ({length} rows are given) and a batch_size (now {batch}) that {rows} "
                    "divides; or use tfdpfl.data.poisson_batches."
                )
            length, batch = length // rows, batch // rows
            self._check_groups(length, batch, call)
            return {"num_examples": length, "batch_size": batch, "sampling": "shuffle"}
        origin = made_from(x)
        if origin is not None and origin.kind != "poisson":
            priced = {"shuffle": ("shuffle", "none"), "fixed_order": ("fixed_order", "shuffle", "none")}
            if self.sampling not in priced.get(origin.kind, ()):
                raise PrivacyError(
                    f"A {type(x).__name__} was made from batches of kind {origin.kind!r}, which sampling="
                    f"{self.sampling!r} does not describe. Pass those batches themselves to fit."
                )
        elif origin is not None:
            again = passed_through(x, ("cache", "snapshot", "save"))
            if again is not None:
                raise PrivacyError(
                    f"{again}() stands behind Poisson batches: every epoch gets the batches of the first one again, "
                    "which are not drawn anew. Leave it out: poisson_batches prefetches, and keeps the data in memory."
                )
            if self.sampling != "poisson":
                raise PrivacyError(
                    f"A {type(x).__name__} was made from Poisson batches, and what that does to their sampling is not "
                    "known. Pass tfdpfl.data.poisson_batches(...) itself to fit (it prefetches) and change the data "
                    "before it; or, if each batch keeps its examples, give PrivacyBudget sampling='poisson', "
                    "num_examples and batch_size (the expected one)."
                )
        if self._optimizer.rows_per_unit > 1:
            raise PrivacyError(
                f"Whether a {type(x).__name__} keeps the rows of a unit together, of which rows_per_unit="
                f"{self._optimizer.rows_per_unit} are one, is not known. Use tfdpfl.data.poisson_batches."
            )
        if passed_through(x, ("directedinterleave",)) and passed_through(x, ("repeat",)):
            raise PrivacyError(
                "sample_from_datasets with repeat() draws some examples more often than others (weighted or class-"
                "balanced sampling), which has no price. Draw with tfdpfl.data.poisson_batches, and weight the loss, "
                "by sample_weight or class_weight."
            )
        missing = [
            said
            for said, given in (
                ("sampling='shuffle' (every example at most once a pass)", self.sampling),
                ("num_examples", self.num_examples),
                ("batch_size", self.batch_size),
            )
            if given is None
        ]
        if missing:
            raise PrivacyError(
                f"How {type(x).__name__} draws its batches is not known, so they cannot be priced. Use "
                f"tfdpfl.data.poisson_batches, or give PrivacyBudget {' and '.join(missing)}, too."
            )
        if self.sampling == "poisson":
            self._check_poisson()
        parts = self._optimizer._dp.parts
        if self.sampling != "shuffle" and parts > 1:
            raise PrivacyError(
                f"sampling={self.sampling!r}: an example may be in several of the batches that "
                f"gradient_accumulation_steps={parts} adds up, which has no price. Use tfdpfl.data.poisson_batches, "
                "which cuts one sample into batches, or sampling='shuffle'."
            )
        if origin is None:
            self._check_against(x)
        else:
            self._check_said_of(origin)
        ordered = self._optimizer.noise is None and self.sampling == "fixed_order"
        sampling = "shuffle" if ordered else self.sampling  # with fresh noise only the number of uses counts
        data = {"num_examples": self.num_examples, "batch_size": self.batch_size, "sampling": sampling}
        if self.sampling == "none" and self._optimizer.expected_batch_size is None:
            data["adjacency"] = "zero_out"  # one example more changes what the sum is divided by
        return data

    def _check_said_of(self, origin: SamplingDeclaration) -> None:
        """That what is said of data that were made from others does not contradict what those declare."""
        if origin.rows_per_unit > 1 or origin.physical_batches > 1 or origin.truncated_batch_size is not None:
            raise PrivacyError(
                f"The data were made from batches with {origin.rows_per_unit} rows of each {origin.unit}, cut into "
                f"{origin.physical_batches} or truncated, which has another price than what PrivacyBudget is told of "
                "them. Pass those batches themselves to fit, and change the data before them (map_fn)."
            )
        size = min(math.ceil(origin.expected_batch_size - 1e-9), origin.num_examples)
        if self.num_examples != origin.num_examples or (self.batch_size or 0) < size:
            raise PrivacyError(
                f"num_examples={self.num_examples} and batch_size={self.batch_size}, but the data were made from "
                f"batches of {size} from {origin.num_examples} examples. Give these numbers."
            )

    def _check_uses(self, declared: SamplingDeclaration, call: dict[str, Any]) -> None:
        """That the epochs to come keep to what the data set declares."""
        most, epochs = getattr(declared, "max_participations", None), self.params.get("epochs")
        if most is None or epochs is None:
            return
        passes = self._optimizer._dp.counter.passes.items()
        begun = sum(n for key, n in passes if key[0] == self._data_number and key[2] == declared.num_examples)
        each = declared.steps // declared.min_separation  # 1, or rounds of the groups
        uses = (begun + epochs - (call.get("initial_epoch") or 0)) * each
        if uses > most:
            raise PrivacyError(
                f"The data were declared with max_participations={most} uses of an example, but with these epochs "
                f"there are {uses}. Train for fewer, or declare more."
            )

    def _check_against(self, x: Any) -> None:
        """That what TensorFlow tells of a data set does not contradict what is said of it."""
        assert self.num_examples is not None and self.batch_size is not None
        shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(getattr(x, "element_spec", ()))]
        sizes = {shape[0] for shape in shapes if shape is not None and shape.rank} - {None}
        if self.sampling == "poisson" and sizes:
            raise PrivacyError(
                f"sampling='poisson', but all batches of the data set hold {min(sizes)} examples (its element_spec "
                "says so). Under Poisson sampling the size varies: use tfdpfl.data.poisson_batches, or say "
                "sampling='shuffle'."
            )
        if sizes - {self.batch_size}:
            raise PrivacyError(
                f"batch_size={self.batch_size}, but batches of the data set hold {min(sizes - {self.batch_size})} "
                "examples (its element_spec says so); give that number."
            )
        batches = int(x.cardinality()) if hasattr(x, "element_spec") and hasattr(x, "cardinality") else -1
        if self.sampling in ("poisson", "fixed_size") and 0 <= batches * self.batch_size < self.num_examples:
            raise PrivacyError(
                f"sampling={self.sampling!r} from num_examples={self.num_examples}, but the data set ends after "
                f"{batches} batches, {batches * self.batch_size} examples at batch_size={self.batch_size}, and begins "
                "anew with each epoch. Use tfdpfl.data.poisson_batches, which draws from all examples for every batch."
            )

    def _poisson(self, declared: SamplingDeclaration, call: dict[str, Any]) -> dict[str, Any]:
        if self.sampling not in (None, "poisson"):
            raise PrivacyError(f"sampling={self.sampling!r}, but the data are Poisson batches. Leave sampling out.")
        if self.num_examples not in (None, declared.num_examples):
            raise ValueError(
                f"num_examples={self.num_examples}, but the Poisson batches are drawn from {declared.num_examples} "
                "examples; give their number."
            )
        self._check_poisson()
        parts = self._optimizer._dp.parts
        if declared.physical_batches != parts:
            raise PrivacyError(
                f"{declared.physical_batches} batches of the data make one Poisson sample, but the optimizer makes an "
                f"update of {parts}: give it gradient_accumulation_steps={declared.physical_batches}, or draw the "
                "batches with another physical_batch_size."
            )
        if parts > 1 and (self.params.get("steps") or 0) % parts:
            raise PrivacyError(
                f"An epoch of {self.params['steps']} batches ends in the middle of a Poisson sample, which {parts} "
                "make: leave steps_per_epoch out, and give poisson_batches the number of samples as steps."
            )
        stream = call.get("steps_per_epoch")
        if parts > 1 and stream is not None:
            # Keras 3 takes a batch off a stream to build a model with, so that what follows is out of step.
            raise PrivacyError(
                f"steps_per_epoch={stream} reads the batches as one stream, in which it is not seen where the "
                f"{parts} of a Poisson sample begin: leave it out, and give poisson_batches the number of samples as "
                "steps."
            )
        # A whole batch size at or above the expected one: a higher rate costs no less.
        size = max(min(math.ceil(declared.expected_batch_size - 1e-9), declared.num_examples), 1)
        self._check_batch_size(size)
        has = getattr(self._optimizer, "rows_per_unit", None) or 1
        if has != declared.rows_per_unit:
            raise PrivacyError(
                f"In the batches {declared.rows_per_unit} rows are one {declared.unit}, and the optimizer clips "
                f"{'each row by itself' if has == 1 else f'{has} as one'}. Give it rows_per_unit="
                f"{declared.rows_per_unit}, or draw the batches with other copies or examples_per_user."
            )
        more: dict[str, Any] = {"unit": declared.unit} if declared.unit != "example" else {}
        if declared.truncated_batch_size is not None:
            more["truncated_batch_size"] = declared.truncated_batch_size
        return {"num_examples": declared.num_examples, "batch_size": size, "sampling": "poisson", **more}

    def _in_order(self, declared: SamplingDeclaration, call: dict[str, Any]) -> dict[str, Any]:
        """Of batches that hold each example once a pass; or once a round of passes, sampled."""
        if declared.kind == "cyclic_poisson":
            raise PrivacyError(
                "cyclic_poisson bounds how often an example takes part, for correlated noise, and the optimizer's is "
                "fresh for every step. Use tfdpfl.data.poisson_batches, which then costs less, or give the optimizer "
                "noise=."
            )
        if self.sampling not in (None, "shuffle"):
            raise PrivacyError(
                f"sampling={self.sampling!r}, but the batches hold each example once a pass. Leave sampling out."
            )
        n, size = declared.num_examples, round(declared.sampling_rate * declared.num_examples)
        if self.num_examples not in (None, n):
            raise ValueError(f"num_examples={self.num_examples}, but the batches hold {n} examples; give their number.")
        self._check_batch_size(size)
        self._check_groups(n, size, call)
        return {"num_examples": n, "batch_size": size, "sampling": "shuffle"}

    def _check_groups(self, length: int, batch: int, call: dict[str, Any]) -> None:
        groups = self._optimizer.num_microbatches
        if groups is not None and not call.get("steps_per_epoch") and length % batch % groups:
            raise PrivacyError(
                f"The last batch of an epoch has {length % batch} of the {length} examples, which num_microbatches="
                f"{groups} does not divide. Leave out examples (x[:{length - length % batch}]) or use "
                "num_microbatches=None."
            )

    def _check_bounded(self, declared: SamplingDeclaration | None, call: dict[str, Any]) -> None:
        """That the data bound how often an example takes part, and as correlated noise was made for."""
        noise, x = self._optimizer.noise, call.get("x")
        sampling = "shuffle" if _length(x) is not None else self.sampling if declared is None else declared.kind
        if sampling not in (None, "shuffle", "fixed_order", "cyclic_poisson"):
            raise PrivacyError(
                f"sampling={sampling!r} does not bound how often an example takes part, which {type(noise).__name__} "
                "noise is priced by. Give fit batches that do: tfdpfl.data.fixed_order or tfdpfl.data.cyclic_poisson; "
                "arrays that fit shuffles; or train with noise=None."
            )
        if sampling == "fixed_order" and declared is None and passed_through(x, ("shuffle", "repeat", "interleave")):
            raise PrivacyError(
                "sampling='fixed_order', but the data set shuffles, interleaves or repeats, so that an example's uses "
                "may lie nearer to each other. Use tfdpfl.data.fixed_order, or say sampling='shuffle'."
            )
        if sampling == "fixed_order" and declared is None and self.num_examples and self.batch_size:
            apart = self.num_examples // self.batch_size
        else:
            apart = getattr(declared, "min_separation", 1)
        if apart < noise.min_separation and sampling is not None:
            raise PrivacyError(
                f"{type(noise).__name__} noise was made for min_separation={noise.min_separation} steps from one use "
                f"of an example to its next, but the data ({sampling}) keep {apart}. Give fit "
                "tfdpfl.data.fixed_order(...) of as many batches, or noise of a smaller min_separation."
            )
        if sampling == "cyclic_poisson" and apart != noise.min_separation:
            raise PrivacyError(
                f"The batches come from {apart} groups in turns, but {type(noise).__name__} noise was made for "
                f"min_separation={noise.min_separation}. Give it the number of groups."
            )
        epochs = self.params.get("epochs")
        if sampling != "cyclic_poisson" and noise.max_participations is not None and epochs is not None:
            begun = sum(self._optimizer._dp.counter.passes.values())
            epochs -= call.get("initial_epoch") or 0
            if begun + epochs > noise.max_participations:
                raise PrivacyError(
                    f"{type(noise).__name__} noise was made for max_participations={noise.max_participations} uses of "
                    f"an example, but with these {epochs} epochs there are {begun + epochs}. Train for fewer, or make "
                    "the noise for more."
                )

    def _bounded(self, declared: SamplingDeclaration) -> dict[str, Any]:
        """What data say of themselves whose batches keep an example's uses apart."""
        if self.sampling not in (None, declared.kind):
            raise PrivacyError(f"sampling={self.sampling!r}, but the data say {declared.kind!r}. Leave sampling out.")
        if self.num_examples not in (None, declared.num_examples):
            raise ValueError(f"num_examples={self.num_examples}, but the data hold {declared.num_examples}.")
        if declared.kind == "cyclic_poisson":
            self._check_poisson()
        size = max(min(math.ceil(declared.expected_batch_size - 1e-9), declared.num_examples), 1)
        self._check_batch_size(size)
        return {"num_examples": declared.num_examples, "batch_size": size, "sampling": declared.kind}

    def _check_batch_size(self, size: int) -> None:
        if self.batch_size not in (None, size):
            raise ValueError(f"batch_size={self.batch_size}, but the data come in batches of {size}; leave it out.")

    def _check_poisson(self) -> None:
        if self._optimizer.expected_batch_size is None:
            raise PrivacyError(
                "Under Poisson sampling the size of a batch is private, but the optimizer divides by it. Give the "
                "optimizer expected_batch_size=sampling_rate * num_examples."
            )
        if self._optimizer.num_microbatches is not None:
            raise PrivacyError(
                "Under Poisson sampling one example more regroups the microbatches of all that follow it, which has no "
                "price. Use num_microbatches=None."
            )


class AveragedWeights(tf.keras.callbacks.Callback):
    """Averages a model's weights over the updates of a training, and leaves it with the averages.

        model.fit(x, y, validation_data=validation, callbacks=[budget, tfdpfl.callbacks.AveragedWeights(decay=0.999)])

    Noise that each step adds is averaged out of the weights, so that a privately trained model is often better for it
    (De et al. 2022, arXiv:2204.13650, section 3). It costs no privacy: what is averaged is private already. Validation
    within `fit` sees the averages; training goes on from the weights themselves.

    Args:
      decay: how much of the average stays at each update, 0 < decay < 1. Of the first updates less stays:
        ``min(decay, (1 + t) / (10 + t))`` at update t.

    Attributes:
      averages: the weights that are trained, averaged, as arrays. Another `fit` with the same callback goes on with
        them.

    Raises:
      ValueError: a decay out of its range.
    """

    def __init__(self, decay: float = 0.999):
        super().__init__()
        self.decay = _checks.probability("decay", decay, "0.999 is usual; more for longer trainings")
        self.averages: list[np.ndarray] = []
        self._updates = self._seen = 0
        self._trained: list[np.ndarray] = []  # while the averages are in their place

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._seen = self._iterations()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        now = self._iterations()
        if now == self._seen:  # a logical batch goes on
            return
        self._updates, self._seen = self._updates + now - self._seen, now
        stays = np.float32(min(self.decay, (1 + self._updates) / (10 + self._updates)))
        weights = self._weights()
        if len(weights) != len(self.averages):
            self.averages = [w.copy() for w in weights]
        self.averages = [stays * a + (1 - stays) * w for a, w in zip(self.averages, weights, strict=True)]

    def on_test_begin(self, logs: dict | None = None) -> None:
        if self.averages and self.model in _running_fits():
            self._trained = self._weights()
            self._put(self.averages)

    def on_test_end(self, logs: dict | None = None) -> None:
        if self._trained:
            self._put(self._trained)
            self._trained = []

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.averages:
            self._put(self.averages)
            if self.model in _LEFT:  # they are what private steps left
                steps, left = _LEFT[self.model]
                _LEFT[self.model] = steps, left | {_fingerprint(self.model)}

    def _iterations(self) -> int:
        return int(np.asarray(self.model.optimizer.iterations))

    def _weights(self) -> list[np.ndarray]:
        return [np.array(v) for v in self.model.trainable_weights]

    def _put(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self.model.trainable_weights, values, strict=True):
            variable.assign(value.astype(variable.dtype if isinstance(variable.dtype, str) else variable.dtype.name))


class _Fit:
    """One call of `fit`.

    Attributes:
      data: num_examples, batch_size (of a logical batch) and sampling, and what of adjacency, unit and truncation is
        not as usual.
      batches: the same as the optimizer counts it.
      physical: size of the batches that come in.
      parts: how many of them make a logical batch, and an update.
      uses: how often one logical batch may hold an example.
      stride: batches of an execution.
      whole: whether a pass may end with a smaller batch, after which the next one begins a batch of its own.
      passes: passes over the data that were begun.
      counts_passes: whether no other callback of the same call does.
      announced: batches that the optimizer was told of.
      awaited: whether a batch was announced that has not ended.
      seen: batches of this epoch that have ended.
      first: the number of its first. Keras 2 goes on with a number from a backup, and with data from their beginning.
    """

    def __init__(
        self, model: Any, optimizer: Any, data: dict[str, Any], data_number: float, stride: int, call: dict[str, Any],
        steps: int | None,
    ):  # fmt: skip
        self.model, self.optimizer, self.data, self.stride = model, optimizer, data, stride
        self.parts, self.physical = optimizer._dp.parts, data["batch_size"]
        self._counter = optimizer._dp.counter
        self.whole = call.get("steps_per_epoch") is None and passed_through(call.get("x"), ("repeat",)) is None
        self.whole |= _length(call.get("x")) is not None
        self._order = float(getattr(declared_sampling(call.get("x")), "order", 0) or 1)  # 1: as the caller says
        self.passes = self.announced = self._steps_before = self._pending = self._pass = self.seen = 0
        self._ended, self.awaited, self.counts_passes = False, False, True
        self.first: int | None = None
        self.uses = self._uses(steps) if self.shuffled else 1
        if self.shuffled:
            self.data = {**data, "batch_size": min(self.parts * self.physical, data["num_examples"])}
        adjacency = data.get("adjacency", ADJACENCIES_OF.get(data["sampling"], (None,))[0])
        sampling = next(
            i for i, (kind, of, unit) in enumerate(_counts.SAMPLINGS)
            if i and (kind, unit) == (data["sampling"], data.get("unit", "example")) and adjacency in (None, of)
        )  # fmt: skip
        if self.uses > 1:
            sampling = _counts.ACROSS_PASSES
        cut = data.get("truncated_batch_size") or 0
        self.batches = (data_number, sampling, data["num_examples"], self.data["batch_size"], cut)

    def _uses(self, steps: int | None) -> int:
        """In how many passes a logical batch may lie."""
        n, b = self.data["num_examples"], self.physical
        self._pass = pass_ = max(min(n // b, steps or n // b), 1)
        if not self.whole:
            return 1 if self.parts == 1 and n % b == 0 else 1 + math.ceil((self.parts * b - 1) / n)
        if self.parts == 1 or (steps and steps % self.parts == 0 and self.passes_in(steps) == 1):
            return 1
        return 1 + math.ceil((self.parts - 1) / pass_)

    def begin(self) -> None:
        chain = self.optimizer._dp.chain
        if chain is not None:
            chain.begin_data(self.batches[1], self._order)
        self._counter.settle(self.optimizer._dp_ledger)
        self._steps_before = self._counter.steps
        # A logical batch goes on where it may lie in several passes, all of it was drawn as what comes, and they were
        # whole.
        goes_on = self.uses > 1 and self.optimizer._dp.whole_pass
        self.optimizer._dp.drop_partial(unless=self.batches if goes_on else None)
        self._pending = int(self.optimizer._dp.pending)

    @property
    def shuffled(self) -> bool:
        return self.data["sampling"] == "shuffle"

    def passes_in(self, steps: int) -> int:
        """How many passes over the data so many steps in a row begin."""
        n, b = self.data["num_examples"], self.physical
        if not self.whole:  # batches may go across the border of two passes
            return math.ceil(steps * b / n)
        return 1 if steps <= math.ceil(n / b) else math.ceil(steps / max(n // b, 1))

    def begin_passes(self, number: int) -> None:
        """Counted for the optimizer, of which another fit may count some, too."""
        if number <= 0:
            return
        self.passes += number
        chain = self.optimizer._dp.chain
        if chain is not None:
            chain.begin_pass(self.batches[1])
        if self.counts_passes:
            self._counter.passes[self.batches] = self._counter.passes.get(self.batches, 0) + number * self.uses

    def steps_in(self, batches: int) -> int:
        """How many steps the first so many batches of the fit make."""
        return (self._pending + batches) // self.parts

    def steps_next(self) -> int:
        """How many steps the next execution makes, or makes a beginning of."""
        return max(self.steps_in(self.announced + self.stride) - self.steps_in(self.announced), 1)

    def announce(self, batch: int, batches: int) -> None:
        """Tells the optimizer of the next execution's batches, of which the first is number ``batch`` of the epoch."""
        self.announced, self.awaited, self.optimizer._dp.whole_pass = self.announced + batches, True, False
        parts = self.parts if self.parts > 1 and self.uses == 1 else 0
        self._counter.announce(self.batches, batches, (batch - (self.first or 0)) % self.parts, parts)

    def check_pass(self) -> None:
        """That an epoch that has ended was as long as the price of logical batches takes passes to be."""
        short = self.uses > 1 and self.seen < self._pass
        self.optimizer._dp.whole_pass = self.whole and not short
        if short and self.whole and not self.model.stop_training:
            self.optimizer._dp.drop_partial()
            if self.first:
                return
            raise PrivacyError(
                f"num_examples={self.data['num_examples']} in batches of {self.physical} make {self._pass} a pass, but "
                f"the data ended after {self.seen} batches, so that a logical batch of {self.parts} may hold an "
                "example more often than is priced. Give PrivacyBudget the number of examples that the data have."
            )

    def silence(self) -> None:
        """Nothing is known of steps from here on."""
        self._counter.announce(self.batches, 0)

    def end(self) -> None:
        """The fit is over, and was not interrupted."""
        if not self._ended:
            self._ended = True
            self.silence()

    def cut_off(self) -> None:
        """The fit is over, and may have been interrupted.

        Other steps may have been taken for a batch that was announced and of which no end was seen. As many are counted
        once more, as steps of which nothing is known. (Nothing ends the announcement at the moment of the interruption:
        what Python calls when it frees a fit may come while TensorFlow builds a graph, and must not build ops.)
        """
        taken = self.stride - int(self._counter.batches.numpy()[-1])
        if not self._ended and self.awaited and taken > 0:
            # They may have come into a logical batch, with examples of other parts.
            self.optimizer._dp.drop_partial()
            halved = self.optimizer.num_microbatches is not None
            multiplier = self.optimizer._dp.least_noise / self.parts / (2 if halved else 1)
            kind = _counts.UNKNOWN + (_counts.DISCRETE if self._counter.discrete else 0)
            row = [_counts.new_origin(), 0, kind, 0, 0, 0, multiplier, taken, 0]
            self._counter.meet(np.array([row]), self.optimizer._dp_ledger)
        self.end()

    @property
    def steps(self) -> int:
        """What the optimizer has taken since the fit began."""
        return self._counter.steps - self._steps_before


# By model: how many private steps it had seen in this process when an epoch last ended, and the fingerprints of the
# weights at all those ends (which EarlyStopping may go back to).
_LEFT: weakref.WeakKeyDictionary[Any, tuple[int, set[int]]] = weakref.WeakKeyDictionary()


def _stepping(model: Any) -> dict[int, Any]:
    """The mechanisms that stepped on a model's weights, by id."""
    found: dict[int, Any] = {}
    for v in _weights(model):
        found |= stepped_on(v)
    return found


def _weights(model: Any) -> list[Any]:
    """A model's weights; of one that Keras 2 has not built yet, those of its layers that are."""
    try:
        return list(model.weights)
    except ValueError:
        return [v for layer in model.layers for v in _weights(layer)]


def _steps_on(model: Any) -> int:
    return sum(dp.counter.steps for dp in _stepping(model).values())


def _fingerprint(model: Any) -> int:
    """A number that tells weights apart, whichever of them are trainable."""
    return sum(zlib.crc32(np.asarray(v).reshape(-1).view(np.uint8).data) for v in _weights(model))


def private_optimizer(model: Any) -> Any:
    """The DP optimizer that a compiled `model` trains with, out of its loss-scaling wrapper if there is one.

    Raises:
      PrivacyError: it trains with another, or holds a second DP optimizer.
    """
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(optimizer, DPOptimizer):
        raise PrivacyError(
            f"PrivacyBudget prices DP optimizers, but the model trains with {type(optimizer).__name__}. Compile it "
            "with tfdpfl.DPAdam(l2_norm_clip=..., noise_multiplier=...) or another of tfdpfl's."
        )
    others = [name for name, value in vars(model).items() if isinstance(value, DPOptimizer) and value is not optimizer]
    if others:
        raise PrivacyError(
            f"The model holds a second DP optimizer, {others[0]!r}, whose steps PrivacyBudget does not see. Price them "
            "together with PrivacyLedger.add and each optimizer's ledger, without PrivacyBudget."
        )
    return optimizer


def _running_fits() -> list[Any]:
    """The models whose `fit` is running, the innermost first."""
    return [given.get("self") for given in running_fits()]


def _fit_arguments(model: Any) -> dict[str, Any]:
    """The arguments of the `fit` call that is running: Keras does not tell callbacks what data it trains on."""
    return next((dict(given) for given in running_fits() if given.get("self") is model), {})


def _length(x: Any) -> int | None:
    """Number of examples in arrays as `fit` takes them, or None for anything else."""
    leaves = tf.nest.flatten(x) if isinstance(x, (dict, list, tuple)) else [x]
    if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "__len__") and len(leaf.shape) for leaf in leaves):
        return int(leaves[0].shape[0])
    return None
