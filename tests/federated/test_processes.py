"""Federated processes: equal to TFF's own without noise, bounded in each client, and noisy by what they say."""

import asyncio
import collections
import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

tff = pytest.importorskip("tensorflow_federated", reason="TensorFlow Federated is not installed on this stack")

# ruff: noqa: E402
from tfdpfl import AdaptiveClip, PrivacyError
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
    local_runtime,
    models,
    skellam_level,
)
from tfdpfl.federated.guarantees import ClientLevel, ExampleLevel

FEATURES, CLASSES = 4, 3
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SPEC = (tf.TensorSpec([None, FEATURES], tf.float32), tf.TensorSpec([None], tf.int32))
KERAS = {"loss": LOSS, "input_spec": SPEC}
SGD = tff.learning.optimizers.build_sgdm(0.1)


@pytest.fixture(scope="module", autouse=True)
def runtime():
    with local_runtime():
        yield


def model_fn():
    init = tf.keras.initializers.GlorotUniform
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((FEATURES,)),
        tf.keras.layers.Dense(5, "tanh", kernel_initializer=init(1)),
        tf.keras.layers.Dense(CLASSES, kernel_initializer=init(2)),
    ])  # fmt: skip


def variable_model_fn():
    return tff.learning.models.from_keras_model(model_fn(), **KERAS)


def client(number, seed=0, batch=5, scale=1.0):
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=(number, FEATURES))).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, rng.integers(0, CLASSES, number).astype("int32"))).batch(batch)


CLIENTS = [client(n, seed) for seed, n in enumerate([5, 10, 20])]


def weights_after(process, rounds=5, clients=CLIENTS):
    state = process.initialize()
    for _ in range(rounds):
        state = process.next(state, clients).state
    return flat(process.get_model_weights(state).trainable)


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def build(builder, **more):
    settings = {"clients_per_round": len(CLIENTS), "noise_multiplier": 0.0, "client_optimizer_fn": SGD, **KERAS, **more}
    return builder(model_fn, **settings)


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


@pytest.mark.parametrize(
    ("name", "kind", "kept"), [("sgd", "sgd", 0), ("momentum", "sgd", 1), ("adam", "adam", 2), ("yogi", "yogi", 2)]
)
def test_a_name_makes_the_optimizer_that_it_names(name, kind, kept):
    made = models.optimizer("server_optimizer_fn", name, models.SERVER_RATES)
    state = made.initialize(tf.TensorSpec([FEATURES], tf.float32))
    assert kind in type(made).__name__.lower()
    assert sum(np.shape(value) == (FEATURES,) for value in tf.nest.flatten(state)) == kept


@pytest.mark.slow
@pytest.mark.parametrize("server", ["yogi", tff.learning.optimizers.build_adagrad(0.1)])
def test_server_optimizers_by_name_or_by_object(server):
    assert np.isfinite(
        weights_after(build(build_dp_fed_avg, l2_norm_clip=1.0, server_optimizer_fn=server), rounds=2)
    ).all()


# -- aggregation: what one client can do, and how much noise there is -------------------------------------------------

SIZE = 2000
VECTOR = tff.to_type(collections.OrderedDict(a=(np.float32, [SIZE - 4]), b=(np.float32, [2, 2])))


def update(norm, seed=0):
    v = np.random.default_rng(seed).normal(size=SIZE)
    v = (norm * v / np.linalg.norm(v)).astype("float32")
    return collections.OrderedDict(a=v[:-4], b=v[-4:].reshape(2, 2))


def unpack(value):
    return np.concatenate([value["a"], value["b"].ravel()]).astype(np.float64)


FACTORIES = {
    "fixed": lambda z, n: aggregators.clipped_mean(0.5, z, n),
    "adaptive": lambda z, n: aggregators.clipped_mean(AdaptiveClip(initial=0.5), z, n),
    "tree": lambda z, n: aggregators.TreeMean(0.5, z, n, 8),
    "local": lambda z, n: aggregators.locally_noised_mean(0.5, z, n),
    "distributed": lambda z, n: aggregators.secure_mean(0.5, z, n, 20)[0],
}


# Secure aggregation compiles slowly; the server's noise is one code for both clips.
KINDS = [pytest.param(name, marks=[pytest.mark.slow] * (name in ("adaptive", "distributed"))) for name in FACTORIES]


