"""What privacy is worth in fact: lower bounds on ε from a mechanism's runs, and attacks on trained models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdpfl.audit.epsilon import audit_epsilon
from tfdpfl.audit.membership import MembershipReport, membership_inference
from tfdpfl.audit.one_run import OneRunReport, one_run_bounds
from tfdpfl.reports import ProjectReport, report

if TYPE_CHECKING:
    from tfdpfl.audit.canaries import OneRunAudit

__all__ = [
    "MembershipReport",
    "OneRunAudit",
    "OneRunReport",
    "ProjectReport",
    "audit_epsilon",
    "membership_inference",
    "one_run_bounds",
    "report",
]


def __getattr__(name: str) -> Any:
    if name != "OneRunAudit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tfdpfl.audit.canaries import OneRunAudit  # a Keras callback: the rest does without TensorFlow

    return OneRunAudit
