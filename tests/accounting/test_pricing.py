"""A price is an upper bound of what ran, and equals what is known exactly."""

import dataclasses
import math
import time

import dp_accounting
import numpy as np
import pytest
from accounting_cases import RUN, beyond, gaussian_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from scipy.stats import binom

from tfdpfl.accounting import PrivacyLedger, Run, compute_epsilon, price, pricing, privacy_report
from tfdpfl.accounting.pricing import SUPPORT, beyond_support
from tfdpfl.accounting.sampling import truncated_event_type
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.strategies import moved_normals


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "noise_multiplier", "num_epochs", "delta", "published"),
    [(60000, 150, 1.3, 15, 1e-5, 0.7242234026), (100000, 100, 1.0, 30, 1e-7, 1.4154988495)],
)
def test_rdp_gives_the_values_that_tf_privacy_published(
    num_examples, batch_size, noise_multiplier, num_epochs, delta, published
):
    run = dict(num_examples=num_examples, batch_size=batch_size, noise_multiplier=noise_multiplier)
    epsilon = compute_epsilon(**run, num_epochs=num_epochs, delta=delta, accountant="RDP")
    assert epsilon == pytest.approx(published, rel=1e-6)


@pytest.mark.slow
def test_pld_is_the_default_and_dp_accountings_own():
    event = dp_accounting.PoissonSampledDpEvent(150 / 60000, dp_accounting.GaussianDpEvent(1.3))
    theirs = dp_accounting.pld.PLDAccountant().compose(event, 6000).get_epsilon(1e-5)
    run = dict(num_examples=60000, batch_size=150, noise_multiplier=1.3, num_epochs=15, delta=1e-5)
    ours = compute_epsilon(**run)
    assert ours == compute_epsilon(**run, accountant="PLD")
    assert theirs <= ours <= theirs * 1.001  # on a coarser grid, and rounding is allowed for


@pytest.mark.parametrize(("sigma", "delta"), [(0.7, 1e-5), (3.0, 1e-6), (30.0, 1e-8)])
def test_one_gaussian_costs_its_closed_form(sigma, delta):
    exact = gaussian_epsilon(sigma, delta)
    run = dict(num_examples=10, batch_size=10, noise_multiplier=sigma, num_steps=1, delta=delta)
    assert exact <= compute_epsilon(**run, sampling="none") <= exact * 1.001
    assert exact <= compute_epsilon(**run, sampling="none", accountant="rdp") <= exact * 1.3


@pytest.mark.parametrize("mu", [1e-4, 0.1, 2.0])
def test_the_closed_form_is_zero_from_the_total_variation_on(mu):
    distance = 2 * special.ndtr(mu / 2) - 1
    assert pricing.gaussian_epsilon(mu, distance * 1.001) == 0 < pricing.gaussian_epsilon(mu, distance * 0.999)


def test_k_gaussians_cost_one_of_sigma_over_root_k():
    epsilon = compute_epsilon(**{**RUN, "noise_multiplier": 4.0}, num_steps=16, sampling="none")
    assert epsilon == pytest.approx(gaussian_epsilon(1.0, 1e-5), rel=1e-4)


def test_fine_and_coarse_noise_are_bounded_where_the_exact_value_is_known():
    for sigma, steps in [(0.3, 2), (500.0, 3)]:
        exact = gaussian_epsilon(sigma / math.sqrt(steps), 1e-5)
        epsilon = compute_epsilon(**{**RUN, "noise_multiplier": sigma}, num_steps=steps, sampling="none")
        assert exact * (1 - 1e-9) <= epsilon <= exact * 1.01


truncated = pytest.mark.skipif(
    not hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent"), reason="needs dp-accounting 0.6"
)


