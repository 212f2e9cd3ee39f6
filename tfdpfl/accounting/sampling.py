"""How batches are drawn: one class for each sampling, which states everything that the package asks about it.

To add a sampling, write a class and append an instance to `_ALL`. Nothing else in the package names it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, PrivacyLosses
from tfdpfl.accounting.events import event_type
from tfdpfl.errors import PrivacyError

__all__ = [
    "BY_CODE",
    "B_MIN_SEP",
    "CYCLIC_POISSON",
    "EVERY_BATCH",
    "FIXED_ORDER",
    "FIXED_SIZE",
    "POISSON",
    "RANDOM_ALLOCATION",
    "SAMPLINGS",
    "SCHEMES",
    "SHUFFLED",
    "Code",
    "SamplingScheme",
    "shuffled_adjacency",
    "truncated_event_type",
]


@dataclasses.dataclass(frozen=True)
class Code:
    """A sampling as an optimizer saves it in its step table.

    Attributes:
        number: What the table holds, but for the bit of 16. Saved models hold it too, so a number keeps its meaning for
            ever.
        adjacency: The neighbours that the steps are priced for.
        unit: What is sampled and clipped.
        across_passes: Whether a batch may reach from one pass into the next, so that it may hold an example more than
            once.
        unknown: Whether nothing is known of the batches: each is taken to hold every example.
    """

    number: int
    adjacency: str
    unit: str = "example"
    across_passes: bool = False
    unknown: bool = False


@dataclasses.dataclass(frozen=True)
class SamplingScheme:
    """One way to draw batches. Everything that depends on how batches are drawn asks this object.

    Attributes:
        name: The public name, as in `sampling="poisson"`.
        adjacencies: The neighbours that it is priced for; the first is the default.
        codes: The numbers that stand for it in the step table of an optimizer.
        text: What it is, for a statement.
        note: What a figure under it takes for granted, or None.
        fresh_noise: Whether steps whose noise is independent can be priced under it.
        once_a_pass: Whether each example is in at most one batch of a pass over the data.
        same_order: Whether all passes have the same batches in the same order.
        independent: Whether examples join a batch independently, so that the size of the batch is private.
        sampled_anew: Whether each batch is a fresh sample of all examples.
        limits_batches: Whether no batch holds more than `batch_size` examples.
        separates_uses: Whether it bounds how often an example takes part, which prices correlated noise.
        in_groups: Whether steps draw from groups of the examples in turns.
        one_pass: Whether a pass is a whole training, so that the noise begins anew with each.
        weaker: Names of samplings that claim less and are true of the same batches.
        tolerance: Of a noise multiplier that is searched for, with correlated noise.
        rough: The name of a sampling that takes no simulation and has about proportional ε, if this one takes one.
        prices_discrete_noise: Whether a step with discrete noise can be priced.
        group_adjacencies: The relations that are priced if neighbours differ in several examples.
        truncated_adjacencies: The relations that are priced if larger batches are cut to a uniform subset.
        draws_cohorts: Whether a federation may draw the clients of a round so.
    """

    name: ClassVar[str]
    adjacencies: ClassVar[tuple[str, ...]]
    codes: ClassVar[tuple[Code, ...]]
    text: ClassVar[str]
    note: ClassVar[str | None] = None
    fresh_noise: ClassVar[bool] = True
    once_a_pass: ClassVar[bool] = False
    same_order: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    sampled_anew: ClassVar[bool] = False
    limits_batches: ClassVar[bool] = False
    separates_uses: ClassVar[bool] = False
    in_groups: ClassVar[bool] = False
    one_pass: ClassVar[bool] = False
    weaker: ClassVar[tuple[str, ...]] = ()
    tolerance: ClassVar[float] = 1e-5
    rough: ClassVar[str | None] = None
    prices_discrete_noise: ClassVar[bool] = False
    group_adjacencies: ClassVar[tuple[str, ...]] = ()
    truncated_adjacencies: ClassVar[tuple[str, ...]] = ()
    draws_cohorts: ClassVar[bool] = False

    @property
    def counts_passes(self) -> bool:
        """Whether ε depends on the number of passes over the data, not on the number of steps."""
        return self.once_a_pass and self.fresh_noise

    @property
    def partitions(self) -> bool:
        """Whether a pass over the data is cut into batches that share no example and have a public size."""
        return self.once_a_pass and not self.independent

    @property
    def amplifies(self) -> bool:
        """Whether ε depends on the size of a batch."""
        return self.sampled_anew or (self.independent and self.fresh_noise)

    @property
    def starts_anew(self) -> bool:
        """Whether nothing is known of when an example was last used once the data begin anew."""
        return self.in_groups or self.one_pass

    def mean_share(self, rate: float, separation: int) -> float:
        """Returns which share of the examples a batch has on average. `separation` is the declared one."""
        return rate

    def rate(self, size: float, population: int, separation: int) -> float:
        """Returns the declared rate of batches of a mean size."""
        return min(size / population, 1.0)

    def of_uses(
        self, use: DpEvent, moves: tuple[float, ...], rate: float, separation: int, uses: int, steps: int
    ) -> DpEvent:
        """Returns a training whose noise has one use of an example as the event `use`, no two of which meet.

        Args:
            moves: How far a use moves the base normals of its step and of the next ones, over their deviation.
            rate: As declared.
            separation: As declared.
            uses: The most uses of an example.
            steps: The steps of the training.
        """
        raise NotImplementedError

    def of_uses_text(self, unit: str, rate: float, separation: int) -> str:
        """Returns how such a training samples, for a sentence."""
        raise NotImplementedError

    def sampled(self, step: DpEvent, population: int, size: float) -> DpEvent:
        """Returns a step on a batch of so many of a population, given the step on all of them. Where ε depends on the
        number of passes, it is a whole pass."""
        return step

    def cut(self, step: DpEvent, population: int, size: float, most: int) -> DpEvent:
        """Returns the same if a uniform subset of so many stays of a larger batch; see `truncated_adjacencies`."""
        raise NotImplementedError

    def of_group(self, step: DpEvent, population: int, size: float, number: int) -> DpEvent:
        """Returns the same for neighbours that differ in so many examples; see `group_adjacencies`."""
        return dp_event.GaussianDpEvent(step.noise_multiplier / number)

    def sensitivity(self, adjacency: str, grouped: bool) -> int:
        """Returns how far one example moves the clipped sum, in clips; `grouped` if means of groups are clipped."""
        return 2 if grouped or adjacency == "replace_one" else 1

    def if_only_shuffled(self, adjacency: str | None) -> dict[str, str | None]:
        """Returns the arguments that turn a run into one with shuffled batches, to be priced next to it; none if that
        says nothing new."""
        return {}

    def code(self, adjacency: str | None = None, unit: str = "example", across_passes: bool = False) -> int:
        """Returns the number for the step table; `adjacency` is the scheme's own if it is None."""
        wanted = (adjacency or self.adjacencies[0], unit, across_passes)
        return next(
            code.number
            for code in self.codes
            if not code.unknown and (code.adjacency, code.unit, code.across_passes) == wanted
        )


