"""What tests of counted steps share: a model, its data, and the price of steps that every example is in."""

import conftest as c
import tensorflow as tf

import tfdpfl
from tfdpfl import callbacks
from tfdpfl.data import poisson_batches

keras = tf.keras

N, DELTA, Z = 200, 1e-4, 2.0


X, Y = c.examples(N)


def compiled(z=Z, **kwargs):
    return c.compiled(tfdpfl.DPSGD(1.0, z, learning_rate=0.1, **kwargs))


def budget(*args, **kwargs):
    return callbacks.PrivacyBudget(*args, **{"delta": DELTA, "accountant": "rdp", **kwargs})  # the quick accountant


def fit(model, *watching, batch_size=20, **kwargs):
    return model.fit(X, Y, batch_size=batch_size, callbacks=list(watching), verbose=0, **kwargs)


def uses(count, z=Z):
    """The price of so many steps with every example in each."""
    said = {"num_examples": N, "batch_size": N, "sampling": "none", "delta": DELTA, "accountant": "rdp"}
    return tfdpfl.compute_epsilon(noise_multiplier=z, num_steps=count, **said)


def everyone(model, steps):
    for _ in range(steps):
        model.train_on_batch(X, Y)


def draws(steps=3, **kwargs):
    return poisson_batches((X, Y), sampling_rate=0.01, steps=steps, **kwargs)


class Also(keras.callbacks.Callback):
    """Does something in the middle of a training."""

    def __init__(self, **hooks):
        super().__init__()
        for name, hook in hooks.items():
            setattr(self, name, lambda *args, hook=hook, **kwargs: hook())


def slices(batch, drop=False):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=drop)
