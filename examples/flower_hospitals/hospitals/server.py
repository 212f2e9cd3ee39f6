"""Runs between the hospitals: averages what they send, prints the table at the end, and saves the model."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from hospitals.data import HOSPITALS
from hospitals.model import DELTA, TARGET_EPSILON, make_model
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.audit import report as privacy_of
from tfdpfl.flower import client_reports

app = ServerApp()


class Averaging(FedAvg):
    """FedAvg that keeps what each hospital says of its patients' privacy."""

    def __init__(self, clients: int):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.reports: dict[int, dict] = {}

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.reports |= client_reports(replies)
        return super().aggregate_train(server_round, replies)


def wait_for_all(grid: Grid, seconds: float = 120) -> None:
    """A strategy of Flower's would wait for ever."""
    until, said = time.monotonic() + seconds, -1
    while (connected := len({*grid.get_node_ids()})) < len(HOSPITALS):
        if time.monotonic() > until:
            raise RuntimeError(
                f"{connected} of {len(HOSPITALS)} hospitals are connected after {seconds:g} s. Where they are "
                f"simulated, start them all: flwr run ... --federation-config 'num-supernodes={len(HOSPITALS)}'"
            )
        if connected != said:
            print(f"Waiting: {connected} of {len(HOSPITALS)} hospitals are connected.", flush=True)
            said = connected
        time.sleep(0.5)


def save(path: Path, arrays: ArrayRecord, reports: dict[str, dict]) -> None:
    """Saves the model that all hospitals have trained, and next to it what it reveals of the patients of each."""
    model = make_model()
    model.set_weights(arrays.to_numpy_ndarrays())
    model.save(path)
    ledgers = {name: PrivacyLedger.from_dict(reports[name]["ledger"]) for name in sorted(reports)}
    page = privacy_of(ledgers, delta=DELTA, title=path.name, data={name: name for name in ledgers})
    path.with_suffix(".privacy.txt").write_text(f"{page}\n", "utf-8")
    print(f"The model is in {path.resolve()}, and its privacy in a .txt file next to it.", flush=True)


@app.main()
def main(grid: Grid, context: Context) -> None:
    path = Path(str(context.run_config.get("model") or "."))
    if path.name and (path.suffix != ".keras" or not path.resolve().parent.is_dir()):
        raise ValueError(f"model={str(path)!r} must be a file that ends in .keras, in a folder that is there.")
    wait_for_all(grid)
    strategy = Averaging(len(HOSPITALS))
    start = ArrayRecord(make_model().get_weights())
    result = strategy.start(grid, start, num_rounds=int(context.run_config.get("num-rounds", 3)), timeout=300)
    content = RecordDict({"arrays": result.arrays or start, "config": ConfigRecord()})
    questions = [Message(content, node, MessageType.EVALUATE) for node in grid.get_node_ids()]
    answers = [reply for reply in grid.send_and_receive(questions, timeout=300) if not reply.has_error()]
    rows = {reply.metadata.src_node_id: reply.content["metrics"] for reply in answers}
    names = {node: [*HOSPITALS][int(row["partition-id"])] for node, row in rows.items()}
    lines = [f"{'':<22}{'patients':>9}{'steps':>7}{'epsilon':>9}{'left':>7}{'accuracy':>10}{'attack AUC':>12}"]
    for node, row in sorted(rows.items(), key=lambda item: item[1]["partition-id"]):
        report = strategy.reports.get(node)
        name, beds = [*HOSPITALS.items()][int(row["partition-id"])]
        spent = f"{'no report':>23}"  # of one that refused or failed: its own ledger states what it has spent
        if report is not None:
            epsilon = report["epsilon"]
            spent = f"{report['steps']:>7}{epsilon:>9.3f}{max(0, TARGET_EPSILON - epsilon):>7.3f}"
        lines.append(f"{name:<22}{beds:>9}{spent}{row['accuracy']:>10.1%}{row['membership-auc']:>12.3f}")
    if path.name and result.arrays:
        save(path, result.arrays, {names.get(node, f"node {node}"): told for node, told in strategy.reports.items()})
    print("\n".join(["", *lines, f"{len(rows)} of {len(HOSPITALS)} hospitals answered"]), flush=True)
    time.sleep(1)  # so that the table is in the log before the run ends