def aggregate(factory, cohort, state=None):
    process = factory.create(VECTOR) if hasattr(factory, "create") else factory
    return process.next(process.initialize() if state is None else state, cohort)


@pytest.mark.parametrize("name", KINDS)
def test_removing_a_client_moves_the_mean_by_the_clip_over_the_expected_cohort(name):
    process = FACTORIES[name](0.0, 10).create(VECTOR)
    others = [update(0.3, 1), update(7.0, 2)]
    for norm, moved in [(0.2, 0.2), (1e3, 0.5), (3e30, 0.5)]:  # the last one's square is no float32
        with_it, without = (aggregate(process, cohort) for cohort in ([update(norm), *others], others))
        difference = np.linalg.norm(unpack(with_it.result) - unpack(without.result))
        assert difference == pytest.approx(moved / 10, rel=2e-3)
        assert difference <= 0.5 / 10 * (1 + (1e-3 if name == "distributed" else 1e-6))


@pytest.mark.parametrize("name", KINDS)
def test_an_update_that_is_not_finite_counts_as_zeros(name):
    process = FACTORIES[name](0.0, 10).create(VECTOR)
    bad = [update(1.0), update(1.0)]
    bad[0]["a"][7] = np.nan
    bad[1]["b"][0, 0] = np.inf
    with_them, without = (aggregate(process, [update(0.3, 1), *more]) for more in (bad, []))
    np.testing.assert_allclose(unpack(with_them.result), unpack(without.result), atol=2e-6)


def accepts(sample, stddev):
    """Whether the sample of zero-mean normals could have this standard deviation: denied once in 10^8 where it has."""
    law, seen = stats.chi2(sample.size), np.sum((sample / stddev) ** 2)
    return min(law.cdf(seen), law.sf(seen)) > 5e-9


def check_noise(sample, stddev):
    assert sample.size >= 400  # with fewer, 2/3 and 3/2 would be taken for 1 once in a while
    assert accepts(sample, stddev), (np.std(sample), stddev)
    assert not accepts(sample, stddev * 2 / 3)
    assert not accepts(sample, stddev * 3 / 2)


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind.values[0] in ("fixed", "adaptive", "distributed")])
@pytest.mark.parametrize("cohort", [0, 4])
def test_noise_has_the_stated_deviation_and_is_new_in_every_round(name, cohort):
    if name == "distributed" and cohort == 0:
        cohort = 2  # its noise comes from the clients: half of them, half the variance
    process = FACTORIES[name](3.0, 4).create(VECTOR)
    zeros = [update(0.0)] * cohort
    first = aggregate(process, zeros)
    again = unpack(aggregate(process, zeros).result)  # a round that is run again from its state
    later = unpack(aggregate(process, zeros, first.state).result)
    first = unpack(first.result)
    stddev = 3.0 * 0.5 / 4
    if name == "adaptive":
        stddev = AdaptiveClip().split(3.0, 4)[0] * 0.5 / 4
    if name == "distributed":
        stddev *= math.sqrt(cohort / 4)
    check_noise(first, stddev)
    check_noise(again, stddev)
    for other in (again, later):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15
    # The tensors of one update have noise of their own.
    assert not np.isclose(first[-4:], first[:4]).all()


def test_every_client_adds_local_noise_of_its_own():
    process = FACTORIES["local"](3.0, 1).create(VECTOR)
    for cohort in (1, 8):
        check_noise(unpack(aggregate(process, [update(0.0)] * cohort).result), 3.0 * 0.5 * math.sqrt(cohort))


@pytest.mark.slow
def test_shares_of_discrete_noise_are_every_clients_own():
    # Were two clients to share a seed, as TFF's clock gives them, four shares would have up to four times the variance.
    process = FACTORIES["distributed"](3.0, 4).create(VECTOR)
    check_noise(unpack(aggregate(process, [update(0.0)] * 4).result), 3.0 * 0.5 / 4)


def test_two_runs_of_one_process_share_no_noise():
    process = FACTORIES["fixed"](1.0, 4).create(VECTOR)
    one, two = (unpack(aggregate(process, []).result) for _ in range(2))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.15


