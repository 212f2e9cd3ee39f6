"""What CONTRIBUTING.md says of the house: imports go one way, and examples and benchmarks use public names alone."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

import conftest
import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py")])


def imports(tree, package=""):
    """(module, name or None, name it is bound to) of every import, also of those in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, alias.asname or alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from ((module, alias.name, alias.asname or alias.name) for alias in node.names)


def modules_imported(sources):
    """Which of these modules imports which of them, from {module: (package, source)}."""
    found = {}
    for module, (package, source) in sources.items():
        named = [(base, f"{base}.{name}") for base, name, _ in imports(ast.parse(source), package)]
        found[module] = {whole if whole in sources else base for base, whole in named} & set(sources) - {module}
    return found


def circle(graph):
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]


@functools.cache
def sources_of_package():
    sources = {}
    for path in (ROOT / "tfdpfl").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        sources[package if parts[-1] == "__init__" else ".".join(parts)] = (package, path.read_text())
    assert len(sources) > 50
    return sources


def test_modules_import_each_other_one_way():
    assert not (found := circle(modules_imported(sources_of_package()))), " is imported by ".join(found)


def listed(tree):
    """The names that a module's `__all__` spells out, or None if it has none."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return {part.value for part in node.value.elts if isinstance(part, ast.Constant)}


def test_each_module_lists_what_others_import_from_it():
    trees = {module: ast.parse(source) for module, (_, source) in sources_of_package().items()}
    every = {module: listed(tree) for module, tree in trees.items() if not module.endswith("__main__")}
    assert not [module for module, names in every.items() if names is None]
    for module, names in every.items():
        bound = {n.id for n in ast.walk(trees[module]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound |= {n.name for n in trees[module].body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        bound |= {name for _, _, name in imports(trees[module])}
        lazy = {n.value for n in ast.walk(trees[module]) if isinstance(n, ast.Constant)}  # `__getattr__` finds these
        assert names <= (bound | lazy if "__getattr__" in bound else bound), module
    for module, tree in trees.items():
        for base, name, _ in imports(tree, sources_of_package()[module][0]):
            inner = base not in every or f"{base}.{name}" in every or name in (None, "*") or name.startswith("_")
            package = {m.rpartition(".")[0] for m in every} & {base}  # its list may be put together
            assert inner or package or name in every[base], f"{module} imports {base}.{name}"


@pytest.mark.parametrize(
    "there", ["from p.a import x", "from p import a", "import p.a", "from . import a", "from .a import x"]
)
def test_a_circle_is_found_however_it_is_written(there):
    sources = {"p": ("p", ""), "p.a": ("p", "from p.b import y"), "p.b": ("p", f"def f():\n    {there}")}
    assert set(circle(modules_imported(sources))) == {"p.a", "p.b"}


def private_names(tree):
    """Names of the package that begin with one underscore: imported, or looked up in what was imported."""
    ours = set()
    for module, name, bound in imports(tree):
        if module.split(".")[0] == "tfdpfl":
            ours.add(bound)
            yield from (part for part in [*module.split("."), name or ""] if _private(part))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            at = node.value
            while isinstance(at, ast.Attribute):
                at = at.value
            if isinstance(at, ast.Name) and at.id in ours:
                yield node.attr


def _private(name):
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_examples_and_benchmarks_use_public_names_alone(path):
    assert not list(private_names(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "source",
    ["from tfdpfl import _x", "import tfdpfl._x", "from tfdpfl._x import y", "from tfdpfl import noise\nnoise._x()",
     "import tfdpfl\ntfdpfl.noise._x = 1", "def f():\n    from tfdpfl.noise import _x as y"],
)  # fmt: skip
def test_a_private_name_is_found_however_it_is_used(source):
    assert list(private_names(ast.parse(source))) == ["_x"]
    assert not list(private_names(ast.parse(source.replace("_x", "x"))))


@pytest.mark.parametrize("file", conftest.OF_TEXT)
def test_what_runs_on_one_stack_because_it_reads_text_runs_nothing_of_the_package(file):
    of_python = sys.stdlib_module_names - {"importlib", "multiprocessing", "os", "runpy", "subprocess"}
    tree = ast.parse((Path(__file__).parent / file).read_text("utf-8"))
    assert {name.split(".")[0] for name, _, _ in imports(tree)} <= of_python | {"conftest", "pytest"}
