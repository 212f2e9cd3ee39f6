"""This package's ledger and accountants behind Flower's own protocol."""

from __future__ import annotations

import math
import sys

from tfdpfl._lazy import dp_event
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.pricing import check_accountant, check_delta
from tfdpfl.accounting.promises import Promise
from tfdpfl.flower._flwr import accounting

__all__ = ["LedgerAccountant"]


class LedgerAccountant:
    """A `flwr` ``PrivacyAccountant`` whose ε comes from a `PrivacyLedger`: for Flower's own DP wrappers.

        DifferentialPrivacyServerSideFixedClipping(
            FedAvg(), noise_multiplier=1.0, clipping_norm=0.5, num_sampled_clients=20,
            accountant=LedgerAccountant(1e-5),
        )

    It prices what Flower declares, and cannot mend what Flower's wrappers let through: numbers of a client that are
    not finite, metrics. `DifferentialPrivacyFixedClipping` does.

    Args:
      delta: δ of every ε that is not asked for with another.
      population_size: all clients; None for a number that no sample passes, since none of Flower's wrappers is
        amplified by sampling.
      max_epsilon: the wrapper raises before ε passes it.
      accountant: "pld" or "rdp".

    Attributes:
      ledger: what ran.
      config: Flower's ``PrivacyConfig``: no amplification.

    Raises:
      ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        delta: float,
        *,
        population_size: int | None = None,
        max_epsilon: float | None = None,
        accountant: str = "pld",
    ):
        self.accountant = check_accountant(accountant)
        population_size = _checks.optional(
            _checks.whole, "population_size", population_size, 1, "count all clients, or None"
        )
        max_epsilon = _checks.optional(
            _checks.real, "max_epsilon", max_epsilon, "give the ε to stay within, or None", above=0
        )
        self.config = accounting.PrivacyConfig(
            target_delta=check_delta(delta),
            population_size=population_size or sys.maxsize,
            neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=accounting.SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=max_epsilon,
        )
        self.ledger = PrivacyLedger()

    @property
    def num_releases(self) -> int:
        """How many releases the ledger holds."""
        return self.ledger.steps

    def compose(self, event: accounting.GaussianPrivacyEvent, count: int = 1) -> None:
        """Adds ``count`` releases of Flower's ``GaussianPrivacyEvent``."""
        self._add(self.ledger, event, count)

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        return [self.ledger.report(delta).promise("training", self.ledger)]

    def get_epsilon(self, delta: float) -> float:
        """An upper bound on the ε of what ran, at δ."""
        return self.ledger.epsilon(check_delta(delta), self.accountant)

    def get_delta(self, epsilon: float) -> float:
        """The smallest δ, but for a hundredth, at which ε is no higher; 1 where there is none above 1e-300."""
        epsilon = _checks.real("epsilon", epsilon, "give an ε", at_least=0)
        low, high = -300.0, 0.0  # of log10 δ; high is enough
        while high - low > 0.004:
            middle = (low + high) / 2
            low, high = (low, middle) if self.get_epsilon(10**middle) <= epsilon else (middle, high)
        return 1.0 if math.isclose(high, 0.0) else 10**high

    def get_privacy_spent(self, delta: float | None = None) -> accounting.PrivacySpent:
        """Flower's ``PrivacySpent`` at δ; None takes the accountant's own."""
        delta = self.config.target_delta if delta is None else delta
        return accounting.PrivacySpent(
            epsilon=self.get_epsilon(delta),
            delta=delta,
            num_releases=self.num_releases,
            accounting_method=self.accountant,
        )

    def would_exceed(
        self, event: accounting.GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Whether ε would pass the limit with ``count`` more releases; nothing is added.

        Raises:
          ValueError: there is no limit.
        """
        limit = self.config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise ValueError("max_epsilon=None. Give it here, or to LedgerAccountant.")
        after = PrivacyLedger.from_dict(self.ledger.to_dict())
        self._add(after, event, count)
        return after.epsilon(self.config.target_delta, self.accountant) > limit

    def state_dict(self) -> dict[str, object]:
        """Returns what ran and δ, as values that JSON can hold."""
        return {"delta": self.config.target_delta, "ledger": self.ledger.to_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes over what `state_dict` gave.

        Raises:
          ValueError: it is of another δ, or none of ours.
        """
        if state.get("delta") != self.config.target_delta:
            raise ValueError(f"state is of delta={state.get('delta')}, not {self.config.target_delta}. Give it that.")
        self.ledger = PrivacyLedger.from_dict(state["ledger"])  # type: ignore[arg-type]

    def _add(self, ledger: PrivacyLedger, event: accounting.GaussianPrivacyEvent, count: int) -> None:
        count = _checks.whole("count", count, 1, "count the releases")
        if event.population_size != self.config.population_size:
            raise ValueError(
                f"The event is of {event.population_size} clients, the accountant of {self.config.population_size}. "
                "Give both the same."
            )
        ledger.add(dp_event.GaussianDpEvent(event.noise_multiplier), count, adjacency="zero_out")
