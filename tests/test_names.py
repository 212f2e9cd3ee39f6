"""Names that `tfdpfl` itself does not have say where they are, and Keras finds its classes in files."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfdpfl
from tfdpfl import _names

GOLDEN = Path(__file__).parent / "golden" / "keras3" / "fresh.keras"
MISSING = {"federated": "tensorflow_federated", "flower": "flwr"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("PrivacyBudget", "it is tfdpfl.callbacks.PrivacyBudget"),
        ("poisson_batches", "it is tfdpfl.data.poisson_batches"),
        ("fix", "it is tfdpfl.clipping.fix"),
        ("DPLogisticRegression", "it is tfdpfl.convex.DPLogisticRegression"),
        ("compute_dp_sgd_privacy_statement", "use tfdpfl.privacy_statement"),
        ("VectorizedDPKerasSGDOptimizer", "use tfdpfl.DPSGD"),
        ("DPSequential", "any Keras model trains privately once you compile it with tfdpfl.DPAdam"),
        ("PrivacyEngine", "compile your model with tfdpfl.DPAdam"),
        ("make_private", "compile your model with tfdpfl.DPAdam"),
        ("DPAdamm", "did you mean tfdpfl.DPAdam?"),
    ],
)
def test_a_name_says_where_it_is(name, place):
    said = f"module 'tfdpfl' has no attribute '{name}': {place}"
    with pytest.raises(AttributeError, match=re.escape(said)):
        getattr(tfdpfl, name)
    with pytest.raises(ImportError, match=re.escape(said)):
        exec(f"from tfdpfl import {name}")
    assert not hasattr(tfdpfl, name)


def test_a_name_of_nothing_is_an_error_without_advice():
    with pytest.raises(AttributeError, match=r"has no attribute 'qqqq'\.$"):
        getattr(tfdpfl, "qqqq")  # noqa: B009


def test_every_place_that_is_named_exists():
    for name, said in _names.ELSEWHERE.items():
        assert name not in tfdpfl.__all__
        for path in re.findall(r"tfdpfl(?:\.\w+)+", said):
            pkgutil.resolve_name(path)
    places = _names._places(tuple(tfdpfl._MODULES))
    assert len(places) > 100
    for name, module in places.items():
        if module not in MISSING or importlib.util.find_spec(MISSING[module]):
            pkgutil.resolve_name(f"tfdpfl.{module}.{name}")


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("first", ["import tfdpfl, keras", "import keras, tfdpfl", "import tfdpfl.data, keras"])
def test_keras_finds_our_classes_whichever_is_imported_first(first):
    code = f"{first}; print(type(keras.models.load_model({str(GOLDEN)!r}).optimizer).__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert run.stdout.startswith("DP"), run.stderr[-2000:]
