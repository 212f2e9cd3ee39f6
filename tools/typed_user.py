"""A user's program, for type checkers: pip install tfdpfl pyright; pyright tools/typed_user.py must find no error.

The types are those that tfdpfl states. TensorFlow states none, so nothing of TensorFlow is named here.
"""

from __future__ import annotations

import numpy as np

import tfdpfl
from tfdpfl.accounting import PrivacyLedger, PrivacyReport
from tfdpfl.audit import audit_epsilon
from tfdpfl.label_dp import RandomizedResponse
from tfdpfl.pate import GNMax

epsilon: float = tfdpfl.compute_epsilon(
    num_examples=60_000, batch_size=256, noise_multiplier=1.1, num_epochs=10, delta=1e-5
)
noise: float = tfdpfl.compute_noise_multiplier(
    target_epsilon=1.0, num_examples=60_000, batch_size=256, num_epochs=10, delta=1e-5
)
steps: int = tfdpfl.compute_num_steps(
    target_epsilon=1.0, num_examples=60_000, batch_size=256, noise_multiplier=1.1, delta=1e-5
)
ledger: PrivacyLedger = PrivacyLedger().record(
    1.1, num_steps=240, num_examples=60_000, batch_size=250, sampling="shuffle"
)
report: PrivacyReport = ledger.report(1e-5)
statement: str = report.statement()
mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
labels: np.ndarray = mechanism.fit_transform(np.array([0, 1, 2]))
answers = GNMax(4.0).aggregate(np.array([[6, 2, 0], [1, 7, 0]]))
bound: float = audit_epsilon(lambda data: float(np.mean(data)), np.zeros(3), np.ones(3), trials=100)
budget = tfdpfl.callbacks.PrivacyBudget(num_examples=60_000, delta=1e-5, target_epsilon=3.0)
optimizer = tfdpfl.DPAdam(l2_norm_clip=1.0, noise_multiplier=1.1, learning_rate=1e-3)
