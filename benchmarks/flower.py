"""What privacy costs a Flower server, and what a federation bears.

    python benchmarks/flower.py aggregate     # 10^7 weights, 100 clients: FedAvg's own aggregation, and ours
    python benchmarks/flower.py aggregate --clients 1000 --weights 100000
    python benchmarks/flower.py simulate      # Ray: 10 of 100 clients with and without DP; then 1,000 clients a round
    python benchmarks/flower.py kills         # 50 SuperNodes on loopback, 10 % of them killed, through 50 rounds

Each prints a table and writes it into benchmarks/results/flower.md. Times are CPU time of the server's process where
they are compared, since other work may share the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # it is 15: on a busy machine clients would hardly run

import numpy as np

RESULTS = Path(__file__).parent / "results" / "flower.md"
BIN = Path(sys.executable).parent


def note(part: str, text: str) -> None:
    """Puts a part of the page in its place."""
    print(text)
    page = RESULTS.read_text() if RESULTS.exists() else "# Flower\n\nMade by `python benchmarks/flower.py`.\n"
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    block = f"{begin}\n{text}\n{end}"
    if begin in page:
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, page, flags=re.S)
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    RESULTS.write_text(page)


# The server alone.


def aggregate(clients: int, weights: int, repeats: int) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from tfdpfl.flower import DifferentialPrivacyAdaptiveClipping, DifferentialPrivacyFixedClipping

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a ServerApp's process
    rng = np.random.default_rng(0)
    side = int((0.9 * weights) ** 0.5)
    shapes = [(side, side), (weights - side**2 - 1000,), (10, 100)]
    start = {str(i): rng.standard_normal(shape, dtype=np.float32) for i, shape in enumerate(shapes)}
    some = []  # a few updates that take turns: 100 would be 4 GB
    for _ in range(4):
        near = {k: w + 0.01 * rng.standard_normal(w.shape, dtype=np.float32) for k, w in start.items()}
        some.append(ArrayRecord({k: Array(w) for k, w in near.items()}))

    class Nodes:
        def get_node_ids(self):
            return range(1, clients + 1)

    def replies(messages):
        return [
            Message(
                RecordDict({"arrays": some[i % 4], "metrics": MetricRecord({"num-examples": 10})}), reply_to=message
            )
            for i, message in enumerate(messages)
        ]

    # Messages of a server come from its own node, and answers from those that were asked.
    def time_of(strategy) -> float:
        record = ArrayRecord({k: Array(w) for k, w in start.items()})
        messages = list(strategy.configure_train(1, record, ConfigRecord(), Nodes()))
        answers = replies(messages)
        began = time.process_time()
        strategy.aggregate_train(1, answers)
        return time.process_time() - began

    plain = FedAvg(fraction_train=1.0)
    arguments = dict(noise_multiplier=1.0, delta=1e-5, clients_per_round=clients)
    ours = {
        "FedAvg": lambda: plain,
        "fixed clip": lambda: DifferentialPrivacyFixedClipping(FedAvg(), clip=1.0, **arguments),
        "adaptive clip": lambda: DifferentialPrivacyAdaptiveClipping(FedAvg(), **arguments),
    }
    time_of(ours["fixed clip"]())  # imports
    found: dict[str, list[float]] = {name: [] for name in ours}
    for _ in range(repeats):
        for name, make in ours.items():
            found[name].append(time_of(make()))
    base = statistics.median(found["FedAvg"])
    rows = [f"| {name} | {statistics.median(t):.2f} | {statistics.median(t) / base:.2f} |" for name, t in found.items()]
    note(
        "aggregate" if clients == 100 else f"aggregate-{clients}",
        f"## Aggregation, {clients:,} clients\n\n{weights:.0e} weights; seconds of CPU for a round, median of "
        f"{repeats} in turns; noise, ledger and the inner FedAvg included.\n\n| | s | × FedAvg |\n| --- | --- | --- |\n"
        + "\n".join(rows),
    )


# Ray.


def simulate(clients_in_many: int) -> None:
    rows = []
    for name, nodes, rounds, private in (
        ("FedAvg, 10 of 100", 100, 5, False),
        ("fixed clip, 10 of 100", 100, 5, True),
        (f"fixed clip, all of {clients_in_many:,}", clients_in_many, 2, True),
    ):
        done = subprocess.run(
            [sys.executable, __file__, "one-simulation", str(nodes), str(rounds), str(int(private))],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        line = re.search(r"^RESULT (.*)$", done.stdout, re.M)
        if not line:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-3000:])
        got = json.loads(line[1])
        cells = [
            name, got["rounds"], f"{got['s']:.2f}", f"{got['process']:.2f}", f"{got['server']:.3f}", got["replied"],
            f"{got['mb']:.0f}", f"{got['norm']:.2f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
        note(  # after each, for they take long
            "simulate",
            "## Simulated clients\n\n"
            "Ray, one CPU core a client, a model of 100,000 weights in numpy; medians over rounds. CPU and memory "
            "are the server process's; what clients compute is in neither."
            "\n\n| | rounds | s a round | s of CPU a round | of these in aggregate_train | answers | peak MB | "
            "norm of the model |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows),
        )


def numpy_client():
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        rng = np.random.default_rng(context.node_id % 2**32)
        arrays = {k: a.numpy() for k, a in message.content["arrays"].items()}
        new = {k: (w + 1e-3 * (1 + rng.standard_normal(w.shape))).astype(w.dtype) for k, w in arrays.items()}
        sums = sum(float((np.ones((64, len(w))) @ w).sum()) for w in new.values() for _ in range(20))  # some work
        content = RecordDict(
            {
                "arrays": ArrayRecord({k: Array(w) for k, w in new.items()}),
                "metrics": MetricRecord({"num-examples": 10, "sum": sums}),
            }
        )
        return Message(content, reply_to=message)

    return app


def one_simulation(nodes: int, rounds: int, private: bool) -> None:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from tfdpfl.flower import DifferentialPrivacyFixedClipping

    server, cpu, ends, replied, process = ServerApp(), [], [], [], []

    @server.main()
    def main(grid, context):
        cohort = 10 if nodes == 100 else nodes
        inner = FedAvg(
            fraction_train=cohort / nodes, fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=cohort
        )  # fmt: skip
        strategy = inner
        if private:
            strategy = DifferentialPrivacyFixedClipping(
                inner, noise_multiplier=1.0, clip=0.5, clients_per_round=cohort, delta=1e-5
            )
        aggregate_train = strategy.aggregate_train

        def timed(server_round, replies):
            replies = list(replies)
            replied.append(sum(not reply.has_error() for reply in replies))
            began = time.process_time()
            result = aggregate_train(server_round, replies)
            cpu.append(time.process_time() - began)
            ends.append(time.monotonic())
            process.append(time.process_time())
            return result

        strategy.aggregate_train = timed
        start = ArrayRecord({"w": Array(np.zeros((1000, 100), np.float32))})
        result = strategy.start(grid, start, num_rounds=rounds, timeout=1800)
        spans = [b - a for a, b in itertools.pairwise(ends)]
        print("RESULT " + json.dumps({
            "rounds": rounds, "s": statistics.median(spans), "server": statistics.median(cpu[1:]),
            "process": statistics.median(b - a for a, b in itertools.pairwise(process)),
            "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
            "replied": sum(replied), "norm": float(np.linalg.norm(result.arrays["w"].numpy())),
        }), flush=True)  # fmt: skip

    run_simulation(server, numpy_client(), num_supernodes=nodes)


# Processes.

APP = """
[project]
name = "kills"
version = "1.0.0"
description = "A load test"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[tool.flwr.app]
publisher = "tfdpfl"

