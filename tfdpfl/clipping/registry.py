"""Holds one record of each type of op (`Op`): all that the engine knows of it. The files in `ops` declare the records
by `teach`, one family of ops a file; users add rules by `register_rule`. The rest of the engine asks the record
(`look_up`) and does not go by the names of ops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdpfl.clipping.states import Batch, Entry, Handle, Mixed, Public, Size, State, batches_of, first_mixed, mixed

__all__ = [
    "ENDS",
    "OPS",
    "Move",
    "Op",
    "Rule",
    "UserRule",
    "View",
    "ends_gradient",
    "look_up",
    "moves_examples",
    "register_rule",
    "teach",
    "user_rules",
]


class View(Protocol):
    """All that an op's move sees of the analysis."""

    @property
    def tainted(self) -> frozenset[State]:
        """The variables that are known to hold batch data."""

    def __getitem__(self, t: tf.Tensor) -> State: ...

    def entries(self, t: tf.Tensor) -> tuple[Entry, ...]:
        """A tensor as a vector of (coefficient, power of the batch size)."""

    def constant(self, t: tf.Tensor) -> np.ndarray | None:
        """The tensor's value where it follows from constants alone."""

    def handle(self, t: tf.Tensor) -> State:
        """The state of a resource: a `Handle`, also of one made in the graph."""

    def held(self, op: tf.Operation) -> Public | Mixed:
        """Returns what the variable holds that an op reads, its first input."""

    def body(
        self, op: tf.Operation, attribute: str, inputs: list[tf.Tensor], states: list[State]
    ) -> tuple[View, list[State], tf.Graph]:
        """Analyses what an op runs: the analysis, the states of the results, and the graph."""

    def note_read(self, handle: Handle, op: tf.Operation) -> None: ...

    def require_divisible(self, t: tf.Tensor, axis: int) -> None:
        """Has the running step check that the batch size divides the length of an axis."""

    def replace_sources(self, freed: Mapping[tuple[str, int], tf.Tensor]) -> None:
        """Has these tensors, by the keys of sources, stand for them."""


# (the `View` that asks, the op, its inputs' states) -> the state of all outputs, or a list of each one's; None to
# leave the op to what holds for any: public if all that it takes in is, else mixed.
Transfer = Callable[[Any, tf.Operation, list[State]], "State | list[State] | None"]
# As a `Transfer`, for the state of one input.
Of = Callable[[Any, tf.Operation, Any], "State | list[State] | None"]
# (a `gradients.Use`, `gradients.Units`) -> a `gradients.Contribution`, the units' gradients; None leaves the use to the
# exact fallback.
Rule = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class UserRule:
    """A rule that a user registered. Nothing here shows that it is right, so reports name it.

    ``promises``: whether it was given a ``batch_axis``. ``compared``: the uses on which `own_rules` has found it right.
    """

    function: Rule
    promises: bool = False
    compared: set[tuple] = dataclasses.field(default_factory=set, compare=False)

    def __call__(self, use: Any, units: Any) -> Any:
        return self.function(use, units)

    def __str__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


@dataclasses.dataclass(frozen=True)
class Move:
    """A transfer, which says where the examples are in an op's outputs, and what may come before it.

    ``data``: the input that the op works on, if the others are its settings: axes, lengths, indices. They may not
    depend on examples, nor on how many there are, but for those in ``sizes``, which the transfer looks at itself. None
    if the transfer looks at the states of all inputs. It may be left out where an op has one.
    ``mixed``, ``any_rank``, ``blocks``: it is asked also where an input is `Mixed`; has an unknown rank; holds the
    batch several times over (`Batch.blocks`). ``entries``: it knows what `Entries` are, and may give some out.
    """

    transfer: Transfer
    data: int | EllipsisType | None = ...
    sizes: tuple[int, ...] = ()
    mixed: bool = False
    any_rank: bool = False
    blocks: bool = False
    entries: bool = False


def moves_examples(
    move: Of, data: int = 0, *, of_size: Of | None = None, of_public: Of | None = None, of_mixed: Of | None = None,
    **settings: Any,
) -> Move:  # fmt: skip
    """Returns a `Move` that goes by the state of input ``data``: ``move`` gets the `View`, the op and that input's
    `Batch`; likewise ``of_size`` a `Size` and ``of_public`` what is `Public`, and ``of_mixed`` the first input that is
    `Mixed`. Without these, the op is as any. All other inputs are settings."""
    by_kind = {Batch: move, Size: of_size, Public: of_public, Mixed: of_mixed}

    def transfer(view: View, op: tf.Operation, states: list[State]) -> State | list[State] | None:
        state = first_mixed(states) or states[data]
        own = by_kind.get(type(state))
        return own(view, op, state) if own is not None else None

    return Move(transfer, data, mixed=of_mixed is not None, **settings)


