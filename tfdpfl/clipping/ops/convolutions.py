"""Convolutions and their transposes, pooling, and what else works on images."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.gradients import (
    TYPICAL_LENGTH,
    Contribution,
    Costs,
    MaterializedGradient,
    OuterProductGradient,
    Units,
    Use,
    dims_of,
    reshaped,
    turned,
    volume,
)
from tfdpfl.clipping.graph import compiled, constant, input_rank
from tfdpfl.clipping.kernel_ops import find_obstacle
from tfdpfl.clipping.native import Filters
from tfdpfl.clipping.ops.windows import Window, places_of
from tfdpfl.clipping.registry import Move, View, moves_examples, teach
from tfdpfl.clipping.rows import even, row_free, shape_entries
from tfdpfl.clipping.states import BY_POSITION, Batch, Public, State, is_batch_free, meeting, mixed

__all__: list[str] = []

# Of an image with more entries, patches are laid out for a quarter of the batch at a time. More of a window at once
# makes fewer and larger products, which take up to a third less.
WHOLE_ENTRIES = 4096


def convolved(view: View, op: tf.Operation, states: list[State], data: int = 0) -> State | None:
    if any(isinstance(s, Batch) for i, s in enumerate(states) if i != data):
        return mixed(op, "has weights that depend on examples")
    state = states[data]
    return of_images(view, op, state) if isinstance(state, Batch) else None


def convolved_back(view: View, op: tf.Operation, states: list[State]) -> State | None:
    """A transposed convolution takes in a shape and the weights before the data."""
    state = convolved(view, op, states, data=2)
    return (even(op, view.entries(op.inputs[0]), 0) or state) if isinstance(state, Batch) else state


def of_images(view: View, op: tf.Operation, state: Batch, least: int = 0) -> State:
    """Works on images, each by itself, if there are ``least`` axes, with the examples along the first."""
    if state.axis != 0 or input_rank(op) < least:
        return mixed(op, "does not have the batch as its first axis")
    return state


def pooled(view: View, op: tf.Operation, state: Batch) -> State:
    return meeting(op, "pools over the batch") if state.axis == 0 and over_the_batch(op) else of_images(view, op, state)


def over_the_batch(op: tf.Operation) -> bool:
    """Whether a pool's windows reach over several examples."""
    return op.get_attr("ksize")[0] != 1 or op.get_attr("strides")[0] != 1


def pool_gradient(view: View, op: tf.Operation, states: list[State]) -> State | None:
    """Of the input, the output and the output's gradient."""
    return meeting(op, "pools over the batch") if over_the_batch(op) else _alike(op, states)


def resize_gradient(view: View, op: tf.Operation, states: list[State]) -> State | None:
    """Of the output's gradient and the input."""
    return _alike(op, states)


def _alike(op: tf.Operation, states: list[State]) -> State | None:
    """Of tensors that all have their examples along the first axis."""
    if len(set(states)) > 1 or getattr(states[0], "axis", 0) != 0:
        return mixed(op, "does not have the batch as its first axis")
    return states[0] if isinstance(states[0], Batch) else None


def average_gradient(view: View, op: tf.Operation, state: Batch) -> State:
    """Of the input's shape and the output's gradient."""
    n, *lengths = view.entries(op.inputs[0])
    if over_the_batch(op):
        return meeting(op, "pools over the batch")
    if state.axis != 0:
        return mixed(op, "does not have the batch as its first axis")
    if n != shape_entries(op.inputs[1], state)[0] or any(power != 0 for _, power in lengths):
        return mixed(op, "has a shape that is not known to follow the batch size")
    return state


def space_to_batch(view, op, state):
    block = constant(op.inputs[1])
    if state.axis or block is None:
        return mixed(op, "does not have the batch as its first axis")
    return Batch(0, state.rows, int(np.prod(block)))


def batch_to_space(view, op, state):
    block = constant(op.inputs[1])
    if state.axis or block is None or int(np.prod(block)) != state.blocks:
        return mixed(op, "takes the batch apart")
    return Batch(0, state.rows)


def projected(view, op, states):
    images, transforms, *settings = states
    if not isinstance(images, Batch):
        return None
    if not all(map(is_batch_free, settings)):
        return mixed(op, "has settings that depend on examples")
    own = transforms == images or (
        isinstance(transforms, Public) and row_free(op.inputs[1], transforms, -2))  # fmt: skip
    return images if own else mixed(op, BY_POSITION)


