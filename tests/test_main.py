"""`python -m tfdpfl` is the command line."""

import subprocess
import sys


def test_python_m_tfdpfl_is_the_command_line():
    run = ["--num-examples", "6000", "--batch-size", "60", "--delta", "1e-5", "--noise-multiplier", "2.0"]
    args = [sys.executable, "-m", "tfdpfl", "epsilon", *run, "--num-steps", "5"]
    helped = subprocess.run([*args, "--help"], capture_output=True, text=True, check=True)
    assert helped.stdout.startswith("Usage: tfdpfl epsilon") and helped.stderr == ""
    refused = subprocess.run([*args, "--batch-size", "0"], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("Error: --batch-size")
