"""Replay: what is sound is found sound on every path, and each planted fault is caught by name."""

import json
import math
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from tfdpfl import _replay_hook, pate
from tfdpfl.audit import replay
from tfdpfl.clips import AdaptiveClip
from tfdpfl.label_dp import (
    ALIBI,
    KMeansPrior,
    RandomizedResponse,
    RandomizedResponseTopK,
    RROnBins,
    UnbiasedRandomizer,
    _top_k,
)
from tfdpfl.noise import Tree
from tfdpfl.optimizers import DPSGD

Y = np.arange(40) % 4
OTHER = np.where(np.arange(40) == 7, (Y + 1) % 4, Y)
VOTES = np.random.default_rng(0).multinomial(50, [0.6, 0.3, 0.1], 30)
MOVED = VOTES + np.array([-1, 1, 0])  # one teacher changed its mind on every query
GRID = (np.arange(4.0), np.array([0.4, 0.3, 0.2, 0.1]))


class OneCluster:
    def fit(self, X):
        return self

    def predict(self, X):
        return np.zeros(len(X), int)


def paid_prior(y, part=1.0):
    prior = KMeansPrior(part, clusterer=OneCluster())
    return RandomizedResponseTopK(2.0, 4, prior, 4).fit_transform(np.zeros((len(y), 1)), y)