@pytest.mark.slow
def test_tree_noise_is_that_of_the_nodes_and_restarts():
    """The running total after t rounds has the variance of the nodes of [1, t], a node of level k having
    1 / (2 - 2^-k) of a leaf's, and what the trees before it had."""
    process = FACTORIES["tree"](1.0, 1).create(VECTOR)
    state, total, totals = process.initialize(), 0.0, []
    for _ in range(16):
        output = aggregate(process, [], state)
        state, total = output.state, total + unpack(output.result)
        totals.append(total)
    variances = [sum(1 / (2 - 2.0**-k) for k in range(4) if t >> k & 1) for t in range(1, 9)]
    for t, found in enumerate(totals):
        variance = variances[t % 8] + (variances[7] if t >= 8 else 0.0)
        check_noise(found, 0.5 * math.sqrt(variance))
    # The second tree's noise is new: its total is not the first's again.
    assert abs(np.corrcoef(totals[7], totals[15] - totals[7])[0, 1]) < 0.15
    # Within a tree it is not: a third of the first leaf's noise is in the node above it, a correlation of 0.41.
    assert abs(np.corrcoef(totals[0], totals[1])[0, 1]) > 0.15


@pytest.mark.slow
def test_a_tree_round_that_is_run_again_draws_new_noise():
    process = FACTORIES["tree"](1.0, 1).create(VECTOR)
    state = aggregate(process, []).state
    one, two = (unpack(aggregate(process, [], state).result) for _ in range(2))
    assert np.isclose(one, two).mean() < 0.01  # of 2000 normals some are close


@pytest.mark.slow
@pytest.mark.parametrize(("start", "quantile", "goal"), [(0.01, 0.8, 1.6), (100.0, 0.5, 1.0)])
def test_the_adaptive_clip_reaches_the_true_quantile(start, quantile, goal):
    # Norms 0.1, 0.2, ..., 1.9: the median is 1, and four fifths are at most 1.6.
    cohort = [update(0.1 * (i + 1), i) for i in range(19)]
    clip = AdaptiveClip(initial=start * goal, target_quantile=quantile)
    process = aggregators.clipped_mean(clip, 0.1, 19.0).create(VECTOR)
    state, clips = process.initialize(), []
    for _ in range(100):
        output = process.next(state, cohort)
        state = output.state
        clips.append(float(output.measurements["dp_query_metrics"]["clip"]))
    assert np.median(clips[-30:]) == pytest.approx(goal, rel=0.15)


@pytest.mark.parametrize(("count", "end"), [(2.0, 1e-8), (-2.0, 1e10)])
def test_the_adaptive_clip_stays_within_the_range_that_float32_can_measure(count, end):
    query = aggregators._Quantile(1.0, 0.5, 1e4, 0.0, 4.0, True, secret=aggregators.Secret())
    state = query.initial_global_state()
    for _ in range(2):
        clip, state, _ = query.get_noised_result(tf.constant(count), state)
        assert float(clip) == float(state.current_estimate) == pytest.approx(end)


@pytest.mark.slow
def test_the_count_of_the_adaptive_clip_has_noise():
    clip = AdaptiveClip(initial=1.0, learning_rate=1.0, clipped_count_stddev=0.4)
    process = aggregators.clipped_mean(clip, 0.5, 4.0).create(VECTOR)
    cohort = [update(0.5)] * 2 + [update(2.0)] * 2
    logs = [math.log(float(process.next(process.initialize(), cohort).measurements["dp_query_metrics"]["clip"]))
            for _ in range(420)]  # fmt: skip
    check_noise(np.array(logs), 0.4 / 4)


