"""The version is the one that the changelog and the citation describe."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_changelog_describes_this_version():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"(?ms)^## (\d+\.\d+\.\d+)[^\n]*\n(.*?)^## ", text)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "tfdpfl/_version.py").read_text("utf-8"))[1]
    assert newest[1] == version and f"version: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    parts = re.findall(r"^### (.+)$", newest[2], re.M)
    assert {"New", "Fixed: ε that was too small"} <= {*parts} and any(part.startswith("Move from ") for part in parts)
