"""The kernels of convolutions, and what the engine makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpfl.clipping.gradients import Costs, MaterializedGradient, Units
from tfdpfl.clipping.kernel_ops import FILTERS, made

__all__ = ["Filters"]


@dataclasses.dataclass(frozen=True)
class Filters:
    """A convolution's filter gradients, one for each example, [batch, entries, filters].

    Args:
      images: [batch, height, width, channels] or [batch, depth, height, width, channels], float32.
      gradients: [batch, *places, filters], of the summed losses with respect to the convolution's output.
      entries: places of the window, times its channels unless the convolution is depthwise.
      settings: what `Window.settings` returns.
      depthwise: whether each channel has one filter of its own.
    """

    images: tf.Tensor
    gradients: tf.Tensor
    entries: int
    settings: tuple[int, ...]
    depthwise: bool = False

    def form(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the gradients, and their squared norms, [batch]."""
        each, norms = self._make(FILTERS[0])
        each.set_shape([self.images.shape[0], self.entries, self.gradients.shape[-1]])
        norms.set_shape([self.images.shape[0]])
        return each, norms

    def squared_norms(self) -> tf.Tensor:
        """Returns the squared norms, [batch], of what `weighted_sum` adds up, number by number."""
        norms = self._make(FILTERS[1])
        norms.set_shape([self.images.shape[0]])
        return norms

    def weighted_sum(self, c: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the gradients times c, [batch]; nothing is added where c is 0."""
        total = self._make(FILTERS[2], factors=c)
        total.set_shape([self.entries, self.gradients.shape[-1]])
        return total

    def contribution(self, layout: Callable, costs: Costs) -> MaterializedGradient:
        """Returns the gradients as the engine wants them: stored, or computed twice."""
        if not costs.stores:
            return Recomputed(self, layout, costs)
        each, norms = self.form()
        return MaterializedGradient([each], layout, norms, costs)

    def _make(self, op: str, **inputs: tf.Tensor) -> Any:
        return made(op, (*self.settings, int(self.depthwise)), images=self.images, gradients=self.gradients, **inputs)


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
