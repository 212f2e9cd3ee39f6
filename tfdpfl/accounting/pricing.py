"""The one place that turns what ran into ε: a dp-accounting event, an accountant, an adjacency."""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from tfdpfl._lazy import dp_event
from tfdpfl._types import Arrays, DpEvent, PrivacyLosses
from tfdpfl._waiting import explain_wait
from tfdpfl.accounting import _checks
from tfdpfl.accounting.run import ADJACENCIES
from tfdpfl.errors import PrivacyError

__all__ = [
    "ACCOUNTANTS",
    "LARGEST_PURE_EPSILON",
    "Price",
    "are_gaussian",
    "beyond_support",
    "check_accountant",
    "check_delta",
    "delta_warning",
    "gaussian_epsilon",
    "is_known_to_renyi_dp",
    "is_of_pld_alone",
    "leaves_of",
    "mu_of_gaussians",
    "price",
]

ACCOUNTANTS = ("pld", "rdp")
# Classes of dp-accounting, which has no types and is imported by the first price.
Relation: TypeAlias = Any
Accountant: TypeAlias = Any
Leaves = Sequence[tuple[DpEvent, int]]

# dp-accounting's own orders are doubled from 64 to 1024; with these, large σ and small ε are not overpriced.
# Every order is a valid bound, so more of them only lower ε.
_MORE_ORDERS = (96, 192, 384, 768, 2048)
# Below, what the numbers lose elsewhere (tails that are cut off, plain Gaussians on a grid) is not far under δ either.
_SMALLEST_PLD_DELTA = 1e-12
# Rounding in the convolutions of sampled steps moves δ, either way, by up to a tenth of this a step, as measured
# where sampling at a rate near 1 has the closed form of none.
_ROUNDING_OF_A_STEP = 2.0**-52
# Putting two distributions together moves it by up to 3e-15, as measured: the share of so many steps.
_FEWEST_ADDED = 16
# Of 10^7 sampled steps PLD's price takes half a minute and is 0.3 % below RDP's.
_MOST_SAMPLED_STEPS = 3_000_000
# Of more, RDP's price is taken.
_MOST_RANDOMIZED_RESPONSES = 1000
# What rounding may take off a sampled step's Rényi divergence, times (order - 1) / order. As measured where the
# divergence itself is far below that: 1.5 of 2^-52 at whole orders, 13 at others (dp-accounting 0.4); this is 64.
_ROUNDING_OF_A_DIVERGENCE = 2.0**-46
# Where the noise of our generators ends, in standard deviations: a radius is made from a word of 64 bits, and
# sqrt(2 log 2^64) is 9.42. Noise that lies further out for one data set than it can for the other gives it away.
SUPPORT = 9.4
# A point of the grid takes dp-accounting as long for a mixture of Gaussians as 25 do for a sampled one: 8000 points at
# most, 2 seconds.
_MIXTURE_POINT = 25
# A mechanism of a larger pure ε releases the truth: the probability of anything else is no normal float.
LARGEST_PURE_EPSILON = 700.0
# One example is in as many nodes of a tree, at most.
_NOISES_OF_A_TREE = 64
# What may be cut off both tails of losses that are put together, as in dp-accounting.
_TAIL = 1e-15
_NUMERICAL = (ValueError, ArithmeticError, MemoryError, IndexError)


def delta_warning(delta: float, num_examples: int | None) -> str | None:
    """Returns a warning about a δ that is too large to mean anything."""
    if num_examples is None or delta < 1 / num_examples:
        return None
    return (
        f"delta = {delta:g} is not below 1 / num_examples = {1 / num_examples:g}: even a release of one whole example "
        "could meet this guarantee."
    )


def check_delta(delta: float) -> float:
    """Returns `delta` as a float, or raises a `ValueError` with the remedy."""
    return _checks.probability("delta", delta, "use a value well below 1 / num_examples, for example 1e-5")


def check_accountant(accountant: str) -> str:
    """Returns the name of an accountant, or raises a `ValueError` with those that there are."""
    return _checks.choice("accountant", accountant, ACCOUNTANTS)


class Price(NamedTuple):
    """An ε, with the accountant that proved it.

    Attributes:
        epsilon: An upper bound; infinite where nothing is promised.
        accountant: `"pld"` or `"rdp"`, which can be the second where the first was asked for.
    """

    epsilon: float
    accountant: str


