"""Sources of examples: arrays in memory, arrays on disk, or an object that gives one example at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdpfl._types import Arrays, Dataset, Nest
from tfdpfl.data.functions import check_apart, check_once

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["Examples", "examples_of", "of_batches"]

# Arrays of these libraries are in memory.
_IN_MEMORY = ("numpy", "tensorflow", "keras", "tf_keras", "pandas", "torch", "jax", "jaxlib", "polars", "builtins")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Data of which examples can be drawn by their numbers.

    Attributes:
        number: how many there are.
        spec: `tf.TensorSpec` of one example, in the structure that `fit` takes.
        take: gives the examples of an int64 tensor [k] of numbers, as tensors [k, ...], where it is traced.
        in_memory: whether ``take`` only gathers.
    """

    number: int
    spec: Nest
    take: Callable[[tf.Tensor], Nest]
    in_memory: bool = True


def examples_of(data: Arrays) -> Examples:
    """Holds what `poisson_batches` takes, looked at once; so looked at, it is taken again."""
    if isinstance(data, Examples):
        return data
    with tf.device("CPU:0"):
        if isinstance(data, tf.data.Dataset):
            return _gathered(_from_dataset(data))
        if _gives_single_examples(data):
            return _from_rows(data)
        leaves = _normalised(data)
        if any(_on_disk(leaf.value) for leaf in tf.nest.flatten(leaves)):
            return _from_disk(leaves)
        return _gathered(tf.nest.map_structure(_as_tensor, leaves))


def _gathered(data: Arrays) -> Examples:
    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), data)
    take = lambda numbers: tf.nest.map_structure(lambda leaf: tf.gather(leaf, numbers), data)  # noqa: E731
    return Examples(_common_length([int(leaf.shape[0]) for leaf in tf.nest.flatten(data)]), spec, take)


# -- on disk ---------------------------------------------------------------------------------------------------


def _on_disk(value: object) -> bool:
    """Whether an array is to be read row by row: a `np.memmap` or a view of one, or an array of h5py, zarr, ..."""
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap):
            return True
        value = value.base
    if type(value).__module__.split(".")[0] in _IN_MEMORY:
        return False
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def _from_disk(leaves: Nest) -> Examples:
    flat = [leaf.value for leaf in tf.nest.flatten(leaves)]
    flat = [value if _on_disk(value) else _as_tensor(_Leaf(value)).numpy() for value in flat]
    number = _common_length([len(value) for value in flat])
    specs = [tf.TensorSpec(value.shape[1:], _type_in_fit(value.dtype)) for value in flat]

    def read(numbers: np.ndarray) -> list[np.ndarray]:
        return [_rows(value, numbers) for value in flat]

    return Examples(number, tf.nest.pack_sequence_as(leaves, specs), _called(read, specs, leaves), in_memory=False)


def _rows(value: Arrays, numbers: np.ndarray) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return np.asarray(value[numbers])
    # One after the other: a list of places is slower in h5py, and not known to all.
    return np.stack([np.asarray(value[int(i)]) for i in numbers]) if len(numbers) else np.asarray(value[:0])


# -- one at a time ---------------------------------------------------------------------------------------------


def of_batches() -> tuple[type, ...]:
    """Returns the kinds of data whose batches `fit` puts in another order in every epoch, unless ``shuffle=False``."""
    kinds = [getattr(tf.keras.utils, name, None) for name in ("PyDataset", "Sequence")]
    return tuple(kind for kind in kinds if kind is not None)


def _gives_single_examples(data: Arrays) -> bool:
    """Whether it is no array and no structure of arrays, but has a length and gives examples by number."""
    if isinstance(data, of_batches()):
        raise ValueError(
            f"{type(data).__name__} gives whole batches, and each draw of one example would read a whole batch. Give "
            "an object whose __len__ counts examples and whose __getitem__(i) gives one of them, such as (x_i, y_i)."
        )
    if isinstance(data, (list, tuple, Mapping, str, bytes, np.ndarray)) or tf.is_tensor(data):
        return False
    if hasattr(data, "shape") or hasattr(data, "to_numpy"):
        return False
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return True
    if hasattr(data, "__next__") or hasattr(data, "__iter__"):
        raise ValueError(
            f"A {type(data).__name__} gives its examples in its own order, but any example may be drawn next. Give an "
            "object with __len__ and __getitem__(i), or the arrays."
        )
    return False


