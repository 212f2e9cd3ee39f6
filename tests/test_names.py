"""Names that `tfdpfl` itself does not have say where they are."""

import importlib
import pkgutil
import re

import pytest

import tfdpfl
from tfdpfl import _names

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
        ("GaussianSumQuery", "a DP optimizer clips, sums and adds noise to gradients"),
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
