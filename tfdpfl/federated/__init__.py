"""Federated processes with differential privacy, on TensorFlow Federated.

Names are imported when they are first used. Those that need TensorFlow Federated say how to install it where it is
missing; samplers, clips and the accounting of rounds do not need it.
"""

from __future__ import annotations

import importlib

_WHERE = {
    **dict.fromkeys(
        ["build_dp_fed_avg", "build_dp_fed_sgd", "build_dp_fed_recon", "build_dp_ftrl", "build_distributed_dp_fed_avg",
         "build_local_dp_fed_avg"],
        "processes",
    ),
    "build_example_dp_fed_avg": "example_level",
    "evaluate_personalized": "personalization",
    **dict.fromkeys(["AdaptiveClip", "NoisedMetrics"], "clip"),
    **dict.fromkeys(["Guarantee", "Participation", "RoundsRun"], "privacy"),
    **dict.fromkeys(
        ["ClientLevel", "CorrelatedLevel", "TreeLevel", "LocalLevel", "ExampleLevel", "DistributedLevel"], "guarantees"
    ),
    "CohortCheck": "guarantees",
    "NbAFLLevel": "nbafl",
    **dict.fromkeys(["compute_federated_noise_multiplier", "skellam_level", "total_price"], "calibration"),
    **dict.fromkeys(["plan_federation", "FederatedPlan"], "plans"),
    **dict.fromkeys(["local_runtime", "remote_runtime", "WorkerLost"], "runtime"),
    **dict.fromkeys(
        ["PoissonClientSampler", "FixedSizeClientSampler", "AvailabilityClientSampler", "BoundedParticipationSampler"],
        "samplers",
    ),
    **dict.fromkeys(["train", "History"], "training"),
    "build_nbafl": "nbafl",
}  # fmt: skip
_MODULES = ("data", "nbafl", "runtime", "samplers", "training")

__all__ = [*_WHERE, *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"tfdpfl.federated.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"tfdpfl.federated.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'tfdpfl.federated' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
