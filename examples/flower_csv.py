"""Trains one model on a folder of CSV files, one for each hospital, and prints the epsilon of each.

    python flower_csv.py                  # makes 20 files of synthetic patients
    python flower_csv.py --folder my-data # one file for each hospital, with the columns below
    python flower_csv.py --folder my-data --model model.keras # keeps the trained model, and its privacy next to it
    python flower_csv.py --make-app app   # for `flwr run app`: each node reads the file that its own config names

Each hospital trains with DP-SGD on its own patients. It computes its own noise from the number of its patients, so that
small hospitals take part in all rounds, too, and no hospital passes the target.
"""

from __future__ import annotations

import argparse
import collections
import csv
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # it is 15: on a busy machine clients would hardly run

import numpy as np
import tensorflow as tf
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.flower import client_reports, example_dp
from tfdpfl.flower.reports import as_template

# Change these for your files. A column of numbers has a public guess of its mean and deviation, because those of the
# patients would reveal something about them. A column of words has a number for each word: {"no": 0, "yes": 1}.
# A patient with an empty cell is left out, unless the column has a value for it: (55, 15, 50) or {"no": 0, "": 0.5}.
# The model then gets this value, and a second number that is 1 if the cell was empty.
Scale = tuple[float, ...] | dict[str, float]
COLUMNS: dict[str, Scale] = {
    "age": (55, 15),
    "pressure": (135, 20),
    "exercise": (5, 3),
}
LABEL, CLASSES = "ill", ["0", "1"]  # the column that is predicted, and what stands in it
TARGET_EPSILON, DELTA = 4.0, 1e-4
BATCH_SIZE, LOCAL_STEPS = 60, 20