@explain_wait("computing epsilon")
def price(event: DpEvent, delta: float, accountant: str = "pld", adjacency: str = "add_or_remove_one") -> Price:
    """Returns the smallest ε that is proven for `event` at `delta`.

    ε is an upper bound, never NaN, and infinite where nothing is promised. This includes an event whose noise no float
    can express, whatever it is composed with. Noise that a computer draws ends at
    `SUPPORT` standard deviations. What that loses is taken from δ. If nothing of δ is left, ε is infinite.

    The price of the same steps in another number is cheap, since a step's privacy losses are remembered.

    Args:
        event: What ran. Noise multipliers in it are relative to the sensitivity under `adjacency`. For example, a
            clipped sum of examples under `"replace_one"` has sensitivity 2C, so its event holds σ/2.
        delta: δ, strictly between 0 and 1.
        accountant: `"pld"` (privacy loss distributions, Doroshenko et al. 2022, arXiv:2207.04380) or `"rdp"`
            (Mironov et al. 2019, arXiv:1908.10530, with the conversion of Canonne et al. 2020,
            arXiv:2004.00010, Proposition 12). If the first does not know the event, takes minutes (over
            3 million sampled steps), or fails or loses to the second numerically, the second's ε is taken, and
            named.
        adjacency: `"add_or_remove_one"`, `"replace_one"` or `"zero_out"`.

    Raises:
        ValueError: `delta`, `accountant` or `adjacency` is not one of those.
        PrivacyError: No accountant knows the event under this adjacency.
    """
    delta, accountant = check_delta(delta), check_accountant(accountant)
    adjacency = _checks.choice("adjacency", adjacency, ADJACENCIES)
    leaves = tuple((leaf, n) for leaf, n in leaves_of(event) if n)
    try:
        return _price(leaves, delta, accountant, adjacency)
    except TypeError:  # an event that holds a list is no key of a cache
        return _price.__wrapped__(leaves, delta, accountant, adjacency)


@functools.lru_cache(maxsize=256)
def _price(leaves: tuple[tuple[DpEvent, int], ...], delta: float, accountant: str, adjacency: str) -> Price:
    if any(_releases_the_truth(leaf) for leaf, _ in leaves):
        return Price(math.inf, accountant)
    if any(_is_group(leaf) for leaf, _ in leaves):
        return _price_of_groups(leaves, delta, accountant, adjacency)
    kept = delta - sum(n * beyond_support(leaf) for leaf, n in leaves)
    proven = _bounds(leaves, kept if kept > 0 else delta, accountant, adjacency)
    if not proven:
        raise PrivacyError(_no_price(leaves, adjacency))
    return min(proven) if kept > 0 else Price(math.inf, accountant)


def _price_of_groups(leaves: Leaves, delta: float, accountant: str, adjacency: str) -> Price:
    bound = _price(tuple((_dominating(leaf), n) for leaf, n in leaves), delta, accountant, adjacency)
    sizes = {leaf.size for leaf, _ in leaves if _is_group(leaf)}
    if len(sizes) > 1 or not all(_is_group(leaf) for leaf, _ in leaves):
        return bound
    ones = tuple((leaf.step, n) for leaf, n in leaves)
    return min(bound, _converted(ones, delta, accountant, adjacency, *sizes))


def _bounds(leaves: Leaves, delta: float, accountant: str, adjacency: str) -> list[Price]:
    """Returns what each accountant that knows all of the events proves."""
    discrete = any(_is_discrete(leaf) for leaf, _ in leaves)
    leaves = tuple((_as_gaussian(leaf), n) for leaf, n in leaves)
    exact = accountant == "pld" and not discrete and are_gaussian(leaves)  # RDP's price is no less
    rdp = None if exact else _rdp_epsilon(leaves, delta, adjacency, whole_orders=discrete)
    pld = None
    # Some events are known to PLD alone, discrete noise to RDP alone.
    if (accountant == "pld" and not discrete) or any(_is_of_pld_alone(leaf) for leaf, _ in leaves):
        pld = _pld_epsilon(leaves, delta, adjacency, guide=rdp)
    return [Price(epsilon, name) for name, epsilon in (("pld", pld), ("rdp", rdp)) if epsilon is not None]


def are_gaussian(leaves: Leaves) -> bool:
    """Returns whether all of the events are Gaussian mechanisms."""
    return all(isinstance(leaf, dp_event.GaussianDpEvent) for leaf, _ in leaves)


