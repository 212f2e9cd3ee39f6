"""Holds what each kind of clip does in a step: the factors of the gradients, the bound that noise is measured by, and
what a clip that adapts keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from tfdpfl import clips
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.engine import LEAST_CLIP, check_clip
from tfdpfl.clipping.pipeline import ClippedGradients, ClippingPipeline
from tfdpfl.clipping.step_checks import name_of, raw_variable
from tfdpfl.clips import LEAST_ADAPTED, MOST_ADAPTED
from tfdpfl.optimizers._schedules import PiecewiseConstant

__all__ = ["Clipping", "clipping_of"]


Multiplier: TypeAlias = float | tf.Tensor
Denominator: TypeAlias = float | tf.Tensor | None
_Sums: TypeAlias = tuple[ClippedGradients, tf.Tensor | None]
C = TypeVar("C", bound=float | clips.Clip | PiecewiseConstant)


class Clipping(Generic[C]):
    """Clips as one kind of clip asks for.

    Attributes:
      clip: as the optimizer was given it.
      start: the first value of the variable that is saved with the optimizer; None if there is none.
      variable: that variable.
      iterations: the optimizer's count of updates.
    """

    start: np.float32 | None = None
    variable: tf.Variable
    iterations: tf.Variable

    def __init__(self, clip: C):
        self.clip = clip
        check_clip(self.first)

    @property
    def first(self) -> float:
        """C at the beginning."""
        raise NotImplementedError

    @property
    def norm(self) -> float | tf.Tensor:
        """C, the largest norm of one unit's part in the sums; in a step that is traced."""
        return self.first

    @property
    def current(self) -> float | list[float]:
        """Returns what a user reads, between steps."""
        return float(self.norm)

    def clipped(self, plan: ClippingPipeline, variables: Sequence, denominator: Denominator) -> _Sums:
        """Returns the clipped sums, and what else is released with them and has noise of its own."""
        del variables
        return plan.finish(plan.squared_norms(), self.norm, denominator), None

    def adapt(self, count: tf.Tensor, units: tf.Tensor) -> None:
        """Moves the clip, given the noisy count that was released with the sums."""

    def split(self, noise_multiplier: Multiplier, units: tf.Tensor | float) -> tuple[Multiplier, Multiplier | None]:
        """Returns the (noise multiplier of the sums, standard deviation of what is released with them)."""
        del units
        return noise_multiplier, None


class Constant(Clipping[float]):
    """One clip for every example."""

    @property
    def first(self) -> float:
        return self.clip


class Scheduled(Clipping[PiecewiseConstant]):
    """A clip for every example that changes at given updates."""

    @property
    def first(self) -> float:
        return self.clip.least

    @property
    def norm(self) -> tf.Tensor:
        return self.clip.at(raw_variable(self.iterations), tf.float32)

    @property
    def current(self) -> float:
        return self.clip.value(int(tf.convert_to_tensor(self.iterations)))


class Automatic(Clipping[clips.AutomaticClip]):
    @property
    def first(self) -> float:
        return self.clip.l2_norm_clip

    def clipped(self, plan: ClippingPipeline, variables: Sequence, denominator: Denominator) -> _Sums:
        clip, stability = self.norm, self.clip.stability
        return plan.scaled_by([plan.squared_norms()], lambda norms: [clip / (norms[0] + stability)], denominator), None


class PerLayer(Clipping[clips.PerLayerClip]):
    _shares: list[float] | None = None

    @property
    def first(self) -> float:
        return self.clip.norm

    @property
    def current(self) -> list[float]:
        shared = not isinstance(self.clip.clips, dict | tuple)
        return list(self._shares if shared and self._shares else map(float, self.clip.values))

    def clipped(self, plan: ClippingPipeline, variables: Sequence, denominator: Denominator) -> _Sums:
        group_of, self._shares = self.clip.groups([name_of(v) for v in variables])
        shares = self._shares
        for share in shares:
            check_clip(share)
        present = list(dict.fromkeys(group_of))  # a group may have no weight that is trained
        norms2 = plan.squared_norms_of([present.index(g) for g in group_of])

        def factors(norms: list[tf.Tensor]) -> list[tf.Tensor]:
            return [shares[g] / tf.maximum(n, shares[g]) for g, n in zip(present, norms, strict=True)]

        return plan.scaled_by(norms2, factors, denominator), None


class Adaptive(Clipping[clips.AdaptiveClip]):
    def __init__(self, clip: clips.AdaptiveClip):
        super().__init__(clip)
        self.start = np.float32(clip.initial)

    @property
    def first(self) -> float:
        return self.clip.initial

    @property
    def norm(self) -> tf.Tensor:
        return tf.convert_to_tensor(raw_variable(self.variable))

    def clipped(self, plan: ClippingPipeline, variables: Sequence, denominator: Denominator) -> _Sums:
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

    def split(self, noise_multiplier: Multiplier, units: tf.Tensor | float) -> tuple[Multiplier, Multiplier | None]:
        return self.clip.split(noise_multiplier, units, tf.maximum)

    def adapt(self, count: tf.Tensor, units: tf.Tensor) -> None:
        """Moves the clip, given the noisy count of those within it."""
        within = count / units + 0.5
        step = math.log(MOST_ADAPTED / LEAST_ADAPTED)  # where there are hardly any units, noise may be any number
        factor = tf.exp(tf.clip_by_value(-self.clip.learning_rate * (within - self.clip.target_quantile), -step, step))
        now = tf.clip_by_value(self.norm * factor, LEAST_ADAPTED, MOST_ADAPTED)
        self.variable.assign(graph_tools.released(now))


def clipping_of(clip: float | clips.Clip | PiecewiseConstant) -> Clipping:
    """Returns what clips as an optimizer's argument asks for."""
    kinds: dict[type, type[Clipping]] = {
        clips.AutomaticClip: Automatic, clips.PerLayerClip: PerLayer, clips.AdaptiveClip: Adaptive,
        PiecewiseConstant: Scheduled,
    }  # fmt: skip
    made: type[Clipping] = next((of for kind, of in kinds.items() if isinstance(clip, kind)), Constant)
    return made(clip)
