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


@pytest.mark.slow
@pytest.mark.both_stacks
def test_no_library_is_loaded_that_private_training_does_not_need():
    """scikit-learn takes 60 MB with all that it loads."""
    code = (
        "import sys, tensorflow as tf\n"
        "optimizer = tf.keras.optimizers.Adam()\n"
        "before = set(sys.modules)\n"
        "import tfdpfl\n"
        "tfdpfl.DPAdam(l2_norm_clip=1.0, noise_multiplier=1.0)\n"
        "print({name.split('.')[0] for name in sys.modules.keys() - before} & {'sklearn', 'scipy', 'pandas'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr[-2000:]
