"""Noise on a client's own update, before it leaves the client."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl._names import accept_old_names
from tfdpfl._types import Json
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.federated.privacy import check_target
from tfdpfl.flower._flwr import Context, Message, MetricRecord, RecordDict, arrays_of, log, only, record_of
from tfdpfl.flower.reports import ClientLedger, attach, over_budget, refused
from tfdpfl.flower.spent import ledger_of_uploads
from tfdpfl.flower.updates import ClippedSum

if TYPE_CHECKING:
    from flwr.client.typing import ClientAppCallable
    from flwr.common.typing import Scalar

    from tfdpfl import noise

__all__ = ["FAILURES", "Mod", "Normals", "add_answer", "local_dp_mod", "noised", "private_reply"]

FAILURES = (Exception, SystemExit)  # of an app; Flower would send the text of the first to the server
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


@accept_old_names(clip="l2_norm_clip")
def local_dp_mod(
    *,
    l2_norm_clip: float | str,
    noise_multiplier: float | str,
    delta: float,
    target_epsilon: float | None = None,
    ledger_path: str | os.PathLike | None = None,
    weighted_by_key: str = "num-examples",
    seed: int | None = None,
) -> Mod:
    """A mod under which a client's update is private against everyone, the server too (local differential privacy).

        @app.train(mods=[local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, target_epsilon=8.0)])
        def train(message, context): ...

    The update is clipped over all floating-point arrays together and gets Gaussian noise of standard deviation
    noise_multiplier * l2_norm_clip. Replacing it by any other moves what is sent by at most 2 l2_norm_clip. Every
    reply adds to the client's ledger before it leaves, and tells its ε (see `client_reports`). Nothing else of the app
    leaves: metrics are dropped, and every client weighs 1. Arrays that are not floating-point go back as they came. If
    the app raises or replies with an error, or its update is not finite or of other shapes, the client sends no
    update, with noise. The reason is logged on the client, and the server does not learn of it.

    Args:
      l2_norm_clip: the largest L2 norm of an update; or the name of the run config's entry that has it. The next, too.
      noise_multiplier: the noise's standard deviation over the clip.
      delta: δ of ε.
      target_epsilon: with it, a client refuses, by an error reply, what would pass it.
      ledger_path: a file on the client, with {node_id} or {partition-id} where several share a machine. None keeps the
        ledger in Flower's context, which ends with the run or the client's process.
      weighted_by_key: the metric that the server's strategy weights by; it is sent as 1.
      seed: for tests only.

    Raises:
      ValueError: an argument is out of its range.
    """
    for name, value in dict(l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier).items():
        if not isinstance(value, str):
            _positive(name, value)
    delta = check_delta(delta)
    check_target(target_epsilon)
    normals = Normals(seed)

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        bound = _positive("l2_norm_clip", _setting(l2_norm_clip, context))
        z = _positive("noise_multiplier", _setting(noise_multiplier, context))
        sent = arrays_of(only(message.content.array_records, "ArrayRecord"))
        kept = ClientLedger(context, "local", ledger_path)
        cost = ledger_of_uploads(z, seed=seed)
        over = over_budget(kept.with_more(cost), delta, target_epsilon)
        if over:
            return refused(message, over)
        total = ClippedSum(sent, bound)
        add_answer(total, message, context, call_next)
        over = kept.spend(cost, delta, target_epsilon)  # another process may have spent meanwhile
        if over:
            return refused(message, over)
        noisy = noised(total, bound * z, normals)
        return private_reply(message, noisy, weighted_by_key, kept.report(delta))

    return mod


def add_answer(total: ClippedSum, message: Message, context: Context, call_next: ClientAppCallable) -> bool:
    """Runs the app and adds the arrays of its reply. Returns whether there were any.

    Whatever the app does wrong may depend on its data, so that the server must not learn of it, not even that it did.
    """
    try:
        reply = call_next(message, context)
        if reply.has_error():
            raise ValueError(f"the app replied with an error: {reply.error.reason}")
        total.add(arrays_of(only(reply.content.array_records, "ArrayRecord")))
    except FAILURES:
        log.warning("No update is sent, only noise. The server does not learn why:", exc_info=True)
        return False
    return True


def private_reply(
    message: Message, arrays: Mapping[str, np.ndarray], weighted_by_key: str, report: Json, weight: float = 1.0
) -> Message:
    """A reply of noisy arrays, a weight and a report on privacy, and of nothing that the app said."""
    key = next(iter(message.content.array_records))
    content = RecordDict({key: record_of(arrays), "metrics": MetricRecord({weighted_by_key: weight})})
    reply = Message(content, reply_to=message)
    attach(reply, report)
    return reply


class Normals:
    """Draws standard normals for one object in one process."""

    def __init__(self, seed: int | None):
        self._seed = seed

    @functools.cached_property
    def source(self) -> noise.Source:
        """What draws them, made when it is first asked for, because it imports TensorFlow."""
        from tfdpfl import noise

        return noise.Source(self._seed)

    def __call__(self, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        return self.source.arrays(shapes)

    def __reduce__(self) -> tuple:  # Ray ships apps to its workers
        return Normals, (self._seed,)


def noised(total: ClippedSum, stddev: float, normals: Normals) -> dict[str, np.ndarray]:
    """The model of a clipped sum plus that sum, with noise, in the model's types; what has no part in the sum stays."""
    base, added = total.base, total.total
    noise = [stddev * normal for normal in normals([part.shape for part in added.values()])]
    with np.errstate(over="ignore"):
        values = [base[name] + part for name, part in added.items()]
        out = [(v + n).astype(base[name].dtype) for name, v, n in zip(added, values, noise, strict=True)]
    told = _replay_hook.released(values, out, noise, [stddev] * len(out), total.l2_norm_clip / stddev)
    return {**base, **dict(zip(added, told, strict=True))}


def _setting(value: float | str, context: Context) -> Scalar:
    if not isinstance(value, str):
        return value
    if value not in context.run_config:
        raise ValueError(f"run_config has no {value!r}, only {sorted(context.run_config)}. Name an entry of it.")
    return context.run_config[value]


def _positive(name: str, value: object) -> float:
    return _checks.real(name, value, "give a number above 0, or the name of the run config's entry", above=0)
