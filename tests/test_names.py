"""Names that `tfdpfl` itself does not have say where they are."""

import importlib
import pkgutil
import re
from pathlib import Path

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
        ("privacy", "all names of tensorflow_privacy.privacy are in tfdpfl itself"),
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


def test_every_name_that_the_page_of_tf_privacy_replaces_says_by_what():
    page = (Path(tfdpfl.__file__).parents[1] / "docs" / "tf-privacy.md").read_text("utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    names = {name for row in rows if not row[2].startswith(" none: range") for name in re.findall(r"`(\w+)`", row[1])}
    names -= {"secret_sharer"}  # nothing replaces it, nor range queries
    assert len(names) > 40
    assert {name for name in names if not hasattr(tfdpfl, name)} <= set(_names.ELSEWHERE)


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