def _releases_the_truth(event: DpEvent) -> bool:
    """Whether an event has no noise that floats can express, at any depth of what it is made of.

    Accountants disagree about such an event. Privacy loss distributions even drop an infinite loss, and return ε = 0.
    """
    if 0 in (getattr(event, "sampling_probability", 1), getattr(event, "sample_size", 1)):
        return False  # nobody is ever sampled
    for name in ("event", "step", "gaussian"):
        if hasattr(event, name):
            return any(n and _releases_the_truth(inner) for inner, n in leaves_of(getattr(event, name)))
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return True
    if hasattr(event, "num_buckets"):  # randomized response
        return not event.noise_parameter / event.num_buckets >= math.exp(-LARGEST_PURE_EPSILON - 1)
    if hasattr(event, "sensitivity"):  # discrete Laplace noise
        return not event.noise_parameter * event.sensitivity <= LARGEST_PURE_EPSILON + 1
    if isinstance(event, dp_event.LaplaceDpEvent):
        return not event.noise_multiplier >= 1 / (LARGEST_PURE_EPSILON + 1)
    deviation = getattr(event, "noise_multiplier", getattr(event, "standard_deviation", None))
    return deviation is not None and not deviation > 0


def _no_price(leaves: Leaves, adjacency: str) -> str:
    sampled = any(isinstance(leaf, dp_event.PoissonSampledDpEvent) for leaf, _ in leaves)
    if any(_is_of_pld_alone(leaf) for leaf, _ in leaves) and adjacency == "add_or_remove_one":
        return (
            "only the PLD accountant computes ε for truncated batches and random allocation, and it has no figure "
            "here: use a δ of at least 1e-12, and at most 3 million steps"
        )
    if adjacency == "replace_one" and sampled and not _pld_replaces():
        return (
            "sampling='poisson' under adjacency='replace_one' needs dp-accounting 0.6, and an older one is installed: "
            "upgrade dp-accounting, or use adjacency='add_or_remove_one'"
        )
    events = ", ".join(sorted({str(leaf) for leaf, _ in leaves}))
    return (
        f"no accountant knows an ε of {events} for adjacency={adjacency!r}: give the adjacency that its mechanism is "
        "stated for, or the other accountant"
    )


def beyond_support(leaf: DpEvent) -> float:
    """The δ that a use of the event loses where its noise ends.

    Shifted noise is where the other noise cannot be with the probability that noise passes SUPPORT minus the shift,
    in standard deviations. A generator's normals come in pairs of one radius, whose tail is exp(-r²/2).
    """
    if hasattr(leaf, "gaussian"):
        return sum(number * _tail(shift) for number, shift in leaf.shifts)
    if hasattr(leaf, "sensitivities"):
        chances = zip(leaf.sensitivities, leaf.sampling_probs, strict=True)
        return sum(p * _tail(abs(s), leaf.standard_deviation) for s, p in chances if s)
    if hasattr(leaf, "event"):
        # In the mean, so many runs of a search could show where noise ends.
        chance = getattr(leaf, "sampling_probability", 1.0) * getattr(leaf, "mean", 1.0)
        return chance * sum(n * beyond_support(inner) for inner, n in leaves_of(leaf.event))
    if _is_truncated(leaf):
        from scipy.stats import binom

        # Where a batch is full an example that is in it pushed another out.
        n, rate, size = leaf.dataset_size, leaf.sampling_probability, leaf.truncated_batch_size
        one, two = (_tail(moved, leaf.noise_multiplier) for moved in (1, 2))
        return rate * one + float(binom.sf(size - 1, n - 1, rate)) * two
    laplace = tuple(getattr(dp_event, name, ()) for name in ("LaplaceDpEvent", "DiscreteLaplaceDpEvent"))
    sigma = None if isinstance(leaf, laplace) else getattr(leaf, "noise_multiplier", None)
    if sigma is None:
        return 0.0
    uses = _NOISES_OF_A_TREE if "TreeAggregation" in type(leaf).__name__ else 1
    return uses * _tail(1, sigma)


def _tail(moved: float, deviation: float = 1.0) -> float:
    """The probability that noise passes its end, less how far it is moved."""
    shift = moved / deviation if deviation > 1e-300 else math.inf
    return math.exp(-((SUPPORT - shift) ** 2) / 2) if shift < SUPPORT else 1.0


def _is_discrete(leaf: DpEvent) -> bool:
    return getattr(leaf, "discrete", False) or (hasattr(leaf, "event") and _is_discrete(leaf.event))


def _as_gaussian(leaf: DpEvent) -> DpEvent:
    """The Gaussian mechanism that an event of several noises, or of discrete ones, is priced as."""
    import attr

    if hasattr(leaf, "gaussian"):
        return leaf.gaussian
    return attr.evolve(leaf, event=_as_gaussian(leaf.event)) if hasattr(leaf, "event") else leaf


