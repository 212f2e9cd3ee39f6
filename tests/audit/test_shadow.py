"""LiRA and RMIA against scipy's normals and a count over pairs; they find an overfit model, and no private one."""

import numpy as np
import pytest
from scipy import stats

from tfdpfl.audit import lira, membership_inference, rmia


def world(shadows=40, examples=300, gap=1.0, seed=0):
    """Scores that are normal, with a place of each example's own, `gap` higher where it was trained on."""
    rng = np.random.default_rng(seed)
    place = rng.normal(0, 5, examples)
    inside = rng.random((shadows + 1, examples)) < 0.5
    scores = place + gap * inside + rng.normal(size=inside.shape)
    return scores[0], scores[1:], inside[1:], inside[0]


def by_hand(scores, shadow, inside, online):
    own = []
    for i, score in enumerate(scores):
        out, into = shadow[~inside[:, i], i], shadow[inside[:, i], i]
        alike = lambda which: np.sqrt(
            sum(np.sum((s[w] - s[w].mean()) ** 2) for s, w in zip(shadow.T, which.T, strict=True))
            / sum(w.sum() - 1 for w in which.T))  # fmt: skip
        ratio = stats.norm.cdf(score, out.mean(), alike(~inside))
        if online:
            ratio = stats.norm.pdf(score, into.mean(), alike(inside))
            ratio /= stats.norm.pdf(score, out.mean(), alike(~inside))
        own.append(ratio)
    return np.array(own)


@pytest.mark.parametrize("online", [True, False])
def test_lira_is_the_likelihood_ratio_of_normals(online):
    scores, shadow, inside, members = world(20, 60)
    ratio = by_hand(scores, shadow, inside, online)
    want = membership_inference(None, -ratio[members], -ratio[~members])
    got = lira(scores, shadow, inside, members, online=online)
    assert got.auc == pytest.approx(want.auc) and got.tpr_at_low_fpr == want.tpr_at_low_fpr
    assert got.num_members == members.sum() and ("online" if online else "offline") in str(got)


def test_lira_reaches_what_normals_that_far_apart_allow():
    """The optimum is Φ(gap / √2); a threshold on the scores sees little of it, since examples differ more."""
    scores, shadow, inside, members = world(200, 3000)
    best = stats.norm.cdf(1 / np.sqrt(2))
    for online in (True, False):
        report = lira(scores, shadow, inside, members, online=online)
        assert report.auc_interval[0] < best < report.auc_interval[1] + 0.01
    assert membership_inference(None, -scores[members], -scores[~members]).auc < 0.6
    nothing = lira(*world(200, 3000, gap=0), confidence=0.999)
    assert nothing.auc_interval[0] < 0.5 < nothing.auc_interval[1]


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_rmia_counts_whom_an_example_beats(gamma):
    scores, shadow, inside, members = world(6, 80)
    keep = inside.any(0) & ~inside.all(0)
    scores, shadow, inside, members = scores[keep], shadow[:, keep], inside[:, keep], members[keep]
    own, others = -np.logaddexp(0, -scores), -np.logaddexp(0, -shadow)
    p, n = np.exp(others), len(own)
    reference = [(p[inside[:, i], i].mean() + p[~inside[:, i], i].mean()) / 2 for i in range(n)]
    ratio = np.exp(own) / reference
    beats = np.array([sum(ratio[i] / ratio[j] >= gamma for j in range(n) if j != i) for i in range(n)])
    want = membership_inference(None, -1.0 * beats[members], -1.0 * beats[~members])
    got = rmia(own, others, inside, members, gamma=gamma)
    assert (got.auc, got.tpr_at_low_fpr) == (pytest.approx(want.auc), want.tpr_at_low_fpr)


def federation(shadows, clients, most, gap, seed=0):
    """As `world`, where clients have one to `most` examples, and are in a training with all of them."""
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(clients), rng.integers(1, most + 1, clients)))
    inside = (rng.random((shadows + 1, clients)) < 0.5)[:, owner]
    scores = rng.normal(0, 5, len(owner)) + gap * inside + rng.normal(size=inside.shape)
    return (scores[0], scores[1:], inside[1:], inside[0]), owner


@pytest.mark.parametrize("online", [True, False])
def test_a_client_is_told_by_all_of_its_examples(online):
    """The mean of m examples is √m times as far out as one, over its deviation: the AUC is Φ(gap √(m / 2))."""
    rng, m, clients, gap = np.random.default_rng(1), 6, 1500, 0.4
    inside = np.repeat(rng.random((201, clients)) < 0.5, m, axis=1)
    scores = rng.normal(0, 5, m * clients) + gap * inside + rng.normal(size=inside.shape)
    many, owner = (scores[0], scores[1:], inside[1:], inside[0]), np.repeat(np.arange(clients), m)
    report = lira(*many, online=online, clients=owner, confidence=0.999)
    assert report.auc_interval[0] < stats.norm.cdf(gap * np.sqrt(m / 2)) < report.auc_interval[1] + 0.01
    assert lira(*many, online=online).auc == pytest.approx(stats.norm.cdf(gap / np.sqrt(2)), abs=0.02)
    assert (report.unit, report.num_members + report.num_non_members) == ("client", clients)
    assert "each a client with all its examples" in str(report) and report.to_dict()["unit"] == "client"
    given, owner = federation(100, 800, 4, 0.0)
    nothing = lira(*given, online=online, clients=owner)
    assert abs(nothing.auc - 0.5) < 0.08


