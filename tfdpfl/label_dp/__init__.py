"""Label differential privacy: features are public, labels private, and a label is randomized before training.

Two data sets are neighbours here if one example's label differs (`adjacency="replace_one"`). Whatever is trained on
the labels that these mechanisms release, for as long as one likes and by any means, costs nothing more.

Nothing here imports TensorFlow but the losses, the `LabelPrivacy` layer and what is done with a `tf.data.Dataset`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_MODULES = {
    "classification": [
        "RandomizedResponse",
        "RandomizedResponseTopK",
        "RandomizedResponseWithPrior",
        "randomized_response",
    ],
    "priors": ["LabelPrior", "KMeansPrior", "PublicPrior", "NoisyHistogram"],
    "regression": ["RROnBins", "UnbiasedRandomizer"],
    "multi_stage": ["MultiStageTraining"],
    "alibi": ["ALIBI"],
    "losses": ["ALIBILoss", "ForwardCorrectedLoss", "BackwardCorrectedLoss"],
    "pipeline": ["LabelPrivacy"],
    "counts": ["debiased_label_counts"],
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ALIBI",
    "ALIBILoss",
    "BackwardCorrectedLoss",
    "ForwardCorrectedLoss",
    "KMeansPrior",
    "LabelPrior",
    "LabelPrivacy",
    "MultiStageTraining",
    "NoisyHistogram",
    "PublicPrior",
    "RROnBins",
    "RandomizedResponse",
    "RandomizedResponseTopK",
    "RandomizedResponseWithPrior",
    "UnbiasedRandomizer",
    "debiased_label_counts",
    "randomized_response",
]

if TYPE_CHECKING:
    from tfdpfl.label_dp.alibi import ALIBI
    from tfdpfl.label_dp.classification import (
        RandomizedResponse,
        RandomizedResponseTopK,
        RandomizedResponseWithPrior,
        randomized_response,
    )
    from tfdpfl.label_dp.counts import debiased_label_counts
    from tfdpfl.label_dp.losses import ALIBILoss, BackwardCorrectedLoss, ForwardCorrectedLoss
    from tfdpfl.label_dp.multi_stage import MultiStageTraining
    from tfdpfl.label_dp.pipeline import LabelPrivacy
    from tfdpfl.label_dp.priors import KMeansPrior, LabelPrior, NoisyHistogram, PublicPrior
    from tfdpfl.label_dp.regression import RROnBins, UnbiasedRandomizer


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(importlib.import_module(f"tfdpfl.label_dp.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'tfdpfl.label_dp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
