"""The noise that a federated training needs for its ε, and what trainings cost together. No TFF."""

import dataclasses
import math

import pytest
from federated_cases import gaussian_delta, rounds

from tfdpfl import PrivacyError
from tfdpfl.federated.calibration import compute_federated_noise_multiplier, skellam_level, total_price
from tfdpfl.federated.guarantees import (
    ClientLevel,
    DistributedLevel,
    ExampleLevel,
    LocalLevel,
    TreeLevel,
)
from tfdpfl.federated.privacy import Participation, RoundsRun

POISSON = Participation(sampling="poisson", population=1000, clients_per_round=50)


LIMITED = Participation(
    sampling="bounded", population=1000, clients_per_round=50, max_participations=4, min_separation=10
)


@pytest.mark.parametrize(
    "level, settings, promised",
    [
        ("client", {}, lambda z, run: (ClientLevel(noise_multiplier=z), run)),
        ("tree", {"restart_every": 16}, lambda z, run: (TreeLevel(noise_multiplier=z, restart_every=16), run)),
        ("local", {}, lambda z, run: (LocalLevel(noise_multiplier=z), run)),
        (
            "distributed",
            {"num_weights": 1000, "clip": 0.5},
            lambda z, run: (
                skellam_level(z, 0.5, 50, 1000),
                rounds(4, cohort=50, cohorts=[[f"{i}" for i in range(50)]] * 4),
            ),
        ),
        (
            "example",
            {"num_examples": 200, "batch_size": 20, "local_steps": 6},
            lambda z, run: (
                ExampleLevel(noise_multiplier=z, sampling="poisson", batch_size=20, local_steps=6),
                rounds(4, "bounded", cohorts=[["a"]] * 4, examples={"a": 200}),
            ),
        ),
        (
            "example",
            {"local_epochs": 3},
            lambda z, run: (ExampleLevel(noise_multiplier=z, sampling="batches", batch_size=9, local_epochs=3), run),
        ),
    ],
)
def test_the_noise_that_is_computed_meets_its_epsilon_and_wastes_nothing(level, settings, promised):
    z = compute_federated_noise_multiplier(
        target_epsilon=2.0, delta=1e-5, num_rounds=40, participation=LIMITED, level=level, accountant="rdp", **settings
    )
    run = RoundsRun(rounds=40, participation=LIMITED)
    for noise, meets in ((z, True), (0.995 * z, False)):
        guarantee, ran = promised(noise, run)
        assert (guarantee.price(ran, 1e-5, "rdp").epsilon <= 2.0) is meets


def test_noise_for_the_tutorials_epsilon_is_the_tutorials():
    tutorial = Participation(sampling="poisson", population=3383, clients_per_round=120)
    z = compute_federated_noise_multiplier(target_epsilon=1.986, delta=1e-5, num_rounds=100, participation=tutorial,
                                 accountant="rdp")  # fmt: skip
    assert z == pytest.approx(1.2, rel=2e-3)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"target_epsilon": 0.0}, "target_epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"level": "user"}, "level must be one of"),
        ({"level": "distributed"}, "num_weights"),
        ({"level": "distributed", "num_weights": 10, "bits": 1}, "bits=1 is too few"),
        ({"level": "example", "local_steps": 3}, "batch_size"),
        ({"level": "example"}, "local_steps"),
    ],
)
def test_bad_plans_are_named_with_their_mend(wrong, words):
    with pytest.raises(ValueError, match=words):
        compute_federated_noise_multiplier(
            **{"target_epsilon": 1.0, "delta": 1e-5, "num_rounds": 3, "participation": POISSON, **wrong}
        )


def test_trainings_on_the_same_clients_add_up_as_one_mechanism():
    # Gaussians: of μ 4/2 and 3/2 together 5/2; a tree's 8 first rounds are one of √4, since each is in 4 nodes.
    plain = [(ClientLevel(noise_multiplier=2.0), rounds(16)), (ClientLevel(noise_multiplier=2.0), rounds(9))]
    assert gaussian_delta(total_price(plain, 1e-5).epsilon, 2.5) == pytest.approx(1e-5, rel=0.02)
    once = rounds(8, "bounded", max_participations=1)
    mixed = [(TreeLevel(noise_multiplier=2.0), once), plain[1]]
    assert gaussian_delta(total_price(mixed, 1e-5).epsilon, math.sqrt(1 + 9 / 4)) == pytest.approx(1e-5, rel=0.02)
    # Whatever is together costs more than either and less than both.
    run = RoundsRun(rounds=20, participation=POISSON)
    fixed = RoundsRun(rounds=20, participation=dataclasses.replace(POISSON, sampling="fixed_size"))
    drawn = [(ClientLevel(noise_multiplier=z), r) for z, r in ((1.0, run), (1.3, run), (1.5, fixed))]
    each = [guarantee.price(r, 1e-5, "rdp").epsilon for guarantee, r in drawn]
    assert max(each) < total_price(drawn, 1e-5, "rdp").epsilon < sum(each)
    # Noise without an event: at shares of delta.
    skellam = DistributedLevel(l1=1e6, l2=1e5, local_stddev=1e5), rounds(1, cohorts=[["a", "b"]])
    halves = [guarantee.price(r, 5e-6).epsilon for guarantee, r in (skellam, plain[0])]
    assert total_price([skellam, plain[0]], 1e-5).epsilon == pytest.approx(sum(halves))
    with pytest.raises(PrivacyError, match=r"of one level to add up, got \['client', 'local'\]"):
        total_price([plain[0], (LocalLevel(noise_multiplier=1.0), rounds(1))], 1e-5)


def test_examples_of_a_client_pay_for_the_trainings_that_it_was_in():
    promise = ExampleLevel(noise_multiplier=2.0, sampling="batches", batch_size=8, local_epochs=1)
    first = rounds(4, cohorts=[["a"], ["a"], ["a", "b"], ["a"]])
    second = rounds(5, cohorts=[["b"], ["b"], ["b"], ["c", "b"], ["b"]])
    # a: 4 uses, b: 1 + 5, c: 1.
    total = total_price([(promise, first), (promise, second)], 1e-5)
    assert gaussian_delta(total.epsilon, math.sqrt(6) / 2) == pytest.approx(1e-5, rel=0.02)