@truncated
@pytest.mark.slow
def test_truncated_poisson_sampling_costs_what_was_published():
    steps = [((4, 0.5, 2, 1.0), 3), ((3, 0.5, 2, 1.0), 2)]
    ledger = PrivacyLedger()
    for arguments, count in steps:
        ledger.add(dp_accounting.TruncatedSubsampledGaussianDpEvent(*arguments), count)
    assert ledger.epsilon(1e-6) == pytest.approx(17.904330, rel=1e-5)  # arXiv:2508.15089, jax-privacy's doctest


@truncated
def test_truncation_is_priced_for_a_neighbour_with_one_example_more_and_costs_little_where_it_is_rare():
    run = dict(num_examples=2000, batch_size=60, noise_multiplier=1.0, num_steps=20, delta=1e-5)
    event = Run(truncated_batch_size=80, **{k: v for k, v in run.items() if k != "delta"}).dp_event
    assert event.event == dp_accounting.TruncatedSubsampledGaussianDpEvent(2001, 0.03, 80, 1.0)
    costs = [compute_epsilon(**run, truncated_batch_size=size) for size in (None, 110, 66)]
    assert costs[0] <= costs[1] * 1.001 <= costs[0] * 1.01
    assert costs[2] > 1.5 * costs[0]
    report = privacy_report(**run, truncated_batch_size=66, accountant="rdp")
    said = dataclasses.replace(report, event=None).statement()  # without what else the event costs, which takes long
    assert report.accountant == "pld" and "of more than 66 a random subset of so many stays" in said
    ledger = PrivacyLedger()
    said = dict(num_examples=2000, batch_size=60, truncated_batch_size=66)
    ledger.record(1.0, 20, **said)
    assert ledger.epsilon(1e-5) == costs[2] and PrivacyLedger.from_dict(ledger.to_dict()) == ledger
    ledger.record(1.0, 1, num_examples=2000, batch_size=60, sampling="shuffle")
    with pytest.raises(PrivacyError, match="different neighbours"):  # none that both are priced for
        ledger.epsilon(1e-5)


ACCOUNTS_FOR_GROUPS = hasattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent")  # 0.6
needs_06 = pytest.mark.skipif(not ACCOUNTS_FOR_GROUPS, reason="dp-accounting 0.6 prices it")


