"""Trainings that are killed at random and go on from what they had saved: is every step in the ledger, no noise twice?

    python benchmarks/kills.py [--kills 1000] [--ways backup,poisson,checkpoint,loop,tree,banded,blt] [--seed 0]

Each way trains on data whose gradient is zero, so that what moves the weights is the noise, and saves as it goes. Its
process is killed (SIGKILL) at a random moment, and another goes on from the files. The next process compares what it
finds: Keras's own count of updates, which is saved with the weights, against the ledger that was saved with them. All
noise that any process drew is compared at the end. Of correlated noise (tree, banded, blt) the steps that led to the
state that is found must have the noise of one matrix, whoever drew it, and be priced as one training in which examples
were used as often, and as near to each other, as they were. Prints a table; exits with 1 if a guarantee was broken.
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
PASS, RATE, MULTIPLIER = EXAMPLES // BATCH, 0.1, 2.0
WAYS = ("backup", "poisson", "checkpoint", "loop", "tree", "banded", "blt")
# What a process writes down of a step: its number in the training, its batch's in the pass, and what it did.
RECORD = np.dtype([("process", "i8"), ("step", "i8"), ("place", "i8"), ("moved", "f4", 3)])
EPOCHS = 1000
# How the printed table names the ways and the figures.
NAMES = {
    "backup": "BackupAndRestore, each epoch",
    "poisson": f"BackupAndRestore, every {INTERVAL} steps, Poisson batches",
    "checkpoint": "model file, each epoch",
    "loop": "checkpoints of a loop",
    "tree": f"BackupAndRestore, every {INTERVAL} steps, tree noise",
    "banded": "model file, each epoch, banded noise",
    "blt": "model file, each epoch, BLT noise",
}
HEADINGS = {
    "way": "saved by",
    "kills": "kills",
    "resumed": "resumed",
    "unreadable": "unreadable",
    "below": "ledgers with too few steps",
    "beyond": "most extra steps",
    "passes beyond": "most extra passes",
    "rows": "most entries",
    "draws": "noises compared",
    "repeated": "noises repeated",
    "off": "variance off",
}


def noise_of(way: str):
    """The correlated noise that a way trains with, or None."""
    from tfdpfl.noise import BLT, Banded, Tree

    bounds = {"min_separation": PASS, "max_participations": EPOCHS, "num_steps": 10 * PASS}
    made = {"tree": lambda: Tree(restart_every=16), "banded": lambda: Banded(bands=3, **bounds),
            "blt": lambda: BLT(**bounds)}  # fmt: skip
    return made[way]() if way in made else None


def led_to(records: np.ndarray) -> list[list[int]]:
    """For each record the numbers of those that led to it, itself the last: a process that goes on from a saved state
    takes the place of what came after it."""
    paths: list[list[int]] = []
    for i, step in enumerate(records["step"]):
        paths.append([*(paths[-1][:step] if paths else []), i])
        assert len(paths[-1]) == step + 1, "a step was saved and not written down"
    return paths


def train(way: str, folder: Path, told: int) -> None:
    """What is killed: goes on from ``folder``, says what it found there, and trains until the end."""
    import tensorflow as tf

    import tfdpfl

    keras = tf.keras
    x, y = np.zeros((EXAMPLES, 1), "float32"), np.zeros((EXAMPLES, 3), "float32")
    log = os.open(folder / "noise", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def made():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, use_bias=False)])
        optimizer = tfdpfl.DPSGD(1.0, MULTIPLIER, learning_rate=RATE, expected_batch_size=BATCH, noise=noise_of(way))
        model.compile(optimizer, loss="mse")
        return model

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.place = 0
            if not hasattr(self, "last"):  # what was saved is loaded by now
                self.said = found(self.model)
                self.last = self.model.get_weights()[0]

        def on_train_batch_end(self, batch, logs=None):
            now = self.model.get_weights()[0]
            write(int(np.asarray(self.model.optimizer.iterations)) - 1, self.place, now - self.last)
            self.last, self.place = now, self.place + 1
            if self.said:  # from here on it may be killed
                os.write(told, self.said)
                self.said = None

    def found(model):
        optimizer = model.optimizer
        ledger = optimizer.ledger
        rows, updates = ledger.to_dict()["rows"], int(np.asarray(optimizer.iterations))
        passes = sum(row.get("run", {}).get("num_epochs", 0) for row in rows)
        priced = optimizer.noise is None or not updates or is_priced(rows, updates)
        said = {"updates": updates, "ledger": ledger.steps, "passes": passes, "unknown": ledger.unknown_steps,
                "rows": len(rows), "priced": priced}  # fmt: skip
        return json.dumps(said).encode() + b"\n"

    def is_priced(rows, updates):
        """Whether the steps that led to the state are a row of the ledger, with all uses that examples had in them."""
        records = records_of(folder)
        places = [records["place"][i] for i in led_to(records)[-1][:updates]]
        uses = max(map(places.count, places))
        apart = min((b - a for a in range(updates) for b in range(a + 1, updates) if places[a] == places[b]), default=0)
        return any(
            row["num_steps"] >= updates
            and (row["min_separation"] <= apart or not apart)
            and (row["max_participations"] or updates) >= uses
            for row in (row["correlated"] for row in rows)
        )

    def write(step, place, moved):
        os.write(log, np.array([(os.getpid(), step, place, moved)], RECORD).tobytes())

    model, budget = made(), tfdpfl.callbacks.PrivacyBudget(EXAMPLES, 1e-5, accountant="rdp")
    forever = {"epochs": EPOCHS, "verbose": 0}
    if way in ("backup", "poisson", "tree"):
        backup = keras.callbacks.BackupAndRestore(
            str(folder / "backup"), save_freq="epoch" if way == "backup" else INTERVAL, delete_checkpoint=False
        )
        data: tuple = (x, y)
        if way == "tree":
            data = (tfdpfl.data.fixed_order((x, y), BATCH),)
        if way == "poisson":
            data = (tfdpfl.data.poisson_batches((x, y), expected_batch_size=BATCH, steps=10),)
        # Before what saves, so that no step is saved that is not written down.
        model.fit(*data, batch_size=BATCH if way == "backup" else None, callbacks=[Watch(), backup, budget], **forever)
    elif way in ("checkpoint", "banded", "blt"):
        path = folder / "model.keras"
        if path.exists():
            model = keras.models.load_model(path)

        class Save(keras.callbacks.Callback):  # as ModelCheckpoint does, but that a kill leaves the old file whole
            def on_epoch_end(self, epoch, logs=None):
                self.model.save(folder / "new.keras")
                os.replace(folder / "new.keras", path)

        data = (x, y) if way == "checkpoint" else (tfdpfl.data.fixed_order((x, y), BATCH),)
        size = BATCH if way == "checkpoint" else None
        model.fit(*data, batch_size=size, callbacks=[budget, Watch(), Save()], **forever)
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
            write(int(np.asarray(model.optimizer.iterations)) - 1, 0, model.get_weights()[0] - before)
            if i == 0:
                os.write(told, said)
            if i % INTERVAL == 0:
                manager.save()


def records_of(folder: Path) -> np.ndarray:
    """What the processes of a training wrote down, in order."""
    path = folder / "noise"
    return np.fromfile(path, RECORD) if path.exists() else np.zeros(0, RECORD)


def base_of(way: str, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The independent normals that a training's noise is made of, [steps, 3]; which were drawn just after a load."""
    z = -records["moved"].astype(np.float64) * BATCH / RATE / MULTIPLIER
    noise, paths = noise_of(way), led_to(records)
    after = np.array([len(set(records["process"][path[-4:]])) > 1 for path in paths], bool)
    if noise is not None and len(z):
        c = noise.matrix(max(map(len, paths)))
        z = np.stack([c[len(path) - 1, : len(path)] @ z[path] for path in paths]) / noise.unit
    return z, after


