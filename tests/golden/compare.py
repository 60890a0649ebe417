"""Compares this tree of the sources with an earlier commit, bit by bit.

``python -m tests.golden.compare COMMIT`` (``make golden BASE=COMMIT``) runs `record.py` for both on
this machine, since bits depend on the processor and on torch. It exits with 1 if a run differs in
its parameters, losses, states, checkpoints or in the bytes of a collective, or if ``torchmn run``
imports torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("record.py")
MAX_LINES = 5
"""Differences that are printed of one quantity."""


def main() -> None:
    """Compare, print what differs, and exit."""
    parser = argparse.ArgumentParser(prog="make golden BASE=COMMIT", description=__doc__)
    parser.add_argument("commit", help="the commit that is compared with the files that are here")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory(prefix="torchmn-golden-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            with ThreadPoolExecutor() as pool:
                base, now = pool.map(record, (tree, ROOT))
        finally:
            _git("worktree", "remove", "--force", str(tree))
    problems = run_differences(base, now)
    if "torch" in record(ROOT, "imports"):
        problems.append("torchmn run imports torch, which takes seconds on every host")
    if problems:
        sys.exit("\n".join([*problems, f"golden: this tree differs from {commit}."]))
    print(f"golden: {len(now)} runs are equal to those of {commit}, bit by bit.")


def record(tree: Path, part: str = "runs") -> Any:
    """One part of the record of a tree."""
    env = dict(os.environ, PYTHONPATH=str(tree / "src"), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, str(RECORD), part]
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)


def run_differences(base: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines that name the runs and quantities that differ."""
    found = []
    for run in _different(base, now):
        quantities = base.get(run, {}), now.get(run, {})
        for quantity in _different(*quantities):
            places = [_places(each.get(quantity)) for each in quantities]
            lines = [
                f"    {place}: {places[0].get(place, 'missing')} -> "
                f"{places[1].get(place, 'missing')}"
                for place in _different(*places)
            ]
            more = [f"    and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
            found += [f"run {run}: {quantity}", *lines[:MAX_LINES], *more]
    return found


def _different(base: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Keys whose values differ, or that one of them lacks."""
    return [key for key in {**base, **now} if base.get(key) != now.get(key)]


def _places(quantity: Any) -> dict[str, Any]:
    if isinstance(quantity, list):
        return {f"step {index + 1}": value for index, value in enumerate(quantity)}
    return quantity or {}


def _git(*args: str) -> None:
    subprocess.run(["git", *args], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
