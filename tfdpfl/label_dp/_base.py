"""Holds what all label mechanisms share: secret randomness, the count of what was released, and its price."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin

from tfdpfl import _replay_hook
from tfdpfl._types import Arrays, DpEvent, Estimator, Json
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.events import composed
from tfdpfl.accounting.promises import Promise
from tfdpfl.label_dp import _labels
from tfdpfl.label_dp._datasets import labels_of
from tfdpfl.label_dp._events import check_epsilon, label_promise, pure_event
from tfdpfl.label_dp._top_k import FINEST, RARE

__all__ = [
    "ClassTransformer",
    "LabelMechanism",
    "LabelTransformer",
    "Uniforms",
    "in_chunks",
    "noisy_counts",
]

_CHUNK = 1 << 18  # labels


class Uniforms:
    """Draws uniform numbers: from the operating system's generator, or from a seed (for tests only)."""

    def __init__(self, seed: int | None, stream: tuple[int, ...] = ()):
        self._rng = None if seed is None else np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))

    def __call__(self, *shape: int) -> np.ndarray:
        """float64 in [0, 1), multiples of 2⁻⁵³."""
        if self._rng is not None:
            return self._rng.random(shape)
        words = np.frombuffer(secrets.token_bytes(8 * math.prod(shape)), np.uint64)
        return ((words >> np.uint64(11)) * 2.0**-53).reshape(shape)

    def fine(self, *shape: int) -> np.ndarray:
        """float64 in [0, 1), of which small numbers have as many digits as large ones.

        A multiple of 2⁻⁵³ that is below 2⁻²⁰ receives further bits. Without them an outcome that is rarer than 2⁻⁵³
        never comes, so that an outcome which only a neighbour can produce gives the label away.
        """
        numbers = self(*shape)
        flat, digit = numbers.reshape(-1), FINEST
        near = np.flatnonzero(flat < RARE)
        while len(near) and digit:
            flat[near] += digit * self(len(near))
            near = near[flat[near] < RARE * digit]
            digit *= FINEST
        return numbers

    def discrete_laplace(self, parameter: float, shape: tuple[int, ...]) -> np.ndarray:
        """Integers x with probability proportional to e^(-parameter·|x|), as float64."""
        tiny = np.finfo(np.float64).tiny
        up, down = np.floor(np.log(np.maximum(self.fine(2, *shape), tiny)) / -parameter)  # geometric, each
        return up - down


def noisy_counts(counts: np.ndarray, parameter: float, uniforms: Uniforms, replaced: int = 2) -> np.ndarray:
    """Counts with discrete Laplace noise, float64; of one example that is replaced they move by ``replaced`` in L1."""
    noise, charge = uniforms.discrete_laplace(parameter, counts.shape), replaced * parameter
    return _replay_hook.released([counts], [counts + noise], [noise], [1 / parameter], charge, replaced=charge, norm=1)[
        0
    ]


def in_chunks(release: Callable[[np.ndarray, int], np.ndarray], values: np.ndarray) -> np.ndarray:
    """`release(piece, where it starts)` of each piece, put together. Many labels need little memory so."""
    said = [release(values[start : start + _CHUNK], start) for start in range(0, max(len(values), 1), _CHUNK)]
    return said[0] if len(said) == 1 else np.concatenate(said)


class _Shared(list):
    """A record that an object and its copies write into together, as if they released the same labels."""

    def __deepcopy__(self, memo: Json) -> _Shared:
        return self


