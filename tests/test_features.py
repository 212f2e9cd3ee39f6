"""Features of images: each image's own, of formulas, and what scipy makes of them."""

import numpy as np
import pytest
import tensorflow as tf
from scipy.signal import correlate2d

from tfdpfl import features


@pytest.mark.slow
def test_features_are_of_one_image_alone_and_of_wavelets(tmp_path):
    images = np.random.default_rng(0).random((3, 8, 12, 2)).astype("float32")
    model = tf.keras.Sequential([tf.keras.Input((8, 12, 2)), features.Scattering()])
    together = model.predict(images, verbose=0)
    assert not model.weights and together.shape == (3, 2, 3, 2 * 81)
    alone = np.concatenate([model.predict(images[i : i + 1], verbose=0) for i in range(3)])
    assert np.allclose(together, alone, atol=1e-5)
    path = str(tmp_path / "model.keras")
    model.save(path)
    np.testing.assert_array_equal(tf.keras.models.load_model(path).predict(images, verbose=0), together)

    fine, coarse, mean = (features.morlet(0, 8)[:, :, 0], features.morlet(1, 8)[:, :, 0], features.low_pass(1.6))
    assert max(np.abs(waves.sum((0, 1))).max() for waves in (fine, coarse)) < 1e-12  # of a constant they see nothing

    def moduli(image, waves):
        real, imaginary = np.split(np.moveaxis(waves, -1, 0), 2)
        at = lambda kernel: correlate2d(image, kernel, "same")
        return [np.hypot(at(r), at(i)) for r, i in zip(real, imaginary, strict=True)]

    # TensorFlow pads an odd kernel by one less before than after, where it takes every second of an even number.
    for channel in range(2):
        image = images[0, :, :, channel].astype(float)
        first = [image, *moduli(image, fine)]
        means = [correlate2d(each, mean[:, :, 0, 0], "same")[2::4, 2::4] for each in first]
        second = [m[1::2, 1::2] for each in first for m in moduli(each, coarse)]
        means += [correlate2d(each, features.low_pass(0.8)[:, :, 0, 0], "same")[1::2, 1::2] for each in second]
        got = np.moveaxis(together[0, :, :, 81 * channel : 81 * (channel + 1)], -1, 0)
        assert np.allclose(got, means, atol=1e-5)


def test_sizes_that_four_does_not_divide_are_rounded_up():
    layer = features.Scattering(num_angles=2)
    assert layer(np.zeros([1, 7, 9, 1], "float32")).shape == (1, 2, 3, 9)
    with pytest.raises(
        ValueError, match="num_angles must be a whole number of at least 1, got 0: give the number of dir"
    ):
        features.Scattering(num_angles=0)


@pytest.mark.slow
def test_deskewed_images_are_centred_and_upright_and_depend_on_no_other(tmp_path):
    rows, columns = np.mgrid[:20, :24].astype("float32")

    def stroke(slant, row, column):  # a Gaussian line, whose columns move by `slant` a row
        return np.exp(-(((columns - column - slant * (rows - row)) / 2) ** 2) - ((rows - row) / 4) ** 2)[..., None]

    def moments(image):
        mass = image[..., 0] / image.sum()
        row, column = (mass * rows).sum(), (mass * columns).sum()
        slant = (mass * (rows - row) * (columns - column)).sum() / (mass * (rows - row) ** 2).sum()
        return row, column, slant

    images = np.stack([stroke(0.5, 9, 13), stroke(-0.7, 11, 10), stroke(0, 9.5, 11.5), np.zeros([20, 24, 1])])
    model = tf.keras.Sequential([tf.keras.Input((20, 24, 1)), features.Deskew()])
    upright = model.predict(images, verbose=0)
    assert not model.weights and upright.shape == images.shape and not upright[3].any()
    assert abs(moments(images[0])[2] - 0.5) < 0.05 and abs(moments(images[1])[2] + 0.7) < 0.05
    for i in range(3):
        assert np.allclose(moments(upright[i]), (9.5, 11.5, 0), atol=0.06)
        assert np.allclose(model.predict(images[i : i + 1], verbose=0)[0], upright[i], atol=1e-5)
    assert np.allclose(upright[2], images[2], atol=1e-3)  # what is upright stays
    path = str(tmp_path / "model.keras")
    model.save(path)
    np.testing.assert_array_equal(tf.keras.models.load_model(path).predict(images, verbose=0), upright)
