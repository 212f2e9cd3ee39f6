"""Labels as they come (lists, numpy, pandas, tensors) to codes 0..K-1 and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdpfl._types import Arrays

__all__ = ["check_lengths", "decode", "encode", "find_classes", "is_dataset", "is_missing", "read"]

Rebuild = Callable[[np.ndarray], Any]


def read(y: Arrays, name: str = "y") -> tuple[np.ndarray, Rebuild]:
    """Returns labels as a flat array, and what puts such an array into the container (and shape) of `y`.

    Raises:
        ValueError: `y` is not `[n]` or `[n, 1]`, or a tensor without values.
    """
    values, rebuild = _array(y, name)
    if values.ndim == 2 and values.shape[1] == 1:  # as keras.datasets.cifar10 has them
        return values[:, 0], lambda flat: rebuild(flat.reshape(-1, 1))
    if values.ndim != 1:
        remedy = (
            "one-hot labels become classes with argmax(axis=-1)" if values.ndim == 2 else "give one label an example"
        )
        raise ValueError(f"{name} must have the shape [n], got {list(values.shape)}: {remedy}")
    return values, rebuild


def _array(y: Arrays, name: str) -> tuple[np.ndarray, Rebuild]:
    tf = sys.modules.get("tensorflow")
    if tf is not None and isinstance(y, tf.data.Dataset | tf.RaggedTensor | tf.SparseTensor):
        raise ValueError(
            f"{name} is a {type(y).__name__.strip('_')}, of which this method reads no labels: give them in one array, "
            "one label an example"
        )
    if tf is not None and (tf.is_tensor(y) or isinstance(y, tf.Variable)):
        if not hasattr(y, "numpy"):
            raise ValueError(
                f"{name} is a symbolic tensor, so every pass would draw its labels anew: use "
                "tfdpfl.label_dp.LabelPrivacy in a tf.data map, or privatise the labels before"
            )
        values = np.asarray(y.numpy())
        if values.dtype == object:
            values = np.char.decode(values.astype(bytes), "utf-8")
        return values, lambda flat: tf.constant(flat, y.dtype) if flat.dtype.kind != "f" else tf.constant(flat)
    if hasattr(y, "to_numpy"):
        if len(getattr(y, "shape", (0,))) == 1 and hasattr(y, "index"):
            return y.to_numpy(), lambda flat: type(y)(flat, index=y.index, name=y.name)
        return y.to_numpy(), lambda flat: flat
    return np.asarray(y), lambda flat: flat


def check_lengths(X: Arrays, labels: np.ndarray) -> None:
    """Raises a `ValueError` unless there is one label for each example."""
    length = np.shape(X)[0] if hasattr(X, "shape") else len(X)
    if length != len(labels):
        raise ValueError(f"X and y must have one length, got {length} and {len(labels)}: give a label an example")


def is_dataset(y: Arrays) -> bool:
    """Whether `y` is a tf.data.Dataset; imports nothing."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(y, tf.data.Dataset)


def is_missing(label: Arrays) -> bool:
    """Whether a label is None, NaN, NaT or pandas' NA, which is equal to nothing and no truth value itself."""
    try:
        return label is None or bool(label != label)
    except TypeError:
        return True


def check_values(values: np.ndarray, name: str = "y") -> None:
    """Raises a `ValueError` where labels are missing, or numbers that name no class."""
    if len(values) == 0:
        raise ValueError(f"{name} must have at least one label, got none")
    if values.dtype.kind == "f":
        wrong = ~(np.isfinite(values) & (values == np.floor(values)))
        if wrong.any():
            raise ValueError(
                f"{name} must be classes, got {values[wrong][0]!r}: drop missing labels; for continuous labels use "
                "RROnBins or UnbiasedRandomizer"
            )
    elif values.dtype == object and (gone := [v for v in values if is_missing(v)]):
        raise ValueError(f"{name} must be classes, got {gone[0]!r}: drop missing labels")
    elif values.dtype.kind not in "biuUSO":
        raise ValueError(f"{name} must be numbers or strings that name classes, got dtype {values.dtype}")


def find_classes(values: np.ndarray, num_classes: int | None, classes: Arrays) -> np.ndarray:
    """The classes, sorted: those given, or 0..num_classes-1, or those that the labels name."""
    if classes is not None:
        return _checked_classes(classes, num_classes)
    check_values(values)
    if values.dtype == object and all(isinstance(v, int | np.integer) for v in values):
        values = values.astype(np.int64)
    if num_classes is not None and values.dtype.kind in "biuf":
        return np.arange(num_classes)
    try:
        known = np.unique(values)
    except TypeError as error:
        raise ValueError(f"y mixes kinds of labels ({error}): make them all strings, or all integers") from error
    if num_classes is not None and num_classes != len(known):
        raise ValueError(
            f"num_classes={num_classes}, but y names {len(known)} classes: if labels are not integers below "
            "num_classes, list them in classes"
        )
    if len(known) < 2:
        raise ValueError(
            f"y names only one class, {known[0]!r}, so no other class could hide it: give num_classes or classes"
        )
    return known


def _checked_classes(classes: Arrays, num_classes: int | None) -> np.ndarray:
    given = np.asarray(classes)
    if given.dtype.kind in "fO" and any(map(is_missing, given.ravel())):
        raise ValueError(f"classes={classes!r} has a missing value, which is no class: leave it out")
    known = np.unique(given)
    if given.ndim != 1 or len(known) != len(given) or len(known) < 2:
        raise ValueError(f"classes must be two or more different labels, got {classes!r}: list each class once")
    if num_classes is not None and num_classes != len(known):
        raise ValueError(f"num_classes={num_classes} but classes lists {len(known)}: give one of the two")
    return known


def encode(values: np.ndarray, classes: np.ndarray, name: str = "y") -> np.ndarray:
    """The position of each label in `classes` (sorted)."""
    if len(values) == 0:
        return np.zeros(0, np.intp)
    plain = classes.dtype.kind in "iu" and classes[0] == 0 and classes[-1] == len(classes) - 1
    if plain and values.dtype.kind in "biu":
        codes = values
        if values.min() >= 0 and values.max() < len(classes):
            return codes.astype(np.intp, copy=False)
        wrong = (values < 0) | (values >= len(classes))
    else:
        check_values(values, name)
        try:
            codes = np.minimum(np.searchsorted(classes, values), len(classes) - 1)
            wrong = np.asarray(classes[codes] != values)
        except TypeError:
            codes, wrong = np.zeros(len(values), np.intp), np.ones(len(values), bool)
        if wrong.shape == values.shape and not wrong.any():
            return codes
    shown = ", ".join(map(str, classes[:8])) + (", …" if len(classes) > 8 else "")
    first = values[wrong][0] if wrong.shape == values.shape else values[0]
    raise ValueError(
        f"{name} has the label {first!r}, which is none of the classes {shown}: fit on all classes, or list them in "
        "classes (num_classes=K stands for 0..K-1)"
    )


def decode(codes: np.ndarray, classes: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Labels of these codes; integers in the dtype of `like` where it holds them."""
    labels = classes[codes]
    if labels.dtype.kind in "iuf" and like.dtype.kind in "iuf":
        with np.errstate(invalid="ignore"):
            held = classes.astype(like.dtype)
        return held[codes] if (held == classes).all() else labels
    return labels.astype(object) if like.dtype == object else labels
