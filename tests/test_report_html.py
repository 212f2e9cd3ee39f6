"""A project's HTML page is whole, shows every figure, escapes what it is given and loads nothing."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from report_cases import DELTA, gaussian, labels

from tfdpfl.accounting.report import rounded_up
from tfdpfl.audit import report

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Refuses a page that is not well-formed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


EVIL = '</td><script>alert(1)</script><img src="http://example.org/x"> $x_{$ & "q"'


def project():
    parts = {EVIL: gaussian(3.0), "_b": gaussian(4.0, steps=2), "labels": labels(), "none": gaussian(0.0)}
    return report(parts, delta=DELTA, title=EVIL, audits={EVIL: 0.5}, utility={EVIL: 0.97})


def figures(saved):
    """Every ε, ρ and μ of the JSON."""
    for name, value in saved.items() if isinstance(saved, dict) else enumerate(saved):
        if isinstance(value, dict | list):
            yield from figures(value)
        elif name in ("epsilon", "zcdp_rho", "gdp_mu", "pld", "rdp", "claimed") and value is not None:
            yield value


def check(text, saved):
    """The text of a page has all figures, and the names as they are."""
    shown = list(figures(saved))
    assert len(shown) > 10
    for value in shown:
        assert rounded_up(math.inf if value == "inf" else value) in text
    assert EVIL in text and "0.97" in text and "0.5000" in text
    assert all(note in text for part in saved["parts"] for note in [*part["notes"], *part["mechanisms"]])


def test_the_page_is_whole_and_asks_for_nothing(tmp_path):
    made = project()
    page = made.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("utf-8") == page
    read = Page(page)
    assert read.tags.count("img") == 1 and "script" not in read.tags
    assert all(link.startswith("data:image/png;base64,") for link in read.links)
    assert not re.search(r"https?://|//\w", page.replace("http://example.org/x", "").split("<body>")[0])
    saved = json.loads(made.to_json(tmp_path / "page.json"), parse_constant=pytest.fail)
    assert json.loads((tmp_path / "page.json").read_text("utf-8")) == saved
    check("\n".join(read.text), saved)
    assert "inf" in figures(saved) and any("infinite" in warning for warning in saved["warnings"])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_a_browser_shows_it(tmp_path):
    made = project()
    made.to_html(tmp_path / "page.html")
    how = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    run = subprocess.run(["chromium", *how, (tmp_path / "page.html").as_uri()], capture_output=True, text=True,
                         check=True)  # fmt: skip
    read = Page(run.stdout)
    assert read.tags.count("img") == 1 and "script" not in read.tags
    check("\n".join(read.text), made.to_dict())
