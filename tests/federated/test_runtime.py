"""Workers end when they should, and a lost one is reported in seconds."""

import contextlib
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

tff = pytest.importorskip("tensorflow_federated", reason="TensorFlow Federated is not installed on this stack")

# ruff: noqa: E402
import tfdpfl
from tfdpfl.federated import (
    WorkerLost,
    build_distributed_dp_fed_avg,
    build_dp_fed_avg,
    build_dp_ftrl,
    local_runtime,
    remote_runtime,
    runtime,
)


@pytest.mark.slow
def test_no_process_is_left_and_a_pipe_that_reads_the_output_ends():
    """Four scripts that end by a signal, as forks of one process, which imports TFF once."""
    program = pathlib.Path(__file__).with_name("runtime_ended.py")
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(tfdpfl.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-W", "ignore", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("nothing is left") == 4


def model_fn():
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((4,)), tf.keras.layers.Dense(3, kernel_initializer="zeros"),
    ])  # fmt: skip


def client(number, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(number, 4)).astype("float32"), rng.integers(0, 3, number).astype("int32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(5)


CLIENTS = [client(10, seed) for seed in range(5)]


@functools.cache
def process(build=build_dp_fed_avg, **more):
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 0.0, "clients_per_round": 5, **more}
    return build(
        model_fn, client_optimizer_fn="sgd", input_spec=CLIENTS[0].element_spec,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), **settings,
    )  # fmt: skip


def weights_after(process, rounds):
    state = process.initialize()
    for _ in range(rounds):
        state = process.next(state, CLIENTS).state
    return np.concatenate([np.ravel(w) for w in process.get_model_weights(state).trainable])


@contextlib.contextmanager
def workers(number):
    started = [runtime.LocalWorker() for _ in range(number)]
    try:
        for worker in started:
            runtime._wait_ready(f"localhost:{worker.port}", 60, lambda w=worker: w.running)
        yield started
    finally:
        for worker in started:
            worker.close()


def parent_of(process):
    return int((pathlib.Path("/proc") / str(process) / "stat").read_text().rsplit(")", 1)[1].split()[1])


def signal_to_servers(chosen, number):
    """Sends a signal to those of TFF's servers that are ``chosen`` by their command and their grandparent."""
    sent = 0
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else [b""]
            if command[0].endswith(b"worker_binary") and chosen(command, parent_of(parent_of(entry.name))):
                os.kill(int(entry.name), number)
                sent += 1
    return sent


def signal_to(worker, number):
    return signal_to_servers(lambda command, _: f"--port={worker.port}".encode() in command, number)


@pytest.mark.slow
def test_two_workers_give_one_workers_result():
    with local_runtime():
        alone = weights_after(process(), 2)
    with workers(2) as pair, remote_runtime([w.port for w in pair]):
        together = weights_after(process(noise_multiplier=1e-9), 2)
        of_a_tree = weights_after(process(build_dp_ftrl, server_optimizer_fn="sgd"), 2)
        secure = weights_after(process(build_distributed_dp_fed_avg), 2)
    assert np.abs(together - alone).max() <= 1e-6
    assert np.abs(of_a_tree - alone).max() <= 1e-6
    # TFF caps the grid at a millionth; rounding is at most one step a client and a round.
    assert np.abs(secure - alone).max() <= 2 * 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("how", "timeout"), [(signal.SIGKILL, 1e6), (signal.SIGSTOP, 8.0)])
def test_a_worker_lost_in_mid_round_is_named(how, timeout):
    with workers(2) as pair:
        rounds = process()
        with (
            pytest.raises(WorkerLost, match=str(pair[1].port)),
            remote_runtime(
                [f"localhost:{w.port}" for w in pair],
                timeout=timeout,
                heartbeat=0.5,  # a busy machine answers late
            ),
        ):
            state = rounds.next(rounds.initialize(), CLIENTS).state
            threading.Timer(0.3, lambda: signal_to(pair[1], how)).start()
            for _ in range(10_000):
                state = rounds.next(state, CLIENTS).state


@pytest.mark.slow
def test_a_local_worker_that_dies_is_reported_and_a_new_runtime_goes_on():
    rounds = process()
    before = []  # those of earlier tests of this process, which end in their own time
    signal_to_servers(lambda command, _: before.append(command), 0)
    own = lambda command, grandparent: grandparent == os.getpid() and command not in before
    with local_runtime():
        state = rounds.next(rounds.initialize(), CLIENTS).state
        assert signal_to_servers(own, signal.SIGKILL) == 1
        with pytest.raises(WorkerLost, match=r"local worker .* has ended"):
            rounds.next(state, CLIENTS)
    with local_runtime():
        assert rounds.next(state, CLIENTS).state is not None


def test_no_worker_and_malformed_targets_are_reported_at_once():
    with pytest.raises(WorkerLost, match="No worker answers at localhost:1"), remote_runtime(1, timeout=0.5):
        pass
    for targets in ([], ["somewhere"], ["host:99999"]):
        with pytest.raises(ValueError, match="targets must"), remote_runtime(targets):
            pass


def test_no_one_takes_a_workers_port_while_it_starts(monkeypatch):
    start = subprocess.Popen

    def after_an_intruder(command, **more):
        (port,) = [int(word.removeprefix("--port=")) for word in command if word.startswith("--port=")]
        with socket.socket() as intruder:
            with pytest.raises(OSError, match="in use"):
                intruder.bind(("", port))
            intruder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                intruder.bind(("localhost", port))
        return start(command, **more)

    monkeypatch.setattr(subprocess, "Popen", after_an_intruder)
    with workers(1) as (worker,):
        assert worker.running
    with socket.socket() as later:
        later.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        later.bind(("", worker.port))


def test_a_second_worker_on_one_port_is_refused():
    with workers(1) as (worker,):
        with pytest.raises(WorkerLost, match=f"Port {worker.port} cannot be opened .*in use"):
            runtime.worker(worker.port)
        assert worker.running
    with pytest.raises(WorkerLost, match="Port 70000 cannot be opened"):
        runtime.worker(70_000)


def test_the_context_that_was_there_comes_back():
    from tfdpfl.federated._tff import default_context

    runtime.ensure_default()
    before = default_context()
    with pytest.raises(KeyError), local_runtime():
        assert default_context() is not before
        raise KeyError
    assert default_context() is before
