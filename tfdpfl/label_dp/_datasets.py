"""Reads a `tf.data.Dataset`, and replaces its labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tfdpfl._types import Arrays
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["arrays_of", "labels_of", "with_labels"]


def labels_of(dataset: tf.data.Dataset) -> np.ndarray:
    """All labels of a dataset of labels or (x, y), flat."""
    return _read(dataset)[2]


def arrays_of(dataset: tf.data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """All features and labels of a dataset of (x, y)."""
    _, x, labels, _ = _read(dataset)
    if x is None:
        raise ValueError("The dataset must have (x, y) elements with one array x, since the prior needs features.")
    return x, labels


def with_labels(dataset: tf.data.Dataset, release: Callable[[Arrays, np.ndarray], np.ndarray]) -> tf.data.Dataset:
    """The dataset, read once and kept in memory, with the labels that `release(x, labels)` returns."""
    import tensorflow as tf

    kept, x, labels, shapes = _read(dataset)
    noisy = tf.constant(np.asarray(release(x, labels)))
    sizes = np.array([int(np.prod(shape)) for shape in shapes])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    places = tf.data.Dataset.from_tensor_slices((starts.astype(np.int64), sizes.astype(np.int64)))

    def replace(element: Arrays, place: Arrays) -> Arrays:
        old = element[1] if isinstance(element, tuple) else element
        new = tf.reshape(noisy[place[0] : place[0] + place[1]], tf.shape(old))
        new.set_shape(old.shape)
        return (element[0], new, *element[2:]) if isinstance(element, tuple) else new

    return tf.data.Dataset.zip((kept, places)).map(replace)


def _taken_apart(dataset: tf.data.Dataset, spec: Arrays) -> tf.data.Dataset:
    """The dataset of single labels, for one of batches."""
    labels = spec[1] if isinstance(spec, tuple) else spec
    try:
        return dataset.unbatch() if labels.shape.rank else dataset
    except (TypeError, ValueError):  # the features of an example are no rows
        return dataset


def _read(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, np.ndarray | None, np.ndarray, list[tuple]]:
    """The dataset in memory, its features if they are one array, its labels, and each element's shape of labels."""
    import tensorflow as tf

    from tfdpfl.data.declared import name_of
    from tfdpfl.data.functions import beside, check_no_copies

    spec = dataset.element_spec
    if isinstance(spec, dict) or (isinstance(spec, tuple) and len(spec) not in (2, 3)):
        raise ValueError(
            f"The dataset must have labels or (x, y) or (x, y, sample_weight) as elements, got {spec}: map it to that."
        )
    before = len(tf.nest.flatten(spec[0])) if isinstance(spec, tuple) else 0
    if (revealing := beside(dataset, before)) is not None:
        raise PrivacyError(
            f"{name_of(revealing)} computes another part of its elements from the label, as weights of classes are, so "
            "that part would reveal the true label. Compute it from the released labels: map what comes out."
        )
    check_no_copies(_taken_apart(dataset, spec), "each label is released by itself")
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset must be finite, got an infinite one; bound it with .take(n).")
    # One whole pass fills the cache; from then on its order is fixed, and the labels line up.
    kept = dataset.cache()
    features, labels, shapes = [], [], []
    for element in kept:
        label = np.asarray((element[1] if isinstance(element, tuple) else element).numpy())
        shapes.append(label.shape)
        labels.append(label.ravel())
        if isinstance(element, tuple) and tf.is_tensor(element[0]):
            x = element[0].numpy()
            features.append(x if label.ndim else x[None])
    if not labels:
        raise ValueError("The dataset must hold at least one example, got none.")
    flat = np.concatenate(labels)
    if flat.dtype == object:
        flat = np.char.decode(flat.astype(bytes), "utf-8")
    return kept, np.concatenate(features) if features else None, flat, shapes
