"""Federated processes: equal to TFF's own without noise, and released with what they state."""

import asyncio
import math

import numpy as np
import pytest
from tff_cases import (
    CLASSES,
    CLIENTS,
    FEATURES,
    KERAS,
    SGD,
    build,
    client,
    flat,
    model_fn,
    one_deviation,
    tff,
    weights_after,
)

from tfdpfl import AdaptiveClip, noise
from tfdpfl.federated import (
    NoisedMetrics,
    Participation,
    RoundsRun,
    aggregators,
    build_distributed_dp_fed_avg,
    build_dp_fed_avg,
    build_dp_fed_sgd,
    build_dp_ftrl,
    build_example_dp_fed_avg,
    build_local_dp_fed_avg,
    build_nbafl,
    skellam_level,
)
from tfdpfl.federated.guarantees import ClientLevel, DistributedLevel

pytestmark = pytest.mark.usefixtures("runtime")


def variable_model_fn():
    return tff.learning.models.from_keras_model(model_fn(), **KERAS)


@pytest.fixture(scope="module")
def tffs_own(runtime):
    return weights_after(tff.learning.algorithms.build_unweighted_fed_avg(variable_model_fn, client_optimizer_fn=SGD))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "settings"),
    [
        (build_dp_fed_avg, {"l2_norm_clip": 1e6}),
        (build_dp_fed_avg, {"l2_norm_clip": AdaptiveClip(initial=1e6, learning_rate=1e-9)}),
        (build_dp_ftrl, {"l2_norm_clip": 1e6, "server_optimizer_fn": "sgd", "restart_every": 2}),
        (build_local_dp_fed_avg, {"l2_norm_clip": 1e6}),
        (
            build_example_dp_fed_avg,
            {"l2_norm_clip": 1e6, "batch_size": 5, "sampling": "batches", "clients_per_round": None},
        ),
    ],
)
def test_without_noise_and_clip_a_process_is_tffs_own(builder, settings, tffs_own):
    assert np.abs(weights_after(build(builder, **settings)) - tffs_own).max() <= 1e-6


@pytest.mark.slow
def test_fed_prox_and_fed_sgd_are_tffs_own_without_noise_and_clip():
    prox = tff.learning.algorithms.build_unweighted_fed_prox(
        variable_model_fn, proximal_strength=0.5, client_optimizer_fn=SGD
    )
    ours = build_dp_fed_avg(  # of a variable model, where the other tests give Keras's
        variable_model_fn, clients_per_round=3, noise_multiplier=0.0, l2_norm_clip=1e6, client_optimizer_fn=SGD,
        proximal_strength=0.5,
    )  # fmt: skip
    assert np.abs(weights_after(ours) - weights_after(prox)).max() <= 1e-6
    same_size = [client(10, seed) for seed in range(3)]  # TFF weights by examples here, which DP cannot
    sgd = tff.learning.algorithms.build_fed_sgd(variable_model_fn, server_optimizer_fn=SGD)
    ours = build_dp_fed_sgd(
        model_fn, clients_per_round=3, noise_multiplier=0.0, l2_norm_clip=1e6, server_optimizer_fn=0.1, **KERAS
    )
    ours, theirs = (weights_after(process, clients=same_size) for process in (ours, sgd))
    assert np.abs(ours - theirs).max() <= 1e-6


@pytest.fixture
def one_deviation_noise(monkeypatch):
    monkeypatch.setattr(noise, "gaussian", one_deviation)


