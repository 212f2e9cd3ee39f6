"""Batches drawn the way the accountant assumes: every example on its own, with the same probability.

`poisson_batches` makes the `tf.data.Dataset` that `fit` takes. `declared_sampling` tells what may be claimed
about it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

_ATTRIBUTE = "tfdpfl_sampling"
_EMPTY_BATCHES = ("auto", "keep", "zero_weight")
# Two: TensorFlow's gradient of a strided 1×1 convolution crashes on a batch of one (oneDNN, 2.14 and 2.21).
_PLACEHOLDERS = 2


@dataclasses.dataclass(frozen=True)
class SamplingDeclaration:
    """How the batches of a dataset are drawn: what an accountant may rely on.

    Attributes:
        kind: `"poisson"`: every example is in every batch with probability `sampling_rate`, independently of
            all else.
        sampling_rate: that probability.
        num_examples: size of the data set that is sampled.
        steps: batches in one pass over the dataset (one epoch of `fit`).
        seed: the public seed that the batches come from; None if they come from the system's entropy.
    """

    kind: str
    sampling_rate: float
    num_examples: int
    steps: int
    seed: int | None = None

    @property
    def expected_batch_size(self) -> float:
        """The mean of the batch size; the denominator for a DP optimizer's `expected_batch_size`."""
        return self.sampling_rate * self.num_examples


def declared_sampling(dataset: Any) -> SamplingDeclaration | None:
    """Returns what `dataset` declares about its sampling, or None where it declares nothing.

    The declaration belongs to the very object that `poisson_batches` returned. A dataset made from it by
    `.map`, `.batch`, `.take` and the like declares nothing, since such a step may change what was promised.
    """
    return getattr(dataset, _ATTRIBUTE, None)


def made_from(dataset: Any) -> SamplingDeclaration | None:
    """What the data set declares that `dataset` was made from, however many steps ago."""
    inputs = dataset._inputs() if hasattr(dataset, "_inputs") else []
    return declared_sampling(dataset) or next(filter(None, map(made_from, inputs)), None)


def passed_through(dataset: Any, names: tuple[str, ...]) -> str | None:
    """Which of the named transformations (as in "cache") made a data set, however many steps ago; of Poisson batches
    those behind the draw."""
    kind = type(dataset).__name__.lower()
    found = next((name for name in names if name in kind), None)
    inputs = dataset._inputs() if hasattr(dataset, "_inputs") and declared_sampling(dataset) is None else []
    return found or next(filter(None, (passed_through(i, names) for i in inputs)), None)


