"""Membership inference: how well an adversary tells the examples that a model was trained on from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy import special, stats

from tfdpfl._types import Arrays, Estimator, Json, Loss, Model
from tfdpfl.accounting import _checks
from tfdpfl.audit.epsilon import clopper_pearson

__all__ = ["MembershipReport", "losses_of", "membership_inference", "report_of"]

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
        non-members there are. The place of that threshold is unknown too. Order statistics of the non-members enclose
        it whatever their distribution, and the members beyond are counted (Clopper and Pearson). With fewer than some
        440 non-members (at 95 %) nothing encloses it from above, and ``low`` is 0.
      fpr: 0.01. With fewer than 100 non-members it means that none is accused.
      confidence: of both intervals. Those of slices hold all together, so each by itself with more.
      num_members: number of members that were scored; of a trained attack, half of them.
      num_non_members: number of non-members that were scored.
      unit: what a member is, "example" or "client".
      slices: {name: report} of parts of the examples, by the same scores.
      left_out: names of slices that have fewer than two members or non-members.
      roc: (false, true positive rates), what the attack reaches at every threshold; ``to_dict`` leaves it out.
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
    unit: str = "example"
    slices: Mapping[str, MembershipReport] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    roc: tuple[np.ndarray, np.ndarray] = dataclasses.field(default=(np.zeros(0),) * 2, repr=False, compare=False)

    def to_dict(self) -> Json:
        """The fields but for the curve, JSON-ready."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "roc"}
        return found | {"slices": {name: part.to_dict() for name, part in self.slices.items()}}

    def __str__(self) -> str:
        unit = ", each a client with all its examples" if self.unit == "client" else ""
        lines = [
            f"{self.attack} attack on {self.num_members} members and {self.num_non_members} non-members{unit}: "
            f"{self._found()} ({self.confidence:.0%} confidence)"
        ]
        lines += [
            f"  {name} ({part.num_members} members, {part.num_non_members} non-members): {part._found()}"
            for name, part in sorted(self.slices.items(), key=lambda item: -item[1].auc)
        ]
        if self.slices:
            lines.append(f"  intervals of slices hold together, with {self.confidence:.0%} confidence")
        if self.left_out:
            lines.append(f"  left out, with fewer than two members or non-members: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _found(self) -> str:
        between = lambda interval: f"[{interval[0]:.3f}, {interval[1]:.3f}]"  # noqa: E731
        return (
            f"AUC {self.auc:.3f} {between(self.auc_interval)}, "
            f"TPR at FPR {self.fpr:.0%} {self.tpr_at_low_fpr:.3f} {between(self.tpr_interval)}"
        )


def membership_inference(
    model_or_losses: Arrays,
    members: Arrays,
    non_members: Arrays,
    *,
    attack: str = "loss",
    loss: Loss = None,
    slices: Arrays = None,
    confidence: float = 0.95,
    batch_size: int = 256,
) -> MembershipReport:
    """Attacks a trained model, and reports how far members can be told from non-members.

        membership_inference(model, (x_train, y_train), (x_test, y_test))
        membership_inference(model, (x_train, y_train), (x_test, y_test), attack="forest", slices="class")

    The loss-threshold attack takes an example for a member where its loss is low. A trained one learns from a random
    half of the examples what members look like, and scores the other half, which the report is about. The attack reads
    each example's loss and, if the model returns probabilities or logits of classes, the logit of the largest
    probability and the entropy. The halves do not change places. Two attacks that each learned from what the other
    scores err in the same direction. An interval that takes them for independent is too narrow.

    Members and non-members should come from one distribution, or the attack tells distributions apart: so should those
    of each slice. An attack that fails proves nothing; one that succeeds beyond what (ε, δ) allows refutes the claim.

    Args:
      model_or_losses: a Keras model; or a function of ``(x, y)`` that returns the losses ``[n]``; or an array of losses
        ``[n]``, of which the next two are the rows (numbers or boolean masks); or None, if they are losses themselves.
      members: ``(x, y)`` that the model was trained on; or as said above.
      non_members: the like of examples that it never saw.
      attack: ``"loss"`` (Yeom et al. 2018, arXiv:1709.01604); or a trained one, of scikit-learn: ``"logistic"``,
        ``"neighbors"``, ``"forest"`` (Shokri et al. 2017, arXiv:1610.05820, without shadow models).
      loss: a Keras loss, its name, or a function of ``(y_true, y_pred)``; None takes what the model was compiled with.
        A loss of several values an example counts by their mean.
      slices: what the report is divided by, too: ``"class"``, of examples ``(x, y)`` with labels ``[n]`` or one-hot; or
        ``{name: (of members, of non-members)}``, an id for each example: its client's in a federation, its decade of
        birth. None in place of the second compares the members of each id with all non-members.
      confidence: of the intervals, strictly between 0 and 1.
      batch_size: of the model's predictions.

    Raises:
      ValueError: an argument is out of its range, the losses are not one finite number an example, there are fewer
        than two examples of either kind (four, for a trained attack), or slices do not fit the examples.

    Source: Carlini et al. 2022, arXiv:2112.03570, on why the true positive rate at a low false positive rate counts.
    """
    confidence = _checks.probability("confidence", confidence, "for instance 0.95")
    attack = _checks.choice("attack", attack, ("loss", *TRAINED))
    sides, names = (members, non_members), ("members", "non_members")
    if attack == "loss":
        scores = [-losses_of(model_or_losses, side, loss, batch_size) for side in sides]
        for name, score in zip(names, scores, strict=True):
            _check_scores(name, score)
    else:
        features = [
            _features(name, model_or_losses, side, loss, batch_size) for name, side in zip(names, sides, strict=True)
        ]
        scores = _held_out(attack, features)
    whole = report_of(attack, _scored(scores[0]), _scored(scores[1]), confidence)
    parts = {name: list(map(_scored, part)) for name, part in _slices(slices, sides, scores).items()}
    usable = {name: part for name, part in parts.items() if min(map(len, part)) >= 2}
    each = 1 - (1 - confidence) / max(1, len(usable))
    return dataclasses.replace(
        whole,
        slices={name: report_of(attack, part[0], part[1], each) for name, part in usable.items()},
        left_out=tuple(name for name in parts if name not in usable),
    )


def _check_scores(name: str, scores: np.ndarray, least: int = 2) -> None:
    if scores.ndim != 1 or len(scores) < least or not np.all(np.isfinite(scores)):
        raise ValueError(
            f"{name} must have one finite loss for each of at least {('two', 'four')[least == 4]} examples, got shape "
            f"{list(scores.shape)} with {np.sum(~np.isfinite(scores))} that are not finite: check the data, and that "
            "training converged"
        )


def report_of(attack: str, members: np.ndarray, non_members: np.ndarray, confidence: float = 0.95) -> MembershipReport:
    """The report of an attack that gave members and non-members these scores, ``[m]`` and ``[n]``: higher ones are
    taken for members."""
    from sklearn.metrics import roc_auc_score, roc_curve

    _check_scores("members", members)
    _check_scores("non_members", non_members)
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
        roc=(fpr, tpr),
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
    low, high = clopper_pearson(least, most, m, error)
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


TRAINED = ("logistic", "neighbors", "forest")


def _classifier(attack: str, rows: int) -> Estimator:
    """A classifier of `TRAINED`, for so many rows."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    return {
        "logistic": LogisticRegression(),
        "neighbors": KNeighborsClassifier(min(25, rows)),
        "forest": RandomForestClassifier(200, min_samples_leaf=10, random_state=0),
    }[attack]


def _held_out(attack: str, features: list[np.ndarray]) -> list[np.ndarray]:
    """Scores [m] and [n] of features [m, f] and [n, f] by a classifier that learned from half of them, from as many
    members as non-members. The half that it learned from has NaN in place of scores."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)  # a report is the same when it is made again
    learned = [rng.permutation(len(part)) % 2 == 1 for part in features]
    seen = [part[which] for part, which in zip(features, learned, strict=True)]
    least = min(map(len, seen))
    seen = [rng.permutation(part)[:least] for part in seen]
    model = make_pipeline(StandardScaler(), _classifier(attack, 2 * least)).fit(
        np.concatenate(seen), np.repeat([1, 0], least)
    )
    scores = [np.full(len(part), np.nan) for part in features]
    for score, part, which in zip(scores, features, learned, strict=True):
        score[~which] = model.predict_proba(part[~which])[:, 1]
    return scores


def _scored(scores: np.ndarray) -> np.ndarray:
    return scores[~np.isnan(scores)]


def _slices(slices: Arrays, sides: Arrays, scores: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """{name: [scores of members, of non-members]}."""
    if slices is None:
        return {}
    if isinstance(slices, str):
        _checks.choice("slices", slices, ("class",))
        slices = {"class": [_classes(_pair(side)[1]) for side in sides]}
    if not isinstance(slices, Mapping) or not slices:
        raise ValueError('slices must be "class" or {name: (of members, of non-members)}: an id for each example')
    found = {}
    for name, ids in slices.items():
        if not isinstance(ids, tuple | list) or len(ids) != 2 or ids[0] is None:
            raise ValueError(f"slices[{name!r}] must be a pair: the ids of members, and of non-members or None")
        known = [np.asarray(part) for part in ids if part is not None]
        for who, of, score in zip(("members", "non-members"), known, scores, strict=False):
            if of.shape != score.shape:
                raise ValueError(
                    f"slices[{name!r}] must have an id for each of the {len(score)} {who}, got shape {list(of.shape)}"
                )
        for value in np.unique(np.concatenate(known)):
            parts = [score[of == value] for of, score in zip(known, scores, strict=False)]
            found[f"{name} {value}"] = parts if ids[1] is not None else [*parts, scores[1]]
    return found


def _classes(y: Arrays) -> np.ndarray:
    y = np.asarray(y)
    return y.argmax(-1) if y.ndim == 2 and y.shape[1] > 1 else y.reshape(-1)


def losses_of(model_or_losses: Arrays, examples: Arrays, loss: Loss, batch_size: int) -> np.ndarray:
    """[n]: as `membership_inference` reads its arguments."""
    if model_or_losses is None:
        return np.asarray(examples, np.float64)
    if hasattr(model_or_losses, "predict"):
        return _model_losses(model_or_losses, *_pair(examples), loss, batch_size)[0]
    if callable(model_or_losses):
        return np.asarray(model_or_losses(*_pair(examples)), np.float64)
    losses, rows = np.asarray(model_or_losses, np.float64), np.asarray(examples)
    if rows.dtype.kind not in "biu":
        raise ValueError(
            f"members and non_members must be rows of the given losses, numbers or masks, got {rows.dtype}: for two "
            "arrays of losses give None in place of the model"
        )
    return losses[rows]


def _features(name: str, model_or_losses: Arrays, examples: Arrays, loss: Loss, batch_size: int) -> np.ndarray:
    """[n, features], of which the first is the loss."""
    more = []
    if hasattr(model_or_losses, "predict"):
        losses, predicted = _model_losses(model_or_losses, *_pair(examples), loss, batch_size)
        more = _confidence(predicted)
    else:
        losses = losses_of(model_or_losses, examples, loss, batch_size)
    _check_scores(name, losses, least=4)
    return np.column_stack([losses, *more])


def _confidence(predicted: np.ndarray) -> list[np.ndarray]:
    """Of outputs [n, classes]: the logit of the largest probability, and the entropy. Of other outputs nothing."""
    if predicted.ndim != 2:
        return []
    if predicted.shape[1] == 1 and predicted.min() >= 0 and predicted.max() <= 1:
        predicted = np.hstack([1 - predicted, predicted])
    elif predicted.shape[1] == 1:
        return []
    elif predicted.min() < 0 or not np.allclose(predicted.sum(1), 1, atol=1e-3):
        predicted = special.softmax(predicted, 1)
    top = np.clip(predicted.max(1), 1e-7, 1 - 1e-7)
    return [special.logit(top), special.entr(predicted).sum(1)]


def _pair(examples: Arrays) -> tuple[Arrays, Arrays]:
    if not isinstance(examples, tuple | list) or len(examples) != 2:
        raise ValueError("members and non_members must each be a pair (x, y): give the inputs and their labels")
    return examples[0], examples[1]


def _model_losses(model: Model, x: Arrays, y: Arrays, loss: Loss, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses [n], and what the model gave out."""
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
    loss_of_examples: Loss = getattr(loss, "call", loss)
    losses = np.asarray(loss_of_examples(truth, predicted), np.float64)
    if losses.shape[:1] != (len(truth),):
        raise ValueError(f"loss must give a loss an example, got shape {list(losses.shape)}: leave its reduction out")
    return losses.reshape(len(losses), -1).mean(1), np.asarray(predicted, np.float64)
