"""A Keras callback that prices the training while it runs, and ends it before the budget is passed."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
import warnings
from collections import Counter
from typing import Any

import tensorflow as tf

from tfdpfl._frames import callers
from tfdpfl.accounting import PrivacyLedger, PrivacyReport, _checks, compute_num_steps
from tfdpfl.accounting.calibration import MOST_STEPS
from tfdpfl.accounting.pricing import ACCOUNTANTS, check_delta
from tfdpfl.accounting.run import ADJACENCIES_OF, SAMPLINGS
from tfdpfl.clipping.models import saved_weights
from tfdpfl.data import SamplingDeclaration, declared_sampling, made_from
from tfdpfl.errors import PrivacyError


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Writes ``epsilon`` into the logs of every epoch, and stops training before ``target_epsilon`` is passed.

        model.fit(x, y, callbacks=[tfdpfl.callbacks.PrivacyBudget(num_examples=len(x), delta=1e-5)])

    What is priced is what ran: the steps and noise multipliers that the optimizer counted (restarts included), under
    the sampling that the data source declares. Batches of `tfdpfl.data.poisson_batches` are Poisson samples; arrays
    given to `fit` are shuffled, each example used once an epoch, and priced without amplification; for other data
    sets and generators say ``sampling`` and ``batch_size``.

    One callback serves one data set: every `fit` it sees adds to its ε, also with another optimizer or sampling. Steps
    between or after them that it did not see (`train_on_batch`, a `fit` without it, several updates on one batch) are
    priced as if every example took part in each. Of steps that the optimizer took before its first `fit` (a resumed
    training) it knows no more than their number and noise: they are priced as if sampled as in that `fit`, with a
    warning, unless ``ledger`` has them.

    Args:
      num_examples: size of the training data; None takes it from the data. The size counts as public.
      delta: δ of the reported ε, 0 < δ < 1; below 1 / num_examples to mean anything.
      target_epsilon: the ε not to pass, or None.
      sampling: "poisson", "shuffle", "fixed_size" or "none", for data that do not say themselves.
      batch_size: (expected) batch size, likewise.
      accountant: "pld" or "rdp".
      ledger: what ran before on the same data: the `ledger` of the callback that saw it.

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
        self.sampling = None if sampling is None else _checks.choice("sampling", sampling, SAMPLINGS)
        if batch_size is not None:
            batch_size = _checks.whole("batch_size", batch_size, 1, "count the examples of a batch, or leave it out")
            if num_examples is not None and batch_size > num_examples:
                raise ValueError(f"batch_size={batch_size} is more than num_examples={num_examples}: one is off.")
        self.batch_size = batch_size
        self.accountant = _checks.choice("accountant", accountant, ACCOUNTANTS)
        if ledger is not None and not isinstance(ledger, PrivacyLedger):
            raise ValueError(f"ledger={ledger!r:.99} must be a PrivacyLedger: PrivacyLedger.from_dict makes one.")
        self._given = PrivacyLedger() if ledger is None else ledger
        self._fits: list[_Fit] = []

    # -- Keras's hooks ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._optimizer = private_optimizer(self.model)
        for earlier in self._fits:
            earlier.ends()  # an interrupted one has not ended
        # Keras 3 has the number itself, Keras 2 a variable under another name.
        held = getattr(self.model, "steps_per_execution", None) or getattr(self.model, "_steps_per_execution", None)
        per_call = 1 if held is None else held.numpy() if hasattr(held, "numpy") else held
        self._begin(self._describe(_fit_arguments(self.model)), int(per_call))

    def _begin(self, data: dict[str, Any], stride: int) -> None:
        """A fit that starts from the optimizer's state as it is now."""
        optimizer = self._optimizer
        fit = _Fit(optimizer, data, stride)
        known = [earlier for earlier in self._fits if earlier.optimizer is optimizer]
        if known:
            fit.unseen = known[-1].since()
        elif sum(fit.start.values()) > self._given.steps:
            fit.before = fit.start
            warnings.warn(
                f"PrivacyBudget did not see the {sum(fit.start.values())} steps that the optimizer has taken before "
                f"and prices them as if sampled like this fit's ({data['sampling']}, batch_size={data['batch_size']}). "
                "If they were not, give it ledger= of the callback that saw them.",
                stacklevel=3,
            )
        self._fits.append(fit)
        steps = self.params.get("steps")
        self._passes_per_epoch = fit.passes_in(steps) if steps else None
        try:
            self._limit = self._allowed()
            if self._is_full(0):
                raise PrivacyError(
                    f"target_epsilon={self.target_epsilon:g} at delta={self.delta:g} leaves no room for another "
                    f"{'epoch' if data['sampling'] == 'shuffle' else 'step'}. Raise noise_multiplier "
                    f"(tfdpfl.compute_noise_multiplier(..., sampling={data['sampling']!r}) finds the smallest one that "
                    "does) or the target."
                )
        except PrivacyError:
            self._fits.pop()
            raise

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        fit = self._fits[-1]
        if not fit.passes and fit.steps:  # a callback that came after this one has loaded a state
            self._begin(self._fits.pop().data, fit.stride)
            fit = self._fits[-1]
        self._epoch = epoch
        self._steps_before_epoch = fit.steps
        self._passes_here = self._passes_per_epoch or 1
        fit.passes += self._passes_here

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._fits[-1].announced += self._fits[-1].stride

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        fit = self._fits[-1]
        if fit.announced <= 2 * fit.stride:  # by now the step is whole, and the next one has not begun
            self._optimizer._dp.check_finished(saved_weights(self.model))
        grows = self._passes_per_epoch is None and fit.shuffled  # how long an epoch is turns out as it runs
        if self._limit is None and not grows:
            return
        steps = fit.steps
        if grows:
            passes = fit.passes_in(min(batch + 1, steps - self._steps_before_epoch))
            fit.passes += max(passes - self._passes_here, 0)
            self._passes_here = max(passes, self._passes_here)
        if self._limit is not None and steps > fit.announced:
            raise PrivacyError(
                f"The model took {steps} steps on {fit.announced} batches, so target_epsilon="
                f"{self.target_epsilon:g} cannot be held: only one update on a batch has a price that is known before. "
                "Make one update a batch in train_step, or train without target_epsilon."
            )
        if self._is_full(steps, batch + 1):
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["epsilon"] = self.report.epsilon
        if self._is_full(self._fits[-1].steps):
            self._stop()

    def _stop(self) -> None:
        planned = self.params.get("epochs")
        if self.params.get("verbose") and not self.model.stop_training and planned != self._epoch + 1:
            print(f"\nPrivacyBudget stops the training in epoch {self._epoch + 1}, before target_epsilon is passed.")
        self.model.stop_training = True

    def on_train_end(self, logs: dict | None = None) -> None:
        self._fits[-1].ends()

    # -- prices ----------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> PrivacyLedger:
        """All that ran on the data, this far."""
        ledger = copy.deepcopy(self._given)
        for fit in self._fits:
            fit.record(ledger)
        latest = {id(fit.optimizer): fit for fit in self._fits}
        for fit in latest.values():
            fit.record_without_sampling(ledger, fit.since())
        return ledger

    @property
    def report(self) -> PrivacyReport:
        """The price of all that ran on the data, this far.

        Raises:
          PrivacyError: the callback was given to no `fit`, so that it does not know what ran.
        """
        if not self._fits and not len(self._given):
            raise PrivacyError("PrivacyBudget saw no training. Give it to fit: model.fit(..., callbacks=[budget]).")
        report = self.ledger.report(self.delta, self.accountant)
        supposed = sum(sum(fit.before.values()) for fit in self._fits)
        if supposed:
            note = f"{supposed} steps ran unseen before, and are taken to have been sampled like those after them."
            report = dataclasses.replace(report, notes=(note, *report.notes))
        return report

    def _allowed(self) -> int | None:
        """How many steps (passes, if shuffled) of this fit the target allows."""
        fit, past = self._fits[-1], self.ledger
        halved = self._optimizer.num_microbatches not in (None, fit.data["batch_size"])
        multiplier = self._optimizer.noise_multiplier / (2 if halved else 1)  # over the sensitivity to one example

        def priced(number: int) -> float:
            ledger = copy.deepcopy(past)
            more: dict[str, Any] = {"epochs" if fit.shuffled else "steps": number}
            ledger.record(multiplier, **more, **fit.data)
            return ledger.epsilon(self.delta, self.accountant)

        if self.target_epsilon is None:
            if len(past):
                priced(1)  # what cannot be added up is refused now
            return None
        planned = self._planned()
        if priced(planned) <= self.target_epsilon:  # the search for the last step that fits may take a minute
            return planned
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
            most //= max(fit.data["num_examples"] // fit.data["batch_size"], 1)
        if not len(past):
            return most
        return bisect.bisect_right(range(1, most + 1), self.target_epsilon, key=priced)

    def _planned(self) -> int:
        """How many steps (passes, if shuffled) Keras says it will take, and an execution (epoch) more; where it does
        not say, more than any training takes."""
        epochs, fit = self.params.get("epochs"), self._fits[-1]
        if not epochs or not self.params.get("steps"):
            return MOST_STEPS
        return (epochs + 1) * self._passes_per_epoch if fit.shuffled else epochs * self.params["steps"] + fit.stride

    def _is_full(self, steps: int, steps_of_epoch: int | None = None) -> bool:
        """Whether after so many steps of the fit the next one passes the target; if shuffled the next epoch, or pass
        within the epoch."""
        if self._limit is None:
            return False
        fit = self._fits[-1]
        if not fit.shuffled:
            return steps + fit.stride > self._limit
        if steps_of_epoch is None:
            return fit.passes + (self._passes_per_epoch or 1) > self._limit
        more = fit.passes_in(steps_of_epoch + fit.stride) - self._passes_here
        return self._passes_per_epoch is None and fit.passes + more > self._limit

    # -- the data --------------------------------------------------------------------------------------------

    def _describe(self, call: dict[str, Any]) -> dict[str, Any]:
        """num_examples, batch_size and sampling of the data that `fit` was given."""
        x = call.get("x")
        declared = declared_sampling(x)
        if declared is not None:
            return self._poisson(declared)
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
            groups = self._optimizer.num_microbatches
            if groups is not None and not call.get("steps_per_epoch") and length % batch % groups:
                raise PrivacyError(
                    f"The last batch of an epoch has {length % batch} of the {length} examples, which num_microbatches="
                    f"{groups} does not divide. Leave out examples (x[:{length - length % batch}]) or use "
                    "num_microbatches=None."
                )
            return {"num_examples": length, "batch_size": batch, "sampling": "shuffle"}
        if made_from(x) is not None and self.sampling != "poisson":
            raise PrivacyError(
                f"A {type(x).__name__} was made from Poisson batches, and what that does to their sampling is not "
                "known. Pass tfdpfl.data.poisson_batches(...) itself to fit (it prefetches) and change the data before "
                "it; or, if each batch keeps its examples, give PrivacyBudget sampling='poisson', num_examples and "
                "batch_size (the expected one)."
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
        data = {"num_examples": self.num_examples, "batch_size": self.batch_size, "sampling": self.sampling}
        if self.sampling == "none" and self._optimizer.expected_batch_size is None:
            data["adjacency"] = "zero_out"  # one example more changes what the sum is divided by
        return data

    def _poisson(self, declared: SamplingDeclaration) -> dict[str, Any]:
        if self.sampling not in (None, "poisson"):
            raise PrivacyError(f"sampling={self.sampling!r}, but the data are Poisson batches. Leave sampling out.")
        if self.num_examples not in (None, declared.num_examples):
            raise ValueError(
                f"num_examples={self.num_examples}, but the Poisson batches are drawn from {declared.num_examples} "
                "examples; give their number."
            )
        self._check_poisson()
        # A whole batch size at or above the expected one: a higher rate costs no less.
        size = max(min(math.ceil(declared.expected_batch_size - 1e-9), declared.num_examples), 1)
        self._check_batch_size(size)
        return {"num_examples": declared.num_examples, "batch_size": size, "sampling": "poisson"}

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


class _Fit:
    """What one call of `fit` did.

    Attributes:
      optimizer: kept, so that steps it takes after the fit are counted when its model is gone.
      data: num_examples, batch_size and sampling, and the adjacency where it is not the sampling's own.
      stride: steps of an execution.
      start, end: what the optimizer had executed then, steps by noise multiplier; the end is None while it runs.
      before: what it had executed earlier, of which no more is known, if it has to be priced here.
      unseen: what it executed since the last fit that the callback saw.
      passes: passes over the data that were begun.
      announced: the steps that Keras announced.
    """

    def __init__(self, optimizer: Any, data: dict[str, Any], stride: int):
        self.optimizer, self.data, self.stride = optimizer, data, stride
        self.start: Counter[float] = self.now()
        self.end: Counter[float] | None = None
        self.before: Counter[float] = Counter()
        self.unseen: Counter[float] = Counter()
        self.passes = self.announced = 0

    @property
    def shuffled(self) -> bool:
        return self.data["sampling"] == "shuffle"

    def passes_in(self, steps: int) -> int:
        """How many passes over the data so many steps in a row begin; the last step of a pass may be partial."""
        n, b = self.data["num_examples"], self.data["batch_size"]
        return 1 if steps <= math.ceil(n / b) else math.ceil(steps / max(n // b, 1))

    def now(self) -> Counter[float]:
        return Counter(dict(self.optimizer.executed))

    def ends(self) -> None:
        if self.end is None:
            self.end = self.now()

    def since(self) -> Counter[float]:
        """What the optimizer executed after the end."""
        return self.now() - self.end if self.end is not None else Counter()

    def ran(self) -> Counter[float]:
        return (self.now() if self.end is None else self.end) - self.start

    @property
    def steps(self) -> int:
        return sum(self.ran().values())

    def record(self, ledger: PrivacyLedger) -> None:
        for z, steps in self.before.items():
            ledger.record(z, steps, **self.data, new_pass=True)
        self.record_without_sampling(ledger, self.unseen)
        ran = self.ran()
        beyond = max(sum(ran.values()) - self.announced, 0)  # steps that had no batch of their own
        for z in sorted(ran):  # which ones is not known: those of the least noise cost most
            steps = min(ran[z], beyond)
            beyond -= steps
            self.record_without_sampling(ledger, {z: steps})
            ran[z] -= steps
            if not self.shuffled:
                ledger.record(z, ran[z], **self.data)
        if self.shuffled and ran:
            steps = sum(ran.values())
            per_pass = math.ceil(self.data["num_examples"] / self.data["batch_size"])
            ledger.record(min(ran), steps, epochs=max(self.passes, math.ceil(steps / per_pass)), **self.data)

    def record_without_sampling(self, ledger: PrivacyLedger, steps: dict[float, int]) -> None:
        """Every example takes part in each of these."""
        for z, number in steps.items():
            data = {"adjacency": ADJACENCIES_OF[self.data["sampling"]][0], **self.data, "sampling": "none"}
            ledger.record(z, number, **data)


def private_optimizer(model: Any) -> Any:
    """The DP optimizer that a compiled model trains with, out of its loss-scaling wrapper if there is one."""
    from tfdpfl.optimizers import DPOptimizer

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


def _fit_arguments(model: Any) -> dict[str, Any]:
    """The arguments of the `fit` call that is running: Keras does not tell callbacks what data it trains on."""
    fits = (frame.f_locals for frame in callers() if frame.f_code.co_name == "fit")
    return next((dict(given) for given in fits if given.get("self") is model), {})


def _length(x: Any) -> int | None:
    """Number of examples in arrays as `fit` takes them, or None for anything else."""
    leaves = tf.nest.flatten(x) if isinstance(x, (dict, list, tuple)) else [x]
    if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "__len__") and len(leaf.shape) for leaf in leaves):
        return int(leaves[0].shape[0])
    return None