# -- metrics, bad input -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_are_out_unless_they_are_noised_and_charged():
    process = build(build_dp_fed_avg, noise_multiplier=1.0)
    assert process.next(process.initialize(), CLIENTS).metrics["client_work"]["train"] == {}
    assert process.privacy == (ClientLevel(noise_multiplier=1.0),)
    noised = NoisedMetrics(noise_multiplier=2.0, bound={"loss": 5.0, "num_examples": 40.0, "contributing": 1.0})
    process = build(build_dp_fed_avg, noise_multiplier=1.0, metrics=noised)
    (promise,) = process.privacy
    assert promise.noise_multiplier == pytest.approx((1 + 0.25) ** -0.5)
    state = process.initialize()
    # Without clients all is noise, of 2 · sqrt(3 metrics) · bound / 3.
    outputs = [process.next(state, []) for _ in range(140)]
    shown = [output.metrics["client_work"]["train"] for output in outputs]
    check_noise(
        np.array([row[name] / bound for row in shown for name, bound in noised.bound.items()]), 2 * math.sqrt(3) / 3
    )
    moved = [flat(process.get_model_weights(o.state).trainable) for o in (*outputs[:2], process.next(state, CLIENTS))]
    assert np.isfinite(moved).all() and not np.isclose(moved[0], moved[1]).all()


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
def test_noise_is_spent_on_the_metrics_that_are_asked_for_alone():
    process = build(build_dp_fed_avg, metrics=NoisedMetrics(noise_multiplier=1e-4, bound=3.0))
    shown = process.next(process.initialize(), CLIENTS).metrics["client_work"]["train"]
    assert list(shown) == ["loss"] and 0.5 < shown["loss"] < 2.5
    with pytest.raises(ValueError, match=r"the metric 'accuracy', but the model has 'loss', 'num_examples'"):
        build(build_dp_fed_avg, metrics=NoisedMetrics(noise_multiplier=1.0, bound={"accuracy": 1.0}))


@pytest.mark.slow
def test_the_average_clipped_norm_is_told_with_the_noise_that_is_charged():
    bounds = {"update_norm": 0.1, "num_batches": 4.0}

    def process(z):
        return build(build_dp_fed_avg, l2_norm_clip=0.1, metrics=NoisedMetrics(noise_multiplier=z, bound=bounds))

    exact = process(1e-5)
    state = exact.initialize()
    norms = []
    free = build(build_dp_fed_avg, l2_norm_clip=100.0)
    begin = free.initialize()
    for one in CLIENTS:  # without a clip, and alone: what each moves the mean of three by
        ends = [flat(free.get_model_weights(s).trainable) for s in (begin, free.next(begin, [one]).state)]
        norms.append(3 * np.linalg.norm(ends[0] - ends[1]))
    assert min(norms) < 0.1 < max(norms)
    measured = exact.next(state, [*CLIENTS, client(5, scale=np.nan)]).metrics["aggregator"]["update_norm"]
    assert measured == pytest.approx(np.minimum(norms, 0.1).sum() / 3, rel=1e-3)
    noisy = process(2.0)
    assert noisy.privacy[0].noise_multiplier == 0  # no noise on the updates, no promise
    state = noisy.initialize()
    outputs = [noisy.next(state, []).metrics for _ in range(220)]
    check_noise(np.array([[o["aggregator"]["update_norm"] / 0.1, o["client_work"]["train"]["num_batches"] / 4.0]
                          for o in outputs]), 2.0 * math.sqrt(2) / 3)  # fmt: skip


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


def with_batch_norm():
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((FEATURES,)), tf.keras.Sequential([tf.keras.layers.BatchNormalization()]),
        tf.keras.layers.Dense(CLASSES),
    ])  # fmt: skip


