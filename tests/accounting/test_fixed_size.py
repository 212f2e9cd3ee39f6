"""A subset of fixed size costs what is known exactly, and no less than an attack shows."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from accounting_cases import DATA, RUN, gaussian_epsilon
from scipy import optimize
from scipy.stats import norm

from tfdpfl.accounting import PrivacyLedger, compute_epsilon, fixed_size, price, privacy_report


def test_a_fixed_size_subset_of_everyone_is_a_gaussian_of_sensitivity_two():
    run = dict(num_examples=10, batch_size=10, noise_multiplier=4.0, num_steps=1, delta=1e-5)
    exact = gaussian_epsilon(2.0, 1e-5)
    assert compute_epsilon(**run, sampling="fixed_size") == pytest.approx(exact, rel=1e-3)


def test_a_fixed_size_subset_costs_no_less_than_an_attack_shows():
    # All others are -C and one is +C or -C: the release is a Gaussian, or a mixture with one 2C off.
    sigma, delta = 1.0, 1e-5
    x = np.linspace(-30, 30, 600001)
    blank, moved = (np.exp(-((x - mean) ** 2) / (2 * sigma**2)) / math.sqrt(2 * math.pi) for mean in (0, 2))

    def leaked(epsilon):
        advantage = np.maximum(0.5 * blank + 0.5 * moved - math.exp(epsilon) * blank, 0)
        return advantage.sum() * (x[1] - x[0]) - delta

    shown = optimize.brentq(leaked, 0, 30)
    run = dict(num_examples=10, batch_size=5, noise_multiplier=sigma, num_steps=1, delta=delta)
    assert shown <= compute_epsilon(**run, sampling="fixed_size") <= 1.3 * shown


def test_a_fixed_size_report_names_the_accountant_that_was_used():
    report = privacy_report(**RUN, num_steps=10, sampling="fixed_size", accountant="pld")
    assert report.accountant == "rdp" and "the figure is by rdp" in report.statement()
    assert report.adjacency == "replace_one"


def test_fixed_size_and_replaced_examples_compose():
    ledger = PrivacyLedger().record(3.0, 10, sampling="fixed_size", **DATA)
    alone = ledger.epsilon(1e-5)
    ledger.record(3.0, 240, sampling="shuffle", adjacency="replace_one", **DATA)
    shuffled = compute_epsilon(
        **{**RUN, "noise_multiplier": 3.0},
        num_epochs=1,
        sampling="shuffle",
        adjacency="replace_one",
        accountant="rdp",
    )
    assert max(alone, shuffled) < ledger.epsilon(1e-5) < alone + shuffled + 0.1


def hockey_stick(first, second, rate, epsilon):
    """How far q N(a, 1) + (1 - q) N(c, 1) passes e^ε times q N(b, 1) + (1 - q) N(c, 1), by summation on a grid; each is
    (mean in the cohort, mean out of it)."""
    x = np.linspace(-12, 12, 20_001)
    p, q = (rate * norm.pdf(x, a) + (1 - rate) * norm.pdf(x, c) for a, c in (first, second))
    return np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) * (x[1] - x[0])


def test_one_draw_of_a_fixed_size_loses_no_less_than_any_two_data_sets_show():
    """A client that adds u or nothing, in whose place another adds v: all u and v on a line, and the two that are
    worst."""
    z, k, n = 0.8, 3, 10
    event = dp_accounting.SampledWithoutReplacementDpEvent(n, k, dp_accounting.GaussianDpEvent(z))
    found = fixed_size.losses(event, 1e-3)
    for epsilon in (0.0, 0.5, 2.0):
        delta = found.get_delta_for_epsilon(epsilon)
        shown = [
            hockey_stick((x, v / z), (y, v / z), k / n, epsilon)
            for u, v in itertools.product((-1, -0.5, 0.3, 1), (-1, -0.4, 0, 0.6, 1))
            for x, y in ((u / z, 0), (0, u / z))
        ]
        assert max(shown) <= delta * (1 + 1e-6) + 1e-12
        assert delta == pytest.approx(hockey_stick((1 / z, -1 / z), (0, -1 / z), k / n, epsilon), rel=0.01)
        # Of the other direction, that the client comes in, the worst is another.
        back = found._pmf_add.get_delta_for_epsilon(epsilon)
        assert back == pytest.approx(hockey_stick((0, 1 / z), (1 / z, 1 / z), k / n, epsilon), rel=0.01, abs=1e-9)
        assert max(shown[1::2]) <= back * (1 + 1e-6) + 1e-12


def test_renyi_dp_prices_a_blanked_member_no_lower_than_its_privacy_losses():
    drawn = dp_accounting.dp_event.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(1.0))
    event = dp_accounting.SelfComposedDpEvent(drawn, 200)
    losses, renyi = (price(event, 1e-5, accountant, "zero_out") for accountant in ("pld", "rdp"))
    assert (losses.accountant, renyi.accountant) == ("pld", "rdp") and renyi.epsilon >= losses.epsilon
