"""Trains PATE on handwritten digits: teachers who share no data, and a student that learns from their noisy votes.

    python examples/pate_mnist.py --data-dir DIR      # MNIST from its four files; or by Keras; or small digits
    python examples/pate_mnist.py --better            # 250 teachers, Confident-GNMax, 3 students, at most epsilon 2

The first command is the well-known notebook. It splits the training images among 100 teachers, and adds Laplace noise
of scale 1/0.1 to the votes for 2000 test images. A student trains on these, and is tested on the rest. The program
prints the notebook's ε of 91.5 and the ε that the same answers really cost.

Both commands print a table and draw a picture (`--output`). `--logs` prints the training of each teacher, as the
notebook does. `--validate` measures each teacher on a tenth of its images that it did not see.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from scipy import ndimage

from tfdpfl.datasets import load_digits, load_image_data
from tfdpfl.pate import PATE, ConfidentGNMax, LNMax, PATEReport, TeacherEnsemble, pysyft_analysis

DELTA = 1e-5
GAMMA = 0.1


def teacher_fn(shape: tuple[int, ...]) -> Any:
    """The notebook's network."""
    import tensorflow as tf

    layers = tf.keras.layers
    blocks = []
    for units in (256, 64):
        blocks += [layers.Dense(units), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5)]
    model = tf.keras.Sequential([layers.Input(shape), layers.Flatten(), *blocks, layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.005), loss)
    return model


def edges_fn(shape: tuple[int, ...]) -> Any:
    """A small network on `edges`, which learns more from a few hundred images than the notebook's on the images."""
    import tensorflow as tf

    layers = tf.keras.layers
    hidden = [layers.Dense(64, activation="relu"), layers.Dropout(0.3)]
    model = tf.keras.Sequential([layers.Input(shape), *hidden, layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.003), loss)
    return model


def edges(images: np.ndarray, directions: int = 8) -> np.ndarray:
    """How strong edges of each direction are in each part of an image, `[n, features]`: fixed, learnt from no data."""
    rows, columns = np.gradient(ndimage.gaussian_filter(images[..., 0], (0, 0.7, 0.7)), axis=(1, 2))
    strength = np.hypot(rows, columns)
    direction = np.arctan2(rows, columns) / (2 * np.pi) * directions
    parts = []
    for k in range(directions):
        away = np.abs((direction - k + directions / 2) % directions - directions / 2)
        part = ndimage.gaussian_filter(np.maximum(1 - away, 0) * strength, (0, 2, 2))
        parts.append(part[:, 2::4, 2::4] if images.shape[1] > 8 else part)
    parts = np.stack(parts, axis=-1).reshape(len(images), -1)
    return np.sqrt(parts / (np.linalg.norm(parts, axis=1, keepdims=True) + 1e-6)).astype(np.float32)


