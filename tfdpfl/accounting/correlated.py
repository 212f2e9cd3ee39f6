"""A run with correlated noise, as the accountant sees it: one Gaussian mechanism for all its steps, or one sampled for
each round of the groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, Json
from tfdpfl.accounting import _checks
from tfdpfl.accounting._checks import choice, real, whole
from tfdpfl.accounting.calibration import smallest_noise_multiplier
from tfdpfl.accounting.participation import most_participations
from tfdpfl.accounting.pricing import price
from tfdpfl.accounting.run import UNITS
from tfdpfl.accounting.sampling import CYCLIC_POISSON, FIXED_ORDER, SCHEMES, SHUFFLED, SamplingScheme
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.strategies import ERRORS, INDEPENDENT, KINDS, Noise, Uses, as_noise

__all__ = [
    "Compared",
    "CorrelatedRun",
    "compare",
    "compute_correlated_noise_multiplier",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedRun:
    """One training run with correlated noise, validated.

    Args:
      noise: `tfdpfl.noise.Tree`, `Banded`, `BandedInverse` or `BLT`, as the optimizer has it.
      noise_multiplier: for `Tree` a node's standard deviation over the clip; else the base normals' over the clip and
        the sensitivity that the noise was made for.
      num_steps: noisy updates.
      min_separation: fewest steps from one use of an example to its next, in what ran.
      max_participations: most uses of an example; None for as many as there is room for. With ``sampling_rate`` there
        is no such bound, because an example may be taken in every round of the groups, so it is not in the price.
      sampling_rate: of cyclic Poisson sampling: ``min_separation`` groups, to one of which each example was assigned by
        itself, take turns, and an example is taken with this probability when it is its group's. None for none.
      adjacency: ``"zero_out"`` (one example contributes nothing; the default) or ``"replace_one"``; with a sampling
        rate ``"add_or_remove_one"`` (the default) or ``"zero_out"``.
      unit: what is clipped, and what an "example" is then in all of the above: ``"example"`` or ``"user"``.
      sampling: with ``sampling_rate``, the name of the sampling that it is of.

    Raises:
      ValueError: an argument is out of its range.
      PrivacyError: the adjacency is not one that this can be priced for.
    """

    noise: Noise
    noise_multiplier: float
    num_steps: int
    min_separation: int = 1
    max_participations: int | None = None
    sampling_rate: float | None = None
    adjacency: str | None = None
    unit: str = "example"
    sampling: str = CYCLIC_POISSON.name

    def __post_init__(self) -> None:
        _checks.keep(self, "noise", as_noise(self.noise))
        _checks.put(self, real, "noise_multiplier", "give the optimizer's noise_multiplier (0 for none)", at_least=0)
        _checks.put(self, whole, "num_steps", 0, "count the noisy updates")
        _checks.put(self, whole, "min_separation", 1, "count the steps from one use of an example to its next")
        _checks.known(self, whole, "max_participations", 0, "count the uses of an example, or leave it out")
        remedy = "give the probability that an example of a group is sampled, or None"
        _checks.known(self, _rate, "sampling_rate", remedy)
        _checks.put(self, choice, "unit", UNITS)
        _checks.put(self, choice, "sampling", tuple(s.name for s in SCHEMES.values() if s.starts_anew))
        offered = self._offered
        _checks.keep(self, "adjacency", offered[0] if self.adjacency is None else self.adjacency)
        if self.adjacency not in offered:
            how = "without sampling" if self.sampling_rate is None else "with cyclic sampling"
            raise PrivacyError(
                f"no ε is known for correlated noise {how} under adjacency={self.adjacency!r}: use "
                f"{' or '.join(map(repr, offered))}"
            )

    @property
    def _offered(self) -> tuple[str, ...]:
        """The neighbours that this can be priced for. They differ in what one example contributes; who else is in a
        batch, and when, stays. An example more would make other batches of a fixed or shuffled order, which has no
        price."""
        return (FIXED_ORDER if self.sampling_rate is None else CYCLIC_POISSON).adjacencies

    @property
    def steps(self) -> int:
        """The number of noisy updates."""
        return self.num_steps

    def stated_for(self, adjacency: str) -> DpEvent | None:
        """Returns the event for these neighbours, or None if it has none."""
        return dataclasses.replace(self, adjacency=adjacency).dp_event if adjacency in self._offered else None

    @property
    def participations(self) -> int:
        """How many noisy updates one example can touch."""
        return most_participations(*self._uses)

    @property
    def _uses(self) -> Uses:
        return Uses(
            self.num_steps, self.min_separation, None if self.sampling_rate is not None else self.max_participations
        )

    @property
    def amplified(self) -> bool:
        """Whether the sampling is in the price: no two uses of an example meet in the noise."""
        uses_meet = self.noise.event_of_a_use(self._uses, 1.0) is None
        return self.sampling_rate is not None and not uses_meet

    @property
    def dp_event(self) -> DpEvent:
        """Returns the event of the run for an accountant. Its σ is relative to the sensitivity under `adjacency`."""
        if self.participations == 0:
            return dp_event.NoOpDpEvent()
        if self.noise_multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        # Of the base normals, in what one example can add to a step.
        stddev = self.noise_multiplier * self.noise.unit / (2 if self.adjacency == "replace_one" else 1)
        use = self.noise.event_of_a_use(self._uses, stddev)
        if use is None or self.sampling_rate is None:
            return self.noise.event(self._uses, stddev)
        column = np.abs(np.trim_zeros(self.noise.matrix(min(self.num_steps, self.min_separation))[:, 0], "b"))
        return SCHEMES[self.sampling].of_uses(
            use, tuple((column / stddev).tolist()), self.sampling_rate, self.min_separation, self.participations,
            self.num_steps,
        )  # fmt: skip

    @property
    def rough(self) -> CorrelatedRun | None:
        """Returns a run that takes no simulation and has about proportional ε; None if this one takes none."""
        scheme = SCHEMES[self.sampling]
        if scheme.rough is None or self.sampling_rate is None:
            return None
        share = scheme.mean_share(self.sampling_rate, self.min_separation)
        rate = SCHEMES[scheme.rough].rate(share, 1, self.min_separation)
        return dataclasses.replace(self, sampling=scheme.rough, sampling_rate=rate)

    def text(self) -> str:
        how = f"at most {self.participations} uses of one {self.unit}, {self.min_separation} or more steps apart"
        if self.sampling_rate is not None:
            how = SCHEMES[self.sampling].of_uses_text(self.unit, self.sampling_rate, self.min_separation)
            how += "" if self.amplified else " (not in the price)"
        what = f"{self.noise.text()} noise, noise multiplier {self.noise_multiplier:.4g}"
        return f"{self.num_steps} steps with {what}: {how}"

    def to_dict(self) -> Json:
        """The run as values that JSON can hold."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.unit == "example":  # as releases save it that know no other unit
            del fields["unit"]
        if self.sampling == CYCLIC_POISSON.name:
            del fields["sampling"]
        return {**fields, "noise": self.noise.to_dict()}

    @classmethod
    def from_dict(cls, saved: Json) -> CorrelatedRun:
        """The run that `to_dict` saved."""
        return cls(**saved)


