"""Bounds on the norm of one unit's part in a sum: an example's gradient, a client's update. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdpfl._types import JsonValue
from tfdpfl.accounting import _checks
from tfdpfl.errors import PrivacyError

__all__ = [
    "LEAST_ADAPTED",
    "MOST_ADAPTED",
    "AdaptiveClip",
    "AutomaticClip",
    "Clip",
    "PerLayerClip",
    "check_adapted",
    "from_config",
    "to_config",
]

# Between these a clip that adapts moves; beyond them float32 loses what it is to measure.
LEAST_ADAPTED, MOST_ADAPTED = 1e-8, 1e10


def check_adapted(clip: float) -> None:
    """Checks that a federation's adaptive clip is not at an end of its range.

    Args:
      clip: the clip of the next round.

    Raises:
      PrivacyError: the clip is at an end.
    """
    if not LEAST_ADAPTED < clip < MOST_ADAPTED:
        raise PrivacyError(
            f"The adaptive clip is {clip:g}: a round would cost epsilon and leave no model. A clip falls so far if "
            "nearly all clients return the model as they got it, and rises so far if most updates are too long to "
            "measure. Look at what clients train, or give a number as l2_norm_clip."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A clip that follows a quantile of the norms (Andrew et al. 2021, arXiv:1905.03871). These are the norms of the
    gradients of examples in an optimizer, of the updates of clients in a federated process.

    Every step (round) the clip is multiplied by ``exp(-learning_rate * (b - target_quantile))``, where b is a noisy
    estimate of the fraction of norms that were within the clip. The noise on b is charged: ``noise_multiplier`` is the
    total, and the noise on the gradients (updates) is raised to make room for the count's.

    Args:
      initial: the first clip, an L2 norm. A factor of 100 is made good in about 50 steps.
      target_quantile: the fraction of examples (clients) that shall stay unclipped.
      learning_rate: the clip changes by a factor of at most exp(learning_rate) a step.
      clipped_count_stddev: standard deviation of the noise on the count of those unclipped. None takes the larger of a
        twentieth of the batch (cohort), which is the paper's, and the noise multiplier. The other noise then rises
        by at most 15.5 % however small the batch is. Half the noise multiplier or less cannot be met.

    Raises:
      ValueError: an argument is out of its range.
    """

    initial: float = 0.1
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    clipped_count_stddev: float | None = None

    def __post_init__(self) -> None:
        _checks.real("initial", self.initial, "give the first clip, for instance 0.1", above=0)
        remedy = "give the fraction to leave unclipped; 0.5 is the median"
        _checks.probability("target_quantile", self.target_quantile, remedy)
        _checks.real("learning_rate", self.learning_rate, "0.2 is usual", above=0)
        stddev = self.clipped_count_stddev
        _checks.optional(_checks.real, "clipped_count_stddev", stddev, "leave it out for a safe value", at_least=0)

    def split(self, noise_multiplier: Any, cohort: Any, larger: Callable[[Any, Any], Any] = max) -> tuple[Any, Any]:
        """(noise multiplier of the sum, standard deviation of the count) that together give ``noise_multiplier``.

        One of the ``cohort`` (a number, or a tensor, with ``larger`` for such) moves the centred count by 1/2, so
        z^-2 = z_sum^-2 + (2 stddev)^-2 (the paper's theorem 1).

        Raises:
          ValueError: the count's noise is too small to leave anything for the sum.
        """
        stddev, known = self.clipped_count_stddev, isinstance(noise_multiplier, float | int)
        if known and noise_multiplier == 0:
            return 0.0, 0.0 if stddev is None else stddev
        if stddev is None:
            stddev = larger(0.05 * cohort, noise_multiplier)
        elif known and 2 * stddev <= noise_multiplier:
            raise ValueError(
                f"clipped_count_stddev={stddev:g} is at most half of noise_multiplier={noise_multiplier:g}, so the "
                "count alone would cost more than the whole step may: raise it, or leave it out for a safe value"
            )
        return (noise_multiplier**-2 - (2 * stddev) ** -2) ** -0.5, stddev

    def after(self, clip: float, noisy_count: float, clients_per_round: float) -> float:
        """The clip of the next round, between `LEAST_ADAPTED` and `MOST_ADAPTED`.

        Args:
          clip: this round's.
          noisy_count: the sum over clients of 1/2 for an update within the clip and -1/2 for another, with noise.
          clients_per_round: the fixed number of clients that the count is divided by.
        """
        within = min(1.0, max(0.0, noisy_count / clients_per_round + 0.5))
        most = math.log(MOST_ADAPTED / LEAST_ADAPTED)
        step = min(max(-self.learning_rate * (within - self.target_quantile), -most), most)
        return min(max(clip * math.exp(step), LEAST_ADAPTED), MOST_ADAPTED)


