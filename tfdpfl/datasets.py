"""Public data sets, as the demo and the examples use them. Nothing else of the package needs them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = [
    "CENSUS_VALUES",
    "DATA_DIR_VARIABLE",
    "CensusData",
    "ImageData",
    "load_adult",
    "load_census",
    "load_digits",
    "load_image_data",
    "load_mnist",
    "load_shakespeare",
]

DATA_DIR_VARIABLE = "TFDPFL_DATA_DIR"
CENSUS_VALUES = {
    "workclass": (
        "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked", "?",
    ),
    "marital-status": (
        "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
        "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
        "Priv-house-serv", "Protective-serv", "Armed-Forces", "?",
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "sex": ("Female", "Male"),
}  # fmt: skip
"""The values of the census columns of words, as the survey's documentation lists them."""

_ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
)  # fmt: skip
_CENSUS_NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_CENSUS_SIZES = (32_561, 16_281)
_DOWNLOAD_TIMEOUT_SECONDS = 5.0
_MNIST_SPLITS = (("train", 60_000), ("t10k", 10_000))


class ImageData(NamedTuple):
    """Images with their labels.

    Attributes:
        name: Of the data set.
        x_train: Images, float32 in [0, 1], `[n, height, width, 1]`.
        y_train: Their labels, int32 `[n]`, from 0 on.
        x_test, y_test: The same, for tests.
        num_classes: How many different labels there are.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int


def load_digits() -> ImageData:
    """Returns the 1,797 handwritten digits of 8×8 pixels that ship with scikit-learn, always split alike."""
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    x, y = sklearn_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        x, y.astype(np.int32), test_size=0.2, random_state=0, stratify=y
    )
    return ImageData("digits", x_train, y_train, x_test, y_test, 10)


def load_mnist(data_dir: str | os.PathLike | None = None) -> ImageData:
    """Returns MNIST from its four idx files, in `<data_dir>/mnist/` or `<data_dir>/`.

    Args:
        data_dir: A folder; None takes the environment variable TFDPFL_DATA_DIR.

    Raises:
        FileNotFoundError: no folder is given, or a file is missing.
        ValueError: a file is not what its name says.

    Source of the format: Y. LeCun, "The MNIST database of handwritten digits".
    """
    folder = _folder(data_dir, "mnist", "train-images-idx3-ubyte.gz")
    x_train, x_test = (
        _read_idx(folder / f"{split}-images-idx3-ubyte.gz", (count, 28, 28)) for split, count in _MNIST_SPLITS
    )
    y_train, y_test = (_read_idx(folder / f"{split}-labels-idx1-ubyte.gz", (count,)) for split, count in _MNIST_SPLITS)
    return _mnist(x_train, y_train, x_test, y_test)


def _mnist(x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> ImageData:
    x_train, x_test = (x[..., None].astype(np.float32) / np.float32(255) for x in (x_train, x_test))
    return ImageData("MNIST", x_train, y_train.astype(np.int32), x_test, y_test.astype(np.int32), 10)


def load_image_data(data_dir: str | os.PathLike | None = None) -> ImageData:
    """Returns MNIST where it can be had, else scikit-learn's digits.

    From `data_dir`, else from the folder in TFDPFL_DATA_DIR, else by Keras's downloader (and its cache).
    If that fails it says so in one line on standard error and returns the digits.

    Raises:
        FileNotFoundError: a folder is given and MNIST is not in it.
    """
    if data_dir is not None or os.environ.get(DATA_DIR_VARIABLE):
        return load_mnist(data_dir)
    timeout = socket.getdefaulttimeout()
    try:
        import tensorflow as tf

        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_SECONDS)
        with contextlib.redirect_stdout(io.StringIO()):
            (x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
    except Exception as error:  # Keras's downloader raises a plain Exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"MNIST could not be downloaded ({reason}); using scikit-learn's digits instead.", file=sys.stderr)
        return load_digits()
    finally:
        socket.setdefaulttimeout(timeout)
    return _mnist(x_train, y_train, x_test, y_test)


def load_adult(
    data_dir: str | os.PathLike | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns UCI's census income as `(X_train, y_train, X_test, y_test)`, float32, and int32: 1 is over 50K.

    Numeric columns are standardised by the training rows' mean and deviation. The others are one-hot over the
    values that the training rows have, missing (`?`) among them. These means, deviations and value lists are
    taken as public.

    Args:
        data_dir: A folder with `adult.data` and `adult.test`, or with a folder `adult` that has them; None
            takes the environment variable TFDPFL_DATA_DIR.

    Raises:
        FileNotFoundError: no folder is given, or a file is missing.
        ValueError: a row has not 15 columns.

    Source: B. Becker and R. Kohavi, "Adult", UCI Machine Learning Repository, 1996.
    """
    from sklearn.compose import make_column_transformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    folder = _folder(data_dir, "adult", "adult.data")
    tables = [np.array(_read_adult(folder / name), object) for name in ("adult.data", "adult.test")]
    scaled, one_hot = StandardScaler(), OneHotEncoder(handle_unknown="ignore")
    kinds = [(scaled if value.isdigit() else one_hot, [column]) for column, value in enumerate(tables[0][0, :-1])]
    numbers = make_column_transformer(*kinds, sparse_threshold=0).fit(tables[0])
    parts = [(numbers.transform(table).astype(np.float32), _incomes(table)) for table in tables]
    return (*parts[0], *parts[1])


