"""Membership inference: how well an adversary tells the examples that a model was trained on from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special, stats

from tfdpfl.accounting import _checks

LOW_FPR = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipReport:
    """How an attack did.

    Attributes:
      attack: its name.
      auc: probability that a random member scores above a random non-member (ties count half); 0.5 is guessing.
      auc_interval: (low, high), by DeLong on the logit scale.
      tpr_at_low_fpr: the largest fraction of members found while at most ``fpr`` of the non-members are accused.
      tpr_interval: (low, high) for the true positive rate of the best threshold that accuses at most ``fpr`` of all
        non-members there are. Where that threshold lies is unknown too: order statistics of the non-members enclose it
        whatever their distribution, and the members beyond are counted (Clopper and Pearson). With fewer than some 440
        non-members (at 95 %) nothing encloses it from above, and ``low`` is 0.
      fpr: 0.01. With fewer than 100 non-members it means that none is accused.
      confidence: of both intervals.
      num_members: number of members.
      num_non_members: number of non-members.
    """

    attack: str
    auc: float
    auc_interval: tuple[float, float]
    tpr_at_low_fpr: float
    tpr_interval: tuple[float, float]
    confidence: float
    num_members: int
    num_non_members: int
    fpr: float = LOW_FPR

    def to_dict(self) -> dict[str, Any]:
        """The fields, JSON-ready."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        between = lambda interval: f"[{interval[0]:.3f}, {interval[1]:.3f}]"  # noqa: E731
        return (
            f"{self.attack} attack on {self.num_members} members and {self.num_non_members} non-members: "
            f"AUC {self.auc:.3f} {between(self.auc_interval)}, "
            f"TPR at FPR {self.fpr:.0%} {self.tpr_at_low_fpr:.3f} {between(self.tpr_interval)} "
            f"({self.confidence:.0%} confidence)"
        )


def membership_inference(
    model_or_losses: Any,
    members: Any,
    non_members: Any,
    *,
    attack: str = "loss",
    loss: Any = None,
    confidence: float = 0.95,
    batch_size: int = 256,
) -> MembershipReport:
    """Attacks a trained model, and reports how far members can be told from non-members.

        membership_inference(model, (x_train, y_train), (x_test, y_test))

    The loss-threshold attack takes an example for a member where its loss is low. Members and non-members should come
    from one distribution, or the attack tells distributions apart. An attack that fails proves nothing; one that
    succeeds beyond what (ε, δ) allows refutes the claim.

    Args:
      model_or_losses: a Keras model; or a function of ``(x, y)`` that returns the losses ``[n]``; or an array of losses
        ``[n]``, of which the next two are the rows (numbers or boolean masks); or None, if they are losses themselves.
      members: ``(x, y)`` that the model was trained on; or as said above.
      non_members: the like of examples that it never saw.
      attack: ``"loss"`` (Yeom et al. 2018, arXiv:1709.01604).
      loss: a Keras loss, its name, or a function of ``(y_true, y_pred)``; None takes what the model was compiled with.
        A loss of several values an example counts by their mean.
      confidence: of the intervals, strictly between 0 and 1.
      batch_size: of the model's predictions.

    Raises:
      ValueError: an argument is out of its range, the losses are not one finite number an example, or there are fewer
        than two examples of either kind.

    Source: Carlini et al. 2022, arXiv:2112.03570, on why the true positive rate at a low false positive rate counts.
    """
    confidence = _checks.probability("confidence", confidence, "for instance 0.95")
    score = ATTACKS[_checks.choice("attack", attack, tuple(ATTACKS))]
    inner = score(model_or_losses, members, loss, batch_size)
    outer = score(model_or_losses, non_members, loss, batch_size)
    return report_of(attack, inner, outer, confidence)


def report_of(attack: str, members: np.ndarray, non_members: np.ndarray, confidence: float = 0.95) -> MembershipReport:
    """The report of an attack that gave members and non-members these scores, ``[m]`` and ``[n]``: higher ones are
    taken for members."""
    from sklearn.metrics import roc_auc_score, roc_curve

    for name, scores in (("members", members), ("non_members", non_members)):
        if scores.ndim != 1 or len(scores) < 2 or not np.all(np.isfinite(scores)):
            raise ValueError(
                f"{name} must have one finite loss for each of at least two examples, got shape {list(scores.shape)} "
                f"with {np.sum(~np.isfinite(scores))} that are not finite: check the data, and that training converged"
            )
    truth = np.repeat([1, 0], [len(members), len(non_members)])
    scores = np.concatenate([members, non_members])
    auc = float(roc_auc_score(truth, scores))
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    found = float(tpr[fpr <= LOW_FPR].max())
    return MembershipReport(
        attack=attack,
        auc=auc,
        auc_interval=_auc_interval(members, non_members, auc, confidence),
        tpr_at_low_fpr=found,
        tpr_interval=_tpr_interval(members, non_members, confidence),
        confidence=confidence,
        num_members=len(members),
        num_non_members=len(non_members),
    )


