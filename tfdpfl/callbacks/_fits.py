"""The calls of `fit` that run, and what a `PrivacyBudget` keeps of its own: passes, logical batches, announcements."""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
import zlib
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdpfl._frames import optimizer_of, running_fits
from tfdpfl._types import Arrays, Callback, Model, Optimizer
from tfdpfl._variables import value_of
from tfdpfl.accounting.sampling import SCHEMES, SamplingScheme
from tfdpfl.callbacks._sizes import BatchSizes
from tfdpfl.data import declared_sampling, passed_through
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import DPOptimizer, _replicas, _step_table
from tfdpfl.optimizers._past import stepped_on_model, weights_of

__all__ = [
    "LEFT",
    "RELEASED",
    "Call",
    "Data",
    "Fit",
    "executions_of",
    "fingerprint",
    "fingerprints",
    "fit_arguments",
    "is_stream",
    "keeps_averages",
    "length",
    "private_optimizer",
    "remember_weights",
    "running_models",
    "stepping",
    "steps_on",
]

Call: TypeAlias = dict[str, Any]  # the arguments of a call of fit
Data: TypeAlias = dict[str, Any]  # what of the arguments of a run describes its data

# By model: how many private steps it had seen in this process when an epoch last ended, and the fingerprints of the
# weights at all those ends (which EarlyStopping may go back to).
LEFT: weakref.WeakKeyDictionary[Model, tuple[int, set[int]]] = weakref.WeakKeyDictionary()

# By model: the releases of callbacks in calls of `fit` that no `PrivacyBudget` watched.
RELEASED: weakref.WeakKeyDictionary[Model, list[Callback]] = weakref.WeakKeyDictionary()


def stepping(model: Model) -> dict[int, Optimizer]:
    """The mechanisms that stepped on a model's weights, by id."""
    found: dict[int, Optimizer] = {}
    for stepped in stepped_on_model(model):
        found |= stepped
    return found


def steps_on(model: Model) -> int:
    return sum(dp.counter.steps for dp in stepping(model).values())


def fingerprint(model: Model) -> int:
    """A number that tells weights apart, whichever of them are trainable."""
    return _number_of(weights_of(model))


def fingerprints(model: Model) -> tuple[int, set[int]]:
    """The `fingerprint` of all weights, and that of each that is trained and has several values (others may be
    alike)."""
    trained, total, single = {id(v) for v in weights_of(model, "trainable_weights")}, 0, set()
    for variable in weights_of(model):
        value = value_of(variable)
        number = _number_of([value])
        total += number
        if id(variable) in trained and (value != value.reshape(-1)[:1]).any():
            single.add(number)
    return total, single


def _number_of(variables: Arrays) -> int:
    return sum(zlib.crc32(value_of(v).reshape(-1).view(np.uint8).data) for v in variables)


def keeps_averages(model: Model) -> bool:
    """Returns whether the optimizer keeps averages of the weights (use_ema=True). Keras puts them in the weights' place
    as `fit` ends, or by SwapEMAWeights."""
    return bool(_averages(model))


def _averages(model: Model) -> list[Model]:
    averages = getattr(optimizer_of(model), "_model_variables_moving_average", None) or []
    return averages if len(averages) == len(weights_of(model, "trainable_weights")) else []


def remember_weights(model: Model) -> None:
    """Adds the weights, and the averages of them that Keras may put in their place, to those that steps left."""
    _, left = LEFT.get(model, (0, set()))
    whole, single = fingerprints(model)
    found = {whole, *single}
    if averages := _averages(model):
        found.add(whole - _number_of(model.trainable_weights) + _number_of(averages))
    LEFT[model] = (steps_on(model), left | found)


def executions_of(model: Model) -> int:
    """How many batches a compiled model takes between two calls of its callbacks."""
    # Keras 3 has the number itself, Keras 2 a variable under another name.
    held = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    if isinstance(held, str) or getattr(model, "_steps_per_execution_tuner", None) is not None:
        raise PrivacyError(
            "The model was compiled with steps_per_execution='auto', which changes while it trains, so a callback does "
            "not know how many steps come next. Give compile a number, for example steps_per_execution=1."
        )
    return 1 if held is None else int(held.numpy() if hasattr(held, "numpy") else held)