class Poisson(SamplingScheme):
    """Every example joins every batch by an independent coin of bias `batch_size / num_examples`."""

    name = "poisson"
    adjacencies = ("add_or_remove_one", "zero_out", "replace_one")
    codes = (Code(1, "add_or_remove_one"), Code(6, "add_or_remove_one", unit="user"))
    text = "every example joins every batch by an independent coin (Poisson)"
    note = (
        "Batches must really be drawn by independent coins, as tfdpfl.data.poisson_batches does; shuffled batches do "
        "not qualify."
    )
    independent = True
    sampled_anew = True
    prices_discrete_noise = True
    group_adjacencies = ("add_or_remove_one", "zero_out")
    truncated_adjacencies = ("add_or_remove_one",)  # else an example may push another one out, which has no price
    draws_cohorts = True

    def sampled(self, step: DpEvent, population: int, size: float) -> DpEvent:
        return dp_event.PoissonSampledDpEvent(size / population, step)

    def cut(self, step: DpEvent, population: int, size: float, most: int) -> DpEvent:
        # A neighbour may have one example more.
        return truncated_event_type(most)(population + 1, size / population, most, step.noise_multiplier)

    def of_group(self, step: DpEvent, population: int, size: float, number: int) -> DpEvent:
        return _sampled_group(size / population, step.noise_multiplier, number)

    def if_only_shuffled(self, adjacency: str | None) -> dict[str, str | None]:
        return {"sampling": Shuffled.name, "adjacency": shuffled_adjacency(adjacency), "truncated_batch_size": None}


class Shuffled(SamplingScheme):
    """Samples as `fit` does: every example is in exactly one batch of a pass. No amplification is claimed."""

    name = "shuffle"
    adjacencies = ("zero_out", "replace_one")
    codes = (
        Code(2, "zero_out"), Code(9, "zero_out", across_passes=True), Code(12, "zero_out", unit="user"),
        Code(13, "zero_out", unit="user", across_passes=True),
    )  # fmt: skip
    text = "every example is in exactly one batch of an epoch, as in fit; no amplification is claimed"
    note = "No batch may span two epochs (batch, then repeat): it could hold one example twice."
    once_a_pass = True
    limits_batches = True
    separates_uses = True
    prices_discrete_noise = True
    group_adjacencies = adjacencies
    weaker = ("none",)


