"""Trains a linear model on fixed features of MNIST with DP-SGD, at ε = 1 and 3.

    python examples/mnist_scattering.py --data-dir FOLDER_WITH_MNIST --epsilon 1 --seeds 3

A scattering network (Mallat 2012) has two layers of wavelets with moduli between them. Its convolutions have formulas
for kernels, so the features cost no ε. They are normalized within each image, which costs none either. The model on
top is linear (Tramèr and Boneh 2021, arXiv:2011.11660). For the data see `mnist_dp_sgd.py`.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl import datasets

ANGLES = 8


def grid(deviation):
    """Rows and columns of a kernel that has room for a Gaussian of this deviation."""
    reach = int(np.ceil(3 * deviation))
    return np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(float)


def low_pass(deviation):
    """[k, k, 1]: a Gaussian of sum 1."""
    rows, columns = grid(deviation)
    kernel = np.exp(-(rows**2 + columns**2) / (2 * deviation**2))
    return kernel[..., None] / kernel.sum()


def morlet(scale):
    """[k, k, 2 * ANGLES]: waves under a Gaussian, twice as long across the wave as along it, of mean 0; first all real
    parts, then all imaginary ones."""
    deviation, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / ANGLES
    rows, columns = grid(deviation / slant)
    kernels = []
    for angle in np.arange(ANGLES) * np.pi / ANGLES:
        along = columns * np.cos(angle) + rows * np.sin(angle)
        across = rows * np.cos(angle) - columns * np.sin(angle)
        window = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
        wave = window * np.exp(1j * frequency * along)
        wave -= window * wave.sum() / window.sum()
        kernels.append(wave * slant / (2 * np.pi * deviation**2))
    return np.concatenate([np.real(kernels), np.imag(kernels)]).transpose(1, 2, 0)


def matrix(kernels, size, stride):
    """[size², channels * (size / stride)²]: a flat image's convolution with kernels [k, k, channels], zero outside.
    On two cores one product with it is several times as fast as TensorFlow's convolutions of one channel."""
    units = np.eye(size**2, dtype="float32").reshape(-1, size, size, 1)
    maps = tf.nn.conv2d(units, kernels[:, :, None].astype("float32"), stride, "SAME")
    return tf.reshape(tf.transpose(maps, [0, 3, 1, 2]), [size**2, -1]).numpy()


class Scattering(tf.keras.layers.Layer):
    """Square images [n, size, size, 1] to [n, size / 4, size / 4, 81]: means of the image, of moduli of its wavelets,
    and of moduli of the wavelets of those. Nothing is trained."""

    def __init__(self, size, **options):
        super().__init__(trainable=False, **options)
        self.size = size
        self.fine, self.coarse = matrix(morlet(0), size, 1), matrix(morlet(1), size, 2)
        self.mean = matrix(low_pass(1.6), size, 4)
        self.mean_of_coarse = matrix(low_pass(0.8), size // 2, 2)

    @staticmethod
    def moduli(images, waves):
        """[n, c, pixels] to [n, c * ANGLES, pixels]."""
        n, c, pixels = tf.shape(images)[0], *images.shape[1:]
        real, imaginary = tf.split(tf.reshape(images, [n * c, pixels]) @ waves, 2, axis=1)
        return tf.reshape(tf.sqrt(real**2 + imaginary**2), [n, c * ANGLES, real.shape[1] // ANGLES])

    def call(self, images):
        image = tf.reshape(images, [tf.shape(images)[0], 1, self.size**2])
        images = tf.concat([image, self.moduli(image, self.fine)], 1)
        features = [images @ self.mean, self.moduli(images, self.coarse) @ self.mean_of_coarse]
        return tf.reshape(tf.transpose(tf.concat(features, 1), [0, 2, 1]), [-1, self.size // 4, self.size // 4, 81])


def features_of(data):
    """The model that makes features [n, count] of images: nothing in it has seen data, nothing is trained."""
    layers, shape = tf.keras.layers, data.x_train.shape[1:]
    norm = layers.GroupNormalization(groups=27, center=False, scale=False, epsilon=1e-9)  # within one image
    return tf.keras.Sequential([tf.keras.Input(shape), Scattering(shape[0]), norm, layers.Flatten()])


def run(data, x_train, x_test, epsilon, delta=1e-5, batch_size=4096, learning_rate=4.0, clip=0.1):
    """(test accuracy, privacy report) of a linear model on features. The settings are those that did best on 10,000
    training images that were held out: what that search would cost in privacy is not in the ε."""
    plan = tfdpfl.plan(
        x_train, data.y_train, target_epsilon=epsilon, delta=delta, l2_norm_clip=clip,
        num_epochs=max(5, round(20 * epsilon)), batch_size=min(batch_size, len(x_train) // 8),
    )  # fmt: skip
    model = tf.keras.Sequential([tf.keras.Input(x_train.shape[1:]), tf.keras.layers.Dense(data.num_classes)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer("sgd", learning_rate=learning_rate, momentum=0.9), loss)
    average = tfdpfl.callbacks.AveragedWeights(decay=0.98)  # costs nothing
    model.fit(plan.batches, epochs=plan.epochs, callbacks=[plan.callback, average], shuffle=False, verbose=0)
    right = model.predict(x_test, batch_size=1000, verbose=0).argmax(1) == data.y_test
    return float(right.mean()), plan.callback.report()


@click.command()
@click.option("--data-dir", envvar="TFDPFL_DATA_DIR", help="Folder with MNIST's idx files.")
@click.option("--epsilon", "epsilons", multiple=True, default=[1.0], show_default=True, help="May be given again.")
@click.option("--seeds", default=1, show_default=True, help="How many runs of each ε.")
@click.option("--quick", is_flag=True, help="Small digits, one run: to see that it runs.")
def main(data_dir, epsilons, seeds, quick):
    data = datasets.load_digits() if quick else datasets.load_image_data(data_dir)
    if quick:
        epsilons, seeds = [1.0], 1
    began = time.perf_counter(), time.process_time()
    model = features_of(data)
    x_train, x_test = (model.predict(x, batch_size=500, verbose=0) for x in (data.x_train, data.x_test))
    spent = time.perf_counter() - began[0], time.process_time() - began[1]
    click.echo(f"{data.name}: {x_train.shape[1]} features in {spent[0]:.0f} s ({spent[1]:.0f} s of CPU time)")
    for epsilon in epsilons:
        accuracies = []
        for seed in range(seeds):
            tf.keras.utils.set_random_seed(seed)  # of the weights; the batches and the noise stay secret
            began = time.perf_counter(), time.process_time()
            accuracy, report = run(data, x_train, x_test, epsilon)
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            accuracies.append(accuracy)
            click.echo(f"ε {report.epsilon:.3f}: {accuracy:.2%} in {spent[0]:.0f} s ({spent[1]:.0f} s of CPU time)")
        low, high = min(accuracies), max(accuracies)
        click.echo(f"mean of {seeds}: {np.mean(accuracies):.2%} ({low:.2%} to {high:.2%})\n\n{report.statement()}\n")


if __name__ == "__main__":
    main()
