"""What the tests of `PrivacyBudget` share: a small model, its data and their price."""

import itertools

import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl import callbacks

KERAS_2 = hasattr(tf.keras, "__internal__")


N, DELTA = 200, 1e-4


RNG = np.random.default_rng(0)


X, Y = RNG.normal(size=(N, 4)).astype("float32"), RNG.integers(0, 3, N)


def compiled(z=2.0, steps_per_execution=1, **kwargs):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpfl.DPSGD(1.0, z, learning_rate=0.1, **kwargs)
    model.compile(optimizer=optimizer, loss=loss, steps_per_execution=steps_per_execution)
    return model


def price(**kwargs):
    return tfdpfl.compute_epsilon(**{"num_examples": N, "delta": DELTA, "accountant": "rdp", **kwargs})


def PrivacyBudget(*args, **kwargs):
    return callbacks.PrivacyBudget(*args, **{"accountant": "rdp", **kwargs})  # the quick accountant


def uses(count):
    """The price if every example takes part in so many steps."""
    return price(batch_size=20, noise_multiplier=2.0, num_steps=count, sampling="none")


def own_batches(sizes, x=X, y=Y):
    """A data set of one's own, of batches of such sizes, of which TensorFlow knows neither number nor size."""
    ends = np.cumsum([0, *sizes])
    return tf.data.Dataset.from_generator(
        lambda: ((x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)),
        output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int64)),
    )


def one_each(*row):
    return tf.data.Dataset.from_tensors(row)


def two_each(*row):
    return one_each(*row).repeat(2)


ROWS = tf.data.Dataset.from_tensor_slices((X, Y))


class Thrice(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(3)

    def call(self, x, training=None):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - tf.one_hot(y, 3)) ** 2)
            self.optimizer.minimize(loss, self.trainable_variables, **({"tape": tape} if KERAS_2 else {}))
        return {"loss": 0.0}


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(20)
