"""Checks what this machine has for private training, and what it costs to lack it: `tfdpfl doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import secrets
from collections.abc import Iterator
from types import ModuleType

from tfdpfl import native
from tfdpfl._version import __version__

__all__ = ["Finding", "examine"]

_FROM_SOURCE = "install a C compiler, then tfdpfl again"
# Measured on two cores: docs/figures.md.
_COST_OF_NO_KERNELS = "a step of a convolutional network takes 1.1 to 1.4 times as long"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
      name: what was looked at.
      fact: what was found.
      cost: what the machine lacks, what that costs and what to do; empty if nothing is to be done.
    """

    name: str
    fact: str
    cost: str = ""

    def __str__(self) -> str:
        return f"{self.name:<11} {self.fact}" + (f". {self.cost}." if self.cost else "")


def examine() -> list[Finding]:
    """Returns what this machine has, a finding a line.

    Example:
        >>> [finding.name for finding in examine()][:3]
        ['tfdpfl', 'TensorFlow', 'kernels']
    """
    return [Finding("tfdpfl", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"), *_stack()]


def _stack() -> Iterator[Finding]:
    try:
        import tensorflow as tf
    except ImportError as error:
        why = f"Only the accounting works without it: pip install tensorflow ({error})"
        yield Finding("TensorFlow", "not installed", why)
        yield _entropy()
        yield _memory()
        return
    one_dnn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower() not in ("0", "false")
    slow = "Without oneDNN looped LSTMs take longer: unset TF_ENABLE_ONEDNN_OPTS"
    yield Finding(
        "TensorFlow", f"{tf.__version__}, Keras {importlib.metadata.version('keras')}", "" if one_dnn else slow
    )
    yield _kernels()
    yield _noise(tf)
    yield _entropy()
    yield _devices(tf)
    yield _memory()
    yield _package("federated", "tensorflow-federated", "it needs Python 3.10 or 3.11: see the page Install")
    yield _package("flower", "flwr", "tfdpfl.flower needs it: pip install 'tfdpfl[flower]'")


def _kernels() -> Finding:
    found = native.kernels()
    missing = found.missing or native.register_ops()
    if missing:
        remedy = f"unset {native.SWITCH}" if native.SWITCH in missing else _FROM_SOURCE
        return Finding("kernels", f"none: {missing}", f"On a CPU {_COST_OF_NO_KERNELS}: {remedy}")
    threads = f"{native.count_threads()} threads"
    noise = "for noise" if found.draws else "for the normals of noise, not its words: this processor has no AES"
    return Finding(
        "kernels", f"{found.instructions}, {threads}, for convolutions and embeddings in float32 and {noise}"
    )


def _noise(tf: ModuleType) -> Finding:
    from tfdpfl import noise

    source = noise.Source()
    tf.function(lambda: source.gaussian([[2]], 1.0)).get_concrete_function()
    weaker = "" if source.generator == "aes-128-ctr" else (
        "On an accelerator or under XLA no cryptographic generator draws, and secure_noise=True is refused: train on a "
        "CPU if you need it")  # fmt: skip
    return Finding("noise", f"by {source.generator}", weaker)


def _entropy() -> Finding:
    try:
        secrets.token_bytes(16)
    except (NotImplementedError, OSError) as error:
        return Finding("entropy", f"none: {error}", "No private noise can be drawn: run where os.urandom works")
    return Finding("entropy", "from the operating system")


def _devices(tf: ModuleType) -> Finding:
    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    others = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds) if kind != "CPU")
    untested = "tfdpfl was not tested on these: python benchmarks/gpu.py checks it" if others else ""
    return Finding("devices", f"{cores} cores, {others or 'no accelerator'}", untested)


def _memory() -> Finding:
    try:
        with open("/proc/meminfo") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in file}
    except OSError:
        return Finding("memory", "unknown, since there is no /proc/meminfo")
    return Finding("memory", f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GiB available")


def _package(name: str, distribution: str, cost: str) -> Finding:
    try:
        return Finding(name, f"{distribution} {importlib.metadata.version(distribution)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"{distribution} is not installed", cost)
