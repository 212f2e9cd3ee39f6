"""Sphinx's settings: make docs."""

import os
import re
import sys
import types

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


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

import tensorflow  # noqa: E402, F401

from tfdpfl import __version__  # noqa: E402

project = "tfdpfl"
author = copyright = "the tfdpfl authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python"]  # attributes of one name in several classes
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "literal"  # what stands between `single` marks in docstrings is code
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_rtype = napoleon_use_param = False  # one line may be about several names
napoleon_custom_sections = [("Attributes", "params_style"), ("Call arguments", "params_style")]

html_theme = "pydata_sphinx_theme"
html_title = f"tfdpfl {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tfdpfl.css"]
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


def _outside(app, docname, source):
    """Links to Markdown outside of these pages, which work where the repository is read, become downloads."""
    if "/" not in docname:
        source[0] = re.sub(r"\]\((\.\./[^)]*\.md)\)", r"](path:\1)", source[0])


def setup(app):
    app.connect("source-read", _outside)
    app.connect("autodoc-process-docstring", _as_rest, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", _skip)
