"""Trains MNIST with DP-SGD at ε = 1 and δ = 1e-5, with Poisson batches and noise that fits the budget.

    python examples/mnist_dp_sgd.py --data-dir FOLDER_WITH_MNIST --seeds 3

If you pass neither --data-dir nor TFDPFL_DATA_DIR, Keras downloads MNIST. Without a network the program uses the
digits of scikit-learn. It prints test accuracy and time for every seed, their mean, and the privacy statement.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl import datasets


def build_model(shape, num_classes):
    """The network of TensorFlow Privacy's MNIST tutorial, with tanh: bounded activations suit clipped gradients."""
    layers = tf.keras.layers
    small = shape[0] < 16  # scikit-learn's digits
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape),
            layers.Conv2D(16, 8, strides=1 if small else 2, padding="same", activation="tanh"),
            layers.MaxPooling2D(2, 1),
            layers.Conv2D(32, 2 if small else 4, strides=2, activation="tanh"),
            layers.MaxPooling2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.Dense(num_classes),
        ]
    )


@click.command()
@click.option("--data-dir", envvar="TFDPFL_DATA_DIR", help="Folder with MNIST's idx files.")
@click.option("--epsilon", default=1.0, show_default=True)
@click.option("--delta", default=1e-5, show_default=True)
@click.option("--batch-size", default=2000, show_default=True, help="Expected size of the Poisson batches.")
@click.option("--epochs", default=30, show_default=True)
@click.option("--learning-rate", default=4e-3, show_default=True)
@click.option("--clip", default=0.5, show_default=True, help="L2 norm of one example's gradient.")
@click.option("--seeds", default=1, show_default=True, help="How many runs to average.")
@click.option("--verbose", default=1, show_default=True, help="Keras's verbosity.")
@click.option("--quick", is_flag=True, help="One epoch of small digits: to see that it runs.")
def main(data_dir, epsilon, delta, batch_size, epochs, learning_rate, clip, seeds, verbose, quick):
    if quick:
        batch_size, epochs, seeds = 50, 1, 1
    data = datasets.load_digits() if quick else datasets.load_image_data(data_dir)
    n = len(data.x_train)
    batch_size = min(batch_size, n // 4)
    steps = n // batch_size
    sigma = tfdpfl.compute_noise_multiplier(
        target_epsilon=epsilon, num_examples=n, batch_size=batch_size, delta=delta, num_steps=steps * epochs
    )
    click.echo(f"{data.name}: {n} examples, {steps * epochs} steps, noise_multiplier {sigma:.4f}")
    accuracies, seconds = [], []
    for seed in range(seeds):
        tf.keras.utils.set_random_seed(seed)  # of the weights; the batches and the noise stay secret
        model = build_model(data.x_train.shape[1:], data.num_classes)
        model.compile(
            optimizer=tfdpfl.DPAdam(
                l2_norm_clip=clip,
                noise_multiplier=sigma,
                expected_batch_size=batch_size,
                learning_rate=learning_rate,
            ),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        budget = tfdpfl.callbacks.PrivacyBudget(num_examples=n, delta=delta, target_epsilon=epsilon)
        batches = tfdpfl.data.poisson_batches((data.x_train, data.y_train), expected_batch_size=batch_size, steps=steps)
        began = time.perf_counter()
        model.fit(batches, epochs=epochs, callbacks=[budget], verbose=verbose)
        seconds.append(time.perf_counter() - began)
        accuracies.append(model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)[1])
        click.echo(f"seed {seed}: test accuracy {accuracies[-1]:.2%} in {seconds[-1]:.0f} s")
    spread = f" (±{np.std(accuracies, ddof=1):.2%} over seeds)" if seeds > 1 else ""
    click.echo(f"mean of {seeds}: {np.mean(accuracies):.2%}{spread}, {np.mean(seconds):.0f} s a run\n")
    click.echo(budget.report().statement())


if __name__ == "__main__":
    main()
