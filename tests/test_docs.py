"""The README and the pages say what is there: their snippets run and print what the pages show, their links lead
somewhere, each page is found."""

import ast
import contextlib
import doctest
import importlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if not {"_build", "_pages"} & {*p.parts})]
NEEDS_TFF = {"docs/federated.md"}
NEEDS_FLOWER = {
    *(f"docs/flower{part}.md" for part in ("", "-clients", "-operations", "-recipes")),
    *("docs/tutorial-federation.md", "docs/tutorial-hospitals.md"),
}
NEEDS_KERAS3 = {"docs/tutorial-fine-tuning.md"}
DIFFERS = NEEDS_TFF | {"README.md", "docs/training.md"}  # between Keras 2 and 3

FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def snippets(page):
    """(line, kind, source, output) of each block of Python or of commands.

    Of Python the output is the `text` block right after it, None where there is none; a block that begins with the
    name of a file is saved, not run. A `console` block has its command after a `$` and the output below.
    """
    text = page.read_text("utf-8")
    blocks = [*FENCE.finditer(text), None]
    for block, after in itertools.pairwise(blocks):
        line = text[: block.start(2)].count("\n")
        if block[1] == "python":
            kind = "file" if re.match(r"# \w+\.py\n", block[2]) else "python"
            follows = after and after[1] == "text" and not text[block.end() : after.start()].strip()
            yield line, kind, block[2], after[2] if follows else None
        elif block[1] == "console":
            command, _, output = block[2].removeprefix("$ ").partition("\n")
            yield line, "console", command, output


def on_screen(text):
    """What a terminal leaves of a text: no colours, and the last state of each progress bar."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "\b").splitlines()
    return "".join(re.split("\b+", line)[-1].rstrip() + "\n" for line in lines)


def prose(page):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text("utf-8")))


def anchors(page):
    """As GitHub and MyST make them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_readme_has_its_two_commands():
    section = (ROOT / "README.md").read_text("utf-8").split("## Two commands")[1].split("\n## ")[0]
    assert re.findall(r"^    (make \S+)", section, re.M) == ["make demo", "make test"]
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)[1].split()
    assert {"demo", "test", "docs"} <= set(targets)


def test_the_pages_show_the_figures_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    step = importlib.import_module("step")
    results = [step.Result(**r) for r in json.loads((ROOT / "benchmarks/results/step.json").read_text())["results"]]
    pages = step.pages(results)
    assert len(pages) == 4 and all(re.search("<!-- (step 256|means|range) -->", text) for text in pages.values())
    for path, text in pages.items():
        assert text == path.read_text("utf-8"), "python benchmarks/step.py --pages brings them up to date"
    results[0].time_ratio = results[1].time_ratio = None
    assert step.pages(results) != pages


def test_pages_and_docstrings_are_written_in_short_sentences(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    sentences = importlib.import_module("sentences")
    docstrings = [sentence for path in sentences.groups()["docstrings"] for sentence in sentences.sentences_of(path)]
    assert len(docstrings) > 3000 and sentences.figures(docstrings)["longer than 25"] < 0.04
    found = [sentence for page in PAGES for sentence in sentences.sentences_of(page)]
    measured = sentences.figures(found)
    assert len(found) > 1000 and measured["median words"] <= 14 and measured["longer than 25"] < 0.05
    assert measured["begin with what, who, where, of which"] <= 0.02
    text = "| a b c |\n\nWhat is `this`\none. And that is [a link](b.md):\n\n- A third one\n"
    assert list(sentences.sentences(text)) == ["What is CODE one.", "And that is a link:", "A third one"]
    assert list(sentences.docstrings('def f():\n    "One. Two."\n\ndef _g():\n    "Three."\n')) == ["One. Two."]
    entries = (
        'def f():\n    """One.\n\n    Args:\n      a, b: it is one\n        entry.\n      c: and a third.\n    """\n'
    )
    (text,) = sentences.docstrings(entries)
    assert list(sentences.sentences(text)) == ["it is one entry.", "and a third."]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_what_is_there(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: no heading {anchor!r} in {name_of(target)}"


def test_every_page_is_in_the_table_of_contents():
    listed = set()
    for page in PAGES:
        for kind, body in FENCE.findall(page.read_text("utf-8")):
            if kind == "{toctree}":
                entries = [line for line in body.splitlines() if line.strip() and not line.startswith(":")]
                entries = [entry for entry in entries if not entry.startswith("_pages/")]  # the build makes them
                listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    pages = {page.resolve() for page in PAGES if page.is_relative_to(DOCS)} - {(DOCS / "index.md").resolve()}
    assert listed == pages


def test_each_pitfall_has_a_severity_code_and_a_test_that_is_there():
    page = (DOCS / "pitfalls.md").read_text("utf-8")
    for pitfall in page.split("\n### ")[1:]:
        for part in (r"^\*\*(High|Middle|Low)\.\*\* ", "^Here, ", "^```py", r"^Test: `test_\w+`$"):
            assert re.search(part, pitfall, re.M), (part, pitfall)
    said = re.findall(r"`(test_\w+)`", page)
    files = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.M)}
    assert len(said) > 30 and set(said) <= there


