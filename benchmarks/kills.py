"""Trainings that are killed at random and go on from what they had saved: is every step in the ledger, no noise twice?

    python benchmarks/kills.py [--kills 1000] [--ways backup,poisson,checkpoint,loop] [--seed 0]

Each way trains on data whose gradient is zero, so that what moves the weights is the noise, and saves as it goes. Its
process is killed (SIGKILL) at a random moment, and another goes on from the files. The next process compares what it
finds: Keras's own count of updates, which is saved with the weights, against the ledger that was saved with them. All
noise that any process drew is compared at the end. Prints a table; exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

EXAMPLES, BATCH, INTERVAL, LINEAGE = 60, 6, 5, 40
WAYS = ("backup", "poisson", "checkpoint", "loop")


def train(way: str, folder: Path, told: int) -> None:
    """What is killed: goes on from ``folder``, says what it found there, and trains until the end."""
    import tensorflow as tf

    import tfdpfl

    keras = tf.keras
    x, y = np.zeros((EXAMPLES, 1), "float32"), np.zeros((EXAMPLES, 3), "float32")
    log = os.open(folder / "noise", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def made():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, use_bias=False)])
        optimizer = tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1, expected_batch_size=BATCH)
        model.compile(optimizer, loss="mse")
        return model

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if not hasattr(self, "last"):  # what was saved is loaded by now
                self.said = found(self.model)
                self.last = self.model.get_weights()[0]

        def on_train_batch_end(self, batch, logs=None):
            now = self.model.get_weights()[0]
            os.write(log, (now - self.last).astype(np.float32).tobytes())
            self.last = now
            if self.said:  # from here on it may be killed
                os.write(told, self.said)
                self.said = None

    def found(model):
        optimizer = model.optimizer
        ledger = optimizer.ledger
        rows = [row["run"] for row in ledger.to_dict()["rows"]]
        passes = sum(row.get("num_epochs", 0) for row in rows)
        said = {"updates": int(np.asarray(optimizer.iterations)), "ledger": ledger.steps, "passes": passes,
                "unknown": ledger.unknown_steps, "rows": len(rows)}  # fmt: skip
        return json.dumps(said).encode() + b"\n"

    model, budget = made(), tfdpfl.callbacks.PrivacyBudget(EXAMPLES, 1e-5, accountant="rdp")
    forever = {"epochs": 10**6, "verbose": 0}
    if way in ("backup", "poisson"):
        backup = keras.callbacks.BackupAndRestore(
            str(folder / "backup"), save_freq="epoch" if way == "backup" else INTERVAL, delete_checkpoint=False
        )
        data = (x, y)
        if way == "poisson":
            data = (tfdpfl.data.poisson_batches((x, y), expected_batch_size=BATCH, steps=10),)
        model.fit(*data, batch_size=BATCH if way == "backup" else None, callbacks=[backup, budget, Watch()], **forever)
    elif way == "checkpoint":
        path = folder / "model.keras"
        if path.exists():
            model = keras.models.load_model(path)

        class Save(keras.callbacks.Callback):  # as ModelCheckpoint does, but that a kill leaves the old file whole
            def on_epoch_end(self, epoch, logs=None):
                self.model.save(folder / "new.keras")
                os.replace(folder / "new.keras", path)

        model.fit(x, y, batch_size=BATCH, callbacks=[budget, Save(), Watch()], **forever)
    else:
        model.optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, str(folder / "loop"), max_to_keep=2)
        manager.restore_or_initialize()
        said = found(model)

        @tf.function(input_signature=[tf.TensorSpec([None, 1]), tf.TensorSpec([None, 3])])
        def step(x, y):
            model.optimizer.minimize(lambda: tf.reduce_mean((model(x) - y) ** 2), model.trainable_variables)

        for i in range(10**9):
            before = model.get_weights()[0]
            step(x[:BATCH], y[:BATCH])
            os.write(log, (model.get_weights()[0] - before).astype(np.float32).tobytes())
            if i == 0:
                os.write(told, said)
            if i % INTERVAL == 0:
                manager.save()


def drawn(folder: Path) -> bytes:
    path = folder / "noise"
    return path.read_bytes() if path.exists() else b""


def run(way: str, kills: int, rng: random.Random) -> dict:
    found, broken, noise = [], [], []
    folder, failures = Path(tempfile.mkdtemp(prefix="kills-")), 0
    for kill in range(kills + 1):
        if kill and kill % LINEAGE == 0:
            noise.append(drawn(folder))
            shutil.rmtree(folder)
            folder = Path(tempfile.mkdtemp(prefix="kills-"))
        hears, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hears)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2), os.dup2(quiet, 1)
            try:
                train(way, folder, told)
            finally:
                os._exit(3)
        os.close(told)
        with os.fdopen(hears) as pipe:
            line = pipe.readline()
        if line:
            said = json.loads(line)
            found.append(said)
            if said["ledger"] < said["updates"]:
                broken.append({"kill": kill, **said})
            time.sleep(rng.uniform(0.0, 0.8))
        else:  # it ended by itself: what was saved could not be read
            failures += 1
            noise.append(drawn(folder))
            shutil.rmtree(folder)
            folder.mkdir()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    noise.append(drawn(folder))
    shutil.rmtree(folder)
    draws = np.concatenate([np.frombuffer(part[: len(part) // 12 * 12], np.float32) for part in noise]).reshape(-1, 3)
    beyond = max(said["ledger"] - said["updates"] for said in found)
    passes = max((said["passes"] - said["updates"] / (EXAMPLES / BATCH) for said in found), default=0)
    return {
        "way": way, "kills": kills, "resumed": sum(said["updates"] > 0 for said in found), "unreadable": failures,
        "below": len(broken), "beyond": beyond, "passes beyond": round(passes, 1),
        "rows": max(said["rows"] for said in found), "draws": len(draws),
        "repeated": len(draws) - len(np.unique(draws.round(5), axis=0)), "broken": broken[:3],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="over all ways")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    # Imported before the forks, and started after them: TensorFlow's threads do not come along.
    import tensorflow  # noqa: F401

    import tfdpfl

    tfdpfl.DPSGD, tfdpfl.callbacks  # noqa: B018
    tfdpfl.compute_epsilon(num_examples=9, batch_size=9, noise_multiplier=1, delta=1e-5, num_steps=1, sampling="none")
    ways = given.ways.split(",")
    rows: list[dict] = []
    for way in ways:
        rows.append(run(way, given.kills // len(ways), random.Random(f"{given.seed} {way}")))
        columns = [name for name in rows[0] if name != "broken"]
        if len(rows) == 1:
            print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
        print("| " + " | ".join(str(rows[-1][name]) for name in columns) + " |", flush=True)
    bad = [row for row in rows if row["below"] or row["repeated"] or not row["resumed"]]
    for row in bad:
        print("BROKEN:", row)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
