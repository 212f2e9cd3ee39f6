"""Noise that is correlated over the steps, as an optimizer uses it."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.noise.strategies import Noise, as_noise
from tfdpfl.optimizers import _step_table
from tfdpfl.optimizers._fresh_noise import FreshNoise, NoiselessMean, noisy_sums, shown
from tfdpfl.optimizers._noise_segments import NoiseSegments
from tfdpfl.optimizers._settings import Settings

__all__ = ["CorrelatedNoise"]


class CorrelatedNoise(FreshNoise):
    """Adds rows of ``C⁻¹ Z``, and knows which steps share base normals.

    A row is scaled by the clip of its step. What is released is the step's clip times (the sum over the clip, plus the
    row). So the mechanism is that of sums with a clip of 1, whichever clip a step has, if the clip depends on no
    example. (Later sums may depend on earlier releases: Denisov et al. 2022, arXiv:2202.08312.)

    A step is a logical batch. If an example moves some steps by m clips, and none by more, it moves the mechanism by at
    most m times what it moves it with one clip a step. So the ledger has the least multiplier of all steps. The same
    holds for a multiplier that changes: where it is larger, the sum counts for less of the base normals.

    Several workers draw each step's base normals from one key, which the first of them draws for all. So they all have
    the same state, and they take no step if they began it with different ones.

    The count of an adaptive clip has independent noise, and is one mechanism with the sums. u uses of an example move
    all counts by sqrt(u) / 2, and the base normals by at least sqrt(u) times `Noise.least_shift`. So the
    multiplier of a step is split as without correlation, if the count's noise is times `Noise.unit` over that shift.
    """

    correlated: Noise
    segments: NoiseSegments

    def __init__(self, settings: Settings, given: Noise):
        super().__init__(settings)
        self.correlated = given
        self.segments = NoiseSegments(given, settings.least_noise)

    @classmethod
    def parse(cls, given: object) -> Noise | None:
        return None if given is None else as_noise(given)

    @property
    def label(self) -> str:
        return f"noise={type(self.correlated).__name__}"

    def check(self) -> None:
        given = self.settings.unusual()
        if "adaptive clip" in given and not self.correlated.least_shift > 0:
            raise ValueError(
                f"{given['adaptive clip']} together with {self.label}, whose class does not state least_shift, so the "
                "clip's noisy count has no price among its steps. Define that property, or give a number or a schedule "
                "as l2_norm_clip."
            )

    def state(self) -> list[tf.Tensor]:
        return self.segments.state()

    @property
    def variables(self) -> list[tf.Variable]:
        return self.segments.variables

    def draw(self, mean: NoiselessMean, counter: _step_table.Counter) -> list[tf.Tensor]:
        source = self.source if mean.key is None else self.source.shared(mean.key)
        rows = self.segments.next(source, counter, mean.known, mean.ids)
        at, unit = len(rows), self.correlated.unit
        counts = [
            source.gaussian([s.shape], std * (unit / self.correlated.least_shift))[0]
            for s, std in zip(mean.sums[at:], mean.stddevs[at:], strict=True)
        ]
        return [row * (unit * mean.stddev) for row in rows] + counts

    def add(self, mean: NoiselessMean, drawn: list[tf.Tensor]) -> list[tf.Tensor]:
        # An example moves a step's sums by so many clips; no step's noise by itself hides that.
        noisy = noisy_sums(mean.sums, drawn)
        return shown(mean.sums, noisy, drawn, mean.stddevs, 1 / mean.multiplier, independent=False)

    def ledger(self, counted: np.ndarray) -> PrivacyLedger:
        return self.segments.ledger(counted)

    def rows_for_others(self, counted: np.ndarray) -> np.ndarray:
        """Returns one entry: as many steps of fresh noise, of which each example is in each, that cost as much."""
        if not len(counted):
            return counted
        steps = int(counted[:, _step_table.STEPS].sum())
        multiplier = self.segments.as_one_gaussian(counted) * math.sqrt(steps)
        names = set(counted[:, _step_table.DATA])
        data = names.pop() if len(names) == 1 else 0.0
        origin = _step_table.number_of(repr(sorted(counted[:, [_step_table.ORIGIN, _step_table.STEPS]].tolist())))
        return np.array([[origin, data, _step_table.UNKNOWN, 0, 0, 0, multiplier, steps, 0]])
