"""Declarations of the sampling of a data set, on which an accountant may rely."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import tensorflow as tf

from tfdpfl._types import Arrays, Dataset, Nest
from tfdpfl.accounting.sampling import SCHEMES, SamplingScheme

__all__ = [
    "SHUFFLES",
    "SamplingDeclaration",
    "ancestors",
    "declare",
    "declared_sampling",
    "inputs_of",
    "keep_source",
    "made_by",
    "made_from",
    "name_of",
    "notes_of",
    "passed_through",
    "repeats",
    "source_of",
    "transformed_by",
]

_ATTRIBUTE = "tfdpfl_sampling"
_SOURCE = "tfdpfl_source"
# The words in the names of tf.data's classes, each by itself: a take is no takewhile, and an unbatch no batch.
_TRANSFORMATION = re.compile(
    "assertcardinality|batch|cache|concatenate|directed|filter|flatmap|groupby|ignoreerrors|interleave|map|model|"
    "options|padded|prefetch|random|range|repeat|save|scan|shard|shuffle|skip|snapshot|takewhile|take|tensorslice|"
    "tensor|unbatch|unique|window|zip"
)
SHUFFLES = ("shuffle",)


@dataclasses.dataclass(frozen=True)
class SamplingDeclaration:
    """How the batches of a dataset are drawn: what an accountant may rely on.

    A unit is what privacy protects: an example, or a user with all that is theirs.

    Attributes:
        kind: how units come into a logical batch, which is the batch of one update:
            `"poisson"`: each with probability `sampling_rate`, independently of all else.
            `"cyclic_poisson"`: each belongs to one of `min_separation` groups, assigned independently and uniformly;
            at step t group `t mod min_separation` is sampled as above.
            `"b_min_sep"`: each rests for `min_separation` - 1 steps after one that has it; else as `"poisson"`.
            `"random_allocation"`: each in `num_selected` batches of a pass, chosen evenly and independently.
            `"shuffle"`: each in one batch of a pass.
            `"fixed_order"`: the same, and every pass has the same batches in the same order.
        sampling_rate: that probability; for the last two, the batch size over `num_examples`.
        num_examples: how many units are sampled.
        steps: logical batches in one pass over the dataset (one epoch of `fit`).
        seed: the public seed that the batches come from; None if they come from the system's entropy.
        physical_batches: into how many batches of the dataset each logical batch is cut. They hold each unit once, and
            belong into one update together.
        truncated_batch_size: of a logical batch with more units a uniform subset of so many stays; None for no bound.
        rows_per_unit: consecutive rows of a batch that are one unit.
        unit: "example" or "user".
        min_separation: steps from one participation of a unit to its next, at least, while passes are whole.
        max_participations: how often a unit may take part in all; None if the data set sets no bound.
        num_selected: in how many logical batches of a pass each unit is, where that is fixed.
        workers: among how many processes the examples are shared out, each of which draws from its own share.
        blanks: whether batches may be filled up with blank rows, which are no examples (`tfdpfl._blanks`).
        order: of `"fixed_order"`, and where `workers` is above 1, a number made from the data, which tells whether
            another data set comes in the same order. Not private; it is kept in memory alone.
    """

    kind: str
    sampling_rate: float
    num_examples: int
    steps: int
    seed: int | None = None
    physical_batches: int = 1
    truncated_batch_size: int | None = None
    rows_per_unit: int = 1
    unit: str = "example"
    min_separation: int = 1
    max_participations: int | None = None
    num_selected: int = 1
    workers: int = 1
    blanks: bool = False
    order: int | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def scheme(self) -> SamplingScheme:
        """The kind of sampling as an object that knows what follows from it."""
        return SCHEMES[self.kind]

    @property
    def draws_logical_batches(self) -> bool:
        """Whether a logical batch is drawn as a whole, so that nothing but its own batches belongs into its update."""
        return self.physical_batches > 1 or self.scheme.independent

    @property
    def expected_batch_size(self) -> float:
        """The mean number of units in a logical batch (before it is truncated); the denominator for a DP optimizer's
        `expected_batch_size`."""
        return self.scheme.mean_share(self.sampling_rate, self.min_separation) * self.num_examples

    @property
    def priced_batch_size(self) -> int:
        """A whole batch size at or above the expected one: a higher rate costs no less."""
        return max(min(math.ceil(self.expected_batch_size - 1e-9), self.num_examples), 1)


def declare(dataset: Dataset, declaration: SamplingDeclaration) -> Dataset:
    """Lets a data set declare its sampling, and returns it."""
    setattr(dataset, _ATTRIBUTE, declaration)
    return dataset


def declared_sampling(dataset: Dataset) -> SamplingDeclaration | None:
    """Returns what `dataset` declares about its sampling, or None where it declares nothing.

    The declaration belongs to the very object that `poisson_batches` returned. A dataset made from it by
    `.map`, `.batch`, `.take` and the like declares nothing, since such a step may change what was promised.
    """
    return getattr(dataset, _ATTRIBUTE, None)


def keep_source(dataset: Dataset, examples: Nest, map_fn: Callable | None, users: Arrays = None) -> None:
    """Lets a data set know what it draws from: its examples, what is made of each, and whose they are."""
    setattr(dataset, _SOURCE, (examples, map_fn, users))


def source_of(dataset: Dataset) -> tuple[Nest, Callable | None, Arrays] | None:
    """Returns what `keep_source` was told of a data set, or None."""
    return getattr(dataset, _SOURCE, None)


def notes_of(dataset: Dataset) -> list[str]:
    """Returns what a statement has to say of a data set's users, as of owners who share examples."""
    note = getattr((source_of(dataset) or (None,))[-1], "note", None)
    return [] if note is None else [note]