def density(chances, means, sigma, x):
    return sum(
        chance * np.exp(-((x - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
        for chance, mean in zip(chances, means, strict=True)
    )


def integrated_epsilon(p, q, step, delta):
    """ε of densities on a grid of cells of this volume."""
    excess = lambda epsilon: np.maximum(p - math.exp(epsilon) * q, 0).sum() * step - delta
    return optimize.brentq(excess, 0, 60, xtol=1e-9) if excess(0) > 0 else 0.0


def composed_epsilon(p, q, x, steps, delta):
    """ε of densities in one dimension, and of two draws from them in two."""
    step = x[1] - x[0]
    if steps == 2:
        p, q, step = np.outer(p, p), np.outer(q, q), step**2
    return max(integrated_epsilon(p, q, step, delta), integrated_epsilon(q, p, step, delta))


@needs_06
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "sigma", "delta", "steps"),
    [(0.1, 1.0, 1e-5, 1), (0.5, 2.0, 1e-6, 2)],
)
def test_replacing_a_sampled_example_costs_what_integration_says(rate, sigma, delta, steps):
    x = np.linspace(-12 * sigma - 1, 12 * sigma + 1, 40_001 if steps == 1 else 2001)
    p, q = (density([1 - rate, rate], [0, mean], sigma, x) for mean in (1, -1))
    truth = composed_epsilon(p, q, x, steps, delta)
    run = dict(num_examples=1000, batch_size=int(1000 * rate), noise_multiplier=sigma, num_steps=steps, delta=delta)
    assert (1 - 3e-5) * truth <= compute_epsilon(**run, adjacency="replace_one") <= 1.005 * truth
    assert compute_epsilon(**run) < truth


@needs_06
@pytest.mark.slow
def test_no_replacement_in_another_direction_shows_more():
    rate, sigma, delta = 0.2, 1.0, 1e-5
    x = np.linspace(-9, 10, 601)
    epsilon = compute_epsilon(
        num_examples=100, batch_size=20, noise_multiplier=sigma, num_steps=1, delta=delta, adjacency="replace_one"
    )
    blank = density([1], [0], sigma, x)
    for angle in (1.0, 2.5, math.pi):
        moved = lambda a: np.outer(density([1], [math.cos(a)], sigma, x), density([1], [math.sin(a)], sigma, x))
        p, q = ((1 - rate) * np.outer(blank, blank) + rate * moved(a) for a in (0.0, angle))
        assert integrated_epsilon(p, q, (x[1] - x[0]) ** 2, delta) <= epsilon * (1 + 1e-4)


@pytest.mark.skipif(ACCOUNTS_FOR_GROUPS, reason="dp-accounting 0.6 prices it")
def test_what_an_older_dp_accounting_does_not_price_is_said_with_the_mend():
    with pytest.raises(PrivacyError, match=r"needs dp-accounting 0\.6.*upgrade"):
        compute_epsilon(**RUN, num_steps=1, adjacency="replace_one")


@pytest.mark.parametrize("sampling", ["none", "shuffle"])
def test_a_users_examples_may_all_be_in_one_batch(sampling):
    run = dict(num_examples=100, batch_size=10, noise_multiplier=12.0, num_steps=30, sampling=sampling, delta=1e-6)
    uses = 3 if sampling == "shuffle" else 30
    epsilon = compute_epsilon(**run, max_examples_per_user=4)
    assert epsilon == pytest.approx(gaussian_epsilon(3.0 / math.sqrt(uses), 1e-6), rel=1e-6)
    doubled = compute_epsilon(**run, max_examples_per_user=2, adjacency="replace_one")
    assert doubled == compute_epsilon(**run, max_examples_per_user=2, num_microbatches=5) == epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "sigma", "k", "delta", "steps"),
    [(0.1, 2.0, 3, 1e-5, 2), (0.5, 6.0, 5, 1e-6, 1)],
)
@pytest.mark.one_stack
def test_a_sampled_user_costs_what_integration_says(rate, sigma, k, delta, steps):
    x = np.linspace(-12 * sigma - 1, 12 * sigma + k, 40_001 if steps == 1 else 2001)
    chances = [math.comb(k, j) * rate**j * (1 - rate) ** (k - j) for j in range(k + 1)]
    truth = composed_epsilon(density(chances, range(k + 1), sigma, x), density([1], [0], sigma, x), x, steps, delta)
    run = dict(num_examples=1000, batch_size=int(1000 * rate), noise_multiplier=sigma, num_steps=steps, delta=delta)
    epsilon = compute_epsilon(**run, max_examples_per_user=k)
    assert (1 - 3e-5) * truth <= epsilon <= truth * (1.01 if ACCOUNTS_FOR_GROUPS else 4)
    assert compute_epsilon(**run, max_examples_per_user=k, accountant="rdp") >= (1 - 3e-5) * truth


@pytest.mark.slow
def test_a_user_of_more_examples_costs_more_and_no_more_than_in_every_batch():
    run = dict(num_examples=10_000, noise_multiplier=40.0, num_steps=100, delta=1e-6)
    costs = [compute_epsilon(**run, batch_size=100, max_examples_per_user=k) for k in (1, 2, 64)]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    nearly = compute_epsilon(**run, batch_size=9_999, max_examples_per_user=5)
    always = compute_epsilon(**run, batch_size=10_000, max_examples_per_user=5)
    assert 0.99 * always < nearly <= always * 1.01


