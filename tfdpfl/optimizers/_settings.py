"""Checks what a DP optimizer was made with. None of it may change later, because traced steps hold it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from tfdpfl import clips
from tfdpfl._types import Json
from tfdpfl.accounting._checks import keep, known, put
from tfdpfl.optimizers._clips import clipping_of
from tfdpfl.optimizers._schedules import PiecewiseConstant, schedule_of

__all__ = ["Settings"]

# Divided by 2^31 examples, and with all the digits of a small normal, still above float32's least normal number.
LEAST_STDDEV = 1e-20

_FINITE = {
    "l2_norm_clip": "> 0. It bounds the L2 norm of one example's gradient; 1.0 is usual.",
    "noise_multiplier": (
        ">= 0. It is the noise's standard deviation over l2_norm_clip; tfdpfl.compute_noise_multiplier finds it."
    ),
    "expected_batch_size": "> 0. It is the sampling rate times the data's size.",
}
_WHOLE = {
    "num_microbatches": "None clips every example by itself.",
    "gradient_accumulation_steps": "It is how many batches make one update; 1 is usual.",
    "rows_per_unit": "It is how many rows in a row are one unit; 1 is usual.",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of a DP optimizer but its noise.

    Raises:
      ValueError: one is out of its range, or two exclude each other.
    """

    l2_norm_clip: float | clips.Clip | PiecewiseConstant
    noise_multiplier: float | PiecewiseConstant
    num_microbatches: int | None = None
    gradient_accumulation_steps: int = 1
    expected_batch_size: float | None = None
    rows_per_unit: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        clip = clips.from_config(self.l2_norm_clip)
        keep(self, "l2_norm_clip", clip if isinstance(clip, clips.Clip) else _constant_or_not("l2_norm_clip", clip))
        put(self, _constant_or_not, "noise_multiplier")
        known(self, _finite, "expected_batch_size")
        for name, remedy in _WHOLE.items():
            put(self, _whole, name, getattr(Settings, name), remedy)
        if self.seed is not None and not (_is_whole(self.seed) and self.seed >= 0):
            raise ValueError(f"seed={self.seed!r} must be a non-negative integer, or None for the system's entropy.")
        keep(self, "seed", None if self.seed is None else int(self.seed))
        if self.rows_per_unit > 1 and self.num_microbatches is not None:
            raise ValueError(
                f"rows_per_unit={self.rows_per_unit} and num_microbatches={self.num_microbatches} both state whose "
                "mean gradient is clipped. Leave num_microbatches out: each unit is then its own group, and costs half "
                "as much."
            )
        self._check_stddev()

    def _check_stddev(self) -> None:
        size, clipping = self.expected_batch_size or 1.0, clipping_of(self.l2_norm_clip)
        for multiplier in self.noises:
            clipping.split(multiplier, size)  # which refuses noise that leaves nothing for the gradients
        stddev = clipping.split(self.least_noise, size)[0] * clipping.first / size
        if self.least_noise > 0 and stddev < LEAST_STDDEV:
            raise ValueError(
                f"l2_norm_clip={self.l2_norm_clip!r} with noise_multiplier={self.noise_multiplier!r} and "
                f"expected_batch_size={self.expected_batch_size!r} is noise of {stddev:.2g}, so small that float32 may "
                "lose the noise and keep the gradient. Scale the loss and l2_norm_clip up."
            )

    @property
    def noises(self) -> tuple[float, ...]:
        """The noise multipliers of all steps."""
        z = self.noise_multiplier
        return z.values if isinstance(z, PiecewiseConstant) else (z,)

    @property
    def least_noise(self) -> float:
        """The least noise multiplier of any step."""
        return min(self.noises)

    @property
    def changing(self) -> str | None:
        """Which setting changes from step to step, if any."""
        names = ("noise_multiplier", "l2_norm_clip")
        return next((name for name in names if isinstance(getattr(self, name), PiecewiseConstant)), None)

    def unusual(self) -> dict[str, str]:
        """Returns what asks for more than one clip a batch of examples: features, each as the user typed it."""
        given = {
            name: f"{name}={getattr(self, name)!r}" for name in _WHOLE if getattr(self, name) != getattr(Settings, name)
        }
        if isinstance(self.l2_norm_clip, clips.Clip):
            adapts = isinstance(self.l2_norm_clip, clips.AdaptiveClip)
            given["adaptive clip" if adapts else "clip by groups"] = f"l2_norm_clip={self.l2_norm_clip!r}"
        return given

    def to_dict(self) -> Json:
        """Returns the arguments as JSON can hold them."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: v.to_dict() if isinstance(v, PiecewiseConstant) else clips.to_config(v) for k, v in given.items()}


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _whole(name: str, value: Any, usual: int | None, remedy: str) -> int | None:
    if value is None:
        return usual
    if not _is_whole(value) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer or None. {remedy}")
    return int(value)


def _finite(name: str, value: Any) -> float:
    bound = _FINITE[name]
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < 0 or (value == 0 and not bound.startswith(">=")):
        raise ValueError(f"{name}={value!r} must be a finite number {bound}")
    return float(value)


def _constant_or_not(name: str, value: object) -> float | PiecewiseConstant:
    return schedule_of(name, value) or _finite(name, value)
