"""A journal holds each round before it is shown, is of one training and one process, and goes on."""

import os

import numpy as np
import pytest

pytest.importorskip("flwr")
import errno
import fcntl

from flower_fakes import FakeGrid, flat, model, moved
from flwr.serverapp import strategy as flower
from strategy_cases import CLIENTS, fixed, one_round, same, updates

from tfdpfl import PrivacyError
from tfdpfl.flower.journal import Journal


def test_a_forked_server_does_not_write_over_its_parents_rounds(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "ledger", {})
    journal.begin(["1"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(PrivacyError, match="forked"):
            journal.charge(["1"])
    journal.charge(["1"])
    journal.close()
    again = Journal(tmp_path / "ledger", {})
    assert again.charged == [["1"]]
    again.close()


def test_a_ledger_that_is_older_than_its_model_is_refused(tmp_path):
    path = tmp_path / "ledger"
    for rounds in (2, 5):
        strategy = fixed(noise_multiplier=1.0, ledger_path=path)
        one_round(strategy, moved(updates), rounds=rounds)
        strategy._journal.close()
        if rounds == 2:
            backup = path.read_bytes()
    newest = path.read_bytes()
    for held in (newest, backup):
        path.write_bytes(held)
        strategy = fixed(noise_multiplier=1.0, ledger_path=path)
        if held is newest:
            assert len(one_round(strategy, moved(updates), rounds=6)[1].sent) == 2  # one round, and its evaluation
        else:
            with pytest.raises(PrivacyError, match=r"came after 6 charged rounds, but ledger_path=.* has 2"):
                one_round(strategy, moved(updates), rounds=6)
        strategy._journal.close()


def test_a_round_that_could_not_begin_makes_no_ledger_older_than_its_model(tmp_path, monkeypatch):
    """Flower counts a round that a full disk kept from beginning, and the ledger does not."""
    strategy = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")

    def full(cohort):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(strategy._journal, "begin", full)
        one_round(strategy, moved(updates))
    with monkeypatch.context() as patch:
        real, rounds = strategy._journal.begin, iter([full])
        patch.setattr(strategy._journal, "begin", lambda cohort: next(rounds, real)(cohort))
        one_round(strategy, moved(updates), rounds=2)
    strategy._journal.close()
    again = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")
    one_round(again, moved(updates), rounds=3)
    assert again.rounds_charged == 2


def test_an_empty_ledger_or_a_damaged_model_is_named(tmp_path):
    path = tmp_path / "ledger"
    path.touch()
    with pytest.raises(ValueError, match=r"holds 0 bytes and no whole line.*Restore"):
        fixed(noise_multiplier=1.0, ledger_path=path)
    path.unlink()
    strategy = fixed(noise_multiplier=1.0, ledger_path=path)
    one_round(strategy, moved(updates), rounds=3)
    strategy._journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[5:]))  # a round is missing in the middle
    with pytest.raises(ValueError, match="damaged"):
        fixed(noise_multiplier=1.0, ledger_path=path)
    path.write_bytes(b"".join(lines))
    for held in (b"", b"PK\x03\x04 no archive", b"text"):
        (tmp_path / "ledger.npz").write_bytes(held)
        strategy = fixed(noise_multiplier=1.0, ledger_path=path)
        with pytest.raises(ValueError, match=r"ledger\.npz cannot be read .*Restore"):
            strategy.start(FakeGrid(CLIENTS, same), model(), num_rounds=4)
        strategy._journal.close()


def test_a_file_system_without_locks_is_not_a_second_server(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(ValueError, match=r"ledger_path=.*cannot lock files \(No locks available\).*local disk"):
        fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")


def test_a_ledger_is_of_one_training(tmp_path):
    path = tmp_path / "ledger"
    first = fixed(noise_multiplier=1.0, ledger_path=path)
    with pytest.raises(ValueError, match="in use"):
        fixed(noise_multiplier=1.0, ledger_path=path)
    one_round(first, moved(updates))
    first._journal.close()
    for other in (
        dict(noise_multiplier=2.0),
        dict(noise_multiplier=1.0, l2_norm_clip=2.0),
        dict(noise_multiplier=1.0, sampling_rate=0.5),
    ):
        with pytest.raises(PrivacyError, match="another"):
            fixed(ledger_path=path, **other)
    whole = path.read_bytes()
    for cut in range(len(whole) - whole[:-1].rfind(b"\n") - 1):  # torn within the last line
        path.write_bytes(whole[: len(whole) - cut])
        torn = fixed(noise_multiplier=1.0, ledger_path=path)
        assert torn.rounds_charged == (1 if cut == 0 else 0)
        torn._journal.close()
    path.write_bytes(whole + b'{"unknown": 1}\n')
    with pytest.raises(ValueError, match="damaged"):
        fixed(noise_multiplier=1.0, ledger_path=path)


@pytest.mark.parametrize("when", ["begin", "charge"])
def test_a_full_disk_releases_nothing(tmp_path, monkeypatch, when, caplog):
    strategy = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")
    lines, full = strategy._journal._file, []
    real = lines._file

    class Full:
        """Half of what is written gets there."""

        def write(self, text):
            if when.encode() in text and full:
                return real.write(text[: len(text) // 2])
            return real.write(text)

        def __getattr__(self, name):
            return getattr(real, name)

    lines._file = Full()
    full.append(True)
    result, grid = one_round(strategy, moved(updates), rounds=2)
    assert strategy.rounds_charged == 0 and flat(result.arrays) == pytest.approx(np.zeros(10))
    assert "cannot be written" in caplog.text
    assert (grid.sent[0] == []) == (when == "begin")
    full.clear()
    strategy.start(grid, model(), num_rounds=1)
    assert strategy.rounds_charged == 1
    strategy._journal.close()
    again = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")
    assert again.rounds_charged == 1


def test_what_a_failed_write_has_left_spoils_no_shorter_line(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    journal = Journal(tmp_path / "ledger", {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError):
            journal.begin([str(node) for node in range(100)])
    journal.begin([])
    journal.charge([])
    journal.close()
    again = Journal(tmp_path / "ledger", {})
    assert again.charged == [[]] and again.begun is None
    again.close()


def test_a_training_goes_on_where_it_was(tmp_path):
    ends = []
    for parts in ([4], [2, 4]):
        path = tmp_path / f"{len(parts)}.jsonl"
        for rounds in parts:
            strategy = fixed(flower.FedAdam(), ledger_path=path)
            result = strategy.start(FakeGrid(CLIENTS, moved(updates)), model(), num_rounds=rounds)
            strategy._journal.close()
        ends.append(flat(result.arrays))
        assert strategy.rounds_charged == 4 and max(result.train_metrics_clientapp) == 4
    np.testing.assert_allclose(*ends, rtol=1e-6)
    assert (path.stat().st_mode & 0o777) == 0o600
    done = fixed(flower.FedAdam(), ledger_path=path)
    again = done.start(FakeGrid(CLIENTS, moved(updates)), model(), num_rounds=4)  # nothing is left to do
    np.testing.assert_allclose(flat(again.arrays), ends[0], rtol=1e-6)
    assert done.rounds_charged == 4
    done._journal.close()
    with pytest.raises(ValueError, match="saved model"):
        fixed(flower.FedAdam(), ledger_path=path).start(FakeGrid(1, same), model(w=np.ones(2, np.float32)))
