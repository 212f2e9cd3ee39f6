"""NbAFL on Flower: both noises, the claim beside what is proven, and the price of those that replied."""

import math

import numpy as np
import pytest

pytest.importorskip("flwr")
from client_cases import PLAN, Clients, message, replace_one, shifted
from flower_fakes import FakeGrid, flat, model
from flwr.serverapp import strategy as flower

from tfdpfl import PrivacyLedger
from tfdpfl.federated import nbafl
from tfdpfl.flower import (
    NbAFLStrategy,
    clip_and_noise_gradients,
    nbafl_mod,
)


def test_nbafl_clips_the_weights_adds_both_noises_and_says_what_is_claimed_and_what_is_proven():
    plan = {**PLAN, "num_exposures": 1}
    strategy = NbAFLStrategy(flower.FedAvg(), **plan)
    clients = Clients(shifted(1.0), [nbafl_mod(**plan)])
    noise = strategy.nbafl
    assert noise == nbafl.noise_of(**plan) and noise.sigma_d > 0
    large = model(w=np.zeros((200, 100), np.float32))
    result = strategy.start(FakeGrid(3, clients), large, num_rounds=1)
    weights = result.arrays["w"].numpy()
    std = math.sqrt(noise.sigma_u**2 / 3 + noise.sigma_d**2)
    assert np.std(weights) == pytest.approx(std, rel=0.04)
    report = strategy.client_reports[101]
    assert report["epsilon"] == pytest.approx(replace_one(noise.sigma_u / 4.0, 1), rel=1e-6) == strategy.local_epsilon
    assert report["claimed_epsilon"] == noise.claimed_epsilon < report["epsilon"]
    assert "claimed by NbAFL" in strategy.statement() and strategy.epsilon > 0
    again = strategy.start(FakeGrid(3, clients), large, num_rounds=5)
    assert strategy.rounds_charged == 3 and strategy.stopped_by == "num_rounds" and again.arrays


def test_nbafl_weights_are_within_the_clip_and_a_missing_client_counts_with_what_it_was_sent():
    plan = {**PLAN, "min_dataset_size": 1e9, "calibration": "published"}  # next to no noise
    clients = Clients(shifted(5.0), [nbafl_mod(**plan)])
    got = clients(message(), 0)
    assert np.linalg.norm(flat(got.content["arrays"])) == pytest.approx(2.0, rel=1e-4)
    start = model(b=np.full(4, 1.0, np.float32))
    strategy = NbAFLStrategy(flower.FedAvg(), **plan)
    result = strategy.start(FakeGrid(3, lambda m, n: clients(m, n) if n == 0 else None), start, num_rounds=1)
    one = 2.0 * np.array([5.0] * 6 + [6.0] * 4) / math.sqrt(6 * 25 + 4 * 36)
    np.testing.assert_allclose(flat(result.arrays), (one + 2 * np.array([0.0] * 6 + [1.0] * 4)) / 3, atol=1e-4)


def test_nbafl_is_priced_by_the_noise_of_those_that_replied():
    strategy = NbAFLStrategy(flower.FedAvg(), **PLAN)
    clients = Clients(shifted(1.0), [nbafl_mod(**PLAN)])
    strategy.start(FakeGrid(3, lambda m, n: clients(m, n) if n == 0 else None), model(), num_rounds=1)
    level = strategy.privacy[1]  # three were asked
    stddev = math.sqrt(level.sigma_u**2 + (3 * level.sigma_d) ** 2)
    assert math.isfinite(strategy.epsilon)
    assert strategy.epsilon == pytest.approx(replace_one(stddev / 4.0, 1), rel=1e-6)


def test_a_steps_gradient_is_clipped_then_noised_and_paid():
    ledger = PrivacyLedger()
    gradients = [np.full((100, 100), 3.0, np.float32), np.zeros(5)]
    noisy = clip_and_noise_gradients(gradients, 1.0, 0.5, ledger)
    assert np.std(noisy[0] - 0.01) == pytest.approx(0.5, rel=0.05) and noisy[0].dtype == np.float32
    assert np.linalg.norm(clip_and_noise_gradients(gradients, 1.0, 1e-9, ledger)[0]) == pytest.approx(1.0, rel=1e-5)
    assert not np.isnan(clip_and_noise_gradients([np.array([np.nan])], 1.0, 0.5, ledger)[0]).any()
    assert ledger.steps == 3 and ledger.adjacency == "replace_one"
    one = PrivacyLedger()
    clip_and_noise_gradients(gradients, 1.0, 0.5, one)
    assert one.epsilon(1e-5) == pytest.approx(replace_one(0.25, 1))