def _from_rows(source: Dataset) -> Examples:
    if len(source) == 0:
        raise ValueError("The source must hold at least one example, got a length of 0.")
    first = tf.nest.map_structure(lambda leaf: _cell(leaf.value), _normalised(_example(source, 0)))
    cells = tf.nest.flatten(first)
    specs = [tf.TensorSpec(cell.shape, _type_in_fit(cell.dtype)) for cell in cells]

    def read(numbers: np.ndarray) -> list[np.ndarray]:
        columns = [np.empty((len(numbers), *cell.shape), cell.dtype) for cell in cells]
        for at, i in enumerate(numbers):
            example = _normalised(_example(source, int(i)))
            try:
                tf.nest.assert_same_structure(first, example)
                values = [_cell(leaf.value) for leaf in tf.nest.flatten(example)]
            except (TypeError, ValueError) as error:
                raise ValueError(f"Example {i} of the source has another structure than example 0: {error}") from error
            for column, value in zip(columns, values, strict=True):
                if value.shape != column.shape[1:]:
                    raise ValueError(
                        f"Example {i} of the source has the shape {value.shape}, and example 0 {column.shape[1:]}: "
                        "give all examples one shape (pad or crop them in __getitem__)."
                    )
                column[at] = value[()]
        return columns

    return Examples(len(source), tf.nest.pack_sequence_as(first, specs), _called(read, specs, first), in_memory=False)


def _example(source: Dataset, i: int) -> Nest:
    example = source[i]
    if isinstance(example, tuple):
        while example and example[-1] is None:
            example = example[:-1]
    return example


def _cell(value: object) -> np.ndarray:
    """One value as an array. Strings as objects: numpy's own cut off zeros at the end, which files may have."""
    if isinstance(value, (str, bytes)):
        cell = np.empty((), object)
        cell[()] = value
        return cell
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _called(read: Callable[[np.ndarray], list[np.ndarray]], specs: list[Nest], structure: Nest) -> Callable:
    """``read`` as a function of tensors."""
    kinds = [object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype for spec in specs]

    def typed(numbers: np.ndarray) -> list[np.ndarray]:
        once, places = numbers, None
        if not (np.diff(numbers) > 0).all():  # each is read once, in the order that disks like
            once, places = np.unique(numbers, return_inverse=True)
        columns = read(once) if places is None else [column[places] for column in read(once)]
        return [np.asarray(column, kind) for column, kind in zip(columns, kinds, strict=True)]

    def take(numbers: tf.Tensor) -> Nest:
        columns = tf.nest.flatten(tf.numpy_function(typed, [numbers], [spec.dtype for spec in specs]))
        for column, spec in zip(columns, specs, strict=True):
            column.set_shape([numbers.shape[0], *spec.shape])
        return tf.nest.pack_sequence_as(structure, columns)

    return take


