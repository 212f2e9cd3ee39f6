"""What the rounds of a federated training cost, against published figures, brute force and closed forms. No TFF."""

import dataclasses
import importlib
import itertools
import math
import re
import sys
import types
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.optimize import brentq
from scipy.stats import binom, norm

from tfdpfl import AdaptiveClip, PrivacyError, compute_epsilon, federated
from tfdpfl.accounting import fixed_size
from tfdpfl.accounting.pricing import Price
from tfdpfl.cli import main
from tfdpfl.federated import guarantees
from tfdpfl.federated.calibration import compute_federated_noise_multiplier, skellam_level, total_price
from tfdpfl.federated.clip import NoisedMetrics, combined
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

ROOT = Path(__file__).resolve().parents[2]


def rounds(number, sampling="none", population=100, cohort=10.0, cohorts=(), examples=None, **limits):
    participation = Participation(sampling=sampling, population=population, clients_per_round=cohort, **limits)
    return RoundsRun(rounds=number, participation=participation, cohorts=cohorts, num_examples=examples or {})


def gaussian_delta(epsilon, mu):
    """Balle and Wang 2018: the δ of a Gaussian mechanism of sensitivity over noise μ."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


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


def searched(leaves, most, separation, restart_every):
    """The largest sum over nodes of the squared number of participations, over all ways to take part."""
    nodes, start = [], 0
    while start < leaves:
        tree = min(restart_every or leaves, leaves - start)
        at = start
        for level in reversed(range(tree.bit_length())):
            if tree >> level & 1:
                for height in range(level + 1):
                    width = 1 << height
                    nodes += [(at + i * width, at + (i + 1) * width) for i in range(1 << (level - height))]
                at += 1 << level
        start += tree
    best = 0
    for number in range(1, most + 1):
        for chosen in itertools.combinations(range(leaves), number):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                best = max(best, sum(sum(a <= leaf < b for leaf in chosen) ** 2 for a, b in nodes))
    return best


@pytest.mark.parametrize("restart_every", [None, 1, 3, 4, 7])
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("leaves", [1, 6, 8, 11])
def test_tree_sensitivity_is_the_worst_over_all_participations(leaves, separation, restart_every):
    for most in (1, 2, 4):
        assert tree_sensitivity(leaves, most, separation, restart_every) == searched(
            leaves, most, separation, restart_every
        )


def test_tree_sensitivity_bounds_what_it_does_not_search():
    # Every round of 2^11: a node of 2^k rounds holds 2^k participations, and there are 2^(11-k) of them.
    assert tree_sensitivity(2048, 2048, 1) == sum(2 ** (11 - k) * 4**k for k in range(12))
    # Rounding a separation down leaves more room, never less; one participation touches each level once.
    assert tree_sensitivity(5000, 5, 700) >= tree_sensitivity(5000, 5, 704)
    assert tree_sensitivity(4096, 1, 4096) == 13
    assert tree_sensitivity(10_000, 1000, 10) >= 1000 * 4  # the bound without search is no less than the leaves' levels


def test_restarts_bound_what_a_client_adds_to_a_tree():
    # Once an epoch, a tree an epoch: floor(log2(64)) + 1 nodes each time.
    assert tree_sensitivity(640, 10, 64, restart_every=64) == 10 * 7
    assert tree_sensitivity(640, 10, 64) > 10 * 7


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


def test_the_count_of_an_adaptive_clip_is_charged_and_safe_for_small_cohorts():
    for cohort in (1, 3, 20, 100, 5000):
        of_updates, of_count = AdaptiveClip().split(1.2, cohort)
        assert combined(of_updates, 2 * of_count) == pytest.approx(1.2)
        assert of_updates <= 1.155 * 1.2
    assert AdaptiveClip().split(1.2, 5000)[1] == 250
    with pytest.raises(ValueError, match=r"clipped_count_stddev=0\.5 is at most half of noise_multiplier=1\.2"):
        AdaptiveClip(clipped_count_stddev=0.5).split(1.2, 100)
    assert AdaptiveClip().split(0.0, 10) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"initial": 0.0}, {"target_quantile": 1.0}, {"learning_rate": -1.0}, {"clipped_count_stddev": -1.0}]
)
def test_adaptive_clips_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdaptiveClip(**wrong)


def test_metrics_out_of_range_are_refused():
    with pytest.raises(ValueError, match="noise_multiplier"):
        NoisedMetrics(noise_multiplier=0.0)
    with pytest.raises(ValueError, match="bound"):
        NoisedMetrics(noise_multiplier=1.0, bound={"loss": -1.0})
    with pytest.raises(ValueError, match="must name a metric"):
        NoisedMetrics(noise_multiplier=1.0, bound={})
    with pytest.raises(ValueError, match="a bound of 1 for 'contributing'"):
        NoisedMetrics(noise_multiplier=1.0, bound={"loss": 2.0, "contributing": 2.0})


@pytest.mark.parametrize("version", [None, "0.19.1"])
def test_a_missing_or_wrong_tff_names_the_command_that_installs_it(monkeypatch, version):
    fake = None
    if version is not None:
        fake = types.ModuleType("tensorflow_federated")
        fake.__version__ = version
    monkeypatch.setitem(sys.modules, "tensorflow_federated", fake)
    monkeypatch.delitem(sys.modules, "tfdpfl.federated._tff", raising=False)
    with pytest.raises(
        ImportError, match=r"0\.87.*pip install 'tfdpfl\[federated\]' && pip install --no-deps"
    ) as refused:
        importlib.import_module("tfdpfl.federated._tff")
    # requirements/try_federated.py tries this command, and those of the page, in empty environments.
    _, _, without_resolver = str(refused.value).rpartition(" && ")
    for page in ("docs/federated.md", "docs/install.md"):
        assert without_resolver in (ROOT / page).read_text("utf-8")


def test_the_worker_command_hands_its_options_on_and_says_what_is_missing(monkeypatch):
    calls = []
    runtime = types.ModuleType("tfdpfl.federated.runtime")
    runtime.worker = lambda *options: calls.append(options)
    monkeypatch.setitem(sys.modules, "tfdpfl.federated.runtime", runtime)
    federated = importlib.import_module("tfdpfl.federated")
    monkeypatch.setattr(federated, "runtime", runtime, raising=False)
    for arguments in (["--port", "8001"], ["--port", "8001", "--max-concurrent-clients", "3"]):
        assert CliRunner().invoke(main, ["worker", *arguments]).exit_code == 0
    assert calls == [(8001, None), (8001, 3)]
    assert CliRunner().invoke(main, ["worker", "--port", "0"]).exit_code == 2

    def missing(*options):
        raise ImportError("pip install 'tfdpfl[federated]'")

    runtime.worker = missing
    refused = CliRunner().invoke(main, ["worker", "--port", "8001"])
    assert refused.exit_code == 2
    assert "tfdpfl[federated]" in refused.output


# -- how much noise, and what trainings cost together -----------------------------------------------------------------


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


def test_what_the_page_says_stays_without_tff_is_there_on_both_stacks():
    page = (ROOT / "docs" / "federated.md").read_text()
    stays = re.search(r"These names need no TFF, and stay:(.*?)\. So", page, re.S)[1]
    names = re.findall(r"`(\w+)`", stays)
    assert len(names) > 10 and all(hasattr(federated, name) for name in names)
    assert {"ClientLevel", "PoissonClientSampler"} <= set(dir(federated))
