"""The price of a server's rounds is that of what ran."""

import math

import pytest

pytest.importorskip("flwr")
import dp_accounting
import flwr.serverapp.strategy as flower
import numpy as np
from client_cases import PLAN, Clients, message, shifted
from dp_accounting import dp_event
from flower_fakes import arrays_in, model, moved, reply
from strategy_cases import config, fixed, loud, one_round, updates

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.federated import NoisedMetrics, RoundsRun
from tfdpfl.flower import NbAFLStrategy, client_reports, clip_and_noise_gradients, local_dp_mod, nbafl_mod
from tfdpfl.flower.reports import promises_of_clients
from tfdpfl.flower.spent import ledger_of_uploads


def test_the_price_is_that_of_what_ran():
    strategy = fixed(noise_multiplier=1.1, sampling_rate=0.3, accountant="rdp")
    one_round(strategy, moved(updates), rounds=7, clients=20)
    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.3, dp_event.GaussianDpEvent(1.1)), 7)
    theirs = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert theirs * 0.99 <= strategy.epsilon <= theirs * 1.01
    run = RoundsRun(rounds=7, participation=strategy.participation)
    assert strategy.epsilon == pytest.approx(strategy.privacy[0].price(run, 1e-5, "rdp").epsilon, rel=1e-6)
    assert "7 rounds, sampling poisson" in strategy.statement() and "zero_out" in strategy.statement()
    assert strategy.ledger.adjacency == "zero_out"


def test_without_sampling_nothing_is_amplified():
    strategy = fixed(noise_multiplier=1.1)
    result, _ = one_round(strategy, moved(updates), rounds=4)
    plain = tfdpfl.accounting.price(dp_event.GaussianDpEvent(1.1 / 2), 1e-5, "pld", "zero_out").epsilon
    assert strategy.epsilon == pytest.approx(plain)
    assert result.train_metrics_clientapp[4]["epsilon"] == strategy.epsilon
    assert fixed().epsilon == 0.0
    free = fixed()
    one_round(free, moved(updates))
    assert free.epsilon == math.inf and "no privacy" in free.statement()


def test_evaluations_are_charged_or_said_not_to_be():
    noised = NoisedMetrics(noise_multiplier=2.0, bound={"loss": 1.0})
    strategy = fixed(noise_multiplier=2.0, sampling_rate=0.5, evaluate_metrics=noised)
    _, grid = one_round(strategy, loud, rounds=3)
    assert strategy.configure_evaluate(4, model(), config(), grid) == []  # the target has room for one a round
    events = [
        dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(2.0)), 3),
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(2.0), 3),
    ]
    assert strategy.epsilon == pytest.approx(
        tfdpfl.accounting.price(dp_event.ComposedDpEvent(events), 1e-5, "pld", "zero_out").epsilon
    )
    strategy = fixed(evaluate_metrics="unprotected")
    result, _ = one_round(strategy, lambda m, n: reply(m, arrays_in(m), {"loss": float(n)}))
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(2.0)
    assert "in no epsilon" in strategy.statement()


def test_what_is_stated_names_a_seed_that_someone_knows():
    known = "its seed is fixed, and anyone who knows it can subtract the noise"
    strategies = [fixed(noise_multiplier=1.0, seed=3), NbAFLStrategy(flower.FedAvg(), **PLAN, seed=3)]
    for strategy in strategies:
        assert known in strategy.statement()
        assert any(known in warning for warning in strategy.promises(1e-5)[0].warnings)
    assert known not in fixed(noise_multiplier=1.0).statement()
    mods = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, seed=3), nbafl_mod(**PLAN, seed=3)
    for mod in mods:
        reports = client_reports([Clients(shifted(1.0), [mod])(message(), 0)])
        (told,) = promises_of_clients(reports.values())
        assert known in told.warnings[0]
    ledger = PrivacyLedger()
    clip_and_noise_gradients([np.ones(3)], 1.0, 1.0, ledger, seed=3)
    assert ledger.seeded and not ledger_of_uploads(1.0).seeded
