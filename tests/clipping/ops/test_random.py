"""What is drawn for a batch is the same in the norm and in the sum, and no draw depends on the batch."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, example_losses, normal
from mixing_cases import B, check_refused_or_apart, check_told, d, n, total

from tfdpfl.clipping import clipped_gradients

MIXING = {
    "shuffled": lambda x: total(d(x) + tf.random.shuffle(d(x))),
    "seed from the batch size": lambda x: total(d(x) * tf.random.stateless_uniform([4], tf.stack([n(x), 1]))),
}  # fmt: skip
TOLD = {
    "shuffled": "RandomShuffle.*picks examples",
}


@pytest.mark.parametrize("layer", [
    lambda: L.Dropout(0.5), *[pytest.param(layer, marks=pytest.mark.slow) for layer in (
        lambda: L.GaussianNoise(0.5), lambda: L.LSTM(3, dropout=0.4, recurrent_dropout=0.2))],
], ids=["Dropout", "GaussianNoise", "LSTM"])  # fmt: skip
def test_noise_in_training_is_one_and_the_same_in_norm_and_sum(layer):
    """The sum of the batch of clipped gradients can then be no longer than the batch times the clip."""
    model = K.Sequential([K.Input((3, 4)), L.Dense(8, activation="relu"), layer(), L.Dense(2)])
    clip = 0.01

    @tf.function(input_signature=[tf.TensorSpec([None, 3, 4])])
    def step(x):
        r = clipped_gradients(tf.reduce_mean(example_losses(model(x, training=True))), model.trainable_variables, clip)
        return tf.linalg.global_norm([s for s in r.sum if s is not None]), r.norms

    x = 3 * normal(1, 3, 4)
    lengths = []
    for _ in range(20):
        length, each = step(tf.constant(x))
        if float(each[0]) > clip:
            np.testing.assert_allclose(float(length), clip, rtol=1e-4)
        lengths.append(float(each[0]))
    assert len(set(lengths)) > 1  # the noise is on


AUGMENTATIONS = {
    "flip": lambda: L.RandomFlip(), "rotation": lambda: L.RandomRotation(0.3), "crop": lambda: L.RandomCrop(3, 3),
    "brightness": lambda: L.RandomBrightness(0.5, value_range=(0, 1)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "batch"), [
    *[pytest.param(layer, None, id=name) for name, layer in AUGMENTATIONS.items()],
    *[pytest.param(AUGMENTATIONS[name], B, id=f"{name}-static") for name in ("crop",)],
])  # fmt: skip
def test_random_images_are_clipped_as_they_were_drawn(layer, batch):
    model = K.Sequential([K.Input((6, 6, 3)), L.Conv2D(3, 2, activation="sigmoid"), layer(), L.Flatten(), L.Dense(1)])
    clip = 0.01

    @tf.function(input_signature=[tf.TensorSpec([batch, 6, 6, 3])])
    def step(x):
        r = clipped_gradients(tf.reduce_mean(example_losses(model(x, training=True))), model.trainable_variables, clip)
        return tf.linalg.global_norm([s for s in r.sum if s is not None]), r.norms

    x = np.repeat(normal(1, 6, 6, 3), batch or 1, 0)
    lengths = set()
    for _ in range(8):
        length, each = step(tf.constant(x))
        assert float(length) <= len(x) * clip * (1 + 1e-4)
        if batch is None and float(each[0]) > clip:
            np.testing.assert_allclose(float(length), clip, rtol=1e-4)
        lengths.update(np.round(each.numpy(), 6).tolist())
    assert len(lengths) > 1


UNTOLD = {name: losses for name, losses in MIXING.items() if name not in TOLD}


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("losses", UNTOLD.values(), ids=UNTOLD)
def test_what_lets_examples_meet_is_refused_or_keeps_them_apart(losses):
    check_refused_or_apart(losses)


@pytest.mark.parametrize(("name", "message"), TOLD.items(), ids=TOLD)
def test_a_refusal_names_the_op_and_the_reason(name, message):
    check_told(MIXING[name], message)