@dataclasses.dataclass(frozen=True)
class PerLayerClip:
    """A clip for each layer, or group of layers: no layer's gradient is cut because another's is long.

    The gradient of each group l is clipped to C_l. All of an example's then has a norm of at most C, where
    C² = Σ C_l², and the noise is of ``noise_multiplier * C`` in every coordinate (McMahan et al. 2018,
    arXiv:1710.06963, section 3).

    Args:
      clips: C, shared equally by all layers that are trained: C_l = C / sqrt(number of layers). Or the C_l: a list, in
        the order of the layers; or a mapping from names (a layer's, or that of a layer that holds others) to C_l, of
        which one must fit each weight.

    Raises:
      ValueError: a clip is out of its range, or there is none.
    """

    clips: float | Sequence[float] | Mapping[str, float] = 1.0

    def __post_init__(self) -> None:
        clips = self.clips
        if isinstance(clips, Mapping):
            clips = dict(clips)
        elif isinstance(clips, Sequence) and not isinstance(clips, str):
            clips = tuple(clips)
        _checks.keep(self, "clips", clips)
        if not self.values:
            raise ValueError(f"clips={clips!r} has no clip: give one number for all layers, or one for each.")
        for clip in self.values:
            _checks.real("clips", clip, "give the largest norm of a layer's gradient, for instance 1.0", above=0)

    @property
    def values(self) -> list[float]:
        """The numbers: of each layer, or one of all layers together."""
        if isinstance(self.clips, dict):
            return list(self.clips.values())
        return list(self.clips) if isinstance(self.clips, tuple) else [self.clips]  # type: ignore[list-item]

    @property
    def norm(self) -> float:
        """C, the largest norm of all of an example's gradient."""
        return math.hypot(*self.values)

    def groups(self, paths: Sequence[str]) -> tuple[list[int], list[float]]:
        """(the group of each weight, the clip of each group); a weight is given by its path, ``layer/.../name``.

        Raises:
          ValueError: the clips do not fit the weights.
        """
        layers = [path.rpartition("/")[0] for path in paths]
        if isinstance(self.clips, dict):
            found = [[name for name in self.clips if f"/{name}/" in f"/{path}/"] for path in layers]
            for path, names in zip(paths, found, strict=True):
                if len(names) != 1:
                    raise ValueError(
                        f"clips={self.clips!r}: {'no name fits' if not names else 'several names fit'} the weight "
                        f"{path!r}. Give names of layers so that each weight has one."
                    )
            keys = list(self.clips)
            return [keys.index(names[0]) for names in found], list(map(float, self.values))
        order = list(dict.fromkeys(layers))
        shares = self.values if isinstance(self.clips, tuple) else [self.norm / math.sqrt(len(order))] * len(order)
        if len(shares) != len(order):
            raise ValueError(
                f"clips={self.clips!r} has {len(shares)} clips, but {len(order)} layers are trained "
                f"({', '.join(order)}): give one for each, in this order, or one number for all."
            )
        return [order.index(layer) for layer in layers], list(map(float, shares))


@dataclasses.dataclass(frozen=True)
class AutomaticClip:
    """Every gradient is scaled to a norm just below C: by C / (norm + stability) (Bu et al. 2023, arXiv:2206.07136).

    There is no clip to tune: with Adam, or a learning rate that is tuned, C has no part in where training goes.

    Args:
      l2_norm_clip: C, the sensitivity.
      stability: γ; gradients that are much shorter than it stay so in comparison with others.

    Raises:
      ValueError: an argument is out of its range.
    """

    l2_norm_clip: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        _checks.real("l2_norm_clip", self.l2_norm_clip, "1.0 is usual", above=0)
        _checks.real("stability", self.stability, "0.01 is usual", above=0)


Clip = AdaptiveClip | PerLayerClip | AutomaticClip
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (AdaptiveClip, PerLayerClip, AutomaticClip)}


def to_config(clip: float | Clip) -> JsonValue:
    """`clip` for JSON: a number as it is, a clip as a dictionary."""
    if not isinstance(clip, Clip):
        return clip
    given = {field.name: getattr(clip, field.name) for field in dataclasses.fields(clip)}
    return {"clip": type(clip).__name__, **{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}}


def from_config(clip: object) -> Any:
    """The inverse of `to_config`: `clip` from its dictionary; all else as it is."""
    if not isinstance(clip, Mapping) or clip.get("clip") not in _KINDS:
        return clip
    return _KINDS[clip["clip"]](**{name: value for name, value in clip.items() if name != "clip"})
