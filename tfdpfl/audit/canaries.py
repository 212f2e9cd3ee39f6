"""Canaries in one training, as a Keras callback: examples that coins put in or leave out."""

from __future__ import annotations

import secrets

import numpy as np
import tensorflow as tf

from tfdpfl._types import Arrays, Loss
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.audit.membership import losses_of
from tfdpfl.audit.one_run import OneRunReport, one_run_bounds

__all__ = ["OneRunAudit"]


class OneRunAudit(tf.keras.callbacks.Callback):
    """Audits a training while it runs: puts canaries into its data, and bounds ε from how well they are told.

        audit = OneRunAudit(canaries, delta=1e-5)
        model.fit(*audit.with_canaries(x, y), callbacks=[audit])
        print(audit.report)

    A fair coin decides for each canary whether it is in the data. After training the losses are compared with those
    before it. Those that fell most are guessed to be in, those that fell least to be out. The others are passed
    over. How many are guessed is one of a few numbers fixed beforehand, whose tests share the error. The adversary sees
    the first and the last weights and no step (a black box). What it finds is far below what the steps give away. The
    cost is two passes over the canaries, forwards.

    The bound is for neighbours by adding or removing one example. It holds whatever the canaries are; it is larger the
    more they stand out, for instance with a wrong label. The model that is trained with canaries is one of an audit:
    they lower its accuracy. Others that share a unit of privacy must not be canaries of one audit.

    Args:
      canaries: ``(x, y)``, at least 20 examples, as the data.
      delta: δ of the bound, 0 < δ < 1.
      confidence: strictly between 0 and 1.
      loss: as in `tfdpfl.audit.membership_inference`.
      batch_size: of the predictions.
      seed: of the coins, for tests; None takes the operating system's entropy.

    Attributes:
      inserted: bool ``[canaries]``: which are in.
      report: a `OneRunReport`, after training; None before.

    Raises:
      ValueError: an argument is out of its range, or there are losses that are not finite.

    Source: Steinke, Nasr & Jagielski 2023, arXiv:2305.08846; Mahloujifar, Melis & Chaudhuri 2024, arXiv:2410.22235.
    """

    def __init__(
        self,
        canaries: tuple[Arrays, Arrays],
        *,
        delta: float,
        confidence: float = 0.95,
        loss: Loss = None,
        batch_size: int = 256,
        seed: int | None = None,
    ):
        super().__init__()
        self._x, self._y = (np.asarray(part) for part in canaries)
        if len(self._x) != len(self._y) or len(self._x) < 20:
            raise ValueError(
                f"canaries must be a pair (x, y) of at least 20 examples, got {len(self._x)} and {len(self._y)}: a few "
                "hundred are enough to detect an ε of about 3"
            )
        self._delta = check_delta(delta)
        self._confidence = _checks.probability("confidence", confidence, "for instance 0.95")
        self._loss, self._batch_size = loss, batch_size
        rng = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
        self.inserted = rng.random(len(self._x)) < 0.5
        self._order = rng
        self.report: OneRunReport | None = None

    def with_canaries(self, x: Arrays, y: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The data with the canaries that are in, in random order."""
        both = [
            np.concatenate([np.asarray(part), canaries[self.inserted].astype(np.asarray(part).dtype)])
            for part, canaries in ((x, self._x), (y, self._y))
        ]
        order = self._order.permutation(len(both[0]))
        return both[0][order], both[1][order]

    def on_train_begin(self, logs: object = None) -> None:
        """Takes the losses before training; of a second `fit` those of the first one hold."""
        if not hasattr(self, "_before"):
            self._before = self._now()

    def on_train_end(self, logs: object = None) -> None:
        """Makes the report."""
        self.report = one_run_bounds(
            self._before - self._now(), self.inserted, delta=self._delta, confidence=self._confidence
        )

    def _now(self) -> np.ndarray:
        return losses_of(self.model, (self._x, self._y), self._loss, self._batch_size)
