"""Features of images that are formulas: they learn nothing, so they cost no ε."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdpfl.accounting import _checks

__all__ = ["Deskew", "Scattering"]


def _grid(deviation: float) -> np.ndarray:
    """Rows and columns of a kernel that has room for a Gaussian of this deviation."""
    reach = int(np.ceil(3 * deviation))
    return np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(float)


def low_pass(deviation: float) -> np.ndarray:
    """Returns a Gaussian of sum 1, [k, k, 1, 1]."""
    rows, columns = _grid(deviation)
    kernel = np.exp(-(rows**2 + columns**2) / (2 * deviation**2))
    return kernel[..., None, None] / kernel.sum()


def morlet(scale: int, num_angles: int) -> np.ndarray:
    """Returns waves under a Gaussian, twice as long across the wave as along it, of mean 0.

    The shape is [k, k, 1, 2 * num_angles]: all real parts, then all imaginary ones.
    """
    deviation, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 0.5
    rows, columns = _grid(deviation / slant)
    kernels = []
    for angle in np.arange(num_angles) * np.pi / num_angles:
        along = columns * np.cos(angle) + rows * np.sin(angle)
        across = rows * np.cos(angle) - columns * np.sin(angle)
        window = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
        wave = window * np.exp(1j * frequency * along)
        wave -= window * wave.sum() / window.sum()
        kernels.append(wave * slant / (2 * np.pi * deviation**2))
    return np.concatenate([np.real(kernels), np.imag(kernels)]).transpose(1, 2, 0)[:, :, None]


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class Scattering(tf.keras.layers.Layer):
    """Turns images into local means of their wavelets' moduli, of two layers (Mallat 2012).

    Args:
        num_angles: The directions of the wavelets, L.
        **options: Those of `tf.keras.layers.Layer`.

    Input: images `[n, height, width, channels]`, floats of any sizes.
    Output: `[n, ⌈height / 4⌉, ⌈width / 4⌉, channels · (1 + L)²]`: for each channel the mean of the image, of the moduli
    of L fine wavelets, and of the moduli of L coarse wavelets of all these. Memory is that of one batch.

    Guarantee:
        The features of an image depend on this image alone, and nothing is trained: they cost no ε, and change neither
        the neighbours nor the sampling of a training on them.

    Example:
        >>> layer = tfdpfl.features.Scattering()
        >>> layer(np.zeros([2, 32, 32, 3], "float32")).shape
        TensorShape([2, 8, 8, 243])
    """

    def __init__(self, num_angles: int = 8, **options):
        super().__init__(**{"trainable": False, **options})
        self.num_angles = _checks.whole("num_angles", num_angles, 1, "give the number of directions, such as 8")
        self._fine, self._coarse = (morlet(scale, self.num_angles) for scale in (0, 1))

    def call(self, images):
        """Returns the features of images."""
        images = tf.convert_to_tensor(images, self.compute_dtype)
        each = self._apart(images)  # [n * channels, height, width, 1]
        first = tf.concat([each, self._moduli(each, self._fine, 1)], -1)
        apart = self._apart(first)
        second = self._apart(self._moduli(apart, self._coarse, 2))
        means = [self._convolved(apart, low_pass(1.6), 4), self._convolved(second, low_pass(0.8), 2)]
        rows, columns = means[0].shape[1:3]
        means = [tf.reshape(mean, [tf.shape(each)[0], -1, rows, columns]) for mean in means]
        together = tf.reshape(tf.concat(means, 1), [tf.shape(images)[0], -1, rows, columns])
        return tf.ensure_shape(tf.transpose(together, [0, 2, 3, 1]), self.compute_output_shape(images.shape))

    @staticmethod
    def _apart(maps):
        """[n, rows, columns, channels] to [n * channels, rows, columns, 1]."""
        return tf.reshape(tf.transpose(maps, [0, 3, 1, 2]), [-1, *maps.shape[1:3], 1])

    @staticmethod
    def _convolved(maps, kernels, stride):
        return tf.nn.conv2d(maps, tf.cast(kernels, maps.dtype), stride, "SAME")

    def _moduli(self, maps, waves, stride):
        real, imaginary = tf.split(self._convolved(maps, waves, stride), 2, axis=-1)
        return tf.sqrt(real**2 + imaginary**2)

    def compute_output_shape(self, input_shape):
        """Returns the shape of the features."""
        n, rows, columns, channels = input_shape
        return (n, -(-rows // 4), -(-columns // 4), channels * (1 + self.num_angles) ** 2)

    def get_config(self):
        """Returns what Keras saves."""
        return super().get_config() | {"num_angles": self.num_angles}


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class Deskew(tf.keras.layers.Layer):
    """Centres images and shears them upright, by the moments of their own pixels.

    The pixels count as masses, so the background must be 0, as in images of handwriting. Each row is moved by as much
    as its distance from the centre times the slant of the mass. Channels are moved alike.

    Args:
        **options: Those of `tf.keras.layers.Layer`.

    Input: images `[n, height, width, channels]`, floats of at least 0.
    Output: images of the same shape.

    Guarantee:
        An image depends on itself alone, and nothing is trained: this costs no ε.

    Example:
        >>> layer = tfdpfl.features.Deskew()
        >>> layer(np.zeros([2, 28, 28, 1], "float32")).shape
        TensorShape([2, 28, 28, 1])
    """

    def __init__(self, **options):
        super().__init__(**{"trainable": False, **options})

    def call(self, images):
        """Returns the images, upright."""
        images = tf.convert_to_tensor(images, tf.float32)
        height, width = images.shape[1:3]
        mass = tf.reduce_sum(images, -1) + 1e-6 / (height * width)
        mass /= tf.reduce_sum(mass, [1, 2], keepdims=True)
        rows, columns = tf.range(height, dtype=tf.float32)[:, None], tf.range(width, dtype=tf.float32)[None]
        row, column = (tf.reduce_sum(mass * places, [1, 2], keepdims=True) for places in (rows, columns))
        mixed, square = (
            tf.reduce_sum(mass * (rows - row) * away, [1, 2], keepdims=True) for away in (columns - column, rows - row)
        )
        slant = mixed / (square + 1e-6)
        middle, centre = (height - 1) / 2, (width - 1) / 2
        ones, zeros = tf.ones_like(slant), tf.zeros_like(slant)
        # Of each pixel of the output: the column and the row of the input that it shows.
        moves = [ones, slant, column - centre - slant * middle, zeros, ones, row - middle, zeros, zeros]
        return tf.ensure_shape(
            tf.raw_ops.ImageProjectiveTransformV3(
                images=images, transforms=tf.concat(moves, 1)[..., 0], output_shape=[height, width], fill_value=0.0,
                interpolation="BILINEAR", fill_mode="CONSTANT",
            ), images.shape,
        )  # fmt: skip

    def compute_output_shape(self, input_shape):
        """Returns the shape of the images."""
        return tuple(input_shape)
