"""Averages of the weights over a training."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdpfl.accounting import _checks
from tfdpfl.callbacks._fits import LEFT, executions_of, fingerprint, running_models

__all__ = ["AveragedWeights"]


class AveragedWeights(tf.keras.callbacks.Callback):
    """Averages a model's weights over the updates of a training, and leaves it with the averages.

        model.fit(x, y, validation_data=validation, callbacks=[budget, tfdpfl.callbacks.AveragedWeights(decay=0.999)])

    Noise that each step adds is averaged out of the weights. A privately trained model is often better for it
    (De et al. 2022, arXiv:2204.13650, section 3). It costs no privacy: what is averaged is private already.

    The model holds the averages from validation to the beginning of the next epoch, so what Keras validates is what
    `EarlyStopping` restores and `ModelCheckpoint` saves. Without validation data it holds them from this callback's
    ``on_epoch_end`` on: then pass this callback before those two. Training goes on from the weights themselves.

    Args:
      decay: how much of the average stays at each update, 0 < decay < 1. Of the first updates less stays:
        ``min(decay, (1 + t) / (10 + t))`` at update t.

    Attributes:
      averages: the weights that are trained, averaged, as arrays. Another `fit` with the same callback goes on with
        them.

    Raises:
      ValueError: a decay out of its range; when training begins, a model whose steps callbacks do not see one by one.
    """

    def __init__(self, decay: float = 0.999):
        super().__init__()
        self.decay = _checks.probability("decay", decay, "0.999 is usual; more for longer trainings")
        self.averages: list[np.ndarray] = []
        self._updates = self._seen = 0
        self._trained: list[np.ndarray] = []  # while the averages are in their place

    def on_train_begin(self, logs: dict | None = None) -> None:
        batches = executions_of(self.model)
        if batches > 1:
            raise ValueError(
                f"The model was compiled with steps_per_execution={batches}, so callbacks see the weights only after "
                "some updates, and AveragedWeights cannot average the others. Compile with steps_per_execution=1. Or "
                f"leave this callback out and average in the step: use_ema=True, ema_momentum={self.decay:g} in the "
                "optimizer."
            )
        self._seen = self._iterations()
        self._trained = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._put_back()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        now = self._iterations()
        if now == self._seen:  # a logical batch goes on
            return
        self._updates, self._seen = self._updates + now - self._seen, now
        stays = np.float32(min(self.decay, (1 + self._updates) / (10 + self._updates)))
        weights = self._weights()
        if len(weights) != len(self.averages):
            self.averages = [w.copy() for w in weights]
        self.averages = [stays * a + (1 - stays) * w for a, w in zip(self.averages, weights, strict=True)]

    def on_test_begin(self, logs: dict | None = None) -> None:
        if self.model in running_models():
            self._put_averages()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._put_averages()

    def on_train_end(self, logs: dict | None = None) -> None:
        self._put_averages()  # unless a callback chose among earlier ones
        self._trained = []

    def _put_averages(self) -> None:
        if self.averages and not self._trained:
            self._trained = self._weights()
            self._put(self.averages)
            if self.model in LEFT:  # they are what private steps left
                steps, left = LEFT[self.model]
                LEFT[self.model] = steps, left | {fingerprint(self.model)}

    def _put_back(self) -> None:
        if self._trained:
            self._put(self._trained)
            self._trained = []

    def _iterations(self) -> int:
        return int(tf.convert_to_tensor(self.model.optimizer.iterations))

    def _weights(self) -> list[np.ndarray]:
        return [np.array(v) for v in self.model.trainable_weights]

    def _put(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self.model.trainable_weights, values, strict=True):
            variable.assign(value.astype(variable.dtype if isinstance(variable.dtype, str) else variable.dtype.name))