# -- the rule ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sides:
    """Returns what a convolution's filter gradient is a product of: what each window of ``x`` meets, and ``g``;
    channels last. A transposed convolution swaps the two."""

    use: Use
    units: Units
    window: Window
    x: tf.Tensor
    g: tf.Tensor
    of_x: Batch
    of_g: Batch

    @classmethod
    def of(cls, use: Use, units: Units, swapped: bool) -> Sides | None:
        x, g = (use.g, use.inputs[2]) if swapped else (use.inputs[0], use.g)
        of_x, of_g = (use.out, use.states[2]) if swapped else (use.states[0], use.out)
        if not all(isinstance(s, Batch) and s.axis == 0 for s in (of_x, of_g)):
            return None
        window = Window.of(use.op, use.shape.as_list())
        if x.shape[1 if window.channels_first else -1] is None:
            return None
        x, g = (tf.cast(t, units.dtype) for t in (x, g))
        if window.channels_first:
            move = [0, *range(2, x.shape.rank), 1]
            x, g = tf.transpose(x, move), tf.transpose(g, move)
        return cls(use, units, window, x, g, of_x, of_g)

    @functools.cached_property
    def places(self) -> list:
        return places_of(self.g)

    @property
    def taps(self) -> int:
        return math.prod(self.window.size)

    @property
    def channels(self) -> int:
        return self.x.shape[-1]

    @property
    def filters(self) -> int:
        return self.g.shape[-1] or self.use.shape[-1]

    @property
    def groups(self) -> int:
        return self.channels if self.use.op.type.startswith("Depthwise") else self.channels // self.use.shape[-2]

    @property
    def rows(self) -> int | None:
        """How many rows of both an example has, if each is a unit; None where that is not known, or not the same."""
        alike = self.of_x.rows == self.of_g.rows and self.of_x.blocks == self.of_g.blocks == 1
        return self.of_x.rows if self.units.single and alike else None

    @property
    def alone(self) -> bool:
        """Whether each example is a unit, and a row of both."""
        return self.rows == 1

    def for_kernel(self) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Returns ``x`` and ``g`` as a kernel takes them, with an example a row; None where it cannot. Several rows of
        an example (frames of a video, the steps of a loop) are the depth of a volume that the window is one deep in."""
        flat = len(self.window.size) == 2
        if self.rows is None or not (self.alone or flat) or find_obstacle(self.x, self.g):
            return None
        if self.alone:
            return self.x, self.g
        x, g = (reshaped(t, [-1, self.rows, *dims_of(t)[1:]]) for t in (self.x, self.g))
        return x, g

    def flat(self, t: tf.Tensor, state: Batch, *tail: int) -> tf.Tensor:
        """[B, *places, C] to [U, places of the unit, *tail]."""
        t = self.units.group(t, state)
        dims = dims_of(t)
        return reshaped(t, [dims[0], volume(dims[1:-1]), *tail])

    def layout(self, f: tf.Tensor) -> tf.Tensor:
        lead = f.shape.rank - (3 if self.groups > 1 else 2)
        if self.groups > 1:  # [..., n, taps x c, p] to [..., taps x c, n, p]
            f = tf.transpose(f, [*range(lead), lead + 1, lead, lead + 2])
        return tf.reshape(f, [*([f.shape[0] or -1] if lead else []), *self.use.shape])


def convolution(use: Use, units: Units, swapped: bool = False) -> Contribution | None:
    """Patches of the input against the output's gradient; ``swapped`` in a transposed convolution."""
    if use.at != 1 or None in use.shape.as_list():
        return None
    sides = Sides.of(use, units, swapped)
    if sides is None:
        return None
    return _by_group(sides) if sides.groups > 1 else _whole(sides)


def _whole(sides: Sides) -> Contribution:
    window, taps, use = sides.window, sides.taps, sides.use
    repeats = max(1.0, taps / math.prod(window.strides))
    g = sides.flat(sides.g, sides.of_g, sides.filters)
    gram = window.gram(sides.x, sides.places) if sides.alone and taps > 1 else None
    entries = taps * sides.channels
    costs = Costs(g.shape[1] or TYPICAL_LENGTH, entries, sides.filters, repeats, gram is not None)
    if costs.native and (taken := sides.for_kernel()):
        return Filters(*taken, entries, window.settings()).contribution(sides.layout, costs)
    if costs.forms and taps > 1:
        return _formed(sides, g, costs)
    (whole,) = window.pieces(sides.x, sides.places, taps)
    a = sides.flat(whole(), sides.of_x, entries)
    needs = tuple((use.inputs[i], use.states[i]) for i in batch_inputs(use))
    # Not for one tap: the product is as fast, and oneDNN's gradient of a strided one writes outside its memory on
    # a batch of one (TensorFlow 2.14 and 2.21, [1, 12, 12, 8] to 16 channels by strides of 2).
    total = (lambda c: filter_gradient(use, c, sides.units)) if taps > 1 else None
    return OuterProductGradient(a, g, sides.layout, ("conv", tuple(use.shape), taps), total, needs, repeats, gram)


