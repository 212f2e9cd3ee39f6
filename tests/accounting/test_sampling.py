"""Tests of the objects that say how batches are drawn."""

import dataclasses
import itertools

import pytest

from tfdpfl.accounting import SAMPLINGS, Run
from tfdpfl.accounting.sampling import BY_CODE, SCHEMES
from tfdpfl.errors import PrivacyError

# What saved models hold. A number keeps its meaning for ever: append, never change.
SAVED = {
    0: ("none", "zero_out", "example", False),
    1: ("poisson", "add_or_remove_one", "example", False),
    2: ("shuffle", "zero_out", "example", False),
    3: ("fixed_size", "replace_one", "example", False),
    4: ("none", "add_or_remove_one", "example", False),
    5: ("none", "zero_out", "example", False),
    6: ("poisson", "add_or_remove_one", "user", False),
    7: ("fixed_order", "zero_out", "example", False),
    8: ("cyclic_poisson", "add_or_remove_one", "example", False),
    9: ("shuffle", "zero_out", "example", True),
    10: ("random_allocation", "add_or_remove_one", "example", False),
    11: ("random_allocation", "add_or_remove_one", "user", False),
    12: ("shuffle", "zero_out", "user", False),
    13: ("shuffle", "zero_out", "user", True),
    14: ("fixed_order", "zero_out", "user", False),
    15: ("cyclic_poisson", "add_or_remove_one", "user", False),
    32: ("b_min_sep", "add_or_remove_one", "example", False),
    33: ("b_min_sep", "add_or_remove_one", "user", False),
}


def test_numbers_in_saved_step_tables_keep_their_meaning():
    found = {n: (s.name, code.adjacency, code.unit, code.across_passes) for n, (s, code) in BY_CODE.items()}
    assert {number: found[number] for number in SAVED} == SAVED
    assert [number for number, (_, code) in BY_CODE.items() if code.unknown] == [0]


def test_each_number_stands_for_one_scheme_and_is_found_again():
    numbers = [code.number for scheme in SCHEMES.values() for code in scheme.codes]
    assert len(set(numbers)) == len(numbers)
    assert not any(number & 16 for number in numbers)  # the table sets this bit for discrete noise
    for number, (scheme, code) in BY_CODE.items():
        if not code.unknown:
            assert scheme.code(code.adjacency, code.unit, code.across_passes) == number
            assert code.adjacency in scheme.adjacencies


@pytest.mark.parametrize(("name", "adjacency"), [(s, a) for s in SAMPLINGS for a in SCHEMES[s].adjacencies])
def test_the_event_of_a_run_holds_its_noise_over_the_sensitivity(name, adjacency):
    run = Run(
        num_examples=100, batch_size=10, noise_multiplier=3.0, num_epochs=2, sampling=name, adjacency=adjacency
    )  # fmt: skip
    composed = run.dp_event
    step = composed.event
    wrapper = type(step).__name__
    while hasattr(step, "event"):
        step = step.event
    assert step.noise_multiplier == 3.0 / (2 if adjacency == "replace_one" else 1)
    wrappers = {
        "poisson": "PoissonSampledDpEvent", "fixed_size": "SampledWithoutReplacementDpEvent",
        "random_allocation": "RandomAllocationDpEvent", "shuffle": "GaussianDpEvent", "none": "GaussianDpEvent",
    }  # fmt: skip
    assert wrapper == wrappers.get(name, wrapper)  # of another, tests/data/test_prices.py holds the price
    assert composed.count == (2 if SCHEMES[name].counts_passes else 20)


def test_means_of_groups_move_twice_as_far_and_are_refused_where_one_example_moves_others_to_other_groups():
    for name in SAMPLINGS:
        scheme, data = SCHEMES[name], dict(num_examples=100, batch_size=10, noise_multiplier=1.0, num_steps=10)
        if scheme.independent:
            with pytest.raises(PrivacyError, match="num_microbatches=5 has no known ε"):
                Run(**data, sampling=name, num_microbatches=5)
        else:
            assert {scheme.sensitivity(a, True) for a in scheme.adjacencies} == {2}


def test_only_poisson_samples_name_a_shuffled_run_beside_them():
    for name, size in itertools.product(SAMPLINGS, (10, 100)):
        run = Run(num_examples=100, batch_size=size, noise_multiplier=1.0, num_steps=10, sampling=name)
        changes = run.scheme.if_only_shuffled(run.adjacency)
        assert bool(changes) == (name == "poisson")
        if changes:
            beside = dataclasses.replace(run, **changes)
            assert (beside.sampling, beside.adjacency, beside.steps) == ("shuffle", "zero_out", 10)


@pytest.mark.parametrize(
    "changes", [{"sampling": "fixed_size"}, {"sampling": "random_allocation"}, {"max_examples_per_user": 2}]
)
def test_discrete_noise_is_refused_where_it_has_no_price(changes):
    with pytest.raises(PrivacyError, match="no ε is known for discrete noise with sampling='fixed_size' or 'rand"):
        Run(num_examples=100, batch_size=10, noise_multiplier=1.0, num_steps=10, secure_noise=True, **changes)
