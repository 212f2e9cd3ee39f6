"""How much noise a federated training needs, and what several on one population cost together. No TFF here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfdpfl._lazy import dp_event
from tfdpfl._names import accept_old_names
from tfdpfl._types import DpEvent
from tfdpfl.accounting import _checks
from tfdpfl.accounting.calibration import smallest_noise_multiplier
from tfdpfl.accounting.pricing import Price, check_accountant, check_delta, price
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.guarantees import (
    ClientLevel,
    DistributedLevel,
    ExampleLevel,
    LocalLevel,
    TreeLevel,
    participations,
)
from tfdpfl.federated.privacy import Guarantee, Participation, RoundsRun

__all__ = ["compute_federated_noise_multiplier", "skellam_level", "total_price"]

LEVELS = ("client", "tree", "distributed", "local", "example")
_TAIL_OF_A_SUM = 3.8905918864131  # standard deviations: TFF lets a sum leave the integers' range once in 10^4


@accept_old_names(clip="l2_norm_clip")
def compute_federated_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    num_rounds: int,
    participation: Participation,
    level: str = "client",
    accountant: str = "pld",
    restart_every: int | None = None,
    num_weights: int | None = None,
    l2_norm_clip: float = 1.0,
    bits: int = 20,
    num_examples: int | None = None,
    batch_size: int | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> float:
    """Returns the smallest noise multiplier whose ε after ``num_rounds`` is at most ``target_epsilon``, to 0.1 %.

        sampler = PoissonClientSampler(clients.client_ids, 0.05)
        z = compute_federated_noise_multiplier(
            target_epsilon=2.0, delta=1e-5, num_rounds=100, participation=sampler.participation
        )
        process = build_dp_fed_avg(make_model, noise_multiplier=z, clients_per_round=..., ...)

    Args:
      target_epsilon: ε > 0 of the level that is protected.
      delta: δ of it, in (0, 1).
      num_rounds: rounds in all, at least 1.
      participation: how clients come: a sampler's ``participation``.
      level: whose noise: ``"client"`` (`build_dp_fed_avg`; without metrics), ``"tree"`` (`build_dp_ftrl`),
        ``"distributed"`` (`build_distributed_dp_fed_avg`, with whole cohorts), ``"local"``
        (`build_local_dp_fed_avg`) or ``"example"`` (`build_example_dp_fed_avg`).
      accountant: ``"pld"`` or ``"rdp"``.
      restart_every: of a tree, in rounds.
      num_weights, l2_norm_clip, bits: of distributed noise: how many trainable weights the model has, and as in its
        builder.
      num_examples: of examples under Poisson steps: how many the smallest client holds.
      batch_size, local_steps: of examples under Poisson steps, as in the builder.
      local_epochs: of examples in batches, in place of those.

    Raises:
      ValueError: an argument is out of its range, or missing for its level.
      PrivacyError: no client takes part, or no noise multiplier meets the target.
    """
    target = _checks.real("target_epsilon", target_epsilon, "give the ε to stay within", above=0)
    delta, accountant = check_delta(delta), check_accountant(accountant)
    rounds = _checks.whole("num_rounds", num_rounds, 1, "count the rounds")
    level = _checks.choice("level", level, LEVELS)
    run = RoundsRun(rounds=rounds, participation=participation)
    most = participations(run)
    if most == 0:
        raise PrivacyError("No client takes part in any round, so that no noise is needed. Check participation.")
    make: Callable[..., Guarantee] = LocalLevel if level == "local" else ClientLevel
    if level == "tree":
        make = functools.partial(TreeLevel, restart_every=restart_every)
    elif level == "distributed":
        weights = _checks.whole("num_weights", num_weights, 1, "count the model's trainable weights")
        cohort = [f"{i}" for i in range(math.ceil(participation.clients_per_round))]
        # Priced without use of the draw, for a client that is there as often as may be.
        unclaimed = Participation(sampling="none", population=len(cohort), clients_per_round=len(cohort))
        run = RoundsRun(rounds=most, participation=unclaimed, cohorts=[cohort] * most)
        make = functools.partial(
            skellam_level, l2_norm_clip=l2_norm_clip, clients_per_round=len(cohort), num_weights=weights, bits=bits
        )
    elif level == "example" and local_epochs is None:
        remedy = "give it, or local_epochs where the data set's own batches are taken"
        steps = _checks.whole("local_steps", local_steps, 1, f"count the steps of one participation: {remedy}")
        size = _checks.whole("batch_size", batch_size, 1, "count the examples of a step")
        examples = _checks.whole("num_examples", num_examples, 1, "count the examples of the smallest client")
        run = RoundsRun(rounds=rounds, participation=participation, num_examples={"": examples})
        make = functools.partial(ExampleLevel, batch_size=size, local_steps=steps)
    elif level == "example":
        epochs = _checks.whole("local_epochs", local_epochs, 1, "count the passes over the client's data")
        make = functools.partial(ExampleLevel, sampling="batches", batch_size=1, local_epochs=epochs)
    return smallest_noise_multiplier(lambda z: make(noise_multiplier=z).price(run, delta, accountant).epsilon, target)


@accept_old_names(clip="l2_norm_clip")
def skellam_level(
    noise_multiplier: float, l2_norm_clip: float, clients_per_round: int, num_weights: int, bits: int = 20
) -> DistributedLevel:
    """States what `build_distributed_dp_fed_avg` will promise for a model of so many trainable weights.

    Args:
      noise_multiplier, l2_norm_clip, clients_per_round, bits: as in that builder.
      num_weights: how many trainable weights the model has.

    Raises:
      ValueError: the bits are too few for a sum over so many clients.

    Source: Kairouz, Liu and Steinke 2021, arXiv:2102.06387, sections 4.1 and 4.2, as TFF computes it.
    """
    n, local = clients_per_round, noise_multiplier * l2_norm_clip / math.sqrt(clients_per_round)
    dimension = 1 << max(0, num_weights - 1).bit_length()
    room = 2.0 ** (2 * bits) - n * _TAIL_OF_A_SUM**2
    if room <= 0:
        raise ValueError(f"bits={bits} is too few for a sum over {n} clients. Raise it.")
    scale = math.sqrt(room) / (2 * _TAIL_OF_A_SUM * math.sqrt((l2_norm_clip * n) ** 2 / dimension + n * local**2))
    scale = min(scale, 1e6)
    l2 = (l2_norm_clip + math.sqrt(dimension) / scale + 1e-5) * scale
    l1 = math.ceil(l2 * min(math.sqrt(dimension), l2))
    return DistributedLevel(l1=float(l1), l2=l2, local_stddev=local * scale)


def total_price(trainings: Iterable[tuple[Any, RoundsRun]], delta: float, accountant: str = "pld") -> Price:
    """Returns an upper bound on the ε of several trainings together, for a client, or an example, that may have been in
    all of them, each of which may have begun from what others released.

        total_price([(first.privacy[0], run1), (second.privacy[0], run2)], delta=1e-5)

    Args:
      trainings: pairs of what a process promises (``process.privacy``), of one level, and what ran, or
        ``History.trainings[level]``.
      delta: δ of the sum, in (0, 1).
      accountant: ``"pld"`` or ``"rdp"``.

    Raises:
      PrivacyError: the levels differ, or a run cannot be priced.
    """
    pairs = list(trainings)
    delta, accountant = check_delta(delta), check_accountant(accountant)
    levels = sorted({guarantee.level for guarantee, _ in pairs})
    if len(levels) != 1:
        raise PrivacyError(f"Trainings must be of one level to add up, got {levels}. Add up each level by itself.")
    adjacencies = {guarantee.adjacency for guarantee, _ in pairs}
    # To contribute nothing in place of something is a case of contributing anything else.
    adjacency = "zero_out" if "zero_out" in adjacencies else adjacencies.pop()
    if levels == ["example"]:
        found = [_composed(events, delta, accountant, adjacency) for events in _events_of_clients(pairs)]
        return max(found, default=Price(0.0, accountant))
    if all(hasattr(guarantee, "event") for guarantee, _ in pairs):
        return _composed([guarantee.event(run) for guarantee, run in pairs], delta, accountant, adjacency)
    each = [guarantee.price(run, delta / len(pairs), accountant) for guarantee, run in pairs]
    return Price(sum(paid.epsilon for paid in each), each[0].accountant)


def _events_of_clients(trainings: Sequence[tuple[Any, RoundsRun]]) -> Iterable[list[DpEvent]]:
    """What each client ran in all trainings, for its examples. Of clients that ran the same there is one."""
    rows = [guarantee.events_by_client(run) for guarantee, run in trainings]
    clients = dict.fromkeys(client for row in rows for client in row)
    each = [[row[client] for row in rows if client in row] for client in clients]
    return {repr(events): events for events in each}.values()


def _composed(events: Sequence[DpEvent], delta: float, accountant: str, adjacency: str) -> Price:
    return price(dp_event.ComposedDpEvent(list(events)), delta, accountant, adjacency)