[tool.flwr.app.components]
serverapp = "kills.server:app"
clientapp = "kills.client:app"

[tool.flwr.app.config]
nodes = 50
rounds = 50
rate = 0.2
timeout = 60
ledger = ""
"""
CLIENT = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    new = {k: Array((a.numpy() + 0.01).astype(np.float32)) for k, a in message.content["arrays"].items()}
    content = RecordDict({"arrays": ArrayRecord(new), "metrics": MetricRecord({"num-examples": 10})})
    return Message(content, reply_to=message)
"""
SERVER = """
import json
import time

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from tfdpfl.flower import DifferentialPrivacyFixedClipping

app = ServerApp()

@app.main()
def main(grid, context):
    c = context.run_config
    while len(list(grid.get_node_ids())) < c["nodes"]:
        time.sleep(1)
    strategy = DifferentialPrivacyFixedClipping(
        FedAvg(fraction_evaluate=0.0), noise_multiplier=1.0, clip=1.0, sampling_rate=float(c["rate"]),
        population=int(c["nodes"]), delta=1e-5, ledger_path=c["ledger"],
    )
    start = ArrayRecord({"w": Array(np.zeros((100, 100), np.float32))})
    began = time.monotonic()
    result = strategy.start(grid, start, num_rounds=int(c["rounds"]), timeout=float(c["timeout"]))
    print("RESULT " + json.dumps({
        "rounds": strategy.rounds_charged, "asked": sum(map(len, strategy.cohorts)),
        "replied": sum(map(len, strategy.contributors)),
        "epsilon": strategy.epsilon, "s": (time.monotonic() - began) / strategy.rounds_charged,
        "finite": bool(np.isfinite(result.arrays["w"].numpy()).all()),
    }), flush=True)
    time.sleep(1)
"""


