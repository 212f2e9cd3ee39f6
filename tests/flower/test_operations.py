"""A federation that runs is operated: keys are replaced and revoked, a run is stopped, the server is killed, and ε
counts every round."""

# ruff: noqa: E402
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
from commands import run
from dp_accounting import dp_event

import tfdpfl
from tfdpfl import _files
from tfdpfl.accounting import PrivacyLedger

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in ("examples/flower_hospitals", "benchmarks")]
from cluster import Cluster, certificates, end, make_key
from flower_app import write_app

HOSPITALS = [f"hospital-{number}" for number in range(3)]
SERVER = """
import os

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

    def show(number, arrays):  # what the model's audience has, on disk as soon as it is released
        new = folder + "/new.npy"
        np.save(new, arrays.to_numpy_ndarrays()[0])
        os.replace(new, folder + f"/shown-{config['life']}-{number:03}.npy")

    strategy.start(grid, ArrayRecord([np.zeros(5000)]), num_rounds=config["num-rounds"], timeout=60, evaluate_fn=show)
    print(strategy.statement(), flush=True)
"""
CLIENT = """
import time

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    time.sleep(4)  # costs no processor, and keeps the number of rounds low, each of which starts three processes
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)
"""


class Federation:
    """The processes of a deployment, and what can be seen of them."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.until = cluster, folder, time.monotonic() + 1500
        self.roster = {}

    def run(self, life, rounds=100, epsilon=50.0):
        """Starts the run of an app whose release and settings are others in each life of the server."""
        config = {"num-rounds": rounds, "client-epsilon": epsilon, "folder": str(self.folder), "life": life}
        write_app(self.folder / "app", "operated", SERVER, CLIENT, config, f"1.{life}.0")
        self.cluster.start("run", "flwr", "run", str(self.folder / "app"), "hospitals", "--stream")

    def run_id(self):
        return re.search(r"started run (\d+)", (self.folder / "run.log").read_text())[1]

    def server_app(self):
        """The processes that run the server's app."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = os.fsencode(self.folder) in (process / "environ").read_bytes()
                if ours and b"flwr-serverapp" in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def shown(self):
        """How many rounds' models were seen; a life begins with the one that it found."""
        names = [path.stem.split("-")[1:] for path in self.folder.glob("shown-*")]
        return len(names) - len({life for life, _ in names})

    def admit(self, names):
        """Registers keys, and puts the ids of their nodes into the roster."""
        commands = [("supernode", "register", str(self.folder / f"{key}.pub"), "hospitals", "--format", "json")
                    for key in names]  # fmt: skip
        nodes = [str(json.loads(told)["node-id"]) for told in self.at_once(commands)]
        self.roster.update(zip(nodes, names.values(), strict=True))
        (self.folder / "roster.json").write_text(json.dumps(self.roster))
        return nodes

    def at_once(self, commands):
        with futures.ThreadPoolExecutor() as threads:
            return [*threads.map(lambda command: self.cluster.flwr(*command), commands)]

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

    def end_run(self):
        """Waits until the command of a run has ended, and its app."""
        end([self.cluster.processes.pop("run")])
        with (self.folder / "ledger.jsonl").open("ab") as file:
            while True:
                try:
                    return _files.lock(file, "ledger_path", file.name)
                except ValueError:
                    self.cluster.check(self.until)


@pytest.mark.slow
def test_keys_change_and_the_server_is_stopped_and_killed_while_the_ledger_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(tfdpfl.__file__).parents[1]))
    certificates(tmp_path)
    with Cluster(tmp_path) as cluster:
        of = Federation(cluster, tmp_path)
        cluster.serve(of.until)
        make_key(tmp_path / "new-key")
        nodes = of.admit(dict(zip(HOSPITALS, HOSPITALS, strict=True)))
        for key in HOSPITALS:
            cluster.join(key, "partition-id=0")
        of.run(0)
        of.wait(lambda cohorts: any(len(cohort) == 3 for cohort in cohorts))

        # hospital-0 gets a new key, and goes on under its name. hospital-2 is revoked: its node ends by itself.
        of.admit({"new-key": "hospital-0"})
        cluster.end("hospital-0.node")
        revoked = cluster.processes.pop("hospital-2.node")
        of.at_once([("supernode", "unregister", node, "hospitals") for node in (nodes[0], nodes[2])])
        before = len(of.cohorts()) + 1  # a round may be under way that asked the old nodes
        cluster.join("new-key", "partition-id=0")
        of.wait(lambda cohorts: any(len(cohort) == 2 for cohort in cohorts[before:]))
        assert not any("hospital-2" in cohort for cohort in of.cohorts()[before:])
        revoked.wait()

        # The run is stopped, and goes on with a newer app of other settings. A node cannot come back with a revoked
        # key, and a key cannot be registered again.
        cluster.flwr("stop", of.run_id(), "hospitals")
        of.end_run()
        stopped = of.cohorts()
        assert len(stopped) >= of.shown()
        assert f"ok (journal, {len(stopped)} rounds" in run("verify", tmp_path / "ledger.jsonl")
        cluster.join("hospital-2", "partition-id=0")
        of.run(1, epsilon=100.0)
        with pytest.raises(RuntimeError, match="Public key already in use"):
            cluster.flwr("supernode", "register", str(tmp_path / "hospital-0.pub"), "hospitals")
        assert cluster.processes.pop("hospital-2.node").wait() != 0
        of.wait(lambda cohorts: len(cohorts) > len(stopped))

        # The SuperLink and its app are killed, as a container or a unit is, and start again. The nodes find them. (An
        # app may outlive a SuperLink that is killed alone: Flower's signal does not reach a thread that waits.)
        superlink = cluster.processes.pop("superlink")
        superlink.kill()
        for process in of.server_app():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        superlink.wait()
        of.end_run()
        done = of.cohorts()
        assert done[: len(stopped)] == stopped and len(done) >= of.shown()
        cluster.serve(of.until)
        of.run(2, len(done) + 1, 100.0)
        of.wait(lambda cohorts: len(cohorts) > len(done))
        cluster.processes["run"].wait()
    while of.server_app():  # nothing is left behind
        time.sleep(0.1)

    cohorts = of.cohorts()
    assert cohorts[: len(done)] == done and {name for cohort in cohorts for name in cohort} == {*HOSPITALS}
    lives = [[np.load(path) for path in sorted(tmp_path.glob(f"shown-{life}-*"))] for life in range(3)]
    noise = np.concatenate([np.diff(models, axis=0) for models in lives if len(models) > 1])  # clients change nothing
    assert len(noise) >= 3 and np.abs(np.corrcoef(noise) - np.eye(len(noise))).max() < 0.1  # 0.014 is chance
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