@pytest.mark.slow
def test_metrics_are_out_unless_they_are_noised_and_charged(one_deviation_noise):
    process = build(build_dp_fed_avg, noise_multiplier=1.0)
    state = process.initialize()
    output = process.next(state, [])
    moved = [flat(process.get_model_weights(s).trainable) for s in (state, output.state)]
    of_updates, _ = AdaptiveClip().split(1.0, 3)
    np.testing.assert_allclose(moved[0] - moved[1], of_updates * AdaptiveClip().initial / 3, rtol=1e-5)
    assert output.metrics["client_work"]["train"] == {}
    assert process.privacy == (ClientLevel(noise_multiplier=1.0),)
    noised = NoisedMetrics(noise_multiplier=2.0, bound={"loss": 5.0, "num_examples": 40.0, "contributing": 1.0})
    process = build(build_dp_fed_avg, noise_multiplier=1.0, metrics=noised)
    (promise,) = process.privacy
    assert promise.noise_multiplier == pytest.approx((1 + 0.25) ** -0.5)
    # Without clients all is noise, of 2 · sqrt(3 metrics) · bound / 3.
    shown = process.next(process.initialize(), []).metrics["client_work"]["train"]
    assert shown == pytest.approx({name: 2 * math.sqrt(3) * bound / 3 for name, bound in noised.bound.items()})


@pytest.mark.slow
def test_clients_without_data_or_with_nan_weights_are_counted_but_harmless():
    exact = NoisedMetrics(noise_multiplier=1e-4, bound={"num_examples": 100.0, "contributing": 1.0})
    process = build(build_dp_fed_avg, l2_norm_clip=1.0, clients_per_round=5, noise_multiplier=1e-9, metrics=exact)
    nan = client(5, scale=np.nan)
    good = [client(n, seed) for seed, n in enumerate([5, 10, 20])]
    state = process.initialize()
    with_bad = process.next(state, [*good, nan, client(0)])
    without = process.next(state, good)
    ours, plain = (flat(process.get_model_weights(o.state).trainable) for o in (with_bad, without))
    np.testing.assert_allclose(ours, plain, atol=1e-6)
    shown = with_bad.metrics["client_work"]["train"]  # a noise of 0.00004 and 0.004
    assert shown["contributing"] == pytest.approx(3 / 5, abs=0.01)
    assert shown["num_examples"] == pytest.approx(35 / 5, abs=0.05)


@pytest.mark.slow
def test_the_average_clipped_norm_is_told_with_the_noise_that_is_charged(one_deviation_noise):
    free, norms = build(build_dp_fed_avg, l2_norm_clip=100.0), []
    begin = free.initialize()
    for one in CLIENTS:  # without a clip, and alone: what each moves the mean of three by
        ends = [flat(free.get_model_weights(s).trainable) for s in (begin, free.next(begin, [one]).state)]
        norms.append(3 * np.linalg.norm(ends[0] - ends[1]))
    assert min(norms) < 0.1 < max(norms)
    metrics = NoisedMetrics(noise_multiplier=2.0, bound={"update_norm": 0.1, "num_batches": 4.0})
    process = build(build_dp_fed_avg, l2_norm_clip=0.1, metrics=metrics)
    assert process.privacy[0].noise_multiplier == 0  # no noise on the updates, no promise
    told = process.next(process.initialize(), [*CLIENTS, client(5, scale=np.nan)]).metrics
    one = 2.0 * math.sqrt(2) / 3
    norm, batches = told["aggregator"]["update_norm"], told["client_work"]["train"]["num_batches"]
    assert norm == pytest.approx(np.minimum(norms, 0.1).sum() / 3 + 0.1 * one, rel=1e-4)
    assert batches == pytest.approx((1 + 2 + 4) / 3 + 4.0 * one, rel=1e-4)


class Source(tff.program.FederatedDataSource, tff.program.FederatedDataSourceIterator):
    """All of the clients, each time."""

    federated_type = tff.FederatedType(tff.SequenceType(np.float32), tff.CLIENTS)

    def iterator(self):
        return self

    def select(self, k=None):
        return CLIENTS[:k]

    def __deepcopy__(self, memo):
        return self

    def to_bytes(self):
        return b""

    @classmethod
    def from_bytes(cls, data):
        return cls()