def compiled():
    model = model_fn()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model_fn": with_batch_norm}, PrivacyError, "BatchNormalization.*GroupNormalization"),
        ({"model_fn": compiled}, ValueError, "compiled Keras model"),
        ({"model_fn": lambda model=model_fn(): model}, ValueError, "same model twice"),  # noqa: B008
        ({"model_fn": model_fn()}, TypeError, "Sequential. Wrap its construction"),
        ({"model_fn": lambda: 3}, TypeError, "returned int"),
        ({"model_fn": 3}, TypeError, "function that makes a model"),
        ({"loss": "mse"}, TypeError, "an object, no name"),
        ({"loss": None}, ValueError, "give its loss and input_spec"),
        ({"input_spec": tf.TensorSpec([None, FEATURES])}, TypeError, "input_spec must be .* must have labels"),
        ({"client_weighting": tff.learning.ClientWeighting.NUM_EXAMPLES}, PrivacyError, "every client counts alike"),
        ({"model_aggregator": tff.aggregators.MeanFactory()}, PrivacyError, "replace the clip"),
        ({"metrics_aggregator": tff.learning.metrics.sum_then_finalize}, PrivacyError, "NoisedMetrics"),
        ({"metrics": True}, PrivacyError, "NoisedMetrics"),
        ({"clients_per_round": 0}, ValueError, "clients_per_round"),
        ({"clients_per_round": "many"}, ValueError, "clients_per_round"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, ValueError, "noise_multiplier"),
        ({"l2_norm_clip": 0.0}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": AdaptiveClip(clipped_count_stddev=0.1)}, ValueError, "clipped_count_stddev=0.1"),
        ({"client_optimizer_fn": tf.keras.optimizers.SGD(0.1)}, TypeError, "TFF optimizer"),
        ({"client_optimizer_fn": "lamb"}, ValueError, "'yogi'"),
        ({"proximal_strength": -1.0}, ValueError, "proximal_strength"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(wrong, error, message):
    settings = {
        "clients_per_round": 3,
        "noise_multiplier": 1.0,
        "l2_norm_clip": 1.0,
        "client_optimizer_fn": SGD,
        **KERAS,
    }
    settings.update(wrong)
    with pytest.raises(error, match=message):
        build_dp_fed_avg(settings.pop("model_fn", model_fn), **settings)


@pytest.mark.parametrize(
    ("builder", "wrong", "error", "message"),
    [
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
        (build_example_dp_fed_avg, {"l2_norm_clip": 1.0, "batch_size": 4}, ValueError, "local_steps"),
        (
            build_example_dp_fed_avg,
            {"l2_norm_clip": 1.0, "batch_size": 4, "local_steps": 1, "client_noise_multiplier": 1.0},
            ValueError,
            "needs client_clip",
        ),
        (
            build_example_dp_fed_avg,
            {"l2_norm_clip": 1.0, "batch_size": 4, "local_epochs": 1, "sampling": "shuffled"},
            ValueError,
            "sampling must be one of",
        ),
    ],
)
def test_bad_input_of_the_other_processes_is_refused(builder, wrong, error, message):
    with pytest.raises(error, match=message):
        build(builder, **wrong)


# -- examples ---------------------------------------------------------------------------------------------------------


WIDE = 50  # so that a few rounds are many draws


def linear_model_fn():
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((WIDE,)),
        tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])  # fmt: skip


LINEAR = {
    "loss": tf.keras.losses.MeanSquaredError(),
    "input_spec": (tf.TensorSpec([None, WIDE], tf.float32), tf.TensorSpec([None, 1], tf.float32)),
}


def regression(x, y, batch=64):
    return tf.data.Dataset.from_tensor_slices((np.float32(x), np.float32(y))).batch(batch)


def example_process(**more):
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 0.0, "batch_size": 8, "sampling": "batches",
                "client_optimizer_fn": tff.learning.optimizers.build_sgdm(1.0), **LINEAR, **more}  # fmt: skip
    return build_example_dp_fed_avg(linear_model_fn, **settings)


def moved(process, data):
    state = process.initialize()
    return flat(process.get_model_weights(process.next(state, data).state).trainable)


@pytest.mark.slow
def test_one_example_moves_a_clients_update_by_its_clip_over_the_expected_batch():
    process = example_process()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, WIDE)), rng.normal(size=(6, 1))
    x[0], y[0] = 1e3, 1e3
    difference = moved(process, [regression(x, y)]) - moved(process, [regression(x[1:], y[1:])])
    assert np.linalg.norm(difference) == pytest.approx(1 / 8, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"local_epochs": 3}, {"sampling": "poisson", "local_steps": 3}])
def test_the_noise_of_examples_is_as_stated_and_each_clients_own(sampling):
    process = example_process(noise_multiplier=2.0, **sampling)
    nothing = regression(np.zeros([8, WIDE]), np.zeros([8, 1]))  # no gradient: the update is noise
    sample = np.concatenate([moved(process, [nothing]) for _ in range(20)])
    check_noise(sample, 2.0 / 8 * math.sqrt(3))
    of_two = np.concatenate([moved(process, [nothing, nothing]) for _ in range(20)])
    check_noise(of_two, 2.0 / 8 * math.sqrt(3 / 2))


