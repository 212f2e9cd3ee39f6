"""Lower bounds on ε from what a mechanism really does: where one is above the claim, the claim is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

from tfdpfl._types import Arrays, Dataset
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import gaussian_epsilon

__all__ = ["audit_epsilon", "clopper_pearson", "epsilon_of_mu"]

_MOST_DISTINCT = 0.05  # of the trials; above, outputs are taken for continuous


def audit_epsilon(
    mechanism: Callable[..., Arrays],
    dataset: Dataset,
    neighbour: Arrays,
    trials: int = 10_000,
    confidence: float = 0.99,
    *,
    delta: float = 0.0,
    vectorized: bool = False,
    tradeoff: str | None = None,
) -> float:
    """Returns an ε that the mechanism does not stay below, from repeated runs on two neighbouring inputs.

        audit_epsilon(lambda y: RandomizedResponse(1.0, 10).fit_transform(y)[0], y, y_other, trials=20_000)

    Half of the runs choose the outputs that tell the two inputs apart best. The others, untouched by that choice,
    count how often each input leads there. If p and q are the two frequencies' Clopper-Pearson bounds, from below and
    above, then ε ≥ ln((p - δ) / q).

    Promise: with probability `confidence` at least, the returned number is at most the mechanism's true ε at δ. A small
    one proves nothing: with n trials no more than about ln(n / 12) can be seen.

    With ``tradeoff="gaussian"`` the same two bounds say how far apart two unit normals are that are as easy to tell
    apart: μ ≥ Φ⁻¹(p) - Φ⁻¹(q). Returned is the ε of that μ at δ, which is far more. That the mechanism is μ-GDP for no
    smaller μ assumes nothing. That its ε at δ is no smaller is an assumption. The pair must be, at every error rate, as
    hard to tell apart as two normals. So it is where Gaussian noise on a value of bounded L2 norm is all that touches
    the data, once or many times, and a claim made for that is what it refutes. Of Laplace noise, randomized response or
    sampled batches it may say too much: take the default there.

    Args:
        mechanism: Takes a data set and returns what an adversary sees: a number, a string, or an array of equal
            shape every time. It must draw new randomness at every call (no fixed seed).
        dataset: An input, passed on as it is.
        neighbour: One that differs in what privacy protects: one example, or one label.
        trials: Runs on each input, at least 20.
        confidence: Strictly between 0 and 1, of both Clopper-Pearson bounds together.
        delta: δ of the claim to be tested.
        vectorized: Whether the mechanism takes (data set, trials) and returns that many independent outputs,
            `[trials, ...]`; much faster where it can.
        tradeoff: None, or "gaussian" for mechanisms that are Gaussian noise; it needs a δ above 0.

    Returns:
        The lower bound, 0.0 where there is nothing to see.

    Raises:
        ValueError: An argument is out of its range, or the outputs have different shapes.

    Source: Jagielski et al. 2020, arXiv:2006.07709; Clopper & Pearson 1934; for "gaussian" Dong, Roth & Su 2019,
    arXiv:1905.02383, and Nasr et al. 2023, arXiv:2302.07956.
    """
    trials = _checks.whole("trials", trials, 20, "a few thousand runs are enough to detect an ε of about 5")
    confidence = _checks.probability("confidence", confidence, "for instance 0.99")
    delta = _checks.real("delta", delta, "0 for pure ε-DP", at_least=0)
    if delta >= 1:
        raise ValueError(f"delta must be below 1, got {delta!r}: use the δ of the claim")
    if tradeoff is not None:
        _checks.choice("tradeoff", tradeoff, ("gaussian",))
        if delta == 0:
            raise ValueError('delta must be above 0 with tradeoff="gaussian": Gaussian noise has no finite ε at δ = 0')
    seen = [_outputs(mechanism, data, trials, vectorized) for data in (dataset, neighbour)]
    if seen[0].shape[1:] != seen[1].shape[1:]:
        raise ValueError(
            f"mechanism returned outputs of the shapes {list(seen[0].shape[1:])} and {list(seen[1].shape[1:])}: return "
            "arrays of one shape for both inputs"
        )
    # One place on a known curve is found with fewer runs than any event.
    half = trials // (2 if tradeoff is None else 4)
    chosen, counted = [part[:half] for part in seen], [part[half:] for part in seen]
    score = _likelihood_ratio(*chosen)
    scores = [score(part) for part in chosen]

    def bound(hits: Arrays, misses: Arrays, n: int) -> np.ndarray:
        """ln((p - δ) / q), or with Gaussian noise Φ⁻¹(p) - Φ⁻¹(q)."""
        low, high = clopper_pearson(hits, misses, n, (1 - confidence) / 2)
        if tradeoff is not None:
            return special.ndtri(low) - special.ndtri(high)
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(low - delta, 0)) - np.log(high)

    sign, threshold = _best_event(scores, bound)
    likely, unlikely = (sign * score(part) >= threshold for part in counted[::sign])
    found = float(bound(likely.sum(), unlikely.sum(), trials - half))
    return max(0.0, found) if tradeoff is None else epsilon_of_mu(found, delta)


def _best_event(
    scores: list[np.ndarray], bound: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
) -> tuple[int, float]:
    """(sign, threshold) of the event that tells two inputs apart best, given the scores of as many runs of either. The
    event is the outputs whose score times the sign is above the threshold. With -1, the second input is the likelier.
    """
    runs, best, event = len(scores[0]), -math.inf, (1, math.inf)
    for sign in (1, -1):
        likely, unlikely = (np.sort(sign * part) for part in scores[::sign])
        thresholds = _between(np.unique(np.concatenate([likely, unlikely])))
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, min(len(thresholds), 200)).astype(int)]
        hits = runs - np.searchsorted(likely, thresholds, "left")
        misses = runs - np.searchsorted(unlikely, thresholds, "left")
        bounds = bound(hits, misses, runs)
        if bounds.max() > best:
            best, event = bounds.max(), (sign, thresholds[bounds.argmax()])
    return event


def _between(values: np.ndarray) -> np.ndarray:
    """The first of these sorted values, and the middle of each two: a threshold at one of the runs that chose it would
    lose runs that are a little below, where the two inputs are far apart."""
    with np.errstate(invalid="ignore"):
        middle = values[:-1] / 2 + values[1:] / 2
    return np.append(values[:1], np.where(np.isfinite(middle), middle, values[1:]))


def clopper_pearson(hits: Arrays, misses: Arrays, n: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Bounds the rate of ``hits`` of n from below, and that of ``misses`` of n from above, each with this error."""
    hits, misses = np.asarray(hits), np.asarray(misses)
    low = np.where(hits > 0, stats.beta.ppf(error, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(misses < n, stats.beta.ppf(1 - error, misses + 1, np.maximum(n - misses, 1)), 1.0)
    return low, high


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The least ε ≥ 0 at which μ-GDP implies (ε, δ)-DP (Dong, Roth & Su 2019, corollary 2.13); 0 of no positive μ."""
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def _outputs(mechanism: Callable[..., Arrays], data: Arrays, trials: int, vectorized: bool) -> np.ndarray:
    """[trials] or [trials, features]: what came out."""
    if vectorized:
        outputs = np.asarray(mechanism(data, trials))
        if len(outputs) != trials:
            raise ValueError(f"mechanism must return {trials} outputs, got {len(outputs)}: one for each trial")
    else:
        runs = [np.asarray(mechanism(data)) for _ in range(trials)]
        shapes = {run.shape for run in runs}
        if len(shapes) > 1:
            raise ValueError(f"mechanism must return one shape every time, got {sorted(shapes)[:3]}: pad or summarise")
        outputs = np.stack(runs)
    if outputs.dtype == object or (outputs.dtype.kind in "fc" and np.isnan(outputs).any()):
        what = "NaN" if outputs.dtype != object else f"{outputs.ravel()[0]!r:.50}"
        raise ValueError(f"mechanism returned {what}, which cannot be counted: return a number or a word for it")
    return outputs.reshape(trials, -1)


def _likelihood_ratio(first: np.ndarray, second: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A score that rises with how much likelier an output is under the first input, learned from these runs: the ratio
    of counts for few distinct outputs, else the number itself, or a linear classifier of several."""
    both = np.concatenate([first, second])
    known, codes = np.unique(both, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    if len(known) <= max(2, _MOST_DISTINCT * len(both)):
        counts = [np.bincount(part, minlength=len(known)) for part in np.split(codes, [len(first)])]
        ratio = np.log(counts[0] + 0.5) - np.log(counts[1] + 0.5)
        place = {row.tobytes(): i for i, row in enumerate(known)}
        ratio = np.append(ratio, 0.0)  # of an output never seen before
        return lambda part: ratio[[place.get(row.tobytes(), -1) for row in part]]
    if both.dtype.kind not in "biuf":
        raise ValueError(
            f"mechanism returned {len(known)} different outputs of dtype {both.dtype}, too many to count: return "
            "numbers, or a summary of the outputs"
        )
    if both.shape[1] == 1:
        up = 1 if first.mean() >= second.mean() else -1
        return lambda part: up * part[:, 0].astype(np.float64)
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    model.fit(both, np.repeat([1, 0], [len(first), len(second)]))
    return lambda part: model.decision_function(part)
