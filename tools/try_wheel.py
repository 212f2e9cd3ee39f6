"""Builds the wheel, installs it with plain pip on each Python, and trains the demo: python tools/try_wheel.py [3.12]

Each Python gets a new environment in a temporary folder, which is removed afterwards. pip downloads TensorFlow, so one
Python takes a few minutes and 2 GB. Pythons are found on PATH (python3.12) and below ~/.pyenv/versions; one that is not
there is reported. The exit code is 1 if one of them fails, or if none is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
EPSILON = "epsilon --num-examples 60000 --batch-size 256 --noise-multiplier 1.1 --num-epochs 10 --delta 1e-5"


def python_of(version: str) -> str | None:
    """Returns the newest interpreter of a version, or None."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


def run(*command: str | Path, where: Path) -> str:
    """Runs a command outside of the clone, so that only the installed package is found, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    done = subprocess.run([str(part) for part in command], cwd=where, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def try_on(python: str, wheel: Path, folder: Path) -> str:
    """Installs the wheel, and returns what the installed command prints."""
    run(python, "-m", "venv", folder / "env", where=folder)
    bin_ = folder / "env" / "bin"
    run(bin_ / "pip", "install", "-q", "--disable-pip-version-check", wheel, where=folder)
    version = run(bin_ / "tfdpfl", "--version", where=folder).strip()
    epsilon = run(bin_ / "tfdpfl", *EPSILON.split(), where=folder).splitlines()[0]
    demo = run(bin_ / "tfdpfl", "demo", "--epochs", "1", "--output", folder / "demo.png", where=folder)
    shown = [line for line in demo.strip().splitlines() if "\r" not in line and "\b" not in line and "\x1b" not in line]
    return "\n  ".join([version, epsilon, *filter(None, shown)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
    found = {version: python_of(version) for version in parser.parse_args().versions}
    first = next(filter(None, found.values()), None)
    if first is None:
        raise SystemExit(f"none of {', '.join(found)} was found on PATH or below ~/.pyenv/versions")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Not sys.executable: an environment that uv made has no pip.
        run(first, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT, where=folder)
        (wheel,) = folder.glob("*.whl")
        print(wheel.name, flush=True)
        for version, python in found.items():
            if python is None:
                print(f"Python {version}: not found", flush=True)
                continue
            (folder / version).mkdir()
            began = time.time()
            result = try_on(python, wheel, folder / version)
            shutil.rmtree(folder / version)
            print(f"Python {version}, {time.time() - began:.0f} s: {result}", flush=True)


if __name__ == "__main__":
    main()