LABELS = {
    "RandomizedResponse": (lambda y: RandomizedResponse(1.5, 4).fit_transform(y), 1.5, True),
    "TopK": (lambda y: RandomizedResponseTopK(1.5, 2, [0.1, 0.2, 0.3, 0.4], 4).fit_transform(y), 1.5, False),
    "RROnBins": (lambda y: RROnBins(1.5, prior=GRID).fit_transform(y.astype(float)), 1.5, False),
    "UnbiasedRandomizer": (lambda y: UnbiasedRandomizer(1.5, prior=GRID).fit_transform(y.astype(float)), 1.5, False),
    "paid histogram": (
        lambda y: RROnBins(2.0, prior_epsilon=0.5, values=GRID[0]).fit_transform(y.astype(float)), 2.0, False),
    "ALIBI": (lambda y: ALIBI(1.5, 4).fit_transform(y), 1.5, True),
    "paid prior": (paid_prior, 2.0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_a_label_mechanism_loses_no_more_than_it_claims(name):
    mechanism, epsilon, exact = LABELS[name]
    found = [replay(mechanism, Y, OTHER, epsilon=epsilon) for _ in range(8)]
    assert all(report.ok for report in found), found
    if name.startswith("paid"):
        assert min(report.moved for report in found) == pytest.approx(1)  # the counts move by all that they may
    most = max(report.epsilon for report in found)
    assert most == pytest.approx(epsilon) if exact and name == "ALIBI" else most <= epsilon * (1 + 1e-4)


def releases(monkeypatch, mechanism, y):
    """What the mechanism tells a tape."""
    seen = []
    monkeypatch.setattr(_replay_hook, "tape", type("Seen", (), {"take": lambda self, r: seen.append(r) or r.out})())
    mechanism(y)
    return seen


@pytest.mark.parametrize("name", LABELS)
def test_a_label_mechanism_tells_of_all_that_it_claims(monkeypatch, name):
    mechanism, epsilon, _ = LABELS[name]
    seen = releases(monkeypatch, mechanism, Y)
    assert sum(release.replaced for release in seen) == pytest.approx(epsilon)
    assert len(seen) == 1 + name.startswith("paid")


@pytest.mark.parametrize(
    ("make", "y"),
    [(lambda: RandomizedResponse(1.5, 4), np.arange(4)), (lambda: UnbiasedRandomizer(1.5, prior=GRID), GRID[0])],
)
def test_the_loss_of_what_is_drawn_is_that_of_its_matrix(monkeypatch, make, y):
    mechanism = make()
    (release,) = releases(monkeypatch, mechanism.fit_transform, y)
    matrix = mechanism.transition_matrix_
    for a in range(4):
        for b in range(4):
            for j in range(matrix.shape[1]):
                loss = release.loss(y[[a]], y[[b]], np.array([j]))
                assert loss == pytest.approx(abs(math.log(matrix[a, j] / matrix[b, j])), abs=1e-9)


def test_the_loss_of_top_k_is_that_of_its_matrix():
    """The closed form against `matrices`, which is tested by itself."""
    order, rank = _top_k.by_likelihood(np.array([[0.1, 0.2, 0.3, 0.4]]))
    k, zero = np.array([2]), np.zeros(1, np.intp)
    matrix = _top_k.matrices(order, k, 1.5)[0]
    for a in range(4):
        for b in range(4):
            report = replay(lambda y: _top_k.release(np.array([y]), zero, order, rank, k, 1.5, np.random.random), a, b)
            losses = [abs(math.log(matrix[a, j] / matrix[b, j])) for j in (2, 3)]
            assert min(abs(report.epsilon - loss) for loss in losses) < 1e-9


@pytest.mark.parametrize(
    "aggregator, most",
    [
        (pate.GNMax(4.0), math.sqrt(2) / 4 * math.sqrt(30)),
        (pate.LNMax(0.1), None),
        (pate.ConfidentGNMax(20.0, 6.0, 4.0), None),
    ],
    ids=["GNMax", "LNMax", "ConfidentGNMax"],
)
def test_votes_move_by_what_the_aggregator_is_charged_for(aggregator, most):
    report = replay(lambda votes: aggregator.aggregate(votes).labels, VOTES, MOVED)
    assert report.ok and report.moved == pytest.approx(1, abs=1e-6)
    if most is not None:
        assert report.mu == pytest.approx(most)
    two = replay(lambda votes: aggregator.aggregate(votes).labels, VOTES, MOVED + np.array([-1, 1, 0]))
    assert {f.kind for f in two.findings} == {"sensitivity"}
    assert all("pate/aggregators.py:" in f.where for f in two.findings)


def test_a_prior_that_nobody_charged_is_in_the_sum():
    report = replay(lambda y: paid_prior(y, 1.9), Y, OTHER)
    assert report.ok
    report = replay(paid_prior, Y, np.where(np.arange(40) == 7, (Y + 1) % 4, Y), epsilon=0.9)
    (finding,) = report.findings
    assert finding.kind == "epsilon" and "label_dp/_base.py:" in finding.where
    assert "epsilon: " in str(report) and json.loads(json.dumps(report.to_dict()))["findings"]


def noised(y, stddev=1.0, bound=1.0, times=1, size=400, leak=False, count=1, shape=0, order=0):
    rng, outs = np.random.default_rng(), []
    total = np.zeros(size)
    total[0] = y
    for _ in range(count + (order and int(y))):
        noise = rng.normal(size=size + (shape and shape * int(y))) * stddev * times
        value = np.resize(total, size + (shape and shape * int(y)))
        outs += _replay_hook.released([value], [value + noise], [noise], [stddev], bound / stddev)
    return {"out": outs, "seen": y if leak else 0}


@pytest.mark.parametrize(
    "fault, kind",
    [
        ({}, None),
        ({"bound": 0.9}, "sensitivity"),
        ({"times": 0.5}, "noise"),
        ({"times": 0}, "noise"),
        ({"leak": True}, "result"),
        ({"order": 1}, "order"),
        ({"shape": 3}, "public"),
    ],
    ids=lambda value: str(value),
)
def test_what_a_release_may_not_do_has_a_name(fault, kind):
    report = replay(lambda y: noised(y, **fault), 0.0, 1.0, adjacency="zero_out")
    assert {f.kind for f in report.findings} == ({kind} if kind else set()), report
    assert report.mu == pytest.approx(1) or kind in ("order", "public")


@pytest.mark.parametrize(
    "seed, again, added, words",
    [
        (None, False, 0, "release 0 lets out is not the values with their noise"),
        (0, False, 1, "release 0 is the same in both runs: its seed is no secret"),
        (None, True, 1, "release 1 is that of release 0"),
        (None, False, 1, None),
    ],
    ids=["left out", "from the source", "used twice", "sound"],
)
def test_noise_that_is_not_there_or_was_there_before_is_named(seed, again, added, words):
    def mechanism(y):
        rng, outs = np.random.default_rng(seed), []
        noise = rng.normal(size=9)
        for scale in (1.0, 2.0):
            outs += _replay_hook.released([y], [y + added * noise * scale], [noise * scale], [scale], 1 / scale)
            noise = noise if again else rng.normal(size=9)
        return outs

    report = replay(mechanism, np.zeros(9), np.eye(9)[0], adjacency="zero_out")
    assert [(f.kind, words in f.message) for f in report.findings] == ([("noise", True)] if words else []), report


def test_scales_that_hang_on_the_data_are_not_public():
    report = replay(lambda y: noised(y, stddev=1 + y), 0.0, 1.0, adjacency="zero_out")
    assert "noise or denominator" in next(f for f in report.findings if f.kind == "public").message


def test_what_is_not_finite_moves_without_bound():
    report = replay(noised, 0.0, math.nan, adjacency="zero_out")
    assert "sensitivity" in {f.kind for f in report.findings}


@pytest.mark.parametrize("times, ok", [(1, True), (2 / 3, False), (3 / 2, False)])
@pytest.mark.parametrize("parameter", [0.05, 1.0, 3.0])
def test_the_size_of_discrete_laplace_noise_is_judged_by_its_own_law(parameter, times, ok):
    from tfdpfl.label_dp._base import Uniforms

    def mechanism(counts):
        noise = Uniforms(None).discrete_laplace(parameter / times, counts.shape)
        return _replay_hook.released([counts], [counts + noise], [noise], [1 / parameter], 1.0, norm=1)[0]

    report = replay(mechanism, np.zeros(20_000), np.zeros(20_000))
    assert [f.kind for f in report.findings] == ([] if ok else ["noise"])


X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
CLASSES = np.arange(16) % 3
FAR = np.where(np.arange(16)[:, None] == 3, -5 * X, X)  # one example is another


def training(data, *, batch_norm=False, of_size=False, metric=False, between=None, epochs=2, **options):
    """Two epochs of two steps; what is released is the model, and whatever else is asked for."""
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(0)
    x, y = data

    class Smuggler(keras.layers.Layer):
        def build(self, shape):
            self.moving = self.add_weight(name="moving_mean", shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.moving.assign(0.9 * self.moving + 0.1 * tf.reduce_mean(x, 0))
            return x

    layers = [keras.layers.Dense(12, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *([Smuggler()] if batch_norm else []), *layers])
    options = {"l2_norm_clip": 0.1, "noise_multiplier": 1.1, **options}
    if of_size:
        options["expected_batch_size"] = 8 * float(np.mean(np.any(x != 0, 1)))
    model.compile(DPSGD(learning_rate=0.5, **options), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, shuffle=False, batch_size=8, epochs=epochs, verbose=0)
    return [model, history.history["loss"]] if metric else model


def on_keras_2(test):
    """On the other stack the self-audit has these cases and these faults."""
    keras3 = metadata.version("keras") >= "3"
    marks = pytest.mark.slow, pytest.mark.both_stacks, pytest.mark.skipif(keras3, reason="is in test_self_audit.py")
    for mark in marks:
        test = mark(test)
    return test


BLANK = np.where(np.arange(16)[:, None] == 3, 0 * X, X)
OPTIMIZERS = {
    "plain": {},
    "adaptive": {"l2_norm_clip": AdaptiveClip(initial=0.1)},
    "secure": {"secure_noise": True},
    "parts": {"gradient_accumulation_steps": 2},
    "microbatches": {"num_microbatches": 4},
    "tree": {"noise": Tree()},
}


@on_keras_2
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_moves_by_more_than_it_is_charged_for(name):
    report = replay(lambda data: training(data, **OPTIMIZERS[name]), (X, CLASSES), (FAR, CLASSES))
    assert report.ok, report
    assert (0.2 if name == "microbatches" else 0.4) < report.moved <= 1.0001
    assert report.releases == (2 if name == "parts" else 4)
    assert all("optimizers/_fresh_noise.py:" in place for place in report.places)


def no_clip(monkeypatch):
    """The factors of `ClippingPipeline.finish` are those of a clip a million times as high."""
    from tfdpfl.clipping.pipeline import ClippingPipeline

    finish = ClippingPipeline.finish
    monkeypatch.setattr(
        ClippingPipeline, "finish", lambda self, norms, clip, size: finish(self, norms, 1e6 * clip, size)
    )


def no_check(monkeypatch):
    from tfdpfl.optimizers import _privatizer

    monkeypatch.setattr(_privatizer, "check_finished", lambda *args: None)


def half_the_noise(monkeypatch):
    from tfdpfl.noise import Source

    whole = Source.gaussian
    monkeypatch.setattr(Source, "gaussian", lambda self, *how: [n / 2 for n in whole(self, *how)])


def half_the_multiplier(monkeypatch):
    from tfdpfl.optimizers._clips import Clipping

    monkeypatch.setattr(Clipping, "split", lambda self, z, units: (z / 2, None))


@on_keras_2
@pytest.mark.parametrize(
    "fault, options, neighbour, kind, where",
    [
        pytest.param(no_clip, {}, FAR, "sensitivity", "optimizers/_fresh_noise.py:", marks=pytest.mark.both_stacks),
        pytest.param(half_the_noise, {}, FAR, "noise", "optimizers/_fresh_noise.py:", marks=pytest.mark.both_stacks),
        (half_the_multiplier, {}, FAR, "sensitivity", "optimizers/_fresh_noise.py:"),
        (no_check, {"batch_norm": True}, FAR, "result", "(moving_mean)"),
        (None, {"metric": True}, FAR, "result", "result[1]"),
        (None, {"of_size": True}, BLANK, "public", "optimizers/_fresh_noise.py:"),
    ],
    ids=["clip dropped", "noise halved", "charged for twice the noise", "BatchNorm smuggled in", "metric leak",
         "denominator by data-set size"],
)  # fmt: skip
def test_a_planted_fault_in_training_is_caught_by_name(monkeypatch, fault, options, neighbour, kind, where):
    if fault:
        fault(monkeypatch)
    report = replay(lambda data: training(data, **options), (X, CLASSES), (neighbour, CLASSES))
    assert {f.kind for f in report.findings} == {kind}, report
    assert any(where in f.where for f in report.findings)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: replay(lambda y: y, 0, 1), "saw no release"),
        (lambda: replay(lambda y: np.random.random(3) + 0 * noised(y)["out"][0][0], 0, 1), "does two different things"),
        (lambda: replay(noised, 0, 1, adjacency="near"), "adjacency must be one of"),
        (lambda: replay(noised, 0, 1, epsilon=-1), "epsilon must be"),
        (lambda: replay(lambda y: [noised(y), object()], 0, 1), "must return arrays"),
        (lambda: replay(lambda y: replay(noised, 0, 1).mu, 0, 1), "running already"),
    ],
)
def test_bad_input_is_named_with_its_mend(call, words):
    with pytest.raises(ValueError, match=words):
        call()
    assert _replay_hook.tape is None


