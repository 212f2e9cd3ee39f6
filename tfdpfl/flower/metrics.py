"""Clients' metrics: what is asked for by name, clipped to its bound and given noise that is charged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl.federated.clip import NoisedMetrics
from tfdpfl.flower._flwr import Message, log, only

__all__ = ["Asked"]


class Asked:
    """The means of clients' metrics that are asked for by name, and of the clients that sent all of them.

    Args:
      argument: the name of the argument, for the error message.
      metrics: `NoisedMetrics` whose bound names the metrics; None to ask for none.

    Attributes:
      size: how many sums there are; 0 if none is asked for.

    Raises:
      ValueError: ``metrics`` names none.
    """

    def __init__(self, argument: str, metrics: object):
        self.size, self._bounds = 0, dict[str, float]()
        self._metrics: NoisedMetrics | None = None
        if metrics is None:
            return
        if not isinstance(metrics, NoisedMetrics) or not isinstance(metrics.bound, Mapping):
            raise ValueError(
                f"{argument} must be None or a NoisedMetrics whose bound names the metrics and the largest value of "
                f"each, got {metrics!r}: for instance NoisedMetrics(noise_multiplier=10, bound={{'accuracy': 1.0}})."
            )
        self._metrics = metrics
        self._bounds = metrics.bounds([*metrics.bound])
        self.size = len(self._bounds) + 1

    def fractions(self, node: int, reply: Message) -> np.ndarray:
        """A client's metrics, each in [0, 1], and a 1 for having sent them; zeros where it did not."""
        found = []
        try:
            record = only(reply.content.metric_records, "MetricRecord")
            for name, bound in self._bounds.items():
                value = record[name]
                if isinstance(value, list) or not math.isfinite(value):
                    raise ValueError(f"{name}={value!r} is no finite number")
                found.append(min(1.0, max(0.0, value / bound)))
        except Exception as error:
            log.warning("Node %d's metrics are left out: %s", node, error)
            return np.zeros(self.size)
        return np.array([*found, 1.0])

    def add_noise(self, total: np.ndarray, normal: np.ndarray) -> None:
        """To fractions, of which each client has one of each."""
        assert self._metrics is not None
        stddev = self._metrics.stddev(self.size)
        _replay_hook.add([total], [normal * stddev], [stddev], 1 / self._metrics.noise_multiplier)

    def means(self, total: np.ndarray, clients: float) -> dict[str, float]:
        """The means over so many clients, given the sums of their fractions."""
        bounds = [*self._bounds.items(), ("contributing", 1.0)]
        return {name: float(part / clients * bound) for (name, bound), part in zip(bounds, total, strict=True)}
