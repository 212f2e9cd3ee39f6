"""NbAFL's formulas are the paper's, its claim is shown to be one, and the sound calibration holds."""

import dataclasses
import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from accounting_cases import gaussian_epsilon
from scipy import stats

from tfdpfl.federated import FixedSizeClientSampler, RoundsRun
from tfdpfl.federated import data as fd
from tfdpfl.federated import nbafl as nb
from tfdpfl.federated.guarantees import LocalLevel
from tfdpfl.federated.privacy import Participation

PLAN = dict(epsilon=2.0, delta=1e-5, l2_norm_clip=1.5, num_rounds=10, num_clients=20)


def test_published_values():
    assert nb.calculate_c(2e-5) == pytest.approx(4.699557816587533, rel=1e-14)
    found = nb.calculate_sigma_d(
        epsilon=0.8, delta=1e-5, l2_norm_clip=1.5, num_exposures=2, num_rounds=3, num_clients=2, min_dataset_size=1e4
    )
    assert found == pytest.approx(0.0009084009867385104, rel=1e-12)
    c = math.sqrt(2 * math.log(1.25e5))
    assert nb.calculate_sigma_u(0.8, 1e-5, 1.5, 3, 1e4) == pytest.approx(2 * c * 1.5 * 3 / (1e4 * 0.8), rel=1e-14)


@pytest.mark.parametrize("rounds", [5, 9, 12, 30, 400])
@pytest.mark.parametrize("k", [2, 7, 20])
@pytest.mark.parametrize("epsilon", [0.05, 3.0])
def test_k_of_n_as_written_in_the_paper_at_fifty_digits(rounds, k, epsilon):
    n, exposures, clip, m, delta = 20, 2, 1.5, 100, 1e-5
    with mpmath.workdps(50):
        e, q = mpmath.mpf(epsilon), mpmath.mpf(k) / n
        gamma = -mpmath.log(1 - q + q * mpmath.exp(-e / (exposures * mpmath.sqrt(k))))
        want = mpmath.mpf(0)
        if rounds > e / gamma:
            b = -rounds / e * mpmath.log(1 - 1 / q + mpmath.exp(-e / rounds) / q)
            c = mpmath.sqrt(2 * mpmath.log(mpmath.mpf(1.25) / mpmath.mpf(delta)))
            want = 2 * c * clip * mpmath.sqrt(rounds**2 / b**2 - exposures**2 * k) / (m * k * e)
    found = nb.calculate_sigma_d(epsilon, delta, clip, exposures, rounds, n, m, k)
    assert found == pytest.approx(float(want), rel=1e-9, abs=1e-12)


def test_all_of_n_is_the_case_without_choice_and_zero_up_to_its_threshold():
    args = dict(epsilon=0.8, delta=1e-5, l2_norm_clip=1.5, num_exposures=2, num_clients=25, min_dataset_size=100)
    assert nb.calculate_sigma_d(num_rounds=10, **args) == nb.calculate_sigma_d(num_rounds=9, **args) == 0
    want = 2 * nb.calculate_c(1e-5) * 1.5 * math.sqrt(11**2 - 4 * 25) / (100 * 25 * 0.8)
    assert nb.calculate_sigma_d(num_rounds=11, **args) == pytest.approx(want, rel=1e-9)
    assert nb.calculate_sigma_d(num_rounds=11, clients_per_round=25, **args) == pytest.approx(want, rel=1e-9)


def test_flower_dps_own_call_never_adds_server_noise():
    args = dict(epsilon=0.8, delta=1e-5, l2_norm_clip=1.5, num_clients=3, min_dataset_size=1e5)
    assert all(nb.calculate_sigma_d(num_exposures=t, num_rounds=t, **args) == 0 for t in range(1, 50))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"num_exposures": 2}, pytest.param({"clients_per_round": 4, "num_exposures": 1}, marks=pytest.mark.slow)],
)
def test_sound_calibration_meets_its_epsilon_and_wastes_nothing(more):
    plan = nb.noise_of(**PLAN, **more)
    assert plan.upload_epsilon <= 2.0 and plan.upload_epsilon == pytest.approx(2.0, rel=2e-3)
    exposures = more.get("num_exposures", 10)
    exact = gaussian_epsilon(plan.sigma_u / (2 * 1.5) / math.sqrt(exposures), 1e-5)
    assert exact == pytest.approx(plan.upload_epsilon, rel=2e-3)
    assert plan.release_epsilon <= 2.0
    if plan.sigma_d:
        assert plan.release_epsilon == pytest.approx(2.0, rel=2e-3)
    if not more:
        assert plan.sigma_d == 0  # what every upload may show, their mean may