def run(way: str, kills: int, rng: random.Random) -> dict:
    found, broken, noise = [], [], []
    folder, failures = Path(tempfile.mkdtemp(prefix="kills-")), 0
    for kill in range(kills + 1):
        if kill and kill % LINEAGE == 0:
            noise.append(base_of(way, records_of(folder)))
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
            if said["ledger"] < said["updates"] or not said["priced"]:
                broken.append({"kill": kill, **said})
            # Some steps, not some time: on a busy machine as on a quiet one, some of them after something was saved.
            until, patience = len(records_of(folder)) + rng.randrange(4 * PASS), time.monotonic() + 60
            while len(records_of(folder)) < until and time.monotonic() < patience:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.1))
        else:  # it ended by itself: what was saved could not be read
            failures += 1
            noise.append(base_of(way, records_of(folder)))
            shutil.rmtree(folder)
            folder.mkdir()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    noise.append(base_of(way, records_of(folder)))
    shutil.rmtree(folder)
    draws, after = np.concatenate([z for z, _ in noise]), np.concatenate([loaded for _, loaded in noise])
    # A chi-squared statistic, as a normal one (Wilson & Hilferty 1931): of all draws, and of the first after a load.
    shares = [2 / (9 * max(z.size, 1)) for z in (draws, draws[after])]
    off = [(np.cbrt((z**2).mean()) - 1 + share) / np.sqrt(share) if z.size else 0.0
           for z, share in zip((draws, draws[after]), shares, strict=True)]  # fmt: skip
    beyond = max(said["ledger"] - said["updates"] for said in found)
    passes = max((said["passes"] - said["updates"] / (EXAMPLES / BATCH) for said in found), default=0)
    return {
        "way": way, "kills": kills, "resumed": sum(said["updates"] > 0 for said in found), "unreadable": failures,
        "below": len(broken), "beyond": beyond, "passes beyond": round(passes, 1),
        "rows": max(said["rows"] for said in found), "draws": len(draws),
        "repeated": len(draws) - len(np.unique(draws.round(3), axis=0)), "off": round(float(max(map(abs, off))), 1),
        "broken": broken[:3],
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
            print("| " + " | ".join(HEADINGS[name] for name in columns) + " |\n|" + " --- |" * len(columns))
        shown = {**rows[-1], "way": NAMES[way]}
        print("| " + " | ".join(str(shown[name]) for name in columns) + " |", flush=True)
    bad = [row for row in rows if row["below"] or row["repeated"] or row["off"] > 5]
    # Of a few kills all may have met files that were being written; of more, something is wrong.
    bad += [row for row in rows if not row["resumed"] and (row["kills"] >= 20 or not any(r["resumed"] for r in rows))]
    for row in bad:
        print("BROKEN:", row)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
