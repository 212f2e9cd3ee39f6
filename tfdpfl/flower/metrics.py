"""Clients' metrics: what is asked for by name, clipped to its bound and given noise that is charged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl.federated.clip import NoisedMetrics
from tfdpfl.flower._flwr import Message, log, only

__all__ = ["add_noise", "fractions", "means_of", "named", "names_of"]


def named(name: str, metrics: object) -> NoisedMetrics | None:
    if metrics is None:
        return None
    if not isinstance(metrics, NoisedMetrics) or not isinstance(metrics.bound, Mapping) or not metrics.bound:
        raise ValueError(
            f"{name} must be None or a NoisedMetrics whose bound names the metrics and the largest value of each, got "
            f"{metrics!r}: for instance NoisedMetrics(noise_multiplier=10, bound={{'accuracy': 1.0}})."
        )
    return metrics


def names_of(metrics: NoisedMetrics | None) -> list[str]:
    return list(metrics.bound) if metrics is not None and isinstance(metrics.bound, Mapping) else []


def fractions(node: int, reply: Message, names: list[str], metrics: NoisedMetrics | None) -> np.ndarray:
    """A client's metrics, each in [0, 1], and a 1 for having sent them; zeros where it did not."""
    assert metrics is not None
    bounds, found = metrics.bounds(names), []
    try:
        record = only(reply.content.metric_records, "MetricRecord")
        for name in names:
            value = record[name]
            if isinstance(value, list) or not math.isfinite(value):
                raise ValueError(f"{name}={value!r} is no finite number")
            found.append(min(1.0, max(0.0, value / bounds[name])))
    except Exception as error:
        log.warning("Node %d's metrics are left out: %s", node, error)
        return np.zeros(len(names) + 1)
    return np.array([*found, 1.0])


def add_noise(total: np.ndarray, normal: np.ndarray, metrics: NoisedMetrics) -> None:
    """To fractions, of which each client has one of each."""
    z, root = metrics.noise_multiplier, math.sqrt(len(total))
    if z > 0:
        _replay_hook.add([total], [normal * (z * root)], [z * root], 1 / z)


def means_of(means: np.ndarray, names: list[str], metrics: NoisedMetrics | None) -> dict[str, float]:
    assert metrics is not None
    bounds = [*metrics.bounds(names).values(), 1.0]
    return {name: float(m * bound) for name, m, bound in zip([*names, "contributing"], means, bounds, strict=True)}
