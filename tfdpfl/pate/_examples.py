"""Examples and labels as Keras takes them: one array or several, whole numbers or one-hot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfdpfl._types import Arrays

__all__ = ["arrays", "as_classes", "as_inputs", "joined", "rows", "size", "zeros_like"]


def as_inputs(X: Arrays, inputs: int = 1) -> Arrays:
    """Returns examples as an array, or for a model of several inputs as a list or dict of arrays of one length.

    Args:
        X: An array `[n, ...]`; or a tuple or dict of them, one for each input.
        inputs: Where it is more than 1, a list is taken as a tuple is.

    Raises:
        ValueError: the arrays differ in length.
    """
    if isinstance(X, list) and inputs == 1:
        return np.asarray(X)
    made = _mapped(np.asarray, list(X) if isinstance(X, tuple) else X)
    lengths = [len(each) for each in arrays(made)]
    if len(set(lengths)) != 1:
        raise ValueError(f"X must have as many examples in each input, got {lengths}.")
    return made


def arrays(X: Arrays) -> list[np.ndarray]:
    """The arrays that examples are made of."""
    return list(X.values()) if isinstance(X, dict) else X if isinstance(X, list) else [X]


def size(X: Arrays) -> int:
    """How many examples there are."""
    return len(arrays(X)[0])


def rows(X: Arrays, which: Arrays) -> Arrays:
    """Some of the examples: indices, a mask or a slice."""
    return _mapped(lambda each: each[which], X)


def zeros_like(X: Arrays) -> Arrays:
    """Examples of zeros in the same form."""
    return _mapped(np.zeros_like, X)


def joined(parts: list[Arrays]) -> Arrays:
    """Parts of one form, one after the other."""
    return _mapped(lambda *each: np.concatenate(each), *parts)


def _mapped(function: Callable[..., np.ndarray], *parts: Arrays) -> Arrays:
    """What a function makes of the arrays at each place of parts of one form."""
    if isinstance(parts[0], dict):
        return {name: function(*(part[name] for part in parts)) for name in parts[0]}
    if isinstance(parts[0], list):
        return [function(*each) for each in zip(*parts, strict=True)]
    return function(*parts)


def as_classes(y: Arrays, examples: int) -> tuple[np.ndarray, int | None]:
    """Returns labels as whole numbers from 0, int64 `[n]`, and how many columns they had where they were one-hot.

    Raises:
        ValueError: they are neither whole numbers from 0, `[n]` or `[n, 1]`, nor one-hot, `[n, K]`.
    """
    y = np.asarray(y)
    if len(y) != examples or y.ndim not in (1, 2):
        raise ValueError(f"y must have one label for each of the {examples} rows of X, got shape {y.shape}.")
    columns = y.shape[1] if y.ndim == 2 and y.shape[1] > 1 else None
    if columns is not None:
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise ValueError(f"y of shape {y.shape} must be one-hot: one 1 in each row, else 0. Take its argmax first.")
        return y.argmax(axis=1), columns
    y = y.reshape(-1)
    if y.dtype.kind not in "iu" or (len(y) and y.min() < 0):
        raise ValueError(f"y must hold whole numbers from 0, got {y.dtype}; number the classes.")
    return y.astype(np.int64), None
