"""Features of images that learn nothing from data, so that they cost no ε."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tfdpfl.accounting import _checks

__all__ = ["Deskew", "Patches", "Scattering"]


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


_DRAWINGS, _DRAWN_SIZE, _PER_DRAWING = 2000, 30, 25  # the world that kernels of patches are learned from
_AT_A_TIME, _MOST_KERNELS = 100, 10_000
_FLAT = 1e-3  # added to a patch's variance, so that noise in flat patches is not blown up


def drawings(count: int, channels: int, random: np.random.Generator) -> np.ndarray:
    """Returns made-up images `[count, 30, 30, channels]` of shapes that hide each other ("dead leaves").

    Ellipses and boxes of all sizes, of which most are small, lie on top of each other at random places, each of one
    colour. Their statistics are like those of photographs (Lee, Mumford and Huang 2001).
    """
    rows, columns = np.mgrid[: _DRAWN_SIZE + 2, : _DRAWN_SIZE + 2].astype("float32")
    images = np.empty((count, _DRAWN_SIZE + 2, _DRAWN_SIZE + 2, channels), "float32")
    for image in images:
        base = random.random(channels)
        image[:] = np.clip(base + 0.35 * random.standard_normal(channels), 0, 1)
        for _ in range(60):
            size = 2 / np.sqrt(1 - random.random() * (1 - (2 / _DRAWN_SIZE) ** 2))  # density of size⁻³
            column, row = random.uniform(-4, _DRAWN_SIZE + 6, 2)
            angle, ratio = random.uniform(0, np.pi), random.uniform(0.4, 1)
            along = (columns - column) * np.cos(angle) + (rows - row) * np.sin(angle)
            across = (rows - row) * np.cos(angle) - (columns - column) * np.sin(angle)
            if random.random() < 0.5:
                inside = (abs(along) < size) & (abs(across) < size * ratio)
            else:
                inside = along**2 + (across / ratio) ** 2 < size**2
            brightness, tint = 0.3 * random.standard_normal(), 0.15 * random.standard_normal(channels)
            shade = 1 + 0.01 * random.standard_normal() * along[inside, None]
            image[inside] = (base + brightness + tint) * shade
    for axis in (1, 2):  # as a lens does
        images = np.roll(images, 1, axis) / 4 + images / 2 + np.roll(images, -1, axis) / 4
    return images[:, 1:-1, 1:-1]


def patch_kernels(images: np.ndarray, size: int, count: int, random: np.random.Generator) -> np.ndarray:
    """Returns kernels `[size, size, channels, count]` for patches of mean 0 and variance 1, learned from images.

    Spherical k-means finds them among whitened patches (Coates, Lee and Ng 2011). The responses to the images have a
    variance of about 1.
    """
    patches = []
    for _ in range(_PER_DRAWING):
        row, column = random.integers(0, _DRAWN_SIZE - size + 1, 2)
        patches.append(images[:, row : row + size, column : column + size].reshape(len(images), -1))
    flat = np.concatenate(patches)
    flat -= flat.mean(axis=1, keepdims=True)
    flat = flat[flat.var(axis=1) > _FLAT]  # the rest is rounding
    flat /= np.sqrt(flat.var(axis=1, keepdims=True) + _FLAT)
    variances, directions = np.linalg.eigh(flat.T.astype(float) @ flat / len(flat))
    whiten = (directions / np.sqrt(np.maximum(variances, 0) + 0.1)) @ directions.T
    points = (flat @ whiten).astype("float32")
    points /= np.linalg.norm(points, axis=1, keepdims=True) + 1e-6
    centres = points[random.choice(len(points), count, replace=False)]
    for _ in range(8):
        nearest, sums = (points @ centres.T).argmax(axis=1), np.zeros_like(centres)
        np.add.at(sums, nearest, points)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        others = points[random.choice(len(points), count, replace=False)]  # for centres that no patch is near to
        centres = np.where(lengths > 1e-3, sums / np.maximum(lengths, 1e-3), others)
    return (whiten @ centres.T).reshape(size, size, -1, count).astype("float32")


def whitened(cells: np.ndarray, power: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means `[rows, columns, k]` of cells `[n, rows, columns, k]`, and the matrix `[k, k]` that undoes so
    much of the covariance of all cells together."""
    mean = cells.mean(axis=0)
    flat = (cells - mean).reshape(-1, cells.shape[-1])
    variances, directions = np.linalg.eigh(flat.T @ flat / len(flat))
    least = max(1e-4 * variances.mean(), 1e-12)  # directions that the drawings hardly have are not blown up
    return mean, (directions * np.maximum(variances, least) ** (-power / 2)) @ directions.T


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class Patches(tf.keras.layers.Layer):
    """Turns images into means of how much their patches resemble small shapes and edges (Coates and Ng 2011).

    Each patch is brought to mean 0 and variance 1. Kernels of the patch's size give responses, of which two parts are
    kept: by how much a response is above the threshold, and by how much it is below minus the threshold. Means of both
    are taken in the cells of a grid, and brought to length 1 for each image. Then the layer subtracts means, and
    decorrelates the features of a cell. Kernels, means and covariances are learned from drawings that the layer makes:
    ellipses and boxes that hide each other. It needs seconds for that, once.

    Args:
        num_kernels: How many kernels.
        patch_size: Rows and columns of a patch.
        grid: Rows and columns of the grid of cells.
        threshold: The response below which nothing is passed on; responses to drawings have a variance of about 1.
        power: How much of the covariance of the drawings' features is undone: 1 decorrelates, 0 centres alone.
        seed: Of the drawings. It is no secret: they have nothing to do with your data.
        **options: Those of `tf.keras.layers.Layer`.

    Input: images `[n, height, width, channels]`, floats from 0 to 1, of at least `patch_size` rows and columns.
    Output: `[n, grid, grid, 2 · num_kernels]`.

    Guarantee:
        The features of an image depend on this image alone, and what is learned on no data: they cost no ε, and change
        neither the neighbours nor the sampling of a training on them.

    Example:
        >>> layer = tfdpfl.features.Patches(num_kernels=20)
        >>> layer(np.zeros([2, 32, 32, 3], "float32")).shape
        TensorShape([2, 4, 4, 40])
    """

    def __init__(
        self, num_kernels: int = 400, patch_size: int = 6, grid: int = 4, threshold: float = 0.65,
        power: float = 0.8, seed: int = 0, **options,
    ):  # fmt: skip
        super().__init__(**{"trainable": False, **options})
        self.num_kernels = _checks.whole("num_kernels", num_kernels, 1, "give the number of kernels, such as 400")
        self.patch_size = _checks.whole("patch_size", patch_size, 2, "give the rows of a patch, such as 6")
        self.grid = _checks.whole("grid", grid, 1, "give the rows of the grid of cells, such as 4")
        self.threshold = _checks.real(
            "threshold", threshold, "give what a response must pass, such as 0.65", at_least=0
        )
        self.power = _checks.real("power", power, "1 decorrelates, 0 centres alone", at_least=0)
        self.seed = _checks.whole("seed", seed, 0, "give the number that the drawings start from")
        if self.patch_size > _DRAWN_SIZE or self.num_kernels > _MOST_KERNELS:
            raise ValueError(
                f"patch_size={patch_size} and num_kernels={num_kernels} are too many for drawings of {_DRAWN_SIZE} "
                f"rows and columns, whose patches give at most {_MOST_KERNELS} kernels. Give no more than that."
            )

    def build(self, input_shape):
        """Learns from drawings, into weights, so that a saved layer keeps its own."""
        channels, size, width = input_shape[-1], self.patch_size, 2 * self.num_kernels
        if channels is None:
            raise ValueError("Patches needs to know the number of channels. Give tf.keras.Input((32, 32, 3)).")
        weight = functools.partial(self.add_weight, initializer="zeros", trainable=False)
        self.kernels = weight(name="kernels", shape=(size, size, channels, self.num_kernels))
        self.mean = weight(name="mean", shape=(self.grid, self.grid, width))
        self.matrix = weight(name="matrix", shape=(width, width))
        with tf.init_scope():
            random = np.random.default_rng(self.seed)
            images = drawings(_DRAWINGS, channels, random)
            self.kernels.assign(patch_kernels(images, size, self.num_kernels, random))
            cells = [self._cells(tf.constant(images[i : i + _AT_A_TIME])) for i in range(0, _DRAWINGS, _AT_A_TIME)]
            mean, matrix = whitened(np.concatenate(cells).astype(float), self.power)
            self.mean.assign(mean)
            self.matrix.assign(matrix)
        self.built = True

    def call(self, images):
        """Returns the features of images."""
        cells = self._cells(tf.convert_to_tensor(images, self.compute_dtype))
        return tf.tensordot(cells - tf.cast(self.mean, cells.dtype), tf.cast(self.matrix, cells.dtype), 1)

    def _cells(self, images):
        """The means of the cells, of length 1 for each image."""
        kernels = tf.cast(self.kernels, images.dtype)
        mean = self._mean_of_patches(images)
        variance = tf.maximum(self._mean_of_patches(images**2) - mean**2, 0)
        product = tf.nn.conv2d(images, kernels, 1, "VALID")
        response = (product - mean * tf.reduce_sum(kernels, [0, 1, 2])) / tf.sqrt(variance + _FLAT)
        above = [tf.nn.relu(side * response - self.threshold) for side in (1, -1)]
        cells = [tf.image.resize(each, [self.grid, self.grid], method="area") for each in above]
        return tf.math.l2_normalize(tf.concat(cells, -1), axis=[1, 2, 3])

    def _mean_of_patches(self, images):
        kernel = tf.ones([self.patch_size, self.patch_size, images.shape[-1], 1], images.dtype)
        return tf.nn.conv2d(images, kernel / tf.cast(tf.size(kernel), images.dtype), 1, "VALID")

    def compute_output_shape(self, input_shape):
        """Returns the shape of the features."""
        return (input_shape[0], self.grid, self.grid, 2 * self.num_kernels)

    def get_config(self):
        """Returns what Keras saves."""
        names = ("num_kernels", "patch_size", "grid", "threshold", "power", "seed")
        return super().get_config() | {name: getattr(self, name) for name in names}
