"""Clients' updates in numpy: what bounds each, and their sum. No Flower here."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy.linalg.blas import daxpy

__all__ = ["ClippedSum"]

# Entries at a time: they stay in the cache, and a product of so many takes no second thread.
_BLOCK = 8192


class ClippedSum:
    """The sum of clients' updates, each of an L2 norm of at most ``l2_norm_clip`` over all its arrays.

    An update is what a client returned minus ``base``. One client's arrays change the sum by at most the clip, but for
    1e-7 of it, whatever they hold. What cannot be an update of ``base`` changes nothing and raises.

    Arrays of ``base`` that are not floating-point, as counters are, take no part.

    Args:
      base: the model that the clients were sent.
      l2_norm_clip: the clip.

    Raises:
      ValueError: ``base`` has no floating-point array, or one of complex numbers or of bytes, as bfloat16 arrives, or
        one that is not finite.
    """

    def __init__(self, base: Mapping[str, np.ndarray], l2_norm_clip: float):
        self.base, self.l2_norm_clip = base, l2_norm_clip
        # What clients returned, times their factors, and the factors: the model is taken off once, at the end.
        self._returned = {name: np.zeros(w.size) for name, w in base.items() if w.dtype.kind == "f"}
        self._factors = 0.0
        for name, w in base.items():
            if w.dtype.kind not in "fiub":
                raise ValueError(
                    f"The model's array {name!r} is of {w.dtype}, which is no number that can be clipped, nor a "
                    "counter that stays. Send it as float32."
                )
            if w.dtype.kind == "f" and not np.isfinite(w).all():
                raise ValueError(
                    f"The model's array {name!r} holds numbers that are not finite. No client's update of it can be "
                    "clipped, so every round would cost epsilon and change nothing. Start from finite numbers, and "
                    "leave constants, as masks of -inf, out of what is sent; or lower the server's learning rate."
                )
        if not self._returned:
            held = ", ".join(f"{name}: {w.dtype}" for name, w in base.items()) or "nothing"
            raise ValueError(f"The model has no floating-point arrays ({held}), so there is nothing to clip.")

    @property
    def total(self) -> dict[str, np.ndarray]:
        """The sum, in float64."""
        return {
            name: (summed - self._factors * self.base[name].reshape(-1)).reshape(self.base[name].shape)
            for name, summed in self._returned.items()
        }

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
        norm = self._norm(arrays)
        factor = self.l2_norm_clip / norm if norm > self.l2_norm_clip else 1.0
        room = np.empty(_BLOCK)
        for name, into in self._returned.items():
            value = arrays[name].reshape(-1)
            for at in range(0, into.size, _BLOCK):
                part = into[at : at + _BLOCK]
                block = room[: part.size]
                np.copyto(block, value[at : at + _BLOCK])
                daxpy(block, part, a=factor)  # into part, in one pass
        self._factors += factor
        return norm

    def _norm(self, arrays: Mapping[str, np.ndarray]) -> float:
        squared, room = 0.0, np.empty(_BLOCK)
        with np.errstate(all="ignore"):
            for name in self._returned:
                w, value = self.base[name].reshape(-1), arrays[name].reshape(-1)
                # In float32, as clients subtract, then in float64: half the time of one mixed step. A difference in
                # float16 is off by up to 1/2048, which a client could use.
                exact = np.empty(_BLOCK, w.dtype) if w.dtype == value.dtype == np.float32 else room
                for at in range(0, w.size, _BLOCK):
                    block = room[: min(_BLOCK, w.size - at)]
                    difference = exact[: block.size]
                    np.subtract(value[at : at + _BLOCK], w[at : at + _BLOCK], out=difference, dtype=exact.dtype)
                    if exact is not room:
                        np.copyto(block, difference)
                    squared += float(block @ block)
        if not math.isfinite(squared):
            raise ValueError("numbers that are not finite, or too large to square")
        return math.sqrt(squared)
