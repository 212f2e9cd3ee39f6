"""Kinds of correlated noise: one class for each, which states all that the package asks about it.

Step t adds row t of ``C⁻¹ Z``, Z being independent normals. A later step takes back a part of what earlier ones
added. So the sum over the steps, which is what the weights follow, has little noise (DP-FTRL, matrix factorisation). C
is lower triangular.

To add a noise, write a class here and put its name into `__all__`. Nothing else in the package names it. TensorFlow is
imported by `draw` alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from tfdpfl._lazy import dp_event
from tfdpfl._types import Json, Keywords
from tfdpfl.accounting._checks import choice, keep, known, put, real, whole
from tfdpfl.accounting.events import event_type
from tfdpfl.accounting.participation import most_participations, moved_by_toeplitz, tree_sensitivity
from tfdpfl.noise.optimal import best_bands, best_buffers, best_inverse_bands, inverse_square_root

if TYPE_CHECKING:
    import tensorflow as tf
    from dp_accounting import DpEvent

    from tfdpfl.noise.source import Source

__all__ = ["BLT", "ERRORS", "INDEPENDENT", "KINDS", "Banded", "BandedInverse", "Noise", "Tree", "Uses", "as_noise"]

ERRORS = ("rms", "max")
_MOST_LEVELS = 48  # of one tree that is never restarted: more steps than any training takes
KINDS: dict[str, type[Noise]] = {}  # by name, as `to_dict` saves it
_WIDTHS = [1 << i for i in range(7)]  # of the bands that `compare` looks at


class Uses(NamedTuple):
    """A training as far as correlated noise depends on it.

    Attributes:
      num_steps: noisy updates.
      min_separation: fewest steps from one use of an example to its next.
      max_participations: most uses of an example; None for as many as there is room for.
    """

    num_steps: int
    min_separation: int = 1
    max_participations: int | None = None

    @property
    def limits(self) -> Keywords:
        """The last two, as arguments of a noise."""
        return {"min_separation": self.min_separation, "max_participations": self.max_participations}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """The base of all kinds of correlated noise; see `Tree`, `Banded`, `BandedInverse` and `BLT`.

    A frozen dataclass that derives from it, and has the methods that raise `NotImplementedError` here, works as
    ``noise=`` of every optimizer and strategy. Its ε is an upper bound if its `sensitivity` and `event` are.

    Attributes:
      min_separation: fewest steps from one use of an example to its next that it was made for.
      max_participations: most uses of an example that it was made for, or None.
      sizes: the names of the settings that a sentence about it shows.
    """

    min_separation: int = 1
    max_participations: int | None = None

    sizes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if cls.__name__.startswith("_"):
            return
        other = KINDS.setdefault(cls.__name__, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"The noise {cls.__name__} of {cls.__module__} has the same name as a noise of {other.__module__}. "
                "Saved files identify kinds of noise by their names. Give the class another name."
            )
        KINDS[cls.__name__] = cls  # the class may be defined anew, as notebooks do

    def __post_init__(self) -> None:
        mend = "count the steps from one use of an example to its next (of an epoch, if each has the same order)"
        put(self, whole, "min_separation", 1, mend)
        mend = "count the steps that one example can be in (the epochs, if it is in one of each)"
        known(self, whole, "max_participations", 1, mend)

    def sensitivity(self, num_steps: int, min_separation: int = 1, max_participations: int | None = None) -> float:
        """Returns how far one example moves all noises together, in clips: the largest L2 norm of ``C u``.

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

    @property
    def least_shift(self) -> float:
        """How far one use moves the base normals at least, in clips, at any step: the least norm of a column of C.

        0, the default, states nothing. An `AdaptiveClip` is then refused.
        """
        return 0.0

    def matrix(self, num_steps: int) -> np.ndarray:
        """Returns C, whole: for looking at it, and for tests."""
        raise NotImplementedError

    def variances(self, num_steps: int) -> np.ndarray:
        """Returns the noise's variance in the running sums after 1, 2, … steps, where the base normals have 1."""
        raise NotImplementedError

    def error(self, num_steps: int, kind: str = "rms") -> float:
        """Returns the noise of the running sums at the privacy of one Gaussian mechanism of σ = 1 and clip 1.

        Standard deviations: the root mean square over the steps, or the largest (``kind="max"``). The influence of an
        example is what the noise was made for. The same noise at another σ and clip has this times both.
        """
        kind = choice("kind", kind, ERRORS)
        variances = self.variances(num_steps)
        sensitivity = self.sensitivity(num_steps, self.min_separation, self.max_participations)
        return sensitivity * math.sqrt(variances.max() if kind == "max" else variances.mean())

    def initial_state(self, size: int) -> dict[str, np.ndarray]:
        """Returns what is kept of earlier noise before step 0: names of variables and their values.

        Args:
          size: coordinates of all weights together.
        """
        raise NotImplementedError

    def draw(self, source: Source, size: int, state: Sequence[tf.Variable], step: tf.Tensor) -> tf.Tensor:
        """Draws a row of ``C⁻¹ Z``, float32 [size], of base normals of deviation 1, and moves the state on.

        Args:
          source: of the fresh normals.
          size: coordinates of all weights together.
          state: the variables that `initial_state` names.
          step: int64 scalar, from 0: which row. At 0 the state counts as empty, whatever it holds.
        """
        raise NotImplementedError

    def event(self, uses: Uses, stddev: float) -> DpEvent:
        """Returns all steps of a training as one event.

        Args:
          uses: the training.
          stddev: of the base normals, in what one example can add to a step.
        """
        raise NotImplementedError

    def event_of_a_use(self, uses: Uses, stddev: float) -> DpEvent | None:
        """Returns one use of an example as an event, if two uses never meet in a base normal; else None."""
        return None

    @classmethod
    def candidates(cls, uses: Uses, objective: str) -> list[Noise]:
        """Returns those of this kind that `compare` looks at for a training."""
        return []

    @classmethod
    def sampled_candidates(cls, num_steps: int, sampling_rate: float, objective: str) -> list[Noise]:
        """Returns those that `compare` looks at with groups that are sampled in turns."""
        return []

    def text(self) -> str:
        """Returns the kind with its `sizes`, for a sentence."""
        given = {name: getattr(self, name) for name in self.sizes}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in given.items() if v is not None)})"

    def to_dict(self) -> Json:
        """Returns the noise as values that JSON can hold; `noise_from_dict` is the inverse."""
        return {"noise": type(self).__name__, **dataclasses.asdict(self)}


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

    sizes = ("restart_every",)

    def __post_init__(self) -> None:
        super().__post_init__()
        known(self, whole, "restart_every", 1, "count the steps of a tree, or leave it out")

    @property
    def unit(self) -> float:
        return 1.0

    @property
    def least_shift(self) -> float:
        return 1.0  # each step closes a node that holds it

    def sensitivity(self, num_steps: int, min_separation: int = 1, max_participations: int | None = None) -> float:
        most = most_participations(num_steps, min_separation, max_participations)
        return math.sqrt(tree_sensitivity(num_steps, most, min_separation, self.restart_every, prefixes_only=True))

    def event(self, uses: Uses, stddev: float) -> DpEvent:
        most = most_participations(*uses)
        levels = min(uses.num_steps, self.restart_every or uses.num_steps).bit_length()
        # Of nodes that hold u uses together the likeliest to pass the end of the normals are u of one use, or as
        # few as can be: the chance over the uses is largest at either end, as long as it is small.
        shifts = [(float(most * levels), 1 / stddev)]
        for level in range(levels):
            held = min(most, -(-(1 << level) // uses.min_separation))
            shifts.append((most / held, held / stddev))
        return moved_normals(self.sensitivity(*uses) / stddev, shifts)

    @classmethod
    def candidates(cls, uses: Uses, objective: str) -> list[Noise]:
        restarts = [None, uses.min_separation] if 1 < uses.min_separation < uses.num_steps else [None]
        return [cls(restart_every=steps, **uses.limits) for steps in restarts]

    def initial_state(self, size: int) -> dict[str, np.ndarray]:
        levels = _MOST_LEVELS if self.restart_every is None else self.restart_every.bit_length()
        return {"dp_noise_keys": np.zeros([levels, 2], np.int64)}

    def draw(self, source: Source, size: int, state: Sequence[tf.Variable], step: tf.Tensor) -> tf.Tensor:
        """Draws the node that this step closes, less those that it is made of, which were open until now: of each level
        below its own the last one drawn."""
        import tensorflow as tf

        place = (step if self.restart_every is None else tf.math.floormod(step, self.restart_every)) + 1
        keys = tf.convert_to_tensor(state[0])
        lowest = tf.bitwise.bitwise_and(place, -place)
        level = tf.reduce_sum(tf.cast(lowest > 2 ** tf.range(_MOST_LEVELS, dtype=tf.int64), tf.int64))
        key = source.fresh_key()
        row = source.of_keys(size, tf.concat([key[None], keys], 0), level)
        state[0].assign(tf.where(tf.range(keys.shape[0], dtype=tf.int64)[:, None] == level, key, keys))
        return row

    def matrix(self, num_steps: int) -> np.ndarray:
        c = np.zeros([num_steps, num_steps])
        for t in range(num_steps):
            place = (t if self.restart_every is None else t % self.restart_every) + 1  # in its tree
            c[t, t + 1 - (place & -place) : t + 1] = 1
        return c

    def variances(self, num_steps: int) -> np.ndarray:
        places = np.arange(1, num_steps + 1)
        trees: Any = 0
        if self.restart_every is not None:
            trees, places = np.divmod(places - 1, self.restart_every)
            places = places + 1
            trees = trees * float(self.restart_every.bit_count())
        bits = np.unpackbits(places.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1).sum(1)
        return trees + bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Toeplitz(Noise):
    """C has one column, shifted down."""

    num_steps: Any = None  # an int once it is made
    objective: str = "rms"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_participations is None:
            raise ValueError("max_participations=None: count the uses of an example (the epochs), or 1 if sampled.")
        if self.num_steps is None:
            keep(self, "num_steps", self.min_separation * self.max_participations)
        put(self, whole, "num_steps", 1, "count the steps of the training")
        put(self, choice, "objective", ERRORS)

    def column(self, num_steps: int) -> np.ndarray:
        """Returns the first column of C, as long as it is not zero."""
        raise NotImplementedError

    @functools.cached_property
    def unit(self) -> float:  # type: ignore[override]
        return self.sensitivity(self.num_steps, self.min_separation, self.max_participations)

    @property
    def least_shift(self) -> float:
        return abs(float(self.column(1)[0]))  # the last step has no other noise after it

    def sensitivity(self, num_steps: int, min_separation: int = 1, max_participations: int | None = None) -> float:
        return float(np.linalg.norm(self._moved(Uses(num_steps, min_separation, max_participations))))

    def _moved(self, uses: Uses) -> np.ndarray:
        return moved_by_toeplitz(self.column(uses.num_steps), *uses)

    def event(self, uses: Uses, stddev: float) -> DpEvent:
        return moved_each(self._moved(uses) / stddev)

    def inverse(self, num_steps: int) -> np.ndarray:
        """Returns the first column of C⁻¹."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bands(_Toeplitz):
    """C or its inverse has a few diagonals. The state is one row of noise for each but the first."""

    bands: int
    coefficients: Any = None  # a tuple of floats once it is made

    sizes = ("bands",)

    def __post_init__(self) -> None:
        super().__post_init__()
        put(self, whole, "bands", 1, "count the diagonals of the band; 1 is independent noise")

    def _put_coefficients(self, coefficients: Any, others: str = "") -> None:
        mend = f"give {self.bands} numbers, the first of them above 0{others}, or leave it out"
        keep(self, "coefficients", _numbers("coefficients", coefficients, mend))
        first, *rest = self.coefficients or (0.0,)
        fits = len(rest) == self.bands - 1 and 2.0**-100 < first < 2.0**100  # draws are float32
        if not fits or (others and (max(rest, default=0.0) > 0 or sum(self.coefficients) < -1e-9 * first)):
            raise ValueError(f"coefficients={self.coefficients!r} do not fit bands={self.bands}: {mend}")

    def initial_state(self, size: int) -> dict[str, np.ndarray]:
        # A variable for each row: what is assigned to a whole variable is not copied.
        return {f"dp_noise_{i}": np.zeros(size, np.float32) for i in range(self.bands - 1)}

    def _weights(self, step: tf.Tensor) -> list[tf.Tensor]:
        """Returns those coefficients of the state's rows that are of this training."""
        import tensorflow as tf

        return [tf.where(age <= step, c, 0.0) for age, c in enumerate(self.coefficients[1:], start=1)]


def _keep(state: Sequence[tf.Variable], rows: Iterable[tf.Tensor]) -> None:
    for variable, value in zip(state, rows, strict=False):
        variable.assign(value)


def _sum(fresh: tf.Tensor, weights: Iterable[tf.Tensor], past: Iterable[tf.Tensor]) -> tf.Tensor:
    import tensorflow as tf

    return tf.add_n([fresh, *(weight * value for weight, value in zip(weights, past, strict=True))])


def _numbers(name: str, values: Iterable[float], mend: str) -> tuple[float, ...]:
    try:
        found = [float(v) for v in values]
    except (TypeError, ValueError):
        raise ValueError(f"{name}={values!r} must be a sequence of numbers: {mend}") from None
    return tuple(real(name, v, mend) for v in found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Banded(_Bands):
    """Banded Toeplitz noise (Choquette-Choo et al. 2023, arXiv:2306.08153).

    ``noise_multiplier`` is the standard deviation of the base normals over the clip and the sensitivity. So the
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands > self.min_separation:
            raise ValueError(
                f"bands={self.bands} is more than min_separation={self.min_separation}: the noise of one use of an "
                "example would overlap with its last use. Use fewer bands, or data that keep uses further apart."
            )
        best = self.coefficients is None
        self._put_coefficients(best_bands(self.bands, self.num_steps, self.objective) if best else self.coefficients)

    @property
    def unit(self) -> float:  # type: ignore[override]
        assert self.max_participations is not None
        return math.sqrt(self.max_participations) * float(np.linalg.norm(self.coefficients))

    def column(self, num_steps: int) -> np.ndarray:
        return np.array(self.coefficients)[:num_steps]

    def event_of_a_use(self, uses: Uses, stddev: float) -> DpEvent | None:
        """As `Noise.event_of_a_use`: each use moves other noises than the last (Choquette-Choo et al. 2023,
        arXiv:2306.08153, Theorem 4) if the bands fit between the two."""
        fits = self.bands <= uses.min_separation
        return moved_each(np.abs(self.column(uses.num_steps)) / stddev) if fits else None

    @classmethod
    def candidates(cls, uses: Uses, objective: str) -> list[Noise]:
        made = functools.partial(cls, num_steps=uses.num_steps, objective=objective, **uses.limits)
        return [made(bands=b) for b in _WIDTHS if b <= min(uses.min_separation, uses.num_steps)]

    @classmethod
    def sampled_candidates(cls, num_steps: int, sampling_rate: float, objective: str) -> list[Noise]:
        made = functools.partial(cls, max_participations=1, num_steps=num_steps, objective=objective)
        return [made(bands=b, min_separation=b) for b in _WIDTHS if b * sampling_rate <= 1]

    def draw(self, source: Source, size: int, state: Sequence[tf.Variable], step: tf.Tensor) -> tf.Tensor:
        """Draws ``c₀ w = z - Σ cₐ w of a steps ago``; the last row is the first state."""
        import tensorflow as tf

        first, past = self.coefficients[0], [tf.convert_to_tensor(v) for v in state]
        row = _sum(source.gaussian([[size]], 1.0)[0], [-weight for weight in self._weights(step)], past)
        row = row if first == 1 else row / first
        _keep(state, [row, *past])
        return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedInverse(_Bands):
    """Noise whose C⁻¹ is banded Toeplitz (Kalinin, McKenna, Upadhyay & Lampert 2025, arXiv:2505.12128).

    Each step adds fresh base normals and subtracts a part of those of the last ``bands - 1`` steps. The state is
    ``bands - 1`` copies of the model. You may use more bands than ``min_separation``, and a few bands are enough for a
    long training. ``noise_multiplier`` is as in `Banded`. The sampling of ``data.cyclic_poisson`` is not in the price,
    because C itself has no bands: two uses of an example always meet in a base normal.

    The sensitivity has this proof. Write ``C⁻¹`` as ``r₀ - r₁ S - r₂ S² …``, where S shifts by a step and no r is
    negative. Entry i of C's column is then ``(r₁ c[i-1] + r₂ c[i-2] + …) / r₀``. So no entry is negative, and an
    example moves the base normals most if all its gradients have the same direction. If the column does not grow, no
    uses move them more than uses as early and as close as possible (Kalinin & Lampert 2024, arXiv:2405.13763, Theorem
    2). If the column grows somewhere, ε counts the least column above it that does not. That column is never above
    ``1 / r₀``, because the coefficients have a sum of at least 0.

    Args:
      bands: diagonals of C⁻¹.
      min_separation, max_participations: as in `Banded`.
      num_steps: as in `Banded`.
      objective: as in `Banded`, for ``coefficients="best"``.
      coefficients: of the diagonals. None uses those of sqrt(1 - x), which are 1, -1/2, -1/8, -1/16, … for any
        training: the inverse square root of running sums (BISR). ``"best"`` finds those with the least error in this
        training, which is much less with few bands. Or give numbers: the first above 0, the others at most 0, their
        sum at least 0.

    Raises:
      ValueError: an argument is out of its range.

    Guarantee:
      `sensitivity` is an upper bound for every ``num_steps``, ``min_separation`` and ``max_participations`` that ran,
      whatever the noise was made for.

    Example:
      >>> noise = tfdpfl.noise.BandedInverse(bands=4, coefficients="best", min_separation=64, max_participations=10)
      >>> round(noise.error(640), 1)
      12.5
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        made = self.coefficients
        if made is None:
            made = inverse_square_root(self.bands)
        elif isinstance(made, str) and made == "best":
            most = most_participations(self.num_steps, self.min_separation, self.max_participations)
            made = best_inverse_bands(self.bands, self.num_steps, self.min_separation, most, self.objective)
        self._put_coefficients(made, ', the others at most 0, their sum at least 0, or "best"')

    def inverse(self, num_steps: int) -> np.ndarray:
        inverse = np.zeros(num_steps)
        drawn = np.array(self.coefficients[:num_steps], np.float32)  # as the steps multiply by them
        inverse[: len(drawn)] = drawn
        return inverse

    def column(self, num_steps: int) -> np.ndarray:
        from scipy.signal import lfilter

        return lfilter([1.0], self.inverse(min(num_steps, self.bands)), np.eye(1, num_steps)[0])

    @classmethod
    def candidates(cls, uses: Uses, objective: str) -> list[Noise]:
        made = functools.partial(cls, coefficients="best", num_steps=uses.num_steps, objective=objective, **uses.limits)
        return [made(bands=b) for b in (4, 8, 16) if b <= uses.num_steps]

    def draw(self, source: Source, size: int, state: Sequence[tf.Variable], step: tf.Tensor) -> tf.Tensor:
        """Draws ``Σ cₐ z of a steps ago``; the last base normals are the first state."""
        import tensorflow as tf

        first, past = self.coefficients[0], [tf.convert_to_tensor(v) for v in state]
        fresh = source.gaussian([[size]], 1.0)[0]
        row = _sum(fresh if first == 1 else first * fresh, self._weights(step), past)
        _keep(state, [fresh, *past])
        return row


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
    decay: Any = None  # tuples of floats once it is made
    scale: Any = None

    sizes = ("buffers",)
    _MOST: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        put(self, whole, "buffers", 1, "2 to 5 are usual")
        if self.buffers > self._MOST:
            raise ValueError(f"buffers={self.buffers} is more than {self._MOST}: 5 are close to the best.")
        if (self.decay is None) != (self.scale is None):
            raise ValueError("Give both decay and scale, or neither.")
        if self.decay is None:
            most = most_participations(self.num_steps, self.min_separation, self.max_participations)
            decay, scale = best_buffers(self.buffers, self.num_steps, self.min_separation, most, self.objective)
            keep(self, "decay", decay)
            keep(self, "scale", scale)
        mend = f"give {self.buffers} numbers, decays between 0 and 1, scales of at least 0 with a sum of at most 1"
        put(self, _numbers, "decay", mend)
        put(self, _numbers, "scale", mend)
        fits = len(self.decay) == len(self.scale) == self.buffers and all(0 <= d < 1 for d in self.decay)
        if not fits or min(self.scale) < 0 or sum(self.scale) > 1:
            raise ValueError(f"decay={self.decay!r} and scale={self.scale!r} do not fit: {mend}")

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

    @classmethod
    def candidates(cls, uses: Uses, objective: str) -> list[Noise]:
        made = functools.partial(cls, num_steps=uses.num_steps, objective=objective, **uses.limits)
        return [made(buffers=m) for m in (2, 3) if uses.num_steps > 2]

    def initial_state(self, size: int) -> dict[str, np.ndarray]:
        return {f"dp_noise_{i}": np.zeros(size, np.float32) for i in range(self.buffers)}

    def draw(self, source: Source, size: int, state: Sequence[tf.Variable], step: tf.Tensor) -> tf.Tensor:
        """Draws ``w = z - scale · s``, then ``s = decay s + w``."""
        import tensorflow as tf

        past = [tf.convert_to_tensor(v) for v in state]
        weights = [tf.where(step > 0, -scale, 0.0) for scale in self.scale]
        row = _sum(source.gaussian([[size]], 1.0)[0], weights, past)
        for variable, value, decay in zip(state, past, self.decay, strict=True):
            variable.assign(tf.where(step > 0, decay, 0.0) * value + row)
        return row


# Independent noise: each step by itself.
INDEPENDENT = Banded(bands=1, max_participations=1, coefficients=(1.0,))


def as_noise(noise: object) -> Noise:
    """Returns a noise that was given to an argument ``noise=``, or saved by `Noise.to_dict`.

    Raises:
      ValueError: it is none.
    """
    if isinstance(noise, Noise):
        return noise
    if isinstance(noise, dict):
        return noise_from_dict(noise)
    *names, last = KINDS
    kinds = f"{', '.join(names)} or {last}"
    raise ValueError(f"noise={noise!r} must be tfdpfl.noise.{kinds}, or None for independent noise.")


def noise_from_dict(saved: Json) -> Noise:
    """Makes the noise that `Noise.to_dict` saved.

    Raises:
      ValueError: ``saved`` is not what it gives.
    """
    settings: Keywords = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    kind = settings.pop("noise", None)
    if kind not in KINDS:
        raise ValueError(f"noise={kind!r} is none of {', '.join(KINDS)}: give what to_dict gave.")
    try:
        return KINDS[kind](**settings)
    except TypeError as error:
        raise ValueError(f"saved is not what to_dict gave: {error}") from error


# A Gaussian mechanism whose noise is many normals. `shifts` holds how many of them move by how many standard
# deviations: where their tails end, neighbours differ.
_correlated = event_type("CorrelatedGaussianDpEvent", "gaussian", "shifts")


def moved_normals(shift: float, shifts: Iterable[tuple[float, float]]) -> DpEvent:
    """Returns the event of normals that one example moves by ``shift`` standard deviations in all.

    Args:
      shifts: how many of them move by how many standard deviations each.
    """
    return _correlated(dp_event.GaussianDpEvent(1 / shift), tuple(shifts))


def moved_each(shifts: np.ndarray) -> DpEvent:
    """Returns the same, from what each of the normals is moved by."""
    rounded, counts = np.unique(np.ceil(32 * shifts[shifts > 0]) / 32, return_counts=True)
    pairs = zip(counts.tolist(), rounded.tolist(), strict=True)
    return moved_normals(float(np.linalg.norm(shifts)), [(float(n), s) for n, s in pairs])
