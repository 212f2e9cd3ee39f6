"""From a loss to the clipped sum of its examples' gradients.

The graph that computed the loss is read backwards (`batch_axis`), the loss is split into one loss an example
(`loss`), and each op that uses a weight yields the norms and the clipped sum of its examples' gradients
(`registry.Op.rule`, `fallback`).
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping import ops as _ops  # noqa: F401 (fills the registry)
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.gradients import EmbeddingGradient, MaterializedGradient, Units, merge
from tfdpfl.clipping.graph import key
from tfdpfl.clipping.inline_control_flow import InlinedControlFlow, close
from tfdpfl.clipping.loss import PerExampleLoss
from tfdpfl.clipping.own_gradients import check_own_gradients
from tfdpfl.clipping.own_rules import check_promises
from tfdpfl.clipping.refusals import EAGER, NO_BATCH, mixing
from tfdpfl.clipping.reparametrized import (
    Part,
    carried_back,
    chain,
    formed_at_roots,
    inner_product,
    isometric,
    unmoved,
    vocabulary_side,
)
from tfdpfl.clipping.sizes import as_freed, original, read_free
from tfdpfl.clipping.states import TAINTED, Batch, Handle, Mixed, Public, Size
from tfdpfl.clipping.step_checks import (
    READ,
    before_it_runs,
    check_arguments,
    check_public,
    name_of,
    raw_variable,
    resource,
)
from tfdpfl.clipping.variable_writes import tainted_read
from tfdpfl.clipping.weight_uses import WeightUses
from tfdpfl.errors import PrivacyError

__all__ = ["ClippedGradients", "ClippingPipeline"]

# Else TensorFlow traces a branch in which a replica has no examples.
_OF_SEVERAL = (
    " For several replicas all batches must be of one known size that their number divides: drop_remainder=True. For "
    "several workers data must be without end, too: repeat(), and steps_per_epoch."
)


@dataclasses.dataclass(frozen=True)
class ClippedGradients:
    """Holds what `clipped_gradients` returns.

    Attributes:
      sum: for each variable, the sum over units (examples, or microbatches) of the clipped gradients, without noise.
        The L2 norm of one unit's part, over all variables together, is at most ``l2_norm_clip``. None where the loss
        does not depend on the variable. (Rows with their numbers where `ClippingPipeline.leave_in_rows` asks for them.)
      norms: [units], each unit's gradient norm before clipping; NaN or infinite where it was not finite.
      regularization: for each variable, the gradient of the part of the loss that depends on no example, or None.
      num_units: scalar int32, how many units there were.
      batch_size: scalar int32, how many examples there were.
      num_nonfinite: scalar int32, how many had a gradient that was not finite; they contribute zero.
      absent: bool [units], which units are no examples (`ClippingPipeline.leave_out`); they contribute zero, and their
        norm is 0.
    """

    sum: list[tf.Tensor | tf.IndexedSlices | None]
    norms: tf.Tensor
    regularization: list[tf.Tensor | None]
    num_units: tf.Tensor
    batch_size: tf.Tensor
    num_nonfinite: tf.Tensor
    absent: tf.Tensor


def _distinct(variables: Sequence) -> list:
    """The raw variables, each of them once."""
    if not variables:
        raise PrivacyError("variables is empty: there is no weight to find gradients for.")
    raw = [raw_variable(v) for v in variables]
    for i, v in enumerate(raw):
        for j, other in enumerate(raw[:i]):
            if v is other:
                raise ValueError(f"variables[{i}] is variables[{j}] again. Give each variable once.")
    return raw


class ClippingPipeline:
    """Everything between a loss and its clipped sum."""

    def __init__(
        self, loss: tf.Tensor, variables: Sequence, num_microbatches: int | None, rows_per_unit: int | None = None,
        replicas: int = 1,
    ):  # fmt: skip
        if isinstance(loss, (list, tuple)) and len(loss) == 1:
            loss = loss[0]
        if not tf.is_tensor(loss) or hasattr(loss, "numpy"):
            raise PrivacyError(EAGER)
        self.graph: tf.Graph = loss.graph
        self.replicas = replicas
        self.variables = _distinct(variables)
        self.arguments: dict[str, int] = {}  # of the graph's function, that are given as weights
        close(self.graph, loss)
        self.analysis = self._analyse(loss)
        size, unsure = self._batch_size()
        check_own_gradients(self.analysis)
        check_promises(self.analysis)
        opened = InlinedControlFlow(self.analysis, [loss], size)
        self.batch_size = self._checked(size, unsure)
        self._check_reads(variables)
        self.sizes = PerExampleLoss(self.analysis, self.batch_size, replicas, self.known_size)
        self.losses, self.public_loss = self._split(opened.now.get(key(loss), loss))
        self._look_again()
        self.dtype = tf.float64 if any(v.dtype in (tf.float64, "float64") for v in self.variables) else tf.float32
        losses, count = self._grouped(self.losses, num_microbatches, rows_per_unit)
        self.units = Units(self.batch_size, count, self.dtype)
        self.uses = WeightUses(self.analysis, self.variables, opened)
        self.parts = self.uses.parts(losses, self.units, self.sizes)
        self.in_rows: frozenset[int] = frozenset()
        self.absent: tf.Tensor | None = None

    # -- reading the graph -----------------------------------------------------------------------------------

    def _analyse(self, loss: tf.Tensor) -> BatchAxis:
        handles: dict[int | str | tuple[str, bytes] | None, int] = {
            id(v.handle): i for i, v in enumerate(self.variables) if hasattr(v, "handle")
        }

        def source(t: tf.Tensor):
            known = resource(t)
            return known and dataclasses.replace(known, index=handles.get(known.name))

        analysis = BatchAxis(self.graph, source)
        for i, v in enumerate(self.variables):
            if hasattr(v, "handle"):
                continue
            if not tf.is_tensor(v):
                raise PrivacyError(f"variables[{i}] is {type(v).__name__}, not a variable or a tensor of the graph.")
            if hasattr(v, "numpy") or v.graph is not self.graph:
                self.variables[i] = v = self.graph.capture(v)
            if isinstance(v.op.type, str) and v.op.type not in ("Placeholder", "PlaceholderV2"):
                analysis.run([v])
            if v.op.name in analysis.ops or graph_tools.captured(v) is not None:
                check_public(i, v, analysis[v])
            else:
                self.arguments[v.op.name] = i
            analysis.declare_state(v, Public(frozenset([i])))
        analysis.run([loss])
        return analysis

    def _check_reads(self, variables: Sequence) -> None:
        tainted = tainted_read(self.analysis)
        if tainted is not None:
            origin, handle = tainted
            name = handle.index is not None and name_of(variables[handle.index])
            raise PrivacyError(mixing(dataclasses.replace(origin, why=f"{TAINTED} ({name})") if name else origin))

    def _split(self, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The losses of the examples, [batch], and what depends on no example."""
        while graph_tools.recomputes(loss.op):
            loss = loss.op.inputs[loss.value_index]
        losses, public = self.sizes(loss)
        state = self.analysis[losses]
        if state != Batch(0, 1) and not (isinstance(state, Batch) and state.axis == 0):
            origin = state if isinstance(state, Mixed) else Mixed("loss", loss.op.name, "has no batch axis")
            raise PrivacyError(mixing(origin))
        return losses, public

    def _look_again(self) -> None:
        """Has the step checked once all of it is traced (`step_checks`)."""
        read = {Handle(None, handle.name): (op.type, op.name) for handle, op in self.analysis.reads}
        READ.setdefault(self.graph, {}).update(read)
        graph_tools.keep_graphs_around(self.graph)
        if arguments := self.arguments:
            graph = weakref.ref(self.graph)
            before_it_runs(self.graph, lambda: check_arguments(graph(), arguments))

    def _batch_size(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """How long the first input is, and the inputs that may be of another length."""
        sources = [as_freed(t) for t in self.analysis.sources]
        self.analysis.replace_sources(dict(zip(map(key, self.analysis.sources), sources, strict=True)))
        signature = getattr(self.graph, "structured_input_signature", None)
        ragged = [s for s in tf.nest.flatten(signature) if isinstance(s, tf.RaggedTensorSpec | tf.SparseTensorSpec)]
        if ragged:
            raise PrivacyError(
                f"The step takes in a {type(ragged[0]).__name__}, whose values are not rows of examples. Pass a "
                "tensor: to_tensor() of a ragged one, tf.sparse.to_dense of a sparse one."
            )
        if not sources:
            raise PrivacyError(NO_BATCH + (_OF_SEVERAL if self.replicas > 1 else ""))
        given = [original(t) for t in sources]
        known = {t.shape[0] for t in given} - {None}
        if len(known) > 1:
            shapes = ", ".join(str(t.shape) for t in given)
            raise PrivacyError(f"The inputs of the step disagree about the batch size: {shapes}.")
        read_free(sources, [v for v in self.variables if not hasattr(v, "handle")])
        self.known_size = known.pop() if known else None
        free = [t for t in sources if t.shape.rank and None in t.shape[1:]]
        if free:
            warnings.warn(
                f"The batch has lengths that are not fixed ({free[0].shape}). If batches are padded to their longest "
                "example, this example changes the gradients of the others, and the clip does not bound that: mask the "
                "padding, or pad all batches to one length. If all batches already have one length, state it: "
                "tf.data.Dataset.from_generator(..., output_signature=...) in place of a generator.",
                stacklevel=2,
            )
        return self._known(tf.shape(sources[0])[0]), sources[1:]

    def _checked(self, size: tf.Tensor, unsure: list[tf.Tensor]) -> tf.Tensor:
        """The batch size, unless a length of the inputs or in the graph is at odds with it. The loops that were opened
        do without these checks, of which some are about what the loops make."""
        checks = [
            (tf.equal(tf.shape(t)[0], size), "tfdpfl: the inputs of the step disagree about the batch size.")
            for t in unsure
        ]
        one = tf.maximum(size, 1)
        checks += [
            (
                tf.equal(tf.shape(y)[axis] % one, 0),
                f"tfdpfl: {y.op.type} ({y.op.name!r}) cuts across examples of the batch.",
            )
            for y, axis in self.analysis.checks
            if y.graph is self.graph
        ]
        self.holds = [holds for holds, _ in checks]
        with tf.control_dependencies([graph_tools.require(*check) for check in checks]):
            return self._known(size)

    def _known(self, size: tf.Tensor) -> tf.Tensor:
        """The batch size, as the analysis knows it."""
        size = tf.identity(size)
        self.analysis.declare_state(size, Size(((1, 1),)))
        return size

    def _grouped(self, losses: tf.Tensor, groups: int | None, rows: int | None) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Losses of the units (``groups`` of them on all replicas, or each of so many rows), and their number if it is
        not the batch size."""
        m = rows if groups is None else groups // self.replicas
        if m is None:
            return losses, None
        known = self.known_size
        if known is not None and known % m:
            raise PrivacyError(
                f"rows_per_unit={m} does not divide the batch of {known} rows. Give batches of whole units."
                if groups is None
                else f"num_microbatches={groups} does not divide the batch of {known * self.replicas} examples. Choose "
                "a divisor, or None to clip every example by itself."
            )
        message = (
            f"tfdpfl: rows_per_unit={m} does not divide the batch. Give batches of whole units, of a multiple of {m} "
            "rows (drop_remainder=True)."
            if groups is None
            else f"tfdpfl: num_microbatches={groups} does not divide the batch. Use batches of a multiple of {groups} "
            "examples (drop_remainder=True), or num_microbatches=None to clip every example by itself."
        )
        whole = tf.equal(self.batch_size % m, 0)
        self.holds.append(whole)
        with tf.control_dependencies([graph_tools.require(whole, message)]):
            count = self.batch_size // m if groups is None else tf.where(self.batch_size > 0, m, 0)
        per = m if groups is None else self.batch_size // m
        return tf.reduce_mean(tf.reshape(losses, tf.stack([count, per])), 1), count

    # -- norms and sums --------------------------------------------------------------------------------------

    def squared_norms(self) -> tf.Tensor:
        """[units], over all variables: never below the truth by more than a thousandth of it. If terms of a sum
        cancel to as little as its rounding error, the error is added."""
        return self.squared_norms_of([0] * len(self.variables))[0]

    def squared_norms_of(self, group_of: Sequence[int]) -> list[tf.Tensor]:
        """As `squared_norms`, for each of several groups of variables; ``group_of`` has the number of each one's."""
        self.group_of = list(group_of)
        parts_of: list[list[Part]] = [[] for _ in group_of]
        for part in self.parts:
            parts_of[part.variable].append(part)
        merged = [self._merged(parts) for parts in parts_of]
        pulled_back = self._pulled_back({i: parts_of[i] for i, parts in enumerate(merged) if parts is None})
        self.merged = [pulled_back[i] if parts is None else parts for i, parts in enumerate(merged)]
        groups = range(max(group_of) + 1)
        terms = [[tf.zeros([self.units.count], self.dtype)] for _ in groups]
        error_bounds: list[list[tf.Tensor]] = [[] for _ in groups]
        for group, parts in zip(group_of, self.merged, strict=True):
            terms[group] += [part.made.squared_norms() for part in parts]
            own = [part.made.error_bound for part in parts if part.made.error_bound is not None]
            if len(parts) == 2:  # an embedding's rows that are looked up, and multiplied
                terms[group].append(2 * inner_product(*parts))
                own *= 2  # its error is at most both of theirs
            error_bounds[group] += own
        return [_with_error_bound(tf.add_n(t), d) for t, d in zip(terms, error_bounds, strict=True)]

    @staticmethod
    def _merged(parts: list[Part]) -> list[Part] | None:
        """The uses of one variable as one contribution, so that its squared norm is that of their sum; None if they
        have to be carried back to the variable first."""
        if not parts:
            return []
        if not all(isometric(part.weight, part.root) for part in parts):
            return None
        if len(parts) == 1:
            return parts
        alike: dict[tuple, list[Part]] = {}
        for part in parts:
            what = type(part.made), part.made.same, chain(part.weight, part.root), tuple(part.weight.shape)
            alike.setdefault(what, []).append(part)
        merged = [same[0]._replace(made=merge([part.made for part in same])) for same in alike.values()]
        merged.sort(key=lambda part: not isinstance(part.made, EmbeddingGradient))
        if len(merged) == 1 or (len(merged) == 2 and vocabulary_side(*merged) is not None):
            return merged
        return None

    def _pulled_back(self, apart: dict[int, list[Part]]) -> dict[int, list[Part]]:
        """All uses of these variables formed and carried back to the variables themselves."""
        formed = formed_at_roots([part for parts in apart.values() for part in parts], self.uses.shape_of)
        made: dict[int, list[Part]] = {}
        for i, parts in apart.items():
            found = [formed[at] for at in dict.fromkeys(key(part.root) for part in parts) if at in formed]
            root = parts[0].root
            made[i] = [parts[0]._replace(made=MaterializedGradient([tf.add_n(found)]), weight=root)] if found else []
        return made

    def finish(
        self, norms2: tf.Tensor, l2_norm_clip: float | tf.Tensor, denominator: tf.Tensor | None = None
    ) -> ClippedGradients:
        """The clipped sums; with a ``denominator`` each unit's part is divided by it, which costs nothing here and a
        pass over all parameters afterwards."""
        held = tf.is_tensor(l2_norm_clip)
        clip = tf.cast(l2_norm_clip, self.dtype) if held else tf.constant(l2_norm_clip, self.dtype)
        return self.scaled_by([norms2], lambda norms: [clip / tf.maximum(norms[0], clip)], denominator)

    def scaled_by(
        self, norms2: Sequence[tf.Tensor], factors: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        denominator: tf.Tensor | None = None,
    ) -> ClippedGradients:  # fmt: skip
        """As `finish`, where ``factors`` says by how much the gradients of each group are scaled, given their norms."""
        nonfinite, absent = self._mark(norms2)
        each = [tf.sqrt(n) for n in norms2]
        norms = each[0] if len(each) == 1 else tf.sqrt(tf.add_n(list(norms2)))
        cs = [tf.where(self.units.good, c, tf.zeros_like(norms)) for c in factors(each)]
        if denominator is not None:
            cs = [c / tf.cast(denominator, self.dtype) for c in cs]
        self.units.mask_nonfinite([t for parts in self.merged for part in parts for t in part.made.to_mask()])
        sums: list[tf.Tensor | tf.IndexedSlices | None] = []
        before: list[tf.Tensor] = []
        for i, (group, parts) in enumerate(zip(self.group_of, self.merged, strict=True)):
            made = parts[0].made if i in self.in_rows and len(parts) == 1 and unmoved(*parts[0][1:3]) else None
            if isinstance(made, EmbeddingGradient):
                with tf.control_dependencies(before):
                    rows = made.weighted_rows(cs[group], self.units)
                before = [rows.values]
                sums.append(rows)
            else:
                sums.append(self._weighted_sum(parts, cs[group], before))
        return ClippedGradients(
            sum=sums,
            norms=norms if self.absent is None else tf.where(absent, tf.zeros_like(norms), norms),
            regularization=self._regularization(),
            num_units=self.units.count,
            batch_size=self.batch_size,
            num_nonfinite=tf.reduce_sum(tf.cast(nonfinite & tf.logical_not(absent), tf.int32)),
            absent=absent,
        )

    def _mark(self, norms2: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Tells the units which of them contribute. Returns those that are not finite, and those that are absent."""
        good = tf.reduce_all(tf.math.is_finite(tf.stack(norms2)), 0)
        for holds in self.holds:  # XLA leaves the op out that would stop the step
            good = tf.logical_and(good, holds)
        nonfinite = tf.logical_not(good)
        absent = tf.zeros_like(good) if self.absent is None else self.absent
        good = tf.logical_and(good, tf.logical_not(absent))
        self.units.good, self.units.any_bad = good, tf.logical_not(tf.reduce_all(good))
        return nonfinite, absent

    def _weighted_sum(self, parts: list[Part], c: tf.Tensor, before: list[tf.Tensor]) -> tf.Tensor | None:
        """One variable's sum. ``before`` holds what it waits for: one after the other, since the scaled copies for all
        of them would else be in memory at once."""
        total = None
        for part in parts:
            with tf.control_dependencies(before):
                s = part.made.weighted_sum(c, self.units)
            before[:] = [s]
            if part.weight is not part.root:
                moved = carried_back(s, part.weight, part.root, units=False)
                if moved is None:
                    (moved,) = tf.gradients([part.weight], [part.root], [tf.cast(s, part.weight.dtype)])
                s = moved
            if s is not None:
                s = tf.cast(tf.convert_to_tensor(s), self.dtype)
                total = s if total is None else total + s
        return total

    def leave_out(self, blank: tf.Tensor, sure: tf.Tensor) -> None:
        """Has units contribute nothing whose rows are all blank (bool [batch]), whatever the loss makes of them. The
        others contribute nothing either, unless it is ``sure`` that these are all."""
        message = "tfdpfl: a batch was marked to hold blank rows, but the step received other rows of it."
        self.holds.append(sure)
        with tf.control_dependencies([graph_tools.require(sure, message)]):
            blank = tf.identity(blank)
        if not self.units.single:
            per = self.batch_size // tf.maximum(self.units.count, 1)
            blank = tf.reduce_all(tf.reshape(blank, tf.stack([self.units.count, per])), 1)
        self.absent = blank

    # -- tables of which rows are looked up --------------------------------------------------------------------

    def looked_up(self) -> list[int]:
        """The places of the variables of which rows are looked up."""
        return sorted({part.variable for part in self.parts if isinstance(part.made, EmbeddingGradient)})

    def leave_in_rows(self, tables: Sequence[int]) -> None:
        """Has the clipped sums of these variables given as `tf.IndexedSlices`, a row for each lookup, which are still
        to be added up; as one tensor where a variable is used otherwise, too."""
        self.in_rows = frozenset(tables)

    def clipped_counts(self, tables: Sequence[int], clip: float, absent: tf.Tensor) -> list[tf.Tensor]:
        """For each of these variables, which are in rows, how many units look up each of its rows, [rows]: a unit's
        part, over all of them together, is scaled to an L2 norm of at most ``clip``. Those that are ``absent``
        ([units]) have none."""
        lookups = [made for i in tables if isinstance(made := self.merged[i][0].made, EmbeddingGradient)]
        pairs = [lookup.looked_up() for lookup in lookups]
        ones = [tf.cast(rows >= 0, self.dtype) for _, rows in pairs]
        number = tf.add_n([tf.math.unsorted_segment_sum(one, unit, self.units.count)
                           for one, (unit, _) in zip(ones, pairs, strict=True)])  # fmt: skip
        factor = tf.where(absent, tf.zeros_like(number), clip / tf.maximum(tf.sqrt(number), clip))
        return [tf.math.unsorted_segment_sum(tf.gather(factor, unit), rows, lookup.vocabulary)
                for lookup, (unit, rows) in zip(lookups, pairs, strict=True)]  # fmt: skip

    def _regularization(self) -> list[tf.Tensor | None]:
        result: list[tf.Tensor | None] = [None] * len(self.variables)
        state = None if self.public_loss is None else self.analysis[self.public_loss]
        if not isinstance(state, Public):  # none, or a number made of lengths
            return result
        roots = self.uses.roots(self.public_loss, state)
        if not roots:
            return result
        grads = tf.gradients([self.public_loss], [r for _, r in roots])
        for (i, _), g in zip(roots, grads, strict=True):
            if g is not None:
                g = tf.cast(tf.convert_to_tensor(g), self.dtype)
                result[i] = g if result[i] is None else result[i] + g
        return result


def _with_error_bound(total: tf.Tensor, error_bounds: list[tf.Tensor]) -> tf.Tensor:
    if not error_bounds:
        return total
    error_bound = tf.add_n(error_bounds)
    return tf.where(total > 1000 * error_bound, total, tf.maximum(total, 0) + error_bound)
