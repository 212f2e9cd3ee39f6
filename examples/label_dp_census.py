"""Learns from a survey in which nobody reports the true income for certain.

    python examples/label_dp_census.py --data-dir path/to/data     # UCI's Adult: adult.data and adult.test

The features (age, education, work, …) are public. The label, whether someone earns over 50K, is private. The program
compares logistic regression on labels that were released in several ways. It also estimates from the released labels
how many people earn over 50K. Without the Adult data it uses the breast cancer data of scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

from tfdpfl import datasets
from tfdpfl.label_dp import (
    ForwardCorrectedLoss,
    KMeansPrior,
    MultiStageTraining,
    RandomizedResponse,
    RandomizedResponseWithPrior,
)


def load(data_dir: str | None):
    try:
        return "Adult", *datasets.load_adult(data_dir)
    except FileNotFoundError as error:
        if data_dir:
            raise
        print(f"{error} Taking scikit-learn's breast cancer data.", file=sys.stderr)
        from sklearn.datasets import load_breast_cancer
        from sklearn.model_selection import train_test_split
        from sklearn.preprocessing import StandardScaler

        x, y = load_breast_cancer(return_X_y=True)
        split = train_test_split(StandardScaler().fit_transform(x).astype(np.float32), y, random_state=0, stratify=y)
        return "breast cancer", split[0], split[2], split[1], split[3]


def make_model(columns: int, loss=None) -> tf.keras.Model:
    """Logistic regression."""
    model = tf.keras.Sequential(
        [tf.keras.Input((columns,)), tf.keras.layers.Dense(2, kernel_regularizer=tf.keras.regularizers.L2(1e-4))]
    )
    loss = loss or tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(3e-3), loss)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with the Adult data; default: $TFDPFL_DATA_DIR")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--clusters", type=int, default=50)
    parser.add_argument("--output", default="label_dp_census.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="one budget, one epoch: to see that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epsilons, arguments.epochs, arguments.clusters = [1.0], 1, 5
    name, x, y, x_test, y_test = load(arguments.data_dir)
    batch = max(16, len(x) // 150)
    fit = dict(epochs=arguments.epochs, batch_size=batch, verbose=0)
    columns = x.shape[1]

    def auc(model: tf.keras.Model) -> float:
        logits = model.predict(x_test, verbose=0, batch_size=4096)
        return float(roc_auc_score(y_test, logits[:, 1] - logits[:, 0]))

    def trained(labels: np.ndarray, loss=None) -> float:
        model = make_model(columns, loss)
        model.fit(x, labels, **fit)
        return auc(model)

    def response(epsilon: float):
        mechanism = RandomizedResponse(epsilon, 2)
        noisy = mechanism.fit_transform(y)
        return trained(noisy), noisy, mechanism

    def forward(epsilon: float):
        mechanism = RandomizedResponse(epsilon, 2)
        noisy = mechanism.fit_transform(y)
        return trained(noisy, ForwardCorrectedLoss(epsilon=epsilon, num_classes=2, from_logits=True)), noisy, mechanism

    def prior(epsilon: float):
        mechanism = RandomizedResponseWithPrior(epsilon, KMeansPrior(epsilon / 4, arguments.clusters), 2)
        noisy = mechanism.fit_transform(x, y)
        return trained(noisy), noisy, mechanism

    def stages(epsilon: float):
        mechanism = MultiStageTraining(lambda: make_model(columns), epsilon, num_classes=2)
        mechanism.fit(x, y, **fit)
        return auc(mechanism.model_), mechanism.noisy_labels_, mechanism

    methods = {
        "randomized response": response,
        "RR, forward loss": forward,
        "RR with KMeans prior": prior,
        "LP-MST, two stages": stages,
    }
    plain = trained(y)
    print(f"{name}: {len(x)} examples, {columns} columns; without privacy AUC {plain:.3f}\n")
    rows, counts = [], []
    for epsilon in tqdm(arguments.epsilons, desc="budgets", leave=False):
        for method, run in methods.items():
            score, noisy, mechanism = run(epsilon)
            rows.append((method, epsilon, score, float(np.mean(noisy == y)), mechanism.epsilon_spent))
            if method == "randomized response":
                counts.append((epsilon, mechanism.label_counts(noisy)[1], int(noisy.sum())))

    print(f"{'method':<24}{'ε':>6}{'AUC':>8}{'labels true':>14}{'spent':>8}")
    for method, epsilon, score, true, spent in rows:
        print(f"{method:<24}{epsilon:>6g}{score:>8.3f}{true:>14.1%}{spent:>8.3g}")
    print(f"\nHow many have the label 1 (in truth {int(y.sum())}), from labels by randomized response")
    for epsilon, estimate, raw in counts:
        print(f"  ε {epsilon:<5g} counted as released {raw:>7d}   debiased {estimate:>9.0f}")

    try:
        import matplotlib
    except ImportError:
        print("\nNo picture: matplotlib is missing (pip install tfdpfl[plots]).")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method in methods:
        points = [(row[1], row[2]) for row in rows if row[0] == method]
        axes.plot(*zip(*points, strict=True), marker="o", label=method)
    axes.axhline(plain, color="0.5", linestyle=":", label="no privacy")
    axes.set(xlabel="ε in total", ylabel="test AUC", title=name, xscale="log")
    axes.legend(loc="lower right")
    figure.savefig(arguments.output, dpi=150)
    print(f"\nAUC against ε: {arguments.output}")


if __name__ == "__main__":
    main()
