"""Correlated noise for training: which matrix, how far one example moves it, how much noise its running sums have.

Step t adds row t of ``C⁻¹ Z``, Z being independent normals: a later step takes back a part of what earlier ones added,
so that the sum over the steps, which is what the weights follow, has little noise (DP-FTRL, matrix factorisation). C is
lower triangular. No TensorFlow here: `tfdpfl.noise` draws.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any, ClassVar

import numpy as np

from tfdpfl.accounting import _checks
from tfdpfl.accounting.participation import most_participations, moved_by_toeplitz, tree_sensitivity

ERRORS = ("rms", "max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """What all kinds of correlated noise have in common; see `Tree`, `Banded` and `BLT`."""

    min_separation: int = 1
    max_participations: int | None = None

    def __post_init__(self) -> None:
        mend = "count the steps from one use of an example to its next (of an epoch, if each has the same order)"
        self._put("min_separation", _checks.whole("min_separation", self.min_separation, 1, mend))
        if self.max_participations is not None:
            mend = "count the steps that one example can be in (the epochs, if it is in one of each)"
            self._put("max_participations", _checks.whole("max_participations", self.max_participations, 1, mend))

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way to set a frozen dataclass's fields

    def sensitivity(self, num_steps: int, min_separation: int = 1, max_participations: int | None = None) -> float:
        """How far one example moves all noises together, in clips: the largest L2 norm of ``C u``.

        Args:
          num_steps: rows of the matrix.
          min_separation: fewest steps from one participation to the next.
          max_participations: most participations; None for as many as there is room for.
        """
        raise NotImplementedError

    @property
    def unit(self) -> float:
        """The standard deviation of the base normals over C, at a noise multiplier of 1."""
        raise NotImplementedError

    def matrix(self, num_steps: int) -> np.ndarray:
        """C, whole: for looking at it, and for tests."""
        raise NotImplementedError

    def variances(self, num_steps: int) -> np.ndarray:
        """Of the running sums after 1, 2, … steps: the noise's variance where the base normals have 1."""
        raise NotImplementedError

    def error(self, num_steps: int, kind: str = "rms") -> float:
        """The noise of the running sums at the privacy of one Gaussian mechanism of σ = 1 and clip 1.

        Standard deviations: the root mean square over the steps, or the largest (``kind="max"``). What an example can
        do is what the noise was made for. The same noise at another σ and clip has this times both.
        """
        kind = _checks.choice("kind", kind, ERRORS)
        variances = self.variances(num_steps)
        sensitivity = self.sensitivity(num_steps, self.min_separation, self.max_participations)
        return sensitivity * math.sqrt(variances.max() if kind == "max" else variances.mean())

    def to_dict(self) -> dict[str, Any]:
        """The noise as values that JSON can hold; `noise_from_dict` is the inverse."""
        return {"noise": type(self).__name__, **dataclasses.asdict(self)}

    @property
    def fingerprint(self) -> int:
        """A number that tells kinds of noise apart."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(Noise):
    """Tree-aggregated noise (Dwork et al. 2010; Kairouz et al. 2021, arXiv:2103.00039): DP-FTRL.

    The sum over t steps has the noise of at most log2(t) + 1 nodes. ``noise_multiplier`` is the standard deviation of a
    node over the clip, as in TensorFlow Federated. It costs no memory (nodes are drawn again from their keys) and two
    draws a step on average.

    Args:
      restart_every: steps in a tree, after which a new one starts; None for one tree. An epoch is usual: with fewer
        nodes above an example it moves less, and the noise of whole epochs adds up.
      min_separation: fewest steps from one use of an example to its next that the data must declare; 1 asks nothing.
      max_participations: most uses that they may declare; None asks nothing.
    """

    restart_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restart_every is not None:
            mend = "count the steps of a tree, or leave it out"
            self._put("restart_every", _checks.whole("restart_every", self.restart_every, 1, mend))

    @property
    def unit(self) -> float:
        return 1.0

    def sensitivity(self, num_steps: int, min_separation: int = 1, max_participations: int | None = None) -> float:
        most = most_participations(num_steps, min_separation, max_participations)
        return math.sqrt(tree_sensitivity(num_steps, most, min_separation, self.restart_every, prefixes_only=True))

    def level(self, step: int) -> int:
        """How often 2 divides the place of a step (from 0) in its tree: its node is the sum over 2^level steps."""
        place = self.place(step)
        return (place & -place).bit_length() - 1

    def place(self, step: int) -> int:
        """The place of a step (from 0) in its tree, from 1."""
        return (step if self.restart_every is None else step % self.restart_every) + 1

    def matrix(self, num_steps: int) -> np.ndarray:
        c = np.zeros([num_steps, num_steps])
        for t in range(num_steps):
            c[t, t + 1 - (1 << self.level(t)) : t + 1] = 1
        return c

    def variances(self, num_steps: int) -> np.ndarray:
        places = np.arange(1, num_steps + 1)
        whole = np.zeros(num_steps)
        if self.restart_every is not None:
            trees, places = np.divmod(places - 1, self.restart_every)
            places = places + 1
            whole = trees * float(self.restart_every.bit_count())
        bits = np.unpackbits(places.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1).sum(1)
        return whole + bits


class _Toeplitz(Noise):
    """C has one column, shifted down."""

    def column(self, num_steps: int) -> np.ndarray:
        """The first column of C, as long as it is not zero."""
        raise NotImplementedError

    def sensitivity(self, num_steps: int, min_separation: int = 1, max_participations: int | None = None) -> float:
        column = self.column(num_steps)
        return float(np.linalg.norm(moved_by_toeplitz(column, num_steps, min_separation, max_participations)))

    def inverse(self, num_steps: int) -> np.ndarray:
        """The first column of C⁻¹."""
        from scipy.signal import lfilter

        return lfilter([1.0], self.column(num_steps), np.eye(1, num_steps)[0])

    def variances(self, num_steps: int) -> np.ndarray:
        return np.cumsum(np.cumsum(self.inverse(num_steps)) ** 2)

    def matrix(self, num_steps: int) -> np.ndarray:
        from scipy.linalg import toeplitz

        column = np.zeros(num_steps)
        known = self.column(num_steps)[:num_steps]
        column[: len(known)] = known
        return np.tril(toeplitz(column))


def _numbers(name: str, values: Any, mend: str) -> tuple[float, ...]:
    try:
        return tuple(_checks.real(name, float(v), mend) for v in values)
    except TypeError:
        raise ValueError(f"{name}={values!r} must be a sequence of numbers: {mend}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Banded(_Toeplitz):
    """Banded Toeplitz noise (Choquette-Choo et al. 2023, arXiv:2306.08153).

    ``noise_multiplier`` is the standard deviation of the base normals over the clip and the sensitivity, so that the
    whole training costs what one Gaussian mechanism of it costs, if it is as it was said to be here. The state is
    ``bands - 1`` copies of the model. With ``data.cyclic_poisson`` batches of ``bands`` groups or more the sampling
    counts: it is priced as one Poisson-sampled step for each round of the groups. One band is DP-SGD.

    Args:
      bands: diagonals of C, at most ``min_separation`` (an example then moves bands noises at a time, and these never
        meet).
      min_separation: fewest steps from one use of an example to its next; the steps of an epoch, if each epoch has the
        same order. With cyclic Poisson sampling the number of groups.
      max_participations: most uses of an example; the epochs. 1 for cyclic Poisson sampling (σ is then of one round).
      num_steps: steps that the bands are best for; None for ``min_separation * max_participations``.
      objective: what they make small: ``"rms"`` or ``"max"`` of the running sums' noise.
      coefficients: of the diagonals; None finds the best.
    """

    bands: int
    num_steps: Any = None  # an int once it is made
    coefficients: Any = None  # a tuple of floats once it is made
    objective: str = "rms"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._put("bands", _checks.whole("bands", self.bands, 1, "count the diagonals of C; 1 is independent noise"))
        if self.max_participations is None:
            raise ValueError("max_participations=None: count the uses of an example (the epochs), or 1 if sampled.")
        if self.bands > self.min_separation:
            raise ValueError(
                f"bands={self.bands} is more than min_separation={self.min_separation}: an example would meet its own "
                "last use. Take fewer bands, or data that keep uses further apart."
            )
        if self.num_steps is None:
            self._put("num_steps", self.min_separation * self.max_participations)
        self._put("num_steps", _checks.whole("num_steps", self.num_steps, 1, "count the steps of the training"))
        self._put("objective", _checks.choice("objective", self.objective, ERRORS))
        mend = f"give {self.bands} numbers, the first of them above 0, or leave it out"
        if self.coefficients is None:
            self._put("coefficients", best_bands(self.bands, self.num_steps, self.objective))
        self._put("coefficients", _numbers("coefficients", self.coefficients, mend))
        if len(self.coefficients) != self.bands or self.coefficients[0] <= 0:
            raise ValueError(f"coefficients={self.coefficients!r} do not fit bands={self.bands}: {mend}")

    @property
    def unit(self) -> float:
        assert self.max_participations is not None
        return math.sqrt(self.max_participations) * float(np.linalg.norm(self.coefficients))

    def column(self, num_steps: int) -> np.ndarray:
        return np.array(self.coefficients)[:num_steps]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BLT(_Toeplitz):
    """Buffered linear Toeplitz noise (Dvijotham et al. 2024, arXiv:2404.16706; McMahan et al. 2024, arXiv:2408.08868).

    C has 1 on its diagonal and ``Σ scale · decay^(i-1)`` i below. A few buffers (copies of the model) come close to the
    best Toeplitz matrix there is, for any number of steps. ``noise_multiplier`` is as in `Banded`.

    Args:
      buffers: how many; 2 or 3 do for thousands of steps, 4 for 100,000.
      min_separation, max_participations: as in `Banded`.
      num_steps: as in `Banded`.
      objective: what the coefficients make small: ``"rms"`` or ``"max"`` of the running sums' noise.
      decay, scale: a number for each buffer, decays between 0 and 1, scales of at least 0 with a sum of at most 1. None
        finds the best.
    """

    buffers: int = 2
    num_steps: Any = None  # an int, and tuples of floats, once it is made
    decay: Any = None
    scale: Any = None
    objective: str = "rms"
    _MOST: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._put("buffers", _checks.whole("buffers", self.buffers, 1, "2 to 5 are usual"))
        if self.buffers > self._MOST:
            raise ValueError(f"buffers={self.buffers} is more than {self._MOST}: 5 come near the best.")
        if self.max_participations is None:
            raise ValueError("max_participations=None: count the uses of an example (the epochs).")
        if self.num_steps is None:
            self._put("num_steps", self.min_separation * self.max_participations)
        self._put("num_steps", _checks.whole("num_steps", self.num_steps, 1, "count the steps of the training"))
        self._put("objective", _checks.choice("objective", self.objective, ERRORS))
        if (self.decay is None) != (self.scale is None):
            raise ValueError("Give both of decay and scale, or neither.")
        if self.decay is None:
            most = most_participations(self.num_steps, self.min_separation, self.max_participations)
            decay, scale = best_buffers(self.buffers, self.num_steps, self.min_separation, most, self.objective)
            self._put("decay", decay)
            self._put("scale", scale)
        mend = f"give {self.buffers} numbers, decays between 0 and 1, scales of at least 0 with a sum of at most 1"
        self._put("decay", _numbers("decay", self.decay, mend))
        self._put("scale", _numbers("scale", self.scale, mend))
        fits = len(self.decay) == len(self.scale) == self.buffers and all(0 <= d < 1 for d in self.decay)
        if not fits or min(self.scale) < 0 or sum(self.scale) > 1:
            raise ValueError(f"decay={self.decay!r} and scale={self.scale!r} do not fit: {mend}")

    @functools.cached_property
    def unit(self) -> float:  # type: ignore[override]
        return self.sensitivity(self.num_steps, self.min_separation, self.max_participations)

    def column(self, num_steps: int) -> np.ndarray:
        i = np.arange(num_steps)[:, None] - 1.0
        column = (np.array(self.scale) * np.array(self.decay) ** i.clip(0)).sum(1)
        column[:1] = 1.0
        return column

    def inverse(self, num_steps: int) -> np.ndarray:
        # The buffers as a filter of the noise that goes out: s' = decay s + w, w = z - scale s.
        values, vectors = np.linalg.eig(np.diag(self.decay) - np.ones([self.buffers, 1]) * np.array(self.scale))
        weights = (np.array(self.scale) @ vectors) * np.linalg.solve(vectors, np.ones(self.buffers))
        i = np.arange(num_steps)[:, None] - 1.0
        inverse = -(weights * values ** i.clip(0)).sum(1).real
        inverse[:1] = 1.0
        return inverse


_KINDS: dict[Any, Any] = {kind.__name__: kind for kind in (Tree, Banded, BLT)}


def noise_from_dict(saved: dict[str, Any]) -> Noise:
    """The noise that `Noise.to_dict` saved.

    Raises:
      ValueError: ``saved`` is not what it gives.
    """
    settings = dict(saved)
    kind = settings.pop("noise", None)
    if kind not in _KINDS:
        raise ValueError(f"noise={kind!r} is none of {', '.join(_KINDS)}: give what to_dict gave.")
    try:
        return _KINDS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
    except TypeError as error:
        raise ValueError(f"saved is not what to_dict gave: {error}") from error


def square_root(num_steps: int) -> np.ndarray:
    """The column of the lower triangular Toeplitz C for which C² makes running sums: 1, 1/2, 3/8, 5/16, … Of all
    matrices it has nearly the least product of sensitivity (one participation) and largest error (Fichtenberger,
    Henzinger & Upadhyay 2022, arXiv:2202.11205)."""
    i = np.arange(1, num_steps)
    return np.concatenate([[1.0], np.cumprod((2 * i - 1) / (2 * i))])[:num_steps]


def inverse_square_root(num_steps: int) -> np.ndarray:
    """The column of its inverse: 1, -1/2, -1/8, -1/16, …"""
    i = np.arange(1, num_steps)
    return np.concatenate([[1.0], np.cumprod((2 * i - 3) / (2 * i))])[:num_steps]


@functools.lru_cache(maxsize=64)
def best_bands(bands: int, num_steps: int, error: str = "rms") -> tuple[float, ...]:
    """Coefficients of ``bands`` diagonals with the least product of the column's norm and the running sums' error; they
    begin with 1. By L-BFGS from the square root's."""
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    bands_ = min(bands, num_steps)
    first = np.eye(1, num_steps)[0]
    weights = np.arange(num_steps, 0, -1) / num_steps if error == "rms" else np.ones(num_steps)

    def loss(rest: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], rest])
        with np.errstate(all="ignore"):
            inverse = lfilter([1.0], c, first)
            sums = np.cumsum(inverse)
            error = weights @ sums**2
            moved = lfilter([1.0], c, sums)  # sums moved by a coefficient j lower: minus this, j later
            slope = [-2 * (weights[j:] * sums[j:]) @ moved[: num_steps - j] for j in range(1, len(c))]
            norm = c @ c
            value = norm * error
        if not np.isfinite(value):
            return 1e300, np.zeros(len(rest))
        return math.log(value), 2 * rest / norm + np.array(slope) / error

    start = square_root(bands_)[1:]
    if not len(start):
        return (1.0,) + (0.0,) * (bands - bands_)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9})
    best = found.x if found.fun <= loss(start)[0] else start
    return (1.0, *best.tolist()) + (0.0,) * (bands - bands_)