@pytest.mark.slow
def test_poisson_steps_take_each_example_with_the_stated_probability():
    process = example_process(sampling="poisson", local_steps=1, l2_norm_clip=1.0, batch_size=12)
    # Each example's clipped gradient is a unit vector of its own, so the update shows which were taken.
    examples, rounds = 48, 100
    x, y = np.eye(WIDE)[:examples], np.full([examples, 1], 100.0)
    taken = np.array([moved(process, [regression(x, y)]) * 12 for _ in range(rounds)])
    assert np.allclose(taken, np.round(taken), atol=1e-4) and not taken[:, examples:].any()
    assert stats.binomtest(round(taken.sum()), rounds * examples, 12 / examples).pvalue > 1e-8
    # Independently of each other: the sizes' variance is a binomial's. Beyond a factor of 3 once in 10^10.
    assert 1 / 3 < np.var(taken.sum(1), ddof=1) / (examples * 0.25 * 0.75) < 3
    # Fewer examples than a step expects: all of them, every time.
    assert np.linalg.norm(moved(process, [regression(x[:3], y[:3])])) == pytest.approx(math.sqrt(3) / 12)


@pytest.mark.slow
def test_an_empty_client_and_client_level_noise_on_top():
    process = example_process(
        sampling="poisson", local_steps=2, noise_multiplier=1.0, client_clip=1.0, client_noise_multiplier=1.5,
        clients_per_round=2,
    )  # fmt: skip
    assert [p.level for p in process.privacy] == ["example", "client"]
    assert process.privacy[1] == ClientLevel(noise_multiplier=1.5)
    assert isinstance(process.privacy[0], ExampleLevel)
    empty = regression(np.zeros([0, WIDE]), np.zeros([0, 1]))
    check_noise(np.concatenate([moved(process, [empty]) for _ in range(20)]), 1.5 / 2)


@pytest.mark.slow
def test_a_loss_that_couples_examples_is_refused():
    class Coupled(tf.keras.losses.Loss):
        def call(self, y_true, y_pred):
            return (y_pred - tf.reduce_mean(y_pred)) ** 2

    with pytest.raises(PrivacyError):
        example_process(loss=Coupled())


@pytest.mark.slow
def test_what_a_plan_says_of_skellam_noise_is_what_is_built():
    for clip, z, k in ((0.3, 1.5, 3), (4.0, 0.4, 40)):
        process = build(build_distributed_dp_fed_avg, l2_norm_clip=clip, noise_multiplier=z, clients_per_round=k)
        weights = FEATURES * 5 + 5 + 5 * CLASSES + CLASSES
        (built,), planned = process.privacy, skellam_level(z, clip, k, weights)
        for name in ("l1", "l2", "local_stddev"):
            assert getattr(planned, name) == pytest.approx(getattr(built, name), rel=1e-5)


# -- what ran is what is priced ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_process_promises_is_what_its_aggregator_reports():
    process = build(build_dp_fed_avg, noise_multiplier=1.2, clients_per_round=20, l2_norm_clip=AdaptiveClip())
    state = process.next(process.initialize(), CLIENTS).state
    event = tff.aggregators.differential_privacy.extract_dp_event_from_state(state.aggregator)
    z = [float(part.noise_multiplier) for part in event.events]
    assert sum(v**-2 for v in z) ** -0.5 == pytest.approx(1.2, rel=1e-5)
    run = RoundsRun(rounds=1, participation=Participation(sampling="none", population=20, clients_per_round=20))
    assert process.privacy[0].price(run, 1e-5) == ClientLevel(noise_multiplier=1.2).price(run, 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 3.0])
def test_updates_of_any_width_have_at_most_the_norm_of_the_clip_after_they_are_rounded(dtype, size):
    rng = np.random.default_rng(0)
    for _ in range(20):
        record = [tf.cast(size * rng.normal(size=400), dtype), tf.cast(size * rng.normal(size=(3, 7)), dtype)]
        for clip in (size, 1e9):
            clipped, norm = aggregators.clip_by_norm(record, clip)
            exact = np.sqrt(sum(np.sum(np.asarray(tf.cast(t, tf.float64)) ** 2) for t in clipped))
            assert exact <= clip * (1 + 1e-6) and clipped[0].dtype == dtype
            assert exact > 0.95 * min(clip, float(norm)) or size == 1e-6
