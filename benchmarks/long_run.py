"""A long training under `PrivacyBudget`: what the callback costs, and whether time or memory grow.

    python benchmarks/long_run.py [--epochs 200] [--steps 100] [--data arrays|poisson]

Prints the CPU time of an epoch with the callback, and with one that does nothing on the same occasions, over one
without any (20 steps an epoch, interleaved, medians), then trains `epochs` x `steps` steps and prints each tenth's
memory and CPU time an epoch.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import time

import numpy as np
import tensorflow as tf

import tfdpfl

BATCH = 64


def made(width: int):
    keras = tf.keras
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(10)])
    # Noise of its own for each width: a price that was asked for before would be remembered, and cost nothing.
    optimizer = tfdpfl.DPAdam(1.0, 1.1 + 1e-4 * width, expected_batch_size=BATCH)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data_of(kind: str, steps: int):
    rng = np.random.default_rng(0)
    n = steps * BATCH
    x, y = rng.normal(size=(n, 784)).astype("float32"), rng.integers(0, 10, n)
    if kind == "arrays":
        return n, {"x": x, "y": y, "batch_size": BATCH}
    return n, {"x": tfdpfl.data.poisson_batches((x, y), expected_batch_size=BATCH, steps=steps)}


def resident() -> float:
    """MB that the process holds now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Epochs(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []
        self.memory: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.at = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.process_time() - self.at)
        if epoch % 10 == 9:
            gc.collect()
        self.memory.append(resident())


class Idle(tf.keras.callbacks.Callback):
    """Does nothing whenever PrivacyBudget does something."""

    def on_epoch_begin(self, epoch, logs=None):
        pass

    on_epoch_end = on_train_batch_begin = on_train_batch_end = on_epoch_begin


def overhead(kind: str, width: int, rounds: int) -> None:
    n, data = data_of(kind, 20)
    kinds = ([], [Idle()], [tfdpfl.callbacks.PrivacyBudget(n, 1e-6)])
    models = [made(width) for _ in kinds]
    took: list[list[float]] = [[] for _ in kinds]
    for model, watching in zip(models, kinds, strict=True):
        model.fit(**data, epochs=2, callbacks=watching, verbose=0)
    for _ in range(rounds):
        for i, watching in enumerate(kinds):
            epochs = Epochs()
            # The clock comes last, so that an epoch ends after its price: of a number of steps that is new each time.
            models[i].fit(**data, epochs=5, callbacks=[*watching, epochs], verbose=0)
            took[i].append(statistics.median(epochs.seconds[1:]))
    without, idle, with_it = map(statistics.median, took)
    print(f"{kind}, hidden width {width}: an epoch of 20 steps takes {without * 1e3:.1f} ms of CPU time, with an idle "
          f"callback {100 * (idle / without - 1):+.1f} %, with PrivacyBudget {100 * (with_it / without - 1):+.1f} %",
          flush=True)  # fmt: skip


def long(kind: str, epochs: int, steps: int) -> None:
    n, data = data_of(kind, steps)
    model, clock, budget = made(32), Epochs(), tfdpfl.callbacks.PrivacyBudget(n, 1e-6)
    model.fit(**data, epochs=epochs, callbacks=[budget, clock], verbose=0)
    print(f"{kind}: {epochs} epochs of {steps} steps, ε = {budget.report().epsilon:.3g}, peak "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")  # fmt: skip
    print("| epochs | MB at the end | CPU ms an epoch, median |\n| --- | --- | --- |")
    tenth = max(epochs // 10, 2)
    for at in range(0, epochs, tenth):
        part = clock.seconds[max(at, 1) : at + tenth]
        used, took = clock.memory[at + tenth - 1], statistics.median(part) * 1e3
        print(f"| {at + 1} to {at + tenth} | {used:.0f} | {took:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", default="arrays,poisson")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    for kind in given.data.split(","):
        for width in (32, 1024):
            overhead(kind, width, given.rounds)
        long(kind, given.epochs, given.steps)


if __name__ == "__main__":
    main()
