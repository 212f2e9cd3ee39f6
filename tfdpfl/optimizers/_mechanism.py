"""What every DP optimizer does between a loss and an update, whatever the version of Keras."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpfl import noise
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.engine import Plan, check_clip, check_finished, raw_variable, versions
from tfdpfl.errors import PrivacyError

LEDGER_ROWS = 8
# Divided by 2^31 examples, and with all the digits of a small normal, still above float32's least normal number.
LEAST_STDDEV = 1e-20
# The graphs of each mechanism's steps, and at what version they were found in order, by ids of the variables kept; not
# among its attributes, which are saved.
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


class _Ran:
    """What ran in this process. It is not saved, so nothing that is loaded takes it back: after another state was
    loaded in the middle of a run, no noise is drawn twice, and every step stays counted. (No tf.Module, which would be
    saved.)"""

    def __init__(self):
        with tf.init_scope():
            self.key, self.steps, self.ledger = (
                tf.Variable(np.zeros(shape, dtype), trainable=False)
                for shape, dtype in (([2], np.int64), ([], np.int64), ([LEDGER_ROWS, 2], np.float64))
            )

    def carried_on(self, state: dict) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The key, steps and ledger to go on from: those of ``state``, as long as nothing ran.

        Then the key stays what it was, and the steps that drew noise with it. The ledger has, row by row, the less
        noise, and the more steps where the state is of this run (has its key), the sum of both where it is of another:
        it costs no less than what either ran.
        """
        key, steps, ledger = (tf.convert_to_tensor(state[k]) for k in ("dp_key", "dp_steps", "dp_ledger"))
        any_ran, same = self.steps > 0, tf.reduce_all(tf.equal(self.key, key))
        z, n = tf.unstack(ledger, axis=1)
        own_z, own_n = tf.unstack(tf.convert_to_tensor(self.ledger), axis=1)
        least = tf.where(n > 0, tf.where(own_n > 0, tf.minimum(z, own_z), z), own_z)
        return (
            tf.where(any_ran, tf.convert_to_tensor(self.key), key),
            tf.where(any_ran, tf.where(same, tf.maximum(steps, self.steps), self.steps), steps),
            tf.stack([least, tf.where(same, tf.maximum(n, own_n), n + own_n)], 1),
        )

    def assign(self, key: tf.Tensor, steps: tf.Tensor, ledger: tf.Tensor, state: dict) -> None:
        for name, own, value in (
            ("dp_key", self.key, key), ("dp_steps", self.steps, steps), ("dp_ledger", self.ledger, ledger)
        ):  # fmt: skip
            own.assign(value)
            state[name].assign(value)


class Mechanism(tf.Module):
    """The Gaussian mechanism on clipped gradients, with its state.

    The update is ``(sum_i clip(g_i, C) + N(0, (z C)^2 I)) / denominator``, plus the gradient of what in the loss
    depends on no example (Abadi et al. 2016, arXiv:1607.00133, algorithm 1). The denominator is
    ``expected_batch_size`` where it is given, else the number of units (examples or microbatches) in the batch.

    State, in variables that are saved with the optimizer: ``key`` (secret), ``steps`` (noisy steps taken),
    ``ledger`` (rows of noise multiplier and steps), ``nonfinite`` (units whose gradient was not finite).
    """

    def __init__(self, l2_norm_clip, noise_multiplier, num_microbatches, expected_batch_size, seed):
        super().__init__(name="tfdpfl_mechanism")
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
        self._ran = _Ran()

    def config(self) -> dict:
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self.num_microbatches,
            "expected_batch_size": self.expected_batch_size,
            "seed": self.seed,
        }

    def initial_state(self) -> dict[str, np.ndarray]:
        """Names and first values of the state's variables."""
        return {
            "dp_key": noise.new_key(self.seed),
            "dp_steps": np.zeros([], np.int64),
            "dp_ledger": np.zeros([LEDGER_ROWS, 2], np.float64),
            "dp_nonfinite": np.zeros([], np.int64),
        }

    def update(self, loss: tf.Tensor, variables: Sequence, state: dict[str, tf.Variable]) -> list[tf.Tensor | None]:
        """The noisy gradients, one for each variable (None where the loss does not depend on it)."""
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1:
            raise PrivacyError(
                f"{type(strategy).__name__} runs {strategy.num_replicas_in_sync} replicas, which would draw noise "
                "apart. Train on one device for now."
            )
        plan = Plan(loss, variables, self.num_microbatches)
        key, steps, ledger = self._ran.carried_on(state)
        if self.expected_batch_size is None:
            denominator = tf.cast(tf.maximum(plan.units.count, 1), tf.float32)
        else:
            denominator = tf.constant(self.expected_batch_size, tf.float32)
        clipped = plan.finish(plan.squared_norms(), self.l2_norm_clip, denominator)
        _GRAPHS.setdefault(self, weakref.WeakKeyDictionary())[clipped.norms.graph] = {}
        means = list(clipped.sum)
        used = [i for i, m in enumerate(means) if m is not None]
        if self.noise_multiplier > 0:
            stddev = self.noise_multiplier * self.l2_norm_clip / denominator
            shapes = [raw_variable(variables[i]).shape for i in used]
            normals = noise.gaussian(shapes, stddev, key, steps)
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
            self._record(state, clipped, key, steps, ledger)
        return result

    def ledger(self, state: dict) -> np.ndarray:
        """Rows of noise multiplier (over the sensitivity to one example) and steps."""
        if not tf.executing_eagerly():
            raise RuntimeError("What ran can be read between steps, not in a function that is being traced.")
        return self._ran.carried_on(state)[2].numpy()

    def settle(self, state: dict) -> None:
        """Brings a state that was loaded up to what ran, for it to be saved."""
        if self._ran.steps.numpy() > 0:
            self._ran.assign(*self._ran.carried_on(state), state)

    def check_finished(self, kept: Sequence = ()) -> None:
        """Looks again at the steps that were traced; see `tfdpfl.clipping.engine.check_finished`."""
        variables = tuple(map(id, kept))
        for graph, checked in list(_GRAPHS.get(self, {}).items()):
            if checked.get(variables) != versions(graph):
                check_finished(graph, kept)
                checked[variables] = versions(graph)

    def _record(self, state: dict[str, tf.Variable], clipped, key, steps_before, ledger) -> None:
        """Counts the step in the ledger's row for the noise multiplier that ran."""
        multiplier = tf.constant(self.noise_multiplier, tf.float64)
        if self.num_microbatches is not None:
            # One example moves a whole group's clipped mean, by up to 2 C, unless the group is that example.
            alone = tf.equal(tf.constant(self.num_microbatches), clipped.batch_size)
            multiplier = tf.where(alone, multiplier, multiplier / 2)
        multipliers, steps = tf.unstack(ledger, axis=1)
        # The row of this multiplier; else the first that is free; else the first.
        rank = tf.where(steps > 0, tf.cast(tf.equal(multipliers, multiplier), tf.float64) * 2, 1.0)
        here = tf.equal(tf.argmax(rank), np.arange(LEDGER_ROWS))
        # A full ledger keeps the least noise of the rows it has to merge: never a smaller price than what ran.
        least = tf.where(steps > 0, tf.minimum(multipliers, multiplier), multiplier)
        steps += tf.cast(here, tf.float64)
        ledger = tf.stack([tf.where(here, least, multipliers), steps], 1)
        self._ran.assign(key, steps_before + 1, ledger, state)
        state["dp_nonfinite"].assign_add(tf.cast(clipped.num_nonfinite, tf.int64))
