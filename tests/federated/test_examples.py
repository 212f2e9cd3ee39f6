"""The federated examples run as a newcomer would run them: without data, to the end, with nothing left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_federated", reason="needs TensorFlow Federated, which is on the tff stack")

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "federated_hospitals": r"round 2 +Orkney Hospital +loss .* q 0\.13 .*ε \d(.*\n)*Orkney Hospital( +\d\.\d+){3} \[",
    "federated_levels": r"DP-FTRL +[\d.]+% +[\d.]+ +inf +[\d.]+ +inf\n(.*\n)* +2 +[\d.]+ +[\d.]+% +[-\d.]+ +[-\d.]+\n",
    "federated_nbafl": r"sound, all uploads seen +[\d.]+% +\d+% to \d+%( +[\d.]+){5}\nsound, 40 clients once",
    "federated_shakespeare": r"always the commonest character: [\d.]+%\n(.*\n)*.*client level: epsilon = ",
}


# One after the other in one process, which imports TFF once.
ALL = """
import runpy, sys
for program, picture in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.argv = [program, "--quick", "--output", picture]
    print("program", program, flush=True)
    runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.slow
def test_examples_run_to_their_end_and_their_output_ends_too(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TFDPFL_DATA_DIR"}
    pairs = [part for name in SAYS for part in (EXAMPLES / f"{name}.py", tmp_path / f"{name}.png")]
    # Reading both pipes to their end also shows that no worker holds them open.
    done = subprocess.run(
        [sys.executable, "-c", ALL, *pairs], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    for (name, says), said in zip(SAYS.items(), re.split("^program .*$", done.stdout, flags=re.M)[1:], strict=True):
        assert re.search(says, said), (name, said)
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in SAYS}
