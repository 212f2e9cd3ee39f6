"""A missing or wrong TFF is refused with the command that installs the right one."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from tfdpfl import federated

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", [None, "0.19.1"])
def test_a_missing_or_wrong_tff_names_the_command_that_installs_it(monkeypatch, version):
    fake = None
    if version is not None:
        fake = types.ModuleType("tensorflow_federated")
        fake.__version__ = version
    monkeypatch.setitem(sys.modules, "tensorflow_federated", fake)
    monkeypatch.delitem(sys.modules, "tfdpfl.federated._tff", raising=False)
    with pytest.raises(
        ImportError, match=r"0\.87.*pip install 'tfdpfl\[federated\]' && pip install --no-deps"
    ) as refused:
        importlib.import_module("tfdpfl.federated._tff")
    # requirements/try_federated.py tries this command, and those of the page, in empty environments.
    _, _, without_resolver = str(refused.value).rpartition(" && ")
    for page in ("docs/federated.md", "docs/install.md"):
        assert without_resolver in (ROOT / page).read_text("utf-8")


def test_what_the_page_says_stays_without_tff_is_there_on_both_stacks():
    page = (ROOT / "docs" / "federated.md").read_text()
    stays = re.search(r"These names need no TFF, and stay:(.*?)\. So", page, re.S)[1]
    names = re.findall(r"`(\w+)`", stays)
    assert len(names) > 10 and all(hasattr(federated, name) for name in names)
    assert {"ClientLevel", "PoissonClientSampler"} <= set(dir(federated))
