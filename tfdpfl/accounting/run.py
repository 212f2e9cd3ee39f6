"""A run of DP-SGD, as the accountant sees it: how often an example takes part, at what noise."""

import math
from dataclasses import dataclass, replace
from typing import TypedDict

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent
from tfdpfl.accounting import _checks
from tfdpfl.accounting._checks import choice, real, whole
from tfdpfl.accounting.events import event_type
from tfdpfl.accounting.sampling import EVERY_BATCH, POISSON, SAMPLINGS, SCHEMES, SamplingScheme
from tfdpfl.errors import PrivacyError

__all__ = ["ADJACENCIES", "OLD_NAMES", "SAMPLINGS", "SAVED_AS", "UNITS", "NoiseArguments", "Run", "options_of"]

UNITS = ("example", "user")
_DISCRETE = "The noise is discrete Gaussian (secure_noise=True), whose ε only Rényi DP knows."
SAVED_AS = {"secure_noise": "discrete"}  # fields that files call otherwise
OLD_NAMES = {"steps": "num_steps", "epochs": "num_epochs", "discrete": "secure_noise"}  # of arguments
ADJACENCIES = ("add_or_remove_one", "replace_one", "zero_out")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One DP-SGD training run, validated: at every step a sum of clipped gradients plus Gaussian noise.

    Args:
        num_examples: Number of training examples n.
        batch_size: Number of examples in a batch; its expectation under Poisson sampling.
        noise_multiplier: σ, the standard deviation of the noise divided by the clip C.
        num_epochs: Passes over the data, possibly a fraction. Either this or `num_steps`.
        num_steps: Noisy updates. Under `"shuffle"` k ⌈num_examples / batch_size⌉ of them are k passes, as `fit` makes
            them. Of any other number the passes may be shorter, because they drop the last, smaller batch. Beside
            `num_epochs`, where not all updates of the passes that were begun have been made; the passes are what is
            priced.
        sampling: How an example comes into a batch.

            - `"poisson"`: by an independent coin of bias `batch_size / num_examples` at every step.
            - `"shuffle"`: what `fit` does: once in every epoch. Given the order, an example touches one step
              an epoch, so an epoch costs one Gaussian mechanism. No amplification is claimed, since none is
              proven for it.
            - `"fixed_size"`: by a fresh uniformly random subset of exactly `batch_size` examples at every
              step.
            - `"random_allocation"`: once in every epoch, at a step that is chosen for it by itself.
            - `"none"`: at every step.
        num_microbatches: The number of groups whose mean gradient is clipped; None, or `batch_size`, clips
            each example by itself. One example moves its group's clipped mean anywhere in a ball, so the
            sensitivity is 2C. This takes for granted that an example's presence does not regroup the others, so
            samplings that draw each example by itself are refused.
        starts_mid_epoch: Whether the first step may lie inside a pass over the data (shuffle, with
            `num_steps`).
        adjacency: Which data sets are neighbours; None takes the sampling's own, the first named.

            - `"add_or_remove_one"` (poisson, random_allocation, none): with or without one example.
            - `"zero_out"` (shuffle, poisson, random_allocation, none): one example's contribution is blanked, all
              batch sizes stay as they are.
            - `"replace_one"` (fixed_size, shuffle, none, and with dp-accounting 0.6 poisson): one example is any
              other; the sensitivity is 2C.
        max_examples_per_user: How many examples neighbours may differ in: the ε then is that of a user who has no
            more of them. They may all be in one batch, whose noise counts as σ over their number. Under Poisson
            sampling each comes by a coin of its own (Choquette-Choo et al. 2024, arXiv:2401.10294), which
            dp-accounting 0.6 prices closely. An older one has only looser bounds.
        truncated_batch_size: With Poisson sampling: of a larger sample a uniform subset of so many stays
            (arXiv:2508.15089).
        unit: What is sampled and clipped, and what an "example" is then in all of the above: `"example"` or `"user"`.
        uneven_batches: Whether batches may be smaller than `batch_size` (buckets of one length), so that a pass has
            more of them (shuffle, with `num_steps` beside `num_epochs`).
        secure_noise: Whether the noise is discrete Gaussian, which is priced by Rényi DP of whole orders: there it is
            what a Gaussian's is, sampled or not (Canonne, Kamath & Steinke 2020, arXiv:2004.00010).

    Raises:
        ValueError: An argument is out of its range; the message has the remedy.
        PrivacyError: The adjacency is not one that the sampling can be priced for.
    """

    num_examples: int
    batch_size: int
    noise_multiplier: float
    num_epochs: float | None = None
    num_steps: int | None = None
    sampling: str = POISSON.name
    num_microbatches: int | None = None
    adjacency: str | None = None
    starts_mid_epoch: bool = False
    max_examples_per_user: int = 1
    truncated_batch_size: int | None = None
    unit: str = "example"
    secure_noise: bool = False
    uneven_batches: bool | None = None

    def __post_init__(self) -> None:
        _checks.put(self, whole, "num_examples", 1, "count the training examples")
        _checks.put(self, whole, "batch_size", 1, "count the examples of a batch")
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size must be at most num_examples={self.num_examples}, got {self.batch_size}: use a smaller "
                "batch, or check that you did not swap the two"
            )
        remedy = "give the standard deviation of the noise divided by the clip (0 for none)"
        _checks.put(self, real, "noise_multiplier", remedy, at_least=0)
        _checks.put(self, choice, "sampling", SAMPLINGS)
        self._check_length()
        self._check_microbatches()
        self._check_groups_stay()
        self._check_adjacency()
        self._check_group()
        self._check_truncation()
        _checks.put(self, choice, "unit", UNITS)
        if self.unit == "user" and self.max_examples_per_user > 1:
            raise ValueError(
                f"max_examples_per_user={self.max_examples_per_user} is for examples that are clipped one by one, "
                "but with unit='user' all examples of a user are clipped together: leave it out"
            )
        if self.secure_noise:
            self._check_discrete()

    def _check_length(self) -> None:
        missing = [self.num_epochs, self.num_steps].count(None)
        if missing == 2 or (missing == 0 and not self.scheme.counts_passes):
            raise ValueError(
                "give exactly one of num_epochs and num_steps, "
                f"got num_epochs={self.num_epochs!r} and num_steps={self.num_steps!r}"
            )
        _checks.known(self, whole, "num_steps", 0, "count the noisy updates")
        _checks.known(self, real, "num_epochs", "count the passes over the data, possibly a fraction", at_least=0)
        if self.num_epochs is not None and not self.uneven_batches and self.steps > self._steps_of_epochs:
            raise ValueError(
                f"num_steps={self.num_steps} is more than the {self._steps_of_epochs} steps that "
                f"num_epochs={self.num_epochs:g} passes have: give one of the two"
            )

    def _check_discrete(self) -> None:
        if not self.scheme.prices_discrete_noise or self.max_examples_per_user > 1:
            without = " or ".join(repr(s) for s in SAMPLINGS if not SCHEMES[s].prices_discrete_noise)
            raise PrivacyError(
                f"no ε is known for discrete noise with sampling={without} or several examples of a user: use "
                "sampling='poisson' or 'shuffle', or train without secure_noise"
            )
        if self.truncated_batch_size is not None:
            raise PrivacyError(
                f"truncated_batch_size={self.truncated_batch_size} has no known ε with discrete noise: only PLD knows "
                "truncated batches, and only Rényi DP knows discrete noise. Leave truncated_batch_size out, or train "
                "without secure_noise"
            )

    def _check_truncation(self) -> None:
        if self.truncated_batch_size is None:
            return
        _checks.put(self, whole, "truncated_batch_size", 1, "give the size of all batches, or leave it out")
        if self.adjacency not in self.scheme.truncated_adjacencies:
            raise PrivacyError(
                f"truncated_batch_size={self.truncated_batch_size} has a known ε for sampling='poisson' with "
                f"adjacency='add_or_remove_one', not for {self.sampling!r} with {self.adjacency!r}: leave it out"
            )
        if self.max_examples_per_user > 1:
            raise PrivacyError(
                f"truncated_batch_size has no known ε for max_examples_per_user={self.max_examples_per_user}: "
                "leave one out"
            )

    def _check_microbatches(self) -> None:
        _checks.known(
            self, whole, "num_microbatches", 1, "count the groups whose mean gradient is clipped, or leave it out"
        )
        if self.num_microbatches is not None and self.batch_size % self.num_microbatches:
            raise ValueError(
                f"num_microbatches must divide batch_size={self.batch_size}, got {self.num_microbatches}: use a "
                "divisor, or leave it out to clip every example by itself"
            )

    def _check_groups_stay(self) -> None:
        if self.grouped and self.scheme.independent:
            raise PrivacyError(
                f"num_microbatches={self.num_microbatches} has no known ε with sampling={self.sampling!r}: one more "
                "example moves other examples to other groups, so fit refuses such a training. Use sampling='shuffle' "
                "(what fit does with arrays), or leave num_microbatches out to clip each example by itself"
            )

    def _check_adjacency(self) -> None:
        offered = self.scheme.adjacencies
        if self.adjacency is None:
            _checks.keep(self, "adjacency", offered[0])
        _checks.put(self, choice, "adjacency", ADJACENCIES)
        if self.adjacency not in offered:
            raise PrivacyError(
                f"sampling={self.sampling!r} has no known ε for adjacency={self.adjacency!r}: use "
                f"{' or '.join(map(repr, offered))}, or another sampling"
            )

    def _check_group(self) -> None:
        remedy = "count the examples of the user with the most, or leave it out"
        _checks.put(self, whole, "max_examples_per_user", 1, remedy)
        if self.max_examples_per_user > self.num_examples:
            raise ValueError(
                f"max_examples_per_user must be at most num_examples={self.num_examples}, "
                f"got {self.max_examples_per_user}: {remedy}"
            )
        if self.max_examples_per_user > 1 and self.adjacency not in self.scheme.group_adjacencies:
            raise PrivacyError(
                f"sampling={self.sampling!r} under adjacency={self.adjacency!r} has no known ε for "
                f"max_examples_per_user={self.max_examples_per_user}: use sampling='poisson' with "
                "adjacency='add_or_remove_one', or sampling='shuffle'"
            )

    @property
    def scheme(self) -> SamplingScheme:
        """How batches are drawn, as an object that knows what follows from it."""
        return SCHEMES[self.sampling]

    @property
    def sampling_rate(self) -> float:
        """The (expected) batch size over the number of examples."""
        return self.batch_size / self.num_examples

    @property
    def grouped(self) -> bool:
        """Whether a clipped gradient is the mean of several examples."""
        return self.num_microbatches is not None and self.num_microbatches < self.batch_size

    @property
    def notes(self) -> list[str]:
        """What a figure takes for granted of the sampling, and what it must say of the noise."""
        return [note for note in (self.scheme.note, _DISCRETE if self.secure_noise else None) if note]

    @property
    def steps(self) -> int:
        """The number of noisy updates."""
        return self._steps_of_epochs if self.num_steps is None else self.num_steps

    @property
    def _steps_of_epochs(self) -> int:
        assert self.num_epochs is not None
        if self.scheme.counts_passes:  # an epoch's last batch is smaller, but a step
            return _ceil(self.num_epochs * -(-self.num_examples // self.batch_size))
        return _ceil(self.num_epochs * self.num_examples / self.batch_size)

    @property
    def steps_per_pass(self) -> int:
        """The steps in which an example is used once: if shuffled, a pass with its last, smaller batch."""
        return -(-self.num_examples // self.batch_size) if self.scheme.counts_passes else 1

    @property
    def whole_passes(self) -> bool:
        """Whether the next step begins a new pass over the data, if the first one did."""
        if self.num_epochs is not None and self.num_steps is None:
            return float(self.num_epochs).is_integer()
        return self.num_epochs is None and not self.starts_mid_epoch and self.steps % self.steps_per_pass == 0

    @property
    def takes_whole_passes(self) -> bool:
        """Whether `participations` would be more if passes dropped their last, smaller batch."""
        uneven = self.scheme.counts_passes and self.num_examples % self.batch_size > 0 and self.scheme.limits_batches
        return uneven and self.num_epochs is None and self.steps > 0 and self.whole_passes

    @property
    def participations(self) -> int:
        """How many noisy updates one example can touch: all, or if shuffled one in every epoch begun."""
        if self.scheme.counts_passes and self.num_epochs is not None:
            return _ceil(self.num_epochs)
        if not self.scheme.counts_passes or self.whole_passes:
            return self.steps // self.steps_per_pass
        least = self.num_examples // self.batch_size  # steps of a pass that drops its last, smaller batch
        least = least if self.scheme.limits_batches else self.steps_per_pass
        if self.starts_mid_epoch and self.steps > 0:
            # A window of steps touches one epoch more than its length says when it lies across their borders.
            return -(-(self.steps - 1) // least) + 1
        return -(-self.steps // least)

    def stated_for(self, adjacency: str) -> DpEvent | None:
        """Returns the event for these neighbours, or None if it has none."""
        if adjacency == self.adjacency:
            return self.dp_event
        cut = self.truncated_batch_size is not None
        return None if cut or adjacency not in self.scheme.adjacencies else replace(self, adjacency=adjacency).dp_event

    @property
    def dp_event(self) -> DpEvent:
        """Returns the event of the run for an accountant. Its σ is relative to the sensitivity under `adjacency`."""
        if self.participations == 0:
            return dp_event.NoOpDpEvent()
        if self.noise_multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        step = dp_event.GaussianDpEvent(
            self.noise_multiplier / self.scheme.sensitivity(str(self.adjacency), self.grouped)
        )
        if self.secure_noise:
            step = _discrete(step)
        n, batch, cut = self.num_examples, self.batch_size, self.truncated_batch_size
        scheme = self.scheme if batch < n else EVERY_BATCH
        if self.max_examples_per_user > 1:
            step = scheme.of_group(step, n, batch, self.max_examples_per_user)
        elif cut is not None and batch < n:
            step = scheme.cut(step, n, batch, cut)
        else:
            step = scheme.sampled(step, n, batch)
        return dp_event.SelfComposedDpEvent(step, self.participations)


class NoiseArguments(TypedDict, total=False):
    """Holds what is known of the noise next to its multiplier; see `Run`."""

    secure_noise: bool


def options_of(discrete: bool) -> NoiseArguments:
    """Returns the arguments that describe a run whose noise is `discrete`, or not."""
    return {"secure_noise": discrete}


# Discrete Gaussian noise on whole numbers, as the Gaussian whose whole Rényi orders it has. No tail is cut off.
_discrete = event_type("DiscreteGaussianDpEvent", "gaussian", shifts=(), discrete=True)


def _ceil(number: float) -> int:
    # 0.3 epochs of 10 steps are 3 steps; in floating point the product is above 3.
    nearest = round(number)
    return nearest if math.isclose(number, nearest, rel_tol=1e-12) else math.ceil(number)
