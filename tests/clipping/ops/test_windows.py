"""What the windows of a convolution meet is what TensorFlow extracts."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import check_model, normal
from layer_cases import SIMPLE, stack

from tfdpfl.clipping.ops import windows


@pytest.mark.parametrize("name", ["conv2d same strided", "conv2d of many channels", "depthwise conv2d"])
def test_images_whose_places_are_too_many_for_a_constant_agree(name, monkeypatch):
    monkeypatch.setattr(windows, "CONSTANT_PLACES", 0)
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("kernel, strides, rates, channels", [
    ((3, 3), (2, 2), (2, 3), 9), ((4, 4), (2, 2), (2, 2), 3), ((4, 6), (2, 2), (3, 1), 3), ((6, 4), (2, 2), (1, 3), 3),
    ((5, 5), (2, 3), (1, 1), 2), ((2, 2), (1, 2), (3, 2), 1), ((1, 1), (2, 2), (1, 1), 8),
    ((1, 12), (1, 12), (1, 1), 3),
])  # fmt: skip
def test_patches_are_tensorflows(kernel, strides, rates, channels, padding):
    """Also where an op has strides and dilation, of which TensorFlow has no gradient on a CPU."""
    x = tf.constant(normal(2, 17, 16, channels))
    wanted = tf.image.extract_patches(x, [1, *kernel, 1], [1, *strides, 1], [1, *rates, 1], padding)
    window = windows.Window(list(kernel), list(strides), list(rates), padding, [], False)
    out = wanted.shape[1:-1].as_list()
    for pieces in (window.pieces(x, out), window.pieces(x, out, math.prod(kernel))):
        np.testing.assert_array_equal(tf.concat([piece() for piece in pieces], -1), wanted)
    assert len(pieces) == 1
