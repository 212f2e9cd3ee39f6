"""Correlated noise is priced as published, and as DP-SGD where the two are the same; its statement names its unit."""

import math

import dp_accounting
import numpy as np
import pytest
from accounting_cases import gaussian_epsilon

import tfdpfl
from tfdpfl.accounting import PrivacyLedger, compute_epsilon, price
from tfdpfl.accounting.correlated import CorrelatedRun, compute_correlated_noise_multiplier
from tfdpfl.accounting.participation import tree_sensitivity
from tfdpfl.noise import BLT, Banded, BandedInverse, Tree, compare


@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_statement_of_correlated_noise_names_its_unit_and_its_one_mechanism(unit):
    noise = Banded(bands=2, min_separation=10, max_participations=3)
    uses = {"num_steps": 25, "min_separation": 10, "max_participations": 3, "unit": unit}
    run = CorrelatedRun(noise=noise, noise_multiplier=2.0, **uses)
    report = PrivacyLedger().count_correlated([("a", 0)], run, dataset=None).report(1e-5)
    assert (report.unit, report.steps, report.participations) == (unit, 25, 3)
    text = report.statement()
    assert f"of other {unit}s for training {unit}s" in text and f"presence of one {unit}" not in text
    assert f"mechanism: 25 steps with Banded(bands=2) noise, noise multiplier 2: at most 3 uses of one {unit}" in text
    both = PrivacyLedger().count_correlated([("a", 0)], run, dataset=None)
    both.add(dp_accounting.GaussianDpEvent(3.0), 4, adjacency="zero_out", unit=unit)
    assert (both.report(1e-5).unit, both.report(1e-5).participations) == (unit, 7)


QUICK_BLT = {"decay": (0.93, 0.18), "scale": (0.42, 0.1)}  # those that fit the training best take seconds to find


def epsilon(noise, z, delta=1e-5, accountant="pld", **how):
    run = CorrelatedRun(noise=noise, noise_multiplier=z, **how)
    return price(run.dp_event, delta, accountant, run.adjacency).epsilon


def test_one_band_under_cyclic_sampling_is_dp_sgd():
    noise = Banded(bands=1, min_separation=1, max_participations=1)
    ours = epsilon(noise, 1.1, num_steps=2400, sampling_rate=250 / 60000)
    dp_sgd = compute_epsilon(num_examples=60000, batch_size=250, noise_multiplier=1.1, num_epochs=10, delta=1e-5)
    assert ours == pytest.approx(dp_sgd, rel=1e-9)


@pytest.mark.parametrize("uses", [1, 3])
def test_bands_under_cyclic_sampling_cost_a_sampled_step_each_round(uses):
    """⌈n/b⌉ rounds at q = participations · b / n, here 2403 steps of 8 groups."""
    noise = Banded(bands=5, min_separation=8, max_participations=uses)
    ours = epsilon(noise, 1.1, num_steps=2403, min_separation=8, sampling_rate=10 * 8 / 2400)
    sigma = 1.1 * math.sqrt(uses)  # uses is what σ is over; a round has one
    theirs = compute_epsilon(num_examples=2400, batch_size=80, noise_multiplier=sigma, num_steps=301, delta=1e-5)
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.slow
def test_noise_found_for_cyclic_sampling_is_for_all_rounds_of_the_groups():
    """By dp-accounting: a Poisson-sampled Gaussian for each of ten rounds. The noise is made for one."""
    noise = Banded(bands=4, min_separation=4, max_participations=1, num_steps=40)
    how = dict(num_steps=40, sampling_rate=0.5)
    sigma = compute_correlated_noise_multiplier(noise, target_epsilon=2.0, delta=1e-5, accountant="rdp", **how)
    step = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(sigma))
    assert 1.99 < dp_accounting.rdp.RdpAccountant().compose(step, 10).get_epsilon(1e-5) <= 2.001
    run = CorrelatedRun(noise=noise, noise_multiplier=sigma, min_separation=4, max_participations=1, **how)
    assert run.participations == 10  # no data set bounds the rounds that an example is taken in


