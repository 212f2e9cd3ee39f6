"""Notes the steps that a file records if Keras loads no private optimizer from it.

`load_model(..., compile=False)` and `load_weights` before `compile` take the weights alone, and these count as public.
So that nobody leaves out steps on the same data without knowing, `PrivacyBudget` states what the file records.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import weakref
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl._types import Model
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.clipping.step_checks import raw_variable
from tfdpfl.optimizers import _past, _step_table

__all__ = ["recorded_for", "watch"]

_LOADERS = {
    "saving_lib": "load_model",
    "legacy_h5_format": "load_model_from_hdf5",
    "legacy_sm_saving_lib": "load_model",
}
_WEIGHTS = "model.weights.h5"  # in a .keras file

# By the id of a weight: the file that it comes from, and what this records.
_RECORDED: dict[int, tuple[str, np.ndarray]] = {}


@functools.cache
def watch(model_class: type) -> None:
    """Has the functions that load, if this Keras has them, note what a file records. ``model_class``: its `Model`."""
    api = inspect.unwrap(model_class.load_weights).__globals__.get("saving_api")  # type: ignore[attr-defined]
    _replace(api, "load_weights")
    for module, name in _LOADERS.items():
        _replace(getattr(api, module, None), name)


def _replace(module: Any, name: str) -> None:
    load: Callable | None = getattr(module, name, None)
    if load is None:
        return
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_and_note(*args: object, **kwargs: object) -> object:
        loaded = load(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        _note(given.get("model", loaded), given["filepath"])
        return loaded

    setattr(module, name, load_and_note)


def _note(model: Model, file: Any) -> None:
    """Notes the steps in a file for the weights of a model that was loaded from it."""
    tables = [table for table in _tables_in(file) if _step_table.is_table(table)]
    for table in tables:
        _step_table.refuse_newer(table)
    rows = _step_table.merge_tables(np.zeros([0, len(_step_table.COLUMNS)]), *map(_step_table.with_all_columns, tables))
    if not len(rows):
        return
    for variable in map(raw_variable, _past.weights_of(model)):
        if id(variable) not in _RECORDED:
            weakref.finalize(variable, _RECORDED.pop, id(variable), None)
        _RECORDED[id(variable)] = (str(file), rows)


def recorded_for(model: Model, ledger: PrivacyLedger) -> dict[str, int]:
    """Returns the files that weights of a model come from, and how many of the steps that they record a ledger lacks,
    if it lacks some."""
    found: dict[str, int] = {}
    known = {origin.rstrip("+*") for origin in ledger.origins}
    for variable in _past.weights_of(model):
        file, rows = _RECORDED.get(id(raw_variable(variable)), ("", np.zeros([0, len(_step_table.COLUMNS)])))
        if not {f"{int(origin):x}" for origin in rows[:, _step_table.ORIGIN]} <= known:
            found[file] = int(rows[:, _step_table.STEPS].sum())
    return found


def _tables_in(file: Any) -> Iterator[np.ndarray]:
    """Yields all that a file holds and that may be a table of an optimizer's steps."""
    if hasattr(file, "visititems"):
        yield from _tables_of_h5(file)
        return
    path = os.fspath(file)
    if os.path.isdir(path):
        yield from _tables_of_folder(path)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if _WEIGHTS in archive.namelist() and _holds_a_table(archive):
                yield from _opened(io.BytesIO(archive.read(_WEIGHTS)))
    elif os.path.isfile(path) and path.endswith((".h5", ".hdf5", ".keras")):
        yield from _opened(path)


def _holds_a_table(archive: zipfile.ZipFile) -> bool:
    """Whether the weights of a .keras file hold a table of steps: they may be large, and most are of no private model.
    (Its config need not tell: Keras 3 leaves the optimizer out of it after the model was saved as .h5.)"""
    mark, end = _step_table.mark_of_any_version(), b""
    with archive.open(_WEIGHTS) as file:
        while chunk := file.read(1 << 24):
            if mark in end + chunk:
                return True
            end = chunk[-len(mark) :]
    return False


def _opened(file: Any) -> Iterator[np.ndarray]:
    import h5py

    with contextlib.suppress(OSError), h5py.File(file, "r") as tree:  # what is none is for Keras to refuse
        yield from _tables_of_h5(tree)


def _tables_of_h5(tree: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = []

    def look(_: str, each: Any) -> None:
        if len(getattr(each, "shape", ())) == 2 and each.shape[0] == _step_table.ROWS:
            found.append(np.asarray(each)) if each.dtype == np.float64 else None

    tree.visititems(look)
    return found


def _tables_of_folder(path: str) -> Iterator[np.ndarray]:
    if os.path.isfile(os.path.join(path, _WEIGHTS)):
        yield from _opened(os.path.join(path, _WEIGHTS))
    point = os.path.join(path, "variables", "variables")
    if os.path.isfile(point + ".index"):
        for name, shape in tf.train.list_variables(point):
            if len(shape) == 2 and shape[0] == _step_table.ROWS:
                table = tf.train.load_variable(point, name)
                if table.dtype == np.float64:
                    yield table
