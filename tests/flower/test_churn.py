"""Nodes come, go and get new ids, and the server dies between any two writes: nothing is under-counted or stopped."""

import collections
import logging
import os
import random

import numpy as np
import pytest

pytest.importorskip("flwr")
from commands import run
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, model, reply
from flwr.serverapp import strategy as flower
from strategy_cases import limited

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.errors import PrivacyError
from tfdpfl.flower import DifferentialPrivacyFixedClipping

RATE, HOSPITALS = 0.2, 30


class Killed(BaseException):
    """As SIGKILL: nothing of this package may catch it."""


class Disk:
    """A machine that stops before or after any write, once in ``every`` of a kind. Unsynced lines may be torn."""

    def __init__(self, monkeypatch, every):
        self.chance, self.every, self.kills, self.writes = random.Random(7), every, {}, collections.Counter()
        self.replace = os.replace  # a real sync would only cost time: this disk loses nothing by itself
        monkeypatch.setattr(os, "fsync", self.sync)
        monkeypatch.setattr(os, "replace", self.rename)

    def die(self, where):
        self.writes[where] += 1
        if self.writes[where] % self.every == 0:
            self.kills[where] = self.kills.get(where, 0) + 1
            raise Killed(where)

    def sync(self, descriptor):
        try:
            self.die("before a sync")
        except Killed:
            size = os.fstat(descriptor).st_size
            if os.access(f"/proc/self/fd/{descriptor}", os.W_OK) and self.chance.random() < 0.5 and size > 9:
                os.ftruncate(descriptor, size - self.chance.randrange(1, 9))
            raise
        self.die("after a sync")

    def rename(self, old, new):
        self.die("before a file is replaced")
        self.replace(old, new)
        self.die("after a file is replaced")


class Consortium(FakeGrid):
    """Hospitals that are there 70 % of the time, are away for a day, and get another node id when they install anew."""

    def __init__(self, chance):
        super().__init__(0, self.train)
        self.chance, self.ids, self.away, self.given = chance, {}, collections.Counter(), 100

    def get_node_ids(self):
        for hospital in range(HOSPITALS):
            if hospital not in self.ids or self.chance.random() < 0.01:  # joins, or installs anew
                self.given += 1
                self.ids[hospital] = self.given
            if self.chance.random() < 0.005:
                self.away[hospital] = 40
            self.away[hospital] -= 1
        return [n for h, n in self.ids.items() if self.away[h] <= 0 and self.chance.random() < 0.7]

    def train(self, message, number):
        if self.chance.random() < 0.1:
            return None  # drops out within the round
        return reply(message, {name: value + 0.01 for name, value in arrays_in(message).items()})


def price(rounds):
    event = dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(1.0))
    return PrivacyLedger().add(event, rounds, adjacency="zero_out").epsilon(1e-5, "rdp")


def run_with_churn(path, monkeypatch, rounds, every, **how):
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    chance = random.Random(7)
    disk, grid, released, lives = Disk(monkeypatch, every), Consortium(chance), [], 0
    while True:
        lives += 1
        strategy = None
        try:
            strategy = DifferentialPrivacyFixedClipping(
                flower.FedAvg(min_available_nodes=0, fraction_evaluate=0.0), noise_multiplier=1.0, l2_norm_clip=1.0,
                sampling_rate=RATE, population=HOSPITALS, delta=1e-5, accountant="rdp", ledger_path=path, **how,
            )  # fmt: skip
            assert strategy.rounds_charged >= len(released), "a model was seen that is not charged"
            assert strategy.epsilon >= 0
            first = []

            def see(number, arrays, first=first, life=lives, strategy=strategy):
                if first:
                    released.append((life, number))
                    assert strategy.rounds_charged >= len(released)
                first.append(number)

            result = strategy.start(grid, model(), num_rounds=rounds, evaluate_fn=see)
            break
        except Killed:
            pass
        finally:
            if strategy is not None:
                strategy._journal.close()
    return strategy, result, released, disk, lives


def check(strategy, result, released, disk, rounds):
    assert len(disk.kills) == 4, "each kind of write was interrupted"
    assert strategy.stopped_by is None and strategy.rounds_charged >= max(rounds, len(released))
    assert strategy.epsilon == pytest.approx(price(strategy.rounds_charged), rel=1e-9)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    cohorts = [len(cohort) for cohort in strategy.cohorts]
    assert 0.5 < np.mean(cohorts) / (RATE * 0.6 * HOSPITALS) < 1.5


def test_churn_and_a_server_that_dies_at_any_write(tmp_path, monkeypatch):
    strategy, result, released, disk, lives = run_with_churn(tmp_path / "ledger", monkeypatch, 40, 17)
    check(strategy, result, released, disk, 40)


@pytest.mark.slow
def test_500_rounds_of_churn(tmp_path, monkeypatch):
    strategy, result, released, disk, lives = run_with_churn(tmp_path / "ledger", monkeypatch, 500, 67)
    check(strategy, result, released, disk, 500)
    assert lives > 20


def test_a_ledger_and_a_model_of_different_backups_lose_no_round(tmp_path):
    path, saved = tmp_path / "ledger", tmp_path / "ledger.npz"
    grid = FakeGrid(2, lambda message, number: reply(message, arrays_in(message)))

    def go_on(rounds):
        strategy = limited(path, None, max_participations=None)
        try:
            strategy.start(grid, model(), num_rounds=rounds)
        finally:
            strategy._journal.close()
        return strategy

    go_on(2)
    old_ledger, old_model = path.read_bytes(), saved.read_bytes()
    go_on(4)
    new_model = saved.read_bytes()
    saved.write_bytes(old_model)
    assert go_on(4).rounds_charged == 6 and "ok (journal, 6 rounds" in run("verify", path)  # rounds 3 and 4 twice
    path.write_bytes(old_ledger)
    assert "came after 6 charged rounds" in run("verify", path, code=1)
    with pytest.raises(PrivacyError, match="came after 6"):
        go_on(4)
    saved.write_bytes(old_model)
    go_on(4)
    saved.write_bytes(new_model)  # of as many rounds, but of others
    assert "lacks lines that it had when the model next to it was saved" in run("verify", path, code=1)
    with pytest.raises(PrivacyError, match="lacks lines that it had when the model next to it was saved"):
        go_on(4)
