"""What tests of reports share: mechanisms that have run."""

import numpy as np

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.label_dp import RandomizedResponse

DELTA = 1e-5


def gaussian(sigma, steps=1, **how):
    how = {"num_examples": 1000, "batch_size": 1000, "sampling": "none", **how}
    return PrivacyLedger().record(sigma, steps, **how)


def labels(seed=None):
    mechanism = RandomizedResponse(1.0, 10, seed=seed)
    mechanism.fit_transform(np.arange(50) % 10)
    return mechanism
