"""TFF's process and the Flower strategy do the same to the same updates: here TFF's half."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_federated")
from flower_oracle import UPDATES, expected_of

from tfdpfl.federated import AdaptiveClip, aggregators, runtime
from tfdpfl.federated._tff import tff


def test_tffs_process_moves_the_same_weights_and_clip():
    runtime.ensure_default()
    adaptive = AdaptiveClip(initial=1.0)
    process = aggregators.clipped_mean(adaptive, 0.0, 5).create(tff.TensorType(np.float32, [10]))
    state, weights = process.initialize(), np.zeros(10)
    for _ in range(4):
        output = process.next(state, [u.astype(np.float32) for u in UPDATES])
        state, weights = output.state, weights + output.result
    expected, clip = expected_of(adaptive, 5, 4)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    assert state.query_state.numerator_state.quantile_estimator_state.current_estimate == pytest.approx(clip, rel=1e-6)
