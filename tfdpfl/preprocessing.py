"""Keras's preprocessing layers, adapted to private data by mechanisms that have an ε.

`adapt` of each layer takes bounds, ε, δ and the ledger that pays. Everything else is Keras's: the layer is called,
saved and loaded as Keras's layer of the same name. The unit is one example, along the first axis of the data, and the
number of examples is public.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import tensorflow as tf

from tfdpfl._sums import noisy_sum
from tfdpfl._types import Arrays, Json, Layer, Nest
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.arguments import shows_arguments
from tfdpfl.accounting.calibration import gaussian_noise_multiplier
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.accounting.promises import Promise
from tfdpfl.data import made_from, passed_through
from tfdpfl.data.functions import check_apart, check_no_copies
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import Source

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

__all__ = ["Discretization", "Normalization", "StringLookup", "TextVectorization", "Whitening", "class_weights"]

_ADJACENCIES = ("add_or_remove_one", "zero_out")
_ROWS_AT_A_TIME = 1024  # a float64 copy of many wide rows would not fit into memory


class _Price(TypedDict):
    epsilon: float
    delta: float


class _Cost(_Price, total=False):
    ledger: PrivacyLedger | None
    adjacency: str | None
    seed: int | None


class _Release:
    """Noisy sums at one (ε, δ), paid by a ledger.

    Args:
        name: What is released, for statements.
        epsilon, delta: What they may cost.
        ledger: What pays; None for one of its own.
        adjacency: The neighbours that it is recorded for; None takes the ledger's.
        thresholded: Whether half of δ is for counts that pass a threshold though they should not.
        seed: For tests alone.
    """

    def __init__(
        self, name: str, epsilon: float, delta: float, ledger: PrivacyLedger | None = None,
        adjacency: str | None = None, seed: int | None = None, thresholded: bool = False,
    ):  # fmt: skip
        self._name = name
        epsilon = _checks.real("epsilon", epsilon, "give what adapting may cost, such as 0.5", above=0)
        self.chance = check_delta(delta) / 2 if thresholded else 0.0
        self.ledger = PrivacyLedger() if ledger is None else ledger
        if self.ledger.unit == "user":
            raise PrivacyError(
                "The ledger is of users, but these sums protect one example each, so a user with several examples "
                "would be protected less. Adapt on one example of each user, and give a separate ledger."
            )
        self.adjacency = self.ledger.adjacency if adjacency is None else adjacency
        if self.adjacency not in _ADJACENCIES:
            raise PrivacyError(
                f"adjacency={self.adjacency!r} has no known ε for these sums, which a replaced example moves further. "
                f"Use {' or '.join(map(repr, _ADJACENCIES))}."
            )
        self.noise_multiplier = gaussian_noise_multiplier(epsilon, delta - self.chance)
        self._source, self._seeded = Source(seed), seed is not None

    def of(self, sums: np.ndarray, sensitivity: float) -> np.ndarray:
        """Returns noisy sums, after the ledger has paid for them."""
        from dp_accounting import GaussianDpEvent

        from tfdpfl.accounting.events import thresholded

        event = GaussianDpEvent(self.noise_multiplier)
        if self.chance:
            event = thresholded(event, self.chance)
        self.ledger.add(event, adjacency=self.adjacency, unit="example", name=self._name)
        if self._seeded:
            self.ledger.seeded |= {"tfdpfl.preprocessing"}
        return noisy_sum(np.asarray(sums, np.float64), sensitivity, self.noise_multiplier, self._source)


class _Adapted:
    """What the layers have beside Keras's: the ledger that their `adapt` wrote into."""

    ledger: PrivacyLedger | None = None
    _takes_figures = False  # whether Keras is being told the figures of an `adapt`

    def update_state(self, *data: Arrays) -> None:
        """Refuses what Keras's layers learn without noise.

        Raises:
            PrivacyError: Always, except within `adapt`.
        """
        if not self._takes_figures:
            raise PrivacyError(
                f"update_state would teach {type(self).__name__} exact statistics of the data, which no ε covers. Call "
                "adapt with epsilon and delta. Its data may be a data set of batches."
            )
        super().update_state(*data)  # type: ignore[misc]  # of Keras's layer

    def _release(self, cost: _Cost, thresholded: bool = False) -> _Release:
        """Makes the release of an `adapt`, which adds to the ledger of an earlier one if it is given none."""
        given = self.ledger if cost.get("ledger") is None else cost["ledger"]
        if given is not None and self.ledger is not None and not given.covers(self.ledger):
            raise PrivacyError(
                f"{type(self).__name__} was adapted before, and ledger= does not hold what that cost, so ε would leave "
                "it out. Leave ledger out to go on with the layer's own, or call ledger.merge(layer.ledger) first."
            )
        release = _Release(type(self).__name__, **(cost | {"ledger": given}), thresholded=thresholded)
        self.ledger = release.ledger
        return release

    def get_config(self) -> Json:
        """Returns what Keras saves: its own, and the ledger."""
        config = super().get_config()  # type: ignore[misc]  # of Keras's layer
        return {**config, **({} if self.ledger is None else {"ledger": self.ledger.to_dict()})}

    @classmethod
    def from_config(cls, config: Json) -> _Adapted:
        """Makes the layer that `get_config` described."""
        config = dict(config)
        ledger = config.pop("ledger", None)
        made = super().from_config(config)  # type: ignore[misc]  # of Keras's layer
        made.ledger = None if ledger is None else PrivacyLedger.from_dict(ledger)
        return made

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        if self.ledger is None:
            raise PrivacyError(f"{type(self).__name__} was not adapted, so it has no ε. Call adapt first.")
        return self.ledger.promises(delta)


