"""A person who waits is told why; a log is not."""

import sys
import time

import pytest

from tfdpfl import _waiting
from tfdpfl.accounting.calibration import (
    compute_batch_size,
    compute_epsilon,
    compute_noise_multiplier,
    compute_num_steps,
)


@pytest.mark.parametrize("terminal, patience, shown", [(True, 0.01, True), (True, 60, False), (False, 0.01, False)])
def test_only_a_long_wait_at_a_terminal_is_explained(terminal, patience, shown, monkeypatch, capsys):
    monkeypatch.setattr(_waiting, "_PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with _waiting.explain_wait("computing epsilon"), _waiting.explain_wait("a part of it, which is silent"):
        until = time.monotonic() + (10 if shown else 0.1)
        error = ""
        while not error and time.monotonic() < until:
            time.sleep(0.01)
            error += capsys.readouterr().err
    assert error == ("tfdpfl: computing epsilon ...\n" if shown else "")


@pytest.mark.parametrize(
    ("call", "known", "said"),
    [
        (compute_epsilon, {"noise_multiplier": 2.0, "batch_size": 10, "num_steps": 3}, "computing epsilon"),
        (
            compute_noise_multiplier,
            {"target_epsilon": 1.0, "batch_size": 10, "num_steps": 3},
            "searching for the noise",
        ),
        (
            compute_num_steps,
            {"target_epsilon": 1.0, "batch_size": 10, "noise_multiplier": 2.0},
            "searching for the num",
        ),
        (
            compute_batch_size,
            {"target_epsilon": 1.0, "num_steps": 3, "noise_multiplier": 2.0},
            "searching for the batch",
        ),
    ],
)
def test_every_search_explains_itself(call, known, said, monkeypatch, capsys):
    """The clock is set to the last moment: what is started is printed."""
    monkeypatch.setattr(_waiting.threading, "Timer", Due)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    call(num_examples=100, delta=1e-3, accountant="rdp", **known)
    assert f"tfdpfl: {said}" in capsys.readouterr().err


class Due:
    """A timer of no time."""

    def __init__(self, interval, function):
        self.start = function

    def cancel(self):
        pass
