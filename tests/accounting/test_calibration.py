"""The noise, steps and batch size that are found meet the target, and the next worse ones do not."""

import dataclasses
import math

import dp_accounting
import pytest
from accounting_cases import MNIST, RUN, beyond

from tfdpfl.accounting import (
    PrivacyLedger,
    Run,
    compute_batch_size,
    compute_epsilon,
    compute_noise_multiplier,
    compute_num_steps,
    privacy_report,
    privacy_statement,
)
from tfdpfl.accounting.calibration import smallest_noise_multiplier
from tfdpfl.accounting.report import report_of
from tfdpfl.errors import PrivacyError


def test_every_answer_takes_the_group_and_the_statement_says_it():
    how = dict(sampling="shuffle", max_examples_per_user=4)
    sigma = compute_noise_multiplier(**MNIST, num_epochs=3, target_epsilon=2.0, **how)
    alone = compute_noise_multiplier(**MNIST, num_epochs=3, target_epsilon=2.0, sampling="shuffle")
    assert sigma == pytest.approx(4 * alone, rel=1e-3)
    run = dict(**MNIST, noise_multiplier=sigma, **how)
    assert compute_num_steps(target_epsilon=2.0, **run) == 720
    report = privacy_report(**run, num_epochs=3)
    assert report.epsilon <= 2.0 and report.max_examples_per_user == 4
    text = privacy_statement(**run, num_epochs=3)
    assert "one user's examples, at most 4" in text and "No user may have more than 4 examples" in text
    assert "user" not in privacy_statement(**MNIST, noise_multiplier=sigma, num_epochs=3, sampling="shuffle")
    one = Run(num_examples=10, batch_size=5, noise_multiplier=2, num_steps=1)
    runs = [one, dataclasses.replace(one, max_examples_per_user=2)]
    with pytest.raises(PrivacyError, match="max_examples_per_user differs"):
        report_of(runs, runs[0].dp_event, 1e-3, "rdp", "add_or_remove_one")


def test_calibration_converges_where_the_tails_decide():
    run = dict(num_examples=10, batch_size=10, delta=1e-12, sampling="none")
    sigma = compute_noise_multiplier(**run, target_epsilon=1e6, num_steps=1)
    assert compute_epsilon(**run, noise_multiplier=sigma, num_steps=1) <= 1e6 and 0.4 < sigma < 0.6
    steps = compute_num_steps(**run, noise_multiplier=0.52, target_epsilon=1e6)
    assert 1 <= steps <= 1e-12 / beyond(0.52) < steps + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "how"),
    [
        (0.3, dict(num_epochs=15)),
        (8.0, dict(num_steps=500, sampling="shuffle")),
        (0.05, dict(num_epochs=2, accountant="rdp")),
        (2.0, dict(num_steps=40, sampling="none", num_microbatches=10)),
    ],
)
def test_the_noise_found_meets_the_target_and_no_less_noise_does(target, how):
    sigma = compute_noise_multiplier(**MNIST, target_epsilon=target, **how)
    assert compute_epsilon(**MNIST, noise_multiplier=sigma, **how) <= target
    assert compute_epsilon(**MNIST, noise_multiplier=0.999 * sigma, **how) > target


@pytest.mark.slow
@pytest.mark.parametrize("gives", [0.9, 1.0])
def test_the_root_finder_is_not_taken_at_its_word(monkeypatch, gives):
    args = dict(**MNIST, target_epsilon=1.0, num_epochs=15, accountant="rdp")
    sigma = compute_noise_multiplier(**args)
    monkeypatch.setattr(dp_accounting, "calibrate_dp_mechanism", lambda *_: gives * sigma * (1 - 1e-3))
    careful = compute_noise_multiplier(**args)
    assert compute_epsilon(**MNIST, num_epochs=15, accountant="rdp", noise_multiplier=careful) <= 1.0
    assert careful <= (1.002 if gives == 1.0 else 1.2) * sigma


@pytest.mark.slow
@pytest.mark.parametrize("off", [-2, 2])
def test_the_steps_found_do_not_hang_on_the_root_finder(monkeypatch, off):
    args = dict(**RUN, target_epsilon=1.0, accountant="rdp")
    steps = compute_num_steps(**args)
    monkeypatch.setattr(dp_accounting, "calibrate_dp_mechanism", lambda *_: steps + off)
    assert compute_num_steps(**args) == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sigma", "how"),
    [
        (0.25, 3.0, dict()),
        (1.0, 1.1, dict(accountant="rdp")),
        (5.0, 4.0, dict(sampling="shuffle")),
        (5.0, 4.0, dict(sampling="none", num_microbatches=1)),
    ],
)
def test_the_steps_found_meet_the_target_and_one_more_does_not(target, sigma, how):
    args = dict(**MNIST, noise_multiplier=sigma, **how)
    steps = compute_num_steps(target_epsilon=target, **args)
    assert type(steps) is int and steps >= 1
    assert compute_epsilon(num_steps=steps, **args) <= target < compute_epsilon(num_steps=steps + 1, **args)
    if how.get("sampling") == "shuffle":
        assert steps % 240 == 0