def _rdp_epsilon(leaves: Leaves, delta: float, adjacency: str, whole_orders: bool = False) -> float | None:
    """ε by Rényi DP; None if an event is not supported."""
    import numpy as np
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    leaves = [(_dominating(leaf), n) for leaf, n in leaves]
    drawn = [_is_blanked_subset(leaf, adjacency) for leaf, _ in leaves]
    every_order, whole = _orders()
    for orders in (whole,) if whole_orders else (every_order, whole):
        relation = _relation(functools.partial(rdp.RdpAccountant, orders), leaves, drawn, adjacency)
        if relation is None:
            return None
        try:
            divergences = _composed_divergences(leaves, drawn, orders, relation)
        except _NUMERICAL:  # the series of a fractional order failed: integer orders are finite sums
            continue
        with _numerics():
            return _converted_divergences(np.asarray(orders), divergences, delta)
    return math.inf


def is_known_to_renyi_dp(event: DpEvent, adjacency: str) -> bool:
    """Returns whether Rényi DP, in which the best of several runs is priced, knows an ε of an event."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    leaves = [(_dominating(leaf), n) for leaf, n in leaves_of(event)]
    drawn = [_is_blanked_subset(leaf, adjacency) for leaf, _ in leaves]
    make = functools.partial(rdp.RdpAccountant, _orders()[0])
    return _relation(make, leaves, drawn, adjacency) is not None


@functools.cache
def _orders() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns all orders at which divergences are computed, and those that are whole numbers."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    every = (*rdp.DEFAULT_RDP_ORDERS, *_MORE_ORDERS)
    return every, tuple(order for order in every if order == int(order))


def _composed_divergences(
    leaves: Leaves, drawn: Sequence[bool], orders: tuple[float, ...], relation: Relation
) -> Arrays:
    """Returns the Rényi divergences of all events together; ``drawn`` says which are blanked subsets."""
    import numpy as np

    divergences = np.zeros(len(orders))
    for (leaf, n), own in zip(leaves, drawn, strict=True):
        divergence = _cached(_divergences, leaf.event if own else leaf, orders, relation)
        if own:  # to be blanked is a case of being replaced, which moves the sum by twice as much
            replaced = _cached(_divergences, _halved(leaf), orders, *_relations("replace_one"))
            divergence = np.fmin(divergence, replaced)
        divergences = divergences + n * divergence
    # A sampled step's divergence may be below what a float resolves, and there may be 10^12 steps.
    by_order = np.asarray(orders) / (np.asarray(orders) - 1)
    divergences = divergences + _sampled_steps(leaves) * _ROUNDING_OF_A_DIVERGENCE * by_order
    # A divergence that rounds to below zero is an error in 0.4 and ε = 0 in 0.6; a NaN order would win the argmin.
    if all(divergences == 0):
        return divergences
    return np.where(np.isnan(divergences), np.inf, np.maximum(divergences, 1e-12))


def _converted_divergences(orders: Arrays, divergences: Arrays, delta: float) -> float:
    """Returns dp-accounting's ε of Rényi divergences. It visits the orders one by one, so it gets those alone at which
    one of its two bounds is least."""
    import numpy as np
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    bounds = divergences + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    least = [int(np.argmin(bounds)), int(np.argmin(divergences))]
    return float(rdp.compute_epsilon(orders[least], divergences[least], delta)[0])


def _dominating(leaf: DpEvent) -> DpEvent:
    """A sum that several examples may join, where the accountant does not know it, as one that all of them join once
    one does: more of them move it no less."""
    if _is_group(leaf):
        chance = -math.expm1(leaf.size * math.log1p(-leaf.step.sampling_probability))
        step = dp_event.GaussianDpEvent(leaf.step.event.noise_multiplier / leaf.size)
    elif hasattr(leaf, "sensitivities"):
        chance = min(sum(p for s, p in zip(leaf.sensitivities, leaf.sampling_probs, strict=True) if s), 1.0)
        step = dp_event.GaussianDpEvent(leaf.standard_deviation / max(leaf.sensitivities))
    else:
        return leaf
    return dp_event.PoissonSampledDpEvent(chance, step)


def _is_blanked_subset(leaf: DpEvent, adjacency: str) -> bool:
    """Whether a Gaussian's sum is over a fresh subset of fixed size, in which one member's contribution is blanked."""
    drawn = isinstance(leaf, dp_event.SampledWithoutReplacementDpEvent)
    return drawn and adjacency == "zero_out" and isinstance(leaf.event, dp_event.GaussianDpEvent)


def _halved(leaf: DpEvent) -> DpEvent:
    half = dp_event.GaussianDpEvent(leaf.event.noise_multiplier / 2)
    return dp_event.SampledWithoutReplacementDpEvent(leaf.source_dataset_size, leaf.sample_size, half)


def _is_truncated(leaf: DpEvent) -> bool:
    return hasattr(leaf, "truncated_batch_size")


def _is_of_pld_alone(leaf: DpEvent) -> bool:
    return _is_truncated(leaf) or hasattr(leaf, "losses")


def is_of_pld_alone(event: DpEvent) -> bool:
    """Returns whether `price` uses the PLD accountant for this event even if it is asked for RDP."""
    return any(_is_of_pld_alone(leaf) for leaf, _ in leaves_of(event))


def _untruncated(leaf: DpEvent) -> DpEvent:
    if not _is_truncated(leaf):
        return leaf
    return dp_event.PoissonSampledDpEvent(leaf.sampling_probability, dp_event.GaussianDpEvent(leaf.noise_multiplier))


def _is_sampled(leaf: DpEvent) -> bool:
    return hasattr(leaf, "event") or _is_truncated(leaf)


def _is_group(leaf: DpEvent) -> bool:
    return hasattr(leaf, "step") and hasattr(leaf, "size")


def _converted(leaves: Leaves, delta: float, accountant: str, adjacency: str, size: int) -> Price:
    """The ε of `size` examples from that of one: with (ε, δ) for one, size · ε holds for all of them at
    δ (e^(size ε) - 1) / (e^ε - 1) (Vadhan 2017, "The Complexity of Differential Privacy", Lemma 2.2)."""
    tried = math.log(delta / size)
    while tried > -60:  # below, nothing is left of δ where noise ends; the first δ that does is the best
        e, proven_by = _price(leaves, math.exp(tried), accountant, adjacency)
        if e == math.inf:
            break
        grown = math.log(size) if e == 0 else (size - 1) * e + math.log(math.expm1(-size * e) / math.expm1(-e))
        if tried + grown <= math.log(delta):
            return Price(size * e, proven_by)
        tried -= max(0.1, (tried + grown - math.log(delta)) / 8)
    return Price(math.inf, accountant)


@functools.lru_cache(maxsize=64)
def _divergences(leaf: DpEvent, orders: tuple[float, ...], relation: Relation) -> Arrays:
    """The Rényi divergences of one use of an event."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    with _numerics():
        return rdp.RdpAccountant(orders, relation).compose(leaf).rdp


