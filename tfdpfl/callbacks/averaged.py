"""Averages of the weights over a training."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdpfl.accounting import _checks
from tfdpfl.callbacks._fits import LEFT, fingerprint, running_models


class AveragedWeights(tf.keras.callbacks.Callback):
    """Averages a model's weights over the updates of a training, and leaves it with the averages.

        model.fit(x, y, validation_data=validation, callbacks=[budget, tfdpfl.callbacks.AveragedWeights(decay=0.999)])

    Noise that each step adds is averaged out of the weights, so that a privately trained model is often better for it
    (De et al. 2022, arXiv:2204.13650, section 3). It costs no privacy: what is averaged is private already. Validation
    within `fit` sees the averages; training goes on from the weights themselves.

    Args:
      decay: how much of the average stays at each update, 0 < decay < 1. Of the first updates less stays:
        ``min(decay, (1 + t) / (10 + t))`` at update t.

    Attributes:
      averages: the weights that are trained, averaged, as arrays. Another `fit` with the same callback goes on with
        them.

    Raises:
      ValueError: a decay out of its range.
    """

    def __init__(self, decay: float = 0.999):
        super().__init__()
        self.decay = _checks.probability("decay", decay, "0.999 is usual; more for longer trainings")
        self.averages: list[np.ndarray] = []
        self._updates = self._seen = 0
        self._trained: list[np.ndarray] = []  # while the averages are in their place

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._seen = self._iterations()

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
        if self.averages and self.model in running_models():
            self._trained = self._weights()
            self._put(self.averages)

    def on_test_end(self, logs: dict | None = None) -> None:
        if self._trained:
            self._put(self._trained)
            self._trained = []

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.averages:
            self._put(self.averages)
            if self.model in LEFT:  # they are what private steps left
                steps, left = LEFT[self.model]
                LEFT[self.model] = steps, left | {fingerprint(self.model)}

    def _iterations(self) -> int:
        return int(tf.convert_to_tensor(self.model.optimizer.iterations))

    def _weights(self) -> list[np.ndarray]:
        return [np.array(v) for v in self.model.trainable_weights]

    def _put(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self.model.trainable_weights, values, strict=True):
            variable.assign(value.astype(variable.dtype if isinstance(variable.dtype, str) else variable.dtype.name))
