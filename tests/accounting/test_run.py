"""How many steps and uses a run has, and what its sampling means for ε."""

import dataclasses
import math
import subprocess
import sys

import dp_accounting
import pytest
from accounting_cases import RUN, gaussian_epsilon

from tfdpfl.accounting import Run, compute_epsilon, compute_num_steps, privacy_statement
from tfdpfl.errors import PrivacyError


def test_sampling_everyone_is_no_sampling():
    run = dict(num_examples=250, batch_size=250, noise_multiplier=5.0, num_steps=20, delta=1e-5)
    assert compute_epsilon(**run, sampling="poisson") == compute_epsilon(**run, sampling="none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sampling="shuffle"), "has a known ε for sampling='poisson'"),
        (dict(adjacency="zero_out"), "not for 'poisson' with 'zero_out'"),
        (dict(max_examples_per_user=2), "no known ε for max_examples_per_user=2"),
        (dict(truncated_batch_size=0), "truncated_batch_size must be"),
    ],
)
def test_truncation_without_a_price_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        compute_epsilon(**{**RUN, "truncated_batch_size": 300, "num_steps": 5, **changes})


@pytest.mark.skipif(hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent"), reason="has a price with 0.6")
def test_truncation_needs_a_newer_accountant():
    with pytest.raises(PrivacyError, match=r"dp-accounting 0\.6"):
        compute_epsilon(**RUN, truncated_batch_size=300, num_steps=5)


def test_shuffled_batches_cost_one_gaussian_an_epoch():
    epsilon = compute_epsilon(**RUN, num_epochs=15, sampling="shuffle")
    assert epsilon == pytest.approx(gaussian_epsilon(1.1 / math.sqrt(15), 1e-5), rel=1e-4)
    assert epsilon > 5 * compute_epsilon(**RUN, num_epochs=15, sampling="poisson")


@pytest.mark.parametrize(
    ("run", "participations"),
    [
        (dict(num_epochs=3), 3),
        (dict(num_epochs=2.1), 3),
        (dict(num_epochs=0.01), 1),
        (dict(num_epochs=0), 0),
        (dict(num_steps=480), 2),
        (dict(num_steps=481), 3),
        (dict(num_steps=1), 1),
        (dict(num_steps=0), 0),
    ],
)
def test_a_shuffled_epoch_begun_is_paid_for(run, participations):
    assert (
        Run(num_examples=60000, batch_size=250, noise_multiplier=1, sampling="shuffle", **run).participations
        == participations
    )


def test_a_shuffled_epoch_may_drop_its_partial_batch():
    run = Run(num_examples=1099, batch_size=100, noise_multiplier=1, sampling="shuffle", num_steps=21)
    assert run.participations == 3  # ten steps an epoch with drop_remainder, eleven without
    assert dataclasses.replace(run, num_steps=None, num_epochs=2).steps == 22


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "none"])
@pytest.mark.parametrize(("num_epochs", "steps"), [(15, 3600), (0.3, 72), (1 / 240, 1), (1.001, 241)])
def test_an_epoch_begun_is_steps_rounded_up(sampling, num_epochs, steps):
    run = Run(num_examples=60000, batch_size=250, noise_multiplier=1, sampling=sampling, num_epochs=num_epochs)
    assert run.steps == run.participations == steps


@pytest.mark.parametrize("sampling", ["shuffle", "none"])
def test_fewer_microbatches_than_examples_count_sigma_as_half(sampling):
    run = {**RUN, "noise_multiplier": 4.0, "num_steps": 100, "sampling": sampling}
    halved = compute_epsilon(**{**run, "noise_multiplier": 2.0})
    assert compute_epsilon(**run, num_microbatches=50) == compute_epsilon(**run, num_microbatches=1) == halved
    assert compute_epsilon(**run, num_microbatches=250) == compute_epsilon(**run) < halved
    assert "regroup" in Run.__doc__ and "other groups" in privacy_statement(**run, num_microbatches=50)


