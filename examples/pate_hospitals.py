"""Hospitals that may not share records teach a model for a hospital that has no labels.

    python examples/pate_hospitals.py                       # scikit-learn's breast cancer data, 8 hospitals
    python examples/pate_hospitals.py --data-dir DIR        # the census data "Adult" in DIR, 200 offices

Each hospital trains on its own patients. Hospitals differ in size. Each question gets a noisy vote, which is all that
leaves the hospitals. One patient is in one hospital, so one patient changes one vote. At the end the program prints a
table of the hospitals and the report, and draws a picture (`--output`).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from tfdpfl.datasets import load_adult
from tfdpfl.pate import PATE, GNMax, TeacherEnsemble


def load_breast_cancer() -> tuple[np.ndarray, ...]:
    from sklearn.datasets import load_breast_cancer as load
    from sklearn.model_selection import train_test_split

    X, y = load(return_X_y=True)
    X = ((X - X.mean(axis=0)) / X.std(axis=0)).astype(np.float32)
    return tuple(train_test_split(X, y, test_size=0.4, random_state=0, stratify=y))


def model_fn(features: int) -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((features,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with Adult (else TFDPFL_DATA_DIR, else breast cancer data)")
    parser.add_argument("--hospitals", type=int, help="default 8, for Adult 200")
    parser.add_argument("--queries", type=int, help="default 40, for Adult 300")
    parser.add_argument("--output", default="pate_hospitals.png", help="the picture to write (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="few queries to few hospitals: to see that it runs")
    args = parser.parse_args()
    adult = bool(args.data_dir or os.environ.get("TFDPFL_DATA_DIR")) and not args.quick
    if adult:
        x_train, y_train, x_public, y_public = load_adult(args.data_dir)
    else:
        x_train, x_public, y_train, y_public = load_breast_cancer()
    hospitals = args.hospitals or (200 if adult else 8)
    queries = args.queries or (300 if adult else 10 if args.quick else 40)
    delta = 0.1 / len(x_train)

    # Hospitals of three sizes, each with its own patients.
    rng = np.random.default_rng(0)
    sizes = rng.choice([1, 2, 3], hospitals)
    ends = (np.cumsum(sizes) / sizes.sum() * len(x_train)).astype(int)[:-1]
    patients = np.split(rng.permutation(len(x_train)), ends)
    teachers = TeacherEnsemble(lambda: model_fn(x_train.shape[1]), hospitals, epochs=20, batch_size=16)
    teachers.fit_shards([(x_train[rows], y_train[rows]) for rows in patients])

    half = len(x_public) // 2
    flow = PATE(
        teachers, GNMax(hospitals / 8), lambda: model_fn(x_train.shape[1]), delta, epochs=20, batch_size=16, verbose=0
    )
    test_data = (x_public[half:], y_public[half:])
    flow.fit(x_public[:half], y_public[:half], num_queries=min(queries, half), test_data=test_data)
    alone = np.mean(teachers.predict(test_data[0]) == test_data[1], axis=1)
    print("\npatients  hospitals  one by itself right (mean, worst)")
    sizes = np.array([len(rows) for rows in patients])
    third = np.digitize(sizes, np.quantile(sizes, [1 / 3, 2 / 3]), right=True)
    for group in (third == i for i in range(3)):
        if group.any():
            span = f"{sizes[group].min()}-{sizes[group].max()}"
            print(f"{span:>8}  {group.sum():9}  {alone[group].mean():.2%}, {alone[group].min():.2%}")
    report = flow.report()
    print(f"\n{report}")
    try:
        asked = flow.queries_
        report.plot(args.output, alone=float(np.mean(teachers.predict(x_public[asked]) == y_public[asked])))
        print(f"\nThe same in a picture: {args.output}")
    except ImportError as error:
        print(f"\nNo picture: {error}")
    if hospitals < 50:
        print("With so few hospitals a vote hides little: see the epsilon. PATE wants a hundred teachers or more.")


if __name__ == "__main__":
    main()
