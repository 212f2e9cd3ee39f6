"""A Keras callback that prices the training while it runs, and ends it before the budget is passed."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl.accounting import PrivacyLedger, PrivacyReport, compute_num_steps, privacy_report
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.accounting.run import SAMPLINGS
from tfdpfl.data import SamplingDeclaration, declared_sampling
from tfdpfl.errors import PrivacyError


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Writes ``epsilon`` into the logs of every epoch, and stops training before ``target_epsilon`` is passed.

        model.fit(x, y, callbacks=[tfdpfl.callbacks.PrivacyBudget(num_examples=len(x), delta=1e-5)])

    What is priced is what ran: the steps and noise multipliers that the optimizer counted (restarts included), under
    the sampling that the data source declares. Batches of `tfdpfl.data.poisson_batches` are Poisson samples; arrays
    given to `fit` are shuffled, each example used once an epoch, and priced without amplification; for other data
    sets and generators say ``sampling`` and ``batch_size``. Steps that the optimizer took before (a resumed training)
    are priced as if they had been sampled the same way.

    Args:
      num_examples: size of the training data; None takes it from the data. The size counts as public.
      delta: δ of the reported ε, 0 < δ < 1; below 1 / num_examples to mean anything.
      target_epsilon: the ε not to pass, or None.
      sampling: "poisson", "shuffle", "fixed_size" or "none", for data that do not say themselves.
      batch_size: (expected) batch size, likewise.
      accountant: "pld" or "rdp".

    Attributes:
      report: a `PrivacyReport` of what ran so far.

    Raises:
      PrivacyError: when training begins, if the optimizer is not private, the sampling is unknown or contradicts the
        data, Poisson batches meet an optimizer without ``expected_batch_size``, or not even one step fits the target.
    """

    def __init__(
        self,
        num_examples: int | None = None,
        delta: float | None = None,
        target_epsilon: float | None = None,
        *,
        sampling: str | None = None,
        batch_size: int | None = None,
        accountant: str = "pld",
    ):
        super().__init__()
        if delta is None:
            raise ValueError("delta=None: give the δ of the promise, for example 1e-5 (below 1 / num_examples).")
        self.num_examples = num_examples
        self.delta = check_delta(delta)
        if target_epsilon is not None and not target_epsilon > 0:
            raise ValueError(f"target_epsilon={target_epsilon!r} must be > 0, or None to train without a limit.")
        self.target_epsilon = target_epsilon
        if sampling is not None and sampling not in SAMPLINGS:
            raise ValueError(f"sampling={sampling!r} must be one of {', '.join(SAMPLINGS)}, or None.")
        self.sampling = sampling
        self.batch_size = batch_size
        self.accountant = accountant
        self._passes = 0

    # -- Keras's hooks ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._optimizer = private_optimizer(self.model)
        call = _fit_arguments(self.model)
        self._data = self._describe(call)
        steps = self.params.get("steps")
        n, b = self._data["num_examples"], self._data["batch_size"]
        self._passes_per_epoch = max(1, math.ceil(steps / math.ceil(n / b))) if steps else 1
        if not self._passes and self._optimizer.num_dp_steps:  # of a run before this one
            self._passes = math.ceil(self._optimizer.num_dp_steps / max(n // b, 1))
        self._limit = self._allowed()
        # Keras 3 has the number itself, Keras 2 a variable under another name.
        per_call = getattr(self.model, "steps_per_execution", None) or getattr(self.model, "_steps_per_execution", 1)
        self._stride = int(np.asarray(per_call))
        if self._is_full():
            raise PrivacyError(
                f"target_epsilon={self.target_epsilon:g} at delta={self.delta:g} leaves no room for another "
                f"{'epoch' if self._data['sampling'] == 'shuffle' else 'step'}. Raise noise_multiplier "
                "(tfdpfl.compute_noise_multiplier finds the smallest one that does) or the target."
            )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._passes += self._passes_per_epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._limit is not None and self._data["sampling"] != "shuffle" and self._is_full():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["epsilon"] = self.report.epsilon
        if self._is_full():
            self.model.stop_training = True

    # -- prices ----------------------------------------------------------------------------------------------

    @property
    def report(self) -> PrivacyReport:
        """The price of all that the optimizer has done."""
        data = self._data
        executed = self._optimizer.executed
        if data["sampling"] == "shuffle":
            least = min((z for z, _ in executed), default=self._multiplier)
            return privacy_report(
                noise_multiplier=least, num_epochs=self._passes, delta=self.delta, accountant=self.accountant, **data
            )
        ledger = PrivacyLedger()
        for z, steps in executed:
            ledger.record(z, steps, **data)
        return ledger.report(self.delta, self.accountant)

    @property
    def _multiplier(self) -> float:
        """The noise of the next step over its sensitivity to one example."""
        halved = self._optimizer.num_microbatches not in (None, self._data["batch_size"])
        return self._optimizer.noise_multiplier / (2 if halved else 1)

    def _allowed(self) -> int | None:
        """How many steps (passes, if shuffled) the target allows in all."""
        if self.target_epsilon is None:
            return None
        executed = self._optimizer.executed
        least = min([z for z, _ in executed] + [self._multiplier])  # never less than the price of any row
        try:
            steps = compute_num_steps(
                target_epsilon=self.target_epsilon, noise_multiplier=least, delta=self.delta,
                accountant=self.accountant, **self._data,
            )  # fmt: skip
        except ValueError:
            return 0
        if self._data["sampling"] != "shuffle":
            return steps
        return steps // max(self._data["num_examples"] // self._data["batch_size"], 1)

    def _is_full(self) -> bool:
        if self._limit is None:
            return False
        if self._data["sampling"] == "shuffle":
            return self._passes + self._passes_per_epoch > self._limit
        return self._optimizer.num_dp_steps + self._stride > self._limit

    # -- the data --------------------------------------------------------------------------------------------

    def _describe(self, call: dict[str, Any]) -> dict[str, Any]:
        """num_examples, batch_size and sampling of the data that `fit` was given."""
        x = call.get("x")
        declared = declared_sampling(x)
        if declared is not None:
            return self._poisson(declared)
        length = _length(x)
        if length is not None:
            if self.sampling not in (None, "shuffle"):
                raise PrivacyError(
                    f"sampling={self.sampling!r}, but fit was given arrays, which it shuffles. Leave sampling out, or "
                    "pass tfdpfl.data.poisson_batches((x, y), ...) to fit."
                )
            n = self.num_examples if self.num_examples is not None else length
            if length > n or (length < n and not call.get("validation_split")):
                raise ValueError(f"num_examples={n}, but fit was given {length} examples; give their number.")
            batch = min(call.get("batch_size") or 32, length)
            return {"num_examples": length, "batch_size": batch, "sampling": "shuffle"}
        if self.sampling is None or self.num_examples is None or self.batch_size is None:
            raise PrivacyError(
                f"How {type(x).__name__} draws its batches is not known, so they cannot be priced. Use "
                "tfdpfl.data.poisson_batches, or give PrivacyBudget sampling='shuffle' (every example at most once a "
                "pass), num_examples and batch_size."
            )
        if self.sampling == "poisson":
            self._check_poisson()
        return {"num_examples": self.num_examples, "batch_size": self.batch_size, "sampling": self.sampling}

    def _poisson(self, declared: SamplingDeclaration) -> dict[str, Any]:
        if self.sampling not in (None, "poisson"):
            raise PrivacyError(f"sampling={self.sampling!r}, but the data are Poisson batches. Leave sampling out.")
        if self.num_examples not in (None, declared.num_examples):
            raise ValueError(
                f"num_examples={self.num_examples}, but the Poisson batches are drawn from {declared.num_examples} "
                "examples; give their number."
            )
        self._check_poisson()
        # A whole batch size at or above the expected one: a higher rate costs no less.
        size = min(math.ceil(declared.expected_batch_size - 1e-9), declared.num_examples)
        return {"num_examples": declared.num_examples, "batch_size": max(size, 1), "sampling": "poisson"}

    def _check_poisson(self) -> None:
        if self._optimizer.expected_batch_size is None:
            raise PrivacyError(
                "Under Poisson sampling the size of a batch is private, but the optimizer divides by it. Give the "
                "optimizer expected_batch_size=sampling_rate * num_examples."
            )
        if self._optimizer.num_microbatches is not None:
            raise PrivacyError(
                "Under Poisson sampling one example more regroups the microbatches of all that follow it, which has no "
                "price. Use num_microbatches=None."
            )


def private_optimizer(model: Any) -> Any:
    """The DP optimizer that a compiled model trains with, out of its loss-scaling wrapper if there is one."""
    from tfdpfl.optimizers import DPOptimizer

    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(optimizer, DPOptimizer):
        raise PrivacyError(
            f"PrivacyBudget prices DP optimizers, but the model trains with {type(optimizer).__name__}. Compile it "
            "with tfdpfl.DPAdam(l2_norm_clip=..., noise_multiplier=...) or another of tfdpfl's."
        )
    return optimizer


def _fit_arguments(model: Any) -> dict[str, Any]:
    """The arguments of the `fit` call that is running: Keras does not tell callbacks what data it trains on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _length(x: Any) -> int | None:
    """Number of examples in arrays as `fit` takes them, or None for anything else."""
    leaves = tf.nest.flatten(x) if isinstance(x, (dict, list, tuple)) else [x]
    if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "__len__") and len(leaf.shape) for leaf in leaves):
        return int(leaves[0].shape[0])
    return None
