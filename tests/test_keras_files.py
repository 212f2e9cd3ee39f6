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
@pytest.mark.parametrize("first", ["import keras, tfdpfl", "import tfdpfl.label_dp.losses"])  # the latter imports Keras
def test_keras_finds_our_classes_in_a_file_whatever_was_imported_first(first):
    code = (
        f"{first}\nimport tensorflow as tf\nprint(tf.keras.models.load_model({str(OWN / 'fresh.keras')!r}).optimizer)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "DPSGD" in done.stdout, done.stderr[-2000:]