def varied(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image a little turned, stretched, slanted and shifted, `[n, height, width, 1]`."""
    centre = (np.array(images.shape[1:3]) - 1) / 2
    result = np.empty_like(images)
    for i, image in enumerate(images):
        turn, slant = rng.uniform(-0.2, 0.2, 2)
        cos, sin = np.cos(turn), np.sin(turn)
        zoom = rng.uniform(0.9, 1.1, 2)
        matrix = np.array([[cos, -sin], [sin, cos]]) @ np.array([[zoom[0], slant], [0, zoom[1]]])
        shift = rng.uniform(-0.07, 0.07, 2) * images.shape[1:3]
        result[i, ..., 0] = ndimage.affine_transform(image[..., 0], matrix, centre - matrix @ centre + shift, order=1)
    return result


def student_fn(shape: tuple[int, ...]) -> Any:
    """A convolutional network that sees every image a little changed: few labels go further."""
    import tensorflow as tf

    layers = tf.keras.layers
    blocks = [
        layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),
        layers.RandomRotation(0.04, "constant"),
        layers.RandomZoom(0.1, 0.1, fill_mode="constant"),
    ]
    for filters, size in ((32, 5), (64, 3)):
        blocks += [
            layers.Conv2D(filters, size, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    head = [layers.Flatten(), layers.Dropout(0.4), layers.Dense(128, activation="relu"), layers.Dropout(0.3)]
    model = tf.keras.Sequential([layers.Input(shape), *blocks, *head, layers.Dense(10)])
    # The average of the last hundred steps: without it one student in three ends two points lower than the others.
    adam = tf.keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.99)
    model.compile(adam, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def students_fn(shape: tuple[int, ...]) -> Any:
    """Three students of the same answers. Each errs in its own way, so that together they err less."""
    import tensorflow as tf

    class Together(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.members = [student_fn(shape) for _ in range(3)]

        def call(self, images: Any, training: bool = False) -> Any:
            return sum(tf.nn.softmax(member(images, training=training)) for member in self.members) / 3

        def fit(self, *args: Any, **kwargs: Any) -> None:
            for member in self.members:
                member.fit(*args, **kwargs)

    model = Together()
    model.compile(loss="sparse_categorical_crossentropy")
    return model


class OfEdges:
    """Teachers that look at the edges of what they are asked about."""

    def __init__(self, teachers: TeacherEnsemble, shards: list[np.ndarray]) -> None:
        self.teachers = teachers
        self.shards_ = shards  # each image once

    def votes(self, images: np.ndarray) -> np.ndarray:
        return self.teachers.votes(edges(images))

    def predict(self, images: np.ndarray) -> np.ndarray:
        return self.teachers.predict(edges(images))


def trained(
    x: np.ndarray, y: np.ndarray, shards: list, model_fn: Any, args: argparse.Namespace, validation_split: float = 0.0
) -> TeacherEnsemble:
    began = time.perf_counter()
    teachers = TeacherEnsemble(
        lambda: model_fn(x.shape[1:]),
        len(shards),
        epochs=args.epochs,
        checkpoint_dir=args.checkpoint_dir,
        verbose=2 if args.logs else 1,
    ).fit(x, y, shards=shards, validation_split=validation_split)
    print(f"\n{len(shards)} teachers of {len(shards[0])} examples, trained in {time.perf_counter() - began:.0f} s")
    names = list(teachers.history_[0])
    print("  epoch  " + "  ".join(f"{name:>12}" for name in names) + "   (means of all teachers; private)")
    for epoch in range(args.epochs):
        means = [np.mean([log[name][epoch] for log in teachers.history_]) for name in names]
        print(f"  {epoch + 1:5}  " + "  ".join(f"{mean:12.3f}" for mean in means))
    return teachers


def conclude(flow: PATE, teachers: Any, x: np.ndarray, y: np.ndarray, output: str) -> PATEReport:
    """The table and the picture; returns the report. Single teachers are measured on what was asked: `x` and `y` at
    the queries."""
    alone = float(np.mean(teachers.predict(x[flow.queries_]) == y[flow.queries_]))
    report = flow.report()
    print(f"\n{report}")
    print(f"  one teacher alone right: {alone:.2%} (private)")
    try:
        report.plot(output, alone=alone)
        print(f"\nThe same in a picture: {output}")
    except ImportError as error:
        print(f"\nNo picture: {error}")
    return report


def notebook(data: Any, num_teachers: int, args: argparse.Namespace, seed: int) -> PATEReport:
    """The notebook's settings, its figure, and what the answers really cost."""
    shards = np.array_split(np.random.default_rng(seed).permutation(len(data.x_train)), num_teachers)
    aside = 0.1 if args.validate else 0.0
    teachers = trained(data.x_train, data.y_train, shards, teacher_fn, args, aside)
    gamma = GAMMA if num_teachers >= 100 else 2 * GAMMA * 100 / num_teachers  # fewer votes carry less noise
    queries = np.arange(min(args.queries or 2000, len(data.x_test) // 2))
    rest = slice(len(queries), None)
    predictions = teachers.predict(data.x_test[queries])
    figures = pysyft_analysis(predictions, None, gamma, DELTA, 10, num_classes=data.num_classes)
    print(f"\nLaplace noise of scale {1 / gamma:g} on {len(queries)} votes, delta = {DELTA:g}:")
    print(f"  the notebook's data-independent epsilon  {figures.data_independent:9.4f}")
    print(f"  the same at real orders                  {figures.real_orders:9.4f}")
    print(f"  what these answers really cost at most   {figures.tight:9.4f}")
    print(f"  given the votes, the notebook's bound    {figures.data_dependent:9.4f}")
    print(f"  given the votes, the best bound          {figures.tight_data_dependent:9.4f}")
    flow = PATE(teachers, LNMax(gamma), lambda: student_fn(data.x_train.shape[1:]), DELTA, epochs=args.student_epochs)
    test_data = data.x_test[rest], data.y_test[rest]
    flow.fit(data.x_test, data.y_test, queries=queries, test_data=test_data)
    return conclude(flow, teachers, data.x_test, data.y_test, args.output)


def better(data: Any, num_teachers: int, args: argparse.Namespace, seed: int) -> PATEReport:
    """More teachers, answers only where they agree, unlabelled images put to use, and a budget."""
    images, rng, copies = data.x_train, np.random.default_rng(seed), 5  # the same when it goes on from a checkpoint
    # All variations of an image are in one shard: its teacher still has one vote on each query.
    shards = np.array_split(rng.permutation(len(images)), num_teachers)
    varying = [np.concatenate([shard + len(images) * i for i in range(copies)]) for shard in shards]
    x = np.concatenate([edges(images), *(edges(varied(images, rng)) for _ in range(copies - 1))])
    teachers = OfEdges(trained(x, np.tile(data.y_train, copies), varying, edges_fn, args), shards)
    # The 2018 paper's threshold and noise for 250 teachers, in proportion.
    share = num_teachers / 250
    aggregator = ConfidentGNMax(200 * share, 150 * share, 40 * share)
    half = len(data.x_test) // 2
    flow = PATE(
        teachers,
        aggregator,
        lambda: students_fn(images.shape[1:]),
        DELTA,
        budget=args.budget,
        budget_data_dependent=True,
        epochs=args.student_epochs,
    )
    test_data = data.x_test[half:], data.y_test[half:]
    flow.fit(
        data.x_test[:half],
        data.y_test[:half],
        num_queries=min(args.queries or 3000, half),
        semi_supervised=True,
        confidence=0.9,
        rounds=4,
        test_data=test_data,
    )
    return conclude(flow, teachers, data.x_test, data.y_test, args.output)  # queries count from the first image


def conclude_all(reports: list[PATEReport]) -> None:
    """Mean, least and most of all runs."""
    print(f"\n{len(reports)} runs: mean (least to most)")
    for name, of in {
        "student right, %": lambda r: 100 * r.student_accuracy,
        "labels given": lambda r: r.answered,
        "labels right, %": lambda r: 100 * r.label_accuracy,
        "epsilon whatever the votes": lambda r: float(r.epsilon),
        "epsilon given the votes, with noise": lambda r: float(r.sanitized.epsilon),
        "epsilon given the votes (private)": lambda r: float(r.epsilon_data_dependent),
    }.items():
        found = [of(report) for report in reports]
        print(f"  {name:<36} {np.mean(found):9.2f} ({min(found):.2f} to {max(found):.2f})")


def main() -> None:
    import tensorflow as tf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with MNIST's files (else TFDPFL_DATA_DIR, else Keras's download)")
    parser.add_argument("--digits", action="store_true", help="scikit-learn's small digits, at once")
    parser.add_argument("--better", action="store_true", help="Confident-GNMax in place of the notebook's settings")
    parser.add_argument("--teachers", type=int, help="default 100, with --better 250; 20 for the small digits")
    parser.add_argument("--epochs", type=int, help="of a teacher: default 10, with --better 12, of 5 variations")
    parser.add_argument("--student-epochs", type=int, help="default 20, with --better 25; 60 for the small digits")
    parser.add_argument("--queries", type=int, help="default 2000, with --better 3000")
    parser.add_argument("--budget", type=float, help="with --better: epsilon not to be passed; default 2, digits 20")
    parser.add_argument("--seeds", type=int, default=1, help="whole runs, each with its own shards and weights")
    parser.add_argument("--checkpoint-dir", help="keeps trained teachers, and goes on from there")
    parser.add_argument("--logs", action="store_true", help="prints each teacher's training, a line an epoch")
    parser.add_argument("--validate", action="store_true", help="not with --better: sets a tenth aside")
    parser.add_argument("--output", default="pate_mnist.png", help="the picture to write (needs matplotlib)")
    parser.add_argument(
        "--quick", action="store_true", help="four teachers of small digits, one epoch: to see that it runs"
    )
    args = parser.parse_args()
    if args.quick:
        args.digits, args.teachers, args.epochs, args.student_epochs, args.queries, args.seeds = True, 4, 1, 1, 20, 1
    data = load_digits() if args.digits else load_image_data(args.data_dir)
    small = data.name == "digits"
    args.budget = args.budget or (20.0 if small else 2.0)
    args.student_epochs = args.student_epochs or (60 if small else 25 if args.better else 20)
    args.epochs = args.epochs or (12 if args.better else 10)
    num_teachers = args.teachers or (20 if small else 250 if args.better else 100)
    reports, folder = [], args.checkpoint_dir
    for seed in range(args.seeds):
        tf.keras.utils.set_random_seed(seed)  # of the weights; the votes' noise stays secret
        args.checkpoint_dir = os.path.join(folder, str(seed)) if folder and args.seeds > 1 else folder
        reports.append((better if args.better else notebook)(data, num_teachers, args, seed))
    if args.seeds > 1:
        conclude_all(reports)


if __name__ == "__main__":
    main()
