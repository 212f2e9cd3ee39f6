"""Where Flower is not installed."""

import sys

import pytest


def test_a_missing_flower_gives_the_command_that_installs_it(monkeypatch):
    for name in [n for n in sys.modules if n.startswith(("flwr", "tfdpfl.flower"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    import tfdpfl.flower

    with pytest.raises(ImportError, match=r'pip install "tfdpfl\[flower\]"'):
        tfdpfl.flower.DifferentialPrivacyFixedClipping  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute"):
        tfdpfl.flower.nothing  # noqa: B018
