"""Keras callbacks: what a training costs while it runs, private figures of it, and averages of its weights."""

from tfdpfl.callbacks.averaged import AveragedWeights
from tfdpfl.callbacks.budget import PrivacyBudget
from tfdpfl.callbacks.private_metrics import PrivateMetrics

__all__ = ["AveragedWeights", "PrivacyBudget", "PrivateMetrics"]