@pytest.mark.slow
def test_a_users_price_on_tf_privacys_own_terms():
    lib = pytest.importorskip("tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib")
    text = lib.compute_dp_sgd_privacy_statement(
        number_of_examples=10_000, batch_size=100, num_epochs=10, noise_multiplier=4.0, delta=1e-6,
        used_microbatching=False, max_examples_per_user=8,
    )  # fmt: skip
    theirs = [float(line.split()[-1]) for line in text.splitlines() if line.strip().startswith("Epsilon")]
    run = dict(num_examples=10_000, batch_size=100, num_epochs=10, noise_multiplier=4.0, delta=1e-6)
    ours = [
        compute_epsilon(**run, max_examples_per_user=k, sampling=sampling)
        for k in (1, 8)
        for sampling in ("shuffle", "poisson")
    ]
    truth = gaussian_epsilon(4 / 8 / math.sqrt(10), 1e-6)  # of the third
    assert len(theirs) == 4 and all(a <= b + 5e-4 for a, b in zip(ours, theirs, strict=True))
    assert ours[2] >= truth * (1 - 1e-9) and ours[3] > 3.02  # 3.0304 by dp-accounting 0.6, up to its grid


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sampling", ["none", "fixed_size"])
@pytest.mark.parametrize(("sigma", "delta"), [(0.05, 1e-5), (0.1, 1e-5), (0.11, 1e-12)])
def test_noise_too_small_for_its_support_promises_nothing(sigma, delta, accountant, sampling):
    scale = 2 if sampling == "fixed_size" else 1  # of the sensitivity
    run = dict(num_examples=100, batch_size=50, noise_multiplier=scale * sigma, num_steps=1, sampling=sampling)
    assert compute_epsilon(**run, delta=delta, accountant=accountant) == math.inf


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(0.2, 1, 1e-3), (0.25, 1, 1e-6), (0.4, 100, 1e-8)])
def test_what_the_tails_lose_is_taken_from_delta(sigma, steps, delta):
    run = dict(num_examples=10, batch_size=10, noise_multiplier=sigma, num_steps=steps, sampling="none", delta=delta)
    kept = delta - beyond(sigma, steps)
    assert 0 < kept < delta
    epsilon = compute_epsilon(**run)
    assert epsilon == pytest.approx(gaussian_epsilon(sigma / math.sqrt(steps), kept), rel=1e-9)
    many = math.ceil(1.001 * delta / beyond(sigma))
    assert compute_epsilon(**{**run, "num_steps": many}) == math.inf
    assert compute_epsilon(**{**run, "num_steps": many}, accountant="rdp") == math.inf


def test_only_a_sampled_example_loses_its_tails():
    run = dict(num_examples=10_000, batch_size=1, noise_multiplier=0.05, num_steps=1, delta=2e-4)
    assert compute_epsilon(**run, accountant="rdp") < math.inf  # it is in the batch with a chance of 1e-4
    assert compute_epsilon(**{**run, "num_steps": 2}, accountant="rdp") == math.inf
    mixed = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(0.05), dp_accounting.GaussianDpEvent(5.0)])
    assert price(mixed, 1e-5).epsilon == math.inf
    assert price(dp_accounting.LaplaceDpEvent(0.05), 1e-5).epsilon < 21
    # What no accountant knows is refused all the same.
    with pytest.raises(PrivacyError, match="no accountant knows an ε"):
        price(dp_accounting.SampledWithoutReplacementDpEvent(10, 5, dp_accounting.GaussianDpEvent(0.05)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["none", "poisson"])
def test_tiny_noise_costs_more_the_smaller_it_is_and_the_longer_it_runs(sampling):
    run = dict(num_examples=100, batch_size=10, sampling=sampling, delta=1e-7, accountant="rdp")
    by_sigma = [compute_epsilon(**run, noise_multiplier=s, num_steps=3) for s in (0.05, 0.12, 0.2, 0.27, 0.33, 0.4)]
    by_steps = [compute_epsilon(**run, noise_multiplier=0.33, num_steps=n) for n in (1, 3, 30, 100, 300, 10**6)]
    assert by_sigma == sorted(by_sigma, reverse=True) and by_sigma[0] == math.inf > by_sigma[-1]
    assert by_steps == sorted(by_steps) and by_steps[0] < math.inf == by_steps[-1]


def price_(rate, sigma, steps):
    return price(
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), steps
        ),
        1e-6,
    ).epsilon