def _rate(name: str, value: object, remedy: str) -> float:
    rate = real(name, value, remedy, above=0)
    if rate > 1:
        raise ValueError(f"{name}={value!r} is above 1: {remedy}")
    return rate


def compute_correlated_noise_multiplier(
    noise: Noise,
    *,
    target_epsilon: float,
    delta: float,
    num_steps: int,
    min_separation: int | None = None,
    max_participations: int | None = None,
    sampling_rate: float | None = None,
    adjacency: str | None = None,
    accountant: str = "pld",
    sampling: str = CYCLIC_POISSON.name,
) -> float:
    """The smallest noise multiplier at which a run with this noise costs no more than ``target_epsilon``.

        noise = tfdpfl.noise.Banded(bands=4, min_separation=240, max_participations=10)
        sigma = tfdpfl.noise.compute_correlated_noise_multiplier(noise, target_epsilon=8, delta=1e-5, num_steps=2400)

    Args:
      noise: as the optimizer is to have it.
      target_epsilon: ε that must not be passed.
      delta: δ of it.
      num_steps, sampling_rate, adjacency: as in `CorrelatedRun`.
      min_separation, max_participations: of the data; None takes those that the noise was made for. With
        ``sampling_rate`` the groups' rounds count, ``num_steps / min_separation`` of them, and not
        ``max_participations``.
      accountant: "pld" or "rdp".
      sampling: with ``sampling_rate``, which sampling it is of: ``"cyclic_poisson"`` or ``"b_min_sep"``. Of the second
        each try is a simulation, of which there are two to four, or about ten in rare cases. The noise multiplier may
        be 1 % too large.

    Raises:
      ValueError: an argument is out of its range.
      PrivacyError: no noise multiplier between 2^-10 and 2^30 is the smallest one that meets the target.
    """
    target = real("target_epsilon", target_epsilon, "give the ε to keep to", above=0)

    def run_of(z: float) -> CorrelatedRun:
        return CorrelatedRun(
            noise=noise, noise_multiplier=z, num_steps=num_steps, sampling_rate=sampling_rate, adjacency=adjacency,
            min_separation=noise.min_separation if min_separation is None else min_separation,
            max_participations=noise.max_participations if max_participations is None else max_participations,
            sampling=sampling,
        )  # fmt: skip

    def epsilon(run: CorrelatedRun) -> float:
        return price(run.dp_event, delta, accountant, str(run.adjacency)).epsilon

    rough = None if run_of(1.0).rough is None else lambda z: epsilon(run_of(z).rough or run_of(z))
    return smallest_noise_multiplier(lambda z: epsilon(run_of(z)), target, SCHEMES[sampling].tolerance, rough)


