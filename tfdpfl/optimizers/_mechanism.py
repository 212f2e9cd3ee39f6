"""What every DP optimizer does between a loss and an update, whatever the version of Keras."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl import _tap, clips, noise
from tfdpfl._variables import in_memory
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.clipping.finished import check_finished, raw_variable, versions
from tfdpfl.clipping.gradients import added, compiled
from tfdpfl.clipping.plan import Plan
from tfdpfl.clipping.registry import user_rules
from tfdpfl.embeddings import AdaFEST
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.strategies import as_noise
from tfdpfl.optimizers import _counts, _draws, _filled, _replicas, _rows, _workers
from tfdpfl.optimizers._chain import Chain
from tfdpfl.optimizers._clips import clipping_of
from tfdpfl.optimizers._partial import Part, Partial
from tfdpfl.optimizers._schedules import Pieces, pieces_of

# Divided by 2^31 examples, and with all the digits of a small normal, still above float32's least normal number.
LEAST_STDDEV = 1e-20
# The graphs of each mechanism's steps, and at what version they were found in order, by ids of the variables kept.
_Checked = dict[tuple[int, ...], tuple[int, ...]]
_GRAPHS: weakref.WeakKeyDictionary[Mechanism, weakref.WeakKeyDictionary[tf.Graph, _Checked]] = (
    weakref.WeakKeyDictionary())  # fmt: skip

NO_LOSS = (
    "These gradients did not come through the clip, so they were not applied. Hand over what tape.gradient(loss, "
    "variables) gave as it is, in the same tf.function: what was clipped, scaled or added to is refused (the optimizer "
    "takes clipnorm, global_clipnorm and weight_decay, and the loss a factor). Or take the step by "
    "optimizer.minimize(loss, variables, tape=tape), in a train_step self.optimizer.minimize(loss, "
    "self.trainable_variables, tape=tape); each of several optimizers its own. Or use "
    "tfdpfl.clipping.clipped_gradients and add the noise yourself."
)


def _number(name: str, value, low: float, strict: bool, mend: str) -> float:
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < low or (strict and value == low):
        raise ValueError(f"{name}={value!r} must be a finite number {'>' if strict else '>='} {low:g}. {mend}")
    return float(value)


def _count(name: str, value, mend: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer or None. {mend}")
    return int(value)


def _plain(setting: Any) -> Any:
    return setting.to_dict() if isinstance(setting, Pieces) else setting


def _seen(
    sums: list[tf.Tensor], noisy: list[tf.Tensor], normals: list[tf.Tensor], scales: list, bound: tf.Tensor, **options
) -> list[tf.Tensor]:
    """``noisy``; where a replay runs, what it says instead (`tfdpfl._tap`)."""
    if _tap.tape is None or _replicas.number() > 1:
        return noisy
    count, where = len(sums), _tap.caller()

    def take(scales, bound, *arrays):
        before, after, drawn = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
        return _tap.released(before, after, drawn, scales, 1.0 * bound, where=where, **options)

    scales = tf.stack([tf.cast(scale, tf.float64) for scale in scales])
    inputs = [scales, bound, *sums, *noisy, *normals]
    told = tf.nest.flatten(tf.numpy_function(take, inputs, [s.dtype for s in noisy]))
    return [tf.ensure_shape(t, s.shape) for t, s in zip(told, noisy, strict=True)]


class Mechanism:
    """The Gaussian mechanism on clipped gradients.

    The update is ``(sum_i clip(g_i, C) + N(0, (z C)^2 I)) / denominator``, plus the gradient of what in the loss
    depends on no example (Abadi et al. 2016, arXiv:1607.00133, algorithm 1). The denominator is
    ``expected_batch_size`` where it is given, else the number of units (examples or microbatches) in the batch. A
    logical batch may come in several parts (``parts``); its update is that of one batch.

    It belongs to one optimizer object in one process, like the key of its noise (``source``) and its count of what ran
    (``counter``). Saved is one variable of the optimizer, the table of `tfdpfl.optimizers._counts`. (No tf.Module, all
    of which would be saved.)
    """

    def __init__(
        self, l2_norm_clip, noise_multiplier, num_microbatches, parts, expected_batch_size, seed, rows_per_unit=1,
        correlated=None, secure_noise=False, sparse=None,
    ):  # fmt: skip
        self.l2_norm_clip = clips.from_config(l2_norm_clip)
        if not isinstance(self.l2_norm_clip, clips.Clip):
            self.l2_norm_clip = pieces_of("l2_norm_clip", l2_norm_clip) or _number(
                "l2_norm_clip", l2_norm_clip, 0, True, "It bounds the L2 norm of one example's gradient; 1.0 is usual."
            )
        self.clipping = clipping_of(self.l2_norm_clip)
        self.noise_multiplier = pieces_of("noise_multiplier", noise_multiplier) or _number(
            "noise_multiplier", noise_multiplier, 0, False,
            "It is the noise's standard deviation over l2_norm_clip; tfdpfl.compute_noise_multiplier finds it.",
        )  # fmt: skip
        of_steps = isinstance(self.noise_multiplier, Pieces)
        self.least_noise = self.noise_multiplier.least if of_steps else self.noise_multiplier
        self.num_microbatches = _count("num_microbatches", num_microbatches, "None clips every example by itself.")
        parts = _count("gradient_accumulation_steps", parts, "It is how many batches make one update; 1 is usual.")
        self.parts = 1 if parts is None else parts
        rows = _count("rows_per_unit", rows_per_unit, "It is how many rows in a row are one unit; 1 is usual.")
        self.rows_per_unit = 1 if rows is None else rows
        if self.rows_per_unit > 1 and self.num_microbatches is not None:
            raise ValueError(
                f"rows_per_unit={rows_per_unit!r} and num_microbatches={num_microbatches!r} both say whose mean "
                "gradient is clipped. Leave num_microbatches out: a unit is a group of its own, and costs half as much."
            )
        if expected_batch_size is not None:
            expected_batch_size = _number(
                "expected_batch_size", expected_batch_size, 0, True, "It is the sampling rate times the data's size."
            )
        self.expected_batch_size = expected_batch_size
        size = expected_batch_size or 1.0
        stddev = self.clipping.split(self.least_noise, size)[0] * self.clipping.first(self.l2_norm_clip) / size
        if self.least_noise > 0 and stddev < LEAST_STDDEV:
            raise ValueError(
                f"l2_norm_clip={l2_norm_clip!r} with noise_multiplier={noise_multiplier!r} and "
                f"expected_batch_size={expected_batch_size!r} is noise of {stddev:.2g}, which float32 loses where it "
                "may keep the gradient. Scale the loss and l2_norm_clip up."
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0):
            raise ValueError(f"seed={seed!r} must be a non-negative integer, or None for the system's entropy.")
        self.seed = None if seed is None else int(seed)
        correlated = as_noise(correlated, or_none=True)
        for name, usual in (("num_microbatches", None), ("parts", 1), ("rows_per_unit", 1)):
            if correlated is not None and getattr(self, name) != usual:
                name, value = {"parts": "gradient_accumulation_steps"}.get(name, name), getattr(self, name)
                raise ValueError(
                    f"{name}={value!r} beside noise={type(correlated).__name__}: correlated noise has a price for one "
                    f"example a row and one batch a step. Leave {name} at {usual}, or use noise=None."
                )
        if correlated is not None and isinstance(self.l2_norm_clip, clips.AdaptiveClip):
            raise ValueError(
                f"l2_norm_clip={self.l2_norm_clip!r} beside noise={type(correlated).__name__}: steps of correlated "
                "noise are one mechanism, of one clip. Give a number, or use noise=None."
            )
        if not isinstance(secure_noise, bool):
            raise ValueError(f"secure_noise={secure_noise!r} must be True or False.")
        if secure_noise and correlated is not None:
            raise ValueError("secure_noise=True draws fresh noise on a grid: use noise=None with it.")
        if secure_noise and (self.parts > 1 or isinstance(self.l2_norm_clip, clips.Clip)):
            what = f"gradient_accumulation_steps={self.parts}" if self.parts > 1 else f"l2_norm_clip={l2_norm_clip!r}"
            raise ValueError(
                f"{what} beside secure_noise=True: the grid is made for one sum of a known sensitivity. Give "
                "l2_norm_clip a number and take whole batches, or leave secure_noise out."
            )
        self._check_schedules(correlated, secure_noise, sparse)
        self.secure_noise = secure_noise
        self.sparse = self._checked_sparse(sparse, correlated)
        self.source = noise.Source(self.seed)
        self.draws = noise.Source()  # whose keys the model's own random numbers are drawn with
        self.draws_by_example = False  # whether a step that was traced draws any for each example
        self.counter = _counts.Counter()
        self.counter.discrete = secure_noise
        self.chain = None if correlated is None else Chain(correlated, self.noise_multiplier)
        self.table: Any = None  # the optimizer's variable
        self.iterations: Any = None  # the optimizer's count of updates
        self.whole_pass = True  # whether the last watched epoch went through all of its data
        self._partials: dict[tuple[int, ...], Partial] = {}
        self.pending = in_memory(np.int64(0))  # parts that the last step left
        self.user_rules: frozenset[str] = frozenset()  # the ops for which users' rules were in force in its steps
        self.holders = 1  # replicas that may hold the same example, in the step that was traced last

    @property
    def _scheduled(self) -> str | None:
        """Which setting changes from step to step."""
        names = ("noise_multiplier", "l2_norm_clip")
        return next((name for name in names if isinstance(getattr(self, name), Pieces)), None)

    def _check_schedules(self, correlated, secure_noise: bool, sparse) -> None:
        beside = {
            f"noise={type(correlated).__name__}": correlated is not None,
            "secure_noise=True": secure_noise,
            f"sparse={sparse!r}": sparse is not None,
            f"l2_norm_clip={self.l2_norm_clip!r}": isinstance(self.l2_norm_clip, clips.AdaptiveClip),
        }
        name = self._scheduled
        for other in (other for other, given in beside.items() if given and name is not None):
            raise ValueError(
                f"{name} that changes beside {other}, which is made for one {name}: give a number, or leave the other "
                "out."
            )

    def _checked_sparse(self, sparse, correlated) -> AdaFEST | None:
        if isinstance(sparse, dict):
            sparse = AdaFEST(**sparse)
        if sparse is None:
            return None
        if not isinstance(sparse, AdaFEST):
            raise ValueError(f"sparse={sparse!r} must be None, or tfdpfl.AdaFEST.")
        beside = {
            f"num_microbatches={self.num_microbatches!r}": self.num_microbatches is not None,
            f"gradient_accumulation_steps={self.parts}": self.parts > 1,
            f"rows_per_unit={self.rows_per_unit}": self.rows_per_unit > 1,
            f"noise={type(correlated).__name__}": correlated is not None,
            "secure_noise=True": self.secure_noise,
            f"l2_norm_clip={self.l2_norm_clip!r}": isinstance(self.l2_norm_clip, clips.AdaptiveClip),
        }
        for name in (name for name, given in beside.items() if given):
            raise ValueError(
                f"{name} beside sparse=AdaFEST: rows are chosen by the examples of one batch, with fresh noise and one "
                "clip. Leave one of the two out."
            )
        sparse.split(self.noise_multiplier)
        return sparse

    def config(self) -> dict:
        return {
            "l2_norm_clip": _plain(clips.to_config(self.l2_norm_clip)),
            "noise_multiplier": _plain(self.noise_multiplier),
            "num_microbatches": self.num_microbatches,
            "gradient_accumulation_steps": self.parts,
            "expected_batch_size": self.expected_batch_size,
            "rows_per_unit": self.rows_per_unit,
            "seed": self.seed,
            "secure_noise": self.secure_noise,
            "noise": None if self.chain is None else self.chain.noise.to_dict(),
            "sparse": None if self.sparse is None else self.sparse.to_dict(),
        }

    def rows(self) -> np.ndarray:
        """All that is known to have run; see `tfdpfl.optimizers._counts`."""
        if not tf.executing_eagerly():
            raise RuntimeError("What ran can be read between steps, not in a function that is being traced.")
        return self.counter.rows(self.table)

    def own_variables(self) -> set[int]:
        """The ids of what it writes by itself: counts of steps, and noise."""
        of_chain = [] if self.chain is None else self.chain.variables
        return {id(v) for v in [self.table, *of_chain]}

    def ledger(self) -> PrivacyLedger:
        """What is known to have run, with its price."""
        rows = self.rows()
        ledger = _counts.ledger_of(rows) if self.chain is None else self.chain.ledger(rows)
        ledger.user_rules |= self.user_rules
        return ledger

    def check_replicas(self) -> None:
        """Raises a `PrivacyError` where several replicas would take a step that they have no common form of."""
        replicas = _replicas.number()
        if replicas > 1 and not _replicas.among_replicas():
            raise PrivacyError(
                "This step is taken beside the replicas, under a strategy's scope. Have each of them take it: "
                "strategy.run(step, args=(batch,))."
            )
        if replicas > 1 and compiled():
            raise PrivacyError(
                f"{replicas} replicas add up in the middle of the step, which XLA does not compile. Compile the model "
                "with jit_compile=False."
            )
        if replicas > 1 and self.num_microbatches is not None:
            raise PrivacyError(
                f"num_microbatches={self.num_microbatches} on {replicas} replicas, which each see a part of the batch: "
                "a group's examples may be on several. Leave it out, or train on one device."
            )
        if replicas > 1 and self.sparse is not None:
            raise PrivacyError(
                f"sparse=AdaFEST on {replicas} replicas, which each look up rows of their own: those that are kept are "
                "chosen in the middle of the step, from the counts of all. Leave it out, or train on one device."
            )
        if _replicas.workers() > 1 and self.chain is not None:
            raise PrivacyError(
                f"noise={type(self.chain.noise).__name__} on {_replicas.workers()} workers: correlated noise is drawn "
                "again from keys that one process has. Use noise=None, or train under MirroredStrategy."
            )

    def update(
        self, loss: tf.Tensor, variables: Sequence, table: tf.Variable
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """The noisy gradients, one for each variable (None where the loss does not depend on it; rows alone where
        ``sparse`` chooses them), zeros where the logical batch goes on (see `where_whole`); ``table`` is the saved one,
        in which the step is counted."""
        self.check_replicas()
        # Clip, and sum over the batch.
        rows = self.rows_per_unit if self.rows_per_unit > 1 else None
        loss, replicas = _replicas.undivided(loss), _replicas.number()
        secret = self.seed is None and _tap.tape is None  # else all is to be drawn again as it was
        if secret:
            _draws.make_secret(loss, self.draws)
        plan = Plan(loss, variables, self.num_microbatches, rows, replicas)
        self.user_rules |= user_rules()
        self.draws_by_example |= _draws.draws_by_example(loss, plan.analysis, secret)
        _replicas.check_apart(plan.analysis.sources)
        _filled.leave_out_blanks(plan)
        together = _workers.meet(self, tf.cast(plan.units.count, tf.float32), variables)
        units, self.holders = together.units, replicas
        known = self.expected_batch_size if self.parts > 1 else self._denominator(units)
        if self._on_grid:
            known = tf.ones([])
        tables = [] if self.sparse is None else _rows.tables_of(self.sparse, plan, variables)
        clipped, count = self.clipping.clipped(plan, variables, known)
        _rows.check_tables(plan, clipped, tables, variables)
        _GRAPHS.setdefault(self, weakref.WeakKeyDictionary())[clipped.norms.graph] = {}
        used = [i for i, s in enumerate(clipped.sum) if s is not None and i not in tables]
        # Not where the clip, or a check, stops the step; and not in an execution that finds the data at their end.
        before = [clipped.num_units, *together.agreed, *([] if count is None else [count])]
        with tf.control_dependencies(before):
            sums = [tf.ensure_shape(clipped.sum[i], raw_variable(variables[i]).shape) for i in used]
            sums += [] if count is None else [count]

            def done(whole: Part) -> list[tf.Tensor]:
                rows = None
                if self.chain is not None and self.least_noise > 0:  # before the count, which is of its segment
                    ids = [id(raw_variable(variables[i])) for i in used]
                    rows = self.chain.next(self.source, self.counter, whole.drawn.known, ids)
                self.counter.count(whole.drawn, whole.multiplier, table, together.origin)
                return self._noisy(whole, rows, together.key)

            def release(summed: list[tf.Tensor]) -> list[tf.Tensor]:
                """Accumulates; and of a whole batch releases the sum."""
                nonfinite, rows, *sums = summed
                bound = tf.cast(self.clipping.norm, tf.float32)
                drawn = self.counter.drawn(nonfinite, rows / self.rows_per_unit)
                multiplier = self._multiplier(clipped.batch_size)
                if self.holders > 1:  # where nothing is known of batches, which each may draw for itself
                    known = tf.not_equal(drawn.known[_counts.SAMPLING - _counts.DATA], _counts.UNKNOWN)
                    multiplier = tf.where(known, multiplier, multiplier / self.holders)
                part = Part(sums, units, drawn, multiplier, bound)
                if self.parts == 1:
                    return done(part)
                released, pending = self._partial([variables[i] for i in used], part).add(part, done)
                self.pending.assign(pending)
                return released

            counts = [tf.cast(number, tf.float32) for number in (clipped.num_nonfinite, clipped.batch_size)]
            released = _replicas.once(release, [*counts, *sums])
            if self.sparse is not None:
                stddev = self._stddev(self._denominator(units))
                used += tables
                released += _rows.kept(
                    self.sparse, self.noise_multiplier, stddev, plan, clipped, tables, variables, self.source
                )
        # What depends on no example goes beside the noise.
        result: list[tf.Tensor | tf.IndexedSlices | None] = [None] * len(variables)
        for i, mean in zip(used, released, strict=False):
            result[i] = mean
        for i, r in enumerate(clipped.regularization):
            if r is not None:
                result[i] = r if result[i] is None else result[i] + r
        return [
            g if g is None else _rows.released(tf.cast(g, raw_variable(v).dtype))
            for g, v in zip(result, variables, strict=True)
        ]

    def _denominator(self, units: tf.Tensor) -> tf.Tensor:
        if self.expected_batch_size is not None:
            return tf.constant(self.expected_batch_size, tf.float32)
        return tf.maximum(units, 1)

    def _noisy(self, whole: Part, rows: list[tf.Tensor] | None, key: tf.Tensor | None) -> list[tf.Tensor]:
        """(sums + noise) / denominator, the noise being fresh (of this process, or of a ``key`` that workers share), or
        ``rows`` of unit base normals that correlate. Of sums that are made of parts and have a denominator that only
        now is known, the division is to come; the others are divided already. What else was summed, for the clip, goes
        to it."""
        sums, denominator = whole.sums, self._denominator(whole.units)
        _, of_count = self.clipping.split(self._now(tf.float32), denominator)
        if self._on_grid:
            return self._rounded_and_noisy(sums, denominator, whole.multiplier, key)
        at = len(sums) if of_count is None else len(sums) - 1  # where the count is
        if self.parts > 1 and self.expected_batch_size is None:
            sums = [s / tf.cast(denominator, s.dtype) for s in sums[:at]] + sums[at:]
        if self.least_noise > 0:
            stddev = self._stddev(denominator)
            if rows is None:
                normals = self.source.gaussian([s.shape for s in sums], stddev, key)
                normals[at:] = [n * (of_count / stddev) for n in normals[at:]]
            else:
                normals = [row * (self.chain.noise.unit * stddev) for row in rows]
            # In the noise's type: a sum of float64 weights would keep digits that no noise covers.
            noisy = [tf.cast(added(s, n), s.dtype) for s, n in zip(sums, normals, strict=True)]
            # Correlated noise is no independent one: a unit moves each step's sum by the clip.
            scales = [stddev if rows is None else self.clipping.norm / denominator] * at + [of_count] * (len(sums) - at)
            bound = 1 / whole.multiplier if rows is None else tf.ones([], tf.float64)
            sums = _seen(sums, noisy, normals, scales, bound, moments=rows is None)
        if of_count is not None:
            self.clipping.adapt(sums[at], denominator)
        return sums

    def _stddev(self, denominator: tf.Tensor) -> tf.Tensor:
        """The standard deviation of the noise on every entry of the mean gradient."""
        multiplier = self.clipping.split(self._now(tf.float32), denominator)[0]
        if self.sparse is not None:  # whose counts are paid for out of it
            multiplier = self.sparse.split(multiplier)[0]
        return multiplier * self.clipping.norm / denominator

    @property
    def _on_grid(self) -> bool:
        return self.secure_noise and self.least_noise > 0

    def _rounded_and_noisy(
        self, sums: list[tf.Tensor], denominator: tf.Tensor, multiplier: tf.Tensor, key: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """The sums, rounded to a grid, with whole noise added, and then divided."""
        sizes = [s.shape.num_elements() for s in sums]
        step, sigma = noise.grid(self.l2_norm_clip, self.noise_multiplier, sum(sizes))
        drawn = tf.split(self.source.discrete(sum(sizes), sigma, key), sizes)
        drawn = [tf.reshape(part, total.shape) for total, part in zip(sums, drawn, strict=True)]
        rounded = [tf.cast(tf.round(tf.cast(total, tf.float64) / step), tf.int64) for total in sums]
        wholes = [total + part for total, part in zip(rounded, drawn, strict=True)]
        wholes = _seen(rounded, wholes, drawn, [sigma] * len(sums), 1 / multiplier)
        # What follows the whole numbers' sum depends on nothing else of the data: its rounding is harmless.
        return [
            tf.cast(tf.cast(whole, tf.float64) * step / tf.cast(denominator, tf.float64), total.dtype)
            for whole, total in zip(wholes, sums, strict=True)
        ]

    # -- logical batches of several parts --------------------------------------------------------------------

    def _partial(self, variables: Sequence, part: Part) -> Partial:
        """What there is of the logical batch for these variables; steps on others are of another."""
        which = tuple(id(raw_variable(v)) for v in variables)
        if which not in self._partials:
            self._partials[which] = Partial(self.parts, part)
        return self._partials[which]

    def where_whole(self, apply: Callable[[], Any]) -> None:
        """Has ``apply`` done after the last part of a logical batch, and nothing after the others."""
        if self.parts == 1:
            apply()
        else:
            _replicas.each_where(lambda: tf.equal(self.pending, 0), apply)

    def drop_partial(self, unless: Sequence[float] | None = None) -> None:
        """Begins the logical batch anew. What was not released costs nothing. A batch is kept of which all parts were
        drawn as ``unless`` says (see `Counter.announce`)."""
        for partial in self._partials.values():
            if not partial.belongs_to(unless):
                partial.drop()
        self.pending.assign(max((int(p.at) for p in self._partials.values()), default=0))

    def _now(self, dtype: tf.DType) -> Any:
        """The noise multiplier of the step that is traced. The same is drawn and counted."""
        given = self.noise_multiplier
        return given.at(raw_variable(self.iterations), dtype) if isinstance(given, Pieces) else given

    def _multiplier(self, batch_size: tf.Tensor) -> tf.Tensor:
        """The noise's standard deviation over the sensitivity to one example."""
        multiplier = tf.convert_to_tensor(self._now(tf.float64), tf.float64)
        if self.num_microbatches is None:
            return multiplier
        # One example moves a whole group's clipped mean, by up to 2 C, unless the group is that example.
        return tf.where(tf.equal(self.num_microbatches, batch_size), multiplier, multiplier / 2)

    def check_finished(self, kept: Sequence = ()) -> None:
        """Looks again at the steps that were traced; see `tfdpfl.clipping.finished.check_finished`."""
        variables = tuple(map(id, kept))
        for graph, checked in list(_GRAPHS.get(self, {}).items()):
            if checked.get(variables) != versions(graph):
                check_finished(graph, kept)
                checked[variables] = versions(graph)
