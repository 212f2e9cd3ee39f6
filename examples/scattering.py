"""Trains a linear model on fixed features of images with DP-SGD.

    python examples/scattering.py --data-dir FOLDER_WITH_MNIST --epsilon 1 --seeds 3
    python examples/scattering.py --images FOLDER --epsilon 3     # a folder of images for each class

The features learn nothing from the images, so they cost no ε. For digits, which are first centred and sheared upright,
they are those of a scattering network (Mallat 2012): two layers of wavelets with moduli between them, normalized
within each image. `Whitening` then decorrelates them by covariances that it learns with noise, from a fifth of ε. For
`--images` they tell how much patches of an image, and of its mirror image, resemble small shapes of made-up drawings.
The model on top is linear (Tramèr and Boneh 2021, arXiv:2011.11660). Of `--images` a fifth is held out as test
images. For MNIST see `mnist_dp_sgd.py`.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl import datasets


def load_images(folder, size):
    """Images of a folder for each class, in [0, 1], of which a fifth is held out."""
    parts = tf.keras.utils.image_dataset_from_directory(
        folder, validation_split=0.2, subset="both", seed=0, image_size=(size, size), batch_size=1000, verbose=False
    )
    arrays = [np.concatenate(column) for part in parts for column in zip(*part.as_numpy_iterator(), strict=True)]
    x_train, y_train, x_test, y_test = arrays
    return datasets.ImageData(folder, x_train / 255, y_train, x_test / 255, y_test, len(parts[0].class_names))


def features_of(data):
    """The model that makes features [n, rows, columns, count] of images: nothing in it has seen data or is trained."""
    layers, shape = tf.keras.layers, data.x_train.shape[1:]
    images = tf.keras.Input(shape)
    if shape[-1] == 1:
        scattering = tfdpfl.features.Scattering()(tfdpfl.features.Deskew()(images))
        norm = layers.GroupNormalization(groups=27, center=False, scale=False, epsilon=1e-9)  # within one image
        return tf.keras.Model(images, norm(scattering))
    patches = tfdpfl.features.Patches()
    both = layers.average([patches(images), patches(layers.Lambda(lambda image: image[:, :, ::-1])(images))])
    return tf.keras.Model(images, layers.UnitNormalization(axis=[1, 2, 3])(both))


def mapped(model, x):
    """What the model makes of x, in half precision: this takes most of the memory."""
    return np.concatenate([np.float16(model.predict_on_batch(x[i : i + 100])) for i in range(0, len(x), 100)])


def whitened(x_train, x_test, power, **cost):
    """Centres and decorrelates features, as learnt with noise, and gives each image the norm 1."""
    learnt = tfdpfl.preprocessing.Whitening(power)
    learnt.adapt(x_train, l2_norm_clip=np.sqrt(x_train[0].size), **cost)  # within one image the variance is 1
    layers = [tf.keras.Input(x_train.shape[1:]), learnt, tf.keras.layers.Flatten(), tf.keras.layers.UnitNormalization()]
    model = tf.keras.Sequential(layers)
    return mapped(model, x_train), mapped(model, x_test)


def run(data, x_train, x_test, epsilon, delta=1e-5):
    """(test accuracy, privacy report) of a linear model on features. The settings are those that did best on images
    that were held out: what that search would cost in privacy is not in the ε."""
    n, ledger = len(x_train), tfdpfl.PrivacyLedger()
    if data.x_train.shape[-1] == 1:
        clip, epochs, batch_size, decay = 0.1, 20 * epsilon, 4096, 0.9
        x_train, x_test = whitened(x_train, x_test, 0.7, epsilon=epsilon / 5, delta=delta / 10, ledger=ledger)
    else:
        clip, epochs, batch_size, decay = 0.3, 40, 8192, 0.95
    plan = tfdpfl.plan(
        x_train, data.y_train, target_epsilon=epsilon, delta=delta, l2_norm_clip=clip, num_epochs=max(5, round(epochs)),
        batch_size=min(batch_size, n // 6), ledger=ledger,
    )  # fmt: skip
    layers = [tf.keras.Input(x_train.shape[1:]), tf.keras.layers.Flatten(), tf.keras.layers.Dense(data.num_classes)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer("sgd", learning_rate=n / 1000, momentum=0.9), loss)
    average = tfdpfl.callbacks.AveragedWeights(decay=decay)  # costs nothing
    model.fit(plan.batches, epochs=plan.epochs, callbacks=[plan.callback, average], shuffle=False, verbose=0)
    right = model.predict(x_test, batch_size=1000, verbose=0).argmax(1) == data.y_test
    tf.keras.backend.clear_session()  # else the features of this run stay in memory
    return float(right.mean()), plan.callback.report()


@click.command()
@click.option("--data-dir", envvar="TFDPFL_DATA_DIR", help="Folder with MNIST's idx files.")
@click.option("--images", help="Folder with a folder of images for each class, in place of MNIST.")
@click.option("--size", default=32, show_default=True, help="Rows and columns of the images of --images.")
@click.option("--epsilon", "epsilons", multiple=True, default=[1.0], show_default=True, help="May be given again.")
@click.option("--seeds", default=1, show_default=True, help="How many runs of each ε.")
@click.option("--quick", is_flag=True, help="Small digits, one run: to see that it runs.")
def main(data_dir, images, size, epsilons, seeds, quick):
    if quick:
        data, epsilons, seeds = datasets.load_digits(), [1.0], 1
    else:
        data = load_images(images, size) if images else datasets.load_image_data(data_dir)
    began = time.perf_counter(), time.process_time()
    model = features_of(data)
    x_train, x_test = mapped(model, data.x_train), mapped(model, data.x_test)
    spent = time.perf_counter() - began[0], time.process_time() - began[1]
    click.echo(f"{data.name}: {x_train[0].size} features in {spent[0]:.0f} s ({spent[1]:.0f} s of CPU time)")
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