def private_optimizer(model: Model) -> Optimizer:
    """The DP optimizer that a compiled `model` trains with, out of its loss-scaling wrapper if there is one.

    Raises:
      PrivacyError: it trains with another, or holds a second DP optimizer.
    """
    optimizer = optimizer_of(model)
    if not isinstance(optimizer, DPOptimizer):
        raise PrivacyError(
            f"PrivacyBudget computes ε for DP optimizers, but the model trains with {type(optimizer).__name__}. "
            "Compile it with plan.optimizer(...) if you have a plan, else with tfdpfl.DPAdam(l2_norm_clip=..., "
            "noise_multiplier=...) or another optimizer of tfdpfl."
        )
    others = [name for name, value in vars(model).items() if isinstance(value, DPOptimizer) and value is not optimizer]
    if others:
        raise PrivacyError(
            f"The model holds a second DP optimizer, {others[0]!r}, whose steps PrivacyBudget does not see. Train "
            "without PrivacyBudget, and merge the ledgers of both optimizers: first.ledger.merge(second.ledger)."
        )
    return optimizer


def running_models() -> list[Model]:
    """The models whose `fit` is running, the innermost first."""
    return [given.get("self") for given in running_fits()]


def fit_arguments(model: Model) -> Call:
    """The arguments of the `fit` call that is running: Keras does not tell callbacks what data it trains on."""
    return next((dict(given) for given in running_fits() if given.get("self") is model), {})


def length(x: Arrays) -> int | None:
    """Number of examples in arrays as `fit` takes them, or None for anything else."""
    leaves = tf.nest.flatten(x) if isinstance(x, (dict, list, tuple)) else [x]
    if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "__len__") and len(leaf.shape) for leaf in leaves):
        return int(leaves[0].shape[0])
    return None


def is_stream(call: Call) -> bool:
    """Returns whether `fit` reads on from one epoch to the next, so that it does not show where passes end.

    What workers read has no end, either. But it begins with the fit, and Keras 2 leaves out none of it. So passes end
    with epochs of whole passes."""
    steps, x = call.get("steps_per_epoch"), call.get("x")
    declared = declared_sampling(x)
    if declared is not None and declared.workers > 1 and steps is not None:
        return steps % (declared.steps * declared.physical_batches) > 0
    return steps is not None or passed_through(x, ("repeat",)) is not None


_ORDERS: weakref.WeakKeyDictionary[Model, int] = weakref.WeakKeyDictionary()
_NEXT_ORDER = itertools.count(-1, -1)


def _order_of(x: Arrays) -> int:
    """A number for the order of data that declare none. Two data sets have the same one if TensorFlow makes them by the
    same graph from the same tensors, or if they are one object. Of any others nothing says that their orders agree."""
    try:
        if x not in _ORDERS:
            _ORDERS[x] = _number_of_graph(x) or next(_NEXT_ORDER)
        return _ORDERS[x]
    except TypeError:  # it has no hash, or nothing can refer to it
        return next(_NEXT_ORDER)


def _number_of_graph(x: Arrays) -> int | None:
    if not isinstance(x, tf.data.Dataset):
        return None
    policy = tf.data.experimental.ExternalStatePolicy.FAIL  # for generators and random numbers
    try:
        graph = tf.compat.v1.GraphDef.FromString(x._as_serialized_graph(external_state_policy=policy).numpy())
    except Exception:  # or it is too large for a message of TensorFlow's
        return None
    for node in graph.node:
        node.attr.pop("metadata", None)  # a name that each object has for itself
    digest = hashlib.sha256(graph.SerializeToString(deterministic=True)).digest()
    return 2 + int.from_bytes(digest[:6], "big")


