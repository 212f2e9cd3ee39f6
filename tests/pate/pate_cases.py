"""What tests of PATE share: votes, teachers' data, models and losses."""

import numpy as np
import tensorflow as tf

from tfdpfl.pate import TeacherEnsemble

PUBLISHED_VOTES = np.array([[240, 4, 1, 0, 0, 1, 0, 2, 1, 1]])


def random_votes(queries=50, teachers=100, classes=10, seed=0, agreement=0.8):
    rng = np.random.default_rng(seed)
    predictions = rng.integers(0, classes, (teachers, queries))
    agree = rng.random((teachers, queries)) < agreement
    return np.where(agree, rng.integers(0, classes, queries), predictions)


CLASSES, FEATURES = 3, 6


def blobs(examples, seed=0, features=FEATURES):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, examples)
    centres = np.random.default_rng(42).normal(size=(CLASSES, features)) * 3
    return (centres[y] + rng.normal(size=(examples, features))).astype(np.float32), y


def dense_model(optimizer="Adam", dropout=0.0):
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(dropout),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(
        getattr(tf.keras.optimizers, optimizer)(0.02), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def quick(num_teachers=4, model_fn=dense_model, **options):
    options = {"epochs": 2, "batch_size": 16, "seed": 0, "verbose": 0, **options}
    return TeacherEnsemble(model_fn, num_teachers, **options)


def by_class_frequency(y_true, y_pred):
    """Weighs each example by how rare its class is in the batch: examples meet."""
    k = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
    weights = 1 / tf.math.bincount(k, minlength=CLASSES, maxlength=CLASSES, dtype=tf.float32)
    each = tf.keras.losses.sparse_categorical_crossentropy(k, y_pred, from_logits=True)
    return each * tf.gather(weights, k)


class Net(tf.keras.Model):
    def __init__(self, scale=1.0):
        super().__init__()
        self.first, self.drop, self.last = (
            tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dropout(0.1), tf.keras.layers.Dense(CLASSES)
        )  # fmt: skip
        self.scale = scale

    def call(self, x, training=False):
        return self.last(self.drop(self.first(x), training=training)) * self.scale


def subclassed(scale=1.0):
    model = Net(scale)
    model.compile(tf.keras.optimizers.Adam(0.05), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


X40, Y40 = blobs(40)