def _type_in_fit(dtype: DTypeLike) -> tf.DType:
    """The type that `fit` gives to an array: float64 becomes Keras's floatx."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return tf.as_dtype(tf.keras.backend.floatx())
    return tf.string if dtype.kind in "OSU" else tf.as_dtype(dtype)


# -- in memory -------------------------------------------------------------------------------------------------


def _normalised(data: Arrays) -> Nest:
    """Wraps the leaves; makes lists of arrays tuples, and drops a trailing None of the outer tuple."""
    if isinstance(data, tuple):
        while data and data[-1] is None:
            data = data[:-1]
        if not data:
            raise ValueError("arrays_or_dataset must hold at least one array, got an empty tuple.")
    return _normalised_part(data)


def _normalised_part(part: Nest) -> Nest:
    if isinstance(part, Mapping):
        return {key: _normalised_part(value) for key, value in part.items()}
    if isinstance(part, tuple):
        values = [_normalised_part(value) for value in part]
        return type(part)(*values) if hasattr(part, "_fields") else tuple(values)
    if isinstance(part, list) and part and all(len(getattr(value, "shape", ())) for value in part):
        return tuple(_normalised_part(value) for value in part)
    if part is None:
        raise ValueError("arrays_or_dataset has None where an array is expected; leave the entry out.")
    return _Leaf(part)


class _Leaf:
    """Keeps `tf.nest` out of leaves that are lists or pandas objects."""

    def __init__(self, value: object):
        self.value = value


def _array_of_table(table: Nest) -> np.ndarray:
    """Returns the values of a table. One of numbers and truth values holds floats, as if each column were numbers."""
    array = table.to_numpy()
    if array.dtype != object or not hasattr(getattr(table, "dtypes", None), "items"):
        return array
    other = [name for name, dtype in table.dtypes.items() if getattr(dtype, "kind", "O") not in "biuf"]
    if not other:
        return table.to_numpy(dtype=np.float64, na_value=np.nan)
    if len(other) == len(table.dtypes):
        return array  # of words alone
    raise ValueError(
        f"The columns {', '.join(map(repr, other)):.200} of a table do not hold numbers, and its other columns do. "
        "Encode words by a list of values that you know without the data, as in df['city'] == 'Bern', or leave these "
        "columns out."
    )


def _as_tensor(leaf: _Leaf) -> tf.Tensor:
    value = leaf.value
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"arrays_or_dataset must hold dense arrays, got a {type(value).__name__}; make it dense first."
        )
    if hasattr(value, "to_numpy"):
        value = _array_of_table(value)
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        tensor = tf.convert_to_tensor(value)
    else:
        try:
            array = np.asarray(value)
            if array.dtype == np.float64:
                array = array.astype(tf.keras.backend.floatx())
            tensor = tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"arrays_or_dataset holds a {type(leaf.value).__name__} that TensorFlow cannot convert to a tensor "
                f"({error}); give rectangular arrays of numbers or strings."
            ) from error
    if tensor.shape.rank == 0:
        raise ValueError(f"arrays_or_dataset must hold arrays [num_examples, ...], got the scalar {value!r}.")
    return tensor


def _from_dataset(dataset: tf.data.Dataset) -> Dataset:
    leaves = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in leaves):
        raise ValueError(f"The dataset must have dense tensors as elements, got {dataset.element_spec}.")
    if all(spec.shape.rank and spec.shape[0] is None for spec in leaves):
        raise ValueError(
            f"The dataset must have single examples as elements, got batches ({dataset.element_spec}); "
            "pass dataset.unbatch()."
        )
    check_once(dataset, "each of them is drawn as an example of its own")
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset must be finite, got an infinite one; bound it with .take(n).")
    try:
        # In chunks: where shapes differ TensorFlow's batch counts up to the batch size before it says so.
        chunks = list(dataset.batch(4096))
        data = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *chunks) if chunks else None
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            f"The dataset's examples must all have one shape, got {dataset.element_spec}; pad them first. "
            f"({error.message})"
        ) from error
    if data is None:
        raise ValueError("The dataset must hold at least one example, got none.")
    check_apart(dataset, int(tf.nest.flatten(data)[0].shape[0]))
    return data


def _common_length(lengths: list[int]) -> int:
    if not lengths:
        raise ValueError("arrays_or_dataset must hold at least one array, got none.")
    if len(set(lengths)) > 1:
        raise ValueError(f"All arrays must have the same first dimension, got {lengths}.")
    if lengths[0] == 0:
        raise ValueError("The arrays must hold at least one example, got a first dimension of 0.")
    return lengths[0]
