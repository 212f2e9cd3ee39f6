"""PATE on handwritten digits: 100 teachers who share no data, and a student that learns from their noisy votes.

    python examples/pate_mnist.py --data-dir DIR      # MNIST from its four files; or by Keras; or small digits
    python examples/pate_mnist.py --better            # 250 teachers, Confident-GNMax, at most epsilon 2

The first is the well-known notebook: the training images are split among the teachers, Laplace noise of scale 1/0.1 on
the votes for 2000 test images, a student trained on these and tested on the rest. Its privacy figure, 91.5, is printed
beside what the same answers really cost.
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
from tfdpfl.pate import PATE, ConfidentGNMax, LNMax, TeacherEnsemble, pysyft_analysis

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


def small_cnn_fn(shape: tuple[int, ...]) -> Any:
    """What learns more from a few hundred images than the notebook's network."""
    import tensorflow as tf

    layers = tf.keras.layers
    blocks = [layers.Conv2D(n, size, 2, "same", activation="relu") for n, size in ((16, 5), (32, 3))]
    head = [layers.Flatten(), layers.Dropout(0.3), layers.Dense(64, activation="relu"), layers.Dense(10)]
    model = tf.keras.Sequential([layers.Input(shape), *blocks, *head])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.002), loss)
    return model


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
    """A convolutional network that sees every image a little shifted and turned: few labels go further."""
    import tensorflow as tf

    layers = tf.keras.layers
    blocks = [layers.RandomTranslation(0.1, 0.1, fill_mode="constant"), layers.RandomRotation(0.04, "constant")]
    for filters in (32, 64):
        blocks += [
            layers.Conv2D(filters, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    head = [layers.Flatten(), layers.Dropout(0.3), layers.Dense(128, activation="relu"), layers.Dense(10)]
    model = tf.keras.Sequential([layers.Input(shape), *blocks, *head])
    # The average of the last hundred steps: without it one student in three ends two points lower than the others.
    adam = tf.keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.99)
    model.compile(adam, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train_teachers(data: Any, num_teachers: int, model_fn: Any, copies: int, args: Any) -> TeacherEnsemble:
    """Teachers on shards of the private data; with `copies`, an image goes to its teacher in that many variations."""
    began = time.perf_counter()
    images, rng = data.x_train, np.random.default_rng(0)  # the same shards when it goes on from a checkpoint
    shards = np.array_split(rng.permutation(len(images)), num_teachers)
    x = np.concatenate([images, *(varied(images, rng) for _ in range(copies - 1))])
    with_copies = [np.concatenate([shard + len(images) * i for i in range(copies)]) for shard in shards]
    teachers = TeacherEnsemble(
        lambda: model_fn(images.shape[1:]), num_teachers, epochs=args.epochs, checkpoint_dir=args.checkpoint_dir
    ).fit(x, np.tile(data.y_train, copies), shards=with_copies)
    print(f"{num_teachers} teachers of {len(images) // num_teachers} examples: {time.perf_counter() - began:.0f} s")
    return teachers


def notebook(data: Any, num_teachers: int, args: argparse.Namespace) -> None:
    """The notebook's settings, its figure, and what the answers really cost."""
    teachers = train_teachers(data, num_teachers, teacher_fn, 1, args)
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
    print(f"  given the votes, the best bound          {figures.tight_data_dependent:9.4f}\n")
    flow = PATE(teachers, LNMax(gamma), lambda: student_fn(data.x_train.shape[1:]), DELTA, epochs=args.student_epochs)
    flow.fit(data.x_test, data.y_test, queries=queries, test_data=(data.x_test[rest], data.y_test[rest]))
    print(flow.report())


def better(data: Any, num_teachers: int, args: argparse.Namespace) -> None:
    """More teachers, answers only where they agree, unlabelled images put to use, and a budget."""
    # All variations of an image are in one shard: its teacher still has one vote on each query.
    teachers = train_teachers(data, num_teachers, small_cnn_fn, 8, args)
    # The 2018 paper's threshold and noise for 250 teachers, in proportion.
    share = num_teachers / 250
    aggregator = ConfidentGNMax(200 * share, 150 * share, 40 * share)
    half = len(data.x_test) // 2
    pool, test = slice(0, half), slice(half, None)
    flow = PATE(
        teachers,
        aggregator,
        lambda: student_fn(data.x_train.shape[1:]),
        DELTA,
        budget=args.budget,
        budget_data_dependent=True,
        epochs=args.student_epochs,
    )
    flow.fit(
        data.x_test[pool],
        data.y_test[pool],
        num_queries=min(args.queries or 3000, half),
        semi_supervised=True,
        test_data=(data.x_test[test], data.y_test[test]),
    )
    print(flow.report())
    if args.plots:
        for name, draw in (("margins", flow.plot_margins), ("costs", flow.plot_costs)):
            draw(f"{args.plots}-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with MNIST's files (else TFDPFL_DATA_DIR, else Keras's download)")
    parser.add_argument("--digits", action="store_true", help="scikit-learn's small digits, at once")
    parser.add_argument("--better", action="store_true", help="Confident-GNMax in place of the notebook's settings")
    parser.add_argument("--teachers", type=int, help="default 100, with --better 250; 20 for the small digits")
    parser.add_argument("--epochs", type=int, help="of a teacher: default 10, with --better 6, of 8 variations")
    parser.add_argument("--student-epochs", type=int, help="default 20; 60 for the small digits")
    parser.add_argument("--queries", type=int, help="default 2000, with --better 3000")
    parser.add_argument("--budget", type=float, help="with --better: epsilon not to be passed; default 2, digits 20")
    parser.add_argument("--checkpoint-dir", help="keeps trained teachers, and goes on from there")
    parser.add_argument("--plots", help="with --better: a prefix for two pictures (needs matplotlib)")
    args = parser.parse_args()
    data = load_digits() if args.digits else load_image_data(args.data_dir)
    small = data.name == "digits"
    args.budget = args.budget or (20.0 if small else 2.0)
    args.student_epochs = args.student_epochs or (60 if small else 20)
    args.epochs = args.epochs or (6 if args.better else 10)
    num_teachers = args.teachers or (20 if small else 250 if args.better else 100)
    (better if args.better else notebook)(data, num_teachers, args)


if __name__ == "__main__":
    main()
