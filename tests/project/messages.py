"""Collects every error message, warning and help text of the package.

``python -m tests.project.messages`` writes the page docs/reference/messages.md.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torchmn"
PAGE = ROOT / "docs" / "reference" / "messages.md"
TITLE = """# Messages

Every error message, warning and help text of torchmn. To find yours, search this page for a few
words of it without names and numbers: braces stand for what is filled in at run time. Most messages
end with what to do. The tutorial and the how-to guides have tables of the most common ones.

The headings are the source files. `python -m tests.project.messages` writes this page from them.
"""
COMMANDS = ("Option", "Argument")
"""Of typer, whose ``help`` is shown by ``--help``."""
PRINTED = ("print", "echo")


def text_of(node: ast.expr, known: dict[str, list[ast.expr]], depth: int = 0) -> str:
    """A string expression as a reader sees it, with the source of what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known, depth) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, known, depth) + text_of(node.right, known, depth)
    if isinstance(node, ast.IfExp):
        first, second = (text_of(each, known, depth) for each in (node.body, node.orelse))
        return f"{first} | {second}"
    if isinstance(node, ast.Name) and node.id in known and depth < 2:
        return " | ".join(text_of(value, known, depth + 1) for value in known[node.id])
    return f"{{{ast.unparse(node)}}}"


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (is_text(node.left) or is_text(node.right))
    if isinstance(node, ast.IfExp):
        return is_text(node.body) and is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def messages_in(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, kind and text of each message."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    known_at: dict[int, dict[str, list[ast.expr]]] = {}
    for function in functions:  # inner ones come later and replace the texts of outer ones
        known: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_text(node.value):
                for target in node.targets:
                    known.setdefault(ast.unparse(target), []).append(node.value)
        for node in ast.walk(function):
            known_at[id(node)] = known
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        known = known_at.get(id(node), {})
        name = called(node)
        kind, text = "", None
        if name.endswith("Error") and name[0].isupper() and node.args:
            kind, text = name, node.args[0]
        elif name == "warn" and node.args:
            kind, text = "warning", node.args[0]
        elif name in COMMANDS:
            option = [each.value for each in node.args if _is_option(each)]
            kind = f"help of {option[0]}" if option else "help of an argument"
            text = next((each.value for each in node.keywords if each.arg == "help"), None)
        elif name in PRINTED and node.args and is_text(node.args[0]):
            kind, text = "printed", node.args[0]
        if text is not None:
            written = " ".join(text_of(text, known).split())
            if any(letter.isalpha() for letter in written.replace(_only_values(written), "")):
                yield node.lineno, kind, written


def _is_option(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("-")


def _only_values(text: str) -> str:
    """The text itself if it is nothing but one value in braces."""
    inner = text[1:-1]
    return text if text[:1] == "{" and text[-1:] == "}" and "{" not in inner else ""


def all_messages() -> dict[Path, list[tuple[int, str, str]]]:
    """By file, in the order of lines."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        messages = sorted(messages_in(ast.parse(path.read_text())))
        if messages:
            found[path] = messages
    return found


def page() -> str:
    """The whole text of the page."""
    parts = [TITLE]
    for path, messages in all_messages().items():
        lines = dict.fromkeys(f"{kind}: {text}" for _, kind, text in messages)
        wrapped = "\n".join(_wrapped(line) for line in lines)
        parts.append(f"## {path.relative_to(SOURCE)}\n```text\n{wrapped}\n```\n")
    return "\n".join(parts)


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, 120, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )


if __name__ == "__main__":
    PAGE.write_text(page())