def _rows(data: ArrayLike | tf.data.Dataset) -> np.ndarray:
    """The examples of arrays, or of a data set of batches."""
    if isinstance(data, tf.data.Dataset):
        _check_batched(data)
        data = np.concatenate(list(data.as_numpy_iterator()))
    rows = np.asarray(data)
    if rows.ndim == 0 or not len(rows):
        raise ValueError(f"data must have examples along its first axis, got the shape {list(rows.shape)}.")
    return rows


def _check_batched(data: tf.data.Dataset) -> None:
    """Raises if one example may be several rows of the data set, each of which would be protected by itself."""
    if not isinstance(data.element_spec, tf.TensorSpec):
        raise ValueError(
            f"data must be a data set of one tensor for each batch, got {data.element_spec}. Select it: "
            "data.map(lambda x, y: x)."
        )
    if made_from(data) is not None:
        raise PrivacyError(
            "The data set was made from batches of tfdpfl.data, which draw an example several times or not at all. "
            "The noise is for examples that come once. Give adapt the data that the batches were made from."
        )
    check_no_copies(data, "the noise is for examples that come once")
    check_apart(data)
    if passed_through(data, ("unbatch", "batch")) in (None, "unbatch"):
        raise PrivacyError(
            f"Nothing shows that the elements of the data set are batches ({data.element_spec}). If each is one "
            "example, its parts would be protected one by one. Call .batch(1024); if they are batches already, "
            ".unbatch().batch(1024)."
        )