@pytest.mark.slow
def test_tffs_own_training_program_runs_what_trains_inside_a_client(tmp_path):
    nbafl = build_nbafl(
        model_fn, epsilon=5.0, delta=1e-4, l2_norm_clip=1.0, num_rounds=2, num_clients=3, client_optimizer_fn=SGD,
        **KERAS,
    )  # fmt: skip
    examples = build_example_dp_fed_avg(
        model_fn, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=5, local_steps=2, client_optimizer_fn=SGD, **KERAS
    )  # fmt: skip
    for number, process in enumerate((nbafl, examples)):
        models_out, metrics = tff.program.MemoryReleaseManager(), tff.program.MemoryReleaseManager()
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=Source(),
                train_per_round_clients=3,
                train_total_rounds=2,
                program_state_manager=tff.program.FileProgramStateManager(tmp_path / f"{number}"),
                model_output_manager=models_out,
                train_metrics_manager=metrics,
                evaluation_manager=None,
                evaluation_periodicity=1,
            )
        )
        (trained,) = models_out.values().values()
        assert np.isfinite(flat(process.get_model_weights(trained).trainable)).all()
        assert list(metrics.values()) == [1, 2] and metrics.values()[2]["model_metrics"] == {}


@pytest.mark.parametrize(
    ("builder", "wrong", "error", "message"),
    [
        (
            build_dp_fed_avg,
            {"metrics": NoisedMetrics(noise_multiplier=1.0, bound={"accuracy": 1.0})},
            ValueError,
            "the metric 'accuracy', but the model has 'loss', 'num_examples'",
        ),
        (build_dp_ftrl, {"l2_norm_clip": AdaptiveClip()}, ValueError, "clip must be a number"),
        (build_dp_ftrl, {"l2_norm_clip": 1.0, "restart_every": 0}, ValueError, "restart_every"),
        (
            build_dp_ftrl,
            {"l2_norm_clip": 1.0, "metrics": NoisedMetrics(noise_multiplier=1.0)},
            ValueError,
            "not priced",
        ),
        (build_local_dp_fed_avg, {"l2_norm_clip": AdaptiveClip()}, ValueError, "only build_dp_fed_avg"),
        (build_distributed_dp_fed_avg, {"l2_norm_clip": 1.0, "clients_per_round": 2.5}, ValueError, "whole number"),
        (build_distributed_dp_fed_avg, {"l2_norm_clip": 1.0, "bits": 40}, ValueError, "bits"),
    ],
)
def test_bad_input_of_the_other_processes_is_refused(builder, wrong, error, message):
    with pytest.raises(error, match=message):
        build(builder, **wrong)


@pytest.mark.slow
def test_what_a_plan_says_of_skellam_noise_is_what_is_built():
    weights = FEATURES * 5 + 5 + 5 * CLASSES + CLASSES
    for clip, z, k in ((0.3, 1.5, 3), (4.0, 0.4, 40)):
        planned = skellam_level(z, clip, k, weights)
        if k == 3:
            (built,) = build(
                build_distributed_dp_fed_avg, l2_norm_clip=clip, noise_multiplier=z, clients_per_round=k
            ).privacy
        else:  # what that process states, without the process
            aggregator, parameters = aggregators.secure_mean(clip, z, k, 20)
            aggregator.create(tff.TensorType(np.float32, [weights]))
            l1, l2, stddev = parameters.bounds
            built = DistributedLevel(l1=l1, l2=l2, local_stddev=stddev)
        for name in ("l1", "l2", "local_stddev"):
            assert getattr(planned, name) == pytest.approx(getattr(built, name), rel=1e-5)


@pytest.mark.slow
def test_what_a_process_promises_is_what_its_aggregator_reports():
    process = build(build_dp_fed_avg, noise_multiplier=1.2, clients_per_round=20, l2_norm_clip=AdaptiveClip())
    state = process.next(process.initialize(), CLIENTS).state
    event = tff.aggregators.differential_privacy.extract_dp_event_from_state(state.aggregator)
    z = [float(part.noise_multiplier) for part in event.events]
    assert sum(v**-2 for v in z) ** -0.5 == pytest.approx(1.2, rel=1e-5)
    run = RoundsRun(rounds=1, participation=Participation(sampling="none", population=20, clients_per_round=20))
    assert process.privacy[0].price(run, 1e-5) == ClientLevel(noise_multiplier=1.2).price(run, 1e-5)
