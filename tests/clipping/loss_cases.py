"""What tests of losses share: a batch, and a loss held against TensorFlow's gradients of one example at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.errors import PrivacyError

RNG = np.random.default_rng(3)
FRAMES = RNG.normal(size=(5, 12, 4)).astype("float32")
LABELS = RNG.integers(1, 6, (5, 3)).astype("int32")
X = RNG.normal(size=(5, 4)).astype("float32")
WEIGHTS = RNG.normal(size=(4, 6)).astype("float32")
MASK = (RNG.random((5, 6)) < 0.7).astype("float32") + np.eye(5, 6, dtype="float32")


def agrees(loss, *batch, weights=WEIGHTS, rtol=1e-5, static=False):
    """The norms and the clipped sum are those of the examples one by one, by TensorFlow's own gradients."""
    w = tf.Variable(weights)

    def gradient(*one):
        with tf.GradientTape() as tape:
            value = loss(w, *one)
        return tf.convert_to_tensor(tape.gradient(value, w)).numpy()

    each = [gradient(*(part[i : i + 1] for part in batch)) for i in range(len(batch[0]))]
    norms = np.array([np.linalg.norm(g) for g in each])
    clip = float(np.median(norms))
    step = tf.function(
        lambda *batch: (per_example_norms(loss(w, *batch), [w]), clipped_gradients(loss(w, *batch), [w], clip).sum[0]),
        input_signature=[tf.TensorSpec([len(part) if static else None, *part.shape[1:]], part.dtype) for part in batch],
    )
    found, total = step(*batch)
    np.testing.assert_allclose(found, norms, rtol=rtol)
    expected = sum(g * min(1, clip / n) for g, n in zip(each, norms, strict=True))
    np.testing.assert_allclose(total, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def refused(loss, *batch, match, static=False):
    w = tf.Variable(WEIGHTS)
    step = tf.function(
        lambda *batch: clipped_gradients(loss(w, *batch), [w], 1.0).sum[0],
        input_signature=[tf.TensorSpec([len(part) if static else None, *part.shape[1:]], part.dtype) for part in batch],
    )
    with pytest.raises(PrivacyError, match=match):
        step(*batch)