# Flower would install `dependencies` anew for every run, from an index. The environment of each node has them.
APP = """[project]
name = "flower-csv"
version = "1.0.0"
description = "Hospitals train one model, each on its own CSV file"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "hospitals"

[tool.flwr.app.components]
serverapp = "flower_csv:server"
clientapp = "flower_csv:client"

[tool.flwr.app.config]
num-hospitals = 3
num-rounds = 3
wait-seconds = 600
model = ""
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder with one CSV file for each hospital")
    parser.add_argument("--ledgers", type=Path, help="a folder that keeps what each hospital has spent")
    parser.add_argument("--model", type=Path, help="a .keras file for the trained model; its privacy stands next to it")
    parser.add_argument("--make-app", type=Path, help="write a Flower app into this new folder, and train nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two hospitals and one round")
    arguments = parser.parse_args()
    if arguments.make_app:
        return make_app(arguments.make_app)
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or make_files(Path(temporary), 2 if arguments.quick else 20)
        files = sorted(folder.resolve().glob("*.csv"))
        if len(files) < 2:
            raise SystemExit(f"--folder {folder} has {len(files)} CSV files. Give a folder with one for each hospital.")
        try:
            check_model(arguments.model)
            for path in files:
                read(path)  # so that what is wrong in a file is said before anything is spent
        except ValueError as error:
            raise SystemExit(str(error)) from None
        simulate(files, arguments.ledgers, rounds, arguments.model)


def simulate(files: list[Path], ledgers: Path | None, rounds: int, model: Path | None) -> None:
    """Trains on all files in this process, and prints the table."""
    from flwr.simulation import run_simulation

    def own_files(context: Context) -> tuple[Path, Path | None]:
        path = files[int(context.node_config["partition-id"])]
        return path, ledgers and ledgers.resolve() / f"{path.stem}.json"

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, rounds, len(files), model, names=[path.stem for path in files])

    run_simulation(server, client_of(own_files), num_supernodes=len(files))


def make_app(folder: Path) -> None:
    """Writes this program, and what Flower wants next to it, into a folder."""
    folder.mkdir(parents=True)
    shutil.copy(__file__, folder / "flower_csv.py")
    (folder / "pyproject.toml").write_text(APP)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features and the labels in a file."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [*csv.DictReader(file)]
    found = [*rows[0]] if rows else []
    missing = [name for name in (*COLUMNS, LABEL) if name not in found]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}, but {found}. Correct COLUMNS and LABEL, or the file.")
    needed = [LABEL, *(name for name, scale in COLUMNS.items() if not may_be_empty(scale))]
    whole = [(line, row) for line, row in enumerate(rows, 2) if all(row[name] for name in needed)]
    x = [
        [number for name, scale in COLUMNS.items()
         for number in features(row[name] or "", scale, f"{path}, line {line}, column {name}")] for line, row in whole
    ]  # fmt: skip
    words = {word: number for number, word in enumerate(CLASSES)}
    y = [scaled(row[LABEL], words, f"{path}, line {line}, column {LABEL}") for line, row in whole]
    if not whole:
        raise ValueError(
            f"{path} has no row without an empty cell. Leave the file out, or give a value for empty cells."
        )
    return np.array(x, "float32"), np.array(y, "int32")


def may_be_empty(scale: Scale) -> bool:
    return "" in scale if isinstance(scale, dict) else len(scale) > 2


def features(text: str, scale: Scale, where: str) -> list[float]:
    """Returns what the model gets for a cell: a number, and whether the cell was empty if it may be."""
    if not may_be_empty(scale):
        return [scaled(text, scale, where)]
    value = text if text or isinstance(scale, dict) else str(scale[2])
    return [scaled(value, scale, where), float(not text)]


def scaled(text: str, scale: Scale, where: str) -> float:
    if isinstance(scale, dict):
        if text not in scale:
            raise ValueError(f"{where}: {text!r} is none of {[*scale]}. Add it to COLUMNS or CLASSES.")
        return scale[text]
    try:
        number = (float(text) - scale[0]) / scale[1]
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {text!r} is no number. Leave the cell empty, or list the words in COLUMNS.")
    return number


def make_net() -> tf.keras.Model:
    width = sum(1 + may_be_empty(scale) for scale in COLUMNS.values())
    return tf.keras.Sequential([tf.keras.Input((width,)), tf.keras.layers.Dense(len(CLASSES))])


def client_of(own_files: Callable[[Context], tuple[Path, Path | None]]) -> ClientApp:
    """Returns a client that trains on the CSV file, and keeps the ledger, that ``own_files`` returns for its node."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            path, ledger = own_files(context)
            x, y = read(path)
            batch_size, steps = min(BATCH_SIZE, len(y)), int(message.content["config"]["num-rounds"]) * LOCAL_STEPS
            noise = tfdpfl.accounting.compute_noise_multiplier(
                target_epsilon=TARGET_EPSILON, delta=DELTA, num_examples=len(y), batch_size=batch_size, num_steps=steps
            )
        except Exception as error:  # Flower would send its text to the server, and the text can hold a cell
            print(f"This hospital does not take part: {error!r}", file=sys.stderr, flush=True)
            return Message(Error(0, "this client did not take part; its own log says why"), reply_to=message)
        reply = example_dp(
            make_net, (x, y), loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            l2_norm_clip=1.0, noise_multiplier=noise, batch_size=batch_size, local_steps=LOCAL_STEPS, optimizer="adam",
            learning_rate=0.05, delta=DELTA, target_epsilon=TARGET_EPSILON,
            ledger_path=ledger and as_template(ledger),
        )(message, context)  # fmt: skip
        if not reply.has_error():
            reply.content["hospital"] = ConfigRecord({"name": path.stem})
        return reply

    return app


