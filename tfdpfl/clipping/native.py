"""The kernels as TensorFlow ops, and what the engine makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_library

from tfdpfl import native
from tfdpfl.clipping.gradients import Costs, MaterializedGradient, Units, compiled

__all__ = ["Filters", "find_obstacle"]

OPS = ("TfdpflFilterGradients", "TfdpflFilterNorms", "TfdpflFilterSum")


def find_obstacle(*tensors: tf.Tensor) -> str:
    """Returns why the kernels cannot be used for these tensors where they are traced, or an empty string."""
    loaded = native.kernels()
    if loaded.library is None:
        return loaded.missing
    if any(t.dtype != tf.float32 or t.shape.rank != 4 for t in tensors):
        return "they are for images in float32"
    if compiled():
        return "XLA compiles the step"
    # A v1 graph may be sent to another process, which does not have the ops (as TFF does).
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "the graph is not one of TensorFlow 2"
    if any(device.device_type != "CPU" for device in tf.config.get_visible_devices()):
        return "TensorFlow has another device than the CPU"
    return native.register_ops()


@dataclasses.dataclass(frozen=True)
class Filters:
    """A convolution's filter gradients, one for each example, [batch, entries of a window, filters].

    Args:
      images: [batch, height, width, channels], float32.
      gradients: [batch, *places, filters], of the summed losses with respect to the convolution's output.
      entries: height times width times channels of the window.
      settings: of height and width each: window, strides, rates, zeros before the first pixel (-1 for padding "SAME").
    """

    images: tf.Tensor
    gradients: tf.Tensor
    entries: int
    settings: tuple[int, ...]

    def form(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the gradients, and their squared norms, [batch]."""
        each, norms = self._make(OPS[0])
        each.set_shape([self.images.shape[0], self.entries, self.gradients.shape[-1]])
        norms.set_shape([self.images.shape[0]])
        return each, norms

    def squared_norms(self) -> tf.Tensor:
        """Returns the squared norms, [batch], of what `weighted_sum` adds up, number by number."""
        norms = self._make(OPS[1])
        norms.set_shape([self.images.shape[0]])
        return norms

    def weighted_sum(self, c: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the gradients times c, [batch]; nothing is added where c is 0."""
        total = self._make(OPS[2], factors=c)
        total.set_shape([self.entries, self.gradients.shape[-1]])
        return total

    def contribution(self, layout: Callable, costs: Costs) -> MaterializedGradient:
        """Returns the gradients as the engine wants them: stored, or computed twice."""
        if not costs.stores:
            return Recomputed(self, layout, costs)
        each, norms = self.form()
        return MaterializedGradient([each], layout, norms, costs)

    def _make(self, op: str, **inputs: tf.Tensor) -> Any:
        instructions = native.INSTRUCTIONS.index(native.kernels().instructions)
        settings = [*self.settings, native.count_threads(), instructions]
        return op_def_library.apply_op(op, images=self.images, gradients=self.gradients, settings=settings, **inputs)


class Recomputed(MaterializedGradient):
    """Gradients that are computed once for their norms, and again for their clipped sum, and never stored. The same
    code in the same order makes both, so that the norms are those of the very gradients that are added up."""

    def __init__(self, filters: Filters, layout: Callable, costs: Costs):
        super().__init__([], layout, costs=costs)
        self._filters = filters

    def formed(self) -> tf.Tensor:
        return self._laid([self._filters.form()[0]])

    def squared_norms(self) -> tf.Tensor:
        return self._filters.squared_norms()

    def to_mask(self) -> list:
        return []  # the kernel passes over examples whose factor is 0

    def weighted_sum(self, c: tf.Tensor, units: Units) -> tf.Tensor:
        return self._laid([self._filters.weighted_sum(c)])


def _refuse(op: tf.Operation, *_: tf.Tensor) -> None:
    raise NotImplementedError(
        f"{op.type} has no gradient, so you cannot differentiate through clipped gradients. Set {native.SWITCH}=0 to "
        "use TensorFlow's own ops, which have gradients."
    )


for _name in OPS:
    tf.RegisterGradient(_name)(_refuse)
