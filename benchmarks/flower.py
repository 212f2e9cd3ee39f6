"""What privacy costs a Flower server, and what a federation bears.

    python benchmarks/flower.py aggregate     # 10^7 weights, 100 clients: FedAvg's own aggregation, and ours
    python benchmarks/flower.py aggregate --clients 1000 --weights 100000
    python benchmarks/flower.py simulate      # Ray: 10 of 100 clients with and without DP; then 1,000 clients a round
    python benchmarks/flower.py simulate --clients 0 --rounds 20  # 10 of 100 alone
    python benchmarks/flower.py kills         # 50 SuperNodes on loopback, 10 % of them killed, through 50 rounds
    python benchmarks/flower.py server-kills  # the server is killed, again and again, and goes on

Each prints a table and writes it into benchmarks/results/flower.md. Times are CPU time of the server's process where
they are compared, since other work may share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
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
from flower_app import write_app

RESULTS = Path(__file__).parent / "results" / "flower.md"
BIN = Path(sys.executable).parent
ACTORS = 4  # processes that clients of a simulation take turns in


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
        "fixed clip": lambda: DifferentialPrivacyFixedClipping(FedAvg(), l2_norm_clip=1.0, **arguments),
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


def simulate(clients_in_many: int, rounds: int) -> None:
    for asked, nodes in ((10, 100), (clients_in_many, clients_in_many)):
        if not asked:
            continue
        done = subprocess.run(
            [sys.executable, __file__, "one-simulation", str(asked), str(nodes), str(rounds)],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        line = re.search(r"^RESULT (.*)$", done.stdout, re.M)
        if not line:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-3000:])
        got = json.loads(line[1])
        plain = got["strategies"]["FedAvg"]
        cells = [
            f"| {name} | {one['s']:.2f} | {one['all']:.3f} | {one['cpu'] * 1000:.1f} | "
            f"{(one['cpu'] - plain['cpu']) / plain['all']:+.1%} |"
            for name, one in got["strategies"].items()
        ]
        note(
            "simulate" if asked == 10 else f"simulate-{asked}",
            f"## Simulated clients, {asked:,} of {nodes:,}\n\n"
            f"Ray, {ACTORS} client processes on {os.cpu_count()} cores, a model of 100,000 weights in numpy. Rounds of "
            f"FedAvg and of the fixed clip around it take turns in one simulation, {rounds} of each after one that is "
            f"not counted; medians. {got['answers']:,} clients answered, all that were asked. The server has a peak of "
            f"{got['mb']:.0f} MB. The overhead of privacy is the CPU time of the strategy (whom it asks, its sum, "
            "noise, ε), as a part of the CPU time of all processes in a round of FedAvg.\n\n"
            "| | s a round | CPU s of all processes | CPU ms of the strategy | privacy adds |\n"
            "| --- | --- | --- | --- | --- |\n" + "\n".join(cells),
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
        sums = sum(float((np.ones((64, len(w)), np.float32) @ w).sum()) for w in new.values())  # some work
        content = RecordDict(
            {
                "arrays": ArrayRecord({k: Array(w) for k, w in new.items()}),
                "metrics": MetricRecord({"num-examples": 10, "sum": sums}),
            }
        )
        return Message(content, reply_to=message)

    return app


def cpu_of_all() -> float:
    """CPU seconds of this process and of those that come from it."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            used[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while new := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= new
    return sum(used[process] for process in ours) / os.sysconf("SC_CLK_TCK")


