"""How the batches of a `fit` are drawn: what the data say of themselves, and whether what is said of them agrees."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdpfl._types import Arrays, Dataset, Optimizer
from tfdpfl.accounting.sampling import EVERY_BATCH, FIXED_SIZE, SCHEMES, SHUFFLED, SamplingScheme
from tfdpfl.callbacks._fits import Call, Data, is_stream
from tfdpfl.callbacks._fits import length as length_of
from tfdpfl.callbacks._streams import check_stream
from tfdpfl.data import SamplingDeclaration, declared_sampling, made_from, passed_through
from tfdpfl.data.declared import SHUFFLES, ancestors, made_by, name_of
from tfdpfl.data.functions import check_apart, out_of_order, shuffles_anew
from tfdpfl.data.sources import of_batches
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import _replicas
from tfdpfl.optimizers._filled import check_kept

__all__ = ["Sampling"]

_CHANGES_SAMPLES = {
    "flatmap": "flat_map", "interleave": "interleave", "filter": "filter", "takewhile": "take_while",
    "unique": "unique", "ignoreerrors": "ignore_errors", "groupby": "group_by_window",
}  # fmt: skip
_ONE_BATCH = ("repeat", "batch", "take", "map", "prefetch", "options", "assertcardinality", "model")
_AGAIN = ("cache", "snapshot", "save")


def _batches(dataset: Dataset) -> bool:
    return isinstance(dataset, tf.data.Dataset) and made_by(dataset, ("batch",)) is not None


def _drawn_anew(x: Dataset, size: int, number: int) -> bool:
    """Whether a data set is one batch that each pass draws anew from all examples, as in
    ``data.shuffle(n).take(b).batch(b).repeat()``."""
    path = ancestors(x)
    repeated = next((each for each in path if made_by(each, ("repeat",))), None)
    pass_ = x if repeated is None else repeated._inputs()[0]
    shuffle = next((each for each in path if made_by(each, SHUFFLES)), None)
    if shuffle is None or not shuffles_anew(shuffle):
        return False
    batched, behind = any(map(_batches, ancestors(pass_))), path[: path.index(shuffle)]
    all_ = int(shuffle._buffer_size) >= max(number, int(shuffle._inputs()[0].cardinality()))
    one = int(pass_.cardinality()) == (1 if batched else size)
    return all_ and one and all(made_by(each, _ONE_BATCH) for each in behind)


def _cardinality(x: Arrays) -> int:
    """How many batches a data set has, negative where it does not know."""
    return int(x.cardinality()) if hasattr(x, "element_spec") and hasattr(x, "cardinality") else -1


def _sizes(x: Arrays) -> set[int]:
    """The sizes of a data set's batches, as far as they are fixed."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(getattr(x, "element_spec", ()))]
    return {shape[0] for shape in shapes if shape is not None and shape.rank} - {None}


def _repeats(again: str, samples: str) -> PrivacyError:
    return PrivacyError(
        f"{again}() comes after {samples}: every epoch repeats the batches of the first one, and draws no new ones. "
        "Leave it out: tfdpfl.data.poisson_batches prefetches, and keeps the data in memory."
    )


