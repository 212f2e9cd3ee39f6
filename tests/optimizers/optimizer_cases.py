"""What tests of the optimizers share."""

import conftest as c
import numpy as np
import tensorflow as tf

import tfdpfl

keras = tf.keras

CLIP = 0.6  # some of the examples' norms are above, some below


def assert_same(actual, expected, rtol=2e-4, atol=2e-6):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def sgd(clip=CLIP, multiplier=0.0, **kwargs):
    return tfdpfl.DPSGD(clip, multiplier, **{"learning_rate": 1.0, **kwargs})


def loss_of(model, x, y):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))


def custom_step(model, optimizer, **kwargs):
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True, **kwargs)
    def step(x, y):
        optimizer.minimize(lambda: loss_of(model, x, y), model.trainable_variables)

    return lambda x, y: step(tf.constant(x), tf.constant(y))


def float16_model(optimizer, **kwargs):
    model = c.classifier(dtype=keras.mixed_precision.Policy("mixed_float16"))
    model.compile(optimizer, loss=c.cross_entropy(), **kwargs)
    return model
