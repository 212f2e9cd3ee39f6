"""Does what every DP optimizer does between a loss and an update, whatever the version of Keras."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfdpfl import _replay_hook
from tfdpfl._types import Json
from tfdpfl._variables import in_memory
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.graph import compiled
from tfdpfl.clipping.pipeline import ClippedGradients, ClippingPipeline
from tfdpfl.clipping.registry import user_rules
from tfdpfl.clipping.step_checks import check_finished, raw_variable, versions
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.source import Source
from tfdpfl.optimizers import _draws, _filled, _replicas, _step_table, _workers
from tfdpfl.optimizers._accumulator import GradientAccumulator, Part, no_rows
from tfdpfl.optimizers._clips import clipping_of
from tfdpfl.optimizers._fresh_noise import FreshNoise, NoiselessMean
from tfdpfl.optimizers._schedules import PiecewiseConstant
from tfdpfl.optimizers._settings import Settings

__all__ = ["NO_LOSS", "GradientPrivatizer", "after_a_step"]

# The graphs of each privatizer's steps, and at what version they were found in order, by ids of the variables kept.
_Checked = dict[tuple[int, ...], tuple[int, ...]]
_GRAPHS: weakref.WeakKeyDictionary[GradientPrivatizer, weakref.WeakKeyDictionary[tf.Graph, _Checked]] = (
    weakref.WeakKeyDictionary())  # fmt: skip

NO_LOSS = (
    "These gradients did not come through the clip, so they were not applied. Pass exactly the tensors that "
    "tape.gradient(loss, variables) returned, in the same tf.function: gradients that were clipped, scaled or added to "
    "are refused (the optimizer accepts clipnorm, global_clipnorm and weight_decay, and the loss accepts a factor). Or "
    "take the step by optimizer.minimize(loss, variables, tape=tape), in a train_step self.optimizer.minimize(loss, "
    "self.trainable_variables, tape=tape); each of several optimizers its own. Or use "
    "tfdpfl.clipping.clipped_gradients and add the noise yourself."
)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step that is traced.

    Attributes:
      variables: that it trains.
      table: the saved one, in which the step is counted.
      plan: of its clipped sums.
      agreement: what all that take the step have in common.
      clipped: the clipped sums.
      count: what the clip releases beside them, or None.
      used: the places of the variables whose sums are released whole.
      tables: the places of those of which only some rows are.
      counts: what these rows are chosen by, a vector for each table.
    """

    variables: Sequence
    table: tf.Variable
    plan: ClippingPipeline
    agreement: _workers.WorkerAgreement
    clipped: ClippedGradients
    count: tf.Tensor | None
    used: list[int]
    tables: list[int]
    counts: list[tf.Tensor]


