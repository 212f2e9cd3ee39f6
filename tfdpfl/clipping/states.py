"""The states that a tensor can be in, as to where its examples are.

An abstract interpretation of the graph between the inputs and the loss (`batch_axis`) gives every tensor one state:

- ``Public``: holds nothing of any example (constants, weights, noise, what follows from these alone);
- ``Size``: a small integer or float tensor made of shapes, entry by entry a multiple of a power of the batch size;
- ``Batch``: one axis is indexed by the examples, in order, ``rows`` consecutive rows each, and a row depends on
  its own example only;
- ``Items``: a TensorList, all of whose elements have one state;
- ``Handle``: a resource, such as a variable;
- ``Mixed``: examples may have met. It remembers the op that did it;
- ``Entries``: a list of some entries of each example. `Mixed` to all ops but those that know of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

__all__ = [
    "BY_POSITION",
    "TAINTED",
    "UNKNOWN",
    "Batch",
    "Entries",
    "Entry",
    "Handle",
    "Items",
    "Mixed",
    "Public",
    "Size",
    "State",
    "batches_of",
    "counts_examples",
    "deps",
    "first_mixed",
    "has_examples",
    "is_batch_free",
    "meeting",
    "mixed",
    "plain",
    "weighs",
]


@dataclasses.dataclass(frozen=True)
class Public:
    """Data-independent. ``deps``: the variables (by number) it is computed from. ``alike``: rows along any axis
    are equal or identically distributed, so that a row does not tell a position in the batch."""

    deps: frozenset[int] = frozenset()
    alike: bool = False


@dataclasses.dataclass(frozen=True)
class Size:
    """Made of shapes. Each entry is (coefficient, power of the batch size); None where it is not known."""

    entries: tuple[tuple[int | None, int | None], ...]

    @property
    def batch_free(self) -> bool:
        return all(power == 0 for _, power in self.entries)

    def blurred(self, number: int | None) -> Size:
        """So many numbers made of the entries; which of which is not known."""
        return Size(tuple([(None, 0) if self.batch_free else UNKNOWN] * (number or 1)))


@dataclasses.dataclass(frozen=True)
class Batch:
    """``blocks``: the axis holds that many copies of the batch one after the other (SpaceToBatchND)."""

    axis: int
    rows: int | None = 1
    blocks: int = 1


@dataclasses.dataclass(frozen=True)
class Items:
    """``empty``: nothing was put into it, and it holds no zeros either, so that it may become a list of anything."""

    element: Public | Size | Batch
    empty: bool = False


@dataclasses.dataclass(frozen=True)
class Handle:
    """A resource: ``index`` of the trainable variable behind it (or its id, where all variables are alike), or None.
    ``name`` tells resources apart."""

    index: int | None
    name: int | str | tuple[str, bytes] | None = None


@dataclasses.dataclass(frozen=True)
class Mixed:
    """``meets``: the op is known to let examples meet; others cannot be followed."""

    op: str
    name: str
    why: str
    meets: bool = dataclasses.field(default=False, kw_only=True)

    def describe(self) -> str:
        return f"{self.op} (in {layer_of(self.name)!r}) {self.why}"


@dataclasses.dataclass(frozen=True)
class Entries(Mixed):
    """Entries of a `Batch` that an op (``name``, of the graph with the id ``graph``) chose of each example by that
    example alone, one after the other. With ``places`` not what they hold, but where they are: the example's number
    first."""

    graph: int
    places: bool


State = Public | Size | Batch | Items | Handle | Mixed
Entry = tuple[int | None, int | None]  # of a Size: (coefficient, power of the batch size)

UNKNOWN = (None, None)

# Why examples meet, where more than one place says so.
BY_POSITION = "treats an example by its position in the batch"
TAINTED = "reads a variable that the step itself writes batch data to"


def weighs(state: State) -> bool:
    """Whether the value comes from trainable weights alone."""
    return state.index is not None if isinstance(state, Handle) else isinstance(state, Public) and bool(state.deps)


def batches_of(states: Iterable[State]) -> list[Batch]:
    """Returns those of the states that hold examples along an axis."""
    return [s for s in states if isinstance(s, Batch)]


def first_mixed(states: Iterable[State]) -> Mixed | None:
    return next((s for s in states if isinstance(s, Mixed)), None)


def has_examples(states: Iterable[State]) -> bool:
    """Whether any of the values holds something of each example."""
    return any(isinstance(s, Batch | Items) for s in states)


def counts_examples(state: State) -> bool:
    """Whether the value depends on how many examples there are, or may."""
    return isinstance(state, Size) and not state.batch_free


def is_batch_free(state: State) -> bool:
    """Whether the value holds nothing of the examples, nor of how many there are."""
    return isinstance(state, Public) or (isinstance(state, Size) and state.batch_free)


def layer_of(op_name: str) -> str:
    """The layer's name inside an op's name; Keras names scopes model/layer/op."""
    parts = [p for p in op_name.split("/") if p]
    return "/".join(parts[:-1]) or op_name


def mixed(op: tf.Operation, why: str) -> Mixed:
    return Mixed(op.type, op.name, why)


def meeting(op: tf.Operation, why: str) -> Mixed:
    """The state of what an op makes of several examples."""
    return Mixed(op.type, op.name, why, meets=True)


def plain(state: State) -> State:
    """The state as it is to ops that do not know of `Entries`."""
    return Mixed(state.op, state.name, state.why) if isinstance(state, Entries) else state


def deps(states: Iterable[State]) -> frozenset[int]:
    """The variables that public ones among the states are computed from."""
    return frozenset().union(*(s.deps for s in states if isinstance(s, Public)))