def _formed(sides: Sides, g: tf.Tensor, costs: Costs) -> MaterializedGradient:
    """Each unit's gradient, piece by piece of the window, so that few patches are in memory."""
    large = (sides.x.shape[1:].num_elements() or 0) > WHOLE_ENTRIES
    quarters = quartered(sides.x, g) if sides.alone and large and not compiled() else [(sides.x, g)]
    found: list[list[tf.Tensor]] = []
    for x_part, g_part in quarters:
        made = []
        for piece in sides.window.pieces(x_part, sides.places, parts=len(quarters)):
            with tf.control_dependencies(sides.units.last_product):
                a = piece()
            made.append(tf.matmul(g_part, sides.flat(a, sides.of_x, a.shape[-1]), transpose_a=True))
            sides.units.last_product = made[-1:]
        found.append(made)
    parts = [tf.concat(same, 0) if len(same) > 1 else same[0] for same in zip(*found, strict=True)]
    return MaterializedGradient(parts, lambda pieces: sides.layout(turned(tf.concat(pieces, -1))), costs=costs)


def _by_group(sides: Sides) -> MaterializedGradient:
    """Groups (of one channel each, in a depthwise convolution): one small product a group."""
    width, per_group = sides.filters // sides.groups, sides.channels // sides.groups
    if per_group == width == 1 and (taken := sides.for_kernel()):
        costs = Costs(taken[1].shape[1:-1].num_elements() or TYPICAL_LENGTH, sides.taps, sides.filters)
        filters = Filters(*taken, sides.taps, sides.window.settings(), depthwise=True)
        return filters.contribution(lambda f: tf.reshape(f, [*dims_of(f)[:-2], *sides.use.shape]), costs)
    g = sides.flat(sides.g, sides.of_g, sides.groups, width)
    parts = []
    for view in sides.window.views(sides.x, sides.places):
        v = sides.flat(view, sides.of_x, sides.groups, per_group)
        if per_group == 1 and width == 1:
            parts.append(tf.reduce_sum(v * g, 1)[..., None])  # [U, n, 1, 1]
        else:
            parts.append(tf.einsum("utna,utnp->unap", v, g))
    return MaterializedGradient([sides.layout(tf.concat(parts, 2))])


def quartered(*tensors: tf.Tensor) -> list[tuple[tf.Tensor, ...]]:
    """Quarters of the batch of each, the last of which takes what is left."""
    size = tensors[0].shape[0] or tf.shape(tensors[0])[0]
    sizes = [size // 4] * 3 + [size - 3 * (size // 4)]
    return list(zip(*(tf.split(t, sizes, num=4) for t in tensors), strict=True))


def batch_inputs(use: Use) -> list[int]:
    return [i for i, s in enumerate(use.states) if isinstance(s, Batch) and i != use.at]


def filter_gradient(use: Use, c: tf.Tensor, units: Units) -> tf.Tensor:
    """The clipped sum by the op's own filter gradient, on a gradient scaled example by example. It is in the working
    type, since a sum over the batch that is rounded to the op's passes the clip."""
    wide = lambda t: tf.cast(t, units.dtype) if t.dtype.is_floating else t  # noqa: E731
    g = wide(use.g)
    g = tf.math.multiply_no_nan(g, units.per_row(c, g, use.out))
    batch = batch_inputs(use)
    inputs = [wide(units.masked(t) if i in batch else t) for i, t in enumerate(use.inputs)]
    inputs[use.at] = tf.stop_gradient(wide(use.weight))
    attrs = {**graph_tools.attributes(use.op), "T": tf.compat.v1.AttrValue(type=units.dtype.as_datatype_enum)}
    made = graph_tools.copy_op(use.op, inputs, attrs, [units.dtype])[use.output.value_index]
    others = [t for i, t in enumerate(inputs) if i != use.at]
    (dw,) = tf.gradients(made, [inputs[use.at]], [g], stop_gradients=others)
    return dw


# -- the records ------------------------------------------------------------------------------------------------------

teach("Conv2D", "Conv3D", "DepthwiseConv2dNative", moves=Move(convolved, data=None, blocks=True), rule=convolution)
teach("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
      moves=Move(convolved_back, data=None, blocks=True),
      rule=functools.partial(convolution, swapped=True))  # fmt: skip
teach("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D", moves=moves_examples(pooled))
teach("AdjustContrastv2", "AdjustHue", "AdjustSaturation",
      moves=moves_examples(functools.partial(of_images, least=4)))  # fmt: skip
teach("RGBToHSV", "HSVToRGB", moves=moves_examples(functools.partial(of_images, least=2)))
teach("DepthToSpace", "SpaceToDepth", "ExtractImagePatches", "ExtractVolumePatches", "FakeQuantWithMinMaxArgs",
      "ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad",
      "ScaleAndTranslate", moves=moves_examples(of_images))  # fmt: skip
teach("MaxPoolGrad", "MaxPool3DGrad", moves=Move(pool_gradient, data=None))
teach("ResizeBilinearGrad", "ResizeBicubicGrad", moves=Move(resize_gradient, data=None))
teach("AvgPoolGrad", "AvgPool3DGrad", moves=moves_examples(average_gradient, data=1, sizes=(0,)))
teach("SpaceToBatchND", moves=moves_examples(space_to_batch))
teach("BatchToSpaceND", moves=moves_examples(batch_to_space, blocks=True))
teach("ImageProjectiveTransformV3", moves=Move(projected, data=None))