class FixedSize(SamplingScheme):
    """Every batch is a fresh uniformly random subset of exactly `batch_size` examples."""

    name = "fixed_size"
    adjacencies = ("replace_one",)
    codes = (Code(3, "replace_one"),)
    text = "every batch is a fresh random subset of fixed size"
    note = "Every batch must be a fresh uniform draw without replacement, independent of all others."
    sampled_anew = True
    limits_batches = True
    draws_cohorts = True

    def sampled(self, step: DpEvent, population: int, size: float) -> DpEvent:
        return dp_event.SampledWithoutReplacementDpEvent(population, int(size), step)


class EveryBatch(SamplingScheme):
    """Every example may be in every batch. Steps of which nothing is known are priced so."""

    name = "none"
    adjacencies = ("add_or_remove_one", "zero_out", "replace_one")
    codes = (Code(0, "zero_out", unknown=True), Code(4, "add_or_remove_one"), Code(5, "zero_out"))
    text = "every example is in every batch; no amplification"
    prices_discrete_noise = True
    group_adjacencies = adjacencies
    draws_cohorts = True


class FixedOrder(SamplingScheme):
    """Every pass has the same batches in the same order, so that the uses of an example lie a pass apart."""

    name = "fixed_order"
    adjacencies = ("zero_out", "replace_one")  # with an example more, a data set has other batches
    codes = (Code(7, "zero_out"), Code(14, "zero_out", unit="user"))
    text = "every epoch has the same batches in the same order"
    fresh_noise = False
    once_a_pass = True
    same_order = True
    limits_batches = True
    separates_uses = True
    weaker = (Shuffled.name, EveryBatch.name)


class CyclicPoisson(SamplingScheme):
    """Each example belongs to one of several groups, of which each step samples the next one by independent coins."""

    name = "cyclic_poisson"
    adjacencies = ("add_or_remove_one", "zero_out")
    codes = (Code(8, "add_or_remove_one"), Code(15, "add_or_remove_one", unit="user"))
    text = "steps sample from one group of the examples after the other by independent coins"
    fresh_noise = False
    independent = True
    separates_uses = True
    in_groups = True

    def mean_share(self, rate: float, separation: int) -> float:
        return rate / separation

    def rate(self, size: float, population: int, separation: int) -> float:
        return min(size * separation / population, 1.0)

    def of_uses(
        self, use: DpEvent, moves: tuple[float, ...], rate: float, separation: int, uses: int, steps: int
    ) -> DpEvent:
        # The rounds of the groups see one of an example's uses each.
        return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(rate, use) if rate < 1 else use, uses)

    def of_uses_text(self, unit: str, rate: float, separation: int) -> str:
        return f"{separation} groups of {unit}s in turns, sampled at {rate:.4g}"


class BMinSep(SamplingScheme):
    """An example that was in a step rests for the next steps; then an independent coin decides in each step.

    `tfdpfl.accounting.monte_carlo` has the sampling and the proof of its price. A pass is a whole training: the next
    one rests nothing, so its noise begins anew.
    """

    name = "b_min_sep"
    adjacencies = ("add_or_remove_one", "zero_out")
    codes = (Code(32, "add_or_remove_one"), Code(33, "add_or_remove_one", unit="user"))
    text = "an example rests for some steps after each use, and then joins a step by an independent coin"
    fresh_noise = False
    independent = True
    separates_uses = True
    one_pass = True
    tolerance = 5e-3  # each try is a simulation
    rough = CyclicPoisson.name

    def mean_share(self, rate: float, separation: int) -> float:
        return rate / (1 + (separation - 1) * rate)

    def rate(self, size: float, population: int, separation: int) -> float:
        return min(size / max(population - (separation - 1) * size, size), 1.0)

    def of_uses(
        self, use: DpEvent, moves: tuple[float, ...], rate: float, separation: int, uses: int, steps: int
    ) -> DpEvent:
        from tfdpfl.accounting import monte_carlo

        moves = (*moves, *(0.0,) * (separation - len(moves)))
        return _resting(use, moves, rate, steps, steps * self.mean_share(rate, separation), monte_carlo.RUNS)

    def of_uses_text(self, unit: str, rate: float, separation: int) -> str:
        from tfdpfl.accounting import monte_carlo

        return (
            f"one {unit} rests for {separation - 1} steps after each use, and is sampled at {rate:.4g} otherwise; "
            f"epsilon is a bound from {monte_carlo.RUNS} simulated trainings in each direction. It is too small with a "
            f"probability of at most {2 * monte_carlo.FAILURE:g}, and delta includes this"
        )