class LabelMechanism(BaseEstimator):
    """A scikit-learn estimator that releases private labels, or counts of them.

    Every release is recorded and none is ever taken back: `releases_`, `dp_event` and `ledger` go on growing through
    calls of `fit`. A clone has released nothing yet. An object and its copies (`copy.copy`, `copy.deepcopy`) have one
    record, so each of them states what all released. An unpickled object keeps the record, and goes on alone. None of
    them repeats the randomness of the original.
    """

    adjacency = "replace_one"
    _family: list[tuple[float, int]]
    _draws = _clones = 0
    _stream: tuple[int, ...] = ()  # with a seed, what tells this object's numbers from those of its clones

    # -- what a user may read --------------------------------------------------------------------------------

    @property
    def releases_(self) -> int:
        """How many times labels were released; every one costs."""
        return len(self._record("_times"))

    @property
    def _spent(self) -> tuple[tuple[float, int], ...]:
        """(ε, outcomes) of all that was released."""
        return tuple(self._record("_parts"))

    @property
    def dp_event(self) -> DpEvent:
        """All that was released, as a dp-accounting event under `adjacency`; before the first release, that release."""
        events = [pure_event(*part) for part in self._spent or self._cost()]
        return composed(events)

    @property
    def epsilon_spent(self) -> float:
        """ε of all that was released, by adding up."""
        return float(sum(epsilon for epsilon, outcomes in self._spent if outcomes > 1))

    @property
    def ledger(self) -> PrivacyLedger:
        """All that was released, in tfdpfl's accounting."""
        return self._ledger_of(self.dp_event) if self._spent else PrivacyLedger()

    @property
    def family_ledger(self) -> PrivacyLedger:
        """States what this object, all that were cloned from it or from one another, and the one they began with
        released together: the price of a `GridSearchCV`, whose every fit is a release.

        It knows of this process alone: search with `n_jobs=None`. A copy through a file goes on by itself.
        """
        events = [pure_event(*part) for part in self._relatives()]
        return self._ledger_of(composed(events)) if events else PrivacyLedger()

    def _ledger_of(self, event: DpEvent) -> PrivacyLedger:
        return PrivacyLedger().add(event, adjacency=self.adjacency, name=f"labels of {type(self).__name__}")

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`.

        The price covers what clones released too, because that is of the same labels, as far as anyone knows.
        """
        spent = self.family_ledger
        times = f", {self.releases_} releases"
        more = "; ε includes what its clones released" if len(spent) and spent != self.ledger else ""
        return [label_promise(self, spent, times + more)]

    # -- for subclasses --------------------------------------------------------------------------------------

    def _cost(self) -> list[tuple[float, int]]:
        """(ε, classes that randomized response is over, or 2) of one release from start to end."""
        return [(self.epsilon, 2)]

    def _spend(self, *parts: tuple[float, int]) -> None:
        for epsilon, _ in parts:
            _checks.real("epsilon", epsilon, "a release has an ε above 0", above=0)
        self._record("_parts").extend(parts)
        self._relatives().extend(parts)

    def _relatives(self) -> list[tuple[float, int]]:
        """What the whole family spent: one list that clones share."""
        return self._record("_family")

    def _record(self, name: str) -> list:
        return self.__dict__.setdefault(name, _Shared())

    def _spend_on_release(self, *parts: tuple[float, int]) -> None:
        self._spend(*parts)
        self._record("_times").append(1)

    def _uniforms(self) -> Uniforms:
        """Fresh randomness: with a seed, every call's own stream."""
        self._draws += 1
        return Uniforms(self.seed, (*self._stream, 0, self._draws))

    def _check(self) -> None:
        self._check_epsilon()
        _checks.optional(
            _checks.whole, "seed", self.seed, 0, "None takes the operating system's entropy; a seed is for tests"
        )

    def _begin(self, y: Arrays, second: object) -> Arrays:
        """Returns the labels to be fitted on, also those of a data set, and refuses (X, y)."""
        if second is not None:
            name = type(self).__name__
            raise ValueError(
                f"{name} releases labels, but received two arrays, as in a pipeline, which passes y on unchanged: call "
                f"{name}.fit_transform(y) before, and fit the pipeline on what that returns"
            )
        self._check()
        return labels_of(y) if _labels.is_dataset(y) else y

    def _check_epsilon(self) -> None:
        check_epsilon(self.epsilon, "give the total ε of one release")

    # -- copies ----------------------------------------------------------------------------------------------

    def __sklearn_clone__(self) -> Estimator:
        twin = super().__sklearn_clone__()
        twin._family = self._relatives()
        if self.seed is not None:  # the same seed, another stream
            self._clones += 1
            twin._stream = (*self._stream, 1, self._clones)
        return twin

    def __getstate__(self) -> Json:
        for name in ("_parts", "_times", "_family"):  # before the first release too, so that copies share them
            self._record(name)
        state: Json = super().__getstate__()
        return state

    def __setstate__(self, state: Json) -> None:
        super().__setstate__(state)
        # Files of older releases hold what this object alone released, as a tuple and a count.
        self._record("_parts").extend(self.__dict__.pop("_spent", ()))
        self._record("_times").extend([1] * self.__dict__.pop("_releases", 0))
        self._family = _Shared(self._family) if type(self.__dict__.get("_family")) is list else self._relatives()
        if self.seed is not None:
            # What is loaded twice would repeat itself under any stream that follows from the file.
            self._stream = (*self._stream, 2, secrets.randbits(64))


class LabelTransformer(TransformerMixin, LabelMechanism):
    """A mechanism that takes labels alone, and returns a column of them."""

    def __sklearn_tags__(self) -> Estimator:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.target_tags.one_d_labels = True
        return tags

    def get_feature_names_out(self, input_features: Arrays = None) -> np.ndarray:
        """The one column's name, for `set_output`."""
        return np.array(["label"], dtype=object)


class ClassTransformer(LabelTransformer):
    """A mechanism of labels that are classes."""

    num_classes: int | None
    classes: Arrays

    def fit(self, y: Arrays, _second: None = None) -> Estimator:
        """Learns the classes, unless they were given. Costs nothing.

        Args:
            y: Labels [n] or [n, 1]: numbers or strings, in a list, array, pandas Series, tensor, or a
                `tf.data.Dataset` of labels or (x, y) pairs, batched or not.
        """
        labels, _ = _labels.read(self._begin(y, _second))
        self.classes_ = _labels.find_classes(labels, self.num_classes, self.classes)
        return self

    def _check(self) -> None:
        super()._check()
        _checks.optional(_checks.whole, "num_classes", self.num_classes, 2, "count the classes")
