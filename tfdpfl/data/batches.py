"""Data sets for `fit`, whose batches are drawn as the accountant assumes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import tensorflow as tf

from tfdpfl import _blanks
from tfdpfl._types import Arrays, Dataset, Nest
from tfdpfl.accounting import _checks
from tfdpfl.accounting.arguments import shows_arguments
from tfdpfl.accounting.sampling import (
    B_MIN_SEP,
    CYCLIC_POISSON,
    FIXED_ORDER,
    POISSON,
    RANDOM_ALLOCATION,
    SHUFFLED,
    truncated_event_type,
)
from tfdpfl.data.declared import SamplingDeclaration, declare, keep_source
from tfdpfl.data.draws import Passes, Words
from tfdpfl.data.functions import check_apart
from tfdpfl.data.sources import Examples, examples_of
from tfdpfl.data.users import Users, users_of
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "PLANNED",
    "b_min_sep",
    "cyclic_poisson",
    "fixed_order",
    "poisson_batches",
    "random_allocation",
    "shuffled_batches",
]

_EMPTY_BATCHES = ("auto", "keep", "zero_weight")
# Two: TensorFlow's gradient of a strided 1×1 convolution crashes on a batch of one (oneDNN, 2.14 and 2.21).
_PLACEHOLDERS = 2
# Examples that are in memory twice while all are compared.
_HASHED = 4096
# Data sets that were made for workers: each of these makes the same ones, one after the other.
_NUMBERS = itertools.count()


class _UnitArguments(TypedDict, total=False):
    """How examples or users become rows of batches; see `poisson_batches`."""

    physical_batch_size: int | None
    user_ids: Arrays
    examples_per_user: int | None
    map_fn: Callable | None
    augment: Callable | None
    copies: int
    num_parallel_calls: int | None


class _SampledArguments(_UnitArguments, total=False):
    empty_batches: str


class _Units:
    """What is sampled: examples, or users with all that is theirs.

    Attributes:
        number: How many there are.
        rows: Consecutive rows of a batch that are one of them.
        name: "example" or "user".
    """

    def __init__(
        self,
        data: Arrays,
        physical_batch_size: object = None,
        user_ids: Arrays = None,
        examples_per_user: object = None,
        map_fn: Callable | None = None,
        augment: Callable | None = None,
        copies: int = 1,
        num_parallel_calls: int | None = None,
        empty_batches: str = "auto",
    ):
        self.examples = examples_of(data)
        self.users, self._each = _checked_users(user_ids, examples_per_user, self.examples)
        self.number = self.examples.number if self.users is None else self.users.number
        self.rows = self._each * _positive("copies", copies, "count the rows that an example becomes")
        self.name = "example" if self.users is None else "user"
        if empty_batches not in _EMPTY_BATCHES:
            raise ValueError(f"empty_batches must be one of {_EMPTY_BATCHES}, got {empty_batches!r}.")
        self._empty_batches, self.physical_batch_size = empty_batches, physical_batch_size
        self._pipeline = _Pipeline(self.examples, map_fn, num_parallel_calls, augment, copies)

    def examples_of(self, units: np.ndarray, words: Words) -> np.ndarray:
        """The numbers of the examples that stand for these units in a batch."""
        return units if self.users is None else self.users.some_of(units, self._each, words)

    def order(self, among: int | None = None) -> int:
        """A number that units in another order do not have; see `_order_of`."""
        of_users = [] if self.users is None else [self.users.rows, self.users.starts]
        return _order_of(self.examples, among) + sum(zlib.crc32(part.tobytes()) for part in of_users)

    def parts(self, expected: float) -> int:
        """Returns into how many physical batches one of so many units is cut."""
        if self.physical_batch_size is None:
            return 1
        room = _positive("physical_batch_size", self.physical_batch_size, "count the rows that fit in memory")
        return max(math.ceil(expected * self.rows / room - 1e-9), 1)

    def batches(
        self, draw: Callable, declaration: SamplingDeclaration, strategy: tf.distribute.Strategy | None = None
    ) -> Dataset:
        """The data set of logical batches that ``draw`` gives, in each of which a unit is with one chance."""
        steps, truncated = declaration.steps, declaration.truncated_batch_size
        rate = declaration.expected_batch_size / self.number
        parts = self.parts(declaration.expected_batch_size)
        replicas = 1 if strategy is None else strategy.num_replicas_in_sync

        def cut(words: Words, worker: int = 0, workers: int = 1) -> Iterator[np.ndarray]:
            for drawn in draw(words) if workers == 1 else draw(words, worker, workers):
                for part in np.array_split(drawn, parts * replicas // workers):
                    yield self.examples_of(part, words)

        size: int | None = None
        least = 0
        if truncated is not None:
            size = least = -(-truncated // parts) * self.rows
        else:
            pieces = parts * replicas
            log_never = self.number * math.log1p(-rate) / pieces if rate < 1 else -math.inf
            if self._pipeline.fills_empty(self._empty_batches, math.log(steps * pieces) + log_never > math.log(1e-9)):
                least = -(-_PLACEHOLDERS // self.rows) * self.rows
        declaration = dataclasses.replace(
            declaration, physical_batches=parts, rows_per_unit=self.rows, unit=self.name, blanks=least > 0
        )
        if strategy is not None:
            declaration = dataclasses.replace(declaration, order=declaration.order or self.order(among=0))
            return _of_workers(strategy, self._pipeline, cut, steps * parts, least, declaration)
        batches = self._pipeline.dataset(Passes(cut, declaration.seed), steps * parts, least, size)
        self._pipeline.keep_source(batches, self.users)
        return declare(batches, declaration)


@shows_arguments(_SampledArguments, _Units)
def poisson_batches(
    arrays_or_dataset: Arrays,
    sampling_rate: float | None = None,
    steps: int | None = None,
    seed: int | None = None,
    *,
    expected_batch_size: float | None = None,
    truncated_batch_size: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    **of_units: Unpack[_SampledArguments],
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of Poisson-sampled batches, for `fit`.

        model.fit(poisson_batches((x, y), expected_batch_size=256, steps=200), epochs=10)

    It guarantees:

    * Every batch holds each unit (an example; a user, with ``user_ids``) with probability `sampling_rate`,
      independently of every other unit and batch. The batch size varies and can be 0.
    * The generator of the noise draws the batches, with a new key from the operating system for each pass.
    * Every pass over the dataset (every epoch of `fit`) draws `steps` new batches. Ten epochs of 200 are 2000 steps of
      the subsampled Gaussian mechanism. No epoch repeats the batches of an earlier one.
    * The batch dimension of `element_spec` is None, so a `tf.function` is traced once for all batch sizes. With
      ``truncated_batch_size`` all batches have one size.
    * `declared_sampling(dataset)` returns the `SamplingDeclaration`. A method such as `.map` or `.prefetch` drops it,
      so transform the data before, by ``map_fn``, or inside the model.
    * If the data are on disk, only the rows of the current batches are in memory.

    Pass `expected_batch_size=sampling_rate * num_examples` (or the number of users) to the DP optimizer, too. Otherwise
    it would divide the update by the size of the batch, which reveals how many examples there are.

    Args:
        arrays_or_dataset: The data: `x`, `(x, y)` or `(x, y, sample_weight)`, where each may be an array, a tuple, a
            list of arrays (it becomes a tuple) or a dict. Arrays `[num_examples, ...]` may be numpy, tensors, pandas or
            lists of numbers, which stay in memory. Or they are `np.memmap`, h5py's and other arrays on disk, which are
            read row by row. float64 arrays become Keras's `floatx`, as in `fit`. Or an object with `__len__` and
            `__getitem__(i)` that returns single examples (of grain, Hugging Face, your own); several threads call it.
            Or a finite `tf.data.Dataset` of *single* examples of equal shapes, which is read once into memory. Call
            `.unbatch()` on a batched one, because privacy protects each element.
        sampling_rate: Probability in (0, 1]. Pass exactly one of this and `expected_batch_size`.
        steps: Logical batches per pass, at least 1. Required.
        seed: None uses the entropy of the operating system. Privacy needs this, because there is no amplification
            against someone who can guess the batches. A seed repeats pass k of the dataset; it is for tests only.
        expected_batch_size: Mean batch size in (0, num_examples]; the rate is `expected_batch_size / num_examples`.
        physical_batch_size: About how many rows fit in memory. A batch is drawn once and cut into k physical batches,
            `k = ceil(expected rows / physical_batch_size)`, each with its share of the units to the nearest whole
            number. A pass has steps * k physical batches. Pass `gradient_accumulation_steps=k` to the optimizer
            (`declared_sampling(dataset).physical_batches`).
        truncated_batch_size: The size of all batches. Blank rows fill up a smaller draw (see ``empty_batches``), and a
            random subset stays of a larger one. Elements are `(x, y, sample_weight)`. Its ε needs dp-accounting 0.6. It
            is hardly larger than for Poisson sampling if this size is six √expected above the expected size.
        user_ids: An id for each example, or {user: numbers of their examples}. Users are then sampled and protected.
        examples_per_user: With ``user_ids``, the number of rows of a user in a batch. They are random examples of the
            user, one after the other. If a user has fewer examples, they are repeated. Pass the same number as
            `rows_per_unit` to the optimizer.
        map_fn: A function that makes one example from one stored element (decoding, a random crop), as for
            `tf.data.Dataset.map`.
        augment: The same after ``map_fn``, called for each copy of an example separately.
        copies: The number of rows that each example becomes, one after the other, each augmented by itself. Pass the
            same number as `rows_per_unit` to the optimizer, which clips their mean gradient once (De et al. 2022,
            arXiv:2204.13650).
        num_parallel_calls: For reading and mapping. None lets tf.data choose.
        empty_batches: The replacement for a draw without examples. With oneDNN (the default on CPUs) TensorFlow's
            convolutions fail on a batch of size 0, and its max pooling aborts the process.
            `"keep"`: a batch of size 0.
            `"zero_weight"`: elements are `(x, y, sample_weight)`, weights of 1 where the data have none, and an empty
            draw is replaced by blank rows: zeros of weight -0.0. The private optimizers recognize this weight and leave
            the rows out, so ε and the mean update stay the same. In a step of your own, pass the weights to the
            tf.function that computes the loss. Keras refuses `class_weight` together with it: pass
            `(x, y, weight_of_class[y])`.
            `"auto"`: `"zero_weight"` if there is a `y`, some `x` has three dimensions or more (images, series) and a
            pass has an empty batch with probability over 1e-9; otherwise `"keep"`.
        strategy: The `tf.distribute.MultiWorkerMirroredStrategy` that trains. Pass the same data in the same order on
            each worker. Worker i of n then draws from every n-th example, beginning with the i-th, at the same rate. So
            all workers together draw a Poisson sample of all examples, and no example is on two workers. The result is
            an endless `tf.distribute.DistributedDataset`, so pass ``steps_per_epoch`` to `fit`: with physical batches
            as many as a pass has, or a multiple.

    Raises:
        ValueError: an argument is out of its range, the arrays differ in length or hold nothing, a user has no
            examples, or the dataset is infinite, batched or of unequal shapes.
        PrivacyError: no ε is known for this sampling: examples with rates of their own, or truncation with an older
            dp-accounting.

    Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", section 3.1; Mironov et al. 2019, "Rényi
    Differential Privacy of the Sampled Gaussian Mechanism", for add/remove of an example.
    """
    steps = _checked_steps(steps)
    units = _Units(arrays_or_dataset, **of_units)
    rate = _checked_rate(sampling_rate, expected_batch_size, units.number)
    if truncated_batch_size is not None:
        if strategy is not None:
            raise ValueError(
                f"truncated_batch_size={truncated_batch_size} together with strategy: each worker draws its own part "
                "of a batch, and the others do not know its size. Leave it out."
            )
        mend = "use six √expected more than the expected size"
        truncated_batch_size = _positive("truncated_batch_size", truncated_batch_size, mend)
        truncated_event_type(truncated_batch_size)

    def draw(words: Words, worker: int = 0, workers: int = 1) -> Iterator[np.ndarray]:
        for _ in range(steps):
            drawn = worker + workers * words.each(len(range(worker, units.number, workers)), rate)
            if truncated_batch_size is not None and len(drawn) > truncated_batch_size:
                drawn = words.some(drawn, truncated_batch_size)
            yield drawn

    declaration = SamplingDeclaration(
        POISSON.name, rate, units.number, steps, seed, truncated_batch_size=truncated_batch_size
    )
    return units.batches(draw, declaration, strategy)


