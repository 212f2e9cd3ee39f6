"""What each kind of clip does in a step: the factors of the gradients, the bound that noise is measured by, and what a
clip that adapts keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl import clips
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.engine import LEAST_CLIP, check_clip
from tfdpfl.clipping.pipeline import ClippedGradients, ClippingPipeline
from tfdpfl.clipping.step_checks import name_of, raw_variable
from tfdpfl.optimizers._schedules import PiecewiseConstant

__all__ = ["Clipping", "clipping_of"]

# Between these a clip that adapts moves; beyond them float32 loses what it is to measure.
LEAST_ADAPTED, MOST_ADAPTED = 100 * LEAST_CLIP, 1e10


class Clipping:
    """One clip for every example.

    Attributes:
      start: the first value of the variable that is saved with the optimizer; None if there is none.
      variable: that variable.
      iterations: the optimizer's count of updates.
    """

    start: np.float32 | None = None
    variable: Any = None
    iterations: Any = None

    def __init__(self, clip: Any):
        check_clip(self.first(clip))
        self.clip = clip

    @staticmethod
    def first(clip: Any) -> float:
        """Returns C at the beginning."""
        return clip

    @property
    def norm(self) -> float | tf.Tensor:
        """C, the largest norm of one unit's part in the sums; in a step that is traced."""
        return self.first(self.clip)

    @property
    def current(self) -> float | list[float]:
        """What a user reads, between steps."""
        return float(self.norm)

    def clipped(
        self, plan: ClippingPipeline, variables: Sequence, denominator: Any
    ) -> tuple[ClippedGradients, tf.Tensor | None]:
        """Returns the clipped sums, and what else is released with them and has noise of its own."""
        del variables
        return plan.finish(plan.squared_norms(), self.norm, denominator), None

    def adapt(self, count: tf.Tensor, units: tf.Tensor) -> None:
        """Moves the clip, given the noisy count that was released with the sums."""

    def split(self, noise_multiplier: float, units: tf.Tensor) -> tuple[Any, Any]:
        """Returns the (noise multiplier of the sums, standard deviation of what is released with them)."""
        del units
        return noise_multiplier, None


class Scheduled(Clipping):
    """A clip for every example that changes at given updates."""

    @staticmethod
    def first(clip: PiecewiseConstant) -> float:
        return clip.least

    @property
    def norm(self):
        return self.clip.at(raw_variable(self.iterations), tf.float32)

    @property
    def current(self):
        return self.clip.value(int(tf.convert_to_tensor(self.iterations)))


class Automatic(Clipping):
    @staticmethod
    def first(clip: clips.AutomaticClip) -> float:
        return clip.l2_norm_clip

    def clipped(self, plan, variables, denominator):
        clip, stability = self.norm, self.clip.stability
        return plan.scaled_by([plan.squared_norms()], lambda norms: [clip / (norms[0] + stability)], denominator), None


class PerLayer(Clipping):
    _shares: list[float] | None = None

    @staticmethod
    def first(clip: clips.PerLayerClip) -> float:
        return clip.norm

    @property
    def current(self):
        given = self.clip.clips
        if isinstance(given, dict | tuple):
            return list(map(float, given.values() if isinstance(given, dict) else given))
        return list(self._shares or [self.clip.norm])

    def clipped(self, plan, variables, denominator):
        group_of, self._shares = self.clip.groups([name_of(v) for v in variables])
        shares = self._shares
        for share in shares:
            check_clip(share)
        present = list(dict.fromkeys(group_of))  # a group may have no weight that is trained
        norms2 = plan.squared_norms_of([present.index(g) for g in group_of])

        def factors(norms: list[tf.Tensor]) -> list[tf.Tensor]:
            return [shares[g] / tf.maximum(n, shares[g]) for g, n in zip(present, norms, strict=True)]

        return plan.scaled_by(norms2, factors, denominator), None


class Adaptive(Clipping):
    def __init__(self, clip: clips.AdaptiveClip):
        super().__init__(clip)
        self.start = np.float32(clip.initial)

    @staticmethod
    def first(clip: clips.AdaptiveClip) -> float:
        return clip.initial

    @property
    def norm(self):
        return tf.convert_to_tensor(raw_variable(self.variable))

    def clipped(self, plan, variables, denominator):
        clip = self.norm
        with tf.control_dependencies([graph_tools.require(clip > LEAST_ADAPTED, (
            f"tfdpfl: the adaptive clip fell to {LEAST_ADAPTED:g}: nearly all gradients are zero. Look for a model "
            "that does not learn (dead units, weights of zero), or give a number as l2_norm_clip."))]):  # fmt: skip
            clip = tf.identity(clip)
        clipped = plan.finish(plan.squared_norms(), clip, denominator)
        within = tf.cast(clipped.norms <= tf.cast(clip, clipped.norms.dtype), tf.float32) - 0.5
        # One unit moves this by 1/2. Without a gradient it is as if it was not there.
        absent = clipped.absent | (clipped.norms <= LEAST_CLIP)
        return clipped, tf.reduce_sum(tf.where(absent, 0.0, within))

    def split(self, noise_multiplier, units):
        return self.clip.split(noise_multiplier, units, tf.maximum)

    def adapt(self, count: tf.Tensor, units: tf.Tensor) -> None:
        """Moves the clip, given the noisy count of those within it."""
        within = count / units + 0.5
        step = math.log(MOST_ADAPTED / LEAST_ADAPTED)  # where there are hardly any units, noise may be any number
        factor = tf.exp(tf.clip_by_value(-self.clip.learning_rate * (within - self.clip.target_quantile), -step, step))
        now = tf.clip_by_value(self.norm * factor, LEAST_ADAPTED, MOST_ADAPTED)
        self.variable.assign(graph_tools.released(now))


def clipping_of(clip: Any) -> Clipping:
    """Returns the way of a clip, as the optimizer was given it."""
    kinds: tuple = ((clips.AutomaticClip, Automatic), (clips.PerLayerClip, PerLayer), (clips.AdaptiveClip, Adaptive),
             (PiecewiseConstant, Scheduled))  # fmt: skip
    return next((way(clip) for kind, way in kinds if isinstance(clip, kind)), None) or Clipping(clip)
