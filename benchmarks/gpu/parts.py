"""The parts of `make bench-gpu`, each within the time that is left, and their bars."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rank_processes import Job, end_ranks, request, start_ranks
from record import Bar, median_bar, ratio_bar
from tests.all.gpu.check import ON_ONE_HOST

from gpu.paced_ranks import paced_ranks
from gpu.training import BLOCK_STEPS, IS_SMOKE
from torchmn.cluster.environment_variables import SHARE_GPU_VARIABLE

SCRIPT = Path(__file__).parents[1] / "bench_gpu.py"
NUM_RANKS = 2
EXCHANGING = ("every_step_view", "int8", "double_buffering", "diloco")
OF_MEMORY = ("ddp_view", "every_step_view", "int8", "diloco")
OF_SPEED = ("alone", "ddp", "ddp_view", "every_step", "every_step_view")
OF_COMPILED = ("ddp_view", "every_step_view")
OF_LINKS = ("alone", "ddp", "every_step", "int8", "1bit", "diloco_int8")
# Over the slowest link a step of the GPT takes 40 s in float32: DDP's is measured, once.
OF_SLOWEST_LINK = ("alone", "ddp", "int8", "1bit", "diloco_int8")
LINKS = (
    ("gpt", "1gbit", OF_LINKS),
    ("gpt", "100mbit", OF_SLOWEST_LINK),
    ("resnet50", "1gbit", OF_LINKS),
    ("gpt", "10gbit", OF_LINKS),
    ("resnet50", "100mbit", OF_LINKS),
)
"""The first are those of which most is expected: there may be no time for all."""
SHARE_OF_LINKS = 0.75
"""Of the time that is left, if other parts follow."""
NUM_AT_ONCE = 1 if IS_SMOKE else 3
LEAST_S = 1.0 if IS_SMOKE else 12.0
"""A job is not started with less time than this."""
SPEED_S = 1.0 if IS_SMOKE else 12.0
LINK_TURN_S = 0.1 if IS_SMOKE else 2.0
LINK_S = 1.0 if IS_SMOKE else 20.0
MAX_STEPS_OF_TURN = 20


@dataclass
class Run:
    """One call of `make bench-gpu`: its time, its options, and what could not be measured."""

    total_s: float
    backend: str
    nccl: Path | None = None
    began_s: float = field(default_factory=time.monotonic)
    not_run: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    is_last: bool = True
    """Whether no part follows the one that runs."""

    @property
    def left_s(self) -> float:
        return self.total_s - (time.monotonic() - self.began_s)

    def measure(self, what: str, part: str, **arguments: object) -> dict[str, Any] | None:
        """Run a part on two ranks; None, with a note in `not_run`, if there is no result."""
        with tempfile.TemporaryDirectory(prefix="torchmn-bench-") as folder:
            launcher = ["-m", "torchmn", "run", "-n", str(NUM_RANKS), "--backend", self.backend]
            launcher += ["--log-dir", folder, str(SCRIPT), "worker", part]
            found = self.call(what, launcher, Path(folder), json.dumps(arguments))
        if found is not None:
            self.facts[part] = f"{found.pop('route')}: {found.pop('reason')}"
        return found

    def call(
        self, what: str, words: Sequence[str], folder: Path, arguments: str
    ) -> dict[str, Any] | None:
        """Run a Python program, which writes its result into a file, in the time that is left."""
        if self.left_s < LEAST_S:
            self.not_run[what] = "no time was left"
            return None
        out, log = folder / "result.json", folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *words, str(out), arguments],
                env={**os.environ, **({} if self.nccl is None else {"LD_PRELOAD": str(self.nccl)})},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(self.left_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status != 0:
            why = "no time was left" if status is None else f"exit status {status}"
            self.not_run[what] = f"{why}: {log.read_text(errors='replace').strip()[-800:]}"
        if not out.exists():
            return None
        found: dict[str, Any] = json.loads(out.read_text())  # what there is when time is over
        return found


# ---- waits ----


def waits(run: Run) -> list[Bar]:
    found = run.measure("host waits", "waits", model="mlp", sides=EXCHANGING)
    if found is None:
        return []
    bars = []
    for side, lines in found["waits"].items():
        bars.append(Bar(f"{side}: waits of the host in a step", len(lines), "", "<= 0", not lines))
        if lines:
            run.facts[f"waits of {side}"] = ", ".join(sorted(set(lines)))
    return bars


# ---- memory ----


def memory(run: Run) -> list[Bar]:
    models = ["wide_mlp"] if IS_SMOKE else ["wide_mlp", "resnet50", "gpt"]
    # A process for each side: what one has left behind does not count for the next.
    groups = [OF_MEMORY] if IS_SMOKE else [(side,) for side in OF_MEMORY]
    jobs = [(model, group) for model in models for group in groups]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        results = pool.map(
            lambda job: run.measure(f"memory of {job}", "memory", model=job[0], sides=job[1]), jobs
        )
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (model, _), result in zip(jobs, results, strict=True):
        for side, numbers in (result or {"memory": {}})["memory"].items():
            found[model, side] = numbers
    bars = []
    for (model, side), numbers in found.items():
        name = f"{model}, {side}: peak of a step"
        bars.append(Bar(name, numbers["peak"] / numbers["parameters"], "x parameters"))
        bars.append(
            Bar(f"{model}, {side}: left after close()", numbers["left"] / numbers["parameters"],
                "x parameters")
        )  # fmt: skip
        ddp = found.get((model, "ddp_view"))
        if ddp is not None and side == "every_step_view":
            share = numbers["peak"] / ddp["peak"]
            limit = None if IS_SMOKE else "<= 1.02"
            name = f"{model}: peak memory, every_step / ddp, both with views"
            bars.append(Bar(name, share, "ratio", limit, None if limit is None else share <= 1.02))
    return bars


# ---- speed ----


def speed(run: Run) -> list[Bar]:
    bars = []
    for is_compiled in (False, True):
        for model in ("mlp", "resnet50", "gpt"):
            if IS_SMOKE and is_compiled and model != "mlp":
                continue
            sides = OF_COMPILED if is_compiled else OF_SPEED
            what = f"{model}, compiled" if is_compiled else model
            found = run.measure(
                f"speed of {what}",
                "speed",
                model=model,
                sides=sides,
                budget_s=SPEED_S,
                is_compiled=is_compiled,
            )
            if found is not None:
                bars += speed_bars(what, found["seconds"])
    return bars


def speed_bars(what: str, seconds: Mapping[str, Sequence[float]]) -> list[Bar]:
    """Times of all sides, and the speed of every_step relative to DDP, with and without views."""
    bars = [
        median_bar(f"{what}: {side}", [1e3 * s for s in values], "ms a step")
        for side, values in seconds.items()
    ]
    limit = None if IS_SMOKE else ">= 1.0"
    for ours, theirs in (("every_step", "ddp"), ("every_step_view", "ddp_view")):
        if ours in seconds:
            name = f"{what}: speed, {ours} / {theirs}"
            bars.append(ratio_bar(name, seconds[theirs], seconds[ours], limit))
    return bars


# ---- slow links ----


def links(run: Run) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="torchmn-bench-") as folder:
        # A process of its own: its hosts are removed when it is killed, at the end of the time.
        left_s = str(run.left_s * (1.0 if run.is_last else SHARE_OF_LINKS))
        found = run.call("slow links", [str(SCRIPT), "links"], Path(folder), left_s)
    if found is None:
        return []
    run.not_run |= found["not_run"]
    run.facts["links"] = f"{found['route']}; {found['made_by']}"
    bars = []
    for what, rates in found["rates"].items():
        bars += link_bars(what, rates)
        for side, parts in found["parts"][what].items():
            bars += [Bar(f"{what}: {side}: {part}", 1e3 * s, "ms a step")
                     for part, s in parts.items()]  # fmt: skip
    return bars


def measure_links(out: str, left_s: str) -> None:
    """Tokens per second and parts of a step of all sides, written when a link is done."""
    from tests.netlab import missing_requirement, netlab

    deadline_s = time.monotonic() + float(left_s)
    why_not = missing_requirement()
    made_by = f"paced connections of one host, for {why_not}" if why_not else "test hosts"
    found: dict[str, Any] = {"rates": {}, "parts": {}, "not_run": {}, "made_by": made_by}
    with paced_ranks(NUM_RANKS) if why_not else netlab(NUM_RANKS, None) as lab:
        for number, (model, rate, sides) in enumerate(LINKS[:2] if IS_SMOKE else LINKS):
            what = f"{model} over {rate}"
            if time.monotonic() > deadline_s - 2 * LEAST_S:
                found["not_run"][what] = "no time was left"
                continue
            lab.set_rate(None)  # while the ranks begin
            words = [str(SCRIPT), "serve", model, *sides]
            # Over gloo and torchmn's own streams: NCCL is for GPUs of one's own.
            variables = {SHARE_GPU_VARIABLE: "0", "PYTHONHASHSEED": "0"}
            job = start_ranks(words, lab, port=29500 + number, variables=variables)
            lab.set_rate(rate)
            turns = _turns(job, sides, deadline_s - LEAST_S)
            found["rates"][what], found["parts"][what], found["route"] = turns
            end_ranks(job)
            Path(out).write_text(json.dumps(found))
    Path(out).write_text(json.dumps(found))


def _turns(
    job: Job, sides: Sequence[str], deadline_s: float
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]], str]:
    """Tokens per second of all ranks in each turn of each side, parts of a step, and the route."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    parts, num_steps = {}, {}
    began, route = time.monotonic(), ""
    for turn in range(1 + (1 if IS_SMOKE else 5)):
        now = time.monotonic()
        if turn and not IS_SMOKE and (now - began > LINK_S or now > deadline_s):
            break
        for side in sides:
            steps = BLOCK_STEPS if side.startswith("diloco") else num_steps.get(side, 1)
            replies = request(job, side, steps, "recorded" if turn == 0 else "plain")
            seconds = max(reply["seconds"] for reply in replies)
            route = replies[0]["route"]
            rates[side].append(sum(reply["tokens"] for reply in replies) / seconds)
            if turn == 0:
                parts[side] = replies[0]["parts"]
                num_steps[side] = min(max(1, int(LINK_TURN_S / seconds)), MAX_STEPS_OF_TURN)
    # The first turn is recorded, and finds out how many steps one takes: it counts if it is alone.
    return {side: values[1:] or values for side, values in rates.items()}, parts, route


