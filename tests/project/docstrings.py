"""Runs examples of docstrings.

``python -m tests.project.docstrings NAME`` runs those of one object, such as
``torchmn.run.start.run_job``, in a process of their own.
"""

import doctest
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

import torchmn
from torchmn.comm import Communicator

NAMED = {"torchmn.base.errors": "torchmn.errors"}
"""Modules whose classes are named by another, which users import."""


def examples(module: str) -> list[doctest.DocTest]:
    """The docstrings of a module that have examples."""
    found = doctest.DocTestFinder().find(import_module(NAMED.get(module, module)))
    return [each for each in found if each.examples]


def run(
    tests: list[doctest.DocTest], comm: Communicator, out: Callable[[str], object] | None = None
) -> doctest.TestResults:
    """Run examples with what every one has: ``comm``, ``np``, ``torch`` and ``torchmn``."""
    names: dict[str, Any] = {"comm": comm, "np": np, "torch": torch, "torchmn": torchmn}
    runner = doctest.DocTestRunner()
    for test in tests:
        test.globs.update(names)
        runner.run(test, out=out)
    return runner.summarize()


def main(name: str) -> int:
    """Run the examples of one object; returns the exit status."""
    module = name.rpartition(".")[0]
    comm = torchmn.create_communicator()
    results = run([each for each in examples(module) if each.name == name], comm)
    comm.finalize()
    print(f"{results.attempted} lines were run, {results.failed} failed")
    return int(results.failed > 0 or results.attempted == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
