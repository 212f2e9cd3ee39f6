"""Runtimes for federated computations: on a worker of this machine that never outlives the script, or on several.

TFF's server process listens on every network interface, without encryption or authentication, and no option of it
says otherwise. Run it on machines and networks where that is acceptable, or behind a firewall.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from tfdpfl._types import Computation
from tfdpfl.federated import _tff

__all__ = ["WorkerLost", "ensure_default", "local_runtime", "remote_runtime", "worker"]

_START_SECONDS = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

# The shell waits for its standard input to end, which happens however this process ends, and then ends the worker;
# or for the worker to end, and then ends itself. The worker has no part in the script's standard output.
_SUPERVISOR = """
"$@" </dev/null >/dev/null &
worker=$!
exec >/dev/null 2>&1
{ read -r _; kill -KILL $worker; } <&3 &
reader=$!
wait $worker
kill -KILL $reader
"""


class WorkerLost(RuntimeError):
    """A worker ended, or does not answer. The round that it was in has released nothing: run it again from the last
    state, in a new runtime."""


class LocalWorker:
    """TFF's server as a child that ends with this process: on exit, exceptions, signals and SIGKILL alike.

    Args:
      port: where it listens; None picks a free one.
      max_concurrent_clients: how many clients are computed at a time; None for as many as there are processors.

    Raises:
      WorkerLost: the port is taken.
    """

    def __init__(self, port: int | None = None, max_concurrent_clients: int | None = None):
        self._held = _hold(port)
        self.port = self._held.getsockname()[1]
        concurrent = max_concurrent_clients or os.cpu_count() or 1
        read_end, self._lifeline = os.pipe()  # neither end is inherited, but for what dup2 does below
        command = [
            "sh", "-c", "exec 3<&0; " + _SUPERVISOR, "tfdpfl-worker", _tff.worker_binary(),
            f"--port={self.port}", f"--max_concurrent_computation_calls={concurrent}",
        ]  # fmt: skip
        try:
            # Its own session: Ctrl-C in a terminal reaches Python, which then ends the worker in good order.
            self._process = subprocess.Popen(command, stdin=read_end, start_new_session=True)
        except BaseException:
            os.close(self._lifeline)
            self._held.close()
            raise
        finally:
            os.close(read_end)
        self._closed = False
        atexit.register(self.close)

    @property
    def running(self) -> bool:
        return not self._closed and self._process.poll() is None

    def wait(self) -> None:
        """Returns when the worker has ended."""
        self._process.wait()

    def close(self) -> None:
        """Ends the worker and waits until it is gone. May be called again."""
        if self._closed:
            return
        self._closed = True
        os.close(self._lifeline)
        self._process.wait()
        self._held.close()
        atexit.unregister(self.close)


class _Link:
    """A channel to one worker, made when first used, with what is known of the worker's health."""

    def __init__(self, target: str):
        self.target = target
        self.lost: str | None = None
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()

    def connect(self) -> grpc.Channel:
        with self._lock:
            if self.lost is not None:
                raise WorkerLost(self.lost)
            if self._channel is None:
                self._channel = _tff.channel(self.target)
            return self._channel

    def lose(self, reason: str) -> None:
        """Ends all calls to the worker, now and later."""
        with self._lock:
            self.lost = self.lost or reason
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    close = lose


class _Local:
    """A worker started by its first computation."""

    def __init__(self, max_concurrent_clients: int | None):
        self._concurrent = max_concurrent_clients
        self._worker: LocalWorker | None = None
        self._link: _Link | None = None
        self._lock = threading.Lock()
        self._ended = False

    def connect(self) -> grpc.Channel:
        with self._lock:
            if self._ended:
                raise WorkerLost("This local_runtime() has ended. Run the computation inside its `with` block.")
            if self._worker is None or self._link is None:
                self._worker = LocalWorker(max_concurrent_clients=self._concurrent)
                self._link = _Link(f"localhost:{self._worker.port}")
                _wait_ready(self._link.target, _START_SECONDS, lambda: bool(self._worker and self._worker.running))
            if not self._worker.running:
                self._link.lose(
                    "the local worker (TFF's worker_binary) has ended: often the system killed it for want of memory. "
                    "Start a new local_runtime(), with a lower max_concurrent_clients, from the last state"
                )
            return self._link.connect()

    def close(self) -> None:
        with self._lock:
            self._ended = True
            if self._link is not None:
                self._link.close("this local_runtime() has ended")
            if self._worker is not None:
                self._worker.close()


@contextlib.contextmanager
def local_runtime(max_concurrent_clients: int | None = None) -> Iterator[None]:
    """Runs this thread's TFF computations on a worker of this machine, which is gone when the block ends.

        with local_runtime():
            state = process.initialize()

    The worker starts with the first computation. It ends after success, after an exception, after Ctrl-C, SIGTERM or
    SIGKILL of this process, and it does not hold this process's standard output open.

    If cohorts vary in size, the worker's memory grows over the first 250 rounds or so, with TFF's plain processes
    (323 to 400 MB) as with private ones (361 to 460 MB, cohorts of 8 to 12 clients, 50,890 weights). The C
    library keeps free blocks in its arenas. ``MALLOC_ARENA_MAX=2`` in the environment, set before the first
    computation, keeps it at 290 to 330 MB, for rounds that take 8 % longer.

    Args:
      max_concurrent_clients: how many clients are computed at a time, and so how many are in memory; None for as many
        as there are processors.

    Raises:
      WorkerLost: by the computation that finds the worker dead.
    """
    ensure_default()  # for what is computed after the block
    local = _Local(max_concurrent_clients)
    try:
        with _tff.installed(_tff.context_on_one(_tff.executor_factory(local.connect))):
            yield
    finally:
        local.close()