class RandomAllocation(SamplingScheme):
    """Every example joins one of the ⌈`num_examples` / `batch_size`⌉ steps of a pass ("balls in bins").

    Which one is chosen evenly, independently of all other examples and passes. An example more, or one that is blanked,
    moves no other example to another step; the number of steps is public. (If examples are replaced, nothing is
    proven here.) A pass that is cut short costs as much as a whole one.
    """

    name = "random_allocation"
    adjacencies = ("add_or_remove_one", "zero_out")
    codes = (Code(10, "add_or_remove_one"), Code(11, "add_or_remove_one", unit="user"))
    text = "every example joins one step of every epoch, chosen at random and independently of all others"
    note = (
        "Each example's step must really be chosen by itself, as tfdpfl.data.random_allocation does, so that batches "
        "vary in size; shuffled batches do not qualify."
    )
    once_a_pass = True
    independent = True

    def sampled(self, step: DpEvent, population: int, size: float) -> DpEvent:
        return _allocation(step, int(-(-population // size)))


POISSON, SHUFFLED, FIXED_SIZE, EVERY_BATCH = Poisson(), Shuffled(), FixedSize(), EveryBatch()
FIXED_ORDER, CYCLIC_POISSON, RANDOM_ALLOCATION = FixedOrder(), CyclicPoisson(), RandomAllocation()
B_MIN_SEP = BMinSep()
_ALL: tuple[SamplingScheme, ...] = (
    POISSON, SHUFFLED, FIXED_SIZE, EVERY_BATCH, FIXED_ORDER, CYCLIC_POISSON, RANDOM_ALLOCATION,
    B_MIN_SEP,
)  # fmt: skip
SCHEMES: dict[str, SamplingScheme] = {scheme.name: scheme for scheme in _ALL}
SAMPLINGS = tuple(scheme.name for scheme in _ALL if scheme.fresh_noise)
BY_CODE: dict[int, tuple[SamplingScheme, Code]] = {code.number: (s, code) for s in _ALL for code in s.codes}


def shuffled_adjacency(adjacency: str | None) -> str:
    """Returns the neighbours for which shuffled batches are priced in place of others."""
    return adjacency if adjacency in Shuffled.adjacencies else Shuffled.adjacencies[0]


def truncated_event_type(size: int | None) -> type[DpEvent]:
    """Returns dp-accounting's event of batches that are cut to a size.

    Raises:
        PrivacyError: The installed one has none.
    """
    found = getattr(dp_event, "TruncatedSubsampledGaussianDpEvent", None)
    if found is None:
        raise PrivacyError(
            f"truncated_batch_size={size} needs dp-accounting 0.6, and an older one is installed: upgrade "
            "dp-accounting, or leave it out"
        )
    return found


# A Poisson-sampled Gaussian as seen by neighbours that differ in up to `size` examples; dp-accounting 0.4 knows none.
_group = event_type("GroupDpEvent", "step", "size")


def _allocation_losses(event: DpEvent, interval: float) -> PrivacyLosses:
    from tfdpfl.accounting import allocation

    return allocation.losses(event.event.noise_multiplier, event.steps, interval)


# A pass of `steps` Gaussian sums, of which each example joins one that is chosen at random.
_allocation = event_type("RandomAllocationDpEvent", "event", "steps", losses=_allocation_losses)


def _resting_losses(event: DpEvent, interval: float) -> PrivacyLosses:
    from tfdpfl.accounting import monte_carlo

    return monte_carlo.losses(event.moves, event.rate, event.steps, event.runs, interval)


# A training of `steps` in which an example rests after each use (`event`), of which there are `mean` on average.
_resting = event_type("BMinSepDpEvent", "event", "moves", "rate", "steps", "mean", "runs", losses=_resting_losses)


def _sampled_group(rate: float, sigma: float, size: int) -> DpEvent:
    """A Gaussian sum that each of `size` examples joins by a coin of its own."""
    mixture = getattr(dp_event, "MixtureOfGaussiansDpEvent", None)
    if mixture is None:
        return _group(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), size)
    from scipy.stats import binom

    # More than `most` come with a chance that PLD itself cuts off; then all are taken to come.
    most = int(binom.isf(1e-23, size, rate))
    chances = {float(j): float(binom.pmf(j, size, rate)) for j in range(most + 1)}
    if most < size:
        chances[float(size)] = float(binom.sf(most, size, rate))
    chances = {j: chance for j, chance in chances.items() if chance > 0}
    return mixture(sigma, tuple(chances), tuple(chances.values()))