@pytest.mark.slow
def test_a_price_does_not_depend_on_those_asked_before():
    asked = [(0.01, 2.0, 100), (0.01, 2.5, 100), (0.02, 2.0, 100), (0.01, 2.0, 101), (0.01, 2.0, 30_000)]
    together = [price_(*what) for what in asked]
    for what, epsilon in zip(asked, together, strict=True):
        for cached in (pricing._price, pricing._repeated, pricing._divergences):
            cached.cache_clear()
        assert price_(*what) == epsilon
        rate, sigma, steps = what
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        theirs = dp_accounting.pld.PLDAccountant().compose(step, steps).get_epsilon(1e-6)
        assert epsilon == pytest.approx(theirs, rel=2e-3)
    assert len(set(together)) == len(asked)


def test_the_price_of_a_run_that_goes_on_is_cheap():
    price_(0.01, 1.1, 1000)
    cpu = []
    for steps in range(1010, 1060, 10):
        before = time.process_time()
        price_(0.01, 1.1, steps)
        cpu.append(time.process_time() - before)
    assert min(cpu) < 0.06  # 0.015 on an idle machine, 0.4 without what is remembered
    assert all(f.cache_info().maxsize <= 256 for f in (pricing._price, pricing._repeated, pricing._divergences))


@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 2.0), (0.01, 0.8)])
def test_uses_are_composed_as_dp_accounting_composes_them(rate, sigma):
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    one = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3).compose(step)._pld
    compose = pricing._composer(one)
    for n in (1, 2, 60):
        a, b = ([vars(pmf) for pmf in (made._pmf_remove, made._pmf_add)] for made in (compose(n), one.self_compose(n)))
        for ours, theirs in zip(a, b, strict=True):
            np.testing.assert_allclose(ours.pop("_probs"), theirs.pop("_probs"), rtol=0, atol=1e-16)
            assert ours == theirs


@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 2.0), (0.01, 0.8), (0.5, 0.3)])
def test_losses_are_put_together_as_dp_accounting_puts_them_together(rate, sigma):
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    one = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3).compose(step)._pld
    whole = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    whole = whole.compose(dp_accounting.GaussianDpEvent(sigma + 0.5))._pld  # the same for both kinds of neighbours
    for a, b in ((one.self_compose(40), one.self_compose(20)), (whole, one), (whole, whole)):
        for ours, theirs in zip(vars(pricing._together(a, b)).values(), vars(a.compose(b)).values(), strict=True):
            if not hasattr(ours, "_probs"):
                assert ours == theirs
                continue
            ours, theirs = dict(vars(ours)), dict(vars(theirs))
            np.testing.assert_allclose(ours.pop("_probs"), theirs.pop("_probs"), rtol=0, atol=1e-18)
            assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


def test_the_price_of_gaussians_is_no_more_than_renyi_divergences_prove():
    for sigma in (0.02, 0.3, 1.0, 30.0, 1e6):
        for delta in (1e-300, 1e-14, 1e-5, 0.3):
            event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), 7)
            found = pricing.price(event, delta)
            assert found.accountant == "pld" and found.epsilon <= pricing.price(event, delta, "rdp").epsilon


