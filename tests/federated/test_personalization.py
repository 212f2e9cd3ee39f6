"""Personalised models: what clients share is private, what they keep stays with them."""

import numpy as np
import pytest
import tensorflow as tf

tff = pytest.importorskip("tensorflow_federated", reason="TensorFlow Federated is not installed on this stack")

# ruff: noqa: E402
from scipy import stats

from tfdpfl import PrivacyError
from tfdpfl.federated import NoisedMetrics, build_dp_fed_recon, evaluate_personalized
from tfdpfl.federated.guarantees import ClientLevel

FEATURES, HIDDEN, CLASSES = 30, 20, 3
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SPEC = (tf.TensorSpec([None, FEATURES], tf.float32), tf.TensorSpec([None], tf.int32))
SGD = tff.learning.optimizers.build_sgdm(0.1)


pytestmark = pytest.mark.usefixtures("runtime")


def model_fn():
    init = tf.keras.initializers.GlorotUniform
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((FEATURES,)),
        tf.keras.layers.Dense(HIDDEN, "tanh", kernel_initializer=init(1), name="shared"),
        tf.keras.layers.Dense(CLASSES, kernel_initializer=init(2), name="own"),
    ])  # fmt: skip


def reconstruction_model_fn():
    model = model_fn()
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        model, global_layers=model.layers[:1], local_layers=model.layers[1:], input_spec=SPEC
    )


def arrays(number, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=(number, FEATURES))).astype("float32")
    return x, rng.integers(0, CLASSES, number).astype("int32")


def client(*args, **more):
    return tf.data.Dataset.from_tensor_slices(arrays(*args, **more)).batch(5)


CLIENTS = [client(n, seed) for seed, n in enumerate([5, 10, 20])]


def build(model_fn=model_fn, **more):
    if model_fn is not reconstruction_model_fn:
        more = {"local_layers": ["own"], "input_spec": SPEC, **more}
    settings = {
        "clients_per_round": 3,
        "noise_multiplier": 0.0,
        "l2_norm_clip": 1e6,
        "client_optimizer_fn": SGD,
        "loss": LOSS,
    }
    return build_dp_fed_recon(model_fn, **{**settings, **more})


def released(process, clients=CLIENTS, rounds=1):
    state = process.initialize()
    for _ in range(rounds):
        state = process.next(state, clients).state
    return process.get_model_weights(state)


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights.trainable])


@pytest.mark.slow
def test_without_noise_and_clip_reconstruction_is_tffs_own():
    theirs = tff.learning.algorithms.build_fed_recon(
        reconstruction_model_fn, loss_fn=lambda: LOSS, client_optimizer_fn=SGD,
        client_weighting=tff.learning.ClientWeighting.UNIFORM,
    )  # fmt: skip
    theirs = flat(released(theirs, rounds=2))
    for make in (model_fn, reconstruction_model_fn):
        process = build(make)
        assert np.abs(flat(released(process, rounds=2)) - theirs).max() <= 1e-6
    assert np.abs(flat(released(process, rounds=0)) - theirs).max() > 1e-3  # something was learnt


@pytest.mark.slow
def test_one_client_moves_what_reconstruction_releases_by_the_clip_over_the_expected_cohort():
    process = build(l2_norm_clip=0.01, clients_per_round=4)
    wild = client(20, 7, scale=1e3)
    with_it, without = (released(process, cohort) for cohort in ([*CLIENTS, wild], CLIENTS))
    assert np.linalg.norm(flat(with_it) - flat(without)) == pytest.approx(0.01 / 4, rel=1e-3)
    # Nothing of the local layer is in the state, and no exact metric is beside it.
    output = process.next(process.initialize(), CLIENTS)
    assert [w.shape for w in tf.nest.flatten(with_it.trainable)] == [(FEATURES, HIDDEN), (HIDDEN,)]
    sizes = {np.size(part) for part in tf.nest.flatten(output.state)}
    assert not sizes & {HIDDEN * CLASSES, CLASSES}
    assert output.metrics["client_work"]["train"] == {}
    assert process.privacy == (ClientLevel(noise_multiplier=0.0),)


@pytest.mark.slow
def test_what_reconstruction_releases_has_the_noise_that_it_promises():
    noised = NoisedMetrics(noise_multiplier=2.0, bound=1.0)
    process = build(l2_norm_clip=0.5, clients_per_round=4, noise_multiplier=3.0, metrics=noised)
    state = process.initialize()
    output = process.next(state, [])
    moved = flat(process.get_model_weights(output.state)) - flat(process.get_model_weights(state))
    law = stats.chi2(moved.size)

    def accepts(stddev):  # denied once in 10^8 where it is right
        seen = np.sum((moved / stddev) ** 2)
        return min(law.cdf(seen), law.sf(seen)) > 5e-9

    stddev = 3.0 * 0.5 / 4
    assert [accepts(stddev * by) for by in (2 / 3, 1, 3 / 2)] == [False, True, False]
    assert set(output.metrics["client_work"]["train"]) == {"loss"}
    assert process.privacy[0].noise_multiplier == pytest.approx((3.0**-2 + 2.0**-2) ** -0.5)