@pytest.mark.slow
def test_what_cannot_be_reached_is_said():
    with pytest.raises(ValueError, match=r"target_epsilon=0\.001 is less than one use of an example costs.*ε = "):
        compute_num_steps(**RUN, target_epsilon=0.001)
    with pytest.raises(PrivacyError, match="after any number of steps"):
        compute_num_steps(**{**RUN, "noise_multiplier": 1e9}, target_epsilon=1, sampling="none")
    with pytest.raises(PrivacyError, match="almost no noise"):
        compute_noise_multiplier(**{**MNIST, "delta": 0.999}, target_epsilon=1e300, num_steps=1)
    with pytest.raises(ValueError, match="without a step"):
        compute_noise_multiplier(**MNIST, target_epsilon=1, num_steps=0)


@pytest.mark.parametrize("target", [0, -1.0, math.nan, math.inf, True, "1"])
def test_a_bad_target_is_refused(target):
    with pytest.raises(ValueError, match="target_epsilon must be a finite number above 0"):
        compute_noise_multiplier(**MNIST, target_epsilon=target, num_steps=1)
    with pytest.raises(ValueError, match="target_epsilon must be a finite number above 0"):
        compute_num_steps(**RUN, target_epsilon=target)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "shuffle", "none"])
def test_noise_found_for_secure_noise_is_that_of_the_mechanism_that_runs(sampling):
    """Against Rényi DP of whole orders by dp-accounting: what a discrete Gaussian has (arXiv:2004.00010)."""
    data = dict(num_examples=60000, batch_size=256, num_steps=470, delta=1e-5, sampling=sampling)
    sigma = compute_noise_multiplier(target_epsilon=2.0, secure_noise=True, **data)
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    event, count = {
        "poisson": (dp_accounting.PoissonSampledDpEvent(256 / 60000, gaussian), 470),
        "shuffle": (gaussian, 2),
        "none": (gaussian, 470),
    }[sampling]
    theirs = dp_accounting.rdp.RdpAccountant(orders=range(2, 257)).compose(event, count).get_epsilon(1e-5)
    assert 1.99 < theirs <= 2.0 + 1e-6
    assert sigma > compute_noise_multiplier(target_epsilon=2.0, **data)
    ran = PrivacyLedger().record(sigma, 470, num_examples=60000, batch_size=256, sampling=sampling, secure_noise=True)
    assert ran.epsilon(1e-5) == compute_epsilon(noise_multiplier=sigma, secure_noise=True, **data) <= 2.0
    report = privacy_report(noise_multiplier=sigma, secure_noise=True, **data)
    assert (report.epsilon, report.accountant) == (ran.epsilon(1e-5), "rdp") and "discrete Gaussian" in str(report)


@pytest.mark.slow
def test_secure_noise_changes_the_number_of_steps_and_the_batch_size():
    run = dict(num_examples=6000, delta=1e-5, noise_multiplier=1.0, target_epsilon=2.0)
    steps, secure = (compute_num_steps(batch_size=60, secure_noise=s, **run) for s in (False, True))
    assert secure < steps
    size, secure = (compute_batch_size(num_steps=100, secure_noise=s, **run) for s in (False, True))
    assert secure < size


def searched(epsilon, target, rough):
    """The σ that a search finds, and those whose ε it computed."""
    tried = []

    def counted(z):
        tried.append(z)
        return epsilon(z)

    return smallest_noise_multiplier(counted, target, 5e-3, rough), tried


@pytest.mark.parametrize("target", [0.3, 2.0, 40.0])
def test_a_rough_epsilon_that_is_about_proportional_saves_most_prices(target):
    epsilon = lambda z: 1.3 / z + 0.8 / z**2
    rough = lambda z: 2.0 / z + 0.9 / z**2
    least = (1.3 + math.sqrt(1.69 + 3.2 * target)) / (2 * target)
    sigma, tried = searched(epsilon, target, rough)
    assert least <= sigma <= 1.005 * least and len(tried) <= 3
    plain, every = searched(epsilon, target, None)
    assert least <= plain <= 1.01 * least and len(every) == len({*every}) > 5


@pytest.mark.parametrize(
    "rough",
    [lambda z: 1e-9 / z, lambda z: 5 + 1 / z, lambda z: 1 / z**3, lambda z: 0.0, lambda z: math.inf],
    ids=["tiny", "never below", "steep", "none", "infinite"],
)
def test_a_rough_epsilon_that_is_wrong_costs_prices_and_no_privacy(rough):
    epsilon = lambda z: 3.0 / z if z > 0.5 else math.inf
    for target in (0.1, 2.0, 5.9):
        sigma, _ = searched(epsilon, target, rough)
        assert epsilon(sigma) <= target and sigma <= 1.04 * 3.0 / target
