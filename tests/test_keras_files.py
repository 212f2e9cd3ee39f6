"""Keras finds the package's classes in a file, whichever of the two is imported first."""

import subprocess
import sys
from pathlib import Path

import conftest
import pytest

KERAS3 = conftest.keras3()
GOLDEN = Path(__file__).parent / "golden"
OWN = GOLDEN / ("keras3" if KERAS3 else "keras2")


@pytest.mark.slow
@pytest.mark.skipif(not KERAS3, reason="Keras 2 imports the module that a file names by itself")
def test_keras_finds_our_classes_in_a_file_though_one_of_our_modules_imported_it():
    """With Keras imported first, test_keys.py loads a file in a process of its own."""
    code = (
        "import tfdpfl.label_dp.losses, tensorflow as tf\n"
        f"print(tf.keras.models.load_model({str(OWN / 'fresh.keras')!r}).optimizer)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "DPSGD" in done.stdout, done.stderr[-2000:]
