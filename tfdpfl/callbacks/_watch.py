"""Records what a `fit` says of its data itself, if no `PrivacyBudget` is among its callbacks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpfl._frames import optimizer_of
from tfdpfl._types import Model
from tfdpfl.callbacks._fits import Fit, executions_of, fit_arguments, length, running_models
from tfdpfl.callbacks._sampling import Sampling
from tfdpfl.callbacks.budget import PrivacyBudget
from tfdpfl.data import declared_sampling
from tfdpfl.optimizers import DPOptimizer, _past, _replicas

__all__ = ["join"]


class _Watch(tf.keras.callbacks.Callback):
    """Tells the optimizer how each batch is drawn, as `PrivacyBudget` does. Refuses nothing: of data that do not say
    themselves, nothing is known of the steps."""

    sampling = num_examples = batch_size = None  # nothing was said

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True  # Keras 2 need not fetch them
        self._fit: Fit | None = None
        self._depth = 0  # how many fits of the model ran when this one began, itself included

    def on_train_begin(self, logs: dict | None = None) -> None:
        call, optimizer = fit_arguments(self.model), trained_with(self.model)
        if optimizer is None:
            return
        watches, depth = optimizer._dp.counter.watches, running_models().count(self.model)
        for watch in list(watches):  # of which one at this depth was interrupted, since another fit is there now
            watch(depth - 1)
        self._fit, self._depth = None, depth
        if length(call.get("x")) is None and declared_sampling(call.get("x")) is None:
            return
        try:
            data = Sampling(self, optimizer, 0.0, call).describe()
        except ValueError:  # what has no price
            return
        self._fit = Fit(self.model, optimizer, data, 0.0, executions_of(self.model), call, self.params.get("steps"))
        watches.append(self._cut_off)  # until the fit ends: an interrupted one drops its callbacks

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        fit, steps = self._fit, self.params.get("steps")
        if fit is None:
            return
        if not steps:  # where a pass ends cannot be seen
            self._fit = None
            return
        if fit.passes == 0:
            fit.begin()
        fit.first = None
        fit.begin_passes(fit.passes_in_epoch(steps))

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        fit = self._fit
        if fit is not None:
            fit.first = batch if fit.first is None else fit.first
            fit.announce(batch, min(fit.stride, self.params["steps"] - batch))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._fit is not None:
            self._fit.silence()
            self._fit.awaited = False

    def on_train_end(self, logs: dict | None = None) -> None:
        if self._fit is not None:
            self._fit.end()
            self._fit.optimizer._dp.counter.watches.remove(self._cut_off)

    def _cut_off(self, running: int | None = None) -> None:
        """Ends a `fit` that was interrupted, if no more of its model's fits are running than did before it began."""
        fit = self._fit
        if fit is None:
            return
        if (running_models().count(fit.model) if running is None else running) < self._depth:
            self._fit = None
            fit.optimizer._dp.counter.watches.remove(self._cut_off)
            fit.cut_off()


def trained_with(model: Model) -> DPOptimizer | None:
    """The model's optimizer, if it is a private one that takes each batch as it comes, with fresh noise."""
    optimizer = optimizer_of(model)
    if not isinstance(optimizer, DPOptimizer) or optimizer.noise is not None or optimizer._dp.parts > 1:
        return None
    return optimizer if _replicas.workers() == 1 else None


def join(callbacks: Any) -> None:
    """Puts a `_Watch` among the callbacks of a `fit` that begins, if no other tells the optimizer of its batches."""
    models = running_models()
    if not models:
        return
    optimizer = optimizer_of(models[0])
    if isinstance(optimizer, DPOptimizer):
        _past.take_in(optimizer._dp, [], models[0])
    if trained_with(models[0]) is None:
        return
    if any(isinstance(callback, (PrivacyBudget, _Watch)) for callback in callbacks.callbacks):
        return
    watch = _Watch()
    watch.set_params(callbacks.params)
    watch.set_model(models[0])
    callbacks.callbacks.append(watch)
    if hasattr(callbacks, "_should_call_train_batch_hooks"):  # Keras 2 asked those that it had
        callbacks._should_call_train_batch_hooks = True