@pytest.mark.slow
def test_server_noise_makes_up_for_uploads_that_are_not_seen():
    plan = nb.noise_of(**{**PLAN, "num_rounds": 200, "num_clients": 3}, num_exposures=1)
    assert plan.sigma_d > 0
    exact = gaussian_epsilon(math.sqrt(3 * plan.sigma_u**2 + 9 * plan.sigma_d**2) / (2 * 1.5) / math.sqrt(200), 1e-5)
    assert exact == pytest.approx(2.0, rel=2e-3)


@pytest.mark.slow
def test_the_papers_claim_is_printed_beside_what_is_proven():
    plan = nb.noise_of(**PLAN, min_dataset_size=100, calibration="published")
    assert plan.claimed_epsilon == pytest.approx(2.0)
    assert plan.upload_epsilon > 100  # the sensitivity is m times what the paper takes
    assert "claimed by NbAFL: epsilon = 2\n" in str(plan) and "by the accountant: uploads epsilon = " in str(plan)
    sound = nb.noise_of(**PLAN, min_dataset_size=100)
    assert sound.claimed_epsilon < 0.2 and "sound calibration" in str(sound)
    assert "claimed by NbAFL: nothing" in str(nb.noise_of(**PLAN))


@pytest.mark.slow
def test_each_round_is_priced_by_its_own_cohort():
    level = nb.NbAFLLevel(clip=1.0, sigma_u=6.0, sigma_d=1.0, clients_per_round=4)
    every = Participation(sampling="none", population=8, clients_per_round=4)
    price = lambda sizes, p=every: (
        level.price(
            RoundsRun(rounds=len(sizes), participation=p, cohorts=[list("abcdefgh")[:s] for s in sizes]), 1e-5
        ).epsilon
    )
    for sizes in ([4], [1], [4, 1, 2], [0, 3]):
        # Gaussians compose as 1/z² adds; the clients' noise is on the sum, the server's 4 times on it.
        z = sum(4 / (max(1, s) * 36 + 16) for s in sizes) ** -0.5
        assert price(sizes) == pytest.approx(gaussian_epsilon(z, 1e-5), rel=2e-3)
    unknown = RoundsRun(rounds=2, participation=every)
    assert level.price(unknown, 1e-5).epsilon == price([1, 1])
    bounded = Participation(sampling="bounded", population=8, clients_per_round=4, max_participations=1)
    assert level.price(RoundsRun(rounds=2, participation=bounded), 1e-5).epsilon == price([1])
    sampler = FixedSizeClientSampler(range(800), 4, seed=0)
    drawn = RoundsRun(rounds=20, participation=sampler.participation, cohorts=[sampler(r) for r in range(20)])
    assert level.price(drawn, 1e-5).epsilon < 0.5 * price([4] * 20)
    assert level.price(drawn, 1e-5) == level.planned_price(
        RoundsRun(rounds=20, participation=sampler.participation), 1e-5
    )
    gone = dataclasses.replace(drawn, absent=[cohort[:2] for cohort in drawn.cohorts])
    assert level.price(gone, 1e-5).epsilon > 1.1 * level.price(drawn, 1e-5).epsilon
    assert nb.NbAFLLevel(clip=1, sigma_u=0, sigma_d=0, clients_per_round=1).price(unknown, 1e-5).epsilon == math.inf


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: nb.calculate_c(0), "delta must"),
        (lambda: nb.calculate_sigma_u(0, 1e-5, 1, 1, 1), "epsilon must"),
        (lambda: nb.calculate_sigma_u(1, 1e-5, -1, 1, 1), "l2_norm_clip must"),
        (lambda: nb.calculate_sigma_u(1, 1e-5, 1, 0, 1), "num_exposures must"),
        (lambda: nb.calculate_sigma_u(1, 1e-5, 1, 1, 0), "min_dataset_size must"),
        (lambda: nb.calculate_sigma_d(1, 1e-5, 1, 1, 0, 1, 1), "num_rounds must"),
        (lambda: nb.calculate_sigma_d(1, 1e-5, 1, 1, 1, 0, 1), "num_clients must"),
        (lambda: nb.calculate_sigma_d(1, 1e-5, 1, 1, 1, 3, 1, 4), "at most num_clients=3"),
        (lambda: nb.noise_of(**PLAN, num_exposures=11), "at most num_rounds=10"),
        (lambda: nb.noise_of(**PLAN, calibration="published"), "min_dataset_size=None"),
        (lambda: nb.noise_of(**PLAN, calibration="flower"), "calibration must be one of"),
    ],
)
def test_bad_input_is_named_with_its_mend(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_formulas_import_neither_tensorflow_nor_tff():
    code = (
        "import sys; from tfdpfl.federated.nbafl import calculate_c, calculate_sigma_d; calculate_c(1e-5);"
        "assert not [m for m in sys.modules if m.startswith('tensorflow')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_local_price_is_of_every_upload():
    run = RoundsRun(rounds=7, participation=Participation(sampling="none", population=3, clients_per_round=3))
    level = LocalLevel(noise_multiplier=8.0)
    assert level.price(run, 1e-5).epsilon == pytest.approx(gaussian_epsilon(4 / math.sqrt(7), 1e-5), rel=2e-3)


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tff():
    return pytest.importorskip("tensorflow_federated", reason="needs TensorFlow Federated, which is on the tff stack")


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4))
    parts = np.split(np.arange(160), 8)
    return fd.from_partition((x, (x.sum(1) > 0).astype(np.int32)), parts).batch(10, shuffle=False)


