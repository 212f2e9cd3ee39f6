"""The data of each client: data sets by client from arrays, data frames, tf.data and TFF.

Other functions split one data set over simulated clients. No TFF here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdpfl._types import Arrays, Dataset, Nest
from tfdpfl.accounting import _checks
from tfdpfl.data.declared import repeats
from tfdpfl.data.functions import check_apart, check_no_copies
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["ClientDatasets", "from_arrays", "from_partition", "once", "partition_iid"]


class ClientDatasets(Mapping):
    """A `tf.data.Dataset` for each client, by the client's id, made when it is first asked for.

    Args:
      make: takes a client's id and returns its data set.
      num_examples: for each client, in order, how many examples it holds; at least 1.

    Attributes:
      client_ids: the clients, a list of strings.
      epochs: how often a data set holds each example, by `batch`.

    Raises:
      ValueError: there is no client, or one without examples.
    """

    epochs = 1
    _batched = False

    def __init__(self, make: Callable[[str], tf.data.Dataset], num_examples: Mapping[str, int]):
        if not num_examples:
            raise ValueError("There must be at least one client, got none. Check the data's client ids.")
        empty = [client for client, n in num_examples.items() if n < 1]
        if empty:
            raise ValueError(
                f"{len(empty)} of {len(num_examples)} clients hold no examples ({', '.join(map(repr, empty[:3]))}…). "
                "Leave them out, or split the data over fewer clients."
            )
        self._make = make
        self._made: dict[str, tf.data.Dataset] = {}
        self._num_examples: dict[str, int] | None = dict(num_examples)
        self.client_ids = list(num_examples)
        self._known = set(self.client_ids)

    @property
    def num_examples(self) -> dict[str, int]:
        """How many examples each client holds. After `preprocess`, they are counted by one pass when first asked for:
        as rows of batches where it is clear that they are, and else as elements."""
        if self._num_examples is None:
            rows = {client: _rows(self[client]) if self._batched else _size(client, self[client]) for client in self}
            self._num_examples = {client: n // self.epochs for client, n in rows.items()}
        return self._num_examples

    def __getitem__(self, client_id: str) -> tf.data.Dataset:
        if client_id not in self._known:
            raise KeyError(f"no client {client_id!r} among {len(self)}")
        if not tf.executing_eagerly():  # asked for the element_spec while a graph is traced, with which it would end
            return self._make(client_id)
        if client_id not in self._made:
            self._made[client_id] = self._make(client_id)
        return self._made[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.client_ids)

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def element_spec(self) -> Nest:
        """Of the first client's data set; clients must agree."""
        return self[self.client_ids[0]].element_spec

    def preprocess(self, function: Callable[[tf.data.Dataset], tf.data.Dataset]) -> ClientDatasets:
        """Returns the clients with ``function`` applied to each one's data set. Their examples are counted anew."""
        made = self._derived(lambda client: function(self[client]))
        made._num_examples = None
        before, after = (_ranks(clients.element_spec) for clients in (self, made))
        # What is not clearly a batch counts as one example: too few of them only raise a price.
        deeper = [b - a if a is not None and b is not None else None for a, b in zip(before, after, strict=False)]
        same = len(before) == len(after)
        made._batched = same and all(step == (0 if self._batched else 1) for step in deeper)
        return made

    def batch(self, batch_size: int, *, epochs: int = 1, shuffle: bool = True) -> ClientDatasets:
        """Returns the clients with their examples in batches, shuffled anew in every pass, for so many passes.

        Processes that protect examples make their own passes, and take only ``epochs=1``.
        """
        batch_size = _checks.whole("batch_size", batch_size, 1, "count the examples of a batch")
        epochs = _checks.whole("epochs", epochs, 1, "count a client's passes over its data in a round")

        def make(client: str) -> tf.data.Dataset:
            dataset = self[client]
            if shuffle:
                dataset = dataset.shuffle(max(1, self.num_examples[client]))
            return (dataset.repeat(epochs) if epochs > 1 else dataset).batch(batch_size)

        made = self._derived(make)
        made.epochs, made._batched = self.epochs * epochs, True
        return made

    def _derived(self, make: Callable[[str], tf.data.Dataset]) -> ClientDatasets:
        made = ClientDatasets(make, dict.fromkeys(self.client_ids, 1))
        made._num_examples, made.epochs, made._batched = self._num_examples, self.epochs, self._batched
        return made


def from_arrays(arrays: Arrays, client_ids: object) -> ClientDatasets:
    """Returns clients that hold the rows of ``arrays`` with their id.

    Args:
      arrays: an array ``[n, ...]``, or a tuple or dict of such, as `fit` takes them from a dataset: ``(x, y)``. float64
        becomes Keras's floatx.
      client_ids: ``[n]``, whose row it is. Ids become strings.

    Raises:
      ValueError: the lengths differ, there are no rows, or an id is missing (None or NaN).
    """
    ids = np.asarray(client_ids)
    if ids.ndim != 1:
        raise ValueError(f"client_ids must be one id for each row, got shape {list(ids.shape)}. Flatten it.")
    missing = [i for i, client in enumerate(ids.tolist()) if client is None or client != client]
    if missing:
        raise ValueError(f"client_ids has no id for {len(missing)} rows, row {missing[0]} first. Fill or drop them.")
    names = ids.astype(str)
    order = np.argsort(names, kind="stable")
    unique, starts = np.unique(names[order], return_index=True)
    parts = np.split(order, starts[1:])
    if len(unique) < len(set(ids.tolist())):
        raise ValueError(
            "client_ids has different ids that read alike as strings, such as 1 and '1'. Make them one type."
        )
    return from_partition(arrays, dict(zip(unique.tolist(), parts, strict=False)), _rows=len(ids))