class CensusData(NamedTuple):
    """A census table: a person a row.

    Attributes:
        name: Of the data set.
        train: Columns by name: float32 for numbers, strings for words.
        y_train: int32, 1 for an income over 50K.
        test, y_test: The same, of other people.
    """

    name: str
    train: dict[str, np.ndarray]
    y_train: np.ndarray
    test: dict[str, np.ndarray]
    y_test: np.ndarray


def load_census(data_dir: str | os.PathLike | None = None) -> CensusData:
    """Returns ten columns of UCI's census income as they are in its files, or a generated table of the same form.

    The table is generated if neither `data_dir` nor TFDPFL_DATA_DIR names a folder. It has the same columns, values and
    numbers of rows, so that a program and its ε are the same for both.

    Args:
        data_dir: A folder as for `load_adult`.

    Raises:
        FileNotFoundError: a folder is given, and a file is missing.
        ValueError: a row has not 15 columns.

    Example:
        table = load_census()
        print(table.name, table.train["age"].mean())

    Source: B. Becker and R. Kohavi, "Adult", UCI Machine Learning Repository, 1996.
    """
    if not (data_dir or os.environ.get(DATA_DIR_VARIABLE)):
        rng = np.random.default_rng(0)
        parts = [_generated_census(rng, rows) for rows in _CENSUS_SIZES]
        return CensusData("a generated table", *parts[0], *parts[1])
    folder = _folder(data_dir, "adult", "adult.data")
    parts = [_census_columns(_read_adult(folder / name)) for name in ("adult.data", "adult.test")]
    return CensusData("UCI Adult", *parts[0], *parts[1])


def _census_columns(rows: list[list[str]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    table = dict(zip(_ADULT_COLUMNS, np.array(rows).T, strict=False))
    columns = {name: table[name].astype(np.float32) for name in _CENSUS_NUMBERS}
    columns |= {name: table[name] for name in CENSUS_VALUES}
    return columns, _incomes(rows)


def _incomes(rows: Iterable[Sequence[str]]) -> np.ndarray:
    return np.array([row[-1].startswith(">50K") for row in rows], np.int32)


def _generated_census(rng: np.random.Generator, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Independent columns, and incomes that follow from four of them."""
    gains = np.where(rng.random((2, rows)) < [[0.08], [0.05]], rng.lognormal([[8.5], [7.5]], 0.5, (2, rows)), 0)
    numbers = (
        rng.normal(38.6, 13.6, rows).clip(17, 90), rng.normal(10.1, 2.6, rows).clip(1, 16), *gains,
        rng.normal(40.4, 12.3, rows).clip(1, 99),
    )  # fmt: skip
    columns = {name: values.round().astype(np.float32) for name, values in zip(_CENSUS_NUMBERS, numbers, strict=True)}
    columns |= {name: rng.choice(values, rows) for name, values in CENSUS_VALUES.items()}
    married = np.isin(columns["relationship"], ("Wife", "Husband"))
    score = (columns["age"] - 40) / 10 + (columns["education-num"] - 10) / 2 + columns["capital-gain"] / 1000
    score += 4 * married - 4.2
    return columns, (score + rng.logistic(scale=1.1, size=rows) > 0).astype(np.int32)


def load_shakespeare(data_dir: str | os.PathLike | None = None) -> dict[str, str]:
    """Returns what each speaker in Shakespeare's plays says, in the order of the plays, by speaker.

    Args:
        data_dir: A folder with `input.txt`, or with a folder `shakespeare` that has it; None takes the
            environment variable TFDPFL_DATA_DIR.

    Raises:
        FileNotFoundError: no folder is given, or the file is missing.

    Source: A. Karpathy, "tinyshakespeare".
    """
    text = (_folder(data_dir, "shakespeare", "input.txt") / "input.txt").read_text(encoding="utf-8")
    speeches: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text.strip()):
        head, _, speech = block.partition("\n")
        if head.endswith(":") and speech:
            speeches.setdefault(head[:-1], []).append(speech)
    return {speaker: "\n".join(said) for speaker, said in speeches.items()}


def _folder(data_dir: str | os.PathLike | None, name: str, file: str) -> Path:
    given = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not given:
        raise FileNotFoundError(f"No folder for {name}: give data_dir, or set {DATA_DIR_VARIABLE}.")
    for folder in (Path(given) / name, Path(given)):
        if (folder / file).is_file():
            return folder
    raise FileNotFoundError(f"{file} is neither in {Path(given) / name} nor in {given}; check data_dir.")


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    with gzip.open(path) as file:
        content = file.read()
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if not content.startswith(header) or len(content) != len(header) + np.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes of shape {shape}; fetch it again.")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def _read_adult(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row and not row[0].startswith("|")]
    if not rows or any(len(row) != 15 for row in rows):
        raise ValueError(f"{path} must have rows of 15 columns; fetch it again.")
    return rows
