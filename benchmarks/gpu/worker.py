"""What a rank of `make bench-gpu` does: one part for some sides, whose results rank 0 writes."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu.paced_ranks import PACE, VARIABLE, pace
from gpu.training import BLOCK_STEPS, IS_SMOKE, Training, synchronize

NUM_WARM_UP = 3
NUM_STEPS_OF_TURN = {"mlp": 40, "resnet50": 4, "gpt": 3}
MIN_TURNS, MAX_TURNS = (2, 2) if IS_SMOKE else (7, 40)
TIMEOUT_S = 90


def work(part: str, out: str, arguments: str) -> None:
    """Called on every rank by `torchmn run`."""
    import torchmn

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    comm = torchmn.create_communicator("auto", timeout_s=TIMEOUT_S, quiet=True)
    found = _PARTS[part](comm, **json.loads(arguments))
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"route": comm.name, "reason": comm.reason, **found}))
    comm.barrier()
    comm.finalize()


# ---- speed ----


def speed(
    comm: Any, model: str, sides: list[str], budget_s: float, is_compiled: bool
) -> dict[str, Any]:
    """Seconds of a step in each turn of each side, those of the slowest rank."""
    group = comm.process_group
    trainings = {}
    for side in sides:
        training = trainings[side] = Training(side, model, comm, group, is_compiled=is_compiled)
        for _ in range(NUM_WARM_UP):
            training.step()
        synchronize(comm.device)
    num_steps = 2 if IS_SMOKE else NUM_STEPS_OF_TURN[model]
    own: dict[str, list[float]] = {side: [] for side in sides}
    began, num_turns, turn = time.perf_counter(), MIN_TURNS, 0
    while turn < num_turns:
        order = [*trainings.items()]
        for side, training in order if turn % 2 else order[::-1]:
            training.step()
            own[side].append(_seconds_of_step(training, comm, num_steps))
        turn += 1
        if turn == 2:  # all ranks make the same number
            expected = int(budget_s / (time.perf_counter() - began) * turn)
            num_turns = comm.bcast_obj(min(max(expected, MIN_TURNS), MAX_TURNS), 0)
    of_all = comm.allgather_obj(own)
    seconds = {s: [max(each) for each in zip(*(o[s] for o in of_all), strict=True)] for s in sides}
    return {"seconds": {side: values[1:] for side, values in seconds.items()}}


def _seconds_of_step(training: Training, comm: Any, num_steps: int) -> float:
    """Seconds of a step in some that all ranks begin together."""
    synchronize(comm.device)
    comm.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        training.step()
    synchronize(comm.device)
    return (time.perf_counter() - began) / num_steps


# ---- waits ----


def waits(comm: Any, model: str, sides: list[str]) -> dict[str, Any]:
    """How often the host waits for the GPU in one step, and in which lines."""
    found: dict[str, list[str]] = {}
    for side in sides:
        training = Training(side, model, comm, None)
        for _ in range(NUM_WARM_UP):
            training.step()
        synchronize(comm.device)
        comm.barrier()
        found[side] = list(_lines_that_wait(training, comm.device))
        training.optimizer.close()
    return {"waits": found}


def _lines_that_wait(training: Training, device: torch.device) -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            training.step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        if "synchroniz" in str(each.message) and "prototype" not in str(each.message):
            yield f"{each.filename}:{each.lineno}"


# ---- memory ----


def memory(comm: Any, model: str, sides: list[str]) -> dict[str, Any]:
    """Bytes of a side: at the peak of a step, between steps, and of the parameters."""
    group = comm.process_group
    comm.allreduce(torch.zeros(1, device=comm.device))  # what the library itself allocates
    found = {}
    for side in sides:
        gc.collect()
        before = _allocated(comm.device)
        training = Training(side, model, comm, group)
        for _ in range(BLOCK_STEPS + 1 if training.has_blocks else NUM_WARM_UP):
            training.step()
        synchronize(comm.device)
        if comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(comm.device)
        # Of blocks with the step in which they are exchanged.
        for _ in range(BLOCK_STEPS if training.has_blocks else NUM_WARM_UP):
            training.step()
        synchronize(comm.device)
        nbytes = sum(p.nbytes for p in training.model.parameters())
        steady = _allocated(comm.device)
        peak = (
            torch.cuda.max_memory_allocated(comm.device) if comm.device.type == "cuda" else steady
        )
        found[side] = {"peak": peak - before, "steady": steady - before, "parameters": nbytes}
        close = getattr(training.optimizer, "close", lambda: None)
        close()
        del training, close
        gc.collect()
        found[side]["left"] = _allocated(comm.device) - before
    return {"memory": found}


def _allocated(device: torch.device) -> int:
    """The bytes of all tensors; on a CPU of those that the garbage collector knows."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in (*tensors, *gradients)}  # fmt: skip
    return sum(storages.values())