def _pld_epsilon(leaves: Leaves, delta: float, adjacency: str, guide: float | None) -> float | None:
    """ε by privacy loss distributions; None if an event is not supported or the numbers fail."""
    if not leaves or guide == 0:
        return 0.0
    others = [(leaf, n) for leaf, n in leaves if not isinstance(leaf, dp_event.GaussianDpEvent)]
    mu = mu_of_gaussians(leaves)
    if not others:
        return gaussian_epsilon(mu, delta)
    left = delta - _ROUNDING_OF_A_STEP * sum(n for _, n in others)
    if delta < _SMALLEST_PLD_DELTA or left < delta / 2 or _takes_pld_too_long(others, guide):
        return None
    if guide is None and any(_is_truncated(leaf) for leaf, _ in leaves):  # where batches are rarely full, about theirs
        guide = _rdp_epsilon([(_untruncated(leaf), n) for leaf, n in leaves], left, adjacency)
    interval = _discretization(leaves, guide)
    if mu:
        others.append((dp_event.GaussianDpEvent(1 / mu), 1))
    return _composed_losses_epsilon(others, left, adjacency, interval)


def mu_of_gaussians(leaves: Leaves) -> float:
    """Returns 1/σ of the Gaussian that those among the events are together, whatever the adjacency."""
    gaussians = [(leaf.noise_multiplier, n) for leaf, n in leaves if isinstance(leaf, dp_event.GaussianDpEvent)]
    return math.hypot(*(math.sqrt(n) / max(sigma, 1e-100) for sigma, n in gaussians))


