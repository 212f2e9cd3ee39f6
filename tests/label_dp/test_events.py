"""An ε is refused unless a sampler can deliver it, and an accountant prices what was released."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from label_cases import CLASS_MECHANISMS, FIVE, NUMBER_MECHANISMS
from scipy import optimize

from tfdpfl.accounting import PrivacyLedger, price
from tfdpfl.label_dp import ALIBI, RandomizedResponse, RandomizedResponseTopK, RROnBins


def test_the_largest_epsilon_is_priced():
    for mechanism in (RandomizedResponse(700.0, 5), RROnBins(700.0, prior=FIVE), ALIBI(700.0, 5)):
        mechanism.fit_transform([0, 1, 2])
        assert 699 < mechanism.ledger.epsilon(1e-6) < 701


@pytest.mark.parametrize("make", [*CLASS_MECHANISMS, *NUMBER_MECHANISMS, lambda eps: ALIBI(eps, 5)])
def test_event_and_ledger_agree_with_epsilon(make):
    mechanism = make(1.2)
    assert mechanism.releases_ == 0 and len(mechanism.ledger) == 0
    mechanism.fit_transform([0, 1, 1])
    paid = price(mechanism.dp_event, 1e-9, adjacency=mechanism.adjacency).epsilon
    always_the_same = getattr(mechanism, "k", None) == 1
    assert paid == (0 if always_the_same else pytest.approx(1.2, rel=6e-3))
    assert mechanism.ledger.epsilon(1e-9) == pytest.approx(paid)
    assert mechanism.epsilon_spent == pytest.approx(0 if always_the_same else 1.2)


def exact_epsilon(epsilon, classes, times, delta):
    """ε at delta of so many randomized responses, from the distribution of their privacy loss: ε, 0 or -ε each."""
    truth = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    one = np.array([truth * math.exp(-epsilon), 1 - truth * (1 + math.exp(-epsilon)), truth])
    whole = np.ones(1)
    for _ in range(times):
        whole = np.convolve(whole, one)
    losses = epsilon * np.arange(-times, times + 1)
    excess = lambda eps: float(whole @ -np.expm1(np.minimum(eps - losses, 0))) - delta
    return optimize.brentq(excess, 0, times * epsilon) if excess(0) > 0 else 0.0


@pytest.mark.parametrize(("epsilon", "classes", "times", "how"), [
    (1.0, 10, 5, "count"), (1.0, 10, 5, "calls"), (1.0, 10, 5, "one by one"), (0.5, 3, 41, "nested"),
    (1.0, 10, 2000, "count"),
])  # fmt: skip
def test_repeated_responses_cost_what_they_cost(epsilon, classes, times, how):
    event, ledger = RandomizedResponse(epsilon, classes).dp_event, PrivacyLedger()
    if how == "count":
        ledger.add(event, times, adjacency="replace_one")
    elif how == "calls":
        for _ in range(times):
            ledger.add(event, adjacency="replace_one")
    elif how == "one by one":
        ledger.add(dp_event.ComposedDpEvent([event] * times), adjacency="replace_one")
    else:
        half = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(event, times // 2)] * 2)
        ledger.add(half, adjacency="replace_one").add(event, times % 2, adjacency="replace_one")
    exact, got = exact_epsilon(epsilon, classes, times, 1e-5), ledger.epsilon(1e-5)
    pld = hasattr(dp_event, "RandomizedResponseDpEvent") and times <= 1000
    assert exact <= got <= (exact * 1.01 if pld else times * epsilon * 1.001)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomizedResponse(0), "epsilon must be a finite number above 0, got 0"),
        (lambda: RandomizedResponse(-1.0), "epsilon.*got -1.0: give the total"),
        (lambda: RandomizedResponse(math.nan), "epsilon.*nan"),
        (lambda: RandomizedResponse(math.inf), "epsilon.*inf"),
        (lambda: RandomizedResponse("1"), "epsilon.*'1'"),
        (lambda: RandomizedResponse(1e3), "epsilon=1000 is larger than 700.*released as it is.*smaller epsilon"),
        (lambda: RandomizedResponse(1.0).set_params(epsilon=1e6).fit([0, 1]), "epsilon=1e\\+06 is larger than 700"),
        (lambda: RandomizedResponseTopK(701.0, 2), "epsilon=701 is larger"),
        (lambda: RandomizedResponse(1.0).set_params(epsilon=-2).fit([0, 1]), "epsilon.*-2"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