@pytest.mark.parametrize(("rate", "sigma", "uses"), [(0.1, 2.0, 1), (0.1, 2.0, 60), (0.9, 0.1, 3)])
def test_epsilon_of_privacy_losses_is_the_least_that_holds(rate, sigma, uses):
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    losses = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-2).compose(step, uses)._pld
    for delta in (1e-12, 1e-5, 0.1, 0.99):
        with pricing._numerics():
            epsilon = pricing._least_epsilon(losses, delta)
        assert losses.get_delta_for_epsilon(epsilon) <= delta * (1 + 1e-6)
        assert epsilon == 0 or losses.get_delta_for_epsilon(epsilon - 1e-3) > delta
        # dp-accounting's own stops at a point of the grid where the losses are too large for its floats.
        assert epsilon == pytest.approx(losses.get_epsilon_for_delta(delta), rel=1e-9) or epsilon > 600
    assert pricing._least_epsilon(losses, 1e-20) == math.inf


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.05, 1.1, 20), (0.01, 0.6, 16), (1 - 1e-9, 30.0, 16)])
def test_a_run_priced_epoch_by_epoch_costs_what_it_costs_at_once(rate, sigma, steps):
    for epochs in range(1, 121):
        added_up = price_(rate, sigma, epochs * steps)
    pricing._price.cache_clear()
    pricing._repeated.cache_clear()
    at_once = price_(rate, sigma, epochs * steps)
    assert added_up == pytest.approx(at_once, rel=1e-7) and added_up != at_once
    if rate > 0.99:  # sampling everyone is a Gaussian, whose price is known
        exact = pricing.price(dp_accounting.GaussianDpEvent(sigma / (epochs * steps) ** 0.5), 1e-6).epsilon
        assert exact <= added_up <= 1.001 * exact


@pytest.mark.slow
def test_an_event_that_no_cache_can_hold_is_priced():
    if ACCOUNTS_FOR_GROUPS:
        lists = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(3.0, [0.0, 1.0], [0.9, 0.1])
        sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(3.0))
        assert price(lists, 1e-6).epsilon == pytest.approx(price(sampled, 1e-6).epsilon, rel=0.01)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    sigma=st.floats(0.6, 20),
    steps=st.integers(1, 5000),
    batch_size=st.sampled_from([1, 20, 250]),  # divisors: steps of whole epochs with a smaller last batch cost less
    delta=st.floats(1e-9, 1e-3),
    sampling=st.sampled_from(["poisson", "shuffle", "none"]),
)
def test_more_noise_fewer_steps_or_a_larger_delta_never_cost_more(sigma, steps, batch_size, delta, sampling):
    def epsilon(sigma=sigma, steps=steps, delta=delta, sampling=sampling):
        return compute_epsilon(
            num_examples=1000, batch_size=batch_size, noise_multiplier=sigma, num_steps=steps, delta=delta,
            sampling=sampling, accountant="rdp",
        )  # fmt: skip

    slack = 1 + 1e-9
    assert epsilon(sigma=1.2 * sigma) <= slack * epsilon()
    assert epsilon(steps=steps + 1) * slack >= epsilon()
    assert epsilon(delta=1.5 * delta) <= slack * epsilon()
    assert epsilon(sampling="poisson") <= slack * epsilon(sampling="none")


@settings(max_examples=4)
@given(sigma=st.floats(1.0, 10), epochs=st.integers(1, 20), batch_size=st.sampled_from([10, 50]))
def test_shuffled_batches_are_never_priced_below_poisson_ones(sigma, epochs, batch_size):
    run = dict(num_examples=5000, batch_size=batch_size, noise_multiplier=sigma, num_epochs=epochs, delta=1e-5)
    assert compute_epsilon(**run) <= compute_epsilon(**run, sampling="shuffle")


def test_pld_is_between_the_truth_and_rdp():
    for sigma, batch_size, steps in [(2.0, 600, 1000), (100.0, 6, 200000)]:
        run = dict(num_examples=6000, batch_size=batch_size, noise_multiplier=sigma, num_steps=steps, delta=1e-5)
        assert 0 < compute_epsilon(**run) <= compute_epsilon(**run, accountant="rdp")


