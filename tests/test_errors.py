"""Every refusal of the code has its row in docs/errors.md, and every row is a sentence of the code."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def text(node, names=()):
    """A string of the code, with … where a value stands; None if it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.IfExp):
        return text(node.body, names)
    if isinstance(node, ast.BinOp):
        return text(node.left, names)
    return dict(names).get(node.id) if isinstance(node, ast.Name) else None


@functools.cache
def trees():
    """Each file of the package, parsed."""
    return {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "tfdpfl").rglob("*.py")}


@functools.cache
def named():
    """The texts that modules give names to."""
    return {
        node.targets[0].id: text(node.value)
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def refusals():
    """The sentences of every PrivacyError that is raised, and the reasons why examples meet in an op."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            at = {"PrivacyError": 0, "mixed": 1, "Mixed": 2}.get(node.func.id)
            said = None if at is None or len(node.args) <= at else text(node.args[at], named())
            if said:
                yield f"{path.name}:{node.lineno}", said


def rows_of_the_errors():
    cells = re.findall(r"^\| ([^|]*) \|", (DOCS / "errors.md").read_text("utf-8"), re.M)
    cells = [cell for cell in cells if cell not in ("sentence", "reason") and set(cell) != {"-"}]
    rows = [row for cell in cells for row in cell.split(" · ")]
    return [re.sub(r" \([a-z][^()]*\)$", "", row).replace("`…`", "…") for row in rows]


def test_the_errors_that_are_explained_are_those_of_the_code():
    rows, said = rows_of_the_errors(), "\n".join(filter(None, (text(n) for t in trees().values() for n in ast.walk(t))))
    assert len(rows) > 100 and [row for row in rows if row not in said] == []


def test_every_refusal_of_the_code_is_explained():
    rows, found = rows_of_the_errors(), list(refusals())
    assert len(found) > 150
    assert [(place, said) for place, said in found if not any(row in said for row in rows)] == []
