"""`tfdpfl demo`: a classifier of handwritten digits with differential privacy, beside the same one without."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from tfdpfl._types import Axes, Keywords, Model, Optimizer

if TYPE_CHECKING:
    from tfdpfl.datasets import ImageData

__all__ = ["run"]

DELTA = 1e-5


def run(
    data_dir: str | None = None,
    epochs: int | None = None,
    output: str = "tfdpfl-demo.png",
    as_json: bool = False,
    seed: int | None = None,
) -> Keywords:
    """Trains both models, prints accuracy, ε and the full statement, and draws both over the epochs.

    Args:
      data_dir: a folder with MNIST's files; None takes the digits that come with scikit-learn.
      epochs: passes over the data; None takes what suits them.
      output: where the picture goes (needs matplotlib; without it none is drawn).
      as_json: print one JSON object instead of text, and no progress bar.
      seed: of the weights, the batches and the noise, for a repeatable show; None for real secrecy.

    Returns:
      The content of the JSON.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    import tfdpfl
    from tfdpfl import datasets

    data = datasets.load_mnist(data_dir) if data_dir else datasets.load_digits()
    n = len(data.x_train)
    # A small data set is best served by few, large batches.
    batch, default_epochs, learning_rate = (2000, 10, 4e-3) if n > 10_000 else (n // 2, 40, 2e-2)
    if seed is not None:
        tf.keras.utils.set_random_seed(seed)
    plan = tfdpfl.plan(
        data.x_train, data.y_train, target_epsilon=3.0, delta=DELTA, batch_size=batch,
        num_epochs=epochs or default_epochs, l2_norm_clip=0.5, seed=seed,
    )  # fmt: skip
    say = (lambda *a: None) if as_json else print
    say(f"{data.name}: {n} examples to train on, {len(data.x_test)} to test on, {data.num_classes} classes\n")

    say("Without privacy:")
    plain, plain_seconds = _trained(
        data, tf.keras.optimizers.Adam(4e-3), x=data.x_train, y=data.y_train, batch_size=128, epochs=plan.epochs,
        verbose=0 if as_json else 2,
    )  # fmt: skip
    say(f"\nWith privacy, (ε, δ) = (3, {DELTA:g}), so noise_multiplier = {plan.noise_multiplier:.3f}:")
    private, private_seconds = _trained(
        data, plan.optimizer("adam", learning_rate=learning_rate, seed=seed), x=plan.batches, epochs=plan.epochs,
        callbacks=[plan.callback], verbose=0 if as_json else 1,
    )  # fmt: skip
    result = {
        "data": data.name,
        "plain_accuracy": float(plain["val_accuracy"][-1]),
        "private_accuracy": float(private["val_accuracy"][-1]),
        "plain_seconds": plain_seconds,
        "private_seconds": private_seconds,
        "privacy": plan.callback.report().to_dict(),
        "picture": _draw(plain, private, data.name, output),
    }
    if as_json:
        print(json.dumps(result))
        return result
    print(f"\nTest accuracy  without privacy {result['plain_accuracy']:.1%}   with {result['private_accuracy']:.1%}")
    print(f"Time           without privacy {plain_seconds:.1f} s   with {private_seconds:.1f} s\n")
    print(plan.callback.report().statement())
    if result["picture"]:
        print(f"\nAccuracy and ε over the epochs: {result['picture']}")
    else:
        print("\nNo picture: matplotlib is missing (pip install tfdpfl[plots]).")
    return result


def _trained(data: ImageData, optimizer: Optimizer, **fit: object) -> tuple[dict[str, list[float]], float]:
    """Trains a new model; returns its history, and the seconds that it took."""
    import tensorflow as tf

    model = _model(data)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    began = time.perf_counter()
    log = model.fit(validation_data=(data.x_test, data.y_test), **fit)
    return log.history, time.perf_counter() - began


def _model(data: ImageData) -> Model:
    """A small network; tanh bounds the activations, which suits clipped gradients (Papernot et al. 2021,
    arXiv:2007.14191)."""
    import tensorflow as tf

    layers = tf.keras.layers
    inputs, outputs = tf.keras.Input(data.x_train.shape[1:]), layers.Dense(data.num_classes)
    if data.x_train.shape[1] <= 16:
        return tf.keras.Sequential([inputs, layers.Flatten(), layers.Dense(64, activation="tanh"), outputs])
    return tf.keras.Sequential(
        [
            inputs,
            layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh"),
            layers.MaxPooling2D(2, 1),
            layers.Conv2D(32, 4, strides=2, activation="tanh"),
            layers.MaxPooling2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            outputs,
        ]
    )


def _draw(plain: dict, private: dict, name: str, output: str) -> str | None:
    from tfdpfl.plots import panels

    try:
        (accuracy,) = panels(1)
    except ImportError:
        return None
    accuracy.plot(range(1, len(plain["val_accuracy"]) + 1), plain["val_accuracy"], color="0.5", label="without privacy")
    epochs = range(1, len(private["val_accuracy"]) + 1)
    accuracy.plot(epochs, private["val_accuracy"], color="C0", label="with privacy")
    accuracy.set(xlabel="epoch", ylabel="test accuracy", title=f"{name}, δ = {DELTA:g}", ylim=(0, 1))
    budget = accuracy.twinx()
    budget.plot(epochs, private["epsilon"], color="C1", linestyle="--", label="ε spent")
    budget.set(ylabel="ε", ylim=(0, None))
    lines = accuracy.get_lines() + budget.get_lines()
    accuracy.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
    figure: Axes = accuracy.figure
    figure.savefig(output, dpi=150)
    return output