def with_batch_norm():
    model = model_fn()
    model.add(tf.keras.layers.BatchNormalization(name="norm"))
    return model


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"client_weighting": tff.learning.ClientWeighting.NUM_EXAMPLES}, PrivacyError, "every client counts alike"),
        ({"model_aggregator": tff.aggregators.MeanFactory()}, PrivacyError, "replace the clip"),
        ({"metrics_aggregator": tff.learning.metrics.sum_then_finalize}, PrivacyError, "NoisedMetrics"),
        ({"model_fn": with_batch_norm}, PrivacyError, "BatchNormalization"),
        ({"l2_norm_clip": -1.0}, ValueError, "l2_norm_clip"),
        ({"local_layers": ["head"]}, ValueError, r"local_layers=\['head'\].*'shared', 'own'"),
        ({"local_layers": "own"}, ValueError, "must be a list of names"),
        ({"local_layers": []}, ValueError, "must be a list of names"),
        ({"local_layers": ["shared", "own"]}, ValueError, "nothing for the clients to learn together"),
        ({"model_fn": reconstruction_model_fn, "local_layers": ["own"]}, ValueError, "has its own"),
        ({"input_spec": None}, ValueError, "element_spec"),
        ({"loss": "mse"}, TypeError, "an object, no name"),
        ({"model_fn": lambda: 3}, TypeError, "ReconstructionModel"),
        ({"reconstruction_optimizer_fn": "lamb"}, ValueError, "reconstruction_optimizer_fn must be one of"),
    ],
)
def test_reconstruction_refuses_what_would_leak_or_not_work(wrong, error, message):
    with pytest.raises(error, match=message):
        build(**wrong)


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def variable_model_fn():
    return tff.learning.models.from_keras_model(
        model_fn(), loss=LOSS, input_spec=SPEC, metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    )


def weights():
    return tff.learning.models.ModelWeights.from_model(variable_model_fn())


def one_label(label):
    """Data on which a client's own model is right with what no common one can know: it has one label alone."""
    x, y = arrays(40, label)
    return tf.data.Dataset.from_tensor_slices((x, np.full_like(y, label))).batch(5)


def evaluate(model_fn=variable_model_fn, **more):
    data = {name: one_label(label) for label, name in enumerate(["a", "b", "c"])}
    settings = {
        "weights": weights(),
        "client_data": data,
        "test_data": data,
        "client_optimizer_fn": SGD,
        "num_epochs": 5,
    }
    return evaluate_personalized(model_fn, **{**settings, **more})


@pytest.mark.slow
def test_each_client_is_measured_before_and_after_training_from_the_released_model():
    found = evaluate()
    assert list(found) == ["a", "b", "c"]
    for label, row in enumerate(found.values()):
        x, y = next(iter(one_label(label).unbatch().batch(40)))
        released = model_fn()  # as each client starts from: nothing of the one before it is left
        assert row["before"]["loss"] == pytest.approx(float(LOSS(y, released(x))), rel=1e-4)
        assert row["after"]["accuracy"] == 1.0 and row["after"]["loss"] < 0.5 * row["before"]["loss"]
        for _ in range(5):
            for xs, ys in one_label(label):
                with tf.GradientTape() as tape:
                    step = LOSS(ys, released(xs))
                gradients = tape.gradient(step, released.trainable_variables)
                for v, g in zip(released.trainable_variables, gradients, strict=True):
                    v.assign_sub(0.1 * g)
        assert row["after"]["loss"] == pytest.approx(float(LOSS(y, released(x))), rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"num_epochs": 0}, ValueError, "num_epochs"),
        ({"test_data": {"a": one_label(0)}}, ValueError, "Client 'b' has no examples in test_data"),
        ({"test_data": [one_label(0)]}, ValueError, "test_data must be"),
        ({"weights": tff.learning.models.ModelWeights([np.zeros(3)], [])}, ValueError, "get_model_weights"),
        ({"client_optimizer_fn": "lamb"}, ValueError, "client_optimizer_fn"),
        ({"model_fn": model_fn}, ValueError, "give its loss and input_spec"),
    ],
)
def test_bad_input_of_the_evaluation_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        evaluate(**wrong)
