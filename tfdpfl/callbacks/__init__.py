"""Keras callbacks: what a training costs while it runs, and averages of its weights."""

from tfdpfl.callbacks.averaged import AveragedWeights
from tfdpfl.callbacks.budget import PrivacyBudget

__all__ = ["AveragedWeights", "PrivacyBudget"]