@dataclasses.dataclass(frozen=True)
class Op:
    """Holds what is known of a type of op. Any field may be left out: what is not known is refused, or done in the
    slow, exact way.

    Args:
      moves: where the examples are in the outputs. Without it, the op mixes the examples that it takes in.
      rule: each unit's gradient of a weight among the inputs. Without it, the op runs again for each example.
      size: what the op makes of entries of sizes: (op, an `Entry` of each input) -> `Entry`; None if that is unknown.
      tail: what the op gives out on a batch of one, at the end of a loss, where the analysis says that examples meet:
        (a `loss.PerExampleLoss`, op) -> `loss.Term`; None if it combines examples. Without it, the loss is refused.
      adds: whether the op adds its inputs up, so that weights among them can be set apart from a loss.
      lengths: for an op that reads the shape of its input, what it makes of the shape: (shape) -> output.
      folds: the output, given the values of the inputs: (op, *arrays) -> array, or None if that cannot be told.
      arranges: whether ``folds`` only puts entries in other places, so that some may be unknown.
      value: the value of an output where some input has none: (output) -> array or None.
      order: for an op that gives out its first input, in whatever type: in which order it puts the axes; None if that
        cannot be told.
      undo: for another op that gives out the entries of its first input, moved about or negated: (op, a gradient of the
        output, whether its first axis is the units) -> the gradient of the input; None if that cannot be told.
      runs: the attributes that name the functions that the op runs.
      enters: whether the op gives out what the graph takes in from outside.
      reads: whether the op reads a variable, its first input, and writes to none.
      movable: whether a copy may run elsewhere instead of the op, though it has a state, because no other op reads it.
      repeatable: whether the op may run as often as one likes, though it has a state.
    """

    moves: Move | None = None
    rule: Rule | None = None
    size: Callable[..., Entry | None] | None = None
    tail: Callable[[Any, tf.Operation], Any] | None = None
    adds: bool = False
    lengths: Callable[[tf.Tensor], tf.Tensor] | None = None
    folds: Callable[..., Any] | None = None
    arranges: bool = False
    value: Callable[[tf.Tensor], np.ndarray | None] | None = None
    order: Callable[[tf.Operation], Sequence[int] | None] | None = None
    undo: Callable[[tf.Operation, tf.Tensor, bool], tf.Tensor | None] | None = None
    runs: tuple[str, ...] = ()
    enters: bool = False
    reads: bool = False
    movable: bool = False
    repeatable: bool = False


OPS: dict[str, Op] = {}
# By how the name of a function for tf.custom_gradient begins: transfers for the IdentityN that gives out its results,
# then its arguments. They are asked although the results are `Mixed`.
ENDS: dict[str, Transfer] = {}
_UNKNOWN = Op()


def look_up(op: tf.Operation) -> Op:
    """Returns the record of an op."""
    return OPS.get(op.type, _UNKNOWN)


def teach(*kinds: str, **fields: Any) -> None:
    """Declares the record of op types, ``fields`` as in `Op`: once for each type, with all that is known of it."""
    record = Op(**fields)
    for kind in kinds:
        if kind in OPS:
            raise TypeError(f"{kind} has a record. Give all that is known of an op in one call of teach.")
        op = op_def_registry.get(kind)
        # If it were forgotten, the op's settings might be made of examples.
        if record.moves is not None and record.moves.data is ... and op is not None and len(op.input_arg) > 1:
            raise TypeError(
                f"teach({kind!r}) does not state data, and the op has the inputs "
                f"{', '.join(arg.name for arg in op.input_arg)}: give Move(..., data=i) if all but input i are "
                "settings, or data=None if the function looks at the states of all."
            )
        OPS[kind] = record


def ends_gradient(name: str) -> Callable[[Transfer], Transfer]:
    """Registers what TensorFlow's own function ``name`` for tf.custom_gradient is known to do."""

    def add(transfer: Transfer) -> Transfer:
        ENDS[name] = transfer
        return transfer

    return add


def register_rule(op_type: str, *, batch_axis: int | None = None) -> Callable[[Rule], Rule]:
    """Teaches the engine an op: a decorator for a function ``rule(use, units)``.

        @tfdpfl.clipping.register_rule("MyScale", batch_axis=0)
        def scale(use, units):  # y = MyScale(x, w), entry by entry
            return summed_to(use.g * use.inputs[0], use.out, use.shape, units)

    Args:
      op_type: the op's type, as in ``tensor.op.type``.
      batch_axis: give it for an op that the engine does not know: the axis of the examples in its inputs that have
        them and in its outputs. It is your promise that row i of an output depends on row i of each input alone, and
        that the op's gradient keeps to that; ε depends on it.

    A gradient that your rule makes too short passes the clip. So the rule is compared with TensorFlow's gradients of
    random numbers when a step is traced, and refused if they differ. That does not prove it right on your data:
    `validate` compares it on a batch, and every ledger, report and statement names it.

    The rule returns an `OuterProductGradient`, an `EmbeddingGradient` or a `MaterializedGradient` (see
    `tfdpfl.clipping.gradients`), or None to leave a use to the exact fallback. A rule for an op that has one replaces
    it.

    Raises:
      ValueError: TensorFlow knows no such op.
    """
    if not isinstance(op_type, str) or op_def_registry.get(op_type) is None:
        raise ValueError(
            f"op_type={op_type!r} is no op of TensorFlow; give tensor.op.type of a result, and load a library of your "
            "own ops before."
        )

    def add(function: Rule) -> Rule:
        record = dataclasses.replace(OPS.get(op_type, _UNKNOWN), rule=UserRule(function, batch_axis is not None))
        if batch_axis is not None:
            record = dataclasses.replace(record, moves=Move(functools.partial(_promised, batch_axis), data=None))
        OPS[op_type] = record
        return function

    return add


def user_rules() -> frozenset[str]:
    """Returns the types of the ops for which rules of users are in force."""
    return frozenset(kind for kind, record in OPS.items() if isinstance(record.rule, UserRule))


def _promised(axis: int, _: View, op: tf.Operation, states: list[State]) -> State | None:
    batches = batches_of(states)
    if any(s.axis != axis for s in batches):
        return mixed(op, f"was registered with batch_axis={axis}, but the batch is elsewhere")
    return Batch(axis, batches[0].rows) if batches else None
