"""The ε of the rounds that ran, against published figures, brute force and closed forms; cohorts not drawn as said."""

import dataclasses
import math

import numpy as np
import pytest
from federated_cases import gaussian_delta, rounds
from scipy.optimize import brentq
from scipy.stats import binom, norm

from tfdpfl import PrivacyError, compute_epsilon
from tfdpfl.accounting.pricing import Price
from tfdpfl.federated import guarantees
from tfdpfl.federated.guarantees import (
    ClientLevel,
    CohortCheck,
    DistributedLevel,
    ExampleLevel,
    LocalLevel,
    TreeLevel,
    tree_sensitivity,
)
from tfdpfl.federated.privacy import Participation, RoundsRun
from tfdpfl.federated.samplers import FixedSizeClientSampler, PoissonClientSampler


@pytest.mark.parametrize(("accountant", "epsilon"), [("rdp", 1.986), ("pld", 1.707)])
def test_the_tutorials_setting_has_the_tutorials_epsilon(accountant, epsilon):
    run = rounds(100, "poisson", population=3383, cohort=120)
    assert ClientLevel(noise_multiplier=1.2).price(run, 1e-5, accountant).epsilon == pytest.approx(epsilon, abs=1e-3)


def test_gboards_setting_is_priced_as_published():
    run = rounds(2000, "bounded", population=4_000_000, cohort=6500, max_participations=6, min_separation=313)
    tree_sensitivity.cache_clear()
    assert tree_sensitivity(2000, 6, 313) / (2 * 7**2) == pytest.approx(0.81, abs=0.005)
    promise = TreeLevel(noise_multiplier=7.0)
    assert promise.price(run, 1e-10, "rdp").epsilon == pytest.approx(8.90, rel=0.01)
    # The nodes are one Gaussian mechanism, whose exact ε is lower; it is the default.
    exact = promise.price(run, 1e-10)
    assert exact.accountant == "pld"
    assert gaussian_delta(exact.epsilon, math.sqrt(79) / 7) == pytest.approx(1e-10, rel=0.05)


def test_without_sampling_every_participation_counts():
    promise = ClientLevel(noise_multiplier=2.0)
    epsilon = promise.price(rounds(16), 1e-5).epsilon
    assert gaussian_delta(epsilon, 4 / 2.0) == pytest.approx(1e-5, rel=0.02)
    bounded = rounds(16, "bounded", max_participations=4)
    assert gaussian_delta(promise.price(bounded, 1e-5).epsilon, 2 / 2.0) == pytest.approx(1e-5, rel=0.02)
    apart = rounds(16, "bounded", min_separation=4)
    assert promise.price(apart, 1e-5) == promise.price(bounded, 1e-5)
    assert promise.price(rounds(0), 1e-5).epsilon == 0
    assert ClientLevel(noise_multiplier=0.0).price(rounds(1), 1e-5).epsilon == math.inf


