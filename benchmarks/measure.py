"""Measures what a change to the package costs: size, complexity, and in how many files one fact stands.

make measure
"""

from __future__ import annotations

import ast
import collections
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that what runs is what is read, in a worktree too
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SAMPLINGS = ("poisson", "shuffle", "fixed_size", "fixed_order", "cyclic_poisson", "random_allocation")
NOISES = ("Tree", "Banded", "BandedInverse", "BLT", "secure_noise")
FORMATTER = [sys.executable, "-m", "ruff", "format", "--check", "-q", "."]
TYPES = [sys.executable, "-m", "mypy"]


def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "tfdpfl").rglob("*.py"))}


def tokens(source: str) -> int:
    """Counts the tokens of a module without comments and line ends; a docstring is one token."""
    return sum(t.type not in LAYOUT for t in tokenize.generate_tokens(io.StringIO(source).readline))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the lines of a function on which a statement stands, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len({line for part in body for node in ast.walk(part) if hasattr(node, "lineno")
                for line in range(node.lineno, node.end_lineno + 1 if isinstance(node, ast.expr) else node.lineno + 1)}
               ) + (function.body[0].lineno - function.lineno)  # fmt: skip


def complexities(source: str) -> Iterator[tuple[int, str]]:
    """Yields McCabe's number, as radon counts it, and the name of each function and method, nested ones too."""

    def walk(block):
        if hasattr(block, "methods"):
            for method in block.methods:
                yield from walk(method)
            return
        yield block.complexity, block.fullname
        for closure in block.closures:
            yield from walk(closure)

    for block in cc_visit(source):
        if getattr(block, "classname", None) is None:  # a method is visited with its class
            yield from walk(block)


def names(tree: ast.AST) -> set[str]:
    """Collects the identifiers and the whole strings of a module; words in sentences do not count."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        for field in ("id", "attr", "arg", "name"):
            found.add(getattr(node, field, None))
    return {name for name in found if isinstance(name, str)}


def files_that_name(trees: dict[Path, ast.AST], word: str) -> int:
    return sum(word in names(tree) for tree in trees.values())


def type_tests(tree: ast.AST) -> int:
    return sum(isinstance(n, ast.Call) and getattr(n.func, "id", "") == "isinstance" for n in ast.walk(tree))


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        yield from filter(None, [getattr(node, "annotation", None), getattr(node, "returns", None)])


def hung_on_graphs(tree: ast.AST) -> int:
    """Counts reads and writes of the package's own attributes on objects of TensorFlow."""
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return sum(name.startswith("_tfdpfl") for name in attributes | strings)


def modules_without_tests(paths: list[Path]) -> list[Path]:
    """Lists the modules for which `tests/` has no file of their name in the folder of the same name."""
    modules = [path.relative_to(ROOT / "tfdpfl") for path in paths if path.stem not in ("__init__", "__main__")]
    return [m for m in modules if not (ROOT / "tests" / m.parent / f"test_{m.stem.strip('_')}.py").exists()]


def way_of_a_loss() -> tuple[int, int]:
    """Follows a small model's loss through `clipped_gradients`, from function to function that gets it as an argument.

    Returns the number of modules that it enters, and how often it comes back to one that it had left.
    """
    import tensorflow as tf

    import tfdpfl.clipping

    folder = str(ROOT / "tfdpfl")
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3, "tanh"), tf.keras.layers.Dense(2)])
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    visits: list[str] = []

    @tf.function
    def step(x, y):
        loss = loss_of(y, model(x))

        def record(frame, event, _):
            code = frame.f_code
            if event != "call" or not code.co_filename.startswith(folder):
                return
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            handed = any(frame.f_locals.get(name) is loss for name in arguments)
            if handed and (not visits or visits[-1] != code.co_filename):
                visits.append(code.co_filename)

        sys.setprofile(record)
        try:
            return tfdpfl.clipping.clipped_gradients(loss, model.trainable_variables, 1.0).sum
        finally:
            sys.setprofile(None)

    step(tf.ones((8, 4)), tf.zeros(8, tf.int32))
    return len(set(visits)), len(visits) - len(set(visits))


def measures() -> dict[str, object]:
    texts = sources()
    trees = {path: ast.parse(text) for path, text in texts.items()}
    complex_ = sorted((c, n) for text in texts.values() for c, n in complexities(text))
    long = [f.name for tree in trees.values() for f in functions(tree) if lines_of_code(f) > 70]
    any_ = sum(getattr(n, "id", "") == "Any" for t in trees.values() for a in annotations(t) for n in ast.walk(a))
    entered, returned = way_of_a_loss()
    untested = modules_without_tests(list(texts))
    untested_in = ", ".join(f"{n} in {where}" for where, n in collections.Counter(map(_folder, untested)).items())
    return {
        "tokens": sum(map(tokens, texts.values())),
        "modules": len(texts),
        "complexity, mean": round(sum(c for c, _ in complex_) / len(complex_), 2),
        "functions of complexity 21 and more": f"{sum(c >= 21 for c, _ in complex_)}, worst {complex_[-1]}",
        "functions longer than 70 lines of code": f"{len(long)} {' '.join(long)}",
        "files that name a sampling": {s: files_that_name(trees, s) for s in SAMPLINGS},
        "files that name a noise": {n: files_that_name(trees, n) for n in NOISES},
        "type tests in reports": type_tests(trees[ROOT / "tfdpfl/reports.py"]),
        "own attributes on tf.Graph": sum(map(hung_on_graphs, trees.values())),
        "Any in annotations": any_,
        "modules that a loss enters": entered,
        "returns of the loss to a module that it left": returned,
        "modules without a test file of their name": f"{len(untested)}: {untested_in}",
        "ruff format": "clean" if subprocess.run(FORMATTER, cwd=ROOT, check=False).returncode == 0 else "not clean",
        "mypy": subprocess.run(TYPES, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()[-1],
    }


def _folder(module: Path) -> str:
    return str(module.parent)


if __name__ == "__main__":
    for what, value in measures().items():
        print(f"{what:45} {value}", flush=True)
