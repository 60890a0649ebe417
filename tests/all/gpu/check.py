"""`make check-gpu`: all tests marked ``gpu``, several beside each other, a table and a record.

Checks of one process share one, file by file. One that fails there, or that a crash, a hang or an
error left in the CUDA context has kept from ending, is run again in a process of its own, and that
counts. Checks of rank processes have processes of their own. With fewer GPUs than ranks NCCL's
ranks share one. Without a GPU, or with a torch without CUDA, nothing runs and the exit status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from benchmarks.record import RECORDS, environment
from rich.console import Console
from rich.table import Table

from tests.all.gpu.ranks import CHECK_LIMIT_VARIABLE, NCCL_VARIABLE
from torchmn.cluster.environment_variables import SHARE_GPU_VARIABLE
from torchmn.cluster.gpus import count_gpus

ROOT = Path(__file__).parents[3]
RECORD = RECORDS / "gpu.jsonl"
TESTS = ("tests/all/gpu/test_one_process.py", "tests/all/gpu/test_ranks.py",
         "tests/unit/comm/codecs/kernels/test_cuda.py",
         "tests/all/processes/test_one_machine_page.py")  # fmt: skip
CHECK_LIMIT_S = 150.0
TOTAL_LIMIT_S = 460.0
"""Of `make check-gpu`: eight minutes, of which some are left for the table."""
ON_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
               "NCCL_RAS_ENABLE": "0"}  # fmt: skip
"""What NCCL need not try for ranks that share a GPU, so that they begin sooner."""
MAX_AT_ONCE = 8
CORES_OF_A_CHECK = 2
HANGS = "what_hangs"
"""Part of the names of checks that leave a GPU stuck for a while: they are run last."""
_FACTS_LIMIT_S = 120.0
_NO_TESTS = 5
"""The exit status of pytest that has found none."""
_MESSAGE_CHARS = 3000
_TAIL_CHARS = 2500
_ROW_CHARS = 400

FACTS = """
import json, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        facts["gpus"].append({"name": each.name, "memory_gib": round(each.total_memory / 2**30, 1),
                              "capability": f"{each.major}.{each.minor}"})
    torch.zeros(1, device="cuda") + 1
    with __import__("contextlib").suppress(Exception):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    import triton
    facts["triton"] = triton.__version__
except ImportError:
    facts["triton"] = None
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a check: passed, failed or not run, with a message or a reason."""

    check: str
    outcome: str
    seconds: float = 0.0
    message: str = ""


def find_facts() -> dict[str, Any]:
    """GPUs and versions, asked by a process of its own; ``error`` where it has failed."""
    facts: dict[str, Any] = {"num_device_files": count_gpus(os.environ), "gpus": []}
    try:
        done = subprocess.run(
            [sys.executable, "-c", FACTS],
            capture_output=True,
            text=True,
            timeout=_FACTS_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**facts, "error": f"the first use of the GPU has not ended in {_FACTS_LIMIT_S:g} s"}
    if done.returncode:
        return {**facts, "error": _end_of(done.returncode, done.stderr)}
    facts |= json.loads(done.stdout.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        facts["driver"] = found.stdout.split("\n")[0].strip()
    return facts


def reason_not_to_run(facts: dict[str, Any]) -> str | None:
    """Why nothing can be checked here; None if there is a GPU that torch can use."""
    if facts["gpus"] or "error" in facts:
        return None
    if facts["num_device_files"]:
        return (
            f"this machine has {facts['num_device_files']} GPU(s), but torch {facts['torch']} "
            "cannot use them: install a build of torch with CUDA into .venv, and a driver for it"
        )
    return "this machine has no GPU"


def collect(tests: Sequence[str], marks: str = "gpu and not several_gpus") -> list[str]:
    """The names of the tests with these marks."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, _NO_TESTS):
        raise SystemExit(f"check-gpu: the tests cannot be read:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def run_checks(names: Sequence[str], limit_s: float, deadline: float = math.inf) -> list[Outcome]:
    """Run tests in one process, and end it and what it has started at its limit.

    Those of several that have not passed are run again, each in a process of its own and with the
    whole limit. Those for which no time is left before ``deadline`` are not run.
    """
    began = time.monotonic()
    limit_s = min(limit_s, deadline - began)
    if limit_s <= 0:
        return [Outcome(name, "not run", 0.0, "the total time limit was over") for name in names]
    with tempfile.TemporaryDirectory(prefix="torchmn-check-") as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output"
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "gpu", *names]
        command += ["-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={report}"]
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_with_children(process)
        seconds = round(time.monotonic() - began, 1)
        text = output.read_text(errors="replace")
        found = [] if status is None else read_report(report)
    if len(names) == 1:
        return [_outcome_of_one(names[0], found, status, seconds, text, limit_s)]
    by_case = {each.check: each for each in found if each.outcome != "failed"}
    outcomes = []
    for name in names:
        own = by_case.get(name.split("::", 1)[1])
        if own is not None:
            outcomes.append(replace(own, check=name))
        else:
            outcomes += run_checks([name], limit_s, deadline)
    return outcomes


def _outcome_of_one(
    name: str,
    found: Sequence[Outcome],
    status: int | None,
    seconds: float,
    text: str,
    limit_s: float,
) -> Outcome:
    if status is None:
        message = f"no end within {limit_s:.0f} s; it was killed. {text[-_TAIL_CHARS:]}"
        return Outcome(name, "failed", seconds, message)
    if not found or (found[0].outcome == "passed" and status):
        return Outcome(name, "failed", seconds, _end_of(status, text))
    return replace(found[0], check=name, seconds=seconds)


