"""Any one of (ε, σ, steps, batch size) from the others: ε is priced, the others are searched for over that price."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdpfl._lazy import dp_event
from tfdpfl._waiting import explain_wait
from tfdpfl.accounting import _checks
from tfdpfl.accounting.arguments import (
    EndlessRunArguments,
    NoiselessRunArguments,
    RunArguments,
    SizelessRunArguments,
    build_run,
    shows_arguments,
)
from tfdpfl.accounting.pricing import check_accountant, check_delta, delta_warning, is_of_pld_alone, price
from tfdpfl.accounting.run import Run
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "MOST_STEPS",
    "compute_batch_size",
    "compute_epsilon",
    "compute_noise_multiplier",
    "compute_num_steps",
    "gaussian_noise_multiplier",
    "largest_count",
    "smallest_noise_multiplier",
]

_TOLERANCE = 1e-4  # of σ, relative
_LARGEST_SIGMA = 2.0**30
_SMALLEST_SIGMA = 2.0**-10
_TRIES = 4  # of σ that a rough ε says, before a search without it
MOST_STEPS = 2**40


@shows_arguments(RunArguments)
def compute_epsilon(*, delta: float, accountant: str = "pld", **run: "Unpack[RunArguments]") -> float:
    """Returns an upper bound on the ε of a DP-SGD run at `delta`: 0.0 for no steps, infinity without noise,
    never NaN.

    The default is Poisson sampling, which `tfdpfl.data.poisson_batches` draws. `fit` shuffles arrays: their ε is that
    of `sampling="shuffle"`, which may be ten times as large.

    Args:
        num_examples: Number of training examples.
        batch_size: Number of examples in a batch; its expectation under Poisson sampling.
        noise_multiplier: σ, the standard deviation of the noise divided by the clip.
        delta: δ, strictly between 0 and 1; from `1 / num_examples` on it means nothing, which a warning says.
        num_epochs: Passes over the data, possibly a fraction: ⌈num_epochs · num_examples / batch_size⌉ steps,
            or under `"shuffle"` and `"random_allocation"` ⌈num_epochs⌉ uses of every example. Either this or
            `num_steps`.
        num_steps: Noisy updates.
        sampling: `"poisson"`, `"random_allocation"`, `"shuffle"` (what `fit` does), `"fixed_size"` or `"none"`; see
            `tfdpfl.accounting.Run`.
        num_microbatches: Groups whose mean gradient is clipped, a divisor of `batch_size`; fewer than
            `batch_size` double the sensitivity, so σ counts as σ/2. It is taken for granted that an example's
            presence does not regroup the others, so `"poisson"` and `"random_allocation"` are refused, as `fit` does.
        accountant: `"pld"` (tight) or `"rdp"`. If PLD has no answer ("fixed_size", δ below 1e-12) RDP's is
            given. RDP has no answer for "random_allocation" and `truncated_batch_size`: PLD's is given, with a warning.
            `privacy_report` names the accountant that was used.
        adjacency: Which data sets are neighbours; None takes the sampling's own: `"add_or_remove_one"` for
            poisson and none, `"zero_out"` for shuffle, `"replace_one"` for fixed_size.
        max_examples_per_user: How many examples neighbours may differ in: the ε of a user who has no more.
        truncated_batch_size: Of a larger Poisson sample a random subset of so many stays (dp-accounting 0.6).
        unit: "example" or "user": what is sampled and clipped, and counted in `num_examples` and `batch_size`.
        secure_noise: Whether the optimizer draws discrete Gaussian noise (`secure_noise=True`), which costs more: only
            Rényi DP prices it.

    Raises:
        ValueError: An argument is out of its range; the message has the remedy.
        PrivacyError: The adjacency has no price under this sampling.
    """
    made = build_run(**run)
    return _pricer(delta, accountant, made, "noise_multiplier")(made.noise_multiplier)


@shows_arguments(NoiselessRunArguments)
def compute_noise_multiplier(
    *, target_epsilon: float, delta: float, accountant: str = "pld", **run: "Unpack[NoiselessRunArguments]"
) -> float:
    """Returns the smallest noise multiplier whose ε is at most `target_epsilon`, to 0.1 %; never 0, never
    over the target. As in `compute_epsilon`, the default is Poisson sampling, and `fit` shuffles arrays.

    Args:
        target_epsilon: The ε that may not be passed, above 0.
        num_examples: As all that follow, see `compute_epsilon`.

    Raises:
        ValueError: An argument is out of its range, or there are no steps to add noise to.
        PrivacyError: No noise multiplier between 2⁻¹⁰ and 2³⁰ is the smallest one that meets the target.
    """
    target = _check_target(target_epsilon)
    begun = build_run(**run, noise_multiplier=1.0)
    if begun.participations == 0:
        raise ValueError(
            f"one of num_steps={run.get('num_steps')} and num_epochs={run.get('num_epochs')} must be above 0: without "
            "a step, ε is 0 with any noise"
        )
    return smallest_noise_multiplier(_pricer(delta, accountant, begun, "noise_multiplier"), target)


@explain_wait("searching for the noise multiplier; each try computes one epsilon")
def smallest_noise_multiplier(
    epsilon: Callable[[float], float],
    target: float,
    tolerance: float = _TOLERANCE,
    rough: Callable[[float], float] | None = None,
) -> float:
    """Returns the smallest σ, to about ``tolerance`` of it, whose ε, which must fall as σ grows, is at most ``target``.

    Args:
        rough: For an ε that takes long: another one that is about proportional to it. Few σ then have their ε computed.

    Raises:
        PrivacyError: No noise multiplier between 2⁻¹⁰ and 2³⁰ is the smallest one that meets the target.
    """
    epsilon = functools.cache(epsilon)  # a search asks for the ends of its bracket again
    found = None if rough is None else _near(rough, epsilon, target, tolerance)
    if found is not None:
        return found
    low = high = 1.0
    while epsilon(high) > target:
        low, high = high, 2 * high
        if high > _LARGEST_SIGMA:
            raise PrivacyError(f"no noise multiplier reaches target_epsilon={target:g}: raise it, or run fewer steps")
    while low == high or epsilon(low) <= target:
        low, high = low / 2, low
        if low < _SMALLEST_SIGMA:
            raise PrivacyError(f"target_epsilon={target:g} needs almost no noise, which protects nothing: lower it")

    sigma = _calibrate(epsilon, target, low, high, tolerance * low)
    nudge = tolerance
    while epsilon(sigma) > target:
        sigma, nudge = min(high, sigma * (1 + nudge)), 2 * nudge
    return sigma


def _near(
    rough: Callable[[float], float], epsilon: Callable[[float], float], target: float, tolerance: float
) -> float | None:
    """Returns such a σ, found where the rough ε says; None if the two are not proportional enough."""
    rough, met = functools.cache(rough), math.inf
    try:
        sigma = smallest_noise_multiplier(rough, target, tolerance / 10)
        for _ in range(_TRIES):
            found = epsilon(sigma)
            least = smallest_noise_multiplier(rough, target * rough(sigma) / found, tolerance / 10)
            met = min(met, sigma) if found <= target else met
            if met <= (1 + tolerance) * least:
                return met
            sigma = (1 + tolerance / 2) * least
    except (PrivacyError, ZeroDivisionError):  # no σ has such a rough ε
        return None
    return met if met <= (1 + 2 * tolerance) * least else None  # a simulated ε is not known better than this


@functools.lru_cache(maxsize=64)
def gaussian_noise_multiplier(epsilon: float, delta: float, times: int = 1) -> float:
    """Returns the smallest noise multiplier of a Gaussian mechanism that is (ε, δ) if it is used so often.

    Raises:
        PrivacyError: As `smallest_noise_multiplier`.
    """

    def spent(z: float) -> float:
        return price(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), times), delta).epsilon

    return smallest_noise_multiplier(spent, epsilon)


@shows_arguments(EndlessRunArguments)
def compute_num_steps(
    *, target_epsilon: float, delta: float, accountant: str = "pld", **run: "Unpack[EndlessRunArguments]"
) -> int:
    """Returns the largest number of steps whose ε is at most `target_epsilon`; under `"shuffle"`, as many as
    whole epochs hold.

    Args:
        target_epsilon: The ε that may not be passed, above 0.
        num_examples: As all that follow, see `compute_epsilon`.

    Raises:
        ValueError: An argument is out of its range, or a single step passes the target.
        PrivacyError: The noise is so large that even 2⁴⁰ steps meet the target.
    """
    target = _check_target(target_epsilon)
    one_step = build_run(**run, num_steps=1)
    steps_each = one_step.steps_per_pass
    pricer = _pricer(delta, accountant, one_step, "num_steps")
    epsilon = lambda uses: pricer(uses * steps_each)  # noqa: E731
    if epsilon(1) > target:
        raise ValueError(
            f"target_epsilon={target:g} is less than one use of an example costs (ε = {epsilon(1):.4g}): raise the "
            "target or noise_multiplier, or use a smaller batch"
        )

    uses = largest_count(epsilon, target)
    if uses is None:
        raise PrivacyError(
            f"noise_multiplier={one_step.noise_multiplier:g} meets target_epsilon={target:g} after any number of "
            "steps: lower it"
        )
    return steps_each * uses


@explain_wait("searching for the number of steps; each try computes one epsilon")
def largest_count(epsilon: Callable[[int], float], target: float) -> int | None:
    """Returns the largest number whose ε, which must not fall as the number grows, is at most ``target``, as that of 1
    is; None if 2⁴⁰ meets it, too."""
    low, high = 1, 8
    while epsilon(high) <= target:
        low, high = high, 8 * high
        if high > MOST_STEPS:
            return None
    return _largest(epsilon, target, low, high)


@shows_arguments(SizelessRunArguments)
def compute_batch_size(
    *, target_epsilon: float, delta: float, accountant: str = "pld", **run: "Unpack[SizelessRunArguments]"
) -> int:
    """Returns the largest (expected) batch size whose ε is at most `target_epsilon`: with Poisson sampling, the
    largest sampling rate times `num_examples`.

    Args:
        target_epsilon: The ε that may not be passed, above 0.
        num_examples: As all that follow, see `compute_epsilon`.

    Raises:
        ValueError: An argument is out of its range, or batches of one example pass the target.
        PrivacyError: The batch size does not change ε under this sampling.
    """
    target = _check_target(target_epsilon)
    smallest = build_run(**run, batch_size=1)
    if not smallest.scheme.amplifies:
        raise PrivacyError(
            f"sampling={smallest.sampling!r} costs the same at every batch size, so no batch size is the largest: give "
            "batch_size"
        )
    epsilon = _pricer(delta, accountant, smallest, "batch_size")
    if epsilon(1) > target:
        raise ValueError(
            f"target_epsilon={target:g} is less than batches of one example cost (ε = {epsilon(1):.4g}): raise the "
            "target or noise_multiplier, or use fewer steps"
        )
    n = smallest.num_examples
    with explain_wait("searching for the batch size; each try computes one epsilon"):
        return n if epsilon(n) <= target else _largest(epsilon, target, 1, n)


def _largest(epsilon: Callable[[int], float], target: float, low: int, high: int) -> int:
    """Returns the largest number whose ε meets the target, as that of `low` does and that of `high` does not."""
    number = max(_calibrate(lambda number: epsilon(round(number)), target, low, high, 0.5, discrete=True), 1)
    while epsilon(number) > target:
        number -= 1
    while epsilon(number + 1) <= target:
        number += 1
    return number


def _check_target(target_epsilon: float) -> float:
    return _checks.real("target_epsilon", target_epsilon, "give the ε to stay within", above=0)


def _pricer(delta: float, accountant: str, run: Run, field: str) -> Callable[[Any], float]:
    """Returns the ε of the run with another value of a field, remembered, since searches ask for their bracket's ends
    again; checks its arguments at once.
    """
    delta, accountant = check_delta(delta), check_accountant(accountant)
    too_large = delta_warning(delta, run.num_examples)
    if too_large:
        warnings.warn(too_large, stacklevel=4)  # at the caller of a function that `shows_arguments` wraps
    if accountant == "rdp" and is_of_pld_alone(run.dp_event):
        what = f"sampling={run.sampling!r}" if run.truncated_batch_size is None else "truncated_batch_size"
        warnings.warn(
            f"accountant='rdp' has no ε for {what}, so this ε is that of accountant='pld'. Leave accountant out.",
            stacklevel=4,
        )

    @functools.cache
    def epsilon(value: Any) -> float:
        event = dataclasses.replace(run, **{field: value}).dp_event
        return price(event, delta, accountant, str(run.adjacency)).epsilon

    return epsilon


def _calibrate(
    epsilon: Callable[[Any], float], target: float, low: float, high: float, tolerance: float, discrete: bool = False
) -> Any:
    """dp-accounting's root finder over our price, between two values of which one meets the target. The
    caller verifies.
    """
    import dp_accounting

    class Price:
        """Gives `calibrate_dp_mechanism` what it needs of an accountant."""

        ledger = dp_accounting.NoOpDpEvent()

        def compose(self, value: object) -> "Price":
            self.value = value
            return self

        def get_epsilon(self, target_delta: float) -> float:
            return min(epsilon(self.value), 10 * target)  # an infinite end would turn the secant into NaN

    try:
        return dp_accounting.calibrate_dp_mechanism(
            Price,
            lambda value: value,
            target,
            0.5,  # the price has its δ
            dp_accounting.ExplicitBracketInterval(low, high),
            discrete,
            tolerance,
        )
    except getattr(dp_accounting.mechanism_calibration, "NoOptimumFoundError", ()):
        # 0.4 gives up where 0.6 bisects; the bracket has an end that meets the target.
        return low if discrete else high
