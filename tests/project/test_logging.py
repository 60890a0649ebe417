"""What ``src`` says goes through `logging` or `warnings`, so that users can format and silence it.

Only commands, the console that shows the output of ranks, and reports of hangs and failures print.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

import torchmn

from .source import parsed

STDERR, STDOUT, HANDLER, WARNING = "standard error", "standard output", "handler", "warning"
ALLOWED = {
    "base/log.py": {STDERR, HANDLER},  # where the script has not configured logging
    "base/terminal.py": {STDERR},  # `say`, for all below
    "base/warn.py": {WARNING},
    # Commands. Programs that another one of ours starts answer on standard output.
    "cli/main.py": {STDERR},
    "cli/report.py": {STDERR},
    "cli/run.py": {STDERR},
    "cli/submit.py": {STDERR},
    "observe/__main__.py": {STDERR, STDOUT},
    "run/host_checks.py": {STDOUT},
    # Hangs and failures.
    "comm/transports/mpi.py": {STDERR},
    "control/mpi_start.py": {STDERR},
    "control/script.py": {STDERR},
    "run/agent_main.py": {STDERR},
    "run/elastic/host_main.py": {STDERR},
    "run/monitor/rank_monitor.py": {STDERR},
    "run/monitor/server.py": {STDERR, STDOUT},
    "run/starters/pbs_shell.py": {STDERR},
    # The progress that a trainer, or a writer of CNTK, is asked to print.
    "cntk/logging.py": {STDOUT},
    "cntk/session_loop.py": {STDOUT},
    "train/reports.py": {STDOUT},
}
WARN = {"warnings.warn", "warnings.warn_explicit", "warn_explicit"}
PRINT_ERROR = {"say", "traceback.print_exc", "traceback.print_exception", "traceback.print_stack"}
HANDLERS = {"addHandler", "basicConfig", "dictConfig", "fileConfig", "StreamHandler"}


def kinds(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        if function == "print":
            files = [ast.unparse(word.value) for word in node.keywords if word.arg == "file"]
            yield (STDOUT if files in ([], ["sys.stdout"]) else STDERR), node.lineno
        elif function.startswith(("sys.stdout.write", "sys.__stdout__.write")):
            yield STDOUT, node.lineno
        elif function in PRINT_ERROR or function.startswith(("sys.stderr.w", "sys.__stderr__.w")):
            yield STDERR, node.lineno
        elif function.rpartition(".")[2] in HANDLERS:
            yield HANDLER, node.lineno
        elif function in WARN:
            yield WARNING, node.lineno


def test_only_these_print() -> None:
    found = {name: lines for name, tree in parsed().items() if (lines := list(kinds(tree)))}
    assert {name: {kind for kind, _ in lines} for name, lines in found.items()} == ALLOWED, found


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (STDERR, "import sys\nprint('x', file=sys.stderr)"),
        (STDERR, "import sys\nsys.stderr.write('x')"),
        (STDERR, "import traceback\ntraceback.print_exc()"),
        (STDERR, "say('x')"),
        (STDOUT, "print('x')"),
        (HANDLER, "import logging\nlogging.basicConfig()"),
        (HANDLER, "logger.addHandler(logging.NullHandler())"),
        (WARNING, "import warnings\nwarnings.warn('x')"),
    ],
)
def test_the_check_sees(kind: str, code: str) -> None:
    assert [found for found, _ in kinds(ast.parse(code))] == [kind]


CATEGORIES = {name for name in torchmn.errors.__all__ if name.endswith("Warning")}


def test_categories_are_known() -> None:
    """A text that is given to `warn` has no category, or one of ours by its name."""
    used = set()
    for name, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warn":
                used |= {ast.unparse(each) for each in node.args[1:]}
                assert not node.keywords, (name, node.lineno)
    assert used == CATEGORIES - {"TorchmnWarning"}
