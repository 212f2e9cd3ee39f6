"""Independent noise of a step: of all coordinates, whatever the batch holds."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import CLIP, custom_step, sgd


@pytest.mark.slow
def test_an_empty_batch_gets_the_noise_of_any_other():
    model = c.classifier()
    step = custom_step(model, sgd(multiplier=1.0, seed=2, expected_batch_size=4))
    x, y = c.examples(0)
    empty = c.flat(c.update_of(model, lambda: step(x, y)))
    other = c.classifier()
    step = custom_step(other, sgd(multiplier=1.0, seed=2, expected_batch_size=4))
    x, y = c.examples(3)
    full = c.update_of(other, lambda: step(x, y))
    noise = c.flat([u + g / 4 for u, g in zip(full, c.clipped_sum(c.weights(), x, y, CLIP), strict=True)])
    assert np.all(empty != 0)
    np.testing.assert_allclose(empty, noise, atol=1e-5)


@pytest.mark.parametrize("jit_compile", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_tables_rows_are_added_to_the_noise_of_all_of_it(jit_compile):
    """Rows that are looked up once, twice and never; with equal seeds the noise of two steps is the same."""
    table = tf.Variable(tf.zeros([7, 3]))
    x = np.array([[0, 1, 0], [1, 2, 5]], np.int32)
    pull = np.array([[0.1], [3.0]], np.float32)  # the second example's norm is sqrt(3 * 3) x 3, over the clip

    def update(clip, multiplier, x):
        optimizer = sgd(clip, multiplier, seed=5, expected_batch_size=2)
        optimizer.build([table])
        table.assign(tf.zeros([7, 3]))

        @tf.function(jit_compile=jit_compile)
        def step(x, pull):
            loss = lambda: tf.reduce_mean(tf.reduce_sum(tf.gather(table, x), [1, 2]) * pull[:, 0])
            optimizer.minimize(loss, [table])

        step(tf.constant(x), tf.constant(pull))
        return -table.numpy()

    expected, ones = np.zeros([7, 3]), np.ones(3)
    for row, count in ((0, 2), (1, 1)):  # its norm is 0.1 x sqrt(3 x (2^2 + 1))
        expected[row] += 0.1 * count * ones / 2
    for row in (1, 2, 5):
        expected[row] += CLIP / 3 * ones / 2
    np.testing.assert_allclose(update(CLIP, 0.0, x), expected, atol=1e-6)
    noisy, elsewhere = update(CLIP, 1.0, x), update(CLIP, 1.0, np.full_like(x, 6))
    apart = np.zeros([7, 3])
    apart[6] = (0.3 + CLIP / np.sqrt(3)) * ones / 2  # three times the same row: 3 x 3, cut to the clip
    np.testing.assert_allclose(noisy - elsewhere, expected - apart, atol=1e-6)
    noise = noisy - expected
    assert np.unique(noise).size == 21 and 0.4 < noise.std() / (CLIP / 2) < 1.6
