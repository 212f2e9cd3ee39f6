"""States what an ε-DP mechanism is to an accountant, whichever dp-accounting is installed, and what it guarantees."""

from __future__ import annotations

import math

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, Estimator
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.pricing import LARGEST_PURE_EPSILON
from tfdpfl.accounting.promises import PLANNED, Promise, of_seed

__all__ = ["check_epsilon", "label_promise", "pure_event"]

_COVERED = (
    "Covered: the released labels, and what is computed from them and from public data.",
    "Not covered: the features, which are used as they are, and scores that were measured on the true labels.",
)


def check_epsilon(epsilon: object, remedy: str, name: str = "epsilon") -> float:
    """Returns ε as a float, or raises a `ValueError` unless it is above 0 and a sampler can deliver it."""
    epsilon = _checks.real(name, epsilon, remedy, above=0)
    if epsilon > LARGEST_PURE_EPSILON:
        raise ValueError(
            f"{name}={epsilon:g} is larger than {LARGEST_PURE_EPSILON:g}. The probability of a noisy label, "
            f"e^(-{name}), is then too small for a float, so every label would be released as it is. Use a smaller "
            "epsilon (10 already hides almost nothing), or train on the labels themselves, without a guarantee."
        )
    return epsilon


def pure_event(epsilon: float, outcomes: int = 2) -> DpEvent:
    """The event of an ε-DP mechanism under `adjacency="replace_one"`.

    Args:
        epsilon: ε of the mechanism.
        outcomes: K if it is randomized response on K classes. 2 stands for any ε-DP mechanism: randomized response
            on two classes dominates them all (Kairouz et al. 2015, arXiv:1311.0776).
    """
    if outcomes < 2:
        return dp_event.NoOpDpEvent()
    if hasattr(dp_event, "RandomizedResponseDpEvent"):
        # With probability p a uniform class: e^ε / (e^ε + K - 1) = 1 - p + p / K.
        shrunk = math.exp(-epsilon)
        return dp_event.RandomizedResponseDpEvent(outcomes * shrunk / (1 + (outcomes - 1) * shrunk), outcomes)
    # dp-accounting 0.4 has no event for it. Its RDP accountant prices a Laplace event as any ε-DP mechanism,
    # min(ε, αε²/2); its PLD accountant as Laplace noise, which several releases by randomized response exceed. One
    # choice out of one (Papernot & Steinke 2021, arXiv:2110.03620) costs nothing, and only RDP knows it, so that
    # beside it the sound price is the only one.
    only_rdp = dp_event.RepeatAndSelectDpEvent(dp_event.NoOpDpEvent(), 1, 0)
    return dp_event.ComposedDpEvent([dp_event.LaplaceDpEvent(1 / epsilon), only_rdp])


def label_promise(mechanism: Estimator, spent: PrivacyLedger, more: str = "") -> Promise:
    """Returns what a label mechanism guarantees that has spent so much, in whatever way it is used."""
    warnings = [*([] if len(spent) else [PLANNED]), *of_seed(mechanism.seed is not None)]
    # Not its repr, which may hold a seed.
    text = f"{type(mechanism).__name__}, epsilon {float(mechanism.epsilon):g} a release{more}"
    return Promise(
        kind="label mechanism", adjacency="replace_one", unit="label",
        event=spent.dp_event if len(spent) else mechanism.dp_event, ledger=spent if len(spent) else None,
        mechanisms=[text], notes=_COVERED, warnings=warnings,
    )  # fmt: skip