def inputs_of(dataset: Dataset) -> list[Dataset]:
    """Returns the data sets that a transformation made `dataset` from; none of one that declares its sampling."""
    if declared_sampling(dataset) is not None or _counts(dataset):
        return []
    # What tf.compat.v1 made is in a wrapper, which passes over the transformation that it holds.
    return [dataset._dataset] if hasattr(dataset, "_dataset") else getattr(dataset, "_inputs", list)()


def _counts(dataset: Dataset) -> bool:
    """Whether `tf.data.Dataset.counter` made a data set: it goes through one zero that is repeated."""
    path = [dataset]
    for name in ("scan", "repeat"):
        if made_by(path[-1], (name,)) is None or not hasattr(path[-1], "_input_dataset"):
            return False
        path.append(path[-1]._input_dataset)
    return type(path[-1]).__name__.strip("_") == "TensorDataset" and path[-1].element_spec.shape == ()


def made_from(dataset: Dataset) -> SamplingDeclaration | None:
    """Returns what the data set declares that `dataset` was made from, however many steps ago."""
    return declared_sampling(dataset) or next(filter(None, map(made_from, inputs_of(dataset))), None)


def transformed_by(dataset: Dataset, harmless: tuple[str, ...]) -> str | None:
    """The name of the nearest transformation behind declared batches that is none of the harmless ones, or None."""
    while inputs := inputs_of(dataset):
        if made_by(dataset, harmless) is None:
            return name_of(dataset).removesuffix("Dataset")
        dataset = next((i for i in inputs if made_from(i) is not None), None)
    return None


def made_by(dataset: Dataset, names: tuple[str, ...]) -> str | None:
    """Which of the named transformations (as in "cache") made a data set, in its last step."""
    words = _TRANSFORMATION.findall(type(dataset).__name__.lower())
    assert all(map(_TRANSFORMATION.fullmatch, names)), names
    return next((name for name in names if name in words), None)


def name_of(dataset: Dataset) -> str:
    """Returns the name of a data set's class, for errors."""
    return type(dataset).__name__.strip("_")


def passed_through(dataset: Dataset, names: tuple[str, ...]) -> str | None:
    """Which of the named transformations made a data set, however many steps ago; of Poisson batches those behind the
    draw."""
    return next(filter(None, (made_by(each, names) for each in ancestors(dataset))), None)


def repeats(dataset: Dataset) -> bool:
    """Returns whether a data set was made with ``repeat``, as far as it shows."""
    return any(made_by(each, ("repeat",)) and int(getattr(each, "_count", -1)) != 1 for each in ancestors(dataset))


def ancestors(dataset: Dataset, end: Dataset = None) -> list[Dataset]:
    """Returns the data set and all that it was made from, down to ``end``, which is not among them. It leaves out one
    element that goes with every element of others, as `timeseries_dataset_from_array` makes it."""
    if dataset is end:
        return []
    inputs = [each for each in inputs_of(dataset) if not _goes_with_all(dataset, each)]
    return [dataset, *(found for each in inputs for found in ancestors(each, end))]


def _goes_with_all(dataset: Dataset, each: Dataset) -> bool:
    """Whether a data set ends, and one of those that it is zipped from is a single element, repeated without end."""
    repeated = made_by(dataset, ("zip",)) and made_by(each, ("repeat",))
    if not repeated or not all(made_by(one, ("tensor",)) for one in inputs_of(each)):
        return False
    with tf.init_scope():  # it may be asked where a function is traced
        return int(dataset.cardinality()) >= 0 > int(each.cardinality())
