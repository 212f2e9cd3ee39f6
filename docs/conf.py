"""Sphinx's settings: make docs."""

import ast
import inspect
import os
import re
import sys
import types
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.abspath(__file__))]


class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


# TensorFlow Federated and Flower need environments of their own. To read signatures and docstrings names suffice.
_flwr = ["", ".app", ".serverapp", ".serverapp.strategy", ".supercore", ".supercore.privacy_accounting"]
_absent = [("tensorflow_federated", "0.87.0"), ("tensorflow_privacy", "0.9.0")]
for _name, _version in [*_absent, *((f"flwr{_part}", "1.41.0") for _part in _flwr)]:
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__version__ = _version
    sys.modules[_name].__getattr__ = lambda name: _Kind(name, (), {})

import notebooks  # noqa: E402
import tensorflow  # noqa: E402, F401

from tfdpfl import __version__  # noqa: E402

project = "tfdpfl"
author = copyright = "the tfdpfl authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python", "myst.header"]  # attributes of one name in several classes; sections of old tables
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "literal"  # what stands between `single` marks in docstrings is code
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_rtype = napoleon_use_param = False  # one line may be about several names
napoleon_custom_sections = [("Attributes", "params_style"), ("Call arguments", "params_style")]

smartquotes = False  # -- is an option
html_theme = "pydata_sphinx_theme"
html_title = f"tfdpfl {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tfdpfl.css"]
html_js_files = ["tables.js"]
html_sidebars = {"**": ["globaltoc.html"]}
html_theme_options = {
    "navbar_center": [],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}


def _as_rest(app, what, name, obj, options, lines):
    """Indented code after a paragraph becomes a literal block; a bar is a bar."""
    out, last, code = [], "", False
    for line in lines:
        indented = line.startswith("    ")
        follows = out and not out[-1].strip() and last and not last.startswith(" ")
        if indented and not code and follows:
            code = True
            out += ["::", ""]
        elif line.strip() and not indented:
            code = False
            for_text = line.split("`")
            for_text[::2] = [part.replace("|", r"\|") for part in for_text[::2]]
            line = "`".join(for_text)
        last = line if line.strip() else last
        out.append(line)
    lines[:] = out


def _skip(app, what, name, obj, skip, options):
    """scikit-learn adds setters for metadata routing to each estimator."""
    return True if name.startswith("set_") and name.endswith("_request") else None


ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "benchmarks/results/*.md",
        "examples/**/*.md",
        "examples/**/*.py",
    )
    for path in ROOT.glob(pattern)
)


def _page_of(path):
    """Returns the page of a file that is outside of docs/."""
    return ROOT / "docs" / "_pages" / (path.with_suffix(".md") if path.suffix == ".py" else path)


def _link_to_pages(text, origin, page):
    """Rewrites the links of a text that was written for the folder ``origin`` and is shown as ``page``."""

    def rewrite(link):
        path, mark, anchor = link[1].partition("#")
        target = (origin / path).resolve()
        if not path or ":" in path or not target.exists():
            return link[0]
        target = _page_of(target.relative_to(ROOT)) if target.relative_to(ROOT) in OUTSIDE else target
        return f"]({os.path.relpath(target, page.parent)}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]*)\)", rewrite, text)


def _write_pages(app, config):
    """Gives each example, table of results and text at the root of the repository a page of its own."""
    for path in OUTSIDE:
        text = (ROOT / path).read_text("utf-8")
        page = _page_of(path)
        if path.suffix == ".py":
            first = ast.parse(text).body[0]
            code = "".join(text.splitlines(keepends=True)[first.end_lineno :]).lstrip("\n")
            text = f"# {path.name}\n\n{inspect.cleandoc(first.value.value)}\n\n```python\n{code}```\n"
        else:
            text = _link_to_pages(text, (ROOT / path).parent, page)
            text = text if text.startswith("# ") else f"# {path.name}\n\n{text}"
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")
    notebooks.write(ROOT / "docs/_pages/notebooks")


# A page whose snippets use what docs/prelude.py makes begins with these lines, folded. A tutorial needs none.
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PRELUDE = (
    "<details>\n<summary>To run the snippets of this page, begin with these lines</summary>\n\n```python\n"
    + (ROOT / "docs/prelude.py").read_text("utf-8").replace("  # noqa: F401", "")
    + "```\n\n</details>\n\n"
)


def _uses_prelude(page):
    nodes = [node for block in PYTHON.findall(page) for node in ast.walk(ast.parse(block))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    loaded = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)} | {a.asname or a.name for a in imports}
    return (loaded - bound) & {"x", "y", "model", "make_model", "np", "tf", "tfdpfl"}


def _read_source(app, docname, source):
    if docname.startswith("tutorial"):
        link = f"{{download}}`Download this page as a notebook <_pages/notebooks/{docname}.ipynb>`"
        source[0] = re.sub(r"\n", f"\n\n{link}\n", source[0], count=1)
    elif docname != "index" and _uses_prelude(source[0]):
        source[0] = source[0].replace("\n", f"\n\n{PRELUDE}", 1)
    if not docname.startswith("_pages/"):
        page = ROOT / "docs" / docname
        source[0] = _link_to_pages(source[0], page.parent, page)


def setup(app):
    app.connect("config-inited", _write_pages)
    app.connect("source-read", _read_source)
    app.connect("autodoc-process-docstring", _as_rest, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", _skip)