@shows_arguments(_SampledArguments, _Units)
def random_allocation(
    arrays_or_dataset: Arrays,
    *,
    expected_batch_size: float,
    num_selected: int = 1,
    seed: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    **of_units: Unpack[_SampledArguments],
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of batches for `fit` that have each example once an epoch, in a step of its own
    choice.

        batches = random_allocation((x, y), expected_batch_size=256)
        model.fit(batches, epochs=10)

    Guarantees:

    * Each unit (an example; a user, with ``user_ids``) is in exactly ``num_selected`` batches of a pass. Which ones is
      chosen evenly, independently of all other units and of all other passes. The batch size varies and can be 0.
    * A pass has num_selected · ⌈number of units / expected_batch_size⌉ logical batches, which is public.
    * The draws, the shapes and the declaration are those of `poisson_batches`.

    ε counts passes: each costs as ``num_selected`` passes of which each has a unit once. One that was begun costs
    as much as a whole one. So leave ``steps_per_epoch`` out of `fit`, and end a training with a pass.

    Guarantee:
        Neighbours differ in the presence of one unit, or one unit's contribution is blanked
        (``"add_or_remove_one"``, ``"zero_out"``): no other unit moves. Sensitivity C. `tfdpfl.accounting.allocation`
        has the proof for Gaussian noise. With ``num_selected`` > 1 the steps can be dealt at random to so many
        groups of equal size with one use of a unit in each (Feldman & Shenfeld 2025, arXiv:2502.08202).

    Args:
        expected_batch_size: The mean batch size, in (0, number of units]. It is rounded down to one that makes a whole
            number of batches: `declared_sampling(dataset).expected_batch_size`, the optimizer's denominator.
        num_selected: In how many batches of a pass each unit is.
        arrays_or_dataset: As those that follow, see `poisson_batches`.
        strategy: As for `poisson_batches`. Pass a multiple of `declared_sampling(dataset).steps` to `fit` as
            ``steps_per_epoch``.

    Raises:
        ValueError: as `poisson_batches`.
    """
    each = _positive("num_selected", num_selected, "count the batches of a pass that have an example")
    units = _Units(arrays_or_dataset, **of_units)
    size = _checked_rate(None, expected_batch_size, units.number) * units.number
    steps = each * math.ceil(units.number / math.ceil(size - 1e-9))

    def draw(words: Words, worker: int = 0, workers: int = 1) -> Iterator[np.ndarray]:
        for drawn in words.allocated(len(range(worker, units.number, workers)), steps, each):
            yield worker + workers * drawn

    declaration = SamplingDeclaration(
        RANDOM_ALLOCATION.name, each / steps, units.number, steps, seed, num_selected=each
    )
    return units.batches(draw, declaration, strategy)


def _of_workers(
    strategy: tf.distribute.Strategy, pipeline: _Pipeline, draw: Callable, steps: int, least: int,
    declaration: SamplingDeclaration,
) -> Dataset:  # fmt: skip
    """Each worker's own draws, one batch for each of its replicas after the other, without end."""
    found = []

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        worker, workers = context.input_pipeline_id, context.num_input_pipelines
        found.append(workers)
        seed = None if declaration.seed is None else (declaration.seed, worker)
        passes = Passes(lambda words: draw(words, worker, workers), seed)
        return pipeline.dataset(passes, steps * context.num_replicas_in_sync // workers, least).repeat()

    batches = strategy.distribute_datasets_from_function(share)
    return declare(batches, dataclasses.replace(declaration, workers=found[0]))


def shuffled_batches(
    arrays_or_dataset: Arrays,
    batch_size: int,
    seed: int | None = None,
    *,
    map_fn: Callable | None = None,
    num_parallel_calls: int | None = None,
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` that shuffles the data in every pass, as `fit` does with arrays.

    It also shuffles data that `fit` could not shuffle. ε is computed without amplification.

    Args:
        arrays_or_dataset: The data. Arguments that are not listed here: see `poisson_batches`.
        batch_size: Examples in a batch; the last of a pass may have fewer.

    Raises:
        ValueError: as `poisson_batches`.
    """
    examples = examples_of(arrays_or_dataset)
    size, steps = _batches_of(batch_size, examples.number)

    def draw(words: Words) -> Iterator[np.ndarray]:
        order = words.order(examples.number)
        yield from (order[at : at + size] for at in range(0, len(order), size))

    dataset = _Pipeline(examples, map_fn, num_parallel_calls).dataset(Passes(draw, seed), steps)
    return declare(dataset, SamplingDeclaration(SHUFFLED.name, size / examples.number, examples.number, steps, seed))


@shows_arguments(_UnitArguments, _Units)
def fixed_order(
    arrays_or_dataset: Arrays,
    batch_size: int,
    *,
    max_participations: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    **of_units: Unpack[_UnitArguments],
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of the data in their own order, the same in every pass, for correlated noise.

    It guarantees that each unit (an example; a user, with ``user_ids``) is in one batch of a pass, and always in the
    same one. So two participations are as many steps apart as a pass has batches (`min_separation`), if passes are
    whole. If the order of the data has a meaning, shuffle them once before.

    Users come in the order of their ids. So the examples that a user has move no other user to another batch.
    Neighbours have the same ids.

    Two data sets keep that distance from one `fit` to the next if all their examples are the same. Data on disk are not
    read to compare them: use one data set for every `fit`.

    Args:
        arrays_or_dataset: The data. Arguments that are not listed here: see `poisson_batches`.
        batch_size: Units in a batch; the last batch of a pass may have fewer.
        max_participations: The largest number of passes with one optimizer. More passes are refused. None leaves the
            number to the length of the training.

    Raises:
        ValueError: as `poisson_batches`; or the last batch of a pass cannot be cut into as many parts as the others.
    """
    units = _Units(arrays_or_dataset, empty_batches="keep", **of_units)
    number = units.number
    size, steps = _batches_of(batch_size, number, units.name)
    remedy = "count the passes, or leave it out"
    max_participations = _checks.optional(_positive, "max_participations", max_participations, remedy)
    last, parts = number % size or size, units.parts(size)
    parts *= 1 if strategy is None else strategy.num_replicas_in_sync
    if last < parts:
        raise ValueError(
            f"physical_batch_size={units.physical_batch_size} cuts each batch into {parts} parts, but the last batch "
            f"of a pass has {last} {units.name}s: take a larger physical_batch_size, or another batch_size."
            if strategy is None
            else f"Each batch is cut into {parts} parts for the replicas, but the last batch of a pass has {last} "
            f"{units.name}s: take another batch_size."
        )

    def draw(words: Words, worker: int = 0, workers: int = 1) -> Iterator[np.ndarray]:
        for at in range(0, number, size):
            batch = np.arange(at, min(at + size, number))
            yield batch[batch % workers == worker]

    declaration = SamplingDeclaration(
        FIXED_ORDER.name, size / number, number, steps, min_separation=steps, max_participations=max_participations,
        order=units.order(among=None if strategy is None else next(_NUMBERS)),
    )  # fmt: skip
    return units.batches(draw, declaration, strategy)


def _order_of(examples: Examples, among: int | None) -> int:
    """Returns a number above 1 that data in another order do not have: made from all that are in memory.

    Of others it is made from 64, and from ``among``, which workers have in common: each opens the data for itself. None
    makes it of this object alone."""
    number, found = examples.number, hashlib.sha256()
    if examples.in_memory:
        pieces = [np.arange(at, min(at + _HASHED, number)) for at in range(0, number, _HASHED)]
    else:
        pieces = [np.unique(np.linspace(0, number - 1, 64).astype(np.int64))]
        found.update(secrets.token_bytes(16) if among is None else str(among).encode())
    with tf.device("CPU:0"):
        for piece in pieces:
            for leaf in tf.nest.flatten(examples.take(tf.constant(piece))):
                found.update(tf.io.serialize_tensor(leaf).numpy())
    return 2 + int.from_bytes(found.digest()[:6], "big")


@shows_arguments(_SampledArguments, _Units)
def cyclic_poisson(
    arrays_or_dataset: Arrays,
    steps: int,
    seed: int | None = None,
    *,
    groups: int,
    expected_batch_size: float,
    max_participations: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    **of_units: Unpack[_SampledArguments],
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of Poisson samples from one group of units after the other.

    Use it for correlated noise with as many bands as there are groups (Choquette-Choo et al. 2023, arXiv:2306.08153).

    It guarantees that each unit (an example; a user, with ``user_ids``) joins one group at random, once, and
    independently of all others. (Groups of equal size would reveal one unit more.) At step t an independent coin
    decides for each unit of group ``t mod groups``. So two participations are ``groups`` steps or more apart, if passes
    are whole.

    Args:
        arrays_or_dataset: The data. Arguments that are not listed here: see `poisson_batches`.
        steps: Batches in a pass, a multiple of ``groups``.
        groups: The number of groups.
        expected_batch_size: Mean number of units in a batch, at most the number of units / groups. The probability of
            the coin is ``expected_batch_size * groups`` over the number of units.
        max_participations: How often a unit may take part with one optimizer. More is refused. None leaves it to
            the length of the training.

    Raises:
        ValueError: as `poisson_batches`; or passes would not be whole rounds.
    """
    steps = _checked_steps(steps)
    groups = _positive("groups", groups, "count the groups that the units are assigned to")
    if steps % groups:
        raise ValueError(
            f"steps={steps} is not a multiple of groups={groups}, so some groups would begin a new pass too early: use "
            f"{max(steps // groups, 1) * groups}."
        )
    remedy = "count the uses of a unit, or leave it out"
    max_participations = _checks.optional(_positive, "max_participations", max_participations, remedy)
    units = _Units(arrays_or_dataset, **of_units)
    number = units.number
    size = _real("expected_batch_size", expected_batch_size)
    if not 0 < size * groups <= number:
        raise ValueError(
            f"expected_batch_size must be in (0, {number / groups:g}], the mean size of a group, got "
            f"{expected_batch_size!r}."
        )
    rate = size * groups / number
    group_of = Words(seed)(number) % np.uint64(groups)
    members = [np.flatnonzero(group_of == g) for g in range(groups)]

    def draw(words: Words, worker: int = 0, workers: int = 1) -> Iterator[np.ndarray]:
        own = [group[group % workers == worker] for group in members]
        for step in range(steps):
            group = own[step % groups]
            yield group[words.each(len(group), rate)]

    declaration = SamplingDeclaration(
        CYCLIC_POISSON.name, rate, number, steps, seed, min_separation=groups, max_participations=max_participations
    )
    return units.batches(draw, declaration, strategy)


@shows_arguments(_SampledArguments, _Units)
def b_min_sep(
    arrays_or_dataset: Arrays,
    steps: int,
    seed: int | None = None,
    *,
    min_separation: int,
    expected_batch_size: int,
    **of_units: Unpack[_SampledArguments],
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of Poisson samples in which a unit rests after each use, for banded noise.

        batches = tfdpfl.data.b_min_sep((x, y), steps=640, min_separation=8, expected_batch_size=256)
        noise = tfdpfl.noise.Banded(bands=8, min_separation=8, max_participations=1, num_steps=640)

    At equal noise its ε is smaller than that of `cyclic_poisson`, because a unit may be in any step (Dong & Ganesh
    2026, arXiv:2602.09338). ε is an upper confidence bound from many simulated trainings, with the proof in
    `tfdpfl.accounting.monte_carlo`. So one ε takes seconds to minutes.

    It guarantees that each unit (an example; a user, with ``user_ids``) rests for ``min_separation - 1`` steps after
    each step that has it. Then an independent coin decides for it in each step. At the start a unit rests for a random
    number of steps, so that all steps have the same mean size. A pass is a whole training: pass ``epochs=1`` to `fit`.

    Args:
        arrays_or_dataset: The data. Arguments that are not listed here: see `poisson_batches`.
        steps: Batches of the training.
        min_separation: Fewest steps from one use of a unit to its next.
        expected_batch_size: Mean number of units in a batch, a whole number, at most the number of units /
            min_separation. The probability of the coin follows from it.

    Returns:
        The batches. `declared_sampling` of them has the probability of the coin as ``sampling_rate``.

    Raises:
        ValueError: as `poisson_batches`.

    Guarantee:
        Neighbours differ in the presence of one unit, or one unit's contribution is blanked: no other unit moves.
        Sensitivity C in each of its steps.
    """
    steps = _checked_steps(steps)
    apart = _positive("min_separation", min_separation, "count the steps from one use of a unit to its next")
    size = _positive("expected_batch_size", expected_batch_size, "give the mean number of units in a batch")
    units = _Units(arrays_or_dataset, **of_units)
    number = units.number
    if size * apart > number:
        raise ValueError(
            f"expected_batch_size={size} is more than {number // apart}, the number of units over min_separation: so "
            "many do not rest. Use a smaller one."
        )
    rate = B_MIN_SEP.rate(size, number, apart)

    def draw(words: Words) -> Iterator[np.ndarray]:
        return words.separated(number, steps, rate, apart)

    declaration = SamplingDeclaration(B_MIN_SEP.name, rate, number, steps, seed, min_separation=apart)
    return units.batches(draw, declaration)


# What `tfdpfl.plan` can plan: the function that draws, and its arguments for batches of this size and, where their
# number is free, so many in a pass.
PLANNED: dict[str, tuple[Callable[..., tf.data.Dataset], Callable[[int, int], dict[str, int]]]] = {
    POISSON.name: (poisson_batches, lambda size, steps: {"expected_batch_size": size, "steps": steps}),
    RANDOM_ALLOCATION.name: (random_allocation, lambda size, _: {"expected_batch_size": size}),
    SHUFFLED.name: (shuffled_batches, lambda size, _: {"batch_size": size}),
    B_MIN_SEP.name: (b_min_sep, lambda size, steps: {"expected_batch_size": size, "steps": steps}),
}


class _Pipeline:
    """How drawn numbers become batches."""

    def __init__(
        self,
        examples: Examples,
        map_fn: Callable | None,
        num_parallel_calls: int | None,
        augment: Callable | None = None,
        copies: int = 1,
    ):
        self._examples, self._copies = examples, copies
        for name, function in (("map_fn", map_fn), ("augment", augment)):
            if function is not None and not callable(function):
                raise ValueError(f"{name}={function!r:.99} must be a function of one example, as Dataset.map takes it.")
        self._functions = (map_fn, augment)
        remedy = "count the calls that run at once, or leave it out"
        parallel = _checks.optional(_positive, "num_parallel_calls", num_parallel_calls, remedy)
        self._parallel = parallel or tf.data.AUTOTUNE
        self._spec = tf.data.Dataset.from_tensors(0).map(lambda _: self._blank(examples.spec))
        for function in self._functions:
            self._spec = self._spec if function is None else self._spec.map(function)
        check_apart(self._spec, examples.number)
        self._spec = self._spec.element_spec
        self._weighted = _is_pair_or_triple(self._spec) and len(self._spec) == 3
        weights = tf.nest.flatten(self._spec[2]) if self._weighted else []
        self._weight_shapes = [s.shape for s in weights if s.shape.rank != 0 or s.dtype in (tf.string, tf.bool)]

    @staticmethod
    def _blank(spec: Nest) -> Nest:
        return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), spec)

    def fills_empty(self, empty_batches: str, likely: bool) -> bool:
        """Whether all-zero examples of weight 0 are to stand for an empty draw."""
        if empty_batches == "zero_weight":
            self._check_weightable('empty_batches="zero_weight"', 'use "keep"')
        if empty_batches != "auto":
            return empty_batches == "zero_weight"
        # Of what has no static shape it is not known: it may be an image.
        images = _is_pair_or_triple(self._spec) and any(
            s.shape.rank is None or s.shape.rank >= 2 for s in tf.nest.flatten(self._spec[0])
        )
        return likely and images and not self._weight_shapes

    def _check_weightable(self, asked: str, mend: str) -> None:
        if self._weight_shapes:
            raise ValueError(
                f"{asked} fills batches up with blank rows, each marked by one sample_weight, but an example's "
                f"sample_weight has the shape {self._weight_shapes[0]}. Give each example one weight (and weight its "
                f"positions in the loss); or {mend}."
            )
        if not _is_pair_or_triple(self._spec):
            raise ValueError(f"{asked} needs data of the form (x, y) or (x, y, sample_weight); {mend}.")

    def dataset(self, draws: Callable[[], Iterator], length: int, least: int = 0, size: int | None = None) -> Dataset:
        """Batches of what ``draws`` gives, ``length`` of them in a pass.

        Args:
            least: how many rows stand for an empty draw; with ``size``, how many all have. They are blank, of weight 0.
            size: the static number of rows; None where it varies.
        """
        if size is not None:
            self._check_weightable("truncated_batch_size", "leave it out")
        if least:
            _blanks.announce()
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False  # it would copy the data once more
        dataset = tf.data.Dataset.from_generator(draws, output_signature=tf.TensorSpec([None], tf.int64))
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
        slow = not self._examples.in_memory or any(self._functions)
        dataset = dataset.map(
            lambda numbers: self._batch(self._examples.take(numbers), least, size),
            num_parallel_calls=self._parallel if slow else None,
        )
        dataset = dataset.with_options(options).prefetch(2)
        self.keep_source(dataset)
        return dataset

    def keep_source(self, dataset: Dataset, users: Users | None = None) -> None:
        keep_source(dataset, self._examples, self._functions[0], users)

    def _batch(self, rows: Arrays, least: int, size: int | None) -> Nest:
        count = tf.shape(tf.nest.flatten(rows)[0])[0]
        total = count * self._copies
        mapped = self._mapped(rows, count)
        if least:
            more = least - total if size is not None else tf.where(total == 0, least, 0)
            mapped = self._filled(mapped, total, more)
        return tf.nest.map_structure(lambda leaf: tf.ensure_shape(leaf, [size, *leaf.shape[1:]]), mapped)

    def _filled(self, batch: Nest, total: tf.Tensor, more: tf.Tensor) -> Nest:
        """(x, y, weights) of a batch of so many rows with so many blank ones behind them."""
        floatx = tf.as_dtype(tf.keras.backend.floatx())
        x, y, weights = batch if self._weighted else (*batch, tf.ones([total], floatx))

        def zeros(leaf: tf.Tensor) -> tf.Tensor:
            leaf = _blanks.unmarked(leaf) if _blanks.may_mark(leaf) else leaf
            return tf.concat([leaf, tf.zeros(tf.concat([[more], tf.shape(leaf)[1:]], 0), leaf.dtype)], 0)

        def marks(leaf: tf.Tensor) -> tf.Tensor:
            leaf = leaf if leaf.dtype.is_floating else tf.cast(leaf, floatx)
            return tf.concat([_blanks.unmarked(leaf), _blanks.weights(more, leaf.dtype)], 0)

        return *tf.nest.map_structure(zeros, (x, y)), tf.nest.map_structure(marks, weights)

    def _mapped(self, rows: Arrays, count: tf.Tensor) -> Nest:
        map_fn, augment = self._functions
        if map_fn is None and augment is None:
            return self._copied(rows)

        def blank() -> Nest:
            return tf.nest.map_structure(lambda s: tf.zeros([0, *(n or 0 for n in s.shape)], s.dtype), self._spec)

        def mapped() -> Nest:
            each = tf.data.Dataset.from_tensor_slices(rows)
            if map_fn is not None:
                each = each.map(map_fn)
            if self._copies > 1:
                one = lambda *e: tf.data.Dataset.from_tensors(e[0] if len(e) == 1 else e)  # noqa: E731
                each = each.flat_map(lambda *e: one(*e).repeat(self._copies))
            if augment is not None:
                each = each.map(augment)
            return each.batch(tf.cast(count * self._copies, tf.int64), drop_remainder=True).get_single_element()

        batch = tf.cond(count > 0, mapped, blank)
        return tf.nest.map_structure(lambda t, s: tf.ensure_shape(t, [None, *s.shape]), batch, self._spec)

    def _copied(self, rows: Arrays) -> Nest:
        if self._copies == 1:
            return rows
        return tf.nest.map_structure(lambda leaf: tf.repeat(leaf, self._copies, axis=0), rows)


def _is_pair_or_triple(spec: Nest) -> bool:
    return isinstance(spec, tuple) and not hasattr(spec, "_fields") and len(spec) in (2, 3)


# -- arguments -------------------------------------------------------------------------------------------------


def _checked_users(user_ids: Arrays, examples_per_user: object, examples: Examples) -> tuple[Users | None, int]:
    if user_ids is None:
        if examples_per_user is not None:
            raise ValueError(f"examples_per_user={examples_per_user!r} needs user_ids, an id for each example.")
        return None, 1
    if examples_per_user is None:
        raise ValueError(
            "user_ids needs examples_per_user: give the number of examples of each user in a batch, for example 4."
        )
    rows = _positive("examples_per_user", examples_per_user, "count the rows of a user in a batch")
    return users_of(user_ids, examples.number), rows


def _batches_of(batch_size: object, number: int, unit: str = "example") -> tuple[int, int]:
    size = _positive("batch_size", batch_size, f"count the {unit}s of a batch")
    if size > number:
        raise ValueError(f"batch_size={size} is more than the {number} {unit}s.")
    return size, -(-number // size)


def _checked_steps(steps: object) -> int:
    return _positive("steps", steps, "count the batches of a pass (an epoch of fit)")


def _positive(name: str, value: object, remedy: str) -> int:
    return _checks.whole(name, value, 1, remedy)


def _checked_rate(sampling_rate: Arrays, expected_batch_size: object, num_examples: int) -> float:
    if np.ndim(sampling_rate):
        raise PrivacyError(
            f"sampling_rate must be a number, got a {type(sampling_rate).__name__}. No ε is known for a separate rate "
            "of each example (weighted or class-balanced sampling): weight the loss by sample_weight instead. If you "
            "meant data, give all arrays as one tuple: poisson_batches((x, y), ...)."
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
            f"expected_batch_size must be in (0, {num_examples}], the number of examples, got {expected_batch_size!r}."
        )
    return size / num_examples


def _real(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, got {value!r}.") from error