def poisson_batches(
    arrays_or_dataset: Any,
    sampling_rate: float | None = None,
    steps: int | None = None,
    seed: int | None = None,
    *,
    expected_batch_size: float | None = None,
    empty_batches: str = "auto",
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of Poisson-sampled batches, for `fit`.

        model.fit(poisson_batches((x, y), expected_batch_size=256, steps=200), epochs=10)

    What it promises:

    * Every batch holds each example with probability `sampling_rate`, independently of every other example
      and batch (drawn as a binomial size and a uniform subset of that size). The batch size varies and can be
      0.
    * Every pass over the dataset (every epoch of `fit`) draws `steps` new batches. Ten epochs of 200 are 2000
      steps of the subsampled Gaussian mechanism; none repeats the batches of an earlier epoch.
    * The batch dimension of `element_spec` is None, so a `tf.function` is traced once for all batch sizes.
    * `declared_sampling(dataset)` gives the `SamplingDeclaration`. Anything chained behind (`.map`,
      `.prefetch`, …) drops it: transform the data before, or inside the model.

    Give the DP optimizer `expected_batch_size=sampling_rate * num_examples` too, so that its update is not
    divided by the size of the batch that was drawn, which tells how many examples there are.

    Args:
        arrays_or_dataset: The data, in the structure that `fit` takes from a dataset: `x`, `(x, y)` or `(x,
            y, sample_weight)`, where each may be an array, a tuple, a list of arrays (it becomes a tuple) or
            a dict. Leaves are arrays `[num_examples, ...]`: numpy, tensors, pandas, lists of numbers. float64
            arrays become Keras's `floatx`, as in `fit`. Or a finite `tf.data.Dataset` of *single* examples of
            equal shapes (`.unbatch()` a batched one: each element is what privacy protects), read once into
            memory.
        sampling_rate: Probability in (0, 1]. Exactly one of this and `expected_batch_size`.
        steps: Batches per pass, at least 1. Required.
        seed: None draws from the operating system's entropy, as privacy needs: who can guess the batches
            voids the amplification. A seed makes pass k of the dataset reproducible; it is for tests only.
        expected_batch_size: Mean batch size in (0, num_examples]; the rate is `expected_batch_size /
            num_examples`.
        empty_batches: What stands for a draw of no example. With oneDNN (the default on CPUs) TensorFlow's
            convolutions fail on a batch of size 0, and its max pooling aborts the process.
            `"keep"`: a batch of size 0.
            `"zero_weight"`: elements are `(x, y, sample_weight)`, weights of 1 where the data have none, and
            an empty draw is replaced by all-zero examples of weight 0, whose gradient is 0: ε and the mean
            update stay as they are. But weights do not reach activity regularizers and `add_loss`: with such
            a model take `"keep"`. Keras refuses `class_weight` beside it: give `(x, y, weight_of_class[y])`.
            `"auto"`: `"zero_weight"` where there is a `y`, some `x` has three dimensions or more (images,
            series) and a pass has an empty draw with probability over 1e-9; else `"keep"`.

    Raises:
        ValueError: an argument is out of its range, the arrays differ in length or hold nothing, or the
            dataset is infinite, batched or of unequal shapes.

    Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", section 3.1; Mironov et al. 2019,
    "Rényi Differential Privacy of the Sampled Gaussian Mechanism", for add/remove of an example.
    """
    import tensorflow as tf

    steps = _checked_steps(steps)
    if empty_batches not in _EMPTY_BATCHES:
        raise ValueError(f"empty_batches must be one of {_EMPTY_BATCHES}, got {empty_batches!r}.")
    examples = examples_of(arrays_or_dataset)
    data, num_examples = examples.data, examples.number
    with tf.device("CPU:0"):
        rate = _checked_rate(sampling_rate, expected_batch_size, num_examples)
        pads = _pads_empty(empty_batches, data, rate, num_examples, steps)
        if pads:
            data = _with_weights(data, num_examples)

    draws = tf.data.Dataset.from_generator(
        _IndexDraws(num_examples, rate, steps, seed), output_signature=tf.TensorSpec([None], tf.int64)
    )

    def gather(indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda leaf: tf.gather(leaf, indices), data)

    def gather_or_pad(indices: tf.Tensor) -> Any:
        def batch(leaf: tf.Tensor) -> tf.Tensor:
            zeros = tf.zeros([_PLACEHOLDERS, *leaf.shape[1:]], leaf.dtype)
            rows = tf.cond(tf.size(indices) == 0, lambda: zeros, lambda: tf.gather(leaf, indices))
            return tf.ensure_shape(rows, [None, *leaf.shape[1:]])

        return tf.nest.map_structure(batch, data)

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # it would copy the data once more
    dataset = (
        draws.apply(tf.data.experimental.assert_cardinality(steps))
        .map(gather_or_pad if pads else gather)
        .with_options(options)
        .prefetch(2)
    )
    setattr(dataset, _ATTRIBUTE, SamplingDeclaration("poisson", rate, num_examples, steps, seed))
    return dataset


@dataclasses.dataclass(frozen=True)
class Examples:
    """Data of which examples can be drawn: ``number`` of them."""

    data: Any
    number: int


def examples_of(arrays_or_dataset: Any) -> Examples:
    """What `poisson_batches` takes, read once; so read, it is taken again."""
    import tensorflow as tf

    if isinstance(arrays_or_dataset, Examples):
        return arrays_or_dataset
    with tf.device("CPU:0"):
        if isinstance(arrays_or_dataset, tf.data.Dataset):
            data = _from_dataset(arrays_or_dataset)
        else:
            data = tf.nest.map_structure(_as_tensor, _normalised(arrays_or_dataset))
        return Examples(data, _common_length(data))


class _IndexDraws:
    """Called once for each pass; yields the indices of `steps` batches, from a stream of that pass's own."""

    def __init__(self, num_examples: int, rate: float, steps: int, seed: int | None):
        self._num_examples, self._rate, self._steps = num_examples, rate, steps
        self._seed = seed
        self._passes = itertools.count()

    def __call__(self) -> Iterator[np.ndarray]:
        # Without a seed each pass asks the system anew: in a forked process, too, it is another stream.
        key = (next(self._passes),)
        rng = np.random.default_rng(None if self._seed is None else np.random.SeedSequence(self._seed, spawn_key=key))
        for _ in range(self._steps):
            size = rng.binomial(self._num_examples, self._rate)
            yield rng.choice(self._num_examples, size, replace=False)


def _checked_steps(steps: Any) -> int:
    mend = "the number of batches in one pass (one epoch of fit), an integer of at least 1"
    try:
        value = 0 if isinstance(steps, bool) else operator.index(steps)
    except TypeError:
        value = 0
    if value < 1:
        raise ValueError(f"steps must be {mend}, got {steps!r}.")
    return value


def _checked_rate(sampling_rate: Any, expected_batch_size: Any, num_examples: int) -> float:
    if np.ndim(sampling_rate):
        raise ValueError(
            f"sampling_rate must be a number, got a {type(sampling_rate).__name__}; give all arrays as one tuple: "
            "poisson_batches((x, y), ...)."
        )
    if (sampling_rate is None) == (expected_batch_size is None):
        raise ValueError(
            "Give exactly one of sampling_rate and expected_batch_size, got "
            f"sampling_rate={sampling_rate!r} and expected_batch_size={expected_batch_size!r}."
        )
    if sampling_rate is not None:
        rate = _real("sampling_rate", sampling_rate)
        if not 0 < rate <= 1:
            raise ValueError(
                f"sampling_rate must be in (0, 1], got {sampling_rate!r}; "
                "for a number of examples use expected_batch_size."
            )
        return rate
    size = _real("expected_batch_size", expected_batch_size)
    if not 0 < size <= num_examples:
        raise ValueError(
            f"expected_batch_size must be in (0, {num_examples}], the number of examples, "
            f"got {expected_batch_size!r}."
        )
    return size / num_examples


def _real(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, got {value!r}.") from error


def _normalised(data: Any) -> Any:
    """Wraps the leaves; makes lists of arrays tuples, and drops a trailing None of the outer tuple."""
    if isinstance(data, tuple):
        while data and data[-1] is None:
            data = data[:-1]
        if not data:
            raise ValueError("arrays_or_dataset must hold at least one array, got an empty tuple.")
    return _normalised_part(data)


def _normalised_part(part: Any) -> Any:
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

    def __init__(self, value: Any):
        self.value = value


def _as_tensor(leaf: _Leaf) -> tf.Tensor:
    import tensorflow as tf

    value = leaf.value
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"arrays_or_dataset must hold dense arrays, got a {type(value).__name__}; make it dense first."
        )
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        tensor = tf.convert_to_tensor(value)
    else:
        try:
            array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
            if array.dtype == np.float64:
                array = array.astype(tf.keras.backend.floatx())
            tensor = tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"arrays_or_dataset holds a {type(value).__name__} that makes no tensor ({error}); "
                "give rectangular arrays of numbers or strings."
            ) from error
    if tensor.shape.rank == 0:
        raise ValueError(f"arrays_or_dataset must hold arrays [num_examples, ...], got the scalar {value!r}.")
    return tensor


