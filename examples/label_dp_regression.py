"""Releases private numbers as labels: by bins, without bias, or with plain Laplace noise.

    python examples/label_dp_regression.py                          # scikit-learn's diabetes data
    python examples/label_dp_regression.py --data-dir path/to/data  # the age column of UCI's Adult, from the others

The program prints the error of the released labels and of ridge regression that is trained on them, and draws both.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from tfdpfl import datasets
from tfdpfl.label_dp import RROnBins, UnbiasedRandomizer


def load(data_dir: str | None):
    """Name, features, labels, and the range that labels can have, which is known beforehand."""
    if data_dir or os.environ.get(datasets.DATA_DIR_VARIABLE):
        x, _, _, _ = datasets.load_adult(data_dir)
        age = np.round((x[:, 0] - x[:, 0].min()) * 13.64 + 17)  # the column is standardised; ages are 17 to 90
        return "Adult, age", x[:, 1:], age.astype(float), (17.0, 90.0)
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return "diabetes", x, y, (0.0, 350.0)


def laplace(epsilon: float, values: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What one would do without this package."""
    return y + np.random.default_rng().laplace(scale=np.ptp(values) / epsilon, size=len(y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with the Adult data; default: $TFDPFL_DATA_DIR, else diabetes")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default="label_dp_regression.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="one budget, once: to see that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epsilons, arguments.repeats = [1.0], 1
    name, features, labels, (low, high) = load(arguments.data_dir)
    x, x_test, y, y_test = train_test_split(features, labels, random_state=0)
    y = np.clip(y, low, high)
    fine, coarse = np.linspace(low, high, 71), np.linspace(low, high, 25)
    methods = {
        "RR on bins": lambda e: RROnBins(e, prior_epsilon=e / 5, values=fine).fit_transform(y),
        "unbiased": lambda e: UnbiasedRandomizer(e, prior_epsilon=e / 5, values=coarse).fit_transform(y),
        "Laplace noise": lambda e: laplace(e, fine, y),
    }

    def rmse(labels: np.ndarray) -> float:
        model = Ridge(alpha=1.0).fit(x, labels)
        return float(np.sqrt(np.mean((model.predict(x_test) - y_test) ** 2)))

    plain = rmse(y)
    constant = float(np.std(y_test))
    print(f"{name}: {len(x)} examples; test RMSE without privacy {plain:.2f}, of a constant {constant:.2f}\n")
    rows = []
    for epsilon in tqdm(arguments.epsilons, desc="budgets", leave=False):
        for method, release in methods.items():
            errors, tests = [], []
            for _ in range(arguments.repeats):
                noisy = release(epsilon)
                errors.append(np.sqrt(np.mean((noisy - y) ** 2)))
                tests.append(rmse(noisy))
            rows.append((method, epsilon, np.mean(errors), np.mean(tests), np.std(tests)))
    print(f"{'method':<16}{'ε':>6}{'RMSE of labels':>17}{'test RMSE':>20}")
    for method, epsilon, error, test, spread in rows:
        print(f"{method:<16}{epsilon:>6g}{error:>17.1f}{test:>13.2f} ± {spread:.2f}")

    try:
        import matplotlib
    except ImportError:
        print("\nNo picture: matplotlib is missing (pip install tfdpfl[plots]).")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for method in methods:
        budgets, error, test, spread = zip(*[row[1:] for row in rows if row[0] == method], strict=True)
        axes[0].plot(budgets, error, marker="o", label=method)
        axes[1].errorbar(budgets, test, spread, marker="o", capsize=3, label=method)
    axes[1].axhline(plain, color="0.5", linestyle=":", label="no privacy")
    axes[0].set(xlabel="ε in total", ylabel="RMSE of released labels", xscale="log", yscale="log", title=name)
    axes[1].set(xlabel="ε in total", ylabel="test RMSE of the model", xscale="log")
    axes[1].legend()
    figure.savefig(arguments.output, dpi=150)
    print(f"\nErrors against ε: {arguments.output}")


if __name__ == "__main__":
    main()
