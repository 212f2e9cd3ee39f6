"""Compares banded noise with DP-SGD on MNIST at the same ε, with the same model, batches and steps.

    python examples/mnist_banded.py --data-dir FOLDER_WITH_MNIST --seeds 3

Both train on Poisson samples. DP-SGD draws each sample from all examples, and its noise is fresh in every step.
Banded noise (Choquette-Choo et al. 2023, arXiv:2306.08153) bounds participation: there are as many groups of examples
as bands, and batches come from one group after the other. Each step subtracts some of the noise of the steps before.
So the weights, which follow the sum of all steps, have less noise. Both ε are for one example more or less.

If you pass neither --data-dir nor TFDPFL_DATA_DIR, Keras downloads MNIST. Without a network the program uses the
digits of scikit-learn. It prints the test accuracy of every run and the privacy statements, and draws a picture.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from tqdm import tqdm

import tfdpfl
from tfdpfl import datasets, plots


def build_model(shape: tuple[int, ...], num_classes: int) -> tf.keras.Model:
    """A network of 270,000 weights: the more there are, the more noise there is to take back."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape),
            layers.Flatten(),
            layers.Dense(256, activation="tanh"),
            layers.Dense(256, activation="tanh"),
            layers.Dense(num_classes),
        ]
    )


class Bar(tf.keras.callbacks.Callback):
    """Moves a progress bar by a step."""

    def __init__(self, bar: tqdm):
        super().__init__()
        self.bar = bar

    def on_train_batch_end(self, batch, logs=None):
        self.bar.update()


def train(data: datasets.ImageData, bands: int, given: argparse.Namespace, bar: tqdm):
    """Test accuracy after each epoch, and the report, of a training with so many bands; 1 is DP-SGD."""
    n = len(data.x_train)
    steps = n // given.batch_size // bands * bands  # of an epoch
    rounds = steps * given.epochs // bands  # of the groups, in each of which an example may be once
    sigma = tfdpfl.compute_noise_multiplier(
        target_epsilon=given.epsilon, delta=given.delta, num_examples=n, batch_size=given.batch_size * bands,
        num_steps=rounds,
    )  # fmt: skip
    pairs = (data.x_train, data.y_train)
    noise, batches = None, None
    if bands == 1:
        batches = tfdpfl.data.poisson_batches(pairs, expected_batch_size=given.batch_size, steps=steps)
    else:
        noise = tfdpfl.noise.Banded(
            bands=bands, min_separation=bands, max_participations=1, num_steps=steps * given.epochs
        )
        batches = tfdpfl.data.cyclic_poisson(pairs, steps, groups=bands, expected_batch_size=given.batch_size)
    model = build_model(data.x_train.shape[1:], data.num_classes)
    model.compile(
        tfdpfl.DPSGD(
            given.clip, sigma, noise=noise, expected_batch_size=given.batch_size, learning_rate=given.learning_rate,
            momentum=given.momentum,
        ),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )  # fmt: skip
    budget = tfdpfl.callbacks.PrivacyBudget(n, given.delta, given.epsilon * (1 + 1e-6))
    log = model.fit(
        batches, epochs=given.epochs, validation_data=(data.x_test, data.y_test), validation_batch_size=1000,
        callbacks=[budget, Bar(bar)], verbose=0,
    )  # fmt: skip
    return log.history["val_accuracy"], budget.report()


def draw(curves: dict[str, np.ndarray], given: argparse.Namespace, name: str) -> None:
    """Accuracy over the epochs, [seeds, epochs] for each noise; the title says who is ahead at the end."""
    (ax,) = plots.panels(1)
    ends = {label: 100 * runs[:, -1].mean() for label, runs in curves.items()}
    for label, runs in curves.items():
        epochs, mean = np.arange(1, runs.shape[1] + 1), 100 * runs.mean(0)
        (line,) = ax.plot(epochs, mean, marker="o", label=f"{label}: {ends[label]:.1f} %")
        ax.fill_between(epochs, 100 * runs.min(0), 100 * runs.max(0), color=line.get_color(), alpha=0.2, lw=0)
    (plain, low), (banded, high) = ends.items()
    verdict = f"{high - low:.1f} points above" if high > low else f"{low - high:.1f} points below"
    ax.set_title(f"{name} at ε = {given.epsilon:g}: {banded} is {verdict} {plain}", fontsize=10)
    ax.set_xlabel("epoch")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel("test accuracy (%)")
    ax.legend(loc="lower right", title=f"mean of {given.seeds} runs; range shaded")
    ax.figure.savefig(given.output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="a folder with MNIST; default: $TFDPFL_DATA_DIR, else a download")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--bands", type=int, default=8, help="of the noise, and groups of the examples")
    parser.add_argument("--batch-size", type=int, default=500, help="expected, of both")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0, help="L2 norm of one example's gradient")
    parser.add_argument("--learning-rate", type=float, default=0.4)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs to average")
    parser.add_argument("--output", default="mnist_banded.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="one epoch of small digits: to see that it runs")
    given = parser.parse_args()
    if given.quick:
        given.batch_size, given.epochs, given.bands, given.seeds = 50, 1, 2, 1
    folder = given.data_dir or os.environ.get("TFDPFL_DATA_DIR")
    data = datasets.load_digits() if given.quick else datasets.load_image_data(folder)
    given.batch_size = min(given.batch_size, len(data.x_train) // (4 * given.bands))
    methods = {"DP-SGD": 1, f"noise of {given.bands} bands": given.bands}
    runs: dict[str, list] = {label: [] for label in methods}
    reports = {}
    total = len(data.x_train) // given.batch_size * given.epochs * len(methods) * given.seeds
    with tqdm(total=total, unit="step") as bar:
        for seed in range(given.seeds):
            for label, bands in methods.items():
                tf.keras.utils.set_random_seed(seed)  # of the weights; the batches and the noise stay secret
                accuracies, reports[label] = train(data, bands, given, bar)
                runs[label].append(accuracies)
                bar.write(f"{data.name}, seed {seed}, {label}: test accuracy {accuracies[-1]:.2%}")
    for label, report in reports.items():
        ends = [accuracies[-1] for accuracies in runs[label]]
        print(f"\n{label}: {np.mean(ends):.2%} (mean of {given.seeds}, {min(ends):.2%} to {max(ends):.2%})")
        print(report.statement())
    draw({label: np.array(accuracies) for label, accuracies in runs.items()}, given, data.name)
    print(f"\nwrote {given.output}")


if __name__ == "__main__":
    main()