_PARTS = {"speed": speed, "waits": waits, "memory": memory}


# ---- slow links: started on test hosts, one rank each ----


def serve(model: str, *sides: str) -> None:
    """Build all sides, print "ready", then make steps on request.

    A request is a line of a side, a number of steps, and ``recorded`` or ``plain``; or of ``pace``
    and bytes per second, for `paced_ranks`.
    """
    import torchmn

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints to the standard output
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    dist.init_process_group("gloo")  # DDP's too: NCCL would need a GPU of its own for each rank
    topology = torchmn.Topology.blocks([1, 1]) if VARIABLE in os.environ else None
    comm = torchmn.create_communicator(
        "auto", timeout_s=TIMEOUT_S * 5, quiet=True, topology=topology
    )
    trainings = {side: Training(side, model, comm, None) for side in sides}
    for training in trainings.values():
        training.step()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        side, count, how = line.split()
        if side == PACE:
            print(json.dumps(pace(int(count))), file=answers, flush=True)
            continue
        training, num_steps, parts = trainings[side], int(count), {}
        if how == "recorded":
            seconds, parts = _recorded(training, comm, num_steps)
        else:
            seconds = _seconds_of_step(training, comm, num_steps)
        reply = {"seconds": seconds, "tokens": training.batch.num_tokens, "route": comm.reason}
        print(json.dumps({**reply, "parts": parts}), file=answers, flush=True)
    os._exit(0)  # the groups of the sides would wait for each other in an orderly exit


def _recorded(training: Training, comm: Any, num_steps: int) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and of its parts as the record of a run has them; none without exchange.

    Encoding, sending and decoding overlap with computing; ``wait`` is what is left of them. Copies
    to and from the host overlap with sending; their time is that of as many bytes, alone.
    """
    from torchmn.base import events
    from torchmn.record.records import Step
    from torchmn.record.step_recorder import StepRecorder
    from torchmn.record.timeline import clock_of

    lines: list[object] = []
    recorder = StepRecorder(lines.append, clock_of(comm.device.type))
    recorder.communicator(comm, True)
    events.add(recorder)
    try:
        seconds = _seconds_of_step(training, comm, num_steps)
    finally:
        events.remove(recorder)
    recorder.close()
    parts: defaultdict[str, float] = defaultdict(float)
    num_sent = 0
    for step in lines:
        if isinstance(step, Step):
            waits = (step.phases.get(name, 0.0) for name in ("exchange", "encode", "decode"))
            parts["wait"] += sum(waits)
            for bucket in step.buckets:
                parts["encode"] += bucket.encode_s
                parts["decode"] += bucket.decode_s
                parts["send"] += bucket.ended_s - bucket.started_s
                parts["send"] -= bucket.encode_s + bucket.decode_s
                num_sent += bucket.sent_nbytes
    if parts:
        parts["copy, alone"] = _copy_s(num_sent, comm.device)
    return seconds, {name: s / num_steps for name, s in parts.items()}


def _copy_s(nbytes: int, device: torch.device) -> float:
    """Seconds to copy some bytes to pinned host memory, and as many back."""
    there = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=device)
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    synchronize(device)
    began = time.perf_counter()
    here.copy_(there, non_blocking=True)
    there.copy_(here, non_blocking=True)
    synchronize(device)
    return time.perf_counter() - began
