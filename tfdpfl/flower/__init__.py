"""Federated learning with differential privacy on Flower, which runs across machines.

Strategies that wrap any other of Flower's Message API, mods and a trainer for clients, and an accountant for Flower's
own wrappers. Names are imported when they are first used; a missing Flower gives the command that installs it.
"""

from __future__ import annotations

from tfdpfl._names import found_in

_WHERE = {
    **dict.fromkeys(["DifferentialPrivacyFixedClipping", "DifferentialPrivacyAdaptiveClipping"], "strategies"),
    "NbAFLStrategy": "nbafl",
    **dict.fromkeys(["nbafl_mod", "clip_and_noise_gradients"], "nbafl"),
    "local_dp_mod": "local",
    "example_dp": "examples",
    "client_reports": "reports",
    "LedgerAccountant": "accountant",
    "Roster": "cohorts",
}

__all__ = [*_WHERE]


def __getattr__(name: str):
    return found_in(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return sorted(__all__)
