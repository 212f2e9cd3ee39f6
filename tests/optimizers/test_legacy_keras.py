"""tf_keras, which TF_USE_LEGACY_KERAS=1 puts in the place of Keras 3, is a Keras 2 and must train as one."""

import os
import subprocess
import sys
from pathlib import Path

import conftest as c
import pytest

CORE = "three_steps or under_a_tape or loss_scale_of or regulariser or config or registered_name or fault_4 or pickles"


@pytest.mark.slow
@pytest.mark.skipif(not c.keras3(), reason="this stack's tf.keras is Keras 2 already")
def test_the_core_of_the_optimizers_holds_under_tf_keras():
    tests = Path(__file__).parent.parent
    files = [f"optimizers/test_{name}.py" for name in ("optimizers", "saving", "privatizer")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-k", CORE, "-p", "no:cacheprovider"]
        + [str(tests / name) for name in files],
        capture_output=True, text=True, cwd=tests.parent, env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed > 15
