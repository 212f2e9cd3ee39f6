"""Noise for large tables of which a batch looks up few rows. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdpfl._types import Json
from tfdpfl.accounting import _checks

__all__ = ["AdaFEST"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaFEST:
    """Of each embedding table only the rows that many examples look up are trained. So only they need noise
    (DP-AdaFEST, Ghazi et al. 2023, arXiv:2311.08357, algorithm 1). Give it to any DP optimizer as ``sparse=``.

    In every step each example (or unit, or group: whatever is clipped as one) has a vector of one entry for each row of
    every table: 1 where it looks the row up, else 0. That vector, of all tables together, is clipped to an L2 norm of
    ``clip``. The vectors are added up, over all parts and replicas of a batch, and normal noise of standard deviation
    ``noise_multiplier * clip`` goes on every count. Rows whose noisy count is at or above ``threshold`` get their
    clipped gradient with noise, looked up or not. The gradient of the others is left out.

    The counts are paid for. The optimizer's ``noise_multiplier`` z is the total. The noise on the gradients rises
    to z₂ with z⁻² = z₁⁻² + z₂⁻², where z₁ is the one given here.

    Args:
      threshold: above 0, in units of the counts. A row that n examples look up, each of which looks up d rows, has a
        count of ``n * min(1, clip / sqrt(d))``. Of rows that nobody looks up a share of Q(threshold / (z₁ clip))
        passes, Q being the normal's upper tail: 3e-5 at 4 standard deviations.
      noise_multiplier: z₁, above the optimizer's z of every step. None takes 2 z, so that the gradients' noise rises by
        15.5 %.
      clip: C₁, the largest norm of an example's part in the counts.
      tables: names of layers whose tables are trained so. None takes all weights of which rows are looked up.

    Raises:
      ValueError: an argument is out of its range.
    """

    threshold: float
    noise_multiplier: float | None = None
    clip: float = 1.0
    tables: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _checks.real("threshold", self.threshold, "at 0, half of all rows pass; 4 times the noise is usual", above=0)
        _checks.real("clip", self.clip, "1.0 is usual", above=0)
        remedy = "it must be above the optimizer's; leave it out for twice that"
        _checks.optional(_checks.real, "noise_multiplier", self.noise_multiplier, remedy, above=0)
        tables = self.tables
        if tables is not None:
            named = not isinstance(tables, str) and isinstance(tables, Sequence) and len(tables) > 0
            if not named or not all(isinstance(name, str) and name for name in tables):
                raise ValueError(f"tables={tables!r} must be names of layers, or None for all tables.")
            _checks.keep(self, "tables", tuple(tables))

    def split(self, noise_multiplier: Any) -> tuple[Any, Any]:
        """(noise multiplier of the gradients, of the counts) that together give ``noise_multiplier``: a number, or a
        tensor of numbers that were checked before.

        Raises:
          ValueError: the counts' noise leaves nothing for the gradients.
        """
        z, known = noise_multiplier, isinstance(noise_multiplier, float | int)
        if known and z == 0:
            return 0.0, 0.0
        counts = 2 * z if self.noise_multiplier is None else self.noise_multiplier
        if known and counts <= z:
            raise ValueError(
                f"sparse={self!r}: noise_multiplier={counts:g} of the counts is not above the optimizer's {z:g}, so "
                "the counts alone would cost more than the whole step may. Raise it, or leave it out for twice that."
            )
        return (z**-2 - counts**-2) ** -0.5, counts

    def to_dict(self) -> Json:
        """The arguments, as JSON can hold them."""
        tables = None if self.tables is None else list(self.tables)
        return {**dataclasses.asdict(self), "tables": tables}
