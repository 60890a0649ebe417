"""Sphinx's settings. `scripts/make_site.py` copies this beside the pages and runs Sphinx there."""

from __future__ import annotations

import re
from typing import Any

import torchmn
from docutils import nodes
from sphinx.util.nodes import make_refnode

project = "torchmn"
author = "the torchmn developers"
version = release = torchmn.__version__
project_copyright = "the torchmn developers, MIT licence"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
suppress_warnings = ["misc.highlighting_failure"]  # records and logs that are shortened by "..."
nitpicky = False  # names in docstrings may be local; what is a public name becomes a link

myst_heading_anchors = 4
highlight_language = "none"  # of blocks that name no language: commands and their output
pygments_style = "tango"
pygments_dark_style = "monokai"

default_role = "py:obj"
autodoc_inherit_docstrings = False  # torch's are written in another way
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

# System fonts, no scripts or styles from elsewhere: the site works without a network.
html_theme = "furo"
html_title = f"torchmn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False

_LANGUAGES = {"en": "English", "ja": "日本語"}
_FENCE = re.compile(r"^```(\w*)\s*$")


def _code_blocks(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings may hold blocks of code as Markdown writes them."""
    converted: list[str] = []
    is_code = False
    for line in lines:
        fence = _FENCE.match(line.strip())
        if fence:
            is_code = not is_code
            converted += ["", f".. code-block:: {fence[1] or 'text'}", ""] if is_code else [""]
        else:
            converted.append(f"   {line}" if is_code else line)
    lines[:] = converted


def _link_to_public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """`GlobalSampler` and `Communicator.split`, wherever they stand, lead to the reference."""
    if node.get("refdomain") != "py":
        return None
    objects = env.domaindata["py"]["objects"]
    target = node["reftarget"].removesuffix("()").lstrip(".~")
    if not hasattr(env, "public_names"):
        env.public_names = {}
        for full in sorted(objects, key=lambda name: (name.count("."), name)):
            for dots in (1, 2):
                env.public_names.setdefault(".".join(full.split(".")[-dots:]), full)
    words = target.split(".")
    if node.get("reftype") in {"class", "exc"}:
        words = words[-1:]
    elif len(words) == 1 and not words[0][:1].isupper():
        return None  # `step` or `rank` are more often arguments than functions
    full = env.public_names.get(".".join(words[-2:]))
    if full is None:
        return None
    found = objects[full]
    docname = node.get("refdoc", env.docname)
    return make_refnode(app.builder, docname, found.docname, found.node_id, content, full)


def _switch_of_language(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.Node | None
) -> None:
    """A page that exists in both languages begins with a link to the other one."""
    own, path = ("ja", pagename[3:]) if pagename.startswith("ja/") else ("en", pagename)
    context["language"] = own
    other = "en" if own == "ja" else "ja"
    page = path if other == "en" else f"ja/{path}"
    if "body" not in context or page not in app.env.found_docs:
        return
    address = context["pathto"](page)
    link = f'<a href="{address}" hreflang="{other}" lang="{other}">{_LANGUAGES[other]}</a>'
    context["body"] = f'<p class="language">{link}</p>{context["body"]}'
    context["metatags"] = (
        context.get("metatags", "") + f'<link rel="alternate" hreflang="{other}" href="{address}">'
    )


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _code_blocks, priority=400)  # before napoleon
    app.connect("missing-reference", _link_to_public_name)
    app.connect("html-page-context", _switch_of_language, priority=400)  # before the theme
    return {"parallel_read_safe": True}
