"""Measures privacy: lower bounds on ε from a mechanism's runs, and attacks on trained models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdpfl.audit.epsilon import audit_epsilon
from tfdpfl.audit.membership import MembershipReport, membership_inference
from tfdpfl.audit.one_run import OneRunReport, one_run_bounds
from tfdpfl.audit.replay import Finding, ReplayReport, replay
from tfdpfl.audit.shadow import lira, rmia
from tfdpfl.reports import ProjectReport, report

if TYPE_CHECKING:
    from tfdpfl.audit.canaries import OneRunAudit

__all__ = [
    "Finding",
    "MembershipReport",
    "OneRunAudit",
    "OneRunReport",
    "ProjectReport",
    "ReplayReport",
    "audit_epsilon",
    "lira",
    "membership_inference",
    "one_run_bounds",
    "replay",
    "report",
    "rmia",
]


def __getattr__(name: str) -> Any:
    if name != "OneRunAudit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tfdpfl.audit.canaries import OneRunAudit  # a Keras callback: the rest does without TensorFlow

    return OneRunAudit
