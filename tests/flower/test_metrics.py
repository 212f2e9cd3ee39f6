"""Clients' metrics are shown only if they are asked for, clipped and given noise that is charged."""

import math

import numpy as np
import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import FakeGrid, model, moved
from flwr.app import MetricRecord
from flwr.serverapp import strategy as flower
from strategy_cases import CLIENTS, fixed, looks_like, loud, one_round, updates

import tfdpfl
from tfdpfl.federated import NoisedMetrics


def mean_loss(contents, weighted_by_key):
    return MetricRecord({"loss": float(np.mean([content["metrics"]["loss"] for content in contents]))})


def test_metrics_are_not_shown_unless_asked_for():
    result, grid = one_round(fixed(), loud)
    assert set(result.train_metrics_clientapp[1]) == {"clip", "epsilon"}
    assert not result.evaluate_metrics_clientapp and grid.sent[1] == []


def test_noised_metrics_are_clipped_and_charged():
    noised = NoisedMetrics(noise_multiplier=1e-9, bound={"loss": 0.5})
    strategy = fixed(noise_multiplier=1.0, train_metrics=noised)
    result, _ = one_round(strategy, loud)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx((0 + 0.25 + 3 * 0.5) / 5, abs=1e-6)  # from 0.5 up it is cut
    assert metrics["contributing"] == pytest.approx(1.0, abs=1e-6) and "secret" not in metrics

    def one_is_broken(message, number):
        got = loud(message, number)
        got.content["metrics"]["loss"] = math.nan if number == 4 else 0.25 * number
        return got

    result, _ = one_round(fixed(noise_multiplier=1.0, train_metrics=noised), one_is_broken)
    metrics = result.train_metrics_clientapp[1]  # it counts as one that sent none
    assert metrics["loss"] == pytest.approx((0 + 0.25 + 2 * 0.5) / 5, abs=1e-6)
    assert metrics["contributing"] == pytest.approx(0.8, abs=1e-6)
    assert strategy.epsilon > 1e9  # noise of 1e-9 is no noise, and says so
    wide = NoisedMetrics(noise_multiplier=3.0, bound={"loss": 0.5})
    strategy = fixed(noise_multiplier=1.0, train_metrics=wide)
    one_round(strategy, loud)
    both = (1.0 + 3.0**-2) ** -0.5
    assert strategy.epsilon == pytest.approx(
        tfdpfl.accounting.price(dp_event.GaussianDpEvent(both), 1e-5, "pld", "zero_out").epsilon
    )


def test_metrics_get_the_noise_that_is_charged():
    noised = NoisedMetrics(noise_multiplier=2.0, bound=dict.fromkeys(map(str, range(30)), 3.0))
    strategy = fixed(noise_multiplier=1.0, train_metrics=noised, evaluate_metrics=noised)
    result, _ = one_round(strategy, moved(updates), rounds=50)
    for by_round in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        sample = np.array([m[name] / 3.0 for m in by_round.values() for name in map(str, range(30))])
        right = 2.0 * math.sqrt(31) / CLIENTS
        assert looks_like(sample, right)
        assert not looks_like(sample, right * 2 / 3) and not looks_like(sample, right * 3 / 2)


def test_a_metrics_function_that_needs_clients_metrics_is_refused_before_a_round_is_paid():
    strategy = fixed(flower.FedAvg(train_metrics_aggr_fn=mean_loss), noise_multiplier=1.0)
    grid = FakeGrid(CLIENTS, loud)
    with pytest.raises(ValueError, match=r"train_metrics_aggr_fn raises KeyError: 'loss'.*train_metrics=NoisedMetrics"):
        strategy.start(grid, model())
    assert grid.sent == [] and strategy.rounds_charged == 0
