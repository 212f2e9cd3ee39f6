"""Scripts on TFF that are ended by signals, and what they leave behind: python runtime_ended.py

Each script is a fork of this process, which has imported TFF and computed nothing. Its output goes into a pipe of its
own, and what it starts has a mark in its environment.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

import numpy as np

from tfdpfl.federated import local_runtime, runtime
from tfdpfl.federated._tff import tff

MARK = "TFDPFL_TEST_MARK"


def marked(mark):
    """Processes that were started with the mark, by what they run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes())
    return found


def computes(number):
    add_one = tff.tensorflow.computation(lambda x: x + 1, np.int32)
    print("result", add_one(number), flush=True)


def within_the_block():
    with local_runtime():
        computes(41)
        print("ready", flush=True)
        time.sleep(600)


def after_the_block():
    """`local_runtime`'s worker has ended, and that of the default serves."""
    with local_runtime():
        computes(41)
    runtime.ensure_default()
    computes(41)
    print("ready", flush=True)
    time.sleep(600)


def serves():
    with socket.socket() as held:  # so that no one else is given the port while the worker starts
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
        if os.fork() == 0:
            runtime._wait_ready(f"localhost:{port}", 600, lambda: True)
            print("result 42\nready", flush=True)
            os._exit(0)
        runtime.worker(port)


def ended(script, number):
    """Runs a script in a fork, ends it by a signal once it is ready, and returns how it ended."""
    mark, (read, write) = uuid.uuid4().hex, os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.close(read)
        os.close(write)
        os.environ[MARK] = mark
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background would ignore it
        script()
    os.close(write)
    said = []
    with open(read) as output:
        for line in output:
            said.append(line)
            if line == "ready\n":
                assert any(b"worker_binary" in process for process in marked(mark))
                os.kill(pid, number)
    assert "result 42\n" in said, said  # and the output has come to its end
    status = os.waitpid(pid, 0)[1]
    deadline = time.monotonic() + 600
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == []
    print(f"{script.__name__}: nothing is left", flush=True)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    assert ended(within_the_block, signal.SIGINT) == -signal.SIGINT  # an exception that leaves the block
    # SIGTERM is the same to local_runtime, which handles no signal.
    assert ended(within_the_block, signal.SIGKILL) == -signal.SIGKILL
    assert ended(after_the_block, signal.SIGTERM) == -signal.SIGTERM
    assert ended(serves, signal.SIGTERM) == 0
    sys.exit(0)
