"""Noisy sums of bounded numbers: what metrics and preprocessing release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tfdpfl import _replay_hook

if TYPE_CHECKING:
    from tfdpfl.noise import Source

__all__ = ["noisy_sum"]


def noisy_sum(values: np.ndarray, sensitivity: float, noise_multiplier: float, source: Source) -> np.ndarray:
    """Returns the sums plus independent normal noise.

    Args:
        values: The sums over all units.
        sensitivity: How far a unit that is added, removed or replaced may move them, as a Euclidean norm.
        noise_multiplier: The noise's standard deviation over the sensitivity.
        source: What draws the noise.
    """
    noise = noise_multiplier * sensitivity * source.normals(values.shape)
    scale, bound = noise_multiplier * sensitivity, 1 / noise_multiplier
    return _replay_hook.released([values], [values + noise], [noise], [scale], bound, replaced=bound)[0]
