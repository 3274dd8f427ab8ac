"""Settings of Sphinx: `make docs` builds these pages into build/docs."""

import hashlib
import inspect
import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
from docutils import nodes  # noqa: E402

import gluon_syncbn  # noqa: E402

matplotlib.use("Agg")
from matplotlib import mathtext  # noqa: E402

project = "gluon_syncbn"
author = "the gluon_syncbn developers"
copyright = author
version = release = gluon_syncbn.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
# GluonCV's own theme (mxtheme 0.3) is no longer maintained: its script ends in an error with Sphinx 7.
html_theme = "sphinx_rtd_theme"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sphinx = html_show_sourcelink = False
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
myst_heading_anchors = 4

# A name between single backticks in a docstring is one of this package, or an error.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", ".*"),  # types in docstrings are words for readers
    ("py:(exc|obj)", "MXNetError"),  # MXNet's pages are elsewhere
]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_preprocess_types = False
napoleon_custom_sections = ["Inputs", "Outputs"]
html_math_renderer = "pictures"

# Where links to files of the checkout lead from a page in build/docs. A build that is put up somewhere else names
# the files' address there: GLUON_SYNCBN_SOURCE=https://...
SOURCE = os.environ.get("GLUON_SYNCBN_SOURCE", "../..").rstrip("/")
_OUTWARD = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./([^)\s]+)\)")


def _leave_docs(_app, docname, source):
    """Sphinx knows the files of this folder only."""

    def anchor(found):
        text, target = found.groups()
        if not (ROOT / target.partition("#")[0]).exists():
            raise FileNotFoundError(f"{docname}: {target}")
        return f'<a class="reference external" href="{SOURCE}/{target}">{text}</a>'

    source[0] = _OUTWARD.sub(anchor, source[0])


def _resolve_short_names(_app, _env, node, contnode):
    """Docstrings say `convert` where they mean gluon_syncbn.convert; outer names are those of Python and MXNet."""
    if node.get("reftype") != "obj":
        return None
    names = node["reftarget"].split(".")
    thing = gluon_syncbn
    for name in names[1:] if names[0] == "gluon_syncbn" else names:
        thing = getattr(thing, name, None)
    if thing is None or inspect.ismodule(thing):
        return None
    return _app.env.get_domain("py").resolve_xref(
        _env, node["refdoc"], _app.builder, "obj", "gluon_syncbn." + ".".join(names), node, contnode
    )


def _underline_gluons_sections(_app, _what, _name, _thing, _options, lines):
    """Gluon's docstrings have *Inputs* and *Outputs* of a block without the line that makes them sections."""
    for at in reversed(range(len(lines) - 1)):
        if lines[at] in ("Inputs", "Outputs") and lines[at + 1].startswith("  "):
            lines.insert(at + 1, "-" * len(lines[at]))


def _formula(writer, node):
    """A picture: MathJax would have to come over the network when a page is read."""
    text = " ".join(node.astext().split())
    name = f"math-{hashlib.sha256(text.encode()).hexdigest()[:16]}.svg"
    folder = Path(writer.builder.outdir) / "_images"
    folder.mkdir(exist_ok=True)
    mathtext.math_to_image(f"${text}$", str(folder / name), dpi=72, format="svg")
    picture = f'<img src="{writer.builder.imgpath or "_images"}/{name}" alt="{writer.attval(text)}">'
    writer.body.append(picture if isinstance(node, nodes.math) else f'<p style="text-align: center">{picture}</p>')
    raise nodes.SkipNode


def setup(app):
    app.connect("source-read", _leave_docs)
    app.connect("missing-reference", _resolve_short_names)
    app.connect("autodoc-process-docstring", _underline_gluons_sections, priority=400)  # before napoleon, at 500
    app.add_html_math_renderer("pictures", inline_renderers=(_formula, None), block_renderers=(_formula, None))