class Sampling:
    """Compares what `PrivacyBudget` was told of the data with what `fit` was given.

    Args:
      said: the callback, with sampling, num_examples and batch_size, each of them None where nothing was said, and
        Keras's params of the fit.
      optimizer: the private one.
      data_number: the data set's, as the optimizer counts it.
      call: the arguments of `fit`.
    """

    def __init__(self, said: Any, optimizer: Optimizer, data_number: float, call: Call):
        self.sampling, self.num_examples, self.batch_size = said.sampling, said.num_examples, said.batch_size
        self._optimizer, self._data_number = optimizer, data_number
        self._call, self._kind = call, type(call.get("x")).__name__
        self._x: Arrays = call.get("x")
        self._steps_per_epoch, self._stream = call.get("steps_per_epoch"), is_stream(call)
        self._steps = said.params.get("steps")  # batches of an epoch, where Keras knows their number
        epochs = said.params.get("epochs")
        self._epochs = None if epochs is None else epochs - (call.get("initial_epoch") or 0)  # that are to come

    def describe(self) -> Data:
        """Returns num_examples, batch_size and sampling of the data that `fit` was given."""
        declared, length = declared_sampling(self._x), length_of(self._x)
        if length is None and self._call.get("batch_size") is not None:
            raise ValueError(
                f"batch_size={self._call['batch_size']} of fit has no effect, because the data come in batches. Leave "
                "it out, and give the batch size where the batches are made."
            )
        self._check_workers(declared)
        if declared is not None:
            self._check_uses(declared)
        if self._optimizer.noise is not None:
            self._check_bounded(declared)
        if declared is not None:
            return self._declared(declared)
        return self._stated() if length is None else self._arrays(length)

    def _check_workers(self, declared: SamplingDeclaration | None) -> None:
        workers = _replicas.workers()
        if (declared is not None and declared.workers != workers) or (declared is None and workers > 1):
            raise PrivacyError(
                f"Training runs on {workers} workers, and the data were made for "
                f"{'one' if declared is None or declared.workers == 1 else declared.workers}. Each worker shuffles and "
                "samples by itself, so a step may hold an example several times. Give fit "
                "tfdpfl.data.poisson_batches(..., strategy=strategy), which shares the examples out; for correlated "
                "noise fixed_order or cyclic_poisson."
            )
        if isinstance(self._x, tf.distribute.DistributedDataset) and declared is None:
            raise PrivacyError(
                f"A {self._kind} does not state what it was made from, nor how many examples all replicas get in "
                "a step. Give fit the data set itself, in batches for all replicas together: fit distributes it."
            )

    def _declared(self, declared: SamplingDeclaration) -> Data:
        """Describes data that state themselves how they are drawn."""
        has = self._optimizer.rows_per_unit
        if has != declared.rows_per_unit:
            raise PrivacyError(
                f"In the batches {declared.rows_per_unit} rows are one {declared.unit}, and the optimizer clips "
                f"{'each row by itself' if has == 1 else f'{has} as one'}. Give it rows_per_unit="
                f"{declared.rows_per_unit}, or draw the batches with other copies or examples_per_user."
            )
        if self._optimizer.noise is not None:
            return self._bounded(declared)
        return self._sampled(declared) if declared.scheme.amplifies else self._in_order(declared)

    def _arrays(self, length: int) -> Data:
        """Describes arrays, which `fit` shuffles."""
        if self.sampling not in (None, SHUFFLED.name):
            raise PrivacyError(
                f"sampling={self.sampling!r}, but fit was given arrays, which it shuffles. Leave sampling out, or "
                "pass tfdpfl.data.poisson_batches((x, y), ...) to fit."
            )
        n = self.num_examples if self.num_examples is not None else length
        if length > n or (length < n and not self._call.get("validation_split")):
            raise ValueError(f"num_examples={n}, but fit was given {length} examples; give their number.")
        batch = min(self._call.get("batch_size") or 32, length)
        self._check_batch_size(batch)
        rows = self._optimizer.rows_per_unit
        if rows > 1 and (self._call.get("shuffle", True) or length % rows or batch % rows):
            raise PrivacyError(
                f"With rows_per_unit={rows}, consecutive rows are one unit, and fit would split units: give it "
                f"shuffle=False, whole units ({length} rows are given) and a batch_size (now {batch}) that {rows} "
                "divides; or use tfdpfl.data.poisson_batches."
            )
        length, batch = length // rows, batch // rows
        self._check_groups(length, batch)
        return {"num_examples": length, "batch_size": batch, "sampling": SHUFFLED.name}

    def _stated(self) -> Data:
        """Describes data of which only what the callback was told is known."""
        origin = made_from(self._x)
        check_kept(self._x)
        if origin is not None:
            self._check_made_from(origin)
        self._check_whole_units()
        scheme, number, size = self._complete()
        if isinstance(self._x, tf.data.Dataset):
            check_apart(self._x, number, batched=True)
        if scheme.independent:
            self._check_poisson()
            self._check_passes(scheme)
        parts = self._optimizer._dp.parts
        if parts > 1 and not scheme.partitions:
            raise PrivacyError(
                f"sampling={self.sampling!r}: an example may be in several of the batches that "
                f"gradient_accumulation_steps={parts} adds up, and no ε is known for this. Use "
                "tfdpfl.data.poisson_batches, which cuts one sample into batches, or sampling='shuffle'."
            )
        if origin is None:
            self._check_sizes(scheme, size)
            self._check_rows(scheme, number, size)
            self._check_drawn(scheme, number, size)
        else:
            self._check_said_of(origin)
        if scheme.counts_passes and scheme.independent:
            self._check_length_of_pass(number, size)
        if scheme.counts_passes or scheme is EVERY_BATCH:
            check_stream(self._x, number, size, self._steps_per_epoch, scheme.counts_passes)
        ordered = self._optimizer.noise is None and scheme.same_order
        sampling = SHUFFLED.name if ordered else self.sampling  # with fresh noise only the number of uses counts
        data = {"num_examples": number, "batch_size": size, "sampling": sampling}
        if scheme is EVERY_BATCH and self._optimizer.expected_batch_size is None:
            data["adjacency"] = "zero_out"  # one example more changes what the sum is divided by
        return data

    def _check_made_from(self, origin: SamplingDeclaration) -> None:
        """Raises if data that were made from others are not drawn as those were."""
        if not origin.scheme.amplifies:
            described = self.sampling == origin.kind and not origin.scheme.starts_anew
            if not described and self.sampling not in origin.scheme.weaker:
                raise PrivacyError(
                    f"A {self._kind} was made from batches of kind {origin.kind!r}, which sampling="
                    f"{self.sampling!r} does not describe. Pass those batches themselves to fit."
                )
            return
        again = passed_through(self._x, _AGAIN)
        if again is not None:
            raise _repeats(again, "Poisson batches")
        samples = sum(declared_sampling(each) is not None for each in ancestors(self._x))
        if samples > 1 or passed_through(self._x, ("concatenate", "directed")):
            raise PrivacyError(
                f"A {self._kind} was made from several data sets, so its batches have no sampling rate of their "
                "own. Call fit once for each of them, with one PrivacyBudget."
            )
        changed = passed_through(self._x, tuple(_CHANGES_SAMPLES))
        if changed is not None:
            raise PrivacyError(
                f"{_CHANGES_SAMPLES[changed]} comes after {origin.kind!r} batches. It may use one of them several "
                "times, or drop one for what it holds, and no ε is known for this. Leave it out: more steps on fresh "
                "samples cost less than a second step on the same one."
            )
        if passed_through(self._x, ("unbatch", "batch")):
            raise PrivacyError(
                f"The examples of {origin.kind!r} batches were put into other batches (unbatch or batch), which are no "
                "longer samples of that kind. Pass the batches themselves to fit, with the expected_batch_size that "
                "you want."
            )
        if self.sampling != origin.kind:
            raise PrivacyError(
                f"A {self._kind} was made from Poisson batches, and its effect on their sampling is not known. "
                "Pass tfdpfl.data.poisson_batches(...) itself to fit (it prefetches), and change the data before it. "
                "Or, if each batch keeps its examples, give PrivacyBudget sampling='poisson', num_examples and "
                "batch_size (the expected one)."
            )

    def _check_whole_units(self) -> None:
        if self._optimizer.rows_per_unit > 1:
            raise PrivacyError(
                f"Whether a {self._kind} keeps the rows of a unit together, of which rows_per_unit="
                f"{self._optimizer.rows_per_unit} are one, is not known. Use tfdpfl.data.poisson_batches."
            )
        if passed_through(self._x, ("directed",)) and passed_through(self._x, ("repeat",)):
            raise PrivacyError(
                "sample_from_datasets with repeat() draws some examples more often than others (weighted or "
                "class-balanced sampling), and no ε is known for this. Draw with tfdpfl.data.poisson_batches, and "
                "weight the loss by sample_weight or class_weight."
            )

    def _check_passes(self, scheme: SamplingScheme) -> None:
        """That the end of each pass is seen, where ε counts passes whose batches vary in size."""
        stream, declared = self._stream, declared_sampling(self._x)
        if declared is not None and declared.workers > 1:
            if stream and (scheme.counts_passes or declared.physical_batches > 1):
                raise PrivacyError(
                    "The batches of workers have no end, and an epoch must be whole passes, because ε or an update is "
                    f"of several batches. Give fit steps_per_epoch={declared.steps * declared.physical_batches}."
                )
        elif scheme.counts_passes and stream:
            raise PrivacyError(
                f"sampling={scheme.name!r} has an ε for each pass over the data, and in a stream "
                f"(steps_per_epoch={self._steps_per_epoch}, or repeat) the end of a pass is not visible. Leave "
                "steps_per_epoch and .repeat() out, and give fit epochs."
            )

    def _check_length_of_pass(self, num_examples: int, size: int) -> None:
        """Raises if a pass may have another number of batches than the price of one pass takes it to have."""
        priced, number = math.ceil(num_examples / size), _cardinality(self._x)
        if number < 0 and not hasattr(self._x, "element_spec") and hasattr(type(self._x), "__len__"):
            number = len(self._x)
        if number != priced:
            raise PrivacyError(
                f"num_examples={num_examples} and batch_size={size} make {priced} batches in a pass, "
                "from which each example chooses one, but a pass over the data has "
                f"{number if number >= 0 else 'an unknown'} {'number' if number < 0 else 'batches'}. Use "
                "tfdpfl.data.random_allocation, or give the numbers that the batches were made with (a data set states "
                "theirs by tf.data.experimental.assert_cardinality)."
            )

    def _complete(self) -> tuple[SamplingScheme, int, int]:
        """Returns the sampling, the number of examples and the batch size, all of which must have been said."""
        sampling, number, size = self.sampling, self.num_examples, self.batch_size
        if sampling is not None and number is not None and size is not None:
            return SCHEMES[sampling], number, size
        said = {
            "sampling='shuffle' (every example at most once a pass)": sampling, "num_examples": number,
            "batch_size": size,
        }  # fmt: skip
        raise PrivacyError(
            f"How {self._kind} draws its batches is not known, so no ε can be computed. Use "
            "tfdpfl.data.poisson_batches, or give PrivacyBudget "
            f"{' and '.join(name for name, given in said.items() if given is None)}, too."
        )

    def _check_said_of(self, origin: SamplingDeclaration) -> None:
        """That what is said of data that were made from others does not contradict what those declare."""
        several = max(origin.rows_per_unit, origin.physical_batches, origin.num_selected) > 1
        if several or origin.truncated_batch_size is not None:
            raise PrivacyError(
                f"The data were made from batches with {origin.rows_per_unit} rows of each {origin.unit}, cut into "
                f"{origin.physical_batches} or truncated, so their ε is not that of the sampling which PrivacyBudget "
                "was given. Pass those batches themselves to fit, and change the data before them (map_fn)."
            )
        size = origin.priced_batch_size
        if self.num_examples != origin.num_examples or (self.batch_size or 0) < size:
            raise PrivacyError(
                f"num_examples={self.num_examples} and batch_size={self.batch_size}, but the data were made from "
                f"batches of {size} from {origin.num_examples} examples. Give these numbers."
            )

    def _check_uses(self, declared: SamplingDeclaration) -> None:
        """That the epochs to come keep to what the data set declares."""
        most = declared.max_participations
        if most is None or self._epochs is None:
            return
        passes = self._optimizer._dp.counter.passes.items()
        begun = sum(n for key, n in passes if key[0] == self._data_number and key[2] == declared.num_examples)
        each = declared.steps // declared.min_separation  # 1, or rounds of the groups
        uses = (begun + self._epochs) * each
        if uses > most:
            raise PrivacyError(
                f"The data were declared with max_participations={most} uses of an example, but these epochs make "
                f"{uses}. Train for fewer epochs, or declare more uses."
            )

    # That what TensorFlow tells of a data set does not contradict what is said of it.

    def _check_sizes(self, scheme: SamplingScheme, size: int) -> None:
        sizes = _sizes(self._x)
        if scheme.independent and sizes:
            raise PrivacyError(
                f"sampling={self.sampling!r}, but all batches of the data set hold {min(sizes)} examples (its "
                "element_spec says so). If examples are drawn independently, sizes vary. Use "
                "tfdpfl.data.poisson_batches or random_allocation, or say sampling='shuffle'."
            )
        if sizes - {size}:
            raise PrivacyError(
                f"batch_size={size}, but batches of the data set hold {min(sizes - {size})} "
                "examples (its element_spec says so); give that number."
            )

    def _check_rows(self, scheme: SamplingScheme, number: int, size: int) -> None:
        batches = _cardinality(self._x)
        rows = batches * size
        whole = self._steps_per_epoch is None and passed_through(self._x, ("repeat",)) is None
        if scheme.once_a_pass and _sizes(self._x) and whole and rows > number:
            raise PrivacyError(
                f"num_examples={number}, but a pass over the data set has {rows} examples ({batches} batches"
                f" of {size}). One of them may be in several steps, or several times in one. Give "
                "PrivacyBudget the number of examples, or fit one pass over the data, and epochs."
            )
        if scheme.sampled_anew and 0 <= rows < number:
            raise PrivacyError(
                f"sampling={self.sampling!r} from num_examples={number}, but the data set ends after "
                f"{batches} batches, {rows} examples at batch_size={size}, and begins "
                "anew with each epoch. Use tfdpfl.data.poisson_batches, which draws from all examples for every batch."
            )

    def _check_drawn(self, scheme: SamplingScheme, number: int, size: int) -> None:
        if not scheme.amplifies or (scheme is FIXED_SIZE and _drawn_anew(self._x, size, number)):
            return
        again = passed_through(self._x, _AGAIN)
        if again is not None:
            raise _repeats(again, "samples")
        cut = next(filter(_batches, ancestors(self._x)), None)
        if cut is not None:
            raise PrivacyError(
                f"sampling={self.sampling!r}, but {name_of(cut)} cuts the data set into batches of "
                "one size, one after the other, so they are no independent samples. Use tfdpfl.data.poisson_batches, "
                "or say sampling='shuffle' if an example comes at most once a pass."
            )

    def _sampled(self, declared: SamplingDeclaration) -> Data:
        size = self._agreed(declared, declared.kind)
        self._check_poisson()
        self._check_passes(declared.scheme)
        self._check_parts(declared)
        parts = self._optimizer._dp.parts
        if parts > 1 and (self._steps or 0) % parts:
            raise PrivacyError(
                f"An epoch of {self._steps} batches ends in the middle of a Poisson sample, which has {parts} "
                "batches: leave steps_per_epoch out, and give poisson_batches the number of samples as steps."
            )
        if parts > 1 and self._steps_per_epoch is not None and self._stream:
            # Keras 3 takes a batch off a stream to build a model with, so that what follows is out of step.
            raise PrivacyError(
                f"steps_per_epoch={self._steps_per_epoch} reads the batches as one stream, which does not show where "
                f"the {parts} batches of a Poisson sample begin: leave it out, and give poisson_batches the number of "
                "samples as steps."
            )
        return self._described(declared, declared.kind, size)

    @staticmethod
    def _described(declared: SamplingDeclaration, sampling: str, size: int) -> Data:
        return {
            "num_examples": declared.num_examples, "batch_size": size, "sampling": sampling, "unit": declared.unit,
            "truncated_batch_size": declared.truncated_batch_size,
        }  # fmt: skip

    def _check_parts(self, declared: SamplingDeclaration) -> None:
        parts, drawn = self._optimizer._dp.parts, declared.physical_batches
        if drawn != parts:
            raise PrivacyError(
                f"{drawn} batches of the data make one sample, but the optimizer makes one update from {parts}: give "
                f"it gradient_accumulation_steps={drawn}, or draw the batches with another physical_batch_size."
            )

    def _in_order(self, declared: SamplingDeclaration) -> Data:
        """Of batches that hold each example once a pass; or once a round of passes, sampled."""
        if declared.scheme.starts_anew:
            raise PrivacyError(
                f"{declared.kind} bounds how often an example takes part, for correlated noise, but the optimizer "
                "draws fresh noise in every step. Use tfdpfl.data.poisson_batches, which then costs less, or give the "
                "optimizer noise=."
            )
        size = self._agreed(declared, SHUFFLED.name)
        if declared.physical_batches > 1:
            self._check_parts(declared)
        self._check_groups(declared.num_examples, size, declared.physical_batches)
        return self._described(declared, SHUFFLED.name, size)

    def _check_groups(self, length: int, batch: int, parts: int = 1) -> None:
        """That each batch, or each of the parts that it is cut into, is of whole microbatches."""
        groups, rest = self._optimizer.num_microbatches, length % batch
        if groups is None:
            return
        uneven = lambda size: any(part % groups for part in (size // parts, -(-size // parts)))  # noqa: E731
        if parts > 1 and uneven(batch):
            raise PrivacyError(
                f"Batches of {batch} examples are cut into {parts} parts (physical_batch_size), which num_microbatches="
                f"{groups} does not divide. Use a batch size that {parts * groups} divides, or num_microbatches=None."
            )
        if not self._steps_per_epoch and uneven(rest):
            cut = f", in {parts} parts" if parts > 1 else ""
            raise PrivacyError(
                f"The last batch of an epoch has {rest} of the {length} examples{cut}, which num_microbatches={groups} "
                f"does not divide. Leave out examples (x[:{length - rest}]) or use num_microbatches=None."
            )

    def _check_bounded(self, declared: SamplingDeclaration | None) -> None:
        """That the data bound how often an example takes part, and as correlated noise was made for."""
        noise = self._optimizer.noise
        sampling = (
            SHUFFLED.name if length_of(self._x) is not None else self.sampling if declared is None else declared.kind
        )
        scheme = None if sampling is None else SCHEMES[sampling]
        if scheme is not None and not scheme.separates_uses:
            raise PrivacyError(
                f"sampling={sampling!r} does not bound how often an example takes part, and the ε of "
                f"{type(noise).__name__} noise depends on this bound. Give fit tfdpfl.data.fixed_order, "
                "tfdpfl.data.cyclic_poisson or arrays, or train with noise=None."
            )
        if scheme is not None:
            self._check_separation(scheme, declared)
        if scheme is None or not scheme.starts_anew:
            self._check_epochs()

    def _check_separation(self, scheme: SamplingScheme, declared: SamplingDeclaration | None) -> None:
        """That two uses of an example are as far apart as correlated noise was made for."""
        name, needed = type(self._optimizer.noise).__name__, self._optimizer.noise.min_separation
        apart = getattr(declared, "min_separation", 1)
        if scheme.same_order:
            self._check_order(declared)
            if declared is None and self.num_examples and self.batch_size:
                apart = self.num_examples // self.batch_size
        added = self._batches_added(declared)
        apart = apart // added if scheme.same_order else apart
        if apart < needed:
            raise PrivacyError(
                f"{name} noise was made for min_separation={needed} steps from one use of an example to its next, but "
                f"the data ({scheme.name}) keep {apart}. Give fit tfdpfl.data.fixed_order(...) of as many batches, or "
                "noise of a smaller min_separation."
            )
        if scheme.starts_anew and apart != needed:
            raise PrivacyError(
                f"The batches come from {apart} groups in turns, or an example rests until the {apart}th step after a "
                f"use, but {name} noise was made for min_separation={needed}. Give it {apart}."
            )
        if scheme.one_pass:
            self._check_one_pass()

    def _check_one_pass(self) -> None:
        """Raises if a fit has several passes, or parts of one, of data whose pass is a whole training."""
        if (self._epochs or 0) > 1 or self._steps_per_epoch is not None:
            raise PrivacyError(
                "One pass over these batches is a whole training, because an example that was used at the end of a "
                "pass may be used again at the start of the next one. Give fit epochs=1 without steps_per_epoch, and "
                "draw the data with steps= all steps."
            )

    def _batches_added(self, declared: SamplingDeclaration | None) -> int:
        """How many batches of the data make one of the optimizer, which holds an example at most once."""
        parts = self._optimizer._dp.parts
        if declared is not None and declared.draws_logical_batches and (parts == 1 or not self._stream):
            self._check_parts(declared)
            return 1
        if self._crosses_passes(declared):
            update, divides, cut = "A batch of this stream", "", ""
            if parts > 1:
                update = f"An update of gradient_accumulation_steps={parts} batches"
                divides = ", whose number of batches gradient_accumulation_steps divides"
                cut = "(..., physical_batch_size=...)"
            raise PrivacyError(
                f"{update} may reach into the next pass over the data and hold an example twice, and no ε of "
                f"{type(self._optimizer.noise).__name__} noise is known for this. Give fit whole passes, without "
                f"steps_per_epoch and repeat{divides}; or use tfdpfl.data.fixed_order{cut}."
            )
        return parts

    def _crosses_passes(self, declared: SamplingDeclaration | None) -> bool:
        """Whether a batch of the optimizer may reach from one pass over the data into the next."""
        n, size, parts = self.num_examples, self.batch_size, self._optimizer._dp.parts
        known = n is not None and size is not None
        if parts == 1:
            own = declared is None and length_of(self._x) is None
            return self._stream and own and known and n % size > 0
        return self._stream or (self._steps or (math.ceil(n / size) if known else 0)) % parts > 0

    def _check_order(self, declared: SamplingDeclaration | None) -> None:
        """Raises if batches of a fixed order come in another one."""
        x = self._x
        if declared is None and passed_through(x, (*SHUFFLES, "repeat", "interleave")):
            raise PrivacyError(
                "sampling='fixed_order', but the data set shuffles, interleaves or repeats, so two uses of an example "
                "may be closer together. Use tfdpfl.data.fixed_order, or say sampling='shuffle'."
            )
        why = out_of_order(x) if declared is None and isinstance(x, tf.data.Dataset) else None
        if why is not None:
            raise PrivacyError(
                f"sampling='fixed_order', but {why}, so two uses of an example may be closer together. Use "
                "tfdpfl.data.fixed_order, or say sampling='shuffle'."
            )
        if isinstance(x, of_batches()) and self._call.get("shuffle", True):
            raise PrivacyError(
                f"sampling='fixed_order', but fit shuffles the batches of a {self._kind} in every epoch, so two "
                "uses of an example may be closer together. Give fit shuffle=False."
            )

    def _check_epochs(self) -> None:
        """Raises if the fit has more passes than the noise was made for."""
        noise, epochs = self._optimizer.noise, self._epochs
        if noise.max_participations is None or epochs is None:
            return
        begun = sum(self._optimizer._dp.counter.passes.values())
        if begun + epochs > noise.max_participations:
            raise PrivacyError(
                f"{type(noise).__name__} noise was made for max_participations={noise.max_participations} uses of an "
                f"example, but these {epochs} epochs make {begun + epochs}. Train for fewer epochs, or make the noise "
                "for more uses."
            )

    def _bounded(self, declared: SamplingDeclaration) -> Data:
        """What data say of themselves whose batches keep an example's uses apart."""
        size = self._agreed(declared, declared.kind)
        if declared.scheme.independent:
            self._check_poisson()
        else:
            self._check_groups(declared.num_examples, size, declared.physical_batches)
        return self._described(declared, declared.kind, size)

    def _agreed(self, declared: SamplingDeclaration, kind: str) -> int:
        """The batch size of data that say themselves how they are drawn, if what the callback was told agrees."""
        if self.sampling not in (None, kind):
            raise PrivacyError(f"sampling={self.sampling!r}, but the data say {kind!r}. Leave sampling out.")
        if self.num_examples not in (None, declared.num_examples):
            raise ValueError(
                f"num_examples={self.num_examples}, but the batches are drawn from {declared.num_examples} examples; "
                "give their number."
            )
        self._check_batch_size(declared.priced_batch_size)
        return declared.priced_batch_size

    def _check_batch_size(self, size: int) -> None:
        if self.batch_size not in (None, size):
            raise ValueError(f"batch_size={self.batch_size}, but the data come in batches of {size}; leave it out.")

    def _check_poisson(self) -> None:
        if self._optimizer.expected_batch_size is None:
            raise PrivacyError(
                "Under Poisson sampling and random allocation the size of a batch is private, but the optimizer "
                "divides by it. Give the optimizer expected_batch_size=sampling_rate * num_examples."
            )
        if self._optimizer.num_microbatches is not None:
            raise PrivacyError(
                "Under Poisson sampling one more example regroups the microbatches of all that follow, and no ε is "
                "known for this. Use num_microbatches=None."
            )