def _composed_losses_epsilon(leaves: Leaves, delta: float, adjacency: str, interval: float) -> float | None:
    """Returns the ε of privacy losses on a grid; None if PLD does not know an event or the numbers fail."""
    from dp_accounting import pld

    if adjacency == "replace_one":
        # PLD's REPLACE_ONE doubles the sensitivity of a Gaussian, sampled or not, in 0.6; our σ has it already. In 0.4
        # it does not, and no sampled one is known.
        leaves = [(_doubled(leaf), n) for leaf, n in leaves]
        if not _pld_replaces() or any(leaf is None for leaf, _ in leaves):
            return None
    drawn = [hasattr(leaf, "losses") or _is_blanked_subset(leaf, adjacency) for leaf, _ in leaves]
    relation = _relation(lambda relation: pld.PLDAccountant(relation, interval), leaves, drawn, adjacency)
    if relation is None:
        return None
    try:
        with _numerics():
            steps = [
                _cached(_repeated, leaf, interval, None if own else relation)(n)
                for (leaf, n), own in zip(leaves, drawn, strict=True)
            ]
            epsilon = _least_epsilon(functools.reduce(lambda a, b: a.compose(b), steps), delta)
    except _NUMERICAL:
        return None
    return None if math.isnan(epsilon) else max(0.0, epsilon)


def _takes_pld_too_long(leaves: Leaves, guide: float | None) -> bool:
    response = getattr(dp_event, "RandomizedResponseDpEvent", ())
    responses = sum(n for leaf, n in leaves if isinstance(leaf, response))
    too_many = guide is not None and sum(n for _, n in leaves) > _MOST_SAMPLED_STEPS
    return too_many or responses > _MOST_RANDOMIZED_RESPONSES


