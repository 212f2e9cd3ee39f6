"""A federation that runs is operated: keys are replaced and revoked, the server restarts, and ε counts every round."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from commands import run
from dp_accounting import dp_event

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.federated import files

APP = Path(__file__).parents[2] / "examples" / "flower_hospitals"
HOSPITALS = [f"hospital-{number}" for number in range(3)]
SERVER = """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from tfdpfl.flower import DifferentialPrivacyFixedClipping, Roster

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    folder = config["folder"]
    strategy = DifferentialPrivacyFixedClipping(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2), noise_multiplier=1.0,
        l2_norm_clip=0.5, clients_per_round=3, delta=1e-3, ledger_path=folder + "/ledger.jsonl",
        register_path=folder + "/clients.db", client_epsilon=config["client-epsilon"],
        clients=Roster(folder + "/roster.json"))
    strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=config["num-rounds"], timeout=60)
    print(strategy.statement(), flush=True)
"""
CLIENT = """
import time

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    time.sleep(2)  # costs no processor, and keeps the number of rounds low
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)
"""
PROJECT = """
[project]
name = "operated"
version = "{version}"
description = "Three hospitals that answer at once"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["operated"]

[tool.flwr.app]
publisher = "tfdpfl"

[tool.flwr.app.components]
serverapp = "operated.server:app"
clientapp = "operated.client:app"

[tool.flwr.app.config]
num-rounds = {rounds}
client-epsilon = {epsilon}
folder = "{folder}"
"""


class Federation:
    """The processes of a deployment, and what can be seen of them."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.until = cluster, folder, time.monotonic() + 1500
        self.roster = {}

    def write_app(self, version, rounds, epsilon):
        package = self.folder / "app" / "operated"
        package.mkdir(parents=True, exist_ok=True)
        for name, text in ("__init__", ""), ("server", SERVER), ("client", CLIENT):
            (package / f"{name}.py").write_text(text)
        project = PROJECT.format(version=version, rounds=rounds, epsilon=epsilon, folder=self.folder)
        (package.parent / "pyproject.toml").write_text(project)

    def run(self):
        self.cluster.start("run", "flwr", "run", str(self.folder / "app"), "hospitals", "--stream")

    def admit(self, key, name):
        """Registers a key, and puts the id of its node into the roster."""
        told = self.cluster.flwr(
            "supernode", "register", str(self.folder / f"{key}.pub"), "hospitals", "--format", "json"
        )
        node = str(json.loads(told)["node-id"])
        self.roster[node] = name
        (self.folder / "roster.json").write_text(json.dumps(self.roster))
        return node

    def cohorts(self):
        path = self.folder / "ledger.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        begun = {line["begin"]: line["cohort"] for line in lines if "begin" in line}
        return [begun[line["charge"]] for line in lines if "charge" in line]

    def wait(self, condition):
        """Returns the cohorts, once they meet a condition."""
        while not condition(self.cohorts()):
            assert self.cluster.processes["run"].poll() is None, (self.folder / "run.log").read_text()[-3000:]
            self.cluster.check(self.until)
        return self.cohorts()

    def wait_until_the_ledger_is_free(self):
        """The app of a run outlives its SuperLink by a moment."""
        with (self.folder / "ledger.jsonl").open("ab") as file:
            while True:
                try:
                    return files.lock(file, "ledger_path", file.name)
                except ValueError:
                    self.cluster.check(self.until)


@pytest.mark.slow
def test_keys_are_replaced_and_revoked_and_the_server_restarts_while_the_ledger_goes_on(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from cluster import Cluster, certificates, make_key

    monkeypatch.setenv("PYTHONPATH", str(Path(tfdpfl.__file__).parents[1]))
    certificates(tmp_path)
    with Cluster(tmp_path) as cluster:
        of = Federation(cluster, tmp_path)
        cluster.serve(of.until)
        nodes = [of.admit(key, key) for key in HOSPITALS]
        for key in HOSPITALS:
            cluster.join(key, "partition-id=0")
        of.write_app("1.0.0", 100, 50.0)
        of.run()
        of.wait(lambda cohorts: any(len(cohort) == 3 for cohort in cohorts))

        # hospital-0 gets a new key, and goes on under its name.
        make_key(tmp_path / "new-key")
        of.admit("new-key", "hospital-0")
        cluster.end("hospital-0.node")
        cluster.flwr("supernode", "unregister", nodes[0], "hospitals")
        before = len(of.cohorts()) + 1  # a round may be under way that asked the old node
        cluster.join("new-key", "partition-id=0")
        of.wait(lambda cohorts: any(len(cohort) == 3 for cohort in cohorts[before:]))
        with pytest.raises(RuntimeError, match="Public key already in use"):
            cluster.flwr("supernode", "register", str(tmp_path / "hospital-0.pub"), "hospitals")

        # hospital-2 is revoked: its node ends by itself, and cannot come back with its key.
        revoked = cluster.processes.pop("hospital-2.node")
        cluster.flwr("supernode", "unregister", nodes[2], "hospitals")
        before = len(of.cohorts()) + 1
        of.wait(lambda cohorts: len(cohorts) > before)
        assert not any("hospital-2" in cohort for cohort in of.cohorts()[before:])
        revoked.wait()
        cluster.join("hospital-2", "partition-id=0")
        assert cluster.processes.pop("hospital-2.node").wait() != 0

        # The server ends in the middle, and starts with a newer app of other settings. The nodes find it again.
        cluster.end("superlink")
        cluster.processes.pop("run").wait()
        of.wait_until_the_ledger_is_free()
        done = of.cohorts()
        cluster.serve(of.until)
        of.write_app("1.1.0", len(done) + 2, 100.0)
        of.run()
        of.wait(lambda cohorts: len(cohorts) == len(done) + 2)
        cluster.processes["run"].wait()

    cohorts = of.cohorts()
    assert cohorts[: len(done)] == done and {name for cohort in cohorts for name in cohort} == {*HOSPITALS}
    assert f"ok (journal, {len(cohorts)} rounds" in run("verify", tmp_path / "ledger.jsonl")
    told = run("epsilon", tmp_path / "ledger.jsonl", "--delta", 1e-3, "--accountant", "rdp", "--json")
    every_round = PrivacyLedger().add(dp_event.GaussianDpEvent(1.0), len(cohorts), adjacency="zero_out")
    assert json.loads(told)["figures"][0]["epsilon"] == pytest.approx(every_round.epsilon(1e-3, "rdp"))
    spent = json.loads(run("clients", tmp_path / "clients.db", "--delta", 1e-3, "--accountant", "rdp", "--json"))
    rounds = Counter(client for cohort in cohorts for client in cohort)
    assert {row["client"] for row in spent} == {*HOSPITALS}
    for row in spent:
        own = PrivacyLedger().add(dp_event.GaussianDpEvent(1.0), row["rounds"], adjacency="zero_out")
        assert row["runs"] == 1 and row["rounds"] >= rounds[row["client"]]
        assert row["epsilon"] == pytest.approx(own.epsilon(1e-3, "rdp"))
