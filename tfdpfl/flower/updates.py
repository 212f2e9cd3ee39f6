"""Clients' updates in numpy: what bounds each, and their sum. No Flower here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

# Entries at a time: they stay in the cache, and a product of so many takes no second thread.
_BLOCK = 8192


class ClippedSum:
    """The sum of clients' updates, each of an L2 norm of at most ``l2_norm_clip`` over all its arrays.

    An update is what a client returned minus ``base``. One client's arrays change the sum by at most the clip, in
    float64, whatever they hold: what cannot be an update of ``base`` changes nothing and raises.

    Arrays of ``base`` that are not floating-point, as counters are, take no part.

    Args:
      base: the model that the clients were sent.
      l2_norm_clip: the clip.

    Raises:
      ValueError: ``base`` has no floating-point array.
    """

    def __init__(self, base: Mapping[str, np.ndarray], l2_norm_clip: float):
        self.base, self.l2_norm_clip = base, l2_norm_clip
        self.total = {name: np.zeros(w.shape) for name, w in base.items() if w.dtype.kind == "f"}
        if not self.total:
            held = ", ".join(f"{name}: {w.dtype}" for name, w in base.items()) or "nothing"
            raise ValueError(f"the model has no floating-point arrays ({held}), so there is nothing to clip")

    def add(self, arrays: Mapping[str, np.ndarray]) -> float:
        """Adds a client's update and returns the norm that it had.

        Raises:
          ValueError: ``arrays`` are not those of ``base``, or not finite. The sum is then as it was.
        """
        if arrays.keys() != self.base.keys():
            missing, extra = sorted(self.base.keys() - arrays.keys()), sorted(arrays.keys() - self.base.keys())
            raise ValueError(f"other arrays than it was sent: {missing} missing, {extra} too many")
        for name, w in self.base.items():
            value = arrays[name]
            if value.shape != w.shape:
                raise ValueError(f"{name!r} has shape {value.shape}, not {w.shape}")
            if value.dtype.kind not in "fiub":
                raise ValueError(f"{name!r} is of {value.dtype}, which is no real number")
        squared = 0.0
        with np.errstate(all="ignore"):
            for _, block in self._blocks(arrays):
                squared += float(block @ block)
        if not math.isfinite(squared):
            raise ValueError("numbers that are not finite, or too large to square")
        norm = math.sqrt(squared)
        factor = self.l2_norm_clip / norm if norm > self.l2_norm_clip else 1.0
        for part, block in self._blocks(arrays):
            np.multiply(block, factor, out=block)
            np.add(part, block, out=part)
        return norm

    def _blocks(self, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Parts of the total, and what the update has there, in float64 that may be overwritten."""
        room = np.empty(_BLOCK)
        for name, total in self.total.items():
            w, value, into = self.base[name].reshape(-1), arrays[name].reshape(-1), total.reshape(-1)
            exact = np.empty(_BLOCK, np.result_type(w, value)) if w.dtype == value.dtype else room
            for at in range(0, w.size, _BLOCK):
                part = into[at : at + _BLOCK]
                difference, block = exact[: part.size], room[: part.size]
                # In the weights' own type, as clients subtract, then in float64: half the time of one mixed step.
                np.subtract(value[at : at + _BLOCK], w[at : at + _BLOCK], out=difference, dtype=difference.dtype)
                if difference is not block:
                    np.copyto(block, difference)
                yield part, block
