"""Sphinx's settings. `scripts/make_site.py` copies this beside the pages and runs Sphinx there."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

import torchmn

project = "torchmn"
author = "the torchmn developers"
version = release = torchmn.__version__
project_copyright = "the torchmn developers, MIT licence"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
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
napoleon_use_param = False  # one line may be for several arguments: "in_channels, out_channels"
napoleon_custom_sections = [("Attributes", "params_style")]
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

copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gd"  # of a diff what stays and what comes

_LANGUAGES = {"en": "English", "ja": "日本語"}
_FENCE = re.compile(r"^```(\w*)\s*$")
_RAISES = re.compile(r"^(\s*)Raises(?:, | \()(.+?)\)?:$")


def _as_restructured_text(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Docstrings may hold code as Markdown writes it, drawings, and "Raises, on all ranks:"."""
    converted: list[str] = []
    is_code = False
    is_drawing = False
    for number, line in enumerate(lines):
        fence = _FENCE.match(line.strip())
        raises = _RAISES.match(line)
        begins_drawing = not is_drawing and "├" in "".join(lines[number + 1 : number + 2])
        is_drawing = begins_drawing or (is_drawing and bool(line.strip()))
        if fence:
            is_code = not is_code
            converted += ["", f".. code-block:: {fence[1] or 'text'}", ""] if is_code else [""]
        elif is_drawing:
            converted += ["::", "", f"   {line}"] if begins_drawing else [f"   {line}"]
        elif raises and not is_code:
            indent, when = raises[1], raises[2]
            converted += [f"{indent}*{when[:1].upper()}{when[1:]}:*", "", f"{indent}Raises:"]
        else:
            converted.append(f"   {line}" if is_code else line)
    lines[:] = converted


def _is_inherited(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Whether a member is left out: one that another library defines."""
    function = getattr(obj, "fget", None) or getattr(obj, "__func__", obj)
    module = getattr(function, "__module__", None)
    is_foreign = callable(function) and str(module or "torchmn").split(".")[0] != "torchmn"
    return True if is_foreign else None


def _exact_references(app: Any, doctree: nodes.document) -> None:
    """Types in signatures are not looked for in all packages at once, where some are ambiguous."""
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refdomain") == "py":
            node.attributes.pop("refspecific", None)


def _link_to_public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """`GlobalSampler` and `Communicator.split`, wherever they stand, lead to the reference."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removesuffix("()").lstrip(".~")
    words = target.split(".")
    is_type = node.get("reftype") in {"class", "exc"}
    if is_type and words[0] != "torchmn" and len(words) > 1:
        return None  # of another library
    if not is_type and len(words) == 1 and not words[0][:1].isupper():
        return None  # `step` or `rank` are more often arguments than functions
    package = ".".join(words[:2]) if words[0] == "torchmn" else node.get("py:module") or "torchmn"
    name = ".".join(words[-1:] if is_type else words[-2:])
    full = _public_name(env, name, package)
    if full is None:
        return None
    found = env.domaindata["py"]["objects"][full]
    docname = node.get("refdoc", env.docname)
    return make_refnode(app.builder, docname, found.docname, found.node_id, content, full)


def _public_name(env: Any, name: str, package: str) -> str | None:
    """The full name: of this package, of the root, or the only one."""
    objects = env.domaindata["py"]["objects"]
    found = [full for full in objects if full == name or full.endswith(f".{name}")]
    of_package = [full for full in found if full.startswith(f"{package}.")]
    of_root = [full for full in found if full == f"torchmn.{name}"]
    for choice in (of_root, of_package, found):
        if len(choice) == 1:
            return str(choice[0])
    return None


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
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _is_inherited)
    app.connect("doctree-read", _exact_references)
    app.connect("missing-reference", _link_to_public_name)
    app.connect("html-page-context", _switch_of_language, priority=400)  # before the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