LINK_LIMITS = {
    ("every_step", "ddp"): ">= 1.0",
    ("int8", "ddp"): ">= 3.0",
    ("diloco_int8", "alone"): ">= 0.95",
}
"""Of the GPT over 1 Gb/s."""


def link_bars(what: str, rates: Mapping[str, Sequence[float]]) -> list[Bar]:
    """Tokens (or images) per second, and their ratios to DDP and to no exchange."""
    bars = [median_bar(f"{what}: {side}", values, "/s") for side, values in rates.items() if values]
    for theirs in ("ddp", "alone"):
        for side, values in rates.items():
            if side in (theirs, "alone") or not values:
                continue
            limit = LINK_LIMITS.get((side, theirs)) if what == "gpt over 1gbit" else None
            name = f"{what}: {side} / {theirs}"
            bars.append(ratio_bar(name, values, rates[theirs], None if IS_SMOKE else limit))
    return bars


# ---- ranks that share a GPU ----


@contextmanager
def shared_gpu() -> Iterator[str]:
    """NVIDIA's MPS with folders of its own, so that kernels of ranks run beside each other.

    Yields what is used.
    """
    control, before = shutil.which("nvidia-cuda-mps-control"), dict(os.environ)
    os.environ |= {**ON_ONE_HOST, **os.environ, SHARE_GPU_VARIABLE: "1"}
    os.environ.setdefault("NCCL_MAX_CTAS", "8")  # leaves room for computing
    with tempfile.TemporaryDirectory(prefix="torchmn-mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
                     "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}  # fmt: skip
        problem = "there is none" if control is None else _mps(control, variables, "-d")
        if not problem:
            os.environ |= variables
        try:
            how = f"without MPS ({problem}): they take turns on it" if problem else "with MPS"
            yield f"one GPU for two ranks, {how}"
        finally:
            if control is not None and not problem:
                _mps(control, variables, text="quit -t 3\n")
            os.environ.clear()
            os.environ.update(before)


def _mps(control: str, variables: Mapping[str, str], *words: str, text: str = "") -> str:
    """Call MPS's control program; returns what is wrong, or nothing."""
    for folder in variables.values():
        Path(folder).mkdir(exist_ok=True)
    try:
        subprocess.run(
            [control, *words],
            env={**os.environ, **variables},
            input=text,
            text=True,
            stdout=subprocess.DEVNULL,  # a daemon must not keep the pipes of this process
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


PARTS: dict[str, Callable[[Run], list[Bar]]] = {
    "waits": waits,
    "memory": memory,
    "speed": speed,
    "links": links,
}