def end_with_children(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it has started, in whatever session."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_report(report: Path) -> list[Outcome]:
    """Outcomes of the tests in a report, by what follows the file; empty if it was not written."""
    try:
        cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    except (OSError, ElementTree.ParseError):
        return []
    return [_outcome_of_case(case) for case in cases]


def _outcome_of_case(case: ElementTree.Element) -> Outcome:
    name, seconds = case.get("name", ""), round(float(case.get("time", 0)), 1)
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "not run")):
        found = case.find(kind)
        if found is not None:
            message = found.get("message") or found.text or ""
            return Outcome(name, outcome, seconds, message[:_MESSAGE_CHARS])
    return Outcome(name, "passed", seconds)


def _end_of(status: int, text: str) -> str:
    how = f"exit status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"ended by {signal.Signals(-status).name}"
    return f"{how}: {text.strip()[-_TAIL_CHARS:]}"


def in_groups(names: Iterable[str]) -> list[list[str]]:
    """Checks that share a process: those of a file, where these start no ranks."""
    groups: dict[str, list[str]] = {}
    for name in names:
        file = name.split("::")[0]
        groups.setdefault(name if file.endswith("test_ranks.py") else file, []).append(name)
    return [*groups.values()]


def run_all(
    names: Sequence[str],
    *,
    check_limit_s: float,
    total_limit_s: float,
    console: Console,
    num_at_once: int = 1,
) -> list[Outcome]:
    """Run groups of checks beside each other, those of hangs last and two at once.

    Those for which no time is left are not run.
    """
    deadline = time.monotonic() + total_limit_s
    num_ended = 0

    def run(group: Sequence[str]) -> list[Outcome]:
        nonlocal num_ended
        outcomes = run_checks(group, check_limit_s, deadline)
        for each in outcomes:
            num_ended += 1
            words = f"{num_ended}/{len(names)} {each.outcome} in {each.seconds:g} s: {each.check}"
            console.print(words, highlight=False, markup=False)
        return outcomes

    hanging = [name for name in names if HANGS in name]
    others = in_groups(name for name in names if HANGS not in name)
    with ThreadPoolExecutor(num_at_once) as pool:
        found = [*pool.map(run, others)]
    with ThreadPoolExecutor(min(2, num_at_once)) as pool:
        found += pool.map(run, ([name] for name in hanging))
    return [each for outcomes in found for each in outcomes]


def show(facts: dict[str, Any], outcomes: Sequence[Outcome], console: Console) -> None:
    """The table."""
    gpus = ", ".join(each["name"] for each in facts["gpus"]) or facts.get("error", "none")
    title = f"check-gpu: {gpus}; torch {facts.get('torch')}, CUDA {facts.get('cuda')}"
    table = Table(title=title)
    for column in ("check", "outcome", "s", "message or reason"):
        table.add_column(column, overflow="fold", justify="right" if column == "s" else "left")
    for each in outcomes:
        short = " ".join(each.message.split())
        if len(short) > _ROW_CHARS:
            half = _ROW_CHARS // 2
            short = f"{short[:half]} ... {short[-half:]}"
        table.add_row(each.check.split("/")[-1], each.outcome, f"{each.seconds:g}", short)
    console.print(table, markup=False)
    counts = Counter(each.outcome for each in outcomes)
    console.print(", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "not run")))


def write(facts: dict[str, Any], outcomes: Sequence[Outcome], record: Path) -> None:
    """Append a line to the record."""
    entry = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kind": "check",
        "environment": environment(),
        "gpu": facts,
        "checks": [asdict(each) for each in outcomes],
    }
    record.parent.mkdir(exist_ok=True)
    with record.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _default_num_at_once() -> int:
    return max(1, min(MAX_AT_ONCE, (os.cpu_count() or 1) // CORES_OF_A_CHECK))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a check has failed."""
    parser = argparse.ArgumentParser(prog="check-gpu", description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or names of tests")
    parser.add_argument("--limit", type=float, default=CHECK_LIMIT_S, help="seconds of one check")
    parser.add_argument("--total", type=float, default=TOTAL_LIMIT_S, help="seconds of all")
    parser.add_argument("--record", type=Path, default=RECORD, help="file to append to")
    parser.add_argument("--jobs", type=int, default=_default_num_at_once(), help="checks at once")
    parser.add_argument(
        "--nccl",
        type=Path,
        help="a libnccl.so.2 of 2.30 or later, for ranks that share a GPU where torch's is older",
    )
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    console = Console(width=150)
    facts = find_facts()
    reason = reason_not_to_run(facts)
    if reason is not None:
        print(f"check-gpu: not run: {reason}.")
        return 0
    if "error" in facts:
        outcomes = [Outcome("the GPU itself", "failed", 0.0, facts["error"])]
    else:
        os.environ |= {SHARE_GPU_VARIABLE: "1", CHECK_LIMIT_VARIABLE: str(chosen.limit)}
        if len(facts["gpus"]) == 1:
            os.environ |= {**ON_ONE_HOST, **os.environ}
        if chosen.nccl is not None:
            os.environ[NCCL_VARIABLE] = str(chosen.nccl.resolve())
        names = [*collect(chosen.tests), *collect(chosen.tests, "several_gpus")]
        outcomes = run_all(
            names,
            check_limit_s=chosen.limit,
            total_limit_s=chosen.total - (time.monotonic() - began),
            console=console,
            num_at_once=chosen.jobs,
        )
    show(facts, outcomes, console)
    write(facts, outcomes, chosen.record)
    print(f"written: {chosen.record}")
    return int(any(each.outcome == "failed" for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