def _tpr_interval(members: np.ndarray, non_members: np.ndarray, confidence: float) -> tuple[float, float]:
    """A quarter of the error for each threshold and each count. Of what is taken for a member at the best threshold,
    non-members are at most ``fpr``: too many of n are seldom in there, so it lies above the outer-th highest of them.
    Whatever lies above the inner-th highest is seldom more than that, so it takes in at least as much."""
    error, m, n = (1 - confidence) / 4, len(members), len(non_members)
    down = np.sort(non_members)[::-1]
    # Least i with P(Bin ≥ i) ≤ error; largest i with P(Bin < i) ≤ error.
    outer = int(stats.binom.isf(error, n, LOW_FPR)) + 1
    inner = int(stats.binom.ppf(error, n, LOW_FPR))
    least = int(np.sum(members > down[inner - 1])) if inner else 0
    most = int(np.sum(members > down[outer - 1])) if outer <= n else m
    low = stats.beta.ppf(error, least, m - least + 1) if least else 0.0
    high = stats.beta.isf(error, most + 1, m - most) if most < m else 1.0
    return float(low), float(high)


def _auc_interval(members: np.ndarray, non_members: np.ndarray, auc: float, confidence: float) -> tuple[float, float]:
    """DeLong et al. 1988: the variance of the placements, each score's rank among the other group. No distribution is
    assumed, ties are right, nothing is random; on the logit scale the interval stays inside (0, 1).

    Where the groups are wholly apart, or all scores tie, that variance is 0. Then min(m, n) independent pairs of a
    member and a non-member all fell the same way, which bounds the AUC by Clopper and Pearson.
    """
    m, n = len(members), len(non_members)
    ranks = stats.rankdata(np.concatenate([members, non_members]))
    above = (ranks[:m] - stats.rankdata(members)) / n
    below = (ranks[m:] - stats.rankdata(non_members)) / m
    error = np.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n)
    if error < 1e-12:
        edge = float(((1 - confidence) / 2) ** (1 / min(m, n)))
        return auc * edge, auc * edge + 1 - edge
    reach = stats.norm.ppf((1 + confidence) / 2) * error / (auc * (1 - auc))
    return float(special.expit(special.logit(auc) - reach)), float(special.expit(special.logit(auc) + reach))


def _minus_losses(model_or_losses: Any, examples: Any, loss: Any, batch_size: int) -> np.ndarray:
    return -losses_of(model_or_losses, examples, loss, batch_size)


# Each takes (model or losses, examples, loss, batch_size) and returns a score for each example, higher for members.
ATTACKS: dict[str, Callable[[Any, Any, Any, int], np.ndarray]] = {"loss": _minus_losses}


def losses_of(model_or_losses: Any, examples: Any, loss: Any, batch_size: int) -> np.ndarray:
    """[n]: as `membership_inference` reads its arguments."""
    if model_or_losses is None:
        return np.asarray(examples, np.float64)
    if hasattr(model_or_losses, "predict"):
        return _model_losses(model_or_losses, *_pair(examples), loss, batch_size)
    if callable(model_or_losses):
        return np.asarray(model_or_losses(*_pair(examples)), np.float64)
    losses, rows = np.asarray(model_or_losses, np.float64), np.asarray(examples)
    if rows.dtype.kind not in "biu":
        raise ValueError(
            f"members and non_members must be rows of the given losses, numbers or masks, got {rows.dtype}: for two "
            "arrays of losses give None in place of the model"
        )
    return losses[rows]


def _pair(examples: Any) -> tuple[Any, Any]:
    if not isinstance(examples, tuple | list) or len(examples) != 2:
        raise ValueError("members and non_members must each be a pair (x, y): give the inputs and their labels")
    return examples[0], examples[1]


def _model_losses(model: Any, x: Any, y: Any, loss: Any, batch_size: int) -> np.ndarray:
    import tensorflow as tf

    loss = getattr(model, "loss", None) if loss is None else loss
    if loss is None or isinstance(loss, list | tuple | dict):
        raise ValueError(
            f"loss must be one Keras loss, but the model has {loss!r}: give loss=…, or a function of (x, y) in place "
            "of the model"
        )
    if isinstance(loss, str):
        loss = tf.keras.losses.get(loss)
    predicted = tf.convert_to_tensor(model.predict(x, batch_size=batch_size, verbose=0))
    truth = tf.convert_to_tensor(y)
    if len(truth) != len(predicted):
        raise ValueError(f"x has {len(predicted)} examples and y {len(truth)}: give one label an example")
    if truth.shape.rank == predicted.shape.rank - 1 and predicted.shape[-1] == 1:
        truth = truth[..., None]  # else [n] against [n, 1] would broadcast to [n, n]
    # A loss object's `call` is the loss before its reduction.
    losses = np.asarray(getattr(loss, "call", loss)(truth, predicted), np.float64)
    if losses.shape[:1] != (len(truth),):
        raise ValueError(f"loss must give a loss an example, got shape {list(losses.shape)}: leave its reduction out")
    return losses.reshape(len(losses), -1).mean(1)
