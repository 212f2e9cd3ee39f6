"""What every DP optimizer does between a loss and an update, whatever the version of Keras."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl import noise
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.strategies import Noise, noise_from_dict
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.engine import check_clip
from tfdpfl.clipping.finished import check_finished, raw_variable, versions
from tfdpfl.clipping.plan import Plan
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import _counts
from tfdpfl.optimizers._chain import Chain

# Divided by 2^31 examples, and with all the digits of a small normal, still above float32's least normal number.
LEAST_STDDEV = 1e-20
# The graphs of each mechanism's steps, and at what version they were found in order, by ids of the variables kept.
_Checked = dict[tuple[int, ...], tuple[int, ...]]
_GRAPHS: weakref.WeakKeyDictionary[Mechanism, weakref.WeakKeyDictionary[tf.Graph, _Checked]] = (
    weakref.WeakKeyDictionary())  # fmt: skip

NO_LOSS = (
    "These gradients did not come through the clip, so they were not applied. In a train_step of your own, take the "
    "step by self.optimizer.minimize(loss, self.trainable_variables, tape=tape), without tape.gradient; elsewhere by "
    "optimizer.minimize(loss, variables) inside a tf.function; or use tfdpfl.clipping.clipped_gradients and add the "
    "noise yourself."
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


class Mechanism:
    """The Gaussian mechanism on clipped gradients.

    The update is ``(sum_i clip(g_i, C) + N(0, (z C)^2 I)) / denominator``, plus the gradient of what in the loss
    depends on no example (Abadi et al. 2016, arXiv:1607.00133, algorithm 1). The denominator is
    ``expected_batch_size`` where it is given, else the number of units (examples or microbatches) in the batch.

    It belongs to one optimizer object in one process, like the key of its noise (``source``) and its count of what ran
    (``counter``). Saved is one variable of the optimizer, the table of `tfdpfl.optimizers._counts`. (No tf.Module, all
    of which would be saved.)
    """

    def __init__(
        self, l2_norm_clip, noise_multiplier, num_microbatches, expected_batch_size, seed, correlated=None,
        secure_noise=False,
    ):  # fmt: skip
        self.l2_norm_clip = _number(
            "l2_norm_clip", l2_norm_clip, 0, True, "It bounds the L2 norm of one example's gradient; 1.0 is usual."
        )
        self.noise_multiplier = _number(
            "noise_multiplier", noise_multiplier, 0, False,
            "It is the noise's standard deviation over l2_norm_clip; tfdpfl.compute_noise_multiplier finds it.",
        )  # fmt: skip
        check_clip(self.l2_norm_clip)
        self.num_microbatches = _count("num_microbatches", num_microbatches, "None clips every example by itself.")
        if expected_batch_size is not None:
            expected_batch_size = _number(
                "expected_batch_size", expected_batch_size, 0, True, "It is the sampling rate times the data's size."
            )
        self.expected_batch_size = expected_batch_size
        stddev = self.noise_multiplier * self.l2_norm_clip / (expected_batch_size or 1)
        if self.noise_multiplier > 0 and stddev < LEAST_STDDEV:
            raise ValueError(
                f"l2_norm_clip={l2_norm_clip!r} with noise_multiplier={noise_multiplier!r} and "
                f"expected_batch_size={expected_batch_size!r} is noise of {stddev:.2g}, which float32 loses where it "
                "may keep the gradient. Scale the loss and l2_norm_clip up."
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0):
            raise ValueError(f"seed={seed!r} must be a non-negative integer, or None for the system's entropy.")
        self.seed = None if seed is None else int(seed)
        if isinstance(correlated, dict):
            correlated = noise_from_dict(correlated)
        if correlated is not None and not isinstance(correlated, Noise):
            raise ValueError(f"noise={correlated!r} must be None, or tfdpfl.noise.Tree, Banded or BLT.")
        if correlated is not None and self.num_microbatches is not None:
            raise ValueError(
                f"num_microbatches={num_microbatches!r} regroups examples, which correlated noise has no price for. "
                "Use num_microbatches=None."
            )
        if not isinstance(secure_noise, bool):
            raise ValueError(f"secure_noise={secure_noise!r} must be True or False.")
        if secure_noise and correlated is not None:
            raise ValueError("secure_noise=True draws fresh noise on a grid: use noise=None with it.")
        self.secure_noise = secure_noise
        self.source = noise.Source(self.seed)
        self.counter = _counts.Counter()
        self.counter.discrete = secure_noise
        self.chain = None if correlated is None else Chain(correlated, self.noise_multiplier)
        self.table: Any = None  # the optimizer's variable

    def config(self) -> dict:
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self.num_microbatches,
            "expected_batch_size": self.expected_batch_size,
            "seed": self.seed,
            "secure_noise": self.secure_noise,
            "noise": None if self.chain is None else self.chain.noise.to_dict(),
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
        return _counts.ledger_of(rows) if self.chain is None else self.chain.ledger(rows)

    def update(self, loss: tf.Tensor, variables: Sequence, table: tf.Variable) -> list[tf.Tensor | None]:
        """The noisy gradients, one for each variable (None where the loss does not depend on it); ``table`` is the
        saved one, in which the step is counted."""
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1:
            raise PrivacyError(
                f"{type(strategy).__name__} runs {strategy.num_replicas_in_sync} replicas, which would draw noise "
                "apart. Train on one device for now."
            )
        plan = Plan(loss, variables, self.num_microbatches)
        if self.expected_batch_size is None:
            denominator = tf.cast(tf.maximum(plan.units.count, 1), tf.float32)
        else:
            denominator = tf.constant(self.expected_batch_size, tf.float32)
        secure = self.secure_noise and self.noise_multiplier > 0
        divided_by = tf.ones_like(denominator) if secure else denominator
        clipped = plan.finish(plan.squared_norms(), self.l2_norm_clip, divided_by)
        _GRAPHS.setdefault(self, weakref.WeakKeyDictionary())[clipped.norms.graph] = {}
        means = list(clipped.sum)
        used = [i for i, m in enumerate(means) if m is not None]
        if secure:
            self._add_on_grid(means, used, denominator)
        elif self.noise_multiplier > 0:
            stddev = self.noise_multiplier * self.l2_norm_clip / denominator
            shapes = [raw_variable(variables[i]).shape for i in used]
            if self.chain is None:
                normals = self.source.gaussian(shapes, stddev)
            else:
                rows = self.chain.next(self.source, self.counter, [id(raw_variable(variables[i])) for i in used])
                normals = [row * (self.chain.noise.unit * stddev) for row in rows]
            for i, normal in zip(used, normals, strict=True):
                # In the noise's type: a sum of float64 weights would keep digits that no noise covers.
                means[i] = tf.cast(tf.cast(means[i], normal.dtype) + normal, means[i].dtype)
        result: list[tf.Tensor | None] = []
        for v, g, r in zip(variables, means, clipped.regularization, strict=True):
            if r is not None:
                g = r if g is None else g + r
            if g is not None:
                g = tf.cast(g, raw_variable(v).dtype)
                g = graph_tools.released(g)
            result.append(g)
        with tf.control_dependencies([clipped.num_units]):  # not in an execution that finds the data at their end
            self.counter.count(self._multiplier(clipped.batch_size), table)
            self.counter.nonfinite.assign_add(tf.cast(clipped.num_nonfinite, tf.int64))
        return result

    def _add_on_grid(self, sums: list, used: list[int], denominator: tf.Tensor) -> None:
        """Puts the noisy means in the place of the sums: rounded to a grid, whole noise added, then divided."""
        sizes = [sums[i].shape.num_elements() for i in used]
        step, sigma = noise.grid(self.l2_norm_clip, self.noise_multiplier, sum(sizes))
        drawn = tf.split(self.source.discrete(sum(sizes), sigma), sizes)
        for i, part in zip(used, drawn, strict=True):
            # What follows the whole numbers' sum depends on nothing else of the data: its rounding is harmless.
            whole = tf.cast(tf.round(tf.cast(sums[i], tf.float64) / step), tf.int64) + tf.reshape(part, sums[i].shape)
            sums[i] = tf.cast(tf.cast(whole, tf.float64) * step / tf.cast(denominator, tf.float64), sums[i].dtype)

    def _multiplier(self, batch_size: tf.Tensor) -> tf.Tensor:
        """The noise's standard deviation over the sensitivity to one example."""
        multiplier = tf.constant(self.noise_multiplier, tf.float64)
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
