"""Makes a notebook of each tutorial, with the outputs that its page shows and that the tests compare."""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```$\n?", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)")


def _cell(kind: str, source: str, output: str | None = None) -> dict:
    cell: dict = {"cell_type": kind, "metadata": {}, "source": source.strip("\n").splitlines(keepends=True)}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    if output:
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": output.splitlines(keepends=True)}]
    return cell


def notebook(page: str) -> dict:
    """Returns the notebook of a page's Markdown, as JSON holds it.

    A block that begins with the name of a file becomes a cell that saves it.
    """
    cells, end = [], 0
    for block in BLOCK.finditer(page):
        between = page[end : block.start()]
        if between.strip():
            cells.append(_cell("markdown", LINK.sub(r"*\1*", between)))
        end = block.end()
        kind, source = block[1], block[2]
        if kind == "python":
            file = re.match(r"# (\w+\.py)\n", source)
            cells.append(_cell("code", f"%%writefile {file[1]}\n{source}" if file else source))
        elif kind == "console":
            command, _, output = source.removeprefix("$ ").partition("\n")
            cells.append(_cell("code", f"!{command}", output))
        elif cells[-1]["cell_type"] == "code":  # the output of the cell
            cells[-1] = _cell("code", "".join(cells[-1]["source"]), source)
        else:
            cells.append(_cell("markdown", block[0]))
    cells.append(_cell("markdown", LINK.sub(r"*\1*", page[end:])))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}


def write(folder: Path) -> dict[str, Path]:
    """Writes a notebook of each tutorial with snippets, and returns the files by the names of their pages."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for page in sorted(DOCS.glob("tutorial*.md")):
        path = folder / f"{page.stem}.ipynb"
        path.write_text(json.dumps(notebook(page.read_text("utf-8")), indent=1, ensure_ascii=False) + "\n", "utf-8")
        files[page.stem] = path
    return files
