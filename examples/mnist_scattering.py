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


def features_of(data):
    """The model that makes features [n, count] of images: nothing in it has seen data, nothing is trained."""
    layers, shape = tf.keras.layers, data.x_train.shape[1:]
    norm = layers.GroupNormalization(groups=27, center=False, scale=False, epsilon=1e-9)  # within one image
    return tf.keras.Sequential([tf.keras.Input(shape), tfdpfl.features.Scattering(), norm, layers.Flatten()])


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
