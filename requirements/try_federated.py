"""Tries, in empty virtual environments, the commands that install TensorFlow Federated beside tfdpfl.

    python3.11 requirements/try_federated.py [clone|pip|both] [--python python3.10]

`clone` runs the commands of docs/federated.md in a copy of this repository. `pip` installs a wheel of it, as someone
without a clone does, and then runs the command that the error message of `tfdpfl.federated` names. Each ends with a
round of private training. Both need a package index and take some minutes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "_build", "__pycache__", "results")
ROUND = """
import numpy as np, tensorflow as tf
from tfdpfl import federated as fl

def make_model():
    return tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])

x, y = np.ones((32, 4), np.float32), np.zeros(32, np.int32)
clients = fl.data.from_partition((x, y), np.split(np.arange(32), 4)).batch(8)
with fl.local_runtime():
    process = fl.build_dp_fed_avg(
        make_model, clients_per_round=2, noise_multiplier=1.0, clip=0.5, client_optimizer_fn="sgd",
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), input_spec=clients.element_spec,
    )
    sampler = fl.PoissonClientSampler(clients.client_ids, 0.5)
    print(fl.train(process, clients, num_rounds=1, sampler=sampler, delta=1e-2, progress=False).statement())
"""


def commands_of_page() -> list[str]:
    """Returns the lines of docs/federated.md that begin with `pip`, each of them a command."""
    return re.findall(r"^    (pip .+)$", (ROOT / "docs" / "federated.md").read_text("utf-8"), re.MULTILINE)


class Environment:
    """A new virtual environment, and commands that run in it."""

    def __init__(self, folder: Path, python: str):
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        self._bin = folder / "env" / "bin"

    def run(self, command: str, folder: Path) -> None:
        """Runs a command of a shell in ``folder``; `pip` is the environment's."""
        print(f"$ {command}", flush=True)
        subprocess.run(command, shell=True, check=True, cwd=folder, env={"PATH": f"{self._bin}:/usr/bin:/bin"})

    def python(self, source: str, folder: Path) -> subprocess.CompletedProcess:
        """Runs a program in ``folder``."""
        quiet = {"PATH": f"{self._bin}:/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run(
            [self._bin / "python", "-c", source], cwd=folder, env=quiet, text=True, capture_output=True
        )


def try_clone(environment: Environment, folder: Path) -> None:
    """Runs the page's commands in a copy of the repository."""
    clone = folder / "a b" / "tfdpfl"
    shutil.copytree(ROOT, clone, ignore=IGNORED)
    for command in commands_of_page():
        environment.run(command, clone)


def try_pip(environment: Environment, folder: Path) -> None:
    """Installs a wheel, and what its error message names."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=IGNORED)
    environment.run(f"pip wheel -q --no-deps --wheel-dir '{folder}' .", source)
    environment.run(f"pip install -q '{next(folder.glob('*.whl'))}'", folder)
    refused = environment.python("import tfdpfl.federated._tff", folder)
    named = re.search(r"(pip install .+)$", refused.stderr, re.MULTILINE)
    if refused.returncode == 0 or named is None:
        raise SystemExit(f"an import without TFF names no command: {refused.stderr}")
    environment.run(named.group(1), folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    ways = {"clone": try_clone, "pip": try_pip}
    parser.add_argument("way", choices=[*ways, "both"], nargs="?", default="both")
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    for way in ways if given.way == "both" else [given.way]:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            environment = Environment(folder, given.python)
            ways[way](environment, folder)
            ran = environment.python(ROUND, folder)
            if ran.returncode or "epsilon" not in ran.stdout:
                raise SystemExit(f"{way}: no round ran\n{ran.stdout}{ran.stderr}")
            print(f"{way}: installed, and a round ran\n{ran.stdout}", flush=True)


if __name__ == "__main__":
    main()
