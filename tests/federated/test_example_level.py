"""What one example can do to a client's update, and how much noise the update has."""

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats
from tff_cases import build, check_noise, flat, tff

from tfdpfl import PrivacyError
from tfdpfl.federated import build_example_dp_fed_avg
from tfdpfl.federated.guarantees import ClientLevel, ExampleLevel

pytestmark = pytest.mark.usefixtures("runtime")
WIDE = 600  # so that a round is many draws


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
    check_noise(moved(process, [nothing]), 2.0 / 8 * math.sqrt(3))
    check_noise(moved(process, [nothing, nothing]), 2.0 / 8 * math.sqrt(3 / 2))


@pytest.mark.slow
def test_poisson_steps_take_each_example_with_the_stated_probability():
    process = example_process(sampling="poisson", local_steps=1, l2_norm_clip=1.0, batch_size=12)
    # Each example's clipped gradient is a unit vector of its own, so the update shows which were taken.
    examples, rounds = 48, 50
    x, y = np.eye(WIDE)[:examples], np.full([examples, 1], 100.0)
    taken = np.array([moved(process, [regression(x, y)]) * 12 for _ in range(rounds)])
    assert np.allclose(taken, np.round(taken), atol=1e-4) and not taken[:, examples:].any()
    assert stats.binomtest(round(taken.sum()), rounds * examples, 12 / examples).pvalue > 1e-8
    # Independently of each other: the sizes' variance is a binomial's. Beyond a factor of 4 once in 10^9.
    assert 1 / 4 < np.var(taken.sum(1), ddof=1) / (examples * 0.25 * 0.75) < 4
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
    check_noise(moved(process, [empty]), 1.5 / 2)


@pytest.mark.slow
def test_a_loss_that_couples_examples_is_refused():
    class Coupled(tf.keras.losses.Loss):
        def call(self, y_true, y_pred):
            return (y_pred - tf.reduce_mean(y_pred)) ** 2

    with pytest.raises(PrivacyError):
        example_process(loss=Coupled())


@pytest.mark.parametrize(
    ("builder", "wrong", "error", "message"),
    [
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