@pytest.mark.slow
def test_sampling_counts_for_no_matrix_that_is_wider_than_the_groups():
    limits = {"min_separation": 8, "max_participations": 10}
    wide = Banded(bands=8, **limits)
    how = {"num_steps": 80, "sampling_rate": 0.1, "adjacency": "zero_out"}
    assert not CorrelatedRun(noise=wide, noise_multiplier=1, min_separation=7, **how).amplified
    for noise in (BLT(**limits, **QUICK_BLT), BandedInverse(bands=2, **limits)):
        assert epsilon(noise, 1.0, min_separation=8, **how) == epsilon(noise, 1.0, num_steps=80, min_separation=8)


@pytest.mark.slow
def test_a_training_as_it_was_said_to_be_costs_one_gaussian():
    one = compute_epsilon(num_examples=1, batch_size=1, noise_multiplier=1.0, num_steps=1, sampling="none", delta=1e-5)
    how = {"min_separation": 30, "max_participations": 5}
    for noise in (Banded(bands=4, **how), BandedInverse(bands=4, coefficients="best", **how), BLT(**how, **QUICK_BLT)):
        assert epsilon(noise, 1.0, num_steps=150, **how) == pytest.approx(one, rel=1e-3)
        assert epsilon(noise, 1.0, num_steps=50, **how) < 0.9 * one  # less ran
        assert epsilon(noise, 1.0, num_steps=180, min_separation=30, max_participations=6) > 1.05 * one
        assert epsilon(noise, 1.0, num_steps=150, min_separation=1, max_participations=5) > 1.3 * one
        assert epsilon(noise, 1.0, num_steps=150) > 4 * one  # nothing known: in every step
        assert epsilon(noise, 1.0, num_steps=150, adjacency="replace_one", **how) == pytest.approx(
            epsilon(noise, 0.5, num_steps=150, **how)
        )
        z = compute_correlated_noise_multiplier(noise, target_epsilon=one, delta=1e-5, num_steps=150)
        assert z == pytest.approx(1.0, rel=1e-3)
        assert epsilon(noise, z, num_steps=150, **how) <= one


def test_gboards_training_is_priced_as_published():
    """z=7, 2000 rounds, at most 6 uses 313 apart: (8.90, 1e-10) for a tree whose every node is used (as TFF's is). Ours
    adds nodes up as they are: those that are a second half are in no sum, so it costs less."""
    every_node = tree_sensitivity(2000, 6, 313)
    assert every_node / (2 * 7**2) == pytest.approx(0.81, abs=0.005)
    how = {"num_steps": 2000, "min_separation": 313, "max_participations": 6, "delta": 1e-10, "accountant": "rdp"}
    ours = Tree().sensitivity(2000, 313, 6) ** 2
    assert epsilon(Tree(), 7 * math.sqrt(ours / every_node), **how) == pytest.approx(8.90, rel=0.01)
    assert ours < every_node and epsilon(Tree(), 7, **how) < 8.90


def test_where_the_normals_end_is_in_the_price():
    """Each of the noises that an example moves may be where the neighbour's cannot."""
    noise = Tree()
    few = CorrelatedRun(noise=noise, noise_multiplier=2, num_steps=4, max_participations=1).dp_event
    assert few.shifts[0] == (3, 0.5)
    assert price(few, 1e-300, adjacency="zero_out").epsilon == math.inf
    how = {"min_separation": 2, "max_participations": 2}
    noise = Banded(bands=2, coefficients=(1, 0.5), **how)
    moved = CorrelatedRun(noise=noise, noise_multiplier=1, num_steps=9, **how).dp_event
    unit = math.sqrt(2 * 1.25)
    assert sum(n * s**2 for n, s in moved.shifts) == pytest.approx(2 * 1.25 / unit**2, rel=0.1)
    assert [n for n, _ in moved.shifts] == [2, 2]
    assert epsilon(Tree(), 0.1, num_steps=1000, delta=1e-5) == math.inf  # one use in a node moves it by ten deviations


