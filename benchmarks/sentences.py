"""Measures the English of the pages and docstrings: python benchmarks/sentences.py [--worst 20] [FILE ...]

For each group of files it prints the number of sentences, their median length in words, the share that is longer than
25 words, the share that begins with What, Who, Where or Of which, and how often words occur that readers expect.
Code, tables, headings and links' addresses do not count.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
ASIDES = re.compile(r"^(Who|What(?! works)|Where|Of (which|what|whom))\b(?!.*\?$)")  # "What works" is a page
SECTION = re.compile(r"^(?:Args|Attributes|Call arguments|Raises|Returns):\n((?: +\S.*(?:\n|\Z)|\n(?= ))+)", re.M)
ENTRY = re.compile(r"\*{0,2}\w+(?:, \*{0,2}\w+)*: ")
EXPECTED = ("because", "for example", "you")


def sentences(prose: str) -> Iterator[str]:
    """Yields the sentences of Markdown, or of a docstring."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", prose, flags=re.M | re.S)
    prose = re.sub(r"<!--.*?-->", "", prose, flags=re.S)
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"``[^`]*``|`[^`]*`", "CODE", prose)
    lines = [line for line in prose.split("\n") if not re.match(r"#|\||    +\S|\s*>>>|:?-{3,}|[:}{]", line)]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    for block in blocks:
        block = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", " ".join(block.split()))
        for sentence in re.split(r"(?<=[.!?:])[\"”)*]* +(?=[\"“*(A-ZεδσC])", block.replace("**", "")):
            if len(sentence.split()) > 2:
                yield sentence.strip()


def docstrings(source: str) -> Iterator[str]:
    """Yields the docstrings of a module's public names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text and not getattr(node, "name", "").startswith("_"):
                yield SECTION.sub(_entries, text)


def _entries(section: re.Match) -> str:
    """Returns the entries of a section as paragraphs: each is a sentence of its own, and none is code."""
    lines = textwrap.dedent(section[1]).split("\n")
    return "\n".join("\n" + ENTRY.sub("", line) if ENTRY.match(line) else line.strip() for line in lines) + "\n\n"


def sentences_of(path: Path) -> list[str]:
    """Returns the sentences of a page, or those of a module's docstrings."""
    text = path.read_text("utf-8")
    proses = docstrings(text) if path.suffix == ".py" else [text]
    return [sentence for prose in proses for sentence in sentences(prose)]


def length(sentence: str) -> int:
    return len(sentence.split())


def figures(found: list[str]) -> dict[str, float]:
    """Returns the measures of a list of sentences; shares are between 0 and 1."""
    text = " ".join(found).lower()
    measured: dict[str, float] = {"sentences": len(found), "median words": median(map(length, found))}
    measured["longer than 25"] = sum(length(sentence) > 25 for sentence in found) / len(found)
    measured["begin with what, who, where, of which"] = sum(bool(ASIDES.match(s)) for s in found) / len(found)
    return measured | {word: len(re.findall(rf"\b{word}\b", text)) for word in EXPECTED}


def groups() -> dict[str, list[Path]]:
    """Returns the files that are measured, by the name of their group."""
    return {
        "pages": [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md"))],
        "docstrings": sorted((ROOT / "tfdpfl").rglob("*.py")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worst", type=int, default=0, help="print the longest sentences, and all that begin wrongly")
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    for name, paths in ({"files": arguments.files} if arguments.files else groups()).items():
        found = {path: sentences_of(path) for path in paths}
        print(
            f"{name}:",
            ", ".join(f"{k} {v:.3g}" for k, v in figures([s for of_path in found.values() for s in of_path]).items()),
        )
        if not arguments.worst:
            continue
        for path, of_path in found.items():
            if of_path:
                print(f"  {path}: median {median(map(length, of_path)):g} words in {len(of_path)} sentences")
        pairs = [(path.name, sentence) for path, of_path in found.items() for sentence in of_path]
        for where, sentence in sorted(pairs, key=lambda pair: -length(pair[1]))[: arguments.worst]:
            print(f"  {length(sentence)} words, {where}: {sentence}")
        for where, sentence in pairs:
            if ASIDES.match(sentence):
                print(f"  beginning, {where}: {sentence}")


if __name__ == "__main__":
    main()
