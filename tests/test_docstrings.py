"""Every public name says what it promises, and every parameter is named where it says what it takes."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTIONS = ("Args", "Call arguments", "Attributes")
# In place of the parameters: what says where they are explained.
ELSEWHERE = re.compile(
    r"As (all )?(those )?that (follow|are not below)\b|Arguments (and errors )?(are those of|as)\b|"
    r"of the same arguments|^ *The others: as for|Arguments that are not listed here: see `",
    re.I | re.M,
)
HOOKS = re.compile(r"on_\w+|build|call|get_config|compute_output_shape|from_config")  # Keras's, which explains them
EXCEPTIONS = {
    "tfdpfl.optimizers.DPOptimizer": "the base that is not used by itself: the arguments are DPSGD's",
    "tfdpfl.label_dp.ForwardCorrectedLoss": "its docstring is put together, from text that two classes share",
    "tfdpfl.label_dp.BackwardCorrectedLoss": "as the other",
}


@functools.cache
def trees():
    found = {}
    for path in sorted((ROOT / "tfdpfl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


def exported():
    """(public name, its node) of the `__all__` of each package, of each module of `tfdpfl` itself, and of those that
    the pages of the API show, through its imports."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    for module, tree in trees().items():
        lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        names = [[e.value for e in every.elts if isinstance(e, ast.Constant)] for every in lists]
        if module in (
            "tfdpfl",
            "tfdpfl.cli",
            "tfdpfl.__main__",
        ):  # the first lists the others'; click explains the second
            continue
        shown = module.count(".") < 2 or f"automodule:: {module}\n" in pages
        public = shown and not any(part.startswith("_") for part in module.split("."))
        lazy = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_WHERE"]
        for name in (c.value for every in lazy for c in ast.walk(every) if isinstance(c, ast.Constant)):
            for below in trees():
                if below.startswith(f"{module}.") and (node := found(below, name, through=False)) is not None:
                    yield f"{module}.{name}", node
        for name in names[0] if public else ():
            node = found(module, name)
            if node is not None:
                yield f"{module}.{name}", node


def defined(tree):
    """What a module defines, and where what it imports comes from."""
    nodes = [inner for n in tree.body for inner in (n.body if isinstance(n, ast.If) else [n])]
    names = {alias.asname or alias.name: (n.module, alias.name) for n in nodes if isinstance(n, ast.ImportFrom)
             for alias in n.names}  # fmt: skip
    return names | {n.name: n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@functools.cache
def names_of(module):
    return defined(trees()[module]) if module in trees() else {}


def found(module, name, through=True):
    node = names_of(module).get(name)
    if isinstance(node, tuple):
        return found(*node) if through else None
    return node


def parameters(function, method):
    args = function.args
    names = [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs]]
    return [name for name in names[method:] if not name.startswith("_")]


def explained(doc):
    """The names that sections of a docstring explain: "a:", "a, b:"."""
    text = "\n".join(re.findall(rf"^(?:{'|'.join(SECTIONS)}):\n((?:\s+.*\n|\n)*)", f"{doc}\n", re.M))
    shown = set(re.findall(r"`([a-z_]\w*)`", doc))  # also in running text
    return shown | {
        n.strip("*` ")
        for names in re.findall(r"^[ ]+([\w*`]+(?:,\s+[\w*`]+)*):(?: |$)", text, re.M)
        for n in names.split(",")
    }


def missing(node, inherited=()):
    """What a function, or a class with its methods, does not explain; methods of `inherited` names may be silent."""
    doc = ast.get_docstring(node)
    if not doc:
        return ["docstring"]
    if isinstance(node, ast.FunctionDef):
        return [] if ELSEWHERE.search(doc) else [n for n in parameters(node, 0) if n not in explained(doc)]
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    if "__init__" in methods:
        names = parameters(methods["__init__"], 1)
        doc += "\n" + (ast.get_docstring(methods["__init__"]) or "")
    else:
        dataclass = any("dataclass" in ast.unparse(d) for d in node.decorator_list) or "NamedTuple" in map(
            ast.unparse, node.bases
        )
        names = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)] if dataclass else []
    gaps = [] if ELSEWHERE.search(doc) else [n for n in names if not n.startswith("_") and n not in explained(doc)]
    silent = [m for m, n in methods.items() if not m.startswith("_") and not ast.get_docstring(n)]
    return gaps + [f"{m}()" for m in silent if not HOOKS.fullmatch(m) and m not in inherited]


def documented_by_bases(node):
    """Methods that a base class in this package explains."""
    for base in map(ast.unparse, node.bases if isinstance(node, ast.ClassDef) else ()):
        for module in trees():
            above = found(module, base)
            if isinstance(above, ast.ClassDef):
                yield from (n.name for n in above.body if isinstance(n, ast.FunctionDef) and ast.get_docstring(n))
                yield from documented_by_bases(above)


def test_every_public_name_explains_itself_and_what_it_takes():
    names = dict(exported())
    assert len(names) > 130 and set(EXCEPTIONS) <= set(names)
    gaps = {name: missing(node, set(documented_by_bases(node))) for name, node in names.items()}
    assert {name: gap for name, gap in gaps.items() if gap and name not in EXCEPTIONS} == {}
    assert all(gaps[name] for name in EXCEPTIONS), "an exception that is not needed"


def test_every_public_parameter_has_a_type():
    untyped = {
        f"{name}.{f.name}({a.arg})"
        for name, node in exported()
        for f in ([node] if isinstance(node, ast.FunctionDef) else node.body)
        if isinstance(f, ast.FunctionDef) and (f is node or f.name == "__init__" or not f.name.startswith("_"))
        if isinstance(node, ast.FunctionDef) or not HOOKS.fullmatch(f.name)
        for a in [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        if a.arg not in ("self", "cls") and a.annotation is None
    }
    assert untyped == set()


@pytest.mark.parametrize(
    ("source", "gap"),
    [
        ("def f(a): pass", ["docstring"]),
        ('def f(a, *, b=1):\n    """F.\n\n    Args:\n        a: it.\n    """', ["b"]),
        ('def f(a, b):\n    """F.\n\n    Args:\n        a, b: both.\n    """', []),
        ('def f(a):\n    """F of `a`."""', []),
        ('class C:\n    """C."""\n    def __init__(self, a): pass\n    def m(self): pass', ["a", "m()"]),
        ('@dataclass\nclass C:\n    """C.\n\n    Attributes:\n        a: it.\n    """\n    a: int\n    b: int', ["b"]),
    ],
)
def test_a_gap_is_found(source, gap):
    assert missing(ast.parse(source).body[0]) == gap