def ensure_default() -> None:
    """Puts a worker that ends with this process where TFF's own default would leave one behind, in this thread."""
    if _tff.leaves_a_worker(_tff.default_context()):
        local = _Local(None)
        _tff.set_default_context(_tff.context_on_one(_tff.executor_factory(local.connect)))


@contextlib.contextmanager
def remote_runtime(targets: Sequence[str | int], *, timeout: float = 10.0, heartbeat: float = 1.0) -> Iterator[None]:
    """Runs this thread's TFF computations on several workers, which share each round's clients between them.

        with remote_runtime(["localhost:8001", "localhost:8002"]):
            state = process.initialize()

    Clients are split evenly and in order. Every ``heartbeat`` seconds each worker has to answer a new connection; one
    that has not for ``timeout`` seconds, or whose connection breaks, is lost.

    Args:
      targets: "host:port" of each worker (`worker`, or ``tfdpfl worker``); a bare port is on this machine.
      timeout: seconds without an answer after which a worker is lost.
      heartbeat: seconds between two questions.

    Raises:
      ValueError: ``targets`` is empty or malformed.
      WorkerLost: by the block's start or by the computation under way, naming the worker: within a second or two where
        it has ended, and about ``timeout`` where it hangs. Nothing is retried for ever; the round has released nothing.
    """
    links = [_Link(_target(target)) for target in ([targets] if isinstance(targets, str | int) else targets)]
    if not links:
        raise ValueError('targets must name at least one worker, got none. Give "host:port" for each.')
    stop = threading.Event()

    def watch(link: _Link) -> None:
        while not stop.wait(heartbeat):
            if not _lives(link.target, timeout):
                link.lose(f"worker {link.target} does not answer: look at it, and start it again")
                return

    def call(invocation: Callable[[], Computation]) -> Computation:
        try:
            return invocation()
        except Exception as error:
            # An answer that breaks off can come before the next heartbeat: ask before the error is passed on.
            for link in links:
                if link.lost is None and isinstance(error, grpc.RpcError) and not _lives(link.target, timeout):
                    link.lose(f"worker {link.target} broke off and does not answer: start it again")
            lost = [link.lost for link in links if link.lost is not None]
            if lost and not isinstance(error, WorkerLost):
                raise WorkerLost("; ".join(lost)) from error
            raise

    for link in links:
        if not _answers(link.target, timeout):
            raise WorkerLost(f"No worker answers at {link.target}. Start one there: `tfdpfl worker --port PORT`.")
    watchers = [threading.Thread(target=watch, args=[link], daemon=True) for link in links]
    for watcher in watchers:
        watcher.start()
    ensure_default()  # for what is computed after the block
    context = _tff.context_on_many([_tff.executor_factory(_checked(link, timeout)) for link in links])
    try:
        with _tff.installed(_tff.guarded(context, call)):
            yield
    finally:
        stop.set()
        for link in links:
            link.close("this remote_runtime() has ended")


def worker(port: int, max_concurrent_clients: int | None = None) -> None:
    """Serves TFF computations on ``port`` until this process gets SIGINT, SIGTERM or SIGHUP.

    The server listens on all interfaces and trusts whoever connects: keep the port behind a firewall.

    Args:
      port: where `remote_runtime` will find it.
      max_concurrent_clients: how many clients are computed at a time; None for as many as there are processors.

    Raises:
      WorkerLost: the port is taken, or the server ended by itself.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(0)

    served = LocalWorker(port, max_concurrent_clients)
    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        served.wait()
        raise WorkerLost("TFF's worker_binary ended by itself. Run it by hand to see why.")
    finally:
        served.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _checked(link: _Link, timeout: float) -> Callable[[], grpc.Channel]:
    """Asks for an answer before a new executor, so that TFF's retries of a broken call end here."""

    def connect() -> grpc.Channel:
        if link.lost is None and not _lives(link.target, timeout):
            link.lose(f"worker {link.target} does not answer: look at it, and start it again")
        return link.connect()

    return connect


def _answers(target: str, timeout: float) -> bool:
    """Whether the server at ``target`` completes a new connection's handshake, which a stopped process does not."""
    connection = _tff.channel(target)
    try:
        grpc.channel_ready_future(connection).result(timeout=timeout)
        return True
    except grpc.FutureTimeoutError:
        return False
    finally:
        connection.close()


def _lives(target: str, timeout: float) -> bool:
    """Whether a server that answered before still does. One whose port is closed has ended, whatever the timeout."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass  # gRPC may know better
    return _answers(target, timeout)


def _wait_ready(target: str, seconds: float, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if _answers(target, 0.5):
            return
        if not alive():
            raise WorkerLost("TFF's worker_binary ended at once. Run it by hand to see why.")
    raise WorkerLost(f"TFF's worker_binary did not answer within {seconds:g} s of its start.")


def _hold(port: int | None) -> socket.socket:
    """A socket bound to the port, or to a free one, that does not listen: no one else is given the port, while TFF's
    server, which sets SO_REUSEPORT, may still have it."""
    if port is not None:
        with socket.socket() as alone:  # else two servers would share the port, and each get some of the connections
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                alone.bind(("", port))
            except (OSError, OverflowError) as error:
                raise WorkerLost(
                    f"Port {port} cannot be opened ({error}). Give another, or end what uses it."
                ) from None
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("", port or 0))
    return held


def _target(target: str | int) -> str:
    host, _, port = str(target).rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'targets must be "host:port" or a port, got {target!r}.')
    return f"{host or 'localhost'}:{port}"