def test_no_noise_is_infinite_and_no_steps_are_free():
    assert compute_epsilon(**{**RUN, "noise_multiplier": 0}, num_steps=1) == math.inf
    assert compute_epsilon(**{**RUN, "noise_multiplier": 0.0}, num_steps=3, sampling="fixed_size") == math.inf
    assert compute_epsilon(**{**RUN, "noise_multiplier": 0}, num_steps=0) == 0.0
    assert compute_epsilon(**RUN, num_epochs=0) == 0.0


def without_noise():
    """Events whose noise no float can express: at any depth, next to others, and in every kind of event."""
    event = dp_accounting.dp_event
    yield event.NonPrivateDpEvent()
    yield event.GaussianDpEvent(0.0)
    yield from (event.LaplaceDpEvent(scale) for scale in (0.0, 1e-320, 1e-4))
    yield event.SingleEpochTreeAggregationDpEvent(0.0, [3])
    if ACCOUNTS_FOR_GROUPS:
        yield from (event.RandomizedResponseDpEvent(p, 5) for p in (0.0, 1e-320))
        yield from (event.DiscreteLaplaceDpEvent(a, 1) for a in (1e4, math.inf))
        yield event.MixtureOfGaussiansDpEvent(0.0, (0.0, 1.0), (0.5, 0.5))
        yield event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 0.0)


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_release_without_noise_promises_nothing(accountant, adjacency):
    for bare in without_noise():
        for event in (
            bare,
            dp_accounting.SelfComposedDpEvent(bare, 3),
            dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(1.0), bare]),
            dp_accounting.PoissonSampledDpEvent(0.5, bare),
            dp_accounting.SampledWithoutReplacementDpEvent(10, 5, dp_accounting.SelfComposedDpEvent(bare, 2)),
            dp_accounting.dp_event.RepeatAndSelectDpEvent(bare, 5.0, 1.0),
        ):
            assert price(event, 1e-6, accountant, adjacency).epsilon == math.inf, event
            assert PrivacyLedger().add(event, adjacency=adjacency).epsilon(1e-6) == math.inf
        assert price(dp_accounting.SelfComposedDpEvent(bare, 0), 1e-6, accountant, adjacency).epsilon == 0


def test_what_nobody_is_sampled_for_is_free():
    assert price(dp_accounting.PoissonSampledDpEvent(0.0, dp_accounting.GaussianDpEvent(0.0)), 1e-6).epsilon == 0


@needs_06
@pytest.mark.parametrize("epsilon", [30.0, 100.0, 700.0])
def test_rare_lies_cost_what_the_hockey_stick_says(epsilon):
    lie = 1 / (math.exp(epsilon) + 4)
    event = dp_accounting.RandomizedResponseDpEvent(5 * lie, 5)
    want = math.log((math.exp(epsilon) * lie - 1e-6) / lie)
    assert want * (1 - 1e-12) <= price(event, 1e-6, "pld", "replace_one").epsilon < want + 1e-3


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("sigma", "steps"), [(1e-3, 1), (0.02, 300_000), (1e6, 1), (1e6, 10**9)])
def test_extremes_are_bounded_and_never_nan(sigma, steps, accountant):
    run = dict(num_examples=10**6, batch_size=1000, noise_multiplier=sigma, num_steps=steps, delta=1e-6)
    epsilon = compute_epsilon(**run, accountant=accountant)
    assert epsilon >= 0 and not math.isnan(epsilon)
    if sigma < 1:
        # With a chance above δ an example is in one batch at least, and that batch alone costs about 1 / 2σ².
        assert epsilon > 0.4 / sigma**2


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sigma", [5e6, pytest.param(1e7, marks=pytest.mark.slow), 1e9])
def test_losses_below_the_resolution_of_a_float_still_add_up(sigma, accountant):
    """10^12 steps are about one Gaussian of μ = q √T / σ (Bu et al. 2019, arXiv:1911.11607)."""
    mu = 0.01 * 1e6 / sigma
    excess = lambda eps: (
        special.ndtr(mu / 2 - eps / mu) - math.exp(eps) * special.ndtr(-mu / 2 - eps / mu) - 1e-6
    )  # fmt: skip
    truth = optimize.brentq(excess, 0, 1) if excess(0) > 0 else 0.0
    run = dict(num_examples=100, batch_size=1, noise_multiplier=sigma, num_steps=10**12, delta=1e-6)
    assert compute_epsilon(**run, accountant=accountant) >= truth