def _limits(bounds: Arrays, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of values, as two arrays."""
    if bounds is None or len(bounds) != 2:
        raise ValueError(
            f"bounds={bounds!r} must be (low, high) that do not depend on the examples: give what you know of the "
            "values beforehand, such as (0, 255). Values beyond are clipped."
        )
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), shape) for bound in bounds)
    if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        raise ValueError(f"bounds={bounds!r} must be finite, and low below high.")
    return low, high


def _clipped(rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> Iterator[np.ndarray]:
    """Yields some examples at a time in float64, clipped to the bounds (what is no number to their middle)."""
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        some = rows[first : first + _ROWS_AT_A_TIME].astype(np.float64)
        yield np.clip(np.where(np.isnan(some), (low + high) / 2, some), low, high)


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class Normalization(_Adapted, tf.keras.layers.Normalization):
    """Shifts and scales features to mean 0 and variance 1, which it learns privately.

    Arguments are those of `tf.keras.layers.Normalization`.

    Guarantee:
        Each feature is clipped to its bounds. The sums of all features and of their squares, scaled to [-1, 1], get
        Gaussian noise. One example that is added, removed or blanked moves them by √(2 · features) at most.

    Example:
        >>> layer = tfdpfl.preprocessing.Normalization()
        >>> layer.adapt(x, bounds=(-4, 4), epsilon=0.5, delta=1e-6)
    """

    def _kept_axes(self, rank: int) -> list[int]:
        axes = () if self.axis is None else self.axis if isinstance(self.axis, (tuple, list)) else (self.axis,)
        kept = sorted(axis % rank for axis in axes)
        if 0 in kept:
            raise ValueError(f"axis={self.axis!r} is the axis of the examples, so each example would be published.")
        return kept

    @shows_arguments(_Cost, _Release)
    def adapt(
        self, data: ArrayLike | tf.data.Dataset, *, bounds: tuple[ArrayLike, ArrayLike] | None = None,
        **cost: Unpack[_Cost],
    ) -> None:  # fmt: skip
        """Learns means and variances with noise.

        Args:
            data: Examples along the first axis: an array, or a finite data set of batches.
            bounds: (low, high), numbers or one for each feature, that are known without the data.
            epsilon, delta: What it may cost.
            ledger: The `PrivacyLedger` that pays, for `PrivacyBudget(ledger=...)`; None makes one: `ledger`.
            adjacency: "add_or_remove_one" or "zero_out"; None takes that of the ledger.
            seed: For tests alone: anyone who knows it can subtract the noise.

        Raises:
            ValueError: An argument is out of its range.
            PrivacyError: The ledger protects users, or is for neighbours of which one example is replaced.
        """
        rows = _rows(data)
        kept = self._kept_axes(rows.ndim)
        others = tuple(axis for axis in range(1, rows.ndim) if axis not in kept)
        shape = tuple(rows.shape[axis] for axis in kept)
        whole = tuple(n if axis in kept else 1 for axis, n in enumerate(rows.shape) if axis)
        low, high = _limits(_reshaped(bounds, whole), whole)
        middle, half = (low + high) / 2, (high - low) / 2
        sums = np.zeros((2, *shape))
        for some in _clipped(rows, low, high):
            scaled = (some - middle) / half  # in [-1, 1]
            sums += np.stack([scaled.mean(axis=others), (scaled**2).mean(axis=others)], axis=1).sum(axis=0)
        release = self._release(cost)
        sensitivity = math.sqrt(sums.size)
        mean, square = release.of(sums, sensitivity) / len(rows)
        # A variance below what the noise may hide is not known, and would blow the feature up.
        least = min(release.noise_multiplier * sensitivity / len(rows), 1.0)
        mean = np.clip(mean, -1, 1)
        deviation = np.sqrt(np.clip(square - mean**2, least, 1)).reshape(whole)
        mean = mean.reshape(whole)
        assert deviation.size == math.prod(shape)
        # Keras's own adapt computes exactly these figures from two examples.
        two = np.stack([middle + half * (mean + side * deviation) for side in (-1, 1)])
        self._takes_figures = True
        try:
            super().adapt(np.broadcast_to(two, (2, *rows.shape[1:])).astype(np.float32))
        finally:
            self._takes_figures = False


def _reshaped(bounds: Arrays, whole: tuple[int, ...]) -> Nest:
    if bounds is None or len(bounds) != 2:
        return bounds
    return [b if np.ndim(b) == 0 else np.asarray(b, np.float64).reshape(whole) for b in bounds]


def _short(rows: np.ndarray, clip: float) -> Iterator[np.ndarray]:
    """Yields some examples at a time, [n, positions, features], of length at most 1, which those of `clip` have."""
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        some = rows[first : first + _ROWS_AT_A_TIME].astype(np.float64)
        some, others = np.where(np.isfinite(some), some, 0), tuple(range(1, rows.ndim))
        largest = np.maximum(np.abs(some).max(axis=others, keepdims=True), clip)  # whose square may be no number
        lengths = np.sqrt(((some / largest) ** 2).sum(axis=others, keepdims=True))
        yield (some / largest / np.maximum(lengths, clip / largest)).reshape(len(some), -1, rows.shape[-1])


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class Whitening(_Adapted, tf.keras.layers.Layer):
    """Centres features and decorrelates those of the last axis, by means and covariances that it learns privately.

    Features of one example that stand along other axes, as the positions of a feature map, have a mean each, and one
    covariance together. Before `adapt` the layer changes nothing.

    Args:
        power: How much of the covariance is undone: 1 gives variance 1 to all directions of the features, 0 centres
            alone. Directions whose variance the noise hides are scaled alike.
        **options: Those of `tf.keras.layers.Layer`.

    Guarantee:
        Each example is shortened to a length of at most `l2_norm_clip`, which counts as 1. The sum of the examples, and
        the sum of the products of their features, get Gaussian noise. One example that is added, removed or blanked
        moves either by a length of at most 1, and both by √2.

    Example:
        >>> layer = tfdpfl.preprocessing.Whitening()
        >>> layer.adapt(x, l2_norm_clip=3.0, epsilon=0.5, delta=1e-6)
    """

    def __init__(self, power: float = 1.0, **options):
        super().__init__(**{"trainable": False, **options})
        self.power = _checks.real("power", power, "1 whitens, 0 centres alone", at_least=0)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the weights, which `adapt` sets."""
        width = input_shape[-1]
        if len(input_shape) < 2 or None in input_shape[1:]:
            raise ValueError(f"Whitening needs examples of one known size, got the shape {list(input_shape)}.")
        self.mean = self.add_weight(name="mean", shape=input_shape[1:], initializer="zeros", trainable=False)
        self.matrix = self.add_weight(name="matrix", shape=(width, width), initializer="identity", trainable=False)
        self.built = True

    def call(self, inputs: Arrays) -> Nest:
        """Returns the features, whitened."""
        return tf.tensordot(tf.cast(inputs, self.compute_dtype) - self.mean, self.matrix, 1)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape of the inputs."""
        return input_shape

    def get_config(self) -> Json:
        """Returns what Keras saves, and the ledger."""
        return {**super().get_config(), "power": self.power}

    @shows_arguments(_Cost, _Release)
    def adapt(
        self, data: ArrayLike | tf.data.Dataset, *, l2_norm_clip: float, **cost: Unpack[_Cost]
    ) -> None:  # fmt: skip
        """Learns means and covariances with noise.

        Args:
            data: As all that follow, see `Normalization.adapt`.
            l2_norm_clip: The greatest length of an example, as a vector of all its features. Choose it without the
                data: √features, if each has a variance of about 1. Longer examples are shortened.
        """
        rows = _rows(data)
        clip = _checks.real("l2_norm_clip", l2_norm_clip, "give a usual length of an example", above=0)
        if not self.built:
            self.build(rows.shape)
        if self.mean.shape != rows.shape[1:]:
            made, got = list(self.mean.shape), list(rows.shape[1:])
            raise ValueError(f"Whitening was made for examples of shape {made}, got {got}. Make a new layer.")
        positions, width = math.prod(rows.shape[1:-1]), rows.shape[-1]
        mean, products = np.zeros((positions, width)), np.zeros((width, width))
        for some in _short(rows, clip):
            mean += some.sum(axis=0)
            flat = some.reshape(-1, width)
            products += flat.T @ flat
        # Products that stand twice are released once, by √2 longer: the length is that of the matrix.
        upper, root = np.triu_indices(width), np.where(np.eye(width, dtype=bool), 1.0, math.sqrt(2))
        release, sensitivity = self._release(cost), math.sqrt(2)
        noisy = release.of(np.concatenate([mean.ravel(), (products * root)[upper]]), sensitivity) / len(rows)
        mean = noisy[: mean.size].reshape(mean.shape)
        products = np.zeros_like(products)
        products[upper] = noisy[mean.size :] / root[upper]
        products += np.triu(products, 1).T
        deviation = release.noise_multiplier * sensitivity / len(rows)
        covariance = products - mean.T @ mean + positions * deviation**2 * np.eye(width)  # the noise's own square
        # A variance below the largest that noise alone would show is not known, and would blow features up.
        variances, directions = np.linalg.eigh(covariance * clip**2 / positions)
        least = deviation * math.sqrt(2 * width) * clip**2 / positions
        scale = np.maximum(variances, max(least, 1e-12)) ** (-self.power / 2)
        self.mean.assign((mean * clip).reshape(rows.shape[1:]))
        self.matrix.assign((directions * scale) @ directions.T)


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class Discretization(_Adapted, tf.keras.layers.Discretization):
    """Puts numbers into bins of about equal frequency, whose boundaries it learns privately.

    Arguments are those of `tf.keras.layers.Discretization`; give `num_bins`.

    Guarantee:
        The range between the bounds is cut into equal cells. An example counts 1 in all, shared out among its values,
        so it moves the counts of the cells by at most 1. They get Gaussian noise, and the boundaries are quantiles of
        the noisy counts.

    Example:
        >>> layer = tfdpfl.preprocessing.Discretization(num_bins=4)
        >>> layer.adapt(x[:, :1], bounds=(-4, 4), epsilon=0.5, delta=1e-6)
    """

    num_bins: int | None

    @shows_arguments(_Cost, _Release)
    def adapt(
        self, data: ArrayLike | tf.data.Dataset, *, bounds: tuple[float, float] | None = None, cells: int = 128,
        **cost: Unpack[_Cost],
    ) -> None:  # fmt: skip
        """Learns the boundaries of the bins with noise.

        Args:
            data: As all that follow, see `Normalization.adapt`.
            bounds: (low, high), known without the data.
            cells: How many cells the range is cut into. A boundary is no more exact than a cell.
        """
        if self.num_bins is None:
            raise ValueError(
                "Discretization has its boundaries already (bin_boundaries, or an earlier adapt), so it has nothing to "
                "learn. Make a new layer with num_bins."
            )
        rows = _rows(data)
        cells = _checks.whole("cells", cells, 2, "cut the range into at least two cells")
        low, high = _limits(bounds, ())
        edges = np.linspace(float(low), float(high), cells + 1)
        counts = sum(np.histogram(some, edges)[0] for some in _clipped(rows, low, high)) / rows[0].size
        release = self._release(cost)
        noisy = np.cumsum(release.of(counts, 1.0))
        shares = np.clip(np.maximum.accumulate(noisy) / len(rows), 0, 1)
        shares = np.concatenate([[0.0], shares / max(shares[-1], 1e-12)])
        wanted = np.arange(1, self.num_bins) / self.num_bins
        boundaries = np.maximum.accumulate(np.interp(wanted, shares, edges)).tolist()
        # As if they had been given, so that Keras saves them with the layer's config.
        self.bin_boundaries = self.input_bin_boundaries = boundaries
        self.num_bins = None


def _vocabulary(
    examples: list[list[str]], most: int, release: _Release, max_tokens: int | None, reserved: set[str]
) -> list[str]:
    """The tokens whose noisy count of examples passes the threshold, the most frequent first."""
    from scipy.special import ndtri

    counts = Counter(token for tokens in examples for token in list(dict.fromkeys(tokens))[:most])
    for token in reserved:
        counts.pop(token, None)
    tokens, sensitivity = list(counts), math.sqrt(most)
    noisy = release.of(np.array([counts[token] for token in tokens]), sensitivity)
    # A token of one example alone passes with a chance of at most chance / most.
    threshold = 1 - release.noise_multiplier * sensitivity * float(ndtri(release.chance / most))
    order = np.argsort(-noisy)
    kept = [tokens[i] for i in order if noisy[i] > threshold][:max_tokens]
    if not kept:
        raise PrivacyError(
            f"No token is in clearly more than {threshold:.0f} examples, below which the noise hides it. Raise epsilon "
            "or delta, lower max_tokens_per_example, or give a vocabulary that is public."
        )
    return kept


class _Vocabulary(_Adapted):
    """What layers have whose `adapt` learns a vocabulary."""

    set_vocabulary: Callable[[list[str]], None]  # Keras's

    def _tokens(self, rows: np.ndarray) -> list[list[str]]:
        """Returns the tokens of each example."""
        raise NotImplementedError

    @shows_arguments(_Cost, _Release)
    def adapt(
        self, data: ArrayLike | tf.data.Dataset, *, max_tokens_per_example: int | None = None, **cost: Unpack[_Cost]
    ) -> None:
        """Learns the vocabulary with noise.

        Args:
            data: As all that follow, see `Normalization.adapt`.
            max_tokens_per_example: How many different strings (tokens of a text) of one example count; the others are
                ignored.
        """
        if max_tokens_per_example is None:
            raise ValueError(
                "max_tokens_per_example is missing: say how many different tokens of an example may count. The noise "
                "grows with its root."
            )
        text = "count the tokens of an example that may count"
        most = _checks.whole("max_tokens_per_example", max_tokens_per_example, 1, text)
        examples = self._tokens(_rows(data))
        release = self._release(cost, thresholded=True)
        lookup: Layer = getattr(self, "_lookup_layer", self)
        reserved = {lookup.mask_token, lookup.oov_token} - {None}
        indices = lookup.num_oov_indices + (lookup.mask_token is not None)
        room = None if lookup.max_tokens is None else lookup.max_tokens - indices
        self.set_vocabulary(_vocabulary(examples, most, release, room, reserved))


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class StringLookup(_Vocabulary, tf.keras.layers.StringLookup):
    """Maps strings to numbers by a vocabulary that it learns privately.

    Arguments are those of `tf.keras.layers.StringLookup`.

    Guarantee:
        Each string's count is of examples, each of which counts for at most `max_tokens_per_example` different strings.
        Counts get Gaussian noise. Strings whose noisy count does not pass a threshold are left out; δ covers that a
        string of one example alone passes it.

    Example:
        >>> layer = tfdpfl.preprocessing.StringLookup()
        >>> layer.adapt(["a", "b"] * 200, max_tokens_per_example=1, epsilon=1.0, delta=1e-6)
    """

    def _tokens(self, rows: np.ndarray) -> list[list[str]]:
        return [[_text(token) for token in row] for row in rows.reshape(len(rows), -1)]


def _text(token: bytes | str) -> str:
    return token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token)


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class TextVectorization(_Vocabulary, tf.keras.layers.TextVectorization):
    """Splits texts into tokens, and maps them to numbers by a vocabulary that it learns privately.

    Arguments are those of `tf.keras.layers.TextVectorization`, without "tf_idf".

    Guarantee:
        As `StringLookup`, with the tokens of a text.

    Example:
        >>> layer = tfdpfl.preprocessing.TextVectorization()
        >>> layer.adapt(["good", "bad film"] * 300, max_tokens_per_example=5, epsilon=1.0, delta=1e-6)
    """

    def _tokens(self, rows: np.ndarray) -> list[list[str]]:
        if getattr(self, "_output_mode", None) == "tf_idf":
            raise PrivacyError(
                "output_mode='tf_idf' needs document frequencies, which adapt does not publish. Use 'count' or 'int'."
            )
        texts = rows.reshape(-1, 1) if rows.ndim < 2 else rows
        tokens = self._preprocess(tf.constant(texts.astype(object)))
        tokens = tokens if isinstance(tokens, tf.RaggedTensor) else tf.RaggedTensor.from_tensor(tokens)
        return [[_text(token) for token in _flattened(row) if len(token)] for row in tokens.to_list()]


def _flattened(row: Nest) -> list[Nest]:
    return [token for part in row for token in _flattened(part)] if isinstance(row, list) else [row]


@shows_arguments(_Cost, _Release)
def class_weights(y: ArrayLike, *, num_classes: int, **cost: Unpack[_Cost]) -> dict[int, float]:
    """Returns a weight for each class, inverse to its noisy frequency, for `fit(class_weight=...)`.

    Guarantee:
        The counts of the classes get Gaussian noise of sensitivity 1, since an example has one class.

    Args:
        y: Whole-number labels from 0 on, one for each example.
        num_classes: How many classes there are; labels beyond are ignored.
        ledger: The `PrivacyLedger` that pays; None if you keep no account. The others: see `Normalization.adapt`.

    Example:
        >>> weights = tfdpfl.preprocessing.class_weights(y, num_classes=3, epsilon=0.2, delta=1e-6)
    """
    labels = _rows(y)
    if labels.size != len(labels):
        raise ValueError(
            f"y has the shape {list(labels.shape)}, and class_weights counts one whole-number label of each example. "
            "Give y.argmax(-1) of one-hot labels."
        )
    if labels.dtype.kind not in "biuf":
        raise ValueError(
            f"y has the dtype {labels.dtype}, and class_weights counts whole-number labels, so every count would be 0. "
            "Give numbers from 0 on: [classes.index(label) for label in y] with a public list of classes."
        )
    labels = labels.reshape(-1)
    counts = np.array([(labels == k).sum() for k in range(_checks.whole("num_classes", num_classes, 1, "count them"))])
    release = _Release(class_weights.__name__, **cost)
    noisy = np.maximum(release.of(counts, 1.0), max(release.noise_multiplier, 1.0))
    return {k: float(len(labels) / (num_classes * count)) for k, count in enumerate(noisy)}