class Compared(NamedTuple):
    """One line of `compare`: a noise, the sampling to draw its batches with, and what the pair reaches.

    Attributes:
      noise: the noise; `Banded` of one band is independent noise, for which you leave ``noise=`` out.
      error: of the running sums, in clips.
      noise_multiplier: the one that the error is at.
      sampling: the name of the sampling, as the batches of `tfdpfl.data` declare it.
    """

    noise: Noise
    error: float
    noise_multiplier: float
    sampling: str


def compare(
    num_steps: int,
    min_separation: int = 1,
    max_participations: int | None = None,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    sampling_rate: float | None = None,
    kind: str = "rms",
) -> list[Compared]:
    """Compares pairs of noise and sampling by the error of the running sums at equal privacy, the least first.

        for line in tfdpfl.noise.compare(640, 64, 10, target_epsilon=2, delta=1e-5, sampling_rate=1 / 64):
            print(f"{line.error:8.2f} {line.sampling} {line.noise.text()}")

    The error is the standard deviation of the noise in a sum over the steps, in clips: what the weights of plain SGD
    have of it, over the learning rate. ``Banded(bands=1)`` is independent noise. Batches have the same mean size with
    each sampling. Neighbours differ in the contribution of one example (zero-out).

    Args:
      num_steps: noisy updates.
      min_separation: fewest steps from one use of an example to its next: the steps of an epoch, if each has the same
        order; 1 if arrays are shuffled.
      max_participations: most uses of an example (epochs); None for as many as there is room for.
      target_epsilon, delta: the privacy that all are to have; None for that of one Gaussian mechanism of σ = 1.
      sampling_rate: the mean size of a batch over the number of examples. With it and a target the samplings that lower
        ε are compared, too: independent noise with each of them, and bands with groups that are sampled in turns.
      kind: ``"rms"`` or ``"max"`` over the steps.

    Returns:
      The pairs. ``tfdpfl.plots.noise_errors`` draws them.

    Raises:
      ValueError: an argument is out of its range, or one of target_epsilon and delta is missing.
    """
    if (target_epsilon is None) != (delta is None) or (sampling_rate is not None and target_epsilon is None):
        raise ValueError("Give target_epsilon and delta together, and sampling_rate only with them.")
    remedy = "give the mean size of a batch over the number of examples"
    sampling_rate = _checks.optional(_rate, "sampling_rate", sampling_rate, remedy)
    kind = choice("kind", kind, ERRORS)
    num_steps = whole("num_steps", num_steps, 1, "count the noisy updates")
    base = Noise(min_separation=min_separation, max_participations=max_participations)
    uses = Uses(num_steps, base.min_separation, base.max_participations)
    uses = uses._replace(max_participations=most_participations(*uses))
    noises = [noise for each in KINDS.values() for noise in each.candidates(uses, kind)]
    sigma = 1.0
    if target_epsilon is not None and delta is not None:
        sigma = compute_correlated_noise_multiplier(
            INDEPENDENT, target_epsilon=target_epsilon, delta=delta, num_steps=1
        )
    unsampled = SHUFFLED.name if uses.min_separation == 1 else FIXED_ORDER.name
    found = [
        Compared(noise, sigma * noise.error(num_steps, kind), sigma * noise.sensitivity(*uses) / noise.unit, unsampled)
        for noise in noises
    ]
    if sampling_rate is not None and target_epsilon is not None and delta is not None:
        found += _sampled(num_steps, sampling_rate, kind, target_epsilon, delta)
    return sorted(found, key=lambda line: line.error)