def _relation(
    make: Callable[[Relation], Accountant], leaves: Leaves, drawn: Sequence[bool], adjacency: str
) -> Relation:
    """Returns the relation under which an accountant knows all events but those that this module knows itself, or
    None."""
    for relation in _relations(adjacency):
        accountant = make(relation)
        if all(own or accountant.supports(leaf) for (leaf, _), own in zip(leaves, drawn, strict=True)):
            return relation
    return None


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the ε of Gaussians that are together one of σ = 1/mu (Balle & Wang 2018, arXiv:1805.06530, Theorem 8)."""
    from scipy.special import log_ndtr, ndtr

    def priced(epsilon: float) -> float:  # each rounding is taken for the worst
        a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        exceeded = ndtr(a + 1e-15 * mu) * (1 + 1e-15)
        return exceeded - math.exp(min(epsilon + log_ndtr(b), 0)) * max(1 - 1e-15 * (1 + epsilon), 0)

    if priced(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while priced(high) > delta:
        low, high = high, 2 * high
        if high > 1e18:
            return math.inf
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if priced(middle) <= delta else (middle, high)
    return high


class _Repeated:
    """The privacy loss distribution of n uses of an event; of None for a relation, where dp-accounting has none.

    A training is priced again after each epoch, so the last price's distribution is remembered, and an epoch's: to put
    them together takes a tenth of the time that composing all steps anew takes.
    """

    def __init__(self, leaf: DpEvent, interval: float, relation: Relation):
        from dp_accounting import pld

        from tfdpfl.accounting.fixed_size import losses

        if relation is not None:
            one = pld.PLDAccountant(relation, interval).compose(leaf)._pld
        else:
            one = leaf.losses(interval) if hasattr(leaf, "losses") else losses(leaf, interval)
        self._of = functools.lru_cache(maxsize=2)(_composer(one))
        self._last: tuple[int, PrivacyLosses] = (0, None)

    def __call__(self, n: int) -> PrivacyLosses:
        before, losses = self._last
        if losses is None or not _FEWEST_ADDED <= n - before <= before:
            losses = self._of(n)
        else:
            losses = _together(losses, self._of(n - before))
        self._last = n, losses
        return losses


def _together(a: PrivacyLosses, b: PrivacyLosses) -> PrivacyLosses:
    """Returns ``a.compose(b)``, which looks in a loop of Python for the tails that it cuts off."""
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    whole = a.compose(b, tail_mass_truncation=0)
    parts = [whole._pmf_remove] if whole._symmetric else [whole._pmf_remove, whole._pmf_add]
    if not all(isinstance(part, DensePLDPmf) and part._pessimistic_estimate for part in parts):
        return a.compose(b)
    return PrivacyLossDistribution(*map(_without_tails, parts))


def _without_tails(part: PrivacyLosses) -> PrivacyLosses:
    """Returns dense losses, of which those in the lower tail count as the least of the others, and those in the upper
    tail as infinite."""
    import numpy as np

    probs = part._probs
    passed = [np.append(np.cumsum(side) > _TAIL / 2, True) for side in (probs, probs[::-1])]
    low, above = (int(after.argmax()) for after in passed)
    high = max(probs.size - above, low + 1)
    kept, infinite = probs[low:high].copy(), part._infinity_mass + probs[high:].sum()
    kept[0] += probs[:low].sum()
    return type(part)(part._discretization, part._lower_loss + low, kept, infinite, True)


def _composer(one: PrivacyLosses) -> Callable[[int], PrivacyLosses]:
    """Returns ``one.self_compose``. Moments, by which it finds where tails may be cut off, are computed once: they do
    not depend on the number of uses, and take three quarters of its time. Transforms of real numbers take half of what
    its complex ones take."""
    import numpy as np
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from scipy import fft, special

    parts = [one._pmf_remove] if one._symmetric else [one._pmf_remove, one._pmf_add]
    if not all(isinstance(part, DensePLDPmf) for part in parts):
        return one.self_compose
    moments = []
    for part in parts:
        orders = np.concatenate((np.arange(-20, 0), np.arange(1, 21))) / part.size
        moments.append([(o, special.logsumexp(np.arange(part.size) * o, b=part._probs)) for o in orders])

    def of(part: PrivacyLosses, moments: list[tuple[float, float]], n: int) -> PrivacyLosses:
        bounds = [(order, (n * moment + math.log(2 / _TAIL)) / order) for order, moment in moments]
        low = max(0, *(math.floor(b) for order, b in bounds if order < 0 and math.isfinite(b)))
        high = min((part.size - 1) * n, *(math.ceil(b) for order, b in bounds if order > 0 and math.isfinite(b)))
        length = fft.next_fast_len(max(high - low + 1, part.size))
        wrapped = fft.irfft(fft.rfft(part._probs, length) ** n, length)
        infinite = _TAIL - math.expm1(n * math.log1p(-part._infinity_mass))
        probs = np.roll(wrapped, -low)[: high - low + 1]
        return DensePLDPmf(
            part._discretization, part._lower_loss * n + low, probs, infinite, part._pessimistic_estimate
        )

    return lambda n: PrivacyLossDistribution(*(of(part, m, n) for part, m in zip(parts, moments, strict=True)))


def _least_epsilon(losses: PrivacyLosses, delta: float) -> float:
    """Returns ``losses.get_epsilon_for_delta(delta)``, which visits the points of the grid one by one in Python."""
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    epsilon = 0.0
    for part in [losses._pmf_remove] if losses._symmetric else [losses._pmf_remove, losses._pmf_add]:
        if isinstance(part, DensePLDPmf):
            epsilon = _epsilon_above(epsilon, part, delta)
        else:
            epsilon = max(epsilon, float(part.get_epsilon_for_delta(delta)))
    return epsilon


def _epsilon_above(least: float, part: PrivacyLosses, delta: float) -> float:
    """Returns the smallest ε from ``least`` on at which the hockey-stick divergence of dense losses is at most δ.

    Between two points of the grid the divergence is U - e^ε L, where U adds up the probabilities p of the losses x
    above ε, and L adds up e^-x p.
    """
    import numpy as np

    if part._infinity_mass > delta:
        return math.inf
    first = min(max(math.floor(least / part._discretization) + 1, part._lower_loss), part._lower_loss + part.size)
    probs = part._probs[first - part._lower_loss :][::-1]
    upper = np.cumsum(np.concatenate(([part._infinity_mass], probs)))
    passed = int(np.searchsorted(upper, delta, side="right"))
    if passed == upper.size:
        return least
    x = part._discretization * np.arange(first + probs.size - 1, first - 1, -1)
    x -= (top := x[passed - 1])  # so that no power of e is too large or too small for a float
    lower = np.cumsum(np.concatenate(([0.0], np.exp(-x) * probs)))
    over = upper[passed:-1] - delta >= np.exp(x[passed:]) * lower[passed:-1]
    at = passed + int(over.argmax()) if over.any() else upper.size - 1
    return max(least, float(top + math.log((upper[at] - delta) / lower[at])))


_repeated = functools.lru_cache(maxsize=16)(_Repeated)  # of at most some MB each


def _cached(function: Any, leaf: DpEvent, *how: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:  # an event that holds a list is no key of a cache
        return function.__wrapped__(leaf, *how)
    return function(leaf, *how)


def _doubled(leaf: DpEvent) -> DpEvent | None:
    """The event as PLD of dp-accounting 0.6 reads σ under REPLACE_ONE: relative to half of what an example moves."""
    if isinstance(leaf, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(2 * leaf.noise_multiplier)
    if isinstance(leaf, dp_event.PoissonSampledDpEvent) and isinstance(leaf.event, dp_event.GaussianDpEvent):
        return dp_event.PoissonSampledDpEvent(leaf.sampling_probability, _doubled(leaf.event))
    return None if hasattr(leaf, "event") or hasattr(leaf, "noise_multiplier") else leaf


def _pld_replaces() -> bool:
    """Whether dp-accounting's PLD knows a sampled Gaussian under REPLACE_ONE."""
    from dp_accounting.pld import privacy_loss_distribution

    return "neighboring_relation" in inspect.signature(privacy_loss_distribution.from_gaussian_mechanism).parameters