@pytest.mark.slow
def test_a_target_that_needs_almost_no_noise_is_refused():
    with pytest.raises(tfdpfl.PrivacyError, match="almost no noise"):
        compute_correlated_noise_multiplier(
            Banded(bands=1, max_participations=1), target_epsilon=1e300, delta=0.5, num_steps=1, sampling_rate=0.01
        )


def test_no_noise_no_steps_and_neighbours_without_a_price():
    assert epsilon(Tree(), 0, num_steps=3) == math.inf
    assert epsilon(Tree(), 1, num_steps=0) == 0
    with pytest.raises(tfdpfl.PrivacyError, match="add_or_remove_one"):
        CorrelatedRun(noise=Tree(), noise_multiplier=1, num_steps=3, adjacency="add_or_remove_one")
    with pytest.raises(tfdpfl.PrivacyError, match="replace_one"):
        CorrelatedRun(noise=Tree(), noise_multiplier=1, num_steps=3, sampling_rate=0.1, adjacency="replace_one")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: CorrelatedRun(noise="tree", noise_multiplier=1, num_steps=1), "noise='tree'"),
        (lambda: CorrelatedRun(noise=Tree(), noise_multiplier=1, num_steps=1, sampling_rate=1.5), "sampling_rate"),
    ],
)
def test_bad_arguments_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.slow
def test_pairs_of_noise_and_sampling_are_compared_at_equal_privacy():
    """Each pair costs the target where it is priced by itself, and its error is that of this much noise."""
    n, epochs, target, delta = 8, 2, 3.0, 1e-4
    lines = compare(n, n // epochs, epochs, target_epsilon=target, delta=delta, sampling_rate=epochs / n)
    assert [line.error for line in lines] == sorted(line.error for line in lines)
    pairs = {(line.sampling, line.noise.text()): line for line in lines}
    run = {"num_examples": 1000, "batch_size": 250, "delta": delta}
    for sampling, length in (("poisson", {"num_steps": n}), ("random_allocation", {"num_epochs": epochs})):
        error, z = pairs[sampling, "Banded(bands=1)"][1:3]
        most, more = (compute_epsilon(noise_multiplier=s, sampling=sampling, **length, **run) for s in (z, 0.998 * z))
        assert most <= target < more
        assert error == pytest.approx(z * math.sqrt((n + 1) / 2))
    for bands in (2, 4):  # one example is in a round of its group with twice, and four times, the probability
        _, error, z, _ = pairs["cyclic_poisson", f"Banded(bands={bands})"]
        event = dp_accounting.PoissonSampledDpEvent(bands / 4, dp_accounting.GaussianDpEvent(z))
        assert price(dp_accounting.SelfComposedDpEvent(event, n // bands), delta).epsilon == pytest.approx(target, 1e-4)
        noise = Banded(bands=bands, min_separation=bands, max_participations=1, num_steps=n)
        sums = np.tril(np.ones([n, n])) @ np.linalg.inv(noise.matrix(n))
        assert error == pytest.approx(z * np.linalg.norm(noise.coefficients) * np.sqrt((sums**2).sum() / n))
    fixed = pairs["fixed_order", "Banded(bands=4)"]
    assert (
        gaussian_epsilon(fixed.noise_multiplier, delta) == pytest.approx(target, 1e-4)
        and ("shuffle", "Tree()") not in pairs
    )
    assert {line.sampling for line in compare(3)} == {"shuffle"}
    with pytest.raises(ValueError, match=r"sampling_rate=1\.5 is above 1"):
        compare(3, target_epsilon=target, delta=delta, sampling_rate=1.5)


@pytest.mark.parametrize("views", [(3, None), (None, 3)])
def test_of_two_views_of_the_same_steps_the_one_that_bounds_no_uses_stands(views):
    both = PrivacyLedger()
    for most in views:
        run = CorrelatedRun(noise=Tree(), noise_multiplier=2.0, num_steps=9, max_participations=most)
        both.count_correlated([("a", 0)], run, dataset=None)
    assert len(both) == 1 and both.report(1e-5, "rdp").participations == 9
