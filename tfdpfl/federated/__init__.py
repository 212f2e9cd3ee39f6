"""Federated processes with differential privacy, on TensorFlow Federated.

Names are imported when they are first used. Those that need TensorFlow Federated say how to install it where it is
missing; samplers, clips and the accounting of rounds do not need it.
"""

from __future__ import annotations

from tfdpfl._names import found_in

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
    **{module: module for module in ("data", "nbafl", "runtime", "samplers", "training")},
}  # fmt: skip

__all__ = [*_WHERE]


def __getattr__(name: str):
    return found_in(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return sorted(__all__)