@pytest.fixture
def build(tff, clients):
    import tensorflow as tf

    from tfdpfl.federated import build_nbafl, local_runtime

    def build(data=clients, **more):
        features = data.element_spec[0].shape[1:]
        return build_nbafl(
            lambda: tf.keras.Sequential(
                [tf.keras.Input(features), tf.keras.layers.Dense(2, bias_initializer="ones")]
            ),
            delta=1e-5, num_clients=8, input_spec=data.element_spec,
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), **more,
        )  # fmt: skip

    with local_runtime():
        yield build


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights.trainable])


@pytest.mark.slow
@pytest.mark.both_stacks
def test_almost_without_noise_the_mean_is_of_clipped_weights(build, clients):
    process = build(epsilon=1e14, num_rounds=5, l2_norm_clip=1.0, calibration="published", min_dataset_size=1e6)
    start = process.initialize()
    before = process.get_model_weights(start)
    after = process.get_model_weights(process.next(start, [clients[c] for c in clients]).state)
    none = process.get_model_weights(process.next(start, []).state)
    wanted = np.zeros(10)
    for client in clients:
        w, b = (np.array(value, np.float64) for value in before.trainable)
        for x, y in clients[client]:
            logits = x.numpy() @ w + b
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - np.eye(2)[y.numpy()]
            w, b = w - 0.1 * x.numpy().T @ p / len(p), b - 0.1 * p.mean(0)
        trained = np.concatenate([w.ravel(), b])
        wanted += trained * min(1, 1.0 / np.linalg.norm(trained)) / 8
    np.testing.assert_allclose(flat(after), wanted, atol=1e-5)
    assert np.linalg.norm(flat(before)) > 1.4  # so the clip bites
    np.testing.assert_allclose(flat(none), flat(before), atol=1e-5)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_noise_of_clients_and_server_has_the_planned_size_and_no_other(build):
    wide = fd.from_arrays((np.zeros([8, 300]), np.zeros(8, np.int32)), range(8)).batch(1)  # a round is many draws
    process = build(wide, epsilon=8.0, num_rounds=60, l2_norm_clip=0.01, num_exposures=5)
    plan = process.nbafl
    assert plan.sigma_d > 0
    start = process.initialize()
    origin = flat(process.get_model_weights(start))
    for k in (0, 8):
        cohort = [wide[client] for client in wide.client_ids[:k]]
        drawn = flat(process.get_model_weights(process.next(start, cohort).state)) - origin * (1 - k / 8)
        # What is left of the clients' weights has a norm of 0.01 at most.
        stddev, law = math.sqrt(k * plan.sigma_u**2 / 64 + plan.sigma_d**2), stats.chi2(drawn.size)
        off = np.sum(drawn**2)
        fits = lambda s, law=law, off=off: min(law.cdf(off / s**2), law.sf(off / s**2)) > 5e-9
        assert [fits(stddev * by) for by in (2 / 3, 1, 3 / 2)] == [False, True, False]


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_training_has_both_levels_and_the_claim(build, clients):
    from tfdpfl.federated import train

    process = build(epsilon=3.0, num_rounds=5, l2_norm_clip=2.0, min_dataset_size=20)
    history = train(
        process, clients, num_rounds=2, sampler=FixedSizeClientSampler(clients.client_ids, 8), delta=1e-5,
        progress=False,
    )  # fmt: skip
    assert history.adjacency == {"local_epsilon": "replace_one", "client_epsilon": "replace_one"}
    assert 0 < history.epsilon["client"] < history.epsilon["local"] < process.nbafl.upload_epsilon <= 3.0
    assert process.nbafl.claimed_epsilon < 1
