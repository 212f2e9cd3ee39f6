"""What tests of label mechanisms share: data, mechanisms, and the ε of a matrix."""

import math

import numpy as np
from sklearn.cluster import KMeans

from tfdpfl.label_dp import (
    RandomizedResponse,
    RandomizedResponseTopK,
    RandomizedResponseWithPrior,
    RROnBins,
    UnbiasedRandomizer,
)

SKEWED = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
FIVE = ([0.0, 1, 2, 3, 10], [0.4, 0.25, 0.2, 0.1, 0.05])


def blobs(n=600, classes=3, seed=0, apart=8):
    """Clusters that tell the class, and the classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return rng.normal(size=(n, 4)) + apart * np.eye(4)[y], y


def largest_loss(matrix):
    """ε of a matrix [inputs, outputs]: the largest log ratio of two inputs' probabilities of one output."""
    worst = 0.0
    for column in matrix.T:
        if column.max() > 0:
            worst = max(worst, math.inf if column.min() == 0 else math.log(column.max() / column.min()))
    return worst


CLASS_MECHANISMS = [
    lambda eps: RandomizedResponse(eps, 5),
    lambda eps: RandomizedResponse(eps, 2),
    lambda eps: RandomizedResponseTopK(eps, 1, SKEWED, 5),
    lambda eps: RandomizedResponseTopK(eps, 3, SKEWED, 5),
    lambda eps: RandomizedResponseTopK(eps, 5, None, 5),
    lambda eps: RandomizedResponseWithPrior(eps, SKEWED, 5),
    lambda eps: RandomizedResponseWithPrior(eps, [0.0, 0.5, 0.0, 0.5, 0.0], 5),
    lambda eps: RandomizedResponseWithPrior(eps, [0, 0, 1, 0, 0], 5),
    lambda eps: RandomizedResponseWithPrior(eps, None, 5),
]


NUMBER_MECHANISMS = [
    lambda eps: RROnBins(eps, prior=FIVE),
    lambda eps: RROnBins(eps, prior=FIVE, loss="absolute"),
    lambda eps: RROnBins(eps, prior=FIVE, loss="poisson"),
    lambda eps: RROnBins(eps, prior_epsilon=0.4 * eps, values=range(5)),
    lambda eps: UnbiasedRandomizer(eps, prior=FIVE),
]


def pure_groups(purity=0.9, size=300, groups=100, classes=10):
    """Groups of one size in which so many have the group's own label: features [n, 1], labels, a clusterer."""

    class Given(KMeans):
        def fit(self, X, y=None):
            return self

        def predict(self, X):
            return np.asarray(X)[:, 0].astype(int)

    group = np.repeat(np.arange(groups), size)
    place = np.tile(np.arange(size), groups)
    label = np.where(place < purity * size, group, group + 1 + place) % classes
    return group[:, None].astype(float), label, Given(groups)


X, Y = blobs(60)


def float_blobs(n=900):
    x, y = blobs(n, apart=5)
    return x.astype(np.float32), y


def small_model(loss="sparse_categorical_crossentropy", softmax=True, rate=0.05):
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3, "softmax" if softmax else None)])
    model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model
