"""On a GPU: codec kernels, host waits, memory and speed beside DDP, slow links with GPU compute.

    bench_gpu.py [--parts kernels,waits,speed,links,memory] [--total S] [--nccl FILE]
    bench_gpu.py --smoke     # tiny models on CPUs, to see that all of it runs; keeps no record

Two ranks over NCCL, which share the GPU if there is one only: times then say what the host costs
and how much memory is used, and nothing about NCCL between GPUs. Sides of a comparison take turns
in the same processes. Slow links are those of test hosts, one rank on each; without root the kernel
paces the connections of ranks of one host. What no time was left for, or has failed, is listed with
the reason. The figures are appended to ``records/gpu.jsonl``. Without a GPU it says so and returns
0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from record import RECORDS, environment, report

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "waits", "speed", "links", "memory")
TOTAL_S = 460.0
"""Eight minutes, of which some are left for the table."""


def main() -> int:
    arguments = _parse()
    sys.path.insert(0, str(ROOT))
    if arguments.smoke:
        os.environ |= {"BENCH_SMOKE": "1", "CUDA_VISIBLE_DEVICES": ""}
        facts: dict[str, object] = {"gpus": []}
    else:
        from tests.all.gpu.check import find_facts, reason_not_to_run

        facts = find_facts()
        reason = facts.get("error") or reason_not_to_run(facts)
        if reason is not None:
            print(f"bench-gpu: not run: {reason}.")
            return int("error" in facts)
    # After BENCH_SMOKE is set.
    import torch
    from gpu import kernels
    from gpu.parts import NUM_RANKS, Run, shared_gpu
    from gpu.parts import PARTS as MEASURED

    run = Run(arguments.total, "gloo" if arguments.smoke else "nccl", arguments.nccl)
    is_shared = not arguments.smoke and len(facts["gpus"]) < NUM_RANKS  # type: ignore[arg-type]
    bars = []
    with shared_gpu() if is_shared else nullcontext("") as how:
        for number, part in enumerate(arguments.parts, 1):
            run.is_last = number == len(arguments.parts)
            print(f"bench-gpu: {part}, {run.left_s:.0f} s are left", flush=True)
            try:
                if part == "kernels":
                    bars += kernels.bars(torch.device("cpu" if arguments.smoke else "cuda"))
                else:
                    bars += MEASURED[part](run)
            except Exception as error:  # the other parts count all the same
                run.not_run[part] = f"{type(error).__name__}: {error}"
    for what, why in {**run.facts, **run.not_run}.items():
        print(f"bench-gpu: {what}: {'not run: ' * (what in run.not_run)}{why}")
    if arguments.smoke:
        report("gpu_smoke", bars)
        return int(bool(run.not_run))
    entry = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kind": "bench",
        "environment": environment(),
        "gpu": facts,
        "ranks": how or f"{NUM_RANKS} GPUs for {NUM_RANKS} ranks",
        "facts": run.facts,
        "not_run": run.not_run,
        "bars": [asdict(bar) for bar in bars],
    }
    with arguments.record.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    return report("gpu", bars)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="what to measure, in this order [%(default)s]")
    add("--total", type=float, default=TOTAL_S, help="seconds of all parts [%(default)g]")
    add("--nccl", type=Path, help="a libnccl.so.2 of 2.30 or later, for ranks that share a GPU")
    add("--record", type=Path, default=RECORDS / "gpu.jsonl", help="file to append to")
    add("--smoke", action="store_true", help="tiny models on CPUs, without a record")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if unknown := {*arguments.parts} - {*PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    if sys.argv[1:2] in (["worker"], ["serve"]):
        from gpu import worker

        {"worker": worker.work, "serve": worker.serve}[sys.argv[1]](*sys.argv[2:])
    elif sys.argv[1:2] == ["links"]:
        sys.path.insert(0, str(ROOT))
        from gpu.parts import measure_links

        measure_links(*sys.argv[2:])
    else:
        raise SystemExit(main())