def _sampled(num_steps: int, rate: float, kind: str, target: float, delta: float) -> Iterator[Compared]:
    """Yields the pairs of which the sampling lowers ε."""
    independent = _independent(num_steps, rate, target, delta)
    for noise, multiplier, sampling in (*_in_groups(num_steps, rate, kind, target, delta), *independent):
        variances = noise.variances(num_steps)
        error = math.sqrt(variances.max() if kind == "max" else variances.mean())
        yield Compared(noise, multiplier * noise.unit * error, multiplier, sampling)


def _in_groups(
    num_steps: int, rate: float, kind: str, target: float, delta: float
) -> Iterator[tuple[Noise, float, str]]:
    """Yields the noises whose price has the sampling of groups in turns, with their noise multipliers."""
    for noise in [n for each in KINDS.values() for n in each.sampled_candidates(num_steps, rate, kind)]:
        b = noise.min_separation
        if b > 1:  # one group is plain Poisson sampling
            multiplier = compute_correlated_noise_multiplier(
                noise, target_epsilon=target, delta=delta, num_steps=num_steps, min_separation=b,
                max_participations=-(-num_steps // b), sampling_rate=b * rate,
            )  # fmt: skip
            yield noise, multiplier, CYCLIC_POISSON.name


def _independent(num_steps: int, rate: float, target: float, delta: float) -> Iterator[tuple[Noise, float, str]]:
    """Yields independent noise with each sampling that lowers ε for the neighbours of the others."""
    population: Any = round(1 / rate, 6)  # of which a batch has one on average
    neighbours = FIXED_ORDER.adjacencies[0]
    for scheme in SCHEMES.values():
        if not (scheme.fresh_noise and scheme.amplifies and neighbours in scheme.adjacencies):
            continue
        times = -(-num_steps // math.ceil(population)) if scheme.counts_passes else num_steps

        def epsilon(z: float, scheme: SamplingScheme = scheme, times: int = times) -> float:
            event = dp_event.GaussianDpEvent(z)
            event = scheme.sampled(event, population, 1) if rate < 1 else event
            try:
                return price(dp_event.SelfComposedDpEvent(event, times), delta, "pld", neighbours).epsilon
            except PrivacyError:  # with so little noise there is no price
                return math.inf

        yield INDEPENDENT, smallest_noise_multiplier(epsilon, target, 1e-3), scheme.name
