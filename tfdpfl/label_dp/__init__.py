"""Label differential privacy: features are public, labels private, and a label is randomized before training.

Two data sets are neighbours here if one example's label differs (`adjacency="replace_one"`). Whatever is trained on
the labels that these mechanisms release, for as long as one likes and by any means, costs nothing more.

Nothing here imports TensorFlow but the losses, the `LabelPrivacy` layer and what is done with a `tf.data.Dataset`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdpfl._names import found_in

_WHERE = {
    **dict.fromkeys(
        ["RandomizedResponse", "RandomizedResponseTopK", "RandomizedResponseWithPrior", "randomized_response"],
        "classification",
    ),
    **dict.fromkeys(["LabelPrior", "KMeansPrior", "PublicPrior", "NoisyHistogram"], "priors"),
    **dict.fromkeys(["RROnBins", "UnbiasedRandomizer"], "regression"),
    "MultiStageTraining": "multi_stage",
    "ALIBI": "alibi",
    **dict.fromkeys(["ALIBILoss", "ForwardCorrectedLoss", "BackwardCorrectedLoss"], "losses"),
    "LabelPrivacy": "pipeline",
    "debiased_label_counts": "counts",
}

__all__ = [*_WHERE]

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
    return found_in(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return sorted(__all__)