def shown_over_rounds(z, rate, rounds, delta):
    """The ε that one client with all others opposed to it shows over independent rounds: by Fourier transforms."""
    grid, x = 1e-3, np.linspace(-14, 14, 100_001)
    p, q = (rate * norm.pdf(x, a) + (1 - rate) * norm.pdf(x) for a in (2 / z, 1 / z))
    size = 1 << 19
    mass = np.zeros(size)
    np.add.at(mass, np.floor(np.log(p / q) / grid).astype(int) % size, p * (x[1] - x[0]))
    total = np.fft.ifft(np.fft.fft(mass) ** rounds).real
    loss = np.where(np.arange(size) < size // 2, np.arange(size), np.arange(size) - size) * grid
    loss, total = loss[loss > 0], total[loss > 0]
    return brentq(lambda e: np.sum(total * -np.expm1(np.minimum(e - loss, 0))) - delta, 0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("z, k, n, number", [(1.2, 50, 1000, 100), (2.0, 20, 100, 30)])
def test_a_cohort_of_fixed_size_costs_what_an_attack_shows_and_more_than_poissons(z, k, n, number):
    promise = ClientLevel(noise_multiplier=z)
    fixed = promise.price(rounds(number, "fixed_size", population=n, cohort=k), 1e-5)
    shown = shown_over_rounds(z, k / n, number, 1e-5)
    assert fixed.accountant == "pld" and 0.99 * shown < fixed.epsilon < 1.06 * shown
    poisson = promise.price(rounds(number, "poisson", population=n, cohort=k), 1e-5).epsilon
    none = promise.price(rounds(number, population=n), 1e-5)
    assert poisson < fixed.epsilon < none.epsilon
    by_rdp = promise.price(rounds(number, "fixed_size", population=n, cohort=k), 1e-5, "rdp")
    # As replacing a client, by another bound, which is looser; and without the draw.
    assert fixed.epsilon < by_rdp.epsilon <= promise.price(rounds(number, population=n), 1e-5, "rdp").epsilon
    assert by_rdp.epsilon <= 1.001 * compute_epsilon(
        num_examples=n, batch_size=k, noise_multiplier=z, num_steps=number, sampling="fixed_size", delta=1e-5,
        accountant="rdp",
    )  # fmt: skip


IDS = [f"{i}" for i in range(50)]


@pytest.mark.parametrize(
    "sampling, population, expected, draw, within",
    [
        ("poisson", 10**6, 50, lambda r: IDS, 2),  # 50 that are always there, said to be of a million
        ("poisson", 50, 5, lambda r: IDS, 2),
        ("poisson", 50, 5, lambda r: [IDS[0], *np.random.default_rng(r).choice(IDS[1:], 5, replace=False)], 20),
        ("fixed_size", 50, 2, lambda r: IDS[:2], 6),
        ("fixed_size", 1000, 50, lambda r: [f"{50 * r + i}" for i in range(50)], 8),  # dealt out, not drawn
        ("poisson", 20, 2, lambda r: IDS[10 * r : 10 * r + 10], 4),  # more of them than there are
    ],
)
def test_cohorts_that_chance_does_not_give_are_refused(sampling, population, expected, draw, within):
    declared = Participation(sampling=sampling, population=population, clients_per_round=expected)
    check, cohorts = CohortCheck(declared), []
    with pytest.raises(PrivacyError, match=r"happen|population of 20"):
        for number in range(within):
            cohorts.append(draw(number))
            check.add(cohorts[-1])
    with pytest.raises(PrivacyError):
        ClientLevel(noise_multiplier=1.0).price(
            RoundsRun(rounds=len(cohorts), participation=declared, cohorts=cohorts), 1e-5, "rdp"
        )
    assert check.counts.total() == sum(map(len, cohorts[:-1]))  # of the refused cohort nothing was kept
    CohortCheck(dataclasses.replace(declared, sampling="none")).add(cohorts[-1])


def test_cohorts_that_are_drawn_as_declared_pass():
    """A bet's winnings are one in the mean, so that they pass 10^9 once in 10^9 trainings."""
    for rate, chances in ((0.5, 30), (0.02, 60)):
        won = [math.exp(guarantees._odds(hits, chances, rate)) for hits in range(chances + 1)]
        higher = [math.exp(guarantees._odds(hits, chances, rate, more_only=True)) for hits in range(chances + 1)]
        weights = binom.pmf(range(chances + 1), chances, rate)
        assert np.dot(won, weights) == pytest.approx(1) and np.dot(higher, weights) == pytest.approx(1)
    for seed in range(20):
        for sampler in (PoissonClientSampler(IDS, 0.1, seed), FixedSizeClientSampler(IDS, 5, seed)):
            check = CohortCheck(sampler.participation)
            for number in range(40):
                check.add(sampler(number))


@pytest.mark.slow
def test_the_ledger_of_examples_is_each_clients_own():
    promise = ExampleLevel(noise_multiplier=1.0, sampling="poisson", batch_size=32, local_steps=10)
    run = rounds(3, cohorts=[["a", "b"], ["a"], ["a", "c"]], examples={"a": 1000, "b": 1000, "c": 50})
    ledger = promise.price_by_client(run, 1e-5, "rdp")
    assert set(ledger) == {"a", "b", "c"}
    assert ledger["b"].epsilon < ledger["a"].epsilon < ledger["c"].epsilon
    assert promise.price(run, 1e-5, "rdp") == ledger["c"]
    batches = ExampleLevel(noise_multiplier=3.0, sampling="batches", batch_size=32, local_epochs=3)
    assert gaussian_delta(batches.price_by_client(run, 1e-5)["a"].epsilon, 1.0) == pytest.approx(1e-5, rel=0.02)
    assert batches.price(rounds(3), 1e-5) == batches.price_by_client(run, 1e-5)["a"]
    assert promise.price(rounds(2, cohorts=[[], []]), 1e-5).epsilon == 0
    # Before anything ran: of a client with the fewest examples, but for those without any.
    assert promise.price(rounds(1, examples={"a": 1000, "c": 50, "z": 0}), 1e-5, "rdp") == ledger["c"]
    # Who gave nothing pays nothing for that round.
    away = dataclasses.replace(run, absent=[["a"], [], ["c"]])
    assert promise.price_by_client(away, 1e-5, "rdp")["a"] == promise._price(2, 1000, 1e-5, "rdp")
    assert promise.price_by_client(away, 1e-5, "rdp")["c"].epsilon == 0
    with pytest.raises(PrivacyError, match="num_examples"):
        promise.price(rounds(3, cohorts=[["a"], ["a"], ["z"]], examples={"a": 10}), 1e-5)


def random_clients(random, number):
    examples = {f"{i}": int(n) for i, n in enumerate(random.integers(0, 60, number))}  # fewer than a batch, and none
    cohorts = [[c for c in examples if random.random() < 0.4] for _ in range(12)]
    return rounds(12, cohort=12.0, cohorts=cohorts, examples=examples)


SIXTEENS = {"batch_size": 16, "local_steps": 3, "local_epochs": 2}


@pytest.mark.parametrize("sampling", ["poisson", "batches"])
def test_the_worst_client_costs_what_the_worst_of_all_ledgers_costs(sampling):
    promise = ExampleLevel(noise_multiplier=1.1, sampling=sampling, **SIXTEENS)
    run = random_clients(np.random.default_rng(0), 6)
    everyone = promise.price_by_client(run, 1e-5, "rdp").values()
    assert promise.price(run, 1e-5, "rdp").epsilon == pytest.approx(max(p.epsilon for p in everyone), rel=1e-9)


def test_only_clients_that_can_be_the_worst_are_priced(monkeypatch):
    random, priced = np.random.default_rng(0), []

    def stand_in(event, *_):
        """Some price that grows with the steps and with the rate, and how much with which is drawn anew."""
        priced.append(event)
        rate = getattr(getattr(event, "event", None), "sampling_probability", 1.0)
        return Price(getattr(event, "count", 0) ** powers[0] * rate ** powers[1], "stand-in")

    monkeypatch.setattr(guarantees, "price", stand_in)
    promise = ExampleLevel(noise_multiplier=1.0, sampling="poisson", **SIXTEENS)
    for _ in range(200):
        powers = random.uniform(0.1, 5, 2)
        run = random_clients(random, 30)
        everyone = promise.price_by_client(run, 1e-5).values()
        priced.clear()
        assert promise.price(run, 1e-5).epsilon == max(p.epsilon for p in everyone)
        assert len(priced) <= 1 + 12  # one for each number of rounds, and nobody


def test_a_client_of_unknown_size_has_no_price_even_beside_worse_ones():
    promise = ExampleLevel(noise_multiplier=1.0, sampling="poisson", batch_size=32, local_steps=10)
    run = rounds(3, cohorts=[["a", "z"], ["a"], ["a"]], examples={"a": 10})
    with pytest.raises(PrivacyError, match="num_examples"):
        promise.price(run, 1e-5, "rdp")
    # A client without examples takes part at no cost, which says nothing of those that took part less.
    run = rounds(3, cohorts=[["a", "z"], ["z"], ["z"]], examples={"a": 10, "z": 0})
    assert promise.price(run, 1e-5, "rdp") == promise.price_by_client(run, 1e-5, "rdp")["a"]


def test_local_noise_is_priced_for_replacement_and_for_who_took_part_most():
    promise = LocalLevel(noise_multiplier=4.0)
    assert promise.adjacency == "replace_one"
    run = rounds(5, "poisson", cohorts=[["a", "b"], ["a"], ["a"], ["b"], ["a"]])
    assert gaussian_delta(promise.price(run, 1e-5).epsilon, 2 * 2 / 4.0) == pytest.approx(1e-5, rel=0.02)
    assert promise.price(rounds(4, "poisson"), 1e-5) == promise.price(run, 1e-5)


def test_distributed_noise_tends_to_a_gaussians_and_is_priced_by_the_cohort_that_came():
    fine = DistributedLevel(l1=1e6, l2=1e5, local_stddev=1e5 * 2.0 / math.sqrt(10))
    names = [f"{i}" for i in range(10)]
    full = rounds(4, "bounded", cohorts=[names] * 4)
    gaussian = ClientLevel(noise_multiplier=2.0).price(rounds(4), 1e-5, "rdp").epsilon
    assert gaussian <= fine.price(full, 1e-5).epsilon == pytest.approx(gaussian, rel=0.01)
    coarse = DistributedLevel(l1=100.0, l2=10.0, local_stddev=10 * 2.0 / math.sqrt(10))
    assert coarse.price(full, 1e-5).epsilon > 1.005 * gaussian
    few = rounds(4, "bounded", cohorts=[names[:5]] * 4)
    weak = ClientLevel(noise_multiplier=2.0 / math.sqrt(2)).price(rounds(4), 1e-5, "rdp").epsilon
    assert fine.price(few, 1e-5).epsilon == pytest.approx(weak, rel=0.01)
    assert fine.price(rounds(1, "bounded", cohorts=[[]]), 1e-5).epsilon == 0
    # Who was in a sampled cohort is secret, so each client pays for every round; a public schedule charges who came.
    half = [names[:5], names[5:]]
    assert (
        fine.price(rounds(2, "bounded", cohorts=half), 1e-5).epsilon
        < fine.price(rounds(2, "poisson", cohorts=half), 1e-5).epsilon
    )
    with pytest.raises(PrivacyError, match="cohorts must hold every round"):
        fine.price(rounds(4), 1e-5)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (rounds(1, cohort=101.0), "at most population=100"),
        (rounds(1, "cyclic"), "sampling must be one of"),
        (rounds(1, cohorts=[["a", "b", "a"]]), "'a' is in the cohort of round 0 more than once"),
        (rounds(3, "bounded", max_participations=1, cohorts=[["a"], [], ["a"]]), "max_participations=1"),
        (rounds(3, "bounded", min_separation=3, cohorts=[["a"], [], ["a"]]), "2 after its last"),
        (rounds(1, "fixed_size", cohort=2, cohorts=[["a", "b", "c"]]), "has 3 clients"),
        (rounds(1, "fixed_size", cohort=2.5), "whole number"),
        (rounds(3, cohorts=[["a"]]), "Record them all"),
        (rounds(1, "bounded", min_separation=0), "min_separation=0"),
    ],
)
def test_cohorts_that_do_not_keep_to_the_declaration_have_no_price(run, message):
    of_examples = ExampleLevel(noise_multiplier=1.0, sampling="batches", batch_size=1, local_epochs=1)
    others = [level(noise_multiplier=1.0) for level in (ClientLevel, TreeLevel, LocalLevel)]
    for price in [*(promise.price for promise in [*others, of_examples]), of_examples.price_by_client]:
        with pytest.raises(PrivacyError, match=message):
            price(run, 1e-5)
