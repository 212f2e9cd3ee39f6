"""`plan` computes noise, batches, optimizer, callback and statement that fit each other, from data and a target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import tensorflow as tf

from tfdpfl import clips
from tfdpfl._frames import PLAN, callbacks_of
from tfdpfl._names import accept_old_names, unexpected
from tfdpfl._types import Arrays, Estimator, Keywords, Nest, Optimizer
from tfdpfl.accounting import (
    PrivacyLedger,
    PrivacyReport,
    _checks,
    compute_batch_size,
    compute_epsilon,
    compute_noise_multiplier,
    compute_num_steps,
    privacy_report,
)
from tfdpfl.accounting.calibration import smallest_noise_multiplier
from tfdpfl.accounting.ledger import check_ledger
from tfdpfl.accounting.promises import PLANNED, Promise
from tfdpfl.accounting.sampling import B_MIN_SEP, POISSON, RANDOM_ALLOCATION, SCHEMES
from tfdpfl.data import declared_sampling, examples_of, users_of
from tfdpfl.data.batches import PLANNED as BATCHES
from tfdpfl.data.declared import notes_of
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from tfdpfl.accounting.correlated import CorrelatedRun
    from tfdpfl.callbacks import PrivacyBudget, PrivateMetrics
    from tfdpfl.noise import Noise

__all__ = ["PrivacyPlan", "plan"]

Number: TypeAlias = Any  # None until it is found
Clip: TypeAlias = Any  # what an optimizer accepts as l2_norm_clip

BEST = "best"  # of the samplings that have the neighbours of Poisson batches

_BATCH_ARGUMENTS = {name for function, _ in BATCHES.values() for name in inspect.signature(function).parameters}

# What an optimizer has where it is not told otherwise.
_DEFAULTS = {
    "expected_batch_size": None, "num_microbatches": None, "gradient_accumulation_steps": 1, "rows_per_unit": 1,
    "secure_noise": False, "noise": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PrivacyPlan:
    """Holds a planned private training; `tfdpfl.plan` makes it.

    Its pieces know each other. If one is used without the others, or with those of another plan, training is refused
    before the first update. (An optimizer of a loaded model counts as the plan's if its settings are.)

    Attributes:
        target_epsilon: the ε that training stops before.
        delta: δ.
        noise_multiplier: σ.
        batch_size: the expected number of examples in a batch.
        epochs, steps_per_epoch: how long to train.
        num_examples: size of the data.
        l2_norm_clip, sampling, accountant, secure_noise: as they were given.
        noise: the `Banded` noise of the optimizer, or None for fresh noise.
        metrics: the `PrivateMetrics` whose releases ε covers, too, or None.
        max_examples_per_user: how many examples neighbours may differ in.
        ledger: the `PrivacyLedger` of what was spent before, which ε covers, too, or None.
        batches: the data set for `fit`.
    """

    target_epsilon: float
    delta: float
    noise_multiplier: float
    batch_size: int
    epochs: int
    steps_per_epoch: int
    num_examples: int
    l2_norm_clip: Clip
    sampling: str
    accountant: str
    secure_noise: bool = False
    noise: Noise | None = None
    metrics: PrivateMetrics | None = None
    ledger: PrivacyLedger | None = None
    max_examples_per_user: int = 1
    batches: Arrays = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        setattr(self.batches, PLAN, self)

    @functools.cached_property
    def callback(self) -> PrivacyBudget:
        """Returns the `PrivacyBudget` for `fit`, which writes ε into the logs and stops before ``target_epsilon``.

        Its `report` states what really ran.
        """
        from tfdpfl.callbacks import PrivacyBudget

        budget = PrivacyBudget(
            self.num_examples, self.delta, self.target_epsilon, accountant=self.accountant, ledger=self.ledger,
            max_examples_per_user=self.max_examples_per_user,
        )  # fmt: skip
        setattr(budget, PLAN, self)
        return budget

    @property
    def callbacks(self) -> list[PrivateMetrics | PrivacyBudget]:
        """Returns the callbacks for `fit`: `metrics`, if there are any, and `callback`."""
        return [self.callback] if self.metrics is None else [self.metrics, self.callback]

    def optimizer(self, optimizer: str | type = "adam", **kwargs: object) -> Optimizer:
        """Returns a DP optimizer for `compile`, with the clip, the noise and the denominator of this plan.

        Args:
          optimizer: a Keras optimizer's name ("adam", "sgd", ...) or class, or one of tfdpfl's.
          **kwargs: that optimizer's arguments, such as ``learning_rate``.

        Raises:
          ValueError: an argument is the plan's to decide, or there is no such optimizer.
        """
        from tfdpfl.optimizers import make_dp_optimizer_class

        decided = self._settings
        same = {"secure_noise"} if kwargs.get("secure_noise") == self.secure_noise else set()
        taken = sorted((decided.keys() & kwargs.keys()) - same)
        if taken:
            raise ValueError(
                f"{taken[0]}={kwargs[taken[0]]!r} is decided by the plan ({decided[taken[0]]!r}), so that all its "
                "parts agree. Leave it out, or make another plan with it."
            )
        if isinstance(optimizer, str):
            optimizer = type(tf.keras.optimizers.get(optimizer))
        elif not inspect.isclass(optimizer):
            raise ValueError(
                f"optimizer={optimizer!r:.99} must be a name or a class; give its arguments beside it: "
                'plan.optimizer("adam", learning_rate=1e-3).'
            )
        made = make_dp_optimizer_class(optimizer)(**{**decided, **kwargs})
        setattr(made, PLAN, self)
        return made

    @property
    def _settings(self) -> Keywords:
        """What the plan decides of an optimizer, beside what it leaves as it is."""
        declared = declared_sampling(self.batches)
        assert declared is not None
        settings: Keywords = {
            "l2_norm_clip": self.l2_norm_clip, "noise_multiplier": self.noise_multiplier,
            "secure_noise": self.secure_noise, "noise": self.noise,
        }  # fmt: skip
        if SCHEMES[self.sampling].independent:
            settings["expected_batch_size"] = float(self.batch_size)
        if declared.physical_batches > 1:
            settings["gradient_accumulation_steps"] = declared.physical_batches
        if declared.rows_per_unit > 1:
            settings["rows_per_unit"] = declared.rows_per_unit
        return settings

    def promises(self, delta: float) -> list[Promise]:
        """Returns what the plan guarantees, of which nothing has run; see `tfdpfl.accounting.promises`."""
        promise = self.report().promise("plan")
        return [dataclasses.replace(promise, warnings=[*promise.warnings, PLANNED])]

    def report(self) -> PrivacyReport:
        """Returns the report of the whole plan. (``callback.report()`` is the report of what ran.)"""
        declared = declared_sampling(self.batches)
        assert declared is not None
        notes = notes_of(self.batches)
        if self.noise is not None:
            steps = self.epochs * self.steps_per_epoch
            rate = declared.sampling_rate
            banded = _banded_run(self.noise, self.noise_multiplier, steps, rate, self.sampling, declared.unit)
            made = _ledger(banded, self.num_examples, self.ledger, self.metrics, self.epochs)
            return made.report(self.delta, self.accountant, notes, self.max_examples_per_user)
        run: Keywords = {
            "num_examples": self.num_examples, "batch_size": self.batch_size, "noise_multiplier": self.noise_multiplier,
            "sampling": self.sampling, "truncated_batch_size": declared.truncated_batch_size, "unit": declared.unit,
            "secure_noise": self.secure_noise, "max_examples_per_user": self.max_examples_per_user,
            **_length(self.sampling, self.epochs, self.steps_per_epoch, declared.num_selected),
        }  # fmt: skip
        if self.metrics is None and self.ledger is None:
            report = privacy_report(delta=self.delta, accountant=self.accountant, **run)
            return dataclasses.replace(report, notes=(*report.notes, *notes))
        made = _ledger(run, self.num_examples, self.ledger, self.metrics, self.epochs)
        return made.report(self.delta, self.accountant, notes, self.max_examples_per_user)

    @property
    def epsilon(self) -> float:
        """Returns the ε of the whole plan, at most ``target_epsilon``."""
        return self.report().epsilon

    def statement(self) -> str:
        """Returns the guarantee of the whole plan, in English."""
        return self.report().statement()

    def check(self, optimizer: Optimizer, fit: Mapping[str, Estimator]) -> None:
        """That a call of `fit` trains with this plan's pieces; its pieces ask. ``fit`` has the call's arguments.

        Raises:
          PrivacyError: a piece is another's, or missing.
        """
        data = fit.get("x")
        if data is not self.batches:
            what = "the batches of another plan" if hasattr(data, PLAN) else f"an object of type {type(data).__name__}"
            raise PrivacyError(
                f"fit was given {what}, not the batches that the noise was planned for. Give it plan.batches; for "
                "other data make another plan."
            )
        if not any(getattr(callback, PLAN, None) is self for callback in callbacks_of(fit)):
            raise PrivacyError(
                "The plan's callback is not among the callbacks of this fit, so nothing would stop it at "
                "target_epsilon. Give fit callbacks=[plan.callback]."
            )
        wanted = {**_DEFAULTS, **self._settings}
        # Keras 3 has an attribute gradient_accumulation_steps of its own, which is None.
        settings = optimizer._dp.settings
        has = {name: getattr(settings if hasattr(settings, name) else optimizer, name) for name in wanted}
        other = next((name for name in wanted if has[name] != wanted[name]), None)
        if other is not None:
            raise PrivacyError(
                f"The model's optimizer has {other}={has[other]!r}, and the plan has {wanted[other]!r}: the optimizer "
                "belongs to another plan. To start, compile the model with plan.optimizer(...). To continue a loaded "
                "model, make the plan that it began with again: the same arguments, and the same ledger."
            )


@accept_old_names(epochs="num_epochs")
def plan(
    x: Arrays,
    y: Arrays = None,
    sample_weight: Arrays = None,
    *,
    delta: float,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    batch_size: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    l2_norm_clip: Clip = 1.0,
    sampling: str = POISSON.name,
    accountant: str = "pld",
    secure_noise: bool = False,
    metrics: PrivateMetrics | Sequence[str] | None = None,
    ledger: PrivacyLedger | None = None,
    max_examples_per_user: int = 1,
    **batches: Arrays,
) -> PrivacyPlan:
    """Plans a private training, so that noise, batches, optimizer and callback fit together.

        plan = tfdpfl.plan(x, y, target_epsilon=1.0, delta=1e-5, batch_size=256, num_epochs=10)
        model.compile(plan.optimizer("adam", learning_rate=1e-3), loss=..., metrics=["accuracy"])
        model.fit(plan.batches, epochs=plan.epochs, callbacks=[plan.callback])
        print(plan.statement())

    Pass three of ``target_epsilon``, ``noise_multiplier``, ``batch_size`` and ``num_epochs``. The plan finds the
    fourth: the ε, the least noise, the largest batch, or the most whole epochs.

    Args:
      x, y, sample_weight: the data, as for `fit`. Or x alone, which may be anything that `tfdpfl.data.poisson_batches`
        accepts. With ``user_ids`` the plan samples, counts and protects users in place of examples.
      delta: δ. Keep it below 1 / num_examples, because a larger δ means nothing.
      target_epsilon: the largest ε, for data sets that differ in the presence of one example.
      noise_multiplier: σ, the standard deviation of the noise, divided by the clip.
      batch_size: the expected number of examples in a batch.
      num_epochs: how often `fit` goes through ``batches``.
      steps_per_epoch: updates in an epoch. None uses ``num_examples // batch_size``, so an example takes part about
        once.
      l2_norm_clip: the clip of the optimizer. ε does not depend on it.
      sampling: "poisson", "random_allocation", "best", "shuffle" or "b_min_sep". With "random_allocation" each example
        is in one batch of an epoch, at about the same ε or less. "best" compares these two, and takes
        "random_allocation" if the figure that the plan finds is no worse; both have the same neighbours. With "shuffle"
        the batches are those of `fit`. ε is then much larger, and its neighbours are data sets of which one has a blank
        in place of an example. With "b_min_sep" pass ``min_separation``, too: an example rests between its uses, and
        the optimizer has `Banded` noise of as many bands. All epochs are then one pass, and each price is a simulation
        that takes seconds to minutes.
      accountant: "pld" (tight) or "rdp".
      secure_noise: True makes the optimizer draw discrete noise from the cryptographic generator, which needs a little
        more noise.
      metrics: a `tfdpfl.callbacks.PrivateMetrics`, or names of its metrics, whose cost the same ε includes. Then pass
        ``callbacks=plan.callbacks`` to `fit`. The plan can find ``noise_multiplier`` or ``target_epsilon``.
      ledger: a `PrivacyLedger` of what was spent on the data before, such as that of `tfdpfl.preprocessing`, which the
        same ε includes. The plan can find ``noise_multiplier`` or ``target_epsilon``.
      max_examples_per_user: how many examples neighbours may differ in, as in `compute_epsilon`: ε is that of a user or
        owner who has no more of them in ``x``. `tfdpfl.data.select_examples` chooses such examples.
      **batches: other arguments of `tfdpfl.data.poisson_batches`, `random_allocation` or `shuffled_batches`.

    Raises:
      ValueError: an argument is out of its range, or not three of the four are given.
      PrivacyError: no plan meets the target.
    """
    for name in batches.keys() - _BATCH_ARGUMENTS:
        raise TypeError(unexpected("plan", name, [*inspect.signature(plan).parameters, *_BATCH_ARGUMENTS]))
    data = x if y is None and sample_weight is None else (x, y, sample_weight)
    examples = examples_of(data)
    num_examples = examples.number
    _check_labels(examples.spec)
    users = batches.get("user_ids")
    if users is not None:
        batches["user_ids"] = users = users_of(users, num_examples)
        num_examples = users.number
    run: Keywords = {
        "num_examples": num_examples, "delta": delta, "accountant": accountant,
        "truncated_batch_size": batches.get("truncated_batch_size"), "secure_noise": secure_noise,
        "max_examples_per_user": max_examples_per_user, "unit": "example" if users is None else "user",
    }  # fmt: skip
    check_ledger(ledger)
    shown, clip = _checked_metrics(metrics), _checked_clip(l2_norm_clip)

    def solved(sampling: str) -> _Numbers:
        _check_sampling(sampling, steps_per_epoch)
        of_noise = {} if SCHEMES[sampling].fresh_noise else {"separation": _separation(sampling, secure_noise, batches)}
        made = (_BandedNumbers if of_noise else _Numbers)(
            target_epsilon, noise_multiplier, batch_size, num_epochs, steps_per_epoch, {**run, "sampling": sampling},
            batches.get("num_selected", 1), shown, ledger, **of_noise,
        )  # fmt: skip
        made.solve()
        return made

    has_choice = steps_per_epoch is None and not secure_noise and "truncated_batch_size" not in batches
    made = _better(solved, has_choice) if sampling == BEST else solved(sampling)
    sampling = made.run["sampling"]
    draw, arguments = BATCHES[sampling]
    drawn = draw(examples, **arguments(made.batch_size, made.steps_per_epoch), **batches)
    return PrivacyPlan(
        target_epsilon=made.target_epsilon,
        delta=delta,
        noise_multiplier=made.noise_multiplier,
        batch_size=made.batch_size,
        epochs=made.num_epochs,
        steps_per_epoch=made.steps_per_epoch,
        num_examples=num_examples,
        l2_norm_clip=clip,
        sampling=sampling,
        accountant=accountant,
        secure_noise=secure_noise,
        noise=getattr(made, "noise", None),
        metrics=shown,
        ledger=ledger,
        max_examples_per_user=max_examples_per_user,
        batches=drawn,
    )


def _better(solved: Callable[[str], _Numbers], has_choice: bool) -> _Numbers:
    """Returns the numbers of Poisson batches, or of random allocation if there is a choice and these are better."""
    made = solved(POISSON.name)
    if has_choice:
        with contextlib.suppress(PrivacyError):  # only Poisson batches meet the target
            other = solved(RANDOM_ALLOCATION.name)
            return made if made.better_than(other) else other
    return made


def _check_labels(spec: Nest) -> None:
    """Raises if the labels of (x, y) are words, of which no loss of Keras is a number."""
    labels = spec[1] if isinstance(spec, tuple) and len(spec) > 1 else None
    if any(label.dtype == tf.string for label in tf.nest.flatten(labels) if hasattr(label, "dtype")):
        raise ValueError(
            "y holds words, and a loss needs numbers. List the classes that you know without the data, and pass the "
            "number of each label: y = np.array([classes.index(label) for label in y])."
        )


def _checked_metrics(metrics: PrivateMetrics | Sequence[str] | None) -> PrivateMetrics | None:
    from tfdpfl.callbacks import PrivateMetrics

    made = metrics if metrics is None or isinstance(metrics, PrivateMetrics) else PrivateMetrics(metrics=metrics)
    if made is not None and made.validation:
        raise ValueError(
            "metrics are measured on validation data, and a plan does not include the cost of these. Give them to fit "
            "together with plan.callbacks."
        )
    return made


def _check_sampling(sampling: str, steps_per_epoch: int | None) -> None:
    if sampling not in BATCHES:
        raise ValueError(f"sampling={sampling!r} has no plan: take {' or '.join(map(repr, [*BATCHES, BEST]))}.")
    if SCHEMES[sampling].counts_passes and steps_per_epoch is not None:
        raise ValueError(
            f"steps_per_epoch={steps_per_epoch}: an epoch of sampling={sampling!r} has all examples. Leave it out."
        )


def _length(sampling: str, num_epochs: int, steps_per_epoch: int, uses: int) -> Keywords:
    """Returns the length of a training as ε counts it, if an epoch has so many uses of an example."""
    if SCHEMES[sampling].counts_passes:
        return {"num_epochs": num_epochs * uses}
    return {"num_steps": num_epochs * steps_per_epoch}


def _separation(sampling: str, secure_noise: bool, batches: Keywords) -> int:
    """Returns the fewest steps between two uses of an example, for which the noise is made."""
    if secure_noise:
        raise ValueError(f"secure_noise=True and sampling={sampling!r}: a step has one kind of noise. Leave one out.")
    if "min_separation" not in batches:
        raise ValueError(
            f"sampling={sampling!r} needs min_separation, which is also the number of bands of the noise: give the "
            "steps from one use of an example to its next, such as min_separation=8."
        )
    return _checks.whole("min_separation", batches["min_separation"], 1, "count the steps from one use to the next")


def _checked_clip(l2_norm_clip: Clip) -> Clip:
    if isinstance(l2_norm_clip, int | float):
        return _checks.real("l2_norm_clip", l2_norm_clip, "it bounds a gradient's norm; 1.0 is usual", above=0)
    if isinstance(l2_norm_clip, clips.Clip):
        return l2_norm_clip
    from tfdpfl.optimizers._schedules import schedule_of

    return schedule_of("l2_norm_clip", l2_norm_clip) or l2_norm_clip


def _ledger(
    run: Keywords | CorrelatedRun, num_examples: int, before: PrivacyLedger | None, metrics: PrivateMetrics | None,
    epochs: int,
) -> PrivacyLedger:  # fmt: skip
    """Returns the ledger of a training that ran as planned, of what was spent before it, and of its metrics."""
    ledger = PrivacyLedger() if before is None else PrivacyLedger().merge(before)
    if isinstance(run, dict):
        ledger.record(**run)
    else:
        ledger.count_correlated((), run)
    if metrics is not None:
        releases = epochs // metrics.every
        ledger.add(metrics.event(num_examples), releases, adjacency=ledger.adjacency, name=type(metrics).__name__)
    return ledger


def _banded_run(
    noise: Noise, noise_multiplier: float, steps: int, rate: float, sampling: str, unit: str
) -> CorrelatedRun:
    from tfdpfl.accounting.correlated import CorrelatedRun

    return CorrelatedRun(
        noise=noise, noise_multiplier=noise_multiplier, num_steps=steps, min_separation=noise.min_separation,
        sampling_rate=rate, sampling=sampling, unit=unit,
    )  # fmt: skip


@dataclasses.dataclass
class _Numbers:
    """The numbers of a plan, of which `solve` finds the one that is None."""

    target_epsilon: Number
    noise_multiplier: Number
    batch_size: Number
    num_epochs: Number
    steps_per_epoch: Number
    run: Keywords
    uses: int  # of an example in an epoch, where that is fixed
    metrics: PrivateMetrics | None
    ledger: PrivacyLedger | None

    def __post_init__(self) -> None:
        four = ("target_epsilon", "noise_multiplier", "batch_size", "num_epochs")
        unknown = [name for name in four if getattr(self, name) is None]
        if len(unknown) != 1:
            raise ValueError(
                f"Give three of {', '.join(four)}, and the plan finds the fourth; "
                + (f"{', '.join(unknown)} are missing." if unknown else "all four are given: leave one out.")
            )
        for name, text in (
            ("num_epochs", "count the passes over the batches"),
            ("steps_per_epoch", "count the updates in an epoch, or leave it to the plan"),
            ("batch_size", "count the examples of a batch"),
        ):
            _checks.known(self, _checks.whole, name, 1, text)

        if self._beside and None in (self.batch_size, self.num_epochs):
            raise ValueError(
                f"{unknown[0]} cannot be computed {self._why_not}. Give it, and leave out noise_multiplier or "
                "target_epsilon."
            )

    _why_not: ClassVar[str] = "together with metrics or a ledger, whose cost ε includes"
    _tolerance: ClassVar[float] = 1e-4  # of a noise multiplier

    @property
    def _beside(self) -> bool:
        """Whether ε covers more than the training."""
        return self.metrics is not None or self.ledger is not None

    def better_than(self, other: _Numbers) -> bool:
        """Whether this plan has less noise or ε, or more epochs or larger batches, than another of the same figures."""
        mine, theirs = (
            (-plan.noise_multiplier, -plan.target_epsilon, plan.num_epochs, plan.batch_size) for plan in (self, other)
        )
        return mine > theirs

    def solve(self) -> None:
        if self.batch_size is None:
            self.batch_size = self._largest_batch()
        sized = {**self.run, "batch_size": self.batch_size}
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self._steps_in(self.batch_size)
        if self.num_epochs is None:
            self.num_epochs = self._most_epochs(sized)
        whole = {**sized, **_length(self.run["sampling"], self.num_epochs, self.steps_per_epoch, self.uses)}
        if self._beside:
            if self.noise_multiplier is None:
                self._check_left(whole["delta"], whole["accountant"])
                self.noise_multiplier = smallest_noise_multiplier(
                    lambda z: self._spent(z, **whole), self.target_epsilon, self._tolerance, self._rough(whole)
                )
            self.target_epsilon = self.target_epsilon or self._spent(self.noise_multiplier, **whole)
        if self.noise_multiplier is None:
            self.noise_multiplier = compute_noise_multiplier(target_epsilon=self.target_epsilon, **whole)
        if self.target_epsilon is None:
            self.target_epsilon = compute_epsilon(noise_multiplier=self.noise_multiplier, **whole)

    def _rough(self, whole: Keywords) -> Callable[[float], float] | None:
        """Returns what `smallest_noise_multiplier` accepts as a rough ε, if ε takes a simulation."""
        return None

    def _spent(self, noise_multiplier: float, delta: float, accountant: str, **run: Any) -> float:
        """Returns the ε of a training by its noise, with all that ε covers beside it."""
        run["noise_multiplier"] = noise_multiplier
        ledger = _ledger(run, run["num_examples"], self.ledger, self.metrics, self.num_epochs)
        return ledger.epsilon(delta, accountant, run["max_examples_per_user"])

    def _check_left(self, delta: float, accountant: str) -> None:
        """Raises if nothing is left of the target for the training."""
        most = self.run["max_examples_per_user"]
        spent = 0.0 if self.ledger is None else self.ledger.epsilon(delta, accountant, most)
        if spent >= self.target_epsilon:
            raise PrivacyError(
                f"The ledger has spent ε = {spent:.4g} of target_epsilon={self.target_epsilon:g}: nothing is left for "
                "the training. Raise the target, or spend less before."
            )

    @property
    def _counts_passes(self) -> bool:
        return SCHEMES[self.run["sampling"]].counts_passes

    def _steps_in(self, batch_size: int) -> int:
        """Returns how many updates an epoch has."""
        n = self.run["num_examples"]
        return -(-n // batch_size) * self.uses if self._counts_passes else max(n // batch_size, 1)

    def _largest_batch(self) -> int:
        given, n, noise = self.steps_per_epoch, self.run["num_examples"], self.noise_multiplier
        length = (
            {"num_epochs": self.num_epochs * self.uses} if given is None else {"num_steps": self.num_epochs * given}
        )
        size = compute_batch_size(target_epsilon=self.target_epsilon, noise_multiplier=noise, **length, **self.run)
        # fit takes whole steps an epoch, which may be fewer than epochs * num_examples / batch_size.
        while given is None and not self._counts_passes and size < n and self.target_epsilon >= compute_epsilon(
            noise_multiplier=noise, batch_size=size + 1, num_steps=self.num_epochs * (n // (size + 1)), **self.run
        ):  # fmt: skip
            size += 1
        return size

    def _most_epochs(self, sized: Keywords) -> int:
        target, each = self.target_epsilon, self.steps_per_epoch
        steps = compute_num_steps(target_epsilon=target, noise_multiplier=self.noise_multiplier, **sized)
        if steps < each:
            raise PrivacyError(
                f"target_epsilon={target:g} allows {steps} steps, and an epoch has {each}: raise the target "
                f"or noise_multiplier, or give steps_per_epoch={steps}."
            )
        return steps // each


@dataclasses.dataclass
class _BandedNumbers(_Numbers):
    """The numbers of a plan with banded noise, of which one pass is a whole training."""

    separation: int = 1

    _why_not: ClassVar[str] = "for this sampling, because each price is a simulation"
    _tolerance: ClassVar[float] = B_MIN_SEP.tolerance

    @property
    def _beside(self) -> bool:
        return True

    @functools.cached_property
    def noise(self) -> Noise:
        from tfdpfl.noise import Banded

        steps = self.num_epochs * self.steps_per_epoch
        return Banded(bands=self.separation, min_separation=self.separation, max_participations=1, num_steps=steps)

    def solve(self) -> None:
        super().solve()
        self.steps_per_epoch, self.num_epochs = self.num_epochs * self.steps_per_epoch, 1

    def _rough(self, whole: Keywords) -> Callable[[float], float] | None:
        return lambda z: self._spent(z, **whole, roughly=True)

    def _spent(
        self, noise_multiplier: float, delta: float, accountant: str, roughly: bool = False, **run: Any
    ) -> float:
        population, sampling = run["num_examples"], run["sampling"]
        rate = SCHEMES[sampling].rate(self.batch_size, population, self.separation)
        banded = _banded_run(self.noise, noise_multiplier, run["num_steps"], rate, sampling, run["unit"])
        banded = banded.rough or banded if roughly else banded
        ledger = _ledger(banded, population, self.ledger, self.metrics, 1)
        return ledger.epsilon(delta, accountant, run["max_examples_per_user"])
