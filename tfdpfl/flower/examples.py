"""DP-SGD inside a Flower client: what it sends protects each of its examples."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from tfdpfl._types import Arrays, Dataset, Json, Loss, Model, Optimizer
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.privacy import check_target
from tfdpfl.flower._flwr import Context, Message, arrays_of, log, only
from tfdpfl.flower.local import FAILURES, private_reply
from tfdpfl.flower.reports import ClientLedger, refused
from tfdpfl.flower.spent import seeded_by

__all__ = ["example_dp"]

_FAILED = "this client did not take part; its own log says why"


def example_dp(
    model: Model,
    data: Arrays,
    *,
    l2_norm_clip: float,
    noise_multiplier: float,
    batch_size: int,
    local_steps: int,
    delta: float,
    loss: Loss = None,
    optimizer: Optimizer = "adam",
    target_epsilon: float | None = None,
    ledger_path: str | os.PathLike | None = None,
    weighted_by_key: str = "num-examples",
    seed: int | None = None,
    **optimizer_arguments: object,
) -> Callable[[Message, Context], Message]:
    """A client's training function: local DP-SGD by this package's optimizers, under the client's own budget.

        train = app.train()(example_dp(make_model, load_data, l2_norm_clip=1.0, noise_multiplier=1.1, batch_size=64,
                                       local_steps=20, delta=1e-5, target_epsilon=4.0, learning_rate=1e-3))

    Each step takes every example with probability batch_size / n. The participation is added to the client's ledger
    before it begins. The reply states ε so far, for the client's own examples (adjacency zero_out: one example
    contributes nothing). The server sees weights, n, and that report; no loss or metric leaves. If the data cannot be
    read, or training fails, the reply is an error of one fixed sentence, and the reason is in the client's log alone.
    That a client failed is in no ε: let ``data`` leave out what it cannot read, example by example.

    Args:
      model: a Keras model, or a function without arguments that makes one. Its weights come with each message.
      data: (x, y), or a function of Flower's `Context` that gives them, as one node's partition.
      l2_norm_clip: the largest L2 norm of one example's gradient.
      noise_multiplier: the noise's standard deviation over the clip.
      batch_size: the expected number of examples in a step; a client with fewer takes all in each.
      local_steps: steps of a participation.
      delta: δ of ε.
      loss: as ``compile`` takes it; None for that which ``model`` was compiled with.
      optimizer: "adam", "sgd" or another of `tfdpfl`'s by its name in lower case, or a DP optimizer's class. Its state
        begins anew in each participation.
      target_epsilon: with it, a client refuses, by an error reply, the participation that would pass it.
      ledger_path: as for `local_dp_mod`. Name a file where clients live on: what Flower keeps ends with the process.
      weighted_by_key: the metric by which n is sent.
      seed: for tests only.
      optimizer_arguments: for the optimizer, as ``learning_rate``.

    Returns:
      A function of (message, context) that returns the reply.

    Raises:
      ValueError: an argument is out of its range.
    """
    _checks.whole("batch_size", batch_size, 1, "give the expected number of examples in a step")
    _checks.whole("local_steps", local_steps, 1, "count the steps of a participation")
    _checks.real("noise_multiplier", noise_multiplier, "give the noise's std over the clip", above=0)
    _checks.real("l2_norm_clip", l2_norm_clip, "give the largest L2 norm of an example's gradient", above=0)
    delta = check_delta(delta)
    check_target(target_epsilon)
    trainer: dict[float, _Trainer] = {}  # by the expected batch, which the optimizer divides by

    def train(message: Message, context: Context) -> Message:
        from tfdpfl.data import poisson_batches

        sent = arrays_of(only(message.content.array_records, "ArrayRecord"))
        kept = ClientLedger(context, "example", ledger_path)
        try:
            x, y = data(context) if callable(data) else data
            n = len(y)
            expected = min(batch_size, n)
            cost = PrivacyLedger().record(  # raises if there are no examples
                noise_multiplier, local_steps, num_examples=n, batch_size=expected, adjacency="zero_out"
            )
        except FAILURES:
            return _failed(message)
        cost.seeded = seeded_by(seed)
        if expected not in trainer:
            arguments = dict(
                l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier, expected_batch_size=expected, seed=seed
            )
            trainer[expected] = _Trainer(model, loss, optimizer, {**arguments, **optimizer_arguments})
        over = kept.spend(cost, delta, target_epsilon)
        if over:
            return refused(message, over)
        try:
            batches = poisson_batches((x, y), expected_batch_size=expected, steps=local_steps, seed=seed)
            trained = trainer[expected].fit([*sent.values()], batches, local_steps)
        except FAILURES:
            return _failed(message)
        arrays = dict(zip(sent, trained, strict=True))
        return private_reply(message, arrays, weighted_by_key, kept.report(delta), n)

    return train


def _failed(message: Message) -> Message:
    """A reply that says nothing of the error that is being handled, whose text may hold an example."""
    log.error("Nothing is sent but that this client failed. The server does not learn why:", exc_info=True)
    return refused(message, _FAILED)


class _Trainer:
    """One model and its optimizer, traced once; each training begins with the weights that it is given."""

    def __init__(self, model: Model, loss: Loss, optimizer: Optimizer, arguments: Json):
        import tensorflow as tf

        own = model if isinstance(model, tf.keras.Model) else model()
        loss = loss if loss is not None else getattr(own, "loss", None)
        if loss is None:
            raise ValueError("loss=None, and model was not compiled with one. Give it, as for compile.")
        self._model = own
        self._optimizer = _class_of(optimizer)(**arguments)
        own.compile(optimizer=self._optimizer, loss=loss)
        self._optimizer.build(own.trainable_variables)
        self._start: Json = {}
        self._optimizer.save_own_variables(self._start)

    def fit(self, weights: list[np.ndarray], batches: Dataset, steps: int) -> list[np.ndarray]:
        self._model.set_weights(weights)
        self._optimizer.load_own_variables(self._start)  # moments of another client are none of this one's
        before = self._optimizer.num_dp_steps
        self._model.fit(batches, epochs=1, verbose=0)
        ran = int(self._optimizer.num_dp_steps) - int(before)
        if ran != steps:
            raise PrivacyError(f"{ran} private steps ran where {steps} were paid: nothing is sent.")
        return self._model.get_weights()


def _class_of(optimizer: Optimizer) -> Optimizer:
    import tfdpfl

    if not isinstance(optimizer, str):
        return optimizer
    known = {name.removeprefix("DP").lower(): name for name in ("DPSGD", "DPAdam", "DPAdamW", "DPAdagrad", "DPRMSprop")}
    return getattr(tfdpfl, known[_checks.choice("optimizer", optimizer.lower(), tuple(known))])