class GradientPrivatizer:
    """Clips, sums, adds noise, divides and counts.

    The update is ``(sum_i clip(g_i, C) + noise) / denominator``, plus the gradient of what in the loss depends on no
    example (Abadi et al. 2016, arXiv:1607.00133, algorithm 1). The denominator is ``expected_batch_size`` where it is
    given, else the number of units (examples or microbatches) in the batch. A logical batch may come in several parts;
    its update is that of one batch.

    It belongs to one optimizer object in one process, like the key of its noise (``source``) and its count of what ran
    (``counter``). One variable of the optimizer is saved, the table of `tfdpfl.optimizers._step_table`. (No tf.Module,
    all of which would be saved.)

    Args:
      settings: of the optimizer.
      noise: of its steps, the only object that knows which kind it is.
    """

    def __init__(self, settings: Settings, noise: FreshNoise):
        self.settings, self.noise = settings, noise
        self.parts, self.seed = settings.gradient_accumulation_steps, settings.seed
        self.least_noise = settings.least_noise
        self.clipping = clipping_of(settings.l2_norm_clip)
        self.source = noise.source = Source(settings.seed)
        self.draws = Source()  # whose keys the model's own random numbers are drawn with
        self.draws_by_example = False  # whether a step that was traced draws any for each example
        self.counter = _step_table.Counter()
        self.counter.discrete = noise.discrete
        self.table: tf.Variable  # the optimizer's
        self.iterations: tf.Variable  # the optimizer's count of updates
        self.built_on: list[weakref.ref] = []  # the variables that the optimizer was built for
        self.whole_pass = True  # whether the last watched epoch went through all of its data
        self._accumulators: dict[tuple[int, ...], GradientAccumulator] = {}
        self.pending = in_memory(np.int64(0))  # parts that the last step left
        self.user_rules: frozenset[str] = frozenset()  # the ops for which users' rules were in force in its steps
        self._others: dict[int, GradientPrivatizer] = {}  # on the same weights, whose steps it took in
        self.holders = 1  # replicas that may hold the same example, in the step that was traced last

    def to_dict(self) -> Json:
        """Returns all that the optimizer was made with, as JSON can hold it."""
        return {**self.settings.to_dict(), **self.noise.to_dict()}

    def rows(self) -> np.ndarray:
        """Returns all that is known to have run; see `tfdpfl.optimizers._step_table`."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                "A function that is being traced cannot read the steps that ran: read them between steps."
            )
        return self.counter.rows(self.table)

    def own_rows(self) -> np.ndarray:
        """Returns what is known to have run, without what other privatizers of this process state themselves."""
        return self.counter.own_rows(self.table)

    def take_in(self, others: Iterable[GradientPrivatizer]) -> None:
        """Adds the steps of others on the same weights to the saved table, so that a file with it has them."""
        self._others |= {id(other): other for other in others if other is not self}
        for other in self._with_others()[1:]:
            self.counter.take_in(other.noise.rows_for_others(other.own_rows()), self.table)

    def _with_others(self) -> list[GradientPrivatizer]:
        """Returns itself, those that it took steps in from, those that these did, and so on."""
        found: dict[int, GradientPrivatizer] = {}
        todo = [self]
        while todo:
            each = todo.pop()
            if id(each) not in found:
                found[id(each)] = each
                todo += each._others.values()
        return list(found.values())

    def own_variables(self) -> set[int]:
        """Returns the ids of what it writes by itself: counts of steps, and noise."""
        return {id(v) for v in [self.table, *self.noise.variables]}

    def ledger(self) -> PrivacyLedger:
        """Returns what is known to have run, with its price."""
        ledger = PrivacyLedger()
        for each in self._with_others():
            ledger.merge(each.noise.ledger(each.own_rows()))
            ledger.user_rules |= each.user_rules
        return ledger

    def check_replicas(self) -> None:
        """Raises a `PrivacyError` where several replicas would take a step that they have no common form of."""
        replicas = _replicas.number()
        if replicas == 1:
            return
        if not _replicas.among_replicas():
            raise PrivacyError(
                "This step is taken outside of the replicas, under a strategy's scope. Let each replica take it: "
                "strategy.run(step, args=(batch,))."
            )
        if compiled():
            raise PrivacyError(
                f"{replicas} replicas add up in the middle of the step, which XLA does not compile. Compile the model "
                "with jit_compile=False."
            )
        groups = self.settings.num_microbatches
        if groups is not None and groups % replicas:
            raise PrivacyError(
                f"num_microbatches={groups} on {replicas} replicas, of which each clips as many groups: choose a "
                f"multiple of {replicas}, or None to clip every example by itself."
            )

    def update(
        self, loss: tf.Tensor, variables: Sequence, table: tf.Variable
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Returns the noisy gradients, one for each variable.

        A gradient is None where the loss does not depend on the variable, rows alone where the noise chooses them, and
        zeros where the logical batch goes on (see `where_whole`).

        Args:
          loss: of the batch.
          variables: to train.
          table: the saved one, in which the step is counted.
        """
        self.check_replicas()
        step = self._clipped(loss, variables, table)
        clipped, sums_of = step.clipped, step.used
        # Not where the clip, or a check, stops the step; and not in an execution that finds the data at their end.
        before = [clipped.num_units, *step.agreement.agreed, *([] if step.count is None else [step.count])]
        with tf.control_dependencies(before):
            sums = [tf.ensure_shape(clipped.sum[i], raw_variable(variables[i]).shape) for i in sums_of]
            sums += [] if step.count is None else [step.count]
            sums += [*step.counts, *(clipped.sum[i] for i in step.tables)]
            of_groups = tf.not_equal((self.settings.num_microbatches or 0) // _replicas.number(), clipped.batch_size)
            numbers = (clipped.num_nonfinite, clipped.batch_size, of_groups)
            counts = [tf.cast(number, tf.float32) for number in numbers]
            released = iter(_replicas.once(functools.partial(self._release, step), [*counts, *sums]))
        # What depends on no example goes beside the noise.
        result: list[tf.Tensor | tf.IndexedSlices | None] = [None] * len(variables)
        for i in sums_of:
            result[i] = next(released)
        for i in step.tables:
            shape = raw_variable(variables[i]).shape
            values = tf.reshape(next(released), [-1, *shape[1:]])
            result[i] = tf.IndexedSlices(values, next(released), tf.constant(shape.as_list(), tf.int64))
        for i, r in enumerate(clipped.regularization):
            if r is not None:
                result[i] = r if result[i] is None else result[i] + r
        return [
            g if g is None else _released(tf.cast(g, raw_variable(v).dtype))
            for g, v in zip(result, variables, strict=True)
        ]

    def _clipped(self, loss: tf.Tensor, variables: Sequence, table: tf.Variable) -> _Step:
        """Clips each unit's gradient, and sums over the batch of one replica."""
        settings, replicas = self.settings, _replicas.number()
        rows = settings.rows_per_unit if settings.rows_per_unit > 1 else None
        loss = _replicas.undivided(loss)
        secret = self.seed is None and _replay_hook.tape is None  # else all is to be drawn again as it was
        if secret:
            _draws.make_secret(loss, self.draws)
        plan = ClippingPipeline(loss, variables, settings.num_microbatches, rows, replicas)
        self.user_rules |= user_rules()
        self.draws_by_example |= _draws.draws_by_example(loss, plan.analysis, secret)
        _replicas.check_apart(plan.analysis.sources)
        _filled.leave_out_blanks(plan)
        agreement = _workers.agree(
            tf.cast(plan.units.count, tf.float32), variables, self.to_dict(), self.counter, self.source,
            self.noise.draws,
            lambda: [raw_variable(self.iterations), self.pending, self.clipping.norm, *self.noise.state()],
        )  # fmt: skip
        self.holders = replicas
        denominator = settings.expected_batch_size if self.parts > 1 else self._denominator(agreement.units)
        tables = self.noise.tables_of(plan, variables)
        clipped, count = self.clipping.clipped(plan, variables, tf.ones([]) if self.noise.divides else denominator)
        _GRAPHS.setdefault(self, weakref.WeakKeyDictionary())[clipped.norms.graph] = {}
        used = [i for i, s in enumerate(clipped.sum) if s is not None and i not in tables]
        counts = self.noise.counts(plan, clipped, tables, variables)
        return _Step(variables, table, plan, agreement, clipped, count, used, tables, counts)

    def _release(self, step: _Step, summed: list) -> list[tf.Tensor]:
        """Accumulates the sums of all replicas; and of a whole batch releases them: of each variable the mean, then of
        each table the rows and their numbers."""
        nonfinite, rows, of_groups, *sums = summed
        sums, tables = _cut(sums, len(step.tables))
        drawn = self.counter.drawn(nonfinite, rows / self.settings.rows_per_unit)
        multiplier = self._multiplier(of_groups)
        if self.holders > 1:  # where nothing is known of batches, which each may draw for itself
            known = tf.not_equal(drawn.known[_step_table.SAMPLING - _step_table.DATA], _step_table.UNKNOWN)
            multiplier = tf.where(known, multiplier, multiplier / self.holders)
        part = Part(sums, tables, step.agreement.units, drawn, multiplier, tf.cast(self.clipping.norm, tf.float32))
        finish = functools.partial(self._finish, step)
        if self.parts == 1:
            return finish(part)

        def nothing() -> list[tf.Tensor]:
            zeros = [tf.zeros(s.shape, s.dtype) for s in sums[: len(step.used)]]
            return zeros + [part for t in tables for part in no_rows(t)]

        trained = [step.variables[i] for i in [*step.used, *step.tables]]
        released, pending = self._accumulator(trained, part).add(part, finish, nothing)
        self.pending.assign(pending)
        return released

    def _finish(self, step: _Step, whole: Part) -> list[tf.Tensor]:
        """Counts the step, and returns the noisy mean of a whole batch; what else was summed goes to the clip."""
        denominator, at = self._denominator(whole.units), len(step.used)
        sums, counts = _cut(whole.sums, len(step.tables))
        multiplier, stddev_of_count = self.clipping.split(self._multiplier_of_sums(), denominator)
        stddev = multiplier * self.clipping.norm / denominator
        late = self.parts > 1 and self.settings.expected_batch_size is None and not self.noise.divides
        divisor = denominator if late else None  # only now known
        if divisor is not None:
            sums = [s / tf.cast(denominator, s.dtype) for s in sums[:at]] + sums[at:]
        keys = step.agreement.keys
        of_sums, others = (None, None) if keys is None else (keys[0], keys[1:])
        rows = self.noise.rows(self._now(), stddev, divisor, counts, whole.tables, others)
        noise = None
        if self.least_noise > 0:
            mean = NoiselessMean(
                sums, [stddev] * at + [stddev_of_count] * (len(sums) - at), stddev, denominator,
                tf.cast(self.clipping.norm, tf.float32), whole.multiplier, whole.drawn.known,
                [id(raw_variable(step.variables[i])) for i in step.used], of_sums,
            )  # fmt: skip
            noise = self.noise.draw(mean, self.counter)
        # Of correlated noise it is the segment, which all workers have.
        origin = step.agreement.origin if noise is None or self.noise.segments is None else None
        self.counter.count(whole.drawn, whole.multiplier, step.table, origin)
        if noise is not None:
            sums = self.noise.add(mean, noise)
        if step.count is not None:
            self.clipping.adapt(sums[at], denominator)
        return sums[:at] + rows

    def _denominator(self, units: tf.Tensor) -> tf.Tensor:
        if self.settings.expected_batch_size is not None:
            return tf.constant(self.settings.expected_batch_size, tf.float32)
        return tf.maximum(units, 1)

    def _multiplier_of_sums(self) -> float | tf.Tensor:
        """Returns the noise multiplier of what the clip releases."""
        multiplier = self.noise.multiplier_of_sums(self._now())
        return tf.cast(multiplier, tf.float32) if tf.is_tensor(multiplier) else multiplier

    def _now(self) -> float | tf.Tensor:
        """Returns the noise multiplier of the step that is traced. The same is drawn and counted."""
        given = self.settings.noise_multiplier
        return given.at(raw_variable(self.iterations), tf.float64) if isinstance(given, PiecewiseConstant) else given

    def _multiplier(self, of_groups: tf.Tensor) -> tf.Tensor:
        """Returns the noise's standard deviation over the sensitivity to one example. It is given how many replicas
        may have groups of several examples."""
        multiplier = tf.convert_to_tensor(self._now(), tf.float64)
        if self.settings.num_microbatches is None:
            return multiplier
        # One example moves a whole group's clipped mean, by up to 2 C, unless the group is that example.
        return tf.where(of_groups > 0, multiplier / 2, multiplier)

    # -- logical batches of several parts --------------------------------------------------------------------

    def _accumulator(self, variables: Sequence, part: Part) -> GradientAccumulator:
        """Returns what there is of the logical batch for these variables; steps on others are of another."""
        which = tuple(id(raw_variable(v)) for v in variables)
        if which not in self._accumulators:
            in_turns = self.noise.segments is not None
            self._accumulators[which] = GradientAccumulator(self.parts, part, in_turns)
        return self._accumulators[which]

    def where_whole(self, apply: Callable[[], object]) -> None:
        """Calls ``apply`` after the last part of a logical batch, and not after the others."""
        if self.parts == 1:
            apply()
        else:
            _replicas.each_where(lambda: tf.equal(self.pending, 0), apply)

    def drop_partial(self, unless: Sequence[float] | None = None) -> None:
        """Begins the logical batch anew. A sum that was not released costs nothing. A batch is kept if all its
        parts were drawn as ``unless`` states (see `Counter.announce`)."""
        for accumulator in self._accumulators.values():
            if not accumulator.belongs_to(unless):
                accumulator.drop()
        self.pending.assign(max((int(a.at) for a in self._accumulators.values()), default=0))

    def check_finished(self, kept: Sequence = ()) -> None:
        """Looks again at the steps that were traced; see `tfdpfl.clipping.step_checks.check_finished`."""
        variables = tuple(map(id, kept))
        for graph, checked in list(_GRAPHS.get(self, {}).items()):
            if checked.get(variables) != versions(graph):
                check_finished(graph, kept)
                checked[variables] = versions(graph)


def after_a_step(gradients: Iterable[tf.Tensor | tf.IndexedSlices | None]) -> list[tf.Tensor]:
    """Returns what an update has to wait for: one of the gradients. Else TensorFlow may count an update, and decay the
    weights, in an execution that finds the data at their end, and noise that changes would change a step too early."""
    for g in gradients:
        if g is not None:
            return [g.values if isinstance(g, tf.IndexedSlices) else g]
    return []


def _released(g: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Marks a gradient as public from here on."""
    if not isinstance(g, tf.IndexedSlices):
        return graph_tools.released(g)
    return tf.IndexedSlices(graph_tools.released(g.values), graph_tools.released(g.indices), g.dense_shape)


def _cut(tensors: list, number: int) -> tuple[list, list]:
    """Returns all but the last ``number`` tensors, and these."""
    at = len(tensors) - number
    return tensors[:at], tensors[at:]
