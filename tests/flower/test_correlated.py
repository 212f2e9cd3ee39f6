"""Correlated noise over a strategy's rounds: its covariance, what one client moves, its price, what a crash leaves."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, flat, model, moved, reply
from flwr.serverapp import strategy as flower

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.federated import NoisedMetrics
from tfdpfl.flower import DifferentialPrivacyAdaptiveClipping as Adaptive
from tfdpfl.flower import DifferentialPrivacyFixedClipping as Fixed
from tfdpfl.noise import BLT, Banded, BandedInverse, Tree

ROUNDS, CLIENTS, APART, MOST, Z, CLIP = 6, 7, 2, 2, 1.3, 0.7
LIMITS = dict(min_separation=APART, max_participations=MOST)
KINDS = {
    "tree": Tree(**LIMITS),
    "restarted tree": Tree(restart_every=4, **LIMITS),
    "banded": Banded(bands=2, coefficients=(1.0, 0.6), **LIMITS),
    "inverse": BandedInverse(bands=3, coefficients=(1.0, -0.5, -0.2), num_steps=ROUNDS, **LIMITS),
    "blt": BLT(buffers=2, decay=(0.9, 0.4), scale=(0.3, 0.2), num_steps=ROUNDS, **LIMITS),
}


def c_of(kind):
    """C, written down from the papers."""
    c = np.zeros((ROUNDS, ROUNDS))
    if kind == "inverse":
        return np.linalg.inv(np.eye(ROUNDS) - 0.5 * np.eye(ROUNDS, k=-1) - 0.2 * np.eye(ROUNDS, k=-2))
    for t, s in itertools.product(range(ROUNDS), repeat=2):
        if kind == "banded":
            c[t, s] = {0: 1.0, 1: 0.6}.get(t - s, 0.0)
        elif kind == "blt":
            c[t, s] = 1.0 if t == s else 0.3 * 0.9 ** (t - s - 1) + 0.2 * 0.4 ** (t - s - 1) if t > s else 0.0
        else:
            place = t % 4 + 1 if kind == "restarted tree" else t + 1
            c[t, s] = t - (place & -place) < s <= t  # the node that is whole after round t holds so many of the last
    return c


def worst(kind):
    """The largest norm of C u over all rounds that one client may be in."""
    sets = (rounds for k in range(MOST + 1) for rounds in itertools.combinations(range(ROUNDS), k))
    fits = (r for r in sets if all(b - a >= APART for a, b in itertools.pairwise(r)))
    return max(np.linalg.norm(c_of(kind)[:, list(rounds)].sum(1)) for rounds in fits)


def unit_of(kind):
    """The standard deviation of Z's entries, by noise multiplier and clip."""
    return worst(kind) if kind in ("blt", "inverse") else np.sqrt(MOST) * np.hypot(1, 0.6) if kind == "banded" else 1.0


def of(kind, **arguments):
    given = dict(
        noise_multiplier=Z, l2_norm_clip=CLIP, delta=1e-5, clients_per_round=2, noise=KINDS[kind], accountant="rdp"
    )
    return Fixed(flower.FedAvg(min_available_nodes=1), **{**given, **arguments})


def same(message, number):
    return reply(message, arrays_in(message))