def _relations(adjacency: str) -> list[Relation]:
    from dp_accounting.privacy_accountant import NeighboringRelation as Neighbours

    if adjacency == "replace_one":
        return [Neighbours.REPLACE_ONE]
    if adjacency == "zero_out":
        # A Gaussian or Poisson-sampled sum with an example blanked is that sum without the example; only tree
        # aggregation asks for the third relation by name.
        return [Neighbours.ADD_OR_REMOVE_ONE, Neighbours.REPLACE_SPECIAL]
    return [Neighbours.ADD_OR_REMOVE_ONE]


def leaves_of(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """The events that compositions are made of, each with how often it ran."""
    if isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from leaves_of(part, count)
    elif isinstance(event, dp_event.SelfComposedDpEvent):
        yield from leaves_of(event.event, count * event.count)
    elif not isinstance(event, dp_event.NoOpDpEvent):
        yield event, count


def _sampled_steps(leaves: Leaves) -> float:
    return sum(n * _times_rounded(leaf) for leaf, n in leaves if _is_sampled(leaf))


def _times_rounded(leaf: DpEvent) -> float:
    """How many sampled steps' rounding an event has: a search 2 + shape times a run's (arXiv:2110.03620, Theorem 2)."""
    return (2 + leaf.shape) * _sampled_steps(list(leaves_of(leaf.event))) if hasattr(leaf, "shape") else 1


def _mixture_losses(leaf: DpEvent) -> tuple[float, float]:
    """The range of a mixture's losses, as far as PLD goes (a mass of e^-50), and less than their deviation."""
    sigma, parts = leaf.standard_deviation, list(zip(leaf.sensitivities, leaf.sampling_probs, strict=True))
    if not sigma:
        return 0.0, 0.0
    parts = [(s / sigma, math.log(p)) for s, p in parts if p > math.exp(-50)]
    x = max(s + math.sqrt(2 * (50 + log_p)) for s, log_p in parts)
    return max(log_p + s * x - s * s / 2 for s, log_p in parts), sum(math.exp(log_p) * s for s, log_p in parts)


def _discretization(leaves: Leaves, guide: float | None) -> float:
    """The grid of privacy losses: dp-accounting's 1e-4 where that fits. Any grid gives an upper bound.

    Finer where ε is small, since the rounding of a tiny loss adds up over the steps; coarser where 1e-4 would
    take over 2e5 points a step, or as many over the range of ε, or is far finer than the losses are spread. Always
    1e-4 times a power of 2, so that a run keeps its grid as it goes on.
    """
    widest, spread = 0.0, math.inf
    for leaf, count in leaves:
        sampled = _is_sampled(leaf)
        sigma = getattr(getattr(leaf, "event", leaf), "noise_multiplier", None)
        if hasattr(leaf, "sensitivities"):
            range_, scale = _mixture_losses(leaf)
            widest, spread = max(widest, _MIXTURE_POINT * range_), min(spread, scale)
        elif sigma:
            # Plain Gaussians are composed into one before they meet the grid, whose error then is no sum.
            sigma = max(sigma / (1 if sampled else math.sqrt(count)), 1e-100)  # its square must not be 0
            widest = max(widest, (0.5 / sigma**2 + 10 / sigma) * (1 if sampled else 4))
        if sampled:
            rate = getattr(leaf, "sampling_probability", 0.0)
            spread = min(spread, rate * math.sqrt(math.expm1(min(1 / sigma**2, 700))) if sigma else 0.0)
    if guide is None or not math.isfinite(guide):
        grid = max(1e-4, 5e-6 * widest)
    else:
        far_finer = min(0.1 * spread, 1e-3 * guide) if math.isfinite(spread) else 0.0
        grid = max(min(1e-4, 1e-3 * guide), 5e-6 * widest, 5e-6 * guide, far_finer)
    return 1e-4 * 2.0 ** math.floor(math.log2(grid / 1e-4) + 1e-9)


@contextlib.contextmanager
def _numerics() -> Iterator[None]:
    """Mutes numpy's overflow warnings and dp-accounting's for each order that it leaves out."""
    import numpy as np

    log = logging.getLogger("absl")
    log.addFilter(_is_error)  # to set its level clears what all loggers of the process remember
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        log.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
