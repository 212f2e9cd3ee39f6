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


@pytest.mark.slow
def test_patches_are_responses_to_kernels_of_no_data_and_of_one_image_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_DRAWINGS", 100)
    images = np.random.default_rng(0).random((3, 11, 9, 2)).astype("float32")
    images[2, :, :, 0] = 0.25  # flat in one channel
    layer = features.Patches(num_kernels=5, patch_size=3, grid=3, threshold=0.4)
    model = tf.keras.Sequential([tf.keras.Input((11, 9, 2)), layer])
    together = model.predict(images, verbose=0)
    assert together.shape == (3, 3, 3, 10) and not model.trainable_weights
    alone = np.concatenate([model.predict(images[i : i + 1], verbose=0) for i in range(3)])
    assert np.allclose(together, alone, atol=1e-4)
    path = str(tmp_path / "model.keras")
    model.save(path)
    np.testing.assert_array_equal(tf.keras.models.load_model(path).predict(images, verbose=0), together)

    kernels, mean, matrix = (np.asarray(weight, float) for weight in layer.get_weights())
    windows = np.lib.stride_tricks.sliding_window_view(images.astype(float), (3, 3), (1, 2))  # [n, 9, 7, 2, 3, 3]
    patches = np.moveaxis(windows, 3, -1).reshape(3, 9, 7, 18)
    patches = patches - patches.mean(-1, keepdims=True)
    responses = patches / np.sqrt(patches.var(-1, keepdims=True) + 1e-3) @ kernels.reshape(18, 5)
    parts = np.concatenate([np.maximum(responses - 0.4, 0), np.maximum(-responses - 0.4, 0)], -1)
    rows = parts.reshape(3, 3, 3, 7, 10).mean(2)
    shares = np.repeat(np.eye(3), 7, axis=1).reshape(3, 7, 3).sum(-1) / 7  # of each of 7 columns in each of 3 cells
    cells = np.einsum("nrwk,cw->nrck", rows, shares)
    cells /= np.linalg.norm(cells.reshape(3, -1), axis=1)[:, None, None, None]
    assert np.allclose(together, (cells - mean) @ matrix, atol=1e-3)

    # What it learned is of the seed alone, and of no images that it has seen.
    again = features.Patches(num_kernels=5, patch_size=3, grid=3, threshold=0.4)
    again(np.ones([1, 20, 20, 2], "float32"))
    other = features.Patches(num_kernels=5, patch_size=3, grid=3, threshold=0.4, seed=1)
    other(images)
    for mine, same, different in zip(layer.get_weights(), again.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, same)
        assert not np.allclose(mine, different)


def test_kernels_of_patches_respond_with_a_variance_of_one():
    random = np.random.default_rng(0)
    images = features.drawings(200, 1, random)
    kernels = features.patch_kernels(images, 3, 6, random).reshape(9, 6)
    patches = np.lib.stride_tricks.sliding_window_view(images[..., 0], (3, 3), (1, 2)).reshape(-1, 9)
    patches = patches - patches.mean(1, keepdims=True)
    responses = patches / np.sqrt(patches.var(1, keepdims=True) + 1e-3) @ kernels
    assert np.abs(kernels.sum(0)).max() < 1e-4 * np.abs(kernels).sum(0).max()  # a flat patch gives nothing
    assert (responses.var(0) > 0.2).all() and (responses.var(0) < 5).all()


def test_whitening_undoes_so_much_of_the_covariance():
    random = np.random.default_rng(0)
    cells = random.standard_normal((500, 2, 2, 3)) @ random.standard_normal((3, 3)) + 5
    for power in (0.0, 0.5, 1.0):
        mean, matrix = features.whitened(cells, power)
        flat = ((cells - mean) @ matrix).reshape(-1, 3)
        before = (cells - cells.mean(0)).reshape(-1, 3)
        variances = np.linalg.eigvalsh(before.T @ before / len(before))
        assert np.allclose(np.linalg.eigvalsh(flat.T @ flat / len(flat)), variances ** (1 - power))


def test_drawings_are_of_shapes_in_all_channels():
    images = features.drawings(20, 3, np.random.default_rng(0))
    assert images.shape == (20, 30, 30, 3) and np.isfinite(images).all()
    near = np.abs(np.diff(images, axis=1)).mean()
    far = np.abs(images[:, :15] - images[:, 15:]).mean()
    assert near < far / 2  # as in photographs, where neighbours are alike


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_kernels": 0}, "num_kernels must be a whole number of at least 1, got 0"),
        ({"patch_size": 1}, "patch_size must be a whole number of at least 2, got 1"),
        ({"grid": 0}, "grid must be a whole number of at least 1, got 0"),
        ({"threshold": -1.0}, "threshold"),
        ({"power": -1.0}, "power"),
        ({"patch_size": 31}, "patch_size=31 and num_kernels=400 are too many for drawings of 30"),
    ],
)
def test_patches_refuse_what_gives_no_features(arguments, told):
    with pytest.raises(ValueError, match=told):
        features.Patches(**arguments)
