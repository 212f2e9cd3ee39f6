"""Runs between the hospitals: averages what they send, and prints the table at the end."""

from __future__ import annotations

import time

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from hospitals.data import HOSPITALS
from hospitals.model import TARGET_EPSILON, make_model
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
    """A strategy of Flower's would wait for ever, and without a word."""
    until = time.monotonic() + seconds
    while (connected := len({*grid.get_node_ids()})) < len(HOSPITALS):
        if time.monotonic() > until:
            raise RuntimeError(
                f"{connected} of {len(HOSPITALS)} hospitals are connected after {seconds:g} s. Where they are "
                f"simulated, start them all: flwr run ... --federation-config 'num-supernodes={len(HOSPITALS)}'"
            )
        time.sleep(0.5)


@app.main()
def main(grid: Grid, context: Context) -> None:
    wait_for_all(grid)
    strategy = Averaging(len(HOSPITALS))
    start = ArrayRecord(make_model().get_weights())
    result = strategy.start(grid, start, num_rounds=int(context.run_config.get("num-rounds", 3)), timeout=300)
    content = RecordDict({"arrays": result.arrays or start, "config": ConfigRecord()})
    questions = [Message(content, node, MessageType.EVALUATE) for node in grid.get_node_ids()]
    answers = [reply for reply in grid.send_and_receive(questions, timeout=300) if not reply.has_error()]
    rows = {reply.metadata.src_node_id: reply.content["metrics"] for reply in answers}
    lines = [f"{'':<22}{'patients':>9}{'steps':>7}{'epsilon':>9}{'left':>7}{'accuracy':>10}{'attack AUC':>12}"]
    for node, row in sorted(rows.items(), key=lambda item: item[1]["partition-id"]):
        report = strategy.reports.get(node)
        name, beds = [*HOSPITALS.items()][int(row["partition-id"])]
        spent = f"{'no report':>23}"  # of one that refused or failed: its own ledger states what it has spent
        if report is not None:
            epsilon = report["epsilon"]
            spent = f"{report['steps']:>7}{epsilon:>9.3f}{max(0, TARGET_EPSILON - epsilon):>7.3f}"
        lines.append(f"{name:<22}{beds:>9}{spent}{row['accuracy']:>10.1%}{row['membership-auc']:>12.3f}")
    print("\n".join(["", *lines, f"{len(rows)} of {len(HOSPITALS)} hospitals answered"]), flush=True)
    time.sleep(1)  # so that the table is in the log before the run ends
