"""Computes what an attack's scores in a file show: the figures of `tfdpfl audit`."""

from __future__ import annotations

import csv
import dataclasses
import os
from pathlib import Path

import numpy as np

from tfdpfl._types import Json, Keywords
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.audit.epsilon import audit_epsilon
from tfdpfl.audit.membership import MembershipReport, report_of
from tfdpfl.audit.one_run import OneRunReport, one_run_bounds

__all__ = ["report_of_scores"]

FORMS = (
    "an .npz with scores and inserted, or with members and non_members; or a .csv whose first line is score,inserted "
    "or score,member"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresReport:
    """Holds what the scores show.

    Attributes:
      membership: AUC, and the true positive rate at 1 % false positives.
      epsilon: with ``confidence``, ε at ``delta`` is no smaller; None where the scores bound none.
      epsilon_gaussian: the same if Gaussian noise is all that touches the data.
      claim: the ε that was claimed at ``delta``, if any.
      claim_stands: whether the bound is at most the claim; None without either.
      delta: δ of the bounds and of the claim.
      confidence: of each bound.
      one_run: of canaries, all that one run shows.
    """

    membership: MembershipReport
    epsilon: float | None = None
    epsilon_gaussian: float | None = None
    claim: float | None = None
    claim_stands: bool | None = None
    delta: float | None = None
    confidence: float = 0.95
    one_run: OneRunReport | None = None

    def to_dict(self) -> Json:
        """The fields, JSON-ready."""
        return dataclasses.asdict(self) | {"membership": self.membership.to_dict()}

    def __str__(self) -> str:
        lines = []
        if self.epsilon is None:
            lines.append("epsilon: no bound, since no coin decided who is a member")
        else:
            lines.append(f"epsilon ≥ {self.epsilon:.3f} at delta {self.delta:g} ({self.confidence:.0%} confidence)")
            lines.append(f"        ≥ {self.epsilon_gaussian:.3f} if Gaussian noise is all that touches the data")
        lines.append(str(self.membership))
        if self.claim is not None:
            lines.append(
                f"The claim, epsilon {self.claim:.4g} at delta {self.delta:g}, stands: what was found is no larger. "
                "That proves nothing."
                if self.claim_stands
                else f"The claim, epsilon {self.claim:.4g} at delta {self.delta:g}, is refuted: something is not as it "
                "is charged."
            )
        return "\n".join(lines)


def report_of_scores(
    path: str | os.PathLike,
    *,
    delta: float | None = None,
    claim: float | None = None,
    confidence: float = 0.95,
    gaussian: bool = False,
    one_training_each: bool = False,
) -> ScoresReport:
    """The report of a file of scores, higher ones for members.

    Args:
      path: see `FORMS`.
      delta: δ of the bound; needed where there is one.
      claim: an ε at δ to be tested.
      confidence: strictly between 0 and 1.
      gaussian: whether the claim is held against the bound that takes the noise to be Gaussian.
      one_training_each: whether each score is of a training of its own, with the example or without.

    Raises:
      ValueError: the file is none of scores, an argument is out of its range, or there is a claim and no bound.
    """
    scores, inside, coins = read_scores(path)
    confidence = _checks.probability("confidence", confidence, "for instance 0.95")
    claim = _checks.optional(_checks.real, "epsilon", claim, "what is claimed", at_least=0)
    found = report_of("score", scores[inside], scores[~inside], confidence)
    if not coins and not one_training_each:
        if claim is not None:
            raise ValueError(
                f"members and non-members of one training (AUC {found.auc:.3f}) give no bound on epsilon, because they "
                "share its noise and no coin chose them. Give the scores of canaries that coins put in (inserted), or "
                "of one training each (--one-training-each); or leave the claim out to see what the attack found"
            )
        return ScoresReport(membership=found, confidence=confidence)
    if delta is None:
        raise ValueError("delta is missing: a bound on epsilon holds at one delta, for example --delta 1e-5")
    delta = check_delta(delta)
    one_run = None
    if coins:
        one_run = one_run_bounds(scores, inside, delta=delta, confidence=confidence)
        bounds = one_run.epsilon, one_run.epsilon_gaussian
    else:
        bounds = _of_many(scores[inside], scores[~inside], delta, confidence)
    return ScoresReport(
        membership=found, epsilon=bounds[0], epsilon_gaussian=bounds[1], claim=claim, delta=delta,
        claim_stands=None if claim is None else bounds[gaussian] <= claim, confidence=confidence, one_run=one_run,
    )  # fmt: skip


def _of_many(members: np.ndarray, others: np.ndarray, delta: float, confidence: float) -> tuple[float, float]:
    """One half of the trainings chooses the threshold, so their order, which may mean something, is mixed first."""
    rng, number = np.random.default_rng(0), min(len(members), len(others))
    members, others = (rng.permutation(part)[:number] for part in (members, others))
    plain, gaussian = (
        audit_epsilon(
            lambda part, trials: part, members, others, number, confidence, delta=delta, vectorized=True,
            tradeoff=tradeoff,
        )
        for tradeoff in (None, "gaussian")
    )  # fmt: skip
    return plain, gaussian


def read_scores(path: str | os.PathLike) -> tuple[np.ndarray, np.ndarray, bool]:
    """(scores, which are of members, whether coins chose these) of a file; see `FORMS`.

    Raises:
      ValueError: the file is none of scores.
    """
    path = Path(path)
    try:
        named: Keywords = {".npz": _of_arrays, ".csv": _of_table}[path.suffix.lower()](path)
        coins = "inserted" in named
        if "members" in named:
            members, others = (np.asarray(named[name], np.float64).ravel() for name in ("members", "non_members"))
            return np.concatenate([members, others]), np.repeat([True, False], [len(members), len(others)]), False
        scores, inside = np.asarray(named["scores"], np.float64), np.asarray(named["inserted" if coins else "member"])
        if scores.ndim != 1 or inside.shape != scores.shape or not np.isin(inside, [0, 1]).all():
            raise ValueError(f"scores {scores.shape} and {inside.shape} of 0 and 1 must be one of each")
    except (KeyError, ValueError, OSError, csv.Error) as error:
        said = f" ({error})" if str(error) and not isinstance(error, KeyError) else ""
        raise ValueError(f"{path} holds no scores{said}: give {FORMS}") from error
    if not np.isfinite(scores).all():
        raise ValueError(f"{path}: {np.sum(~np.isfinite(scores))} scores are not finite: check that training converged")
    return scores, inside.astype(bool), coins


def _of_arrays(path: Path) -> Keywords:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _membership(text: str | None) -> float:
    """0 or 1, which pandas and others also write as a word."""
    words = {"true": 1.0, "false": 0.0}
    said = (text or "nothing").strip().lower()
    return words[said] if said in words else float(said)


def _of_table(path: Path) -> Keywords:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, skipinitialspace=True))
    if not rows:
        raise ValueError("it has no rows")
    which = "inserted" if "inserted" in rows[0] else "member"
    numbers = [(float(row["score"] or "nothing"), _membership(row[which])) for row in rows]
    return {"scores": [score for score, _ in numbers], which: [said for _, said in numbers]}
