"""What privacy is worth in fact: lower bounds on ε from a mechanism's runs, and attacks on trained models."""

from tfdpfl.audit.epsilon import audit_epsilon
from tfdpfl.audit.membership import MembershipReport, membership_inference
from tfdpfl.reports import ProjectReport, report

__all__ = ["MembershipReport", "ProjectReport", "audit_epsilon", "membership_inference", "report"]