def one_simulation(asked: int, nodes: int, rounds: int) -> None:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from tfdpfl.flower import DifferentialPrivacyFixedClipping

    # Flower looks, for each node, at all messages that wait, again and again. Python lets such a thread run for 5 ms
    # before another may, and the others are those that hand messages to clients.
    sys.setswitchinterval(2e-4)
    server, answers = ServerApp(), []

    def timed(strategy, cpu):
        """Adds up what its two calls a round take."""
        for name in ("configure_train", "aggregate_train"):
            real = getattr(strategy, name)

            def call(number, given, *others, real=real):
                if isinstance(given, list):  # replies
                    answers.append(sum(not reply.has_error() for reply in given))
                began = time.thread_time()
                result = real(number, given, *others)
                cpu.append(time.thread_time() - began)
                return result

            setattr(strategy, name, call)
        return strategy

    @server.main()
    def main(grid, context):
        def inner():
            return FedAvg(
                fraction_train=asked / nodes, fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=asked
            )

        private = dict(noise_multiplier=1.0, l2_norm_clip=0.5, delta=1e-5)
        made = {
            "FedAvg": inner(),
            "private, fixed cohorts": DifferentialPrivacyFixedClipping(inner(), clients_per_round=asked, **private),
            "private, Poisson cohorts": DifferentialPrivacyFixedClipping(
                inner(), sampling_rate=asked / nodes, population=nodes, **private
            ),
        }
        cpu: dict[str, list[float]] = {name: [] for name in made}
        strategies = {name: timed(strategy, cpu[name]) for name, strategy in made.items()}
        arrays = ArrayRecord({"w": Array(np.zeros((1000, 100), np.float32))})
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in strategies}
        for name in [*strategies] * (rounds + 1):
            began, used = time.monotonic(), cpu_of_all()
            arrays = strategies[name].start(grid, arrays, num_rounds=1, timeout=1800).arrays
            spans[name].append((time.monotonic() - began, cpu_of_all() - used))
            print(name, spans[name][-1], sum(cpu[name][-2:]), file=sys.stderr, flush=True)
        found = {}
        for name in strategies:
            seconds, used = zip(*spans[name][1:], strict=True)
            own = [sum(cpu[name][at : at + 2]) for at in range(2, len(cpu[name]), 2)]
            found[name] = {key: statistics.median(v) for key, v in (("s", seconds), ("all", used), ("cpu", own))}
        print("RESULT " + json.dumps({
            "strategies": found, "answers": sum(answers),
            "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        }), flush=True)  # fmt: skip

    share = (os.cpu_count() or 1) / ACTORS
    run_simulation(
        server, numpy_client(), num_supernodes=nodes, backend_config={"client_resources": {"num_cpus": share}}
    )


# Processes.

CONFIG = dict(
    nodes=50, rounds=50, rate=0.2, timeout=60, folder="", step=0.01, life=-1, pause=0.0,
)  # fmt: skip
CLIENT = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    step = float(context.run_config["step"])
    new = {k: Array((a.numpy() + step).astype(np.float32)) for k, a in message.content["arrays"].items()}
    content = RecordDict({"arrays": ArrayRecord(new), "metrics": MetricRecord({"num-examples": 10})})
    return Message(content, reply_to=message)
"""
SERVER = """
import json
import os
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
        FedAvg(fraction_evaluate=0.0), noise_multiplier=1.0, l2_norm_clip=1.0, sampling_rate=float(c["rate"]),
        population=int(c["nodes"]), delta=1e-5, ledger_path=os.path.join(c["folder"], "ledger"),
    )

    def show(number, arrays):  # what the model's audience has, on disk as soon as it is released
        if c["life"] >= 0:
            new = os.path.join(c["folder"], "new.npy")
            np.save(new, arrays["w"].numpy())
            os.replace(new, os.path.join(c["folder"], f"shown-{c['life']:03}-{number:03}.npy"))
            time.sleep(float(c["pause"]))

    start = ArrayRecord({"w": Array(np.zeros((100, 100), np.float32))})
    began = time.monotonic()
    result = strategy.start(grid, start, num_rounds=int(c["rounds"]), timeout=float(c["timeout"]),
                            evaluate_fn=show)
    print("RESULT " + json.dumps({
        "number": max(result.train_metrics_clientapp, default=0),
        "rounds": strategy.rounds_charged, "asked": sum(map(len, strategy.cohorts)),
        "replied": sum(map(len, strategy.contributors)),
        "epsilon": strategy.epsilon, "s": (time.monotonic() - began) / strategy.rounds_charged,
        "finite": bool(np.isfinite(result.arrays["w"].numpy()).all()),
    }), flush=True)
    time.sleep(1)
"""


class Federation:
    """A SuperLink and SuperNodes on loopback, each in a process group of its own, all of them ended on the way out."""

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.running, self.port = folder, {}, free_port()
        write_app(folder, "kills", SERVER, CLIENT, CONFIG)
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = {**os.environ, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}
        self.nodes = nodes

    def __enter__(self) -> Federation:
        self.superlink()
        for number in range(self.nodes):
            self.start(
                f"node-{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host",
                "127.0.0.1", "--port", str(free_port()), "--node-config", f"partition-id={number}",
            )  # fmt: skip
        return self

    def __exit__(self, *why) -> None:
        for name in self.running:
            self.kill(name)
        until = time.monotonic() + 60  # what was killed takes a moment to end, on a busy machine
        while (orphans := of_folder(self.folder)) and time.monotonic() < until:
            for process in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)

    def start(self, name: str, *command: str) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [BIN / command[0], *command[1:]], env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.running[name]

    def superlink(self) -> None:
        self.start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "state.db"),
        )  # fmt: skip
        while not listening(self.port):
            time.sleep(0.3)

    def run(self, **config: float | str) -> subprocess.Popen:
        (self.folder / "run.log").unlink(missing_ok=True)
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())  # which TOML reads, too
        return self.start("run", "flwr", "run", str(self.folder), "here", "--stream", "--run-config", given)

    def kill(self, name: str) -> None:
        try:
            os.killpg(self.running[name].pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.running[name].wait()

    def said(self) -> str:
        return (self.folder / "run.log").read_text(errors="replace")

    def result(self) -> dict:
        line = re.search(r"^RESULT (.*)$", self.said(), re.M)
        if not line:
            raise RuntimeError(self.said()[-3000:])
        return json.loads(line[1])


def of_folder(folder: Path, what: str = "") -> list[int]:
    """Processes whose environment names the folder, and whose command has a word."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = os.fsencode(folder) in (process / "environ").read_bytes()
            if ours and what.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kills(nodes: int, rounds: int, rate: float, timeout: float) -> None:
    """A tenth of the SuperNodes is killed at random moments of the run, each once, and stays dead."""
    with tempfile.TemporaryDirectory(prefix="flower-kills-") as temporary, Federation(Path(temporary), nodes) as all_:
        run = all_.run(nodes=nodes, rounds=rounds, rate=rate, timeout=timeout, folder=temporary)
        killed, dead, memory = 0, max(1, nodes // 10), 0.0
        moments = sorted(random.sample(range(2, rounds), dead))
        victims = random.sample(range(nodes), dead)
        while run.poll() is None:
            time.sleep(1)
            memory = max(memory, megabytes(temporary))
            seen = len(re.findall(r"\[ROUND \d+/", all_.said()))
            while killed < dead and seen >= moments[killed]:
                all_.kill(f"node-{victims[killed]}")
                killed += 1
        got = all_.result()
    note(
        "kills",
        f"## SuperNodes that die\n\n{nodes} SuperNodes on loopback, each a process, Poisson cohorts at rate {rate:g}, "
        f"{killed} of them killed at random moments. A round waits at most {timeout:g} s for a client that does not "
        f"answer. `python benchmarks/flower.py kills --nodes {nodes} --rounds {rounds} --rate {rate:g} --timeout "
        f"{timeout:g}`\n\n"
        "| rounds that were released | clients asked | updates in the sums | ε at 1e-5 | s a round | model finite | "
        "peak MB of all processes |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        f"| {got['rounds']} | {got['asked']} | {got['replied']} | {got['epsilon']:.3f} | {got['s']:.1f} | "
        f"{got['finite']} | {memory:,.0f} |",
    )


def megabytes(folder: str) -> float:
    """The memory of all processes of a folder; what several share counts once."""
    total = 0
    for process in of_folder(Path(folder)):
        with contextlib.suppress(OSError):
            total += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text(), re.M)[1])
    return total / 1000


def server_kills(nodes: int, rounds: int, times: int, timeout: float) -> None:
    """The server is killed ``times`` times while it trains, and started again: in turns its ServerApp's process, the
    SuperLink, and both. Clients change nothing, so that models differ by their noise."""
    chance, survived = random.Random(0), []
    with tempfile.TemporaryDirectory(prefix="flower-kills-") as temporary, Federation(Path(temporary), nodes) as all_:
        ledger = Path(temporary) / "ledger"

        def charged() -> int:
            return ledger.read_bytes().count(b'{"charge"') if ledger.exists() else 0

        for life in range(times + 1):
            last = life == times
            run = all_.run(
                nodes=nodes, rounds=rounds, rate=1.0, timeout=timeout, folder=temporary, step=0.0, life=life, pause=0.3,
            )  # fmt: skip
            until = charged() + 1 + chance.randrange(0, max(1, rounds // (2 * times + 2)))
            while run.poll() is None and (last or charged() < until):
                time.sleep(0.02)
            if not last:
                if run.poll() is not None:
                    raise RuntimeError(f"it ended by itself:\n{all_.said()[-3000:]}")
                time.sleep(chance.uniform(0, 4))  # in the middle of a round, or after its model was seen
                victims = of_folder(Path(temporary), "flwr-serverapp")
                if not victims:
                    raise RuntimeError("no ServerApp's process was found")
                if life % 3:
                    all_.kill("superlink")
                if life % 3 != 1:
                    for process in victims:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
                all_.kill("run")
                while of_folder(Path(temporary), "flwr-serverapp"):  # an orphan ends by itself, and holds the ledger
                    time.sleep(0.2)
                shown = len([*Path(temporary).glob("shown-*")]) - life - 1  # a life begins with the model that it found
                survived.append((charged(), shown))
                if life % 3:
                    all_.superlink()
        got = all_.result()
        lives = [sorted(Path(temporary).glob(f"shown-{life:03}-*")) for life in range(times + 1)]
        models = [[np.load(path).ravel() for path in paths] for paths in lives]
        noise = np.concatenate([np.diff(of_life, axis=0) for of_life in models if len(of_life) > 1])
        alike = float(np.abs(np.atleast_2d(np.corrcoef(noise)) - np.eye(len(noise))).max())
        released = len(noise)
    left = of_folder(Path(temporary))
    before = all(shown <= counted for counted, shown in survived)
    note(
        "server-kills",
        f"## A server that dies\n\n{nodes} SuperNodes on loopback, {rounds} rounds; SIGKILL met in turns the "
        "ServerApp's process, the SuperLink, and both. They start again, and the same command goes on.\n\n"
        "| kills | rounds of the model | rounds charged | rounds whose model was seen | each was charged before | most "
        "alike two noises are (correlation) | ε at 1e-5 | processes left |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        f"| {times} | {got['number']} | {got['rounds']} | {released} | {before} | {alike:.3f} | "
        f"{got['epsilon']:.3f} | {len(left)} |",
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
    global RESULTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=RESULTS, help="the page that is written")
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("aggregate")
    one.add_argument("--clients", type=int, default=100)
    one.add_argument("--weights", type=int, default=10**7)
    one.add_argument("--repeats", type=int, default=3)
    simulated = parts.add_parser("simulate")
    simulated.add_argument("--clients", type=int, default=1000)
    simulated.add_argument("--rounds", type=int, default=3)
    inner = parts.add_parser("one-simulation")
    inner.add_argument("numbers", type=int, nargs=3)
    many = parts.add_parser("kills")
    many.add_argument("--nodes", type=int, default=50)
    many.add_argument("--rounds", type=int, default=50)
    many.add_argument("--rate", type=float, default=0.2)
    many.add_argument("--timeout", type=float, default=60, help="seconds that a round waits for those that are gone")
    server = parts.add_parser("server-kills")
    server.add_argument("--nodes", type=int, default=3)
    server.add_argument("--rounds", type=int, default=30)
    server.add_argument("--times", type=int, default=6)
    server.add_argument("--timeout", type=float, default=60)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end, too
    RESULTS = arguments.page
    logging.getLogger("flwr").setLevel(logging.WARNING)
    if arguments.part == "aggregate":
        aggregate(arguments.clients, arguments.weights, arguments.repeats)
    elif arguments.part == "simulate":
        simulate(arguments.clients, arguments.rounds)
    elif arguments.part == "one-simulation":
        one_simulation(*arguments.numbers)
    elif arguments.part == "server-kills":
        server_kills(arguments.nodes, arguments.rounds, arguments.times, arguments.timeout)
    else:
        kills(arguments.nodes, arguments.rounds, arguments.rate, arguments.timeout)


if __name__ == "__main__":
    main()