class Fit:
    """One call of `fit`.

    Attributes:
      data: num_examples, batch_size (of a logical batch) and sampling, and what of adjacency, unit and truncation is
        not as usual.
      batches: the same as the optimizer counts it.
      physical: size of the batches that come in.
      parts: how many of them make a logical batch, and an update.
      uses: how often one logical batch may hold an example.
      clips: how many clips an example moves the sum of a batch by, if that holds it once.
      stride: batches of an execution.
      own: whether the data are of the caller's making, and nothing but what was said is known of their passes.
      whole: whether a pass may end with a smaller batch, after which the next one begins a batch of its own.
      passes: passes over the data that were begun.
      counts_passes: whether no other callback of the same call does.
      announced: batches that the optimizer was told of.
      awaited: whether a batch was announced that has not ended.
      ended: whether the call is over.
      cut_pass: whether it was interrupted in a pass whose number of batches was only stated.
      seen: batches of this epoch that have ended.
      first: the number of its first. Keras 2 goes on with a number from a backup, and with data from their beginning.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, data: Data, data_number: float, stride: int, call: Call,
        steps: int | None,
    ):  # fmt: skip
        self.model, self.optimizer, self.data, self.stride = model, optimizer, data, stride
        self.parts = optimizer._dp.parts
        self._counter = optimizer._dp.counter
        self.whole = not is_stream(call) or length(call.get("x")) is not None
        self._in_executions = call.get("steps_per_epoch") is not None and hasattr(model, "steps_per_execution")
        x, declared = call.get("x"), declared_sampling(call.get("x"))
        self.own = declared is None and length(x) is None
        ordered = self.own and optimizer.noise is not None
        self._order = float(getattr(declared, "order", 0) or (_order_of(x) if ordered else 1))
        self.passes = self.announced = self._steps_before = self._pending = self._pass = self.seen = 0
        self.ended, self.awaited, self.counts_passes, self.cut_pass = False, False, True, False
        self.first: int | None = None
        self._begun_at = (0.0, 0.0, 0)  # what the counter had seen before this epoch, before this batch; steps before
        # Batches of a pass: made into logical ones; or cut out of those that were drawn.
        partitions = self.scheme.partitions
        pieces = declared.physical_batches if partitions and declared is not None else 1
        self._declared, self.physical = declared, -(-data["batch_size"] // pieces)
        self._sizes = BatchSizes(data["sampling"], self.physical, stride)
        self.uses = self._uses(steps) if partitions and self.shuffled else 1
        self.clips = 1 if optimizer.num_microbatches in (None, self.physical) else 2
        if partitions and pieces == 1:
            self.data = {**data, "batch_size": min(self.parts * self.physical, data["num_examples"])}
        sampling = self.scheme.code(data.get("adjacency"), data.get("unit", "example"), across_passes=self.uses > 1)
        truncated = data.get("truncated_batch_size") or 0
        self.batches = (data_number, sampling, data["num_examples"], self.data["batch_size"], truncated)

    def _uses(self, steps: int | None) -> int:
        """In how many passes a logical batch may lie."""
        n, b = self.data["num_examples"], self.physical
        if self.parts > 1 and self.optimizer.noise is not None:
            return 1  # each epoch is a pass, and begins a logical batch
        self._pass = pass_ = max(min(n // b, steps or n // b), 1)
        if not self.whole:
            return 1 if self.parts == 1 and n % b == 0 else 1 + math.ceil((self.parts * b - 1) / n)
        if self.parts == 1 or (steps and steps % self.parts == 0 and self.passes_in_epoch(steps) == 1):
            return 1
        return 1 + math.ceil((self.parts - 1) / pass_)

    def begin(self) -> None:
        segments = self.optimizer._dp.noise.segments
        if segments is not None:
            if segments.table is None and self.model.built and _replicas.workers() == 1:
                # Keras 2 loads a backup into variables only when they are made; what is noted now is of that state.
                with self.model.distribute_strategy.scope():
                    self.optimizer.build(self.model.trainable_variables)
            segments.begin_data(self.batches[1], self._order)
        self._counter.write_back(self.optimizer._dp_ledger)
        self._steps_before = self._counter.steps
        # A logical batch goes on where it may lie in several passes, all of it was drawn as what comes, and they were
        # whole.
        goes_on = self.uses > 1 and self.optimizer._dp.whole_pass
        self.optimizer._dp.drop_partial(unless=self.batches if goes_on else None)
        self._pending = int(self.optimizer._dp.pending)

    def steps_of_epoch(self, steps: int | None) -> int | None:
        """Returns how many batches an epoch has, given Keras's number, or None if that shows as it runs: Keras 3 takes
        whole executions of a stream."""
        return None if steps and self._in_executions and steps % self.stride else steps

    @property
    def shuffled(self) -> bool:
        return self.scheme.counts_passes

    @property
    def scheme(self) -> SamplingScheme:
        return SCHEMES[self.data["sampling"]]

    def passes_in(self, steps: int) -> int:
        """How many passes over the data so many steps in a row begin; where an example has several uses in a pass, so
        many."""
        declared = self._declared
        if declared is not None and declared.draws_logical_batches and self.scheme.once_a_pass:
            return declared.num_selected * math.ceil(steps / (declared.steps * declared.physical_batches))
        n, b = self.data["num_examples"], self.physical
        if not self.whole:  # batches may go across the border of two passes
            return math.ceil(steps * b / n)
        return 1 if steps <= math.ceil(n / b) else math.ceil(steps / max(n // b, 1))

    def passes_in_epoch(self, batches: int) -> int:
        """How many passes over the data the first so many batches of an epoch begin."""
        if self.own and self.whole:  # however many batches a pass is cut into; `check_rows` counts their examples
            return min(batches, 1)
        return self.passes_in(batches)

    def begin_passes(self, number: int) -> None:
        """Counted for the optimizer, of which another fit may count some, too."""
        if number <= 0:
            return
        self.passes += number
        segments = self.optimizer._dp.noise.segments
        if segments is not None:
            segments.begin_pass(self.batches[1])
        if self.counts_passes:
            self._counter.passes[self.batches] = self._counter.passes.get(self.batches, 0) + number * self.uses

    def steps_in(self, batches: int) -> int:
        """How many steps the first so many batches of the fit make."""
        return (self._pending + batches) // self.parts

    def steps_next(self) -> int:
        """How many steps the next execution makes, or makes a beginning of."""
        return max(self.steps_in(self.announced + self.stride) - self.steps_in(self.announced), 1)

    def announce(self, batch: int, batches: int) -> None:
        """Tells the optimizer of the next execution's batches, of which the first is number ``batch`` of the epoch."""
        self.announced, self.awaited, self.optimizer._dp.whole_pass = self.announced + batches, True, False
        parts = self.parts if self.parts > 1 and self.uses == 1 else 0
        if self._declared is not None and self._declared.workers > 1:  # their data begin with the fit alone
            at = self.announced - batches
        else:
            at = batch - (self.first or 0)
        self._counter.announce(self.batches, batches, at % self.parts, parts)

    def share(self, most: int | None) -> None:
        """Tells the optimizer, for workers to agree on, the order of the data and how many steps the target allows."""
        self._counter.share.assign([self._order, -1 if most is None else most])

    def check_pass(self) -> None:
        """That an epoch that has ended was as long as the price of logical batches takes passes to be."""
        short = self.uses > 1 and self.seen < self._pass
        self.optimizer._dp.whole_pass = self.whole and not short
        if short and self.whole and not self.model.stop_training:
            self.optimizer._dp.drop_partial()
            if self.first:
                return
            raise PrivacyError(
                f"num_examples={self.data['num_examples']} in batches of {self.physical} make {self._pass} a pass, but "
                f"the data ended after {self.seen} batches, so a logical batch of {self.parts} may hold an example "
                "more often than ε counts. Give PrivacyBudget the number of examples of the data."
            )

    def begin_epoch(self) -> None:
        seen = float(value_of(self._counter.seen))
        self._begun_at = (seen, seen, self.steps)
        self._sizes.begin_epoch()

    def check_rows(self) -> None:
        """That batches and a pass hold no more examples than was said of them, which is all that is known of them.

        If a pass has more examples than ``num_examples``, one of them may be in it several times, even in one batch:
        as often as there are too many, if each of the others is in it once. So much its steps are counted as, too."""
        n, (epoch, before, steps) = self.data["num_examples"], self._begun_at
        if not self.own or not (self.scheme.limits_batches or self.scheme.independent):
            return
        seen = float(value_of(self._counter.seen))
        self._begun_at = epoch, seen, steps
        if not self.scheme.limits_batches:
            left = n * self.stride if self.scheme.sampled_anew else n - round(before - epoch)
            self._check_sizes(round(seen - before), left)
            return
        in_pass, in_batches = round(seen - epoch), round(seen - before)
        if self.whole and in_pass > n:
            held = min(in_pass - n + 1, self.physical * self.parts)
            self._count_unknown(self.steps - steps, held)
            raise PrivacyError(
                f"num_examples={n}, but this pass over the data has {in_pass} examples or more. One of them may be in "
                "several steps, or several times in one, so an ε that counts one use in each pass would be too small. "
                "If all examples are different, give PrivacyBudget their number. If some are copies of one (flat_map, "
                "window), use tfdpfl.data.poisson_batches(..., augment=..., copies=k) and an optimizer with "
                "rows_per_unit=k. If the data set holds several passes, give fit one of them, and epochs."
            )
        if in_batches > self.stride * self.physical:
            raise PrivacyError(
                f"batch_size={self.physical}, but fit was given a batch of {-(-in_batches // self.stride)} examples or "
                "more, so the number of steps does not show the number of passes. Give PrivacyBudget the size of the "
                "largest batch as batch_size."
            )

    def _check_sizes(self, size: int, population: int) -> None:
        """Raises if the sizes of the batches so far contradict that they are drawn independently."""
        doubt = self._sizes.doubt(size, population)
        if doubt is not None:
            self._count_unknown(self.steps, self.optimizer._dp.holders * self._sizes.held)
            raise doubt

    def silence(self) -> None:
        """Nothing is known of steps from here on."""
        self._counter.silence()

    def end(self) -> None:
        """The fit is over, and was not interrupted."""
        if not self.ended:
            self.ended = True
            self.silence()

    def cut_off(self) -> None:
        """The fit is over, and may have been interrupted.

        Other steps may have been taken for a batch that was announced and of which no end was seen. As many are counted
        once more, as steps of which nothing is known. (Nothing ends the announcement at the moment of the interruption:
        what Python calls when it frees a fit may come while TensorFlow builds a graph, and must not build ops.)
        """
        taken = self.stride - int(self._counter.batches.numpy()[-1])
        if not self.ended and self.awaited and taken > 0:
            # They may have come into a logical batch, with examples of other parts.
            self.optimizer._dp.drop_partial()
            self._count_unknown(taken, self.parts * self.optimizer._dp.holders)  # each may have held the same example
        if not self.ended and self.awaited and self.own and self.scheme.counts_passes and self.scheme.independent:
            # The data may have ended early, against the number of batches that they state. An example then chose among
            # fewer of them than ε counts.
            self._count_unknown(self.steps - self._begun_at[2], self.optimizer._dp.holders)
            self.cut_pass = True
        self.end()

    def _count_unknown(self, steps: int, held: int) -> None:
        """Counts so many steps once more, as steps of which each may have held every example so often."""
        dp, halved = self.optimizer._dp, self.optimizer.num_microbatches is not None
        kind = _step_table.UNKNOWN + (_step_table.DISCRETE if self._counter.discrete else 0)
        multiplier = dp.least_noise / held / (2 if halved else 1)
        row = [_step_table.new_origin(), 0, kind, 0, 0, 0, multiplier, steps, 0]
        self._counter.merge(np.array([row]), self.optimizer._dp_ledger)

    @property
    def steps(self) -> int:
        """Returns what the optimizer has taken since the fit began."""
        return self._counter.steps - self._steps_before
