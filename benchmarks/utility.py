"""What privacy costs in accuracy: MNIST and Adult, private and not, three seeds a row; the picture of docs/utility.md.

    python benchmarks/utility.py [--seeds 3] [--data-dir FOLDER]   # minutes on two cores
    python benchmarks/utility.py --data peer                       # where TF Privacy 0.9 is: Keras 2

MNIST's rows are those of `examples/scattering.py`. Writes `benchmarks/results/utility.json` and the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from sklearn.linear_model import LogisticRegression

import tfdpfl
from tfdpfl import datasets, plots
from tfdpfl.convex import DPLogisticRegression

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
EPSILONS = {"MNIST": (0.5, 1.0, 3.0), "Adult": (0.1, 0.5, 1.0, 3.0)}
PEER = 1.0  # its trainings take minutes
DELTA = {"MNIST": 1e-5, "Adult": 1e-6}


def network(columns: int) -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([tf.keras.Input((columns,)), layers.Dense(64, "tanh"), layers.Dense(2)])


def adult_rows(data_dir: str | None):
    """(name, ε or None, a function that gives a test accuracy)."""
    x, y, x_test, y_test = datasets.load_adult(data_dir)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def right(model) -> float:
        predicted = model.predict(x_test) if not hasattr(model, "layers") else model.predict(x_test, 4096, 0).argmax(1)
        return float(np.mean(predicted == y_test))

    def plain_network() -> float:
        model = network(x.shape[1])
        model.compile("adam", loss)
        model.fit(x, y, batch_size=128, epochs=5, verbose=0)
        return right(model)

    def private_network(epsilon: float) -> float:
        return right(private(x, y, epsilon, loss))

    def private_regression(epsilon: float) -> float:
        return right(DPLogisticRegression(epsilon, DELTA["Adult"], data_norm=3.0).fit(x, y))

    yield "logistic regression", None, lambda: right(LogisticRegression(max_iter=2000).fit(x, y))
    yield "network", None, plain_network
    for epsilon in EPSILONS["Adult"]:
        yield "logistic regression", epsilon, lambda e=epsilon: private_regression(e)
        yield "network", epsilon, lambda e=epsilon: private_network(e)


def private(x: np.ndarray, y: np.ndarray, epsilon: float, loss) -> tf.keras.Model:
    model = network(x.shape[1])
    plan = tfdpfl.plan(x, y, target_epsilon=epsilon, delta=DELTA["Adult"], batch_size=2048, num_epochs=20)
    model.compile(plan.optimizer("adam", learning_rate=5e-3), loss)
    model.fit(plan.batches, epochs=plan.epochs, callbacks=[plan.callback], shuffle=False, verbose=0)
    return model


def peer_rows(data_dir: str | None):
    """Adult's network by TF Privacy, and by tfdpfl beside it. TF Privacy shuffles; its ε is for Poisson batches."""
    import tensorflow_privacy
    from tensorflow_privacy.privacy.analysis.compute_noise_from_budget_lib import compute_noise

    x, y, x_test, y_test = datasets.load_adult(data_dir)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    mean = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    right = lambda model: float(np.mean(model.predict(x_test, 4096, 0).argmax(1) == y_test))  # noqa: E731

    def theirs() -> float:
        noise = compute_noise(len(x), 2048, PEER, 20, DELTA["Adult"], 1e-2)
        model = network(x.shape[1])
        # One microbatch an example; the step size and clip are those that `plan` has.
        model.compile(tensorflow_privacy.VectorizedDPKerasAdamOptimizer(1.0, noise, 2048, learning_rate=5e-3), loss)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(2048, drop_remainder=True)
        model.fit(batches, epochs=20, verbose=0)
        return right(model)

    yield "network by TF Privacy", PEER, theirs
    yield "network by tfdpfl", PEER, lambda: right(private(x, y, PEER, mean))


def mnist_rows(data_dir: str | None):
    import scattering

    data = datasets.load_image_data(data_dir)
    model = scattering.features_of(data)
    x_train, x_test = scattering.mapped(model, data.x_train), scattering.mapped(model, data.x_test)

    def plain() -> float:
        head = tf.keras.Sequential(
            [tf.keras.Input(x_train.shape[1:]), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)]
        )
        head.compile(tf.keras.optimizers.Adam(1e-3), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        head.fit(x_train, data.y_train, batch_size=512, epochs=10, verbose=0)
        return float(np.mean(head.predict(x_test, 1000, 0).argmax(1) == data.y_test))

    yield "scattering, linear", None, plain
    for epsilon in EPSILONS["MNIST"]:
        yield "scattering, linear", epsilon, lambda e=epsilon: scattering.run(data, x_train, x_test, e)[0]


def draw(found: dict[str, list[dict]], folder: Path) -> None:
    """Draws a picture of each data set: two side by side cannot be read on a phone."""
    for data, rows in found.items():
        (ax,) = plots.panels(1)
        best = max((row for row in rows if row["epsilon"] is None), key=lambda row: np.mean(row["accuracies"]))
        names = dict.fromkeys(row["name"] for row in rows)
        private = {n: [row for row in rows if row["name"] == n and row["epsilon"]] for n in names}
        curves = {n: [(row["epsilon"], np.mean(row["accuracies"])) for row in rows] for n, rows in private.items()}
        plots.privacy_utility(curves, baseline=float(np.mean(best["accuracies"])), utility="test accuracy", ax=ax)
        for line, part in zip(ax.get_lines(), private.values(), strict=False):
            ends = np.array([(min(row["accuracies"]), max(row["accuracies"])) for row in part]).T
            ax.fill_between([row["epsilon"] for row in part], *ends, color=line.get_color(), alpha=0.25)
        shown = EPSILONS[data]
        ax.set_xticks(shown, [f"{epsilon:g}" for epsilon in shown])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
        ax.set_title(f"{data}, δ = {DELTA[data]:.0e}".replace("e-0", "e-"), loc="left")
        ax.figure.savefig(folder / f"utility-{data.lower()}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with MNIST and Adult; default: $TFDPFL_DATA_DIR")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="+", default=list(EPSILONS), choices=[*EPSILONS, "peer"])
    parser.add_argument("--redraw", action="store_true", help="the picture alone, from the figures that are there")
    arguments = parser.parse_args()
    results = ROOT / "benchmarks" / "results" / "utility.json"
    found: dict[str, list[dict]] = json.loads(results.read_text("utf-8")) if results.exists() else {}
    sources = {"MNIST": mnist_rows, "Adult": adult_rows, "peer": peer_rows}
    for data in [] if arguments.redraw else arguments.data:
        found[data] = []
        for name, epsilon, accuracy in sources[data](arguments.data_dir):
            accuracies, began = [], time.process_time()
            for seed in range(arguments.seeds):
                tf.keras.utils.set_random_seed(seed)  # of the weights; batches and noise stay secret
                accuracies.append(accuracy())
            seconds = (time.process_time() - began) / arguments.seeds
            found[data].append(dict(name=name, epsilon=epsilon, accuracies=accuracies, cpu_seconds=round(seconds, 1)))
            mean, low, high = np.mean(accuracies), min(accuracies), max(accuracies)
            price = f"ε {epsilon:g}" if epsilon else "no privacy"
            print(f"{data}, {name}, {price}: {mean:.2%} ({low:.2%} to {high:.2%}), {seconds:.0f} s", flush=True)
        results.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    draw({data: found[data] for data in EPSILONS if data in found}, ROOT / "docs" / "_static")


if __name__ == "__main__":
    main()
