"""Plans the noise of a federation before it begins. Neither Flower nor TFF here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdpfl._types import Json
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.calibration import largest_count, smallest_noise_multiplier
from tfdpfl.accounting.pricing import check_accountant, check_delta
from tfdpfl.accounting.report import rounded_up
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.guarantees import ClientLevel, participations
from tfdpfl.federated.privacy import Participation, RoundsRun, no_room, notes_on_delta
from tfdpfl.flower.spent import Draw, Settings

__all__ = ["FederatedPlan", "plan_federation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedPlan:
    """Holds the numbers of a federation that fit each other; `plan_federation` makes it.

    Attributes:
      unit: what is protected, "client" or "example".
      epsilon: ε after ``num_rounds``, at ``delta``; adjacency zero_out: one unit contributes nothing.
      target_epsilon: the ε that is given to the training as its target.
      delta, noise_multiplier, num_rounds: the numbers of the training.
      population: the number of clients.
      sampling_rate, clients_per_round, max_participations, min_separation: who takes part, as they were given.
      local_steps, batch_size, num_examples: the training at a client, as they were given.
      accountant: "pld" or "rdp".
    """

    unit: str
    epsilon: float
    target_epsilon: float
    delta: float
    noise_multiplier: float
    num_rounds: int
    population: int
    sampling_rate: float | None
    clients_per_round: int | None
    max_participations: int | None
    min_separation: int
    local_steps: int | None
    batch_size: int | None
    num_examples: int | None
    accountant: str

    @property
    def arguments(self) -> Json:
        """Returns the arguments of the part that adds noise: `DifferentialPrivacyFixedClipping` for clients,
        `example_dp` for examples. You add what ε does not depend on, for example ``l2_norm_clip``."""
        names = ["noise_multiplier", "delta", "target_epsilon"]
        if self.unit == "example":
            names += ["batch_size", "local_steps"]
        else:
            names += ["population", "accountant", *self._cohort]
        return {name: getattr(self, name) for name in names}

    @property
    def _cohort(self) -> list[str]:
        names = "sampling_rate", "clients_per_round", "max_participations"
        limits = ["min_separation"] if self.min_separation > 1 else []
        return [name for name in names if getattr(self, name) is not None] + limits

    @property
    def participation(self) -> Participation:
        """States what may be relied on about who is in a round."""
        draw = Draw(self.sampling_rate, self.clients_per_round, self.max_participations, self.min_separation)
        return draw.participation(self.population)

    def statement(self) -> str:
        """Returns the plan in English, with the calls that it is for."""
        part, call = _CALLS[self.unit]
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        cohort = self.participation
        lines = [
            f"noise multiplier = {rounded_up(self.noise_multiplier)} for {self.num_rounds} rounds",
            f"epsilon = {rounded_up(self.epsilon)} at delta = {self.delta:g} for one {self.unit} "
            f"(adjacency zero_out, sampling {cohort.text()}, accountant {self.accountant})",
        ]
        if self.unit == "client":
            share = self.noise_multiplier / cohort.clients_per_round
            lines.append(f"noise of the mean = {share:.3g} times the clip, in each weight")
        else:
            lines.append(f"a client with at least {self.num_examples} examples, {self.local_steps} local steps a round")
        number = self.population if self.unit == "client" else self.num_examples
        lines += [f"Note: {note}" for note in notes_on_delta(self.delta, number, self.unit)]
        return "\n".join([*lines, "", f"{part}:", f"  {call}({given}, ...)"])

    def __str__(self) -> str:
        return self.statement()

    def to_dict(self) -> Json:
        """Returns all numbers, and ``arguments``, as values that JSON can hold."""
        return {**dataclasses.asdict(self), "arguments": self.arguments}


_CALLS = {
    "client": ("At the server", "tfdpfl.flower.DifferentialPrivacyFixedClipping"),
    "example": ("At each client", "tfdpfl.flower.example_dp"),
}


def plan_federation(
    *,
    population: int,
    delta: float,
    unit: str = "client",
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    num_rounds: int | None = None,
    sampling_rate: float | None = None,
    clients_per_round: int | None = None,
    max_participations: int | None = None,
    min_separation: int = 1,
    local_steps: int | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    accountant: str = "pld",
) -> FederatedPlan:
    """Plans a federation, so that its noise, its rounds and its ε fit each other.

        plan = plan_federation(population=1000, sampling_rate=0.05, num_rounds=100, target_epsilon=2.0, delta=1e-5)
        strategy = DifferentialPrivacyFixedClipping(FedAvg(), l2_norm_clip=0.5, **plan.arguments)
        strategy.start(grid, arrays, num_rounds=plan.num_rounds)

    Pass two of ``target_epsilon``, ``noise_multiplier`` and ``num_rounds``. The plan finds the third: the ε, the least
    noise, or the most rounds.

    The ε of clients depends neither on local steps nor on the clip. The ε of examples depends on the local steps, and
    not on how clients are drawn: the server knows who sent an update. So it holds for a client that is in every round
    that the limits allow.

    Args:
      population: the number of clients.
      delta: δ. Keep it below 1 / population for clients, and below 1 / num_examples for examples.
      unit: "client": the server adds noise to the sum. "example": each client trains by DP-SGD.
      target_epsilon: the largest ε for one unit.
      noise_multiplier: the noise's standard deviation over the clip.
      num_rounds: rounds in all.
      sampling_rate: the probability that a client is in a round, decided by an independent coin.
      clients_per_round: in its place, a fixed number of clients. ε claims no privacy for how they are chosen.
      max_participations, min_separation: with clients_per_round, limits on the rounds of a client.
      local_steps: for examples, the steps of one participation.
      batch_size: for examples, the expected number of examples in a step.
      num_examples: for examples, how many the smallest client holds. A client with fewer has a larger ε.
      accountant: "pld" (tight) or "rdp".

    Returns:
      A `FederatedPlan`.

    Raises:
      ValueError: an argument is out of its range, is missing, or has no effect on this unit.
      PrivacyError: no plan meets the target.
    """
    unit = _checks.choice("unit", unit, tuple(_CALLS))
    delta, accountant = check_delta(delta), check_accountant(accountant)
    solved = {"target_epsilon": target_epsilon, "noise_multiplier": noise_multiplier, "num_rounds": num_rounds}
    if [*solved.values()].count(None) != 1:
        raise ValueError(f"{_said(solved)}. Give two of them, and the plan finds the third.")
    _checks.optional(_checks.real, "target_epsilon", target_epsilon, "give the ε to stay within", above=0)
    _checks.optional(_checks.real, "noise_multiplier", noise_multiplier, "give the noise's std over the clip", above=0)
    num_rounds = _checks.optional(_checks.whole, "num_rounds", num_rounds, 1, "count the rounds")
    population = _checks.whole("population", population, 1, "count all clients")
    draw = Draw(sampling_rate, clients_per_round, max_participations, min_separation, population)
    draw.check()
    cohort = draw.participation(population)
    local = _local(unit, local_steps, batch_size, num_examples)

    def spent(noise_multiplier: float, rounds: int) -> float:
        run = RoundsRun(rounds=rounds, participation=cohort)
        if unit == "client":
            own = ClientLevel(noise_multiplier=noise_multiplier)
            return Settings((own,), draw).ledger(run).epsilon(delta, accountant)
        n, size, steps = (int(local[name] or 1) for name in ("num_examples", "batch_size", "local_steps"))
        ledger = PrivacyLedger().record(
            noise_multiplier, participations(run) * steps, num_examples=n, batch_size=min(size, n),
            adjacency="zero_out",
        )  # fmt: skip
        return ledger.epsilon(delta, accountant)

    if noise_multiplier is None:
        assert num_rounds is not None and target_epsilon is not None
        rounds = num_rounds
        noise_multiplier = smallest_noise_multiplier(lambda z: spent(z, rounds), target_epsilon)
    elif num_rounds is None:
        assert target_epsilon is not None
        z = noise_multiplier
        num_rounds = _most_rounds(lambda rounds: spent(z, rounds), target_epsilon, f"noise_multiplier={z:g}", delta)
    assert num_rounds is not None
    epsilon = spent(noise_multiplier, num_rounds)
    return FederatedPlan(
        unit=unit, epsilon=epsilon, target_epsilon=epsilon if target_epsilon is None else target_epsilon, delta=delta,
        noise_multiplier=noise_multiplier, num_rounds=num_rounds, population=cohort.population,
        sampling_rate=sampling_rate, clients_per_round=clients_per_round, max_participations=max_participations,
        min_separation=min_separation, accountant=accountant, **local,
    )  # fmt: skip


def _most_rounds(spent: Callable[[int], float], target_epsilon: float, given: str, delta: float) -> int:
    if spent(1) > target_epsilon:
        raise no_room(target_epsilon, delta, spent(1))
    most = largest_count(spent, target_epsilon)
    if most is None:
        raise PrivacyError(
            f"{given} meets target_epsilon={target_epsilon:g} in any number of rounds, so none is the largest. Give "
            "num_rounds, or lower noise_multiplier."
        )
    return most


def _local(
    unit: str, local_steps: int | None, batch_size: int | None, num_examples: int | None
) -> dict[str, int | None]:
    local = {"local_steps": local_steps, "batch_size": batch_size, "num_examples": num_examples}
    if unit == "client" and any(value is not None for name, value in local.items() if name != "local_steps"):
        raise ValueError(f"{_said(local)}: the ε of a client does not depend on these. Leave them out, or pass "
                         "unit='example'.")  # fmt: skip
    if unit == "example" and None in local.values():
        raise ValueError(f"{_said(local)}: the ε of examples needs all of them.")
    return {
        name: None if value is None else _checks.whole(name, value, 1, _LOCAL[name]) for name, value in local.items()
    }


_LOCAL = {
    "local_steps": "count the steps of one participation",
    "batch_size": "give the expected number of examples in a step",
    "num_examples": "count the examples of the smallest client",
}


def _said(values: Json) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
