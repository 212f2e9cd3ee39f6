"""Flower, and what is known here of its insides: how arrays travel, where it logs, which strategies compare clients."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.serverapp import Grid, strategy
    from flwr.serverapp.strategy import Result, Strategy
    from flwr.supercore import privacy_accounting as accounting
except ImportError as error:
    raise ImportError(
        f'tfdpfl.flower needs Flower 1.41 or newer ({error}): pip install "tfdpfl[flower]" on Python 3.11 or newer; '
        'simulations need "flwr[simulation]", too.'
    ) from error

__all__ = [
    "COMPARE",
    "GONE",
    "ArrayRecord",
    "ConfigRecord",
    "Context",
    "Error",
    "Grid",
    "Message",
    "MessageType",
    "MetricRecord",
    "RecordDict",
    "Result",
    "Strategy",
    "accounting",
    "arrays_of",
    "as_before",
    "log",
    "only",
    "packed",
    "record_of",
    "unpacked",
]

log = logging.getLogger("flwr")  # where `flwr run` shows what is logged

# Codes of errors that Flower itself makes where no answer came: message, reply or node unavailable.
GONE = (3, 4, 5)

# They compare the clients' updates with each other, or sum trees. Beside a noisy mean they would compare nothing.
COMPARE = tuple(
    getattr(strategy, name)
    for name in "Bulyan FedMedian FedTrimmedAvg FedXgbBagging FedXgbCyclic Krum MultiKrum QFedAvg".split()
    if hasattr(strategy, name)
)


def array_of(sent: Array) -> np.ndarray:
    """The array that was sent, read only and without a copy.

    Raises:
      ValueError: it is none, or not of numbers.
    """
    if sent.stype != "numpy.ndarray":
        return sent.numpy()  # which says what it is
    head = io.BytesIO(sent.data[:1024])
    try:
        version = np.lib.format.read_magic(head)
        if version != (1, 0):
            return sent.numpy()
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
    except ValueError:
        return sent.numpy()  # a longer head, or what numpy refuses
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    flat = np.frombuffer(sent.data, dtype, offset=head.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array_of(sent) for name, sent in record.items()}


def record_of(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


_Record = TypeVar("_Record")


def only(records: Mapping[str, _Record], what: str) -> _Record:
    """The one record that there must be.

    Raises:
      ValueError: there are none, or several.
    """
    if len(records) != 1:
        raise ValueError(f"{len(records)} {what}s in place of one")
    return next(iter(records.values()))


def as_before(value: np.ndarray, w: np.ndarray | None) -> np.ndarray:
    """In the type that the model had, which strategies change: they average counters, and Adam makes float64."""
    if w is None:
        return value
    with np.errstate(over="ignore"):
        return value.astype(w.dtype) if w.dtype.kind == "f" else w


def packed(value: object) -> tuple[str, dict[str, np.ndarray]]:
    """Arrays that a strategy holds, and how; nothing for all else."""
    if isinstance(value, np.ndarray):
        return "array", {"": value}
    if isinstance(value, ArrayRecord):
        return "record", arrays_of(value)
    if isinstance(value, dict) and value and all(isinstance(v, np.ndarray) for v in value.values()):
        return "dict", {str(name): v for name, v in value.items()}
    if isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
        return "list", {str(i): v for i, v in enumerate(value)}
    return "", {}


def unpacked(
    kind: str, parts: dict[str, np.ndarray]
) -> np.ndarray | ArrayRecord | dict[str, np.ndarray] | list[np.ndarray]:
    if kind == "array":
        return parts[""]
    if kind == "record":
        return record_of(parts)
    return parts if kind == "dict" else [parts[str(i)] for i in range(len(parts))]