@functools.lru_cache(maxsize=64)
def best_buffers(
    buffers: int, num_steps: int, separation: int = 1, most: int = 1, error: str = "max"
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Decays and scales with the least product of sensitivity and error of the running sums.

    By L-BFGS over the decays of C and of C⁻¹, which lie between each other where all scales are above 0 (McMahan et al.
    2024, arXiv:2408.08868, section 4); a column of such a C never grows, as `moved_by_toeplitz` likes it.
    """
    from scipy.optimize import minimize

    i = np.arange(num_steps - 1)[:, None].astype(float)
    weights = np.arange(num_steps, 0, -1) / num_steps if error == "rms" else np.ones(num_steps)

    def parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Decays and scales of C, and of C⁻¹; x may be complex."""
        places = x[0] - np.concatenate([[0.0], np.cumsum(np.exp(x[1:]))])
        both = 1 / (1 + np.exp(-places))
        decay, inverse_decay = both[::2], both[1::2]

        def scales(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            apart = a[:, None] - a[None, :] + np.eye(len(a))
            return np.prod(a[:, None] - b[None, :], 1) / np.prod(apart, 1)

        return decay, scales(decay, inverse_decay), inverse_decay, scales(inverse_decay, decay)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            now = parts(x)
            decay, scale, inverse_decay, inverse_scale = now
            if min(np.diff(np.sort(np.concatenate([decay, inverse_decay])))) < 1e-12 or max(decay) >= 1:
                return 1e300, np.zeros(len(x))
            powers = decay**i
            column = np.concatenate([[1.0], powers @ scale])
            moved = moved_by_toeplitz(column, num_steps, separation, most)
            to_column = moved.copy()
            for k in range(1, most):
                to_column[: num_steps - k * separation] += moved[k * separation :]
            inverse_powers = inverse_decay**i
            geometric = np.cumsum(inverse_powers, 0)
            sums = np.concatenate([[1.0], 1 + geometric @ inverse_scale])
            squared, variance = moved @ moved, weights @ sums**2
            # Slopes by the four kinds of numbers, then by x: a complex step is exact there.
            by_column, by_sums = 2 * to_column[1:] / squared, 2 * (weights * sums)[1:] / variance
            slopes_of_powers = i * decay ** (i - 1).clip(0)
            slopes_of_sums = np.cumsum(i * inverse_decay ** (i - 1).clip(0), 0)
            slopes = (
                scale * (by_column @ slopes_of_powers), by_column @ powers,
                inverse_scale * (by_sums @ slopes_of_sums), by_sums @ geometric,
            )  # fmt: skip
            steps = np.array([np.concatenate(parts(x + 1e-30j * e)).imag / 1e-30 for e in np.eye(len(x))])
            return math.log(squared * variance), steps @ np.concatenate(slopes)

    longest = math.log(max(num_steps, 2))
    best = None
    # Decays from 1 - 1/n down, evenly in the logarithm; the second start is for few steps.
    for reach in (longest + 1, longest / 2 + 0.5):
        gaps = np.full(2 * buffers - 1, math.log(max(reach, 0.5) / (2 * buffers - 1) + 0.1))
        start = np.concatenate([[reach], gaps])
        options = {"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-9}
        found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
        if best is None or found.fun < best.fun:
            best = found
    assert best is not None
    with np.errstate(all="ignore"):
        decay, scale, _, _ = parts(best.x)
    return tuple(decay.tolist()), tuple(scale.tolist())
