"""A person who waits is told why; a log is not."""

import sys
import time

import pytest

from tfdpfl import _waiting


@pytest.mark.parametrize("terminal, patience, shown", [(True, 0.01, True), (True, 60, False), (False, 0.01, False)])
def test_only_a_long_wait_at_a_terminal_is_explained(terminal, patience, shown, monkeypatch, capsys):
    monkeypatch.setattr(_waiting, "_PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with _waiting.explain_wait("computing epsilon"):
        until = time.monotonic() + (10 if shown else 0.1)
        error = ""
        while not error and time.monotonic() < until:
            time.sleep(0.01)
            error += capsys.readouterr().err
    assert error == ("tfdpfl: computing epsilon ...\n" if shown else "")
