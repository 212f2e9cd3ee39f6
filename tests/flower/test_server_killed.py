"""The deployed server is killed, as processes on loopback are, and started again by the same commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import tfdpfl

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "flower.py"
ROW = r"^\| 2 \| 8 \| (\d+) \| (\d+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$"


@pytest.mark.slow
def test_a_server_killed_in_each_of_its_processes_goes_on_with_a_ledger_that_holds_all_it_showed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(tfdpfl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, PROGRAM, "--page", tmp_path / "page.md", "server-kills", "--times", "2", "--rounds", "8",
         "--nodes", "2"],
        env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    row = re.search(ROW, done.stdout, re.M)
    assert row, done.stdout[-2000:]
    charged, seen, before, alike, epsilon, left = row.groups()
    assert before == "True" and 8 <= int(charged) <= 10 and 3 <= int(seen) <= int(charged)
    assert float(alike) < 0.1  # of 10,000 entries each: 0.01 is chance, 1 the same noise
    assert float(epsilon) >= 15.45  # of 8 rounds at noise multiplier 1, δ = 1e-5
    assert left == "0"
