"""A model's fingerprint changes with everything that changes its training, and with nothing else."""

import pytest
import tensorflow as tf
from pate_cases import CLASSES, FEATURES, X40, Y40, by_class_frequency, subclassed

from tfdpfl.pate import _model_fingerprint


def renamed(k):
    def act(x):
        return tf.nn.relu(x) * k

    return act


def told(model):
    model(X40[:1])
    return _model_fingerprint.fingerprint(model, tf.constant(X40[:2]), Y40[:2])


@pytest.mark.one_stack
@pytest.mark.slow
def test_what_a_model_is_known_by_tells_all_that_changes_its_training():
    def made(activation="relu", optimizer="Adam", rate=0.02, loss=None):
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((FEATURES,)), tf.keras.layers.Dense(4, activation=activation),
             tf.keras.layers.Dense(CLASSES)]
        )  # fmt: skip
        loss = loss or tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(getattr(tf.keras.optimizers, optimizer)(rate), loss)
        return model

    makers = [
        made,
        lambda: made("tanh"),
        lambda: made(renamed(2.0)),
        lambda: made(renamed(3.0)),
        lambda: made(lambda x: tf.nn.relu(x) - x),
        lambda: made(lambda x: x - tf.nn.relu(x)),  # the same ops, wired otherwise
        lambda: made(rate=0.03),
        lambda: made(optimizer="RMSprop"),
        lambda: made(loss="sparse_categorical_crossentropy"),
        lambda: made(loss=lambda y, p: by_class_frequency(y, p)),
        lambda: made(loss=lambda y, p: 2.0 * by_class_frequency(y, p)),
        subclassed,
        lambda: subclassed(2.0),
    ]
    first = [told(make()) for make in makers]
    assert len(set(first)) == len(makers)
    assert [told(make()) for make in makers] == first
