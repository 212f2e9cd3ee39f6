"""Differential privacy for Keras and federated learning.

Names are imported when they are first used: `import tfdpfl` does not import TensorFlow. The classes that Keras loads by
name is registered at once if TensorFlow was imported before, else when Keras is.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from tfdpfl._version import __version__

_WHERE = {
    **dict.fromkeys(
        ["DPSGD", "DPAdam", "DPAdamBC", "DPAdamW", "DPAdagrad", "DPRMSprop", "DPFTRL", "make_dp_optimizer_class",
         "DPKerasSGDOptimizer", "DPKerasAdamOptimizer", "DPKerasAdagradOptimizer"],
        "optimizers",
    ),
    **dict.fromkeys(
        ["compute_epsilon", "compute_noise_multiplier", "compute_num_steps", "privacy_statement", "PrivacyReport",
         "PrivacyLedger"],
        "accounting",
    ),
    "PrivacyError": "errors",
    **dict.fromkeys(["AdaptiveClip", "AutomaticClip", "PerLayerClip"], "clips"),
    "AdaFEST": "embeddings",
    **dict.fromkeys(["plan", "PrivacyPlan"], "planning"),
}  # fmt: skip
_MODULES = (
    "accounting", "audit", "callbacks", "clipping", "convex", "data", "datasets", "errors", "features", "federated",
    "flower", "label_dp", "noise", "optimizers", "pate", "planning", "plots", "preprocessing", "tuning",
)  # fmt: skip

__all__ = ["__version__", *_WHERE, *_MODULES]

if TYPE_CHECKING:
    from tfdpfl import (
        accounting,
        audit,
        callbacks,
        clipping,
        convex,
        data,
        datasets,
        errors,
        features,
        federated,
        flower,
        label_dp,
        noise,
        optimizers,
        pate,
        planning,
        plots,
        preprocessing,
        tuning,
    )
    from tfdpfl.accounting import (
        PrivacyLedger,
        PrivacyReport,
        compute_epsilon,
        compute_noise_multiplier,
        compute_num_steps,
        privacy_statement,
    )
    from tfdpfl.clips import AdaptiveClip, AutomaticClip, PerLayerClip
    from tfdpfl.embeddings import AdaFEST
    from tfdpfl.errors import PrivacyError
    from tfdpfl.optimizers import (
        DPFTRL,
        DPSGD,
        DPAdagrad,
        DPAdam,
        DPAdamBC,
        DPAdamW,
        DPKerasAdagradOptimizer,
        DPKerasAdamOptimizer,
        DPKerasSGDOptimizer,
        DPRMSprop,
        make_dp_optimizer_class,
    )
    from tfdpfl.planning import PrivacyPlan, plan


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"tfdpfl.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"tfdpfl.{_WHERE[name]}"), name)
    if name.startswith("__"):
        raise AttributeError(f"module 'tfdpfl' has no attribute {name!r}")
    from tfdpfl._names import sentence

    said = sentence(name, _MODULES, _WHERE)
    # In `from tfdpfl import name` Python drops the text of an AttributeError, and looks for a module of that name.
    imported = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    if imported and importlib.util.find_spec(f"tfdpfl.{name}") is None:
        raise ImportError(said, name="tfdpfl")
    raise AttributeError(said, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted(__all__)


if "tensorflow" in sys.modules:
    from tfdpfl._keras_files import register as _register

    _register()
else:
    from tfdpfl._keras_files import AfterKeras as _AfterKeras

    sys.meta_path.insert(0, _AfterKeras())
