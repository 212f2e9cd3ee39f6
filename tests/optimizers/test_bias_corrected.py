"""Adam without the noise's bias."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl

keras = tf.keras
X, Y = c.examples(12)
CLIP = 0.6


@pytest.mark.parametrize("floor", [None, 1e-3])
def test_bias_corrected_adam_takes_the_noises_variance_off_the_second_moment(floor):
    """Of noise too small to be seen in the weights' last digits φ is as it is said, and the update numpy's."""
    z, size, rate, betas = 2.0, 12, 0.05, (0.9, 0.99)
    of_adam = {"learning_rate": rate, "beta_1": betas[0], "beta_2": betas[1]}
    optimizer = tfdpfl.DPAdamBC(CLIP, z, expected_batch_size=size, variance_floor=floor, **of_adam)
    optimizer._dp.source.gaussian = lambda shapes, *_: [tf.zeros(s) for s in shapes]  # noise off, price and φ on
    model = c.compiled(optimizer)
    phi = (z * CLIP / size) ** 2
    values, m, v = c.weights(), 0.0, 0.0
    for t in range(1, 4):
        model.train_on_batch(X, Y)
        g = c.flat(c.clipped_sum(values, X, Y, CLIP)) / size
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        least = phi / 10 if floor is None else floor
        scale = np.sqrt(np.maximum(v / (1 - betas[1] ** t) - phi, least)) + 1e-7
        flat = c.flat(values) - rate * m / (1 - betas[0] ** t) / scale
        ends = np.cumsum([w.size for w in values])
        values = [part.reshape(w.shape) for part, w in zip(np.split(flat, ends[:-1]), values, strict=True)]
        np.testing.assert_allclose(c.flat(model.get_weights()), flat, atol=2e-5)
    assert np.any(v / (1 - betas[1] ** 3) < phi) and model.optimizer.executed == [(z, 3)]
    again = tfdpfl.DPAdamBC.from_config(model.optimizer.get_config())
    assert again.get_config()["variance_floor"] == floor


@pytest.mark.parametrize(
    "clip, given, message",
    [(1.0, {}, "give it expected_batch_size"), (tfdpfl.AdaptiveClip(), {"expected_batch_size": 4}, "not change"),
     (1.0, {"expected_batch_size": 4, "amsgrad": True}, "amsgrad"), (1.0, {"variance_floor": 0.0}, "variance_floor=0")],
)  # fmt: skip
def test_bias_corrected_adam_refuses_what_it_cannot_correct(clip, given, message):
    with pytest.raises(ValueError, match=message):
        c.compiled(tfdpfl.DPAdamBC(clip, 1.0, **given)).train_on_batch(X, Y)
