"""Differential privacy for Keras and federated learning.

Names are imported when they are first used: `import tfdpfl` does not import TensorFlow. Where TensorFlow was imported
before, what Keras loads from files by name is registered at once.
"""

from __future__ import annotations

import contextlib
import importlib
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
    "accounting", "audit", "callbacks", "clipping", "convex", "data", "datasets", "errors", "federated", "flower",
    "label_dp", "noise", "optimizers", "pate", "planning", "plots", "tuning",
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
        federated,
        flower,
        label_dp,
        noise,
        optimizers,
        pate,
        planning,
        plots,
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
    raise AttributeError(f"module 'tfdpfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if "tensorflow" in sys.modules:
    from tfdpfl.errors import PrivacyError as _PrivacyError

    with contextlib.suppress(_PrivacyError):  # Keras runs on another backend
        for _name in ("optimizers", "label_dp.losses", "label_dp.pipeline"):
            importlib.import_module(f"tfdpfl.{_name}")
