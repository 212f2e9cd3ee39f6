"""NbAFL on Flower (Wei et al. 2020, arXiv:1911.00222): clients clip and noise their weights, the server adds noise.

The paper's claim and the proven ε stand side by side: see `tfdpfl.federated.nbafl`, whose formulas these are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdpfl._types import Promiser
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.arguments import shows_arguments
from tfdpfl.accounting.promises import Promise, fixed
from tfdpfl.federated.guarantees import LocalLevel
from tfdpfl.federated.nbafl import NbAFLArguments, NbAFLLevel, cohort_of, noise_of
from tfdpfl.federated.privacy import level_promise
from tfdpfl.flower._flwr import Context, Message, Strategy, arrays_of, log, only
from tfdpfl.flower.local import Mod, Normals, add_answer, noised, private_reply
from tfdpfl.flower.reports import ClientLedger
from tfdpfl.flower.spent import ledger_of_uploads
from tfdpfl.flower.strategies import DifferentialPrivacy
from tfdpfl.flower.updates import ClippedSum

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NbAFLStrategy", "clip_and_noise_gradients", "nbafl_mod"]


@shows_arguments(NbAFLArguments, noise_of)
def nbafl_mod(
    *,
    ledger_path: str | os.PathLike | None = None,
    weighted_by_key: str = "num-examples",
    seed: int | None = None,
    **plan: Unpack[NbAFLArguments],
) -> Mod:
    """The client's side of NbAFL: its weights, after training, are scaled to an L2 norm of at most C over all tensors,
    and get Gaussian noise of standard deviation σ_u.

    The reply tells what the client's uploads have cost so far by an accountant, and what the paper claims
    (``claimed_epsilon``). Metrics are dropped, and every client weighs 1. If the app raises or replies with an error,
    or its weights are not finite or of other shapes, the weights that the server sent take their place. The reason is
    logged on the client, and the server does not learn of it.

    Args:
      ledger_path, weighted_by_key, seed: as for `local_dp_mod`.
      The others: those of `NbAFLStrategy`.

    Raises:
      ValueError: an argument is out of its range.
    """
    nbafl, clip = noise_of(**plan), plan["l2_norm_clip"]
    normals = Normals(seed)

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        sent = arrays_of(only(message.content.array_records, "ArrayRecord"))
        kept = ClientLedger(context, "local", ledger_path)
        zero = {name: np.zeros_like(w) if w.dtype.kind == "f" else w for name, w in sent.items()}
        unchanged = ClippedSum(zero, clip)
        unchanged.add(sent)  # before the app runs, since it raises where the server's weights are not finite
        total = ClippedSum(zero, clip)  # of the weights themselves
        if not add_answer(total, message, context, call_next):
            total = unchanged
        kept.spend(ledger_of_uploads(nbafl.sigma_u / clip, seed=seed))
        noisy = noised(total, nbafl.sigma_u, normals)
        report = kept.report(nbafl.delta, claimed_epsilon=nbafl.claimed_epsilon)
        return private_reply(message, noisy, weighted_by_key, report)

    return mod


def clip_and_noise_gradients(
    gradients: Sequence[np.ndarray], l2_norm_clip: float, sigma: float, ledger: PrivacyLedger, seed: int | None = None
) -> list[np.ndarray]:
    """A step's gradient, of a whole batch, scaled to an L2 norm of at most C over all tensors, then given noise.

    For clients that train by themselves, PyTorch's among them, and add noise to each step as flower-dp's do. That
    clips each tensor alone, after it was noised, which bounds nothing. This does it in the order that can be priced.
    One batch becomes any other, and the step is one Gaussian of sensitivity 2 C.

    Args:
      gradients: arrays of floating-point numbers.
      l2_norm_clip: C > 0.
      sigma: the noise's standard deviation, above 0.
      ledger: takes the step.
      seed: for tests only.

    Returns:
      Arrays of the same shapes and types; of zeros and noise where a gradient is not finite.
    """
    clip = _checks.real("l2_norm_clip", l2_norm_clip, "give the largest L2 norm of a gradient", above=0)
    sigma = _checks.real("sigma", sigma, "give the noise's standard deviation", above=0)
    named = {str(i): np.asarray(g) for i, g in enumerate(gradients)}
    zero = {name: np.zeros_like(g) for name, g in named.items()}
    total = ClippedSum(zero, clip)
    try:
        total.add(named)
    except ValueError as error:
        log.warning("A gradient counts as zero: %s", error)
    ledger.merge(ledger_of_uploads(sigma / clip, seed=seed))
    return [*noised(total, sigma, Normals(seed)).values()]


class NbAFLStrategy(DifferentialPrivacy):
    """The server's side of NbAFL around any strategy that takes a mean: the mean over K of what clients sent, with
    Gaussian noise of standard deviation σ_d.

        plan = dict(epsilon=8.0, delta=1e-5, l2_norm_clip=5.0, num_rounds=10, num_clients=3)
        strategy = NbAFLStrategy(FedAvg(), **plan)
        ... @app.train(mods=[nbafl_mod(**plan)])
        print(strategy.nbafl)   # noise, the paper's claim, and what is proven

    A client that is missing, or sends what cannot be weights, counts with the weights it was sent. The server trusts
    clients to clip and to add their noise, as the paper does. Rounds beyond ``num_rounds`` are not run.

    Args:
      strategy: as for `DifferentialPrivacyFixedClipping`.
      ledger_path: as for `DifferentialPrivacyFixedClipping`.
      seed: for tests only.
      The others: those of `tfdpfl.federated.build_nbafl`.

    Attributes:
      nbafl: the noise, and what it is worth: the paper's claim beside what an accountant proves.
      privacy: a `LocalLevel`, of what each client sends, and an `NbAFLLevel`, of the released models.
      epsilon: proven for the models that were released so far; adjacency replace_one.
      local_epsilon: proven for the uploads of the client that replied most; adjacency replace_one.

    Raises:
      ValueError: an argument is out of its range, or there is no noise that meets ε.
    """

    _limit = "num_rounds"

    @shows_arguments(NbAFLArguments, noise_of)
    def __init__(
        self,
        strategy: Strategy,
        *,
        ledger_path: str | os.PathLike | None = None,
        seed: int | None = None,
        **plan: Unpack[NbAFLArguments],
    ):
        self.nbafl, k = noise_of(**plan), cohort_of(plan)
        self._num_rounds, self._l2_norm_clip, self._k = plan["num_rounds"], plan["l2_norm_clip"], k
        super().__init__(
            strategy, noise_multiplier=0.0, delta=plan["delta"], clients_per_round=k, population=plan["num_clients"],
            ledger_path=ledger_path, seed=seed,
        )  # fmt: skip

    def _checked_clip(self, clip: object) -> float:
        return math.inf  # clients clip their weights, and the server trusts them

    def _levels(self) -> tuple[Promiser, ...]:
        clip, sigma_u, sigma_d = self._l2_norm_clip, self.nbafl.sigma_u, self.nbafl.sigma_d
        return (
            LocalLevel(noise_multiplier=sigma_u / clip),
            NbAFLLevel(clip=clip, sigma_u=sigma_u, sigma_d=sigma_d, clients_per_round=self._k),
        )

    def _stddevs(self, clip: float, clients: float) -> tuple[float, float]:
        return clients * self.nbafl.sigma_d, 0.0

    def _fits(self, rounds: int) -> bool:
        return rounds <= self._num_rounds

    def _epsilons(self) -> dict[str, float]:
        """ε of each level. Nothing is claimed for the choice of clients, and fewer replies are less noise."""
        prices = self._settings.prices(self._journal, self.delta, "pld")
        return {level: epsilon for level, (_, epsilon) in prices.items()}

    @property
    def epsilon(self) -> float:
        return self._epsilons()["client"]

    @property
    def local_epsilon(self) -> float:
        """An upper bound on ε, at ``delta``, of what the client that replied most has sent."""
        return self._epsilons()["local"]

    @property
    def ledger(self) -> PrivacyLedger:
        """Returns what clients have sent, as events, for the client that replied most."""
        counts = [client for cohort in self._journal.replied for client in cohort]
        most = max(map(counts.count, set(counts)), default=0)
        return ledger_of_uploads(self.privacy[0].noise_multiplier, most)

    def _own_promises(self, delta: float) -> list[Promise]:
        epsilons = self._epsilons()
        return [
            level_promise(
                guarantee, fixed(epsilons[guarantee.level], self.delta, "pld"), part=f"{guarantee.level} level",
                sampling=self.participation.text(), mechanisms=[f"{self.rounds_charged} rounds, NbAFL"],
                warnings=self._of_seed(),
            )
            for guarantee in self.privacy
        ]  # fmt: skip

    def statement(self) -> str:
        """States what the paper claims, and what is proven for what ran."""
        epsilons = self._epsilons()
        lines = [
            f"{self.rounds_charged} rounds of NbAFL: {self.nbafl}\n  so far, by the accountant: uploads epsilon = "
            f"{epsilons['local']:.4g}, released models epsilon = {epsilons['client']:.4g} at delta = {self.delta:g}"
        ]
        return "\n".join([*lines, *(f"  {warning}" for warning in self._of_seed())])
