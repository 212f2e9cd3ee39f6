"""What tests of processes share: models, clients, and noise that is checked from both sides. Skips where TFF is not."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

tff = pytest.importorskip("tensorflow_federated", reason="TensorFlow Federated is not installed on this stack")

FEATURES, CLASSES = 4, 3
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SPEC = (tf.TensorSpec([None, FEATURES], tf.float32), tf.TensorSpec([None], tf.int32))
KERAS = {"loss": LOSS, "input_spec": SPEC}
SGD = tff.learning.optimizers.build_sgdm(0.1)


def model_fn():
    init = tf.keras.initializers.GlorotUniform
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((FEATURES,)),
        tf.keras.layers.Dense(5, "tanh", kernel_initializer=init(1)),
        tf.keras.layers.Dense(CLASSES, kernel_initializer=init(2)),
    ])  # fmt: skip


def client(number, seed=0, batch=5, scale=1.0):
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=(number, FEATURES))).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, rng.integers(0, CLASSES, number).astype("int32"))).batch(batch)


CLIENTS = [client(n, seed) for seed, n in enumerate([5, 10, 20])]


def weights_after(process, rounds=2, clients=CLIENTS):
    state = process.initialize()
    for _ in range(rounds):
        state = process.next(state, clients).state
    return flat(process.get_model_weights(state).trainable)


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def one_deviation(shapes, stddev, key, number):
    """In place of `tfdpfl.noise.gaussian`: each draw is one standard deviation, so that what is released tells by
    itself how much noise it has. That draws are normal and new each time is asked of the real ones, in
    `test_aggregators.py`."""
    return [tf.fill(tf.TensorShape(shape), tf.cast(stddev, tf.float32)) for shape in shapes]


def build(builder, **more):
    settings = {"clients_per_round": len(CLIENTS), "noise_multiplier": 0.0, "client_optimizer_fn": SGD, **KERAS, **more}
    return builder(model_fn, **settings)


def accepts(sample, stddev):
    """Whether the sample of zero-mean normals could have this standard deviation: denied once in 10^8 where it has."""
    law, seen = stats.chi2(sample.size), np.sum((sample / stddev) ** 2)
    return min(law.cdf(seen), law.sf(seen)) > 5e-9


def check_noise(sample, stddev):
    assert sample.size >= 400  # with fewer, 2/3 and 3/2 would be taken for 1 once in a while
    assert accepts(sample, stddev), (np.std(sample), stddev)
    assert not accepts(sample, stddev * 2 / 3)
    assert not accepts(sample, stddev * 3 / 2)
