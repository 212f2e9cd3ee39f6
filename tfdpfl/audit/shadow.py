"""Attacks by shadow models: LiRA, which learns what an example's score is with it and without, and RMIA."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import stats

from tfdpfl._types import Arrays
from tfdpfl.accounting import _checks
from tfdpfl.audit.membership import MembershipReport, report_of

__all__ = ["lira", "rmia"]


def lira(
    scores: Arrays,
    shadow_scores: Arrays,
    shadow_members: Arrays,
    members: Arrays,
    *,
    online: bool = True,
    clients: Arrays = None,
    confidence: float = 0.95,
) -> MembershipReport:
    """Attacks a model by the likelihood ratio of each example's score with it in training and without.

        lira(scores_of(model), [scores_of(m) for m in shadows], in_of_shadows, in_of_model)

    Shadow models are trained like the model, each on a random half of the examples. Online, an example's score is
    compared with two normals: of the shadows that had it and of those that had not. Offline, with the second alone.
    Every score of an example must come of the model's output for it by one rule. Carlini's is the logit of the right
    class's probability, ln(p / (1 - p)), which is nearly normal. Higher must mean likelier to be a member.

    The variance is each example's own where it has at least 32 shadows of either kind, else common to all.

    Of a federated model whole clients are in a training or out of it. With ``clients`` a client's score is the sum of
    its examples' log-likelihood ratios. Offline it is the sum of their z-scores over the root of their number
    (Stouffer). This takes the examples' scores to be independent, given whose models had the client. If they are not,
    the attack is weaker than it could be, and its report is still right.

    Args:
      scores: ``[examples]``, of the model that is attacked.
      shadow_scores: ``[shadows, examples]``.
      shadow_members: bool ``[shadows, examples]``: which were in each shadow's training.
      members: bool ``[examples]``: which were in the model's.
      online: whether shadows that had the example are used.
      clients: ids ``[examples]``, numbers or strings: whose each example is. Then clients are attacked, and counted in
        the report. None attacks examples.
      confidence: of the intervals, strictly between 0 and 1.

    Raises:
      ValueError: shapes do not fit, scores are not finite, an example has fewer than two shadows of a kind that is
        needed, a client is partly in a training, or fewer than two clients are in the model's or out of it.

    Source: Carlini et al. 2022, arXiv:2112.03570, algorithm 1 and section VI.
    """
    scores, shadow, inside, members = _checked(scores, shadow_scores, shadow_members, members)
    confidence = _checks.probability("confidence", confidence, "for instance 0.95")
    owners = None if clients is None else _Owners(clients, inside, members)
    mean, deviation = _normals(shadow, ~inside, "without")
    if online:
        mean_in, deviation_in = _normals(shadow, inside, "with")
        ratio = stats.norm.logpdf(scores, mean_in, deviation_in) - stats.norm.logpdf(scores, mean, deviation)
    else:
        ratio = (scores - mean) / deviation
    name = "LiRA, online" if online else "LiRA, offline"
    if owners is None:
        return report_of(name, ratio[members], ratio[~members], confidence)
    return owners.report(name, owners.sums(ratio) / (1 if online else np.sqrt(owners.sizes)), confidence)


def rmia(
    log_probabilities: Arrays,
    shadow_log_probabilities: Arrays,
    shadow_members: Arrays,
    members: Arrays,
    *,
    gamma: float = 1.0,
    clients: Arrays = None,
    confidence: float = 0.95,
) -> MembershipReport:
    """Attacks a model by comparing each example with others of the population (RMIA, online). It asks how many of the
    others' likelihood ratios its own beats by a factor of γ. It needs fewer shadows than LiRA; one pair is enough.

    The others are all examples that are attacked, but itself. With ``clients`` a client's ratio is the geometric mean
    of its examples', and is compared with the other clients'.

    Args:
      log_probabilities: ``[examples]``: ln of the right class's probability by the model; minus the cross-entropy.
      shadow_log_probabilities: ``[shadows, examples]``.
      shadow_members: bool ``[shadows, examples]``: which were in each shadow's training, at least one that was and one
        that was not.
      members: bool ``[examples]``: which were in the model's.
      gamma: γ ≥ 1.
      clients: as in `lira`.
      confidence: of the intervals, strictly between 0 and 1.

    Raises:
      ValueError: as `lira`; γ is below 1, or a logarithm above 0.

    Source: Zarifzadeh, Liu & Shokri 2024, arXiv:2312.03262, section 3.
    """
    own, shadow, inside, members = _checked(log_probabilities, shadow_log_probabilities, shadow_members, members)
    if max(own.max(), shadow.max()) > 1e-6:
        raise ValueError("log_probabilities must be at most 0: give minus the cross-entropy of each example")
    gamma = _checks.real("gamma", gamma, "1 or 2 is usual", at_least=1)
    confidence = _checks.probability("confidence", confidence, "for instance 0.95")
    # P(x): half of the mean over shadows that had it, and half of that over the others.
    halves = [np.where(which, np.exp(shadow), 0).sum(0) / _counts(which, 1, name) for which, name in
              ((inside, "with"), (~inside, "without"))]  # fmt: skip
    ratio = own - np.log(np.maximum((halves[0] + halves[1]) / 2, 1e-300))
    if clients is None:
        beaten = _beaten(ratio, gamma)
        return report_of("RMIA", beaten[members], beaten[~members], confidence)
    owners = _Owners(clients, inside, members)
    return owners.report("RMIA", _beaten(owners.sums(ratio) / owners.sizes, gamma), confidence)


def _beaten(ratio: np.ndarray, gamma: float) -> np.ndarray:
    """The part of the others that each of these logarithms beats by a factor of γ."""
    return (np.searchsorted(np.sort(ratio), ratio - np.log(gamma), side="right") - (gamma == 1)) / len(ratio)


class _Owners:
    """Whose the examples are, each client being in a training or out of it.

    Attributes:
      sizes: [clients], how many examples each has.
      members: bool [clients], which are in the model's training.
    """

    def __init__(self, clients: Arrays, inside: np.ndarray, members: np.ndarray):
        ids = np.asarray(clients)
        if ids.shape != members.shape or ids.dtype.kind not in "biuUS":
            raise ValueError(
                f"clients must be whole numbers or strings [examples], {list(members.shape)}, got {list(ids.shape)} of "
                f"{ids.dtype}: give the id of each example's client"
            )
        names, first, self._of, self.sizes = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
        trainings = np.vstack([members, inside])
        torn = (trainings != trainings[:, first][:, self._of]).any(0)
        if torn.any():
            raise ValueError(
                f"clients: {names[self._of[torn.argmax()]].item()!r} has some examples in a training and some outside: "
                "include all examples of a client, or none"
            )
        self.members = members[first]
        if not 2 <= self.members.sum() <= len(names) - 2:
            raise ValueError(
                f"clients must be at least two in the model's training and two that are not, got "
                f"{self.members.sum()} and {np.sum(~self.members)}: attack more clients"
            )

    def sums(self, scores: np.ndarray) -> np.ndarray:
        """[clients], of scores [examples]."""
        return np.bincount(self._of, scores)

    def report(self, attack: str, scores: np.ndarray, confidence: float) -> MembershipReport:
        found = report_of(attack, scores[self.members], scores[~self.members], confidence)
        return dataclasses.replace(found, unit="client")


def _checked(scores: Arrays, shadow: Arrays, inside: object, members: Arrays) -> tuple[np.ndarray, ...]:
    scores, shadow = np.asarray(scores, np.float64), np.asarray(shadow, np.float64)
    inside, members = np.asarray(inside), np.asarray(members)
    fits = shadow.ndim == 2 and inside.shape == shadow.shape and scores.shape == members.shape == shadow.shape[1:]
    if not fits or inside.dtype != bool or members.dtype != bool:
        raise ValueError(
            f"scores and members must be [examples], shadow scores and members [shadows, examples], members bool; got "
            f"{scores.shape}, {members.shape} of {members.dtype}, {shadow.shape}, {inside.shape} of {inside.dtype}: "
            "give one of each example"
        )
    if not (np.all(np.isfinite(scores)) and np.all(np.isfinite(shadow))):
        raise ValueError("scores must be finite: clip probabilities away from 0 and 1 before the logarithm")
    return scores, shadow, inside, members


def _counts(which: np.ndarray, least: int, name: str) -> np.ndarray:
    counts = which.sum(axis=0)
    if counts.min() < least:
        raise ValueError(
            f"example {int(counts.argmin())} has {counts.min()} shadow models {name} it, but needs {least}: train more"
        )
    return counts


def _normals(shadow: np.ndarray, which: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each example's scores over these shadows."""
    counts = _counts(which, 2, name)
    mean = np.where(which, shadow, 0).sum(0) / counts
    squares = np.where(which, (shadow - mean) ** 2, 0).sum(0)
    if counts.min() >= _OWN_VARIANCE:
        variance = squares / (counts - 1)
    else:
        variance = np.full(len(counts), squares.sum() / (counts - 1).sum())
    return mean, np.sqrt(np.maximum(variance, 1e-12))


_OWN_VARIANCE = 32
