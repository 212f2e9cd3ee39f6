"""Times PATE: aggregation beside the notebook's loop, the analysis, teachers together beside one `fit` after another.

    python benchmarks/pate.py [--teachers 100 --alone 10] [--data-dir DIR]

Times are the best of several rounds, since others may use the machine. Teachers are the notebook's network on 600
images; without MNIST, on noise of its shape. `--alone` is how many are trained by a `fit` of their own, for a mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from tfdpfl.pate import ConfidentGNMax, GNMax, LNMax, TeacherEnsemble, as_counts, rdp_data_dependent

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


def best(function, rounds=5):
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def notebook_loop(predictions, gamma):
    labels = []
    for image in range(predictions.shape[1]):
        counts = np.bincount(predictions[:, image], minlength=10).astype(float)
        for i in range(len(counts)):
            counts[i] += np.random.laplace(0, 1 / gamma, 1)[0]
        labels.append(np.argmax(counts))
    return labels


# The notebook's loop as it stands, in PyTorch; run in the environment that `make bench` has for Opacus.
TORCH_LOOP = """
import time, numpy as np, torch
votes = torch.from_numpy(np.random.default_rng(0).integers(0, 10, (100, 10_000)))
began = time.perf_counter()
labels = []
for image in range(votes.shape[1]):
    counts = torch.bincount(votes[:, image], minlength=10).float()
    for i in range(len(counts)):
        counts[i] += np.random.laplace(0, 10, 1)[0]
    labels.append(torch.argmax(counts))
torch.tensor(labels)
print(time.perf_counter() - began)
"""


def votes(teachers=100, queries=10_000):
    rng = np.random.default_rng(0)
    right = rng.integers(0, 10, queries)
    agree = rng.random((teachers, queries)) < rng.beta(5, 1, queries)
    return np.where(agree, right, rng.integers(0, 10, (teachers, queries)))


def aggregation_and_analysis():
    predictions = votes()
    counts = as_counts(predictions, 10)
    orders = 1 + np.geomspace(0.05, 500, 100)
    loop = best(lambda: notebook_loop(predictions, 0.1), 3)
    ours = best(lambda: LNMax(0.1).aggregate(predictions, 10), 30)
    result = {"aggregation_ms": 1e3 * ours, "notebook_loop_ms": 1e3 * loop, "aggregation_speedup": loop / ours}
    torch_python = Path(__file__).resolve().parent.parent / ".venv/opacus/bin/python"
    if torch_python.exists():
        ran = subprocess.run([torch_python, "-c", TORCH_LOOP], capture_output=True, text=True, check=True)
        result["notebook_torch_loop_ms"] = 1e3 * float(ran.stdout)
        result["aggregation_speedup_torch"] = float(ran.stdout) / ours
    for mechanism in (LNMax(0.1), GNMax(20), ConfidentGNMax(60, 40, 20)):
        name = type(mechanism).__name__
        result[f"analysis_s_{name}"] = best(lambda m=mechanism: rdp_data_dependent(m, counts, orders))
        result[f"epsilon_s_{name}"] = best(lambda m=mechanism: m.epsilon(counts, 1e-5))
    return result


def training(teachers, alone, data_dir):
    from pate_mnist import teacher_fn

    rng = np.random.default_rng(0)
    if data_dir:
        from tfdpfl.datasets import load_mnist

        data = load_mnist(data_dir)
        x, y = data.x_train[: 600 * teachers], data.y_train[: 600 * teachers]
    else:
        x, y = rng.random((600 * teachers, 28, 28, 1), np.float32), rng.integers(0, 10, 600 * teachers)
    model_fn = lambda: teacher_fn((28, 28, 1))  # noqa: E731

    # A part of the single fits before and a part after, so that a busy spell of the machine does not favour one side.
    def fits(which):
        began = time.perf_counter()
        for t in which:
            rows = slice(600 * t, 600 * t + 600)
            model_fn().fit(x[rows], y[rows], epochs=10, batch_size=32, verbose=0)
        return time.perf_counter() - began

    before = fits(range(alone // 2))
    began = time.perf_counter()
    ensemble = TeacherEnsemble(model_fn, teachers, epochs=10, verbose=0).fit(x, y)
    together = time.perf_counter() - began
    each = (before + fits(range(alone // 2, alone))) / alone
    return {
        "teachers": teachers,
        "together_s": together,
        "stacked": ensemble.trained_together_,
        "one_fit_s": each,
        "one_after_another_s": each * teachers,
        "training_speedup": each * teachers / together,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, default=100, help="0 leaves training out")
    parser.add_argument("--alone", type=int, default=10)
    parser.add_argument("--data-dir", default=os.environ.get("TFDPFL_DATA_DIR"))
    args = parser.parse_args()
    result = aggregation_and_analysis()
    print(json.dumps(result, indent=1), flush=True)
    if args.teachers:
        print(json.dumps(training(args.teachers, args.alone, args.data_dir), indent=1))


if __name__ == "__main__":
    main()
