"""Finds the noise that an optimizer's arguments ask for."""

from __future__ import annotations

from typing import Any

from tfdpfl.optimizers._correlated_noise import CorrelatedNoise
from tfdpfl.optimizers._fresh_noise import FreshNoise
from tfdpfl.optimizers._grid_noise import GridNoise
from tfdpfl.optimizers._settings import Settings
from tfdpfl.optimizers._sparse_noise import SparseNoise

__all__ = ["KINDS", "noise_of"]

# Each has a `parse` for its argument, which returns None if the argument does not ask for it.
KINDS: tuple[Any, ...] = (CorrelatedNoise, GridNoise, SparseNoise)


def noise_of(settings: Settings, *arguments: object) -> FreshNoise:
    """Returns the noise that the arguments ask for, one for each of `KINDS`.

    Raises:
      ValueError: an argument is none of its kind, two ask for a noise, or the settings exclude the noise.
    """
    parsed = [(kind, kind.parse(given)) for kind, given in zip(KINDS, arguments, strict=True)]
    noises = [kind(settings, given) for kind, given in parsed if given is not None]
    if len(noises) > 1:
        one, other = (noise.label for noise in noises[:2])
        raise ValueError(f"{one} together with {other}: a step has one kind of noise. Leave one of the two out.")
    noise = noises[0] if noises else FreshNoise(settings)
    noise.check()
    return noise