@pytest.mark.parametrize("sampling", ["poisson", "random_allocation"])
def test_groups_that_an_example_more_would_regroup_have_no_price(sampling):
    run = {**RUN, "num_epochs": 1, "sampling": sampling}
    with pytest.raises(PrivacyError, match=f"num_microbatches=50 .*'{sampling}': .*Use sampling='shuffle'"):
        compute_epsilon(**run, num_microbatches=50)
    assert compute_epsilon(**run, num_microbatches=250) == compute_epsilon(**run)


@pytest.mark.parametrize("sampling", ["shuffle", "none"])
def test_replacing_an_example_counts_sigma_as_half(sampling):
    run = {**RUN, "num_steps": 4, "sampling": sampling}
    halved = compute_epsilon(**{**run, "noise_multiplier": RUN["noise_multiplier"] / 2})
    assert compute_epsilon(**run, adjacency="replace_one") == halved
    assert compute_epsilon(**run, adjacency="replace_one", num_microbatches=5) == halved


@pytest.mark.parametrize(
    ("sampling", "adjacency"),
    [("shuffle", "add_or_remove_one"), ("fixed_size", "add_or_remove_one"), ("fixed_size", "zero_out")],
)
def test_an_adjacency_without_an_argument_is_refused(sampling, adjacency):
    with pytest.raises(PrivacyError, match=f"{adjacency}.*use '"):
        compute_epsilon(**RUN, num_steps=1, sampling=sampling, adjacency=adjacency)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(max_examples_per_user=0), "max_examples_per_user must be a whole number of at least 1, got 0"),
        (dict(max_examples_per_user=1.5), "max_examples_per_user.*1.5"),
        (dict(max_examples_per_user=60001), "max_examples_per_user must be at most num_examples=60000, got 60001"),
        (dict(max_examples_per_user=2, sampling="fixed_size"), "has no known ε for max_examples_per_user=2: use"),
        (dict(max_examples_per_user=2, adjacency="replace_one"), "has no known ε for max_examples_per_user=2: use"),
    ],
)
def test_a_group_that_has_no_price_is_refused(how, message):
    for function in (compute_epsilon, privacy_statement):
        with pytest.raises(ValueError, match=message):
            function(**RUN, num_steps=1, **how)


def test_accounting_loads_nothing_slow_before_the_first_price():
    code = (
        "import sys, tfdpfl.accounting as a;"
        "slow = {'tensorflow', 'keras', 'scipy', 'numpy', 'dp_accounting'};"
        "assert not slow & set(sys.modules), slow & set(sys.modules);"
        "a.Run(num_examples=100, batch_size=10, noise_multiplier=5, num_steps=3).participations;"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("steps, passes", [(1, 1), (234, 1), (235, 1), (236, 2), (470, 2), (2340, 10), (2350, 10)])
def test_steps_of_whole_epochs_cost_what_the_epochs_cost(steps, passes):
    """60000 examples in batches of 256 are 234 batches and a smaller one."""
    run = Run(num_examples=60000, batch_size=256, noise_multiplier=1, sampling="shuffle", num_steps=steps)
    assert run.participations == passes


def test_epochs_and_their_steps_have_one_epsilon():
    run = dict(num_examples=60000, batch_size=256, noise_multiplier=1.1, sampling="shuffle", delta=1e-5)
    assert compute_epsilon(num_steps=10 * 235, **run) == compute_epsilon(num_epochs=10, **run)
    assert compute_num_steps(target_epsilon=compute_epsilon(num_epochs=3, **run) * 1.001, **run) == 3 * 235


def test_truncated_batches_with_discrete_noise_have_no_price():
    with pytest.raises(PrivacyError, match="truncated_batch_size=300 has no known ε with discrete noise"):
        compute_epsilon(**RUN, num_steps=5, truncated_batch_size=300, secure_noise=True)
