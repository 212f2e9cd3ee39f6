"""Trains one model on a folder of CSV files, one for each hospital, and prints the epsilon of each.

    python flower_csv.py                  # makes 20 files of synthetic patients
    python flower_csv.py --folder my-data # one file for each hospital, with the columns below

Each hospital trains with DP-SGD on its own patients. It computes its own noise from the number of its patients, so that
small hospitals take part in all rounds, too, and no hospital passes the target.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # it is 15: on a busy machine clients would hardly run

import flwr.simulation
import numpy as np
import tensorflow as tf
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import tfdpfl
from tfdpfl.flower import client_reports, example_dp

# Change these for your files. A column of numbers has a public guess of its mean and deviation, because those of the
# patients would reveal something about them. A column of words has a number for each word: {"no": 0, "yes": 1}.
COLUMNS: dict[str, tuple[float, float] | dict[str, float]] = {
    "age": (55, 15),
    "pressure": (135, 20),
    "exercise": (5, 3),
}
LABEL, CLASSES = "ill", ["0", "1"]  # the column that is predicted, and what stands in it
TARGET_EPSILON, DELTA = 4.0, 1e-4
BATCH_SIZE, LOCAL_STEPS = 60, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder with one CSV file for each hospital")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two hospitals and one round")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or make_files(Path(temporary), 2 if arguments.quick else 20)
        files = sorted(folder.resolve().glob("*.csv"))
        if len(files) < 2:
            raise SystemExit(f"--folder {folder} has {len(files)} CSV files. Give a folder with one for each hospital.")
        for path in files:
            read(path)  # so that what is wrong in a file is said before anything is spent
        flwr.simulation.run_simulation(server_of(files, rounds), client_of(files, rounds), num_supernodes=len(files))


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features and the labels in a file. Rows with an empty cell are left out."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [*csv.DictReader(file)]
    found = [*rows[0]] if rows else []
    missing = [name for name in (*COLUMNS, LABEL) if name not in found]
    if missing:
        raise SystemExit(f"{path} has no column {missing[0]!r}, but {found}. Correct COLUMNS and LABEL, or the file.")
    whole = [(line, row) for line, row in enumerate(rows, 2) if all(row[name] for name in (*COLUMNS, LABEL))]
    x = [[scaled(row[name], scale, f"{path}, line {line}, column {name}") for name, scale in COLUMNS.items()]
         for line, row in whole]  # fmt: skip
    words = {word: number for number, word in enumerate(CLASSES)}
    y = [scaled(row[LABEL], words, f"{path}, line {line}, column {LABEL}") for line, row in whole]
    if not whole:
        raise SystemExit(f"{path} has no row without an empty cell. Leave the file out, or columns that are empty.")
    return np.array(x, "float32"), np.array(y, "int32")


def scaled(text: str, scale: tuple[float, float] | dict[str, float], where: str) -> float:
    """Returns the number that the model gets for a cell."""
    if isinstance(scale, dict):
        if text not in scale:
            raise SystemExit(f"{where}: {text!r} is none of {[*scale]}. Add it to COLUMNS or CLASSES.")
        return scale[text]
    mean, deviation = scale
    try:
        number = (float(text) - mean) / deviation
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SystemExit(f"{where}: {text!r} is no number. Leave the cell empty, or list the words in COLUMNS.")
    return number


def make_net() -> tf.keras.Model:
    return tf.keras.Sequential([tf.keras.Input((len(COLUMNS),)), tf.keras.layers.Dense(len(CLASSES))])


def client_of(files: list[Path], rounds: int) -> ClientApp:
    app = ClientApp()

    def trainer(number: int):
        x, y = read(files[number])
        batch_size = min(BATCH_SIZE, len(y))
        noise = tfdpfl.accounting.compute_noise_multiplier(
            target_epsilon=TARGET_EPSILON, delta=DELTA, num_examples=len(y), batch_size=batch_size,
            num_steps=rounds * LOCAL_STEPS,
        )  # fmt: skip
        return example_dp(
            make_net, lambda context: (x, y), loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            l2_norm_clip=1.0, noise_multiplier=noise, batch_size=batch_size, local_steps=LOCAL_STEPS, optimizer="adam",
            learning_rate=0.05, delta=DELTA, target_epsilon=TARGET_EPSILON,
        )  # fmt: skip

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        reply = trainer(number)(message, context)
        if not reply.has_error():
            reply.content["hospital"] = ConfigRecord({"name": files[number].stem})
        return reply

    return app


class Averaging(FedAvg):
    """FedAvg that keeps what each hospital says of its patients' privacy, by its name."""

    def __init__(self, hospitals: int):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=hospitals, min_available_nodes=hospitals)
        self.reports: dict[str, dict] = {}

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        named = {reply.metadata.src_node_id: reply.content["hospital"]["name"]
                 for reply in replies if not reply.has_error()}  # fmt: skip
        self.reports |= {named[node]: report for node, report in client_reports(replies).items()}
        return super().aggregate_train(server_round, replies)


def server_of(files: list[Path], rounds: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Averaging(len(files))
        strategy.start(grid, ArrayRecord(make_net().get_weights()), num_rounds=rounds)
        print(table([path.stem for path in files], strategy.reports), flush=True)

    return app


def table(names: list[str], reports: dict[str, dict]) -> str:
    lines = [f"{'':<16}{'steps':>6}{'epsilon':>9}{'left':>7}"]
    for name in names:
        report = reports.get(name, {"steps": 0, "epsilon": 0.0})
        left = TARGET_EPSILON - report["epsilon"]
        lines.append(f"{name:<16}{report['steps']:>6}{report['epsilon']:>9.3f}{left:>7.3f}")
    return "\n".join(["", *lines, f"{len(reports)} of {len(names)} hospitals trained"])


def make_files(folder: Path, hospitals: int) -> Path:
    """Writes a file of synthetic patients for each hospital."""
    for number in range(hospitals):
        rng = np.random.default_rng(number)
        beds = int(rng.integers(150, 900))
        age = rng.normal(35 + 2 * number, 12, beds).clip(18, 95)
        pressure = 90 + 0.8 * age + rng.normal(0, 15, beds)
        exercise = np.maximum(0, 8 - 0.05 * age + rng.normal(0, 3, beds))
        risk = 0.05 * age + 0.03 * pressure - 0.2 * exercise + rng.normal(0, 0.7, beds)
        rows = np.column_stack([age, pressure, exercise, risk > 5.8])
        np.savetxt(
            folder / f"hospital-{number:02}.csv", rows, fmt=["%.1f", "%.1f", "%.2f", "%d"], delimiter=",",
            header=",".join([*COLUMNS, LABEL]), comments="",
        )  # fmt: skip
    return folder


if __name__ == "__main__":
    main()