def test_a_federation_is_replayed_with_pythons_random_seeded():
    """Flower draws the clients of a round with it."""
    pytest.importorskip("flwr")
    import random

    import audit_cases as cases
    from flower_fakes import moved
    from flwr.serverapp.strategy import FedAvg

    from tfdpfl.flower import DifferentialPrivacyFixedClipping

    train = moved(lambda number: np.random.default_rng(number).normal(size=10) * 5)
    how = dict(noise_multiplier=1.0, l2_norm_clip=1.0, clients_per_round=2, delta=1e-3)

    def run(far):
        return cases.federation(DifferentialPrivacyFixedClipping(FedAvg(fraction_train=0.5), **how), far, 6, train)[0]

    def seeded(far):
        random.seed(0)
        return run(far)

    assert replay(seeded, 1.0, None).ok
    with pytest.raises(ValueError, match="does two different things"):
        replay(run, 1.0, None)


def test_a_place_is_told_from_the_packages_own_folder_in_a_clone_of_any_name(monkeypatch):
    """`git clone` makes a folder tfdpfl, in which the package's folder has the same name."""
    clone = Path("/home/me/tfdpfl")
    module = sys.modules[replay.__module__]
    monkeypatch.setattr(module, "_ROOT", clone)
    assert module._place(f"{clone}/tfdpfl/noise/grid.py:7") == "tfdpfl/noise/grid.py:7"
    assert module._place(f"{clone}/examples/digits.py:7") == "examples/digits.py:7"
