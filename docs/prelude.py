import numpy as np
import tensorflow as tf

import tfdpfl  # noqa: F401

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 6)).astype("float32")  # your examples
y = rng.integers(0, 3, 512)  # your labels


def make_model():
    return tf.keras.Sequential(
        [
            tf.keras.Input((6,)),
            tf.keras.layers.Dense(8, activation="tanh"),
            tf.keras.layers.Dense(3, activation="softmax"),
        ]
    )


model = make_model()
model.compile("sgd", loss="sparse_categorical_crossentropy")