def run_python(source, line, page, names):
    tree = ast.parse(source)
    ast.increment_lineno(tree, line)
    exec(compile(tree, str(page), "exec"), names)


def run_command(command):
    """A `tfdpfl` command, in this process; a program that the page has saved, in one of its own."""
    from click.testing import CliRunner

    from tfdpfl.cli import main

    program, *arguments = shlex.split(command)
    if program == "python":
        ran = subprocess.run(
            [sys.executable, *arguments], text=True, capture_output=True, timeout=600,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        print(ran.stdout, end="")
        return
    done = CliRunner().invoke(main, arguments)
    assert (program, done.exit_code) == ("tfdpfl", 0), done.output
    print(done.output, end="")


def save_file(source):
    Path(source.split()[1]).write_text(source, "utf-8")


def test_outputs_are_compared_line_by_line():
    bar = "\x1b[1m1/2\x1b[0m loss: 2.0\b\b\b\x1b[1m2/2\x1b[0m loss: 1.5\r2/2 loss: 1.25 \nend\n"
    assert on_screen(bar) == "2/2 loss: 1.25\nend\n"
    assert shows("2/2 loss: 1...\nend\n", on_screen(bar)) and shows(None, "")
    for other in ("2/2 loss: 1.24\nend\n", "2/2 loss: 1.25\n", "2/2 loss: 1.25 end\n", None, ""):
        assert not shows(other, on_screen(bar))


def shows(output, printed):
    """Whether a page's output is what was printed; `...` stands for any text, as in doctest."""
    return doctest.OutputChecker().check_output(output or "", printed, doctest.ELLIPSIS)


def namespace(page):
    """What a page's snippets may use without making it; docs/index.md says so. A tutorial makes all that it uses."""
    names = {"__name__": "page"}
    if not page.stem.startswith("tutorial"):
        exec((DOCS / "prelude.py").read_text("utf-8"), names)
    return names


def test_notebooks_have_the_snippets_and_outputs_of_their_pages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    notebooks = importlib.import_module("notebooks")
    files = notebooks.write(tmp_path)
    assert len(files) >= 9
    for name, path in files.items():
        cells = json.loads(path.read_text("utf-8"))["cells"]
        assert cells[0]["source"][0].startswith("# ")
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        found = [("".join(c["source"]), "".join("".join(o["text"]) for o in c["outputs"])) for c in code]
        heads = {"python": "", "console": "!", "file": "%%writefile"}
        expected = [*snippets(DOCS / f"{name}.md")]
        assert len(found) == len(expected) > 0
        for (source, output), (_, kind, text, shown) in zip(found, expected, strict=True):
            assert source.startswith(heads[kind]) and source.endswith(text.strip("\n")) and output == (shown or "")


def simulate(server, client, num_supernodes):
    """Flower's run_simulation in this process: Ray takes 20 s to start, and test_hospitals.py runs it."""
    from flower_fakes import FakeGrid
    from flwr.app import Context, RecordDict

    nodes = [Context(1, 101 + i, {"partition-id": i}, RecordDict(), {}) for i in range(num_supernodes)]
    server(FakeGrid(num_supernodes, lambda message, i: client(message, nodes[i])), Context(1, 0, {}, RecordDict(), {}))


@pytest.mark.slow
@pytest.mark.parametrize("page", [
    pytest.param(page, id=name_of(page), marks=[pytest.mark.both_stacks] * (name_of(page) in DIFFERS))
    for page in PAGES if any(snippets(page))
])  # fmt: skip
def test_every_snippet_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    if name_of(page) in NEEDS_TFF:
        pytest.importorskip("tensorflow_federated", reason="needs TensorFlow Federated, which is on the tff stack")
    if name_of(page) in NEEDS_FLOWER:
        pytest.importorskip("flwr", reason="needs Flower, which is on the keras3 stack")
        import flwr.simulation

        monkeypatch.setattr(flwr.simulation, "run_simulation", simulate)
    if name_of(page) in NEEDS_KERAS3:
        pytest.importorskip("keras", "3", reason="needs Keras 3, which has LoRA")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = namespace(page)
    for line, kind, source, output in snippets(page):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            if kind == "python":
                run_python(source, line, page, names)
            else:
                {"console": run_command, "file": save_file}[kind](source)
        printed = on_screen(stream.getvalue())
        assert shows(output, printed), f"{page}:{line} prints\n{printed}\nand the page shows\n{output}"