class Averaging(FedAvg):
    """FedAvg that keeps the model, and what each hospital says of its patients' privacy."""

    def __init__(self, hospitals: int, wait_seconds: float = 600):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=hospitals, min_available_nodes=hospitals)
        self.wait_seconds = wait_seconds
        self.by_node: dict[int, dict] = {}
        self.names: dict[int, str] = {}
        self.trained: ArrayRecord | None = None

    @property
    def reports(self) -> dict[str, dict]:
        """What each hospital says, by the name of its file, and by its node, too, if two files have one name."""
        files = collections.Counter(self.names[node] for node in self.by_node)
        return {
            self.names[node] if files[self.names[node]] == 1 else f"{self.names[node]} ({node})": report
            for node, report in self.by_node.items()
        }

    def configure_train(self, server_round, arrays, config, grid):
        wait_for_all(grid, self.min_available_nodes, self.wait_seconds)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.names |= {reply.metadata.src_node_id: reply.content["hospital"]["name"]
                       for reply in replies if not reply.has_error()}  # fmt: skip
        self.by_node |= client_reports(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.trained = arrays or self.trained
        return arrays, metrics


def wait_for_all(grid: Grid, hospitals: int, seconds: float) -> None:
    """Waits until all hospitals are connected. Flower would wait without a limit."""
    until, said = time.monotonic() + seconds, -1
    while (connected := len({*grid.get_node_ids()})) < hospitals:
        if time.monotonic() > until:
            raise TimeoutError(
                f"{hospitals - connected} of {hospitals} hospitals are not connected after {seconds:g} s. "
                "`flwr supernode list` shows whose key is online. Start the other nodes, and look at their logs; or "
                f'train without them: --run-config "num-hospitals={connected}". A longer wait is "wait-seconds=3600".'
            )
        if connected != said:
            print(f"Waiting for {hospitals - connected} of {hospitals} hospitals, {seconds:g} s at most.", flush=True)
            said = connected
        time.sleep(0.5)


def serve(
    grid: Grid, rounds: int, hospitals: int, model: Path | None = None, wait_seconds: float = 600,
    names: list[str] | None = None,
) -> None:  # fmt: skip
    """Trains, prints the table (of ``names``, or of all that trained), and saves the model.

    If a hospital is gone after a round, what was trained until then is saved, too.
    """
    strategy = Averaging(hospitals, wait_seconds)
    sent = ConfigRecord({"num-rounds": rounds})  # from which each hospital computes its noise
    try:
        strategy.start(grid, ArrayRecord(make_net().get_weights()), num_rounds=rounds, train_config=sent)
    finally:
        names = sorted(strategy.reports) if names is None else names
        print(table(names, strategy.reports, hospitals), flush=True)
        if strategy.trained is None:
            pass
        elif model is None:
            print("The model is not saved: name a file for it by --model, or as model in --run-config.", flush=True)
        else:
            save(model, strategy.trained, strategy.reports)


def check_model(path: Path | None) -> None:
    """Raises where the model could not be saved after the training."""
    if path is not None and (path.suffix != ".keras" or not os.access(path.resolve().parent, os.W_OK)):
        raise ValueError(
            f"The model cannot be saved as {path}. Give a name that ends in .keras, in a folder that is there."
        )


def save(path: Path, trained: ArrayRecord, reports: dict[str, dict]) -> None:
    """Saves the model that all hospitals have trained, and next to it what it reveals of the patients of each."""
    net = make_net()
    net.set_weights(trained.to_numpy_ndarrays())
    net.save(path)
    ledgers = {name: PrivacyLedger.from_dict(reports[name]["ledger"]) for name in sorted(reports)}
    page = tfdpfl.audit.report(ledgers, delta=DELTA, title=path.name, data={name: name for name in ledgers})
    statement = path.with_suffix(".privacy.txt")
    statement.write_text(f"{page}\n", "utf-8")
    print(f"The model is in {path.resolve()}, and its privacy in {statement.name} next to it.", flush=True)


def table(names: list[str], reports: dict[str, dict], hospitals: int) -> str:
    lines = [f"{'':<16}{'steps':>6}{'epsilon':>9}{'left':>7}"]
    for name in names:
        report = reports.get(name)
        if report is None:  # it refused or failed, and its own ledger states what it has spent
            lines.append(f"{name:<16}  no report")
            continue
        left = TARGET_EPSILON - report["epsilon"]
        lines.append(f"{name:<16}{report['steps']:>6}{report['epsilon']:>9.3f}{left:>7.3f}")
    return "\n".join(["", *lines, f"{len(reports)} of {hospitals} hospitals trained"])


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


def own_files_of_node(context: Context) -> tuple[Path, Path]:
    """What `--node-config 'csv="/data/north.csv" ledger="/data/north-ledger.json"'` names."""
    return Path(str(context.node_config["csv"])), Path(str(context.node_config["ledger"]))


client = client_of(own_files_of_node)  # these two are the app that `--make-app` writes
server = ServerApp()


@server.main()
def serve_app(grid: Grid, context: Context) -> None:
    config = context.run_config
    model = Path(str(config["model"])) if config["model"] else None
    check_model(model)
    serve(grid, int(config["num-rounds"]), int(config["num-hospitals"]), model, float(config["wait-seconds"]))
    time.sleep(1)  # so that the table is in the log before the run ends


if __name__ == "__main__":
    main()