def from_partition(
    arrays: Arrays, parts: Mapping[str, ArrayLike] | Sequence[ArrayLike], _rows: int | None = None
) -> ClientDatasets:
    """Returns clients that hold the given rows of ``arrays``, the i-th of a sequence being named "client_i".

    Args:
      arrays: as for `from_arrays`.
      parts: row numbers of each client: a dict by id, or a list as the ``partition_`` functions return it.

    Raises:
      ValueError: the arrays' lengths differ, a row number is out of range, or a client has no rows.
    """
    data = tf.nest.map_structure(_array, arrays if not isinstance(arrays, list) else tuple(arrays))
    lengths = sorted({len(leaf) for leaf in tf.nest.flatten(data)} | ({_rows} if _rows is not None else set()))
    if len(lengths) != 1:
        raise ValueError(f"arrays and ids must have equal lengths, got {lengths}: one row and one id an example.")
    if not isinstance(parts, Mapping):
        width = len(str(max(len(parts) - 1, 0)))
        parts = {f"client_{i:0{width}d}": rows for i, rows in enumerate(parts)}
    index = {str(client): np.asarray(rows, np.int64) for client, rows in parts.items()}
    for client, rows in index.items():
        if rows.size and (rows.min() < 0 or rows.max() >= lengths[0]):
            raise ValueError(f"parts of client {client!r} must be row numbers from 0 to {lengths[0] - 1}. Check them.")

    def make(client: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda leaf: leaf[index[client]], data))

    return ClientDatasets(make, {client: len(rows) for client, rows in index.items()})


def partition_iid(num_examples: int, num_clients: int, seed: int | None = None) -> list[np.ndarray]:
    """Splits examples over clients at random, as evenly as can be.

    Args:
      num_examples: at least ``num_clients``.
      num_clients: at least 1.
      seed: None for a new split every time.

    Returns:
      The row numbers of each client, disjoint, all rows together.

    Raises:
      ValueError: an argument is out of its range.
    """
    num_clients = _checks.whole("num_clients", num_clients, 1, "count the clients to split over")
    if num_clients > num_examples:
        raise ValueError(
            f"num_clients must be at most {num_examples} for this many examples, got {num_clients}. Take fewer."
        )
    return np.array_split(np.random.default_rng(seed).permutation(num_examples), num_clients)


def _array(values: Arrays) -> np.ndarray:
    values = np.asarray(values)
    if not values.ndim:
        raise ValueError("arrays must have a row for each example, got a single value. Give a list or an array.")
    return values.astype(tf.keras.backend.floatx()) if values.dtype == np.float64 else values


def _size(client: object, dataset: tf.data.Dataset) -> int:
    size = _finite(client, dataset)
    return size if size >= 0 else sum(1 for _ in dataset)


def _finite(client: object, dataset: tf.data.Dataset) -> int:
    """Returns a data set's cardinality, which is -2 where it is not known."""
    size = int(dataset.cardinality())
    if size == -1:
        raise ValueError(f"The data set of client {client!r} is infinite. Give it .take(n).")
    return size


def _rows(batches: Arrays) -> int:
    return sum(int(tf.nest.flatten(batch)[0].shape[0]) for batch in batches)


def _ranks(spec: Nest) -> list[int | None]:
    return [leaf.shape.rank for leaf in tf.nest.flatten(spec)]


def once(client: str, dataset: Dataset, most: int | None = None) -> tuple[Arrays, int]:
    """A client's batches as they are now, in memory, and the number of their examples.

    The returned data are those that are counted, whatever the data set would give at its next pass.

    Args:
      client: its name, for errors.
      dataset: a `tf.data.Dataset` of batches, or an iterable of them.
      most: how many examples the client is said to hold; None where nothing is said.

    Raises:
      PrivacyError: the data set repeats its examples, or yields more of them than the client holds: then one example
        is in it more than once, and what protects each of a batch's rows protects no example. Or examples meet in it.
      ValueError: it is infinite.
    """
    own = "the process makes the passes over a client's data (local_steps, local_epochs)"
    if repeats(dataset):
        raise PrivacyError(
            f"The data set of client {client!r} is repeated, so that it holds an example more than once. Leave out "
            f"repeat, or epochs, since {own}"
        )
    is_dataset = isinstance(dataset, tf.data.Dataset)
    if is_dataset:
        _finite(client, dataset)
    batches = list(dataset)
    sizes = [_rows([batch]) for batch in batches]
    found, kept = sum(sizes), dataset if is_dataset else batches
    if is_dataset and batches and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]:
        whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
        static = all(leaf.shape[0] is not None for leaf in tf.nest.flatten(dataset.element_spec))
        kept = tf.data.Dataset.from_tensor_slices(whole).batch(sizes[0], drop_remainder=static)
    if most is not None and found > most:
        raise PrivacyError(
            f"The data set of client {client!r} yields {found} examples, but the client holds {most}. Give each one "
            f"once, since {own}; or correct num_examples."
        )
    if is_dataset:
        check_no_copies(dataset, "each row of a batch is protected by itself")
        check_apart(dataset, found, batched=True)
    return kept, found
