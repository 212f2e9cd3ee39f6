"""Slices and their gradients keep examples apart: exact, or refused where they take some examples of a batch."""

import numpy as np
import pytest
import tensorflow as tf
from loss_cases import X, agrees, refused
from mixing_cases import TABLE, check_told, d, n, total


@pytest.mark.parametrize("cut", [np.s_[:, 1:3], np.s_[..., 0], np.s_[:, None, 2], np.s_[:, ::2], np.s_[..., None, 1:]])
@pytest.mark.one_stack
def test_the_gradient_of_a_slice_is_exact(cut):
    def loss(w, x):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ w)[cut] ** 2
        return tf.reduce_mean(tape.gradient(y, x) ** 2)

    agrees(loss, X, rtol=2e-5, static=True)


@pytest.mark.parametrize("cut", [np.s_[1:], np.s_[::-1], np.s_[:2], np.s_[0], np.s_[None, 1:]])
@pytest.mark.one_stack
def test_the_gradient_of_a_slice_of_examples_is_refused(cut):
    def loss(w, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ w)[cut] ** 2
        return tf.reduce_mean(tape.gradient(y, x) ** 2)

    refused(loss, X, match="takes some examples|by its position|not known to follow the batch size", static=True)


@pytest.mark.parametrize("rows, stride, match", [
    (lambda n: n, -1, "takes some examples"), (lambda n: 2 * n, 1, "not known to follow the batch size"),
    (lambda n: 5, 1, "not known to follow the batch size"),
])  # fmt: skip
def test_a_slices_gradient_in_other_rows_than_the_examples_is_refused(rows, stride, match):
    """Turned round, among more rows than there are, or in as many as one batch has."""

    def loss(w, x):
        y = tf.tanh(x @ w)
        put = tf.raw_ops.StridedSliceGrad(
            shape=tf.stack([rows(tf.shape(y)[0]), 6]), begin=[0], end=[0], strides=[stride], dy=y, begin_mask=1,
            end_mask=1,
        )  # fmt: skip
        return tf.reduce_mean(y**2) + tf.reduce_mean(put**2)

    refused(loss, X, match=f"StridedSliceGrad.*{match}")


def test_a_public_row_for_each_place_in_the_batch_is_refused():
    check_told(lambda x: total(d(x) * TABLE[: n(x)]), "StridedSlice.*slices by the batch size")