def _from_dataset(dataset: tf.data.Dataset) -> Any:
    import tensorflow as tf

    leaves = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in leaves):
        raise ValueError(f"The dataset must have dense tensors as elements, got {dataset.element_spec}.")
    if all(spec.shape.rank and spec.shape[0] is None for spec in leaves):
        raise ValueError(
            f"The dataset must have single examples as elements, got batches ({dataset.element_spec}); "
            "pass dataset.unbatch()."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The dataset must be finite, got an infinite one; remove .repeat() or bound it with .take(n)."
        )
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
    return data


def _common_length(data: Any) -> int:
    import tensorflow as tf

    lengths = [int(leaf.shape[0]) for leaf in tf.nest.flatten(data)]
    if not lengths:
        raise ValueError(f"arrays_or_dataset must hold at least one array, got {data!r}.")
    if len(set(lengths)) > 1:
        raise ValueError(f"All arrays must have the same first dimension, got {lengths}.")
    if lengths[0] == 0:
        raise ValueError("The arrays must hold at least one example, got a first dimension of 0.")
    return lengths[0]


def _is_pair_or_triple(data: Any) -> bool:
    return isinstance(data, tuple) and not hasattr(data, "_fields") and len(data) in (2, 3)


def _pads_empty(empty_batches: str, data: Any, rate: float, num_examples: int, steps: int) -> bool:
    import tensorflow as tf

    weightable = _is_pair_or_triple(data)
    if empty_batches == "zero_weight" and not weightable:
        raise ValueError(
            'empty_batches="zero_weight" needs data of the form (x, y) or (x, y, sample_weight); use "keep".'
        )
    if empty_batches != "auto":
        return empty_batches == "zero_weight"
    log_never = num_examples * math.log1p(-rate) if rate < 1 else -math.inf
    likely = math.log(steps) + log_never > math.log(1e-9)
    return likely and weightable and any(leaf.shape.rank >= 3 for leaf in tf.nest.flatten(data[0]))


def _with_weights(data: Any, num_examples: int) -> Any:
    import tensorflow as tf

    return data if len(data) == 3 else (*data, tf.ones([num_examples], tf.keras.backend.floatx()))