def test_clients_of_any_size_are_compared():
    """Each client's sum by hand; one example each is the attack on examples; names may be strings."""
    given, owner = federation(40, 120, 5, 1.0)
    scores, shadow, inside, members = given
    mean = lambda which: np.where(which, shadow, 0).sum(0) / which.sum(0)
    spread = lambda which: np.sqrt(np.where(which, (shadow - mean(which)) ** 2, 0).sum() / (which.sum(0) - 1).sum())
    z = (scores - mean(~inside)) / spread(~inside)
    ratio = z**2 / 2 - ((scores - mean(inside)) / spread(inside)) ** 2 / 2
    of = lambda part, by: np.array([by(part[owner == i]) for i in range(120)])
    within = of(members, np.all)
    logs, p = -np.logaddexp(0, -scores), 1 / (1 + np.exp(-shadow))
    reference = (np.where(inside, p, 0).sum(0) / inside.sum(0) + np.where(inside, 0, p).sum(0) / (~inside).sum(0)) / 2
    means = of(logs - np.log(reference), np.mean)
    beats = np.array([np.sum(means[i] >= means) - 1.0 for i in range(120)])
    found = {
        "online": (lira(*given, clients=owner), of(ratio, np.sum)),
        "offline": (lira(*given, online=False, clients=owner), of(z, lambda part: part.sum() / np.sqrt(len(part)))),
        "rmia": (rmia(logs, -np.logaddexp(0, -shadow), inside, members, clients=owner), beats),
    }
    for name, (got, by_hand) in found.items():
        want = membership_inference(None, -by_hand[within], -by_hand[~within])
        assert (got.auc, got.tpr_at_low_fpr) == (pytest.approx(want.auc, abs=2e-3), want.tpr_at_low_fpr), name
    each = np.arange(len(scores))
    assert lira(*given, clients=each).auc == lira(*given).auc
    assert lira(*given, clients=[f"c{i}" for i in owner]).auc == found["online"][0].auc


@pytest.mark.parametrize("attack", [lira, lambda s, h, *rest, **how: rmia(-abs(s), -abs(h), *rest, **how)])
def test_clients_that_do_not_fit_are_refused(attack):
    (scores, shadow, inside, members), owner = federation(40, 40, 2, 1.0)

    def refused(words, clients=owner, inside=inside, members=members):
        with pytest.raises(ValueError, match=words):
            attack(scores, shadow, inside, members, clients=clients)

    refused(r"clients must be whole numbers or strings \[examples\], \[\d+\], got", owner[1:])
    refused("of float64: give the id of each example's client", owner + 0.5)
    refused("two in the model's training and two that are not, got 40 and 0", members=members | True)
    torn = np.bincount(owner)[owner] == 2
    one = np.arange(len(owner)) == np.flatnonzero(torn)[0]  # of the two examples of a client
    words = f"clients: {owner[one][0]} has some examples in a training and some outside: include all"
    refused(words, members=members ^ one)
    refused(words, inside=inside ^ (one & (np.arange(40) == 7)[:, None]))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda s, h, i, m: lira(s[1:], h, i, m), "scores and members must be"),
        (lambda s, h, i, m: lira(s, h, i * 1, m), "members bool"),
        (lambda s, h, i, m: lira(s * np.nan, h, i, m), "scores must be finite"),
        (lambda s, h, i, m: lira(s, h, i | True, m), "0 shadow models without it"),
        (lambda s, h, i, m: lira(s, h, i & False, m), "0 shadow models with it"),
        (lambda s, h, i, m: rmia(s, h, i, m), "at most 0"),
        (lambda s, h, i, m: rmia(-abs(s), -abs(h), i, m, gamma=0.5), "gamma must be"),
        (lambda s, h, i, m: lira(s, h, i, m, confidence=2), "confidence must be"),
    ],
)
def test_bad_input_is_named_with_its_mend(call, words):
    with pytest.raises(ValueError, match=words):
        call(*world(40, 30))


def confidences(model, x, y):
    """ln(p / (1 - p)) of the right class."""
    p = np.clip(model.predict_proba(x)[np.arange(len(y)), y], 1e-7, 1 - 1e-7)
    return np.log(p / (1 - p))


def attacked(make, x, y, models=16):
    """The mean AUC of both forms of LiRA and of RMIA over targets, each attacked by all other models."""
    rng = np.random.default_rng(0)
    inside = np.argsort(rng.random((models // 2, len(y))), 1) < len(y) // 2
    inside = np.concatenate([inside, ~inside])  # each example is in half of them
    scores = np.array([confidences(make().fit(x[i], y[i]), x, y) for i in inside])
    found = []
    for target in range(models):
        rest = np.arange(models) != target
        given = inside[rest], inside[target]
        logs = -np.logaddexp(0, -scores)
        found.append([
            lira(scores[target], scores[rest], *given).auc,
            lira(scores[target], scores[rest], *given, online=False).auc,
            rmia(logs[target], logs[rest], *given).auc,
        ])  # fmt: skip
    return np.mean(found, axis=0)


@pytest.mark.slow
def test_an_overfit_digits_model_tells_its_members_and_one_at_epsilon_1_does_not():
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    from tfdpfl.convex import DPLogisticRegression

    x, y = load_digits(return_X_y=True)
    x, y = x[:300] / 16, y[:300].copy()
    wrong = np.random.default_rng(1).random(300) < 0.3
    y[wrong] = (y[wrong] + 1) % 10  # what cannot be learnt, only kept
    mlp = MLPClassifier((64,), alpha=0, max_iter=150, learning_rate_init=0.01, random_state=0)
    overfit = attacked(lambda: mlp, x, y)
    assert overfit.min() >= 0.7, overfit
    private = attacked(lambda: DPLogisticRegression(1.0, 1e-4, classes=np.arange(10), num_steps=20), x, y)
    assert private.max() <= 0.55, private
