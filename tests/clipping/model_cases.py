"""What tests of Keras models share: small models with data, and users' rules."""

import numpy as np
import tensorflow as tf

import tfdpfl

RNG = np.random.default_rng(0)
L = tf.keras.layers
IMAGES, LABELS = RNG.normal(size=(6, 10, 10, 3)).astype("float32"), RNG.integers(0, 4, 6)
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(*layers):
    model = tf.keras.Sequential([tf.keras.Input((10, 10, 3)), *layers, L.Flatten(), L.Dense(4)])
    model.compile(optimizer="sgd", loss=LOSS)
    return model


def norms_of(loss, *weights):
    """A function of a batch of 3 numbers each: the norms of its examples' gradients."""
    spec = [tf.TensorSpec([None, 3])]
    return tf.function(lambda x: tfdpfl.clipping.per_example_norms(loss(x), list(weights)), spec, autograph=False)


def flat(*layers):
    model = tf.keras.Sequential([tf.keras.Input((5,)), *layers, L.Dense(4)])
    model.compile(optimizer="sgd", loss=LOSS)
    return model, (RNG.normal(size=(6, 5)).astype("float32"), LABELS)
