"""TensorLists, which loops hand from turn to turn."""

from __future__ import annotations

from tfdpfl.clipping.ops.control_flow import blank
from tfdpfl.clipping.registry import Move, teach
from tfdpfl.clipping.states import UNKNOWN, Batch, Items, Public, Size, deps, is_batch_free, mixed

__all__ = ["summed"]


def summed(states: list[Items]) -> Items | None:
    """The sum of lists, as a tape adds up what loops wrote. Lists of one length and shape are added, nothing is
    repeated, so that equal rows may be added to any."""
    elements = [s.element for s in states]
    batches = {e for e in elements if isinstance(e, Batch)}
    if any(isinstance(e, Size) for e in elements):
        return None
    if not batches:
        return Items(Public(deps(elements), all(e.alike for e in elements if isinstance(e, Public))))
    alone = len(batches) == 1 and all(e in batches or blank(e) for e in elements)
    return Items(batches.pop()) if alone else None


def reserve(view, op, states):
    if not is_batch_free(states[1]):
        return mixed(op, "makes a list whose length depends on examples or on how many there are")
    return Items(Public(alike=True), op.type == "EmptyTensorList")


def from_tensor(view, op, states):
    state = states[0]
    if isinstance(state, Public):
        return Items(Public(state.deps, state.alike))
    if isinstance(state, Batch):
        return Items(Batch(state.axis - 1, state.rows)) if state.axis else mixed(op, "takes the batch apart")
    return None


def set_item(view, op, states):
    return put(op, states[0], states[2], states[1])


def push_back(view, op, states):
    items, value = states
    if isinstance(value, Size) and isinstance(items, Items):
        return Items(value) if items.empty or items.element == value else None
    return put(op, items, value, Public())


def put(op, items, value, index):
    if not isinstance(items, Items) or not is_batch_free(index):
        return None
    if isinstance(value, Size):
        return None
    if isinstance(items.element, Public) and isinstance(value, Public | Batch):
        if isinstance(value, Public):
            return Items(Public(items.element.deps | value.deps, items.element.alike and value.alike))
        return Items(value) if blank(items.element) else mixed(op, "lists values of different kinds")
    if isinstance(value, Batch) and value == items.element:
        return items
    return mixed(op, "lists tensors with different batch axes")


def get_item(view, op, states):
    if isinstance(states[0], Items) and isinstance(states[1], Public | Size):
        return None if isinstance(states[0].element, Size) else states[0].element
    return None


def pop_back(view, op, states):
    return [states[0], states[0].element] if isinstance(states[0], Items) else None


def stacked(view, op, states):
    if not isinstance(states[0], Items):
        return None
    element = states[0].element
    if isinstance(element, Size):
        return None
    # Elements that are alike within themselves may differ from one another.
    return Batch(element.axis + 1, element.rows) if isinstance(element, Batch) else Public(element.deps)


def element_shape(view, op, states):
    """As it was given, with lengths that may be left open."""
    return Size(tuple([UNKNOWN] * (op.outputs[0].shape.num_elements() or 1))) if isinstance(states[0], Items) else None


def length(view, op, states):
    return Public()


# -- the records ------------------------------------------------------------------------------------------------------

teach("TensorListReserve", "EmptyTensorList", moves=Move(reserve, data=None, any_rank=True))
teach("TensorListFromTensor", moves=Move(from_tensor, data=0, sizes=(1,), any_rank=True))
teach("TensorListSetItem", moves=Move(set_item, data=None, any_rank=True))
teach("TensorListPushBack", moves=Move(push_back, data=None, any_rank=True))
teach("TensorListGetItem", moves=Move(get_item, data=0, sizes=(2,), any_rank=True))
teach("TensorListPopBack", moves=Move(pop_back, data=None, any_rank=True))
teach("TensorListStack", moves=Move(stacked, data=0, sizes=(1,), any_rank=True))
teach("TensorListElementShape", moves=Move(element_shape, any_rank=True))
teach("TensorListLength", moves=Move(length, any_rank=True))