def test_divergences_that_a_float_rounds_to_nothing_still_add_up():
    """Each of 10^15 steps has one of 5e-19 at order 1, and dp-accounting's own sum is 0."""
    run = dict(num_examples=10, batch_size=1, noise_multiplier=1e8, num_steps=10**15, delta=1e-5)
    assert compute_epsilon(**run, accountant="rdp") >= gaussian_epsilon(1e8 / (0.1 * math.sqrt(1e15)), 1e-5)


def test_noise_whose_square_is_no_float_is_priced():
    for accountant in ("pld", "rdp"):
        run = dict(num_examples=100, batch_size=1, noise_multiplier=1e-300, num_steps=1, delta=1e-6)
        assert compute_epsilon(**run, accountant=accountant) == math.inf


def test_a_delta_that_pld_cannot_resolve_is_priced_by_rdp():
    report = privacy_report(**{**RUN, "delta": 1e-13}, num_steps=100)
    assert report.accountant == "rdp" and math.isfinite(report.epsilon)


@pytest.mark.parametrize("delta, warned", [(0.5, True), (1 / 60000, True), (1e-5, False)])
def test_a_delta_that_promises_nothing_is_taken_with_a_warning(recwarn, delta, warned):
    compute_epsilon(**{**RUN, "delta": delta}, num_steps=1, accountant="rdp")
    assert [str(w.message)[:5] for w in recwarn if "below 1 / num_examples" in str(w.message)] == ["delta"] * warned


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [40.0, 100.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-10, 1e-11, 1e-12])
def test_rounding_in_many_convolutions_never_lowers_epsilon(sigma, delta):
    """Sampled at a rate of nearly 1, 10^5 steps are one Gaussian; PLD's own answers fall to 1 % below it."""
    rate, steps = 0.9999, 100_000
    run = dict(num_examples=10_000, batch_size=9_999, noise_multiplier=sigma, num_steps=steps, delta=delta)
    assert compute_epsilon(**run) >= (1 - 1e-4) * gaussian_epsilon(sigma / math.sqrt(steps) / rate, delta)


def test_each_kind_of_event_loses_the_ends_of_its_own_noise():
    """Mass of a normal beyond SUPPORT less what an example moves it by, over the deviation."""
    tail = lambda shift: math.exp(-((SUPPORT - shift) ** 2) / 2)
    events = dp_accounting.dp_event
    tree = events.SingleEpochTreeAggregationDpEvent(noise_multiplier=0.5, step_counts=8)
    several = moved_normals(2.0, [(3.0, 1.5), (1.0, 4.0)])
    lost = [(tree, 64 * tail(2)), (several, 3 * tail(1.5) + tail(4)), (events.GaussianDpEvent(0.0), 1.0)]
    if hasattr(events, "MixtureOfGaussiansDpEvent"):
        mixture = events.MixtureOfGaussiansDpEvent(0.5, (0.0, 1.0, 2.0), (0.5, 0.3, 0.2))
        lost.append((mixture, 0.3 * tail(2) + 0.2 * tail(4)))
        full = truncated_event_type(10)(101, 0.1, 10, 0.5)  # one batch in two is full, and who joins it pushes one out
        lost.append((full, 0.1 * tail(2) + float(binom.sf(9, 100, 0.1)) * tail(4)))
    for event, delta in lost:
        assert beyond_support(event) == pytest.approx(delta, rel=1e-9)
