"""The one place that turns what ran into ε: a dp-accounting event, an accountant, an adjacency."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdpfl.accounting import _checks
from tfdpfl.accounting.run import ADJACENCIES
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ACCOUNTANTS = ("pld", "rdp")

# dp-accounting's own orders are doubled from 64 to 1024; with these, large σ and small ε are not overpriced.
# Every order is a valid bound, so more of them only lower ε.
_MORE_ORDERS = (96, 192, 384, 768, 2048)
# Below, what the numbers lose elsewhere (tails that are cut off, plain Gaussians on a grid) is not far under δ either.
_SMALLEST_PLD_DELTA = 1e-12
# Rounding in the convolutions of sampled steps moves δ, either way, by up to a tenth of this a step, as measured
# where sampling at a rate near 1 has the closed form of none.
_ROUNDING_OF_A_STEP = 2.0**-52
# Of 10^7 sampled steps PLD's price takes half a minute and is 0.3 % below RDP's.
_MOST_SAMPLED_STEPS = 3_000_000
# As many are unrolled for PLD; of more, RDP's price is taken.
_MOST_RANDOMIZED_RESPONSES = 1000
# What rounding may take off a sampled step's Rényi divergence, times (order - 1) / order. As measured where the
# divergence itself is far below that: 1.5 of 2^-52 at whole orders, 13 at others (dp-accounting 0.4); this is 64.
_ROUNDING_OF_A_DIVERGENCE = 2.0**-46
_NUMERICAL = (ValueError, ArithmeticError, MemoryError, IndexError)


def large(delta: float, num_examples: int | None) -> str | None:
    """What is wrong with a δ that is too large for its promise to mean anything."""
    if num_examples is None or delta < 1 / num_examples:
        return None
    return (
        f"delta = {delta:g} is not below 1 / num_examples = {1 / num_examples:g}: "
        "publishing one random example whole could meet it."
    )


def check_delta(delta: float) -> float:
    """Returns `delta` as a float, or raises a `ValueError` with the mend."""
    return _checks.probability("delta", delta, "take a value well below 1 / num_examples, for instance 1e-5")


class Price(NamedTuple):
    """An ε, with the accountant that proved it; it can be `"rdp"` where `"pld"` was asked for."""

    epsilon: float
    accountant: str


def price(
    event: "DpEvent", delta: float, accountant: str = "pld", adjacency: str = "add_or_remove_one"
) -> Price:
    """Returns the smallest ε that is proven for `event` at `delta`.

    ε is an upper bound, never NaN, and infinite where nothing is promised.

    Args:
        event: What ran. Noise multipliers in it are relative to the sensitivity under `adjacency`: a clipped
            sum of examples under `"replace_one"` has sensitivity 2C, so its event holds σ/2.
        delta: δ, strictly between 0 and 1.
        accountant: `"pld"` (privacy loss distributions, Doroshenko et al. 2022, arXiv:2207.04380) or `"rdp"`
            (Mironov et al. 2019, arXiv:1908.10530, with the conversion of Canonne et al. 2020,
            arXiv:2004.00010, Proposition 12). Where the first does not know the event, takes minutes (over
            3 million sampled steps), or fails or loses to the second numerically, the second's ε is taken, and
            named.
        adjacency: `"add_or_remove_one"`, `"replace_one"` or `"zero_out"`.

    Raises:
        ValueError: `delta`, `accountant` or `adjacency` is not one of those.
        PrivacyError: No accountant knows the event under this adjacency.
    """
    delta = check_delta(delta)
    accountant = _checks.choice("accountant", accountant, ACCOUNTANTS)
    adjacency = _checks.choice("adjacency", adjacency, ADJACENCIES)
    rdp = _rdp_epsilon(event, delta, adjacency)
    pld = None if accountant == "rdp" else _pld_epsilon(event, delta, adjacency, guide=rdp)
    if pld is not None and (rdp is None or pld <= rdp):
        return Price(pld, "pld")
    if rdp is None:
        raise PrivacyError(
            f"no accountant prices {event} for adjacency={adjacency!r}: "
            "give the adjacency that its mechanism is stated for"
        )
    return Price(rdp, "rdp")


def _rdp_epsilon(event: "DpEvent", delta: float, adjacency: str) -> float | None:
    """ε by Rényi DP; None if the event is not supported."""
    import numpy as np
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    every_order = [*rdp.DEFAULT_RDP_ORDERS, *_MORE_ORDERS]
    for orders in (every_order, [order for order in every_order if order == int(order)]):
        make_ledger = functools.partial(rdp.RdpAccountant, orders)
        ledger = _supporting(make_ledger, event, _relations(adjacency))
        if ledger is None:
            return None
        try:
            with _numerics():
                divergences = ledger.compose(event).rdp
        except _NUMERICAL:  # the series of a fractional order failed: integer orders are finite sums
            continue
        # A sampled step's divergence may be below what a float resolves, and there may be 10^12 steps.
        sampled = _sampled_steps(_leaves(event))
        if sampled:
            by_order = np.asarray(orders) / (np.asarray(orders) - 1)
            divergences = divergences + sampled * _ROUNDING_OF_A_DIVERGENCE * by_order
        # A divergence that rounds to below zero is an error in 0.4 and ε = 0 in 0.6; a NaN order would win
        # the argmin.
        if not all(divergences == 0):
            divergences = np.where(np.isnan(divergences), np.inf, np.maximum(divergences, 1e-12))
        with _numerics():
            return float(rdp.compute_epsilon(orders, divergences, delta)[0])
    return math.inf


def _pld_epsilon(event: "DpEvent", delta: float, adjacency: str, guide: float | None) -> float | None:
    """ε by privacy loss distributions; None if the event is not supported or the numbers fail."""
    from dp_accounting import dp_event, pld

    leaves = list(_leaves(event))
    if not leaves or guide == 0:
        return 0.0
    relations = _relations(adjacency)
    if adjacency == "replace_one":
        # Under REPLACE_ONE, PLD doubles a Gaussian's sensitivity in 0.6 and does not in 0.4. Our σ has it
        # already, and a plain Gaussian is the same pair of distributions whatever the adjacency; mixtures of
        # the two readings go to RDP.
        gaussian = [isinstance(leaf, dp_event.GaussianDpEvent) for leaf, _ in leaves]
        if all(gaussian):
            relations = _relations("add_or_remove_one")
        elif any(gaussian) or any(hasattr(leaf, "event") for leaf, _ in leaves):
            return None
    unrolled = _unrolled(event, leaves)
    if unrolled is None:
        return None
    event = unrolled
    sampled = _sampled_steps(leaves)
    given, delta = delta, delta - _ROUNDING_OF_A_STEP * sampled
    if given < _SMALLEST_PLD_DELTA or delta < given / 2:
        return None
    if sampled > _MOST_SAMPLED_STEPS and guide is not None:
        return None
    interval = _discretization(leaves, guide)
    ledger = _supporting(lambda relation: pld.PLDAccountant(relation, interval), event, relations)
    if ledger is None:
        return None
    try:
        with _numerics():
            epsilon = float(ledger.compose(event).get_epsilon(delta))
    except _NUMERICAL:
        return None
    return None if math.isnan(epsilon) else max(0.0, epsilon)


def _unrolled(event: "DpEvent", leaves: list[tuple["DpEvent", int]]) -> "DpEvent | None":
    """The event without repeated randomized responses, each of which dp-accounting 0.6's PLD prices as a single
    one; None if they are too many."""
    from dp_accounting import dp_event

    response = getattr(dp_event, "RandomizedResponseDpEvent", ())
    responses = [(leaf, n) for leaf, n in leaves if isinstance(leaf, response)]
    if sum(n for _, n in responses) > _MOST_RANDOMIZED_RESPONSES:
        return None
    if all(n == 1 for _, n in responses):
        return event
    others = [dp_event.SelfComposedDpEvent(leaf, n) for leaf, n in leaves if not isinstance(leaf, response)]
    return dp_event.ComposedDpEvent([*others, *(leaf for leaf, n in responses for _ in range(n))])


def _relations(adjacency: str) -> list[Any]:
    from dp_accounting.privacy_accountant import NeighboringRelation as Relation

    if adjacency == "replace_one":
        return [Relation.REPLACE_ONE]
    if adjacency == "zero_out":
        # A Gaussian or Poisson-sampled sum with an example blanked is that sum without the example; only tree
        # aggregation asks for the third relation by name.
        return [Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_SPECIAL]
    return [Relation.ADD_OR_REMOVE_ONE]


def _supporting(make_ledger: Any, event: "DpEvent", relations: list[Any]) -> Any:
    """The first accountant, over `relations`, that knows the event; None if there is none."""
    ledgers = (make_ledger(relation) for relation in relations)
    return next((ledger for ledger in ledgers if ledger.supports(event)), None)


def _leaves(event: "DpEvent", count: int = 1) -> Iterator[tuple["DpEvent", int]]:
    """The events that compositions are made of, each with how often it ran."""
    from dp_accounting import dp_event

    if isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part, count)
    elif isinstance(event, dp_event.SelfComposedDpEvent):
        yield from _leaves(event.event, count * event.count)
    elif not isinstance(event, dp_event.NoOpDpEvent):
        yield event, count


def _sampled_steps(leaves: Iterable[tuple["DpEvent", int]]) -> int:
    return sum(n for leaf, n in leaves if hasattr(leaf, "event"))


def _discretization(leaves: list[tuple["DpEvent", int]], guide: float | None) -> float:
    """The grid of privacy losses: dp-accounting's 1e-4 where that fits. Any grid gives an upper bound.

    Finer where ε is small, since the rounding of a tiny loss adds up over the steps; coarser where 1e-4 would
    take over 2e5 points a step, or as many over the range of ε.
    """
    widest = 0.0
    for leaf, count in leaves:
        sampled = hasattr(leaf, "event")
        sigma = getattr(leaf.event if sampled else leaf, "noise_multiplier", None)
        if sigma:
            # Plain Gaussians are composed into one before they meet the grid, whose error then is no sum.
            sigma = max(sigma / (1 if sampled else math.sqrt(count)), 1e-100)  # its square must not be 0
            widest = max(widest, (0.5 / sigma**2 + 10 / sigma) * (1 if sampled else 4))
    if guide is None or not math.isfinite(guide):
        return max(1e-4, 5e-6 * widest)
    return max(min(1e-4, 1e-3 * guide), 5e-6 * widest, 5e-6 * guide)


@contextlib.contextmanager
def _numerics() -> Iterator[None]:
    """Mutes numpy's overflow warnings and dp-accounting's for each order that it leaves out."""
    import numpy as np

    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        log.setLevel(level)