class Killed(BaseException):
    """Stands for SIGKILL: nothing may handle it."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_that_of_the_matrix_over_restarts_and_lost_rounds(kind, tmp_path, monkeypatch):
    start = model(w=np.zeros((100, 200), np.float32))
    models, grid, charge = [np.zeros(20004)], FakeGrid(CLIENTS, same), tfdpfl.flower.journal.Journal.charge
    for number in range(1, ROUNDS + 1):
        if number % 2 == 0:  # dies with its noise drawn and kept, but not charged

            def killed(self, replied):
                raise Killed

            monkeypatch.setattr(tfdpfl.flower.journal.Journal, "charge", killed)
            strategy = of(kind, ledger_path=tmp_path / "ledger")
            with pytest.raises(Killed):
                strategy.start(grid, start, num_rounds=number)
            strategy._journal.close()
            monkeypatch.setattr(tfdpfl.flower.journal.Journal, "charge", charge)
        strategy = of(kind, ledger_path=tmp_path / "ledger")
        if number == 3:  # the same strategy goes on after its disk was full

            def full(self, replied):
                raise OSError("no space left")

            monkeypatch.setattr(tfdpfl.flower.journal.Journal, "charge", full)
            strategy.start(grid, start, num_rounds=number)
            assert strategy.rounds_charged == number - 1
            monkeypatch.setattr(tfdpfl.flower.journal.Journal, "charge", charge)
        models.append(flat(strategy.start(grid, start, num_rounds=number).arrays))
        strategy._journal.close()
    assert strategy.rounds_charged == ROUNDS
    rows = np.diff(models, axis=0) * 2  # the mean is over 2
    base = c_of(kind) @ rows
    unit = unit_of(kind)
    deviations = base.std(axis=1) / (Z * CLIP * unit)
    assert np.abs(deviations - 1).max() < 0.04  # 8 standard errors; 2/3 and 3/2 are far outside
    assert np.abs(np.corrcoef(base) - np.eye(ROUNDS)).max() < 0.05
    assert np.abs(np.corrcoef(rows) - np.eye(ROUNDS)).max() > 0.2  # and the rows are not independent
    kept = sorted(path.name for path in tmp_path.glob("ledger.noise-*"))
    assert kept == [f"ledger.noise-{n}.npz" for n in (ROUNDS - 1, ROUNDS)]
    assert all((path.stat().st_mode & 0o777) == 0o600 for path in tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_moves_what_is_priced_and_keeps_to_its_limits(kind):
    ends = []
    for there in (True, False):
        strategy, means = of(kind, noise_multiplier=0.0, seed=3), [np.zeros(10)]
        update = moved(lambda number: 100.0 * np.eye(10)[number])
        answer = lambda message, number, u=update, there=there: u(message, number) if number or there else None
        grid = FakeGrid(CLIENTS, answer)
        strategy.start(grid, model(), num_rounds=ROUNDS, evaluate_fn=lambda n, a, m=means: m.append(flat(a)))
        ends.append(2 * np.diff(means[1:], axis=0))
        rounds = [i for i, cohort in enumerate(strategy.cohorts) if "101" in cohort]
    assert len(rounds) == MOST and min(np.diff(rounds)) >= APART  # of 12 places in all, 7 clients with 2 each
    moved_by = np.linalg.norm(c_of(kind) @ (ends[0] - ends[1])) / CLIP
    assert 0.9 < moved_by <= worst(kind) * (1 + 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_price_is_that_of_the_rounds_that_ran(kind):
    strategy = of(kind)
    strategy.start(FakeGrid(CLIENTS, same), model(), num_rounds=ROUNDS)
    unit = unit_of(kind)
    exact = dp_event.GaussianDpEvent(Z * unit / worst(kind))
    epsilon = tfdpfl.accounting.price(exact, 1e-5, "rdp", "zero_out").epsilon
    # Of a tree every node counts there, of the matrix those that some sum needs: no more.
    assert epsilon * (1 - 1e-6) <= strategy.epsilon <= epsilon * 1.02
    if kind == "tree":  # metrics are paid beside it, for the rounds that a client may be in
        noised = NoisedMetrics(noise_multiplier=5.0, bound={"loss": 1.0})
        beside = of(kind, train_metrics=noised)
        beside.start(FakeGrid(CLIENTS, same), model(), num_rounds=ROUNDS)
        both = dp_event.GaussianDpEvent(((worst(kind) / Z) ** 2 + MOST / 25) ** -0.5)
        assert beside.epsilon >= tfdpfl.accounting.price(both, 1e-5, "rdp", "zero_out").epsilon * (1 - 1e-6)
    limited = of(kind, target_epsilon=strategy.epsilon * 1.001)
    limited.start(FakeGrid(CLIENTS, same), model(), num_rounds=ROUNDS)
    assert limited.rounds_charged == ROUNDS


def test_a_kept_noise_that_is_gone_or_cannot_be_kept_releases_nothing(tmp_path, monkeypatch, caplog):
    strategy, grid = of("banded", ledger_path=tmp_path / "ledger"), FakeGrid(CLIENTS, same)
    strategy.start(grid, model(), num_rounds=1)
    real = os.replace

    def full(source, target):
        if "noise" in str(target):
            raise OSError("no space left")
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert strategy.start(grid, model(), num_rounds=2) and strategy.rounds_charged == 1
    strategy._journal.close()
    (tmp_path / "ledger.noise-1.npz").unlink()
    strategy = of("banded", ledger_path=tmp_path / "ledger")
    with pytest.raises(PrivacyError, match="correlated noise of the first 1 rounds"):
        strategy.start(grid, model(), num_rounds=2)
    assert strategy.rounds_charged == 1
    strategy._journal.close()
    for other in (
        dict(noise=Banded(bands=2, coefficients=(1.0, 0.5), **LIMITS)),
        dict(train_metrics=NoisedMetrics(noise_multiplier=5.0, bound={"loss": 1.0})),
    ):
        with pytest.raises(PrivacyError, match="another"):
            of("banded", **other, ledger_path=tmp_path / "ledger")


def test_what_has_no_price_is_refused():
    for arguments, message in (
        (dict(noise=3), "must be tfdpfl.noise.Tree"),
        (dict(sampling_rate=0.5, clients_per_round=None), "no price for a coin"),
    ):
        with pytest.raises(ValueError, match=message):
            of("tree", **arguments)
    with pytest.raises(ValueError, match="fixed clip"):
        Adaptive(flower.FedAvg(), noise_multiplier=1.0, clients_per_round=2, delta=1e-5, noise=Tree())


@pytest.mark.slow
def test_a_server_that_is_killed_at_any_time_has_charged_what_it_showed_and_repeats_no_noise(tmp_path):
    """With both kinds of noise in one process, which imports TensorFlow once."""
    program = os.path.join(os.path.dirname(__file__), "flower_killed.py")
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(tfdpfl.__file__))}
    done = subprocess.run([sys.executable, program, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for kind, got in json.loads(done.stdout.split("RESULT ")[1]).items():
        assert got["kills"] >= 3 and 5 < got["released"] <= got["charged"]
        lives = {}
        for path in sorted((tmp_path / kind).glob("shown-*")):
            lives.setdefault(path.stem.split("-")[1], []).append(np.load(path))
        rows = np.concatenate([np.diff(models, axis=0) for models in lives.values() if len(models) > 1])
        between = np.corrcoef(rows) - np.eye(len(rows))
        # Neighbours of these bands: -0.6; the same noise: 1.
        assert np.abs(between).max() < {"independent": 0.15, "banded": 0.7}[kind]
        assert np.abs(rows.std(axis=1) - rows.std()).max() < 0.25 * rows.std()