def kills(nodes: int, rounds: int, rate: float, timeout: float) -> None:
    """A tenth of the SuperNodes is killed at random moments of the run, each once, and stays dead."""
    with tempfile.TemporaryDirectory(prefix="flower-kills-") as temporary:
        folder = Path(temporary)
        (folder / "kills").mkdir()
        (folder / "pyproject.toml").write_text(APP)
        (folder / "kills" / "__init__.py").write_text("")
        (folder / "kills" / "client.py").write_text(CLIENT)
        (folder / "kills" / "server.py").write_text(SERVER)
        port = free_port()
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}
        running: list[subprocess.Popen] = []

        def start(name, *command):
            with open(folder / f"{name}.log", "wb") as log:
                process = subprocess.Popen(
                    [BIN / command[0], *command[1:]], env=environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            running.append(process)
            return process

        def node(number):
            return start(
                f"node-{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--host",
                "127.0.0.1", "--port", str(free_port()), "--node-config", f"partition-id={number}",
            )  # fmt: skip

        try:
            start(
                "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port),
                "--disable-runtime-dependency-installation",
            )  # fmt: skip
            while not listening(port):
                time.sleep(0.3)
            alive = [node(number) for number in range(nodes)]
            run = start(
                "run", "flwr", "run", str(folder), "here", "--stream", "--run-config",
                f'nodes={nodes} rounds={rounds} rate={rate} timeout={timeout} ledger="{folder / "ledger"}"',
            )  # fmt: skip
            log, killed, dead = folder / "run.log", 0, max(1, nodes // 10)
            moments = sorted(random.sample(range(2, rounds), dead))
            victims = random.sample(range(nodes), dead)
            while run.poll() is None:
                time.sleep(1)
                seen = len(re.findall(r"\[ROUND \d+/", log.read_text(errors="replace")))
                while killed < dead and seen >= moments[killed]:
                    os.killpg(alive[victims[killed]].pid, signal.SIGKILL)
                    killed += 1
            line = re.search(r"^RESULT (.*)$", log.read_text(errors="replace"), re.M)
            if not line:
                raise RuntimeError(log.read_text(errors="replace")[-3000:])
            got = json.loads(line[1])
        finally:
            for process in running:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                process.wait()
    note(
        "kills",
        f"## SuperNodes that die\n\n{nodes} SuperNodes on loopback, Poisson cohorts at rate {rate:g}, {killed} of them "
        "killed at random moments.\n\n"
        "| rounds that were released | clients asked | updates in the sums | ε at 1e-5 | s a round | model finite |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        f"| {got['rounds']} | {got['asked']} | {got['replied']} | {got['epsilon']:.3f} | {got['s']:.1f} | "
        f"{got['finite']} |",
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def listening(port: int) -> bool:
    with socket.socket() as found:
        found.settimeout(1)
        return found.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("aggregate")
    one.add_argument("--clients", type=int, default=100)
    one.add_argument("--weights", type=int, default=10**7)
    one.add_argument("--repeats", type=int, default=3)
    parts.add_parser("simulate").add_argument("--clients", type=int, default=1000)
    inner = parts.add_parser("one-simulation")
    inner.add_argument("numbers", type=int, nargs=3)
    many = parts.add_parser("kills")
    many.add_argument("--nodes", type=int, default=50)
    many.add_argument("--rounds", type=int, default=50)
    many.add_argument("--rate", type=float, default=0.2)
    many.add_argument("--timeout", type=float, default=60, help="seconds that a round waits for those that are gone")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    if arguments.part == "aggregate":
        aggregate(arguments.clients, arguments.weights, arguments.repeats)
    elif arguments.part == "simulate":
        simulate(arguments.clients)
    elif arguments.part == "one-simulation":
        one_simulation(arguments.numbers[0], arguments.numbers[1], bool(arguments.numbers[2]))
    else:
        kills(arguments.nodes, arguments.rounds, arguments.rate, arguments.timeout)


if __name__ == "__main__":
    main()
