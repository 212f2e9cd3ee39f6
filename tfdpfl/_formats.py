"""The versions of what this package saves, and how a file is compared with the settings of the program that reads it.

A file without a version is of before versions were written. It reads as version 1 does, unless its module says more. A
file of a newer version is refused, because what it records in a new way would be in no ε.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfdpfl._types import JsonValue, Keywords
from tfdpfl._version import __version__
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "NewerFormatError",
    "agrees",
    "describe",
    "number_or_text",
    "refuse_newer",
    "refuse_others",
    "restore",
    "stamp",
    "strict",
]


class NewerFormatError(PrivacyError):
    """A file is of a newer version than this release reads."""


def stamp(version: int) -> Keywords:
    """Returns the entries that a saved dictionary carries: the format's version and who wrote it."""
    return {"version": version, "written_by": f"tfdpfl {__version__}"}


def refuse_newer(what: str, saved: Mapping[str, object], newest: int) -> None:
    """Refuses a file of a newer version than this release reads.

    Args:
      what: names the file, at the beginning of the sentence.
      saved: what the file holds, with the entries of `stamp` if it has them.
      newest: the newest version that this release reads.

    Raises:
      NewerFormatError: the file is of a newer version.
      ValueError: its version is no version.
    """
    version, writer = saved.get("version", newest), saved.get("written_by")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"{what} has version={version!r}, which is no version of a format of tfdpfl.")
    if version > newest:
        by = "" if writer is None else f", written by {writer}"
        raise NewerFormatError(
            f"{what} is of format version {version}{by}, but tfdpfl {__version__} reads versions up to {newest} and "
            "would leave what it does not know out of epsilon: upgrade with pip install --upgrade tfdpfl."
        )


def strict(value: object) -> JsonValue:
    """Returns values that strict JSON can hold: an infinite number is the string "inf", and NaN is None."""
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def number_or_text(value: float | str) -> float | str:
    """Returns text as it is, and any other number as Python's own."""
    return value if isinstance(value, str) else float(value)


def describe(value: object) -> JsonValue:
    """Returns settings as values that JSON can hold, for `agrees` to compare with later.

    A field of a dataclass that is at its default is left out. So a later release may add a field with a default, and
    what was saved before still describes the same settings. A default that changes needs a new version of the file.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: getattr(value, f.name) for f in _fields(value) if not _is_default(value, f)}
        return {"type": type(value).__name__, **describe(changed)}
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def agrees(saved: object, value: object) -> bool:
    """Returns whether a file describes these settings. An entry that the file lacks is at its default there: a field
    at the dataclass's, an entry of a dictionary at None.

    Args:
      saved: what `describe` gave, read from JSON; or the value's `repr`, as files without a version have it.
      value: the settings.
    """
    if saved == repr(value):
        return True
    if isinstance(saved, str) and not isinstance(value, str):
        saved = _parsed(saved)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return isinstance(saved, Mapping) and _fields_agree(saved, value)
    if isinstance(value, Mapping):
        named = {str(name): item for name, item in value.items()}
        return isinstance(saved, Mapping) and not any(_disagreeing(saved, named))
    if isinstance(value, list | tuple):
        alike = isinstance(saved, list | tuple) and len(saved) == len(value)
        return alike and all(map(agrees, saved, value))  # type: ignore[call-overload]
    return bool(saved == value)


def _fields_agree(saved: Mapping[str, JsonValue], value: DataclassInstance) -> bool:
    kind, fields = type(value).__name__, {f.name: f for f in _fields(value)}
    if saved.get("type", kind) != kind or not saved.keys() - {"type"} <= fields.keys():
        return False
    return all(
        agrees(saved[name], getattr(value, name)) if name in saved else _is_default(value, field)
        for name, field in fields.items()
    )


def _disagreeing(saved: Mapping[str, JsonValue], now: Mapping[str, object]) -> Iterator[str]:
    """Yields the entries of a file that do not describe those of a dictionary."""
    return (name for name in {**now, **saved} if not agrees(saved.get(name), now.get(name)))


def refuse_others(what: str, saved: Mapping[str, JsonValue], now: Mapping[str, object], why: str) -> None:
    """Refuses a file of a training with other settings than those that it would go on with.

    Args:
      what: names the file, at the beginning of the sentence.
      saved: what `describe` gave, read from JSON.
      now: the settings.
      why: the reason and the fix, which end the sentence.

    Raises:
      PrivacyError: they differ.
    """
    for name in _disagreeing(saved, now):
        raise PrivacyError(
            f"{what} is of a training with another {name}, {saved.get(name)}, not {describe(now.get(name))}: {why}"
        )


def restore(saved: JsonValue, classes: Iterable[type]) -> Any:
    """Returns the value that `describe` or `repr` described.

    Args:
      saved: what `describe` gave, read from JSON; or the value's `repr`, as files without a version have it.
      classes: the dataclasses that it may hold.

    Raises:
      ValueError: it holds another class.
    """
    known = {cls.__name__: cls for cls in classes}

    def value_of(described: JsonValue) -> Any:
        if isinstance(described, str):
            described = _parsed(described)
        if isinstance(described, list | tuple):
            return tuple(map(value_of, described))
        if not isinstance(described, Mapping):
            return described
        fields = {name: value_of(item) for name, item in described.items()}
        if "type" not in fields:
            return fields
        name = fields.pop("type")
        if name not in known:
            raise ValueError(f"{name} is no setting that this release knows")
        return known[name](**fields)

    return value_of(saved)


def _fields(value: DataclassInstance) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(value) if field.init]


def _is_default(value: object, field: dataclasses.Field) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return default is not dataclasses.MISSING and bool(getattr(value, field.name) == default)


def _parsed(text: str) -> JsonValue:
    """Returns what `describe` would have given of the value whose `repr` this is, with the fields at their defaults;
    the text itself if it is no such `repr`."""
    try:
        return _value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return text


def _value_of(node: ast.expr) -> JsonValue:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        return {"type": node.func.id, **{str(k.arg): _value_of(k.value) for k in node.keywords}}
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:  # a NumPy scalar
        return _value_of(node.args[0])
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value_of(key) for key in node.keys]
        return {str(key): _value_of(item) for key, item in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_of(item) for item in node.elts]
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return math.inf if node.id == "inf" else math.nan
    return ast.literal_eval(node)
