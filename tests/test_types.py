"""Every name for a kind of value is used: one that nothing uses explains nothing."""

import re
from pathlib import Path

from tfdpfl import _types

PACKAGE = Path(__file__).parent.parent / "tfdpfl"


def test_every_name_of_a_kind_of_value_is_used_by_some_module():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for names in re.findall(r"(?m)^from tfdpfl\._types import (\([^)]*\)|.*)$", path.read_text("utf-8")):
            used |= set(re.findall(r"\w+", names))
    assert used == set(_types.__all__)
