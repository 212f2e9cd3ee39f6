"""What logical batches of several parts, and correlated noise, add to a private step's CPU time.

    python benchmarks/training.py [--rounds 5] [--updates 20] [--only parts,plain,noise]

``parts``: an update of four batches of 256 (`gradient_accumulation_steps=4`) over one of a batch of 1024. ``plain``:
what Keras's own accumulation adds to plain SGD (on Keras 3). ``noise``: a step of 256 with correlated noise over one
with fresh noise. By `fit`, on a network of 270,000 weights and on a small convolutional one. Each round times all in
turn; a ratio is the median of the rounds' ratios. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl.noise import BLT, Banded, Tree

SHAPE, CLASSES, SMALL, PARTS = (28, 28, 1), 10, 256, 4
BOUNDS = {"min_separation": 100, "max_participations": 10}
NOISES = {"tree": Tree(), "2 bands": Banded(bands=2, **BOUNDS), "4 bands": Banded(bands=4, **BOUNDS),
          "2 buffers": BLT(buffers=2, **BOUNDS), "4 buffers": BLT(buffers=4, **BOUNDS)}  # fmt: skip


def dense():
    layers = tf.keras.layers
    return [layers.Flatten(), layers.Dense(256, "tanh"), layers.Dense(256, "tanh"), layers.Dense(CLASSES)]


def convolutional():
    layers = tf.keras.layers
    return [layers.Conv2D(16, 8, 2, "same", activation="tanh"), layers.MaxPooling2D(2, 1),
            layers.Conv2D(32, 4, 2, activation="tanh"), layers.MaxPooling2D(2, 1), layers.Flatten(),
            layers.Dense(32, "tanh"), layers.Dense(CLASSES)]  # fmt: skip


class Way:
    """A training that can be gone on with: so many updates, and their CPU time."""

    def __init__(self, network, size: int, parts: int = 1, noise=None, private: bool = True):
        self.model = tf.keras.Sequential([tf.keras.Input(SHAPE), *network()])
        if private:
            optimizer = tfdpfl.DPSGD(
                1.0, 1.0, gradient_accumulation_steps=parts, noise=noise, expected_batch_size=size * parts, momentum=0.9
            )
        else:
            more = {"gradient_accumulation_steps": parts} if parts > 1 else {}
            optimizer = tf.keras.optimizers.SGD(momentum=0.9, **more)
        self.model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        rng = np.random.default_rng(0)
        batch = (rng.normal(size=(size, *SHAPE)).astype("float32"), rng.integers(0, CLASSES, size))
        self.batch, self.parts = tf.data.Dataset.from_tensors(batch), parts
        self.seconds(2)  # traces

    def seconds(self, updates: int) -> float:
        data = self.batch.repeat(updates * self.parts)
        began = time.process_time()
        self.model.fit(data, verbose=0)
        return (time.process_time() - began) / updates


def ways_of(what: str, network) -> dict[str, Way]:
    """The first is what the others are compared with."""
    if what in ("parts", "plain"):
        private, of = what == "parts", "" if what == "parts" else "plain, "
        return {f"{of}one batch of {SMALL * PARTS}": Way(network, SMALL * PARTS, private=private),
                f"{of}{PARTS} parts of {SMALL}": Way(network, SMALL, PARTS, private=private)}  # fmt: skip
    return {"fresh noise": Way(network, SMALL), **{k: Way(network, SMALL, noise=n) for k, n in NOISES.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="in each round")
    parser.add_argument("--only", default="parts,plain,noise")
    given = parser.parse_args()
    print("| network | update | CPU ms | ratio | of the rounds |\n| --- | --- | --- | --- | --- |")
    for network in (dense, convolutional):
        for what in given.only.split(","):
            ways = ways_of(what, network)
            times = np.array([[way.seconds(given.updates) for way in ways.values()] for _ in range(given.rounds)])
            ratios = times / times[:, :1]
            for i, name in enumerate(ways):
                span = f"{ratios[:, i].min():.2f} to {ratios[:, i].max():.2f}"
                cost = f"{1000 * np.median(times[:, i]):.1f} | {np.median(ratios[:, i]):.2f}"
                print(f"| {network.__name__} | {name} | {cost} | {span} |", flush=True)


if __name__ == "__main__":
    main()
