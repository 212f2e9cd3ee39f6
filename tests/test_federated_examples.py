"""The federated examples run as a newcomer would run them: without data, to the end, with nothing left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_federated", reason="needs TensorFlow Federated, which is on the tff stack")

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "federated_hospitals": r"Orkney Hospital +\d\.\d+ +\d\.\d+ +0\.\d+ \[.*\n(.*\n)*.*example level: epsilon = ",
    "federated_levels": r"client level, DP-FTRL +[\d.]+% +inf +[\d.]+ +inf\n(.*\n)*.*It is no bound",
    "federated_nbafl": r"sound, all uploads seen +[\d.]+% +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+\n",
    "federated_shakespeare": r"always the commonest character: [\d.]+%\n(.*\n)*.*client level: epsilon = ",
}


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", SAYS)
def test_example_runs_to_its_end_and_its_output_ends_too(name, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TFDPFL_DATA_DIR"}
    command = [sys.executable, EXAMPLES / f"{name}.py", "--quick", "--output", tmp_path / "picture.png"]
    # Reading both pipes to their end also shows that no worker holds them open.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(SAYS[name], done.stdout), done.stdout
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picture.png"]
